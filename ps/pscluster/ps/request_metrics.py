"""Metrics of reads and updates, in the server and its clients; see `pscluster.core.metrics.registry`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pscluster.core.metrics.registry import Histogram, Value
from pscluster.core.metrics.trace import Recording

UPDATES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
"""Bounds of the histogram of staleness."""


@dataclass(slots=True)
class VariableMetrics:
    """Metrics of one variable's shards on one server. Bytes are those of values."""

    pulls: int = 0
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    rows_read: int = 0
    pushes: int = 0
    pushed_bytes: int = 0
    push_seconds: float = 0.0
    rows_updated: int = 0
    rows_found: int = 0
    rows_made: int = 0
    rows_made_again: int = 0
    rows_evicted: int = 0
    rows_not_admitted: int = 0

    def read(self, nbytes: int, seconds: float, rows: int, times: int = 1) -> None:
        self.pulls += times
        self.pulled_bytes += nbytes
        self.pull_seconds += seconds
        self.rows_read += rows

    def updated(self, nbytes: int, seconds: float, rows: int) -> None:
        self.pushes += 1
        self.pushed_bytes += nbytes
        self.push_seconds += seconds
        self.rows_updated += rows


TRAFFIC_HALF_LIFE = 120.0
"""Seconds after which the traffic of a shard counts half."""


_FADING_SECONDS = 1.0
"""How long it counts fully."""


class ShardTraffic:
    """Bytes of values that were lately read and updated of one shard, which takes them along when it moves.

    Later ones count more: so neither an earlier phase of the job nor a server's restart matters for long.
    """

    __slots__ = ("_at", "_nbytes")

    def __init__(self, nbytes: float = 0.0) -> None:
        self._nbytes, self._at = nbytes, time.monotonic()

    def add(self, nbytes: int, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        if now - self._at > _FADING_SECONDS:
            self.recent(now)  # before: nothing is called between the reading and the writing of a counter
        self._nbytes += nbytes

    def recent(self, now: float | None = None) -> float:
        """Return the bytes, those of one half-life ago counted half. `now`: as of `time.monotonic`."""
        now = time.monotonic() if now is None else now
        if (past := now - self._at) > _FADING_SECONDS:
            self._at = now
            self._nbytes *= 0.5 ** (past / TRAFFIC_HALF_LIFE)
        return self._nbytes


class StoreMetrics:
    """Metrics of all updates of a server, of any job."""

    def __init__(self) -> None:
        self.staleness = Histogram(UPDATES)  # of an update: others on its shard since its sender last saw the count
        self.duplicates = 0  # updates that had been applied before
        self.lock_waits = 0  # updates that waited for another one, or for a reader
        self.lock_seconds = 0.0  # time that updates waited for their shard


class ServiceMetrics:
    """Metrics of the requests of a server."""

    def __init__(self) -> None:
        self.pulls, self.pushes = Histogram(), Histogram()  # seconds from a request's arrival to its reply's end
        self.pulled_bytes = self.pushed_bytes = 0  # of replies, and of requests
        self.refused = 0
        self.checkpoints = Histogram()
        self.checkpoint_bytes = 0
        self.recording = Recording()


@dataclass(slots=True)
class ReplicaMetrics:
    """Metrics of the steps that one replica takes together with others, for any number of calls."""

    staleness: int = 0  # how many steps it is ahead of the slowest replica, as far as it has heard
    wait_seconds: float = 0.0  # from the end of its step functions until it could go on
    dropped: int = 0  # contributions that came too late, and were dropped


class ClientMetrics:
    """Metrics of a process's requests to the parameter servers, by server."""

    def __init__(self, num_servers: int) -> None:
        self.pulls: list[Histogram] = []  # seconds from sending a request to its reply, including retries
        self.pushes: list[Histogram] = []  # likewise
        self.pulled_bytes: list[int] = []  # of replies
        self.pushed_bytes: list[int] = []  # of requests
        self.reconnects: list[int] = []  # attempts that failed because the server was unreachable, and were retried
        self.residual_bytes = self.residual_rows = 0  # kept of pushed gradients, to be added to the next ones
        self.residual_rows_dropped = 0
        self.recording = Recording()
        self.grow(num_servers)

    def grow(self, num_servers: int) -> None:
        more = range(len(self.pulls), num_servers)
        for histograms in (self.pulls, self.pushes):
            histograms.extend(Histogram() for _ in more)
        for counts in (self.pulled_bytes, self.pushed_bytes, self.reconnects):
            counts.extend(0 for _ in more)

    def plain(self) -> dict[str, Value]:
        """Return the metrics for a snapshot, by the server's index."""
        return {
            "pull_seconds": _by_server(histogram.plain() for histogram in self.pulls),
            "push_seconds": _by_server(histogram.plain() for histogram in self.pushes),
            "pulled_bytes_total": _by_server(self.pulled_bytes),
            "pushed_bytes_total": _by_server(self.pushed_bytes),
            "server_reconnects_total": _by_server(self.reconnects),
            "residual_bytes": self.residual_bytes,
            "residual_rows": self.residual_rows,
            "residual_rows_dropped_total": self.residual_rows_dropped,
        }


def _by_server(values: Iterable[Value]) -> Value:
    return {str(index): value for index, value in enumerate(values)}
