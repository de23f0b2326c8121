"""Which worker has which tasks, and which gets the next ones. Pure, like the scheduler built on it.

A worker that asks is offered what it should get (`offer`), and gets it (`give`); `take` does both. A barrier stops
that, and an idle worker may take over tasks that wait at another one. See `scheduler` for the states of all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from pscluster.coordinator.scheduling.decisions.gangs import Gangs
from pscluster.coordinator.scheduling.decisions.task_queue import TaskQueue
from pscluster.coordinator.scheduling.decisions.tasks import P, State, Task, WorkerState

MAX_BATCH_BYTES = 1 << 20


class Assignments(TaskQueue[P]):
    """The workers of a job, and their tasks."""

    def __init__(self, num_workers: int, max_attempts: int, max_queued: float = math.inf) -> None:
        super().__init__(max_queued)
        self.workers: list[WorkerState[P]] = [WorkerState() for _ in range(num_workers)]
        self.gangs: Gangs[P] = Gangs(self.workers, max_attempts)
        self.barriers: set[object] = set()  # the owners of those that are held or waited for
        self._barrier_owner: object | None = None  # of the one that is held, as long as it is in `barriers`
        self._turn = 0  # the worker to prefer when there are more free workers than tasks
        self._unrefused: set[int] = set()  # ids of ended tasks whose updates a server may still apply

    # Questions

    @property
    def queued(self) -> int:
        """Return how many tasks could be sent now."""
        return len(self._begun) if self.barriers else len(self._begun) + len(self._queue)

    @property
    def waiting(self) -> int:
        """Return how many tasks no worker has, members of gangs included."""
        return super().waiting + sum(gang.size for gang in self.gangs.line)

    @property
    def running(self) -> int:
        """Return how many tasks are sent or orphaned."""
        return sum(len(worker.sent) + len(worker.orphaned) for worker in self.workers)

    @property
    def in_flight(self) -> int:
        """Return how many tasks are sent or orphaned, or have ended but may still be updating something."""
        return self.running + len(self._unrefused)

    @property
    def executing(self) -> bool:
        for worker in self.workers:  # without a generator: this is asked after every outcome
            if worker.sent or worker.orphaned or worker.reserved:
                return True
        return bool(self._unrefused)

    @property
    def lingering(self) -> Iterator[Task[P]]:
        """Return the ended tasks of which an attempt may still run."""
        return itertools.chain.from_iterable(worker.lingering.values() for worker in self.workers)

    def tasks(self) -> Iterator[Task[P]]:
        """Yield all tasks that have not ended."""
        yield from self._blocked
        yield from self._begun
        yield from self._queue
        yield from self.gangs.waiting()
        for worker in self.workers:
            yield from worker.reserved
            yield from worker.sent.values()
            yield from worker.orphaned

    # Events: users stop the job between functions

    def begin_barrier(self, owner: object) -> None:
        """Send only tasks that have begun from now on. May be called without the lock if `take_barrier` follows."""
        self.barriers.add(owner)  # a set: wherever Ctrl-C strikes, one `end_barrier` undoes it

    def take_barrier(self, owner: object) -> bool:
        """Let this owner hold the barrier if nothing executes, nothing has begun, and no other owner holds it."""
        held = self._barrier_owner in self.barriers and self._barrier_owner is not owner
        if self.executing or self._begun or self.gangs.begun or held:
            return False
        self._barrier_owner = owner
        return True

    def end_barrier(self, owner: object) -> None:
        """Release the barrier, or give up waiting for it. May be called without the lock."""
        self.barriers.discard(owner)

    # Events: workers join, and leave for good

    def worker_joined(self, index: int | None = None) -> int:
        """Expect a worker from now on: a new one, or one that had left. Return its index."""
        if index is None:
            self.workers.append(WorkerState())
            return len(self.workers) - 1
        worker = self.workers[index]
        assert worker.gone is not None, "it is a member already"
        worker.gone, worker.awaited, worker.leaving = None, True, False
        return index

    def worker_left(self, index: int, why: Exception) -> None:
        """Expect a worker no more: it is down, and its tasks are queued again. `why` fails gangs that need it."""
        worker = self.workers[index]
        assert not worker.up, "it is lost before it leaves"
        assert not worker.sent, "its tasks are lost before it leaves"
        assert not worker.orphaned, "its tasks are requeued before it leaves"
        worker.gone, worker.awaited, worker.idle = why, False, False

    # Events: a worker is ready for tasks, or not

    def worker_up(self, index: int) -> None:
        """Begin to give a worker tasks: it is connected, perhaps again."""
        worker = self.workers[index]
        assert not worker.sent, "its tasks are lost before it comes back"
        assert not worker.orphaned, "its tasks are requeued before it comes back"
        assert worker.gone is None, "it joins before it is up"
        worker.up, worker.leaving, worker.sent_count, worker.seconds = True, False, 0, None
        worker.front, worker.stopping, worker.awaited = (0, 0), 0, False
        self.gangs.rejoin(index)

    def worker_missing(self, index: int) -> None:
        """Note that a worker has not come up for long: a gang that can do without it begins."""
        self.workers[index].awaited = False

    def worker_leaves(self, index: int) -> None:
        """Give a worker no more tasks until it is back. May be called without the lock."""
        self.workers[index].leaving = True
        self.workers[index].idle = False

    def worker_busy(self, index: int) -> None:
        """End a worker's idleness: its writer is preparing something, or its connection has ended.

        May be called without the lock. `take` makes it idle again.
        """
        self.workers[index].idle = False

    def next_free(self) -> int | None:
        """Return the next free worker, in turn; None if there is none."""
        count = len(self.workers)
        for turn in range(self._turn, self._turn + count):
            if self.workers[turn % count].free and self.gangs.holds(turn % count) is None:
                self._turn = turn % count + 1
                return turn % count
        return None

    def to_wake(self) -> list[int]:
        """Return the workers that should check the queue: free ones, in turn, one a task; or all idle ones."""
        free = [index for index, worker in enumerate(self.workers) if worker.free]
        if len(free) < self.queued or self.gangs.line:
            return [index for index, worker in enumerate(self.workers) if worker.idle]
        self._turn += 1
        return [free[(self._turn + offset) % len(free)] for offset in range(self.queued)]

    def take(self, index: int, now: float = 0.0) -> list[Task[P]]:
        """Give a worker its next tasks, and return them. If there are none it is idle, until `worker_busy`."""
        tasks, worker = self.offer(index), self.workers[index]
        self.give(index, tasks, self.reserve(index, len(tasks)), now)
        worker.idle = not tasks and worker.up and not worker.leaving
        return tasks

    def offer(self, index: int) -> list[Task[P]]:
        """Return a worker's next tasks: at most its window, and at most its share of the queue.

        A task that would only wait here is left to a worker that has none, since the wait may be long. Nothing is sent
        until half the window is free, so that one message brings several tasks.
        """
        worker = self.workers[index]
        if worker.reserved:
            return [] if worker.lingering or not worker.up else list(worker.reserved)
        queued = self.queued
        if not queued or not worker.up or worker.leaving or worker.lingering:
            return []
        window = worker.window
        count = min(window - len(worker.sent), queued)
        if count > 1:
            count = min(count, math.ceil(queued / sum(other.up for other in self.workers)))
        if worker.sent:
            if window - len(worker.sent) < window // 2:
                return []
            count = min(count, queued - sum(other.up and other.empty for other in self.workers))
        batch: list[Task[P]] = []
        size = 0
        tasks: Iterable[Task[P]] = itertools.chain(self._begun, self._queue) if self._begun else self._queue
        holder = self.gangs.holds(index)
        for task in itertools.islice(tasks, max(count, 0)):
            if holder is not None and task.id > holder.order:
                break
            size += task.size
            batch.append(task)
            if size >= MAX_BATCH_BYTES:
                break
        return batch

    def reserve(self, index: int, count: int) -> int:
        """Reserve positions on the worker's stream for `count` tasks, and return the first. Gaps do no harm."""
        worker = self.workers[index]
        worker.sent_count += count
        return worker.sent_count - count + 1

    def give(self, index: int, tasks: Sequence[Task[P]], first: int, now: float = 0.0) -> None:
        """Give a worker these tasks, which were offered to it, at the positions from `first` on."""
        worker = self.workers[index]
        for position, task in enumerate(tasks, first):
            if task in worker.reserved:
                worker.reserved.remove(task)
            else:
                head = (self._begun or self._queue).popleft()
                assert head is task, "what was offered is the head of the queue"
            task.state = State.SENT
            task.attempts += 1
            task.position = position
            task.sent = now
            worker.sent[task.id] = task

    def steal_for(self, index: int) -> tuple[int, Sequence[Task[P]]] | None:
        """Return whom to recall tasks from for an idle worker while the queue is empty, and which: the later half."""
        if not self.workers[index].free or self.queued or self.error is not None or self.gangs.holds(index) is not None:
            return None
        index, tasks = self._most_given()
        if len(tasks) < 2 or self.workers[index].recalled:
            return None
        return index, tasks[(len(tasks) + 1) // 2 :]

    def _most_given(self) -> tuple[int, list[Task[P]]]:
        """Return the worker that has most tasks that another one could run, and these."""
        # The members of a gang are not for another worker.
        given = [[task for task in worker.sent.values() if task.gang is None] for worker in self.workers]
        index = max(range(len(given)), key=lambda i: len(given[i]))
        return index, given[index]

    def has_nothing_for(self, index: int) -> bool:
        """Return whether nothing is queued, and a free worker could not take anything over from another."""
        if not self.workers[index].free or self.queued:
            return False
        return max([len(worker.sent) for worker in self.workers]) < 2 or len(self._most_given()[1]) < 2

    def begin_recall(self, index: int) -> None:
        """Note that a worker is being asked for some of its tasks: nothing is stolen from it meanwhile."""
        self.workers[index].recalled = True

    def end_recall(self, index: int) -> list[int]:
        """Note that the worker has been asked; return the idle workers, which may now steal. Needs no lock.

        Each of them has checked once by itself, perhaps in vain while this was under way.
        """
        self.workers[index].recalled = False
        return [other for other, stealer in enumerate(self.workers) if stealer.idle]

    # Inside

    def _cancel_waiting(self, wanted: Callable[[Task[P]], bool] = lambda _: True) -> list[Task[P]]:
        members = self.gangs.cancel_waiting(wanted)
        for task in members:
            self._end(task, State.CANCELLED)
        return super()._cancel_waiting(wanted) + members
