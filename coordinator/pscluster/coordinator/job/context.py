"""What the parts of a job share: made when a strategy connects, passed to each of them, closed with the job.

The strategy is what users see of it. Parts (checkpoints, evaluations, the live page, figures) are passed the context,
and know no strategy; what the context holds (dispatcher, positions of datasets, variables) is passed what it needs. So
imports go one way: strategy -> parts -> context -> what it holds.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from pscluster.coordinator.data.dataset_progress import DatasetProgress
from pscluster.coordinator.job.losses import Losses, count_losses
from pscluster.coordinator.local.local_cluster import LocalCluster, LocalClusterError
from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.observability.job_metrics import CoordinatorCounts
from pscluster.coordinator.scheduling import loop
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.scheduling.partly_applied import PartlyApplied
from pscluster.coordinator.scheduling.server_link import ServerAttachment, unreachable
from pscluster.coordinator.variables.creation import VariableCreator
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.errors import MisuseError, PSUnavailableError
from pscluster.core.metrics.exposition import MetricsServer
from pscluster.core.role.options import RoleOptions
from pscluster.core.role.server import RoleServer
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.client.client import PsClient
from pscluster.v1 import node_pb2

HOPELESS = 10.0
"""Seconds for which a task that is gone is waited for by a job that is asked to end."""

# Held here until they are closed: a job goes on though nobody refers to its strategy any more.
_open: set[JobContext] = set()


class HasJob(Protocol):
    """Whatever belongs to a job: its strategy, its coordinator, the context itself."""

    @property
    def context(self) -> JobContext:
        """What the job's parts share."""
        ...


class Saver(Protocol):
    """Writes something that the end of the job has to wait for: a CheckpointManager."""

    def end(self) -> None:
        """Wait for what is being written, unless a server is gone; begin nothing more."""
        ...


class Page(Protocol):
    """Shows the job until it is closed."""

    def close(self) -> None:
        """Show the last of it; then nothing. Idempotent."""
        ...


class JobContext:
    """Of one job.

    Attributes:
        resolver: of the cluster.
        spec: the cluster, as it was when the job began.
        options: how this process serves and dials, with the credentials of the job.
        client: the coordinator's own client of the parameter servers.
        request: what the job says of itself to each task that it attaches to.
        tasks: the parameter servers and workers.
        workers: the workers among them.
        variables: makes variables and optimizers, and knows them.
        servers: connections to the parameter servers, once they are attached.
        dispatcher: hands out functions, once there is a ClusterCoordinator.
        coordinator: that ClusterCoordinator.
        positions: of distributed datasets, once there is a ClusterCoordinator.
        counts: figures of the job.
        event_log: what has happened, for whoever looks on.
        partly_applied: functions that have ended and left a part of their updates.
        losses: what parameter servers that came back have lost.
        closed: is the job over?
        half_restored: why some servers have a checkpoint's values, and others perhaps not; empty: there is no reason.
        managers: those of checkpoints that are open: at the end of the job, what they are writing is waited for.
        role_server: answers health checks and status questions, where the coordinator has an address.
        metrics_server: answers `/metrics`, where it is served.
    """

    def __init__(
        self,
        resolver: ClusterResolver | LocalCluster,
        spec: ClusterSpec,
        options: RoleOptions,
        client: PsClient,
        request: node_pb2.AttachRequest,
        variables: VariableCreator,
        tasks: Sequence[PeerAddress],
    ) -> None:
        self.resolver, self.spec = resolver, spec
        self.options = options
        self.client = client
        self.request = request
        self.variables = variables
        self.tasks = list(tasks)
        self.workers = [peer for peer in tasks if peer.role == "worker"]
        self.servers: list[ServerAttachment] = []
        self.dispatcher: Dispatcher | None = None
        self.coordinator: object = None
        self.dataset_progress: DatasetProgress | None = None
        self.counts = CoordinatorCounts()
        self.event_log = EventLog()
        self.partly_applied = PartlyApplied()
        self.losses = Losses(lambda: count_losses(client), self.event_log)
        self.closed = False
        self.half_restored = ""
        self.managers: weakref.WeakSet[Saver] = weakref.WeakSet()
        self.role_server: RoleServer | None = None
        self.metrics_server: MetricsServer | None = None
        self._pages: list[Page] = []
        self._lock = threading.Lock()
        self._workers_gone: LocalClusterError | None = None
        self._lost: PSUnavailableError | None = None  # a parameter server, for good
        client.on_lost = self.server_is_lost

    @property
    def context(self) -> JobContext:
        """This."""
        return self

    @property
    def connected(self) -> bool:
        """Have all tasks answered, and is the job not over?"""
        return self in _open

    @property
    def resumed(self) -> bool:
        """Does this go on with a job whose coordinator has died?"""
        return self.request.epoch > 1

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of `/metrics`; "": it is not served."""
        return self.metrics_server.address if self.metrics_server is not None else ""

    # Tasks that are gone

    def unreachable(self) -> dict[PeerAddress, float]:
        """The parameter servers that are, and for how many seconds."""
        return unreachable(self.servers)

    def hopeless(self) -> str:
        """Why it makes no sense to wait for an end in order: the whole cluster is ending, as a rule. Empty: it does."""
        late = [
            f"{server} has been unreachable for {s:.0f} s" for server, s in self.unreachable().items() if s > HOPELESS
        ]
        return ", ".join(late)

    def server_is_lost(self, error: PSUnavailableError) -> None:
        """Tell everybody: the coordinator's client has found out that a server is, before its link has."""
        self._lost = error
        if self.dispatcher is not None:
            self.dispatcher.server_is_lost(error)

    def workers_gone(self, error: LocalClusterError | None) -> None:
        """For the LocalCluster: no worker is left, nor will one come by itself; None: one comes."""
        with self._lock:
            self._workers_gone = error
            if self.dispatcher is not None:
                self.dispatcher.workers_gone(error)

    def lost_updates(self) -> dict[str, int]:
        """Ask all who are there; see `ParameterServerStrategy.lost_updates`."""
        if self.dispatcher is not None and not self.closed:
            away = self.unreachable()
            there = [server.peer.index for server in self.servers if server.peer not in away]
            loop.run(self.dispatcher.tell_seen(there))
        return count_losses(self.client)

    def wait_for_losses(self, left: float | None) -> None:
        """Until it is known, and said, what servers that came back have lost; `left` seconds at most, and not long."""
        self.losses.wait(left, lambda: bool(self.unreachable()))

    # From its begin to its end

    def begin(self) -> None:
        """All tasks have answered: the job has begun, and is closed when the script ends, at the latest."""
        _open.add(self)
        # What was registered last runs first: the job is ended before the LocalCluster, made before it, is stopped.
        atexit.unregister(close_all)
        atexit.register(close_all, "the coordinator's script has ended")

    def start_dispatcher(self, *, max_queued: int, max_attempts: int, worker_lease: float) -> Dispatcher:
        """For the ClusterCoordinator: begin to hand out functions."""
        if self.closed:
            raise MisuseError("this strategy is closed: make another ParameterServerStrategy")
        dispatcher = Dispatcher(
            loop.event_loop(),
            self.workers,
            self.servers,
            self.request,
            max_queued=max_queued,
            max_attempts=max_attempts,
            worker_lease=worker_lease,
            counts=self.counts,
            event_log=self.event_log,
            partly_applied=self.partly_applied,
        )
        with self._lock:
            self.dispatcher = dispatcher
            dispatcher.workers_gone(self._workers_gone)
        loop.run(dispatcher.start())
        if self._lost is not None:
            dispatcher.server_is_lost(self._lost)
        return dispatcher

    def show_until_closed(self, page: Page) -> None:
        """A live page shows this job; it is closed when this is. MisuseError if the job is over."""
        with self._lock:
            if self.closed:
                raise MisuseError("the job is over: a live page has nothing to show")
            self._pages.append(page)

    def close(self, reason: str) -> None:
        """End the job; see `ParameterServerStrategy.close`. Idempotent."""
        for manager in list(self.managers):
            manager.end()
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self.dispatcher is not None:
            self.dispatcher.tell_of_forgotten()
        self.event_log.record("coordinator", "note", f"the job is over: {reason}")
        for page in self._pages:
            page.close()
        if self.dataset_progress is not None:
            self.dataset_progress.close()
        dispatcher = self.dispatcher
        if dispatcher is None and self.servers:
            dispatcher = Dispatcher(
                loop.event_loop(), self.workers, self.servers, self.request, max_queued=1, max_attempts=1
            )
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
    """Those of this process that are not closed."""
    return list(_open)


def close_all(reason: str) -> None:
    """End all jobs that are open."""
    for job in open_jobs():
        job.close(reason)


os.register_at_fork(after_in_child=_open.clear)  # the jobs are the parent's to end, and it has the loop's thread
