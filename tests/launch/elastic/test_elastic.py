"""Members of an elastic run that join, report, leave and die in any order: who is awaited, and who gets which rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import search

from pscluster.core.errors import CheckpointError, MemberUnavailableError, MisuseError, ProtocolError, StaleError
from pscluster.launch.answers.session import Answer, Commit, Report
from pscluster.launch.elastic.rows import Rows
from pscluster.launch.elastic.session import ElasticSession, Phase, SavedRows


def begun(*numbers: int, fewest: int = 2, most: int = 4, **options: Any) -> ElasticSession:
    """A session in which these executions have begun."""
    session = ElasticSession(fewest, most, **options)
    session.schedule()
    for number in numbers:
        session.join(number, f"begins {number}")
    return session


def answers(actions: list[Any]) -> dict[Any, Any]:
    """By question: the value, or the error."""
    return {action.question: action.error or action.value for action in actions if isinstance(action, Answer)}


def reports(session: ElasticSession, *numbers: int, at: int = 1, **positions: Any) -> list[Any]:
    """What follows when these members report. A commit is carried out."""
    actions: list[Any] = []
    for number in numbers:
        actions += session.report(number, 1, at, Report({}, positions=positions), f"reports {number}", 0.0)
    return [*actions, *(each for action in actions if isinstance(action, Commit) for each in done(session, action))]


def done(session: ElasticSession, commit: Commit, **options: Any) -> list[Any]:
    return session.committed_now(commit.number, None, **options)


def test_a_run_begins_with_the_fewest() -> None:
    session = ElasticSession(2, 4)
    assert session.schedule() == [1, 2, 3, 4]
    assert session.join(3, "c") == []
    told = answers(session.join(1, "a"))
    assert [(told[name]["rank"], told[name]["size"], told[name]["attempt"]) for name in "ac"] == [(0, 2, 1), (1, 2, 1)]
    late = answers(session.join(2, "b"))["b"]
    assert (late["rank"], late["size"]) == (2, 3)
    assert late["attempt"] != 1


def test_one_that_joins_while_others_report_is_not_awaited_by_them() -> None:
    """It is let in when that report is committed; the next one waits for it."""
    session = begun(1, 2)
    assert reports(session, 1) == []
    assert session.join(3, "c") == []
    told = answers(reports(session, 2))
    assert told["c"] == {"rank": 2, "size": 3, "attempt": 4, "began_after": 0}
    assert told["reports 1"]["size"] == told["reports 2"]["size"] == 3
    assert reports(session, 1, 2, at=2) == []
    assert isinstance(reports(session, 3, at=2)[0], Commit)


def test_ranks_follow() -> None:
    """The lowest that is free goes to one that joins; with a committed report there is no gap."""
    session = begun(1, 2, 3)
    session.leave(1)
    assert reports(session, 2) == []
    told = answers(reports(session, 3))
    assert [(told[name]["rank"], told[name]["size"]) for name in ("reports 2", "reports 3")] == [(0, 2), (1, 2)]
    session.leave(2)
    assert session.schedule() == [5, 6]
    assert answers(session.join(5, "d"))["d"]["rank"] == 0


def test_below_the_fewest_nothing_is_committed_and_the_run_fails_in_the_end() -> None:
    session = begun(1, 2, join_seconds=10.0)
    session.leave(2)
    assert reports(session, 1) == []
    session.expire(100.0)
    assert session.too_few(110.0) == ""
    why = "the run has had 1 member for 10 s, and needs at least 2, as ScalingConfig(workers=(2, 4)) says"
    assert session.too_few(110.5).startswith(why)
    assert "begins" in next(iter(answers(session.join(3, "begins")))), "at once: the one that waits needs it"
    session.expire(111.0)
    assert session.too_few(200.0) == ""
    assert isinstance(reports(session, 3)[0], Commit)


def test_a_worker_that_leaves_in_order_leaves_with_its_report() -> None:
    session = begun(1, 2, 3)
    session.open(3, "d", 10, "opens")
    lease = answers(session.take(3, "d", 0, 5, "takes"))["takes"]
    assert (lease["start"], lease["stop"]) == (0, 5)
    reports(session, 1, 2)
    (commit,) = session.report(3, 1, 1, Report({}, positions={"d": [[0, 0, 5]]}), "reports 3", 0.0)
    assert isinstance(commit, Commit)
    told = answers(done(session, commit, leaving={3}))
    assert told["reports 3"]["leave"]
    assert not told["reports 1"]["leave"]
    assert told["reports 1"]["size"] == 2
    with pytest.raises(StaleError):
        reports(session, 3, at=2)
    assert session.rows["d"].behind == 0


def test_when_one_has_returned_nobody_joins_but_in_place_of_one_that_is_lost() -> None:
    session = begun(1, 2)
    session.end(1)
    assert (session.phase, session.schedule(), session.withdraw()) == (Phase.ENDING, [], [3, 4])
    assert answers(session.join(4, "late")) == {"late": {"over": True}}
    session.leave(2)
    assert not session.over
    assert session.schedule() == [5]
    assert answers(session.join(5, "again"))["again"]["rank"] == 0
    session.end(5)
    assert session.over


def test_rows_that_were_left_behind_are_given_to_one_more() -> None:
    """As long as it takes some: its function may not care."""
    session = begun(1, 2)
    session.open(2, "d", 10, "opens")
    session.take(2, "d", 0, 5, "takes")
    session.leave(2)
    session.end(1)
    assert session.rows["d"].behind == 5
    session.withdraw()
    assert session.wanted == 1
    (number,) = session._queued
    session.join(number, "helps")
    session.take(number, "d", 0, 5, "takes")
    session.leave(number)
    (number,) = session.schedule()
    session.join(number, "helps")
    session.end(number)
    assert session.over
    assert session.rows["d"].behind == 5


def test_barriers_of_one_that_joins() -> None:
    """Those of the beginning it passes at once, with their values; others wait for it only after its first report."""
    session = begun(1, 2)
    session.meet(1, 1, (1, 0), "a", 0.0, nbytes=0)
    assert answers(session.meet(2, 1, (1, 0), "b", 0.0, sent="seed", nbytes=5)) == {"a": "seed", "b": "seed"}
    reports(session, 1, 2)
    session.join(3, "joins")
    assert answers(session.meet(3, 1, (1, 0), "c", 0.0, nbytes=0)) == {"c": "seed"}
    assert answers(session.meet(3, 1, (1, 1), "c", 0.0)) == {"c": None}, "the others have been past it"
    error = answers(session.meet(3, 1, (1, 2), "c", 0.0, nbytes=0))["c"]
    assert isinstance(error, MemberUnavailableError)
    session.meet(1, 1, (2, 0), "a", 0.0)
    assert set(answers(session.meet(2, 1, (2, 0), "b", 0.0))) == {"a", "b"}
    reports(session, 1, 2, 3, at=2)
    session.meet(1, 1, (3, 0), "a", 0.0)
    assert session.meet(2, 1, (3, 0), "b", 0.0) == []
    assert set(answers(session.leave(3))) == {"a", "b"}


def test_one_that_finds_no_rows_has_no_report_to_make() -> None:
    """It is at the barrier at the end while others report what they had: it passes, and ends."""
    session = begun(1, 2, 3, fewest=3)
    assert session.meet(2, 1, (1, 0), "b", 0.0) == []
    assert reports(session, 1) == []
    assert answers(session.report(3, 1, 1, Report({}), "c", 0.0)) == {"b": None}
    assert isinstance(session.end(2)[0], Commit)


def test_what_makes_no_sense_is_refused() -> None:
    session = begun(1, 2)
    session.open(1, "d", 10, "opens")
    with pytest.raises(MisuseError, match="dataset 'd' has 9 rows on one member, and 10 on another"):
        session.open(2, "d", 9, "opens")
    with pytest.raises(MisuseError, match="a dataset without rows"):
        session.open(2, "e", 0, "opens")
    with pytest.raises(ProtocolError, match="can't be given out"):
        session.take(1, "other", 0, 5, "takes")
    with pytest.raises(ProtocolError, match="report 2 of rank 1, but 0 reports are committed"):
        reports(session, 1, at=2)
    with pytest.raises(ProtocolError, match="which it was not given"):
        reports(session, 1, d=[[0, 0, 5]])
    with pytest.raises(StaleError):
        reports(session, 3)


def test_a_run_that_goes_on_counts_what_came_after_its_checkpoint() -> None:
    rows = Rows(20)
    rows.take(1, 0, 5, 1)
    rows.done(1, [(0, 0, 5)])
    at_checkpoint = rows.state()
    furthest = rows.state([(0, 5, 10)])
    session = begun(1, 2, saved=SavedRows({"d": at_checkpoint}, {"d": furthest}))
    session.open(1, "d", 20, "opens")
    taken = [answers(session.take(1, "d", 0, 5, "takes"))["takes"] for _ in range(4)]
    assert [(each["start"], each["stop"]) for each in taken] == [(5, 10), (10, 15), (15, 20), (0, 0)]
    assert session.rows["d"].again == 5
    fixed = begun(1, 2, saved=SavedRows({"d": {"epoch": 3}}))  # saved by members of a fixed number
    assert answers(fixed.open(1, "d", 20, "opens")) == {"opens": {"epoch": 3}}


class Members(RuleBasedStateMachine):
    """Members take rows of several epochs, and report after each; they join, die and leave at any moment.

    At the end all that are left do the rest. Every row of each epoch is then reported once.
    """

    EPOCHS, ROWS, FEWEST, MOST = 2, 12, 2, 4
    session: ElasticSession

    @initialize()
    def start(self) -> None:
        self.session = ElasticSession(self.FEWEST, self.MOST)
        self.asked: set[int] = set()  # executions that have asked to begin
        self.waits: set[int] = set()  # members that wait for an answer
        self.next: dict[int, int] = {}  # by member: its next report
        self.epoch: dict[int, int] = {}
        self.given: dict[int, list[list[int]]] = {}
        self.exhausted: set[int] = set()  # members whose iteration has ended, and that have not reported since
        self.leaving: set[int] = set()
        self.fails = False  # the next commit does
        self.queued: list[int] = []
        self.commits: list[Commit] = []
        self.reported: Counter[tuple[int, int]] = Counter()
        self.lost = 0  # rows that members had when they died
        self.refill()

    def refill(self) -> None:
        self.queued += self.session.schedule()
        for number in self.session.withdraw():
            self.queued.remove(number)

    def take_actions(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Commit):
                self.commit(action)
            else:
                number, what = action.question
                self.answered(number, what, action.error or action.value)
        self.refill()

    def commit(self, commit: Commit) -> None:
        session = self.session
        assert session.phase is Phase.ENDING or len(session.members) >= self.FEWEST
        assert sorted(commit.reports) == sorted(member.rank for member in session.members.values())
        if self.fails:
            self.fails = False
            self.take_actions(session.committed_now(commit.number, None, CheckpointError("no room")))
            return
        self.commits.append(commit)
        for report in commit.reports.values():
            for epoch, start, stop in report.positions.get("d", ()):
                self.reported.update((epoch, row) for row in range(start, stop))
        leaving = self.leaving & set(session.members)
        actions = session.committed_now(commit.number, None, leaving=leaving)
        assert sorted(member.rank for member in session.members.values()) == list(range(len(session.members)))
        self.take_actions(actions)

    def answered(self, number: int, what: str, value: Any) -> None:
        if what == "begins":
            self.asked.discard(number)
            if value == {"over": True}:
                self.take_actions(self.session.end(number))
                return
            self.next[number], self.given[number] = self.session.committed + 1, []
            opened = answers(self.session.open(number, "d", self.ROWS, "opens"))["opens"]
            self.epoch[number] = opened["epoch"]
            self.waits.add(number)
            self.take_actions(self.session.meet(number, 1, (1, 0), (number, "meets"), 0.0))
        elif what == "reports":
            self.waits.discard(number)
            if isinstance(value, CheckpointError):
                return
            self.next[number] += 1
            self.given[number] = []
            self.exhausted.discard(number)
            self.epoch[number] = value["epochs"]["d"]
            if value["leave"]:
                self.leaving.discard(number)
                del self.next[number]
        else:
            self.waits.discard(number)

    @property
    def busy(self) -> list[int]:
        return sorted(set(self.next) - self.waits)

    def begin(self, number: int) -> None:
        self.queued.remove(number)
        self.asked.add(number)
        self.take_actions(self.session.join(number, (number, "begins")))

    def step(self, number: int) -> None:
        """What the function does next."""
        if number not in self.exhausted and self.epoch[number] < self.EPOCHS:
            epoch = self.epoch[number]
            lease = answers(self.session.take(number, "d", epoch, 2, "takes"))["takes"]
            if lease["start"] < lease["stop"]:
                self.given[number].append([epoch, lease["start"], lease["stop"]])
            else:
                self.exhausted.add(number)
                self.epoch[number] = lease["epoch"]
        elif number in self.exhausted:
            self.report(number)
        else:
            self.session.returned(number, {"d": self.given[number]})
            for epoch, start, stop in self.given[number]:
                self.reported.update((epoch, row) for row in range(start, stop))
            del self.next[number]
            self.take_actions(self.session.end(number))

    def report(self, number: int) -> None:
        self.waits.add(number)
        report = Report({}, positions={"d": [list(each) for each in self.given[number]]})
        self.take_actions(self.session.report(number, 1, self.next[number], report, (number, "reports"), 0.0))

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def a_worker_begins(self, data: st.DataObject) -> None:
        self.begin(data.draw(st.sampled_from(self.queued)))

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def goes_on(self, data: st.DataObject, steps: int) -> None:
        number = data.draw(st.sampled_from(self.busy))
        for _ in range(steps):
            if number in self.next and number not in self.waits:
                self.step(number)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def reports_early(self, data: st.DataObject) -> None:
        self.report(data.draw(st.sampled_from(self.busy)))

    @precondition(lambda self: self.next or self.asked)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted({*self.next, *self.asked})))
        self.lost += sum(stop - start for _, start, stop in self.given.get(number, []))
        for known in (self.asked, self.waits, self.exhausted, self.leaving):
            known.discard(number)
        self.next.pop(number, None)
        self.take_actions(self.session.leave(number))

    @precondition(lambda self: self.next)
    @rule(data=st.data())
    def is_told_to_leave(self, data: st.DataObject) -> None:
        self.leaving.add(data.draw(st.sampled_from(sorted(self.next))))

    @rule()
    def has_no_room(self) -> None:
        self.fails = True

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def each_row_is_with_one_member(self) -> None:
        assert set(self.reported.values()) <= {1}
        held = [
            (epoch, row)
            for number in self.next
            for epoch, start, stop in self.given[number]
            for row in range(start, stop)
        ]
        assert len(held) == len(set(held))
        assert not self.reported.keys() & set(held)

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def members_are_as_they_should_be(self) -> None:
        session = self.session
        assert set(session.members) == set(self.next)
        assert [commit.number for commit in self.commits] == list(range(1, session.committed + 1))
        ranks = [member.rank for member in session.members.values()]
        assert len(set(ranks)) == len(ranks)
        assert len(ranks) <= self.MOST
        if session.phase is not Phase.ENDING:
            assert len(self.queued) + len(self.asked) + len(session.members) == self.MOST
            if len(session.members) >= self.FEWEST:
                assert not self.waits or self.busy, "somebody goes on"

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        for _ in range(1000):
            if self.session.over:
                break
            for number in list(self.queued)[:2]:
                if number in self.queued:
                    self.begin(number)
            for number in self.busy:
                if number in self.next and number not in self.waits:
                    self.step(number)
        assert self.session.over, "all others have come to the end"
        wanted = {(epoch, row) for epoch in range(self.EPOCHS) for row in range(self.ROWS)}
        assert set(self.reported) == wanted
        assert set(self.reported.values()) == {1}
        rows = self.session.rows["d"]
        assert rows.again == self.lost, "what those had that died was given out again, and counted"
        assert rows.behind == 0


TestMembers = Members.TestCase
TestMembers.settings = search(150, 50)
