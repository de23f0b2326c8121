"""Metrics of a role: plain numbers, updated where the work is done, read on demand.

Every role has one `Telemetry`. Its `snapshot()` returns the metrics as plain numbers, both for use in the process (the
live page, the status) and for Prometheus, where `exposition` prefixes their names with `pscluster_<role>_`.

Counting must be nearly free: handing out a function takes some 20 us in total, and one increment of a Prometheus object
takes 1 us. So nothing is counted twice, what can be derived is derived on demand, and a counter is an attribute or a
list item, without a lock. CPython 3.11 to 3.13 switches threads where a function begins, after a call, also of a C
function, and where a loop jumps back: not within `x.y += took`, if `x.y` is a plain attribute or list item. Within `x.y
+= clock() - begin` it may, between reading and writing `x.y`: what other threads add in between is lost, and the
counter falls, which Prometheus takes for a restart. So compute the amount first. Without the global lock, some counts
may be lost.
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
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

Value: TypeAlias = "float | Mapping[str, Value]"
Snapshot: TypeAlias = dict[str, Value]
"""By a metric's name: a number; with labels, a mapping by label, one level per label; for a histogram "count", "sum"
and "buckets" (cumulative counts, by the upper bound as text). Can be dumped as JSON."""

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Bounds of histograms of times."""

MAX_LABELS = 50  # variables with their own metrics; the others are added up as `other`
OTHER = "other"


class Histogram:
    """Counts of values by upper bound. Not locked: see the module's docstring."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_falling(self, first: float, last: float, count: int) -> None:
        """Count `count` values that are spaced evenly from `first` down to `last`."""
        first_bucket, last_bucket = bisect_left(self.bounds, first), bisect_left(self.bounds, last)
        if first_bucket == last_bucket:
            self.counts[first_bucket] += count
        else:
            step = (first - last) / max(count - 1, 1)
            for nth in range(count):
                self.counts[bisect_left(self.bounds, first - step * nth)] += 1
        self.total += (first + last) / 2 * count

    def plain(self) -> dict[str, Value]:
        """Return it in the form of a snapshot."""
        sums = list(accumulate(self.counts))
        buckets: dict[str, Value] = dict(zip((*map(str, self.bounds), "+Inf"), sums, strict=True))
        return {"count": sums[-1], "sum": self.total, "buckets": buckets}


@dataclass(frozen=True, slots=True)
class Metric:
    """The description of a name in a snapshot."""

    name: str  # with its unit; a counter's ends in `_total`
    kind: Literal["counter", "gauge", "histogram"]
    help: str  # one sentence, with the unit
    labels: tuple[str, ...] = ()  # in the order of the snapshot's levels


_OF_ALL_ROLES = (
    Metric("memory_bytes", "gauge", "resident memory of the process"),
    Metric("cpu_seconds_total", "counter", "processor time of the process, all threads"),
    Metric("threads", "gauge", "Python threads of the process"),
    Metric("uptime_seconds", "gauge", "since the role began"),
    Metric("refused_calls_total", "counter", "calls refused for lack of a valid cluster token, on either port"),
    Metric("ready", "gauge", "1 if /readyz says so, else 0"),
)


class Telemetry(ABC):
    """The metrics of one role, for any thread. Each metric of a snapshot is of one moment; the snapshot is not."""

    role: ClassVar[str]  # as in the names: "ps", "worker" or "coordinator"
    metrics: ClassVar[Sequence[Metric]]  # those of `own`

    def __init__(self) -> None:
        self._began = time.monotonic()
        # Set by the role: see `not_ready`, and the number of refused calls.
        self.why_not_ready: Callable[[], str] = lambda: "it is starting"
        self.refusals: Callable[[], int] = lambda: 0

    @abstractmethod
    def own(self) -> Snapshot:
        """Return the role's own metrics: one entry for each of `metrics`."""

    def not_ready(self) -> str:
        """Return why the role can't do its part of a job now, in words; "" if it can."""
        return self.why_not_ready()

    def snapshot(self) -> Snapshot:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **self.own(),
            "memory_bytes": resident_bytes(),
            "cpu_seconds_total": used.ru_utime + used.ru_stime,
            "threads": threading.active_count(),
            "uptime_seconds": time.monotonic() - self._began,
            "refused_calls_total": self.refusals(),
            "ready": int(not self.not_ready()),
        }

    @classmethod
    def described(cls) -> Sequence[Metric]:
        """Return the descriptions of all metrics of a snapshot."""
        return (*cls.metrics, *_OF_ALL_ROLES)


def resident_bytes() -> int:
    """Return the resident memory of this process; its peak if the system reports only that."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


class Labels:
    """Chooses the names with their own metrics, so that no collector is flooded: the first `limit` that had any.

    A name keeps its label, since otherwise a counter would seem to fall; deleted names make room.
    """

    def __init__(self, limit: int = MAX_LABELS) -> None:
        self._limit = limit
        self._named: set[str] = set()
        self._lock = threading.Lock()

    def choose(self, names: Iterable[str]) -> dict[str, str]:
        """Return the label of each name: its own or `other`. If there are too many, earlier ones take precedence."""
        names = list(names)
        with self._lock:
            self._named.intersection_update(names)
            for name in names:
                if len(self._named) < self._limit:
                    self._named.add(name)
            return {name: name if name in self._named else OTHER for name in names}
