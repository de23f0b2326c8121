"""Callbacks that end a training that no longer improves, or no longer makes sense."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np

from pscluster.coordinator.training.callbacks.base import Callback, Logs
from pscluster.coordinator.training.callbacks.checkpoint import manager_of, saved_if_possible
from pscluster.coordinator.training.callbacks.monitor import EPOCHS, Mode, Monitor
from pscluster.core import checks
from pscluster.core.errors import CheckpointError
from pscluster.ps.handles.rows.table import EmbeddingTable
from pscluster.ps.handles.variables.variable import Variable

logger = logging.getLogger(__name__)

_READ_BYTES = 64 << 20


class EarlyStopping(Callback):
    """Ends the training when a number has not improved for `patience` epochs.

    Args:
        monitor: the number's name in the logs.
        min_delta: smaller changes are no improvement.
        patience: epochs without an improvement; the first epoch never ends the training.
        mode: "min" or "max"; "auto": by the name.
        baseline: an epoch counts as an improvement only if it is better than this, too.
        restore_best_weights: at the end, restore the variables of the best epoch.
        directory: where to save them, in a folder `best`; all servers must see it.
        start_from_epoch: ignore the epochs before.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        directory: str | PathLike[str] | None = None,
        start_from_epoch: int = 0,
    ) -> None:
        if restore_best_weights and directory is None:
            raise ValueError(
                "restore_best_weights needs directory=, a directory that all servers share, to save the best variables"
            )
        self._monitor = Monitor(monitor, mode, min_delta)
        self._baseline = None if baseline is None else Monitor(monitor, mode, min_delta, baseline)
        self.patience = checks.whole("patience", patience, kind=EPOCHS, at_least=0)
        self.directory = f"{os.fspath(directory or '').rstrip('/')}/best" if restore_best_weights else None
        self.start_from_epoch = checks.whole("start_from_epoch", start_from_epoch, at_least=0)
        self.best_epoch: int | None = None
        self._saved: str | None = None
        self._wait = 0

    @property
    def best(self) -> float:
        return self._monitor.best

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._monitor.check(self)
        self._monitor.reset()
        self.best_epoch, self._saved, self._wait = None, None, 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value = self._monitor.value(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        self._wait += 1
        if self._monitor.improves(value) and self._can_come_back():
            self._monitor.best, self.best_epoch = value, epoch
            if self._baseline is None or self._baseline.improves(value):
                self._wait = 0
        if self._wait >= max(1, self.patience) and epoch > 0:
            self.training.stop(
                f"{self._monitor.name} has not become better than {self.best:.6g} for {self._wait} epochs"
            )

    def _can_come_back(self) -> bool:
        """Save the variables if they may be restored; False if that failed, since there is no way back to them."""
        if self.directory is None:
            return True
        with manager_of(self, self.directory, 1) as manager:
            saved = saved_if_possible(manager)
        self._saved = saved or self._saved
        return saved is not None

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self.directory is None or self._saved is None:
            return
        with manager_of(self, self.directory, 1) as manager:
            try:
                manager.restore(self._saved, progress=False)
            except CheckpointError as error:
                logger.error("could not restore the best variables; keeping the last ones: %s", error)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self._wait, "saved": self._saved}

    def load(self, state: Mapping[str, Any]) -> None:
        if state["saved"] is not None and self.directory is not None:
            with manager_of(self, self.directory, 1) as manager:
                if state["saved"] not in manager.checkpoints:
                    return  # a later best one replaced it, in an attempt that was lost
        self._monitor.best, self.best_epoch = state["best"], state["best_epoch"]
        self._wait, self._saved = state["wait"], state["saved"]


class TerminateOnNaN(Callback):
    """Ends the training when a number of a step is not finite, and logs the step and which variables are not."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        bad = [f"{name} is {value}" for name, value in (logs or {}).items() if not math.isfinite(value)]
        if not bad or self.training.stop_training:
            return
        strategy = self.training.coordinator.strategy
        counts = _not_finite(strategy.variables)
        names = [f"{variable.name!r} ({count:,} value{'s' * (count != 1)})" for variable, count in counts]
        of = "" if self.training.execution is None else f", {self.training.execution}"
        where = f"variables that now hold NaN or infinity: {', '.join(names)}" if names else "all variables are finite"
        if any(isinstance(variable, EmbeddingTable) for variable in strategy.variables):
            where += ", not counting embedding tables, which were not searched"
        self.training.stop(
            f"{', '.join(bad)} in step {batch + 1} of epoch {self.training.epoch + 1}{of}; {where}", failed=True
        )


def _not_finite(variables: Iterable[Variable]) -> Iterator[tuple[Variable, int]]:
    """Yield variables with values that are not finite, and their number. Reads few rows at a time: variables may not
    fit into memory."""
    for variable in variables:
        if isinstance(variable, EmbeddingTable):
            continue
        if variable.dtype.kind not in "fc" and variable.dtype.name != "bfloat16":
            continue
        if not variable.shape:
            count = int(not np.isfinite(variable.numpy()))
        else:
            rows = max(1, _READ_BYTES * variable.shape[0] // max(1, variable.nbytes))
            starts = range(0, variable.shape[0], rows)
            count = sum(int((~np.isfinite(variable[start : start + rows])).sum()) for start in starts)
        if count:
            yield variable, count
