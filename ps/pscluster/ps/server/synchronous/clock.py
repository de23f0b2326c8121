"""The clock of a synchronous run with bounded staleness: how many steps each replica has completed. Pure.

In such a run each replica's updates are applied as they come, and no replica begins step t before all have completed
t - staleness steps. The clock is kept on server 0. It decides nothing but who has to wait:

    a replica has completed n steps ("tick")---> its progress is n, with the positions of its iterators; the slowest may
                                                 be further now, and those that wait for that are answered
    the data of a replica has ended after n----> `end` is n at most: those that have completed as many steps wait until
                                                 all have, and then stop
    a message of a later epoch-----------------> a new attempt: there is no `end`, and all progress stays
    a message of an earlier epoch--------------> refused: that attempt is over
    a message of a later call, from step m on--> every replica counts as having completed m steps
    the first message of another run-----------> a new clock, with the positions of the last one of the same job

Steps are numbered through all calls of a run. What a replica says is absolute, so a repeated or late message changes
nothing, and progress never falls.

What may be lost: all of it, if the server restarts, or if so many other runs were younger (`Clocks`). Nothing depends
on it but the bound and the place where an attempt goes on. Replicas that are lost count as being at the beginning, so
that the others wait until they have been heard again; those that wait ask every half a second, and so say where they
are. A replica that restarts at the same time takes its steps again, from the beginning of the call: their updates are
dropped as repeated ones, like those of any function that runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pscluster.core.errors import ProtocolError, StaleError
from pscluster.core.limits import MAX_COUNT

MAX_ITERATORS = 16
"""The most iterators of which a replica's position is remembered: those used last."""

MAX_CLOCKS = 16
"""The most clocks that a server keeps. There is one for each strategy of a job, and restore."""

_MAX_BEHIND = 16
"""The most of the slowest replicas that are named."""


@dataclass(slots=True)
class Progress:
    """What one replica has said: how many steps it has completed, and the positions of its iterators."""

    steps: int = 0
    before: dict[int, int] = field(default_factory=dict)  # the last of these steps
    after: dict[int, int] = field(default_factory=dict)

    def reach(self, steps: int, before: Mapping[int, int], after: Mapping[int, int]) -> None:
        """Take note of a report, unless a later one has come."""
        if steps < self.steps:
            return
        if steps > self.steps:
            self.before = self.after
        self.before = _merged(self.before, before)
        self.after = _merged(self.after, after)
        self.steps = steps


def _merged(known: Mapping[int, int], new: Mapping[int, int]) -> dict[int, int]:
    merged = {key: at for key, at in known.items() if key not in new} | dict(new)
    return dict(list(merged.items())[-MAX_ITERATORS:])


@dataclass(slots=True)
class Clock:
    """The clock of one run."""

    epoch: int = 0
    replicas: int = 0
    first: int = 0  # the first step of the last call
    end: int | None = None  # after how many steps the data of a replica has ended
    progress: dict[int, Progress] = field(default_factory=dict)  # by replica, of those that have been heard
    found: Mapping[int, Mapping[int, int]] = field(default_factory=dict)  # by replica, positions when the run began

    def begin(self, epoch: int, replica: int, replicas: int, first: int) -> Progress:
        """Take note of a message; return what is known of its replica.

        StaleError if it is of an earlier epoch, ProtocolError if it contradicts others.
        """
        if not 0 <= replica < replicas <= MAX_COUNT:
            raise ProtocolError(f"a message of replica {replica}, of {replicas}; the limit is {MAX_COUNT}")
        if self.replicas not in (0, replicas):
            raise ProtocolError(f"a message of one of {replicas} replicas, in a run of {self.replicas}")
        if epoch < self.epoch:
            raise StaleError("this attempt at synchronous steps is over: another one has begun")
        if epoch > self.epoch:
            self.epoch, self.end = epoch, None
        self.replicas, self.first = replicas, max(self.first, first)
        if (known := self.progress.get(replica)) is None:
            known = self.progress[replica] = Progress(after=dict(self.found.get(replica, {})))
        return known

    def followed(self) -> Clock:
        """Return the clock of the run after this one, whose iterators are where they are."""
        return Clock(found={**self.found, **{replica: known.after for replica, known in self.progress.items()}})

    def end_at(self, steps: int) -> None:
        """Take note that the data of a replica has ended after so many steps."""
        self.end = steps if self.end is None else min(self.end, steps)

    def ending(self, steps: int) -> bool:
        """Return whether a replica that has completed so many steps must not begin another one."""
        return self.end is not None and steps >= self.end

    def steps_of(self, replica: int) -> int:
        """Return how many steps a replica has completed, as far as is known."""
        known = self.progress.get(replica)
        return max(self.first, known.steps) if known is not None else self.first

    @property
    def slowest(self) -> int:
        """Return how many steps all replicas have completed."""
        if not self.replicas or len(self.progress) < self.replicas:
            return self.first
        return max(self.first, min(known.steps for known in self.progress.values()))

    @property
    def furthest(self) -> int:
        """Return how many steps the furthest replica has completed."""
        return max((self.first, *(known.steps for known in self.progress.values())))

    @property
    def behind(self) -> list[int]:
        """Return the slowest replicas, not all of them if they are many."""
        slowest, behind = self.slowest, []
        for replica in range(self.replicas):
            if self.steps_of(replica) == slowest:
                behind.append(replica)
                if len(behind) == _MAX_BEHIND:
                    break
        return behind


class Clocks:
    """The clocks of a server, by run: those used last."""

    def __init__(self) -> None:
        self._by_run: dict[int, Clock] = {}
        self._job = 0

    def of(self, run: int, job: int = 0) -> Clock:
        """Return the clock of a run, perhaps a new one, in place of the oldest."""
        if not run:
            raise ProtocolError("a message of a synchronous run without a number")
        if job != self._job:  # a new one
            self._by_run.clear()
            self._job = job
        if (clock := self._by_run.pop(run, None)) is None:
            clock = Clock() if self.last is None else self.last.followed()
        while len(self._by_run) >= MAX_CLOCKS:
            del self._by_run[next(iter(self._by_run))]
        self._by_run[run] = clock  # the youngest again
        return clock

    @property
    def last(self) -> Clock | None:
        """Return the clock used last, if there is one."""
        return next(reversed(self._by_run.values()), None)
