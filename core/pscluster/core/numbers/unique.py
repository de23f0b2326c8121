"""Distinct elements of arrays, by sorting.

NumPy's `unique` without further results, and what is made of it (`union1d`, `setdiff1d`), hashes since 2.3: that takes
15 times as long for 4,096 integers of 64 bits, and 130 times for a million.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Element = TypeVar("_Element", bound=np.generic)


def sorted_unique(array: npt.NDArray[_Element]) -> npt.NDArray[_Element]:
    """Return the distinct elements of a one-dimensional array, rising."""
    ordered = np.sort(array)
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def without(array: npt.NDArray[_Element], others: npt.NDArray[_Element]) -> npt.NDArray[_Element]:
    """Return the distinct elements of a one-dimensional array that are not among the others, rising."""
    return np.setdiff1d(sorted_unique(array), sorted_unique(others), assume_unique=True)
