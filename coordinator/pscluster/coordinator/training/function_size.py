"""How many steps one function of a training takes: as given, or as few as cost little beside their steps."""

from __future__ import annotations

import time
from collections import deque
from typing import Literal

from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.training.feed import Feed
from pscluster.coordinator.training.plan import DISPATCH_SECONDS, MEASURED, Overhead, best_size, most_ahead


class FunctionSize:
    """Sets the size of a feed's functions. With "auto" it follows from what steps and functions are measured to take.

    MEASURING --enough functions of one step have ended--> CHOSEN, from a typical overhead
    CHOSEN    --the overhead is measured--> CHOSEN anew, or FINAL if it would hardly change
    """

    def __init__(self, steps: int | Literal["auto"], feed: Feed, context: JobContext) -> None:
        self._steps, self._feed, self._context = steps, feed, context
        self._dispatch_seconds = DISPATCH_SECONDS
        self._step_seconds: deque[float] = deque(maxlen=max(64, 2 * self._workers))
        self._function_seconds: float | None = None
        self._chosen = self._final = steps != "auto"
        self._overhead = Overhead(self._workers)

    @property
    def _workers(self) -> int:
        return max(len(self._context.workers), 1)

    def begin_epoch(self, resumed: bool) -> None:
        """Choose the size at an epoch's begin. A resumed one keeps its cuts: parts may be handed out."""
        keep_cuts = resumed and self._feed.data is not None
        self._final = keep_cuts or self._steps != "auto"
        self._chosen = self._final or len(self._step_seconds) >= MEASURED
        if keep_cuts:
            return
        if self._steps != "auto":
            self._feed.resize(self._steps)
        elif self._chosen:
            best, current = self._best(), self._feed.size()
            if not current / 2 < best < current * 2:
                self._feed.resize(best)
            self._overhead.begin(time.monotonic(), time.process_time())

    def most_ahead(self) -> int:
        """Return how many functions to schedule ahead."""
        # Until the size is chosen, only as many as are measured: the rest would be too small.
        return most_ahead(self._function_seconds if self._chosen else None, self._workers)

    def measure(self, seconds: float, steps: int) -> None:
        """Note that a function of `steps` steps took `seconds` seconds; 0 steps if its data had ended."""
        self._function_seconds = seconds
        if steps:
            self._step_seconds.append(seconds / steps)

    def adjust(self, worker: int, begin: float, end: float) -> bool:
        """Choose the size, if the function that ran from `begin` to `end` makes it known; return whether it changed."""
        if self._final:
            return False
        now, cpu = time.monotonic(), time.process_time()
        if not self._chosen:
            if len(self._step_seconds) < max(MEASURED, 2 * self._workers):
                return False
            self._chosen = True
            self._overhead.begin(now, cpu)
        else:
            overhead = self._overhead.add(worker, begin, end, now, cpu)
            if overhead is None:
                return False
            self._dispatch_seconds = overhead
            self._final = self._best() < 1.5 * self._feed.size()
        return not self._final and self._feed.resize(self._best())

    def _best(self) -> int:
        return best_size(self._step_seconds, self._dispatch_seconds, self._feed.per_epoch, self._workers)
