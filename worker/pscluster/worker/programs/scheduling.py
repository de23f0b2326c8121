"""In which order a task does the jobs of a program, and which ones it hands to other threads.

One thread does all jobs but long ones, which need no lock of Python's; threads that both compute for microseconds wait
for that lock again and again. It hands a long job over, does others, and waits for it when its result is needed, or
nothing else is left to do.

This is list scheduling by the critical path (Graham, 1969; the order is that of HEFT, Topcuoglu et al., 2002): of the
jobs that can begin, the one comes first that most work depends on, one after the other. So what one device still waits
for is in the shadow of what another one computes. Times are estimates; if they are wrong, a job ends later than it
could, and nothing else changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

AHEAD = 256
"""Jobs that may be done before the first that is not done yet, so that few results are kept for longer than needed."""

WAKING = 25.0
"""Microseconds until a thread that sleeps goes on."""

HANDING = 8.0
"""Microseconds that it takes to wake one."""

WORTH = 40.0
"""Microseconds of other jobs during which a long one is done elsewhere: less is not worth handing it over."""


class Job(NamedTuple):
    """What is to be done."""

    cost: float  # microseconds, about
    needs: tuple[int, ...]  # the numbers of earlier jobs
    is_long: bool = False  # worth another thread


class Kind(Enum):
    """What is done with a job."""

    DO = auto()
    HAND = auto()
    WAIT = auto()


class Action(NamedTuple):
    """One thing that the thread does."""

    kind: Kind
    job: int


class _InFlight(NamedTuple):
    """A job that another thread does."""

    end: float  # when the result can be used here
    job: int


def arranged(jobs: Sequence[Job], helpers: int) -> list[Action]:
    """Return what the thread does, in order, with this many helper threads.

    Each job is done once, or handed over once and waited for later, after all that it needs is done or waited for.
    """
    if not helpers or not any(job.is_long for job in jobs):
        return [Action(Kind.DO, nth) for nth in range(len(jobs))]
    return _Arranging(jobs, helpers).actions()


class _Arranging:
    """An order that is being made: the state of the threads at a time."""

    def __init__(self, jobs: Sequence[Job], helpers: int) -> None:
        self._jobs = jobs
        self._free = [0.0] * helpers  # from when on; the first one first
        self._after: list[list[int]] = [[] for _ in jobs]
        for nth, job in enumerate(jobs):
            for needed in set(job.needs):
                self._after[needed].append(nth)
        self._missing = [len(set(job.needs)) for job in jobs]
        self._rank = [0.0] * len(jobs)  # the longest way from here to the end
        for nth in reversed(range(len(jobs))):
            self._rank[nth] = jobs[nth].cost + max((self._rank[after] for after in self._after[nth]), default=0.0)
        self._done = [False] * len(jobs)
        self._first = 0  # that is not done
        self._now = 0.0
        self._actions: list[Action] = []
        self._in_flight: list[_InFlight] = []
        self._later: list[int] = []  # that could begin, but not so far ahead
        self._long: list[tuple[float, int]] = []  # that can begin, the first by rank first
        self._short: list[tuple[float, int]] = []
        self._short_cost = 0.0
        for nth, missing in enumerate(self._missing):
            if not missing:
                self._can_begin(nth)

    def actions(self) -> list[Action]:
        """Return the order."""
        while self._first < len(self._jobs):
            while self._in_flight and self._in_flight[0].end <= self._now:
                self._wait()
            if self._long:
                self._hand_over()
            if self._long and (not self._short or self._long[0] <= self._short[0]):
                self._do(heapq.heappop(self._long)[1])
            elif self._short:
                _, nth = heapq.heappop(self._short)
                self._short_cost -= self._jobs[nth].cost
                self._do(nth)
            elif self._in_flight:
                self._now = max(self._now, self._in_flight[0].end)
                self._wait()
        return self._actions

    def _can_begin(self, nth: int) -> None:
        if nth >= self._first + AHEAD:
            heapq.heappush(self._later, nth)
            return
        job = self._jobs[nth]
        heapq.heappush(self._long if job.is_long else self._short, (-self._rank[nth], nth))
        self._short_cost += 0.0 if job.is_long else job.cost

    def _hand_over(self) -> None:
        """Hand over long jobs to threads that are free, or will be soon, if there is something else to do."""
        while self._long and self._free[0] <= self._now + WAKING and self._has_more_than(self._long[0][0]):
            nth = heapq.heappop(self._long)[1]
            self._actions.append(Action(Kind.HAND, nth))
            self._now += HANDING
            start = self._free[0] if self._free[0] > self._now else self._now + WAKING
            heapq.heapreplace(self._free, start + self._jobs[nth].cost)
            heapq.heappush(self._in_flight, _InFlight(start + self._jobs[nth].cost + WAKING, nth))

    def _has_more_than(self, urgency: float) -> bool:
        """Return whether there is something that is as urgent as a long job, or other jobs for long enough."""
        if len(self._long) > 1 or self._short_cost >= WORTH:
            return True
        if self._short and self._short[0][0] <= urgency:
            return True
        return any(self._jobs[job].cost - self._rank[job] <= urgency for _, job in self._in_flight)

    def _do(self, nth: int) -> None:
        self._actions.append(Action(Kind.DO, nth))
        self._now += self._jobs[nth].cost
        self._end(nth)

    def _wait(self) -> None:
        nth = heapq.heappop(self._in_flight).job
        self._actions.append(Action(Kind.WAIT, nth))
        self._end(nth)

    def _end(self, nth: int) -> None:
        self._done[nth] = True
        while self._first < len(self._jobs) and self._done[self._first]:
            self._first += 1
        while self._later and self._later[0] < self._first + AHEAD:
            self._can_begin(heapq.heappop(self._later))
        for after in self._after[nth]:
            self._missing[after] -= 1
            if not self._missing[after]:
                self._can_begin(after)
