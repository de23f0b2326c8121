"""Connections to the parameter servers: channels, the data plane, and sessions, the streams of small requests.

Reads and updates go over a server's data plane, if it has one that can be reached, else over gRPC. Where it is, the
server says at every handshake: another process of it has another port.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from pscluster.core.errors import ProtocolError, PsClusterError, PSUnavailableError, UnavailableError
from pscluster.core.ids import fresh_id
from pscluster.core.metrics.trace import SESSION_HEADER
from pscluster.core.security.channel import OPEN_SECONDS, telling
from pscluster.core.transport.channels import (
    HELLO_SECONDS,
    NODE_SERVICE,
    PeerAddress,
    open_peer_channel,
    open_stream,
    say_hello,
)
from pscluster.core.transport.frames import CHUNK_BYTES, DATA_FRAME_BYTES, Buffer, pack, unpack
from pscluster.core.transport.grpc_streams import Metadata, Stream, StreamEndedError
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.tcp.client import DataPort, DataStream
from pscluster.core.transport.tcp.packets import Place
from pscluster.ps.client.watchdog import Exchange, Liveness, watchdog
from pscluster.ps.spec import SERVICE
from pscluster.v1 import node_pb2, ps_pb2

_SESSION, _PULL, _PUSH = (f"/{SERVICE.full_name}/{name}" for name in ("Session", "Pull", "Push"))


def new_session() -> str:
    """A name that no other session has."""
    return f"{fresh_id():x}"


class Session:
    """One stream of request and reply in turn, used by one thread at a time."""

    def __init__(self, stream: Stream, liveness: Liveness, name: str = "", *, direct: bool = False) -> None:
        self._stream = stream
        self.name = name
        self.direct = direct  # on the data plane
        self.nth = 0  # of the request that was sent last
        self.begin = 0.0  # when it was
        self._exchange = Exchange(liveness, stream.cancel)
        watchdog.watch(self._exchange)

    def send(self, parts: Sequence[Buffer], timeout: float) -> None:
        self.nth += 1
        self.begin = time.monotonic()
        self._exchange.begin(timeout)
        if isinstance(self._stream, DataStream):
            self._stream.send_parts(parts)
            return
        for frame in _frames(b"".join(parts)):
            self._stream.send(frame)

    def receive(self) -> bytes:
        try:
            return self._stream.receive()
        except grpc.RpcError as error:
            self._exchange.check()
            if error.code() is grpc.StatusCode.OK:
                raise UnavailableError("the session was ended by the server") from None
            raise
        finally:
            self._exchange.end()

    def close(self) -> None:
        """By the thread that uses it, or while none does."""
        self._stream.close()


def _frames(request: bytes) -> Iterator[bytes]:
    """The messages that a session's request is over gRPC: one, if it is not too large for that."""
    if len(request) <= CHUNK_BYTES:
        yield request
        return
    head, payload = unpack(request, ps_pb2.Request)
    head.last = False
    yield pack(head)
    for at in range(0, len(payload), CHUNK_BYTES):
        end = at + CHUNK_BYTES
        yield pack(ps_pb2.Request(last=end >= len(payload)), [payload[at:end]])


class _Transfer:
    """One large read or update on the data plane, by one thread."""

    def __init__(self, stream: DataStream, exchange: Exchange) -> None:
        self._stream, self._exchange = stream, exchange

    def send(self, parts: Sequence[Buffer], *, last: bool = False) -> None:
        """Send a message; the last one ends what is sent."""
        self._stream.send_parts(parts, last=last)
        self._exchange.progress()

    def end(self) -> None:
        """Nothing more is sent."""
        self._stream.end()

    def replies(self, place: Place | None = None) -> Iterator[bytes]:
        """What the server answers, to the end of the call; nothing of what is put in its place."""
        while True:
            try:
                data = self._stream.receive(place)
            except StreamEndedError as error:
                if error.code() is grpc.StatusCode.OK:
                    return
                raise
            self._exchange.progress()
            yield data


def _result(call: Any, tell: Callable[[Any], None]) -> Any:
    tell(call)
    try:
        return call.result()
    except BaseException:
        call.cancel()  # Ctrl-C: else the thread that sends would wait for ever, and the server for the rest
        raise


class Server:
    """One parameter server: its channels and idle sessions."""

    def __init__(self, peer: PeerAddress, identity: node_pb2.Identity, patience: float) -> None:
        self.peer = peer
        self.liveness = Liveness(self._answers, patience)
        self.holding = 0  # the number of what it holds for the job; see AttachEvent
        self._identity = identity
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        self._data = DataPort(str(peer), peer.token, peer.tls)
        self._greeted = self._closed = False
        self._retired: Sequence[grpc.Channel] = ()  # with the certificate before this one
        self._open()

    def _open(self) -> None:
        self._generation = 0 if self.peer.tls is None else self.peer.tls.look_again()
        self._control = open_peer_channel(self.peer)
        self._bulk = open_peer_channel(self.peer, [(ChannelOptions.SingleThreadedUnaryStream, 1)])
        self.control = Stub(self._control, SERVICE)
        self.node = Stub(self._control, NODE_SERVICE)
        self.bulk = Stub(self._bulk, SERVICE)

    def take_session(self) -> Session:
        """An idle one, or a new one. What is wrong with the server, its use tells."""
        direct, stale, found = self._has_data(), list[Session](), None
        with self._lock:
            while found is None and self._idle:
                session = self._idle.pop()
                if session.direct or not direct:
                    found = session
                else:
                    stale.append(session)  # of a time at which the data plane could not be reached
        for session in stale:
            session.close()
        if found is not None:
            return found
        name = new_session()
        metadata = ((SESSION_HEADER, name),)
        stream = self._data.open(_SESSION, metadata) if direct else None
        if stream is not None:
            return Session(stream, self.liveness, name, direct=True)
        with self._watched(OPEN_SECONDS):
            opened = open_stream(self._control, _SESSION, metadata)
        return Session(opened, self.liveness, name)

    def _has_data(self) -> bool:
        """Is there a data plane to be used? Asks the server, the first time, and when it was forgotten where it is."""
        if not self._greeted or self._data.should_ask():
            with contextlib.suppress(PsClusterError):
                self.hello()
        return self._data.usable()

    @contextlib.contextmanager
    def _transfer(self, path: str, metadata: Metadata, timeout: float) -> Iterator[_Transfer | None]:
        """A call on the data plane, if there is one."""
        stream = self._data.open(path, metadata) if self._has_data() else None
        if stream is None:
            yield None
            return
        try:
            with watchdog.call(self.liveness, stream.cancel, timeout) as exchange:
                yield _Transfer(stream, exchange)
        finally:
            self._data.give_back(stream)

    def pull(self, question: bytes, metadata: Metadata, timeout: float, place: Place) -> None:
        """A large read; the frames of the answer go to their place. grpc.RpcError, or ours, if something goes wrong."""
        with self._transfer(_PULL, metadata, timeout) as transfer:
            if transfer is None:
                with self._watched(timeout) as (exchange, tell):
                    call = self.bulk.pull(question, metadata=metadata, timeout=timeout)
                    tell(call)
                    for data in call:
                        exchange.progress()
                        place(data, len(data))
                return
            transfer.send((question,), last=True)
            for _ in transfer.replies(place):
                pass

    def push(self, frames: Callable[[int], Iterator[Sequence[Buffer]]], metadata: Metadata, timeout: float) -> bytes:
        """A large update, in frames of parts, with payloads of at most so many bytes: the answer. Raises as `pull`."""
        with self._transfer(_PUSH, metadata, timeout) as transfer:
            if transfer is None:
                with self._watched(timeout) as (_, tell):
                    call = self.bulk.push.future(map(b"".join, frames(CHUNK_BYTES)), metadata=metadata, timeout=timeout)
                    data: bytes = _result(call, tell)
                return data
            for parts in frames(DATA_FRAME_BYTES):
                transfer.send(parts)
            transfer.end()
            replies = list(transfer.replies())
        if len(replies) != 1:
            raise ProtocolError(f"{len(replies)} replies to one update")
        return replies[0]

    def ask(self, method: Any, request: Any, timeout: float) -> Any:
        """Call a method of a stub with one request. grpc.RpcError, or ours, if something goes wrong."""
        with self._watched(timeout) as (_, tell):
            if hasattr(method, "future"):
                return _result(method.future(request, timeout=timeout), tell)
            return method(request, timeout=timeout)  # authenticated: it tells by itself

    @contextlib.contextmanager
    def _watched(self, timeout: float) -> Iterator[tuple[Exchange, Callable[[Any], None]]]:
        """Watch a call over gRPC, also while it is opened; gives the exchange, and what is to be told of the call."""
        calls: list[Any] = []

        def cancel() -> None:
            for call in calls[-1:]:
                call.cancel()

        with watchdog.call(self.liveness, cancel, timeout) as exchange, telling(calls.append):
            yield exchange, calls.append

    def _answers(self, timeout: float) -> bool:
        """Does anybody answer, on a connection of its own?"""
        channel = open_peer_channel(self.peer)
        try:
            say_hello(channel, self.peer, self._identity, timeout)
        except UnavailableError:
            return False
        except PsClusterError:
            return True  # what is wrong, the call itself finds out
        finally:
            channel.close()
        return True

    def give_back(self, session: Session) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(session)
                return
        session.close()

    def hello(self, timeout: float = HELLO_SECONDS) -> node_pb2.HelloReply:
        """The handshake. UnavailableError if nobody answers."""
        generation = 0 if self.peer.tls is None else self.peer.tls.look_again()  # reads files: not while others wait
        over: Sequence[grpc.Channel] = ()
        with self._lock:
            if generation > self._generation:
                # What is under way on the old channels ends there: they are closed at the next renewal.
                over, self._retired = self._retired, (self._control, self._bulk)
                self._open()
        for channel in over:
            channel.close()
        reply = say_hello(self._control, self.peer, self._identity, timeout)
        self._data.learn(self.peer, reply)
        self._greeted = True
        return reply

    def check_holding(self, timeout: float = HELLO_SECONDS) -> None:
        """PSUnavailableError if it no longer holds what it held. UnavailableError if nobody answers."""
        theirs = self.hello(timeout)
        if self.holding and theirs.holding != self.holding:
            raise PSUnavailableError(
                f"{self.peer} was restarted and has lost its variables, or serves another job: start a new "
                "coordinator, and create them again or restore a checkpoint"
            )

    def drop_sessions(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()
        self._data.drop()

    def close(self) -> None:
        self._closed = True
        self.drop_sessions()
        self._data.close()
        for channel in (*self._retired, self._control, self._bulk):
            channel.close()
