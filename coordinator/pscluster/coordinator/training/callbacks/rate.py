"""Callbacks that set the learning rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pscluster.coordinator.training.callbacks.base import Callback, Logs
from pscluster.coordinator.training.callbacks.monitor import EPOCHS, Mode, Monitor
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.optim.schedules import LearningRateSchedule

logger = logging.getLogger(__name__)


class ReduceLROnPlateau(Callback):
    """Reduces the learning rate when a number has not improved for some epochs.

    Args:
        optimizer: its rate must be a number, not a schedule.
        monitor: the number's name in the logs.
        factor: by which the rate is multiplied, between 0 and 1.
        patience: epochs without an improvement before a reduction.
        mode: "min" or "max"; "auto": by the name.
        min_delta: smaller changes are no improvement.
        cooldown: epochs after a reduction that do not count.
        min_lr: the lower limit of the rate.
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
        _rate_of(optimizer)
        self._monitor = Monitor(monitor, mode, min_delta)
        self.optimizer = optimizer
        self.factor = checks.real("factor", factor, above=0, below=1)
        self.patience = checks.whole("patience", patience, kind=EPOCHS, at_least=0)
        self.cooldown = checks.whole("cooldown", cooldown, kind=EPOCHS, at_least=0)
        self.min_lr = checks.real("min_lr", min_lr, at_least=0)
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
                logger.info("epoch %d: the learning rate is now %g", epoch + 1, _rate_of(self.optimizer))
                self._wait, self._cooling = 0, self.cooldown

    def state(self) -> dict[str, Any]:
        return {"best": self._monitor.best, "wait": self._wait, "cooling": self._cooling}

    def load(self, state: Mapping[str, Any]) -> None:
        self._monitor.best, self._wait, self._cooling = state["best"], state["wait"], state["cooling"]


class LearningRateScheduler(Callback):
    """Sets the learning rate, a number, to what `schedule(epoch, rate)` returns at each epoch's begin.

        halved = LearningRateScheduler(optimizer, lambda epoch, rate: rate / 2)
        coordinator.fit(step, data, epochs=9, callbacks=[halved])

    Args:
        optimizer: whose rate is set, on the servers.
        schedule: a function of the epoch, from 0, and of the rate until now; returns the rate.

    Raises:
        TypeError: `schedule` is no function.
        MisuseError: the optimizer's rate is a schedule.
    """

    def __init__(self, optimizer: Optimizer, schedule: Callable[[int, float], float]) -> None:
        _rate_of(optimizer)
        if not callable(schedule):
            raise TypeError(f"schedule is {type_of(schedule)}; it must be a function of the epoch and the rate")
        self.optimizer, self.schedule = optimizer, schedule
        self._begun: tuple[int, float] | None = None  # an epoch, and the rate before it

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begun = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._begun is None or self._begun[0] != epoch:  # otherwise it is resumed
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
        raise TypeError(f"give the optimizer whose learning rate should change, not {type_of(optimizer)}")
    rate = optimizer.learning_rate
    if isinstance(rate, LearningRateSchedule):
        raise MisuseError(f"the learning rate of {optimizer.name!r} is a schedule: make the optimizer with a number")
    return rate
