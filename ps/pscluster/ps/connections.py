"""Connections to the parameter servers: channels, the data plane, and sessions, the streams of small requests.

Reads and updates go over a server's data plane, if it has one that can be reached, else over gRPC. Where it is, the
server says at every handshake: another process of it has another port.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import grpc
from grpc.experimental import ChannelOptions

from pscluster.core.channels import NODE_SERVICE, PeerAddress, open_channel, say_hello
from pscluster.core.data_plane.client import DataPort, DataStream
from pscluster.core.data_plane.connection import Place
from pscluster.core.errors import ProtocolError, PsClusterError, PSUnavailableError, UnavailableError
from pscluster.core.frames import CHUNK_BYTES, DATA_FRAME_BYTES, Buffer
from pscluster.core.identity import fresh_id
from pscluster.core.rpc import Stub
from pscluster.core.streams import Metadata, Stream, StreamEndedError, open_stream
from pscluster.core.telemetry.recording import SESSION_HEADER
from pscluster.ps.wire import SERVICE
from pscluster.v1 import node_pb2

_SESSION, _PULL, _PUSH = (f"/{SERVICE.full_name}/{name}" for name in ("Session", "Pull", "Push"))


class _Watched(Protocol):
    """What may overstay."""

    deadline: float

    def give_up(self) -> None:
        """End it, while the thread that uses it waits."""
        ...


class _Watchdog:
    """Cancels exchanges that overstay: a read on a stream has no timeout of its own."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[_Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, exchange: _Watched) -> None:
        with self._lock:
            self._watched.add(exchange)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="session-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(0.5)
            now = time.monotonic()
            with self._lock:
                late = [exchange for exchange in self._watched if exchange.deadline < now]
            for exchange in late:
                exchange.give_up()


_watchdog = _Watchdog()


def new_session() -> str:
    """A name that no other session has."""
    return f"{fresh_id():x}"


class Session:
    """One stream of request and reply in turn, used by one thread at a time."""

    def __init__(self, stream: Stream, name: str = "", *, direct: bool = False) -> None:
        self._stream = stream
        self.name = name
        self.direct = direct  # on the data plane
        self.nth = 0  # of the request that was sent last
        self.begin = 0.0  # when it was
        self.deadline = float("inf")
        self._given_up = False
        _watchdog.watch(self)

    def send(self, parts: Sequence[Buffer], timeout: float) -> None:
        self.nth += 1
        self.begin = time.monotonic()
        self.deadline = self.begin + timeout
        if isinstance(self._stream, DataStream):
            self._stream.send_parts(parts)
        else:
            self._stream.send(b"".join(parts))

    def receive(self) -> bytes:
        try:
            return self._stream.receive()
        except grpc.RpcError as error:
            if self._given_up:
                raise UnavailableError("no answer came in time") from None
            if error.code() is grpc.StatusCode.OK:
                raise UnavailableError("the session was ended by the server") from None
            raise
        finally:
            self.deadline = float("inf")

    def give_up(self) -> None:
        """By the watchdog, while the thread that uses it waits."""
        self._given_up = True
        self._stream.cancel()

    def close(self) -> None:
        """By the thread that uses it, or while none does."""
        self._stream.close()


class _Transfer:
    """One large read or update on the data plane, by one thread."""

    def __init__(self, stream: DataStream, timeout: float) -> None:
        self.stream = stream
        self.deadline = time.monotonic() + timeout
        self._given_up = False
        _watchdog.watch(self)

    def replies(self, place: Place | None = None) -> Iterator[bytes]:
        """What the server answers, to the end of the call; nothing of what is put in its place."""
        while True:
            try:
                data = self.stream.receive(place)
            except StreamEndedError as error:
                if self._given_up:
                    raise UnavailableError("no answer came in time") from None
                if error.code() is grpc.StatusCode.OK:
                    return
                raise
            yield data

    def give_up(self) -> None:
        """By the watchdog."""
        self._given_up = True
        self.stream.cancel()


class Server:
    """One parameter server: its channels and idle sessions."""

    def __init__(self, peer: PeerAddress, identity: node_pb2.Identity, metadata: tuple[tuple[str, str], ...]) -> None:
        self.peer = peer
        self.holding = 0  # the number of what it holds for the job; see AttachEvent
        self._identity = identity
        self.metadata = metadata
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        self._data = DataPort(str(peer))
        self._greeted = self._closed = False
        self._open()

    def _open(self) -> None:
        self._generation = 0 if self.peer.tls is None else self.peer.tls.look_again()
        self._control = open_channel(self.peer.address, self.peer.tls)
        self._bulk = open_channel(self.peer.address, self.peer.tls, [(ChannelOptions.SingleThreadedUnaryStream, 1)])
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
        metadata = (*self.metadata, (SESSION_HEADER, name))
        stream = self._data.open(_SESSION, metadata) if direct else None
        if stream is not None:
            return Session(stream, name, direct=True)
        return Session(open_stream(self._control, _SESSION, metadata), name)

    def _has_data(self) -> bool:
        """Is there a data plane to be used? Asks the server, the first time."""
        if not self._greeted:
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
            yield _Transfer(stream, timeout)
        finally:
            self._data.give_back(stream)

    def pull(self, question: bytes, metadata: Metadata, timeout: float, place: Place) -> None:
        """A large read; the frames of the answer go to their place. grpc.RpcError, or ours, if something goes wrong."""
        with self._transfer(_PULL, metadata, timeout) as transfer:
            if transfer is None:
                for data in self.bulk.pull(question, metadata=metadata, timeout=timeout):
                    place(data, len(data))
                return
            transfer.stream.send_parts((question,), last=True)
            for _ in transfer.replies(place):
                pass

    def push(self, frames: Callable[[int], Iterator[Sequence[Buffer]]], metadata: Metadata, timeout: float) -> bytes:
        """A large update, in frames of parts, with payloads of at most so many bytes: the answer. Raises as `pull`."""
        with self._transfer(_PUSH, metadata, timeout) as transfer:
            if transfer is None:
                call = self.bulk.push.future(map(b"".join, frames(CHUNK_BYTES)), metadata=metadata, timeout=timeout)
                try:
                    data: bytes = call.result()
                except BaseException:
                    call.cancel()  # Ctrl-C: else the thread that sends would wait for ever, and the server for the rest
                    raise
                return data
            for parts in frames(DATA_FRAME_BYTES):
                transfer.stream.send_parts(parts)
            transfer.stream.end()
            replies = list(transfer.replies())
        if len(replies) != 1:
            raise ProtocolError(f"{len(replies)} answers to one update")
        return replies[0]

    def give_back(self, session: Session) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(session)
                return
        session.close()

    def hello(self) -> node_pb2.HelloReply:
        """The handshake. UnavailableError if nobody answers."""
        generation = 0 if self.peer.tls is None else self.peer.tls.look_again()  # reads files: not while others wait
        with self._lock:
            if generation > self._generation:
                self._open()  # with the renewed certificate; what is under way on the old channels ends there
        reply = say_hello(self._control, self.peer, self._identity, self.metadata)
        self._data.learn(self.peer, reply)
        self._greeted = True
        return reply

    def check_holding(self) -> None:
        """PSUnavailableError if it no longer holds what it held. UnavailableError if nobody answers."""
        theirs = self.hello()
        if self.holding and theirs.holding != self.holding:
            raise PSUnavailableError(
                f"{self.peer} was restarted and has lost its variables, or works for another job: create them anew, or "
                "restore a checkpoint, with a new coordinator"
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
        self._control.close()
        self._bulk.close()
