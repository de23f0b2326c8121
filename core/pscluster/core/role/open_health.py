"""Health checks for all callers (--open-health): for probes that can't prove a token, such as an orchestrator's.

Only `Check` of gRPC's health service is open, not its `Watch`, whose calls last. An unauthenticated check gets one of a
few slots, of which a connection holds at most `_PER_CONNECTION`, and `_SECONDS` to send its request. If all slots are
taken, the oldest check of the connection that holds most gives way: a probe sends its request at once, so calls that
send nothing keep no probe out, on however many connections.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pscluster.core.transport.methods import Handler, guarded
from pscluster.core.transport.watchdog import StallWatchdog

PATH = "/grpc.health.v1.Health/Check"

OPEN_HEALTH_VARIABLE = "PSCLUSTER_OPEN_HEALTH"

_SLOTS = 32
_PER_CONNECTION = 4
_SECONDS = 3.0


class OpenHealth:
    """Opens the health check's handler to callers without a token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[grpc.ServicerContext, str] = {}  # each call's connection; longest wait first
        self._watchdog = StallWatchdog(_SECONDS)

    def handler(self, handler: Any) -> Handler:
        """Return an open handler of the health check, or of one that checks certificates (`RoleInterceptor`)."""
        check: Any = guarded(handler, PATH, lambda requests, _context: requests, self._watchdog).stream_unary

        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._slot(context), self._watchdog.with_call(context):
                return check(requests, context)

        make = grpc.stream_unary_rpc_method_handler
        made: Handler = make(call, handler.request_deserializer, handler.response_serializer)
        return made

    @contextmanager
    def _slot(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Hold a slot while the call runs; refuse it (RESOURCE_EXHAUSTED) if its connection holds enough."""
        connection, ousted = context.peer(), None
        with self._lock:
            held = Counter(self._waiting.values())
            if has_slot := held[connection] < _PER_CONNECTION:
                if len(self._waiting) >= _SLOTS:
                    most = max(held.values())
                    ousted = next(call for call, of in self._waiting.items() if held[of] == most)
                    del self._waiting[ousted]
                self._waiting[context] = connection
        if not has_slot:
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
