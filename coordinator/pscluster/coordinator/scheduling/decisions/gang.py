"""A gang, and its states: plain data. See `gangs`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from pscluster.coordinator.scheduling.decisions.tasks import ENDED, NO_LIMITS, P, RunLimits, State, Task


class GangState(enum.Enum):
    """Of a gang; see `gangs`."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


@dataclass(slots=True, eq=False)
class Gang(Generic[P]):
    """Tasks that run together: one payload and one key for each member, by rank."""

    payloads: Sequence[P]
    keys: Sequence[int]
    workers: Sequence[int] | None = None  # by rank: the home of each; None: any, all different
    limits: RunLimits = NO_LIMITS
    min_workers: int = 0  # others run the members of workers that are lost while this many are up; 0: none do
    id: int = 0
    since: float = 0.0  # when it was scheduled
    order: int = 0  # how many tasks were scheduled before it
    state: GangState = GangState.WAITING
    generation: int = 0  # how often it was placed
    members: list[Task[P]] = field(default_factory=list)  # of this generation, by rank
    placed: Sequence[int] = ()  # the worker of each
    described: Any = None  # this generation, as it is described to its members
    steps: Any = None  # the steps of a synchronous run that it takes, if it does
    spare: int = 0  # how many members it can do without, once all others have returned
    results: dict[int, Any] = field(default_factory=dict)  # by rank, of members that have returned
    no_result: Any = None  # of a member that it does without
    failures: int = 0  # that were retried
    errors: int = 0  # those of them that members raised; see `progressed`
    errors_before: int = 0  # this generation
    deaths: int = 0  # of workers that ran a member, and attempts in which members lost each other; see `progressed`
    deaths_before: int = 0  # this generation
    gave_up: dict[Task[P], Exception] = field(default_factory=dict)  # members that missed another one
    error: Exception | None = None  # of the first member that failed for good
    withdrawn: bool = False  # unwanted: it does not run again
    isolated: bool = False  # its error cancels nothing else
    waits: bool = False  # it is not placed before all its workers are free
    follower: Gang[P] | None = None  # was placed while this one runs, and begins on each worker when it returns there
    taken_back: bool = False  # this generation: it followed one that did not return

    @property
    def size(self) -> int:
        return len(self.payloads)

    @property
    def is_program(self) -> bool:
        """Return whether another one may be placed while it runs.

        It runs again only if a worker dies or members lose each other, and its error ends no other one.
        """
        if not self.isolated or self.steps is not None or self.limits.retries:
            return False
        if self.size == 1:
            return True
        homes = self.workers or ()
        has_own = len(set(homes)) == self.size  # a worker for each member
        return has_own and not (self.min_workers or self.spare or self.limits.timeout)

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, or is ending, and will not run again."""
        return self.error is not None or self.withdrawn or self.state in _OVER

    @property
    def has_enough(self) -> bool:
        """Return whether it runs, and can do without the members that have not returned."""
        if not self.spare or self.state is not GangState.RUNNING or self.is_over:
            return False
        return sum(member.state is State.DONE for member in self.members) >= self.size - self.spare

    @property
    def late(self) -> list[Task[P]]:
        """Return the members that have not ended."""
        return [member for member in self.members if member.state not in ENDED]

    def is_away(self, index: int) -> bool:
        """Return whether a member whose home is this worker runs on another one."""
        homes = self.workers or ()
        return any(home == index != at for home, at in zip(homes, self.placed, strict=False))

    @property
    def begun(self) -> bool:
        """Return whether a member may have changed something, and it has not ended."""
        return self.generation > 0 and self.state not in _OVER

    def rank_of(self, task: Task[P]) -> int:
        """Return the rank of a member of this generation."""
        return self.members.index(task)

    def renew(self) -> None:
        """Make the tasks of the next generation."""
        self.results.clear()
        self.gave_up.clear()
        self.follower, self.taken_back = None, False
        self.deaths_before, self.errors_before = self.deaths, self.errors
        self.members = [
            Task(
                payload,
                limits=self.limits,
                key=key,
                isolated=True,
                since=self.since,
                gang=self,
                attempts=self.deaths,
                failures=self.failures,
                withdrawn=self.withdrawn,
            )
            for payload, key in zip(self.payloads, self.keys, strict=True)
        ]


_OVER = (GangState.DONE, GangState.FAILED, GangState.CANCELLED)
