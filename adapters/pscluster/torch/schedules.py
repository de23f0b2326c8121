"""Schedulers of torch, which change an optimizer's learning rate, as schedules that the servers have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pscluster.core import checks
from pscluster.ps.optim.schedules import LearningRateSchedule
from pscluster.ps.optim.tabulated import tabulated


def schedule(
    scheduler: Callable[[torch.optim.Optimizer], Any], learning_rate: float, steps: int, *, every: int = 1
) -> LearningRateSchedule:
    """Return a schedule for our optimizers with the rates that a scheduler of torch gives.

        rate = pscluster.torch.schedule(partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=900), 0.1, steps=900)
        optimizer = optimizers.SGD(rate)

    The rates go to the servers as a table of at most 10,000. Where there are more, each holds for several steps.

    Args:
        scheduler: makes a scheduler of an optimizer, as `partial(torch.optim.lr_scheduler.StepLR, step_size=30)`.
        learning_rate: that of the optimizer, at least 0.
        steps: for how many steps of training the rate changes. From there on it stays.
        every: after how many of them the scheduler's `step()` is called: those of an epoch, where it counts epochs.

    Raises:
        TypeError: `scheduler` does not make a scheduler of torch.
        ValueError: a number is out of range; or the scheduler follows a metric, as ReduceLROnPlateau does.
    """
    rate = checks.real("learning_rate", learning_rate, at_least=0)
    every = checks.whole("every", every, at_least=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    if not isinstance(made, LRScheduler) or made.optimizer is not optimizer:
        raise TypeError(
            "schedule takes what makes a scheduler of torch.optim.lr_scheduler for an optimizer, such as "
            f"partial(StepLR, step_size=30), not {checks.type_of(scheduler)}"
        )
    if isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau follows a metric, and has no rates beforehand: use callbacks.ReduceLROnPlateau in fit"
        )
    rates: list[float] = []

    def rates_of(at: Sequence[int]) -> Sequence[float]:
        while len(rates) <= max(at) // every:
            if rates:
                optimizer.step()  # otherwise torch warns
                made.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return [rates[step // every] for step in at]

    return tabulated(rates_of, steps)
