"""Count reads and updates, by the server and by its clients. See `pscluster.core.metrics.registry` for how."""

from __future__ import annotations

from collections.abc import Mapping

from pscluster.core.metrics.registry import Histogram, Value
from pscluster.core.metrics.trace import Recording

UPDATES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
"""Bounds of how stale updates are."""


class VariableCounts:
    """Of the shards of one variable on one server. Bytes are those of values."""

    __slots__ = (
        "pull_seconds",
        "pulled_bytes",
        "pulls",
        "push_seconds",
        "pushed_bytes",
        "pushes",
        "rows_read",
        "rows_updated",
    )

    def __init__(self) -> None:
        self.pulls = self.pulled_bytes = self.rows_read = 0
        self.pushes = self.pushed_bytes = self.rows_updated = 0
        self.pull_seconds = self.push_seconds = 0.0

    def read(self, nbytes: int, seconds: float, rows: int, times: int = 1) -> None:
        """A shard, or rows of it, were given out."""
        self.pulls += times
        self.pulled_bytes += nbytes
        self.pull_seconds += seconds
        self.rows_read += rows

    def updated(self, nbytes: int, seconds: float, rows: int) -> None:
        """An update was applied."""
        self.pushes += 1
        self.pushed_bytes += nbytes
        self.push_seconds += seconds
        self.rows_updated += rows


class StoreCounts:
    """Of all updates of a server, whatever job they were of.

    Attributes:
        staleness: of each update, how many others its shard had had since its sender was last told of its updates;
            where the sender knew of any.
        duplicates: updates that had been applied before.
        lock_waits: updates that had to wait for another one, or for a reader.
        lock_seconds: time that updates waited for their shard.
    """

    def __init__(self) -> None:
        self.staleness = Histogram(UPDATES)
        self.duplicates = self.lock_waits = 0
        self.lock_seconds = 0.0


class ServiceCounts:
    """Of the requests of a server.

    Attributes:
        pulls, pushes: seconds from a request's coming to the last of its answer.
        pulled_bytes, pushed_bytes: of answers and of requests, all told.
    """

    def __init__(self) -> None:
        self.pulls, self.pushes = Histogram(), Histogram()
        self.pulled_bytes = self.pushed_bytes = 0
        self.refused = 0
        self.checkpoints = Histogram()
        self.checkpoint_bytes = 0
        self.recording = Recording()


class ClientCounts:
    """What a process asks of the parameter servers, by server.

    Attributes:
        pulls, pushes: seconds from a request's sending to its answer, what is repeated included.
        pulled_bytes, pushed_bytes: of answers and of requests, all told.
        reconnects: attempts that failed since the server was out of reach, and were repeated.
    """

    def __init__(self, num_servers: int) -> None:
        self.pulls: list[Histogram] = []
        self.pushes: list[Histogram] = []
        self.pulled_bytes: list[int] = []
        self.pushed_bytes: list[int] = []
        self.reconnects: list[int] = []
        self.recording = Recording()
        self.grow(num_servers)

    def grow(self, num_servers: int) -> None:
        """Have a place for each of so many servers, at least."""
        for _ in range(len(self.pulls), num_servers):
            self.pulls.append(Histogram())
            self.pushes.append(Histogram())
            for counts in (self.pulled_bytes, self.pushed_bytes, self.reconnects):
                counts.append(0)

    def plain(self) -> dict[str, Value]:
        """For a snapshot; by the server's index."""

        def by_server(values: list[int]) -> Mapping[str, Value]:
            return {str(index): value for index, value in enumerate(values)}

        return {
            "pull_seconds": {str(index): each.plain() for index, each in enumerate(self.pulls)},
            "push_seconds": {str(index): each.plain() for index, each in enumerate(self.pushes)},
            "pulled_bytes_total": by_server(self.pulled_bytes),
            "pushed_bytes_total": by_server(self.pushed_bytes),
            "server_reconnects_total": by_server(self.reconnects),
        }
