"""The log: updates behind a generation, each acknowledged once it is in the file.

Space is set aside before an update is applied, so that a full disk refuses it and does not lose it. Records are
written by one thread for all that wait (group commit): whoever comes while nobody writes does, for the others too.

A log is a row of segments. Each begins with a generation and names the one before it, so that none can be missing or
another one's; it is cut to what was written when the next one begins.

The head of a segment names the boot of the machine in which it is written, and bears a mark, twice, which says how far
the segment is acknowledged and how far it was synced. Each batch goes through these states, and may be found in any of
them:

    written, in part or whole --(--fsync: synced)--> marked --> acknowledged

While the machine runs, the kernel keeps all that was written, whatever becomes of the process. Below the mark all
of it has to be as it was written: what is wrong there is damage. A batch beyond it was never acknowledged: what is not
whole is dropped. After another boot the mark itself may be older or newer than the records. With `--fsync` everything
below what was synced, by the mark or by where a later batch begins, has to be there. What is missing beyond that was
lost with the machine: it is dropped with all behind it, logged, and counted as far as it can be known.

Only the last segment may end otherwise than it was written. A record's header has a checksum of its own, so that its
length and number are known where its body is damaged.

A segment that is needed no more becomes the next one: to write over pages that are there costs a quarter of making new
ones. What is left in it of its former life bears another generation.
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
from typing import NamedTuple

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

# Magic, generation, that of the segment before (0: none), boot id, CRC-32 of these.
_SEGMENT = struct.Struct("<8sQQ16sI")
_SEGMENT_MAGIC = b"PSSLOG02"
# How far it is acknowledged, how far it was synced (0: nothing is), how many records are acknowledged; CRC-32 of these.
_MARK = struct.Struct("<QQQI")
_FIRST = _SEGMENT.size + 2 * _MARK.size
"""Where the first record begins. The mark stands there twice: one flipped bit leaves the other."""

_MAGIC = 0x5053_4C47
# Magic; checksums of the rest of the header, and of the record; its length; where the batch begins that it was written
# with; the segment's generation; its number in the segment, from 1 on.
_HEAD = struct.Struct("<IIIQQQQ")
_HEAD_REST = 8
_GROW, _MOST = 16 << 20, 256 << 20  # steps by which a segment grows
_ROOM = 256  # of a record, beside what the request and the payload take


@functools.cache
def boot_id() -> bytes:
    """Return what names this boot of the machine; b"" where the system does not tell."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return b""


def _with_crc(form: struct.Struct, *fields: bytes | int) -> bytes:
    data = form.pack(*fields, 0)[:-4]
    return data + struct.pack("<I", zlib.crc32(data))


def _header(checksum: int, size: int, batch: int, generation: int, number: int) -> bytes:
    rest = _HEAD.pack(_MAGIC, 0, checksum, size, batch, generation, number)[_HEAD_REST:]
    return struct.pack("<II", _MAGIC, zlib.crc32(rest)) + rest


class Log:
    """The segment that is being written."""

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
        """What is flushed from now on goes into the segment of this generation.

        Args:
            before: of the segment that was the last one when the process began.
            saved: the last generation that is on disk. An empty segment of a later one, which failed, goes.

        Returns:
            Was the log broken? Then all updates that were taken have ended, and the generation holds them.

        Raises:
            OSError: there is no room. The segment before goes on.
        """
        path = self._directory.log_file(generation)
        with self._changed:
            while self._writing or (self._plan.broken and not self._plan.settled):
                self._changed.wait()
            size, new = self._promised + _GROW, path.with_name(path.name + ".new")
            self._directory.reuse_segment(new)
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = max(size, os.fstat(file).st_size)
                os.posix_fallocate(file, 0, size)
                unused = self._segment > saved and self._end == _FIRST
                previous = self._previous if unused else self._segment or before
                head = _with_crc(_SEGMENT, _SEGMENT_MAGIC, generation, previous, boot_id())
                end = write_all(file, [head, *self._mark(_FIRST, 0)], 0)
                if self._directory.fsync:
                    os.fsync(file)
                if self._file >= 0:
                    os.ftruncate(self._file, self._end)
                    self._allocated = self._end
                    if self._directory.fsync:  # what was behind its end must not come back once it is not the last
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
        """A generation that was begun behind a failure is saved."""
        with self._changed:
            self._plan.mended()
            self._changed.notify_all()

    @property
    def size(self) -> int:
        """Bytes in the segment."""
        return self._end

    @property
    def broken(self) -> str:
        """Why no update is taken; empty: they are."""
        return self._plan.broken

    def close(self) -> None:
        """Nothing more is written."""
        with self._changed:
            while self._writing:
                self._changed.wait()
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    # For an update

    def take(self, size: int) -> tuple[int, int]:
        """Before an update of so many bytes, payload and all, is applied: its ticket, and the space set aside.

        Raises:
            UnavailableError: the log can't take it now; nothing was applied.
        """
        with self._changed:
            if self._plan.broken or self._file < 0:
                raise UnavailableError(f"updates are refused: {self._plan.broken or 'the server is stopping'}")
            room = size + _ROOM
            missing = self._end + self._promised + room - self._allocated
            if missing > 0:
                # In few, large steps, as far as there is room: many small ones make every write four times as slow.
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
            return self._plan.take(), room

    def record(self, ticket: int, room: int, record: state_pb2.LogRecord, payload: Sequence[Buffer]) -> None:
        """Behind an update: return when its record is flushed. UnavailableError if it can't be."""
        parts = [memoryview(part) for part in parts_of(record, payload)]
        checksum = _checksum(*parts)
        with self._changed:
            if not self._plan.broken:
                self._queue.append((ticket, room, checksum, parts))
            while ticket not in self._done:
                if self._plan.broken:
                    self._end_ticket(ticket, room)
                    raise UnavailableError(f"an update could not be logged: {self._plan.broken}")
                if self._writing:
                    self._changed.wait()
                else:
                    self._write()
            self._done.discard(ticket)

    def give_back(self, ticket: int, room: int) -> None:
        """The update changed nothing."""
        with self._changed:
            self._end_ticket(ticket, room)

    def _end_ticket(self, ticket: int, room: int) -> None:
        self._promised -= room
        self._plan.close(ticket)
        self._changed.notify_all()

    def wait_for_others(self) -> None:
        """Behind a repetition: return when all updates taken so far are flushed. UnavailableError if they can't be."""
        with self._changed:
            horizon = self._plan.horizon()
            while self._plan.broken or not self._plan.passed(horizon):
                if self._plan.broken:
                    raise UnavailableError(f"the first copy of an update could not be logged: {self._plan.broken}")
                self._changed.wait()

    def _mark(self, end: int, count: int) -> list[bytes | memoryview]:
        return _mark(end, end if self._directory.fsync else 0, count)

    def _write(self) -> None:
        """Under the lock, which is not held while the disk is at work: write all that waits."""
        batch, self._queue, self._writing = self._queue, [], True
        file, at, generation, number = self._file, self._end, self._segment, self._records
        self._changed.release()
        failure = ""
        try:
            buffers: list[bytes | memoryview] = []
            for _, _, checksum, parts in batch:
                number += 1
                buffers += [_header(checksum, sum(map(len, parts)), at, generation, number), *parts]
            end = write_all(file, buffers, at)
            if self._directory.fsync:
                os.fdatasync(file)
            reach("ps.log.written")
            write_all(file, self._mark(end, number), _SEGMENT.size)
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
                self._end, self._records = end, number
                for ticket, room, _, _ in batch:
                    self._promised -= room
                    self._plan.close(ticket)
                    self._done.add(ticket)
            self._changed.notify_all()


class _Segment(NamedTuple):
    """What the head of a segment says."""

    generation: int
    previous: int
    same_boot: bool
    end: int  # how far it was acknowledged, as far as the mark knows
    synced: int  # 0: it is not
    records: int  # that were acknowledged, as far as the mark knows


class _Header(NamedTuple):
    """What the header of a record says."""

    checksum: int
    size: int
    batch: int
    number: int


@dataclass
class Dropped:
    """What the log has lost of what was acknowledged.

    Attributes:
        updates: by number of the job's holding, variable and shard: which updates of the shard.
        unknown: records of which it can't be told what they updated.
    """

    updates: defaultdict[tuple[int, int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    unknown: int = 0

    def add(self, record: state_pb2.LogRecord) -> None:
        """Count a record that can be read."""
        for item, count in zip(record.update.items, record.updates, strict=False):
            if count:
                self.updates[record.holding, item.variable, item.shard].add(count)


def records(
    paths: Sequence[Path], first: int, *, cut: bool = False, dropped: Dropped | None = None
) -> Iterator[tuple[state_pb2.LogRecord, memoryview]]:
    """The records of the segments from generation `first` on, and their payloads, in order.

    Args:
        paths: of all segments, ascending.
        cut: cut the last one behind its last whole record: what comes next is another segment.
        dropped: is told what was lost with the machine.

    Raises:
        DamagedError: something is missing, or not what was written.
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
            data = bytes(_FIRST) + file.read()  # so that places are those in the file
            end, count = yield from _records_of(path, head, data, last, dropped)
        # One without records, of a generation that failed, may be passed over by the next: it was to be removed.
        named = frozenset((generation,)) if count else frozenset((generation, previous))
        if last and cut:
            _cut(path, head, end, count)
    if before is None or before < first:
        raise DamagedError(f"the segment of the log that begins with generation {first} is missing")


def _cut(path: Path, head: _Segment, end: int, count: int) -> None:
    """Leave so many records. What was lost behind them is not to be found lost again."""
    os.truncate(path, end)
    if (head.end, head.records) == (end, count):
        return
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_all(file, _mark(end, end if head.synced else 0, count), _SEGMENT.size)
    finally:
        os.close(file)


def lost_in(paths: Sequence[Path], first: int) -> Dropped:
    """What of a damaged log can still be read, of the segments from generation `first` on: all of it is lost."""
    dropped = Dropped()
    for path in paths:
        with path.open("rb") as file, contextlib.suppress(DamagedError):
            head = _segment_head(path, file.read(_FIRST))
            if head.generation >= first:
                _count_lost(bytes(_FIRST) + file.read(), head, _FIRST, 0, dropped)
    return dropped


def _segment_head(path: Path, data: bytes) -> _Segment:
    if len(data) == _FIRST:
        magic, generation, previous, boot, crc = _SEGMENT.unpack_from(data)
        marks = [
            _MARK.unpack_from(data, at)
            for at in (_SEGMENT.size, _SEGMENT.size + _MARK.size)
            if zlib.crc32(data[at : at + _MARK.size - 4]) == int.from_bytes(data[at + _MARK.size - 4 :][:4], "little")
        ]
        if (
            magic == _SEGMENT_MAGIC
            and crc == zlib.crc32(data[: _SEGMENT.size - 4])
            and path.name == f"log-{generation:06d}.bin"
            and marks
        ):
            end, synced, count, _ = max(marks)
            return _Segment(generation, previous, boot == boot_id() != b"", end, synced, count)
    raise DamagedError(f"{path} is damaged at its beginning, or is not a segment of a log")


def _records_of(
    path: Path, head: _Segment, data: bytes, last: bool, dropped: Dropped | None
) -> Generator[tuple[state_pb2.LogRecord, memoryview], None, tuple[int, int]]:
    """Of one segment. Returns where in the file the last whole one ends, and how many they are."""
    at, count, view = _FIRST, 0, memoryview(data)
    while at < len(data):
        if (end := _whole(view, at, head.generation, count + 1)) == 0:
            break
        try:
            yield unpack(data[at + _HEAD.size : end], state_pb2.LogRecord, end)
        except ProtocolError as error:
            raise DamagedError(f"{path} holds an invalid record at byte {at:,}: {error}") from None
        at, count = end, count + 1
    if at < _has_to_be_whole(data, head, at) or (not last and (at < head.end or any(view[at:]))):
        raise DamagedError(f"{path} is damaged at byte {at:,}, with updates that were acknowledged")
    if last and not head.same_boot:
        missing = Dropped() if dropped is None else dropped
        if lost := _count_lost(data, head, at, count, missing):
            logger.warning(
                "%s: of what was not synced when the machine stopped, %d acknowledged updates or more are lost, from "
                "byte %s on",
                path,
                lost,
                f"{at:,}",
            )
    return at, count


def _has_to_be_whole(data: bytes, head: _Segment, hole: int) -> int:
    """Up to which byte there has to be all that was written, where something is wrong at `hole`."""
    if head.same_boot:
        return head.end
    if not head.synced:
        return 0
    # A batch begins when the one before is synced.
    return max([head.synced, *(header.batch for _, header in _headers(data, hole, head.generation))])


def _count_lost(data: bytes, head: _Segment, hole: int, whole: int, dropped: Dropped) -> int:
    """Count, at least, the records that were acknowledged behind the first whole ones."""
    found, view = list(_headers(data, hole, head.generation)), memoryview(data)
    acknowledged = max([head.end, *(header.batch for _, header in found)])
    lost = [(at, header) for at, header in found if at < acknowledged and header.number > whole]
    total = max([head.records, *(header.number for _, header in lost)]) - whole
    known = 0
    for at, header in lost:
        end = at + _HEAD.size + header.size
        if _whole(view, at, head.generation, header.number):
            with contextlib.suppress(ProtocolError):
                dropped.add(unpack(data[at + _HEAD.size : end], state_pb2.LogRecord, end)[0])
                known += 1
    dropped.unknown += max(total - known, 0)
    return max(total, 0)


def _headers(data: bytes, at: int, generation: int) -> Iterator[tuple[int, _Header]]:
    """The headers that are whole, from a place on, whatever lies between them."""
    mark, view = struct.pack("<I", _MAGIC), memoryview(data)
    while (at := data.find(mark, at)) >= 0:
        header = _header_at(view, at, generation)
        if header is not None:
            yield at, header
        # What a body holds is not looked at, if it is there: it may be anything.
        at += _HEAD.size + header.size if header is not None and _whole(view, at, generation, header.number) else 1


def _header_at(data: memoryview, at: int, generation: int) -> _Header | None:
    """None if there is none that is whole, and of this segment."""
    if len(data) < at + _HEAD.size:
        return None
    magic, crc, checksum, size, batch, segment, number = _HEAD.unpack_from(data, at)
    if magic != _MAGIC or segment != generation or crc != zlib.crc32(data[at + _HEAD_REST : at + _HEAD.size]):
        return None
    return _Header(checksum, size, batch, number)


def _whole(data: memoryview, at: int, generation: int, number: int) -> int:
    """Where the record at this place ends; 0 if there is none with this number, or it is not whole."""
    header = _header_at(data, at, generation)
    if header is None or header.number != number or not header.size:
        return 0
    end = at + _HEAD.size + header.size
    whole = end <= len(data) and _checksum(data[at + _HEAD.size : end]) == header.checksum
    return end if whole else 0


def _mark(end: int, synced: int, count: int) -> list[bytes | memoryview]:
    mark = _with_crc(_MARK, end, synced, count)
    return [mark, mark]


def _checksum(*parts: memoryview) -> int:
    """Half of XXH3's 64 bits: a quarter of the time that a CRC takes, where every update waits for it."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest() & 0xFFFF_FFFF
