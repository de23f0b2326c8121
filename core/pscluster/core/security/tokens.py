"""The cluster token: a secret that every caller must know, if one is set. It is proved, and never sent.

It comes from, in this order: the option, the file named by PSCLUSTER_TOKEN_FILE, the value of PSCLUSTER_TOKEN. If none
is set, and everything is on loopback, the user's own is used: a file that the first role creates, and that no other
user can read.

A file may hold several tokens, one per line: a role proves the first and accepts all, and reloads the file while it
runs. So a token can be changed without stopping the job: add the new one to every role's file, then put it first and
restart the roles one by one, then remove the old one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import math
import os
import secrets
import stat as modes
import string
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pscluster.core.errors import ConfigurationError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "PSCLUSTER_TOKEN"  # noqa: S105  (the variable's name, not a secret)  # nosec B105
TOKEN_FILE_VARIABLE = "PSCLUSTER_TOKEN_FILE"  # noqa: S105  # nosec B105
MIN_BITS = 128
_MIN_DISTINCT = 8

CHECK_SECONDS = 1.0
"""Minimum time between checks of a token file."""


def new_token() -> str:
    """Return a new token of 256 random bits."""
    return secrets.token_urlsafe(32)


def create_token_file(path: Path) -> None:
    """Write a new token to `path`, readable by its owner only, unless there is one; the first writer wins."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token() + "\n")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # fails if the file exists by now, and never exposes half a token
        finally:
            draft.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"can't create the token file {path}: {error.strerror}; name a path in a folder you may write to"
        ) from error


def strength(token: str) -> float:
    """Return an upper bound of a token's entropy in bits, as if its characters were drawn at random.

    A repeated unit counts once, even if the last repetition is cut short, and an alphabet of few distinct characters
    for no more than these. This distinguishes random tokens from lazy ones, not from invented ones.
    """
    periods = (size for size in range(1, len(token) // 2 + 1) if token[size:] == token[:-size])
    unit = token[: next(periods, len(token))]
    kinds = set(unit)
    if kinds <= set(string.hexdigits[:16]):
        alphabet = 16
    else:
        classes = (string.ascii_lowercase, string.ascii_uppercase, string.digits, string.punctuation + " ")
        alphabet = sum(len(characters) for characters in classes if kinds & set(characters))
        if kinds & set(classes[0]) and kinds & set(classes[1]):
            alphabet = max(alphabet, 64)  # base 64: one token in forty of 128 bits has no digit
    if len(kinds) < _MIN_DISTINCT:
        alphabet = len(kinds)
    return len(unit) * math.log2(max(alphabet, 1))


class Token(str):
    """The token to prove, and all accepted ones."""

    __slots__ = ("_changes", "accepted", "file")

    accepted: frozenset[str]  # as last loaded
    file: Path | None
    _changes: FileChanges

    @staticmethod
    def of(tokens: Sequence[str], file: Path | None = None) -> Token:
        """Make a token of several: the first is proved, all are accepted; their file is reloaded when it changes."""
        token = Token(tokens[0])
        token.accepted = frozenset(tokens)
        token.file, token._changes = file, FileChanges([] if file is None else [file])
        return token

    def accepts(self, given: bytes) -> bool:
        """Return whether this is an accepted token, in a time that does not reveal how much of it is right."""
        self.refresh()
        return sum(hmac.compare_digest(given, known.encode()) for known in self.accepted) > 0  # compares with all

    def refresh(self) -> bool:
        """Reload a changed file, at most once in `CHECK_SECONDS`. Return whether the accepted tokens have changed."""
        if self.file is None or not self._changes.have_changed():
            return False
        before = self.accepted
        try:
            self.accepted = load_token(self.file).accepted  # type: ignore[union-attr]  # never None for a named file
        except ConfigurationError as error:
            logger.error("keeping the current tokens: %s", error)
        else:
            count = len(self.accepted)
            logger.info("reloaded %s: it holds %d %s", self.file, count, "token" if count == 1 else "tokens")
        return self.accepted != before


class FileChanges:
    """Notices that files were rewritten, checking at most once in `CHECK_SECONDS`. Guarded by its owner's lock."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self._stamps = list(map(_stamp, files))
        self._next_check = time.monotonic() + CHECK_SECONDS

    def have_changed(self) -> bool:
        """Return whether a file was rewritten since the last check."""
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + CHECK_SECONDS
        before, self._stamps = self._stamps, list(map(_stamp, self.files))
        return self._stamps != before


def _stamp(file: Path) -> object:
    """Return a value that differs once the file is rewritten; None if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


_hidden: list[str] = []  # the value of PSCLUSTER_TOKEN, once removed from this process's environment


def hide_token() -> None:
    """Remove PSCLUSTER_TOKEN from the environment of a role's process, in which user functions run.

    So they and the processes that they start do not inherit the token by accident; `load_token` still finds it. On
    Linux the copy in `/proc/PID/environ` is overwritten, too.
    """
    value = os.environ.get(TOKEN_VARIABLE)
    if value is None:
        return
    _hidden[:] = [value]
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError, OSError):
            library = ctypes.CDLL(None)
            library.getenv.restype = ctypes.c_void_p
            if (address := library.getenv(os.fsencode(TOKEN_VARIABLE))) is not None:
                ctypes.memset(address, 0, len(ctypes.string_at(address)))
    del os.environ[TOKEN_VARIABLE]


def load_token(token_file: Path | None, environ: Mapping[str, str] = os.environ) -> Token | None:
    """Return the cluster token, or None if none is set. Raise ConfigurationError if it is unusable."""
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
    elif environ is os.environ and _hidden:
        tokens, source = _hidden, TOKEN_VARIABLE
    else:
        return None
    given = [token.strip() for token in tokens if token.strip()]
    if not given:
        name = source if token_file is None else f"the token file {source}"
        raise ConfigurationError(f"{name} is empty: put a token there; `pscluster token` makes one")
    for token in given:
        if not token.isascii() or not token.isprintable():
            raise ConfigurationError(
                f"the cluster token in {source} is not printable ASCII text: `pscluster token` makes one"
            )
        if (bits := strength(token)) < MIN_BITS:
            raise ConfigurationError(
                f"the cluster token in {source} can be guessed: its {len(token)} characters are worth {bits:.0f} bits "
                f"at most, and it needs {MIN_BITS}; `pscluster token` makes one"
            )
    if token_file is not None:
        _warn_of_readers(token_file)
    return Token.of(given, token_file)


def _warn_of_readers(file: Path) -> None:
    """Warn, once per process, if others could read the token."""
    try:
        status = file.stat()
    except OSError:
        return
    mode, excess = status.st_mode, modes.S_IRWXG | modes.S_IRWXO
    if status.st_uid == 0 != os.geteuid() and status.st_gid in {os.getegid(), *os.getgroups()}:
        excess &= ~modes.S_IRGRP  # root has given it to our group to read, as Kubernetes does with a Secret
    if mode & excess and file not in _warned:
        _warned.add(file)
        logger.warning(
            "other users can read the token file %s (mode %04o): `chmod 600` it, and change the token if they may have "
            "read it",
            file,
            modes.S_IMODE(mode),
        )


_warned: set[Path] = set()


def user_token_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the user's own token; None if the user has no home."""
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]) / "pscluster" / "token"
    try:
        return Path.home() / ".config" / "pscluster" / "token"
    except RuntimeError:
        return None


def user_token(environ: Mapping[str, str] = os.environ, *, create: bool) -> Token | None:
    """Return the user's own token, for roles on loopback that were given none, after creating it if asked to.

    None if there is none; also if it can't be created, which is logged. Raise ConfigurationError if it is unusable, or
    other users could have read or changed it.
    """
    file = user_token_file(environ)
    if file is None:
        return None
    if create and not file.exists():
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_token_file(file)
        except (OSError, ConfigurationError) as error:
            logger.warning("running without a token, as this user's can't be stored: %s", error)
            return None
        logger.info("made a token for the roles of this user: %s", file)
    try:
        status = file.stat()
    except OSError:
        return None
    if status.st_uid != os.geteuid() or status.st_mode & (modes.S_IRWXG | modes.S_IRWXO):
        raise ConfigurationError(
            f"other users can read or change the token file {file} (mode {modes.S_IMODE(status.st_mode):04o}, owner "
            f"{status.st_uid}): remove it, and the next role makes another"
        )
    return load_token(file, {})
