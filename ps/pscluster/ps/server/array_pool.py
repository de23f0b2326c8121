"""The arrays that whole assignments leave, for the next ones.

Values that are assigned whole come in an array of their own; afterwards that one, or the one whose place it has taken,
is of no use. What goes back to malloc in one piece is seldom found there in one piece again: others have taken some of
it, so that a server would come to hold a third array.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class ArrayPool:
    """Arrays that nobody else has. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: list[Array] = []  # the oldest first
        self.nbytes = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """One of these, or else a new one. Its values are anything."""
        with self._lock:
            for number, array in enumerate(self._arrays):
                if array.shape == shape and array.dtype == dtype:
                    self.nbytes -= array.nbytes
                    return self._arrays.pop(number)
        return np.empty(shape, dtype)

    def keep(self, arrays: list[Array]) -> None:
        """Have those of them that nobody else has. The list is empty afterwards."""
        with self._lock:
            while arrays:
                array = arrays.pop()
                # This name, and the call's argument. A view, or a read under way, would be one more.
                if sys.getrefcount(array) == _ALONE and array.flags.c_contiguous and array.flags.owndata:
                    self._arrays.append(array)
                    self.nbytes += array.nbytes

    def shrink(self, nbytes: int) -> None:
        """Let go of the oldest, until the others have no more bytes than that."""
        with self._lock:
            while self.nbytes > max(nbytes, 0):
                self.nbytes -= self._arrays.pop(0).nbytes


def _alone() -> int:
    array = np.empty(0)
    return sys.getrefcount(array)


_ALONE = _alone()
