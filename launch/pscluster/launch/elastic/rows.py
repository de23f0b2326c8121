"""Which rows of a dataset the members of an elastic run have: each row once an epoch, whoever comes and goes. Pure.

The rows of an epoch are numbered, in an order that all members know. A range of them is

    FREE   --take--------------------------------> LEASED   a few batches, to the member that asks
    LEASED --its member's report is committed----> DONE     those rows that the report says it was given
           --its member returns------------------> DONE     the same; the rest is FREE
           --its member is lost, or leaves-------> FREE     and left behind: given out once more, and counted then

An epoch is over when all its rows are DONE. Members may be in different epochs: one that finds no free row in its epoch
goes on to the lowest that has any, which is an earlier one if a member was lost that had rows of it.

What may be lost: nothing that is DONE. What a lost member had been given since its last report is given to others; so
is what it had leased and not come to, which can't be told apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.numbers.intervals import IntervalSet

MAX_BATCHES = 8
"""The most batches of a lease."""

Range: TypeAlias = Sequence[int]
"""An epoch, the first row, and the first after the last one."""


class Rows:
    """The rows of one dataset. Its owner serializes the calls."""

    def __init__(
        self, length: int, saved: Mapping[str, Any] | None = None, furthest: Mapping[str, Any] | None = None
    ) -> None:
        """Begin at a position that `state` has returned, where the run had once been at a later one, `furthest`.

        Raises:
            MisuseError: there are no rows.
            CheckpointMismatchError: the position is one of another dataset.
        """
        if length < 1:
            raise MisuseError("a dataset without rows can't be handed out: give one with rows, or none")
        self._coverage = EpochCoverage(length, length, saved)
        self._leased: defaultdict[int, defaultdict[int, IntervalSet]] = defaultdict(lambda: defaultdict(IntervalSet))
        self._behind: defaultdict[int, IntervalSet] = defaultdict(IntervalSet)  # FREE, and given out before
        self.again = 0  # rows that were given out once more
        if furthest is not None:
            self.again = int(furthest.get("again", 0))
            self._leave_behind_between(EpochCoverage(length, length, saved), EpochCoverage(length, length, furthest))

    def _leave_behind_between(self, saved: EpochCoverage, furthest: EpochCoverage) -> None:
        for epoch in range(saved.epoch, furthest.epoch):
            self._behind[epoch].add(0, furthest.length)
        for epoch, intervals in _visited(furthest).items():
            for interval in intervals:
                self._behind[epoch].add(*interval)
        for epoch, intervals in _visited(saved).items():
            self._behind[epoch].remove(intervals)

    @property
    def length(self) -> int:
        return self._coverage.length

    @property
    def epoch(self) -> int:
        """Return the lowest epoch that has rows to give out."""
        return self._coverage.unassigned_epoch

    @property
    def behind(self) -> int:
        """Return how many rows lost members have left behind that were not given out again."""
        return sum(stop - start for intervals in self._behind.values() for start, stop in intervals)

    def take(self, member: int, epoch: int, batch: int, members: int) -> tuple[int, int]:
        """Lease rows of an epoch to a member: the first, and the first after the last one; the same if there are none.

        Whole batches, as far as there are, and fewer towards the end, so that `members` come to it together.
        """

        def choose_stop(start: int) -> int:
            share = (self.length - start) // (2 * max(members, 1) * batch)
            return start + batch * min(max(share, 1), MAX_BATCHES)

        start, stop = self._coverage.take(epoch, choose_stop) or (0, 0)
        if stop > start:
            self._leased[member][epoch].add(start, stop)
            behind = self._behind[epoch]
            self.again += sum(max(min(stop, after) - max(start, first), 0) for first, after in behind)
            behind.remove([(start, stop)])
        return start, stop

    def check(self, member: int, given: Iterable[Range]) -> None:
        """Raise ProtocolError unless the member has leased these rows."""
        for epoch, start, stop in given:
            if not start < stop or not self._leased[member][epoch].covers(start, stop):
                raise ProtocolError(f"a member reports rows {start} to {stop} of epoch {epoch}, which it was not given")

    def done(self, member: int, given: Iterable[Range]) -> None:
        """Take note that these rows, which the member had leased, are done."""
        for epoch, start, stop in given:
            self._leased[member][epoch].remove([(start, stop)])
            self._coverage.commit(epoch, start, stop)

    def free(self, member: int, *, lost: bool) -> None:
        """Take back what a member has leased. `lost`: it may have been given some of that."""
        for epoch, intervals in self._leased.pop(member, {}).items():
            for start, stop in list(intervals):
                self._coverage.release(epoch, start, stop)
                if lost:
                    self._behind[epoch].add(start, stop)

    def state(self, given: Iterable[Range] = ()) -> dict[str, Any]:
        """Return the position, as plain data, as it is once these rows are done, too."""
        coverage = EpochCoverage(self.length, self.length, self._coverage.state())
        for epoch, start, stop in given:
            coverage.commit(epoch, start, stop)
        return {**coverage.state(), "again": self.again}


def _visited(coverage: EpochCoverage) -> dict[int, list[tuple[int, int]]]:
    return {
        int(epoch): [(start, stop) for start, stop in intervals]
        for epoch, intervals in coverage.state()["visited"].items()
    }
