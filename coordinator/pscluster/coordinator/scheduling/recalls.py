"""How functions are taken back from workers: for others that are idle, or since nobody wants them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pscluster.coordinator.scheduling.call import (
    Call,
)
from pscluster.coordinator.scheduling.scheduler import Task, WorkerState
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.scheduling.worker_connection import WorkerConnection

STEAL_SECONDS = 0.01
"""So long a worker is idle before it is given what another one has not started."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Tasks of a worker, where they were when it was decided to ask for them back: soon they may be elsewhere."""

    worker: WorkerState[Call]
    connection: WorkerConnection
    functions: Sequence[int]
    positions: Sequence[int]


class Recalls:
    """Asks workers for functions that they have."""

    def __init__(self, state: DispatchState) -> None:
        self._state, self._scheduler = state, state.scheduler

    def of(self, index: int, tasks: Sequence[Task[Call]] | None = None) -> list[Recall]:
        """Under the lock: how to ask a worker for tasks (None: all it has)."""
        handle = self._state.workers[index]
        if tasks is None:
            tasks = self._scheduler.recallable(index)
        if handle.connection is None or not tasks:
            return []
        return [
            Recall(
                self._scheduler.workers[index],
                handle.connection,
                [task.id for task in tasks],
                [task.position for task in tasks],
            )
        ]

    def of_all(self) -> list[Recall]:
        """Under the lock: how to ask for everything."""
        return [recall for index in range(len(self._state.workers)) for recall in self.of(index)]

    def ask(self, recalls: Iterable[Recall], *, cancel_running: bool = True) -> None:
        """What has not started comes back; what runs is asked to stop, where everything is cancelled."""
        for recall in recalls:
            self._state.in_background(self._ask_back(recall, cancel_running))

    def ask_for_all(self, cancel_running: bool) -> None:
        """Ask all workers for all that they have. On the loop's thread."""
        with self._state.lock:
            recalls = self.of_all()
        self.ask(recalls, cancel_running=cancel_running)

    def consider_stealing_soon(self, index: int) -> asyncio.TimerHandle:
        """See whether an idle worker can be given what another has, unless it gets something before."""
        return self._state.loop.call_later(STEAL_SECONDS, self.consider_stealing, index)

    def consider_stealing(self, index: int) -> None:
        """Ask for what an idle worker can be given in place of another. On the loop's thread."""
        with self._state.lock:
            found = self._scheduler.steal_for(index)
            recalls = [] if found is None else self.of(*found)
        self.ask(recalls, cancel_running=False)

    async def _ask_back(self, recall: Recall, cancel_running: bool) -> None:
        recall.worker.recalled = True
        try:
            await recall.connection.recall(recall.functions, recall.positions, cancel_running)
        finally:
            recall.worker.recalled = False
        # Some may have looked in vain while this went on, and look once only by themselves.
        for index, stealer in enumerate(self._scheduler.workers):
            if stealer.idle:
                self.consider_stealing_soon(index)
        self._state.wake_idle()
