"""Metrics of a role: plain numbers, counted where the work is done, read when somebody asks.

Every role has one `Telemetry`. `snapshot()` gives its metrics as plain numbers, to whoever looks on in the process (a
live page, the status) as to Prometheus, for whom `exposition` puts `pscluster_<role>_` before their names.

To count has to cost nothing: a function that is handed out takes some 20 us in all, and one increment of a Prometheus
object takes one of them. So nothing is counted twice, what can be derived is derived when it is asked for, and what is
counted is an attribute or an item of a list, without a lock. CPython 3.11 to 3.13 changes threads where a function
begins, behind a call, be it of a function in C, and where a loop goes back: not within `x.y += took`, where `x.y` is a
plain attribute or an item of a list. Within `x.y += clock() - begin` it may, between the reading of `x.y` and its
writing: what others have added meanwhile is lost, and the counter falls, which to Prometheus is a restart. So what is
added is worked out first. Without the global lock some may be lost.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

Value: TypeAlias = "float | Mapping[str, Value]"
Snapshot: TypeAlias = dict[str, Value]
"""By a metric's name: a number; by label, where it has labels, one level a label; of a histogram "count", "sum" and
"buckets" (how many were at most so much, by the bound as text). JSON can hold it."""

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Bounds of histograms of times."""

MAX_LABELS = 50
"""So many variables have metrics of their own; the others are added up as `other`."""

OTHER = "other"


class Histogram:
    """How many values were at most so much. Not locked: see the module's docstring."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_falling(self, first: float, last: float, count: int) -> None:
        """Count so many that lie evenly between these two."""
        here, there = bisect_left(self.bounds, first), bisect_left(self.bounds, last)
        if here == there:
            self.counts[here] += count
        else:
            step = (first - last) / max(count - 1, 1)
            for place in range(count):
                self.counts[bisect_left(self.bounds, first - step * place)] += 1
        self.total += (first + last) / 2 * count

    def plain(self) -> dict[str, Value]:
        """For a snapshot."""
        counts, done = list(self.counts), 0
        buckets: dict[str, Value] = {}
        for bound, count in zip((*map(str, self.bounds), "+Inf"), counts, strict=True):
            done += count
            buckets[bound] = done
        return {"count": done, "sum": self.total, "buckets": buckets}


@dataclass(frozen=True, slots=True)
class Metric:
    """What a name in a snapshot stands for.

    Attributes:
        name: with its unit; what is added up ends in `_total`.
        help: one sentence, with the unit.
        labels: by which it is told apart, in the order of the snapshot's levels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_OF_ALL_ROLES = (
    Metric("memory_bytes", "gauge", "resident memory of the process"),
    Metric("cpu_seconds_total", "counter", "processor time of the process, all threads"),
    Metric("threads", "gauge", "Python threads of the process"),
    Metric("uptime_seconds", "gauge", "since the role began"),
    Metric("refused_calls_total", "counter", "calls refused for want of the cluster token, on either port"),
    Metric("ready", "gauge", "1 where /readyz says so, else 0"),
)


class Telemetry(ABC):
    """The metrics of one role. Any thread may ask; a snapshot is not of one moment, each metric of it is."""

    role: ClassVar[str]
    """As in the names: "ps", "worker" or "coordinator"."""

    metrics: ClassVar[Sequence[Metric]]
    """What `snapshot` gives, without those that all roles have."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._why_not: Callable[[], str] = lambda: "it is starting"
        self._refusals: Callable[[], int] = lambda: 0

    @abstractmethod
    def own(self) -> Snapshot:
        """The role's own metrics: one entry for each of `metrics`."""

    def not_ready(self) -> str:
        """Why the role can't do its part of a job now, in words; "": it can."""
        return self._why_not()

    def ask_readiness(self, why_not: Callable[[], str]) -> None:
        """From now on this says whether the role is ready, as `not_ready` does."""
        self._why_not = why_not

    def ask_refusals(self, count: Callable[[], int]) -> None:
        """From now on this says how many calls were refused."""
        self._refusals = count

    def snapshot(self) -> Snapshot:
        """All metrics, by name; see `Snapshot` for what they look like."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **self.own(),
            "memory_bytes": resident_bytes(),
            "cpu_seconds_total": used.ru_utime + used.ru_stime,
            "threads": threading.active_count(),
            "uptime_seconds": time.monotonic() - self._began,
            "refused_calls_total": self._refusals(),
            "ready": int(not self.not_ready()),
        }

    @classmethod
    def described(cls) -> Sequence[Metric]:
        """All that a snapshot has."""
        return (*cls.metrics, *_OF_ALL_ROLES)


def resident_bytes() -> int:
    """Memory of this process; where the system does not tell, the most that it has had."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


class Labels:
    """Which names get metrics of their own, so that no collector is flooded: the first `limit` that had any.

    Who has one keeps it, or a counter would seem to fall; what is gone makes room.
    """

    def __init__(self, limit: int = MAX_LABELS) -> None:
        self._limit = limit
        self._named: set[str] = set()
        self._lock = threading.Lock()

    def choose(self, names: Iterable[str]) -> dict[str, str]:
        """The label of each, which is its own or `other`. Those that come first go first where there is no room."""
        names = list(names)
        with self._lock:
            self._named.intersection_update(names)
            for name in names:
                if len(self._named) < self._limit:
                    self._named.add(name)
            return {name: name if name in self._named else OTHER for name in names}
