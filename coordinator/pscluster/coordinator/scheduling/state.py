"""What the parts of the dispatcher share: the scheduler, the lock that guards it, and what is known of workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.observability.job_metrics import CoordinatorCounts
from pscluster.coordinator.scheduling.call import (
    Call,
)
from pscluster.coordinator.scheduling.connections import (
    LOST_CONNECTION,
)
from pscluster.coordinator.scheduling.partly_applied import PartlyApplied
from pscluster.coordinator.scheduling.scheduler import Scheduler
from pscluster.coordinator.scheduling.server_link import ServerAttachment
from pscluster.coordinator.scheduling.waiting import Condition
from pscluster.coordinator.scheduling.worker_connection import WorkerConnection
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.tcp.client import DataPort
from pscluster.v1 import node_pb2


@dataclass(slots=True)
class WorkerHandle:
    """What is known of a worker and of its connection."""

    peer: PeerAddress
    wake: asyncio.Event
    connection: WorkerConnection | None = None
    up: bool = False
    known: dict[str, None] = field(default_factory=dict)  # definitions, the last used one at the end
    built: set[int] = field(default_factory=set)
    restarts: int = -1
    outcomes: int = 0  # that have come, of all its lives
    heard: float = 0.0  # when it was given something or gave something back
    sent: int = 0  # the last place on its stream that something was sent for
    doomed: asyncio.Event = field(default_factory=asyncio.Event)  # it has not stopped
    why: str = "not connected yet"
    data: DataPort = field(init=False)

    def __post_init__(self) -> None:
        self.data = DataPort(str(self.peer), self.peer.token, self.peer.tls)


class DispatchState:
    """The queue of one coordinator, who works on it, and the loop. The lock guards the scheduler."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Sequence[PeerAddress],
        servers: Sequence[ServerAttachment],
        attach: node_pb2.AttachRequest,
        *,
        max_queued: int,
        max_attempts: int,
        worker_lease: float,
        counts: CoordinatorCounts | None,
        event_log: EventLog | None,
        partly_applied: PartlyApplied | None,
    ) -> None:
        self.loop = loop
        self.workers = [WorkerHandle(peer, asyncio.Event()) for peer in workers]
        self.servers = list(servers)
        self.attach = attach
        self.max_attempts = max_attempts
        self.worker_lease = worker_lease
        self.counts = counts or CoordinatorCounts()
        self.event_log = event_log or EventLog()
        self.partly_applied = partly_applied or PartlyApplied()
        self.lock = threading.Lock()
        self.changed = Condition(self.lock)
        self.scheduler: Scheduler[Call] = Scheduler(len(workers), max_attempts, max_queued)
        self.term = attach.term  # under which functions update variables; it changes while none runs
        self.closed = False
        self.no_worker_since = self.failed_at = time.monotonic()
        self.cancelled_by_error = 0
        self.final_told = False
        self.jobs: list[asyncio.Task[None]] = []
        self._wake_asked = False

    def on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """Call this on the loop's thread, soon; not if the loop is closed. On any thread."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def ask_to_wake(self) -> None:
        """Have `wake_idle` called. Under the lock."""
        if not self._wake_asked:
            self.loop.call_soon_threadsafe(self.wake_idle)
            self._wake_asked = True

    def wake_idle(self) -> None:
        """Wake those who may take something."""
        with self.lock:
            self._wake_asked = False
            indices = self.scheduler.to_wake()
        for index in indices:
            self.workers[index].wake.set()

    def wake_all(self) -> None:
        """Wake all, whether they may take something or not."""
        for handle in self.workers:
            handle.wake.set()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this on the loop; a connection that is lost meanwhile is no error of it."""

        async def quietly() -> None:
            with suppress(*LOST_CONNECTION):
                await work

        task = self.loop.create_task(quietly())
        self.jobs.append(task)
        task.add_done_callback(self.jobs.remove)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began

    @property
    def workers_up(self) -> int:
        """How many workers take functions now."""
        return sum(handle.up for handle in self.workers)
