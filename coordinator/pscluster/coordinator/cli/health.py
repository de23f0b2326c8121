"""`pscluster health`: check whether a role is serving. Imports little, since containers run it every few seconds."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pscluster.core.errors import RETRYABLE, from_rpc
from pscluster.core.security.tls import Tls
from pscluster.core.transport.channels import explain, open_channel

ASK_SECONDS = 3.0


def is_healthy(
    address: str, token: str | None, timeout: float = ASK_SECONDS, tls: Tls | None = None
) -> tuple[bool, str]:
    """Make the standard gRPC health check; return whether the role is SERVING, and a sentence for people."""
    with open_channel(address, tls, token) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            if error.code() in RETRYABLE:
                return False, f"{address} does not answer: {explain(address, tls)}"
            return False, str(from_rpc(error, address))
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return reply.status == health_pb2.HealthCheckResponse.SERVING, f"{address} is {name}"
