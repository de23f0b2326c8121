"""The server's side of the handshake, for both transports. `handshake` decides; this holds the lock.

Calls over gRPC and data-plane connections are recorded under their tokens, so that they end when their token is removed
from the file. The file is checked once a second, whether calls arrive or not.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import KIND_METADATA, AuthenticationError, ProtocolError, PsClusterError, kind_of
from pscluster.core.limits import MAX_METADATA
from pscluster.core.role.open_health import PATH as HEALTH_PATH
from pscluster.core.role.open_health import OpenHealth
from pscluster.core.security.handshake import CallHeader, Secret, ServerSession, SessionTable
from pscluster.core.security.tokens import CHECK_SECONDS, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Token
from pscluster.core.transport.base import Cancellable, Metadata
from pscluster.core.transport.methods import Handler, Lookup, abort, guarded
from pscluster.v1 import authentication_pb2, node_pb2

logger = logging.getLogger(__name__)

HANDSHAKE_PATH = "/pscluster.v1.Authentication/Handshake"
HANDSHAKE_METADATA = "pscluster-handshake-bin"
CALL_METADATA = "authorization"
PROOF_METADATA = "pscluster-proof"
SESSION_METADATA = "pscluster-session"
UNKNOWN_SESSION = "unknown"
NOT_ACCEPTED = "this cluster does not accept this process's token"


class Refused(Protocol):
    """Called for every refused call; returns whether to answer it."""

    def __call__(self, peer: str, /, *, unknown_session: bool = False, is_large: bool = False) -> bool: ...


class Authenticator:
    """The sessions of one role, whose clients prove `token`, or another one that it accepts. Thread-safe."""

    def __init__(self, token: str, identity: node_pb2.Identity) -> None:
        self._token = token if isinstance(token, Token) else Token.of([token])
        self._lock = threading.Lock()
        self._table = SessionTable(identity.role, identity.index, identity.boot_id)
        self._open: dict[Cancellable, bytes] = {}  # with their tokens' ids
        self._secrets: dict[str, Secret] = {}
        self._over = threading.Event()
        self._derive()

    def start(self) -> None:
        """Begin to check the token file and idle sessions, until `stop`."""
        threading.Thread(target=self._watch, name="authenticator", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(CHECK_SECONDS):
            try:
                self.check()
            except Exception:
                logger.exception("can't check the sessions; trying again")

    def check(self) -> None:
        """Reload a changed token file, end sessions and calls of removed tokens, and forget idle sessions."""
        self._token.refresh()
        if self._token.accepted != frozenset(self._secrets):  # not if the file changed just now: others share the token
            self._derive()
        accepted = frozenset(secret.token_id for secret in self._secrets.values())
        with self._lock:
            self._table.drop_tokens(accepted)
            self._table.expire(time.monotonic())
            ended = [call for call, token_id in self._open.items() if token_id not in accepted]
            for call in ended:
                del self._open[call]
        for call in ended:
            call.cancel()
        if ended:
            logger.info("ended %d open calls and connections whose token is no longer accepted", len(ended))

    def _derive(self) -> None:
        self._secrets = {token: self._secrets.get(token) or Secret.of(token) for token in self._token.accepted}

    def open(self, request: authentication_pb2.HandshakeRequest) -> ServerSession:
        """Answer a handshake. AuthenticationError if the client does not know the token, ProtocolError if malformed."""
        secrets = list(self._secrets.values())
        try:
            with self._lock:
                return self._table.open(secrets, request, time.monotonic())
        except AuthenticationError:
            raise refusal(has_token=True) from None

    def admit(self, text: str, path: str) -> tuple[ServerSession | None, CallHeader | None]:
        """Return the session of a call with this header, None if the call must be refused, and the parsed header."""
        header = CallHeader.parse(text)
        if header is None:
            return None, None
        with self._lock:
            return self._table.admit(header, path, time.monotonic()), header

    def knows(self, header: CallHeader | None) -> bool:
        """Return whether the call's session is one of this role's."""
        with self._lock:
            return header is not None and self._table.knows(header.session)

    def claim(self, session: ServerSession, connection: Cancellable) -> bool:
        """Give a session to the data-plane connection whose client has proved itself.

        False if the session is already in use, or its token was removed: a recorded connection can't be replayed.
        """
        with self._lock:
            if session.used or not self._table.knows(session.name):
                return False
            self._table.use(session, time.monotonic())
            session.open_calls += 1
            self._open[connection] = session.token_id
            return True

    def enter(self, session: ServerSession, call: Cancellable) -> bool:
        """Record a call, to end it with the session's token. False if the token was removed already."""
        with self._lock:
            if not self._table.knows(session.name):
                return False
            session.open_calls += 1
            self._open[call] = session.token_id
            return True

    def leave(self, session: ServerSession, call: Cancellable) -> None:
        with self._lock:
            session.open_calls -= 1
            session.last_use = time.monotonic()
            self._open.pop(call, None)


def refusal(*, has_token: bool = False) -> AuthenticationError:
    """Return the error for a caller without the token, or with another one."""
    why = NOT_ACCEPTED if has_token else "this cluster requires a token"
    return AuthenticationError(
        f"{why}: set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} to the one its roles were started with"
    )


class AuthenticationInterceptor(grpc.ServerInterceptor):
    """Refuses every gRPC call without a proof, except handshakes, and health checks with --open-health.

    Whatever the method, a refused call takes a stream of requests, which is read only on demand: of an unauthenticated
    call only the head is read, and no thread waits for the rest.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        open_health: OpenHealth | None = None,
        refused: Refused = lambda _peer, **_how: True,
    ) -> None:
        self._authenticator = authenticator
        self._report_refused = refused
        self._open_health = open_health
        self._refused = _refusing(refused)
        unknown = ((SESSION_METADATA, UNKNOWN_SESSION),)
        self._unknown = _refusing(functools.partial(refused, unknown_session=True), unknown)
        self._large = _refusing(functools.partial(refused, is_large=True))
        self._handshake = _without_waiting(
            self._shake_hands, "handshakes", authentication_pb2.HandshakeReply.SerializeToString
        )

    def intercept_service(self, continuation: Lookup, details: grpc.HandlerCallDetails) -> Handler | None:
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

            def prove(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
                """Send the server's proof; the client sends its requests only then."""
                if not self._authenticator.enter(session, context):
                    abort(context, refusal(has_token=True))
                if not context.add_callback(lambda: self._authenticator.leave(session, context)):
                    self._authenticator.leave(session, context)
                context.send_initial_metadata(((PROOF_METADATA, proof),))
                return requests

            return guarded(handler or _MISSING, details.method, prove)
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
                error = ProtocolError(f"what is in {HANDSHAKE_METADATA} is not a handshake")
            if self._report_refused(context.peer()):
                _refuse(context, send, error)
            return
        send(reply)
        send(None)


class NoTokenInterceptor(grpc.ServerInterceptor):
    """Tells a caller with a token that this role has none: it may not be the intended one."""

    def __init__(self) -> None:
        why = (
            "the role there runs without a cluster token, and this process has one: start both with the same token, or "
            "use --insecure for both"
        )
        self._refused = _refusing(lambda _peer: True, error=AuthenticationError(why))

    def intercept_service(self, continuation: Lookup, details: grpc.HandlerCallDetails) -> Handler | None:
        return self._refused if details.method == HANDSHAKE_PATH else continuation(details)


Behaviour = Callable[[Any, grpc.ServicerContext, Callable[[Any], None]], None]
"""Given the requests, which it does not read, and a function that sends an answer, or the status if given None. A call
for which it sends neither goes on until its connection ends."""


def _without_waiting(behaviour: Behaviour, name: str, serialize: Any = None) -> Handler:
    """Return a handler for calls of any arity; one thread serves them all, since none of them waits."""
    call: Any = functools.partial(behaviour)
    call.experimental_non_blocking = True
    call.experimental_thread_pool = ThreadPoolExecutor(1, name)
    made: Handler = grpc.stream_stream_rpc_method_handler(call, response_serializer=serialize)
    return made


def _refuse(
    context: grpc.ServicerContext, send: Callable[[None], None], error: PsClusterError, more: Metadata = ()
) -> None:
    kind, status = kind_of(error)
    context.set_trailing_metadata(((KIND_METADATA, kind), *more))
    context.set_code(status)
    context.set_details(str(error))
    send(None)


def _refusing(report: Callable[[str], bool], more: Metadata = (), error: AuthenticationError | None = None) -> Handler:
    """Return a handler that refuses calls of any arity: a status alone answers each."""
    said = error or refusal()

    def refuse(_requests: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        if report(context.peer()):
            _refuse(context, send, said, more)

    return _without_waiting(refuse, "refusals")


def _unimplemented(_requests: Any, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


_MISSING: Handler = grpc.stream_stream_rpc_method_handler(_unimplemented)
