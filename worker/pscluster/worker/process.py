"""A worker in this process: its role, and the server that serves it, from its start to its end."""

from __future__ import annotations

from collections.abc import Sequence

from pscluster.core.fault_points import reach
from pscluster.core.role.lifecycle import StopRequest
from pscluster.core.role.options import RoleOptions
from pscluster.core.role.server import RoleServer
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.client.client import PsClient
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.v1 import node_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.servers import ServerList
from pscluster.worker.service import SERVICE, WorkerRole, WorkerService
from pscluster.worker.telemetry import WorkerTelemetry


class WorkerProcess:
    """Serves a worker on `address` from the moment it is made.

    Args:
        identity: of the worker.
        address: where it listens.
        own: at which it is dialled, if that is another address; "": it is not.
        peers: the parameter servers that its TF_CONFIG lists; empty: it takes its coordinator's.
        options: how to serve.
        stop: asked when the job is over, if it is to exit then.
    """

    def __init__(
        self,
        identity: node_pb2.Identity,
        address: str,
        options: RoleOptions,
        stop: StopRequest,
        *,
        own: str = "",
        peers: Sequence[PeerAddress] = (),
    ) -> None:
        self._grace = options.grace
        metrics = ClientMetrics(len(peers))
        servers = ServerList(identity.index, peers, options)
        self.place_of = servers.place_of

        def make_client(request: node_pb2.AttachRequest, incarnation: int) -> PsClient:
            metrics.grow(len(request.store_ids))
            client = PsClient(
                servers.of(request),
                identity,
                job=request.job,
                incarnation=incarnation,
                retry_seconds=request.ps_timeout,
                metrics=metrics,
            )
            client.expect(request.store_ids)
            client.updater.term = request.term
            return client

        self._role = WorkerRole(
            servers, make_client, options.connect_timeout, metrics.recording, lambda: ConnectionPool(identity, options)
        )
        self.server = RoleServer(
            identity,
            self._role,
            {"worker": (SERVICE, WorkerService(self._role))},
            address,
            options,
            on_job_end=lambda: stop.ask("the job is over") if options.until_done else None,
            telemetry=WorkerTelemetry(self._role, metrics),
            own=own,
        )

    def close(self) -> None:
        """Leave in order: tell the coordinator, let the running function end or give it back, and stop serving."""
        reach("worker.stop.before")
        self.server.leave()
        self._role.leave(self._grace)
        reach("worker.stop.after")
        self.server.stop(0.5)  # for outcomes that are being sent; the streams do not end by themselves
