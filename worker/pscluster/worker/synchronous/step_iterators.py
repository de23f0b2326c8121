"""The iterators that the steps of one replica take elements from, whose positions go with its steps."""

from __future__ import annotations

from collections.abc import Mapping

from pscluster.worker.data.per_worker import WorkerIterator
from pscluster.worker.job import Job


class StepIterators:
    """Those of one replica, in one attempt. What a step takes is given again until it is confirmed."""

    def __init__(self) -> None:
        self._iterators: dict[int, WorkerIterator] = {}
        self.before: dict[int, int] = {}
        """By iterator, how many elements it had given before the last step."""
        self.ahead: dict[int, int] = {}
        """By iterator, how many of the elements that it has given are for later steps."""

    def take_from(self, iterator: WorkerIterator) -> None:
        """Note that a step has taken an element from an iterator."""
        if (key := int(iterator.handle_key)) not in self._iterators:
            self._iterators[key] = iterator
            self.before[key] = iterator.given - 1

    @property
    def given(self) -> dict[int, int]:
        """By iterator, how many elements it has given to steps so far."""
        return {key: iterator.given - self.ahead.get(key, 0) for key, iterator in self._iterators.items()}

    def begin(self) -> None:
        """Note that a step begins."""
        self.before = self.given

    def confirm(self, positions: Mapping[int, int] | None = None) -> None:
        """Note that what the steps took is not given again: all of it, or what is before these positions."""
        for key, iterator in self._iterators.items():
            iterator.confirm(None if positions is None else positions[key])

    def rewind(self) -> None:
        """Give again what was taken since the last step that was confirmed."""
        for iterator in self._iterators.values():
            iterator.rewind()

    def move(self, job: Job, rank: int, positions: Mapping[int, int], *, back: bool) -> None:
        """Move the iterators of a replica here to these positions: forward, as after a restart, or also `back`."""
        for key, position in positions.items():
            iterator = job.iterator_of(key, rank)
            if iterator is not None and (back or iterator.given < position):
                iterator.seek(position)
                self._iterators[key] = iterator
