"""Bounds what a server holds of messages that are still coming, over all of its calls together.

gRPC keeps what has come of a message until all of it is there, and says nothing of it meanwhile: a call that waits for
a message may hold as much as a message may have. So over gRPC each call that waits counts as one whole message; on the
data plane, where a message's size comes first, a call counts for that many bytes, and for none between messages.

    (not counted) --a message is waited for--> WAITING --it has come, or the call has ended--> (not counted)
                                               WAITING --the others need the room------------> CUT OFF

Whoever comes is never kept waiting: where there is no room, the calls that have waited longest are cut off. A call with
half a message that does not go on is soon among them. A client that was merely idle calls again when it needs to; what
was in flight is repeated, and updates are applied once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from pscluster.core.security.access import REQUEST_SECONDS, of_the_first
from pscluster.core.transport.watchdog import StallWatchdog


class Call(Protocol):
    """What is needed of a call's context."""

    def cancel(self) -> bool:
        """End it; who waits for its messages is told by an exception."""
        ...


class Waiting:
    """A call that waits for a message of so many bytes."""

    __slots__ = ("call", "size")

    def __init__(self, call: Call, size: int) -> None:
        self.call, self.size = call, size


class Admission:
    """Room for messages that are coming. Thread-safe.

    Args:
        room: how many bytes there are for them now.
        message_bytes: what a message over gRPC may have.

    Attributes:
        used: bytes that are counted now.
        cut_off: how many calls were.
    """

    def __init__(self, room: Callable[[], int], message_bytes: int) -> None:
        self.message_bytes = message_bytes
        self.used = self.cut_off = 0
        self._room = room
        self._lock = threading.Lock()
        self._waiting: dict[Waiting, None] = {}  # the longest first

    def enter(self, call: Call, size: int) -> Waiting:
        """A message of so many bytes is waited for. Others may be cut off for it."""
        mine = Waiting(call, size)
        with self._lock:
            self._waiting[mine] = None
            self.used += size
        self.shrink(mine)
        return mine

    def leave(self, mine: Waiting) -> None:
        """It has come, or will not."""
        with self._lock:
            if mine in self._waiting:
                del self._waiting[mine]
                self.used -= mine.size

    def shrink(self, newest: Waiting | None = None) -> None:
        """Cut calls off, those that have waited longest first, until the rest fit; but not the newest."""
        late: list[Waiting] = []
        with self._lock:
            room = self._room()
            while self.used > room and self._waiting:
                first = next(iter(self._waiting))
                if first is newest:
                    break
                del self._waiting[first]
                self.used -= first.size
                late.append(first)
            self.cut_off += len(late)
        for each in late:
            each.call.cancel()

    def admitted(self, requests: Iterator[Any], call: Call) -> Iterator[Any]:
        """The same messages, over gRPC, counted while each is waited for."""
        while True:
            waiting = self.enter(call, self.message_bytes)
            try:
                request = next(requests, _END)
            finally:
                self.leave(waiting)
            if request is _END:
                return
            yield request


_END = object()


class AdmissionInterceptor(grpc.ServerInterceptor):
    """Counts the calls of a gRPC server.

    Of a method that takes one request, too, nothing is read before it is counted: so it becomes one for a stream.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._watchdog = StallWatchdog(REQUEST_SECONDS)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler, whose requests are counted."""
        handler: Any = continuation(details)
        if handler is None:
            return None
        shape = {False: "unary", True: "stream"}
        behaviour = getattr(handler, f"{shape[handler.request_streaming]}_{shape[handler.response_streaming]}")
        make = getattr(grpc, f"stream_{shape[handler.response_streaming]}_rpc_method_handler")
        counted: grpc.RpcMethodHandler[Any, Any] = make(
            self._counted(
                behaviour if handler.request_streaming else of_the_first(behaviour, details.method, self._watchdog)
            ),
            handler.request_deserializer,
            handler.response_serializer,
        )
        return counted

    def _counted(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(behaviour)  # also keeps what grpc's health check notes on its method
        def call(requests: Iterator[Any], context: grpc.ServicerContext, *rest: Any) -> Any:
            return behaviour(self._admission.admitted(requests, context), context, *rest)

        return call
