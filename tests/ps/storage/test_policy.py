"""When a generation is saved and when an update may be acknowledged, against models that remember everything."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pscluster.ps.storage.policy import PAUSE_FACTOR, LogPlan, SavePlan

EVERY = 5.0

seconds = st.floats(0, 20, allow_subnormal=False)


class SaveMachine(RuleBasedStateMachine):
    """Changes, waiters and generations that succeed or fail, in any order, as one thread saves them."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = SavePlan(EVERY)
        self.now = 100.0
        self.made = 0  # changes so far
        self.held: int | None = None  # the changes that the generation in progress holds
        self.disk = 0  # changes that are on disk
        self.last_failed = False
        self.began = 0.0
        self.earliest = -math.inf
        self.generations = 0
        self.waiting = set[int]()

    @rule(passes=seconds)
    def time_passes(self, passes: float) -> None:
        """Let time pass."""
        self.now += passes

    @rule()
    def change(self) -> None:
        """An update arrives."""
        self.made += 1
        assert self.plan.changed() == self.made

    @rule()
    def ask(self) -> None:
        """A creation arrives, and waits."""
        self.made += 1
        self.plan.changed()
        request = self.plan.request()
        assert request == self.made
        assert not self.plan.is_saved(request)
        assert not self.plan.has_failed(request), "told of a failure before anybody tried"
        self.waiting.add(request)

    @rule()
    def ask_for_what_there_is(self) -> None:
        """The server stops."""
        if self.plan.request() == self.disk:
            assert self.plan.is_saved(self.made)

    @precondition(lambda self: self.held is None and self.made > self.disk)
    @rule()
    def the_time_comes(self) -> None:
        """The thread waits until a generation is due, and begins it."""
        due = self.plan.due()
        assert due is not None, "what has changed is never saved"
        self.now = max(self.now, due)
        self.plan.begin(self.now)
        self.held, self.began = self.made, self.now

    @precondition(lambda self: self.held is not None)
    @rule(took=seconds, error=st.sampled_from(["", "", "no room"]))
    def end(self, took: float, error: str) -> None:
        """The generation is saved or not: all that waited for it know."""
        assert self.held is not None
        self.now += took
        self.plan.end(self.now, error)
        self.earliest = self.now + max(EVERY, PAUSE_FACTOR * (self.now - self.began))
        for request in [request for request in self.waiting if request <= self.held]:
            assert self.plan.is_saved(request) is not bool(error)
            assert self.plan.has_failed(request) is bool(error)
            self.waiting.discard(request)
        if not error:
            self.disk = self.held
            self.generations += 1
        self.held = None
        assert self.plan.failed == error

    @precondition(lambda self: self.held is not None)
    @rule()
    def never_two_at_once(self) -> None:
        """While one is in progress none is due, and beginning another is an error."""
        assert self.plan.due() is None
        with pytest.raises(AssertionError, match="two generations"):
            self.plan.begin(self.now)

    @invariant()
    def due_is_now_for_waiters_and_later_for_others(self) -> None:
        """No waiter waits for ever, no change is forgotten, and the disk has its pauses."""
        due = self.plan.due()
        if self.held is not None or self.made == self.disk:
            assert due is None
        elif self.waiting:
            assert due == -math.inf
        else:
            assert due in (-math.inf, self.earliest)

    @invariant()
    def what_is_saved_is_saved(self) -> None:
        """Exactly the changes up to the last successful generation are saved."""
        assert [self.plan.is_saved(request) for request in range(1, self.made + 1)] == [
            request <= self.disk for request in range(1, self.made + 1)
        ]
        assert not any(self.plan.has_failed(request) for request in range(1, self.disk + 1))
        assert self.plan.saved == self.generations


TestSavePlan = SaveMachine.TestCase
TestSavePlan.__doc__ = "Never two generations at a time, no caller waits in vain, and no change is forgotten."
TestSavePlan.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_without_waiters_the_disk_has_its_pause() -> None:
    """The first change is saved at once, the next `every` seconds later, or nine times what a slow save took."""
    plan = SavePlan(EVERY)
    assert plan.due() is None
    plan.changed()
    assert plan.due() == -math.inf
    plan.begin(10.0)
    plan.changed()
    plan.end(11.0)
    assert plan.due() == 11.0 + 9.0
    plan.begin(20.0)
    plan.end(20.1, "no room")
    assert plan.due() == 20.1 + EVERY
    plan.request()
    assert plan.due() == -math.inf
    plan.begin(21.0)
    plan.end(21.0)
    assert plan.due() is None


class LogMachine(RuleBasedStateMachine):
    """Updates, repetitions, a disk that breaks and generations that repair the log, against a list of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = LogPlan()
        self.given = list[int]()
        self.open = set[int]()
        self.repetitions = list[
            tuple[int, frozenset[int]]
        ]()  # the horizon, and the tickets that were open as it arrived
        self.broken = False

    @precondition(lambda self: not self.broken)
    @rule()
    def take(self) -> None:
        """An update is taken."""
        ticket = self.plan.take()
        assert ticket not in self.given
        self.given.append(ticket)
        self.open.add(ticket)

    @precondition(lambda self: self.broken)
    @rule()
    def none_is_taken(self) -> None:
        """While the log is broken taking one is an error."""
        with pytest.raises(AssertionError, match="broken"):
            self.plan.take()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """A record is flushed, or the update changed nothing, or it raised since the log is broken."""
        ticket = data.draw(st.sampled_from(sorted(self.open)))
        self.open.discard(ticket)
        self.plan.close(ticket)

    @rule()
    def repetition(self) -> None:
        """A repetition arrives; its first copy may be any of the open ones."""
        self.repetitions.append((self.plan.horizon(), frozenset(self.open)))

    @rule()
    def break_off(self) -> None:
        """A record could not be written."""
        self.plan.break_off("EIO")
        self.broken = True

    @precondition(lambda self: self.broken and not self.open)
    @rule()
    def repaired(self) -> None:
        """A generation that holds all that the log lacks is saved."""
        assert self.plan.all_ended
        self.plan.repaired()
        self.broken = False

    @invariant()
    def no_repetition_passes_an_older_one(self) -> None:
        """A repetition passes as soon as no ticket is open that was open as it arrived, and not before."""
        for horizon, older in self.repetitions:
            assert self.plan.passed(horizon) is not bool(older & self.open)
        assert self.plan.all_ended is not bool(self.open)
        assert bool(self.plan.broken) is self.broken


TestLogPlan = LogMachine.TestCase
TestLogPlan.__doc__ = (
    "A repetition waits for all that was open as it came, and for no other; a broken log takes nothing."
)
TestLogPlan.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
