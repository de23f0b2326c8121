"""Who may call what, where callers show a certificate (mutual TLS): one table for all services.

A certificate names its role in a URI, such as `pscluster://role/worker`, among its alternative names. The coordinator
may call every method; the other roles may call those listed here. The token, if there is one, is required as well: by
itself it does not distinguish roles.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from pscluster.core.errors import AuthenticationError, NotPermittedError
from pscluster.core.security.revocation import why_refused
from pscluster.core.security.tls import Tls
from pscluster.core.security.tokens import CHECK_SECONDS
from pscluster.core.transport.methods import Handler, Lookup, abort, guarded

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
ROLES = ("ps", "worker", COORDINATOR, "tool")
"""A tool only reads: `pscluster status`, `pscluster health`."""

ROLE_URI = "pscluster://role/"


def role_host(role: str) -> str:
    """Return the name that the certificates of a role hold beside their hosts: of processes without a host name."""
    return f"{role}.pscluster"


_ALL = frozenset(ROLES)
_WORKER = frozenset({"worker"})

CALLERS: dict[str, frozenset[str]] = {
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/pscluster.v1.Node/Hello": _ALL,
    "/pscluster.v1.Node/Status": _ALL,
    # Reads and updates; only the coordinator may create variables or put metadata, see `check_coordinator`.
    "/pscluster.v1.ParameterServer/Session": _WORKER,
    "/pscluster.v1.ParameterServer/Pull": _WORKER,
    "/pscluster.v1.ParameterServer/Push": _WORKER,
    "/pscluster.v1.ParameterServer/Describe": _WORKER,
    # To join the cluster, as the role of the certificate, see `check_role`: the coordinator then dials it.
    "/pscluster.v1.Coordinator/Register": frozenset({"worker", "ps"}),
    # Collectives; a worker opens only those of gangs that it is in, which it proves by their secret.
    "/pscluster.v1.Worker/Exchange": _WORKER,
}


def may_call(role: str, path: str) -> bool:
    """Return whether a certificate of this role opens the method."""
    return role == COORDINATOR or role in CALLERS.get(path, frozenset())


def roles_of(context: grpc.ServicerContext) -> list[str] | None:
    """Return the roles in the caller's certificate; None if callers need none."""
    shown: Any = context.auth_context()  # bytes, whatever the stubs say
    if "x509_pem_cert" not in shown:
        return None
    uris = (uri.decode(errors="replace") for uri in shown.get("peer_uri", ()))
    return [uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)]


def check_coordinator(context: grpc.ServicerContext, action: str) -> None:
    """Raise NotPermittedError if the caller has shown a certificate that is not a coordinator's."""
    check_role(context, COORDINATOR, action)


def check_role(context: grpc.ServicerContext, role: str, action: str) -> None:
    """Raise NotPermittedError if the caller has shown a certificate that is not of this role."""
    roles = roles_of(context)
    if roles is not None and role not in roles:
        raise _refusal(roles, action)


def _refusal(roles: list[str], action: str) -> NotPermittedError:
    if not any(role in ROLES for role in roles):
        return NotPermittedError(
            f"the caller's certificate names no role: give it the URI {ROLE_URI}ROLE, where ROLE is one of "
            f"{', '.join(ROLES)}; `pscluster certs DIR` makes such certificates"
        )
    return NotPermittedError(
        f"a {roles[0]}'s certificate does not allow {action}: use the certificate of a role that it allows"
    )


class RoleInterceptor(grpc.ServerInterceptor):
    """Refuses every call that the caller's certificate does not open. For servers that require certificates.

    With `tls`, revoked certificates open nothing, and open calls end when theirs is revoked.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._open: dict[grpc.ServicerContext, bytes] = {}  # with the caller's certificate
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to check for revoked certificates, until `stop`."""
        threading.Thread(target=self._watch, name="revocation", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        seen = frozenset[str]()
        while not self._over.wait(CHECK_SECONDS):
            assert self._tls is not None
            self._tls.refresh()
            if self._tls.revoked == seen:
                continue
            seen = self._tls.revoked
            with self._lock:
                ended = [call for call, pem in self._open.items() if why_refused(pem, seen, resumed=False)]
            for call in ended:
                call.cancel()
            if ended:
                logger.info("ended %d open calls whose certificates were revoked", len(ended))

    def _begin(self, context: grpc.ServicerContext) -> None:
        """Record an open call. Raise AuthenticationError if its certificate is refused."""
        if self._tls is None:
            return
        self._tls.refresh()
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

    def intercept_service(self, continuation: Lookup, details: grpc.HandlerCallDetails) -> Handler | None:
        handler = continuation(details)
        if handler is None:
            return None

        # The certificate is known only in the call.
        def check(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                self._begin(context)
            except AuthenticationError as error:
                abort(context, error)
            roles = roles_of(context) or []
            if not any(may_call(role, details.method) for role in roles):
                abort(context, _refusal(roles, details.method))
            return requests

        return guarded(handler, details.method, check)
