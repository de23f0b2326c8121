"""The client's side of the data plane: connections to one role, and the streams of calls over them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.cluster.spec import split_address
from pscluster.core.errors import ProtocolError, UnavailableError
from pscluster.core.security.handshake import UNPROVEN, Secret, accept_reply, make_request
from pscluster.core.security.tls import Tls
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.frames import Buffer
from pscluster.core.transport.grpc_streams import CODES, Metadata, StreamEndedError
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.packets import (
    ClosedError,
    Connection,
    Kind,
    Packet,
    Place,
    UnknownProtocolError,
    supported,
    tuned,
)
from pscluster.core.transport.unix_sockets import address_of, connect, data_path, path_of
from pscluster.v1 import authentication_pb2, data_plane_pb2, node_pb2

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
"""So long it is tried to reach the port: whoever is behind a firewall that drops packets waits as long, once."""

HANDSHAKE_SECONDS = 5.0
"""So long the server there may take for it."""

_MAX_HANDSHAKE_BYTES = 4 << 10

AVOID_SECONDS = 60.0
"""So long a port that could not be reached is left alone, then twice as long, and so on: a try may be a wait."""

AVOID_MOST_SECONDS = 3600.0

ASK_SECONDS = 1.0
"""After a connection broke, the role is asked where it is: by who repairs a call at once, by others so much later."""

Where = tuple[str, int] | str
"""Of a data plane: a host and a port, or the path of a Unix socket."""

_Place = tuple[Where, int]
"""That, and the boot id of the process there; 0: it is not known."""


# Of a role of another kind, or of another cluster: what is said of ours is found out over gRPC.
_FROM_OTHER_SERVERS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


class DataStream:
    """A call over a connection of the data plane; see `streams.Stream`. Sending waits for room on the connection."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        metadata: Metadata,
        on_useless: Callable[[str], None] = lambda _why: None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        pairs = [data_plane_pb2.DataMetadata(key=key, value=value) for key, value in metadata]
        self._call: bytes | None = data_plane_pb2.DataCall(path=path, metadata=pairs).SerializeToString()
        self._connection = connection
        self._on_useless = on_useless  # the port is of no use, and it does not help to ask again
        self._on_broken = on_broken
        self._shut = False  # by this side
        self._ended = False
        self.reusable: Connection | None = None  # the connection, once the call is over and another may follow

    def send(self, data: bytes) -> None:
        """Send a message, the first one with the call. What is wrong with the connection, `receive` raises."""
        self.send_parts((data,))

    def send_parts(self, parts: Sequence[Buffer], *, last: bool = False) -> None:
        """Send a message of these parts, which are not joined before; nothing behind it, if it is the last."""
        packets: list[Packet] = [(Kind.MESSAGE, parts)]
        if last:
            packets.append((Kind.END, ()))
            self._ended = True
        self._send(packets)

    def end(self) -> None:
        """Nothing more will be sent."""
        self._ended = True
        self._send([(Kind.END, ())])

    def _send(self, packets: list[Packet]) -> None:
        if self._call is not None:
            packets.insert(0, (Kind.CALL, (self._call,)))
            self._call = None
        try:
            self._put(packets)
        except OSError:
            self._connection.shut()  # what the server said before it broke off can still be read

    def _put(self, packets: Sequence[Packet]) -> None:
        """OSError if the connection is broken."""
        self._connection.send(*packets)

    def receive(self, place: Place | None = None) -> bytes:
        """Wait for a message, to have it or put it in its place. StreamEndedError once the call has ended."""
        try:
            kind, body = self._connection.receive(place)
        except ClosedError:
            self._broke()
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, "the connection was closed") from None
        except UnknownProtocolError as error:
            raise self._met_other_server(str(error)) from None
        except ProtocolError as error:
            raise StreamEndedError(grpc.StatusCode.INTERNAL, str(error)) from None
        except OSError as error:
            self._broke()
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, f"the connection broke: {error}") from None
        if kind is Kind.MESSAGE:
            return body
        if kind is not Kind.STATUS:
            raise self._met_other_server("what came is what only clients send")
        try:
            status = data_plane_pb2.DataStatus.FromString(body)
        except DecodeError as error:
            raise self._met_other_server(f"what came is no status: {error}") from None
        if self._ended:
            self.reusable = self._connection
        code = CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not status.trailing:  # no error of the method's
            self._on_useless(status.details)
            code = grpc.StatusCode.UNAVAILABLE
        elif code in _FROM_OTHER_SERVERS:
            raise self._met_other_server(status.details)
        raise StreamEndedError(code, status.details, tuple((pair.key, pair.value) for pair in status.trailing))

    def _broke(self) -> None:
        if not self._shut:
            self._on_broken()

    def _met_other_server(self, why: str) -> StreamEndedError:
        """Somebody else has the port: the role has died, and will say, over gRPC, where it is now."""
        self.reusable = None
        self._on_useless(why)
        return StreamEndedError(grpc.StatusCode.UNAVAILABLE, why)

    def cancel(self) -> None:
        """The thread that waits sees the end."""
        self._shut = True
        self._connection.shut()

    def close(self) -> None:
        """By the thread that receives, or while none does."""
        self._connection.shut()
        self._connection.break_off()


class PromptStream(DataStream):
    """A stream on which sending never waits, by any thread: what there is no room for waits in memory, for a thread."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        metadata: Metadata,
        on_useless: Callable[[str], None] = lambda _why: None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(connection, path, metadata, on_useless, on_broken)
        self._lock = threading.Lock()
        self._backlog: deque[list[Packet]] = deque()
        self._sender: threading.Thread | None = None  # while there is a backlog
        self._closed = False

    def _put(self, packets: Sequence[Packet]) -> None:
        with self._lock:
            if self._closed:
                return
            if self._sender is not None:
                self._backlog.append([(kind, (b"".join(body),)) for kind, body in packets])
            elif left := self._connection.start_to_send(*packets):
                self._sender = threading.Thread(target=self._send_rest, args=(left,), name="data-send", daemon=True)
                self._sender.start()

    def _send_rest(self, left: bytes) -> None:
        try:
            self._connection.finish(left)
            while True:
                with self._lock:
                    if not self._backlog:
                        self._sender = None
                        return
                    packets = self._backlog.popleft()
                self._connection.send(*packets)
        except OSError:  # nothing more will arrive; who receives is told
            self._connection.shut()

    def close(self) -> None:
        """By the thread that receives, or while none does. Nobody else uses the connection any more then."""
        self._connection.shut()
        with self._lock:
            self._closed, sender = True, self._sender
        if sender is not None:
            sender.join()
        self._connection.break_off()


_StreamT = TypeVar("_StreamT", bound=DataStream)


class DataPort:
    """One role's data plane, as a client has it: where it is, and the connections that no call uses. Thread-safe.

    What it knows it was told over gRPC by the role, which had proved itself; at the first failure it forgets that.

        unknown --learn--> known; dialled at once, unless it has just failed and is the same: then after a while
        known   --a connection can't be made, or its first bytes are no role's--> unknown; to be asked for after a while
        known   --a connection breaks--> unknown; to be asked for soon
    """

    def __init__(self, name: str, token: str | None = None, tls: Tls | None = None) -> None:
        self._name, self._tls = name, tls
        self._secret = None if token is None else Secret.of(token)
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self._failed: _Place | None = None  # that was there at the last failure
        self._forgotten = False  # where it is was known, and can be asked for
        self._idle: list[Connection] = []
        self._avoid_until, self._avoid_seconds = 0.0, AVOID_SECONDS
        self._reached = False  # has a connection to where it is come about?
        self._closed = False

    def learn(self, peer: PeerAddress, said: node_pb2.HelloReply | node_pb2.AttachEvent) -> None:
        """Where it is, as the role itself has said to who dialled it as this peer."""
        has_one = said.data_port and said.address == peer.address
        if not has_one:
            self.is_at(None)
        elif (path := path_of(peer.address)) is not None:
            self.is_at(data_path(path), said.identity.incarnation)
        else:
            self.is_at((split_address(peer.address)[0], said.data_port), said.identity.incarnation)

    def is_at(self, where: Where | None, boot_id: int = 0) -> None:
        """Where it is from now on, and of which process; None: there is none.

        Who learns this has just reached the role. So what could be reached before is worth another try.
        """
        place = (where, boot_id) if where is not None and supported() else None
        with self._lock:
            moved = place != (self._place or self._failed)
            if moved or self._reached:
                self._avoid_until = 0.0
            if moved:
                self._reached, self._avoid_seconds, self._failed = False, AVOID_SECONDS, None
            self._place, self._forgotten = place, False
        if moved:
            self.drop()

    def should_ask(self) -> bool:
        """Is it time to ask the role where it is, since that was forgotten? Once in a while."""
        with self._lock:
            now = time.monotonic()
            due = self._forgotten and now >= self._avoid_until
            if due:
                self._avoid_until = now + AVOID_SECONDS
            return due

    @property
    def where(self) -> Where | None:
        """Where it is, as far as that is known."""
        return None if self._place is None else self._place[0]

    def usable(self) -> bool:
        """Is it worth to try?"""
        return self._place is not None and time.monotonic() >= self._avoid_until

    def open(self, path: str, metadata: Metadata) -> DataStream | None:
        """A stream for a call, on an idle connection or a new one; None where the call has to go another way."""
        return self._open(DataStream, path, metadata)

    def open_prompt(self, path: str, metadata: Metadata) -> PromptStream | None:
        """The same, of the other kind."""
        return self._open(PromptStream, path, metadata)

    def _open(self, kind: type[_StreamT], path: str, metadata: Metadata) -> _StreamT | None:
        connection: Connection | None = None
        with self._lock:
            place = self._place
            while connection is None and self._idle:
                if (connection := self._idle.pop()).worn:
                    connection.close()
                    connection = None
        if connection is None:
            connection = self._dialled(place)
        if connection is None:
            return None
        on_useless = partial(self.avoid, failed=place, ask_again=False)
        return kind(connection, path, metadata, on_useless, partial(self._broke, place))

    def _dialled(self, place: _Place | None) -> Connection | None:
        if place is None or not self.usable():
            return None
        where, boot_id = place
        try:
            connected = tuned(_connected(where))
        except OSError as error:
            self.avoid(str(error), place)
            return None
        found = Connection(connected)
        try:
            if self._tls is not None:
                found = TlsConnection(connected, self._tls, where[0])
                _secure(found)
            if self._secret is not None:
                self._shake_hands(found, self._secret, where, boot_id)
        except (OSError, ProtocolError, DecodeError, UnavailableError) as error:
            found.break_off()
            self.avoid(str(error), place, ask_again=False)
            return None
        with self._lock:
            if place == self._place:
                self._avoid_seconds, self._reached = AVOID_SECONDS, True
        return found

    @staticmethod
    def _shake_hands(connection: Connection, secret: Secret, where: Where, boot_id: int = 0) -> None:
        """Have both sides prove that they know the token, before all else. Raises where the server does not."""
        request = make_request(secret, _named(where))
        with _in_time(connection):
            connection.send((Kind.HANDSHAKE, (request.SerializeToString(),)))
            body = _expected(connection, Kind.HANDSHAKE)
        reply = authentication_pb2.HandshakeReply.FromString(body)
        session = accept_reply(secret, request, reply)
        if boot_id not in (0, reply.boot_id):
            raise UnavailableError(UNPROVEN)
        connection.send((Kind.PROOF, (session.keys.data_proof(),)))

    def avoid(self, why: str, failed: _Place | None, *, ask_again: bool = True) -> None:
        """Forget where it is, and have calls go another way for a while; not if it is elsewhere than where it failed.

        Args:
            ask_again: is it worth a try as soon as the role says that it is still there?
        """
        with self._lock:
            if failed is None or failed != self._place:
                return
            self._forget(self._avoid_seconds)
            self._reached = self._reached and ask_again
            self._avoid_seconds = min(2 * self._avoid_seconds, AVOID_MOST_SECONDS)
        self.drop()
        where, _ = failed
        what = f"socket {where}" if isinstance(where, str) else f"port {where[1]}"
        logger.info("%s: its data %s can't be used (%s): using gRPC for now", self._name, what, why)

    def _broke(self, failed: _Place | None) -> None:
        """A connection has ended that was one to the role."""
        with self._lock:
            if failed is None or failed != self._place:
                return
            self._forget(ASK_SECONDS)
            self._reached = True
        self.drop()

    def _forget(self, seconds: float) -> None:
        """Under the lock."""
        self._failed, self._place, self._forgotten = self._place, None, True
        self._avoid_until = time.monotonic() + seconds

    def give_back(self, stream: DataStream) -> None:
        """The call is over. What can't be used again is closed."""
        with self._lock:
            if (connection := stream.reusable) is not None and not self._closed and not connection.worn:
                self._idle.append(connection)
                return
        stream.close()

    def close(self) -> None:
        """Nothing is given back any more."""
        self._closed = True
        self.drop()

    def drop(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _secure(connection: TlsConnection) -> None:
    """Have both sides trust each other's certificates. Raises where they do not."""
    with _in_time(connection):
        connection.shake_hands()
        _expected(connection, Kind.READY)  # else what is wrong with ours would be found out amid a call


@contextmanager
def _in_time(connection: Connection) -> Iterator[None]:
    """Give the server so long for its part of a handshake, however it trickles, and room for little."""
    most, connection.limit = connection.limit, _MAX_HANDSHAKE_BYTES
    late = threading.Timer(HANDSHAKE_SECONDS, connection.shut)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        connection.limit = most


def _expected(connection: Connection, expected: Kind) -> bytes:
    """What the server says in a handshake. UnavailableError if it refuses, or says something else."""
    kind, body = connection.receive()
    if kind is Kind.STATUS:
        raise UnavailableError(data_plane_pb2.DataStatus.FromString(body).details)
    if kind is not expected:
        raise UnavailableError(UNPROVEN)
    return body


def _connected(where: Where) -> socket.socket:
    if isinstance(where, str):
        return connect(where, CONNECT_SECONDS)
    return socket.create_connection(where, timeout=CONNECT_SECONDS)


def _named(where: Where) -> str:
    return address_of(where) if isinstance(where, str) else f"{where[0]}:{where[1]}"
