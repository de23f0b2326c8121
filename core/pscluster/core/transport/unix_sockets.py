"""Unix sockets, for processes of one machine and one user: no other user can open, take or replace one.

An address is `unix:/PATH`. A role that listens there has up to three files in the socket's folder:

    PATH          the gRPC server's socket
    PATH.data     the data plane's
    PATH.lock     its holder may create the two sockets, and remove those that a killed process left

Three things keep other users out; each is enough against a user who can't become this user or root:

    the folder  belongs to this user, has mode 0700 and is not a symbolic link; only this user and root can replace it.
                It is checked before a socket is made or dialled, and also guards gRPC's own reconnections.
    the mode    of the sockets is 0600.
    the uid     of the process at the other end of a data-plane connection, which the kernel reports to each side.
                Where it does not (SO_PEERCRED is Linux's), the first two must do.

    free   --lock--> locked: remove a dead process's sockets --bind--> listening
    any    --the process ends, in any way--> free; the next holder of the lock removes its sockets
    locked by another process that does not end within a moment --> SocketTakenError

The lock file is never removed: otherwise two processes could hold locks of the same name. Names of the abstract
namespace are refused: they have no owner and no mode.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.limits import MAX_BACKLOG

PREFIX = "unix:"
MAX_PATH_BYTES = 99
"""Maximum length of a socket's path: the kernel takes 107, `.data` adds five, and other systems take fewer."""

DATA_SUFFIX, LOCK_SUFFIX = ".data", ".lock"
LOCK_SECONDS = 2.0
"""Time to wait for a socket's lock: a killed process may need a moment to end."""

_LOCK_RETRY_SECONDS = 0.05
_PLAIN = re.compile(r"[A-Za-z0-9/._+,=@~-]+")  # in others gRPC would look for URL escapes and delimiters
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TIMEOUT = struct.Struct("ll")  # seconds and microseconds


def path_of(address: str) -> str | None:
    """Return the path of a Unix socket's address; None for an address of another kind."""
    return address.removeprefix(PREFIX) if address.startswith(PREFIX) else None


def address_of(path: str | os.PathLike[str]) -> str:
    return f"{PREFIX}{os.fspath(path)}"


def data_path(path: str) -> str:
    """Return the path of the data plane of the role that serves gRPC on this socket."""
    return path + DATA_SUFFIX


def why_no_path(path: str) -> str:
    """Return the rule that a socket's path breaks, for an error message; "" if none."""
    if not path.startswith("/"):
        return "the path of a Unix socket begins with / (there are no abstract names)"
    if not _PLAIN.fullmatch(path):
        return "the path of a Unix socket has letters, digits and / . _ + , = @ ~ - only"
    if path.startswith("//") or path == "/" or os.path.normpath(path) != path:
        return "the path of a Unix socket has no needless /, . or .."
    if path.endswith((DATA_SUFFIX, LOCK_SUFFIX)):
        return f"{DATA_SUFFIX} and {LOCK_SUFFIX} are for the files beside a socket"
    if (size := len(path)) > MAX_PATH_BYTES:
        return f"the path of a Unix socket has at most {MAX_PATH_BYTES} bytes, not {size}"
    return ""


# Folders


def why_unsafe(folder: str) -> str:
    """Return why another user could open or replace a socket in a folder, and the remedy; "" if none can.

    If there is no such folder, checks who could create it.
    """
    # The owner of / can replace everything; where root is not mapped (in a user namespace), that is not 0.
    owners = (0, os.geteuid(), os.lstat("/").st_uid)
    parents = {str(parent) for path in (folder, os.path.realpath(folder)) for parent in Path(path).parents}
    for parent in sorted(parents):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(parent)
            if status.st_uid not in owners:
                return f"{parent} belongs to another user (uid {status.st_uid}), who could replace its contents"
            if stat.S_ISLNK(status.st_mode):
                continue  # of this user or root; the parents of its target are checked, too
            if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
                return f"others may write to {parent}, and so replace its contents; chmod go-w {parent}"
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{folder} can't be inspected: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is {'a link' if stat.S_ISLNK(status.st_mode) else 'not a folder'}"
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user (uid {status.st_uid}, this is {os.geteuid()})"
    if status.st_mode & 0o077:
        return f"{folder} has the mode {stat.S_IMODE(status.st_mode):04o}, which lets others in; chmod 700 {folder}"
    return ""


def check_address(address: str) -> None:
    """Raise ConfigurationError if this is a Unix socket's address that other users could open or replace."""
    if (path := path_of(address)) is not None and (why := why_unsafe(os.path.dirname(path))):
        raise ConfigurationError(
            f"refusing to use {address}: {why}; a socket's folder must be its user's own, with the mode 0700"
        )


def candidate_folders() -> Iterator[str]:
    """Yield folders in which a folder for sockets may be created, best first.

    TMPDIR comes last: in a long one no path fits. A runtime directory comes second: it is removed when its user logs
    out, while a job may go on.
    """
    seen = set[str]()
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    for folder in ("/tmp", own, f"/run/user/{os.geteuid()}", "/var/tmp", "/dev/shm", tempfile.gettempdir()):  # noqa: S108  # nosec B108
        if folder.startswith("/") and folder not in seen and len(folder) < MAX_PATH_BYTES // 2:
            seen.add(folder)
            unused = f"{folder}/{secrets.token_hex(16)}"  # a name that others can't have taken
            if os.path.isdir(folder) and not why_unsafe(unused) and os.access(folder, os.W_OK | os.X_OK):
                yield folder


# Listening


class SocketTakenError(PsClusterError):
    """Another process, or another server of this one, has the socket."""


class SocketLock:
    """The right to listen at a path, held by one process at a time; another holder is given `seconds` to end.

    Raises SocketTakenError if it does not, and ConfigurationError if others could open or replace a socket there.
    """

    def __init__(self, path: str, seconds: float | None = None) -> None:
        address, self._path = address_of(path), path
        check_address(address)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path + LOCK_SUFFIX, flags, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"can't listen on {address}: {error.strerror} ({error.filename}); give a path in a folder of this user"
            ) from None
        try:
            check_address(address)  # again, now that the folder exists
            self._take(address, LOCK_SECONDS if seconds is None else seconds)
            for socket_path in (path, data_path(path)):
                self._remove(socket_path)
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self, address: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise SocketTakenError(
                        f"can't listen on {address}: another process has this socket; stop it, or give another path"
                    ) from None
                time.sleep(_LOCK_RETRY_SECONDS)
            except OSError as error:
                raise ConfigurationError(
                    f"can't listen on {address}: its folder is on a file system without locks ({error.strerror}); "
                    "give a path on another one"
                ) from None
            else:
                return

    @staticmethod
    def _remove(path: str) -> None:
        try:
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigurationError(f"can't listen on {path}: the file is not a socket; give another path")
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigurationError(f"can't listen on {path}: {error.strerror}; give another path") from None

    def close(self) -> None:
        """Remove the sockets, on which nothing listens any more, and let another process have the path."""
        for socket_path in (self._path, data_path(self._path)):
            with contextlib.suppress(OSError, ConfigurationError):
                self._remove(socket_path)
        os.close(self._lock)


def make_private(path: str) -> None:
    """Let only this user open a socket, just created in a folder that only this user can enter."""
    os.chmod(path, 0o600)


def listen(path: str) -> socket.socket:
    """Return a socket that listens at the path. Requires the lock. Raises OSError if it can't."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        make_private(path)
        listener.listen(MAX_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


# Connections


def connect(path: str, timeout: float) -> socket.socket:
    """Return a connection to a process of this user. Raise OSError if there is none within `timeout` seconds."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not `settimeout`: a socket that does not block fails at once where many connections wait to be accepted.
        whole = int(timeout)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT.pack(whole, int((timeout - whole) * 1e6)))
        connected.connect(path)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT.pack(0, 0))
        check_peer(connected)
    except OSError:
        connected.close()
        raise
    return connected


def peer_uid(connected: socket.socket) -> int | None:
    """Return the uid of the process at the other end; None where the kernel does not report it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    uid: int = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))[1]
    return uid


def check_peer(connected: socket.socket) -> None:
    """Raise PermissionError if the kernel reports that the process at the other end is another user's."""
    uid = peer_uid(connected)
    if uid not in (None, os.geteuid()):
        raise PermissionError(f"the process at the other end is another user's (uid {uid}, this is {os.geteuid()})")
