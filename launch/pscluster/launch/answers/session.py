"""What becomes of the reports, barriers and broadcasts of a run's members. Pure.

Members are numbered by rank. Each numbers its reports from 1; the reports of all members with one number are committed
together:

    a report of number n, not committed-----> waits until all members that have not ended have reported n: then commit n
    n is committed--------------------------> all that waited for it are answered
    a report of a number that is committed--> answered at once: a member that was restarted repeats what it had done
    a member begins a later attempt---------> what its earlier one had sent and is not committed is dropped. If members
                                              restart together, so is what the others had sent in earlier attempts
    a member ends---------------------------> nobody waits for it any more
    a wait that takes too long--------------> fails, for all who wait there; the error names who is missing

Barriers and broadcasts have a place: the number of the member's next report, and how many there were since the last
one. So a restarted member finds those that all others have passed, and passes them at once. What was broadcast is kept
for it, up to `KEPT_BYTES`. One that has loaded a checkpoint counts its reports from there, and may come to a barrier
that the others never had: then they wait for it in the report that follows, and so it passes.

What may be lost: all that is not committed, if this process ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pscluster.core.errors import MemberTimeoutError, MisuseError, ProtocolError, PsClusterError, StaleError

KEPT_BYTES = 64 << 20
"""The most bytes of broadcast values that are kept for members that restart."""

Place: TypeAlias = tuple[int, int]
"""Of a barrier or broadcast: the number of the next report, and its own since the last one, from 0."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a member reports."""

    metrics: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]] | None = None  # of its part of a checkpoint; None: it has none
    name: str = ""  # of the checkpoint, as the member asks for
    positions: Mapping[str, Sequence[Any]] = field(
        default_factory=dict
    )  # in its datasets; see `shards`, `elastic.rows`
    with_variables: bool = False  # its checkpoint has those of the servers
    updates: Mapping[int, int] = field(default_factory=dict)  # of variables, so far in its function


@dataclass(frozen=True, slots=True)
class Commit:
    """The reports with this number are all there: commit them, then call `Session.committed_now`."""

    number: int
    reports: Mapping[int, Report]  # by rank
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of an elastic run: the position by dataset


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a question, with a value or an error."""

    question: Any
    value: Any = None
    error: PsClusterError | None = None


Action: TypeAlias = Commit | Answer


@dataclass(slots=True)
class _Waiting:
    """A member at a report, a barrier or a broadcast."""

    attempt: int
    since: float
    question: Any
    sent: Any = None


@dataclass(slots=True)
class Member:
    """What is known of one member."""

    attempt: int = 0  # 0: it has not begun
    ended: bool = False


class Session:
    """The members of one run, their reports and meetings."""

    def __init__(self, size: int, *, committed: int = 0, together: bool = False, seconds: float = 600.0) -> None:
        """Begin after report number `committed`.

        Args:
            size: how many members there are.
            together: members restart together, so that the attempt of one is that of all.
            seconds: how long a member may wait for the others.
        """
        self.members = {rank: Member() for rank in range(size)}
        self.committed = committed
        self._together = together
        self._seconds = seconds
        self._committing: int | None = None
        self._reports: dict[int, _Waiting] = {}  # by rank, of number `committed` + 1
        self._meetings: dict[Place, dict[int, _Waiting]] = {}
        self._passed: set[Place] = set()
        self._broadcasts: OrderedDict[Place, tuple[Any, int]] = OrderedDict()

    # Events

    def begin(self, rank: int, attempt: int) -> None:
        """Begin an attempt of a member: what its earlier ones have sent is dropped."""
        member = self.members[rank]
        if attempt < member.attempt:
            raise StaleError("a later attempt of this member has begun")
        member.attempt, member.ended = attempt, False
        for other in self.members.values() if self._together else ():
            if other.attempt < attempt:  # it will begin, too, also if it had ended
                other.attempt, other.ended = attempt, False
        if self._committing is None:
            self._drop(self._reports, rank, attempt)
        for meeting in self._meetings.values():
            self._drop(meeting, rank, attempt)

    def _drop(self, waiting: dict[int, _Waiting], rank: int, attempt: int) -> None:
        for other, known in list(waiting.items()):
            if known.attempt < attempt and (other == rank or self._together):
                del waiting[other]

    def report(self, rank: int, attempt: int, number: int, report: Report, question: Any, now: float) -> list[Action]:
        """Take a member's report. ProtocolError if it is not the next one."""
        self._check(rank, attempt)
        if number <= self.committed:
            return [Answer(question)]
        if number != self.committed + 1:
            raise ProtocolError(f"report {number} of rank {rank}, but {self.committed} reports are committed")
        self._reports[rank] = _Waiting(attempt, now, question, report)
        return self._settle()

    def committed_now(self, number: int, path: str | None, error: PsClusterError | None = None) -> list[Action]:
        """Take note that a commit has ended, with the path of its checkpoint or an error; answer all who waited."""
        assert self._committing == number
        self._committing = None
        waiting, self._reports = self._reports, {}
        if error is None:
            self.committed = number
        return [Answer(known.question, path, error) for known in waiting.values()]

    def meet(
        self, rank: int, attempt: int, place: Place, question: Any, now: float, *, sent: Any = None, nbytes: int = -1
    ) -> list[Action]:
        """Take a member that has come to a barrier, or to a broadcast if `nbytes` is not negative.

        The member with rank 0 sends the value that all get, of `nbytes`; the others send 0 bytes.
        """
        self._check(rank, attempt)
        if nbytes > 0 and place not in self._broadcasts:
            self._broadcasts[place] = sent, nbytes
            while sum(size for _, size in self._broadcasts.values()) > KEPT_BYTES and len(self._broadcasts) > 1:
                self._broadcasts.popitem(last=False)
        if place in self._passed:
            return [self._passes(place, _Waiting(attempt, now, question, nbytes >= 0))]
        self._meetings.setdefault(place, {})[rank] = _Waiting(attempt, now, question, nbytes >= 0)
        return self._settle()

    def end(self, rank: int, attempt: int) -> list[Action]:
        """Take note that a member's function has returned."""
        if attempt < self.members[rank].attempt:
            return []
        self.members[rank].ended = True
        return self._settle()

    def expire(self, now: float) -> list[Action]:
        """Give up what has waited for too long."""
        actions: list[Action] = []
        if self._committing is None and self._is_late(self._reports, now):
            actions += self._fail(f"report {self.committed + 1}", self._reports)
            self._reports = {}
        for place, meeting in list(self._meetings.items()):
            if self._is_late(meeting, now):
                actions += self._fail(f"a barrier or broadcast before report {place[0]}", meeting, place[0])
                del self._meetings[place]
        return actions

    # Decisions

    def _check(self, rank: int, attempt: int) -> None:
        if attempt != self.members[rank].attempt:
            raise StaleError("another attempt of this member has begun")

    def _settle(self) -> list[Action]:
        """Return what can be done now that a member has come, or ended."""
        actions: list[Action] = []
        for place, meeting in list(self._meetings.items()):
            missing = self._missing(meeting, place[0])
            if place[0] <= self.committed + 1 and self._may_be_others(meeting):
                missing = [rank for rank in missing if rank not in self._reports]
            if meeting and not missing:
                actions += [self._passes(place, known) for known in meeting.values()]
                self._passed.add(place)
                del self._meetings[place]
        if self._reports and self._committing is None and self._may_commit() and not self._missing(self._reports):
            self._committing = self.committed + 1
            actions.append(self._commit(self._committing))
        return actions

    def _may_be_others(self, meeting: Mapping[int, _Waiting]) -> bool:
        """Return whether those that report next may have been past this barrier, or never have come to it."""
        return any(known.attempt > 1 for known in meeting.values())

    def _may_commit(self) -> bool:
        return True

    def _commit(self, number: int) -> Commit:
        return Commit(number, {rank: self._reports[rank].sent for rank in sorted(self._reports)})

    def _passes(self, place: Place, known: _Waiting) -> Answer:
        """Return the answer to a member at a barrier or broadcast that all have passed."""
        if not known.sent:
            return Answer(known.question)
        if place not in self._broadcasts:
            return Answer(known.question, error=self._no_value())
        return Answer(known.question, self._broadcasts[place][0])

    def _no_value(self) -> PsClusterError:
        return MisuseError(
            "rank 0 is already past this broadcast, and gave no value for it: after a restart, broadcast before "
            f"get_checkpoint(), or give FailureConfig(restart='group'). The last {KEPT_BYTES >> 20} MiB are kept"
        )

    def _missing(self, there: Iterable[int], number: int = 0) -> list[int]:
        """Return who is not there: at a report, or at a meeting before the report with a number."""
        del number  # all are members at each
        there = set(there)
        return [rank for rank, member in self.members.items() if not member.ended and rank not in there]

    def _rank(self, member: int) -> int:
        """Return the rank of a member: here each has the number of its rank."""
        return member

    def _is_late(self, waiting: Mapping[int, _Waiting], now: float) -> bool:
        return any(now - known.since > self._seconds for known in waiting.values())

    def _fail(self, subject: str, waiting: Mapping[int, _Waiting], number: int = 0) -> list[Action]:
        missing = ", ".join(str(self._rank(member)) for member in self._missing(waiting, number))
        error = MemberTimeoutError(
            f"{subject} has waited {self._seconds:g} s for rank {missing}: every rank has to call report(), barrier() "
            "and broadcast() as often as the others, in the same order. If it only takes longer, give "
            "RunConfig(report_timeout=) more seconds"
        )
        return [Answer(known.question, error=error) for known in waiting.values()]
