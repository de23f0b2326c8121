"""Schedulers of torch as schedules of the servers: the same rates, step by step."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import pscluster.torch


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=30, cycle_momentum=False)


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, 20)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(lr_scheduler.StepLR, step_size=7, gamma=0.5),
        functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
        one_cycle,
        warmed_up,
    ],
)
def test_rates_are_those_of_the_scheduler(make: Any, every: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    scheduler, expected = make(optimizer), []
    for step in range(25):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % every == every - 1:
            scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = pscluster.torch.schedule(make, 0.2, steps=24, every=every)
    assert [schedule(step) for step in range(25)] == expected
    assert schedule(100) == expected[-1]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau, ValueError, r"follows a metric, .* use callbacks\.ReduceLROnPlateau in fit"),
        (lambda optimizer: 0.1, TypeError, "takes what makes a scheduler of torch"),
        (0.1, TypeError, "such as partial.StepLR, step_size=30., not a float"),
    ],
)
def test_what_is_no_scheduler_of_steps_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pscluster.torch.schedule(make, 0.1, steps=10)
