"""A temporary folder for what is of no use without the process that made it.

Its owner holds a lock on a file in it, and removes it at its end. Who dies without (SIGKILL, no memory left) leaves it
behind, with as much as all variables take: the next owner of such a folder in the same place removes it.

    owner    makes the folder, then the file, then takes its lock; if a sweep came first, it makes another folder
    sweep    takes the lock of a folder, without waiting; leaves it where somebody still holds a lock in it (a server
             that saves last of all); removes the file last, so that a sweep that dies is made up for by the next

What has no such file is left alone: it is not ours, or is being made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from pscluster.core.errors import ConfigurationError

_PREFIX = "pscluster-local-"
_OWNER = "owner.lock"


class OwnFolder:
    """A folder of this process; `remove` ends it.

    Raises:
        ConfigurationError: none can be made.
    """

    def __init__(self) -> None:
        try:
            _sweep(Path(tempfile.gettempdir()))
            while (lock := self._made()) is None:
                pass
        except OSError as error:
            raise ConfigurationError(
                f"no temporary folder can be made for the cluster's files ({error}): have TMPDIR name a directory that "
                "can be written"
            ) from None
        self._lock = lock

    def _made(self) -> int | None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _taken(lock) and os.fstat(lock).st_nlink:
            return lock
        os.close(lock)
        return None

    def remove(self) -> None:
        """With all that is in it. What can't be removed now, the next owner of such a folder removes."""
        _remove(self.path)
        os.close(self._lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(place: Path) -> None:
    """Remove what owners have left behind."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # another one sweeps, too
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            for path in (folder / _OWNER, *folder.rglob("lock")):
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, lock)
                if not _taken(lock):
                    break
            else:
                _remove(folder)


def _remove(folder: Path) -> None:
    """As far as it can be; the lock's file only if nothing else is left."""
    with contextlib.suppress(OSError):
        for child in folder.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != _OWNER:
                child.unlink()
        if len(list(folder.iterdir())) == 1:
            (folder / _OWNER).unlink()
            folder.rmdir()
