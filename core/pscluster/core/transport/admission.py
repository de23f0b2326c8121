"""Bounds the memory that a server's calls hold together for messages that are still arriving.

gRPC buffers a message until it is complete, and reports nothing meanwhile: a call that waits for a message may hold as
much as the largest message. So over gRPC each waiting call counts as one message of that size. On the data plane a
message's size comes first: a call counts for that size, and for nothing between messages.

    (not counted) --waits for a message--> WAITING --received, or the call has ended--> (not counted)
                                           WAITING --others need the room-------------> CUT OFF
                                           CUT OFF --the call has ended---------------> (not counted)

The calls that have waited longest are cut off to make room for a new one, soon including any that stalled amid a
message. A new call waits only until those have ended, as they hold their memory until then, and at most END_SECONDS. A
client that was merely idle calls again when it needs to; what was in flight is repeated, and updates are applied once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from pscluster.core.transport.base import Cancellable
from pscluster.core.transport.methods import Handler, Lookup, guarded

END_SECONDS = 0.1
"""How long a new call may wait for calls that were cut off to end: a handler that is busy does not notice at once."""


class Waiting:
    """A call that waits for a message of `size` bytes."""

    __slots__ = ("call", "is_cut_off", "size")

    def __init__(self, call: Cancellable, size: int) -> None:
        self.call, self.size, self.is_cut_off = call, size, False


class Admission:
    """Room for arriving messages. Thread-safe."""

    def __init__(self, room: Callable[[], int]) -> None:
        self.used = self.cut_off = 0  # bytes counted now, and calls cut off so far
        self._room = room  # returns the bytes available now
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[Waiting, None] = {}  # longest wait first
        self._ending = 0  # bytes counted for calls that were cut off and have not ended yet

    def enter(self, call: Cancellable, size: int) -> Waiting:
        """Count a call that waits for a message of `size` bytes; make room if necessary, by cutting off others."""
        waiting = Waiting(call, size)
        with self._lock:
            self._waiting[waiting] = None
            self.used += size
            if self._fits():  # as nearly always
                return waiting
        self.shrink(waiting)
        if self._ending:
            with self._lock:
                self._changed.wait_for(lambda: waiting.is_cut_off or not self._ending or self._fits(), END_SECONDS)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """Stop counting a call whose message was received, or will not be."""
        with self._lock:
            self.used -= waiting.size
            if self._ending:  # others may wait for that to end, or for room
                self._changed.notify_all()
            if waiting.is_cut_off:
                self._ending -= waiting.size
            else:
                del self._waiting[waiting]

    def _fits(self) -> bool:
        return self.used <= self._room()

    def shrink(self, newest: Waiting | None = None) -> None:
        """Cut off calls, longest wait first, until the rest fit; never the newest."""
        ended: list[Waiting] = []
        with self._lock:
            room = self._room()
            while self.used - self._ending > room and self._waiting:
                first = next(iter(self._waiting))
                if first is newest:
                    break
                del self._waiting[first]
                first.is_cut_off = True
                self._ending += first.size
                ended.append(first)
            if ended:
                self.cut_off += len(ended)
                self._changed.notify_all()  # one of them may itself be waiting
        for waiting in ended:
            waiting.call.cancel()

    def admitted(self, message_bytes: int, requests: Iterator[Any], call: Cancellable) -> Iterator[Any]:
        """Yield the messages of a gRPC call, counting the call while it waits for each."""
        while True:
            waiting = self.enter(call, message_bytes)
            try:
                request = next(requests, _END)
            finally:
                self.leave(waiting)
            if request is _END:
                return
            yield request


_END = object()


class AdmissionInterceptor(grpc.ServerInterceptor):
    """Counts the calls of a gRPC server, each before its request is read; `message_bytes` is its largest message."""

    def __init__(self, admission: Admission, message_bytes: int) -> None:
        self._admitted = functools.partial(admission.admitted, message_bytes)

    def intercept_service(self, continuation: Lookup, details: grpc.HandlerCallDetails) -> Handler | None:
        handler = continuation(details)
        return None if handler is None else guarded(handler, details.method, self._admitted)
