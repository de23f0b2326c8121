"""A role's server: its services, over gRPC and on the data plane, health checks and metrics."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pscluster.core.cluster.addresses import is_loopback, is_on_this_machine
from pscluster.core.limits import connections, raise_descriptor_limit
from pscluster.core.metrics.exposition import MetricsServer
from pscluster.core.metrics.registry import Telemetry
from pscluster.core.role.node import NodeService, Role
from pscluster.core.role.open_health import OpenHealth
from pscluster.core.role.options import RoleOptions
from pscluster.core.role.process import bind_log
from pscluster.core.security.access import RoleInterceptor
from pscluster.core.security.authenticator import AuthenticationInterceptor, Authenticator, NoTokenInterceptor
from pscluster.core.security.connection_reaper import ConnectionReaper
from pscluster.core.security.http_access import CertificateFiles, check_exposure
from pscluster.core.security.tls import CERTIFICATE, KEY
from pscluster.core.transport.admission import Admission
from pscluster.core.transport.channels import NODE_SERVICE
from pscluster.core.transport.listener import Checks, Endpoint, Listener
from pscluster.core.transport.methods import OnAccepted, generic_handler
from pscluster.core.transport.unix_sockets import path_of
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)


def serve_metrics(telemetry: Telemetry, options: RoleOptions) -> MetricsServer | None:
    """Begin to serve the metrics of a role, unless turned off.

    Raise ConfigurationError if the port is in use, or the host is off loopback without a token or a certificate.
    """
    host, port = options.metrics_host, options.metrics_port
    if port is None:
        return None
    files = None
    if options.tls is not None and not is_loopback(host):
        files = CertificateFiles("metrics", options.tls.folder / CERTIFICATE, options.tls.folder / KEY)
    check_exposure(
        "metrics",
        host,
        host,
        options.token,
        encrypted=files is not None,
        insecure=options.insecure,
        hint="leave --metrics-host at 127.0.0.1",
    )
    return MetricsServer(telemetry, host, port, options.token, files, open_health=options.open_health)


class _Health(health.HealthServicer):  # type: ignore[misc]  # it has no types
    """The standard health check, which marks its callers as authenticated, like all methods."""

    def __init__(self, on_accepted: OnAccepted) -> None:
        super().__init__(experimental_non_blocking=True, experimental_thread_pool=ThreadPoolExecutor(1))
        self._mark_authenticated = on_accepted

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  (gRPC's name)
        self._mark_authenticated(context.peer())
        return super().Check(request, context)

    def Watch(self, request: Any, context: grpc.ServicerContext, *rest: Any) -> Any:  # noqa: N802
        self._mark_authenticated(context.peer())
        return super().Watch(request, context, *rest)


class RoleServer:
    """The gRPC server of a role: its own services, the node service and the standard health check.

    With `telemetry`, it serves the role's metrics, too. The role's own services are also served on a data plane, for
    clients that dial the role by its own address: the listening one, unless `own` is given. `admission` bounds the
    memory for arriving messages, and `overhead_bytes` what one may have beside a full frame.
    """

    def __init__(
        self,
        identity: node_pb2.Identity,
        role: Role,
        services: Mapping[str, tuple[ServiceDescriptor, object]],
        address: str,
        options: RoleOptions,
        on_job_end: Callable[[], None] = lambda: None,
        telemetry: Telemetry | None = None,
        own: str = "",
        admission: Admission | None = None,
        overhead_bytes: int | None = None,
    ) -> None:
        self._serving = False
        self._metrics: MetricsServer | None = None
        raise_descriptor_limit()
        self._reaper = ConnectionReaper(connections())
        bind_log(role=identity.role, index=identity.index, boot_id=f"{identity.boot_id:016x}", pid=os.getpid())
        self.node = NodeService(identity, role, on_job_end, options.coordinator_timeout)
        # With --open-health anyone may check: that does not authenticate.
        self._health = _Health((lambda _peer: None) if options.open_health else self._reaper.mark_authenticated)
        interceptors: list[grpc.ServerInterceptor] = []  # of every call, on any transport
        self._roles: RoleInterceptor | None = None
        if options.tls is not None and options.tls.is_mutual:
            self._roles = RoleInterceptor(tls=options.tls)
            interceptors.append(self._roles)
            self._roles.start()
        grpc_only: list[grpc.ServerInterceptor] = [NoTokenInterceptor()]
        self._authenticator = Authenticator(options.token, identity) if options.token else None
        if self._authenticator is not None:
            open_health = OpenHealth() if options.open_health else None
            grpc_only = [AuthenticationInterceptor(self._authenticator, open_health, self._reaper.refused)]
        self._services = services
        self._names = ["", *(descriptor.full_name for descriptor, _ in services.values())]
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._listener = Listener(
            Endpoint(address, options.data_port, options.share_port, options.tls),
            Checks(grpc_only, interceptors, self._authenticator, self._reaper.refused, admission, overhead_bytes),
            self._add_services,
            [generic_handler(descriptor, servicer) for descriptor, servicer in services.values()],
        )
        self.port = self._reaper.port = self._listener.port
        if self._authenticator is not None:
            self._authenticator.start()
        local = is_on_this_machine(address)
        if path_of(address) is None and options.token is None and (options.tls is None or not options.tls.is_mutual):
            logger.warning(
                "listening on %s without a token%s: %s can %s",
                address,
                " (--insecure)" if options.insecure else "",
                "any user of this machine" if local else "anyone who can reach it",
                "run code here" if options.insecure else "read and change what is here, though not send code",
            )
        elif not local and options.insecure and options.tls is None:
            logger.warning(
                "listening on %s in plain text (--insecure): anyone on the path can read and change what travels",
                address,
            )
        if telemetry is not None:
            telemetry.why_not_ready = self._not_ready
            telemetry.refusals = lambda: self._reaper.refusals.total
            self._metrics = serve_metrics(telemetry, options)
            self.node.metrics_address = self._metrics.address if self._metrics is not None else ""
        if self._listener.data_port:
            self.node.data_port, self.node.address = self._listener.data_port, own or self._listener.address
        self._listener.start()
        self._reaper.start()

    def _add_services(self, server: grpc.Server) -> None:
        for descriptor, servicer in ((NODE_SERVICE, self.node), *self._services.values()):
            handler = generic_handler(descriptor, servicer, self._reaper.mark_authenticated)
            server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    def _not_ready(self) -> str:
        return self.node.not_ready() if self._serving else "it waits for the tasks that it needs"

    def _set_health(self, status: int) -> None:
        for name in self._names:
            self._health.set(name, status)

    def ready(self) -> None:
        """Let health checks say SERVING from now on."""
        self._serving = True
        if self._metrics is not None:
            self._metrics.wake()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def set_address(self, own: str) -> None:
        """Set the address at which clients dial the role, to tell them of its data plane."""
        if self.node.data_port:
            self.node.address = own

    def leave(self) -> None:
        """Let health checks say NOT_SERVING and tell the coordinator; calls are still answered."""
        self._health.enter_graceful_shutdown()
        self.node.leave()

    def stop(self, grace: float) -> None:
        """Refuse new calls, give the running ones `grace` seconds, close."""
        self._reaper.stop()
        for watched in (self._authenticator, self._roles):
            if watched is not None:
                watched.stop()
        self._listener.stop(grace)
        if self._metrics is not None:
            self._metrics.close()
