"""A link: the exchange that a member of a gang has opened with another one, and its thread.

    opening --opened--> open --their function has ended, and this one--> END is sent --> over; the connection is kept
            --refused, or unreachable--> broken      open --the connection breaks, or is cancelled--> broken

What a member sends goes out on its function's thread. That also opens the exchange, if an earlier gang has left a
connection to the other worker; otherwise the link's thread does, since dialling may take long. The link's thread
receives the one reply: how the other function has ended.

Between the two ends the receiver drops what comes. Nothing waits for the links of a function that has ended: a slow
receiver may still read what it was sent.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import grpc

from pscluster.core.errors import MemberTimeoutError, MemberUnavailableError, PsClusterError, UnavailableError, from_rpc
from pscluster.core.transport.base import BeforeWaiting, Stream
from pscluster.core.transport.frames import Buffer, parts_of
from pscluster.core.transport.watchdog import Liveness, WatchedCall, watch
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.gang import Member

SILENT = "its worker does not answer: it is frozen, or cut off"


class Link:
    """The exchange that this member has opened with another one."""

    def __init__(self, member: Member, opening: worker_pb2.Opening, pool: ConnectionPool, seconds: float) -> None:
        """Take the pool to the members, and how long a worker may be silent before it is asked."""
        self.member = member
        self.sent = 0  # messages of collectives
        self.begun = 0  # number of the last collective whose signature was sent
        self.ready = threading.Event()  # it is open, or broken
        self.on_ended: Callable[[worker_pb2.ExchangeReply], None] = lambda _reply: None
        self.on_broken: Callable[[PsClusterError], None] = lambda _error: None
        self._opening, self._pool, self._seconds = opening, pool, seconds
        self._liveness = Liveness(functools.partial(pool.answers, member), seconds)
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._watched: WatchedCall | None = None
        self._calls: list[Any] = []  # made to open it
        self._has_ended = self._is_over = self._is_cancelled = False  # theirs, ours, this link

    def start(self) -> None:
        """Open it: now if that takes no time, otherwise soon."""
        if (stream := self._pool.open_idle(self.member)) is not None:
            self._begin(stream)
        self._pool.threads.run(self._run)

    def _run(self) -> None:
        try:
            error = self._exchange()
        except PsClusterError as refused:
            error = refused
        except Exception as failure:  # a reply that is none, or a call that was cancelled before it began
            error = UnavailableError(f"{type(failure).__name__}: {failure}")
        if error is not None:
            if self._stream is not None:
                self._stream.close()
            if isinstance(error, UnavailableError):
                error = MemberUnavailableError(f"{self.member} is gone: {error}")
            self.on_broken(error)
        self.ready.set()

    def _exchange(self) -> PsClusterError | None:
        """Open the stream, and receive what the other member says. Return why it broke; None at its proper end."""
        try:
            stream = self._stream or self._pool.open(self.member, self._report)
            if stream is not self._stream:
                self._begin(stream)
            while True:
                reply = worker_pb2.ExchangeReply.FromString(stream.receive())
                self.on_ended(reply)
                self._half(theirs=True)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.OK or not self._has_ended:
                failure = from_rpc(error, f"worker {self.member.worker}")
                error.__traceback__ = None  # gRPC's frames, which hold the error
                return failure
        with self._lock:
            self._stream = None  # a late `cancel` must not break its connection, which another gang may have now
        stream.release()
        return None

    def _begin(self, stream: Stream) -> None:
        with self._lock:
            self._stream, cancelled = stream, self._is_cancelled
            self._watched = watch(WatchedCall(stream.cancel, self._seconds, self._liveness))
        if cancelled:
            stream.cancel()
        stream.send(*parts_of(worker_pb2.ExchangeRequest(opening=self._opening)))
        self.ready.set()

    def _report(self, call: Any) -> None:
        self._calls.append(call)
        if self._is_cancelled:
            call.cancel()

    def _half(self, *, theirs: bool) -> None:
        """Note that one of the two functions has ended; end the stream when both have."""
        with self._lock:
            if theirs:
                self._has_ended = True
            else:
                self._is_over = True
            stream = self._stream if self._has_ended and self._is_over else None
        if stream is not None:
            stream.end()

    def send(self, *buffers: Buffer, before_waiting: BeforeWaiting | None = None) -> None:
        """Send a message, once it is ready. What fails is reported by `on_broken`. MemberTimeoutError if it hangs."""
        stream, watched = self._stream, self._watched
        if stream is None or watched is None:
            return  # broken
        watched.begin()
        try:
            stream.send(*buffers, before_waiting=before_waiting)
        finally:
            watched.end()
        try:
            watched.raise_if_cancelled()
        except UnavailableError:
            raise MemberTimeoutError(f"{self.member} has taken nothing for {self._seconds:g} s, and {SILENT}") from None

    def end(self) -> None:
        """End it, as soon as the other function has ended, too."""
        self._half(theirs=False)

    def cancel(self) -> None:
        """Break it, from any thread."""
        with self._lock:
            self._is_cancelled = True
            if self._stream is not None:
                self._stream.cancel()
                return
        for call in tuple(self._calls[-1:]):
            call.cancel()
