"""A shard whole, values, slots and averages, as it was at one moment, read in blocks while updates go on.

Copy-on-write, as `Snapshot` is for what clients read: an update first saves, under the shard's lock, the blocks which
it is about to change and which have not been read yet. Saved blocks are given out first, so that their memory is free
again soon. Nobody waits for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.frames import CHUNK_BYTES, view

Array = npt.NDArray[Any]


class CapturedBlock(NamedTuple):
    """Some bytes of one of the arrays."""

    array: str
    offset: int
    data: bytes


class Capture:
    """The arrays of a shard, by name, as they were when this was made. Made, and told of changes, under its lock."""

    def __init__(self, arrays: Mapping[str, Array], lock: threading.Lock) -> None:
        self.arrays = dict(arrays)
        self._lock = lock
        self._views = {name: view(array) for name, array in arrays.items()}
        self._rows = {name: _row_bytes(array) for name, array in arrays.items()}
        self._left = {name: set(range(-(-len(data) // CHUNK_BYTES))) for name, data in self._views.items()}
        self._saved: dict[tuple[str, int], bytes] = {}

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
            for block in wanted:
                self._saved[name, block] = bytes(self._views[name][block * CHUNK_BYTES : (block + 1) * CHUNK_BYTES])
                left.discard(block)

    def in_order(self, array: str) -> Iterator[bytes]:
        """The bytes of one of the arrays, once, from its beginning."""
        data = self._views[array]
        for block in range(-(-len(data) // CHUNK_BYTES)):
            with self._lock:
                saved = self._saved.pop((array, block), None)
            if saved is None:
                copy = bytes(data[block * CHUNK_BYTES : (block + 1) * CHUNK_BYTES])
                with self._lock:
                    self._left[array].discard(block)
                    saved = self._saved.pop((array, block), copy)
            yield saved

    def blocks(self) -> Iterator[CapturedBlock]:
        """All bytes, once, in no order."""
        while True:
            with self._lock:
                if self._saved:
                    (name, block), data = self._saved.popitem()
                else:
                    name, block = next(((n, next(iter(left))) for n, left in self._left.items() if left), ("", -1))
                    data = b""
            if block < 0:
                return
            if not data:
                data = bytes(self._views[name][block * CHUNK_BYTES : (block + 1) * CHUNK_BYTES])
                with self._lock:
                    self._left[name].discard(block)
                    data = self._saved.pop((name, block), data)  # an update came between: what it saved counts
            yield CapturedBlock(name, block * CHUNK_BYTES, data)


def blocks_of_rows(rows: npt.NDArray[np.int64], row_bytes: int, block_bytes: int) -> set[int]:
    """The blocks in which these rows, of so many bytes each, lie."""
    first, last = rows * row_bytes // block_bytes, ((rows + 1) * row_bytes - 1) // block_bytes
    pairs = set(zip(first.tolist(), last.tolist(), strict=True))
    return {block for low, high in pairs for block in range(low, high + 1)}


def _row_bytes(array: Array) -> int:
    """Of an index of the first axis."""
    return array.nbytes // array.shape[0] if array.ndim and array.shape[0] else max(array.nbytes, 1)
