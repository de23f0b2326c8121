"""Gangs: tasks that run at the same time, each on a worker of its own, all of them or none. Pure, like the scheduler.

A gang's members talk to each other while they run, so one of them alone is of no use: a gang is placed, fails, and is
retried as a whole. Each time it is placed is a generation, with tasks of its own under the same keys, so that the
updates of all generations count once. What a generation's members send each other carries its number.

    WAITING --place: all its workers are free--> RUNNING   each worker is reserved for its member, and sent it next; one
                                                           program may be placed ahead, see below
    RUNNING --all members returned-------------> DONE
    RUNNING --a member ended in another way----> ENDING    the others are cancelled (`Scheduler.settle_gangs`)
            --one gave up, and all have ended--> ENDING
    ENDING  --no member is left, no server may still apply an update of one, and it may run again--> WAITING, first
    ENDING  --the same, and it may not---------> FAILED, CANCELLED
    WAITING --an error, or it is not wanted----> CANCELLED

A member gives up when another one is gone, or does not answer. The cause is the other one's: its error, or the loss of
its worker, is on its way, and the others are not cancelled before it has come. If none comes, the attempt counts as if
a worker had died.

Such deaths are counted since a member has last told that steps of a synchronous run are committed (`progressed`). So
are errors that are retried, but not attempts that ran too long: the timeout is one for all steps. A gang that takes
steps for weeks does not fail because now and then a worker dies, but one that kills its workers does.

All workers are taken at once, when all are free. So that this happens on a busy cluster, one gang at a time, the front
one, keeps its workers from getting tasks that were scheduled after it. The front one is the first in line whose
workers are all up: a gang that waits for a worker that is gone holds none, and no gang waits for another that waits.

A program of global arrays is placed while another one still runs on the same workers, if nothing else is to run before
it: one program ahead. Each worker begins it once its member of the one before has returned, without waiting for a
message. These workers have nothing else, so all of them run the two in the same order, and neither waits for the other:

    the one before                       the one that follows
    RUNNING                              RUNNING: workers may have begun it, where the one before has returned
    a member is lost, fails, gives up,
    or is cancelled                      is taken back: ENDING, unless it has ended itself. A worker whose member of the
                                         one before has not returned gives it back without a message (`Task.follows`)
    ENDING, and may run again            goes back in line before that one, which then goes in front of it
    DONE                                 runs like any other

While a program is to go back in line, no other one gets its workers. So programs on the same workers run in their
order, whatever happens. The one that follows runs again as a whole. That changes nothing: its inputs are still there,
and it makes the same arrays again. Nor may it take away what the one before needs to run again; if it would, it waits
(`Gang.waits`). A worker's death counts for the program that it ran: the first one whose outcome has not come. Members
of the other one that gave up count for none. One that waits for another member waits for as long as the one before runs
there; so programs of very many members are not placed ahead (`MAX_AHEAD`).

A gang may have several members on a worker, and may go on without workers that are lost (`min_workers`): their members
are then placed on others. Once such a worker is back the generation ends, and the next one has its members at home.
If workers have left for good, and without them too few are left for that, it fails:

    WAITING --workers that it needs are GONE--> FAILED

Some gangs can do without a few members at their end (`spare`): those of steps with backup replicas. Once all others
have returned, one that is lost, or is left behind since its worker is silent, has no result, and the gang is DONE.
While such a worker may still run its member, others run those of the next gang, as if it were lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic

from pscluster.coordinator.scheduling.decisions.gang import Gang, GangState
from pscluster.coordinator.scheduling.decisions.tasks import ENDED, P, State, Task, WorkerState

MAX_AHEAD = 128
"""Members of a program that is placed ahead: the others may all open exchanges to a worker that has not begun it, which
keeps at most `worker.collectives.incoming.MAX_WAITING_EXCHANGES`."""


class Gangs(Generic[P]):
    """The gangs that have not ended. The scheduler owns it, and tells it how members end."""

    def __init__(self, workers: Sequence[WorkerState[P]], max_attempts: int) -> None:
        self._workers, self._max_attempts = workers, max_attempts
        self.line: deque[Gang[P]] = deque()  # those that wait for workers
        self.running: dict[Gang[P], None] = {}  # or ending
        self._broken: list[Gang[P]] = []  # those with members to end
        self._over: list[Gang[P]] = []  # those that have ended

    # Questions

    def __bool__(self) -> bool:
        return bool(self.line or self.running or self._over)

    @property
    def begun(self) -> list[Gang[P]]:
        """Return those in line of which a member may have changed something."""
        return [gang for gang in self.line if gang.begun]

    def waiting(self) -> Iterator[Task[P]]:
        """Yield the members of the gangs in line."""
        for gang in self.line:
            yield from gang.members

    def front(self) -> tuple[Gang[P], list[int]] | None:
        """Return the first gang in line whose workers are all up, with its workers by rank: the freest, if any will do.

        None if there is none.
        """
        up: list[int] | None = None
        for gang in self.line:
            if gang.workers is not None:
                if (indices := self._at_home_or_with_others(gang, gang.workers)) is not None:
                    return gang, indices
                continue
            if up is None:
                up = [index for index in range(len(self._workers)) if self._is_up(index)]
            if len(up) >= gang.size:
                freest = sorted(up, key=lambda index: (not self._workers[index].empty, index))
                return gang, sorted(freest[: gang.size])
        return None

    def _at_home_or_with_others(self, gang: Gang[P], homes: Sequence[int]) -> list[int] | None:
        """Return where the members can run, by rank: at home, or with those that have fewest. None: wait."""
        up = {index: 0 for index in homes if self._is_up(index)}
        missing = set(homes).difference(up)
        if missing and (len(up) < (gang.min_workers or len(homes)) or any(self._workers[at].awaited for at in missing)):
            return None
        for home in homes:
            if home in up:
                up[home] += 1
        placed = []
        for home in homes:
            if home not in up:
                home = min(up, key=lambda index: (up[index], index))
                up[home] += 1
            placed.append(home)
        return placed

    def _is_up(self, index: int) -> bool:
        worker = self._workers[index]
        if not worker.up or worker.leaving:
            return False
        if not worker.lingering:
            return True
        return not any(
            task.gang is not None and task.gang.state is GangState.DONE for task in worker.lingering.values()
        )

    def holds(self, index: int) -> Gang[P] | None:
        """Return the gang that keeps later tasks from this worker, if one does."""
        if not self.line or (front := self.front()) is None:
            return None
        gang, indices = front
        return gang if index in indices else None

    # Events

    def add(self, gang: Gang[P]) -> None:
        """Add a gang at the end of the line."""
        gang.renew()
        self.line.append(gang)

    def place(self, *, only_begun: bool, ahead: bool = False) -> Gang[P] | None:
        """Reserve workers for the front gang if all of them are free, or it may be sent ahead, and return it.

        `ahead`: nothing else is queued, so that a program may be sent to its workers while another one runs there.
        """
        front = self.front()
        if front is None or (only_begun and not front[0].begun):
            return None
        gang, indices = front
        if gang.isolated and self._are_kept_for_another(indices):
            return None
        may_follow = ahead and gang.is_program and not gang.waits and gang.size <= MAX_AHEAD
        before = self._program_on(indices) if may_follow else None
        if before is None and not all(self._workers[index].free for index in indices):
            return None
        self.line.remove(gang)
        self.running[gang] = None
        gang.state, gang.placed = GangState.RUNNING, indices
        gang.generation += 1
        for index, task in zip(indices, gang.members, strict=True):
            self._workers[index].reserved.append(task)
        if before is not None:
            before.follower = gang
            for task, one_before in zip(gang.members, before.members, strict=True):
                task.follows = one_before.id if one_before.state is State.SENT else 0
        return gang

    def _are_kept_for_another(self, indices: Sequence[int]) -> bool:
        """Return whether an isolated gang that was placed on some of these workers is to go back in line."""
        return any(
            gang.state is GangState.ENDING and gang.isolated and not gang.is_over and set(indices) & set(gang.placed)
            for gang in self.running
        )

    def _program_on(self, indices: Sequence[int]) -> Gang[P] | None:
        """Return the program that runs on these workers, by rank, if they have nothing else, and all may yet return."""
        program: Gang[P] | None = None
        for index in indices:
            worker = self._workers[index]
            if not worker.idle or worker.reserved or worker.lingering or worker.stopping or len(worker.sent) > 1:
                return None
            for task in worker.sent.values():
                if task.gang is None or (program is not None and task.gang is not program):
                    return None
                program = task.gang
        if program is None or not program.is_program or program.is_over or list(program.placed) != list(indices):
            return None
        returns = all(member.state in (State.SENT, State.DONE) for member in program.members)
        return program if returns and program.state is GangState.RUNNING else None

    def rejoin(self, index: int) -> None:
        """Note that a worker is up, or has nothing to do with a past gang any more: its members come back to it."""
        for gang in self.running:
            if gang.is_away(index) and not any(member.state in ENDED for member in gang.members):
                self.break_up(gang)

    def member_ended(self, task: Task[P]) -> None:
        """Note that a member has ended, in any way."""
        gang = task.gang
        assert gang is not None
        if task.state is not State.DONE:
            self._take_back_follower(gang)
        if task.state is not State.DONE and task not in gang.gave_up and not gang.has_enough:
            self.break_up(gang)
        elif gang.state is GangState.RUNNING and not gang.late:
            if gang.gave_up and not gang.has_enough:
                gang.state = GangState.ENDING
                return
            gang.state, gang.follower = GangState.DONE, None
            del self.running[gang]
            self._over.append(gang)

    def progressed(self, task: Task[P]) -> bool:
        """Note that a member has committed steps: deaths and errors before its generation do not count any more.

        Return whether it is of this generation.
        """
        gang = task.gang
        if gang is None or task not in gang.members:
            return False
        gang.deaths -= gang.deaths_before
        gang.errors -= gang.errors_before
        gang.failures -= gang.errors_before
        for member in gang.members:
            member.attempts -= gang.deaths_before
            member.failures -= gang.errors_before
        gang.deaths_before = gang.errors_before = 0
        return True

    def break_up(self, gang: Gang[P]) -> None:
        """Note that this generation can't be completed, unless what is missing can be spared."""
        if gang.state is GangState.RUNNING and not gang.has_enough:
            gang.state = GangState.ENDING
            self._broken.append(gang)
            self._take_back_follower(gang)

    def _take_back_follower(self, gang: Gang[P]) -> None:
        """Note that this gang can't be completed: the one that follows runs again after it."""
        if (follower := gang.follower) is not None and follower.state in (GangState.RUNNING, GangState.ENDING):
            follower.taken_back = True
            self.break_up(follower)

    def take_broken(self) -> list[Gang[P]]:
        """Return, once, the gangs whose other members must be cancelled."""
        broken, self._broken = self._broken, []
        return broken

    def withdraw_ending(self) -> None:
        """Mark the gangs that have broken up, and have not ended, as unwanted."""
        for gang in self.running:
            gang.withdrawn |= gang.state is GangState.ENDING

    def settle(self, may_still_update: Callable[[Task[P]], bool]) -> list[Gang[P]]:
        """Decide what becomes of gangs of which nothing is left. Return, once, those that have ended."""
        for gang in [gang for gang in reversed(self.running) if gang.state is GangState.ENDING]:  # each one goes first
            if any(may_still_update(member) for member in gang.members) or self._goes_second(gang):
                continue
            del self.running[gang]
            if gang.gave_up and not gang.taken_back and gang.deaths == gang.deaths_before:
                gang.deaths += 1
                if gang.deaths >= self._max_attempts:
                    gang.error = gang.error or next(iter(gang.gave_up.values()))
            if gang.is_over:
                gang.state = GangState.CANCELLED if gang.error is None else GangState.FAILED
                self._over.append(gang)
            else:
                gang.state = GangState.WAITING
                gang.renew()
                self.line.appendleft(gang)
        for gang in list(self.line):
            if (why := self._why_never_placed(gang)) is not None:
                self.line.remove(gang)
                gang.error, gang.state = why, GangState.FAILED
                self._over.append(gang)
        over, self._over = self._over, []
        return over

    @staticmethod
    def _goes_second(gang: Gang[P]) -> bool:
        """Return whether another one goes back in line before this one does, and so comes after it there."""
        follower = gang.follower
        return follower is not None and follower.state is GangState.ENDING and not (gang.is_over or follower.is_over)

    def _why_never_placed(self, gang: Gang[P]) -> Exception | None:
        """Return why a gang in line will never be placed; None if it may."""
        homes = set(gang.workers or ())
        gone = [why for at in sorted(homes) if (why := self._workers[at].gone) is not None]
        return gone[0] if gone and len(homes) - len(gone) < (gang.min_workers or len(homes)) else None

    def cancel_waiting(self, wanted: Callable[[Task[P]], bool]) -> list[Task[P]]:
        """Take the wanted gangs out of the line. Return their members, which have not ended yet."""
        cancelled: list[Task[P]] = []
        for gang in [gang for gang in self.line if any(map(wanted, gang.members))]:
            self.line.remove(gang)
            gang.state = GangState.CANCELLED
            self._over.append(gang)
            cancelled += gang.members
        return cancelled

    def withdraw(self, tasks: Iterable[Task[P]]) -> set[Task[P]]:
        """Mark the gangs of these tasks as unwanted. Return the tasks, with the other members of those gangs."""
        chosen = set[Task[P]]()
        for task in tasks:
            if task.gang is None:
                chosen.add(task)
            else:
                task.gang.withdrawn = True
                chosen.update(task.gang.members)
        return chosen
