"""The server's side of the handshake: who may call, on either transport. `handshake` decides, this holds the lock.

What is open under a token (a call over gRPC, a connection of the data plane) is kept here, so that it ends when the
token is taken out of the file. The file is looked at once a second, whether calls come or not.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import KIND_METADATA, AuthenticationError, ProtocolError, PsClusterError, kind_of
from pscluster.core.limits import MAX_METADATA
from pscluster.core.role.open_health import PATH as HEALTH_PATH
from pscluster.core.role.open_health import OpenHealth
from pscluster.core.security.access import of_the_first
from pscluster.core.security.handshake import CallHeader, Secret, ServerSession, SessionTable
from pscluster.core.security.tokens import LOOK_SECONDS, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Token
from pscluster.core.transport.methods import abort
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.v1 import authentication_pb2, node_pb2

logger = logging.getLogger(__name__)

HANDSHAKE_PATH = "/pscluster.v1.Authentication/Handshake"
HANDSHAKE_METADATA = "pscluster-handshake-bin"
CALL_METADATA = "authorization"
PROOF_METADATA = "pscluster-proof"
SESSION_METADATA = "pscluster-session"
UNKNOWN_SESSION = "unknown"

REQUEST_SECONDS = 30.0
"""How long a call may take to bring its one request."""


class Refused(Protocol):
    """Is told of every call that was refused; is it to be answered?"""

    def __call__(self, peer: str, /, *, unknown_session: bool = False, is_large: bool = False) -> bool: ...


class Endable(Protocol):
    """An open call, or a connection."""

    def cancel(self) -> Any:
        """End it; any thread may."""
        ...


class Authenticator:
    """Knows the sessions of one role. Thread-safe.

    Args:
        token: with all that are accepted.
        identity: of the role.
    """

    def __init__(self, token: str, identity: node_pb2.Identity) -> None:
        self._token = token if isinstance(token, Token) else Token.of([token])
        self._lock = threading.Lock()
        self._table = SessionTable(identity.role, identity.index, identity.incarnation)
        self._open: dict[Endable, bytes] = {}  # and under which token
        self._secrets: dict[str, Secret] = {}
        self._over = threading.Event()
        self._derive()

    def start(self) -> None:
        """Look at the token file and at idle sessions now and then, until `stop`."""
        threading.Thread(target=self._watch, name="authenticator", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:
                logger.exception("can't check the sessions; trying again")

    def look(self) -> None:
        """Take up a changed token file: sessions and calls of tokens that are gone end. Forget idle sessions."""
        self._token.look_again()
        if self._token.accepted != frozenset(self._secrets):  # whoever has looked first: others share the token
            self._derive()
        accepted = frozenset(secret.token_id for secret in self._secrets.values())
        with self._lock:
            self._table.drop_tokens(accepted)
            self._table.expire(time.monotonic())
            ended = [each for each, token_id in self._open.items() if token_id not in accepted]
            for each in ended:
                del self._open[each]
        for each in ended:
            each.cancel()
        if ended:
            logger.info("ended %d open calls and connections whose token is no longer accepted", len(ended))

    def _derive(self) -> None:
        self._secrets = {token: self._secrets.get(token) or Secret.of(token) for token in self._token.accepted}

    def open(self, request: authentication_pb2.HandshakeRequest) -> ServerSession:
        """Answer a handshake. AuthenticationError if the client does not know the token, ProtocolError if it is bad."""
        secrets = list(self._secrets.values())
        try:
            with self._lock:
                return self._table.open(secrets, request, time.monotonic())
        except AuthenticationError:
            raise refusal() from None

    def admit(self, text: str, path: str) -> tuple[ServerSession | None, CallHeader | None]:
        """The session of a call with this header; None if it is not to be served. And what the header says."""
        header = CallHeader.parse(text)
        if header is None:
            return None, None
        with self._lock:
            return self._table.admit(header, path, time.monotonic()), header

    def knows(self, header: CallHeader | None) -> bool:
        """Is the call's session one of this role's?"""
        with self._lock:
            return header is not None and self._table.knows(header.session)

    def claim(self, session: ServerSession, connection: Endable) -> bool:
        """Give a session to the connection of the data plane whose client has proved itself.

        False if it is somebody's already, or its token is gone: what was recorded of a connection opens no other.
        """
        with self._lock:
            if session.used or not self._table.knows(session.name):
                return False
            self._table.use(session, time.monotonic())
            session.open_calls += 1
            self._open[connection] = session.token_id
            return True

    def enter(self, session: ServerSession, call: Endable) -> bool:
        """Have this ended with the session's token; False if that is gone already."""
        with self._lock:
            if not self._table.knows(session.name):
                return False
            session.open_calls += 1
            self._open[call] = session.token_id
            return True

    def leave(self, session: ServerSession, call: Endable) -> None:
        """It has ended."""
        with self._lock:
            session.open_calls -= 1
            session.last_use = time.monotonic()
            self._open.pop(call, None)


def refusal() -> AuthenticationError:
    """What a caller without the token is told."""
    return AuthenticationError(
        f"this cluster asks for a token: set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} to the one its roles were "
        "started with"
    )


class AuthenticationInterceptor(grpc.ServerInterceptor):
    """Refuses every call over gRPC that carries no proof, but for handshakes, and health checks where they are open.

    Whatever the method, a refused call is one for a stream of requests, of which nothing is read before it is asked
    for: of an unauthenticated call nothing but its head is read, and no thread waits for the rest.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        open_health: OpenHealth | None = None,
        refused: Refused = lambda _peer, **_how: True,
    ) -> None:
        self._authenticator = authenticator
        self._tell_refused = refused
        self._open_health = open_health
        self._watchdog = StallWatchdog(REQUEST_SECONDS)
        self._refused = _refusing((), refused)
        self._unknown = _refusing(
            ((SESSION_METADATA, UNKNOWN_SESSION),), functools.partial(refused, unknown_session=True)
        )
        self._large = _refusing((), functools.partial(refused, is_large=True))
        self._handshake = _without_waiting(
            self._shake_hands, "handshakes", authentication_pb2.HandshakeReply.SerializeToString
        )

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Let the call through, or answer it with UNAUTHENTICATED."""
        is_large = len(details.invocation_metadata or ()) > MAX_METADATA
        if details.method == HANDSHAKE_PATH:
            return self._large if is_large else self._handshake
        text = ""
        for key, value in details.invocation_metadata or ():
            if key == CALL_METADATA:
                text = value if isinstance(value, str) else value.decode("ascii", "replace")
        session, header = self._authenticator.admit(text, details.method)
        handler = continuation(details)
        if session is not None and header is not None:
            proof = session.keys.answer_proof(details.method, header.counter)
            return _proving(handler or _MISSING, details.method, proof, session, self._authenticator, self._watchdog)
        if is_large:
            return self._large
        if header is not None and not self._authenticator.knows(header):
            return self._unknown
        if self._open_health is not None and handler is not None and details.method == HEALTH_PATH:
            return self._open_health.handler(handler)
        return self._refused

    def _shake_hands(self, _requests: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        given = next((value for key, value in context.invocation_metadata() or () if key == HANDSHAKE_METADATA), b"")
        try:
            request = authentication_pb2.HandshakeRequest.FromString(given if isinstance(given, bytes) else b"")
            reply = self._authenticator.open(request).reply
        except (AuthenticationError, ProtocolError, DecodeError) as error:
            if isinstance(error, DecodeError):
                error = ProtocolError(f"what is in {HANDSHAKE_METADATA} is no handshake")
            if self._tell_refused(context.peer()):
                _refuse(context, send, error)
            return
        send(reply)
        send(None)


class NoTokenInterceptor(grpc.ServerInterceptor):
    """Tells a caller with a token that this role has none: it may not be the one that is looked for."""

    def __init__(self) -> None:
        self._refused = _refusing(
            (),
            lambda _peer: True,
            AuthenticationError(
                "the role there runs without a cluster token, and this process has one: start both with the same "
                "token, or give both --insecure"
            ),
        )

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Refuse a handshake, and let all else through."""
        return self._refused if details.method == HANDSHAKE_PATH else continuation(details)


Behaviour = Callable[[Any, grpc.ServicerContext, Callable[[Any], None]], None]
"""Is given the requests, which it does not read, and what sends an answer, or with None the status. A call for which it
sends neither goes on until its connection ends."""


def _without_waiting(behaviour: Behaviour, name: str, serialize: Any = None) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for a call of any arity, whose calls one thread serves, since none of them waits."""

    def call(requests: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        behaviour(requests, context, send)

    call.experimental_non_blocking = True  # type: ignore[attr-defined]
    call.experimental_thread_pool = ThreadPoolExecutor(1, name)  # type: ignore[attr-defined]
    made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        cast("Any", call), response_serializer=serialize
    )
    return made


def _refuse(
    context: grpc.ServicerContext,
    send: Callable[[None], None],
    error: PsClusterError,
    more: tuple[tuple[str, str], ...] = (),
) -> None:
    kind, status = kind_of(error)
    context.set_trailing_metadata(((KIND_METADATA, kind), *more))
    context.set_code(status)
    context.set_details(str(error))
    send(None)


def _refusing(
    more: tuple[tuple[str, str], ...], tell: Callable[[str], bool], error: AuthenticationError | None = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """A status alone is an answer of every arity."""
    said = error or refusal()

    def refuse(_requests: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        if tell(context.peer()):
            _refuse(context, send, said, more)

    return _without_waiting(refuse, "refusals")


def _unimplemented(_requests: Any, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


_MISSING: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_unimplemented)


def _proving(
    handler: Any,
    path: str,
    proof: str,
    session: ServerSession,
    authenticator: Authenticator,
    watchdog: StallWatchdog,
) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler, which proves that the server knows the token before it reads the request.

    The client sends that only then: so whatever the method, it is one for a stream of requests.
    """
    word = {False: "unary", True: "stream"}
    behaviour = getattr(handler, f"{word[handler.request_streaming]}_{word[handler.response_streaming]}")
    if not handler.request_streaming:
        behaviour = of_the_first(behaviour, path, watchdog)

    def begin(context: grpc.ServicerContext) -> None:
        if not authenticator.enter(session, context):
            abort(context, refusal())
        if not context.add_callback(lambda: authenticator.leave(session, context)):
            authenticator.leave(session, context)
        context.send_initial_metadata(((PROOF_METADATA, proof),))

    def unary(requests: Any, context: grpc.ServicerContext) -> Any:
        begin(context)
        return behaviour(requests, context)

    def stream(requests: Any, context: grpc.ServicerContext, *rest: Any) -> Any:
        begin(context)
        return behaviour(requests, context, *rest)

    call = stream if handler.response_streaming else unary
    if getattr(behaviour, "experimental_non_blocking", False):  # the Watch of gRPC's health service
        stream.experimental_non_blocking = True  # type: ignore[attr-defined]
    make = getattr(grpc, f"stream_{word[handler.response_streaming]}_rpc_method_handler")
    made: grpc.RpcMethodHandler[Any, Any] = make(call, handler.request_deserializer, handler.response_serializer)
    return made
