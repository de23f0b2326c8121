"""Bounds the memory that a server's calls hold together for messages that are still arriving.

gRPC buffers a message until it is complete, and reports nothing meanwhile: a call that waits for a message may hold as
much as the largest message. So over gRPC each waiting call counts as one message of that size. On the data plane a
message's size comes first: a call counts for that size, and for nothing between messages.

    (not counted) --waits for a message--> WAITING --received, or the call has ended--> (not counted)
                                           WAITING --others need the room-------------> CUT OFF

A new call never waits for room: the calls that have waited longest are cut off instead, soon including any that stalled
amid a message. A client that was merely idle calls again when it needs to; what was in flight is repeated, and updates
are applied once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from pscluster.core.transport.base import Cancellable
from pscluster.core.transport.methods import Handler, Lookup, guarded


class Waiting:
    """A call that waits for a message of `size` bytes."""

    __slots__ = ("call", "size")

    def __init__(self, call: Cancellable, size: int) -> None:
        self.call, self.size = call, size


class Admission:
    """Room for arriving messages. Thread-safe."""

    def __init__(self, room: Callable[[], int], message_bytes: int) -> None:
        self.message_bytes = message_bytes  # of the largest message over gRPC
        self.used = self.cut_off = 0  # bytes counted now, and calls cut off so far
        self._room = room  # returns the bytes available now
        self._lock = threading.Lock()
        self._waiting: dict[Waiting, None] = {}  # longest wait first

    def enter(self, call: Cancellable, size: int) -> Waiting:
        """Count a call that waits for a message of `size` bytes, and cut off others for it if necessary."""
        waiting = Waiting(call, size)
        with self._lock:
            self._waiting[waiting] = None
            self.used += size
        self.shrink(waiting)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """Stop counting a call whose message was received, or will not be."""
        with self._lock:
            if waiting in self._waiting:
                del self._waiting[waiting]
                self.used -= waiting.size

    def shrink(self, newest: Waiting | None = None) -> None:
        """Cut off calls, longest wait first, until the rest fit; never the newest."""
        ended: list[Waiting] = []
        with self._lock:
            room = self._room()
            while self.used > room and self._waiting:
                first = next(iter(self._waiting))
                if first is newest:
                    break
                del self._waiting[first]
                self.used -= first.size
                ended.append(first)
            self.cut_off += len(ended)
        for waiting in ended:
            waiting.call.cancel()

    def admitted(self, requests: Iterator[Any], call: Cancellable) -> Iterator[Any]:
        """Yield the messages of a gRPC call, counting the call while it waits for each."""
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
    """Counts the calls of a gRPC server, each before its request is read."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def intercept_service(self, continuation: Lookup, details: grpc.HandlerCallDetails) -> Handler | None:
        handler = continuation(details)
        return None if handler is None else guarded(handler, details.method, self._admission.admitted)
