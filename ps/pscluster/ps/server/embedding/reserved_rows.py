"""Arrays of rows that grow where they are, in address space that is reserved for all the rows they may get.

The system gives memory where it is written only. So an array of a table's rows is a view of the first ones of a
reservation, and gets more of them as another view of the same: nothing is copied, at no moment is there a second array,
and views that snapshots hold stay valid. Fewer rows give no memory back: the next ones use it again.

A reservation takes address space, of which a process has 128 TiB, no memory, and none of what the system promises
(MAP_NORESERVE). It is as large as the machine's memory at most. Where the system refuses even that, because address
space is limited (`ulimit -v`) or nothing may be promised twice (`vm.overcommit_memory=2`), it is smaller, and once it
is full the rows are copied into another one of twice the size.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_NORESERVE = 0x4000 if os.uname().sysname == "Linux" else 0
"""`MAP_NORESERVE`, which Python's mmap does not name before 3.13."""

_LARGE = 4 << 20
"""Bytes in use from which on pages may be large: a small table is not to take several."""


def resized(array: Array, rows: int, limit: int) -> Array:
    """Return the array, of shape (n, width), with this many rows, the first of which are its own.

    Rows that are new have any values. `limit` is how many it may ever get. MemoryError if there is too little.
    """
    space = reservation_of(array)
    if space is None or rows > len(space):
        least = max(rows, min(2 * len(array), limit)) if space is not None else rows
        larger = _reserve(least, limit, array.shape[1], array.dtype)
        kept = min(len(array), rows)
        larger[:kept] = array[:kept]
        space = larger
    if array.nbytes < _LARGE <= rows * space.shape[1] * space.itemsize:
        _use_large_pages(space)
    return space[:rows]


def reserved(limit: int, width: int, dtype: np.dtype[Any]) -> Array:
    """Return an array of no rows that may get as many as `limit`."""
    return _reserve(0, limit, width, dtype)[:0]


def reservation_of(array: Array) -> Array | None:
    """Return all rows that are reserved for an array that `resized` or `reserved` has made; None for another one."""
    flat = array.base
    if not isinstance(flat, np.ndarray) or array.ndim != 2:
        return None
    owner: Any = flat.base
    if not isinstance(owner, memoryview) or not isinstance(owner.obj, mmap.mmap):
        return None
    space: Array = flat.reshape(-1, array.shape[1])
    return space


def _reserve(least: int, limit: int, width: int, dtype: np.dtype[Any]) -> Array:
    row = width * dtype.itemsize
    least = max(least, 2)  # an index looks at the last ones for ids that have no row
    rows = max(min(limit, _memory() // row), least)
    while True:
        try:
            space = mmap.mmap(-1, rows * row, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
            break
        except (OSError, ValueError, OverflowError):
            if rows == least:
                raise MemoryError(f"{rows * row:,} bytes") from None
            rows = max(rows // 2, least)
    return np.frombuffer(space, dtype).reshape(rows, width)


def _use_large_pages(space: Array) -> None:
    """Have the system give memory in large pages, as NumPy does for large arrays: rows are found in any order."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            space.base.base.obj.madvise(mmap.MADV_HUGEPAGE)  # type: ignore[union-attr]


@functools.cache
def _memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
