"""Health checks for whoever asks (--open-health): for probes that can't show a token, such as an orchestrator's.

The check of gRPC's health service is opened, and nothing else: not its `Watch`, whose calls last. An unauthenticated
check gets one of a few places, and `_SECONDS` to bring its request. A connection holds at most `_PER_CONNECTION` of
them, so that a peer that opens calls and sends nothing does not keep probes on other connections out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pscluster.core.security.access import of_the_first
from pscluster.core.transport.watchdog import Patience

PATH = "/grpc.health.v1.Health/Check"

OPEN_HEALTH_VARIABLE = "PSCLUSTER_OPEN_HEALTH"

_PLACES = 32
_PER_CONNECTION = 4
_SECONDS = 3.0


class OpenHealth:
    """Makes the check's handler one that asks for no token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()  # calls by connection
        self._patience = Patience(_SECONDS)

    def handler(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Of the health service's own, or of what already looks at certificates before it (`RoleInterceptor`)."""
        check = handler.stream_unary or of_the_first(handler.unary_unary, PATH, self._patience)

        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._place(context), self._patience.with_call(context):
                return check(requests, context)

        made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )
        return made

    @contextmanager
    def _place(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Hold a place while the call runs; refuse the call (RESOURCE_EXHAUSTED) where there is none."""
        connection = context.peer()
        with self._lock:
            refusal = self._refusal(connection)
            if refusal is None:
                self._running[connection] += 1
        if refusal is not None:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        try:
            yield
        finally:
            with self._lock:
                self._running[connection] -= 1
                if not self._running[connection]:
                    del self._running[connection]

    def _refusal(self, connection: str) -> str | None:
        if self._running[connection] >= _PER_CONNECTION:
            return f"more than {_PER_CONNECTION} health checks without a token at once on one connection"
        if self._running.total() >= _PLACES:
            return f"more than {_PLACES} health checks without a token at once"
        return None
