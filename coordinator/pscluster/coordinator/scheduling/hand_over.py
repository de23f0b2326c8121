"""Functions go to workers that wait for them, from whatever thread has found that they can."""

from __future__ import annotations

import time

from pscluster.coordinator.scheduling.call import (
    Call,
    step_of,
)
from pscluster.coordinator.scheduling.definitions_cache import DefinitionsCache, has_definition
from pscluster.coordinator.scheduling.scheduler import Task
from pscluster.coordinator.scheduling.state import DispatchState, WorkerHandle

MAX_DIRECT = 16
"""More functions than that, or those that need preparation, are sent by the loop: messages are made under the lock."""


class HandOver:
    """Sends functions to idle workers, under the lock, where there is nothing to prepare."""

    def __init__(self, state: DispatchState, definitions: DefinitionsCache) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._resources = definitions.resources

    def to(self, index: int) -> bool:
        """Send a worker what it may have, if its writer waits and there is nothing to prepare.

        Under the lock. False if the writer is to look. Not where a worker that has something gets nothing now: the
        writer would find the same, and there will be a next outcome.

        Ctrl-C before the worker is said to have it: it is given again, and what it does counts once.
        """
        handle, worker = self._state.workers[index], self._scheduler.workers[index]
        connection = handle.connection
        if not worker.idle or worker.leaving or not set(self._resources) <= handle.built:
            return False
        tasks = self._scheduler.offer(index)
        if not tasks and worker.sent:
            return True
        if connection is None or not 0 < len(tasks) <= MAX_DIRECT:
            return False
        if not all(self._is_ready(handle, task) for task in tasks):
            return False
        full = self._scheduler.full
        position, now = self._scheduler.place(index, len(tasks)), time.monotonic()
        connection.send(position, [step_of(task, task.attempts + 1, self._state.term) for task in tasks])
        self._scheduler.give(index, tasks, position, now)
        self._state.counts.sent(tasks, now)
        handle.heard, handle.sent = now, position + len(tasks) - 1
        if full:
            self._state.changed.notify_all()
        return True

    def _is_ready(self, handle: WorkerHandle, task: Task[Call]) -> bool:
        """Under the lock: can the worker be given the task as it is?"""
        call = task.payload
        return not (call.attachments or call.remote or call.classes) and has_definition(handle, call.function)
