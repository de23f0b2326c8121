"""Memory in which the kernels work: buffers that a thread uses again, and rows seen as opaque items."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np

from pscluster.ps.optim.rule import Array


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
            memory = np.empty(size + 64, np.uint8)
            start = -memory.ctypes.data % 64  # a cache line
            self._buffers[self._used] = memory[start : start + size]
        buffer = self._buffers[self._used]
        self._used += 1
        return buffer[:size].view(dtype).reshape(shape)


workspace = Workspace()
