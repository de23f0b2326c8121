"""Health checks for whoever asks (--open-health): for probes that can't show a token, such as an orchestrator's.

The check of gRPC's health service is opened, and nothing else: not its `Watch`, whose calls last. An unauthenticated
check gets one of a few places, and `_SECONDS` to bring its request. A connection holds at most `_PER_CONNECTION` of
them. Where all are taken, the check that has waited longest on the connection that holds most makes room: a probe sends
its request at once, and whoever opens calls and sends nothing keeps nobody out, on however many connections.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pscluster.core.security.access import of_the_first
from pscluster.core.transport.watchdog import StallWatchdog

PATH = "/grpc.health.v1.Health/Check"

OPEN_HEALTH_VARIABLE = "PSCLUSTER_OPEN_HEALTH"

_PLACES = 32
_PER_CONNECTION = 4
_SECONDS = 3.0


class OpenHealth:
    """Makes the check's handler one that asks for no token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[grpc.ServicerContext, str] = {}  # each call's connection; the longest first
        self._watchdog = StallWatchdog(_SECONDS)

    def handler(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Of the health service's own, or of what already looks at certificates before it (`RoleInterceptor`)."""
        check = handler.stream_unary or of_the_first(handler.unary_unary, PATH, self._watchdog)

        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._place(context), self._watchdog.with_call(context):
                return check(requests, context)

        made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )
        return made

    @contextmanager
    def _place(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Hold a place while the call runs; refuse it (RESOURCE_EXHAUSTED) where its connection holds enough."""
        connection, ousted = context.peer(), None
        with self._lock:
            held = Counter(self._waiting.values())
            if has_place := held[connection] < _PER_CONNECTION:
                if len(self._waiting) >= _PLACES:
                    most = max(held.values())
                    ousted = next(call for call, of in self._waiting.items() if held[of] == most)
                    del self._waiting[ousted]
                self._waiting[context] = connection
        if not has_place:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"more than {_PER_CONNECTION} health checks without a token at once on one connection",
            )
        if ousted is not None:
            ousted.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(context, None)
