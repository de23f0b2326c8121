"""Interleavings of contributions, epochs, lost and late messages, and restarts: every server applies what server 0 has
decided, in that order, once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pscluster.core.errors import ProtocolError, StaleError
from pscluster.ps.server.synchronous.run import ContributionDecision, Place, Run
from pscluster.ps.server.synchronous.runs import Runs
from pscluster.v1 import ps_pb2

REPLICAS = 3
RUN = 7

Contributed = tuple[int, int, int]
"""Replica, step, epoch."""


class Steps(RuleBasedStateMachine):
    """Two servers, and replicas that may be told to begin again at any time, with old messages on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.decider: Run[Contributed] = Run(0)
        self.other: Run[Contributed] = Run(1)
        self.decided: list[list[Contributed]] = []  # by step, what server 0 has applied
        self.applied: dict[int, list[Contributed]] = {}  # by step, what server 1 has
        self.logged: list[Contributed] = []  # by server 1
        self.staged: set[Contributed] = set()  # acknowledged by server 1, before its replica went on
        self.epoch = 0
        self.at: dict[int, int] = {}  # the step of each replica in this epoch, once it has begun
        self.sent: list[tuple[str, Contributed]] = []  # what may arrive, or arrive again

    def committed_in(self, step: int) -> int:
        """The epoch in which the step before this one was committed."""
        return self.decided[step - 1][0][2] if step else 0

    @rule()
    def begin_epoch(self) -> None:
        self.epoch += 1
        self.at.clear()

    @precondition(lambda self: self.epoch)
    @rule(replica=st.integers(0, REPLICAS - 1))
    def open(self, replica: int) -> None:
        if replica not in self.at and self.begin_on_decider(replica):
            self.at[replica] = self.decider.applied
            self.reach_other(self.decider.applied, self.committed_in(self.decider.applied))

    def begin_on_decider(self, replica: int) -> bool:
        """Return whether a replica can begin this epoch."""
        self.decider.begin(self.epoch)
        return True

    def takes_part(self, replica: int) -> bool:
        """Return whether its step counts with a replica, as far as server 0 says so now."""
        return True

    @precondition(lambda self: self.at)
    @rule(data=st.data(), none=st.booleans())
    def contribute(self, data: st.DataObject, none: bool) -> None:
        """A replica sends what it may send next, or sends it again; it may have nothing for the other server."""
        replica = data.draw(st.sampled_from(sorted(self.at)))
        if not self.takes_part(replica):
            return
        contributed = replica, self.at[replica], self.epoch
        begun = ("stage", contributed) in self.sent
        kind = "commit" if contributed in self.staged or (none and not begun) else "stage"
        if ("commit", contributed) in self.sent:
            kind = "commit"
        self.sent.append((kind, contributed))
        self.deliver_one(kind, contributed)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver_late(self, data: st.DataObject) -> None:
        self.deliver_one(*data.draw(st.sampled_from(self.sent)))

    def deliver_one(self, kind: str, contributed: Contributed) -> None:
        replica, step, epoch = contributed
        server = self.decider if kind == "commit" else self.other
        current = epoch == self.epoch
        if server is self.other:
            self.reach_other(step, self.committed_in(step))
        try:
            if server is self.decider and not self.admitted_again(contributed):
                return
            decision = server.admit(step, epoch, replica, REPLICAS)
        except StaleError:
            late = server is self.other and step < server.applied
            assert late or not current, "a replica of this epoch was refused"
            return
        if decision is ContributionDecision.STAGE:
            server.staged[replica] = contributed
            if server is self.other:
                self.logged.append(contributed)
        if server is self.other:
            if current:
                self.staged.add(contributed)
        else:
            if server.decided:
                self.decided.append(server.in_order())
                server.end_step()
            if current and server.applied > step and self.at.get(replica) == step:
                self.at[replica] = step + 1

    def admitted_again(self, contributed: Contributed) -> bool:
        """Return whether server 0 takes a COMMIT."""
        return True

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """A replica asks whether its step is committed, and then reads from the other server."""
        replica = data.draw(st.sampled_from(sorted(self.at)))
        if self.decider.applied > self.at[replica] and self.counted_with(replica):
            self.at[replica] += 1
        self.reach_other(self.at[replica], self.committed_in(self.at[replica]))
        assert self.other.applied >= self.at[replica]

    def counted_with(self, replica: int) -> bool:
        """Return whether its step, which is committed, was with a replica."""
        return (replica, self.at[replica], self.epoch) in self.decided[self.at[replica]]

    def reach_other(self, step: int, epoch: int) -> None:
        while self.other.due(step, epoch):
            self.applied[self.other.applied] = self.other.in_order()
            self.other.end_step()

    @rule()
    def restart_decider(self) -> None:
        """Its staged contributions are not acknowledged before they are applied, so they are not logged."""
        self.decider = Run(0, self.decider.applied)
        self.refuse_late_ones()

    @rule()
    def restart_other(self) -> None:
        """It has logged what it has staged, and the ledger knows what it has applied."""
        runs: Runs[Contributed] = Runs(1, lambda _: max(self.applied, default=-1) + 1)
        for contributed in self.logged:
            replica, step, epoch = contributed
            of = ps_pb2.Contribution(run=RUN, step=step, epoch=epoch, replica=replica, replicas=REPLICAS)
            runs.found(of, contributed)
        runs.end_of_log()
        self.other = runs.idle(RUN)
        self.refuse_late_ones()

    def refuse_late_ones(self) -> None:
        """Before a server that restarted serves, it is told which functions are over: it refuses their messages."""
        self.sent = [(kind, contributed) for kind, contributed in self.sent if contributed[2] == self.epoch]

    @invariant()
    def the_other_follows(self) -> None:
        assert len(self.decided) == self.decider.applied >= self.other.applied
        for step in range(self.other.applied):
            contributed = [one for one in self.decided[step] if one in self.staged]
            assert self.applied.get(step, []) == contributed, f"step {step}"


class StepsWithBackup(Steps):
    """The same with steps that are done without one of the replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: set[tuple[int, int]] = set()  # replicas and epochs
        self.late: set[Contributed] = set()

    @initialize()
    def begin_all(self) -> None:
        """An epoch that all have begun, which random rules seldom make."""
        self.begin_epoch()
        for replica in range(REPLICAS):
            self.open(replica)

    def begin_on_decider(self, replica: int) -> bool:
        if (replica, self.epoch) in self.begun:  # it was told that this attempt is over
            return False
        self.begun.add((replica, self.epoch))
        self.decider.open(self.epoch, replica, REPLICAS, 1)
        return True

    def takes_part(self, replica: int) -> bool:
        step = self.at[replica]
        place = self.decider.place(step, self.epoch, replica, REPLICAS, 1)
        if place is Place.UNKNOWN:
            del self.at[replica]
        elif place is Place.LATE:
            self.late.add((replica, step, self.epoch))
            if self.decider.applied > step:
                self.at[replica] = self.decider.applied
        return place is Place.ADMITTED

    def admitted_again(self, contributed: Contributed) -> bool:
        replica, step, epoch = contributed
        return self.decider.place(step, epoch, replica, REPLICAS, 1) is Place.ADMITTED

    @invariant()
    def steps_are_of_those_that_were_first(self) -> None:
        for contributed in self.decided:
            assert len(contributed) == REPLICAS - 1
            assert self.late.isdisjoint(contributed)


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestStepsWithBackup = StepsWithBackup.TestCase
TestStepsWithBackup.settings = TestSteps.settings


@pytest.fixture
def run() -> Run[str]:
    return Run(1)


def test_a_server_that_restarted_without_a_log_refuses_a_run_that_goes_on() -> None:
    with pytest.raises(StaleError, match=r"ps 1 has 3 of the 5 synchronous steps .* --durability log"):
        Run(1, 3, whole=False).due(5, 1)
    assert not Run(1, 0, whole=False).due(0, 0), "a run that begins is welcome"


def test_a_server_that_is_ahead_of_the_deciding_one_says_so() -> None:
    with pytest.raises(StaleError, match="ps 1 has applied 5 synchronous steps, and ps 0 knows of 3"):
        Run(1, 5).admit(3, 1, 0, 2)


def test_the_deciding_server_is_never_behind() -> None:
    with pytest.raises(StaleError, match="ps 0 has 3 of the 4"):
        Run(0, 3).due(4, 1)


def test_a_server_without_a_part_in_some_steps_goes_on(run: Run[str]) -> None:
    assert not run.due(9, 1)
    assert run.applied == 9


def test_what_an_attempt_staged_that_was_not_committed_is_dropped(run: Run[str]) -> None:
    run.admit(0, 1, 0, 2)
    run.staged[0] = "of an attempt that failed"
    assert not run.due(1, 2), "the step was committed in the next one, which had nothing for this server"
    assert not run.staged
    assert run.applied == 1


def test_contradictions_are_refused(run: Run[str]) -> None:
    run.admit(0, 1, 0, 2)
    with pytest.raises(ProtocolError, match="one of 3 replicas, in an epoch of 2"):
        run.admit(0, 1, 1, 3)
    with pytest.raises(ProtocolError, match="replica 2, of 2"):
        run.admit(0, 1, 2, 2)


def test_an_ended_step_is_never_decided_until_the_next_epoch() -> None:
    run: Run[str] = Run(0)
    run.admit(0, 1, 0, 1)
    run.staged[0], run.ended = "the end", True
    assert not run.decided
    run.begin(2)
    run.admit(0, 2, 0, 1)
    run.staged[0] = "more"
    assert run.decided


def test_the_first_replicas_make_a_step() -> None:
    """The others are late, and counted once for each step; those that it counts with hear so again."""
    run: Run[str] = Run(0)
    for replica in (0, 1):
        run.open(1, replica, 3, 1)
    assert run.place(0, 1, 0, 3, 1) is Place.EARLY
    run.open(1, 2, 3, 1)
    places = [run.place(0, 1, replica, 3, 1) for replica in (2, 0, 1, 1, 2)]
    assert places == [Place.ADMITTED, Place.ADMITTED, Place.LATE, Place.LATE, Place.ADMITTED]
    assert run.missing == [0, 2]
    run.staged.update({0: "a", 2: "b"})
    assert run.decided
    run.end_step()
    assert [run.place(0, 1, replica, 3, 1) for replica in range(3)] == [Place.ADMITTED, Place.LATE, Place.ADMITTED]
    assert run.dropped == {1: 1}
    assert run.place(1, 1, 1, 3, 1) is Place.ADMITTED
    run.begin(2)
    assert run.place(1, 2, 1, 3, 1) is Place.UNKNOWN, "all have to begin the next attempt"
    with pytest.raises(StaleError):
        run.place(1, 1, 1, 3, 1)


def test_an_epoch_that_has_begun_before_a_restart_is_over_for_all() -> None:
    """Also for those that begin it only now, which would wait for the others."""
    run: Run[str] = Run(0)
    run.open(1, 0, 3, 1)
    assert run.place(0, 1, 0, 3, 1) is Place.EARLY
    assert run.place(0, 1, 1, 3, 1) is Place.UNKNOWN
    run.open(1, 2, 3, 1)
    assert [run.place(0, 1, replica, 3, 1) for replica in (0, 2)] == [Place.UNKNOWN, Place.UNKNOWN]
    for replica in range(3):
        run.open(2, replica, 3, 1)
    assert run.place(0, 2, 0, 3, 1) is Place.ADMITTED


def test_as_many_backups_as_replicas_are_refused() -> None:
    run: Run[str] = Run(0)
    with pytest.raises(ProtocolError, match="3 replicas with 3 of them as backup"):
        run.open(1, 0, 3, 3)
    run.open(1, 0, 3, 1)
    with pytest.raises(ProtocolError, match="3 replicas with 2 of them as backup; it was 1"):
        run.open(1, 1, 3, 2)
