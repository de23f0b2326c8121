"""Reads and writes single files of a run, each as a whole; locks the run; explains what goes wrong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import fsspec

from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.launch.storage.checkpoint import is_local


class RunFiles:
    """The files in the folder of one run."""

    def __init__(self, storage: str, name: str) -> None:
        """Name the folder of a run; nothing is read or written. CheckpointError if the storage makes no sense."""
        with explained(storage, "can't be used"):
            storage = storage if "://" in storage else os.path.abspath(os.path.expanduser(storage))
            self._fs, root = fsspec.core.url_to_fs(storage)
        self.name, self.storage = name, storage.rstrip("/")
        self.path = f"{self.storage}/{name}"
        self._root = f"{root.rstrip('/')}/{name}"
        self._is_local = is_local(self._fs)

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return what is in a file. FileNotFoundError if there is none, CheckpointError if it is damaged."""
        try:
            record: Any = json.loads(self._fs.cat_file(f"{self._root}/{name}"))
            if not isinstance(record, dict):
                raise ValueError(f"it has a {type(record).__name__}")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path}/{name} is damaged ({error}): restore it, or move it away with all reports after it"
            ) from None
        return record

    def _put(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a file as a whole, or not at all."""
        data = (json.dumps(record, indent=1, default=str) + "\n").encode()
        path = f"{self._root}/{name}"
        if not self._is_local:
            self._fs.pipe_file(path, data)
            return
        with open(f"{path}.new", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
        sync_folder(Path(path).parent)

    def _keep_only(self, folder: str, names: Set[str]) -> None:
        """Remove what a folder has under other names; do nothing if there is no such folder."""
        try:
            paths = self._fs.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return
        for path in paths:
            if path.rstrip("/").rpartition("/")[2] not in names:
                self._fs.rm(path, recursive=True)

    def _is_locked(self) -> bool:
        if not self._is_local:
            return True  # unknown
        try:
            with open(f"{self._root}/.lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(f"{self._root}/.lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise MisuseError(
                    f"the run in {self.path} is being written by {file.read() or 'another process'}: wait until that "
                    "has ended, or give this run another name"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield


def sync_folders(folders: Iterable[str], root: str) -> None:
    """Sync these folders and those above them, up to the root."""
    places = {place for folder in map(Path, folders) for place in (folder, *folder.parents)}
    for place in sorted(places, reverse=True):
        if place.is_relative_to(root):
            sync_folder(place)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: str, problem: str) -> Iterator[None]:
    """Turn errors of the file system in the block into CheckpointErrors."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = ""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "; make room there, or give RunConfig(storage=) another place"
        elif isinstance(error, PermissionError):
            hint = "; give RunConfig(storage=) a folder that this user may write"
        elif isinstance(error, ImportError):
            hint = "; install what fsspec needs for that URL, on the workers, too"
        raise CheckpointError(f"{path} {problem}: {why}{hint}") from error
