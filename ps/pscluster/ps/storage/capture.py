"""A shard whole, values, slots and averages, as it was at one moment, read in blocks while updates go on.

Copy-on-write, as `Snapshot` is for what clients read: an update first saves, under the shard's lock, the blocks which
it is about to change and which have not been read yet. Saved blocks are given out first, so that their memory is free
again soon. Few of them are in memory, the others in a file (`spill`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.transport.frames import CHUNK_BYTES, view
from pscluster.ps.storage.spill import SavedBlock, Spill

Array = npt.NDArray[Any]


class CapturedBlock(NamedTuple):
    """Some bytes of one of the arrays."""

    array: str
    offset: int
    data: bytes


class Capture:
    """The arrays of a shard, by name, as they were when this was made. Made, and told of changes, under its lock."""

    def __init__(self, arrays: Mapping[str, Array], lock: threading.Lock, spill: Spill) -> None:
        self.arrays = dict(arrays)
        self._lock = lock
        self._spill = spill
        self._views = {name: view(array) for name, array in arrays.items()}
        self._rows = {name: _row_bytes(array) for name, array in arrays.items()}
        self._left = {name: set(range(-(-len(data) // CHUNK_BYTES))) for name, data in self._views.items()}
        self._saved: dict[tuple[str, int], SavedBlock] = {}

    def save(self, rows: npt.NDArray[np.int64] | None, per_row: int = 1) -> None:
        """Keep the old bytes of these rows (None: all) as far as they are still to be read. Under the lock.

        Args:
            rows: numbers of rows.
            per_row: how many of a row make an index of the first axis, where rows are of several leading axes.
        """
        if rows is not None and not len(rows):
            return
        for name, left in self._left.items():
            wanted = (
                set(left) if rows is None else left & blocks_of_rows(rows, self._rows[name] // per_row, CHUNK_BYTES)
            )
            self._keep(name, wanted)

    def _keep(self, name: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._saved[name, block] = self._spill.save(self._block(name, block))
            self._left[name].discard(block)

    def save_span(self, start: int, stop: int, size: int) -> None:
        """Keep the old bytes of these elements of each array that has so many, and of all others. Under the lock."""
        for name, left in self._left.items():
            array = self.arrays[name]
            wanted = set(left)
            if array.size == size:
                wanted &= set(range(start * array.itemsize // CHUNK_BYTES, -(-stop * array.itemsize // CHUNK_BYTES)))
            self._keep(name, wanted)

    def drop(self) -> None:
        """Nothing more is read, and no update tells of itself any more."""
        self._saved.clear()

    def in_order(self, array: str) -> Iterator[bytes]:
        """The bytes of one of the arrays, once, from its beginning."""
        for block in range(-(-len(self._views[array]) // CHUNK_BYTES)):
            yield self._taken(array, block)

    def blocks(self) -> Iterator[CapturedBlock]:
        """All bytes, once, in no order."""
        while True:
            with self._lock:
                left = ((name, block) for name, blocks in self._left.items() for block in blocks)
                place = next(iter(self._saved), None) or next(left, None)
            if place is None:
                return
            name, block = place
            yield CapturedBlock(name, block * CHUNK_BYTES, self._taken(name, block))

    def _taken(self, name: str, block: int) -> bytes:
        """A block as it was, which is not to be kept any longer."""
        with self._lock:
            saved = self._saved.pop((name, block), None)
        if saved is None:
            copy = bytes(self._block(name, block))
            with self._lock:
                self._left[name].discard(block)
                saved = self._saved.pop((name, block), None)
            if saved is None:
                return copy
        return saved.read()  # an update came between: what it saved counts

    def _block(self, name: str, block: int) -> memoryview:
        return self._views[name][block * CHUNK_BYTES : (block + 1) * CHUNK_BYTES]


def blocks_of_rows(rows: npt.NDArray[np.int64], row_bytes: int, block_bytes: int) -> set[int]:
    """The blocks in which these rows, of so many bytes each, lie."""
    first, last = rows * row_bytes // block_bytes, ((rows + 1) * row_bytes - 1) // block_bytes
    pairs = set(zip(first.tolist(), last.tolist(), strict=True))
    return {block for low, high in pairs for block in range(low, high + 1)}


def _row_bytes(array: Array) -> int:
    """Of an index of the first axis."""
    return array.nbytes // array.shape[0] if array.ndim and array.shape[0] else max(array.nbytes, 1)
