"""The cluster token: a secret that every caller must know, where one is set. It is proved, and never sent.

Looked for in this order: the option, the file named by PSCLUSTER_TOKEN_FILE, the value of PSCLUSTER_TOKEN. Where there
is none, and all is on loopback, that of the user: a file that the first role makes, and that no other user can read.

A file may hold several, one a line: a role proves the first and accepts all, and looks at the file again while it runs.
So a token is changed without a stop of the job: the new one is added to every role's file, then put first and the roles
started again one by one, then the old one is removed.
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


def strength(token: str) -> float:
    """Return how many bits a token of this form has at most, were its characters drawn at random.

    Of what repeats only the first counts, and of few different characters no more than they are. It tells a random
    token from a lazy one, not a random one from one that somebody made up.
    """
    unit = token[: (token + token).find(token, 1)] if token else ""
    kinds = set(unit)
    if kinds <= set(string.hexdigits[:16]):
        alphabet = 16
    else:
        classes = (string.ascii_lowercase, string.ascii_uppercase, string.digits, string.punctuation + " ")
        alphabet = sum(len(each) for each in classes if kinds & set(each))
    if len(kinds) < _MIN_DISTINCT:
        alphabet = len(kinds)
    return len(unit) * math.log2(max(alphabet, 1))


class Token(str):
    """The token to prove, and those to accept."""

    __slots__ = ("_file", "_known", "_next_look", "_stamp")

    _known: frozenset[str]
    _file: Path | None
    _stamp: object
    _next_look: float

    @staticmethod
    def of(tokens: Sequence[str], file: Path | None = None) -> Token:
        """The first is proved. The file they are from is looked at again."""
        token = Token(tokens[0])
        token._known = frozenset(tokens)
        token._file, token._stamp = file, None if file is None else stamp(file)
        token._next_look = time.monotonic() + LOOK_SECONDS
        return token

    def accepts(self, given: bytes) -> bool:
        """Is this one of them? Compared in a time that does not tell how much of it is right."""
        self.look_again()
        return sum(hmac.compare_digest(given, known.encode()) for known in self._known) > 0  # all, whichever fits

    @property
    def accepted(self) -> frozenset[str]:
        """Those that are accepted, as they were found last."""
        return self._known

    def look_again(self) -> bool:
        """Take up a changed file, at most once in `LOOK_SECONDS`; has what is accepted changed?"""
        if self._file is None or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK_SECONDS
        now = stamp(self._file)
        if now == self._stamp:
            return False
        self._stamp, before = now, self._known
        try:
            self._known = load_token(self._file)._known  # type: ignore[union-attr]  # a file that is named has one
        except ConfigurationError as error:
            logger.error("keeping the current tokens: %s", error)
        else:
            logger.info("reloaded %s: it holds %d tokens", self._file, len(self._known))
        return self._known != before


def stamp(file: Path) -> object:
    """Differs when the file was written anew; None if it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


_hidden: list[str] = []  # the value of PSCLUSTER_TOKEN, once this process has taken it out of its environment


def hide_token() -> None:
    """Take PSCLUSTER_TOKEN out of this process' environment, for a role, whose user functions run in it.

    They and the processes that they start do not inherit the token by accident; `load_token` goes on to find it. On
    Linux what `/proc/PID/environ` shows is overwritten, too.
    """
    value = os.environ.get(TOKEN_VARIABLE)
    if value is None:
        return
    _hidden[:] = [value]
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError, OSError):
            library = ctypes.CDLL(None)
            library.getenv.restype = ctypes.c_void_p
            if (place := library.getenv(os.fsencode(TOKEN_VARIABLE))) is not None:
                ctypes.memset(place, 0, len(ctypes.string_at(place)))
    del os.environ[TOKEN_VARIABLE]


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
    elif environ is os.environ and _hidden:
        tokens, source = _hidden, TOKEN_VARIABLE
    else:
        return None
    found = [token.strip() for token in tokens]
    found = [token for token in found if token] or [""]
    for token in found:
        if not token.isascii() or not token.isprintable():
            raise ConfigurationError(
                f"the cluster token in {source} is no printable ASCII text: `pscluster token` makes one"
            )
        if (bits := strength(token)) < MIN_BITS:
            raise ConfigurationError(
                f"the cluster token in {source} can be guessed: its {len(token)} characters are worth {bits:.0f} bits "
                f"at most, and it needs {MIN_BITS}; `pscluster token` makes one"
            )
    if token_file is not None:
        _warn_of_readers(token_file)
    return Token.of(found, token_file)


def _warn_of_readers(file: Path) -> None:
    """Say once a process that others could read the token."""
    try:
        found = file.stat()
    except OSError:
        return
    if found.st_mode & (modes.S_IRWXG | modes.S_IRWXO) and file not in _warned:
        _warned.add(file)
        logger.warning(
            "other users can read the token file %s (mode %04o): `chmod 600` it, and change the token if they may have",
            file,
            modes.S_IMODE(found.st_mode),
        )


_warned: set[Path] = set()


def user_token_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the user's own token is; None where the user has no home."""
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]) / "pscluster" / "token"
    try:
        return Path.home() / ".config" / "pscluster" / "token"
    except RuntimeError:
        return None


def user_token(environ: Mapping[str, str] = os.environ, *, create: bool) -> Token | None:
    """The user's own token, for roles on loopback that were given none.

    Args:
        create: make it if there is none.

    Returns:
        None where there is none; also, if it was to be made, where it can't be, which is logged.

    Raises:
        ConfigurationError: it is there, and unusable; or others could have read or changed it.
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
        found = file.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid() or found.st_mode & (modes.S_IRWXG | modes.S_IRWXO):
        raise ConfigurationError(
            f"other users can read or change the token file {file} (mode {modes.S_IMODE(found.st_mode):04o}, owner "
            f"{found.st_uid}): remove it, and the next role makes another"
        )
    return load_token(file, {})
