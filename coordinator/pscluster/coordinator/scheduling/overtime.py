"""Functions that run longer than they may, or that were ended and run on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence, Set

from pscluster.coordinator.scheduling.call import (
    Call,
)
from pscluster.coordinator.scheduling.outcomes import (
    too_long,
)
from pscluster.coordinator.scheduling.recalls import Recall, Recalls
from pscluster.coordinator.scheduling.remote_value import RemoteValueStatus
from pscluster.coordinator.scheduling.scheduler import Late, Task
from pscluster.coordinator.scheduling.server_link import runs
from pscluster.coordinator.scheduling.settlement import Settlement
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.scheduling.worker_connection import WorkerConnection
from pscluster.core.awake import AwakeTime
from pscluster.core.errors import (
    PsClusterError,
    PSUnavailableError,
)

logger = logging.getLogger(__name__)

TIMEOUT_STEP = 0.1
"""So often it is looked whether a function has run longer than it may."""


class Overtime:
    """Stops what runs too long, and sees to it that what runs on changes nothing any more."""

    def __init__(self, state: DispatchState, recalls: Recalls, settlement: Settlement) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._recalls = recalls
        self._settlement = settlement
        self.timed = asyncio.Event()  # some functions have a timeout

    async def watch(self) -> None:
        """Look now and then what runs too long, once there are functions with a timeout."""
        await self.timed.wait()
        awake = AwakeTime(TIMEOUT_STEP)
        while True:
            await asyncio.sleep(TIMEOUT_STEP)
            awake.look()
            with self._state.lock:
                recalls = [
                    recall for index in range(len(self._state.workers)) for recall in self._late(index, awake.seconds)
                ]
            self._recalls.ask(recalls)

    def _late(self, index: int, now: float) -> list[Recall]:
        """Under the lock: how to stop what a worker runs, if that has run too long."""
        handle, scheduler = self._state.workers[index], self._scheduler
        late, task = scheduler.late(index, handle.sent, now), scheduler.first(index)
        if late is None or task is None:
            return []
        if late is Late.ASK:
            return self._recalls.of(index, [task])
        if late is Late.GIVE_UP:
            handle.doomed.set()
            return []
        task.payload.applied = True  # or not: it has not said, and goes on
        error, before = too_long(index, task), scheduler.error
        failed, cancelled = scheduler.time_out(index, task, error)
        self._state.counts.remember(task, task.payload.function.name, index, time.monotonic(), "failed")
        if failed is not None:
            self._settlement.say(index, error)
            self._settlement.set_error(task, error, RemoteValueStatus.FAILED)
        self._settlement.settle_cancelled(cancelled)
        self._state.changed.notify_all()
        self.part_with([task])
        return self._recalls.of_all() if scheduler.error is not before else []

    def part_with(self, tasks: Sequence[Task[Call]], kill_after: float | None = None) -> None:
        """Under the lock, on any thread: these have ended, and may run on. See to it that it does not matter."""
        self._state.on_loop(self._shut_out, list(tasks))
        self._state.on_loop(self._stop_strays, {task.id for task in tasks}, kill_after)

    def _shut_out(self, tasks: Sequence[Task[Call]]) -> None:
        """On the loop's thread: no server takes an update of these any more, and nothing is cut before that is so."""
        intervals = list(runs(sorted(task.id for task in tasks)))

        async def shut_out() -> None:
            try:
                await asyncio.gather(
                    *(server.finish_functions(intervals, shut_out=True) for server in self._state.servers)
                )
            except PsClusterError as error:
                why = f"the updates of a function that was ended can't be shut out from all parameter servers: {error}"
                self._settlement.abort(PSUnavailableError(why), final=True)
            finally:
                with self._state.lock:
                    self._scheduler.shut_out(tasks)
                    self._state.changed.notify_all()

        self._state.in_background(shut_out())

    def _stop_strays(self, numbers: Set[int], kill_after: float | None) -> None:
        """On the loop's thread: ask these to stop, and take back what waits behind them.

        Args:
            numbers: of functions that have ended.
            kill_after: seconds, after which the process of a worker that still runs one is ended; None: it is not.
        """
        stop, behind = [], []
        with self._state.lock:
            for index, handle in enumerate(self._state.workers):
                strays = [task for task in self._scheduler.workers[index].strays.values() if task.id in numbers]
                if strays:
                    stop += self._recalls.of(index, strays)
                    behind += self._recalls.of(index)
                if kill_after is not None:
                    for task in strays:
                        self._state.loop.call_later(kill_after, self._end_process_of, index, handle.connection, task)
        self._recalls.ask(stop)
        self._recalls.ask(behind, cancel_running=False)

    def _end_process_of(self, index: int, connection: WorkerConnection | None, task: Task[Call]) -> None:
        """On the loop's thread: it has had its time to stop."""
        handle = self._state.workers[index]
        with self._state.lock:
            runs = self._scheduler.workers[index].strays.get(task.id) is task and handle.connection is connection
        if runs and connection is not None:
            logger.warning("%s is still running on %s; ending its process", task.payload.function.name, handle.peer)
            work = connection.recall([task.id], [task.position], cancel_running=True, end_process=True)
            self._state.in_background(work)
