"""Blocks in which no function runs, and the end of functions that nobody wants any more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from pscluster.coordinator.scheduling.call import (
    Call,
    with_dependents,
)
from pscluster.coordinator.scheduling.outcomes import (
    cancelled_error,
)
from pscluster.coordinator.scheduling.overtime import Overtime
from pscluster.coordinator.scheduling.queue_stats import QueueStatus
from pscluster.coordinator.scheduling.recalls import Recalls
from pscluster.coordinator.scheduling.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.scheduling.scheduler import State, Task
from pscluster.coordinator.scheduling.settlement import Settlement
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.scheduling.waiting import result_of
from pscluster.coordinator.scheduling.waits import Waits
from pscluster.core.errors import (
    WaitTimeoutError,
)

_BUSY = "another checkpoint, or other copies of variables, are still made or restored"

_ENDED = (State.DONE, State.FAILED, State.CANCELLED)


class Barriers:
    """Stops the job between functions, and cancels what was scheduled."""

    def __init__(
        self,
        state: DispatchState,
        recalls: Recalls,
        settlement: Settlement,
        overtime: Overtime,
        status: QueueStatus,
        waits: Waits,
    ) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._recalls = recalls
        self._settlement = settlement
        self._overtime = overtime
        self._status = status
        self._waits = waits

    @contextlib.contextmanager
    def barrier(self, timeout: float = threading.TIMEOUT_MAX) -> Iterator[None]:
        """Within the block no function runs, and none has begun that may still run: a cut through the job.

        What has begun ends first, also where it went back to the queue: it is run again before all others. What has
        not begun waits. One such block at a time: what reads all variables at one moment must not meet what replaces
        them.

        Raises:
            WaitTimeoutError: some have not ended after so many seconds; the message names them. They go on.
        """
        deadline, owner, scheduler = time.monotonic() + timeout, object(), self._scheduler
        try:
            scheduler.begin_barrier(owner)
            self._state.loop.call_soon_threadsafe(self._recalls.ask_for_all, False)
            with self._state.lock:
                while not scheduler.take_barrier(owner):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise WaitTimeoutError(f"after {timeout:g} s {self._status.unended() or _BUSY}")
                    self._state.changed.wait(left)
            yield
        finally:  # wherever Ctrl-C struck
            scheduler.barriers.discard(owner)
            with self._state.lock:
                scheduler.end_barrier(owner)
                self._state.changed.notify_all()
            self._state.on_loop(self._state.wake_all)

    @contextlib.contextmanager
    def exclusive(self, timeout: float | None) -> Iterator[None]:
        """Within the block no function runs but those that this thread schedules: all others have ended, or wait.

        Raises as `join` does.
        """
        me, begin = threading.get_ident(), time.monotonic()

        def left() -> float | None:
            return None if timeout is None else timeout - (time.monotonic() - begin)

        try:
            with self._state.lock:
                while not self._scheduler.begin_exclusive(me):
                    if not self._state.changed.wait(left()):
                        raise WaitTimeoutError(
                            f"after {timeout:g} s another evaluation still runs: {self._status.describe_locked()}"
                        )
            self._waits.join(left())
            yield
        finally:  # wherever Ctrl-C struck
            with self._state.lock:
                self._scheduler.end_exclusive(me)
                self._state.changed.notify_all()

    def cancel_waiting(self, values: Iterable[RemoteValue]) -> int:
        """Cancel those of these functions that no worker has begun; how many. Waits for what has, whosever it is."""
        wanted = list(values)
        with self.barrier():
            # On the loop's thread, where no Ctrl-C strikes.
            return result_of(asyncio.run_coroutine_threadsafe(self._withdraw(wanted), self._state.loop))

    async def _withdraw(self, values: Sequence[RemoteValue]) -> int:
        tasks = self.tasks_of(values)
        self.withdraw(tasks)
        return len(tasks)

    def tasks_of(self, values: Iterable[RemoteValue]) -> list[Task[Call]]:
        """Those that have not ended."""
        wanted = set(map(id, values))
        with self._state.lock:
            return with_dependents([task for task in self._scheduler.tasks() if id(task.payload.result()) in wanted])

    def withdraw(self, tasks: Sequence[Task[Call]]) -> None:
        """Nobody waits for these any more: what has not begun never does, what runs is asked to stop."""
        with self._state.lock:
            self._settlement.settle_cancelled(self._scheduler.withdraw(tasks))
            recalls = [
                recall
                for index, worker in enumerate(self._scheduler.workers)
                for recall in self._recalls.of(index, [task for task in worker.sent.values() if task.withdrawn])
            ]
            self._state.changed.notify_all()  # there is room in the queue
        if recalls:
            self._state.on_loop(self._recalls.ask, recalls)

    def cancel(self, values: Iterable[RemoteValue] | None, kill_after: float | None) -> int:
        """Cancel the functions of these values (None: all), with those that wait for their results; how many.

        See `Overtime` for `kill_after`, which goes for those of them, too, that had ended so before.
        """
        wanted = None if values is None else set(map(id, values))
        with self._state.lock:
            tasks = [task for task in self._scheduler.tasks() if wanted is None or id(task.payload.result()) in wanted]
            tasks += [
                task for _, task in self._scheduler.strays if wanted is None or id(task.payload.result()) in wanted
            ]
            ended = [task for task in tasks if task.state in _ENDED]
            cancelled, left = self._scheduler.cancel(with_dependents(tasks))
            for task in left:
                task.payload.applied = True  # or not: nobody knows
            for task in cancelled:
                error = cancelled_error(task.payload.function.name, None, task.payload.applied)
                self._settlement.set_error(task, error, RemoteValueStatus.CANCELLED)
            self._state.changed.notify_all()
            if left or (ended and kill_after is not None):
                self._overtime.part_with([*left, *ended], kill_after)
        return len(cancelled)
