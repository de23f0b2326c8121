"""The best checkpoint, copied, since the job that made it removes old ones.

    files of the checkpoint -> BEST_DIR/ckpt-N -> its index -> best.json -> the one before is removed

So there is a whole one at any moment. Until best.json names a copy, the evaluator that is started next makes it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from typing import Any

import fsspec

from pscluster.coordinator.checkpoints import folder
from pscluster.coordinator.training.callbacks.monitor import Mode, Monitor
from pscluster.core.errors import CheckpointError, ConfigurationError, MisuseError

logger = logging.getLogger(__name__)

BEST = "best.json"


class BestCheckpoint:
    """Keeps a copy of the checkpoint with the best value of a name.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(self, directory: str, monitor: str, mode: Mode) -> None:
        self.directory = directory
        if not isinstance(monitor, str) or not monitor:
            raise ConfigurationError(f"monitor is {monitor!r}; give the name of a number that fn returns")
        try:
            self._monitor = Monitor(monitor, mode)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    def begin(self) -> None:
        """Continue with what an earlier evaluator has copied. CheckpointError if that can't be read."""
        with folder.written(self.directory) as (fs, root):
            try:
                found = json.loads(fs.cat_file(f"{root}/{BEST}"))
                number, name, value = int(found["number"]), str(found["monitor"]), float(found["value"])
            except FileNotFoundError:
                return
            except (ValueError, TypeError, LookupError):
                logger.warning("%s/%s was not written by an evaluator: starting over", self.directory, BEST)
                return
            if name == self._monitor.name and number in folder.numbers(self.directory, whole=True):
                self._monitor.best = value

    def offer(self, path: str, number: int, values: dict[str, float]) -> bool:
        """Copy a checkpoint if it is the best one until now; return whether it was copied.

        Raises:
            MisuseError: no number has the name.
            CheckpointError: the copy can't be written.
        """
        if (value := values.get(self._monitor.name)) is None:
            raise MisuseError(
                f"the evaluator monitors {self._monitor.name!r}, but fn returned {', '.join(map(repr, values))}"
            )
        if not self._monitor.improves(value):
            return False
        copy = folder.path_of(self.directory, number)
        with folder.written(self.directory) as (fs, root):
            _remove(fs, folder.path_of(root, number))  # what an evaluator that died has left
            try:
                _copy(path, fs, folder.path_of(root, number))
            except FileNotFoundError:
                _remove(fs, folder.path_of(root, number))
                logger.warning("%s is the best, but was removed before it could be copied to %s", path, copy)
                return False
            text = json.dumps({"number": number, "monitor": self._monitor.name, "value": value, "copied_from": path})
            folder.written_aside(f"{self.directory}/{BEST}", f"{text}\n".encode())()
            self._monitor.best = value
            for other in folder.numbers(self.directory, whole=False):
                if other != number:
                    _remove(fs, folder.path_of(root, other))
        logger.info("%s is the best so far (%s %.6g): copied to %s", path, self._monitor.name, value, copy)
        return True


def _copy(path: str, fs: Any, target: str) -> None:
    """Copy a checkpoint's files, the index last: without it a checkpoint is none. FileNotFoundError if one vanishes."""
    try:
        source_fs, source = fsspec.core.url_to_fs(path)
        source_fs.invalidate_cache()
        files = sorted(source_fs.find(source), key=lambda file: str(file).endswith(f"/{folder.INDEX}"))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {folder.reason(error)}") from error
    if not files or not str(files[-1]).endswith(f"/{folder.INDEX}"):
        raise FileNotFoundError(path)
    for file in files:
        name = str(file)[len(str(source).rstrip("/")) + 1 :]
        copy = f"{target}/{name}"
        fs.makedirs(copy.rpartition("/")[0], exist_ok=True)
        with source_fs.open(file, "rb") as original, fs.open(copy, "wb") as written:
            shutil.copyfileobj(original, written, 1 << 20)


def _remove(fs: Any, path: str) -> None:
    """Remove a checkpoint, its index first, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(f"{path}/{folder.INDEX}")
    with contextlib.suppress(FileNotFoundError):
        fs.rm(path, recursive=True)
