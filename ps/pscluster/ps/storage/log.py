"""The log: updates after a generation, each acknowledged once it is in the file.

Space is reserved before an update is applied, so that a full disk refuses the update instead of losing it. One thread
writes the records of all that wait (group commit): the first to arrive while no thread is writing.

A log is a sequence of segments. Each begins with a generation and names the previous segment, so that a missing or
foreign one is detected; it is truncated to what was written when the next one begins.

The head of a segment names the boot of the machine that wrote it, and holds, twice, a mark that says how far the
segment is acknowledged and how far it was synced. Each batch passes through these states, and may be found in any of
them:

    written, in part or whole --(--fsync: synced)--> marked --> acknowledged

While the machine runs, the kernel holds all that was written even if the process dies, so below the mark anything that
differs is damage. A batch beyond the mark was never acknowledged and is dropped unless it is whole. After another boot
the mark itself may be older or newer than the records. With `--fsync` everything that was synced, according to the mark
or to where a later batch begins, must be there. Anything missing beyond that was lost with the machine: it is dropped
with all that follows, logged, and counted as far as possible.

Only the last segment may end differently from how it was written. A record's header has its own checksum, so that its
length and number are known even if its body is damaged.

An unused segment is reused for the next one: overwriting existing pages costs a quarter of allocating new ones. Its
leftover records carry another generation.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import struct
import threading
import uuid
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from pscluster.core.errors import ProtocolError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.transport.frames import Buffer, parts_of, unpack
from pscluster.ps.storage.disk import write_all
from pscluster.ps.storage.generations import DamagedError, StateDirectory
from pscluster.ps.storage.policy import LogPlan
from pscluster.v1 import state_pb2

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Magic, generation, that of the previous segment (0: none), boot id, CRC-32 of these.
_SEGMENT = struct.Struct("<8sQQ16sI")
_SEGMENT_MAGIC = b"PSSLOG02"
# End of what is acknowledged, end of what was synced (0: nothing), number of acknowledged records; CRC-32 of these.
_MARK = struct.Struct("<QQQI")
_FIRST = _SEGMENT.size + 2 * _MARK.size
"""Where the first record begins. The mark is stored twice, so that one survives a flipped bit in the other."""

_MAGIC = 0x5053_4C47
# Magic; checksums of the rest of the header, and of the record; its length; where its batch begins; the segment's
# generation; its number in the segment, from 1.
_HEAD = struct.Struct("<IIIQQQQ")
_HEAD_REST = 8
_GROW, _MOST = 16 << 20, 256 << 20  # steps by which a segment grows
_ROOM = 256  # for a record, besides its request and payload


@functools.cache
def machine_boot_id() -> bytes:
    """Return the id of this boot of the machine; b"" if the system has none."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return b""


def _with_crc(form: struct.Struct, *fields: bytes | int) -> bytes:
    data = form.pack(*fields, 0)[:-4]
    return data + struct.pack("<I", zlib.crc32(data))


def _checked(form: struct.Struct, data: bytes, at: int) -> tuple[Any, ...] | None:
    """Return the fields without their CRC; None if that does not match."""
    *fields, crc = form.unpack_from(data, at)
    return tuple(fields) if crc == zlib.crc32(data[at : at + form.size - 4]) else None


def _header(checksum: int, size: int, batch: int, generation: int, record: int) -> bytes:
    rest = _HEAD.pack(_MAGIC, 0, checksum, size, batch, generation, record)[_HEAD_REST:]
    return struct.pack("<II", _MAGIC, zlib.crc32(rest)) + rest


class Log:
    """The segment that is being written. Thread-safe."""

    def __init__(self, directory: StateDirectory) -> None:
        self._directory = directory
        self._plan = LogPlan()
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, int, list[memoryview]]] = []  # ticket, room, checksum, record
        self._done: set[int] = set()
        self._writing = False
        self._file = -1
        self._segment = self._previous = 0
        self._end = self._promised = self._allocated = 0
        self._records = 0  # in the segment

    def begin_segment(self, generation: int, before: int, saved: int) -> bool:
        """Begin the segment of this generation; return whether the log was broken: the generation holds all updates.

        `before` is the last segment that was found when the process began. An empty segment of a generation later than
        `saved`, the last one on disk, is of one that failed, and is removed. OSError if there is no room; then the
        previous segment continues.
        """
        path = self._directory.log_file(generation)
        with self._changed:
            while self._writing or (self._plan.broken and not self._plan.all_ended):
                self._changed.wait()
            size, new = self._promised + _GROW, path.with_name(path.name + ".new")
            self._directory.reuse_segment(new)
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = max(size, os.fstat(file).st_size)
                os.posix_fallocate(file, 0, size)
                unused = self._segment > saved and self._end == _FIRST
                previous = self._previous if unused else self._segment or before
                head = _with_crc(_SEGMENT, _SEGMENT_MAGIC, generation, previous, machine_boot_id())
                end = write_all(file, [head, *_mark(_FIRST, 0, self._directory.fsync)], 0)
                if self._directory.fsync:
                    os.fsync(file)
                if self._file >= 0:
                    os.ftruncate(self._file, self._end)
                    self._allocated = self._end
                    if self._directory.fsync:  # leftovers after its end must not come back once it is not the last
                        os.fsync(self._file)
                reach("ps.segment.before")
                new.replace(path)  # with its name it is the last segment
                reach("ps.segment.after")
                if self._directory.fsync:
                    self._directory.sync_names()
            except BaseException:
                os.close(file)
                with contextlib.suppress(OSError):
                    new.unlink()
                raise
            if self._file >= 0:
                os.close(self._file)
            if unused:
                with contextlib.suppress(OSError):
                    self._directory.log_file(self._segment).unlink()
            self._file, self._segment, self._previous = file, generation, previous
            self._end, self._allocated, self._records = end, size, 0
            return bool(self._plan.broken)

    def mended(self) -> None:
        """Resume: a generation that was begun after the failure is saved."""
        with self._changed:
            self._plan.mended()
            self._changed.notify_all()

    @property
    def size(self) -> int:
        """Bytes in the segment."""
        return self._end

    @property
    def broken(self) -> str:
        """Why updates are refused; empty if they are not."""
        return self._plan.broken

    def close(self) -> None:
        """Wait for the write in progress, and close the segment."""
        with self._changed:
            while self._writing:
                self._changed.wait()
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    # For an update

    def take(self, size: int) -> tuple[int, int]:
        """Reserve space before an update of `size` bytes is applied; return its ticket and space.

        UnavailableError if the log can't take it now.
        """
        with self._changed:
            if self._plan.broken or self._file < 0:
                raise UnavailableError(f"updates are refused: {self._plan.broken or 'the server is stopping'}")
            room = size + _ROOM
            self._promise(room)
            return self._plan.take(), room

    def _promise(self, room: int) -> None:
        """Reserve space in the segment. UnavailableError if the disk has none. Called under the lock."""
        missing = self._end + self._promised + room - self._allocated
        if missing > 0:
            # In few, large steps if there is room: many small ones make every write four times as slow.
            more = missing + min(max(_GROW, self._allocated), _MOST)
            try:
                try:
                    os.posix_fallocate(self._file, self._allocated, more)
                except OSError:
                    more = missing
                    os.posix_fallocate(self._file, self._allocated, more)
            except OSError as error:
                raise UnavailableError(
                    f"updates are refused, since the log in {self._directory.path} can't grow ({error.strerror}): "
                    "free some disk space there"
                ) from None
            self._allocated += more
        self._promised += room

    def record(self, ticket: int, room: int, record: state_pb2.LogRecord, payload: Sequence[Buffer]) -> None:
        """Write the record of an applied update; return once it is flushed. UnavailableError if it can't be."""
        parts = [memoryview(buffer) for buffer in parts_of(record, payload)]
        checksum = _checksum(*parts)
        with self._changed:
            if not self._plan.broken:
                self._queue.append((ticket, room, checksum, parts))
            while ticket not in self._done:
                if self._plan.broken:
                    self.give_back(ticket, room)
                    raise UnavailableError(f"an update could not be logged: {self._plan.broken}")
                if self._writing:
                    self._changed.wait()
                else:
                    self._write()
            self._done.discard(ticket)

    def carry_over(self, size: int, record: state_pb2.LogRecord, payload: Sequence[Buffer]) -> None:
        """Write a record that the previous segment had, also while the log is broken: nothing else is written then.

        UnavailableError if it can't be written.
        """
        with self._changed:
            if not self._plan.broken:
                ticket, room = self.take(size)
            else:
                ticket, room = 0, size + _ROOM  # no update has this one
                self._promise(room)
                parts = [memoryview(buffer) for buffer in parts_of(record, payload)]
                self._queue.append((ticket, room, _checksum(*parts), parts))
                self._write()
                if ticket in self._done:
                    self._done.discard(ticket)
                    return
                self._promised -= room
                raise UnavailableError(self._plan.broken)
        self.record(ticket, room, record, payload)

    def give_back(self, ticket: int, room: int) -> None:
        """Release the space of an update without a record."""
        with self._changed:
            self._promised -= room
            self._plan.close(ticket)
            self._changed.notify_all()

    def wait_for_others(self) -> None:
        """Return once all updates taken so far are flushed, for a repetition. UnavailableError if they can't be."""
        with self._changed:
            horizon = self._plan.horizon()
            while self._plan.broken or not self._plan.passed(horizon):
                if self._plan.broken:
                    raise UnavailableError(f"the first copy of an update could not be logged: {self._plan.broken}")
                self._changed.wait()

    def _write(self) -> None:
        """Write all queued records. Called under the lock, which is released during the write."""
        batch, self._queue, self._writing = self._queue, [], True
        file, at, generation, records = self._file, self._end, self._segment, self._records
        self._changed.release()
        failure = ""
        try:
            buffers: list[bytes | memoryview] = []
            for _, _, checksum, parts in batch:
                records += 1
                buffers += [_header(checksum, sum(map(len, parts)), at, generation, records), *parts]
            end = write_all(file, buffers, at)
            if self._directory.fsync:
                os.fdatasync(file)
            reach("ps.log.written")
            write_all(file, _mark(end, records, self._directory.fsync), _SEGMENT.size)
        except Exception as error:
            reason = getattr(error, "strerror", None) or repr(error)
            failure = f"the log in {self._directory.path} could not be written ({reason})"
        finally:
            self._changed.acquire()
            self._writing = False
            if failure:
                self._plan.break_off(failure)
                self._queue.clear()
            else:
                self._end, self._records = end, records
                for ticket, room, _, _ in batch:
                    self._promised -= room
                    self._plan.close(ticket)
                    self._done.add(ticket)
            self._changed.notify_all()


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
        with path.open("rb") as file:
            head = _segment_head(path, file.read(_FIRST))
            generation, previous = head.generation, head.previous
            if generation < first:
                before, named = generation, frozenset((generation,))
                continue
            if (before is None and generation != first) or (before is not None and previous not in named):
                raise DamagedError(f"the segment of the log before {path} is missing, or belongs to another log")
            before = generation
            last = path == paths[-1]
            data = bytes(_FIRST) + file.read()  # so that offsets are those in the file
            end, count = yield from _records_of(path, head, data, last, dropped)
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
            write_all(file.fileno(), _mark(end, count, head.synced > 0), _SEGMENT.size)


def lost_in(paths: Sequence[Path], first: int) -> Dropped:
    """Count all that can still be read of a damaged log, from generation `first` on, as lost."""
    dropped = Dropped()
    for path in paths:
        with path.open("rb") as file, contextlib.suppress(DamagedError):
            head = _segment_head(path, file.read(_FIRST))
            if head.generation >= first:
                _count_lost(bytes(_FIRST) + file.read(), head, _FIRST, 0, dropped)
    return dropped


def _segment_head(path: Path, data: bytes) -> _Segment:
    if len(data) == _FIRST and (head := _checked(_SEGMENT, data, 0)) is not None:
        magic, generation, previous, boot = head
        offsets = _SEGMENT.size, _SEGMENT.size + _MARK.size
        marks = [mark for at in offsets if (mark := _checked(_MARK, data, at)) is not None]
        if magic == _SEGMENT_MAGIC and path.name == f"log-{generation:06d}.bin" and marks:
            return _Segment(generation, previous, boot == machine_boot_id() != b"", *max(marks))
    raise DamagedError(f"{path} is damaged at its beginning, or is not a segment of a log")


def _records_of(
    path: Path, head: _Segment, data: bytes, last: bool, dropped: Dropped | None
) -> Generator[tuple[state_pb2.LogRecord, memoryview], None, tuple[int, int]]:
    """Yield the records of one segment; return where the last whole one ends, and their number."""
    at, count, view = _FIRST, 0, memoryview(data)
    while at < len(data):
        if (end := _whole(view, at, head.generation, count + 1)) == 0:
            break
        try:
            yield unpack(data[at + _HEAD.size : end], state_pb2.LogRecord, end)
        except ProtocolError as error:
            raise DamagedError(f"{path} holds an invalid record at byte {at:,}: {error}") from None
        at, count = end, count + 1
    if at < _required_end(data, head, at) or (not last and (at < head.end or any(view[at:]))):
        raise DamagedError(f"{path} is damaged at byte {at:,}, with updates that were acknowledged")
    if last and not head.same_boot:
        missing = Dropped() if dropped is None else dropped
        if lost := _count_lost(data, head, at, count, missing):
            logger.warning(
                "%s: at least %d acknowledged updates were lost, from byte %s on, because they had not been synced "
                "when the machine stopped; start servers with --fsync to prevent this",
                path,
                lost,
                f"{at:,}",
            )
    return at, count


def _required_end(data: bytes, head: _Segment, hole: int) -> int:
    """Return the end of the bytes that can't have been lost with the machine, given that some are wrong at `hole`."""
    if head.same_boot:
        return head.end
    if not head.synced:
        return 0
    # A batch begins once the previous one is synced.
    return max([head.synced, *(header.batch for _, header in _headers(data, hole, head.generation))])


def _count_lost(data: bytes, head: _Segment, hole: int, whole: int, dropped: Dropped) -> int:
    """Count at least the records that were acknowledged after the first `whole` ones."""
    headers, view = list(_headers(data, hole, head.generation)), memoryview(data)
    acknowledged = max([head.end, *(header.batch for _, header in headers)])
    lost = [(at, header) for at, header in headers if at < acknowledged and header.record > whole]
    total = max([head.records, *(header.record for _, header in lost)]) - whole
    known = 0
    for at, header in lost:
        end = at + _HEAD.size + header.size
        if _whole(view, at, head.generation, header.record):
            with contextlib.suppress(ProtocolError):
                dropped.add(unpack(data[at + _HEAD.size : end], state_pb2.LogRecord, end)[0])
                known += 1
    dropped.unknown += max(total - known, 0)
    dropped.records += max(total, 0)
    return max(total, 0)


def _headers(data: bytes, at: int, generation: int) -> Iterator[tuple[int, _Header]]:
    """Yield the intact headers from `at` on, whatever is between them."""
    mark, view = struct.pack("<I", _MAGIC), memoryview(data)
    while (at := data.find(mark, at)) >= 0:
        header = _header_at(view, at, generation)
        if header is not None:
            yield at, header
        # Skip intact bodies: they may contain anything, headers too.
        at += _HEAD.size + header.size if header is not None and _whole(view, at, generation, header.record) else 1


def _header_at(data: memoryview, at: int, generation: int) -> _Header | None:
    """Return the header at this offset; None if there is no intact one of this segment."""
    if len(data) < at + _HEAD.size:
        return None
    magic, crc, checksum, size, batch, segment, record = _HEAD.unpack_from(data, at)
    if magic != _MAGIC or segment != generation or crc != zlib.crc32(data[at + _HEAD_REST : at + _HEAD.size]):
        return None
    return _Header(checksum, size, batch, record)


def _whole(data: memoryview, at: int, generation: int, record: int) -> int:
    """Return where the record at this offset ends; 0 if it is not that of record number `record`, or is not whole."""
    header = _header_at(data, at, generation)
    if header is None or header.record != record or not header.size:
        return 0
    end = at + _HEAD.size + header.size
    whole = end <= len(data) and _checksum(data[at + _HEAD.size : end]) == header.checksum
    return end if whole else 0


def _mark(end: int, count: int, synced: bool) -> list[bytes | memoryview]:
    return [_with_crc(_MARK, end, end if synced else 0, count)] * 2


def _checksum(*buffers: memoryview) -> int:
    """Return half of XXH3's 64 bits: every update waits for it, and a CRC takes four times as long."""
    checksum = xxhash.xxh3_64()
    for buffer in buffers:
        checksum.update(buffer)
    return checksum.intdigest() & 0xFFFF_FFFF
