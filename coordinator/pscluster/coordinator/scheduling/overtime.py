"""Tasks that run longer than they may, or that have ended while their attempt is still running."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable

from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.function_errors import too_long
from pscluster.coordinator.scheduling.connections.server_link import runs
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.decisions.tasks import Late, Task
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.awake import AwakeTime
from pscluster.core.errors import PsClusterError, PSUnavailableError

logger = logging.getLogger(__name__)

TIMEOUT_STEP = 0.1
"""Seconds between checks for tasks that have run longer than they may."""


class Overtime:
    """Stops tasks that run too long, and makes sure that attempts left behind change nothing more."""

    def __init__(self, state: DispatchState) -> None:
        self._state, self._scheduler = state, state.scheduler
        self.timed = asyncio.Event()  # some tasks have a timeout

    async def watch(self) -> None:
        """Check regularly for tasks that run too long, once there are tasks with a timeout."""
        await self.timed.wait()
        awake = AwakeTime(TIMEOUT_STEP)
        while True:
            await asyncio.sleep(TIMEOUT_STEP)
            awake.check()
            with self._state.lock:
                for index in range(len(self._state.workers)):
                    self._stop_late(index, awake.seconds)

    def _stop_late(self, index: int, now: float) -> None:
        """Stop a worker's task if it has run too long. Under the lock."""
        handle, scheduler = self._state.workers[index], self._scheduler
        if (overdue := scheduler.late(index, handle.sent, now)) is None:
            return
        late, task = overdue
        if late is Late.STOP:
            self._state.recall(index, [task])
        elif late is Late.GIVE_UP:
            handle.abandon("it runs a function that does not stop after its timeout")
        else:
            task.payload.may_have_applied()  # it is still running
            self._state.metrics.remember(task, task.payload.function.name, index, time.monotonic(), "failed")
            before = scheduler.error
            self._state.fail(index, task, too_long(index, task), runs_on=True)
            if scheduler.error is not before:
                self._state.recall_all()
            self._state.changed.notify_all()
            self.stop_lingering([task])
            self._state.settle_gangs()

    def stop_lingering(self, tasks: Iterable[Task[Call]], kill_after: float | None = None) -> None:
        """Shut out, and ask to stop, attempts of these tasks, which have ended. Under the lock, from any thread.

        Tasks that wait for them on their workers are recalled. The process of a worker that still runs one after
        `kill_after` seconds (None: never) is ended.
        """
        state, ended = self._state, set(tasks)
        state.on_loop(lambda: state.in_background(self._shut_out(ended)))
        for index, handle in enumerate(state.workers):
            lingering = [task for task in self._scheduler.workers[index].lingering.values() if task in ended]
            if lingering:
                state.recall(index, lingering)
                # Others can run these; a program that is there already waits for this worker anyway.
                others = [task for task in self._scheduler.workers[index].sent.values() if task.gang is None]
                state.recall(index, others, cancel_running=False)
            for task in lingering if kill_after is not None else ():
                state.on_loop(state.loop.call_later, kill_after, self._end_process_of, index, handle.connection, task)

    async def _shut_out(self, tasks: Collection[Task[Call]]) -> None:
        """Have all servers refuse updates of these tasks; no barrier is taken before."""
        intervals, servers = list(runs(sorted(task.id for task in tasks))), self._state.servers
        try:
            await asyncio.gather(*(server.finish_functions(intervals, shut_out=True) for server in servers))
        except PsClusterError as error:
            why = f"the updates of a function that was ended can't be blocked on all parameter servers: {error}"
            self._state.abort(PSUnavailableError(why), final=True)
        finally:
            with self._state.lock:
                self._scheduler.shut_out(tasks)
                self._state.settle_gangs()
                self._state.changed.notify_all()

    def _end_process_of(self, index: int, connection: WorkerConnection | None, task: Task[Call]) -> None:
        """End a worker's process if it still runs a task that has had its time to stop. On the loop's thread."""
        handle = self._state.workers[index]
        with self._state.lock:
            runs = self._scheduler.workers[index].lingering.get(task.id) is task and handle.connection is connection
        if runs and connection is not None:
            logger.warning("%s is still running on %s; ending its process", task.payload.function.name, handle.peer)
            work = connection.recall([task.id], [task.position], cancel_running=True, end_process=True)
            self._state.in_background(work)
