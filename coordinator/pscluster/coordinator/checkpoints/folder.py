"""A directory of checkpoints: which it holds, and whether more will come. Paths may be URLs of fsspec.

DIRECTORY/ckpt-000001   and so on; a checkpoint once it has an index
DIRECTORY/finished.json no more will come, unless it is removed for another one
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
from pscluster.ps.storage.files.tensor_files import join

INDEX = "index.json"
FINISHED = "finished.json"


def path_of(directory: str, checkpoint_number: int) -> str:
    return f"{directory.rstrip('/')}/ckpt-{checkpoint_number:06d}"


def numbers(directory: str, *, whole: bool) -> list[int]:
    """Return the checkpoints' numbers, sorted; `whole`: of those with an index. CheckpointError if it can't be read."""
    with _accessible(directory, "can't be read") as (fs, root):
        if not there(fs, root):
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in fs.ls(root, detail=True)]
        existing = [int(name[5:]) for name in names if re.fullmatch(r"ckpt-([0-9]{6}|[1-9][0-9]{6,})", name)]
        return sorted(number for number in existing if not whole or there(fs, f"{path_of(root, number)}/{INDEX}"))


def where(path: str | Path) -> str:
    """Return a checkpoint's path itself; for a directory of them, the path of the newest."""
    text = str(path).rstrip("/")
    if exists(text, INDEX):
        return text
    newest = max(numbers(text, whole=True), default=None)
    return text if newest is None else path_of(text, newest)


def there(fs: Any, path: str) -> bool:
    """Return whether the file or directory exists. Unlike fsspec's `exists`, raise other errors, and signals."""
    try:
        fs.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def exists(directory: str, name: str) -> bool:
    """Return whether the directory has this file. CheckpointError if it can't be read."""
    with _accessible(directory, "can't be read") as (fs, root):
        return there(fs, join(root, name))


def finish(directory: str) -> None:
    """Record that no more checkpoints will come. CheckpointError if that can't be written."""
    newest = max(numbers(directory, whole=True), default=None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    text = json.dumps({"newest": newest and path_of("", newest).strip("/"), "time": now})
    with written(directory) as (fs, root):
        fs.makedirs(root, exist_ok=True)
        rename = written_aside(join(directory, FINISHED), f"{text}\n".encode())
        reach("coordinator.finished.before")
        rename()
        reach("coordinator.finished.after")


def clear_finished(directory: str) -> None:
    """Undo `finish`. CheckpointError if that is not possible."""
    if exists(directory, FINISHED):  # permission to write need not be permission to remove
        with written(directory) as (fs, root), contextlib.suppress(FileNotFoundError):
            fs.rm_file(join(root, FINISHED))


def written_aside(path: str, data: bytes) -> Callable[[], object]:
    """Write a file under a temporary name; return a function that moves it to its own."""
    fs, final = fsspec.core.url_to_fs(path)
    temporary = f"{final}.new"
    with fs.open(temporary, "wb") as file:
        file.write(data)
    return lambda: fs.mv(temporary, final)


def written(path: str) -> contextlib.AbstractContextManager[tuple[Any, str]]:
    """Yield the file system and the path in it; errors in the block become CheckpointErrors: it can't be written."""
    return _accessible(path, "can't be written")


@contextlib.contextmanager
def _accessible(path: str, problem: str) -> Iterator[tuple[Any, str]]:
    try:
        fs, local_path = fsspec.core.url_to_fs(path)
        fs.invalidate_cache()
        yield fs, local_path
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} {problem}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return why a file or directory could not be used, in the system's words if it has any."""
    return getattr(error, "strerror", None) or str(error)
