"""A directory of checkpoints: which there are, and whether more will come. Paths may be URLs of fsspec.

DIRECTORY/ckpt-000001   and so on; a checkpoint from the moment its index is there
DIRECTORY/finished.json no more will come, until the next one is made
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from pscluster.core.errors import CheckpointError
from pscluster.core.fault_points import reach
from pscluster.ps.storage.tensor_files import join

INDEX = "index.json"
FINISHED = "finished.json"


def path_of(directory: str, number: int) -> str:
    """Where the checkpoint of this number is."""
    return f"{directory.rstrip('/')}/ckpt-{number:06d}"


def numbers(directory: str, *, whole: bool) -> list[int]:
    """Those that there are, in order; `whole`: that have an index. CheckpointError if one can't look."""
    with _accessible(directory, "can't be looked into"):
        fs, place = fsspec.core.url_to_fs(directory)
        fs.invalidate_cache()
        if not there(fs, place):
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in fs.ls(place, detail=True)]
        found = [int(name[5:]) for name in names if re.fullmatch(r"ckpt-([0-9]{6}|[1-9][0-9]{6,})", name)]
        return sorted(n for n in found if not whole or there(fs, f"{path_of(place, n)}/{INDEX}"))


def where(path: str | Path) -> str:
    """Of a checkpoint, its own path; of a directory of them, that of the newest."""
    text = str(path).rstrip("/")
    if exists(text, INDEX):
        return text
    newest = max(numbers(text, whole=True), default=None)
    return text if newest is None else path_of(text, newest)


def there(fs: Any, place: str) -> bool:
    """Whether there is such a file or directory. The file system's own `exists` says no, too, where it can't look, and
    where SIGTERM or Ctrl-C came meanwhile, which are lost then."""
    try:
        fs.info(place)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def exists(directory: str, name: str) -> bool:
    """Whether such a file is there. CheckpointError if one can't look."""
    with _accessible(directory, "can't be looked into"):
        fs, place = fsspec.core.url_to_fs(directory)
        fs.invalidate_cache()
        return there(fs, join(place, name))


def finish(directory: str) -> None:
    """Say that no more will come. CheckpointError if that can't be written."""
    newest = max(numbers(directory, whole=True), default=None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    text = json.dumps({"newest": newest and path_of("", newest).strip("/"), "time": now})
    with written(directory):
        fs, place = fsspec.core.url_to_fs(directory)
        fs.makedirs(place, exist_ok=True)
        rename = written_aside(join(directory, FINISHED), f"{text}\n".encode())
        reach("coordinator.finished.before")
        rename()
        reach("coordinator.finished.after")


def is_finished(directory: str) -> bool:
    """Whether no more will come. To be asked before one looks which there are."""
    return exists(directory, FINISHED)


def go_on(directory: str) -> None:
    """More will come. CheckpointError if it can't be taken back that none would."""
    if exists(directory, FINISHED):  # one who may write need not be one who may remove
        with written(directory), contextlib.suppress(FileNotFoundError):
            fs, place = fsspec.core.url_to_fs(join(directory, FINISHED))
            fs.rm_file(place)


def written_aside(path: str, data: bytes) -> Callable[[], object]:
    """Write a file under a name that does not count; what is returned gives it its own, in place of what has it."""
    fs, place = fsspec.core.url_to_fs(path)
    new = f"{place}.new"
    with fs.open(new, "wb") as file:
        file.write(data)
    return lambda: fs.mv(new, place)


def written(path: str) -> contextlib.AbstractContextManager[None]:
    """What goes wrong within is a CheckpointError: that can't be written."""
    return _accessible(path, "can't be written")


@contextlib.contextmanager
def _accessible(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} {what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Why a file or a directory could not be used, in the system's words where it has any."""
    return getattr(error, "strerror", None) or str(error)
