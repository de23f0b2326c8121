"""The cluster token: a secret that every call must carry, where one is set.

Looked for in this order: the option, the file named by PSCLUSTER_TOKEN_FILE, the value of PSCLUSTER_TOKEN.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from pscluster.core.errors import KIND_METADATA, AuthenticationError, ConfigurationError, kind_of

TOKEN_VARIABLE = "PSCLUSTER_TOKEN"  # noqa: S105  (the variable's name, not a secret)
TOKEN_FILE_VARIABLE = "PSCLUSTER_TOKEN_FILE"  # noqa: S105
_HEADER = "authorization"
_MIN_LENGTH = 16


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


def load_token(token_file: Path | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The cluster token, or None where none is set. ConfigurationError if it is there but unusable."""
    if token_file is None and environ.get(TOKEN_FILE_VARIABLE):
        token_file = Path(environ[TOKEN_FILE_VARIABLE])
    if token_file is not None:
        try:
            token, source = token_file.read_text(encoding="ascii").strip(), str(token_file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigurationError(
                f"can't read the token file {token_file}: {reason}; make one with `pscluster token --file PATH`"
            ) from error
    elif TOKEN_VARIABLE in environ:
        token, source = environ[TOKEN_VARIABLE].strip(), TOKEN_VARIABLE
    else:
        return None
    if len(token) < _MIN_LENGTH or not token.isascii() or not token.isprintable():
        raise ConfigurationError(
            f"the cluster token in {source} has {len(token)} usable characters; it needs at least {_MIN_LENGTH} "
            "printable ASCII ones: `pscluster token` makes one"
        )
    return token


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What a client adds to every call."""
    return ((_HEADER, f"Bearer {token}"),) if token else ()


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses every call that does not carry the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        error = AuthenticationError(
            f"this cluster asks for a token: set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} to the one its roles were "
            "started with"
        )
        kind, status = kind_of(error)

        def refuse(_request: Any, context: grpc.ServicerContext) -> None:
            context.set_trailing_metadata(((KIND_METADATA, kind),))
            context.abort(status, str(error))

        self._refuse: dict[tuple[bool, bool], grpc.RpcMethodHandler[Any, Any]] = {
            (False, False): grpc.unary_unary_rpc_method_handler(refuse),
            (False, True): grpc.unary_stream_rpc_method_handler(refuse),
            (True, False): grpc.stream_unary_rpc_method_handler(refuse),
            (True, True): grpc.stream_stream_rpc_method_handler(refuse),
        }

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Let the call through, or answer it with UNAUTHENTICATED in its own arity."""
        given = b""
        for key, value in details.invocation_metadata or ():
            if key == _HEADER:
                given = value if isinstance(value, bytes) else value.encode()
        if hmac.compare_digest(given, self._expected):
            return continuation(details)
        handler = continuation(details)
        if handler is None:
            return None
        return self._refuse[handler.request_streaming, handler.response_streaming]
