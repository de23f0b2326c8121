"""Old bytes that are still to be written or sent: in memory up to a limit, beyond that in an unnamed file.

Blocks that change before they are written to disk, or before a slow client has read them, must be saved for it: at
worst all of a server's arrays, for each reader. The file is in the state's folder; the kernel caches as much of it as
it has room for, and an update that saves more waits for the disk.

    save --there is room in memory----------> in memory --last reference dropped--> freed
         --else, to a free slot of the file-> spilled ----last reference dropped--> freed, with its slot
         --the file can't be written--------> in memory: no update fails because of this

Nothing here outlives the process, and the file is closed once its last block is freed. Bytes read back are verified by
checksum, because a disk may lose what the kernel has accepted.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash

from pscluster.core.transport.frames import CHUNK_BYTES
from pscluster.ps.storage.files.disk import write_all

logger = logging.getLogger(__name__)

LIMIT_BYTES = 64 << 20


class Spill:
    """The saved blocks of one server: `in_memory` bytes, and `spilled` blocks in the file. Thread-safe."""

    def __init__(self, folder: Path | None = None, limit: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._slots = 0
        self._free: list[int] = []
        self._released: deque[tuple[int, int | None]] = deque()  # size and slot
        self._fails = False
        self.in_memory = self.spilled = 0

    def save(self, data: memoryview) -> SavedBlock:
        """Save a copy of these bytes, at most a block."""
        block = self._spilled(data)
        if block is None:
            with self._lock:
                self.in_memory += len(data)
            block = SavedBlock(data, self._release)
        self._try_reclaim()
        return block

    def _spilled(self, data: memoryview) -> SavedBlock | None:
        """Save to the file; return None if there is room in memory, or if the file can't be written."""
        try:
            with self._lock:
                self._reclaim()
                if self.in_memory + len(data) <= self._limit:
                    return None
                file, slot = self._new_slot()
            return SavedBlock(data, self._release, slot, file)
        except OSError as error:
            if not self._fails:
                where = self._folder or "the folder of temporary files"
                why = str(error)  # a log handler that holds the error itself would hold the block, too
                logger.warning(
                    "can't create a temporary file in %s (%s): values that readers still need stay in memory; free "
                    "disk space there",
                    where,
                    why,
                )
            self._fails = True
            return None

    def _new_slot(self) -> tuple[IO[bytes], int]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (`_reclaim` closes it)
        self.spilled += 1
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        return self._file, self._free.pop()

    def _release(self, size: int, slot: int | None) -> None:
        """Free a block. Runs wherever its last reference is dropped, under any locks, so it waits for none."""
        self._released.append((size, slot))
        self._try_reclaim()

    def _try_reclaim(self) -> None:
        """Reclaim released blocks unless another thread has the lock, which then reclaims them itself."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

    def _reclaim(self) -> None:
        """Free the memory and slots of released blocks. Needs the lock."""
        while self._released:
            size, slot = self._released.popleft()
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
    """Bytes in memory or in a slot of the file, released with this object. OSError if they can't be stored."""

    __slots__ = ("_data", "_file", "_release", "_size", "_slot", "_sum")

    def __init__(
        self,
        data: memoryview,
        release: Callable[[int, int | None], None],
        slot: int | None = None,
        file: IO[bytes] | None = None,
    ) -> None:
        self._size, self._release, self._slot, self._file = len(data), release, slot, file
        if file is None or slot is None:
            self._data = bytes(data)
        else:
            self._sum = xxhash.xxh3_128_digest(data)
            write_all(file.fileno(), [data], slot * CHUNK_BYTES)

    def read(self) -> bytes:
        """Return the bytes. OSError if they can't be read back from the file."""
        if self._file is None or self._slot is None:
            return self._data
        try:
            data = os.pread(self._file.fileno(), self._size, self._slot * CHUNK_BYTES)
        except OSError as error:
            raise OSError(error.errno, f"old values can't be read back from the disk: {error.strerror}") from None
        if xxhash.xxh3_128_digest(data) != self._sum:
            raise OSError(errno.EIO, "old values read back from the disk are damaged")
        return data

    def __del__(self) -> None:
        self._release(self._size, self._slot)
