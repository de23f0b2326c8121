"""Who may call what, where callers show a certificate (mutual TLS): one table for all services.

A certificate names its role in a URI among its names, `pscluster://role/worker`. The coordinator's opens all methods;
the others' open what stands here, and a method that does not stand here is the coordinator's only. The token, if there
is one, is asked for besides: by itself it does not tell roles apart.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from pscluster.core.errors import AuthenticationError, NotPermittedError, ProtocolError
from pscluster.core.security.revocation import why_refused
from pscluster.core.security.tls import Tls
from pscluster.core.security.tokens import LOOK_SECONDS
from pscluster.core.transport.methods import abort
from pscluster.core.transport.watchdog import StallWatchdog

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
ROLES = ("ps", "worker", COORDINATOR, "tool")
"""A tool looks and changes nothing: `pscluster status`, `pscluster health`."""

ROLE_URI = "pscluster://role/"

REQUEST_SECONDS = 30.0
"""So long a call may take to bring its one request."""

_ALL = frozenset(ROLES)
_WORKER = frozenset({"worker"})

CALLERS: dict[str, frozenset[str]] = {
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/pscluster.v1.Node/Hello": _ALL,
    "/pscluster.v1.Node/Status": _ALL,
    # Reads and updates; what a request creates is the coordinator's, see `check_coordinator`.
    "/pscluster.v1.ParameterServer/Session": _WORKER,
    "/pscluster.v1.ParameterServer/Pull": _WORKER,
    "/pscluster.v1.ParameterServer/Push": _WORKER,
    "/pscluster.v1.ParameterServer/Describe": _WORKER,
}


def may_call(role: str, path: str) -> bool:
    """Does a certificate of this role open the method?"""
    return role == COORDINATOR or role in CALLERS.get(path, frozenset())


def roles_of(context: grpc.ServicerContext) -> list[str] | None:
    """What the caller's certificate says that it is; None if callers need none."""
    shown: Any = context.auth_context()  # bytes, whatever the stubs say
    if "x509_pem_cert" not in shown:
        return None
    uris = (uri.decode(errors="replace") for uri in shown.get("peer_uri", ()))
    return [uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)]


def check_coordinator(context: grpc.ServicerContext, what: str) -> None:
    """NotPermittedError if the caller has shown a certificate that is not a coordinator's."""
    roles = roles_of(context)
    if roles is not None and COORDINATOR not in roles:
        raise _refusal(roles, what)


def _refusal(roles: list[str], what: str) -> NotPermittedError:
    if not any(role in ROLES for role in roles):
        return NotPermittedError(
            f"the caller's certificate names no role: give it the URI {ROLE_URI}ROLE, where ROLE is one of "
            f"{', '.join(ROLES)}; `pscluster certs DIR` makes such certificates"
        )
    return NotPermittedError(
        f"the caller's certificate is a {roles[0]}'s, which does not open {what}: call with one of a role that may"
    )


class RoleInterceptor(grpc.ServerInterceptor):
    """Refuses every call that the caller's certificate does not open. For servers that ask for one.

    With `tls`, certificates that were revoked open nothing, and calls that are open end once theirs is.
    """

    def __init__(self, watchdog: StallWatchdog | None = None, tls: Tls | None = None) -> None:
        self._watchdog = watchdog or StallWatchdog(REQUEST_SECONDS)
        self._tls = tls
        self._lock = threading.Lock()
        self._open: dict[grpc.ServicerContext, bytes] = {}  # and the caller's certificate
        self._over = threading.Event()

    def start(self) -> None:
        """Look at what was revoked now and then, until `stop`."""
        threading.Thread(target=self._watch, name="revocation", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        seen = frozenset[str]()
        while not self._over.wait(LOOK_SECONDS):
            assert self._tls is not None
            self._tls.look_again()
            if self._tls.revoked == seen:
                continue
            seen = self._tls.revoked
            with self._lock:
                ended = [each for each, pem in self._open.items() if why_refused(pem, seen, resumed=False)]
            for each in ended:
                each.cancel()
            if ended:
                logger.info("ended %d open calls whose certificates were revoked", len(ended))

    def _begin(self, context: grpc.ServicerContext) -> None:
        """AuthenticationError if the caller's certificate is refused."""
        if self._tls is None:
            return
        self._tls.look_again()
        shown: Any = context.auth_context()  # bytes, whatever the stubs say
        (pem,) = shown["x509_pem_cert"]
        with self._lock:
            self._open[context] = pem
        if not context.add_callback(lambda: self._end(context)):
            self._end(context)
        resumed = shown.get("ssl_session_reused") == [b"true"]
        if (why := why_refused(pem, self._tls.revoked, resumed=resumed)) is not None:
            raise AuthenticationError(why)

    def _end(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._open.pop(context, None)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler, which looks at the certificate first: there is none to see before it is called.

        Whatever the method, it is one for a stream of requests, of which nothing is read before it is asked for: of a
        call that is refused nothing but its head is, and no thread waits for the rest.
        """
        handler: Any = continuation(details)
        if handler is None:
            return None
        shape = {False: "unary", True: "stream"}
        behaviour = getattr(handler, f"{shape[handler.request_streaming]}_{shape[handler.response_streaming]}")
        if not handler.request_streaming:
            behaviour = of_the_first(behaviour, details.method, self._watchdog)
        make = getattr(grpc, f"stream_{shape[handler.response_streaming]}_rpc_method_handler")
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            self._guarded(behaviour, details.method),
            handler.request_deserializer,
            handler.response_serializer,
        )
        return guarded

    def _guarded(self, behaviour: Callable[..., Any], path: str) -> Callable[..., Any]:
        @functools.wraps(behaviour)  # also keeps what grpc's health check notes on its method
        def call(requests: Iterator[Any], context: grpc.ServicerContext, *rest: Any) -> Any:
            try:
                self._begin(context)
            except AuthenticationError as error:
                abort(context, error)
            roles = roles_of(context) or []
            if not any(may_call(role, path) for role in roles):
                abort(context, _refusal(roles, path))
            return behaviour(requests, context, *rest)

        return call


def of_the_first(behaviour: Callable[..., Any], path: str, watchdog: StallWatchdog) -> Callable[..., Any]:
    """The behaviour of a method that takes one request, for a stream of them."""

    @functools.wraps(behaviour)
    def call(requests: Iterator[Any], context: grpc.ServicerContext, *rest: Any) -> Any:
        with watchdog.with_call(context):
            request = next(requests, None)
        if request is None:
            abort(context, ProtocolError(f"a call to {path} without a request"))
        return behaviour(request, context, *rest)

    return call
