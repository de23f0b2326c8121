"""What the parts of a job share: made when a strategy connects, passed to each part, closed with the job.

Users see the strategy. The parts (checkpoints, evaluations, the live page, metrics) are passed the context, and know no
strategy; what the context holds (dispatcher, positions of datasets, variables) is passed what it needs. So imports go
one way: strategy -> parts -> context -> what it holds.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from pscluster.coordinator.data.dataset_progress import DatasetProgress
from pscluster.coordinator.job.cuts import Cuts
from pscluster.coordinator.job.losses import Losses
from pscluster.coordinator.job.members import MAX_WORKERS, Claim, Members
from pscluster.coordinator.job.server_places import WaitingServers
from pscluster.coordinator.local.monitor import ClusterError
from pscluster.coordinator.moves.decision import latest
from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.observability.job_metrics import CoordinatorMetrics
from pscluster.coordinator.scheduling.connections import loop
from pscluster.coordinator.scheduling.connections.server_link import ServerAttachment, unreachable
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.scheduling.state import DispatchState, PartlyApplied
from pscluster.coordinator.variables.creation import VariableCreator
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.display.notebook import current_cell
from pscluster.core.errors import MisuseError, PSUnavailableError, UnavailableError
from pscluster.core.metrics.exposition import MetricsServer
from pscluster.core.role.options import RoleOptions
from pscluster.core.role.server import RoleServer
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.client.client import PsClient
from pscluster.v1 import node_pb2, ps_pb2

logger = logging.getLogger(__name__)

UNREACHABLE_SECONDS = 10.0
"""Seconds for which a job that is ending waits for an unreachable task."""

# Until they are closed: a job goes on even without a reference to its strategy.
_open: set[JobContext] = set()


class HasJob(Protocol):
    """Anything that belongs to a job: its strategy, its coordinator, the context itself."""

    @property
    def context(self) -> JobContext:
        """Return what the job's parts share."""


class Saver(Protocol):
    """A writer that the end of the job waits for: a CheckpointManager."""

    def end(self) -> None:
        """Wait for the current write, unless a server is unreachable, and begin no other."""


class Settle(Protocol):
    """What makes all servers have the same synchronous steps: see `SynchronousRun.settle`."""

    def __call__(self, *, anew: bool = False) -> None: ...


class Sender(Protocol):
    """What reads and updates variables later than it is told to: before a checkpoint, or a restore, if told by then."""

    def settle(self, timeout: float, *, reads: bool = False) -> None:
        """Wait until all updates that were asked for are applied, or have failed; with `reads`, all reads as well.

        WaitTimeoutError after `timeout` seconds.
        """


@dataclass(eq=False, repr=False)
class JobContext:
    """What the parts of one job share."""

    resolver: ClusterResolver
    spec: ClusterSpec  # as the cluster was when the job began
    options: RoleOptions  # how this process serves and dials, with the credentials of the job
    client: PsClient  # the coordinator's own client of the parameter servers
    request: node_pb2.AttachRequest  # sent to each task that the job attaches to
    variables: VariableCreator  # of variables and optimizers; it keeps them
    tasks: list[PeerAddress]  # the parameter servers and workers
    servers: list[ServerAttachment] = field(default_factory=list)  # once they are attached
    taking: list[ServerAttachment] = field(default_factory=list)  # while they are being attached
    dispatcher: Dispatcher | None = None  # hands out functions, once there is a ClusterCoordinator
    coordinator: object = None  # that ClusterCoordinator
    dataset_progress: DatasetProgress | None = None  # once there is a ClusterCoordinator
    settle_steps: Settle = lambda **_: None  # makes all servers have the same synchronous steps
    metrics: CoordinatorMetrics = field(default_factory=CoordinatorMetrics)
    event_log: EventLog = field(default_factory=EventLog)  # what has happened, for observers
    partly_applied: PartlyApplied = field(default_factory=PartlyApplied)
    closed: bool = False  # is the job over?
    cell: int | None = field(default_factory=current_cell)  # of a notebook, that has begun it
    half_restored: str = ""  # why only some servers may have a checkpoint's values
    managers: weakref.WeakSet[Saver] = field(default_factory=weakref.WeakSet)  # open ones
    senders: weakref.WeakSet[Sender] = field(default_factory=weakref.WeakSet)
    moving: threading.RLock = field(default_factory=threading.RLock)  # held while shards move, and servers come and go
    cuts: Cuts = field(default_factory=Cuts)  # that the servers have yet to write
    role_server: RoleServer | None = None  # answers status questions, where the coordinator has an address
    metrics_server: MetricsServer | None = None  # answers `/metrics`, where it is served
    _pages: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _workers_gone: ClusterError | None = None
    _lost: PSUnavailableError | None = None  # a parameter server, for good

    def __post_init__(self) -> None:
        self.workers = [peer for peer in self.tasks if peer.role == "worker"]  # never changed in place
        self._boot_ids: dict[int, int] = {}  # of workers that have registered
        self._members = Members((peer.index for peer in self.workers), self.options.max_workers or MAX_WORKERS)
        self.waiting_servers = WaitingServers[PeerAddress]()  # that have registered, and may be added
        self.losses = Losses(self.client, self.event_log, self.unreachable)
        self.client.exchanges.on_lost = self.server_is_lost

    @property
    def context(self) -> JobContext:
        """Return this context: see `HasJob`."""
        return self

    @property
    def connected(self) -> bool:
        """Return whether all tasks have answered and the job is not over."""
        return self in _open

    @property
    def placing(self) -> threading.RLock:
        """Return the lock that is held while anything is cut or created that goes by which server has what."""
        return self.variables.placing

    @property
    def resumed(self) -> bool:
        """Return whether this continues a job whose coordinator has died."""
        return self.request.coordinator_number > 1

    @property
    def metrics_address(self) -> str:
        """Return HOST:PORT of `/metrics`; "" if it is not served."""
        return self.metrics_server.address if self.metrics_server is not None else ""

    def placing_of_servers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which servers may be added and removed: it begins when no checkpoint is being written."""
        return self.cuts.none_open(self.placing, self.client.exchanges.check_open)

    def place_of(self, peer: PeerAddress) -> PeerAddress:
        """Return where a task is by now."""
        return self.client.place_of(peer) if peer.role == "ps" else peer

    # Workers that join and leave: on the loop's thread, one at a time

    def register(self, claim: Claim, peer: PeerAddress, boot_id: int) -> PeerAddress:
        """Take a worker that has registered at the place of `peer`, and return it with its index.

        BusyError if its task is taken, or the cluster is full; nothing has changed then.
        """

        async def take() -> PeerAddress:
            if self.closed:
                raise UnavailableError("the job is over: the worker joins the next one")
            mine = replace(peer, index=self._members.claim(claim, time.monotonic(), self._presence(peer)))
            self._boot_ids[mine.index] = boot_id
            self._set_workers([*(worker for worker in self.workers if worker.index != mine.index), mine])
            if self.dispatcher is not None:
                self.dispatcher.join(mine, boot_id)
            return mine

        return loop.run(take())

    def _presence(self, peer: PeerAddress) -> Callable[[int], bool]:
        """Return what says, to one that registers at the place of `peer`, whether the worker with an index is there."""
        if self.dispatcher is not None:
            return self.dispatcher.is_there
        # Nobody has tried yet to connect to those that TF_CONFIG names: only who is at their address takes their task.
        named = {worker.index: worker.address for worker in self.workers if worker.index not in self._boot_ids}
        return lambda index: named.get(index, peer.address) != peer.address

    def retire_worker(self, index: int) -> None:
        """Let a worker leave the cluster for good when it is next down: it is being stopped."""

        async def retire() -> None:
            if self.dispatcher is None:
                self._worker_left(index)
            else:
                self.dispatcher.retire(index)

        loop.run(retire())

    def _worker_left(self, index: int) -> None:
        """Note that a worker has left the cluster for good."""
        self._members.left(index)
        self._boot_ids.pop(index, None)
        self._set_workers([worker for worker in self.workers if worker.index != index])

    def _set_workers(self, workers: list[PeerAddress]) -> None:
        """Take these workers for all messages from now on."""
        workers = sorted(workers, key=lambda peer: peer.index)
        self.tasks = [*(peer for peer in self.tasks if peer.role != "worker"), *workers]
        self.workers = workers
        self.request.workers[:] = [peer.index for peer in workers]
        # A worker's index is below it: the number of input pipelines.
        self.request.num_workers = max((peer.index + 1 for peer in workers), default=0)

    # Shards that move

    def announce(
        self,
        specs: Iterable[ps_pb2.VariableSpec],
        *,
        frozen: ps_pb2.HeldShard | None = None,
        arriving: ps_pb2.HeldShard | None = None,
    ) -> None:
        """Send these specs, and the shard that is moving, to servers that attach again."""

        async def note() -> None:  # where requests to attach are copied
            request, moved = node_pb2.AttachRequest(), (spec for spec in specs if spec.placement)
            request.CopyFrom(self.request)
            for field_name in ("placed", "frozen", "arriving"):
                self.request.ClearField(field_name)
            self.request.placed.extend(latest([*request.placed, *moved]).values())
            self.request.frozen.extend([] if frozen is None else [frozen])
            self.request.arriving.extend([] if arriving is None else [arriving])

        loop.run(note())

    # Tasks that are lost

    def unreachable(self) -> dict[PeerAddress, float]:
        """Return the unreachable parameter servers, with the seconds for which they have been."""
        return unreachable(self.servers)

    def unreachable_too_long(self) -> str:
        """Return why a clean end is not worth waiting for, usually because the whole cluster ends; otherwise ""."""
        late = [
            f"{server} has been unreachable for {s:.0f} s"
            for server, s in self.unreachable().items()
            if s > UNREACHABLE_SECONDS
        ]
        return ", ".join(late)

    def server_is_lost(self, error: PSUnavailableError) -> None:
        """Pass on that a server is lost: the coordinator's client has noticed before its attachment has."""
        self._lost = error
        if self.dispatcher is not None:
            self.dispatcher.servers.is_lost(error)

    def workers_gone(self, error: ClusterError | None) -> None:
        """Note, for the cluster, that no worker is left and none will come up by itself; None: one will."""
        with self._lock:
            self._workers_gone = error
            if self.dispatcher is not None:
                self.dispatcher.workers_gone(error)

    def lost_updates(self) -> dict[str, int]:
        """Count lost updates; see `ParameterServerStrategy.lost_updates`."""
        self.client.check_servers()  # before workers are asked, who would wait for a lost one
        self.client.statuses()  # wait for servers that are down: workers tell them when they are back
        self.losses.wait(None)
        if self.dispatcher is not None and not self.closed:
            away = self.unreachable()
            there = [server.peer.index for server in self.servers if server.peer not in away]
            loop.run(self.dispatcher.servers.report_seen(there))
        return self.losses.count()

    def server_is_back(self, server: ServerAttachment) -> None:
        """Count what a server that was restored has lost. On the loop's thread."""
        dispatcher = self.dispatcher
        self.losses.begin(None if dispatcher is None else dispatcher.servers.report_seen([server.peer.index]))

    # Beginning and end

    def begin(self) -> None:
        """Begin the job: all tasks have answered. It is closed at the end of the script, at the latest."""
        _open.add(self)
        # The last registered runs first: the job ends before the LocalCluster, made before it, is stopped.
        atexit.unregister(close_all)
        atexit.register(close_all, "the coordinator's script has ended")

    def start_dispatcher(self, *, max_queued: int, max_attempts: int, worker_lease: float) -> Dispatcher:
        """Begin to run functions, for the ClusterCoordinator."""
        if self.closed:
            raise MisuseError("this strategy is closed: make another ParameterServerStrategy")
        limits = max_queued, max_attempts, worker_lease
        records = self.metrics, self.event_log, self.partly_applied

        async def begin() -> Dispatcher:  # on the loop: no worker joins meanwhile
            dispatcher = Dispatcher(DispatchState(self.workers, self.servers, self.request, *limits, *records))
            for handle in dispatcher.state.workers:
                if (boot_id := self._boot_ids.get(handle.peer.index)) is not None:
                    handle.move(handle.peer, boot_id)
            dispatcher.state.on_worker_up = lambda peer: self._members.came_up(peer.index)
            dispatcher.state.on_worker_left = lambda peer: self._worker_left(peer.index)
            with self._lock:
                self.dispatcher = dispatcher
                dispatcher.workers_gone(self._workers_gone)
            await dispatcher.start()
            return dispatcher

        dispatcher = loop.run(begin())
        if self._lost is not None:
            dispatcher.servers.is_lost(self._lost)
        return dispatcher

    def show_until_closed(self, close: Callable[[], None]) -> None:
        """Call `close`, of a live page, when the job is closed. Raise MisuseError if the job is over."""
        with self._lock:
            if self.closed:
                raise MisuseError("the job is over: a live page has nothing to show")
            self._pages.append(close)

    def close(self, reason: str) -> None:
        """End the job; see `ParameterServerStrategy.close`. Idempotent."""
        for manager in list(self.managers):
            manager.end()
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self.client.exchanges.closed = reason  # before servers drop the job: threads are told that, and not of a loss
        if self.dispatcher is not None:
            self.dispatcher.status.warn_of_forgotten()
        self.event_log.record("coordinator", "note", f"the job is over: {reason}")
        for close_page in self._pages:
            close_page()
        if self.dataset_progress is not None:
            self.dataset_progress.close()
        dispatcher = self.dispatcher
        if dispatcher is None and self.servers:
            dispatcher = Dispatcher(DispatchState(self.workers, self.servers, self.request))
        try:
            if dispatcher is not None:
                loop.run(dispatcher.close(reason))
            for server in self.servers:
                loop.run(server.close())
        finally:  # Ctrl-C included
            _open.discard(self)
            self.losses.close()
            self.client.close(reason)
            if self.role_server is not None:
                self.role_server.stop(0)
            if self.metrics_server is not None:
                self.metrics_server.close()


def open_jobs() -> list[JobContext]:
    """Return the jobs of this process that are not closed."""
    return list(_open)


def close_all(reason: str) -> None:
    for job in open_jobs():
        job.close(reason)


os.register_at_fork(after_in_child=_open.clear)  # the jobs are the parent's to end, and it has the loop's thread
