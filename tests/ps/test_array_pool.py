"""The pool of arrays that whole assignments leave: reused only without other references."""

from __future__ import annotations

import numpy as np

from pscluster.core.transport.frames import view
from pscluster.ps.array_pool import CACHE_LINE, UNALIGNED_BYTES, ArrayPool, aligned_empty, aligned_full

FLOAT = np.dtype(np.float32)


def test_what_is_left_is_taken_again() -> None:
    """For the same shape and type."""
    pool, array = ArrayPool(), np.empty((4, 5), FLOAT)
    address = array.ctypes.data
    left = [array]
    del array
    pool.put(left)
    assert left == []
    assert pool.nbytes == 80
    assert pool.take((5, 4), FLOAT).shape == (5, 4)
    assert pool.take((4, 5), np.dtype(np.int32)).dtype == np.int32
    assert pool.nbytes == 80
    assert pool.take((4, 5), FLOAT).ctypes.data == address
    assert pool.nbytes == 0
    assert pool.take((4, 5), FLOAT).shape == (4, 5)


def test_what_somebody_else_has_is_not() -> None:
    """The array, a view of it, its memory, or another one's memory."""
    pool = ArrayPool()
    array = np.empty(5, FLOAT)
    pool.put([array])
    whole = np.empty(5, FLOAT)
    rest = whole[1:]
    left = [whole]
    del whole
    pool.put(left)
    other = np.empty(5, FLOAT)
    memory = view(other)
    left = [other]
    del other
    pool.put(left)
    pool.put([np.frombuffer(bytearray(20), FLOAT)])
    assert pool.nbytes == 0
    assert (len(rest), len(memory)) == (4, 20)
    twice = np.empty(5, FLOAT)
    left = [twice, twice]
    del twice
    pool.put(left)
    assert pool.nbytes == 20, "one of the two is the last"


def test_large_arrays_begin_at_cache_lines() -> None:
    """New ones, at large pages if they last, and the pool's, which takes none of which somebody has a view."""
    pool, shape = ArrayPool(), (UNALIGNED_BYTES // 8, 2)
    arrays = [aligned_empty(shape, FLOAT), aligned_full(shape, 0, FLOAT), aligned_full(shape, 3, FLOAT)]
    addresses = [array.ctypes.data for array in (*arrays, pool.take(shape, FLOAT))]
    assert [address % CACHE_LINE for address in addresses] == [0] * 4
    assert [float(array.min()) for array in arrays[1:]] == [float(array.max()) for array in arrays[1:]] == [0, 3]
    assert [aligned_full((4 << 20, 1), fill, FLOAT).ctypes.data % (2 << 20) for fill in (0, 1)] == [0, 0]
    rest, memory = arrays[1][1:], view(arrays[2])
    pool.put(arrays)
    assert pool.nbytes == UNALIGNED_BYTES, "only the first has no view"
    assert pool.take(shape, FLOAT).ctypes.data == addresses[0]
    assert (len(rest), len(memory)) == (shape[0] - 1, UNALIGNED_BYTES)


def test_the_oldest_go_first() -> None:
    """Until the rest takes no more than the limit."""
    pool = ArrayPool()
    for size in (1, 2, 3):
        pool.put([np.empty(size, FLOAT)])
    pool.shrink(20)
    assert pool.nbytes == 20
    pool.shrink(19)
    assert pool.nbytes == 12
    assert pool.take((3,), FLOAT).size == 3
    pool.put([np.empty(3, FLOAT)])
    pool.shrink(-1)
    assert pool.nbytes == 0
