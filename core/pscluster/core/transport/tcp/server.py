"""The server's side of the data plane: a socket, a thread for each connection, gRPC's handlers and interceptors.

With TLS a connection begins with its handshake, on the connection's own thread, and READY or a refusal.

A peer is unauthenticated until it has proved that it knows the token or, without one, made a call. Unauthenticated
peers are limited in number, may send small packets only, and are closed after a while, or oldest first above the limit.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import KIND_METADATA, AuthenticationError, ProtocolError, kind_of
from pscluster.core.limits import (
    HANDSHAKE_SECONDS,
    MAX_BACKLOG,
    MAX_CALL_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_METADATA,
    MAX_UNAUTHENTICATED,
    data_connections,
)
from pscluster.core.security.authenticator import Authenticator, Refused, refusal
from pscluster.core.security.handshake import ServerSession
from pscluster.core.security.refusals import HOLD_SECONDS
from pscluster.core.security.tls import Tls
from pscluster.core.transport.admission import Admission
from pscluster.core.transport.methods import Handler, Lookup
from pscluster.core.transport.peer_names import OTHER_USER
from pscluster.core.transport.tcp.call import Buffers, CallBrokenError, Requests, answers_of
from pscluster.core.transport.tcp.context import DataContext, HandlerAborted
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.packets import ClosedError, Kind
from pscluster.core.transport.tcp.peer import Peer
from pscluster.core.transport.unix_sockets import check_peer
from pscluster.v1 import authentication_pb2, data_plane_pb2

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0


class _Details(NamedTuple):
    """The details of a call, for interceptors."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


class DataServer:
    """Serves the methods of some handlers on a separate port, until `stop`.

    Args:
        listener: a listening socket; `stop` closes it.
        handlers: gRPC's own, with methods of any arity.
        interceptors: as of a gRPC server, in order.
        authenticator: to which clients must prove themselves; None: every caller is served.
        tls: this side's certificates; None: plain text.
    """

    def __init__(
        self,
        listener: socket.socket,
        handlers: Sequence[grpc.GenericRpcHandler],
        interceptors: Sequence[grpc.ServerInterceptor],
        authenticator: Authenticator | None = None,
        *,
        admission: Admission | None = None,
        message_bytes: int = MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
        refused: Refused = lambda _peer, **_how: True,
    ) -> None:
        self._admission, self._message_bytes = admission, message_bytes
        self._tls, self._revoked = tls, frozenset[str]()

        def find(details: grpc.HandlerCallDetails) -> Handler | None:
            candidates = (handler.service(details) for handler in handlers)
            return next((handler for handler in candidates if handler is not None), None)

        lookup: Lookup = find
        for interceptor in reversed(interceptors):
            lookup = functools.partial(interceptor.intercept_service, lookup)
        self._lookup, self._authenticator, self._refused = lookup, authenticator, refused
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a call has ended
        self._peers: set[Peer] = set()
        self._by_descriptor: dict[int, Peer] = {}
        self._epoll = select.epoll()
        self._over = False
        self._listener = listener
        self.port: int = 1 if listener.family == socket.AF_UNIX else listener.getsockname()[1]  # as gRPC reports it

    def start(self) -> None:
        for target, name in ((self._accept, "data-accept"), (self._watch, "data-watch")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def stop(self, grace: float = 0.0) -> None:
        """Refuse new calls, wait `grace` seconds for running ones, and end them."""
        with self._lock:
            self._over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            self._changed.wait_for(lambda: not any(peer.busy for peer in self._peers), grace)
            peers = list(self._peers)
        for peer in peers:
            peer.connection.shut()  # first: a handler whose context ends may return as if all were well
            peer.gone()

    # Connections

    def _accept(self) -> None:
        while not self._over:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not self._over:
                    logger.warning("can't accept a connection to the data port: %s", error)
                    time.sleep(_CHECK_SECONDS)  # too many open files, for one: it passes
                continue
            if (peer := self._peer_of(connected)) is None:
                connected.close()
                continue
            try:
                self._take(peer)
            except Exception:  # no more threads, for one; the next one may be served
                logger.exception("can't serve a connection to the data port")
                self._drop(peer)

    def _peer_of(self, connected: socket.socket) -> Peer | None:
        try:
            if connected.family == socket.AF_UNIX:
                check_peer(connected)
            return Peer(connected, self._tls)
        except PermissionError as error:  # it is another user's
            self._refused(OTHER_USER)
            logger.debug("a connection to the data plane was refused: %s", error)
        except ssl.SSLError as error:  # a renewed key may be too short, for one, which gRPC takes
            logger.error("can't accept a connection to the data port: %s", error)
        except OSError:
            pass  # it has disconnected already
        return None

    def _take(self, peer: Peer) -> None:
        with self._lock:
            full = self._over or len(self._peers) >= data_connections()
            if not full:
                self._peers.add(peer)
                self._by_descriptor[peer.connection.fileno()] = peer
                self._epoll.register(peer.connection.fileno(), select.EPOLLRDHUP)
            unauthenticated = [peer for peer in self._peers if peer.is_unauthenticated]
        if len(unauthenticated) > MAX_UNAUTHENTICATED:
            min(unauthenticated, key=lambda peer: peer.since).turn_out()
        if full:
            with contextlib.suppress(CallBrokenError):
                self._answer(peer, _status(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections"))
            peer.connection.close()
            return
        threading.Thread(target=self._serve, args=(peer,), name="data", daemon=True).start()

    def _drop(self, peer: Peer) -> None:
        peer.connection.shut()  # for a handler's thread that still reads
        with self._lock:
            descriptor = peer.connection.fileno()
            if self._by_descriptor.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)
            self._peers.discard(peer)
            self._changed.notify_all()
            peer.connection.close()  # under the lock: the descriptor may be reused at once

    def _watch(self) -> None:
        """End the calls of clients that have disconnected, and close connections that stay unauthenticated."""
        while not self._over:
            events = self._epoll.poll(_CHECK_SECONDS)
            with self._lock:
                gone = [peer for descriptor, _ in events if (peer := self._gone(descriptor)) is not None]
                late = time.monotonic() - HANDSHAKE_SECONDS
                silent = [peer for peer in self._peers if peer.is_unauthenticated and peer.since < late]
            for peer in gone:
                peer.gone()
            for peer in silent:
                peer.turn_out()
            self._end_revoked()

    def _end_revoked(self) -> None:
        if self._tls is None:
            return
        self._tls.refresh()
        if self._tls.revoked == self._revoked:
            return
        self._revoked = self._tls.revoked
        with self._lock:
            ended = [peer for peer in self._peers if peer.why_refused(self._revoked) is not None]
        for peer in ended:
            peer.cancel()

    def _gone(self, descriptor: int) -> Peer | None:
        """Return the peer that disconnected; requires the lock. Polls again, as the descriptor may have been reused."""
        peer = self._by_descriptor.get(descriptor)
        if peer is None:
            return None
        now = select.poll()
        now.register(descriptor, select.POLLRDHUP)
        if not now.poll(0):
            return None
        del self._by_descriptor[descriptor]
        self._epoll.unregister(descriptor)  # else it would be reported again and again
        return peer

    # Calls

    def _serve(self, peer: Peer) -> None:
        session = None
        try:
            if isinstance(peer.connection, TlsConnection):
                self._secure(peer, peer.connection)
            if self._authenticator is not None:
                session = self._shake_hands(peer, self._authenticator)
            while True:
                self._call(peer)
        except (OSError, DecodeError, ProtocolError, CallBrokenError) as error:
            logger.debug("%s: %s", peer.name, error)
        except Exception:
            logger.exception("a connection of the data plane failed")
        finally:
            peer.gone()
            self._drop(peer)
            if session is not None and self._authenticator is not None:
                self._authenticator.leave(session, peer)

    def _secure(self, peer: Peer, connection: TlsConnection) -> None:
        """Exchange certificates, and answer whether the client's is accepted. Raises if it is not."""
        assert self._tls is not None
        connection.shake_hands()
        peer.shown = connection.shown()
        if (why := peer.why_refused(self._tls.revoked)) is not None:
            self._refuse(peer, _status(grpc.StatusCode.UNAUTHENTICATED, why))
        self._send(peer, Kind.READY, b"")

    def _refuse(self, peer: Peer, status: data_plane_pb2.DataStatus | None = None) -> NoReturn:
        """Answer a client that was refused, unless it is to be held, and raise."""
        if not self._refused(peer.name):
            peer.hold(HOLD_SECONDS)
        elif status is not None:
            self._answer(peer, status)
        raise ClosedError("no client of ours" if status is None else status.details) from None

    def _shake_hands(self, peer: Peer, authenticator: Authenticator) -> ServerSession:
        """Have the client prove that it knows the token. Raises if it does not."""
        kind, body = peer.connection.receive()
        try:
            if kind is not Kind.HANDSHAKE:
                raise refusal()
            session = authenticator.open(authentication_pb2.HandshakeRequest.FromString(body))
        except (AuthenticationError, ProtocolError, DecodeError) as error:
            said = refusal() if isinstance(error, DecodeError) else error
            word, code = kind_of(said)
            trailing = [data_plane_pb2.DataMetadata(key=KIND_METADATA, value=word)]
            self._refuse(peer, data_plane_pb2.DataStatus(code=code.value[0], details=str(said), trailing=trailing))
        self._send(peer, Kind.HANDSHAKE, session.reply.SerializeToString())
        kind, body = peer.connection.receive()
        if kind is not Kind.PROOF or not hmac.compare_digest(body, session.keys.data_proof()):
            self._refuse(peer)
        if not authenticator.claim(session, peer):
            raise ClosedError("another connection's proof, or its token is no longer accepted")
        self._accept_peer(peer)
        return session

    def _accept_peer(self, peer: Peer) -> None:
        peer.known, peer.connection.limit = True, self._message_bytes

    def _call(self, peer: Peer) -> None:
        """Serve one call. Raises if no other may follow."""
        kind, body = peer.connection.receive()
        if kind is not Kind.CALL or len(body) > MAX_CALL_BYTES:
            raise ProtocolError(f"expected a call, but received {kind.name} of {len(body)} bytes")
        call = data_plane_pb2.DataCall.FromString(body)
        if len(call.metadata) > MAX_METADATA:
            raise ProtocolError(f"a call with {len(call.metadata):,} pairs of metadata; the limit is {MAX_METADATA}")
        context = DataContext(peer.connection, peer.name, call, peer.shown)
        with self._lock:
            if self._over:
                raise ClosedError("the server is stopping")
            peer.context, peer.busy = context, True
        requests = Requests(peer.connection, context, self._admission)
        try:
            details: Any = _Details(call.path, context.invocation_metadata())
            handler = self._lookup(details)
            if handler is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            self._accept_peer(peer)
            for answer in answers_of(handler, requests, context):
                self._send(peer, Kind.MESSAGE, answer)
            status = context.status(None)
        except CallBrokenError as error:
            raise ClosedError(f"the caller has gone: {error}") from None
        except HandlerAborted as error:  # not kept: its frames hold the handler's variables
            status = context.status(error)
        except Exception as error:
            if requests.broken or not context.is_active():
                raise ClosedError(f"the caller has gone: {error}") from None
            logger.exception("%s failed", call.path)
            status = context.status(error)
        peer.context = None
        context.end()
        self._answer(peer, status)
        with self._changed:
            peer.busy = False
            self._changed.notify_all()
        requests.drop_rest()

    def _answer(self, peer: Peer, status: data_plane_pb2.DataStatus) -> None:
        self._send(peer, Kind.STATUS, status.SerializeToString())

    @staticmethod
    def _send(peer: Peer, kind: Kind, body: Buffers) -> None:
        try:
            peer.connection.send((kind, (body,) if isinstance(body, bytes) else body))
        except OSError as error:
            raise CallBrokenError(f"the connection broke: {error}") from None


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Return a socket that listens on an address, on any free port for 0. Raise OSError if it can't listen there.

    With `share`, another process of this user has reserved the port: it has bound it, but does not listen.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()  # as gRPC does there
    return socket.create_server((host, port), family=family, backlog=MAX_BACKLOG, reuse_port=share, dualstack_ipv6=both)


def _status(code: grpc.StatusCode, details: str) -> data_plane_pb2.DataStatus:
    return data_plane_pb2.DataStatus(code=code.value[0], details=details)
