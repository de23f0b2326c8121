"""The queue of functions: every decision about them, and nothing else. Pure: no I/O, no clock, no locks.

A task is one scheduled function. Its states and what moves it:

    BLOCKED --its RemoteValue arguments are ready--> QUEUED
    QUEUED  --take(worker)-------------------------> SENT      those that have begun before all others, then the
                                                               oldest first
    BLOCKED, QUEUED --cancel_waiting---------------> CANCELLED
    SENT    --finish--> DONE | --fail--> FAILED
    SENT    --give_back----------------------------> QUEUED    the worker never started it; at the head
    SENT    --run_again(worker)--------------------> QUEUED    it raised or ran too long, and is to run again; it has
                                                               begun
    SENT    --lose(worker)-------------------------> ORPHANED  the worker is gone
    ORPHANED --requeue(worker)---------------------> QUEUED    at the head, it may have begun; once every server has
                                                               closed the worker's incarnation, so that nothing of
                                                               the lost attempt lands beside the new one
    any but DONE, FAILED --an error elsewhere------> CANCELLED
    any but DONE, FAILED --withdraw----------------> CANCELLED what is sent or orphaned: once it ends, or comes back
    any but DONE, FAILED --cancel------------------> CANCELLED at once
    SENT    --time_out-----------------------------> FAILED    at once: it has run too long, and is not to run again

A task that is sent or orphaned and ends at once leaves an attempt behind, which nobody waits for:

    SHUTTING OUT --shut_out--> OVER   every server refuses what it still updates; until then it counts as executing
    STRAY --its outcome, or its worker is lost--> GONE   until then its worker is given nothing else

How long a task runs is measured from when it was first seen to be the first that its worker has (`late`): where it may
run again it is asked to stop, and given up with its worker if it does not within STOP_SECONDS, since no other attempt
may begin while that one could still read what the other writes; else it is ended by `time_out`.

The first error wins: it is kept, all that is blocked or queued is cancelled, and what is sent is to be
recalled. (But for the error of a task that is isolated: it ends nothing but itself.) The error can be taken,
once, when nothing is sent or orphaned any more: at that moment nothing executes, and the scheduler is as new. An
error that is `final` (a parameter server is lost) is not cleared by being taken: it is raised again by every later
call. Where somebody has said that a server is lost, it is found out whether that is so:

    SURE  --doubt--> DOUBTS  no error can be taken, since it may have to be final
    DOUBTS --no_doubt, as often--> SURE   after an `abort`, where it was so

A function has begun when an attempt of it may have changed something: its worker was lost, whose outcomes may be lost
with it, or it failed and is to run again. It stays so until it ends, wherever it is. What makes a cut through the job
(a checkpoint, a restore, copies of variables, a cancel) must not meet the half of one, and puts up a barrier:

    NONE    --begin_barrier--> WAITING   only what has begun is sent
    WAITING --take_barrier---> HELD      once nothing is sent or orphaned, nothing that has begun is queued, and there
                                         is no other owner: nothing executes, and nothing is sent
    any     --end_barrier----> NONE      as soon as nobody waits

Several may wait; one at a time is its owner. What waits too long gives up, and nothing is lost. A function that ends
with an error, or is cancelled, may have changed something for good: its owner says so.

Who may enter tasks: whoever has the queue alone (`begin_exclusive`), else anybody, while it is not full. A key names
one piece of work, so no two tasks that have not ended share one (`is_scheduled`).

A worker is idle while it waits for something to do, and free if it has nothing besides. A task goes to the free ones in
turn (`next_free`, `to_wake`); to an idle one goes what another has not started (`steal_for`), unless that one is being
asked for some already. What failed is run again as often as it may be (`may_retry`).

Ids rise from 1 in the order of `add`. `ended` collects the ids that no server needs to remember.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

TARGET_SECONDS = 0.01
"""So much work, by its measured time, is kept with a worker beyond what it runs."""

STOP_SECONDS = 5.0
"""So long what is to run again may go on, when its time is over, to its next library call; then its worker is lost."""

MAX_WINDOW = 1000
MAX_BATCH_BYTES = 1 << 20
_SMOOTHING = 0.2


class State(enum.Enum):
    """Of a task; see the module's docstring."""

    BLOCKED = enum.auto()
    QUEUED = enum.auto()
    SENT = enum.auto()
    ORPHANED = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


class Late(enum.Enum):
    """What is to become of a task that has run too long."""

    ASK = enum.auto()  # it is to run again: ask it to stop
    GIVE_UP = enum.auto()  # it has not stopped: its worker is lost
    END = enum.auto()  # it does not run again: see `time_out`


class Ending(enum.Enum):
    """What comes of a task that has not ended well."""

    CANCELLED = enum.auto()
    AGAIN = enum.auto()  # it is to run again: see `run_again`
    FAILED = enum.auto()


_DONE = State.DONE  # to look it up in an enum takes as long as the rest of `_end`

P = TypeVar("P")


class Task(Generic[P]):
    """One scheduled function. `payload` is the owner's; the scheduler does not look at it."""

    __slots__ = (
        "attempts",
        "begun_on",
        "blockers",
        "data_retries",
        "failures",
        "id",
        "isolated",
        "key",
        "payload",
        "position",
        "retries",
        "sent",
        "since",
        "size",
        "state",
        "timeout",
        "withdrawn",
    )

    def __init__(
        self,
        payload: P,
        blockers: int = 0,
        size: int = 0,
        *,
        isolated: bool = False,
        since: float = 0.0,
        timeout: float | None = None,
        retries: int = 0,
        data_retries: int = 0,
        key: int = 0,
    ) -> None:
        self.id = 0
        self.payload = payload
        self.blockers = blockers
        self.size = size
        self.state = State.BLOCKED if blockers else State.QUEUED
        self.attempts = 0
        self.begun_on = -1  # the worker of an attempt that may have changed something and did not end it; -1: none
        self.since = since  # when it was entered
        self.sent = 0.0  # when it was sent last
        self.position = 0  # in the order of all that were sent on the worker's stream
        self.timeout = timeout  # seconds that it may run, each time
        self.retries = retries  # how often it may raise, or run too long, and is run again
        self.data_retries = data_retries  # the same where its examples can't be read
        self.failures = 0  # after which it was run again
        self.key = key  # its name in the work; 0: it has none
        self.isolated = isolated  # its error is its own, and cancels nothing else
        self.withdrawn = False  # nobody wants it any more: where it would be queued again, or fails, it is cancelled

    @property
    def begun(self) -> bool:
        """May an attempt that did not end it have changed something?"""
        return self.begun_on >= 0

    def __repr__(self) -> str:
        return f"<Task {self.id} {self.state.name} attempts={self.attempts}>"


@dataclass(slots=True)
class WorkerState(Generic[P]):
    """What the scheduler knows of a worker."""

    up: bool = False
    idle: bool = False  # it waits for something to do, and can be given it at once
    leaving: bool = False  # it is to be given nothing more
    recalled: bool = False  # it is being asked for some of what it has
    sent: dict[int, Task[P]] = field(default_factory=dict)  # in the order of sending
    orphaned: list[Task[P]] = field(default_factory=list)
    strays: dict[int, Task[P]] = field(default_factory=dict)  # have ended, and may still run here
    front: tuple[int, int] = (0, 0)  # number and position of the first one that it has
    front_since: float = 0.0  # when it was first seen to be
    asked: int = 0  # number of one that has run too long, and was asked to stop
    sent_count: int = 0
    seconds: float | None = None  # of a function, smoothed
    done: int = 0  # functions that returned, since the beginning

    @property
    def empty(self) -> bool:
        """It has nothing, and runs nothing."""
        return not self.sent and not self.strays

    @property
    def free(self) -> bool:
        """It takes a function for certain: who has something may have no room."""
        return self.idle and self.up and not self.leaving and self.empty

    @property
    def window(self) -> int:
        """How many functions to keep with this worker: one until it is known how long they take."""
        if self.seconds is None:
            return 1
        return min(MAX_WINDOW, 2 + int(TARGET_SECONDS / max(self.seconds, 1e-6)))


class Scheduler(Generic[P]):
    """The queue and who has what. Its owner serialises all calls with one lock."""

    def __init__(self, num_workers: int, max_attempts: int, max_queued: float = math.inf) -> None:
        self.workers: list[WorkerState[P]] = [WorkerState() for _ in range(num_workers)]
        self.error: Exception | None = None
        self.final = False
        self.doubts = 0  # ways in which it is being found out whether a server is lost
        self.ended: list[int] = []
        self.failed = self.were_cancelled = 0  # of those that have ended
        self._max_attempts = max_attempts
        self._max_queued = max_queued
        self._exclusive: object | None = None  # who alone may enter tasks
        self._turn = 0  # whose turn it is when there is less to do than there are free workers
        self._keys: set[int] = set()  # of tasks that have not ended
        self._to_forget: set[int] = set()  # keys of what is not entered again
        self.barriers: set[object] = set()
        """Who makes a barrier, or waits to."""
        self._barrier_owner: object | None = None  # who has it now
        self._unrefused: set[int] = set()  # tasks that have ended, and of which a server may still take an update
        self._begun: deque[Task[P]] = deque()  # queued, before all others
        self._queue: deque[Task[P]] = deque()
        self._blocked: set[Task[P]] = set()
        self._last_id = 0

    # What there is

    @property
    def waiting(self) -> int:
        """Tasks that no worker has."""
        return len(self._begun) + len(self._queue) + len(self._blocked)

    @property
    def queued(self) -> int:
        """Tasks that could be sent now."""
        return len(self._begun) if self.barriers else len(self._begun) + len(self._queue)

    @property
    def full(self) -> bool:
        """Nothing can be entered until something is sent."""
        return self.waiting >= self._max_queued

    @property
    def entered(self) -> int:
        """Tasks that there ever were."""
        return self._last_id

    @property
    def next_one(self) -> Task[P] | None:
        """The head of the queue."""
        return next(iter(self._begun or self._queue), None)

    @property
    def in_flight(self) -> int:
        """Tasks that are sent or orphaned, or have ended so that something of them could still land."""
        return sum(len(worker.sent) + len(worker.orphaned) for worker in self.workers) + len(self._unrefused)

    def tasks(self) -> Iterator[Task[P]]:
        """All that have not ended."""
        yield from self._blocked
        yield from self._begun
        yield from self._queue
        for worker in self.workers:
            yield from worker.sent.values()
            yield from worker.orphaned

    @property
    def idle(self) -> bool:
        """Nothing is waiting and nothing executes."""
        return not self.waiting and not self.in_flight

    @property
    def settled(self) -> bool:
        """Idle, and it is known of each error whether it is final."""
        return self.idle and (self.final or not self.doubts)

    @property
    def is_shutting_out(self) -> bool:
        """May a server still take an update of what has ended?"""
        return bool(self._unrefused)

    @property
    def begun(self) -> list[Task[P]]:
        """Tasks that have begun, and wait to be run again."""
        return list(self._begun)

    # Barriers

    def begin_barrier(self, owner: object) -> None:
        """From now on only what has begun is sent. May be called without the lock, by whoever then takes it."""
        self.barriers.add(owner)  # wherever Ctrl-C strikes, it is taken out as often as it was put in

    def take_barrier(self, owner: object) -> bool:
        """Has everything ended that had begun, and does nobody else have the barrier? Then this is its owner."""
        if self.in_flight or self._begun or self._barrier_owner not in (None, owner):
            return False
        self._barrier_owner = owner
        return True

    def end_barrier(self, owner: object) -> None:
        """It is made, or given up."""
        self.barriers.discard(owner)
        if self._barrier_owner is owner:
            self._barrier_owner = None

    # The producer's side

    def may_add(self, who: object) -> bool:
        """Return whether there is room, and nobody else has the queue to himself."""
        return self._exclusive in (None, who) and not self.full

    def begin_exclusive(self, who: object) -> bool:
        """Let nobody else enter tasks from now on; False if somebody else has asked for that."""
        if self._exclusive is not None:
            return False
        self._exclusive = who
        return True

    def end_exclusive(self, who: object) -> None:
        """Let everybody enter tasks again."""
        if self._exclusive == who:
            self._exclusive = None

    def is_scheduled(self, key: int) -> bool:
        """Return whether a task with this key has not ended: a key names one piece of work."""
        return key in self._keys

    def forget(self, keys: Iterable[int]) -> set[int]:
        """Let the servers forget those of these keys whose tasks have ended; return these."""
        ended = {key for key in keys if key not in self._keys}
        self._to_forget |= ended
        return ended

    @property
    def to_forget(self) -> Set[int]:
        """Keys that were given to `forget` since the last `take_ended`."""
        return self._to_forget

    def take_ended(self) -> tuple[list[int], set[int]]:
        """Return what the servers need not remember: ids of tasks, and keys."""
        ended, self.ended = self.ended, []
        keys, self._to_forget = self._to_forget, set()
        return ended, keys

    def add(self, task: Task[P]) -> None:
        """Enter a task. Only while there is no error."""
        assert self.error is None, "the error is to be taken first"
        self._last_id += 1
        task.id = self._last_id
        if task.blockers:
            self._blocked.add(task)
        else:
            self._queue.append(task)
        if task.key:
            self._keys.add(task.key)

    def unblock(self, task: Task[P]) -> None:
        """One of the values a task waits for is ready. One that was never entered (Ctrl-C) stays out."""
        task.blockers -= 1
        if not task.blockers and task.state is State.BLOCKED and task.id:
            self._blocked.discard(task)
            task.state = State.QUEUED
            self._queue.append(task)

    def take_error(self) -> Exception | None:
        """The error, if there is one and nothing executes any more; cleared by this unless it is final."""
        if self.error is None or self.in_flight or (self.doubts and not self.final):
            return None
        error = self.error
        if not self.final:
            self.error = None
        return error

    def doubt(self) -> None:
        """Somebody says that a parameter server is lost for good."""
        self.doubts += 1

    def no_doubt(self) -> None:
        """It is known whether it is."""
        self.doubts -= 1

    # The workers' side

    def worker_up(self, index: int) -> None:
        """A worker is ready for functions."""
        worker = self.workers[index]
        assert not worker.sent, "what it had is lost before it comes back"
        assert not worker.orphaned, "what it had is requeued before it comes back"
        worker.up, worker.sent_count, worker.seconds = True, 0, None
        worker.front, worker.asked = (0, 0), 0

    def next_free(self) -> int | None:
        """Return a worker that takes a function for certain, in turn; None: there is none."""
        count = len(self.workers)
        for place in range(self._turn, self._turn + count):
            if self.workers[place % count].free:
                self._turn = place % count + 1
                return place % count
        return None

    def to_wake(self) -> list[int]:
        """Return who is to look for something to do: as many free workers as there are tasks, in turn, or all idle."""
        free = [index for index, worker in enumerate(self.workers) if worker.free]
        if len(free) < self.queued:
            return [index for index, worker in enumerate(self.workers) if worker.idle]
        self._turn += 1
        return [free[(self._turn + place) % len(free)] for place in range(self.queued)]

    def take(self, index: int, now: float = 0.0) -> list[Task[P]]:
        """The next tasks for a worker, which has them from now on."""
        tasks = self.offer(index)
        self.give(index, tasks, self.place(index, len(tasks)), now)
        return tasks

    def offer(self, index: int) -> list[Task[P]]:
        """The next tasks for a worker: as many as fit its window, but no more than its share of the queue.

        What would only wait here is left to workers that have nothing: nobody knows how long it would wait. Nothing
        is sent before there is room for half a window, so that a message brings several.
        """
        worker = self.workers[index]
        queued = self.queued
        if not worker.up or not queued or worker.strays:
            return []
        up = sum(other.up for other in self.workers)
        count = min(worker.window - len(worker.sent), math.ceil(queued / up))
        if worker.sent:
            if worker.window - len(worker.sent) < worker.window // 2:
                return []
            count = min(count, queued - sum(other.up and other.empty for other in self.workers))
        batch: list[Task[P]] = []
        size = 0
        tasks: Iterable[Task[P]] = itertools.chain(self._begun, self._queue) if self._begun else self._queue
        for task in itertools.islice(tasks, max(count, 0)):
            size += task.size
            batch.append(task)
            if size >= MAX_BATCH_BYTES:
                break
        return batch

    def place(self, index: int, count: int) -> int:
        """The position of the first of so many tasks on the worker's stream. Places that stay empty are harmless."""
        worker = self.workers[index]
        worker.sent_count += count
        return worker.sent_count - count + 1

    def give(self, index: int, tasks: Sequence[Task[P]], position: int, now: float = 0.0) -> None:
        """The worker has these, which were offered, from this position on."""
        worker = self.workers[index]
        for place, task in enumerate(tasks, position):
            first = (self._begun or self._queue).popleft()
            assert first is task, "what was offered is the head of the queue"
            task.state = State.SENT
            task.attempts += 1
            task.position = place
            task.sent = now
            worker.sent[task.id] = task

    def finish(self, index: int, task_id: int, seconds: float) -> Task[P] | None:
        """A function returned. None if the task is no longer this worker's."""
        worker = self.workers[index]
        task = worker.sent.pop(task_id, None)
        if task is None:
            worker.strays.pop(task_id, None)
            return None
        worker.seconds = seconds if worker.seconds is None else worker.seconds + _SMOOTHING * (seconds - worker.seconds)
        worker.done += 1
        self._end(task, State.DONE)
        return task

    def fail(self, index: int, task_id: int, error: Exception) -> tuple[Task[P] | None, list[Task[P]]]:
        """A function raised. The task (None: no longer this worker's, or cancelled) and those that are cancelled."""
        task = self.workers[index].sent.pop(task_id, None)
        if task is None:
            self.workers[index].strays.pop(task_id, None)
            return None, []
        if self.error is not None or task.withdrawn:  # the first error won; this is one of those it cancels
            self._end(task, State.CANCELLED)
            return None, [task]
        self._end(task, State.FAILED)
        return task, [] if task.isolated else self._set_error(error)

    def ended_badly(self, index: int, task: Task[P], *, stopped: bool = False, data_unread: bool = False) -> Ending:
        """Decide what comes of a task that has not ended well. One that is to fail still has to: see `fail`.

        Args:
            index: the worker's.
            task: which it has.
            stopped: the worker says that it stopped as it was asked to.
            data_unread: it raised since its examples could not be read.
        """
        asked = task.id == self.workers[index].asked
        if stopped and (not asked or self.error is not None):
            self.cancelled(index, task.id)
            return Ending.CANCELLED
        return Ending.AGAIN if self.retry(task, data_unread=data_unread) else Ending.FAILED

    def retry(self, task: Task[P], *, data_unread: bool = False) -> bool:
        """Decide whether a task that failed is to run again; if so this is a failure that it may have."""
        if not self.may_retry(task, data_unread=data_unread):
            return False
        task.failures += 1
        return True

    def may_retry(self, task: Task[P], *, data_unread: bool = False) -> bool:
        """Return whether it is to run again where it fails now."""
        retries = max(task.retries, task.data_retries) if data_unread else task.retries
        return task.failures < retries and not task.withdrawn and self.error is None

    def cancelled(self, index: int, task_id: int) -> Task[P] | None:
        """A function stopped because it was asked to."""
        task = self.workers[index].sent.pop(task_id, None)
        if task is not None:
            self._end(task, State.CANCELLED)
        else:
            self.workers[index].strays.pop(task_id, None)
        return task

    def give_back(self, index: int, task_ids: Iterable[int]) -> list[Task[P]]:
        """The worker will not run these. They go to the head of the queue; those cancelled instead are returned."""
        worker, task_ids = self.workers[index], list(task_ids)
        for task_id in task_ids if worker.strays else ():
            worker.strays.pop(task_id, None)
        if worker.asked in task_ids:  # its next attempt, perhaps here, may run as long
            worker.asked = 0
        tasks = [worker.sent.pop(task_id) for task_id in task_ids if task_id in worker.sent]
        for task in tasks:
            task.attempts -= 1  # it was none
        return self._requeue(tasks)

    def run_again(self, index: int, task_ids: Iterable[int]) -> list[Task[P]]:
        """These failed on the worker, and are to run again: as `give_back`, but they have begun."""
        worker, task_ids = self.workers[index], list(task_ids)
        for task_id in task_ids:
            if task_id in worker.sent:
                worker.sent[task_id].begun_on = index
        return self.give_back(index, task_ids)

    def lose(self, index: int) -> bool:
        """A worker is gone. True if it had tasks, which are orphaned now.

        It ran them in order, so its death is an attempt of the oldest only: the others did not start, or had
        ended and lost their outcomes. Else a function that waits behind others could be given up for what
        they, or a machine that is taken away again and again, did. But all of them may have begun.
        """
        worker = self.workers[index]
        worker.up = worker.idle = False
        worker.strays.clear()
        lost = list(worker.sent.values())
        for task in lost[1:]:
            task.attempts -= 1
        worker.orphaned.extend(lost)
        worker.sent.clear()
        for task in worker.orphaned:
            task.state, task.begun_on = State.ORPHANED, index
        return bool(worker.orphaned)

    def requeue(
        self, index: int, exhausted: Exception | None = None, overdue: int = 0
    ) -> tuple[list[Task[P]], list[Task[P]]]:
        """Every server has closed the lost worker's incarnation: its tasks may run elsewhere.

        Returns the tasks that fail (with the error `exhausted`) because they have had all their attempts, or have the
        number `overdue`; and those that are cancelled.
        """
        worker = self.workers[index]
        tasks, worker.orphaned = worker.orphaned, []
        hopeless = [task for task in tasks if task.attempts >= self._max_attempts or task.id == overdue]
        cancelled = self._requeue([task for task in tasks if task not in hopeless])
        failed: list[Task[P]] = []
        for task in hopeless:
            if self.error is None and exhausted is not None and not task.withdrawn:
                self._end(task, State.FAILED)
                failed.append(task)
                if not task.isolated:
                    cancelled += self._set_error(exhausted)
            else:
                self._end(task, State.CANCELLED)
                cancelled.append(task)
        return failed, cancelled

    # Too long, or not wanted

    def late(self, index: int, reached: int, now: float) -> Late | None:
        """What is to become of the first task that a worker has, if it has run longer than it may; see `first`.

        Args:
            index: the worker's.
            reached: the last position of which anything was sent to it.
            now: seconds for which this process was awake.
        """
        worker, task = self.workers[index], self.first(index)
        if task is None or task.position > reached:
            return None
        if worker.strays:  # it waits behind what still runs there
            worker.front = (0, 0)
            return None
        if worker.front != (task.id, task.position):
            worker.front, worker.front_since = (task.id, task.position), now
        if task.timeout is None or (over := now - worker.front_since - task.timeout) < 0:
            return None
        if not self.may_retry(task):
            return Late.END
        if worker.asked != task.id:
            worker.asked = task.id
            return Late.ASK
        return Late.GIVE_UP if over > STOP_SECONDS else None

    def first(self, index: int) -> Task[P] | None:
        """What a worker runs, or has not yet begun."""
        return next(iter(self.workers[index].sent.values()), None)

    def time_out(self, index: int, task: Task[P], error: Exception) -> tuple[Task[P] | None, list[Task[P]]]:
        """The worker has run it for too long. As `fail`; an attempt of it is left behind."""
        failed, cancelled = self.fail(index, task.id, error)
        self._leave_behind(index, task)
        return failed, cancelled

    def cancel(self, wanted: Iterable[Task[P]]) -> tuple[list[Task[P]], list[Task[P]]]:
        """These are cancelled now, wherever they are: all of them that had not ended, and those to be shut out."""
        chosen = set(wanted)
        cancelled, left = self.cancel_waiting(chosen.__contains__), list[Task[P]]()
        for index, worker in enumerate(self.workers):
            for task in [task for task in worker.sent.values() if task in chosen]:
                del worker.sent[task.id]
                self._leave_behind(index, task)
                left.append(task)
            for task in [task for task in worker.orphaned if task in chosen]:
                worker.orphaned.remove(task)
                self._unrefused.add(task.id)
                left.append(task)
        for task in left:
            self._end(task, State.CANCELLED)
        return cancelled + left, left

    def never_sent(self, index: int, task: Task[P]) -> None:
        """It was cancelled before it was sent to the worker that had it: there is no attempt."""
        if self.workers[index].strays.get(task.id) is task:
            del self.workers[index].strays[task.id]

    def shut_out(self, tasks: Iterable[Task[P]] | None = None) -> None:
        """Every server refuses what attempts of these (None: of all) that were left behind still update."""
        self._unrefused.difference_update(self._unrefused if tasks is None else [task.id for task in tasks])

    @property
    def strays(self) -> Iterator[tuple[int, Task[P]]]:
        """Attempts that were left behind and may still run: the worker, and the task."""
        for index, worker in enumerate(self.workers):
            for task in worker.strays.values():
                yield index, task

    def _leave_behind(self, index: int, task: Task[P]) -> None:
        self.workers[index].strays[task.id] = task
        self._unrefused.add(task.id)

    def withdraw(self, tasks: Iterable[Task[P]]) -> list[Task[P]]:
        """Nobody wants these any more. Those that no worker has, which are cancelled at once; others when they end."""
        for task in tasks:
            task.withdrawn = True
        return self.cancel_waiting(lambda task: task.withdrawn)

    def abort(self, error: Exception, *, final: bool) -> list[Task[P]]:
        """An error from outside of any function. The tasks that are cancelled by it, those orphaned included.

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

    def cancel_waiting(self, wanted: Callable[[Task[P]], bool] = lambda _: True) -> list[Task[P]]:
        """Those of them that no worker has are cancelled, whether they have begun or not: these."""
        cancelled = [task for task in (*self._blocked, *self._begun, *self._queue) if wanted(task)]
        self._blocked.difference_update(cancelled)
        ended = set(cancelled)
        self._begun = deque(task for task in self._begun if task not in ended)
        self._queue = deque(task for task in self._queue if task not in ended)
        for task in cancelled:
            self._end(task, State.CANCELLED)
        return cancelled

    def recallable(self, index: int) -> list[Task[P]]:
        """Tasks that a worker has, in the order of sending."""
        return list(self.workers[index].sent.values())

    def was_asked_to_stop(self, index: int) -> Task[P] | None:
        """Return the task of a lost worker that had run too long there, and did not stop."""
        worker = self.workers[index]
        return next((task for task in worker.orphaned if task.id == worker.asked), None)

    def steal_for(self, index: int) -> tuple[int, Sequence[Task[P]]] | None:
        """Return a worker that has several tasks, and its later half, for an idle one while the queue is empty.

        Not from one that is being asked for some already.
        """
        stealer = self.workers[index]
        if not (stealer.idle and stealer.up and stealer.empty):
            return None
        found = self.to_steal()
        return None if found is None or self.workers[found[0]].recalled else found

    def to_steal(self) -> tuple[int, Sequence[Task[P]]] | None:
        """Return a worker that has several tasks, and its later half, while the queue is empty."""
        if self.queued or self.error is not None:
            return None
        index = max(range(len(self.workers)), key=lambda i: len(self.workers[i].sent))
        tasks = self.recallable(index)
        if len(tasks) < 2:
            return None
        return index, tasks[(len(tasks) + 1) // 2 :]

    # Inside

    def _requeue(self, tasks: Sequence[Task[P]]) -> list[Task[P]]:
        cancelled = [task for task in tasks if self.error is not None or task.withdrawn]
        for task in cancelled:
            self._end(task, State.CANCELLED)
        for task in reversed(tasks):
            if task.state is not State.CANCELLED:
                task.state = State.QUEUED
                (self._begun if task.begun else self._queue).appendleft(task)
        return cancelled

    def _set_error(self, error: Exception) -> list[Task[P]]:
        self.error = error
        return self.cancel_waiting()

    def _end(self, task: Task[P], state: State) -> None:
        task.state = state
        if task.key:
            self._keys.discard(task.key)
        if state is not _DONE:
            self.failed += state is State.FAILED
            self.were_cancelled += state is State.CANCELLED
        self.ended.append(task.id)

    def check(self) -> None:
        """Assert the invariants; for the end of every state test."""
        for worker in self.workers:
            assert worker.up or not worker.sent, "a worker that is down has nothing"
            assert all(task.state is State.SENT for task in worker.sent.values())
            assert all(task.state is State.ORPHANED for task in worker.orphaned)
            assert worker.up or not worker.strays, "nothing of a lost worker is waited for"
            assert all(task.state in (State.FAILED, State.CANCELLED) for task in worker.strays.values())
            assert not set(worker.strays) & set(worker.sent)
        assert all(task.state is State.QUEUED for task in (*self._begun, *self._queue))
        assert all(task.begun for task in self._begun)
        assert not any(task.begun for task in self._queue)
        if self._barrier_owner is not None:
            assert not self.in_flight, "nothing executes behind a barrier"
            assert not self._begun, "a barrier holds no half of a function"
            assert self._barrier_owner in self.barriers
        assert all(task.state is State.BLOCKED and task.blockers > 0 for task in self._blocked)
        assert self.error is None or not self.waiting, "an error leaves nothing waiting"
        held = [task.id for task in (*self._begun, *self._queue, *self._blocked)]
        held += [task_id for worker in self.workers for task_id in worker.sent]
        held += [task.id for worker in self.workers for task in worker.orphaned]
        assert len(held) == len(set(held)), "a task is in one place"
        assert len(held) + len(self.ended) <= self._last_id
        assert self._keys == {task.key for task in self.tasks() if task.key}, "a key is a task's that has not ended"
