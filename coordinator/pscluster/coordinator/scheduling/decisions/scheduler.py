"""Decide which worker runs which function, and what becomes of each. Pure: no I/O, no clock, no threads, no locks.

Each public method is a question, which changes nothing, or an event: it changes what the scheduler knows, and returns
what its owner has to do. Times are given to it. It extends `assignments` (who gets which tasks), and that `task_queue`
(the tasks that no worker has).

A task is one scheduled function. Its states, and the events between them:

    BLOCKED --unblock (its RemoteValue arguments are ready)--> QUEUED
    QUEUED  --take, or offer and give--> SENT       tasks that have begun first, then the oldest
    BLOCKED, QUEUED --withdraw---------> CANCELLED
    SENT    --finish-------------------> DONE
    SENT    --fail---------------------> FAILED     it raised, or it has run too long and may run on
    SENT    --give_back----------------> QUEUED     the worker never started it; to the head of the queue
    SENT    --run_again----------------> QUEUED     it raised or was stopped for running too long, and has a retry left;
                                                    it has begun
    SENT    --lose---------------------> ORPHANED   its worker is lost
    ORPHANED --requeue-----------------> QUEUED     to the head of the queue, as begun. By then every server has closed
                                                    the worker's incarnation, so no update of the lost attempt can
                                                    arrive during the next one
    ORPHANED --requeue with an error---> FAILED     see `decide_loss`
    any but DONE, FAILED --another task's error--> CANCELLED
    SENT, ORPHANED --withdraw----------> CANCELLED  when it fails, or would be queued again
    any but DONE, FAILED --cancel------> CANCELLED  at once

A task that ends at once while it is sent or orphaned leaves an attempt behind:

    SHUTTING OUT --shut_out--> OVER   every server refuses its updates; until then it counts as executing
    LINGERS --its outcome comes, or its worker is lost--> GONE   until then its worker gets no other task

A task's running time is measured from when it was first seen to be the first of its worker's tasks (`late`). If it has
a retry left it is asked to stop, and its worker is given up if it has not done so within STOP_SECONDS: no other attempt
may begin while this one could still read what the next one writes. Otherwise it is ended by `fail`.

The first error wins: it is kept, all that is blocked or queued is cancelled, and what is sent should be recalled. (The
error of an isolated task ends that task only.) The error can be taken, once, when nothing is sent or orphaned any more:
then nothing executes, and the scheduler is as new. A `final` error (a parameter server is lost) is not cleared by being
taken: every later call raises it again. While a worker's report that a server is lost is being checked (`doubt`,
`no_doubt`), no error can be taken, since it may have to become final.

A task has begun when an attempt of it may have changed something: its worker was lost, perhaps with its outcome, or it
failed and will be retried. It stays so until it ends. A cut through the job (a checkpoint, a restore, copies of
variables, a cancel) must not contain half of a task, and puts up a barrier:

    NONE    --begin_barrier--> WAITING   only tasks that have begun are sent
    WAITING --take_barrier---> HELD      nothing is sent or orphaned, nothing that has begun is queued, and there is no
                                         other owner: nothing executes, and nothing is sent
    any     --end_barrier----> NONE      once no other barrier is waiting

Several may wait; one at a time is held. A function that ends with an error, or is cancelled, may have changed something
for good: the owner keeps a record of that.

Workers come and go. Each has a place, its index here, which another process may take later for the same task:

    MEMBER --worker_up--> UP --lose, requeue--> MEMBER   as often as it dies and returns
    MEMBER --worker_left----------------------> GONE     it is not expected any more; it has no tasks by then
    none, GONE --worker_joined----------------> MEMBER

A gang that can't run without workers that are GONE fails (see `gangs`); every other task runs elsewhere.

Ids count from 1 in the order of `add`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pscluster.coordinator.scheduling.decisions.assignments import Assignments
from pscluster.coordinator.scheduling.decisions.gang import Gang
from pscluster.coordinator.scheduling.decisions.tasks import ENDED, Ending, Late, Loss, P, State, Task

STOP_SECONDS = 5.0
"""A task that was asked to stop, to be retried, has this long to reach a library call; then its worker is given up."""

_SMOOTHING = 0.2


class Scheduler(Assignments[P]):
    """What becomes of tasks and their workers. The owner serializes all calls with one lock."""

    def __init__(self, num_workers: int, max_attempts: int, max_queued: float = math.inf) -> None:
        super().__init__(num_workers, max_attempts, max_queued)
        self._max_attempts = max_attempts

    # Questions

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.executing and not self.gangs

    @property
    def settled(self) -> bool:
        """Return whether it is idle, and it is known whether its error is final."""
        return self.idle and (self.final or not self.doubts)

    @property
    def ends_waits(self) -> bool:
        """Return whether users' waits may be over: nothing executes, and nothing waits, or an error or barrier does."""
        if self.executing or self.gangs.running:
            return False
        return self.error is not None or bool(self.barriers) or not (self.waiting or self.gangs)

    @property
    def is_shutting_out(self) -> bool:
        """Return whether a server may still apply an update of a task that has ended."""
        return bool(self._unrefused)

    def may_retry(self, task: Task[P], *, data_unread: bool = False) -> bool:
        """Return whether a task would run again if it failed now."""
        if task.withdrawn or self.error is not None or (task.gang is not None and task.gang.is_over):
            return False
        return task.failures < task.max_retries(data_unread=data_unread)

    # Events: users wait, and no longer want functions

    def take_error(self) -> Exception | None:
        """Return the error once nothing executes and it is known whether it is final; clear it unless it is."""
        if self.error is None or self.executing or self.gangs.running or (self.doubts and not self.final):
            return None
        error = self.error
        if not self.final:
            self.error = None
        return error

    def withdraw(self, tasks: Iterable[Task[P]]) -> list[Task[P]]:
        """Mark tasks as unwanted; cancel, and return, those that no worker has."""
        for task in self.gangs.withdraw(tasks):
            task.withdrawn = True
        return self._cancel_waiting(lambda task: task.withdrawn)

    def cancel(self, tasks: Iterable[Task[P]]) -> tuple[list[Task[P]], list[Task[P]]]:
        """Cancel these tasks at once. Return those that had not ended, and those of them that must be shut out."""
        return self._cancel(self.gangs.withdraw(tasks))

    def _cancel(self, chosen: set[Task[P]]) -> tuple[list[Task[P]], list[Task[P]]]:
        cancelled, left_behind = self._cancel_waiting(chosen.__contains__), list[Task[P]]()
        for worker in self.workers:
            reserved = [task for task in worker.reserved if task in chosen]
            worker.reserved = [task for task in worker.reserved if task not in chosen]
            for task in reserved:
                self._end(task, State.CANCELLED)
            cancelled += reserved
            lingering = {task.id: task for task in worker.sent.values() if task in chosen}
            worker.sent = {task.id: task for task in worker.sent.values() if task not in chosen}
            worker.lingering |= lingering
            left_behind += [*lingering.values(), *(task for task in worker.orphaned if task in chosen)]
            worker.orphaned = [task for task in worker.orphaned if task not in chosen]
        for task in left_behind:
            self._unrefused.add(task.id)
            self._end(task, State.CANCELLED)
        return cancelled + left_behind, left_behind

    def abort(self, error: Exception, *, final: bool) -> list[Task[P]]:
        """Set an error that is no function's. Return the tasks that it cancels; a final one cancels orphaned tasks too.

        A final error replaces one that is not; the first final one stays.
        """
        if self.error is not None and not final:
            return []
        cancelled = []
        if final:
            for worker in self.workers:
                orphaned, worker.orphaned = worker.orphaned, []
                for task in orphaned:
                    self._end(task, State.CANCELLED)
                cancelled += orphaned
            if self.final:
                return cancelled
            self.final = True
        return cancelled + self._set_error(error)

    # Events: an outcome comes

    def finish(self, index: int, task_id: int, seconds: float, waited: float = 0.0) -> Task[P] | None:
        """End a task whose function returned after `seconds`, of which it `waited` some for its data.

        None if that does not count: the worker no longer has it, or was asked to stop it (see `ended_badly`).
        """
        worker = self.workers[index]
        task = worker.sent.pop(task_id, None) if task_id != worker.stopping else None
        if task is None:
            return None
        if worker.seconds is None:
            worker.seconds, worker.waited = seconds, waited
        else:
            worker.seconds += _SMOOTHING * (seconds - worker.seconds)
            worker.waited += _SMOOTHING * (waited - worker.waited)
        worker.done += 1
        self._end(task, State.DONE)
        return task

    def ended_badly(self, index: int, task: Task[P], *, stopped: bool = False, data_unread: bool = False) -> Ending:
        """Decide what becomes of a worker's task that raised, stopped as asked, or returned too late; count a retry.

        With `data_unread` it raised because its examples could not be read.
        """
        worker = self.workers[index]
        if stopped and (task.id != worker.stopping or self.error is not None):
            del worker.sent[task.id]
            self._end(task, State.CANCELLED)
            return Ending.CANCELLED
        if not self.may_retry(task, data_unread=data_unread):
            return Ending.FAILED
        task.failures += 1
        if task.gang is not None:
            task.gang.failures = task.failures
            task.gang.errors += task.id != worker.stopping
        return Ending.AGAIN

    def fail(self, index: int, task: Task[P], error: Exception, *, runs_on: bool = False) -> list[Task[P]]:
        """End a worker's task with an error. With `runs_on` its attempt may still run, and lingers.

        Returns the tasks that are cancelled: the task itself, if it is cancelled by an earlier error or was withdrawn.
        """
        worker = self.workers[index]
        del worker.sent[task.id]
        if runs_on:
            worker.lingering[task.id] = task
            self._unrefused.add(task.id)
        if self.error is not None or task.withdrawn:
            self._end(task, State.CANCELLED)
            return [task]
        return self._fail(task, error)

    def give_back(self, index: int, task_ids: Iterable[int]) -> list[Task[P]]:
        """Put tasks that the worker will not run at the head of the queue; return those that are cancelled instead."""
        worker, task_ids = self.workers[index], list(task_ids)
        for task_id in task_ids if worker.lingering else ():
            self.lingering_ended(index, task_id)
        if worker.stopping in task_ids:  # its next attempt, perhaps here, may take as long again
            worker.stopping = 0
        tasks = [worker.sent.pop(task_id) for task_id in task_ids if task_id in worker.sent]
        for task in tasks:
            task.attempts -= 1  # there was none
        return self._requeue(tasks)

    def run_again(self, index: int, task_ids: Iterable[int]) -> list[Task[P]]:
        """Put tasks that failed and will be retried at the head of the queue, as `give_back` does. They have begun."""
        worker, task_ids = self.workers[index], list(task_ids)
        for task_id in task_ids:
            if task_id in worker.sent:
                worker.sent[task_id].begun_on = index
        return self.give_back(index, task_ids)

    def lingering_ended(self, index: int, task_id: int) -> None:
        """Note that a worker no longer runs a task that is not its any more, if it did, or that it was never sent."""
        worker = self.workers[index]
        ended = worker.lingering.pop(task_id, None)
        if ended is not None and ended.gang is not None and worker.up and not worker.lingering:
            self.gangs.rejoin(index)

    def shut_out(self, tasks: Iterable[Task[P]] | None = None) -> None:
        """Note that every server refuses updates by attempts of these tasks (None: all) that were left behind."""
        self._unrefused.difference_update(self._unrefused if tasks is None else [task.id for task in tasks])

    # Events: a worker is lost

    def lose(self, index: int) -> Task[P] | None:
        """Orphan the tasks of a lost worker, and return the one that it ran; None if it had none.

        It ran them in order, so its death is an attempt of the oldest only: the others did not start, or had ended and
        lost their outcomes. Otherwise a function that waits behind others could be given up for what they did, or for a
        machine that is taken away again and again. But all of them may have begun.
        """
        worker = self.workers[index]
        worker.up = worker.idle = False
        worker.lingering.clear()
        for task in worker.reserved:
            self._end(task, State.CANCELLED)
        worker.reserved = []
        lost = list(worker.sent.values())
        for task in lost[1:]:
            task.attempts -= 1
        worker.orphaned.extend(lost)
        worker.sent.clear()
        for task in worker.orphaned:
            task.state, task.begun_on = State.ORPHANED, index
            if task.gang is not None:
                self.gangs.break_up(task.gang)
        return worker.orphaned[0] if worker.orphaned else None

    def decide_loss(self, index: int, task: Task[P]) -> Loss | None:
        """Decide what `requeue` should do with the task that a lost worker ran, and count a retry.

        None if it has ended, or is cancelled by `requeue`.
        """
        if task.state is not State.ORPHANED or task.withdrawn or self.error is not None:
            return None
        if task.gang is not None and task.gang.has_enough:
            return None
        late = task.id == self.workers[index].stopping
        if late and not self.may_retry(task):
            return Loss.TOO_LONG
        if task.attempts >= self._max_attempts:
            return Loss.DEADLY
        task.failures += late
        if task.gang is not None:
            task.gang.failures, task.gang.deaths = task.failures, task.attempts
        return Loss.RETRY if late else Loss.AGAIN

    def requeue(self, index: int, error: Exception | None = None) -> list[Task[P]]:
        """Queue the tasks of a lost worker again: every server has closed its incarnation.

        With an error the one that it ran fails. Returns the tasks that are cancelled.
        """
        worker = self.workers[index]
        tasks, worker.orphaned = worker.orphaned, []
        if error is None:
            return self._requeue(tasks)
        return self._requeue(tasks[1:]) + self._fail(tasks[0], error)

    # Events: gangs are added, placed, and end

    def add_gang(self, gang: Gang[P]) -> None:
        """Add a gang. Only while there is no error."""
        assert self.error is None, "the error must be taken first"
        gang.order = self.entered
        self.gangs.add(gang)

    def place_gang(self) -> Gang[P] | None:
        """Reserve workers for a gang if all that it needs are free, and return it. Each gets its member next."""
        if not self.gangs.line or self._barrier_owner in self.barriers:
            return None
        gang = self.gangs.place(only_begun=bool(self.barriers), ahead=not self.queued)
        for task in gang.members if gang is not None else ():
            self.entered += 1
            task.id = self.entered
            self._keys.add(task.key)
        return gang

    def gave_up(self, index: int, task: Task[P], error: Exception) -> None:
        """End a worker's member of a gang that missed another one; `error` says so."""
        assert task.gang is not None
        del self.workers[index].sent[task.id]
        task.gang.gave_up[task] = error
        self._end(task, State.CANCELLED)

    def leave_behind(self, tasks: Iterable[Task[P]]) -> list[Task[P]]:
        """End members that their gangs can do without; return them, since they may run on and must be shut out."""
        _, left_behind = self._cancel({task for task in tasks if task.gang is not None and task.gang.has_enough})
        return left_behind

    def settle_gangs(self) -> tuple[list[Task[P]], list[Gang[P]]]:
        """Decide what becomes of gangs with members that have ended.

        Returns what it has cancelled and must be shut out: the other members of a gang that failed; and the gangs that
        have ended.
        """
        left_behind: list[Task[P]] = []
        for task in self.members_ended:
            self.gangs.member_ended(task)
        for gang in self.gangs.take_broken():
            # Not those of a lost worker: they end once its incarnation is closed.
            _, left = self._cancel({member for member in gang.members if member.state in (State.QUEUED, State.SENT)})
            left_behind += left
        self.members_ended.clear()
        if self.error is not None:  # which may have come after they broke up: they do not wait for workers again
            self.gangs.withdraw_ending()
        over = self.gangs.settle(lambda task: task.id in self._unrefused or task.state not in ENDED)
        for task in [task for gang in over for task in gang.members if task.state not in ENDED]:
            task.state = State.CANCELLED  # of a gang that was never placed: no server has heard of it
        return left_behind, over

    # Events: time passes

    def late(self, index: int, reached: int, now: float) -> tuple[Late, Task[P]] | None:
        """Return what to do about the first of a worker's tasks, if it has run longer than it may.

        `reached` is the last position for which anything was sent to it; `now` counts seconds of this process awake.
        """
        worker = self.workers[index]
        task = next(iter(worker.sent.values()), None)
        if task is None or task.position > reached:
            return None
        if worker.lingering:  # it waits for them
            worker.front = (0, 0)
            return None
        if worker.front != (task.id, task.position):
            worker.front, worker.front_since = (task.id, task.position), now
        timeout = task.limits.timeout
        if timeout is None or (over := now - worker.front_since - timeout) < 0:
            return None
        if not self.may_retry(task):
            return Late.END, task
        if worker.stopping != task.id:
            worker.stopping = task.id
            return Late.STOP, task
        return (Late.GIVE_UP, task) if over > STOP_SECONDS else None
