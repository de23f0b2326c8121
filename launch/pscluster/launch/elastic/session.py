"""The members of an elastic run: who joins and leaves, who is awaited, and which rows each has. Pure.

A member is one execution of the training function on a worker, with a number of its own, from 1. So many executions are
scheduled as the run may have members; each waits until a worker is free, so the run has as many members as there are
workers, and nothing here knows of workers.

    QUEUED  --a worker begins the function--------------> JOINING
    JOINING --between two reports-----------------------> MEMBER   see below
    MEMBER  --its worker is lost------------------------> GONE     what it had not reported is FREE for others (`rows`)
            --its report is committed, its worker leaves> GONE     in order: it is told so, and nothing is done twice
            --its function returns----------------------> RETURNED the run is ENDING
    any     --its function raises-----------------------> the run fails

For one that is GONE another one is QUEUED: if its worker comes back, or another one, it joins. It repeats nothing, and
its updates are its own.

Between two reports the members are fixed but for those that are lost. One that asks to begin is let in at once if
nobody has made the next report yet, and otherwise once that is committed; its first report has the number that is next
then.
So a report, and a barrier, waits for those that are members at its number. Ranks are those of all members: one that
joins gets the lowest that is free, and with each committed report they become 0 to size - 1 again, in the same order.

    STARTING --`fewest` have asked to begin-------------> RUNNING  these are let in together
    RUNNING  --a function returns-----------------------> ENDING   nobody joins, but for those who died meanwhile
    ENDING   --no function is left----------------------> OVER     see `wanted`

While there are fewer than `fewest`, and the run is not ENDING, reports are not committed, members are let in at once,
and after `join_seconds` the run has failed.

Barriers and broadcasts that a member comes to before its first report are those of the run's beginning, wherever the
others are: it passes those that they have passed at once, with the same values. In later ones it takes part. One that
found no rows left in the last epoch has no report to make, and comes to the barriers after it while the others report:
it passes once all of them do.

What may be lost: nothing that is committed. Updates that a lost member has made since its last report are on the
servers, and others make them again, for the same rows: that is what `Result.rows_again` counts.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pscluster.core.errors import MemberUnavailableError, MisuseError, ProtocolError, PsClusterError, StaleError
from pscluster.launch.answers.session import Action, Answer, Commit, Member, Place, Report, Session
from pscluster.launch.elastic.rows import Rows


class Phase(enum.Enum):
    """Of a run; see the module's docstring."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()


@dataclass(frozen=True, slots=True)
class RankAnswer(Answer):
    """Tell a member which rank it has from now on."""


@dataclass(frozen=True, slots=True)
class Admit(RankAnswer):
    """Let a member begin: answer its question with this, and with where the run stands."""


@dataclass(slots=True)
class Elastic(Member):
    """What is known of one that has been let in."""

    rank: int = 0
    first: int = 0  # reports that were committed when it joined
    helps: bool = False  # it joined while the run was ending
    has_taken: bool = False  # rows


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Where the run had come to in its datasets, by name."""

    at_checkpoint: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # where it goes on
    furthest: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # with the last report


class ElasticSession(Session):
    """The members of one elastic run, their reports, meetings and rows.

    The owner carries out a `Commit`, and calls `committed_now`, before it tells of anything else.
    """

    members: dict[int, Elastic]  # type: ignore[assignment]

    def __init__(
        self,
        fewest: int,
        most: int,
        *,
        committed: int = 0,
        seconds: float = 600.0,
        join_seconds: float = 60.0,
        saved: SavedRows | None = None,
    ) -> None:
        """Begin after report number `committed`.

        Args:
            fewest, most: how many members there may be.
            seconds: how long a member may wait for the others.
            join_seconds: how long there may be fewer than `fewest`.
        """
        super().__init__(0, committed=committed, seconds=seconds)
        self.phase = Phase.STARTING
        self._fewest, self._most, self._join_seconds = fewest, most, join_seconds
        self._began_after = committed
        self._numbers = itertools.count(1)
        self._queued: dict[int, None] = {}  # scheduled, and not begun, in order
        self._joining: dict[int, Any] = {}  # questions, by member
        self._lost = 0  # members to replace, of those that went while the run was ending
        self._in_vain = False  # one that was to do what was left behind has taken nothing
        self._short_since: float | None = None
        self._saved = saved or SavedRows()
        self.rows: dict[str, Rows] = {}

    # What is to be scheduled

    @property
    def wanted(self) -> int:
        """Return how many executions there should be that are not members yet.

        As many as may join. When the run is ending: one for each member that was lost since, and one for rows that were
        left behind while nobody is there who could take them, as long as the last one for that has taken some.
        """
        if self.phase is not Phase.ENDING:
            return self._most - len(self.members)
        alone = not self.members and not self._in_vain and any(rows.behind for rows in self.rows.values())
        return max(self._lost, int(alone))

    def schedule(self) -> list[int]:
        """Return the numbers of executions to schedule now."""
        count = self.wanted - len(self._queued) - len(self._joining)
        new = list(itertools.islice(self._numbers, max(count, 0)))
        self._queued.update(dict.fromkeys(new))
        return new

    def withdraw(self) -> list[int]:
        """Return the numbers of executions that have not begun, and are not wanted any more."""
        surplus = len(self._queued) + len(self._joining) - self.wanted
        numbers = list(self._queued)[-surplus:] if surplus > 0 else []
        for number in numbers:
            del self._queued[number]
        return numbers

    @property
    def over(self) -> bool:
        """Return whether the run has ended."""
        return self.phase is Phase.ENDING and not (self.members or self._queued or self._joining or self.wanted)

    # Events: members join and leave

    def join(self, number: int, question: Any) -> list[Action]:
        """Take an execution that asks to begin. Answered with `Admit`, or told that the run is over."""
        if number not in self._queued:  # it has begun before, or is not wanted
            return [*self.leave(number), Answer(question, {"over": True})]
        del self._queued[number]
        if self.phase is Phase.ENDING and len(self._joining) >= self.wanted:
            return [Answer(question, {"over": True})]
        self._joining[number] = question
        return self._admit()

    def returned(self, number: int, given: Mapping[str, Any]) -> None:
        """Take note of what a member was given since its last report: its function is returning."""
        self._check(number, 1)
        for dataset, rows in self.rows.items():
            rows.check(number, given.get(dataset, ()))
            rows.done(number, given.get(dataset, ()))
            rows.free(number, lost=False)

    def end(self, number: int, attempt: int = 1) -> list[Action]:
        """Take note that an execution has returned. It was told that the run is over if it was no member."""
        del attempt
        if (member := self.members.get(number)) is None:
            return self.leave(number)
        self.phase = Phase.ENDING
        self._in_vain |= member.helps and not member.has_taken
        self._remove(number, lost=False)
        return self._settle_all()

    def leave(self, number: int) -> list[Action]:
        """Take note that an execution was lost, or was cancelled before it began."""
        self._queued.pop(number, None)
        self._joining.pop(number, None)
        if number in self.members:
            self._remove(number, lost=True)
        return self._settle_all()

    def _remove(self, number: int, *, lost: bool) -> None:
        """Take a member out. `lost`: it may have been given rows that it did not report."""
        assert self._committing is None, "a commit is carried out at once"
        del self.members[number]
        self._reports.pop(number, None)
        for meeting in self._meetings.values():
            meeting.pop(number, None)
        self._meetings = {place: meeting for place, meeting in self._meetings.items() if meeting}
        for rows in self.rows.values():
            rows.free(number, lost=lost)
        self._lost += lost and self.phase is Phase.ENDING

    # Events: rows

    def open(self, number: int, dataset: str, length: int, question: Any) -> list[Action]:
        """Take a member that begins with a dataset. It is told the epoch. MisuseError if it has other rows."""
        self._check(number, 1)
        if dataset not in self.rows:
            saved, furthest = (
                None if (state := of.get(dataset)) is None else {"length": length, "visited": {}, **state}
                for of in (self._saved.at_checkpoint, self._saved.furthest)
            )
            self.rows[dataset] = Rows(length, saved, furthest)
        rows = self.rows[dataset]
        if rows.length != length:
            raise MisuseError(
                f"dataset {dataset!r} has {length} rows on one member, and {rows.length} on another: all need the same"
            )
        return [Answer(question, {"epoch": rows.epoch})]

    def take(self, number: int, dataset: str, epoch: int, batch: int, question: Any) -> list[Action]:
        """Give a member the next rows of an epoch, and the lowest epoch that has any then."""
        self._check(number, 1)
        if dataset not in self.rows or epoch < 0 or batch < 1:
            raise ProtocolError(f"rows of epoch {epoch} of dataset {dataset!r}, {batch} at a time, can't be given out")
        rows, member = self.rows[dataset], self.members[number]
        start, stop = rows.take(number, epoch, batch, len(self.members))
        member.has_taken |= stop > start
        return [Answer(question, {"start": start, "stop": stop, "epoch": rows.epoch})]

    # Events: reports and meetings

    def report(self, rank: int, attempt: int, number: int, report: Report, question: Any, now: float) -> list[Action]:
        """Take the next report of a member. ProtocolError if it is another one, or has rows that were not given."""
        self._check(rank, attempt)
        if number <= self.committed:
            raise ProtocolError(f"report {number}, but {self.committed} reports are committed")
        for dataset, given in report.positions.items():
            if dataset not in self.rows:
                raise ProtocolError(f"a report of rows of {dataset!r}, which was not opened")
            self.rows[dataset].check(rank, given)
        return super().report(rank, attempt, number, report, question, now)

    def committed_now(
        self,
        number: int,
        path: str | None,
        error: PsClusterError | None = None,
        leaving: Collection[int] = (),
    ) -> list[Action]:
        """Take note that a commit has ended, as `Session` does. `leaving`: members whose workers leave after it."""
        waiting = dict(self._reports)
        if error is not None:
            return super().committed_now(number, path, error) + self._admit()
        super().committed_now(number, path)
        for member, known in waiting.items():
            for dataset, given in known.sent.positions.items():
                self.rows[dataset].done(member, given)
        for member in leaving:
            self._remove(member, lost=False)
            self._lost += self.phase is Phase.ENDING
        for rank, member in enumerate(sorted(self.members, key=lambda member: self.members[member].rank)):
            self.members[member].rank = rank
        actions = self._admit()
        told = {"path": path, "size": len(self.members), "epochs": {name: of.epoch for name, of in self.rows.items()}}
        for member, known in waiting.items():
            rank = self.members[member].rank if member in self.members else 0
            actions.append(RankAnswer(known.question, {**told, "rank": rank, "leave": member not in self.members}))
        return actions

    def meet(
        self, rank: int, attempt: int, place: Place, question: Any, now: float, *, sent: Any = None, nbytes: int = -1
    ) -> list[Action]:
        """Take a member that has come to a barrier or broadcast, as `Session` does."""
        self._check(rank, attempt)
        if place[0] <= self.committed:  # all others are past it
            self._passed.add(place)
        return super().meet(rank, attempt, place, question, now, sent=sent, nbytes=nbytes)

    def expire(self, now: float) -> list[Action]:
        """Give up what has waited for too long; while there are too few members, nothing has."""
        if not self._is_short:
            self._short_since = None
            return super().expire(now)
        if self._short_since is None:
            self._short_since = now
        for known in itertools.chain(self._reports.values(), *(each.values() for each in self._meetings.values())):
            known.since = now
        return []

    def too_few(self, now: float) -> str:
        """Return why the run has failed, if there were fewer than the fewest for too long; else ""."""
        if self._short_since is None or now - self._short_since <= self._join_seconds:
            return ""
        there = f"{len(self.members)} member{'s' * (len(self.members) != 1)}"
        return (
            f"the run has had {there} for {self._join_seconds:g} s, and needs at least {self._fewest}, as "
            f"ScalingConfig(workers=({self._fewest}, {self._most})) says: give it workers that stay, a lower first "
            "number, or a longer join_timeout"
        )

    # Decisions

    @property
    def _is_short(self) -> bool:
        return self.phase is not Phase.ENDING and len(self.members) < self._fewest

    def _admit(self) -> list[Action]:
        """Let those in that ask to begin, if it is time."""
        at_start = self.phase is Phase.STARTING
        if at_start:
            if len(self._joining) < self._fewest:
                return []
            self.phase = Phase.RUNNING
        elif self._reports and not self._is_short:
            return []
        actions: list[Action] = []
        joining, self._joining = self._joining, {}
        numbers = sorted(joining)
        if self.phase is Phase.ENDING:
            numbers = numbers[: self.wanted]
            actions += [Answer(joining[number], {"over": True}) for number in joining if number not in numbers]
        for number in numbers:
            taken = {member.rank for member in self.members.values()}
            rank = next(rank for rank in itertools.count() if rank not in taken)
            # The attempt names files: of those that have had a rank, each has another one.
            attempt, helps = 1 if at_start else number + 1, self.phase is Phase.ENDING
            self.members[number] = Elastic(attempt, rank=rank, first=self.committed, helps=helps)
        if self.phase is Phase.ENDING:
            self._lost = max(self._lost - len(numbers), 0)
        for number in numbers:
            member = self.members[number]
            where = {"rank": member.rank, "size": len(self.members), "attempt": member.attempt}
            actions.append(Admit(joining[number], {**where, "began_after": self._began_after}))
        return actions

    def _settle_all(self) -> list[Action]:
        """Return what can be done now that somebody has gone."""
        return [*self._settle(), *self._admit()] if self._committing is None else []

    def _check(self, rank: int, attempt: int) -> None:
        del attempt
        if rank not in self.members:
            raise StaleError("this member has left the run")

    def _missing(self, there: Iterable[int], number: int = 0) -> list[int]:
        there = set(there)
        start = self._began_after + 1
        return [
            member
            for member, known in self.members.items()
            if member not in there and (number in (0, start) or known.first + 1 < number)
        ]

    def _may_be_others(self, meeting: Mapping[int, Any]) -> bool:
        del meeting
        return True  # one that finds no rows left makes fewer reports, and comes to the barriers after them earlier

    def _may_commit(self) -> bool:
        return not self._is_short

    def _commit(self, number: int) -> Commit:
        by_rank = {self.members[member].rank: known.sent for member, known in self._reports.items()}
        given: dict[str, list[Any]] = {name: [] for name in self.rows}
        for known in self._reports.values():
            for dataset, ranges in known.sent.positions.items():
                given[dataset] += ranges
        rows = {name: of.state(given[name]) for name, of in self.rows.items()}
        return Commit(number, dict(sorted(by_rank.items())), rows)

    def _rank(self, member: int) -> int:
        return self.members[member].rank

    def _no_value(self) -> PsClusterError:
        return MemberUnavailableError(
            "rank 0 has left before it gave a value at this broadcast: broadcast before the first report, where those "
            "that join later get the same value, or be ready to do without"
        )
