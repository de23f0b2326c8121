"""Memory in which the kernels work: buffers that a thread uses again, and rows seen as opaque items."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np

from pscluster.ps.optim.rule import Array

_LINE = 64
"""Bytes of a cache line; also elements, so that arrays of any type that follow each other begin with one."""


def items_of(table: Array) -> Array:
    """Return the rows of a table as opaque items, shape (rows,). Each is contiguous; they may lie apart."""
    items: Array = table.view(_item(table.shape[1] * table.itemsize))[:, 0]
    return items


@functools.lru_cache(maxsize=256)
def _item(size: int) -> np.dtype[np.void]:
    return np.dtype((np.void, size))


class Workspace(threading.local):
    """This thread's buffers, each as large as its largest use so far, reused by every call."""

    def __init__(self) -> None:
        self._buffers: list[Array] = []
        self._used = 0

    def begin(self) -> None:
        """Begin a call, in which no buffer is in use yet."""
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array, valid until the next `begin`."""
        size = math.prod(shape) * dtype.itemsize
        if self._used == len(self._buffers):
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[self._used].size < size:
            memory = np.empty(size + _LINE, np.uint8)
            start = -memory.ctypes.data % _LINE
            self._buffers[self._used] = memory[start : start + size]
        buffer = self._buffers[self._used]
        self._used += 1
        return buffer[:size].view(dtype).reshape(shape)

    def arrays(self, count: int, size: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return this many uninitialized flat arrays of one size, each from a cache line on: faster than one by one."""
        room = size + -size % _LINE + _LINE  # one more, so that those of 64 KiB don't compete for places in the cache
        return [row[:size] for row in self.array((count, room), dtype)]


workspace = Workspace()
