"""Distinct elements, as NumPy gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pscluster.core.numbers.unique import sorted_unique, without


@pytest.mark.parametrize(
    "array",
    [
        np.array([], np.int64),
        np.array([7]),
        np.array([3, -1, 3, 2, -(2**63), 2**63 - 1, -1]),
        np.array([b"b", b"", b"ab", b"b", b"a"]),
    ],
)
def test_elements_are_those_of_numpy(array: npt.NDArray[Any]) -> None:
    assert sorted_unique(array).tolist() == np.unique(array).tolist()
    for others in (array[:0], array[1:3], array):
        assert without(array, others).tolist() == np.setdiff1d(array, others).tolist()
