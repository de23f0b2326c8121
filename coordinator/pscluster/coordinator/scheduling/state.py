"""What the parts of the dispatcher share: the scheduler, its lock, the workers; how tasks are settled and recalled."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any

from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.observability.job_metrics import CoordinatorMetrics
from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.function_errors import cancelled_error, says_data_unread
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValueStatus
from pscluster.coordinator.scheduling.connections.lifecycle import LOST_CONNECTION
from pscluster.coordinator.scheduling.connections.loop import event_loop
from pscluster.coordinator.scheduling.connections.server_link import ServerAttachment
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.decisions.scheduler import Scheduler
from pscluster.coordinator.scheduling.decisions.tasks import State, Task
from pscluster.coordinator.waiting import Condition
from pscluster.core.errors import FunctionError
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.transport import Transport
from pscluster.core.values.arrays import Buffer
from pscluster.v1 import node_pb2, ps_pb2, value_pb2, worker_pb2

logger = logging.getLogger(__name__)

STEAL_SECONDS = 0.01
"""A worker that is idle for this long gets tasks that another one has not started."""

FORGET_SECONDS = 60.0
"""A worker that has joined is expected back for this long after it went down; then its place is free."""

_MAX_NAMED, _MAX_TEXT = 1000, 300


@dataclass(eq=False)
class PartlyApplied:
    """Functions that failed for good, or were cancelled, and may have applied some of their updates.

    They stay, also in checkpoints, until one is restored. The last are kept by name. The owner serializes calls.
    """

    count: int = 0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_NAMED))  # each one's name, and how it ended

    def add(self, function: str, why: str) -> None:
        line = why.partition("\n")[0]
        self.count += 1
        self.last.append((line if line.startswith(function) else f"{function}: {line}")[:_MAX_TEXT])

    def clear(self) -> None:
        """Forget all: a checkpoint was restored, which undid them."""
        self.count = 0
        self.last.clear()


@dataclass(slots=True)
class WorkerHandle:
    """A worker and its connection, as its link sees them."""

    peer: PeerAddress
    boot_id: int = 0  # of the process that has registered there; 0: any
    transient: bool = False  # forgotten once it has left, or stays away: it will register again
    retired: bool = False  # it is to leave for good
    expected_since: float = field(default_factory=time.monotonic)  # when it registered, or went down
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    connection: WorkerConnection | None = None
    up: bool = False
    known: dict[str, None] = field(default_factory=dict)  # digests of its definitions, the last used one at the end
    built: set[int] = field(default_factory=set)  # ids of its resources
    restarts: int = -1
    outcomes: int = 0  # received, over all incarnations
    heard: float = 0.0  # when a task was last sent to it, or an outcome came
    sent: int = 0  # the last position on its stream for which anything was sent
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # servers have, and it may not know
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)  # it must be given up, see `why_abandoned`
    why_abandoned: str = ""
    why: str = "not connected yet"  # it is not up
    transport: Transport = field(init=False)

    def __post_init__(self) -> None:
        self.transport = Transport(self.peer)

    def abandon(self, why: str) -> None:
        """Give it up. On the loop's thread."""
        self.why_abandoned = why
        self.abandoned.set()

    def move(self, peer: PeerAddress, boot_id: int) -> None:
        """Take the place at which another process has registered as this task. On the loop's thread."""
        self.expected_since, self.boot_id = time.monotonic(), boot_id
        self.transient, self.retired = True, False
        if peer != self.peer or peer.tls_name != self.peer.tls_name:
            self.peer, self.transport = peer, Transport(peer)

    def is_forgotten(self) -> bool:
        """Return whether it is not expected to come back, while it is down."""
        return self.retired or (self.transient and time.monotonic() - self.expected_since >= FORGET_SECONDS)


@dataclass(eq=False)
class DispatchState:
    """The scheduler of one coordinator with the lock that guards it, the workers and servers, and the loop."""

    peers: InitVar[Sequence[PeerAddress]]  # the workers
    servers: Sequence[ServerAttachment]
    attach: node_pb2.AttachRequest
    max_queued: InitVar[int] = 1
    max_attempts: int = 1
    worker_lease: float = math.inf
    metrics: CoordinatorMetrics = field(default_factory=CoordinatorMetrics)
    event_log: EventLog = field(default_factory=EventLog)
    partly_applied: PartlyApplied = field(default_factory=PartlyApplied)

    def __post_init__(self, peers: Sequence[PeerAddress], max_queued: int) -> None:
        self.loop = event_loop()
        self.workers = [WorkerHandle(peer) for peer in peers]
        self.lock = threading.Lock()
        self.changed = Condition(self.lock)
        self.scheduler: Scheduler[Call] = Scheduler(len(peers), self.max_attempts, max_queued)
        self.term = self.attach.term  # of functions' updates; it changes only while no function runs
        self.placements = 0  # how many shards have moved; where replicas step together, likewise
        # Variables that were resharded; it grows while no function runs.
        self.resharded: list[ps_pb2.VariableSpec] = []
        self.closed = False
        self.no_worker_since = self.failed_at = time.monotonic()
        self.cancelled_by_error = 0
        self.final_raised = False
        self.jobs: list[asyncio.Task[None]] = []
        # Called on the loop when a worker is connected, and when one has left for good.
        self.on_worker_up: Callable[[PeerAddress], None] = lambda _: None
        self.on_worker_left: Callable[[PeerAddress], None] = lambda _: None
        self.settle_gangs: Callable[[], None] = lambda: None  # after any event that may concern one; see `gang_runs`
        self._wake_asked = False

    @property
    def members(self) -> list[WorkerHandle]:
        """Return the workers that have not left the cluster."""
        workers = zip(self.workers, self.scheduler.workers, strict=False)  # one may join just now
        return [handle for handle, worker in workers if worker.gone is None]

    def servers_moved(self) -> None:
        """Have all workers told where servers are, as `attach` says. On the loop's thread."""
        for handle in self.workers:
            handle.moved.set()

    @property
    def workers_up(self) -> int:
        return sum(handle.up for handle in self.workers)

    # The loop

    def on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """Call this soon on the loop's thread, unless the loop is closed. From any thread."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this on the loop, ignoring the loss of a connection."""

        async def quietly() -> None:
            with suppress(*LOST_CONNECTION):
                await work

        task = self.loop.create_task(quietly())
        self.jobs.append(task)
        task.add_done_callback(self.jobs.remove)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began

    def ask_to_wake(self) -> None:
        """Have `wake_idle` called. Under the lock."""
        if not self._wake_asked:
            self.loop.call_soon_threadsafe(self.wake_idle)
            self._wake_asked = True

    def wake_idle(self) -> None:
        """Wake the writers that should check the queue."""
        with self.lock:
            self._wake_asked = False
            indices = self.scheduler.to_wake()
        for index in indices:
            self.workers[index].wake.set()

    def wake_all(self) -> None:
        for handle in self.workers:
            handle.wake.set()

    # Tasks end. Under the lock

    def fail(self, index: int, task: Task[Call], error: FunctionError, *, runs_on: bool = False) -> None:
        """Fail a worker's task. With `runs_on` its attempt may still be running."""
        cancelled = self.scheduler.fail(index, task, error, runs_on=runs_on)
        if task.state is State.FAILED:
            self.settle_failed(index, task, error)
        self.settle_cancelled(cancelled)

    def settle_failed(self, index: int, task: Task[Call], error: FunctionError) -> None:
        """Set the error of a task that has failed for good on a worker."""
        head = error.summary.partition("\n\n")[0]
        self.event_log.record(self.workers[index].peer.task, "error", head, error.remote_traceback)
        self.set_error(task, error, RemoteValueStatus.FAILED)

    def settle_cancelled(self, tasks: Iterable[Task[Call]]) -> None:
        for task in tasks:
            error = first = self.scheduler.error
            self.cancelled_by_error += first is not None
            if error is None or not self.scheduler.final:  # otherwise it is no use to schedule it again
                error = cancelled_error(task.payload.function.name, first, task.payload.applied)
            self.set_error(task, error, RemoteValueStatus.CANCELLED)

    def set_error(self, task: Task[Call], error: Exception, status: RemoteValueStatus) -> None:
        """Set the error of a task's value, unless it is of a gang that may run again."""
        if status is RemoteValueStatus.FAILED and error is self.scheduler.error:
            self.failed_at = time.monotonic()
        if task.gang is None or task.gang.is_over:
            self.set_call_error(task.payload, error, status, only_copies=task.isolated and task.gang is None)
        if task.isolated:
            self.changed.notify_all()

    def set_call_error(
        self, call: Call, error: Exception, status: RemoteValueStatus, *, only_copies: bool = False
    ) -> None:
        """Set the error of a call's value, and record that it may have applied some updates, if not only to copies."""
        value = call.result()
        if value is not None and value.status is not RemoteValueStatus.NOT_READY:
            return
        if call.applied and not only_copies:
            of = " and ".join(part.name for part in call.parts)
            self.partly_applied.add(call.function.name, f"{error}".partition("\n")[0] + (of and f", of {of}"))
        for part in call.parts:
            part.release()
        if value is not None:
            value.dependents = None
            value._set_error(error, status)

    def set_value(self, call: Call, message: value_pb2.Value, attachments: Sequence[Buffer]) -> bool:
        """Set a call's value; return whether tasks were waiting for it. Under the lock."""
        value = call.result()
        if value is None:
            return False
        value._set_value(message, attachments)
        dependents, value.dependents = value.dependents, None
        for dependent in dependents or ():
            self.scheduler.unblock(dependent)
        return bool(dependents)

    def say_retry(self, index: int, task: Task[Call], event: str, failure: worker_pb2.Failure | None = None) -> None:
        """Log that a function failed and will be retried."""
        name, peer = task.payload.function.name, self.workers[index].peer
        retries = task.max_retries(data_unread=says_data_unread(failure))
        self.metrics.retried_failed += 1
        logger.warning("%s %s on %s; retrying (%d of %d)", name, event, peer, task.failures, retries)
        text = f"{name} {event}; retrying ({task.failures} of {retries})"
        self.event_log.record(peer.task, "retry", text, failure.traceback if failure is not None else "")

    def abort(self, error: Exception, *, final: bool) -> None:
        """Cancel all tasks with this error. From any thread, without the lock."""
        with self.lock:
            news = not self.scheduler.final
            self.settle_cancelled(self.scheduler.abort(error, final=final))
            self.recall_all()
            self.settle_gangs()
            self.changed.notify_all()
        if news:
            self.event_log.record("coordinator", "error", str(error))

    # Tasks are recalled

    def recall(self, index: int, tasks: Sequence[Task[Call]] | None = None, *, cancel_running: bool = True) -> None:
        """Recall tasks (None: all) from a worker. Under the lock, from any thread.

        Tasks that have not started come back; with `cancel_running` one that runs is asked to stop.
        """
        connection = self.workers[index].connection
        tasks = list(self.scheduler.workers[index].sent.values()) if tasks is None else tasks
        if connection is None or not tasks:
            return
        # Now: soon they may have other positions.
        functions, positions = [task.id for task in tasks], [task.position for task in tasks]
        self.scheduler.begin_recall(index)

        async def ask_back() -> None:
            try:
                await connection.recall(functions, positions, cancel_running)
            finally:
                stealers = self.scheduler.end_recall(index)
            for stealer in stealers:
                self.steal_soon(stealer)
            self.wake_idle()

        self.on_loop(lambda: self.in_background(ask_back()))

    def recall_all(self) -> None:
        """Recall all tasks from all workers. Under the lock, from any thread."""
        for index in range(len(self.workers)):
            self.recall(index)

    def steal_soon(self, index: int) -> asyncio.TimerHandle:
        """Schedule `steal` for an idle worker; to be cancelled if it gets a task before."""
        return self.loop.call_later(STEAL_SECONDS, self.steal, index)

    def steal(self, index: int) -> None:
        """Recall from another worker what an idle one can run instead. On the loop's thread."""
        with self.lock:
            if (order := self.scheduler.steal_for(index)) is not None:
                self.recall(*order, cancel_running=False)
