"""Files of lines cut into blocks: each line in exactly one, wherever the cuts are."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.worker.data.files import lines
from pscluster.worker.data.files.lines import lines_of, odd_quotes


def blocks_of(content: bytes, block: int, *, quoted: bool = False) -> list[tuple[int, bytes]]:
    """Return what each block of a file has, and where."""
    starts = range(0, len(content), block)
    odd = odd_quotes(content[start : start + block] for start in starts)

    def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(content)
        return content[start:stop]

    return [
        lines_of(
            read,
            len(content),
            start,
            min(start + block, len(content)),
            (odd[index], odd[index + 1]) if quoted else None,
        )
        for index, start in enumerate(starts)
    ]


def check(content: bytes, block: int, *, quoted: bool = False) -> list[bytes]:
    """Check that the blocks are the file, each with the lines that begin in it; return them."""
    found = blocks_of(content, block, quoted=quoted)
    assert b"".join(data for _, data in found) == content
    for index, (begin, data) in enumerate(found):
        if data:
            assert index * block <= begin < (index + 1) * block
            assert content[begin : begin + len(data)] == data
            assert data.endswith(b"\n") or begin + len(data) == len(content)
    return [data for _, data in found]


@given(st.text("ab\n\r", max_size=60).map(str.encode), st.integers(1, 70))
def test_each_line_is_in_one_block(content: bytes, block: int) -> None:
    """Cut at every byte, with empty lines and lines of many blocks, with and without a line break at the end."""
    parts = check(content, block)
    assert [line for part in parts for line in part.splitlines(keepends=True)] == content.splitlines(keepends=True)


@given(st.lists(st.lists(st.text('a,"\n', max_size=8), min_size=2, max_size=2), max_size=8), st.integers(1, 90))
def test_quoted_line_breaks_end_no_line(rows: list[list[str]], block: int) -> None:
    """Each row of a CSV file is whole, in one block, however its values are quoted."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    parts = check(text.getvalue().encode(), block, quoted=True)
    assert [row for part in parts for row in csv.reader(io.StringIO(part.decode(), newline=""))] == rows


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not one of lines is not read whole."""
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    content = b"a\n" + bytes(300_000)
    read: list[int] = []

    def reading(start: int, stop: int) -> bytes:
        read.append(stop - start)
        return content[start:stop]

    with pytest.raises(ValueError, match=r"the line at byte 2 has more than 1,000 bytes"):
        lines_of(reading, len(content), 0, 10)
    assert sum(read) < 100_000
    assert lines_of(reading, len(content), 100, 200) == (200, b"")
