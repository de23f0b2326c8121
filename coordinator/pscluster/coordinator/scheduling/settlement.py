"""What follows for those who wait, when functions end: their values, their errors, and what is said of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from pscluster.coordinator.scheduling.call import (
    Call,
)
from pscluster.coordinator.scheduling.function_errors import (
    cancelled_error,
    says_data_unread,
)
from pscluster.coordinator.scheduling.recalls import Recall, Recalls
from pscluster.coordinator.scheduling.remote_value import RemoteValueStatus
from pscluster.coordinator.scheduling.scheduler import Task
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.errors import (
    FunctionError,
)
from pscluster.core.values import Buffer
from pscluster.v1 import value_pb2, worker_pb2

logger = logging.getLogger(__name__)


Outcome = worker_pb2.Outcome


class Settlement:
    """Gives RemoteValues their values and errors."""

    def __init__(self, state: DispatchState, recalls: Recalls) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._recalls = recalls

    def set_value(self, task: Task[Call], outcome: Outcome, buffers: Sequence[Buffer]) -> bool:
        """Under the lock. True if another task waited for the value."""
        value = task.payload.result()
        if value is None:
            return False
        message = outcome.value if outcome.HasField("value") else value_pb2.Value(none=True)
        value._set_value(message, buffers)
        if task.isolated:
            self._state.changed.notify_all()
        dependents, value.dependents = value.dependents, None
        for dependent in dependents or ():
            self._scheduler.unblock(dependent)
        return bool(dependents)

    @staticmethod
    def visited(call: Call, outcome: Outcome) -> None:
        """Under the lock: it has ended, and with it the visit of its parts."""
        for number, part in enumerate(call.parts):
            part.commit(call.key)
            skipped = [each for each in outcome.skipped if each.part == number] if outcome.skipped else ()
            part.dataset.took(outcome.seconds, outcome.waited, skipped)

    def say_retry(self, index: int, task: Task[Call], what: str, failure: worker_pb2.Failure | None = None) -> None:
        """Under the lock: a function failed, and is to run again."""
        name, peer = task.payload.function.name, self._state.workers[index].peer
        retries = max(task.retries, task.data_retries) if says_data_unread(failure) else task.retries
        self._state.counts.retried_failed += 1
        logger.warning("%s %s on %s; retrying (%d of %d)", name, what, peer, task.failures, retries)
        text = f"{name} {what}; retrying ({task.failures} of {retries})"
        self._state.event_log.record(peer.task, "retry", text, failure.traceback if failure is not None else "")

    def fail_with(self, index: int, task: Task[Call], error: FunctionError) -> None:
        """Let a task that a worker has fail with this. Under the lock."""
        failed, cancelled = self._scheduler.fail(index, task.id, error)
        if failed is not None:
            self.say(index, error)
            self.set_error(failed, error, RemoteValueStatus.FAILED)
        self.settle_cancelled(cancelled)

    def set_error(self, task: Task[Call], error: Exception, status: RemoteValueStatus) -> None:
        """Give a task's value its error, and say where it may have applied a part. Under the lock."""
        if status is RemoteValueStatus.FAILED and error is self._scheduler.error:
            self._state.failed_at = time.monotonic()
        if task.payload.applied and not task.isolated:  # what is isolated changes nothing but copies
            of = " and ".join(part.name for part in task.payload.parts)
            self._state.partly_applied.add(
                task.payload.function.name, f"{error}".partition("\n")[0] + (of and f", of {of}")
            )
        for part in task.payload.parts:
            part.release()
        value = task.payload.result()
        if value is not None:
            value.dependents = None
            value._set_error(error, status)
        if task.isolated:
            self._state.changed.notify_all()

    def settle_cancelled(self, tasks: Iterable[Task[Call]]) -> None:
        """Give the values of tasks that were cancelled their errors. Under the lock."""
        for task in tasks:
            first = self._scheduler.error
            self._state.cancelled_by_error += first is not None
            if first is not None and self._scheduler.final:  # to schedule it again would be of no use
                self.set_error(task, first, RemoteValueStatus.CANCELLED)
                continue
            error = cancelled_error(task.payload.function.name, first, task.payload.applied)
            self.set_error(task, error, RemoteValueStatus.CANCELLED)

    def say(self, index: int, error: FunctionError) -> None:
        """To who looks on: a function failed, for good."""
        head = error.summary.partition("\n\n")[0]
        self._state.event_log.record(self._state.workers[index].peer.task, "error", head, error.remote_traceback)

    def abort(self, error: Exception, *, final: bool) -> None:
        """Cancel everything with this error. On the loop's thread."""
        self._recalls.ask(self.aborted(error, final=final))

    def aborted(self, error: Exception, *, final: bool) -> list[Recall]:
        """On any thread: what is to be asked back."""
        with self._state.lock:
            news = not self._scheduler.final
            self.settle_cancelled(self._scheduler.abort(error, final=final))
            recalls = self._recalls.of_all()
            self._state.changed.notify_all()
        if news:
            self._state.event_log.record("coordinator", "error", str(error))
        return recalls
