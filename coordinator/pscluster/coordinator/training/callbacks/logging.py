"""Callbacks that write the logs to files."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pscluster.coordinator.training.callbacks.base import Callback, Logs
from pscluster.coordinator.training.events import EventWriter
from pscluster.core import checks
from pscluster.core.errors import ConfigurationError

logger = logging.getLogger(__name__)


class CSVLogger(Callback):
    """Writes the logs of each epoch as a line of a file.

    Args:
        filename: the file's. Its columns are those of the first epoch.
        separator: of the columns.
        append: to an existing file; a training that is resumed always appends.
    """

    def __init__(self, filename: str | PathLike[str], separator: str = ",", append: bool = False) -> None:
        self.filename, self.separator, self.append = Path(filename), separator, append
        self._names: list[str] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._names = None
        with self.filename.open("a"):
            pass  # a file that can't be written is noticed now

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        try:
            self._write({"epoch": epoch, **(logs or {})})
        except OSError as error:
            logger.error("could not write epoch %d to %s; training continues: %s", epoch, self.filename, error)

    def _write(self, logs: Logs) -> None:
        if self._names is None:
            if not (self.append or self.params.get("resumed")):
                self.filename.write_text("")
            with self.filename.open(newline="") as file:
                self._names = next(csv.reader(file, delimiter=self.separator), None)
        new = self._names is None
        names = self._names or list(logs)
        with self.filename.open("a", newline="") as file:
            writer = csv.DictWriter(
                file, names, restval="nan", extrasaction="ignore", delimiter=self.separator, lineterminator="\n"
            )
            if new:
                writer.writeheader()
            writer.writerow(logs)
        self._names = names


class TensorBoard(Callback):
    """Writes the logs as event files for TensorBoard, to `log_dir/train` and `log_dir/validation`.

    It needs tensorboardX: `pip install "pscluster[tensorboard]"`.

    Args:
        log_dir: a directory, or a URL of fsspec.
        update_freq: "epoch", or a number of steps ("batch": 1) after which to write "batch_..." numbers as well.
    """

    def __init__(self, log_dir: str | PathLike[str] = "logs", update_freq: int | Literal["epoch", "batch"] = "epoch"):
        every = 1 if update_freq == "batch" else 0 if update_freq == "epoch" else update_freq
        kind = "whole number of steps"
        every = checks.whole("update_freq", every, ", or 'epoch' or 'batch'", kind=kind, at_least=0)
        self.log_dir = os.fspath(log_dir).rstrip("/")
        self._every = every
        self._writers: dict[str, EventWriter] = {}
        self._steps = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._steps = 0
        self._writer("train")  # a directory that can't be written is noticed now

    def _writer(self, kind: str) -> EventWriter:
        if kind not in self._writers:
            self._writers[kind] = EventWriter(f"{self.log_dir}/{kind}")
        return self._writers[kind]

    def _write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
        if not numbers:
            return
        try:
            self._writer(kind).scalars(step, numbers)
        except (OSError, ConfigurationError) as error:
            logger.error("could not write step %d to %s; training continues: %s", step, self.log_dir, error)
            self._close(kind)  # readers stop at half an event: continue in another file

    def _close(self, kind: str) -> None:
        if (writer := self._writers.pop(kind, None)) is not None:
            with contextlib.suppress(OSError):
                writer.close()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            self._write("train", self._steps, {f"batch_{name}": value for name, value in (logs or {}).items()})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        values: dict[str, dict[str, Any]] = {}
        for name, value in (logs or {}).items():
            kind = "validation" if name.startswith("val_") else "train"
            values.setdefault(kind, {})[f"epoch_{name.removeprefix('val_')}"] = value
        for kind in values:
            self._write(kind, epoch, values[kind])

    def close(self) -> None:
        for kind in list(self._writers):
            self._close(kind)

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
