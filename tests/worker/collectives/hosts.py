"""Worker services in this process, and functions that run there as the members of a gang."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tests.conftest import attached
from tests.roles.processes import free_addresses

from pscluster.core.context import FunctionContext, running
from pscluster.core.ids import make_identity
from pscluster.core.metrics.trace import Recording
from pscluster.core.role.options import RoleOptions
from pscluster.core.role.server import RoleServer
from pscluster.core.security.certificates import make_certificates
from pscluster.core.security.tls import load_tls
from pscluster.core.transport.unix_sockets import PREFIX
from pscluster.ps.client.client import PsClient
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.collectives.links import Ways
from pscluster.worker.collectives.replica import ReplicaContext, replica_context
from pscluster.worker.job import Job
from pscluster.worker.servers import ServerList
from pscluster.worker.service import SERVICE, WorkerRole, WorkerService

TIMEOUT = 60.0
SECRET = bytes(range(32))
TOKEN = "correct-horse-battery-staple"
WAYS = ("grpc", "tcp", "unix", "tls")


class _NoServers:
    """Stands for the parameter servers' client, which these functions do not use."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Host:
    """One worker's service, attached to a coordinator that is not there."""

    def __init__(self, index: int, address: str, options: RoleOptions) -> None:
        identity = make_identity("worker", index)
        make_client = lambda _request, _incarnation: cast("PsClient", _NoServers())  # noqa: E731  (short)
        self.role = WorkerRole(ServerList(index), make_client, TIMEOUT, Recording(), lambda: Ways(identity, options))
        self.address = address
        services = {"worker": (SERVICE, WorkerService(self.role))}
        self._server = RoleServer(identity, self.role, services, address, options)
        self._server.ready()
        event = attached(self.role, node_pb2.AttachRequest(job=1, num_workers=1))
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


def options_of(way: str, folder: Path) -> RoleOptions:
    """The options of workers that reach each other in a way; certificates are made in the folder."""
    if way == "grpc":
        return RoleOptions(data_port=None, metrics_port=None, token=TOKEN)
    if way == "tls":
        certificates = folder / "certificates"
        if not certificates.exists():
            make_certificates(certificates)
        return RoleOptions(metrics_port=None, token=TOKEN, tls=load_tls(str(certificates / "worker")))
    return RoleOptions(metrics_port=None, token=TOKEN)


def addresses_of(way: str, folder: Path, count: int) -> list[str]:
    """Addresses for so many workers."""
    if way != "unix":
        return free_addresses(count)
    folders = [folder / f"w{index}" for index in range(count)]
    for each in folders:
        each.mkdir(mode=0o700)
    return [f"{PREFIX}{each}/s" for each in folders]


@contextmanager
def hosts_of(count: int, folder: Path, way: str = "tcp") -> Iterator[list[Host]]:
    """So many workers, that reach each other in this way."""
    options, hosts = options_of(way, folder), list[Host]()
    try:
        for index, address in enumerate(addresses_of(way, folder, count)):
            hosts.append(Host(index, address, options))
        yield hosts
    finally:
        for host in hosts:
            host.close()


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


class Running:
    """Functions of one gang, each on a thread of its own."""

    def __init__(self, hosts: Sequence[Host], steps: Sequence[Step | None], **gang: Any) -> None:
        places = [(host.address, host.incarnation) for host in hosts]
        self.contexts = [host.context() for host in hosts]
        self._results: list[Any] = [None] * len(hosts)

        def run(rank: int, step: Step) -> None:
            try:
                message = gang_of(places, rank, **gang)
                self._results[rank] = as_member(hosts[rank], message, step, self.contexts[rank])
            except BaseException as error:
                self._results[rank] = error

        self._threads = [
            threading.Thread(target=functools.partial(run, rank, step), daemon=True)
            for rank, step in enumerate(steps)
            if step is not None
        ]
        for thread in self._threads:
            thread.start()

    def results(self) -> list[Any]:
        """What they have returned or raised, by rank."""
        for thread in self._threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a function that does not end"
        return self._results


def together(hosts: Sequence[Host], *steps: Step | None, **gang: Any) -> list[Any]:
    """Run one function on all hosts, or one on each, as a gang; what they have returned or raised, by rank."""
    return Running(hosts, steps * len(hosts) if len(steps) == 1 else steps, **gang).results()
