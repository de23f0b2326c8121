"""Blocks of lines: where in a file the lines of a block begin and end. Pure.

A block has the lines that begin at its bytes. So each line is in exactly one block, on whichever worker, and to find
the ends of a block it is enough to read on to the next line break. A block in the middle of a long line has no lines.

Within quotes, as CSV has them, a line break does not end a line. Whether a byte is within quotes depends on all bytes
before it: `odd_quotes` counts them, in one pass over the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Read = Callable[[int, int], bytes]
"""Returns the bytes [start, stop) of a file."""

LONGEST_LINE = 1 << 26
_STEP = 1 << 16


def lines_of(read: Read, size: int, start: int, stop: int, odd: tuple[int, int] | None = None) -> tuple[int, bytes]:
    """Return the lines that begin at the bytes [start, stop) of a file, and where the first one begins.

    Args:
        read: returns bytes of the file.
        size: of the file.
        start, stop: of the block; 0 <= start < stop <= size.
        odd: for files with line breaks in quotes: whether an odd number of quotes comes before the byte `start - 1`,
            and before `stop - 1`. None: all line breaks end a line.

    Raises:
        ValueError: a line has more than `LONGEST_LINE` bytes.
    """
    before = max(0, start - 1)  # a line that begins at `start` follows a line break at `start - 1`
    data = read(before, stop)
    first = 0
    if start:
        first, _ = _after_break(data, 0, odd and odd[0])
        if first < 0 or before + first >= stop:
            return stop, b""
    offset = stop - 1 - before
    line, end, quotes = offset, len(data), odd and odd[1]
    while stop < size:
        end, quotes = _after_break(data, offset, quotes)
        offset = len(data)
        if end >= 0 or before + offset >= size:
            break
        if offset - line > LONGEST_LINE:
            line = data.rfind(b"\n", 0, line) + 1
            raise ValueError(f"the line at byte {before + line:,} has more than {LONGEST_LINE:,} bytes")
        # Twice as much each time, so that a long line is not copied again and again.
        more = read(before + offset, min(size, before + offset + max(_STEP, offset - line)))
        if not more:
            break
        data += more
    return before + first, data[first:] if end < 0 else data[first:end]


def _after_break(data: bytes, offset: int, odd: int | None) -> tuple[int, int | None]:
    """Return the index after the first line break at `offset` or later, or -1; and whether quotes are open there."""
    while (index := data.find(b"\n", offset)) >= 0:
        if odd is None:
            return index + 1, None
        odd ^= data.count(b'"', offset, index) & 1
        if not odd:
            return index + 1, 0
        offset = index + 1
    return -1, None if odd is None else odd ^ data.count(b'"', offset) & 1


def odd_quotes(blocks: Iterable[bytes]) -> bytes:
    """Return, for the start of each block and the end of the last, 1 if an odd number of quotes precedes the byte
    before it, else 0. Takes the blocks of a file in their order."""
    odd, last, found = 0, 0, bytearray(1)
    for block in blocks:
        odd ^= block.count(b'"') & 1
        last = block.endswith(b'"')
        found.append(odd ^ last)
    return bytes(found)
