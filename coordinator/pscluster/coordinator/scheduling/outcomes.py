"""Hand functions over to idle workers, and take their outcomes: results and failures.

Both happen on the threads of the workers' connections; a function that is scheduled alone is sent by the user's thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pscluster.coordinator.scheduling.calls.call import Call, add_step
from pscluster.coordinator.scheduling.calls.function_errors import (
    raised,
    says_data_unread,
    says_member_gone,
    says_server_lost,
    too_long,
)
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.decisions.tasks import Ending, Task
from pscluster.coordinator.scheduling.definitions_cache import DefinitionsCache, has_definition
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.fault_points import reach
from pscluster.core.metrics.trace import EACH, SHORT_SECONDS
from pscluster.core.values.arrays import Buffer
from pscluster.v1 import value_pb2, worker_pb2

Outcome = worker_pb2.Outcome

MAX_DIRECT = 16
"""More functions, or functions that need preparation, are left to the loop: here messages are made under the lock."""


class Outcomes:
    """Settles what workers report, and sends them more functions that need no preparation."""

    def __init__(self, state: DispatchState, server_watch: ServerWatch, definitions: DefinitionsCache) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._server_watch = server_watch
        self._definitions = definitions

    def take(self, index: int, connection: WorkerConnection, outcomes: Sequence[Outcome]) -> None:
        """Take a worker's outcomes, on the thread of its connection."""
        reach("coordinator.outcome.before")
        # Before the functions count as done: if the worker dies here, another one runs them again.
        arrays = {
            outcome.function: connection.download(outcome.attachments)
            for outcome in outcomes
            if outcome.HasField("attachments") and outcome.kind == Outcome.DONE
        }
        self._settle(index, outcomes, arrays)
        reach("coordinator.outcome.after")

    def _settle(self, index: int, outcomes: Sequence[Outcome], arrays: Mapping[int, Sequence[Buffer]]) -> None:
        """Settle outcomes, with the large arrays of their values by function, and hand over the next functions."""
        scheduler, metrics, begin = self._scheduler, self._state.metrics, time.monotonic()
        handle = self._state.workers[index]
        handle.heard = begin
        returned: list[int] = []
        again: list[int] = []
        if not self._state.lock.acquire(blocking=False):
            self._state.lock.acquire()
            metrics.lock_waits += 1
            waited = time.monotonic() - begin
            metrics.lock_seconds += waited
        try:
            before, unblocked = scheduler.error, False
            for outcome in outcomes:
                task_id, kind, seconds = outcome.function, outcome.kind, outcome.seconds
                if kind == Outcome.DONE and (task := scheduler.finish(index, task_id, seconds, outcome.waited)):
                    if seconds >= SHORT_SECONDS or not task_id & (EACH - 1) or task.attempts > 1:  # as the worker does
                        metrics.remember(task, task.payload.function.name, index, begin, "done")
                    if task.payload.parts:
                        self._visited(task, outcome)
                    unblocked |= self._set_value(task, outcome, arrays)
                elif kind == Outcome.RETURNED:
                    returned.append(task_id)
                elif (sent := scheduler.workers[index].sent.get(task_id)) is None:
                    scheduler.lingering_ended(index, task_id)
                elif self._ended_badly(index, sent, outcome, begin):
                    again.append(task_id)
            if returned:
                self._state.settle_cancelled(scheduler.give_back(index, returned))
            if again:
                self._state.settle_cancelled(scheduler.run_again(index, again))
            failed = scheduler.error is not None and before is None
            if failed or scheduler.ends_waits:
                self._state.changed.notify_all()
            if failed:
                self._state.recall_all()
            for_all = unblocked or returned or again
            if for_all:
                self._state.ask_to_wake()
            if scheduler.gangs:
                self._state.settle_gangs()
            # When nothing is left to do, the writer need not check.
            done = self.hand_over(index) or scheduler.idle
            handle.outcomes += len(outcomes)
        finally:
            self._state.lock.release()
        if for_all or not done:
            self._state.on_loop(handle.wake.set)

    def _ended_badly(self, index: int, task: Task[Call], outcome: Outcome, begin: float) -> bool:
        """Settle a task that raised, stopped or returned too late; return whether it runs again. Under the lock."""
        call, failed = task.payload, outcome.kind == Outcome.FAILED
        call.applied |= outcome.updated
        if outcome.kind == Outcome.DONE:
            call.may_have_applied()
        if says_server_lost(outcome.failure):
            self._server_watch.doubt()
        if task.gang is not None and failed and says_member_gone(outcome.failure):
            self._state.metrics.remember(task, call.function.name, index, begin, "missed another")
            self._scheduler.gave_up(index, task, raised(index, task, outcome.failure))
            return False
        ending = self._scheduler.ended_badly(
            index, task, stopped=outcome.kind == Outcome.CANCELLED, data_unread=says_data_unread(outcome.failure)
        )
        self._state.metrics.remember(task, call.function.name, index, begin, ending.value)
        if ending is Ending.CANCELLED:
            self._state.settle_cancelled([task])
        elif ending is Ending.AGAIN:
            self._state.say_retry(index, task, "failed" if failed else "ran too long", outcome.failure)
        else:
            error = raised(index, task, outcome.failure) if failed else too_long(index, task)
            self._state.fail(index, task, error)
        return ending is Ending.AGAIN

    def _set_value(self, task: Task[Call], outcome: Outcome, arrays: Mapping[int, Sequence[Buffer]]) -> bool:
        """Set a task's value; return whether other tasks were waiting for it. Under the lock."""
        if task.payload.result() is None and task.gang is None:
            return False
        message = outcome.value if outcome.HasField("value") else value_pb2.Value(none=True)
        if task.gang is not None:
            task.gang.results[task.gang.rank_of(task)] = message, arrays.get(task.id, ())
            return False
        if task.isolated:
            self._state.changed.notify_all()
        return self._state.set_value(task.payload, message, arrays.get(task.id, ()))

    @staticmethod
    def _visited(task: Task[Call], outcome: Outcome) -> None:
        """Mark the dataset parts of a task that returned as visited. Under the lock."""
        for part_index, part in enumerate(task.payload.parts):
            part.commit(task.key)
            skipped = [skip for skip in outcome.skipped if skip.part == part_index]
            part.dataset.took(outcome.seconds, outcome.waited, skipped)

    def hand_over(self, index: int) -> bool:
        """Send a worker its next functions, if its writer is waiting and they need no preparation. Under the lock.

        Returns False if the writer should check the queue. It need not for a worker that gets no more now and has
        functions, since another outcome will come, or could not take over any: the writer would find the same.

        After Ctrl-C between `send` and `give` a function is sent again, and its updates count once.
        """
        handle, worker = self._state.workers[index], self._scheduler.workers[index]
        connection = handle.connection
        if not worker.idle or not handle.built.issuperset(self._definitions.resources):
            return False
        tasks = self._scheduler.offer(index)
        if not tasks and (worker.sent or self._scheduler.has_nothing_for(index)):
            return True
        if connection is None or not 0 < len(tasks) <= MAX_DIRECT:
            return False
        for task in tasks:
            call = task.payload
            if call.attachments or call.remote or call.classes or not has_definition(handle, call.function):
                return False
        full = self._scheduler.full
        position, now = self._scheduler.reserve(index, len(tasks)), time.monotonic()
        term, placements = self._state.term, self._state.placements
        request = worker_pb2.StepsRequest(position=position)
        for task in tasks:
            add_step(request, task, task.attempts + 1, term, placements)
        connection.send(request)
        self._scheduler.give(index, tasks, position, now)
        self._state.metrics.sent(tasks, now)
        handle.heard, handle.sent = now, position + len(tasks) - 1
        if full:
            self._state.changed.notify_all()
        return True
