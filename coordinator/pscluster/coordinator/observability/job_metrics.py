"""What is counted of a job by its coordinator. See `pscluster.core.metrics.registry` for how."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from pscluster.coordinator.scheduling.scheduler import Task
from pscluster.core.metrics.registry import Histogram
from pscluster.core.metrics.trace import MAX_FUNCTIONS


class Attempt(NamedTuple):
    """One run of a function, from here. Times: seconds of `time.monotonic()`."""

    function: int
    name: str
    number: int
    worker: int
    scheduled: float
    sent: float
    end: float
    how: str  # "done", "failed", "failed, run again", "cancelled", or "lost" with its worker


class CoordinatorCounts:
    """Of one strategy.

    Attributes:
        dispatches: seconds from a function's schedule to its sending, of each time that it is sent.
        retried_lost, retried_failed: functions that run again since their worker died, or since they raised or ran too
            long.
        lock_waits, lock_seconds: outcomes' waits for the lock of the queue, and how long they took.
        checkpoints: seconds of each that was written.
        checkpoint_pauses: seconds for which no function ran for one.
        checkpoints_failed: those that could not be written.
        attempts: the last ones, for the timeline.
    """

    def __init__(self) -> None:
        self.dispatches = Histogram()
        self.retried_lost = self.retried_failed = 0
        self.lock_waits, self.lock_seconds = 0, 0.0
        self.checkpoints, self.checkpoint_pauses = Histogram(), Histogram()
        self.checkpoints_failed = 0
        self.attempts: deque[Attempt] = deque(maxlen=MAX_FUNCTIONS)

    def sent(self, tasks: Sequence[Task[Any]], now: float) -> None:
        """These were sent, in the order in which they were scheduled, nearly. Under the dispatcher's lock."""
        first, last = now - tasks[0].since, now - tasks[-1].since
        if last / 2 <= first <= 2 * last:
            self.dispatches.add_falling(first, last, len(tasks))
            return
        # The queue was short; or there are such among them that run again, which come first and are far older.
        for task in tasks:
            self.dispatches.add(now - task.since)

    def remember(self, task: Task[Any], name: str, worker: int, end: float, how: str) -> None:
        """Put a run of it on the record. Under the dispatcher's lock."""
        self.attempts.append(Attempt(task.id, name, task.attempts, worker, task.since, task.sent, end, how))
