"""The log: updates behind a generation, each acknowledged once it is in the file.

Space is set aside before an update is applied, so that a full disk refuses it and does not lose it. Records are
written by one thread for all that wait (group commit): whoever comes while nobody writes does, for the others too.

A log is a row of segments. Each begins with a generation and names the one before it, so that none can be missing or
another one's; it is cut to what was written when the next one begins. Only the last may end with a record that the end
of a process broke off, or with a batch of which a machine that died has written some: nothing of that was
acknowledged. Whatever else is not as it was written is damage.

A segment that is needed no more becomes the next one: to write over pages that are there costs a quarter of making new
ones. What is left in it of its former life bears another generation.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import xxhash

from pscluster.core.errors import ProtocolError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.frames import Buffer, parts_of, unpack
from pscluster.ps.durable.disk import write_all
from pscluster.ps.durable.files import DamagedError, StateDirectory
from pscluster.ps.durable.plan import LogPlan
from pscluster.v1 import state_pb2

_SEGMENT = struct.Struct("<8sQQI")  # magic, generation, that of the segment before (0: none), CRC-32 of these
_SEGMENT_MAGIC = b"PSSLOG01"
_MAGIC = 0x5053_4C47
# Magic; checksum and length of the record; where the batch begins that it was written with; the segment's generation.
_HEAD = struct.Struct("<IIQQQ")
_GROW, _MOST = 16 << 20, 256 << 20  # steps by which a segment grows
_ROOM = 256  # of a record, beside what the request and the payload take


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
                unused = self._segment > saved and self._end == _SEGMENT.size
                previous = self._previous if unused else self._segment or before
                head = _SEGMENT.pack(_SEGMENT_MAGIC, generation, previous, 0)
                head = head[:-4] + struct.pack("<I", zlib.crc32(head[:-4]))
                end = write_all(file, [head], 0)
                if self._directory.fsync:
                    os.fsync(file)
                if self._file >= 0:
                    os.ftruncate(self._file, self._end)
                    self._allocated = self._end
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
            self._end, self._allocated = end, size
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
                raise UnavailableError(f"no update is taken: {self._plan.broken or 'the server is stopping'}")
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
                        f"no update is taken, since the log in {self._directory.path} can't grow ({error.strerror}): "
                        "make room there"
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

    def _write(self) -> None:
        """Under the lock, which is not held while the disk is at work: write all that waits."""
        batch, self._queue, self._writing = self._queue, [], True
        file, at, generation = self._file, self._end, self._segment
        self._changed.release()
        failure = ""
        try:
            buffers: list[bytes | memoryview] = []
            for _, _, checksum, parts in batch:
                buffers += [_HEAD.pack(_MAGIC, checksum, sum(map(len, parts)), at, generation), *parts]
            end = write_all(file, buffers, at)
            if self._directory.fsync:
                os.fdatasync(file)
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
                self._end = end
                for ticket, room, _, _ in batch:
                    self._promised -= room
                    self._plan.close(ticket)
                    self._done.add(ticket)
            self._changed.notify_all()


def records(
    paths: Sequence[Path], first: int, *, cut: bool = False
) -> Iterator[tuple[state_pb2.LogRecord, memoryview]]:
    """The records of the segments from generation `first` on, and their payloads, in order.

    Args:
        paths: of all segments, ascending.
        cut: cut the last one behind its last whole record: what comes next is another segment.

    Raises:
        DamagedError: something is missing, or not what was written.
    """
    before, named = None, frozenset[int]()
    for path in paths:
        with path.open("rb") as file:
            generation, previous = _segment_head(path, file.read(_SEGMENT.size))
            if generation < first:
                before, named = generation, frozenset((generation,))
                continue
            if (before is None and generation != first) or (before is not None and previous not in named):
                raise DamagedError(f"the segment of the log before {path} is missing, or another one's")
            before = generation
            last = path == paths[-1]
            end = yield from _records_of(path, generation, file.read(), last)
        # One without records, of a generation that failed, may be passed over by the next: it was to be removed.
        named = frozenset((generation,)) if end > _SEGMENT.size else frozenset((generation, previous))
        if last and cut:
            os.truncate(path, end)
    if before is None or before < first:
        raise DamagedError(f"the segment of the log that begins with generation {first} is missing")


def _segment_head(path: Path, head: bytes) -> tuple[int, int]:
    if len(head) == _SEGMENT.size:
        magic, generation, previous, crc = _SEGMENT.unpack(head)
        if magic == _SEGMENT_MAGIC and crc == zlib.crc32(head[:-4]) and path.name == f"log-{generation:06d}.bin":
            return generation, previous
    raise DamagedError(f"{path} is damaged at its beginning, or is no segment of a log")


def _records_of(
    path: Path, generation: int, data: bytes, last: bool
) -> Generator[tuple[state_pb2.LogRecord, memoryview], None, int]:
    """Of one segment, without its head. Returns where in the file the last whole one ends."""
    at, view = 0, memoryview(data)
    while at < len(data):
        if (end := _whole(view, at, generation)) == 0:
            if (not last and any(view[at:])) or _acknowledged_behind(data, at, generation):
                where = _SEGMENT.size + at
                raise DamagedError(f"{path} is damaged at byte {where:,}, with updates that were acknowledged")
            break
        try:
            yield unpack(data[at + _HEAD.size : end], state_pb2.LogRecord, end)
        except ProtocolError as error:
            raise DamagedError(f"{path} holds at byte {_SEGMENT.size + at:,} what is no record: {error}") from None
        at = end
    return _SEGMENT.size + at


def _whole(data: memoryview, at: int, generation: int) -> int:
    """Where the record at this place ends; 0 if there is none, or it is not whole."""
    if len(data) < at + _HEAD.size:
        return 0
    magic, checksum, size, _, segment = _HEAD.unpack_from(data, at)
    end: int = at + _HEAD.size + size
    whole = (
        magic == _MAGIC
        and segment == generation
        and size
        and end <= len(data)
        and _checksum(data[at + _HEAD.size : end]) == checksum
    )
    return end if whole else 0


def _checksum(*parts: memoryview) -> int:
    """Half of XXH3's 64 bits: a quarter of the time that a CRC takes, where every update waits for it."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest() & 0xFFFF_FFFF


def _acknowledged_behind(data: bytes, hole: int, generation: int) -> bool:
    """Is there a whole record of a later batch? It was written once this one had been."""
    mark, at, view = struct.pack("<I", _MAGIC), hole, memoryview(data)
    while (at := data.find(mark, at + 1)) >= 0:
        if _whole(view, at, generation) and _HEAD.unpack_from(data, at)[3] - _SEGMENT.size > hole:
            return True
    return False
