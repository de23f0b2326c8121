"""What the coordinator answers when asked how it does."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace

from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.core.role.listening import listen_address
from pscluster.core.role.node import Role
from pscluster.core.role.server import RoleServer
from pscluster.core.transport.unix_sockets import SocketTakenError
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)


class CoordinatorRole(Role):
    """The role of one job's coordinator."""

    def __init__(self, context: JobContext) -> None:
        self._context = weakref.ref(context)

    def describe(self, reply: node_pb2.StatusReply) -> None:
        """Fill in what the coordinator does, and its functions."""
        context = self._context()
        reply.state = "coordinating" if context is not None and context.connected else "waiting for tasks"
        if context is not None and (dispatcher := context.dispatcher) is not None:
            reply.detail = dispatcher.describe()
            seen = dispatcher.stats()
            reply.functions_waiting, reply.functions_running, reply.functions_done = (
                seen.waiting,
                seen.in_flight,
                seen.done,
            )


def serve_role(context: JobContext) -> RoleServer | None:
    """Answer health checks and status questions, where the cluster gives the coordinator an address."""
    resolver, spec, options = context.resolver, context.spec, context.options
    if "chief" not in spec.jobs or resolver.task_type != "chief":
        return None
    address = listen_address(spec.task_address("chief", 0), options)
    if isinstance(resolver, LocalCluster):
        options = replace(options, share_port="--share-port" in resolver.hand_over_port("chief", 0))
    try:
        server = RoleServer(context.request.coordinator, CoordinatorRole(context), {}, address, options)
    except SocketTakenError:
        if not options.share_port:
            raise
        logger.info("another coordinator answers at %s, so this one can't be asked for its status there", address)
        return None
    server.node.metrics_address = context.metrics_address
    return server
