"""What becomes of reports, barriers and broadcasts: pure, in all orders that members and restarts can come in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import search

from pscluster.core.errors import CheckpointError, MemberTimeoutError, MisuseError, ProtocolError, StaleError
from pscluster.launch.answers import session as module
from pscluster.launch.answers.session import Answer, Commit, Report, Session


def begun(size: int, **options: Any) -> Session:
    """A session whose members have begun their first attempt."""
    session = Session(size, **options)
    for rank in range(size):
        session.begin(rank, 1)
    return session


def of(metric: float) -> Report:
    return Report({"loss": metric})


def test_a_report_is_committed_once_all_have_made_it() -> None:
    session = begun(3)
    assert session.report(0, 1, 1, of(0.0), "a", 0.0) == []
    assert session.report(2, 1, 1, of(2.0), "c", 1.0) == []
    (commit,) = session.report(1, 1, 1, of(1.0), "b", 2.0)
    assert commit == Commit(1, {0: of(0.0), 1: of(1.0), 2: of(2.0)})
    assert session.committed == 0
    answers = session.committed_now(1, "path")
    assert sorted(answers, key=lambda answer: str(answer)) == [Answer(name, "path") for name in "abc"]
    assert session.committed == 1


def test_a_commit_that_fails_is_an_error_of_all_and_can_be_made_again() -> None:
    session = begun(2)
    session.report(0, 1, 1, of(0.0), "a", 0.0)
    session.report(1, 1, 1, of(0.0), "b", 0.0)
    error = CheckpointError("no room")
    assert session.committed_now(1, None, error) == [Answer("a", None, error), Answer("b", None, error)]
    assert session.committed == 0
    session.report(0, 1, 1, of(0.0), "a", 0.0)
    assert session.report(1, 1, 1, of(0.0), "b", 0.0) == [Commit(1, {0: of(0.0), 1: of(0.0)})]


def test_a_member_that_restarts_repeats_its_reports() -> None:
    session = begun(2)
    for number in (1, 2):
        session.report(0, 1, number, of(0.0), "a", 0.0)
        session.report(1, 1, number, of(0.0), "b", 0.0)
        session.committed_now(number, None)
    session.begin(1, 2)
    assert session.report(1, 2, 1, of(0.0), "again", 0.0) == [Answer("again")]
    assert session.report(1, 2, 2, of(0.0), "again", 0.0) == [Answer("again")]
    assert session.report(1, 2, 3, of(0.0), "new", 0.0) == []
    with pytest.raises(ProtocolError, match="report 5 of rank 0, but 2 reports are committed"):
        session.report(0, 1, 5, of(0.0), "skips", 0.0)


def test_what_a_dead_attempt_has_sent_is_dropped() -> None:
    session = begun(2)
    session.report(1, 1, 1, of(1.0), "dead", 0.0)
    session.begin(1, 2)
    assert session.report(0, 1, 1, of(0.0), "a", 0.0) == [], "the dead one's does not count"
    with pytest.raises(StaleError):
        session.report(1, 1, 1, of(1.0), "late", 0.0)
    assert session.report(1, 2, 1, of(2.0), "b", 0.0) == [Commit(1, {0: of(0.0), 1: of(2.0)})]


@pytest.mark.parametrize("together", [False, True])
def test_members_that_restart_together_drop_what_the_others_had_sent(together: bool) -> None:
    session = begun(2, together=together)
    session.report(0, 1, 1, of(0.0), "old", 0.0)
    session.begin(1, 2)
    actions = session.report(1, 2, 1, of(1.0), "new", 0.0)
    assert actions == ([] if together else [Commit(1, {0: of(0.0), 1: of(1.0)})])


def test_members_that_restart_together_wait_for_those_that_had_ended() -> None:
    """Also if what a member's earlier attempt has sent comes late."""
    session = begun(2, together=True)
    session.end(1, 1)
    session.begin(0, 2)
    assert session.end(1, 1) == []
    with pytest.raises(StaleError, match="another attempt"):
        session.report(1, 1, 1, of(1.0), "late", 0.0)
    assert session.meet(0, 2, (1, 0), "a", 0.0) == []
    session.begin(1, 2)
    assert session.meet(1, 2, (1, 0), "b", 0.0) == [Answer("a"), Answer("b")]


def test_nobody_waits_for_a_member_that_has_ended() -> None:
    session = begun(3)
    session.report(0, 1, 1, of(0.0), "a", 0.0)
    assert session.end(1, 1) == []
    assert session.end(2, 1) == [Commit(1, {0: of(0.0)})]


def test_a_wait_that_takes_too_long_names_who_is_missing() -> None:
    session = begun(3, seconds=10.0)
    session.report(0, 1, 1, of(0.0), "a", 0.0)
    session.meet(1, 1, (1, 0), "b", 5.0)
    assert session.expire(10.0) == []
    (answer,) = session.expire(10.5)
    assert isinstance(answer, Answer)
    assert answer.question == "a"
    with pytest.raises(MemberTimeoutError, match="report 1 has waited 10 s for rank 1, 2: every rank has to call"):
        raise answer.error or AssertionError
    (answer,) = session.expire(16.0)
    assert isinstance(answer, Answer)
    assert answer.question == "b"
    assert "a barrier or broadcast before report 1 has waited 10 s for rank 0, 2" in str(answer.error)
    assert session.expire(100.0) == []


def test_barriers_and_broadcasts_are_passed_again_at_once() -> None:
    session = begun(2)
    assert session.meet(1, 1, (1, 0), "b", 0.0, nbytes=0) == []
    answers = session.meet(0, 1, (1, 0), "a", 0.0, sent={"x": 1}, nbytes=9)
    assert sorted(answer.question for answer in answers if isinstance(answer, Answer)) == ["a", "b"]
    assert all(isinstance(answer, Answer) and answer.value == {"x": 1} for answer in answers)
    session.begin(1, 2)
    assert session.meet(1, 2, (1, 0), "again", 0.0, nbytes=0) == [Answer("again", {"x": 1})]


def test_a_restarted_member_may_come_to_a_barrier_that_the_others_never_had() -> None:
    """It has loaded the checkpoint of report 1; the others wait in report 2, which comes after the barrier."""
    session = begun(2)
    session.report(0, 1, 1, of(0.0), "a", 0.0)
    session.report(1, 1, 1, of(0.0), "b", 0.0)
    session.committed_now(1, "path")
    session.begin(1, 2)
    assert session.meet(1, 2, (2, 0), "barrier", 0.0) == []
    assert session.report(0, 1, 2, of(0.0), "a", 0.0) == [Answer("barrier")]
    (answer,) = session.meet(1, 2, (2, 1), "broadcast", 0.0, nbytes=0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.error, MisuseError)
    assert session.report(1, 2, 2, of(0.0), "b", 0.0) == [Commit(2, {0: of(0.0), 1: of(0.0)})]


def test_a_barrier_that_one_leaves_out_is_no_restart() -> None:
    session = begun(2, seconds=10.0)
    session.report(0, 1, 1, of(0.0), "a", 0.0)
    assert session.meet(1, 1, (1, 0), "barrier", 0.0) == []
    assert len(session.expire(11.0)) == 2


def test_what_was_broadcast_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 100)
    session = begun(2)
    for nth in range(2):
        session.meet(1, 1, (1, nth), "b", 0.0, nbytes=0)
        session.meet(0, 1, (1, nth), "a", 0.0, sent=nth, nbytes=80)
    session.begin(1, 2)
    (answer,) = session.meet(1, 2, (1, 0), "lost", 0.0, nbytes=0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.error, MisuseError)
    assert "rank 0 is already past this broadcast, and gave no value for it" in str(answer.error)
    assert session.meet(1, 2, (1, 1), "kept", 0.0, nbytes=0) == [Answer("kept", 1)]


class Members(RuleBasedStateMachine):
    """Members report, restart and end in any order; what is committed is what each last attempt has said."""

    SIZE = 3
    together: bool
    session: Session

    @initialize(together=st.booleans())
    def start(self, together: bool) -> None:
        self.together = together
        self.session = Session(self.SIZE, together=together)
        self.attempts = [0] * self.SIZE
        self.next = [1] * self.SIZE  # each member's next report
        self.waits = [False] * self.SIZE
        self.ended = [False] * self.SIZE
        self.commits: list[Commit] = []
        for rank in range(self.SIZE):
            self.restart(rank)

    def restart(self, rank: int) -> None:
        self.attempts[rank] = (
            max(self.attempts)
            if self.together and self.attempts[rank] < max(self.attempts)
            else (self.attempts[rank] + 1)
        )
        self.session.begin(rank, self.attempts[rank])
        self.next[rank], self.waits[rank], self.ended[rank] = 1, False, False
        if self.together:  # the others' reports are dropped; they will begin, too
            for other in range(self.SIZE):
                if self.attempts[other] < self.attempts[rank]:
                    self.waits[other] = False

    ranks = st.integers(0, SIZE - 1)

    @rule(rank=ranks)
    def dies(self, rank: int) -> None:
        if self.together:
            later = max(self.attempts) + 1
            for each in range(self.SIZE):
                self.attempts[each] = later - 1
                self.restart(each)
        else:
            self.restart(rank)

    @rule(rank=ranks)
    def reports(self, rank: int) -> None:
        if self.waits[rank] or self.ended[rank]:
            return
        number, known = self.next[rank], self.session.committed
        report = of(self.attempts[rank])
        actions = self.session.report(rank, self.attempts[rank], number, report, rank, 0.0)
        if number <= known:
            assert actions == [Answer(rank)]
            self.next[rank] += 1
            return
        self.waits[rank] = True
        self.take(actions)

    @rule(rank=ranks)
    def ends(self, rank: int) -> None:
        if not self.waits[rank] and not self.ended[rank]:
            self.ended[rank] = True
            self.take(self.session.end(rank, self.attempts[rank]))

    def take(self, actions: list[Any]) -> None:
        for action in actions:
            assert isinstance(action, Commit)
            self.commits.append(action)
            for rank, report in action.reports.items():
                assert report == of(self.attempts[rank]), "of the last attempt"
            answers = self.session.committed_now(action.number, None)
            assert {answer.question for answer in answers if isinstance(answer, Answer)} == set(action.reports)
            for rank in action.reports:
                self.waits[rank] = False
                self.next[rank] += 1

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def numbers_rise_by_one(self) -> None:
        assert [commit.number for commit in self.commits] == list(range(1, self.session.committed + 1))

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def none_waits_in_vain(self) -> None:
        there = [self.waits[rank] or self.ended[rank] for rank in range(self.SIZE)]
        assert not all(there) or not any(self.waits), "all have come, so it is committed"


TestMembers = Members.TestCase
TestMembers.settings = search(60, 40)
