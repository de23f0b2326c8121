"""Old bytes that are still to be written, or sent: in memory up to a limit, beyond that in a file without a name.

What changes before it is written to disk, or before a slow client has read it, has to be kept for that: at worst all of
a server's arrays, for each that reads. The file lies where the state does; the kernel holds of it what it has room for,
and an update that saves more than that waits for the disk.

    save --there is room in memory-------> in memory --nobody has it any more--> gone
         --else, to a free slot of the file-> spilled --nobody has it any more--> gone; the slot is free
         --the file can't be written-----> in memory: no update fails for this

Nothing of it is to outlive the process. The file goes with the last that is in it. What comes back from it is compared
with what was saved: a disk may lose what the kernel has taken.
"""

from __future__ import annotations

import errno
import logging
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash

from pscluster.core.transport.frames import CHUNK_BYTES
from pscluster.ps.storage.disk import read_all, write_all

logger = logging.getLogger(__name__)

LIMIT_BYTES = 64 << 20


class Spill:
    """What one server keeps so. Thread-safe.

    Args:
        folder: where the file lies; None: where temporary files do.
        limit: bytes in memory.

    Attributes:
        in_memory: bytes.
        spilled: blocks.
    """

    def __init__(self, folder: Path | None = None, limit: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._slots = 0
        self._free: list[int] = []
        self._gone: deque[tuple[int, int | None]] = deque()  # size and slot
        self._fails = False
        self.in_memory = self.spilled = 0

    def save(self, data: memoryview) -> SavedBlock:
        """Keep a copy of these bytes, a block at most."""
        with self._lock:
            self._forget()
            fits = self.in_memory + len(data) <= self._limit
        block = None if fits else self._spilled(data)
        if block is None:
            with self._lock:
                self.in_memory += len(data)
            block = SavedBlock(len(data), self._let_go)
            block.hold(data)
        self._look()
        return block

    def _spilled(self, data: memoryview) -> SavedBlock | None:
        """In the file; None if that can't be written."""
        try:
            with self._lock:
                file, slot = self._new_slot()
            block = SavedBlock(len(data), self._let_go, slot, file)
            block.write(data)
        except OSError as error:
            if not self._fails:
                where = self._folder or "the folder of temporary files"
                why = str(error)  # not the error, which whoever keeps the record would keep, and the block with it
                logger.warning(
                    "old values stay in memory until they are written or sent, for lack of a file in %s: %s", where, why
                )
            self._fails = True
            return None
        return block

    def _new_slot(self) -> tuple[IO[bytes], int]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (`_forget` closes it)
        self.spilled += 1
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        return self._file, self._free.pop()

    def _let_go(self, size: int, slot: int | None) -> None:
        """Wherever the last reference ends, whatever locks are held there: so none is waited for."""
        self._gone.append((size, slot))
        self._look()

    def _look(self) -> None:
        """Who has the lock looks again when it is free."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                self._forget()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        """Give free what is gone."""
        while self._gone:
            size, slot = self._gone.popleft()
            if slot is None:
                self.in_memory -= size
            else:
                self.spilled -= 1
                self._free.append(slot)
        if self._file is not None and not self.spilled:
            file, self._file, self._slots, self._free, self._fails = self._file, None, 0, [], False
            with suppress(OSError):
                file.close()


class SavedBlock:
    """Bytes that are kept until this is no more."""

    __slots__ = ("_data", "_file", "_let_go", "_size", "_slot", "_sum")

    def __init__(
        self,
        size: int,
        let_go: Callable[[int, int | None], None],
        slot: int | None = None,
        file: IO[bytes] | None = None,
    ) -> None:
        self._size, self._let_go = size, let_go
        self._data, self._sum = b"", b""
        self._slot, self._file = slot, file

    def hold(self, data: memoryview) -> None:
        """In memory."""
        self._data = bytes(data)

    def write(self, data: memoryview) -> None:
        """To the file. OSError if that fails."""
        assert self._file is not None
        assert self._slot is not None
        self._sum = xxhash.xxh3_128_digest(data)
        write_all(self._file.fileno(), [data], self._slot * CHUNK_BYTES)

    def read(self) -> bytes:
        """The bytes. OSError if the file does not give them."""
        if self._file is None or self._slot is None:
            return self._data
        try:
            data = read_all(self._file.fileno(), self._size, self._slot * CHUNK_BYTES)
        except OSError as error:
            raise OSError(error.errno, f"old values can't be read back from the disk: {error.strerror}") from None
        if xxhash.xxh3_128_digest(data) != self._sum:
            raise OSError(errno.EIO, "old values read back from the disk are damaged")
        return data

    def __del__(self) -> None:
        self._let_go(self._size, self._slot)
