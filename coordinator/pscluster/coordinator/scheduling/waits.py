"""What users' threads do with functions: wait for them, hold the job between them, and cancel them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from pscluster.coordinator.scheduling.calls.call import Call, with_dependents
from pscluster.coordinator.scheduling.calls.function_errors import cancelled_error
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.scheduling.connections.loop import run
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.coordinator.scheduling.overtime import Overtime
from pscluster.coordinator.scheduling.queue_stats import QueueStatus
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.waiting import deadline_of, seconds_left
from pscluster.core.display.notebook import current_cell
from pscluster.core.errors import FunctionError, WaitTimeoutError

_BUSY = "another checkpoint or evaluation snapshot is still being made or restored"


class Waits:
    """Waits for functions to end, or ends them."""

    def __init__(self, state: DispatchState, status: QueueStatus, overtime: Overtime) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._status = status
        self._overtime = overtime

    def join(self, timeout: float | None, by: str = "join") -> None:
        """Wait until everything scheduled has ended. Raise the first error, once: see `raise_error`."""
        deadline = deadline_of(timeout)
        with self._state.lock:
            while not self._scheduler.settled:
                self.wait(deadline, lambda: f"not done after {timeout:g} s")
            self.raise_error(deadline, by)

    def wait(self, deadline: float, late: Callable[[], str]) -> None:
        """Wait until something has changed. Under the lock.

        After the deadline raise WaitTimeoutError with `late()` and the state of the queue, from the pending error.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise WaitTimeoutError(f"{late()}: {self._status.describe_locked()}") from self._scheduler.error
        self._state.changed.wait(left)

    def done(self) -> bool:
        """Return whether everything has ended; once nothing executes, raise the first error, once. Does not wait."""
        with self._state.lock:
            if (error := self._scheduler.take_error()) is not None:
                raise self._explained(error, "done")
            return self._scheduler.settled

    def raise_error(self, deadline: float, by: str) -> None:
        """Raise the error, if there is one, once nothing executes. Under the lock.

        In a notebook all but "join" forget one that `fetch` has raised in an earlier cell: its user has seen it there.
        """
        while self._scheduler.error is not None:
            if (error := self._scheduler.take_error()) is not None:
                shown_in = error._shown_in if isinstance(error, FunctionError) and not self._scheduler.final else None
                if by != "join" and shown_in is not None and shown_in != current_cell():
                    self._state.cancelled_by_error = 0
                    return
                raise self._explained(error, by)
            self.wait(deadline, lambda: "timed out before all running functions had stopped")

    def _explained(self, error: Exception, by: str) -> Exception:
        """Prepare a taken error to be raised by this call, which may not have caused it. Under the lock."""
        self._state.cancelled_by_error, self._state.final_raised = 0, self._scheduler.final
        if isinstance(error, FunctionError) and not self._scheduler.final and (error._fetched or by == "schedule"):
            failed_at = time.time() - (time.monotonic() - self._state.failed_at)
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failed_at))
            told = ", and fetch() has raised it before" if error._fetched else ""
            lost = ". What was given to schedule() has not been scheduled: do so again" if by == "schedule" else ""
            error.add_note(
                f"This is the error of {error.function}, which failed at {when}{told}: schedule(), "
                f"join() and done() raise the first error of all functions, once. It is cleared now{lost}."
            )
        return error.with_traceback(None)  # otherwise a final one would grow with every call

    def wait_for(self, values: Sequence[RemoteValue], deadline: float, timeout: float | None) -> None:
        """Wait until these values of isolated functions are ready. Raise the error of one that has failed.

        Raise WaitTimeoutError at the deadline, which is `timeout` seconds after the user's call.
        """
        with self._state.lock:
            while True:
                for value in values:
                    if value._error is not None:
                        raise value._error.with_traceback(None)
                waiting = [value for value in values if value.status is not RemoteValueStatus.READY]
                if not waiting:
                    return
                self.check_may_run(waiting[0]._function)  # cancelling those that run may take long
                self.wait(deadline, lambda: f"not evaluated after {timeout:g} s")

    def check_no_error(self) -> None:
        """Raise the error of a function, if there is one, which stays pending."""
        with self._state.lock:
            if (error := self._scheduler.error) is not None:
                raise error.with_traceback(None)

    def check_may_run(self, name: str) -> None:
        """Raise CancelledError for an isolated function if there is an error, which stays pending. Under the lock."""
        if (error := self._scheduler.error) is not None:
            if self._scheduler.final:  # scheduling it again is no use
                raise error.with_traceback(None)
            raise cancelled_error(name, error) from error

    # Blocks in which no function runs, and functions that are no longer wanted

    @contextlib.contextmanager
    def barrier(self, timeout: float = threading.TIMEOUT_MAX) -> Iterator[None]:
        """Hold the job for the block: no function runs, and none has begun that may run again. So it is a cut.

        Functions that have begun end first; if they are queued again they run before all others. The others wait. One
        such block at a time: a reader of all variables at one moment must not meet a restore.

        Raises:
            WaitTimeoutError: some have not ended after `timeout` seconds; the message names them. They go on.
        """
        deadline, owner, scheduler = time.monotonic() + timeout, object(), self._scheduler
        try:
            scheduler.begin_barrier(owner)
            with self._state.lock:
                for index, worker in enumerate(scheduler.workers):  # a gang that was sent counts as begun
                    self._state.recall(
                        index, [task for task in worker.sent.values() if task.gang is None], cancel_running=False
                    )
                while not scheduler.take_barrier(owner):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise WaitTimeoutError(f"after {timeout:g} s {self._status.unended() or _BUSY}")
                    self._state.changed.wait(left)
            yield
        finally:  # wherever Ctrl-C struck
            scheduler.end_barrier(owner)
            with self._state.lock:
                self._state.settle_gangs()
                self._state.changed.notify_all()
            self._state.on_loop(self._state.wake_all)

    @contextlib.contextmanager
    def exclusive(self, timeout: float | None) -> Iterator[None]:
        """Let only this thread schedule within the block; all earlier functions have ended. Raises as `join` does."""
        me, deadline = threading.get_ident(), deadline_of(timeout)
        try:
            with self._state.lock:
                while not self._scheduler.begin_exclusive(me):
                    self.wait(deadline, lambda: f"after {timeout:g} s another evaluation still runs")
            self.join(seconds_left(deadline), "begin")
            yield
        finally:  # wherever Ctrl-C struck
            with self._state.lock:
                self._scheduler.end_exclusive(me)
                self._state.changed.notify_all()

    def cancel_waiting(self, values: Iterable[RemoteValue]) -> int:
        """Wait for all functions that have begun, cancel those of these that have not, and return how many."""

        async def withdraw() -> int:
            return self.withdraw(values)

        with self.barrier():
            return run(withdraw())  # on the loop's thread, where Ctrl-C can't strike

    def withdraw(self, values: Iterable[RemoteValue]) -> int:
        """Cancel these functions if they have not begun, ask them to stop if they run, and return how many."""
        wanted = set(map(id, values))
        with self._state.lock:
            tasks = with_dependents(task for task in self._scheduler.tasks() if id(task.payload.result()) in wanted)
            self._state.settle_cancelled(self._scheduler.withdraw(tasks))
            for index, worker in enumerate(self._scheduler.workers):
                self._state.recall(index, [task for task in worker.sent.values() if task.withdrawn])
            self._state.settle_gangs()
            self._state.changed.notify_all()  # there is room in the queue
        return len(tasks)

    def cancel(self, values: Iterable[RemoteValue] | None, kill_after: float | None) -> int:
        """Cancel the functions of these values (None: all), and those that wait for their results; return how many.

        `kill_after` (see `Overtime.stop_lingering`) applies to attempts left behind earlier as well.
        """
        wanted = None if values is None else set(map(id, values))

        def is_meant(task: Task[Call]) -> bool:
            return wanted is None or id(task.payload.result()) in wanted

        with self._state.lock:
            ended = list(filter(is_meant, self._scheduler.lingering))
            cancelled, left = self._scheduler.cancel(with_dependents(filter(is_meant, self._scheduler.tasks())))
            for task in left:
                task.payload.may_have_applied()
            for task in cancelled:
                error = cancelled_error(task.payload.function.name, None, task.payload.applied)
                self._state.set_error(task, error, RemoteValueStatus.CANCELLED)
            self._state.settle_gangs()
            self._state.changed.notify_all()
            if left or (ended and kill_after is not None):
                self._overtime.stop_lingering([*left, *ended], kill_after)
        return len(cancelled)
