"""Health checks for whoever asks (--open-health): for probes that can't show a token, such as an orchestrator's.

The check of gRPC's health service is opened, and nothing else: not its `Watch`, whose calls last. A stranger's check
gets one of a few places, and `_SECONDS` to bring its request: who opens thousands keeps others of his kind out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from pscluster.core.access import of_the_first
from pscluster.core.patience import Patience

PATH = "/grpc.health.v1.Health/Check"

OPEN_HEALTH_VARIABLE = "PSCLUSTER_OPEN_HEALTH"

_PLACES = 32
_SECONDS = 3.0


class OpenHealth:
    """Makes the check's handler one for strangers."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(_PLACES)
        self._patience = Patience(_SECONDS)

    def handler(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Of the health service's own, or of what already looks at certificates before it (`RoleInterceptor`)."""
        check = handler.stream_unary or of_the_first(handler.unary_unary, PATH, self._patience)

        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            if not self._places.acquire(blocking=False):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {_PLACES} health checks without a token")
            try:
                with self._patience.with_call(context):
                    return check(requests, context)
            finally:
                self._places.release()

        made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )
        return made
