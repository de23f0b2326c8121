"""What is counted of the functions of a worker. See `pscluster.core.metrics.registry` for how."""

from __future__ import annotations

import threading
import time

from pscluster.core.metrics.registry import SECONDS, Histogram
from pscluster.core.metrics.trace import Recording, Run
from pscluster.v1 import worker_pb2

_HOW = {
    worker_pb2.Outcome.DONE: "done",
    worker_pb2.Outcome.FAILED: "failed",
    worker_pb2.Outcome.CANCELLED: "cancelled",
}


SHORTEST_SECONDS = SECONDS[0]
"""Functions that take no longer than that have a counter of their own: see `WorkerCounts`."""


class WorkerCounts:
    """Of all coordinators that it has worked for.

    Attributes:
        runs: seconds of each function that ran, its arguments' and result's coding not counted.
        shortest, shortest_seconds: of these, how many took at most `SHORTEST_SECONDS`, and how long all of them did;
            they are not among `runs` before `all_runs`.
        done, failed, cancelled: how many functions returned, raised, or were stopped as they ran.
        returned: functions that were given back and never began.
        attachments: how often a coordinator took it.
        data_seconds: for which functions waited for data.
    """

    def __init__(self, recording: Recording) -> None:
        self.runs = Histogram()
        self.shortest, self.shortest_seconds = 0, 0.0
        self.done = self.failed = self.cancelled = self.returned = self.attachments = 0
        self.data_seconds = 0.0
        self.recording = recording
        self._idle_since = 0.0  # when it ran out of functions; 0: it has some
        self._idle_seconds = 0.0

    def all_runs(self) -> Histogram:
        """The seconds of all functions that ran."""
        found = Histogram()
        found.counts = list(self.runs.counts)
        found.counts[0] += self.shortest
        found.total = self.runs.total + self.shortest_seconds
        return found

    def waited_for_data(self, seconds: float) -> None:
        """A function has."""
        self.data_seconds += seconds

    def idle(self) -> float:
        """There is nothing to run any more. Gives what `not_idle` is to be told."""
        now = time.monotonic()
        if self._idle_since:  # another stream, which has not ended quite
            self._idle_seconds += now - self._idle_since
        self._idle_since = now
        return now

    def not_idle(self, since: float) -> None:
        """There is something to run, or nothing is waited for any more, by the stream that was idle since then.

        Nothing happens where another stream has come: the time is its own.
        """
        now = time.monotonic()
        if since == self._idle_since:
            self._idle_seconds += now - since
            self._idle_since = 0.0

    @property
    def idle_seconds(self) -> float:
        """For which it was attached, and had no function to run."""
        now = time.monotonic()  # before the two are read, between which there is no call
        since, before = self._idle_since, self._idle_seconds
        return before + max(now - since, 0.0) if since else before

    def remember(
        self,
        step: worker_pb2.Step,
        received: float,
        begun: float,
        ready: float,
        seconds: float,
        waited: float,
        kind: worker_pb2.Outcome.Kind,
    ) -> None:
        """Put it on the record: it came, had its turn, had its arguments, and ran so many seconds."""
        how, thread = _HOW.get(kind, ""), threading.current_thread().name
        end = ready + seconds
        self.recording.runs.append(Run(step.function, step.attempt, received, begun, ready, end, waited, how, thread))
