"""Connections to the parameter servers: channels, and sessions, the streams that small requests go over."""

from __future__ import annotations

import threading
import time
import weakref

import grpc
from grpc.experimental import ChannelOptions

from pscluster.core.channels import NODE_SERVICE, PeerAddress, open_channel, say_hello
from pscluster.core.errors import PSUnavailableError, UnavailableError
from pscluster.core.identity import fresh_id
from pscluster.core.rpc import Stub
from pscluster.core.streams import Stream, open_stream
from pscluster.core.telemetry.recording import SESSION_HEADER
from pscluster.ps.wire import SERVICE
from pscluster.v1 import node_pb2

_SESSION = f"/{SERVICE.full_name}/Session"


class _Watchdog:
    """Cancels exchanges that overstay: a read on a stream has no timeout of its own."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, session: Session) -> None:
        with self._lock:
            self._sessions.add(session)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="session-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(0.5)
            now = time.monotonic()
            with self._lock:
                late = [session for session in self._sessions if session.deadline < now]
            for session in late:
                session.give_up()


_watchdog = _Watchdog()


def new_session() -> str:
    """A name that no other session has."""
    return f"{fresh_id():x}"


class Session:
    """One stream of request and reply in turn, used by one thread at a time."""

    def __init__(self, stream: Stream, name: str = "") -> None:
        self._stream = stream
        self.name = name
        self.nth = 0  # of the request that was sent last
        self.begin = 0.0  # when it was
        self.deadline = float("inf")
        self._given_up = False
        _watchdog.watch(self)

    def send(self, data: bytes, timeout: float) -> None:
        self.nth += 1
        self.begin = time.monotonic()
        self.deadline = self.begin + timeout
        self._stream.send(data)

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


class Server:
    """One parameter server: its channels and idle sessions."""

    def __init__(self, peer: PeerAddress, identity: node_pb2.Identity, metadata: tuple[tuple[str, str], ...]) -> None:
        self.peer = peer
        self.holding = 0  # the number of what it holds for the job; see AttachEvent
        self._identity = identity
        self.metadata = metadata
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._generation = 0 if self.peer.tls is None else self.peer.tls.look_again()
        self._control = open_channel(self.peer.address, self.peer.tls)
        self._bulk = open_channel(self.peer.address, self.peer.tls, [(ChannelOptions.SingleThreadedUnaryStream, 1)])
        self.control = Stub(self._control, SERVICE)
        self.node = Stub(self._control, NODE_SERVICE)
        self.bulk = Stub(self._bulk, SERVICE)

    def take_session(self) -> Session:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        name = new_session()
        return Session(open_stream(self._control, _SESSION, (*self.metadata, (SESSION_HEADER, name))), name)

    def give_back(self, session: Session) -> None:
        with self._lock:
            self._idle.append(session)

    def hello(self) -> node_pb2.HelloReply:
        """The handshake. UnavailableError if nobody answers."""
        generation = 0 if self.peer.tls is None else self.peer.tls.look_again()  # reads files: not while others wait
        with self._lock:
            if generation > self._generation:
                self._open()  # with the renewed certificate; what is under way on the old channels ends there
        return say_hello(self._control, self.peer, self._identity, self.metadata)

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

    def close(self) -> None:
        self.drop_sessions()
        self._control.close()
        self._bulk.close()
