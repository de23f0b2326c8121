"""Reads the log back: whole records, and how many were lost. `writer` says what may be found in it."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.frames import unpack
from pscluster.ps.storage.files.disk import write_all
from pscluster.ps.storage.files.generations import DamagedError
from pscluster.ps.storage.log.format import (
    FIRST,
    HEAD,
    HEAD_REST,
    MAGIC,
    MARK,
    SEGMENT,
    SEGMENT_MAGIC,
    checked,
    checksum_of,
    machine_boot_id,
    mark_twice,
)
from pscluster.v1 import state_pb2

logger = logging.getLogger(__name__)

_LEAST, _MOST = 1 << 12, 1 << 20  # bytes read at a time
_MARK = struct.pack("<I", MAGIC)  # with which a header begins


class _Segment(NamedTuple):
    generation: int
    previous: int
    same_boot: bool
    end: int  # of what was acknowledged, according to the mark
    synced: int  # end of what was synced; 0: nothing
    records: int  # that were acknowledged, according to the mark


class _Header(NamedTuple):
    checksum: int
    size: int
    batch: int
    record: int


class _Data:
    """The bytes of a segment, of which a record at a time is in memory: the segment may be larger than that."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size = file, os.fstat(file.fileno()).st_size

    def read(self, start: int, size: int) -> bytes:
        """Return the bytes from `start` on: fewer than `size` at the end of the file."""
        self._file.seek(start)
        return self._file.read(size)

    def pieces(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield all bytes from `start` on, in pieces that grow and overlap by one byte less than a mark's."""
        size = _LEAST
        while piece := self.read(start, size):
            yield start, piece
            if start + len(piece) >= self.size:
                break
            start, size = start + len(piece) - len(_MARK) + 1, min(2 * size, _MOST)


@dataclass
class Dropped:
    """The acknowledged updates that the log has lost, as numbers by store id, variable and shard."""

    updates: defaultdict[tuple[int, int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    unknown: int = 0  # records whose updates can't be identified
    records: int = 0  # that are lost, those of contributions to synchronous steps included

    def add(self, record: state_pb2.LogRecord) -> None:
        """Count a record that can be read."""
        for item, count in zip(record.update.items, record.updates, strict=False):
            if count:
                self.updates[record.store_id, item.variable, item.shard].add(count)


def records(
    paths: Sequence[Path], first: int, *, cut: bool = False, dropped: Dropped | None = None
) -> Iterator[tuple[state_pb2.LogRecord, memoryview]]:
    """Yield the records of the segments from generation `first` on, and their payloads, in order.

    `paths` are of all segments, ascending. With `cut` the last one is truncated after its last whole record, as later
    records go to another segment. `dropped` counts what was lost with the machine. DamagedError if anything else is
    missing, or is not what was written.
    """
    before, named = None, frozenset[int]()
    for path in paths:
        with path.open("rb", buffering=_MOST) as file:
            head = _segment_head(path, file.read(FIRST))
            generation, previous = head.generation, head.previous
            if generation < first:
                before, named = generation, frozenset((generation,))
                continue
            if (before is None and generation != first) or (before is not None and previous not in named):
                raise DamagedError(f"the segment of the log before {path} is missing, or belongs to another log")
            before = generation
            last = path == paths[-1]
            end, count = yield from _records_of(path, head, _Data(file), last, dropped)
        # The next segment may skip one without records, of a generation that failed: it should have been removed.
        named = frozenset((generation,)) if count else frozenset((generation, previous))
        if last and cut:
            _cut(path, head, end, count)
    if before is None or before < first:
        raise DamagedError(f"the segment of the log that begins with snapshot {first} is missing")


def _cut(path: Path, head: _Segment, end: int, count: int) -> None:
    """Truncate to `count` records, and move the mark so that losses after them are not counted again."""
    os.truncate(path, end)
    if (head.end, head.records) != (end, count):
        with path.open("r+b", buffering=0) as file:
            write_all(file.fileno(), mark_twice(end, count, head.synced > 0), SEGMENT.size)


def lost_in(paths: Sequence[Path], first: int) -> Dropped:
    """Count all that can still be read of a damaged log, from generation `first` on, as lost."""
    dropped = Dropped()
    for path in paths:
        with path.open("rb") as file, contextlib.suppress(DamagedError):
            head = _segment_head(path, file.read(FIRST))
            if head.generation >= first:
                _count_lost(_Data(file), head, FIRST, 0, dropped)
    return dropped


def _segment_head(path: Path, data: bytes) -> _Segment:
    if len(data) == FIRST and (head := checked(SEGMENT, data, 0)) is not None:
        magic, generation, previous, boot = head
        offsets = SEGMENT.size, SEGMENT.size + MARK.size
        marks = [mark for offset in offsets if (mark := checked(MARK, data, offset)) is not None]
        if magic == SEGMENT_MAGIC and path.name == f"log-{generation:06d}.bin" and marks:
            return _Segment(generation, previous, boot == machine_boot_id() != b"", *max(marks))
    raise DamagedError(f"{path} is damaged at its beginning, or is not a segment of a log")


def _records_of(
    path: Path, head: _Segment, data: _Data, last: bool, dropped: Dropped | None
) -> Generator[tuple[state_pb2.LogRecord, memoryview], None, tuple[int, int]]:
    """Yield the records of one segment; return where the last whole one ends, and their number."""
    offset, count = FIRST, 0
    while body := _body_at(data, offset, head.generation, count + 1):
        try:
            yield unpack(body, state_pb2.LogRecord, len(body))
        except ProtocolError as error:
            raise DamagedError(f"{path} holds an invalid record at byte {offset:,}: {error}") from None
        offset, count = offset + HEAD.size + len(body), count + 1
    if offset < _required_end(data, head, offset) or (
        not last and (offset < head.end or any(any(piece) for _, piece in data.pieces(offset)))
    ):
        raise DamagedError(f"{path} is damaged at byte {offset:,}, with updates that were acknowledged")
    if last and not head.same_boot:
        missing = Dropped() if dropped is None else dropped
        if lost := _count_lost(data, head, offset, count, missing):
            logger.warning(
                "%s: at least %d acknowledged updates were lost, from byte %s on, because they had not been synced "
                "when the machine stopped; start servers with --fsync to prevent this",
                path,
                lost,
                f"{offset:,}",
            )
    return offset, count


def _required_end(data: _Data, head: _Segment, hole: int) -> int:
    """Return the end of the bytes that can't have been lost with the machine, given that some are wrong at `hole`."""
    if head.same_boot:
        return head.end
    if not head.synced:
        return 0
    # A batch begins once the previous one is synced.
    return max([head.synced, *(header.batch for _, header in _headers(data, hole, head.generation))])


def _count_lost(data: _Data, head: _Segment, hole: int, whole: int, dropped: Dropped) -> int:
    """Count at least the records that were acknowledged after the first `whole` ones."""
    headers = list(_headers(data, hole, head.generation))
    acknowledged = max([head.end, *(header.batch for _, header in headers)])
    lost = [(offset, header) for offset, header in headers if offset < acknowledged and header.record > whole]
    total = max([head.records, *(header.record for _, header in lost)]) - whole
    known = 0
    for offset, header in lost:
        if body := _body_at(data, offset, head.generation, header.record):
            with contextlib.suppress(ProtocolError):
                dropped.add(unpack(body, state_pb2.LogRecord, len(body))[0])
                known += 1
    dropped.unknown += max(total - known, 0)
    dropped.records += max(total, 0)
    return max(total, 0)


def _headers(data: _Data, offset: int, generation: int) -> Iterator[tuple[int, _Header]]:
    """Yield the intact headers from `offset` on, whatever is between them."""
    while (offset := _find_mark(data, offset)) >= 0:
        header = _header_at(data, offset, generation)
        if header is not None:
            yield offset, header
        # Skip intact bodies: they may contain anything, headers too.
        is_whole = header is not None and _body_at(data, offset, generation, header.record)
        offset += HEAD.size + header.size if header is not None and is_whole else 1


def _find_mark(data: _Data, offset: int) -> int:
    """Return where a header may begin, at `offset` or later; -1 if there is none."""
    return next((start + at for start, piece in data.pieces(offset) if (at := piece.find(_MARK)) >= 0), -1)


def _header_at(data: _Data, offset: int, generation: int) -> _Header | None:
    """Return the header at this offset; None if there is no intact one of this segment."""
    head = data.read(offset, HEAD.size)
    if len(head) < HEAD.size:
        return None
    magic, crc, checksum, size, batch, segment, record = HEAD.unpack(head)
    if magic != MAGIC or segment != generation or crc != zlib.crc32(head[HEAD_REST:]):
        return None
    return _Header(checksum, size, batch, record)


def _body_at(data: _Data, offset: int, generation: int, record: int) -> bytes:
    """Return what follows the header at this offset; empty if it is not record number `record`, or is not whole."""
    header = _header_at(data, offset, generation)
    if header is None or header.record != record or offset + HEAD.size + header.size > data.size:
        return b""
    body = data.read(offset + HEAD.size, header.size)
    return body if checksum_of(memoryview(body)) == header.checksum else b""
