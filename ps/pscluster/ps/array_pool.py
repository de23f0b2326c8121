"""Memory for arrays: aligned, and that of arrays no longer in use, for new ones of the same form."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CACHE_LINE = 64  # bytes: what XLA wants arrays aligned to, to use their memory as it is
_LARGE_PAGE = 2 << 20
UNALIGNED_BYTES = 64 << 10  # in arrays of fewer, since a copy of these takes no longer than to align them


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any], *, lasting: bool = False) -> Array:
    """Return a new array that begins at a cache line, unless it is small. Its values are undefined.

    NumPy's own large arrays begin 16 bytes after a page, and JAX copies those that it is given. On a server, their
    rows would begin and end within cache lines: to write some takes half as long if they don't. A large one that is
    `lasting` begins at a large page, for which NumPy asks the system: all of it then lies in such pages.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < UNALIGNED_BYTES:
        return np.empty(shape, dtype)
    unit = _unit(size, lasting)
    return _aligned(np.empty(size + unit, np.uint8), size, unit).view(dtype).reshape(shape)


def aligned_full(shape: tuple[int, ...], fill: float, dtype: np.dtype[Any]) -> Array:
    """Return a lasting array with one value everywhere. Memory for zeros is taken only as they are changed."""
    size = math.prod(shape) * dtype.itemsize
    if fill or size < UNALIGNED_BYTES:
        array = aligned_empty(shape, dtype, lasting=True)
        array.fill(fill)
        return array
    unit = _unit(size, lasting=True)
    return _aligned(np.zeros(size + unit, np.uint8), size, unit).view(dtype).reshape(shape)


def _unit(size: int, lasting: bool) -> int:
    """Return what the address of an array of `size` bytes is to be a multiple of."""
    return _LARGE_PAGE if lasting and size >= 4 * _LARGE_PAGE else CACHE_LINE


def _aligned(memory: Array, size: int, unit: int) -> Array:
    """Return `size` bytes of this memory, which has `unit` more, from an address that is a multiple of that on."""
    start = -memory.ctypes.data % unit
    return memory[start : start + size]


class ArrayPool:
    """Arrays that are no longer needed, for reuse. Thread-safe.

    New memory costs as much as a copy of it. On a server there is another reason: the values of a whole assignment are
    received into a separate array; afterwards either that array or the one it replaced is unused. If it were freed,
    malloc would rarely have the same block in one piece for the next assignment, because other allocations take some
    of it, and the server would come to hold a third array.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: list[Array] = []  # the oldest first
        self.nbytes = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a pooled array, or else a new one. Its values are undefined."""
        with self._lock:
            for index, array in enumerate(self._arrays):
                if array.shape == shape and array.dtype == dtype:
                    self.nbytes -= array.nbytes
                    return self._arrays.pop(index)
        return aligned_empty(shape, dtype, lasting=True)

    def put(self, arrays: list[Array]) -> None:
        """Empty the list, and pool those of its arrays that are not in use elsewhere."""
        with self._lock:
            while arrays:
                if (array := pop_unused(arrays)) is not None:
                    self._arrays.append(array)
                    self.nbytes += array.nbytes

    def shrink(self, nbytes: int) -> None:
        """Free the oldest arrays until the rest take no more than `nbytes`."""
        with self._lock:
            while self.nbytes > max(nbytes, 0):
                self.nbytes -= self._arrays.pop(0).nbytes


def pop_unused(arrays: list[Array]) -> Array | None:
    """Remove the last array of a list; return it if it has no other references, and its memory can be used again."""
    array = arrays.pop()
    # The name and the call's argument count; a view, or a read in progress, would add one.
    if sys.getrefcount(array) != _UNSHARED:
        return None
    flags, memory = array.flags, array.base
    if memory is not None:  # of `aligned_empty`: all views of the array have this base, too
        own = type(memory) is np.ndarray and memory.flags.owndata and memory.nbytes - array.nbytes <= _LARGE_PAGE
        unused = own and sys.getrefcount(memory) == _UNSHARED + 1
    else:
        unused = flags.owndata
    return array if unused and flags.c_contiguous and flags.writeable else None


def _unshared() -> int:
    array = np.empty(0)
    return sys.getrefcount(array)


_UNSHARED = _unshared()
