"""One shard: its array, its optimizer slots, its lock, and consistent reads that do not stop updates.

A read of a large shard goes out in chunks; an update in between must not be half in it. A `Snapshot` is
lazy copy-on-write: it is registered under the lock, and an update first saves for it the blocks which it is
about to change and which the snapshot has not given out yet. Nobody pays where the two do not meet, and the
lock is held for one block's copy at a time, never while the network is slow.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.frames import CHUNK_BYTES, view
from pscluster.ps.rules import compute_dtype

Array = npt.NDArray[np.generic]

AVERAGE = "average"
"""Name under which the average of a shard's values is read, like a slot."""


class Shard:
    """A block of a variable. Every access to `array` and `slots` happens under `lock`."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.version = secrets.randbits(62)  # rises before each update; never that of another server's shard
        self.lock = threading.Lock()
        self.slots: dict[int, dict[str, Array]] = {}  # by optimizer
        self.steps: dict[int, int] = {}
        self.averages: dict[int, Array] = {}
        self._snapshots: list[Snapshot] = []

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

    def before_change(self, blocks: Iterable[int] | None = None) -> None:
        """To be called under the lock before the bytes in these blocks change (None: all of them)."""
        for snapshot in self._snapshots:
            snapshot.save(blocks)

    def blocks_of_rows(self, ids: npt.NDArray[np.int64], row_bytes: int) -> Iterable[int]:
        """The blocks in which these rows, of so many bytes each, lie."""
        if not self._snapshots:
            return ()
        first = (ids * row_bytes // CHUNK_BYTES).tolist()
        last = (((ids + 1) * row_bytes - 1) // CHUNK_BYTES).tolist()
        return {block for low, high in set(zip(first, last, strict=True)) for block in range(low, high + 1)}

    def snapshot(self, start: int, stop: int) -> Snapshot:
        """A consistent read of the bytes [start, stop), to be closed. Takes the lock."""
        with self.lock:
            snapshot = Snapshot(self, start, stop)
            self._snapshots.append(snapshot)
        return snapshot

    def forget(self, snapshot: Snapshot) -> None:
        """The snapshot has been read or given up. Takes the lock."""
        with self.lock:
            self._snapshots.remove(snapshot)


class Snapshot:
    """The bytes [start, stop) of a shard as they were when this was made, given out once, in order."""

    def __init__(self, shard: Shard, start: int, stop: int) -> None:
        self._shard = shard
        self._bytes = view(shard.array)
        self._position = start
        self._stop = stop
        self._saved: dict[int, bytes] = {}

    def save(self, blocks: Iterable[int] | None) -> None:
        """Keep the old bytes of these blocks, as far as they are still to be given out. Under the lock."""
        first, last = self._position // CHUNK_BYTES, -(-self._stop // CHUNK_BYTES)
        for block in range(first, last) if blocks is None else blocks:
            if first <= block < last and block not in self._saved:
                self._saved[block] = bytes(self._bytes[block * CHUNK_BYTES : (block + 1) * CHUNK_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        """Chunks that end at block boundaries."""
        return (chunk for chunk, _ in self.packed(bytes))

    def packed(self, pack: Callable[[memoryview], bytes]) -> Iterator[tuple[bytes, int]]:
        """What `pack` makes of each chunk, and the chunk's size.

        It copies the chunk, of the live array and without the lock, so that neither has to wait. An update that
        comes in between saves the block first: then the copy may be torn, and is made anew of what was saved.
        """
        while self._position < self._stop:
            start, block = self._position, self._position // CHUNK_BYTES
            base = block * CHUNK_BYTES
            end = min(base + CHUNK_BYTES, self._stop)
            made = None
            with self._shard.lock:
                saved = self._saved.pop(block, None)
                if saved is not None:
                    self._position = end
            if saved is None:
                made = pack(self._bytes[start:end])
                with self._shard.lock:
                    saved = self._saved.pop(block, None)
                    self._position = end
            if saved is not None:
                made = pack(memoryview(saved)[start - base : end - base])
            assert made is not None  # either of the two has made it
            yield made, end - start

    def close(self) -> None:
        """No more will be read."""
        self._shard.forget(self)
