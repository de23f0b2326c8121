"""Callbacks that save checkpoints, and go on from them."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

from pscluster.coordinator.checkpoints import CheckpointManager, RestoredFrom
from pscluster.coordinator.training.callbacks.base import Callback, Logs
from pscluster.coordinator.training.callbacks.monitor import Mode, Monitor
from pscluster.core import checks
from pscluster.core.errors import CheckpointError, WaitTimeoutError

logger = logging.getLogger(__name__)


def manager_of(callback: Callback, directory: str, keep: int | None) -> CheckpointManager:
    """Make a manager of a directory for the training's variables."""
    return CheckpointManager(directory, strategy=callback.training.coordinator.strategy, max_to_keep=keep)


def saved_if_possible(manager: CheckpointManager, wait: bool = True) -> str | None:
    """Return the path, or None if it is not waited for.

    None, too, if none could be saved: then the training goes on, and what there was stands. That is logged; so is a
    failure of what is not waited for.
    """
    try:
        future = manager.save(wait=wait)
    except (CheckpointError, WaitTimeoutError) as error:
        logger.error("no checkpoint was made; training continues: %s", error)
        return None
    return future.result() if wait else None


class _Saving(Callback):
    """Base of those that make checkpoints, every so many steps or once an epoch."""

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
        """Of the directory."""
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
    """Saves checkpoints as the training goes on; at its end, a `SidecarEvaluator` is told that none follows.

    Args:
        directory: which every server must see under the same path; or a URL of fsspec.
        monitor: with `save_best_only`, the number that says which is best.
        save_best_only: behind an epoch, and only if it was better than all before.
        mode: "min" or "max"; "auto": by the name.
        save_freq: "epoch", or every so many steps.
        max_to_keep: how many; None: all.
        initial_value_threshold: what is to be improved on from the start.
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
        _ = self.manager.checkpoints  # a directory that can't be looked into is found now

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
    """Makes a training that was killed go on where it was, when its script is started again.

    At the begin of the training, what there is is gone on with: live variables, if only the coordinator had died, else
    the newest checkpoint. It goes on with the step, not the epoch: what was visited of the data is part of the
    checkpoint, so are the numbers that other callbacks keep. The epoch's mean of the logs is then one over the steps
    that the coordinator knew of.

    Args:
        backup_dir: which every server must see under the same path; or a URL of fsspec. Of this training alone.
        save_freq: "epoch", or every so many steps.
        every: and when so many seconds have passed; None: never.
        delete_checkpoint: once the training has ended in order, and made sense to its end.
    """

    def __init__(
        self,
        backup_dir: str | PathLike[str],
        save_freq: int | Literal["epoch"] = "epoch",
        every: float | None = 60.0,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__(backup_dir, save_freq, 2)
        if every is not None and not every > 0:
            raise ValueError(f"every is {every}; give more than 0 seconds, or None")
        self.every = math.inf if every is None else every
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
            self._last = -math.inf  # with the epoch's first step: what came with the end of the last one is dealt with

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
