"""Learning-rate schedules of optax, which are functions of JAX, as schedules that the servers have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.ps.optim.schedules import LearningRateSchedule
from pscluster.ps.optim.tabulated import tabulated


def schedule(fn: Callable[[Any], Any], steps: int) -> LearningRateSchedule:
    """Return a schedule for our optimizers with the rates of an optax schedule, or of another function of the step.

        rate = pscluster.jax.schedule(optax.warmup_cosine_decay_schedule(0.0, 0.1, 100, 2000), steps=2000)
        optimizer = optimizers.SGD(rate, momentum=0.9)

    The servers don't have JAX: the rates go there as a table of at most 10,000. Where `steps` is more, each rate holds
    for several steps.

    Args:
        fn: called with the step, counted from 0; returns a number.
        steps: for how many steps the rate changes. From there on it is `fn(steps)`.

    Raises:
        TypeError: `fn` is not a function.
        ValueError: a rate is negative, NaN or infinite: its step is named.
        MisuseError: `fn` returned something other than a number.
    """
    if not callable(fn):
        raise TypeError(f"schedule takes a function of the step, such as optax's schedules, not {type_of(fn)}")

    def rates_of(at: Sequence[int]) -> Sequence[float]:
        return [_number(step, fn(step)) for step in at]

    return tabulated(rates_of, steps)


def _number(step: int, rate: Any) -> float:
    try:
        return float(rate)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"the schedule returned {type_of(rate)} for step {step}: it must return a number") from error
