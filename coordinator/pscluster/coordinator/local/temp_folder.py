"""A local cluster's temporary folders, for files that are useless without the process that made them: state, sockets.

The owner holds a lock on the folder, and removes it at the end. An owner that is killed (SIGKILL, no memory left)
leaves it behind, as large as all variables: the next owner of such a folder in the same parent folder removes it.

    owner    makes the folder, then takes its lock; if a sweep was faster, it makes another one
    sweep    takes the lock of a folder, without waiting; then checks whether a process still holds a lock in it (a
             server that makes its last save), and if so leaves it to the next sweep

The lock is on the directory itself: there is no lock file that a cleaner of old files could remove, and systemd's
cleaner spares a locked directory. On file systems without locks there are no sweeps.
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
from pscluster.core.transport.unix_sockets import candidate_folders

_PREFIX, _SOCKETS_PREFIX, _SUFFIX = "pscluster-local-", "psc-", ".tmp"
_NAME = re.compile(rf"({_PREFIX}|{_SOCKETS_PREFIX})[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")  # as `mkdtemp` makes them
# `.tls.*` is renamed to `tls` when it is complete; the last pattern matches sockets and the files beside them.
_CHILD = re.compile(r"state|tls|\.tls\.\w+|(chief|ps|worker)-\d+(\.data|\.lock)?")
_TRIES = 100  # a sweep is very rarely faster


class OwnFolder:
    """A folder of this process that only its user can enter, until `remove`."""

    def __init__(self, parent: str | None = None, prefix: str = _PREFIX) -> None:
        """Sweep, and make the folder, by default in the one for temporary files. ConfigurationError if that fails."""
        self._parent, self._prefix = parent, prefix
        with contextlib.suppress(OSError):  # the same problem is reported below
            _sweep(Path(parent or tempfile.gettempdir()))
        try:
            if not any(self._make() for _ in range(_TRIES)):
                raise OSError(f"{self.path} was removed by another process")
        except OSError as error:
            raise ConfigurationError(
                f"cannot make a temporary folder for the cluster's files: {error}; fix that, or set TMPDIR to a "
                "directory where it is possible"
            ) from None
        self.state, self.tls = self.path / "state", self.path / "tls"  # not created yet

    def _make(self) -> bool:
        """Make the folder and lock it. Return False if a sweep was faster."""
        self.path = Path(tempfile.mkdtemp(_SUFFIX, self._prefix, self._parent))
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
        """Remove the folder and its contents. The next owner of such a folder removes what can't be removed now."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # the script has closed descriptors that are not its own
            os.close(self._lock)


def folder_for_sockets() -> OwnFolder:
    """Make a folder whose paths are short. ConfigurationError if that is impossible."""
    errors = ["none of /tmp, XDG_RUNTIME_DIR, /var/tmp and /dev/shm can be used"]
    for parent in candidate_folders():
        try:
            return OwnFolder(parent, _SOCKETS_PREFIX)
        except ConfigurationError as error:  # a full disk, for example
            errors.append(str(error).partition(";")[0])
    raise ConfigurationError(
        f"cannot make a folder for the cluster's sockets that no other user could replace: {'; '.join(errors)}; "
        'fix that, or give transport="tcp"'
    )


def _opened(path: Path, kind: int = os.O_DIRECTORY) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | kind)


def _taken(lock: int) -> bool:
    """Take a lock. Return False if another process has it. OSError if that can't be determined."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(parent: Path) -> None:
    for folder in parent.iterdir():
        # Another process may be sweeping too; a file, or a folder that can't be opened, is not ours.
        with contextlib.suppress(OSError), contextlib.ExitStack() as locks:
            if _NAME.fullmatch(folder.name) and _is_abandoned(folder, locks):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path, locks: contextlib.ExitStack) -> bool:
    """Return whether it is ours and unused; if so, no process can use it before the locks are released."""

    def take(path: Path, kind: int) -> bool:
        lock = _opened(path, kind)
        locks.callback(os.close, lock)
        return _taken(lock)

    return (
        folder.stat(follow_symlinks=False).st_uid == os.getuid()
        and take(folder, os.O_DIRECTORY)
        and all(_CHILD.fullmatch(child.name) for child in folder.iterdir())
        # The servers' locks are checked last: with the folder locked, no owner can start another server.
        and all(take(path, 0) for path in folder.rglob("*lock") if path.name == "lock" or path.suffix == ".lock")
    )
