"""The cluster token: a secret that every call must carry, where one is set.

Looked for in this order: the option, the file named by PSCLUSTER_TOKEN_FILE, the value of PSCLUSTER_TOKEN.

A file may hold several, one a line: a role sends the first and accepts all, and looks at the file again while it runs.
So a token is changed without a stop of the job: the new one is added to every role's file, then put first and the roles
started again one by one, then the old one is removed.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from pscluster.core.errors import KIND_METADATA, AuthenticationError, ConfigurationError, kind_of
from pscluster.core.open_health import PATH, OpenHealth

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "PSCLUSTER_TOKEN"  # noqa: S105  (the variable's name, not a secret)  # nosec B105
TOKEN_FILE_VARIABLE = "PSCLUSTER_TOKEN_FILE"  # noqa: S105  # nosec B105
_HEADER = "authorization"
_SCHEME = b"Bearer "
_MIN_LENGTH = 16

LOOK_SECONDS = 1.0
"""So often, at most, a token file is looked at again."""


def new_token() -> str:
    """A fresh token of 256 random bits."""
    return secrets.token_urlsafe(32)


def create_token_file(path: Path) -> None:
    """Write a fresh token to `path`, readable by its owner only, unless there is one; the first writer wins."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token() + "\n")
        try:
            os.link(draft, path)  # fails where the file exists by now, and never shows half a token
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"can't create the token file {path}: {error.strerror}; name a path in a folder you may write to"
        ) from error


class Token(str):
    """The token to send, and those to accept."""

    __slots__ = ("_file", "_known", "_next_look", "_stamp")

    _known: frozenset[bytes]
    _file: Path | None
    _stamp: object
    _next_look: float

    @staticmethod
    def of(tokens: Sequence[str], file: Path | None = None) -> Token:
        """The first is sent. The file they are from is looked at again."""
        token = Token(tokens[0])
        token._known = frozenset(each.encode() for each in tokens)
        token._file, token._stamp = file, None if file is None else stamp(file)
        token._next_look = time.monotonic() + LOOK_SECONDS
        return token

    def accepts(self, given: bytes) -> bool:
        """Is this one of them? Compared in a time that does not tell how much of it is right."""
        self._look_again()
        return sum(hmac.compare_digest(given, known) for known in self._known) > 0  # all of them, whichever fits

    def _look_again(self) -> None:
        if self._file is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        now = stamp(self._file)
        if now == self._stamp:
            return
        self._stamp = now
        try:
            self._known = load_token(self._file)._known  # type: ignore[union-attr]  # a file that is named has one
        except ConfigurationError as error:
            logger.error("the tokens of before stay: %s", error)
        else:
            logger.info("%s was read again: it holds %d tokens", self._file, len(self._known))


def stamp(file: Path) -> object:
    """Differs when the file was written anew; None if it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def load_token(token_file: Path | None, environ: Mapping[str, str] = os.environ) -> Token | None:
    """The cluster token, or None where none is set. ConfigurationError if it is there but unusable."""
    if token_file is None and environ.get(TOKEN_FILE_VARIABLE):
        token_file = Path(environ[TOKEN_FILE_VARIABLE])
    if token_file is not None:
        try:
            tokens, source = token_file.read_text(encoding="ascii").split("\n"), str(token_file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigurationError(
                f"can't read the token file {token_file}: {reason}; make one with `pscluster token --file PATH`"
            ) from error
    elif TOKEN_VARIABLE in environ:
        tokens, source = [environ[TOKEN_VARIABLE]], TOKEN_VARIABLE
    else:
        return None
    found = [token.strip() for token in tokens]
    found = [token for token in found if token] or [""]
    for token in found:
        if len(token) < _MIN_LENGTH or not token.isascii() or not token.isprintable():
            raise ConfigurationError(
                f"the cluster token in {source} has {len(token)} usable characters; it needs at least {_MIN_LENGTH} "
                "printable ASCII ones: `pscluster token` makes one"
            )
    return Token.of(found, token_file)


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What a client adds to every call."""
    return ((_HEADER, f"Bearer {token}"),) if token else ()


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses every call that does not carry a token that is accepted, but for health checks where they are open."""

    def __init__(self, token: str, open_health: OpenHealth | None = None) -> None:
        self._token = token if isinstance(token, Token) else Token.of([token])
        self._open_health = open_health
        error = AuthenticationError(
            f"this cluster asks for a token: set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} to the one its roles were "
            "started with"
        )
        kind, status = kind_of(error)

        def refuse(_request: Any, context: grpc.ServicerContext) -> None:
            context.set_trailing_metadata(((KIND_METADATA, kind),))
            context.abort(status, str(error))

        # Whatever the method: of a stream of requests nothing is read before it is asked for, and so of a stranger's
        # call nothing but its head, and no thread waits for the rest. A status alone is an answer of every arity.
        self.refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Let the call through, or answer it with UNAUTHENTICATED."""
        given = b""
        for key, value in details.invocation_metadata or ():
            if key == _HEADER:
                given = value if isinstance(value, bytes) else value.encode()
        if given.startswith(_SCHEME) and self._token.accepts(given.removeprefix(_SCHEME)):
            return continuation(details)
        handler = continuation(details)
        if handler is not None and self._open_health is not None and details.method == PATH:
            return self._open_health.handler(handler)
        return None if handler is None else self.refusal
