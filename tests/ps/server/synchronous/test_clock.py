"""The clock of bounded staleness: whatever is repeated, late or forgotten, no replica is too far ahead."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pscluster.core.errors import ProtocolError, StaleError
from pscluster.ps.server.synchronous.clock import MAX_CLOCKS, MAX_ITERATORS, Clock, Clocks

REPLICAS, STALENESS = 3, 2
ITERATOR = 5

Report = tuple[int, int, int, int]
"""Replica, epoch, first step of the call, steps completed."""


class Progress(RuleBasedStateMachine):
    """Replicas that take steps under a clock, which may be forgotten, and attempts and calls that begin again."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.epoch, self.first = 1, 0
        self.done = [0] * REPLICAS  # steps of each replica
        self.most = [0] * REPLICAS  # the same, before any death
        self.known = [0] * REPLICAS  # how many steps of the slowest each has been told
        self.told = [0] * REPLICAS  # steps of each that the clock has acknowledged since it was last forgotten
        self.sent: list[Report] = []

    @rule(replica=st.integers(0, REPLICAS - 1))
    def step(self, replica: int) -> None:
        """It takes the next step if it may; nobody is told yet."""
        if self.done[replica] - STALENESS <= self.known[replica]:
            self.done[replica] += 1
            self.most[replica] = max(self.most[replica], self.done[replica])

    @rule(replica=st.integers(0, REPLICAS - 1))
    def report(self, replica: int) -> None:
        report = replica, self.epoch, self.first, self.done[replica]
        self.sent.append(report)
        self.deliver(report)
        self.known[replica] = max(self.known[replica], self.clock.slowest)
        self.told[replica] = self.done[replica]

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver_late(self, data: st.DataObject) -> None:
        report = data.draw(st.sampled_from(self.sent))
        if report[1] < self.epoch and self.clock.epoch == self.epoch:
            with pytest.raises(StaleError):
                self.deliver(report)
        else:
            self.deliver(report)

    def deliver(self, report: Report) -> None:
        replica, epoch, first, steps = report
        known = self.clock.begin(epoch, replica, REPLICAS, first)
        known.reach(steps, {}, {ITERATOR: 10 * steps})

    @rule(dies=st.integers(0, REPLICAS))
    def begin_attempt(self, dies: int) -> None:
        """All go on where they were; one that has died goes on after the steps that the clock knows of."""
        self.epoch += 1
        for replica in range(REPLICAS):
            known = self.clock.begin(self.epoch, replica, REPLICAS, self.first)
            if replica == dies:
                self.done[replica] = max(self.first, known.steps)
                assert self.done[replica] >= self.told[replica]
                assert known.after.get(ITERATOR, 0) == 10 * known.steps
            self.known[replica] = self.first

    @precondition(lambda self: min(self.done) > self.first)
    @rule()
    def begin_call(self) -> None:
        self.first = max(self.done)
        self.done, self.known, self.most = ([self.first] * REPLICAS for _ in range(3))
        self.epoch += 1
        self.sent.clear()  # all answers have come

    @rule()
    def forget(self) -> None:
        self.clock = Clock()
        self.sent = [report for report in self.sent if report[1] == self.epoch]
        self.told = [0] * REPLICAS

    @invariant()
    def none_is_too_far_ahead(self) -> None:
        slowest = min(self.most)
        assert self.clock.slowest <= slowest
        assert max(self.known) <= slowest
        assert max(self.done) <= slowest + STALENESS + 1, "the last of these steps began when it might"


TestProgress = Progress.TestCase
TestProgress.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def heard(clock: Clock, replica: int, steps: int, epoch: int = 1, first: int = 0) -> None:
    clock.begin(epoch, replica, 2, first).reach(steps, {}, {})


def test_the_slowest_is_not_known_before_all_were_heard() -> None:
    clock = Clock()
    heard(clock, 0, 3)
    assert (clock.slowest, clock.behind, clock.furthest) == (0, [1], 3)
    heard(clock, 1, 2)
    assert (clock.slowest, clock.behind) == (2, [1])
    heard(clock, 1, 1)
    assert clock.slowest == 2, "a late message changes nothing"


def test_a_call_counts_those_before_as_over() -> None:
    """Whatever each had done: it begins where the numbers of the last one end."""
    clock = Clock()
    heard(clock, 0, 5)
    heard(clock, 1, 3)
    heard(clock, 0, 10, epoch=2, first=10)
    assert (clock.slowest, clock.behind, clock.furthest) == (10, [0, 1], 10)


def test_the_end_is_forgotten_with_the_attempt() -> None:
    clock = Clock()
    heard(clock, 0, 1)
    clock.end_at(7)
    clock.end_at(5)
    clock.end_at(6)
    assert [clock.ending(steps) for steps in (4, 5, 6)] == [False, True, True], "the others may complete as many"
    heard(clock, 0, 1, epoch=2)
    assert not clock.ending(6)
    with pytest.raises(StaleError, match="this attempt at synchronous steps is over"):
        heard(clock, 1, 1)


def test_positions_before_and_after_the_last_step() -> None:
    """An iterator that a step did not use stays where it was; those used last are kept."""
    known = Clock().begin(1, 0, 1, 0)
    known.reach(1, {7: 3}, {7: 4})
    known.reach(1, {7: 3}, {7: 4})
    known.reach(2, {8: 0}, {8: 1})
    assert (known.before, known.after) == ({7: 4, 8: 0}, {7: 4, 8: 1})
    known.reach(1, {7: 3}, {7: 4})
    assert known.steps == 2
    known.reach(3, {}, dict.fromkeys(range(100, 200), 1))
    assert len(known.after) == MAX_ITERATORS


def test_contradictions_are_refused() -> None:
    clock = Clock()
    heard(clock, 0, 1)
    with pytest.raises(ProtocolError, match="one of 3 replicas, in a run of 2"):
        clock.begin(1, 0, 3, 0)
    with pytest.raises(ProtocolError, match="replica 2, of 2"):
        clock.begin(1, 2, 2, 0)
    with pytest.raises(ProtocolError, match="a synchronous run without a number"):
        Clocks().of(0)


def test_positions_outlast_a_run() -> None:
    """Also through a run in which a replica was not heard; not from one job to the next."""
    clocks = Clocks()
    for replica in range(2):
        clocks.of(1, job=5).begin(1, replica, 2, 0).reach(3, {7: 2}, {7: 3 + replica})
    clocks.of(2, job=5).begin(1, 0, 2, 0).reach(1, {7: 3}, {7: 4})
    clock = clocks.of(3, job=5)
    for replica in range(2):
        known = clock.begin(1, replica, 2, 0)
        assert (known.steps, known.before, known.after) == (0, {}, {7: 4})
    clock = clocks.of(4, job=5)
    assert clock.begin(1, 0, 1, 0).after == {7: 4}
    assert clock.slowest == 0
    assert clocks.of(5, job=6).begin(1, 0, 2, 0).after == {}


def test_few_clocks_are_kept() -> None:
    """Those used last."""
    clocks = Clocks()
    kept = clocks.of(1)
    for run in range(2, MAX_CLOCKS + 10):
        clocks.of(run)
        assert clocks.of(1) is kept
    assert clocks.last is kept
    assert clocks.of(MAX_CLOCKS + 9).replicas == 0
