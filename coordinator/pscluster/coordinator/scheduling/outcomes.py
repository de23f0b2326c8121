"""What workers tell of functions: results and failures, on the threads of their connections."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pscluster.coordinator.scheduling.call import (
    Call,
)
from pscluster.coordinator.scheduling.function_errors import (
    raised,
    says_data_unread,
    says_server_lost,
    too_long,
)
from pscluster.coordinator.scheduling.hand_over import HandOver
from pscluster.coordinator.scheduling.recalls import Recall, Recalls
from pscluster.coordinator.scheduling.scheduler import Ending, Task
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.settlement import Settlement
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.scheduling.worker_connection import WorkerConnection
from pscluster.core.fault_points import reach
from pscluster.core.metrics.trace import EACH, SHORT_SECONDS
from pscluster.core.values import Buffer
from pscluster.v1 import worker_pb2

Outcome = worker_pb2.Outcome


class Outcomes:
    """Takes what workers tell, settles it, and gives them more."""

    def __init__(
        self,
        state: DispatchState,
        recalls: Recalls,
        settlement: Settlement,
        server_watch: ServerWatch,
        hand_over: HandOver,
    ) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._recalls = recalls
        self._settlement = settlement
        self._server_watch = server_watch
        self._hand_over = hand_over

    def take(self, index: int, connection: WorkerConnection, outcomes: Sequence[Outcome]) -> None:
        """Take outcomes of a worker, on the thread of its connection."""
        reach("coordinator.outcome.before")
        complete: list[tuple[Outcome, Sequence[Buffer]]] = []
        for outcome in outcomes:
            buffers: Sequence[Buffer] = ()
            if outcome.kind == Outcome.DONE and outcome.HasField("attachments"):
                # Before the function counts as done: should the worker die here, another one runs it again.
                buffers = connection.download(outcome.attachments)
            complete.append((outcome, buffers))
        self._state.workers[index].heard = time.monotonic()
        self._take_outcomes(index, complete)
        reach("coordinator.outcome.after")

    def _take_outcomes(self, index: int, outcomes: Sequence[tuple[Outcome, Sequence[Buffer]]]) -> None:
        scheduler, counts, begin = self._scheduler, self._state.counts, time.monotonic()
        returned: list[int] = []
        again: list[int] = []
        if not self._state.lock.acquire(blocking=False):
            self._state.lock.acquire()
            took = time.monotonic() - begin
            counts.lock_waits += 1
            counts.lock_seconds += took
        try:
            before, asked = scheduler.error, scheduler.workers[index].asked
            unblocked = False
            for outcome, buffers in outcomes:
                number, kind = outcome.function, outcome.kind
                if kind == Outcome.DONE and number != asked:
                    seconds = outcome.seconds
                    task = scheduler.finish(index, number, seconds)
                    if task is not None:
                        # As the worker does.
                        if seconds >= SHORT_SECONDS or not number & (EACH - 1) or task.attempts > 1:
                            counts.remember(task, task.payload.function.name, index, begin, "done")
                        self._settlement.visited(task.payload, outcome)
                        unblocked |= self._settlement.set_value(task, outcome, buffers)
                elif kind == Outcome.RETURNED:
                    returned.append(number)
                elif (sent := scheduler.workers[index].sent.get(number)) is None:
                    scheduler.cancelled(index, number)  # it is no longer this worker's; an attempt of it has ended
                elif self._ended_badly(index, sent, outcome, begin):
                    again.append(number)
            if returned:
                self._settlement.settle_cancelled(scheduler.give_back(index, returned))
            if again:
                self._settlement.settle_cancelled(scheduler.run_again(index, again))
            failed = scheduler.error is not None and before is None
            if failed or (
                not scheduler.in_flight and (scheduler.idle or scheduler.error is not None or scheduler.barriers)
            ):
                self._state.changed.notify_all()
            recalls = self._recalls.of_all() if failed else []
            for_all = bool(unblocked or returned or again)
            # Where nothing is left to do nobody waits for what may be possible now.
            done = self._hand_over.to(index) or scheduler.idle
            self._state.workers[index].outcomes += len(outcomes)
        finally:
            self._state.lock.release()
        if recalls or for_all or not done:
            self._state.on_loop(self._go_on, index, recalls, for_all)

    def _ended_badly(self, index: int, task: Task[Call], outcome: Outcome, begin: float) -> bool:
        """Under the lock: it has failed, was too late, or stopped because it was asked to. Is it to be run again?"""
        call, failed = task.payload, outcome.kind == Outcome.FAILED
        call.applied |= outcome.updated or outcome.kind == Outcome.DONE
        if says_server_lost(outcome.failure):
            self._server_watch.doubt()
        ending = self._scheduler.ended_badly(
            index,
            task,
            stopped=outcome.kind == Outcome.CANCELLED,
            data_unread=says_data_unread(outcome.failure),
        )
        how = {Ending.CANCELLED: "cancelled", Ending.AGAIN: "failed, run again", Ending.FAILED: "failed"}[ending]
        self._state.counts.remember(task, call.function.name, index, begin, how)
        if ending is Ending.CANCELLED:
            self._settlement.settle_cancelled([task])
        elif ending is Ending.AGAIN:
            self._settlement.say_retry(index, task, "failed" if failed else "ran too long", outcome.failure)
        else:
            error = raised(index, task, outcome.failure) if failed else too_long(index, task)
            self._settlement.fail_with(index, task, error)
        return ending is Ending.AGAIN

    def _go_on(self, index: int, recalls: Sequence[Recall], for_all: bool) -> None:
        """What follows from outcomes of a worker."""
        self._recalls.ask(recalls)
        self._state.workers[index].wake.set()
        if for_all:
            self._state.wake_idle()
