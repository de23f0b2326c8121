"""What is read over HTTP, a role's metrics and the coordinator's live page: who may ask, where, by what certificate.

On loopback may ask whoever can reach it, by a name of this machine: a page of another site, whose name was made to lead
here, is not to read it by way of a browser. Elsewhere whoever has the cluster token.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from pathlib import Path

from pscluster.core.cluster.spec import is_loopback
from pscluster.core.errors import ConfigurationError
from pscluster.core.security.tls import TLS_VARIABLE
from pscluster.core.security.tokens import LOOK_SECONDS, Token, stamp

logger = logging.getLogger(__name__)


class Visitors:
    """Who may ask, of what listens on this host with this token."""

    def __init__(self, host: str, token: str | None) -> None:
        self._local = is_loopback(host)
        self._token = None if self._local or token is None else token if isinstance(token, Token) else Token.of([token])

    @property
    def need_token(self) -> bool:
        """Else whoever comes by a known name may ask."""
        return self._token is not None

    def is_known_host(self, host: str) -> bool:
        """Is this, of a request's Host header, a name of this machine? Not asked off loopback, where names are free."""
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        return not self._local or is_loopback(name)

    def have_token(self, authorization: str) -> bool:
        """Does this header hold one that is accepted?"""
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given)

    def is_token(self, given: str) -> bool:
        """Is it one that is accepted? What came and is no UTF-8 is in the text as surrogates."""
        return self._token is not None and self._token.accepts(given.encode(errors="surrogateescape"))


def check_place(
    doing: str, where: str, host: str, token: str | None, *, encrypted: bool, insecure: bool, mend: str
) -> None:
    """Whether one may listen there; what is unsafe, and asked for all the same, is logged.

    Args:
        doing: what is about to be done there, such as "serve metrics".
        where: as it was given.
        host: of it.
        mend: what to do instead, but for the token and certificates.

    Raises:
        ConfigurationError: it is not loopback, without a token or in plain text, and not `insecure`.
    """
    if is_loopback(host) or (token and encrypted):
        return
    if insecure:
        how = "without a token: anyone who can reach it can read all"
        if token:
            how = "in plain text: anyone on the path can read all, and the token"
        logger.warning("told to %s on %s %s (--insecure)", doing, where, how)
    elif token:
        raise ConfigurationError(
            f"refusing to {doing} on {where} in plain text, where anyone on the path could read the cluster token: "
            f"give certificates with --tls DIR or {TLS_VARIABLE} (`pscluster certs DIR` makes them), {mend}, or say "
            "--insecure"
        )
    else:
        raise ConfigurationError(
            f"refusing to {doing} on {where} without a cluster token, where anyone could read all: set "
            f"PSCLUSTER_TOKEN_FILE (`pscluster token --file PATH` makes one), {mend}, or give --insecure"
        )


class CertificateFiles:
    """A certificate and its key, for connections that come; looked at again when they were renewed. Any thread."""

    def __init__(self, what: str, certificate: str | os.PathLike[str], key: str | os.PathLike[str] | None) -> None:
        """Reads them.

        Args:
            what: is encrypted with them, for messages.
            certificate: with the chain to its CA, if there is one.
            key: default: it is in the same file.

        Raises:
            ConfigurationError: they can't be used.
        """
        self._what = what
        self._paths = Path(certificate), Path(certificate if key is None else key)
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            self._context = self._load()
        except OSError as error:  # ssl's own, too
            names = " and ".join(map(str, dict.fromkeys(self._paths)))
            raise ConfigurationError(f"the certificate of {what} can't be used: {names}: {error}") from None

    def _stamps(self) -> list[object]:
        return list(map(stamp, self._paths))

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._paths, password=str)  # a key that asks for one is an error, not a question
        return context

    def context(self) -> ssl.SSLContext:
        """For a connection that has come. Renewed files that can't be used are logged, and those of before stay."""
        with self._lock:
            if time.monotonic() < self._next_look:
                return self._context
            self._next_look = time.monotonic() + LOOK_SECONDS
            if (stamps := self._stamps()) != self._seen:
                self._seen = stamps
                try:
                    self._context = self._load()
                except OSError as error:
                    logger.error("keeping the current certificate of %s: %s", self._what, error)
                else:
                    logger.info("reloaded %s", self._paths[0])
            return self._context
