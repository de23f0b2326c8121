"""The tasks that no worker has, and the first error, which empties the queue. Pure, like the scheduler built on it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from pscluster.coordinator.scheduling.decisions.tasks import P, State, Task

_DONE = State.DONE  # looking it up in the enum takes as long as the rest of `_end`


class TaskQueue(Generic[P]):
    """Tasks that wait for their arguments or for a worker. See `scheduler` for their states."""

    def __init__(self, max_queued: float = math.inf) -> None:
        self.error: Exception | None = None  # the first one, until it is taken; nothing waits while there is one
        self.final = False  # it is not cleared by being taken
        self.doubts = 0  # checks under way of whether a parameter server is lost
        self.entered = 0  # how many tasks were ever added
        self.ended: list[int] = []  # ids of tasks that have ended since the last `take_ended`
        self.members_ended: list[Task[P]] = []  # of gangs; see `Scheduler.settle_gangs`
        self.to_forget: set[int] = set()  # keys that were given to `forget` since then
        self.failed = self.were_cancelled = 0  # how many tasks have
        self._max_queued = max_queued
        self._exclusive: object | None = None  # the only one that may add tasks
        self._keys: set[int] = set()  # of tasks that have not ended
        self._begun: deque[Task[P]] = deque()  # queued, before all others
        self._queue: deque[Task[P]] = deque()
        self._blocked: set[Task[P]] = set()

    # Questions

    @property
    def waiting(self) -> int:
        """Return how many tasks no worker has."""
        return len(self._begun) + len(self._queue) + len(self._blocked)

    @property
    def full(self) -> bool:
        """Return whether no task can be added until one is sent."""
        return len(self._begun) + len(self._queue) + len(self._blocked) >= self._max_queued

    @property
    def next_one(self) -> Task[P] | None:
        """Return the head of the queue."""
        return next(iter(self._begun or self._queue), None)

    @property
    def begun(self) -> list[Task[P]]:
        """Return the tasks that have begun and wait to run again."""
        return list(self._begun)

    def may_add(self, producer: object) -> bool:
        """Return whether there is room, and no other producer has the queue to itself."""
        return self._exclusive in (None, producer) and not self.full

    def is_scheduled(self, key: int) -> bool:
        """Return whether a task with this key has not ended: a key names one piece of work."""
        return key in self._keys

    # Events: tasks are added

    def begin_exclusive(self, producer: object) -> bool:
        """Let only this producer add tasks; return False if another one has the queue to itself."""
        if self._exclusive is not None:
            return False
        self._exclusive = producer
        return True

    def end_exclusive(self, producer: object) -> None:
        """Let every producer add tasks again, if this one had the queue to itself."""
        if self._exclusive == producer:
            self._exclusive = None

    def add(self, task: Task[P]) -> None:
        """Add a task. Only while there is no error."""
        assert self.error is None, "the error must be taken first"
        self.entered += 1
        task.id = self.entered
        if task.blockers:
            task.state = State.BLOCKED
            self._blocked.add(task)
        else:
            self._queue.append(task)
        if task.key:
            self._keys.add(task.key)

    def unblock(self, task: Task[P]) -> None:
        """Count one argument of a task as ready. A task that was never added (Ctrl-C) stays out."""
        task.blockers -= 1
        if not task.blockers and task.state is State.BLOCKED:
            self._blocked.discard(task)
            task.state = State.QUEUED
            self._queue.append(task)

    # Events: the servers need not remember what has ended

    def forget(self, keys: Iterable[int]) -> set[int]:
        """Let the servers forget those of these keys whose tasks have ended, and return them."""
        ended = {key for key in keys if key not in self._keys}
        self.to_forget |= ended
        return ended

    def take_ended(self) -> tuple[list[int], set[int]]:
        """Return, once, the ids and keys that the servers need not remember."""
        ended, self.ended = self.ended, []
        keys, self.to_forget = self.to_forget, set()
        return ended, keys

    # Events: a server may be lost

    def doubt(self) -> bool:
        """Hold back the error until `no_doubt`: a parameter server may be lost. False if that makes no difference."""
        if self.final:
            return False
        self.doubts += 1
        return True

    def no_doubt(self) -> None:
        """End one `doubt`: by now it is known whether the server is lost."""
        self.doubts -= 1

    # Inside

    def _cancel_waiting(self, wanted: Callable[[Task[P]], bool] = lambda _: True) -> list[Task[P]]:
        """Cancel, and return, the wanted ones of the tasks that no worker has, whether they have begun or not."""
        cancelled = [task for task in (*self._blocked, *self._begun, *self._queue) if wanted(task)]
        self._blocked.difference_update(cancelled)
        ended = set(cancelled)
        self._begun = deque(task for task in self._begun if task not in ended)
        self._queue = deque(task for task in self._queue if task not in ended)
        for task in cancelled:
            self._end(task, State.CANCELLED)
        return cancelled

    def _requeue(self, tasks: Sequence[Task[P]]) -> list[Task[P]]:
        """Put these at the head of the queue, and return those that are cancelled instead."""
        cancelled = []
        for task in tasks:
            if self.error is not None or task.withdrawn:
                cancelled.append(task)
            elif task.gang is None:
                continue
            self._end(task, State.CANCELLED)  # the members of a gang run again together, as new tasks
        for task in reversed(tasks):
            if task.state is not State.CANCELLED:
                task.state = State.QUEUED
                (self._begun if task.begun else self._queue).appendleft(task)
        return cancelled

    def _fail(self, task: Task[P], error: Exception) -> list[Task[P]]:
        """End a task with an error, and return those that are cancelled by it."""
        self._end(task, State.FAILED)
        if task.gang is not None and task.gang.error is None:
            task.gang.error = error
        return [] if task.isolated else self._set_error(error)

    def _set_error(self, error: Exception) -> list[Task[P]]:
        self.error = error
        return self._cancel_waiting()

    def _end(self, task: Task[P], state: State) -> None:
        task.state = state
        if task.key:
            self._keys.discard(task.key)
        if state is not _DONE:
            self.failed += state is State.FAILED
            self.were_cancelled += state is State.CANCELLED
        self.ended.append(task.id)
        if task.gang is not None:
            self.members_ended.append(task)
