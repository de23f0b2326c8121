"""The metrics that the coordinator counts. See `pscluster.core.metrics.registry` for how."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.core.metrics.registry import Histogram
from pscluster.core.metrics.trace import MAX_FUNCTIONS


class Attempt(NamedTuple):
    """One run of a function, as the coordinator sees it. Times: seconds of `time.monotonic()`."""

    function: int
    name: str
    number: int
    worker: int
    scheduled: float
    sent: float
    end: float
    how: str  # "done", "failed", "failed, run again", "cancelled", or "lost" with its worker


@dataclass(eq=False)
class CoordinatorMetrics:
    """The metrics of one strategy."""

    dispatches: Histogram = field(default_factory=Histogram)  # seconds from a function's schedule to each sending
    retried_lost: int = 0  # functions that were run again because their worker died
    retried_failed: int = 0  # functions that were run again because they raised or timed out
    lock_waits: int = 0  # how often outcomes waited for the queue's lock
    lock_seconds: float = 0.0  # for how long in all
    checkpoints: Histogram = field(default_factory=Histogram)  # seconds that each took
    checkpoint_pauses: Histogram = field(default_factory=Histogram)  # seconds without functions, for each
    checkpoints_failed: int = 0  # that could not be written
    attempts: deque[Attempt] = field(default_factory=lambda: deque(maxlen=MAX_FUNCTIONS))  # the latest

    def sent(self, tasks: Sequence[Task[Any]], now: float) -> None:
        """Count tasks as sent, in about the order of their schedule. Under the dispatcher's lock."""
        first, last = now - tasks[0].since, now - tasks[-1].since
        if last / 2 <= first <= 2 * last:
            self.dispatches.add_falling(first, last, len(tasks))
            return
        # The queue was short, or some tasks run again: those come first and are far older.
        for task in tasks:
            self.dispatches.add(now - task.since)

    def remember(self, task: Task[Any], name: str, worker: int, end: float, how: str) -> None:
        """Record a run of a task. Under the dispatcher's lock."""
        self.attempts.append(Attempt(task.id, name, task.attempts, worker, task.since, task.sent, end, how))
