"""TLS: the certificate, the key and the CA of a process, from the files of a folder.

    tls.crt, tls.key    the certificate, with the chain to its CA if there is one, and its key
    ca.crt              the CAs of the processes that are dialled, and of callers
    revoked.txt         optional: certificates and keys of callers that are refused all the same; see revocation

Kubernetes uses these names, and `pscluster certs` makes such a folder for each role. If there is a `ca.crt`, callers
must show a certificate, too (mutual TLS), which names their role: `access` says what each may call.

Renewed files are loaded while the process runs, at the next connection that a server accepts or a client makes. Open
connections stay. Unusable files are logged as an error, and the current ones kept.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pscluster.core.cluster.addresses import is_on_this_machine, split_address
from pscluster.core.errors import ConfigurationError
from pscluster.core.security.revocation import REVOKED, parse_revoked
from pscluster.core.security.tokens import FileChanges, user_token
from pscluster.core.transport.unix_sockets import check_address, path_of

logger = logging.getLogger(__name__)

TLS_VARIABLE = "PSCLUSTER_TLS"
SERVER_ONLY_VARIABLE = "PSCLUSTER_TLS_SERVER_ONLY"
INSECURE_VARIABLE = "PSCLUSTER_INSECURE"
CERTIFICATE, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
_PROBE_SECONDS = 2.0
_HINT = "`pscluster certs DIR` makes certificates"
_UNTRUSTED = frozenset({2, 18, 19, 20, 21})  # OpenSSL's error numbers for a certificate whose CA is unknown
_NOT_YET, _EXPIRED = 9, 10
_CLOSED = "it closed the connection"
_OTHER_NAME = frozenset({62, 64})


@dataclass(frozen=True, slots=True)
class _Files:
    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None
    ends: datetime.datetime | None  # of the certificate
    revoked: frozenset[str]


class Tls:
    """A process's certificate, and the CAs that it trusts. Thread-safe."""

    def __init__(self, folder: Path, *, server_only: bool = False) -> None:
        """Read and check the files: ConfigurationError if unusable. With `server_only`, callers need no certificate."""
        self.folder = folder
        self.version = 0  # rises when the files were reloaded
        self._server_only = server_only
        self._lock = threading.Lock()
        self._changes = FileChanges([folder / name for name in (CERTIFICATE, KEY, AUTHORITIES, REVOKED)])
        self._files = _read(folder)
        self._contexts: dict[bool, tuple[_Files, ssl.SSLContext]] = {}

    @property
    def is_mutual(self) -> bool:
        return self._files.authorities is not None and not self._server_only

    @property
    def revoked(self) -> frozenset[str]:
        return self._files.revoked

    def refresh(self) -> int:
        """Load renewed files. Return the version of the current ones."""
        with self._lock:
            if not self._changes.have_changed():
                return self.version
            try:
                files = _read(self.folder)
                if self.is_mutual and files.authorities is None:
                    raise ConfigurationError(f"{self.folder} no longer holds {AUTHORITIES}; put it back")
                if self._files.certificate is not None and files.certificate is None:
                    raise ConfigurationError(f"{self.folder} no longer holds {CERTIFICATE}; put it back")
            except ConfigurationError as error:
                logger.error("keeping the current certificates: %s", error)
            else:
                self._files = files
                self.version += 1
                until = (
                    "" if files.ends is None else f": its certificate is valid until {files.ends:%Y-%m-%d %H:%M} UTC"
                )
                logger.info("reloaded %s%s", self.folder, until)
            return self.version

    def channel_credentials(self) -> grpc.ChannelCredentials:
        self.refresh()
        files = self._files
        return grpc.ssl_channel_credentials(files.authorities, files.key, files.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a server. Raise ConfigurationError if there is no certificate to show."""
        if self._files.certificate is None:
            raise ConfigurationError(
                f"{self.folder} holds no {CERTIFICATE} and {KEY}, and this role needs them to serve; {_HINT}"
            )
        last = self.version

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal last
            if (now := self.refresh()) == last:
                return None
            last = now
            return self._configuration()

        fetcher: Any = renewed  # it may return None for no change, which the stubs do not know
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetcher, require_client_authentication=self.is_mutual
        )

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the context for a new data-plane connection, a new one for renewed files.

        TLS 1.3 only, and without session tickets: every client shows its certificate. Raises OSError if OpenSSL rejects
        files that gRPC accepts, such as a key that is too short.
        """
        self.refresh()
        with self._lock:
            files, known = self._files, self._contexts.get(server)
            if known is None or known[0] is not files:
                known = self._contexts[server] = files, _context(files, server=server, asks=server and self.is_mutual)
            return known[1]

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        assert files.key is not None
        assert files.certificate is not None
        return grpc.ssl_server_certificate_configuration(
            [(files.key, files.certificate)], files.authorities if self.is_mutual else None
        )

    def why_not(self, address: str, name: str = "") -> str | None:
        """Return why the two sides do not trust each other, and the remedy; None if they do, or no server answers.

        gRPC does not report it: one side only sees a closed connection. So this dials again, and sees the TLS error.
        """
        self.refresh()
        # A server that is stopping closes connections, too: only one that does so twice has refused us.
        if (why := self._why_not(address, name)) == _CLOSED:
            why = self._why_not(address, name)
        return self._why_refused() if why == _CLOSED else why

    def _why_not(self, address: str, name: str) -> str | None:
        files, host, shaken = self._files, name or split_address(address)[0], False
        try:
            authorities = None if files.authorities is None else files.authorities.decode("ascii", "ignore")
            context = ssl.create_default_context(cadata=authorities)
            if files.certificate is not None and files.key is not None:
                # From the folder itself, so that no key is copied. The password str() makes an encrypted key an error.
                context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, password=str)
            context.set_alpn_protocols(["h2"])
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as gRPC sees it
            with _connected(address) as plain, context.wrap_socket(plain, server_hostname=host) as connection:
                shaken = True  # in TLS 1.3 the other side checks our certificate only now
                return None if connection.recv(1) else _CLOSED
        except ssl.SSLCertVerificationError as error:
            return self._why_untrusted(error, host)
        except ssl.SSLError as error:
            if error.reason == "WRONG_VERSION_NUMBER":
                return f"it speaks no TLS, but this process was told to: start it with --tls or {TLS_VARIABLE}, too"
            return _CLOSED if "ALERT" in (error.reason or "") else None
        except (ConnectionResetError, BrokenPipeError):
            return _CLOSED if shaken else None
        except OSError:
            return None

    def _why_untrusted(self, error: ssl.SSLCertVerificationError, host: str) -> str:
        if error.verify_code == _EXPIRED:
            return (
                "its certificate (or its CA's) has expired; `pscluster certs DIR --renew` makes new ones for the same "
                "CA"
            )
        if error.verify_code == _NOT_YET:
            return "its certificate (or its CA's) is not valid yet: compare the clocks of both machines"
        if error.verify_code in _OTHER_NAME:
            return (
                f"its certificate does not name {host}; `pscluster certs DIR --renew --host {host}` makes one that does"
            )
        if error.verify_code in _UNTRUSTED:
            known = self.folder / AUTHORITIES if self._files.authorities is not None else "the system's CAs"
            return f"its certificate is of none of the CAs in {known}: give both sides certificates of the same CA"
        return f"its certificate was refused: {error.verify_message}"

    def _why_refused(self) -> str:
        if self._files.certificate is None or self._files.ends is None:
            return f"it asks for a certificate, but {self.folder} holds no {CERTIFICATE} and {KEY}; {_HINT}"
        if self._files.ends < datetime.datetime.now(datetime.UTC):
            return (
                f"it refused our certificate {self.folder / CERTIFICATE}, which expired at "
                f"{self._files.ends:%Y-%m-%d %H:%M} UTC; `pscluster certs DIR --renew` makes new ones for the same CA"
            )
        return (
            f"it refused our certificate {self.folder / CERTIFICATE}: is its CA in the {AUTHORITIES} there? Give both "
            "sides certificates of the same CA; if they have them, compare the clocks of both machines"
        )


def why_not_plain(address: str) -> str | None:
    """Return why a process without certificates can't connect, if the server at that address speaks TLS."""
    if path_of(address) is not None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent, and nothing trusted
    context.set_alpn_protocols(["h2"])
    try:
        with _connected(address) as plain, context.wrap_socket(plain):
            pass
    except OSError:
        return None
    return f"it speaks TLS, but this process was given no certificates: use --tls DIR, or set {TLS_VARIABLE}"


def load_tls(
    role: str, folder: Path | None = None, *, server_only: bool = False, environ: Mapping[str, str] = os.environ
) -> Tls | None:
    """Return the TLS files of this process, None if none are configured. Raise ConfigurationError if they are unusable.

    If the folder has a subfolder named as the role instead of a certificate, that is used, so that all roles of a
    machine can be given the same folder.
    """
    if folder is None and environ.get(TLS_VARIABLE):
        folder = Path(environ[TLS_VARIABLE])
    server_only = server_only or is_set(SERVER_ONLY_VARIABLE, environ)
    if folder is None:
        if server_only:
            raise ConfigurationError(
                f"{SERVER_ONLY_VARIABLE} or --tls-server-only is set, but there are no certificates: use --tls DIR, or "
                f"set {TLS_VARIABLE}; {_HINT}"
            )
        return None
    if not (folder / CERTIFICATE).exists() and (folder / role).is_dir():
        folder = folder / role
    return Tls(folder, server_only=server_only)


def is_set(variable: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this variable is 1. Raise ConfigurationError unless it is 1, 0 or empty."""
    value = environ.get(variable, "0")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{variable} is {value!r}, but it is 1 or 0; set it to 1 or leave it out")
    return value == "1"


def token_for(
    token: str | None, addresses: Iterable[str], tls: Tls | None, *, insecure: bool, create: bool
) -> str | None:
    """Return the token for these addresses: if none was given and all are on this machine, the user's own.

    But none with mutual TLS, whose certificates say who may call, or with --insecure. See `user_token`.
    """
    if token is not None or insecure or (tls is not None and tls.is_mutual):
        return token
    if not all(map(is_on_this_machine, addresses)):
        return None
    return user_token(create=create)


def check_plain(peer: object, address: str, token: str | None, tls: Tls | None, *, insecure: bool) -> None:
    """Raise ConfigurationError if calls, under a token, could be read and changed on the way.

    Also if a Unix socket is unsafe, or if there are certificates for it.
    """
    check_no_tls(address, tls)
    check_address(address)
    if token and tls is None and not insecure and not is_on_this_machine(address):
        raise ConfigurationError(
            f"refusing to talk to {peer} in plain text, where anyone on the path could read and change everything: "
            f"give certificates with --tls DIR or {TLS_VARIABLE} ({_HINT}), or use --insecure or {INSECURE_VARIABLE}=1"
        )


def check_no_tls(address: str, tls: Tls | None) -> None:
    """Raise ConfigurationError if there are certificates for a Unix socket, where they have no use."""
    if tls is not None and path_of(address) is not None:
        raise ConfigurationError(
            f"certificates are for TCP, but {address} is a Unix socket, which its folder guards: leave out --tls and "
            f"{TLS_VARIABLE}, or give the task an address HOST:PORT"
        )


def _context(files: _Files, *, server: bool, asks: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: every certificate in ca.crt is trusted
    if server:
        context.num_tickets = 0
    if files.certificate is not None and files.key is not None:
        with _in_memory(files.certificate + b"\n" + files.key) as path:
            context.load_cert_chain(path, password=str)
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
    if asks or not server:
        if files.authorities is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cadata=files.authorities.decode("ascii", "ignore"))
    return context


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield a path from which OpenSSL reads exactly the bytes that were checked, without a copy of the key on disk."""
    with open(os.memfd_create("tls"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _connected(address: str) -> socket.socket:
    return socket.create_connection(split_address(address), timeout=_PROBE_SECONDS)


def _read(folder: Path) -> _Files:
    """Read and check the folder: gRPC takes anything, and fails every connection afterwards."""
    from cryptography import x509  # only with TLS: the import takes longer than a health check
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    certificate, key, authorities = (_bytes(folder / name) for name in (CERTIFICATE, KEY, AUTHORITIES))
    if (certificate is None) != (key is None):
        there, missing = (KEY, CERTIFICATE) if certificate is None else (CERTIFICATE, KEY)
        raise ConfigurationError(f"{folder} holds {there}, but no {missing}; {_HINT}")
    if certificate is None and authorities is None:
        why = "holds none of " + ", ".join((CERTIFICATE, KEY, AUTHORITIES)) if folder.is_dir() else "is not a folder"
        raise ConfigurationError(f"the TLS folder {folder} {why}; {_HINT}")
    ends = None
    try:
        where = folder / AUTHORITIES
        if authorities is not None:
            x509.load_pem_x509_certificates(authorities)
        where = folder / CERTIFICATE
        if certificate is not None and key is not None:
            leaf = x509.load_pem_x509_certificates(certificate)[0]
            where = folder / KEY
            private = serialization.load_pem_private_key(key, None)
            if private.public_key() != leaf.public_key():
                raise ConfigurationError(f"{folder / KEY} is not the key of {folder / CERTIFICATE}; {_HINT}")
            ends = leaf.not_valid_after_utc
            if ends < datetime.datetime.now(datetime.UTC):
                raise ConfigurationError(
                    f"the certificate {folder / CERTIFICATE} expired at {ends:%Y-%m-%d %H:%M} UTC; "
                    "`pscluster certs DIR --renew` makes new ones for the same CA"
                )
    except ConfigurationError:
        raise
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key has a password
        raise ConfigurationError(f"{where} can't be used: {error}; {_HINT}") from None
    listed = _bytes(folder / REVOKED)
    revoked = parse_revoked((listed or b"").decode("ascii", "replace"), str(folder / REVOKED))
    return _Files(certificate, key, authorities, ends, revoked)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}; {_HINT}") from error
