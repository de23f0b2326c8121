"""Sets of whole numbers as intervals."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given, settings

from pscluster.core.numbers.intervals import IntervalSet

TOP = 40

intervals = st.tuples(st.integers(-3, TOP), st.integers(-3, TOP))


@given(st.lists(st.tuples(intervals, st.booleans()), max_size=30))
def test_an_interval_set_holds_what_a_set_would(changes: list[tuple[tuple[int, int], bool]]) -> None:
    """Whatever is added and removed in any order, membership is that of a set, in the shortest form."""
    intervals, expected = IntervalSet(), set[int]()
    for (start, stop), added in changes:
        if added:
            intervals.add(start, stop)
            expected.update(range(start, stop))
        else:
            intervals.remove([(start, stop)])
            expected.difference_update(range(start, stop))
        assert {number for number in range(-5, TOP + 5) if number in intervals} == expected
        pairs = list(intervals)
        assert {number for low, high in pairs for number in range(low, high)} == expected
        assert all(low < high for low, high in pairs), "none is empty"
        assert all(high < low for (_, high), (low, _) in itertools.pairwise(pairs)), "none touch"


@given(st.permutations(range(200)))
@settings(max_examples=20)
def test_numbers_without_a_gap_are_one_interval(order: list[int]) -> None:
    """Functions that end in any order are finally one interval."""
    intervals = IntervalSet()
    for number in order:
        intervals.add(number, number + 1)
    assert list(intervals) == [(0, 200)]
