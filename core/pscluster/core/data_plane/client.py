"""The client's side of the data plane: connections to one role, and the streams of calls over them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.channels import PeerAddress
from pscluster.core.cluster import split_address
from pscluster.core.data_plane.connection import (
    ClosedError,
    Connection,
    Kind,
    Packet,
    Place,
    StrangerError,
    as_buffers,
    supported,
    tuned,
)
from pscluster.core.errors import ProtocolError, UnavailableError
from pscluster.core.frames import Buffer
from pscluster.core.security.handshake import UNPROVEN, Secret, accept_reply, make_request
from pscluster.core.streams import CODES, Metadata, StreamEndedError
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


# Of a role of another kind, or of another cluster: what is said of ours is found out over gRPC.
_OF_STRANGERS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


class DataStream:
    """A call over a connection of the data plane; see `streams.Stream`. Sending waits for room on the connection."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        metadata: Metadata,
        on_useless: Callable[[str], None] = lambda _why: None,
    ) -> None:
        pairs = [data_plane_pb2.DataMetadata(key=key, value=value) for key, value in metadata]
        self._call: bytes | None = data_plane_pb2.DataCall(path=path, metadata=pairs).SerializeToString()
        self._connection = connection
        self._on_useless = on_useless  # the port is of no use, and it does not help to ask again
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
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, "the connection was closed") from None
        except StrangerError as error:
            raise self._met_stranger(str(error)) from None
        except ProtocolError as error:
            raise StreamEndedError(grpc.StatusCode.INTERNAL, str(error)) from None
        except OSError as error:
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, f"the connection broke: {error}") from None
        if kind is Kind.MESSAGE:
            return body
        if kind is not Kind.STATUS:
            raise self._met_stranger("what came is what only clients send")
        try:
            status = data_plane_pb2.DataStatus.FromString(body)
        except DecodeError as error:
            raise self._met_stranger(f"what came is no status: {error}") from None
        if self._ended:
            self.reusable = self._connection
        code = CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not status.trailing:  # no error of the method's
            self._on_useless(status.details)
            code = grpc.StatusCode.UNAVAILABLE
        elif code in _OF_STRANGERS:
            raise self._met_stranger(status.details)
        raise StreamEndedError(code, status.details, tuple((pair.key, pair.value) for pair in status.trailing))

    def _met_stranger(self, why: str) -> StreamEndedError:
        """Somebody else has the port: the role has died, and will say, over gRPC, where it is now."""
        self.reusable = None
        self._on_useless(why)
        return StreamEndedError(grpc.StatusCode.UNAVAILABLE, why)

    def cancel(self) -> None:
        """The thread that waits sees the end."""
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
    ) -> None:
        super().__init__(connection, path, metadata, on_useless)
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._sender: threading.Thread | None = None  # while there is a backlog
        self._closed = False

    def _put(self, packets: Sequence[Packet]) -> None:
        with self._lock:
            if self._closed:
                return
            if self._sender is not None:
                self._backlog.append(b"".join(as_buffers(packets)))
            elif left := self._connection.start_to_send(*packets):
                self._backlog.append(left)
                self._sender = threading.Thread(target=self._send_backlog, name="data-send", daemon=True)
                self._sender.start()

    def _send_backlog(self) -> None:
        while True:
            with self._lock:
                if not self._backlog:
                    self._sender = None
                    return
                data = self._backlog.popleft()
            try:
                self._connection.finish(data)
            except OSError:  # nothing more will arrive; who receives is told
                self._connection.shut()
                return

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
    """One role's data plane, as a client has it: where it is, and the connections that no call uses. Thread-safe."""

    def __init__(self, name: str, token: str | None = None) -> None:
        self._name = name
        self._secret = None if token is None else Secret.of(token)
        self._lock = threading.Lock()
        self._where: tuple[str, int] | None = None
        self._boot_id = 0  # of the process there; 0: it is not known
        self._idle: list[Connection] = []
        self._avoid_until, self._avoid_seconds = 0.0, AVOID_SECONDS
        self._reached = False  # has a connection to where it is come about?
        self._closed = False

    def learn(self, peer: PeerAddress, said: node_pb2.HelloReply | node_pb2.AttachEvent) -> None:
        """Where it is, as the role itself has said to who dialled it as this peer."""
        same = peer.tls is None and said.address == peer.address
        self._boot_id = said.identity.incarnation
        self.is_at(split_address(peer.address)[0], said.data_port if same else 0)

    def is_at(self, host: str, port: int) -> None:
        """Where it is from now on; port 0: there is none.

        Who learns this has just reached the role. So a port that could be reached before is worth another try.
        """
        where = (host, port) if port and supported() else None
        with self._lock:
            moved = where != self._where
            if moved or self._reached:
                self._avoid_until = 0.0
            if moved:
                self._where, self._reached, self._avoid_seconds = where, False, AVOID_SECONDS
        if moved:
            self.drop()

    def usable(self) -> bool:
        """Is it worth to try?"""
        return self._where is not None and time.monotonic() >= self._avoid_until

    def open(self, path: str, metadata: Metadata) -> DataStream | None:
        """A stream for a call, on an idle connection or a new one; None where the call has to go another way."""
        return self._open(DataStream, path, metadata)

    def open_prompt(self, path: str, metadata: Metadata) -> PromptStream | None:
        """The same, of the other kind."""
        return self._open(PromptStream, path, metadata)

    def _open(self, kind: type[_StreamT], path: str, metadata: Metadata) -> _StreamT | None:
        where = self._where
        connection = self._connection()
        if connection is None:
            return None
        return kind(connection, path, metadata, partial(self.avoid, failed=where, ask_again=False))

    def _connection(self) -> Connection | None:
        with self._lock:
            where = self._where
            if self._idle:
                return self._idle.pop()
        if where is None or not self.usable():
            return None
        try:
            found = Connection(tuned(socket.create_connection(where, timeout=CONNECT_SECONDS)))
        except OSError as error:
            self.avoid(str(error), where)
            return None
        if self._secret is not None:
            try:
                self._shake_hands(found, self._secret, where, self._boot_id)
            except (OSError, ProtocolError, DecodeError, UnavailableError) as error:
                found.break_off()
                self.avoid(str(error), where, ask_again=False)
                return None
        with self._lock:
            if where == self._where:
                self._avoid_seconds, self._reached = AVOID_SECONDS, True
        return found

    @staticmethod
    def _shake_hands(connection: Connection, secret: Secret, where: tuple[str, int], boot_id: int = 0) -> None:
        """Have both sides prove that they know the token, before all else. Raises where the server does not."""
        host, port = where
        request = make_request(secret, f"{host}:{port}")
        most, connection.limit = connection.limit, _MAX_HANDSHAKE_BYTES
        late = threading.Timer(HANDSHAKE_SECONDS, connection.shut)  # of all of it, however it trickles
        late.daemon = True
        late.start()
        try:
            connection.send((Kind.HANDSHAKE, (request.SerializeToString(),)))
            kind, body = connection.receive()
        finally:
            late.cancel()
        if kind is Kind.STATUS:
            raise UnavailableError(data_plane_pb2.DataStatus.FromString(body).details)
        if kind is not Kind.HANDSHAKE:
            raise UnavailableError(UNPROVEN)
        reply = authentication_pb2.HandshakeReply.FromString(body)
        session = accept_reply(secret, request, reply)
        if boot_id not in (0, reply.boot_id):
            raise UnavailableError(UNPROVEN)
        connection.send((Kind.PROOF, (session.keys.data_proof(),)))
        connection.limit = most

    def avoid(self, why: str, failed: tuple[str, int] | None, *, ask_again: bool = True) -> None:
        """Have calls go another way for a while, unless it is elsewhere by now than where it failed.

        Args:
            ask_again: is it worth a try as soon as the role says that it is still there?
        """
        with self._lock:
            if failed != self._where:
                return
            self._reached = self._reached and ask_again
            self._avoid_until = time.monotonic() + self._avoid_seconds
            self._avoid_seconds = min(2 * self._avoid_seconds, AVOID_MOST_SECONDS)
        if failed is not None:
            logger.info("%s: its data port %d can't be used (%s): over gRPC for now", self._name, failed[1], why)

    def give_back(self, stream: DataStream) -> None:
        """The call is over. What can't be used again is closed."""
        with self._lock:
            if stream.reusable is not None and not self._closed:
                self._idle.append(stream.reusable)
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
