"""One worker's service in this process, and a function that runs there as a member: light, for processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from pscluster.core.context import FunctionContext, running
from pscluster.core.ids import make_identity
from pscluster.core.metrics.trace import Recording
from pscluster.core.role.options import RoleOptions
from pscluster.core.role.server import RoleServer
from pscluster.ps.client.client import PsClient
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.replica import ReplicaContext, replica_context
from pscluster.worker.job import Job
from pscluster.worker.servers import ServerList
from pscluster.worker.service import SERVICE, WorkerRole, WorkerService

TIMEOUT = 60.0
SECRET = bytes(range(32))


class _NoServers:
    """Stands for the parameter servers' client, which these functions do not use."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Host:
    """One worker's service, attached to a coordinator that is not there."""

    def __init__(self, index: int, address: str, options: RoleOptions) -> None:
        identity = make_identity("worker", index)
        make_client = lambda _request, _incarnation: cast("PsClient", _NoServers())  # noqa: E731  (short)
        self.role = WorkerRole(
            ServerList(index), make_client, TIMEOUT, Recording(), lambda: ConnectionPool(identity, options)
        )
        self.address = address
        services = {"worker": (SERVICE, WorkerService(self.role))}
        self._server = RoleServer(identity, self.role, services, address, options)
        self._server.ready()
        event = node_pb2.AttachEvent()
        self.role.attached(node_pb2.AttachRequest(job=1, num_workers=1), event)
        self.incarnation = event.incarnation

    @property
    def job(self) -> Job:
        """The job of the only attachment."""
        return self.role.job(self.incarnation)

    def context(self) -> FunctionContext:
        """The context for a function."""
        return self.job.context(function=1, attempt=1)

    def close(self) -> None:
        """End the job and the service."""
        self.role.job_ended()
        self._server.stop(0)
        # Its threads end with it, and pytest keeps the hosts of the last test until all fixtures have ended.
        del self._server


def gang_of(
    members: Sequence[tuple[str, int]], rank: int, *, generation: int = 1, secret: bytes = SECRET, timeout: float = 0.0
) -> worker_pb2.Gang:
    """A gang of workers at these addresses with these incarnations, as one of them sees it."""
    gang = worker_pb2.Gang(id=7, generation=generation, rank=rank, secret=secret, timeout=timeout)
    for worker, (address, incarnation) in enumerate(members):
        gang.members.add(worker=worker, address=address, incarnation=incarnation)
    return gang


Step = Callable[[ReplicaContext], Any]


def as_member(host: Host, gang: worker_pb2.Gang, step: Step, context: FunctionContext | None = None) -> Any:
    """Run a function as one member of a gang."""
    with running(context or host.context()) as function, host.job.membership.member(gang, function):
        return step(replica_context())
