"""Callbacks that save checkpoints, and continue from them."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

from pscluster.coordinator.checkpoints.manager import CheckpointManager, RestoredFrom
from pscluster.coordinator.training.callbacks.base import Callback, Logs
from pscluster.coordinator.training.callbacks.monitor import Mode, Monitor
from pscluster.core import checks
from pscluster.core.errors import CheckpointError, WaitTimeoutError

logger = logging.getLogger(__name__)


def manager_of(callback: Callback, directory: str, keep: int | None) -> CheckpointManager:
    return CheckpointManager(directory, strategy=callback.training.coordinator.strategy, max_to_keep=keep)


def saved_if_possible(manager: CheckpointManager, wait: bool = True) -> str | None:
    """Save a checkpoint and return its path; None if that failed, which is logged, or with `wait=False`."""
    try:
        future = manager.save(wait=wait)
    except (CheckpointError, WaitTimeoutError) as error:
        logger.error("no checkpoint was made; training continues: %s", error)
        return None
    return future.result() if wait else None


class _Saving(Callback):
    """Base class of callbacks that save checkpoints, every `save_freq` steps or once an epoch."""

    def __init__(self, directory: str | PathLike[str], save_freq: int | Literal["epoch"], keep: int | None) -> None:
        if save_freq != "epoch":
            save_freq = checks.whole("save_freq", save_freq, ", or 'epoch'", kind="whole number of steps", at_least=1)
        self.directory = os.fspath(directory)
        self.save_freq = save_freq
        self._keep = keep
        self._opened: CheckpointManager | None = None
        self._steps = 0

    @property
    def manager(self) -> CheckpointManager:
        if self._opened is None:
            self._opened = manager_of(self, self.directory, self._keep)
        return self._opened

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps += 1
        if self.save_freq != "epoch" and self._steps % self.save_freq == 0:
            self._save(wait=False)

    def _save(self, wait: bool) -> str | None:
        return saved_if_possible(self.manager, wait)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close(wait=not self.training.at_once)
            self._opened = None


class ModelCheckpoint(_Saving):
    """Saves checkpoints during training; at its end, a `SidecarEvaluator` is told that no more follow.

    Args:
        directory: a path that is the same for all servers, or a URL of fsspec.
        monitor: with `save_best_only`, the name of the number that decides which is best.
        save_best_only: save after an epoch, and only if it was better than all before.
        mode: "min" or "max"; "auto": by the name.
        save_freq: "epoch", or a number of steps.
        max_to_keep: how many to keep; None: all.
        initial_value_threshold: the value that even the first checkpoint must improve on.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: Mode = "auto",
        save_freq: int | Literal["epoch"] = "epoch",
        max_to_keep: int | None = 5,
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(directory, save_freq, max_to_keep)
        if save_best_only and save_freq != "epoch":
            raise ValueError(
                "save_best_only goes with save_freq='epoch': the best epoch is known only after it has ended"
            )
        self._monitor = Monitor(monitor, mode, 0.0, initial_value_threshold) if save_best_only else None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._monitor is not None:
            self._monitor.check(self)
        _ = self.manager.checkpoints  # an unreadable directory is noticed now

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.save_freq != "epoch" or self.training.failed:
            return
        value = None if self._monitor is None else self._monitor.value(logs)
        if self._monitor is None:
            self._save(wait=True)
        elif value is not None and self._monitor.improves(value) and self._save(wait=True):
            self._monitor.best = value

    def on_train_end(self, logs: Logs | None = None) -> None:
        try:
            self.manager.finish()
        except CheckpointError as error:
            logger.error(
                "could not mark %s as complete; evaluators keep waiting for checkpoints there: %s",
                self.directory,
                error,
            )

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        if self._monitor is None:
            self._save(wait=True)

    def state(self) -> dict[str, Any]:
        return {} if self._monitor is None else {"best": self._monitor.best}

    def load(self, state: Mapping[str, Any]) -> None:
        if self._monitor is not None:
            self._monitor.best = state.get("best", self._monitor.best)


class BackupAndRestore(_Saving):
    """Makes a training that was killed resume where it was, when its script is started again.

    The training continues from live variables, if only the coordinator had died, else from the newest checkpoint. It
    resumes at the step, not the epoch: the checkpoint holds what was visited of the data, and the states of other
    callbacks. The epoch's mean of the logs then covers the steps that the coordinator knew of.

    Args:
        backup_dir: a path that is the same for all servers, or a URL of fsspec. Used by this training alone.
        save_freq: "epoch", or a number of steps.
        every: save also after this many seconds; None: never.
        delete_checkpoint: delete the backup once the training has ended cleanly, and has not failed.
    """

    def __init__(
        self,
        backup_dir: str | PathLike[str],
        save_freq: int | Literal["epoch"] = "epoch",
        every: float | None = 60.0,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__(backup_dir, save_freq, 2)
        kind = "number of seconds"
        every = math.inf if every is None else every
        self.every = checks.real("every", every, ", or None", kind=kind, finite=False, above=0)
        self.delete_checkpoint = delete_checkpoint
        self.restored: RestoredFrom | None = None
        self._last = math.inf
        self._epochs = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.restored = self.manager.restore_or_initialize()
        self.training.restored |= self.restored is RestoredFrom.CHECKPOINT
        self._last, self._epochs = time.monotonic(), 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epochs += 1
        if self._epochs > 1 and self.save_freq == "epoch":
            self._last = -math.inf  # save with the epoch's first step: the end of the last one has been handled by then

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        if time.monotonic() - self._last > self.every or self._last == -math.inf:
            self._save(wait=False)

    def _save(self, wait: bool) -> str | None:
        self._last = time.monotonic()
        self.training.keep()
        return super()._save(wait)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if not self.delete_checkpoint:
            self._save(wait=True)
        elif not self.training.failed:
            try:
                self.manager.remove_all()
            except CheckpointError as error:
                logger.error("could not remove the backup: %s", error)

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        self._save(wait=True)
