"""Metrics of a worker's functions. See `pscluster.core.metrics.registry` for how they are counted."""

from __future__ import annotations

import time

from pscluster.core.metrics.registry import MAX_LABELS, SECONDS, Histogram, Value
from pscluster.core.metrics.trace import Recording
from pscluster.ps.request_metrics import ReplicaMetrics

SHORTEST_SECONDS = SECONDS[0]  # functions that take no longer have their own counter: see `WorkerMetrics`


class WorkerMetrics:
    """Metrics over all coordinators that the worker has worked for."""

    def __init__(self, recording: Recording) -> None:
        # Seconds of each function that ran, without decoding its arguments and encoding its result. For those that took
        # at most SHORTEST_SECONDS, only the number and the sum.
        self.runs = Histogram()
        self.shortest, self.shortest_seconds = 0, 0.0
        self.done = self.failed = self.cancelled = 0  # functions that returned, raised, or were stopped as they ran
        self.returned = 0  # functions that were given back before they began
        self.attachments = 0  # of coordinators
        self.data_seconds = 0.0  # for which functions waited for data
        self.recording = recording
        self.replicas: dict[int, ReplicaMetrics] = {}  # by number, of the replicas that ran here in this job
        self._idle_since = 0.0  # when it ran out of functions; 0 while it has some
        self._idle_seconds = 0.0

    def all_runs(self) -> Histogram:
        """Return the seconds of all functions that ran."""
        runs = Histogram()
        runs.counts = list(self.runs.counts)
        runs.counts[0] += self.shortest
        runs.total = self.runs.total + self.shortest_seconds
        return runs

    def waited_for_data(self, seconds: float) -> None:
        """Count time for which a function waited for data."""
        self.data_seconds += seconds

    def of_replica(self, replica: int) -> ReplicaMetrics:
        """Return the metrics of a replica, to be updated; they are not shown if there have been too many here."""
        if replica not in self.replicas and len(self.replicas) == MAX_LABELS:
            return ReplicaMetrics()
        return self.replicas.setdefault(replica, ReplicaMetrics())

    def plain_replicas(self) -> dict[str, Value]:
        """Return their metrics for a snapshot, by the replica's number."""
        known = sorted(self.replicas.copy().items())
        return {
            "replica_staleness_steps": {str(number): of.staleness for number, of in known},
            "replica_wait_seconds_total": {str(number): of.wait_seconds for number, of in known},
            "replica_dropped_total": {str(number): of.dropped for number, of in known},
        }

    def forget_job(self) -> None:
        """Forget what belongs to an earlier job."""
        self.recording.forget_functions()
        self.replicas = {}

    def idle(self) -> float:
        """Note that a stream has nothing to run. Return the argument for `not_idle`."""
        now = time.monotonic()
        if self._idle_since:  # of another stream, which is about to end
            self._idle_seconds += now - self._idle_since
        self._idle_since = now
        return now

    def not_idle(self, since: float) -> None:
        """Note the end of a stream's idle time, or of the stream. Do nothing if another stream is idle since then."""
        now = time.monotonic()
        if since == self._idle_since:
            self._idle_seconds += now - since
            self._idle_since = 0.0

    @property
    def idle_seconds(self) -> float:
        """The seconds for which a coordinator was attached, and there was no function to run."""
        now = time.monotonic()  # first: there must be no call between reading the two
        since, before = self._idle_since, self._idle_seconds
        return before + max(now - since, 0.0) if since else before
