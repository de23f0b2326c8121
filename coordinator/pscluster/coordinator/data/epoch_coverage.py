"""Which items of which epochs are assigned to functions, and which have been visited. Pure.

An epoch's items (examples, or files) are numbered 0 to length - 1, in an order that the workers know. A range of them
goes through

    FREE --take--> ASSIGNED --commit--> VISITED
    ASSIGNED --release--> FREE        its function failed, or was cancelled

A checkpoint holds only what was visited: the coordinator that resumes assigns the rest again, and `load` forgets all
assignments. Epochs overlap: the next one may begin while functions of the last one run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from pscluster.coordinator.data.file_lists import FileList
from pscluster.core.errors import CheckpointMismatchError
from pscluster.core.numbers.intervals import IntervalSet


class EpochCoverage:
    """The coverage of one dataset's epochs. Its owner serializes the calls.

    Of an epoch's `length` items, the first `used` are visited; the others are an incomplete last batch. `files` are
    saved with it, if it has some, and must be the same when it is loaded.
    """

    def __init__(
        self, length: int, used: int, state: Mapping[str, Any] | None = None, files: FileList | None = None
    ) -> None:
        assert used > 0, "an empty epoch would never be assigned, and so would be over at once"
        self.length = length
        self.used = used
        self.files = files
        self.epoch = 0  # all epochs before it have been visited completely
        self._visited: defaultdict[int, IntervalSet] = defaultdict(IntervalSet)
        self._assigned: defaultdict[int, IntervalSet] = defaultdict(IntervalSet)  # visited items included
        if state is not None:
            self.load(state)

    def visited(self, epoch: int) -> int:
        return self.used if epoch < self.epoch else sum(stop - start for start, stop in self._visited[epoch])

    def visited_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of items of the current epoch that were visited."""
        return list(self._visited[self.epoch])

    @property
    def unassigned_epoch(self) -> int:
        return next(epoch for epoch in itertools.count(self.epoch) if not self._assigned[epoch].covers(0, self.used))

    def take(self, epoch: int, choose_stop: Callable[[int], int]) -> tuple[int, int] | None:
        """Assign the epoch's next range, which ends where `choose_stop(start)` says; None if there is none."""
        if epoch < self.epoch:
            return None
        start, stop = 0, self.used
        for first, after in self._assigned[epoch]:
            if start < first:
                stop = first
                break
            start = after
        if start >= stop or (stop := min(stop, choose_stop(start))) <= start:
            return None
        self._assigned[epoch].add(start, stop)
        return start, stop

    def commit(self, epoch: int, start: int, stop: int) -> None:
        if epoch < self.epoch:
            return
        self._visited[epoch].add(start, stop)
        self._assigned[epoch].add(start, stop)  # another function may have released it
        while self._visited[self.epoch].covers(0, self.used):
            del self._visited[self.epoch], self._assigned[self.epoch]
            self.epoch += 1

    def release(self, epoch: int, start: int, stop: int) -> None:
        """Free the range, except what another function has visited of it."""
        if epoch >= self.epoch:
            self._assigned[epoch].remove([(start, stop)])
            for visited in self._visited[epoch]:
                self._assigned[epoch].add(*visited)

    def state(self) -> dict[str, Any]:
        visited = {str(epoch): list(map(list, intervals)) for epoch, intervals in sorted(self._visited.items())}
        state = {"length": self.length, "epoch": self.epoch, "visited": visited}
        return state if self.files is None else {**state, "files": self.files.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. CheckpointMismatchError, with nothing changed, if it is not this dataset's."""
        try:
            epoch, length = int(state["epoch"]), state["length"]
            visited = [(int(key), *interval) for key, intervals in state["visited"].items() for interval in intervals]
            if not all(type(start) is type(stop) is int and start >= 0 for _, start, stop in visited):
                raise ValueError("these are not intervals")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointMismatchError(f"the saved data is not a position of a dataset: {error!r:.200}") from None
        if self.files is not None and "files" in state:
            self.files.check(state["files"])
        if length != self.length:
            raise CheckpointMismatchError(
                f"the saved position is of a dataset with {length} examples, and this one has "
                f"{self.length:,}: give it another name to start at its beginning"
            )
        self.epoch = epoch
        self._visited.clear()
        self._assigned.clear()
        for visited_epoch, start, stop in visited:
            self.commit(visited_epoch, start, min(stop, self.used))  # a larger batch size may use fewer
