"""Waits of users' threads, and the error that they raise."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pscluster.coordinator.scheduling.function_errors import (
    cancelled_error,
)
from pscluster.coordinator.scheduling.queue_stats import QueueStatus
from pscluster.coordinator.scheduling.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.errors import (
    FunctionError,
    WaitTimeoutError,
)


class Waits:
    """Waits until functions have ended."""

    def __init__(self, state: DispatchState, status: QueueStatus) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._status = status

    def join(self, timeout: float | None) -> None:
        """Wait until everything scheduled has ended. Raises the first error, once."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._state.lock:
            while not self._scheduler.settled:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeoutError(
                        f"not done after {timeout:g} s: {self._status.describe_locked()}"
                    ) from self._scheduler.error
                self._state.changed.wait(left)
            self.raise_error(deadline, "join")

    def done(self) -> bool:
        """Has everything ended? Does not wait; raises the first error, once, when nothing executes any more."""
        with self._state.lock:
            error = self._scheduler.take_error()
            if error is not None:
                raise self._explained(error, "done")
            return self._scheduler.settled

    def raise_error(self, deadline: float | None, by: str) -> None:
        """Under the lock. Waits until what runs has stopped, then raises the error, if there is one."""
        while (pending := self._scheduler.error) is not None:
            error = self._scheduler.take_error()
            if error is not None:
                raise self._explained(error, by)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeoutError(
                    f"timed out before all running functions had stopped: {self._status.describe_locked()}"
                ) from pending
            self._state.changed.wait(left)

    def _explained(self, error: Exception, by: str) -> Exception:
        """Under the lock: an error that was taken, to be raised by this call, which may have nothing to do with it."""
        self._state.cancelled_by_error, self._state.final_told = 0, self._scheduler.final
        if isinstance(error, FunctionError) and not self._scheduler.final and (error._fetched or by == "schedule"):
            ago = time.monotonic() - self._state.failed_at
            when = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
            told = ", and fetch() has raised it before" if error._fetched else ""
            lost = ". What was given to schedule() has not been scheduled: do so again" if by == "schedule" else ""
            error.add_note(
                f"This is the error of {error.function}, which failed at {when}, {ago:.1f} s ago{told}: schedule(), "
                f"join() and done() raise the first error of all functions, once. It is cleared now{lost}."
            )
        return error.with_traceback(None)  # else one that is final would grow with every call

    def wait_for(self, values: Sequence[RemoteValue], left: float | None, timeout: float | None) -> None:
        """Wait, for `left` of the `timeout` seconds that the user gave, until these have their values.

        Of functions that are isolated. Raises the error of one that will have none, or WaitTimeoutError.
        """
        deadline = None if left is None else time.monotonic() + left
        with self._state.lock:
            while True:
                for value in values:
                    if value._error is not None:
                        raise value._error.with_traceback(None)
                waiting = [value for value in values if value.status is not RemoteValueStatus.READY]
                if not waiting:
                    return
                self.check_no_error(waiting[0]._function)  # those that run may take long to be cancelled
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeoutError(f"not evaluated after {timeout:g} s: {self._status.describe_locked()}")
                self._state.changed.wait(left)

    def check_no_error(self, name: str) -> None:
        """Under the lock; see `atomically`. What is isolated is cancelled by an error of others, which is theirs."""
        if (error := self._scheduler.error) is not None:
            if self._scheduler.final:  # to do it again would be of no use
                raise error.with_traceback(None)
            raise cancelled_error(name, error) from error
