"""Sets of whole numbers that grow mostly at one end: ended functions, visited examples."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A set of whole numbers, kept as disjoint, sorted, half-open intervals."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add start, start + 1, ..., stop - 1."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # the first interval that touches or follows
        after = bisect_right(self._starts, stop)
        if first < after:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[after - 1])
        self._starts[first:after] = [start]
        self._stops[first:after] = [stop]

    def remove(self, intervals: Iterable[tuple[int, int]]) -> None:
        """Remove the numbers in these half-open intervals."""
        for start, stop in intervals:
            first, after = bisect_right(self._stops, start), bisect_left(self._starts, stop)
            if first < after:
                low, high = self._starts[first], self._stops[after - 1]
                self._starts[first:after] = self._stops[first:after] = []
                self.add(low, start)
                self.add(stop, high)

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all of start, ..., stop - 1 are in it; stop must be above start."""
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and stop <= self._stops[index]

    def __contains__(self, number: int) -> bool:
        return self.covers(number, number + 1)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"
