"""Dispatch: the shell around the scheduler. Moves tasks to workers and outcomes back, on the loop's thread.

One lock guards the scheduler and all RemoteValues' transitions; it is held for decisions only. User threads
enter tasks and wait on its condition; a thread for each worker takes its outcomes; the loop's thread looks after
connections, takes tasks back, and has for each worker a writer that prepares tasks and sends them. While a writer waits
for something to do (its worker is idle), the other threads send for it what needs no preparation, under the lock:
a message is started there, not waited for. So a function that is scheduled alone goes to its worker without a word
to the loop.

    state              what the parts share: scheduler, lock, workers, loop
    hand_over          from the queue to idle workers          worker_link        a worker's life, and its writer
    definitions_cache  what each worker has                    outcomes           what workers tell of functions
    settlement         values and errors for who waits         recalls            taking back, and stealing
    overtime           what runs too long, or on               server_watch       servers: lost, and what they forget
    waits, barriers    join, done; blocks where nothing runs   queue_stats        how all is, in metrics and words

Order that others rely on: a result's large arrays are fetched before the task counts as finished; a lost
worker's incarnation is closed on every server before its tasks go back to the queue; the ids of ended
functions reach the servers in the background, since they only free memory there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.observability.job_metrics import CoordinatorCounts
from pscluster.coordinator.scheduling.barriers import Barriers
from pscluster.coordinator.scheduling.call import Call
from pscluster.coordinator.scheduling.connections import end_job
from pscluster.coordinator.scheduling.definitions_cache import DefinitionsCache
from pscluster.coordinator.scheduling.hand_over import HandOver
from pscluster.coordinator.scheduling.loop import end_tasks
from pscluster.coordinator.scheduling.outcomes import Outcomes
from pscluster.coordinator.scheduling.overtime import Overtime
from pscluster.coordinator.scheduling.partly_applied import PartlyApplied
from pscluster.coordinator.scheduling.queue_stats import QueueStatus
from pscluster.coordinator.scheduling.recalls import Recalls
from pscluster.coordinator.scheduling.remote_value import RemoteValueStatus
from pscluster.coordinator.scheduling.scheduler import Task
from pscluster.coordinator.scheduling.server_link import ServerAttachment
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.settlement import Settlement
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.scheduling.waits import Waits
from pscluster.coordinator.scheduling.worker_link import WorkerLinks
from pscluster.core.errors import (
    CancelledError,
    MisuseError,
    PsClusterError,
    WaitTimeoutError,
)
from pscluster.core.fault_points import reach
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Dispatcher:
    """Runs the tasks of one coordinator on the workers of its cluster."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Sequence[PeerAddress],
        servers: Sequence[ServerAttachment],
        attach: node_pb2.AttachRequest,
        *,
        max_queued: int,
        max_attempts: int,
        worker_lease: float = math.inf,
        counts: CoordinatorCounts | None = None,
        event_log: EventLog | None = None,
        partly_applied: PartlyApplied | None = None,
    ) -> None:
        state = self._state = DispatchState(
            loop,
            workers,
            servers,
            attach,
            max_queued=max_queued,
            max_attempts=max_attempts,
            worker_lease=worker_lease,
            counts=counts,
            event_log=event_log,
            partly_applied=partly_applied,
        )
        self._lock, self._changed, self._scheduler = state.lock, state.changed, state.scheduler
        self._workers = state.workers
        self._no_workers: PsClusterError | None = None  # why none will come by itself
        self._status = status = QueueStatus(state)
        self._recalls = recalls = Recalls(state)
        self._settlement = settlement = Settlement(state, recalls)
        self._overtime = overtime = Overtime(state, recalls, settlement)
        self._server_watch = server_watch = ServerWatch(state, recalls, settlement)
        self._definitions = definitions = DefinitionsCache(state, settlement, server_watch)
        self._hand_over = hand_over = HandOver(state, definitions)
        outcomes = Outcomes(state, recalls, settlement, server_watch, hand_over)
        self._waits = waits = Waits(state, status)
        self._worker_links = WorkerLinks(state, recalls, settlement, server_watch, definitions, outcomes.take)
        barriers = Barriers(state, recalls, settlement, overtime, status, waits)
        # What the parts do for the dispatcher's users.
        self.join, self.done, self.wait_for = waits.join, waits.done, waits.wait_for
        self.check_no_error = waits.check_no_error
        self.barrier, self.exclusive = barriers.barrier, barriers.exclusive
        self.cancel, self.cancel_waiting = barriers.cancel, barriers.cancel_waiting
        self.withdraw, self.tasks_of = barriers.withdraw, barriers.tasks_of
        self.add_resource, self.release_resource = definitions.add_resource, definitions.release_resource
        self.release_function = definitions.release_function
        self.forget, self.forget_ended = server_watch.forget, server_watch.forget_ended
        self.forgotten = server_watch.forgotten
        self.server_is_lost, self.tell_seen = server_watch.is_lost, server_watch.tell_seen
        self.stats, self.metrics, self.counts = status.stats, status.metrics, status.counts
        self.describe, self.explain, self.pending = status.describe, status.explain, status.pending
        self.missing, self.stranded = status.missing, status.stranded
        self.tell_of_forgotten = status.tell_of_forgotten

    @property
    def term(self) -> int:
        """Under which functions update variables; it is set while none runs."""
        return self._state.term

    @term.setter
    def term(self, term: int) -> None:
        self._state.term = term

    @property
    def workers_up(self) -> int:
        """How many workers take functions now."""
        return self._state.workers_up

    @property
    def functions_done(self) -> int:
        """How many have returned. Takes no lock."""
        return self._status.functions_done

    def atomically(self, look: Callable[[], T]) -> T:
        """What it gives while nothing begins or ends. It may take positions' locks, and no others."""
        with self._lock:
            return look()

    def submit(self, call: Call, key: str = "", left: float | None = None) -> Task[Call]:
        """Enter a function. Blocks while the queue is full; raises the pending error, or that of the cluster.

        One that is isolated is cancelled by such an error, and leaves it to the others.

        Raises:
            WaitTimeoutError: it could not be entered within the seconds that are left.
        """
        deadline = None if left is None else time.monotonic() + left
        blockers = list(call.remote.values())
        size = call.check_size()
        # The lock and not its condition: entering that is Python code, where Ctrl-C could leave it locked for ever.
        with self._lock:
            while True:
                if call.isolated:
                    self._waits.check_no_error(call.function.name)
                else:
                    self._waits.raise_error(deadline, "schedule")
                if self._no_workers is not None:
                    raise self._no_workers.with_traceback(None)
                if self._state.closed:
                    raise CancelledError("the strategy is closed: no more functions can be scheduled")
                if self._scheduler.may_add(threading.get_ident()):
                    break
                if not self._changed.wait(None if deadline is None else deadline - time.monotonic()):
                    raise WaitTimeoutError(
                        f"timed out before everything was scheduled: {self._status.describe_locked()}"
                    )
            pending = [value for value in blockers if value.status is RemoteValueStatus.NOT_READY]
            for value in blockers:
                if value._error is not None:
                    raise CancelledError(f"an argument has no value: {value!r}") from value._error
            if self._scheduler.is_scheduled(call.key):
                raise MisuseError(
                    f"a function with the key {key!r} is already scheduled and has not ended: "
                    "use one key per piece of work"
                )
            task = Task(
                call,
                len(pending),
                size,
                isolated=call.isolated,
                since=time.monotonic(),
                timeout=call.timeout,
                retries=call.retries,
                data_retries=call.data_retries if call.parts else 0,
                key=call.key,
            )
            if call.timeout is not None and not self._overtime.timed.is_set():
                self._state.loop.call_soon_threadsafe(self._overtime.timed.set)
            free = None if pending or self._scheduler.queued else self._scheduler.next_free()
            # In this order: wherever Ctrl-C strikes there is a wake-up too many, not one too few; but for what is
            # handed over directly, which the loop finds by itself.
            if not pending and free is None:
                self._state.ask_to_wake()
            for value in pending:
                if value.dependents is None:
                    value.dependents = []
                value.dependents.append(task)
            self._scheduler.add(task)
            if free is not None and not self._hand_over.to(free):
                self._state.ask_to_wake()
        return task

    def workers_gone(self, error: PsClusterError | None) -> None:
        """No worker is left, nor will one come by itself: what is scheduled fails with this. None: one comes."""
        with self._lock:
            self._no_workers = error
            busy = not self._scheduler.idle
        if error is not None and busy:
            self._state.on_loop(functools.partial(self._settlement.abort, error, final=False))

    async def start(self) -> None:
        """Begin to dial workers and to watch the servers."""
        jobs = [self._worker_links.serve(index) for index in range(len(self._workers))]
        jobs += [*self._server_watch.jobs(), self._status.warn_when_quiet(), self._overtime.watch()]
        self._state.jobs = [asyncio.create_task(self._supervised(job)) for job in jobs]

    async def _supervised(self, job: Coroutine[Any, Any, None]) -> None:
        """A job that ended unnoticed would let others wait for ever: what it fails with is the cluster's error."""
        try:
            await job
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failure: BaseException = error  # nobody asked for it: grpc's word for a call that is gone
        except Exception as error:
            failure = error
        else:
            return
        logger.error("a job of the coordinator failed", exc_info=failure)
        self._settlement.abort(
            PsClusterError(f"the coordinator failed ({type(failure).__name__}: {failure})"), final=True
        )

    async def close(self, reason: str) -> None:
        """Cancel what is scheduled, tell the workers that the job is over, end all connections."""
        with self._changed:
            self._state.closed = True
            cancelled = self._scheduler.abort(CancelledError(f"the job is over: {reason}"), final=True)
            self._settlement.settle_cancelled(cancelled)
            self._changed.notify_all()
        for server in self._state.servers:
            server.over = True
        # The roles first, while they still see the coordinator: an ended job is no lost coordinator.
        peers = [*(handle.peer for handle in self._workers), *(server.peer for server in self._state.servers)]
        reach("coordinator.end.before")
        await asyncio.gather(*(end_job(peer, self._state.attach.job, reason) for peer in peers))
        reach("coordinator.end.after")
        await end_tasks(self._state.jobs)
        await asyncio.gather(*(handle.connection.close() for handle in self._workers if handle.connection is not None))
        with self._changed:
            for index, handle in enumerate(self._workers):
                handle.up = False
                self._scheduler.lose(index)
                self._settlement.settle_cancelled(self._scheduler.requeue(index)[1])
            self._scheduler.shut_out()
            self._changed.notify_all()
