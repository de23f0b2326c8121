"""What is committed of large variables: old values, their change and what is missing make the new values."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pscluster.ps.client.block_copies import _AT_ONCE, _difference


@pytest.mark.parametrize("width", [32, 64])
@given(data=st.data())
def test_the_new_values_are_exact(width: Literal[32, 64], data: st.DataObject) -> None:
    dtype = np.dtype(f"f{width // 8}")
    numbers = st.one_of(
        st.floats(-2, 2, width=width),
        st.floats(-(2.0**60), 2.0**60, width=width),
        st.sampled_from([float("inf"), float("-inf"), 0.0]),
    )
    old = data.draw(hnp.arrays(dtype, st.integers(0, 40), elements=numbers))
    new = data.draw(hnp.arrays(dtype, len(old), elements=numbers))
    new = np.where(np.isinf(old), old, new)  # what is infinite stays so, or becomes NaN
    before, change = old.copy(), np.empty_like(old)
    places, remainder = _difference(new, before, change)
    assert np.array_equal(before, new), "they are the old ones of the next change"
    made = old + change
    made[places] += remainder
    assert np.array_equal(made, new)


def test_places_count_from_the_beginning() -> None:
    new, old = np.zeros(2 * _AT_ONCE + 3), np.zeros(2 * _AT_ONCE + 3)
    old[[5, -1]], new[[5, -1]] = 1.0, 1e-20
    places, remainder = _difference(new, old, np.empty_like(new))
    assert places.tolist() == [5, len(new) - 1]
    assert remainder.tolist() == [1e-20, 1e-20]


def test_what_is_no_number_stays_none() -> None:
    old, new = np.array([1.0, np.nan, 1.0]), np.array([np.nan, np.nan, np.inf])
    change = np.empty(3)
    places, _ = _difference(new, old.copy(), change)
    assert not len(places)
    assert np.array_equal(old + change, new, equal_nan=True)
