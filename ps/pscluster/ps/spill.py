"""Old bytes that are still to be written, or sent: in memory up to a limit, beyond that in a file without a name.

What changes before it is written to disk, or before a slow client has read it, has to be kept for that: at worst all of
a server's arrays, for each that reads. The file lies where the state does; the kernel holds of it what it has room for.

    save --there is room in memory------> in memory --taken, or nobody has it any more--> gone
         --else, to a free slot of the file-> spilled --taken, or nobody has it any more--> gone; the slot is free
         --the file can't be written----> in memory: no update fails for this

Nothing of it is to outlive the process. The file goes with the last that is in it.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from pscluster.core.frames import CHUNK_BYTES
from pscluster.ps.durable.disk import read_all, write_all

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
            file, slot = (None, None) if fits else self._new_slot()
            self.in_memory += len(data) if slot is None else 0
        if file is not None and slot is not None:
            block = SavedBlock(len(data), self._let_go, slot=slot, file=file)
            try:
                write_all(file.fileno(), [data], slot * CHUNK_BYTES)
            except OSError as error:
                self._complain(error)
            else:
                self._fails = False
                return block
            with self._lock:
                self.in_memory += len(data)
        return SavedBlock(len(data), self._let_go, data=bytes(data))

    def _new_slot(self) -> tuple[IO[bytes], int] | tuple[None, None]:
        if self._file is None:
            try:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (`_forget` closes it)
            except OSError as error:
                self._complain(error)
                return None, None
        self.spilled += 1
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        return self._file, self._free.pop()

    def _complain(self, error: OSError) -> None:
        if not self._fails:
            where, why = self._folder or tempfile.gettempdir(), str(error)  # not what a record of the error would keep
            logger.warning("what changes before it is written or sent stays in memory: no file in %s: %s", where, why)
        self._fails = True

    def _let_go(self, size: int, slot: int | None) -> None:
        """Wherever the last reference ends, whatever locks are held there: so none is waited for."""
        self._gone.append((size, slot))
        if self._lock.acquire(blocking=False):
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
            self._file.close()
            self._file, self._slots, self._free = None, 0, []


class SavedBlock:
    """Bytes that are kept until this is no more."""

    __slots__ = ("_data", "_file", "_let_go", "_size", "_slot")

    def __init__(
        self,
        size: int,
        let_go: Callable[[int, int | None], None],
        *,
        data: bytes = b"",
        slot: int | None = None,
        file: IO[bytes] | None = None,
    ) -> None:
        self._size, self._let_go = size, let_go
        self._data, self._slot, self._file = data, slot, file

    def read(self) -> bytes:
        """The bytes. OSError if the file can't be read."""
        if self._file is None or self._slot is None:
            return self._data
        return read_all(self._file.fileno(), self._size, self._slot * CHUNK_BYTES)

    def __del__(self) -> None:
        self._let_go(self._size, self._slot)
