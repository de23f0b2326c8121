"""Connections to the parameter servers: channels, the data plane, and sessions, the streams of small requests.

Reads and updates go over a server's data plane if it is reachable, otherwise over gRPC. The server announces its port
at every handshake, since it changes when the server restarts.

A server that returns elsewhere is moved there (`Server.move`): what is under way at its old place ends with
UnavailableError, and is tried again at the new one, under the same key. Nothing that was sent to the old place is lost
or counted by that: it is as if the server had restarted where it was.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import grpc

from pscluster.core.errors import ProtocolError, PsClusterError, PSUnavailableError, ShardMovedError, UnavailableError
from pscluster.core.ids import fresh_id
from pscluster.core.metrics.trace import SESSION_HEADER
from pscluster.core.security.channel import OPEN_SECONDS, reporting_calls
from pscluster.core.transport.base import Destination, Metadata, Stream, StreamEndedError
from pscluster.core.transport.channels import HELLO_SECONDS, NODE_SERVICE, PeerAddress, open_peer_channel, say_hello
from pscluster.core.transport.frames import Buffer, parts_of, unpack
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.transport import Transport
from pscluster.core.transport.watchdog import Liveness, WatchedCall, watch
from pscluster.ps.spec import BESIDE_PAYLOAD_BYTES, SERVICE
from pscluster.v1 import node_pb2, ps_pb2

_SESSION, _PULL, _PUSH = (f"/{SERVICE.full_name}/{name}" for name in ("Session", "Pull", "Push"))


Way = Literal["control", "bulk", "node"]
"""Which of a server's stubs a call goes over: the service beside small or large requests, or the node's."""

_LEAVE_SECONDS = 30.0  # channels to a place that a server has left are closed after this long


def new_session() -> str:
    return f"{fresh_id():x}"


class Session:
    """One stream of request and reply in turn, used by one thread at a time."""

    def __init__(self, stream: Stream, liveness: Liveness, name: str = "") -> None:
        self.stream = stream
        self.liveness = liveness
        self.name = name
        self.nth = 0  # requests sent
        self.begin = 0.0  # when the last one was sent
        self.rested = 0.0  # seconds since then in which no thread has waited for the reply
        self._resting_since = 0.0  # while none does
        self._exchange = watch(WatchedCall(stream.cancel, liveness.max_silence, liveness))

    def send(self, parts: Sequence[Buffer], timeout: float) -> None:
        self.nth += 1
        self.begin, self.rested = time.monotonic(), 0.0
        self._exchange.begin(timeout)
        most = self.stream.frame_bytes
        if sum(map(len, parts)) <= most + BESIDE_PAYLOAD_BYTES:
            self.stream.send(*parts)
            return
        for frame in _frames(parts, most):
            self.stream.send(*frame)

    def rest(self) -> None:
        """Begin a time in which no thread waits for the reply: how long that is says nothing about the server."""
        self._exchange.end()
        self._resting_since = time.monotonic()

    def resume(self, timeout: float) -> None:
        """Wait for the reply from now on, for at most `timeout` seconds."""
        now = time.monotonic()
        self.rested += now - self._resting_since
        self._exchange.begin(timeout)

    def receive(self) -> bytes:
        try:
            return self.stream.receive()
        except grpc.RpcError as error:
            self._exchange.raise_if_cancelled()
            if error.code() is grpc.StatusCode.OK:
                raise UnavailableError("the session was ended by the server") from None
            raise
        finally:
            self._exchange.end()

    def close(self) -> None:
        """End the stream. Call this on the thread that uses it, or while it is idle."""
        self.stream.close()


def _frames(parts: Sequence[Buffer], most: int) -> Iterator[Sequence[Buffer]]:
    """Yield a session's request as messages of its stream: for one that is too large for a single message."""
    head, payload = unpack(b"".join(parts), ps_pb2.Request)
    head.last = False
    yield parts_of(head)
    for at in range(0, len(payload), most):
        end = at + most
        yield parts_of(ps_pb2.Request(last=end >= len(payload)), [payload[at:end]])


def _replies(stream: Stream, destination: Destination | None = None) -> Iterator[bytes]:
    """Yield the server's replies until the call ends, without the bytes that were received in place."""
    try:
        while True:
            yield stream.receive(destination)
    except StreamEndedError as error:
        if error.code() is not grpc.StatusCode.OK:
            raise


def _close(channels: Sequence[grpc.Channel]) -> None:
    for channel in channels:
        channel.close()


def _result(call: Any, tell: Callable[[Any], None]) -> Any:
    tell(call)
    try:
        return call.result()
    except BaseException:
        call.cancel()  # Ctrl-C: otherwise the sending thread would wait forever, and the server for the rest
        raise


class Server:
    """One parameter server: its channels and idle sessions."""

    def __init__(self, peer: PeerAddress, identity: node_pb2.Identity, retry_seconds: float) -> None:
        self.peer = peer
        self.liveness = Liveness(self._answers, retry_seconds)  # of its place
        self.store_id = 0  # of what it holds for the job; see AttachEvent
        self.lost: PSUnavailableError | ShardMovedError | None = None  # see `give_up` and `leave`
        self._identity = identity
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        self._transport = Transport(peer, self.hello)
        self._closed = False
        self._retired: Sequence[grpc.Channel] = ()  # of the previous certificate, or to a place that it has left
        self._leaving: list[threading.Timer] = []  # each closes channels to such a place
        self._open()

    def give_up(self, error: PSUnavailableError) -> None:
        """Raise this error from all calls from now on, and end those that are waiting."""
        self.lost = self.lost or error
        self.liveness.given_up = True

    def leave(self) -> None:
        """Have what is under way, or begins by an older plan, look for its shards elsewhere: the server was removed."""
        self.lost = ShardMovedError(f"{self.peer.task} was removed from the job")
        self.lost.server = 0  # which knows where its shards are
        self.liveness.given_up = True
        closing = threading.Timer(_LEAVE_SECONDS, self.close)  # not under a call that begins just now
        closing.daemon = True
        closing.start()

    def move(self, peer: PeerAddress) -> None:
        """Dial the server there from now on. What is under way at its old place ends with UnavailableError."""
        with self._lock:
            if self._closed or (peer.address, peer.tls_name) == (self.peer.address, self.peer.tls_name):
                return
            self.peer, left = peer, self.liveness
            self.liveness = Liveness(self._answers, left.max_silence)
            self.liveness.given_up = left.given_up  # a lost server stays lost
            idle, self._idle = self._idle, []
            transport, self._transport = self._transport, Transport(peer, self.hello)
            there = self._control, self._bulk
            self._retired = (*self._retired, *there)
            self._open()
            closing = threading.Timer(_LEAVE_SECONDS, self._leave, (there,))  # not under a call that begins just now
            closing.daemon = True
            self._leaving = [*(timer for timer in self._leaving if timer.is_alive()), closing]
            closing.start()
        left.given_up = True  # cancels the calls that wait there
        for session in idle:
            session.close()
        transport.close()

    def _leave(self, channels: Sequence[grpc.Channel]) -> None:
        """Close the channels to a place that the server has left."""
        with self._lock:
            self._retired = tuple(channel for channel in self._retired if channel not in channels)
        _close(channels)

    def check(self) -> None:
        """Raise the error that says that the server is lost, if it has been given up."""
        if self.lost is not None:
            raise self.lost.with_traceback(None)

    def _open(self) -> None:
        self._version = 0 if self.peer.tls is None else self.peer.tls.refresh()
        self._control = open_peer_channel(self.peer)
        self._bulk = open_peer_channel(self.peer)
        self.control = Stub(self._control, SERVICE)
        self.node = Stub(self._control, NODE_SERVICE)
        self.bulk = Stub(self._bulk, SERVICE)

    def take_session(self) -> Session:
        """Return an idle session, or a new one. Failures of the server show when it is used."""
        while True:
            with self._lock:
                if not self._idle:
                    break
                session = self._idle.pop()
            if not self._transport.is_outdated(session.stream):
                return session
            session.close()
        name = new_session()
        with self._lock:
            transport, channel, liveness = self._transport, self._control, self.liveness
        with self._watched(OPEN_SECONDS):
            stream = transport.open(channel, _SESSION, ((SESSION_HEADER, name),))
        return Session(stream, liveness, name)

    @contextlib.contextmanager
    def _transfer(self, path: str, metadata: Metadata, timeout: float) -> Iterator[tuple[Stream, Callable[[], None]]]:
        """Open a call for a large transfer and watch it for the block, which calls the function given at progress."""
        with self._watched(timeout) as (exchange, tell):
            with self._lock:
                transport, channel = self._transport, self._bulk
            stream = transport.open(channel, path, metadata)
            tell(stream)
            try:
                yield stream, exchange.progress
            finally:
                stream.release()

    def pull(self, question: bytes, metadata: Metadata, timeout: float, destination: Destination) -> None:
        """Make a large read into `destination`. Raise grpc.RpcError or PsClusterError on failure."""
        with self._transfer(_PULL, metadata, timeout) as (stream, progress):
            stream.send(question, last=True)
            for _ in _replies(stream, destination):
                progress()

    def push(self, frames: Callable[[int], Iterator[Sequence[Buffer]]], metadata: Metadata, timeout: float) -> bytes:
        """Make a large update and return the reply; `frames` takes the most bytes of a payload. Raise as `pull`."""
        with self._transfer(_PUSH, metadata, timeout) as (stream, progress):
            for parts in frames(stream.frame_bytes):
                stream.send(*parts)
                progress()
            stream.end()
            replies = list(_replies(stream))
        if len(replies) != 1:
            raise ProtocolError(f"{len(replies)} replies to one update")
        return replies[0]

    def ask(self, way: Way, method: str, request: Any, timeout: float) -> Any:
        """Call a method with one request. Raise grpc.RpcError or PsClusterError if it fails."""
        with self._watched(timeout) as (_, tell):
            return _result(getattr(getattr(self, way), method).future(request, timeout=timeout), tell)

    @contextlib.contextmanager
    def _watched(self, timeout: float) -> Iterator[tuple[WatchedCall, Callable[[Any], None]]]:
        """Watch a gRPC call, also while it is opened; yield the exchange, and a function to be given the call."""
        calls: list[Any] = []

        def cancel() -> None:
            for call in calls[-1:]:
                call.cancel()

        exchange = watch(WatchedCall(cancel, self.liveness.max_silence, self.liveness))
        exchange.begin(timeout)
        try:
            with reporting_calls(calls.append):
                yield exchange, calls.append
        except (grpc.RpcError, grpc.FutureCancelledError):
            exchange.raise_if_cancelled()
            raise
        finally:
            exchange.end()

    def _answers(self, timeout: float) -> bool:
        """Return whether the server answers on a new connection."""
        channel = open_peer_channel(self.peer)
        try:
            say_hello(channel, self.peer, self._identity, timeout)
        except UnavailableError:
            return False
        except PsClusterError:
            return True  # the call itself reports what is wrong
        finally:
            channel.close()
        return True

    def give_back(self, session: Session) -> None:
        with self._lock:
            if not self._closed and session.liveness is self.liveness:
                self._idle.append(session)
                return
        session.close()

    def hello(self, timeout: float = HELLO_SECONDS) -> node_pb2.HelloReply:
        """Shake hands. UnavailableError if the server does not answer."""
        version = 0 if self.peer.tls is None else self.peer.tls.refresh()  # reads files: not under the lock
        outdated: Sequence[grpc.Channel] = ()
        with self._lock:
            if version > self._version:
                # Calls on the old channels end normally: these are closed at the next renewal.
                outdated, self._retired = self._retired, (self._control, self._bulk)
                self._open()
        _close(outdated)
        with self._lock:
            channel, peer, transport = self._control, self.peer, self._transport
        reply = say_hello(channel, peer, self._identity, timeout)
        transport.learn(peer, reply)
        return reply

    def check_store_id(self, timeout: float = HELLO_SECONDS) -> None:
        """Raise PSUnavailableError if the server has lost its store, UnavailableError if it does not answer."""
        theirs = self.hello(timeout)
        if self.store_id and theirs.store_id != self.store_id:
            raise PSUnavailableError(
                f"{self.peer} was restarted and has lost its variables, or serves another job: start a new "
                "coordinator, and create them again or restore a checkpoint"
            )

    def drop_sessions(self) -> None:
        """Close all idle sessions, and forget the data plane's address."""
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()
        self._transport.drop()

    def close(self) -> None:
        """Close all connections, and end the calls that wait for an answer: the server may be frozen."""
        with self._lock:
            self._closed = True
            self.liveness.given_up = True
            leaving = self._leaving
        for timer in leaving:
            timer.cancel()
        self.drop_sessions()
        self._transport.close()
        _close((*self._retired, self._control, self._bulk))
