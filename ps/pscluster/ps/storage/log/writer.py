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

A log that fills the disk could never be replaced, so it leaves what the next generation takes (`end_generation`). When
the disk has little more than that, the unused segment is removed, and a generation is due (`is_short`). When it has no
more, a segment with updates takes no others until the generation is saved. If that fails, the log may fill the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from pscluster.core.errors import UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.transport.frames import Buffer, parts_of
from pscluster.ps.storage.files.disk import write_all
from pscluster.ps.storage.files.generations import StateDirectory
from pscluster.ps.storage.log.format import (
    FIRST,
    SEGMENT,
    SEGMENT_MAGIC,
    checksum_of,
    header_of,
    machine_boot_id,
    mark_twice,
    with_crc,
)
from pscluster.ps.storage.policy import LogPlan
from pscluster.v1 import state_pb2

_GROW, _MOST = 16 << 20, 256 << 20  # steps by which a segment grows
_LEAST = 64 << 10  # what a segment begins with where there is no room for such a step
_ROOM = 256  # for a record, besides its request and payload


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
        self._taken = 0  # updates since the segment began
        self._kept_free = 0
        self._in_generation = False  # the one that this segment begins with is not saved yet
        self.is_short = False
        """Whether the disk has no room for a large step of the log beside the next generation."""

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
            least, new = self._promised + _LEAST, path.with_name(path.name + ".new")
            size = self._promised + _GROW if self._has_room(self._promised + _GROW) else least
            self._directory.reuse_segment(new)
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = _reserve(file, 0, max(size, os.fstat(file).st_size), least)
                unused = self._segment > saved and self._end == FIRST
                previous = self._previous if unused else self._segment or before
                head = with_crc(SEGMENT, SEGMENT_MAGIC, generation, previous, machine_boot_id())
                end = write_all(file, [head, *mark_twice(FIRST, 0, self._directory.fsync)], 0)
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
                for name in (new, path):  # by its name it would be the last segment, but the previous one continues
                    with contextlib.suppress(OSError):
                        name.unlink()
                raise
            if self._file >= 0:
                os.close(self._file)
            if unused:
                with contextlib.suppress(OSError):
                    self._directory.log_file(self._segment).unlink()
            self._file, self._segment, self._previous = file, generation, previous
            self._end, self._allocated, self._records = end, size, 0
            self._taken, self.is_short, self._in_generation = 0, False, True
            return bool(self._plan.broken)

    def end_generation(self, kept_free: int | None) -> None:
        """Note that the generation is saved, or has failed. From now on leave this many bytes of the disk to the next.

        With 0, leave none: it could not be saved. With None, leave as many as before.
        """
        with self._changed:
            self._in_generation = False
            if kept_free is not None:
                self._kept_free = kept_free
                self.is_short &= kept_free > 0

    def repaired(self) -> None:
        """Resume: a generation that was begun after the failure is saved."""
        with self._changed:
            self._plan.repaired()
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
            self._taken += 1
            return self._plan.take(), room

    def _has_room(self, size: int) -> bool:
        """Return whether the disk has room for this, beside the next generation: perhaps without the unused segment."""
        if not self._kept_free or self._directory.free_bytes() >= size + self._kept_free:
            return True
        self._directory.remove_spare()
        return self._directory.free_bytes() >= size + self._kept_free

    def _promise(self, room: int, *, carried_over: bool = False) -> None:
        """Reserve space in the segment. UnavailableError if the disk has none. Called under the lock."""
        missing = self._end + self._promised + room - self._allocated
        if missing > 0:
            # In few, large steps if there is room: many small ones make every write four times as slow.
            more = missing + min(max(_GROW, self._allocated), _MOST)
            self.is_short = not self._has_room(more)
            if self.is_short:
                more = missing
                # If nothing has been taken since the last generation, another one would be of no use.
                must_wait = not carried_over and (self._taken or self._in_generation)
                if must_wait and not self._has_room(missing):
                    raise UnavailableError(
                        f"updates are refused until the state has been saved: the disk of {self._directory.path} is "
                        "almost full"
                    )
            try:
                self._allocated += _reserve(self._file, self._allocated, more, missing)
            except OSError as error:
                raise UnavailableError(
                    f"updates are refused, since the log in {self._directory.path} can't grow ({error.strerror}): "
                    "free some disk space there"
                ) from None
        self._promised += room

    def record(self, ticket: int, room: int, record: state_pb2.LogRecord, payload: Sequence[Buffer]) -> None:
        """Write the record of an applied update; return once it is flushed. UnavailableError if it can't be."""
        parts = [memoryview(buffer) for buffer in parts_of(record, payload)]
        checksum = checksum_of(*parts)
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
            room = size + _ROOM
            self._promise(room, carried_over=True)
            if not self._plan.broken:
                ticket = self._plan.take()
            else:
                ticket = 0  # no update has this one
                parts = [memoryview(buffer) for buffer in parts_of(record, payload)]
                self._queue.append((ticket, room, checksum_of(*parts), parts))
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
                buffers += [header_of(checksum, sum(map(len, parts)), at, generation, records), *parts]
            end = write_all(file, buffers, at)
            if self._directory.fsync:
                os.fdatasync(file)
            reach("ps.log.written")
            write_all(file, mark_twice(end, records, self._directory.fsync), SEGMENT.size)
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


def _reserve(file: int, end: int, size: int, least: int) -> int:
    """Reserve disk space for a file, from `end` on; return how many bytes: `size`, or `least` if it has no more.

    OSError if it has not even those; then the file is as long as before.
    """
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, end, size)
        return size
    except OSError:  # the disk is small, or almost full
        os.ftruncate(file, before)  # ext4 leaves to the file all that it has found, and so nothing to save the state in
    try:
        os.posix_fallocate(file, end, least)
    except OSError:
        os.ftruncate(file, before)
        raise
    return least
