"""Which process of a pool does which task, over random courses of events."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.conftest import search

from pscluster.core.errors import ProtocolError
from pscluster.worker.data.processes.plan import ATTEMPTS, DEPTH, START_SECONDS, Plan

WORKERS, TIMEOUT = 3, 10.0


class PoolMachine(RuleBasedStateMachine):
    """A pool whose processes die, freeze and end tasks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan(WORKERS, TIMEOUT)
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.ready: dict[int, bool] = {}
        self.given: dict[int, list[tuple[int, int]]] = {}  # what each process has, as (task, slot)
        self.wanted: set[int] = set()
        self.deaths: dict[int, int] = {}  # by task

    @staticmethod
    def choose(items: Collection[int], index: int) -> int:
        """Return one of several numbers."""
        return sorted(items)[index % len(items)]

    @rule(count=st.integers(1, 5))
    def submit(self, count: int) -> None:
        """New tasks come."""
        for _ in range(count):
            task = next(self.numbers)
            self.plan.add(task)
            self.wanted.add(task)
            self.deaths[task] = 0

    @rule()
    def turn(self) -> None:
        """Start what is missed, and give out what waits."""
        for _ in range(self.plan.missing):
            number = next(self.numbers)
            self.plan.started(number, self.now)
            self.ready[number], self.given[number] = False, []
        for process, slot, task in self.plan.give(self.now):
            assert self.ready[process]
            assert task in self.wanted
            assert all(task != other for tasks in self.given.values() for other, _ in tasks)
            assert slot not in [used for _, used in self.given[process]]
            self.given[process].append((task, slot))
        waiting = self.wanted - {task for tasks in self.given.values() for task, _ in tasks}
        assert not waiting or all(
            len(self.given[number]) == DEPTH for number, is_ready in self.ready.items() if is_ready
        )
        assert not waiting or len(self.ready) == WORKERS

    @precondition(lambda self: self.ready)
    @rule(index=st.integers(0, 99))
    def become_ready(self, index: int) -> None:
        """A process has loaded the function."""
        number = self.choose(self.ready, index)
        if not self.ready[number]:
            self.plan.ready(number, self.now)
            self.ready[number] = True

    @precondition(lambda self: any(self.given.values()))
    @rule(index=st.integers(0, 99))
    def end_task(self, index: int) -> None:
        """A process ends the task that it is at."""
        number = self.choose([number for number, tasks in self.given.items() if tasks], index)
        task, slot = self.given[number].pop(0)
        if self.given[number]:
            with pytest.raises(ProtocolError):
                self.plan.done(number, self.given[number][0][1], self.now)
        assert self.plan.done(number, slot, self.now) == (task if task in self.wanted else None)
        self.wanted.discard(task)

    @precondition(lambda self: self.ready)
    @rule(index=st.integers(0, 99))
    def die(self, index: int) -> None:
        """A process dies; only the task that it was at is blamed."""
        number = self.choose(self.ready, index)
        is_ready, tasks = self.ready.pop(number), self.given.pop(number)
        death = self.plan.died(number)
        at = tasks[0][0] if tasks and tasks[0][0] in self.wanted else None
        assert death.task == at
        assert death.unready == (not is_ready)
        if at is not None:
            self.deaths[at] += 1
            assert death.failed == (self.deaths[at] == ATTEMPTS)
            if death.failed:
                self.wanted.discard(at)

    @precondition(lambda self: self.wanted)
    @rule(index=st.integers(0, 99))
    def drop(self, index: int) -> None:
        """A task's result is no longer wanted."""
        task = self.choose(self.wanted, index)
        self.plan.drop(task)
        self.wanted.discard(task)

    @rule(seconds=st.sampled_from([1.0, TIMEOUT + 1, START_SECONDS + 1]), progress=st.booleans())
    def wait(self, seconds: float, progress: bool) -> None:
        """Time passes: what has made no progress for too long is overdue, and nothing else."""
        self.now += seconds
        for number, tasks in self.given.items():
            if progress and tasks:
                self.plan.observe(number, int(self.now), self.now)
        overdue = set(self.plan.overdue(self.now))
        assert overdue <= {number for number in self.ready if self.given[number] or not self.ready[number]}
        if progress:
            assert overdue.isdisjoint(number for number, tasks in self.given.items() if tasks)
        elif seconds > TIMEOUT:
            assert overdue >= {number for number, tasks in self.given.items() if tasks}
        for number in overdue:
            self.die_of(number)

    def die_of(self, number: int) -> None:
        """Kill what is overdue."""
        self.die(sorted(self.ready).index(number))

    @invariant()
    def no_more_than_it_should_have(self) -> None:
        """No process has more than `DEPTH` tasks, and there are no more processes than workers."""
        assert len(self.ready) <= WORKERS
        assert all(len(tasks) <= DEPTH for tasks in self.given.values())

    def teardown(self) -> None:
        """If nothing dies any more, every task that is wanted ends."""
        for _ in range(2 * len(self.wanted) + 2):
            self.turn()
            for number in self.ready:
                self.become_ready(sorted(self.ready).index(number))
            for number in list(self.given):
                if self.given[number]:
                    self.end_task([other for other in sorted(self.given) if self.given[other]].index(number))
        assert not self.wanted


TestPool = PoolMachine.TestCase
TestPool.settings = search(60, 40)
