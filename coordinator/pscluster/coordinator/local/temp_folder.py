"""A local cluster's temporary folders, for what is of no use without the process that made them: state, and sockets.

Its owner holds a lock on it, and removes it at its end. Who dies without (SIGKILL, no memory left) leaves it behind,
with as much as all variables take: the next owner of such a folder in the same place removes it.

    owner    makes the folder, then takes its lock; if a sweep came first, it makes another one
    sweep    takes the lock of a folder, without waiting; then looks whether somebody still holds a lock in it (a
             server that saves last of all), and leaves it then; what it does not get to, the next one does

The lock is the directory's own: no file that a cleaner of old files could take away, and systemd's leaves a directory
with a lock alone. On file systems without locks nobody sweeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from pscluster.core.errors import ConfigurationError
from pscluster.core.transport.unix_sockets import places

_PREFIX, _SOCKETS_PREFIX, _SUFFIX = "pscluster-local-", "psc-", ".tmp"
_NAME = re.compile(rf"({_PREFIX}|{_SOCKETS_PREFIX})[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")  # as `mkdtemp` makes them
# The third is what becomes `tls` when it is whole; the last are sockets, and what stands beside them.
_CHILD = re.compile(r"state|tls|\.tls\.\w+|(chief|ps|worker)-\d+(\.data|\.lock)?")
_TRIES = 100  # a sweep comes first once in a blue moon


class OwnFolder:
    """A folder of this process, which only its user can enter; `remove` ends it.

    Attributes:
        path: the folder.
        state: where servers may keep their state, not made yet.
        tls: where certificates may be made.

    Raises:
        ConfigurationError: none can be made.
    """

    def __init__(self, place: str | None = None, prefix: str = _PREFIX) -> None:
        """Makes it, and sweeps.

        Args:
            place: what it lies in. Default: where temporary files are.
        """
        self._place, self._prefix = place, prefix
        with contextlib.suppress(OSError):  # what is wrong there is said below
            _sweep(Path(place or tempfile.gettempdir()))
        try:
            if not any(self._make() for _ in range(_TRIES)):
                raise OSError(f"{self.path} was removed by another process")
        except OSError as error:
            raise ConfigurationError(
                f"no temporary folder can be made for the cluster's files: {error}; fix that, or set TMPDIR to a "
                "directory where it is possible"
            ) from None
        self.state, self.tls = self.path / "state", self.path / "tls"

    def _make(self) -> bool:
        """False if a sweep came first."""
        self.path = Path(tempfile.mkdtemp(_SUFFIX, self._prefix, self._place))
        try:
            self._lock = _opened(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            self.path.rmdir()
            raise
        with contextlib.suppress(OSError):  # a file system without locks
            if not (_taken(self._lock) and os.fstat(self._lock).st_nlink):
                os.close(self._lock)
                return False
        return True

    def remove(self) -> None:
        """With all that is in it. What can't be removed now, the next owner of such a folder removes."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a script that closes descriptors that are not its own
            os.close(self._lock)


def folder_for_sockets() -> OwnFolder:
    """Make one whose paths are short. ConfigurationError if there is nowhere to make it."""
    failed = ["none of /tmp, XDG_RUNTIME_DIR, /var/tmp and /dev/shm can be used"]
    for place in places():
        try:
            return OwnFolder(place, _SOCKETS_PREFIX)
        except ConfigurationError as error:  # the disk is full there, for one
            failed.append(str(error).partition(";")[0])
    raise ConfigurationError(
        f"no folder can be made for the cluster's sockets, where no other user could replace it: {'; '.join(failed)}; "
        'fix that, or give transport="tcp"'
    )


def _opened(path: Path, kind: int = os.O_DIRECTORY) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | kind)


def _taken(lock: int) -> bool:
    """False if another process has it. OSError if it can't be told."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(place: Path) -> None:
    """Remove what owners have left behind."""
    for folder in place.iterdir():
        # Another one may sweep, too; what is no folder, or not to be opened, is not ours.
        with contextlib.suppress(OSError), contextlib.ExitStack() as locks:
            if _NAME.fullmatch(folder.name) and _is_left(folder, locks):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path, locks: contextlib.ExitStack) -> bool:
    """Is it ours, and does nobody use it any more? Then nobody can before the locks are given back."""

    def take(path: Path, kind: int) -> bool:
        lock = _opened(path, kind)
        locks.callback(os.close, lock)
        return _taken(lock)

    return (
        folder.stat(follow_symlinks=False).st_uid == os.getuid()
        and take(folder, os.O_DIRECTORY)
        and all(_CHILD.fullmatch(child.name) for child in folder.iterdir())
        # The servers' locks are looked for now that there is no owner who could start one.
        and all(take(path, 0) for path in folder.rglob("*lock") if path.name == "lock" or path.suffix == ".lock")
    )
