"""Access over HTTP to a role's metrics and the coordinator's live page: who may read, where, under which certificate.

On loopback any local caller may read, but only by a name of this machine: otherwise another site, by DNS rebinding,
could read through a browser. Elsewhere the cluster token is required.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from pathlib import Path

from pscluster.core.cluster.addresses import is_loopback
from pscluster.core.errors import ConfigurationError
from pscluster.core.security.tls import TLS_VARIABLE
from pscluster.core.security.tokens import FileChanges, Token

logger = logging.getLogger(__name__)


class Visitors:
    """Who may read from a server that listens on this host with this token."""

    def __init__(self, host: str, token: str | None) -> None:
        self._local = is_loopback(host)
        self._token = None if self._local or token is None else token if isinstance(token, Token) else Token.of([token])

    @property
    def need_token(self) -> bool:
        """Return whether callers need the token; otherwise a known host name suffices."""
        return self._token is not None

    def is_known_host(self, host: str) -> bool:
        """Return whether a request's Host header names this machine; off loopback any name will do."""
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        return not self._local or is_loopback(name)

    def have_token(self, authorization: str) -> bool:
        """Return whether this header holds an accepted token."""
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given)

    def is_token(self, given: str) -> bool:
        """Return whether the token is accepted. Received bytes that are not UTF-8 are surrogates in the text."""
        return self._token is not None and self._token.accepts(given.encode(errors="surrogateescape"))


def check_exposure(
    content: str, where: str, host: str, token: str | None, *, encrypted: bool, insecure: bool, hint: str
) -> None:
    """Check that it is safe to listen on an address; log it if it is not, but `insecure`.

    `content` is what is served, such as "metrics", and `hint` the remedy, besides the token and certificates.
    Raise ConfigurationError if it is off loopback, without a token or in plain text, and not `insecure`.
    """
    if is_loopback(host) or (token and encrypted):
        return
    if insecure:
        how = "without a token: anyone who can reach it can read everything"
        if token:
            how = "in plain text: anyone on the path can read everything, and the token"
        logger.warning("serving %s on %s %s (--insecure was given)", content, where, how)
    elif token:
        raise ConfigurationError(
            f"refusing to serve {content} on {where} in plain text, where anyone on the path could read the cluster "
            f"token: give certificates with --tls DIR or {TLS_VARIABLE} (`pscluster certs DIR` makes them), {hint}, or "
            "use --insecure"
        )
    else:
        raise ConfigurationError(
            f"refusing to serve {content} on {where} without a cluster token, where anyone could read everything: set "
            f"PSCLUSTER_TOKEN_FILE (`pscluster token --file PATH` makes one), {hint}, or use --insecure"
        )


class CertificateFiles:
    """A certificate and its key for incoming connections, reloaded after a renewal. Thread-safe."""

    def __init__(
        self, server_name: str, certificate: str | os.PathLike[str], key: str | os.PathLike[str] | None
    ) -> None:
        """Read the files, of which one may hold both. Raise ConfigurationError if they can't be used."""
        self._server_name = server_name
        self._paths = Path(certificate), Path(certificate if key is None else key)
        self._lock = threading.Lock()
        self._changes = FileChanges(self._paths)
        try:
            self._context = self._load()
        except OSError as error:  # ssl's own, too
            names = " and ".join(map(str, dict.fromkeys(self._paths)))
            raise ConfigurationError(f"the certificate of {server_name} can't be used: {names}: {error}") from None

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._paths, password=str)  # a key with a password is an error, not a prompt
        return context

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Unusable renewed files are logged, and the current ones kept."""
        with self._lock:
            if self._changes.have_changed():
                try:
                    self._context = self._load()
                except OSError as error:
                    logger.error("keeping the current certificate of %s: %s", self._server_name, error)
                else:
                    logger.info("reloaded %s", self._paths[0])
            return self._context
