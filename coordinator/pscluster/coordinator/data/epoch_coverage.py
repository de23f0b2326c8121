"""Which examples of which epochs were given out, and which were visited: every decision about it. Pure.

An epoch is the numbers 0 to length - 1: places in its order, which the workers know. A range of them goes through

    UNTOUCHED --take--> GIVEN --commit--> VISITED
    GIVEN --release--> UNTOUCHED        its function failed, or was cancelled

and all that a checkpoint needs to hold is what was visited: what was only given out is given out again by whoever goes
on. `load` forgets what was given. Epochs overlap: the next one may be begun while functions of the last one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pscluster.core.errors import CheckpointMisfitError
from pscluster.core.intervals import IntervalSet


class EpochCoverage:
    """Track the epochs of one dataset. Its owner serialises the calls.

    Args:
        length: examples an epoch.
        kept: so many of them are visited, the first ones; the rest is dropped (an incomplete last batch).
    """

    def __init__(self, length: int, kept: int) -> None:
        assert kept > 0, "an epoch of nothing would never be given out, and be over at once"
        self.length = length
        self.kept = kept
        self.epoch = 0  # all before it are wholly visited
        self._visited: dict[int, IntervalSet] = {}
        self._given: dict[int, IntervalSet] = {}

    # What there is

    def visited(self, epoch: int) -> int:
        """How many examples of that epoch were visited."""
        return self.kept if epoch < self.epoch else _size(self._visited.get(epoch))

    @property
    def unfinished(self) -> int:
        """The first epoch of which not all was given out."""
        epoch = self.epoch
        while epoch in self._given and self._given[epoch].covers(0, self.kept):
            epoch += 1
        return epoch

    # What happens

    def take(self, epoch: int, stop_of: Callable[[int], int]) -> tuple[int, int] | None:
        """The next range of the epoch, which ends where `stop_of` its start says; None if there is none up to there."""
        if epoch < self.epoch:
            return None
        given = self._given.setdefault(epoch, IntervalSet())
        start, stop = 0, self.kept
        for first, after in given:
            if start < first:
                stop = first
                break
            start = after
        if start >= stop:
            return None
        stop = min(stop, stop_of(start))
        if start >= stop:
            return None
        given.add(start, stop)
        return start, stop

    def commit(self, epoch: int, start: int, stop: int) -> None:
        """That range was visited."""
        if epoch < self.epoch:
            return
        self._visited.setdefault(epoch, IntervalSet()).add(start, stop)
        given = self._given.setdefault(epoch, IntervalSet())
        if not given.covers(start, stop):  # it was released by another function
            given.add(start, stop)
        while self.epoch in self._visited and self._visited[self.epoch].covers(0, self.kept):
            self._visited.pop(self.epoch)
            self._given.pop(self.epoch, None)
            self.epoch += 1

    def release(self, epoch: int, start: int, stop: int) -> None:
        """That range was not visited, and will not be by whom it was given to."""
        given = self._given.get(epoch)
        if given is None:
            return
        left = self._given[epoch] = IntervalSet()
        for first, after in given:
            left.add(first, min(after, start))
            left.add(max(first, stop), after)
        for first, after in self._visited.get(epoch, ()):
            left.add(first, after)

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """What was visited, as JSON holds it."""
        visited = {str(epoch): [list(each) for each in found] for epoch, found in sorted(self._visited.items())}
        return {"length": self.length, "epoch": self.epoch, "visited": visited}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            CheckpointMisfitError: it is of a dataset of another length, or no position; nothing has changed then.
        """
        try:
            epoch, found = int(state["epoch"]), _checked(state["visited"])
            length = state["length"]
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointMisfitError(f"the saved data is not a position of a dataset: {error!r:.200}") from None
        if length != self.length:
            raise CheckpointMisfitError(
                f"the saved position is of a dataset with {length} examples, and this one has "
                f"{self.length:,}: give it another name to start at its beginning"
            )
        self.epoch, self._visited, self._given = epoch, {}, {}
        for number, intervals in found.items():
            visited, given = IntervalSet(), IntervalSet()
            for start, stop in intervals:
                visited.add(start, min(stop, self.kept))
                given.add(start, min(stop, self.kept))
            self._visited[number], self._given[number] = visited, given
        self.commit(self.epoch, 0, 0)  # with a larger batch size less is kept: that may have been all


def _checked(visited: Mapping[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """By epoch, the intervals that were visited. ValueError if they are none."""
    found = {}
    for epoch, intervals in visited.items():
        found[int(epoch)] = [(start, stop) for start, stop in intervals]
        if not all(type(start) is type(stop) is int and start >= 0 for start, stop in found[int(epoch)]):
            raise ValueError(f"{intervals!r:.80} are no intervals")
    return found


def _size(intervals: IntervalSet | None) -> int:
    return 0 if intervals is None else sum(stop - start for start, stop in intervals)
