"""Arrays that whole assignments leave: taken again where nobody else has them."""

from __future__ import annotations

import numpy as np

from pscluster.core.transport.frames import view
from pscluster.ps.server.array_pool import Spares

FLOAT = np.dtype(np.float32)


def test_what_is_left_is_taken_again() -> None:
    """By who needs the same shape and type."""
    spares, array = Spares(), np.empty((4, 5), FLOAT)
    address = array.ctypes.data
    left = [array]
    del array
    spares.keep(left)
    assert left == []
    assert spares.nbytes == 80
    assert spares.take((5, 4), FLOAT).shape == (5, 4)
    assert spares.take((4, 5), np.dtype(np.int32)).dtype == np.int32
    assert spares.nbytes == 80
    assert spares.take((4, 5), FLOAT).ctypes.data == address
    assert spares.nbytes == 0
    assert spares.take((4, 5), FLOAT).shape == (4, 5)


def test_what_somebody_else_has_is_not() -> None:
    """The array, a view of it, its memory, or another one's memory."""
    spares = Spares()
    array = np.empty(5, FLOAT)
    spares.keep([array])
    whole = np.empty(5, FLOAT)
    rest = whole[1:]
    left = [whole]
    del whole
    spares.keep(left)
    other = np.empty(5, FLOAT)
    memory = view(other)
    left = [other]
    del other
    spares.keep(left)
    spares.keep([np.frombuffer(bytearray(20), FLOAT)])
    assert spares.nbytes == 0
    assert (len(rest), len(memory)) == (4, 20)
    twice = np.empty(5, FLOAT)
    left = [twice, twice]
    del twice
    spares.keep(left)
    assert spares.nbytes == 20, "one of the two is the last"


def test_the_oldest_go_first() -> None:
    """Until there is no more than that."""
    spares = Spares()
    for size in (1, 2, 3):
        spares.keep([np.empty(size, FLOAT)])
    spares.shrink(20)
    assert spares.nbytes == 20
    spares.shrink(19)
    assert spares.nbytes == 12
    assert spares.take((3,), FLOAT).size == 3
    spares.keep([np.empty(3, FLOAT)])
    spares.shrink(-1)
    assert spares.nbytes == 0
