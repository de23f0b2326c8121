"""The client's side of the data plane: connections to one role, over which calls go (see stream.py)."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from pscluster.core.cluster.addresses import split_address
from pscluster.core.errors import ProtocolError, UnavailableError
from pscluster.core.security.handshake import UNPROVEN, Secret, accept_reply, make_request
from pscluster.core.security.tls import Tls
from pscluster.core.transport.base import Metadata
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.packets import Connection, Kind, supported, tuned
from pscluster.core.transport.tcp.stream import DataStream, PromptStream
from pscluster.core.transport.unix_sockets import address_of, connect, data_path, path_of
from pscluster.v1 import authentication_pb2, data_plane_pb2, node_pb2

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
"""Time to try to reach the port: a client behind a firewall that drops packets waits so long, once."""

HANDSHAKE_SECONDS = 5.0
"""Time for the server to complete the handshake."""

_MAX_HANDSHAKE_BYTES = 4 << 10

AVOID_SECONDS = 60.0
"""Time to avoid a port that was unreachable; doubled after each further failure, since an attempt may block."""

AVOID_MOST_SECONDS = 3600.0

ASK_SECONDS = 1.0
"""After a connection broke, the role is asked for its port: at once by a retried call, by others after this time."""

Where = tuple[str, int] | str
"""Address of a data plane: a host and a port, or the path of a Unix socket."""

Endpoint = tuple[Where, int]
"""That, and the boot id of the process there; 0: unknown."""


class DataPort:
    """A client's view of a role's data plane: its address, and idle connections. Thread-safe.

    The role reports the address over gRPC, after it has proved itself; the first failure makes it unknown again.

        unknown --learn--> known; dialled at once, unless the same address has just failed: then after a while
        known   --a connection can't be made, or the peer is no role--> unknown; the role is asked after a while
        known   --a connection breaks--> unknown; the role is asked soon

    `wait_for_room` is as in `packets.tuned`.
    """

    def __init__(
        self,
        name: str,
        token: str | None = None,
        tls: Tls | None = None,
        tls_name: str = "",
        send_bytes: int | None = None,
        *,
        wait_for_room: bool = False,
    ) -> None:
        self._name, self._tls, self._tls_name = name, tls, tls_name
        self._send_bytes, self._wait_for_room = send_bytes, wait_for_room
        self._secret = None if token is None else Secret.of(token)
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._failed: Endpoint | None = None  # the address at the last failure
        self._forgotten = True  # unknown, but the role can be asked
        self._idle: list[Connection] = []
        self._avoid_until, self._avoid_seconds = 0.0, AVOID_SECONDS
        self._reached = False  # has a connection to the address succeeded?
        self._closed = False

    def learn(self, peer: PeerAddress, said: node_pb2.HelloReply | node_pb2.AttachEvent) -> None:
        """Take the address that the role reported to a caller that dialled it as this peer."""
        has_one = said.data_port and said.address == peer.address
        if not has_one:
            self.is_at(None)
        elif (path := path_of(peer.address)) is not None:
            self.is_at(data_path(path), said.identity.boot_id)
        else:
            self.is_at((split_address(peer.address)[0], said.data_port), said.identity.boot_id)

    def is_at(self, where: Where | None, boot_id: int = 0) -> None:
        """Set the address, and the boot id of the process there; None: there is no data plane.

        The caller has just reached the role. So a port that was reachable before is worth another try.
        """
        endpoint = (where, boot_id) if where is not None and supported() else None
        with self._lock:
            moved = endpoint != (self._endpoint or self._failed)
            if moved or self._reached:
                self._avoid_until = 0.0
            if moved:
                self._reached, self._avoid_seconds, self._failed = False, AVOID_SECONDS, None
            self._endpoint, self._forgotten = endpoint, False
        if moved:
            self.drop()

    def should_ask(self) -> bool:
        """Return whether it is time to ask the role for its address; once per `AVOID_SECONDS` at most."""
        with self._lock:
            now = time.monotonic()
            due = self._forgotten and now >= self._avoid_until
            if due:
                self._avoid_until = now + AVOID_SECONDS
            return due

    def usable(self) -> bool:
        """Return whether a connection is worth trying."""
        return self._endpoint is not None and time.monotonic() >= self._avoid_until

    def connect(self, path: str, metadata: Metadata, *, prompt: bool = False) -> DataStream | None:
        """Return a stream for a call, on an idle or a new connection; None if the call must use gRPC."""
        connection, endpoint = self._take_idle()
        if connection is None:
            connection = self._dialled(endpoint)
        if connection is None:
            return None
        return (PromptStream if prompt else DataStream)(self, endpoint, connection, path, metadata)

    def connect_idle(self, path: str, metadata: Metadata = ()) -> DataStream | None:
        """Return a stream for a call on an idle connection, without dialling; None if there is none."""
        connection, endpoint = self._take_idle()
        return None if connection is None else DataStream(self, endpoint, connection, path, metadata)

    def _take_idle(self) -> tuple[Connection | None, Endpoint | None]:
        with self._lock:
            while self._idle:
                if not (connection := self._idle.pop()).worn:
                    return connection, self._endpoint
                connection.close()
            return None, self._endpoint

    def _dialled(self, endpoint: Endpoint | None) -> Connection | None:
        if endpoint is None or not self.usable():
            return None
        where, boot_id = endpoint
        try:
            connected = tuned(_connected(where), self._send_bytes, wait_for_room=self._wait_for_room)
        except OSError as error:
            self.avoid(str(error), endpoint)
            return None
        connection = Connection(connected)
        try:
            if self._tls is not None:
                connection = TlsConnection(connected, self._tls, self._tls_name or where[0])
                _secure(connection)
            if self._secret is not None:
                self._shake_hands(connection, self._secret, where, boot_id)
        except (OSError, ProtocolError, DecodeError, UnavailableError) as error:
            connection.break_off()
            self.avoid(str(error), endpoint, ask_again=False)
            return None
        with self._lock:
            if endpoint == self._endpoint:
                self._avoid_seconds, self._reached = AVOID_SECONDS, True
        return connection

    @staticmethod
    def _shake_hands(connection: Connection, secret: Secret, where: Where, boot_id: int = 0) -> None:
        """Prove to each other that both sides know the token. Raises if the server does not."""
        address = address_of(where) if isinstance(where, str) else f"{where[0]}:{where[1]}"
        request = make_request(secret, address)
        with _in_time(connection):
            connection.send((Kind.HANDSHAKE, (request.SerializeToString(),)))
            body = _expected(connection, Kind.HANDSHAKE)
        reply = authentication_pb2.HandshakeReply.FromString(body)
        session = accept_reply(secret, request, reply)
        if boot_id not in (0, reply.boot_id):
            raise UnavailableError(UNPROVEN)
        connection.send((Kind.PROOF, (session.keys.data_proof(),)))

    def avoid(self, why: str, failed: Endpoint | None, *, ask_again: bool = True) -> None:
        """Use gRPC for a while, or until the role reports the address if `ask_again`, unless that has changed."""
        with self._lock:
            if failed is None or failed != self._endpoint:
                return
            self._forget(self._avoid_seconds)
            self._reached = self._reached and ask_again
            self._avoid_seconds = min(2 * self._avoid_seconds, AVOID_MOST_SECONDS)
        self.drop()
        where, _ = failed
        target = f"socket {where}" if isinstance(where, str) else f"port {where[1]}"
        logger.info("%s: its data %s can't be used (%s): using gRPC for now", self._name, target, why)

    def broke(self, failed: Endpoint | None) -> None:
        """Forget the address after a connection to the role has ended."""
        with self._lock:
            if failed is None or failed != self._endpoint:
                return
            self._forget(ASK_SECONDS)
            self._reached = True
        self.drop()

    def _forget(self, seconds: float) -> None:
        """Forget the address; requires the lock."""
        self._failed, self._endpoint, self._forgotten = self._endpoint, None, True
        self._avoid_until = time.monotonic() + seconds

    def give_back(self, stream: DataStream) -> None:
        """Keep the connection of a call that is over, or close it if it can't be reused."""
        with self._lock:
            connection = None if stream.is_dead or self._closed else stream.reusable
            if connection is not None and not connection.worn:
                self._idle.append(connection)
                return
        stream.close()

    def close(self) -> None:
        self._closed = True  # for connections that are returned later
        self.drop()

    def drop(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _secure(connection: TlsConnection) -> None:
    """Exchange certificates. Raises if one side does not trust the other."""
    with _in_time(connection):
        connection.shake_hands()
        _expected(connection, Kind.READY)  # else a call would fail if the server rejects our certificate


@contextmanager
def _in_time(connection: Connection) -> Iterator[None]:
    """Bound the time of a handshake in the block, however slowly the server sends, and the size of its packets."""
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
    """Return the server's part of a handshake. Raise UnavailableError if it refuses, or sends another packet."""
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
