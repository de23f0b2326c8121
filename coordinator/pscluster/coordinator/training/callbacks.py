"""What is called on the way through a training. The hooks have Keras' names; so have the callbacks and their arguments.

A callback of one's own derives from `Callback`, and finds what the training is at in `self.training`. In a loop of
one's own a `CallbackList` calls several of them. All run in the coordinator's script, one at a time.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pscluster.coordinator.checkpoints import CheckpointManager, RestoredFrom
from pscluster.coordinator.scheduling.function_queue import FunctionQueue
from pscluster.coordinator.training.events import EventWriter
from pscluster.core.errors import CheckpointError, ConfigurationError, MisuseError, WaitTimeoutError
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.variable import Variable
from pscluster.ps.optim.schedules import LearningRateSchedule

logger = logging.getLogger(__name__)

Logs = dict[str, Any]
"""Numbers by name."""

Mode = Literal["auto", "min", "max"]

_GROW = re.compile(r"acc|auc|precision|recall|f1|r2|score", re.IGNORECASE)
_LOOK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Execution:
    """The function whose steps are being dealt with.

    Attributes:
        function: its name.
        what: which part of the data it had.
        worker: that ran it.
    """

    function: str
    what: str
    worker: int

    def __str__(self) -> str:
        return f"{self.function} of {self.what} on worker {self.worker}"


class Training:
    """What callbacks see of it.

    Attributes:
        coordinator: that runs it.
        params: "epochs", "steps" (of an epoch; None: not known), "verbose", "validation" (is there one?), "resumed"
            (does it go on where a coordinator before this one, or an interruption, has left it?).
        epoch: that goes on, from 0.
        steps: that were done in it.
        stop_training: set it to end the training.
        stopped: why; shown, and kept in the history.
        failed: it was ended since it makes no sense to go on: backups stay.
        restored: a callback has restored a checkpoint in `on_train_begin`, to go on with.
        at_once: it was asked twice to end, or there is no hope for an end in order: `close` waits for nothing.
        keep: keeps how far the training is, and what callbacks keep, with the variables: before a checkpoint is made.
        execution: what the logs of `on_train_batch_end` come from.
    """

    def __init__(self, coordinator: FunctionQueue, params: Mapping[str, Any]) -> None:
        self.coordinator = coordinator
        self.params = dict(params)
        self.epoch = self.steps = 0
        self.stop_training = False
        self.stopped = ""
        self.failed = self.restored = self.at_once = False
        self.execution: Execution | None = None
        self.keep: Callable[[], None] = lambda: None

    def stop(self, why: str, *, failed: bool = False) -> None:
        """End the training, and say so."""
        self.stop_training, self.stopped, self.failed = True, why, failed
        logger.warning("the training ends: %s", why)


class Callback:
    """Does nothing: override what is wanted."""

    training: Training

    @property
    def params(self) -> dict[str, Any]:
        """Of the training."""
        return self.training.params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before anything is scheduled. What is restored here is gone on with."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """The training has ended in order, early or not."""

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        """Ctrl-C or SIGTERM: no function runs, none follows."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before the epoch's first function is scheduled."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """All functions of the epoch have ended. `logs`: means over its steps, and "val_..." of the evaluation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A step is scheduled, the epoch's first with number 0. It begins when a worker is free."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A step has ended. They end in another order than they begin: the number is that of the end."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Before an evaluation."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Behind it, with its results."""

    def close(self) -> None:
        """The training is over, whatever happened: leave nothing open."""

    def state(self) -> dict[str, Any]:
        """What to keep for a coordinator that goes on with the training, as JSON holds it."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from that."""


class CallbackList(Callback):
    """Calls several callbacks, in their order. What one of them raises goes on, with a note that names it.

    Args:
        callbacks: those.
        coordinator: of the loop.
        params: see `Training`.
    """

    def __init__(self, callbacks: Iterable[Callback], coordinator: FunctionQueue, **params: Any) -> None:
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            raise TypeError(
                "callbacks are a list of instances of pscluster.coordinator.callbacks.Callback, not "
                f"a {type(callbacks).__name__}"
            )
        self.callbacks = list(callbacks)
        for each in self.callbacks:
            if not isinstance(each, Callback):
                raise TypeError(f"callbacks are instances of pscluster.coordinator.callbacks.Callback, not {each!r}")
        self.training = Training(coordinator, params)
        for each in self.callbacks:
            each.training = self.training
        hooks = ("on_train_batch_begin", "on_train_batch_end")
        self.wants_begin, self.wants_end = (
            any(
                getattr(getattr(each, hook), "__func__", None) is not getattr(Callback, hook) for each in self.callbacks
            )
            for hook in hooks
        )

    def _each(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, hook)(*args)
            except BaseException as error:
                error.add_note(f"raised by the callback {type(callback).__name__}.{hook}")
                raise

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._each("on_train_begin", logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._each("on_train_end", logs or {})

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        """All of them, also where one of them can't."""
        for callback in self.callbacks:
            try:
                callback.on_train_interrupted(logs or {})
            except Exception as error:
                logger.error("the callback %s has failed at the end: %s", type(callback).__name__, error)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.training.epoch, self.training.steps = epoch, 0
        self._each("on_epoch_begin", epoch, logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._each("on_epoch_end", epoch, {} if logs is None else logs)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self.wants_begin:
            self._each("on_train_batch_begin", batch, logs or {})

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.training.steps = batch + 1
        if self.wants_end:
            self._each("on_train_batch_end", batch, logs or {})

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._each("on_test_begin", logs or {})

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._each("on_test_end", logs or {})

    def close(self) -> None:
        """All of them, also where one of them can't."""
        for callback in self.callbacks:
            try:
                callback.close()
            except Exception as error:
                logger.error("the callback %s could not be closed: %s", type(callback).__name__, error)

    def states(self) -> list[dict[str, Any]]:
        """What they want to keep."""
        return [{"callback": type(each).__name__, "state": state} for each in self.callbacks if (state := each.state())]

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Give each its own: of several of one class, in their order."""
        left = list(states)
        for callback in self.callbacks:
            mine = next((each for each in left if each["callback"] == type(callback).__name__), None)
            if mine is not None:
                left.remove(mine)
                callback.load(mine["state"])


# What goes by a number of the logs


class Monitor:
    """Whether a number of the logs gets better.

    Args:
        name: of the number.
        mode: "min" or "max"; "auto": by the name.
        min_delta: less than that is no improvement.
        best: what is to be improved on from the start.
    """

    def __init__(self, name: str, mode: Mode = "auto", min_delta: float = 0.0, best: float | None = None) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode is {mode!r}; it must be 'auto', 'min' or 'max'")
        if not min_delta >= 0:
            raise ValueError(f"min_delta is {min_delta}; it must be 0 or more")
        self.name = name
        self._sign = 1 if mode == "max" or (mode == "auto" and _GROW.search(name)) else -1
        self._min_delta = min_delta
        self._first = -self._sign * math.inf if best is None else best
        self.best = self._first
        self._missed = False

    def reset(self) -> None:
        """Another training begins."""
        self.best = self._first

    def check(self, callback: Callback) -> None:
        """MisuseError if there will be no such number."""
        if self.name.startswith("val_") and not callback.params.get("validation", True):
            raise MisuseError(
                f"{type(callback).__name__} goes by {self.name!r}, but nothing is evaluated: give fit() "
                "validation_data, or another monitor"
            )

    def value(self, logs: Mapping[str, Any] | None) -> float | None:
        """The number; None if it is not among the logs, which is said once."""
        value = (logs or {}).get(self.name)
        if value is None and not self._missed and not self.name.startswith("val_"):  # those are not of every epoch
            self._missed = True
            logger.warning("a callback goes by %r, which is not among the logs: %s", self.name, list(logs or ()))
        return None if value is None else float(value)

    def improves(self, value: float) -> bool:
        """Is it better than the best one?"""
        if math.isinf(self.best):
            return math.isfinite(value)
        return self._sign * (value - self.best) > self._min_delta


class EarlyStopping(Callback):
    """Ends the training when a number has not become better for so many epochs.

    Args:
        monitor: its name among the logs.
        min_delta: less than that is no improvement.
        patience: epochs without one; behind the first epoch it does not end.
        mode: "min" or "max"; "auto": by the name.
        baseline: to be better than the epochs before is not enough: it must be better than this, too.
        restore_best_weights: at the end, restore the variables of the best epoch.
        directory: for these, a place that all servers see; a folder `best` is made there.
        start_from_epoch: before that nothing is stopped.
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
            raise ValueError("restore_best_weights needs directory=, which all servers see, to keep the best ones in")
        self._monitor = Monitor(monitor, mode, min_delta)
        self._baseline = None if baseline is None else Monitor(monitor, mode, min_delta, baseline)
        self.patience = patience
        self.directory = f"{os.fspath(directory or '').rstrip('/')}/best" if restore_best_weights else None
        self.start_from_epoch = start_from_epoch
        self.best_epoch: int | None = None
        self._saved: str | None = None
        self._wait = 0

    @property
    def best(self) -> float:
        """The number, when it was best."""
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
        """Keep the variables, if they are to be restored: without that there would be no way back to them."""
        if self.directory is None:
            return True
        with _manager(self, self.directory, 1) as manager:
            saved = _saved_if_possible(manager)
        self._saved = saved or self._saved
        return saved is not None

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self.directory is None or self._saved is None:
            return
        with _manager(self, self.directory, 1) as manager:
            try:
                manager.restore(self._saved, progress=False)
            except CheckpointError as error:
                logger.error("the best variables are not restored, the last ones stay: %s", error)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self._wait, "saved": self._saved}

    def load(self, state: Mapping[str, Any]) -> None:
        if state["saved"] is not None and self.directory is not None:
            with _manager(self, self.directory, 1) as manager:
                if state["saved"] not in manager.checkpoints:
                    return  # a later one took its place, before what is gone on with now was lost
        self._monitor.best, self.best_epoch = state["best"], state["best_epoch"]
        self._wait, self._saved = state["wait"], state["saved"]


class ReduceLROnPlateau(Callback):
    """Makes the learning rate smaller when a number has not become better for some epochs.

    Args:
        optimizer: whose rate it is; a number, not a schedule.
        monitor: the number's name among the logs.
        factor: by which the rate is multiplied, between 0 and 1.
        patience: epochs without an improvement.
        mode: "min" or "max"; "auto": by the name.
        min_delta: less than that is no improvement.
        cooldown: epochs that are not counted, behind a reduction.
        min_lr: the rate does not become less.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor is {factor}; it must be between 0 and 1")
        _rate_of(optimizer)
        self._monitor = Monitor(monitor, mode, min_delta)
        self.optimizer = optimizer
        self.factor, self.patience, self.cooldown, self.min_lr = factor, patience, cooldown, min_lr
        self._wait = self._cooling = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._monitor.check(self)
        self._monitor.reset()
        self._wait = self._cooling = 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        rate = _rate_of(self.optimizer)
        if logs is not None:
            logs["learning_rate"] = rate
        value = self._monitor.value(logs)
        if value is None:
            return
        if self._cooling:
            self._cooling -= 1
            self._wait = 0
        if self._monitor.improves(value):
            self._monitor.best, self._wait = value, 0
        elif not self._cooling:
            self._wait += 1
            if self._wait >= self.patience and rate > self.min_lr:
                self.optimizer.learning_rate = max(rate * self.factor, self.min_lr)
                logger.info("epoch %d: the learning rate is %g now", epoch + 1, _rate_of(self.optimizer))
                self._wait, self._cooling = 0, self.cooldown

    def state(self) -> dict[str, Any]:
        return {"best": self._monitor.best, "wait": self._wait, "cooling": self._cooling}

    def load(self, state: Mapping[str, Any]) -> None:
        self._monitor.best, self._wait, self._cooling = state["best"], state["wait"], state["cooling"]


class LearningRateScheduler(Callback):
    """Sets the learning rate at each epoch's begin.

    Args:
        optimizer: whose rate it is; a number, not a schedule.
        schedule: `schedule(epoch, rate)` gives the new rate.
    """

    def __init__(self, optimizer: Optimizer, schedule: Callable[[int, float], float]) -> None:
        _rate_of(optimizer)
        if not callable(schedule):
            raise TypeError(f"schedule is a {type(schedule).__name__}; it must be a function of the epoch and the rate")
        self.optimizer, self.schedule = optimizer, schedule
        self._begun: tuple[int, float] | None = None  # an epoch, and the rate before it

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begun = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._begun is None or self._begun[0] != epoch:  # else it is gone on with
            self._begun = epoch, _rate_of(self.optimizer)
        self.optimizer.learning_rate = float(self.schedule(*self._begun))

    def state(self) -> dict[str, Any]:
        return {"begun": self._begun}

    def load(self, state: Mapping[str, Any]) -> None:
        self._begun = tuple(state["begun"]) if state["begun"] else None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = _rate_of(self.optimizer)


def _rate_of(optimizer: Optimizer) -> float:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"give the optimizer whose learning rate is to change, not a {type(optimizer).__name__}")
    rate = optimizer.learning_rate
    if isinstance(rate, LearningRateSchedule):
        raise MisuseError(f"the learning rate of {optimizer.name!r} is a schedule: make the optimizer with a number")
    return rate


class TerminateOnNaN(Callback):
    """Ends the training when a number of a step is not finite, and says whose, and which variables are not."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        bad = [f"{name} is {value}" for name, value in (logs or {}).items() if not math.isfinite(value)]
        if not bad or self.training.stop_training:
            return
        strategy = self.training.coordinator.strategy
        found = [f"{variable.name!r} ({count:,} of its values)" for variable, count in _not_finite(strategy.variables)]
        of = "" if self.training.execution is None else f", {self.training.execution}"
        where = f"not finite are now the variables {', '.join(found)}" if found else "all variables are finite"
        self.training.stop(
            f"{', '.join(bad)} in step {batch + 1} of epoch {self.training.epoch + 1}{of}; {where}",
            failed=True,
        )


def _not_finite(variables: Iterable[Variable]) -> Iterator[tuple[Variable, int]]:
    """Variables, and how many of their values are not finite. Read some rows at a time: they may be larger than this
    machine."""
    for variable in variables:
        if variable.dtype.kind not in "fc" and variable.dtype.name != "bfloat16":
            continue
        if not variable.shape:
            count = int(not np.isfinite(variable.numpy()))
        else:
            rows = max(1, _LOOK_BYTES * variable.shape[0] // max(1, variable.nbytes))
            starts = range(0, variable.shape[0], rows)
            count = sum(int((~np.isfinite(variable[start : start + rows])).sum()) for start in starts)
        if count:
            yield variable, count


# Checkpoints


def _manager(callback: Callback, directory: str, keep: int | None) -> CheckpointManager:
    return CheckpointManager(directory, strategy=callback.training.coordinator.strategy, max_to_keep=keep)


def _saved_if_possible(manager: CheckpointManager, wait: bool = True) -> str | None:
    """The path, if it is waited for; None if none could be saved: then the training goes on, and what there was stands.

    That is logged; so is a failure of what is not waited for.
    """
    try:
        future = manager.save(wait=wait)
    except (CheckpointError, WaitTimeoutError) as error:
        logger.error("no checkpoint was made, the training goes on: %s", error)
        return None
    return future.result() if wait else None


class _Saving(Callback):
    """Base of those that make checkpoints, every so many steps or once an epoch."""

    def __init__(self, directory: str | PathLike[str], save_freq: int | Literal["epoch"], keep: int | None) -> None:
        if save_freq != "epoch" and (isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(f"save_freq is {save_freq!r}; it must be 'epoch', or a number of steps, 1 or more")
        self.directory = os.fspath(directory)
        self.save_freq = save_freq
        self._keep = keep
        self._opened: CheckpointManager | None = None
        self._steps = 0

    @property
    def manager(self) -> CheckpointManager:
        """Of the directory."""
        if self._opened is None:
            self._opened = _manager(self, self.directory, self._keep)
        return self._opened

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps += 1
        if self.save_freq != "epoch" and self._steps % self.save_freq == 0:
            self._save(wait=False)

    def _save(self, wait: bool) -> str | None:
        return _saved_if_possible(self.manager, wait)

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
            raise ValueError("save_best_only goes with save_freq='epoch': what is best is known behind an epoch")
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
            logger.error("who waits for checkpoints in %s is not told that none follows: %s", self.directory, error)

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
                logger.error("the backup stays: %s", error)

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        self._save(wait=True)


# Logs


class CSVLogger(Callback):
    """Writes the logs of each epoch as a line into a file.

    Args:
        filename: of the file. Its columns are those of the first epoch.
        separator: between columns.
        append: to what it holds; a training that is gone on with does so in any case.
    """

    def __init__(self, filename: str | PathLike[str], separator: str = ",", append: bool = False) -> None:
        self.filename, self.separator, self.append = Path(filename), separator, append
        self._names: list[str] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._names = None
        with self.filename.open("a"):
            pass  # a place where nothing can be written is found now

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        try:
            self._write({"epoch": epoch, **(logs or {})})
        except OSError as error:
            logger.error("%s lacks epoch %d, the training goes on: %s", self.filename, epoch, error)

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
    """Writes the logs as event files, for TensorBoard: in `log_dir/train` and `log_dir/validation`.

    It needs tensorboardX: `pip install "pscluster[tensorboard]"`.

    Args:
        log_dir: a directory, or a URL of fsspec.
        update_freq: "epoch", or also every so many steps ("batch": 1), under the names "batch_...".
    """

    def __init__(self, log_dir: str | PathLike[str] = "logs", update_freq: int | Literal["epoch", "batch"] = "epoch"):
        every = 1 if update_freq == "batch" else 0 if update_freq == "epoch" else update_freq
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"update_freq is {update_freq!r}; it must be 'epoch', 'batch', or a number of steps")
        self.log_dir = os.fspath(log_dir).rstrip("/")
        self._every = every
        self._writers: dict[str, EventWriter] = {}
        self._steps = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._steps = 0
        self._writer("train")  # a place where nothing can be written is found now

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
            logger.error("%s lacks step %d, the training goes on: %s", self.log_dir, step, error)
            self._close(kind)  # with half an event at its end nobody reads on: the next one is in another file

    def _close(self, kind: str) -> None:
        if (writer := self._writers.pop(kind, None)) is not None:
            with contextlib.suppress(OSError):
                writer.close()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            self._write("train", self._steps, {f"batch_{name}": value for name, value in (logs or {}).items()})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        for kind in ("train", "validation"):
            mine = {
                f"epoch_{name.removeprefix('val_')}": value
                for name, value in (logs or {}).items()
                if name.startswith("val_") == (kind == "validation")
            }
            if mine:
                self._write(kind, epoch, mine)

    def close(self) -> None:
        for kind in list(self._writers):
            self._close(kind)

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
