"""One shard: its array, its optimizer slots, its lock, and consistent reads that do not stop updates.

A read of a large shard goes out in chunks; an update in between must not be half in it. A `Snapshot` is
lazy copy-on-write: it is registered under the lock, and an update first saves for it the blocks which it is
about to change and which the snapshot has not given out yet. Nobody pays where the two do not meet, and the
lock is held for one block's copy at a time, never while the network is slow.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import UnavailableError
from pscluster.core.transport.frames import CHUNK_BYTES, view
from pscluster.ps.optim import compute_dtype
from pscluster.ps.storage.capture import Capture, blocks_of_rows
from pscluster.ps.storage.spill import SavedBlock, Spill

Array = npt.NDArray[np.generic]


class Shard:
    """A block of a variable. Every access to `array` and `slots` happens under `lock`."""

    def __init__(self, array: Array, updates: int = 0) -> None:
        self.array = array
        self.updates = updates  # applied so far
        self.changes = 0  # rises before each update, applied or failed
        self._first_version = secrets.randbits(62)
        self.lock = threading.Lock()
        self.slots: dict[int, dict[str, Array]] = {}  # by optimizer
        self.steps: dict[int, int] = {}
        self.averages: dict[int, Array] = {}
        self._snapshots: list[Snapshot] = []
        self._captures: list[Capture] = []

    @property
    def version(self) -> int:
        """Rises before each update; never that of another server's shard, or of this one before it was restored."""
        return self._first_version + self.changes

    def arrays(self) -> dict[str, Array]:
        """All that is kept of it: the values, and by optimizer its slots and average. Under the lock."""
        slots = {f"slot/{number}/{name}": array for number, by in self.slots.items() for name, array in by.items()}
        averages = {f"average/{number}": array for number, array in self.averages.items()}
        return {"value": self.array, **slots, **averages}

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Slots and averages, named as `arrays` does."""
        for name, array in arrays.items():
            kind, _, rest = name.partition("/")
            if kind == "slot":
                number, _, slot = rest.partition("/")
                self.slots.setdefault(int(number), {})[slot] = array
            elif kind == "average":
                self.averages[int(rest)] = array

    def copy(self, optimizers: Container[int]) -> Shard:
        """Another one, with the values and what these optimizers keep beside them as they are now. Takes the lock."""
        with self.lock:
            made = Shard(self.array.copy())
            for number, slots in self.slots.items():
                if number in optimizers:
                    made.slots[number] = {name: array.copy() for name, array in slots.items()}
            made.steps = {number: step for number, step in self.steps.items() if number in optimizers}
            made.averages = {number: array.copy() for number, array in self.averages.items() if number in optimizers}
        return made

    def capture(self, spill: Spill) -> Capture:
        """All of it as it is now, to be given to `release`. Under the lock.

        Args:
            spill: keeps what changes before it is read.
        """
        capture = Capture(self.arrays(), self.lock, spill)
        self._captures.append(capture)
        return capture

    def release(self, capture: Capture) -> None:
        """The capture has been read or given up. Takes the lock."""
        with self.lock:
            self._captures.remove(capture)
        capture.drop()

    @property
    def nbytes(self) -> int:
        """Bytes of the values and of all slots. Takes no lock: it may miss what an update is just adding."""
        slots = sum(array.nbytes for by_name in list(self.slots.values()) for array in by_name.values())
        return self.array.nbytes + slots + sum(array.nbytes for array in list(self.averages.values()))

    def average(self, optimizer: int, momentum: float, ids: npt.NDArray[np.int64] | None) -> None:
        """Move the exponential average of the values (Keras' `use_ema`) by one step; of these rows only, if given.

        The first one is the values themselves. Averages of half types are kept in float32, or they would stand
        still. To be called under the lock, behind the update.
        """
        average: Any = self.averages.get(optimizer)
        values: Any = self.array
        if average is None:
            self.averages[optimizer] = values.astype(compute_dtype(values.dtype))
            return
        share = average.dtype.type(1 - momentum)
        if ids is None:
            average += (values - average) * share
        else:
            rows = np.unique(ids)
            average[rows] += (values[rows] - average[rows]) * share

    def replace(self, array: Array) -> bool:
        """Have these values, in this array, instead of all that there are. Under the lock.

        Nothing happens (False) while somebody reads the shard or writes it to disk: the array that there was would be
        kept whole until that is done.
        """
        if self._captures or self._snapshots:
            return False
        self.array = array
        return True

    def before_change(self) -> None:
        """To be called under the lock before any of it changes."""
        for snapshot in self._snapshots:
            snapshot.save(None)
        for capture in self._captures:
            capture.save(None)

    def before_span_changes(self, start: int, stop: int) -> None:
        """To be called under the lock before these elements change, in C order, of all arrays that have as many."""
        size = self.array.itemsize
        for snapshot in self._snapshots:
            snapshot.save(range(start * size // CHUNK_BYTES, -(-stop * size // CHUNK_BYTES)))
        for capture in self._captures:
            capture.save_span(start, stop, self.array.size)

    def before_rows_change(self, ids: npt.NDArray[np.int64], leading: int = 1) -> None:
        """To be called under the lock before these rows change, numbered over so many leading axes."""
        if not (self._snapshots or self._captures):
            return
        shape = self.array.shape
        row_bytes = math.prod(shape[leading:]) * self.array.itemsize
        blocks = blocks_of_rows(ids, row_bytes, CHUNK_BYTES)
        for snapshot in self._snapshots:
            snapshot.save(blocks)
        for capture in self._captures:
            capture.save(ids, math.prod(shape[1:leading]))

    def snapshot(self, start: int, stop: int, spill: Spill) -> Snapshot:
        """A consistent read of the bytes [start, stop), to be closed. Takes the lock.

        Args:
            start: in the array's bytes.
            stop: in the array's bytes.
            spill: keeps what changes before it is read.
        """
        with self.lock:
            snapshot = Snapshot(self, start, stop, spill)
            self._snapshots.append(snapshot)
        return snapshot

    def forget(self, snapshot: Snapshot) -> None:
        """The snapshot has been read or given up. Takes the lock."""
        with self.lock:
            self._snapshots.remove(snapshot)


class Snapshot:
    """The bytes [start, stop) of a shard as they were when this was made, given out once, in order."""

    def __init__(self, shard: Shard, start: int, stop: int, spill: Spill) -> None:
        self._shard = shard
        self._spill = spill
        self._bytes = view(shard.array)
        self._position = start
        self._stop = stop
        self._saved: dict[int, SavedBlock] = {}

    def save(self, blocks: Iterable[int] | None) -> None:
        """Keep the old bytes of these blocks, as far as they are still to be given out. Under the lock."""
        first, last = self._position // CHUNK_BYTES, -(-self._stop // CHUNK_BYTES)
        for block in range(first, last) if blocks is None else blocks:
            if first <= block < last and block not in self._saved:
                self._saved[block] = self._spill.save(self._bytes[block * CHUNK_BYTES : (block + 1) * CHUNK_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        """Chunks that end at block boundaries."""
        return (chunk for chunk, _ in self.packed(bytes))

    def packed(self, pack: Callable[[memoryview], bytes]) -> Iterator[tuple[bytes, int]]:
        """What `pack`, which copies it, makes of each chunk, and the chunk's size."""
        made: tuple[bytes, int] | None = None
        for chunk, again in self.chunks():
            if made is not None and not again:
                yield made
            made = pack(chunk), len(chunk)
        if made is not None:
            yield made

    def chunks(self, blocks: int = 1) -> Iterator[tuple[memoryview, bool]]:
        """Chunks to be copied or sent before the next is asked for; and whether it begins where the one before did.

        It is of the live array, and nobody has the lock, so that neither has to wait. An update that comes in between
        saves the block first: then what was copied may be torn, and is given again as it was. Of several blocks so is
        each, one by one, and then nothing but single ones: where there is one update there may be others.

        Args:
            blocks: in a chunk, at most.
        """
        again = False
        while self._position < self._stop:
            start, block = self._position, self._position // CHUNK_BYTES
            with self._shard.lock:
                saved = self._saved.pop(block, None)
                count = next((n for n in range(1, blocks) if block + n in self._saved), blocks) if saved is None else 1
                end = min((block + count) * CHUNK_BYTES, self._stop)
                if saved is not None:
                    self._position = end
            if saved is None:
                yield self._bytes[start:end], again
                with self._shard.lock:
                    again = any(number in self._saved for number in range(block, block + count))
                    if again and count > 1:
                        blocks = 1
                        continue
                    saved = self._saved.pop(block, None)
                    self._position = end
            if saved is not None:
                try:
                    old = saved.read()
                except OSError as error:
                    raise UnavailableError(f"try again: {error.strerror}") from None
                base = block * CHUNK_BYTES
                yield memoryview(old)[start - base : end - base], again
                again = False

    def close(self) -> None:
        """No more will be read."""
        self._shard.forget(self)
        self._saved.clear()
        self._bytes = memoryview(b"")
