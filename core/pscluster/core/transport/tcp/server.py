"""The server's side of the data plane: a socket, a thread for each connection, gRPC's handlers and interceptors.

Where there is TLS, a connection begins with its handshake, on the connection's own thread, and READY or a refusal.

Unauthenticated peers, which have not proved that they know the token or, where there is none, made a call, are few at
a time, may only send a small packet, and are closed after a while, the oldest first where there are many.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import KIND_METADATA, AuthenticationError, ProtocolError, kind_of
from pscluster.core.limits import HANDSHAKE_SECONDS, MAX_CALL_BYTES, MAX_MESSAGE_BYTES, MAX_METADATA, data_connections
from pscluster.core.security.authenticator import Authenticator, Refused, refusal
from pscluster.core.security.handshake import ServerSession
from pscluster.core.security.refusals import HOLD_SECONDS, OTHER_USER
from pscluster.core.security.revocation import why_refused
from pscluster.core.security.tls import Tls
from pscluster.core.transport.admission import Admission, Waiting
from pscluster.core.transport.frames import Buffer
from pscluster.core.transport.tcp.context import DataContext, HandlerAborted
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.packets import ClosedError, Connection, Kind, tuned
from pscluster.core.transport.unix_sockets import check_peer
from pscluster.v1 import authentication_pb2, data_plane_pb2

logger = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
"""Connections at a time on which no call was accepted yet."""

_LOOK_SECONDS = 1.0
_SMALL_BYTES = 4 << 10  # of a message that is coming; as many connections as there are may hold that each

Parts = bytes | Sequence[Buffer]
"""An answer; see `ServerCall.takes_parts`."""

Lookup = Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"]


class CallBrokenError(grpc.RpcError):
    """The caller has gone, or sends what is no message: raised where messages are asked for, as gRPC does."""


class _Details(NamedTuple):
    """What an interceptor is asked about."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


class _Peer:
    """A connection, and the call on it."""

    def __init__(self, connected: socket.socket, tls: Tls | None) -> None:
        connected = tuned(connected)
        self.connection = Connection(connected) if tls is None else TlsConnection(connected, tls)
        self.connection.limit = MAX_CALL_BYTES
        self.shown: dict[str, Any] = {}  # by its certificate; see `DataContext.auth_context`
        self.name = _name_of(connected)
        self.since = time.monotonic()
        self.known = False
        self.turned_out = False
        self.busy = False  # with a call, until its end is told
        self.context: DataContext | None = None

    @property
    def is_unauthenticated(self) -> bool:
        """Has no call of it been accepted, and may one still be?"""
        return not (self.known or self.turned_out)

    def why_refused(self, revoked: frozenset[str]) -> str | None:
        """What is wrong with the certificate that it has shown, if it has shown one."""
        shown = self.shown.get("x509_pem_cert", ())
        return next((why for pem in shown if (why := why_refused(pem, revoked, resumed=False))), None)

    def cancel(self) -> None:
        """End it: its client's token or certificate is accepted no more."""
        self.connection.shut()
        self.gone()

    def turn_out(self) -> None:
        """Its thread finds that it is closed."""
        self.turned_out = True
        self.connection.shut()

    def hold(self, seconds: float) -> None:
        """Wait for so long, or until it is closed, by whichever side."""
        waiting = select.poll()
        waiting.register(self.connection.fileno(), select.POLLRDHUP)
        waiting.poll(seconds * 1000)

    def gone(self) -> None:
        """Nobody is on the other side any more."""
        if (context := self.context) is not None:
            context.end()


class DataServer:
    """Serves the methods of some handlers on a port of its own, until `stop`.

    Args:
        listener: listens; it is closed at the end.
        handlers: gRPC's own; their unary methods are served, too.
        interceptors: as of a gRPC server: the first is asked first.
        authenticator: of whom clients have to prove themselves to; None: whoever calls is served.
        admission: bounds what is held of messages that are coming.
        message_bytes: what a message may have.
        tls: what is shown, and asked for; None: what is sent can be read on its way.
        refused: is told of every connection that was refused; is it to be answered?

    Attributes:
        port: where it listens; of a Unix socket 1, as gRPC says.
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

        def find(details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
            found = (handler.service(details) for handler in handlers)
            return next((handler for handler in found if handler is not None), None)

        lookup: Lookup = find
        for interceptor in reversed(interceptors):
            lookup = functools.partial(interceptor.intercept_service, lookup)
        self._lookup, self._authenticator, self._refused = lookup, authenticator, refused
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a call has ended
        self._peers: set[_Peer] = set()
        self._by_number: dict[int, _Peer] = {}
        self._epoll = select.epoll()
        self._over = False
        self._listener = listener
        self.port: int = 1 if listener.family == socket.AF_UNIX else listener.getsockname()[1]

    def start(self) -> None:
        """Serve from now on."""
        for target, name in ((self._accept, "data-accept"), (self._watch, "data-watch")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def stop(self, grace: float = 0.0) -> None:
        """Refuse what is new, wait for so many seconds for what runs, end it."""
        with self._lock:
            self._over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            self._changed.wait_for(lambda: not any(peer.busy for peer in self._peers), grace)
            peers = list(self._peers)
        for peer in peers:
            peer.connection.shut()  # first: a handler that is told that nobody waits may end as if all were well
            peer.gone()

    # Connections

    def _accept(self) -> None:
        while not self._over:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not self._over:
                    logger.warning("can't accept a connection to the data port: %s", error)
                    time.sleep(_LOOK_SECONDS)  # as with too many open files: it passes
                continue
            if not self._may_connect(connected):
                connected.close()
                continue
            try:
                peer = _Peer(connected, self._tls)
            except ssl.SSLError as error:  # a renewed key may be too short, for one; gRPC takes it
                logger.error("can't accept a connection to the data port: %s", error)
                connected.close()
                continue
            except OSError:  # it has gone already
                connected.close()
                continue
            try:
                self._take(peer)
            except Exception:  # no more threads, for one; the next one may be served
                logger.exception("can't serve a connection to the data port")
                self._drop(peer)

    def _may_connect(self, connected: socket.socket) -> bool:
        """On a Unix socket: is it this user's process?"""
        if connected.family != socket.AF_UNIX:
            return True
        try:
            check_peer(connected)
        except OSError as error:
            self._refused(OTHER_USER)
            logger.debug("a connection to the data plane was refused: %s", error)
            return False
        return True

    def _take(self, peer: _Peer) -> None:
        with self._lock:
            full = self._over or len(self._peers) >= data_connections()
            if not full:
                self._peers.add(peer)
                self._by_number[peer.connection.fileno()] = peer
                self._epoll.register(peer.connection.fileno(), select.EPOLLRDHUP)
            unauthenticated = [each for each in self._peers if each.is_unauthenticated]
        if len(unauthenticated) > MAX_UNAUTHENTICATED:
            min(unauthenticated, key=lambda each: each.since).turn_out()
        if full:
            with contextlib.suppress(CallBrokenError):
                self._answer(peer, _status(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more connections are taken here"))
            peer.connection.close()
            return
        threading.Thread(target=self._serve, args=(peer,), name="data", daemon=True).start()

    def _drop(self, peer: _Peer) -> None:
        peer.connection.shut()  # for a thread of the handler's that still reads
        with self._lock:
            number = peer.connection.fileno()
            if self._by_number.pop(number, None) is not None:
                self._epoll.unregister(number)
            self._peers.discard(peer)
            self._changed.notify_all()
            peer.connection.close()  # under the lock: the number is free for another one

    def _watch(self) -> None:
        """Tell the calls whose callers have gone, and close unauthenticated connections that say nothing."""
        while not self._over:
            events = self._epoll.poll(_LOOK_SECONDS)
            with self._lock:
                gone = [peer for number, _ in events if (peer := self._gone(number)) is not None]
                late = time.monotonic() - HANDSHAKE_SECONDS
                silent = [each for each in self._peers if each.is_unauthenticated and each.since < late]
            for peer in gone:
                peer.gone()
            for peer in silent:
                peer.turn_out()
            self._end_revoked()

    def _end_revoked(self) -> None:
        if self._tls is None:
            return
        self._tls.look_again()
        if self._tls.revoked == self._revoked:
            return
        self._revoked = self._tls.revoked
        with self._lock:
            ended = [peer for peer in self._peers if peer.why_refused(self._revoked) is not None]
        for peer in ended:
            peer.cancel()

    def _gone(self, number: int) -> _Peer | None:
        """Under the lock. The event may be of a connection that had the number before: so it is looked at again."""
        peer = self._by_number.get(number)
        if peer is None:
            return None
        now = select.poll()
        now.register(number, select.POLLRDHUP)
        if not now.poll(0):
            return None
        del self._by_number[number]
        self._epoll.unregister(number)  # it would be told again and again
        return peer

    # Calls

    def _serve(self, peer: _Peer) -> None:
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

    def _secure(self, peer: _Peer, connection: TlsConnection) -> None:
        """Have both sides show their certificates, and say whether the client's is accepted. Raises where it is not."""
        assert self._tls is not None
        connection.shake_hands()
        peer.shown = connection.shown()
        if (why := peer.why_refused(self._tls.revoked)) is not None:
            if not self._refused(peer.name):
                peer.hold(HOLD_SECONDS)
            else:
                self._answer(peer, _status(grpc.StatusCode.UNAUTHENTICATED, why))
            raise ClosedError(why)
        self._send(peer, Kind.READY, b"")

    def _shake_hands(self, peer: _Peer, authenticator: Authenticator) -> ServerSession:
        """Have the client prove that it knows the token. Raises where it has not."""
        kind, body = peer.connection.receive()
        try:
            if kind is not Kind.HANDSHAKE:
                raise refusal()
            try:
                request = authentication_pb2.HandshakeRequest.FromString(body)
            except DecodeError:
                raise refusal() from None
            session = authenticator.open(request)
        except (AuthenticationError, ProtocolError) as error:
            if not self._refused(peer.name):
                peer.hold(HOLD_SECONDS)
                raise ClosedError("no client of ours") from None
            word, code = kind_of(error)
            trailing = [data_plane_pb2.DataMetadata(key=KIND_METADATA, value=word)]
            self._answer(peer, data_plane_pb2.DataStatus(code=code.value[0], details=str(error), trailing=trailing))
            raise ClosedError("no client of ours") from None
        self._send(peer, Kind.HANDSHAKE, session.reply.SerializeToString())
        kind, body = peer.connection.receive()
        if kind is not Kind.PROOF or not hmac.compare_digest(body, session.keys.data_proof()):
            if not self._refused(peer.name):
                peer.hold(HOLD_SECONDS)
            raise ClosedError("no client of ours")
        if not authenticator.claim(session, peer):
            raise ClosedError("another connection's proof, or its token is accepted no more")
        self._accept_peer(peer)
        return session

    def _accept_peer(self, peer: _Peer) -> None:
        peer.known, peer.connection.limit = True, self._message_bytes

    def _call(self, peer: _Peer) -> None:
        """Serve one call. Raises where no other may follow."""
        kind, body = peer.connection.receive()
        if kind is not Kind.CALL or len(body) > MAX_CALL_BYTES:
            raise ProtocolError(f"a call was to begin, and {kind.name} of {len(body)} bytes came")
        call = data_plane_pb2.DataCall.FromString(body)
        if len(call.metadata) > MAX_METADATA:
            raise ProtocolError(f"a call with {len(call.metadata):,} pairs of metadata, the limit is {MAX_METADATA}")
        context = DataContext(peer.connection, peer.name, call, peer.shown)
        with self._lock:
            if self._over:
                raise ClosedError("no more calls are taken here")
            peer.context, peer.busy = context, True
        requests = _Requests(peer.connection, context, self._admission)
        try:
            details: Any = _Details(call.path, context.invocation_metadata())
            handler = self._lookup(details)
            if handler is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            self._accept_peer(peer)
            for answer in _answers(handler, requests, context):
                self._send(peer, Kind.MESSAGE, answer)
            status = context.status(None)
        except CallBrokenError as error:
            raise ClosedError(f"the caller has gone: {error}") from None
        except HandlerAborted as error:  # which is not kept: it knows all that the handler had
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

    def _answer(self, peer: _Peer, status: data_plane_pb2.DataStatus) -> None:
        self._send(peer, Kind.STATUS, status.SerializeToString())

    @staticmethod
    def _send(peer: _Peer, kind: Kind, body: Parts) -> None:
        try:
            peer.connection.send((kind, (body,) if isinstance(body, bytes) else body))
        except OSError as error:
            raise CallBrokenError(f"the connection broke: {error}") from None


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Return a socket that listens there.

    Args:
        port: 0: any free one.
        share: it is bound by another process of this user, too, which keeps it but does not listen.

    Raises:
        OSError: that can't be.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()  # as gRPC does there
    return socket.create_server((host, port), family=family, backlog=128, reuse_port=share, dualstack_ipv6=both)


def _name_of(connected: socket.socket) -> str:
    """What a connection is called in logs, and where refusals are counted."""
    if connected.family == socket.AF_UNIX:
        return f"unix:data:{connected.fileno()}"
    host, port = connected.getpeername()[:2]
    return f"data:{host}:{port}"


def _status(code: grpc.StatusCode, details: str) -> data_plane_pb2.DataStatus:
    return data_plane_pb2.DataStatus(code=code.value[0], details=details)


class _Requests:
    """The messages of a call, until the client says that there are no more. Raises if it breaks off."""

    def __init__(self, connection: Connection, context: DataContext, admission: Admission | None = None) -> None:
        self._connection, self._context, self._admission = connection, context, admission
        self._waiting: Waiting | None = None
        self._ended = False
        self.broken = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._ended:
            raise StopIteration
        try:
            kind, body = self._connection.receive(self._context.place, self._announce)
        except (OSError, ProtocolError) as error:
            self.broken = True
            raise CallBrokenError(str(error)) from None
        finally:
            if self._waiting is not None and self._admission is not None:
                self._admission.leave(self._waiting)
                self._waiting = None
        if kind is Kind.END:
            self._ended, self._context.place = True, None
            raise StopIteration
        if kind is not Kind.MESSAGE:
            self.broken = True
            raise CallBrokenError(f"{kind.name} within a call")
        return body

    def _announce(self, size: int) -> None:
        """A message of so many bytes comes: small ones are not worth counting."""
        if size > _SMALL_BYTES and self._admission is not None and not self._context.has_room:
            self._waiting = self._admission.enter(self._context, size)

    def drop_rest(self) -> None:
        """What the client still sends is of a call that is over."""
        self._context.place = None
        for _ in self:
            pass


def _as_it_is(answer: Parts) -> Parts:
    return answer


def _answers(handler: Any, requests: Iterator[bytes], context: DataContext) -> Iterator[Parts]:
    """What the handler answers, whatever its arity."""
    parse, serialize = handler.request_deserializer, handler.response_serializer or _as_it_is
    given: Any = requests if parse is None else map(parse, requests)
    if not handler.request_streaming:
        given = next(given, None)
        if given is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
    word = {False: "unary", True: "stream"}
    behaviour = getattr(handler, f"{word[handler.request_streaming]}_{word[handler.response_streaming]}")
    answer = behaviour(given, context)
    if not handler.response_streaming:
        yield serialize(answer)
        return
    answers = iter(answer or ())
    try:
        yield from map(serialize, answers)
    finally:
        if (close := getattr(answers, "close", None)) is not None:
            close()
