"""Learning-rate schedules: pure functions of the step.

As in Keras, a schedule takes the number of updates applied before: 0 for the first one, `schedule(step - 1)` for the
`step`-th gradient of an update rule, whose steps count from 1. Schedules have no state, so each shard calls them with
its own count, in any order, and no shared counter is needed.

Names, parameters, defaults and formulas are those of Keras 3's `keras.optimizers.schedules`, computed in float64
where Keras uses float32; `WarmUp` is ours. In the formulas s is the step and lr the initial learning rate; ^ is a
power. Values that Keras accepts but that make no sense (a share above 1, a warm-up without a target) are refused.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from pscluster.core.checks import Parameters, checked, real, whole

_steps = partial(whole, kind="whole number of steps")
_RATE = checked(partial(real, at_least=0))
_SHARE = checked(partial(real, at_least=0, at_most=1))
_POSITIVE = checked(partial(real, above=0))
_STEPS = checked(partial(_steps, at_least=1))


def _rate_or_none(name: str, value: Any) -> float | None:
    return None if value is None else real(name, value, at_least=0)


def _rate_or_schedule(name: str, value: Any) -> float | LearningRateSchedule:
    return value if isinstance(value, LearningRateSchedule) else real(name, value, at_least=0)


def _sequence_of(check: Callable[[str, Any], object]) -> dict[str, Any]:
    """Return a check of every element of a sequence, which makes it a tuple."""

    def check_all(name: str, values: Any) -> tuple[object, ...]:
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
            raise ValueError(f"{name} is {values!r}; it must be a sequence of numbers")
        return tuple(check(name, value) for value in values)

    return checked(check_all)


@dataclass(frozen=True)
class LearningRateSchedule(Parameters, ABC):
    """A learning rate for every step; its parameters are the fields of the dataclass.

    These are the `SCHEDULES`. For another formula, set the rate between steps, or write a custom rule
    (`rule.UpdateRule.learning_rate_at`).
    """

    def __call__(self, step: int) -> float:
        """Return the rate of the update after `step` updates. ValueError if negative, TypeError if no integer."""
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step {step} is below 0: a schedule takes the number of updates applied so far")
        return self.at(step)

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the same for a step known to be an integer, 0 or more."""

    def to_spec(self) -> dict[str, Any]:
        """Return the name and the parameters as JSON values, for `from_spec`."""
        return {"name": self.name} | {item: _plain(value) for item, value in self.values_by_name().items()}


def from_spec(spec: Mapping[str, Any]) -> LearningRateSchedule:
    """Return the schedule that `to_spec` described; missing parameters have their defaults.

    Raises:
        ValueError: unknown schedule or parameter, one without a default is missing, or a value is out of its limits.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"a schedule is an object with a name and parameters, not {spec!r:.40}")
    name = spec.get("name")
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    values = {item: from_spec(value) if isinstance(value, Mapping) else value for item, value in spec.items()}
    del values["name"]
    return SCHEDULES[name].made_of(values)


def _plain(value: object) -> object:
    if isinstance(value, LearningRateSchedule):
        return value.to_spec()
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """Multiplied by `decay_rate` every `decay_steps` steps.

        lr * decay_rate ^ (s / decay_steps)          the exponent rounded down if staircase

    With a `decay_rate` above 1 the rate grows, eventually to infinity.
    """

    name: ClassVar[str] = "exponential_decay"

    initial_learning_rate: float = field(metadata=_RATE)
    decay_steps: int = field(metadata=_STEPS)
    decay_rate: float = field(metadata=_POSITIVE)
    staircase: bool = False

    def at(self, step: int) -> float:
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.initial_learning_rate * _power(self.decay_rate, exponent)


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """One value up to and including each boundary's step, and one after the last.

    values[0]                                    s <= boundaries[0]
    values[i]                                    boundaries[i - 1] < s <= boundaries[i]
    values[-1]                                   s > boundaries[-1]
    """

    name: ClassVar[str] = "piecewise_constant_decay"

    boundaries: tuple[int, ...] = field(metadata=_sequence_of(partial(_steps, at_least=0)))
    values: tuple[float, ...] = field(metadata=_sequence_of(partial(real, at_least=0)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(a >= b for a, b in itertools.pairwise(self.boundaries)):
            raise ValueError(f"{self.name}: boundaries are {self.boundaries}, but each must be above the one before it")
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"{self.name}: there are {len(self.values)} values for {len(self.boundaries)} boundaries, but there "
                "must be one more value than boundaries: the last is for all steps after the last boundary"
            )

    def at(self, step: int) -> float:
        return self.values[bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class PolynomialDecay(LearningRateSchedule):
    """From the initial rate to `end_learning_rate` in `decay_steps` steps; then constant, or again.

        (lr - end) * (1 - min(s, decay_steps) / decay_steps) ^ power + end

    With cycle, n = decay_steps * max(1, ceil(s / decay_steps)) replaces decay_steps, and min(s, n) is s: the rate
    jumps up after each multiple of decay_steps, less far every time.
    """

    name: ClassVar[str] = "polynomial_decay"

    initial_learning_rate: float = field(metadata=_RATE)
    decay_steps: int = field(metadata=_STEPS)
    end_learning_rate: float = field(default=0.0001, metadata=_RATE)
    power: float = field(default=1.0, metadata=_POSITIVE)
    cycle: bool = False

    def at(self, step: int) -> float:
        length = self.decay_steps * (max(1, -(-step // self.decay_steps)) if self.cycle else 1)
        remaining = 1.0 - min(step, length) / length
        height = self.initial_learning_rate - self.end_learning_rate
        return height * _power(remaining, self.power) + self.end_learning_rate


@dataclass(frozen=True)
class InverseTimeDecay(LearningRateSchedule):
    """Divided by a number that grows by `decay_rate` every `decay_steps` steps.

    lr / (1 + decay_rate * s / decay_steps)      s / decay_steps rounded down if staircase
    """

    name: ClassVar[str] = "inverse_time_decay"

    initial_learning_rate: float = field(metadata=_RATE)
    decay_steps: int = field(metadata=_STEPS)
    decay_rate: float = field(metadata=_RATE)
    staircase: bool = False

    def at(self, step: int) -> float:
        periods = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.initial_learning_rate / (1.0 + self.decay_rate * periods)


@dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """Half a cosine, without restarts, down to the share `alpha` (Loshchilov and Hutter 2017), after a warm-up.

        lr * ((1 - alpha) * (1 + cos(pi * min(s, decay_steps) / decay_steps)) / 2 + alpha)

    With a warm-up, a straight line (Goyal et al. 2017), warmup_target replaces lr and s - warmup_steps replaces s
    above, and before that the rate is

        lr + (warmup_target - lr) * s / warmup_steps                 s < warmup_steps

    A warm-up needs both target and steps; one without the other is refused (Keras ignores it).
    """

    name: ClassVar[str] = "cosine_decay"

    initial_learning_rate: float = field(metadata=_RATE)
    decay_steps: int = field(metadata=_STEPS)
    alpha: float = field(default=0.0, metadata=_SHARE)
    warmup_target: float | None = field(default=None, metadata=checked(_rate_or_none))
    warmup_steps: int = field(default=0, metadata=checked(partial(_steps, at_least=0)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.warmup_target is None) is not (self.warmup_steps == 0):
            raise ValueError(
                f"{self.name}: warmup_target is {self.warmup_target!r} and warmup_steps is {self.warmup_steps}: "
                "a warm-up needs both a rate and at least 1 step; for none, leave out both"
            )

    def at(self, step: int) -> float:
        target = self.warmup_target
        if target is None:
            target = self.initial_learning_rate
        elif step < self.warmup_steps:
            return _line(self.initial_learning_rate, target, step / self.warmup_steps)
        done = min(step - self.warmup_steps, self.decay_steps) / self.decay_steps
        return target * ((1.0 - self.alpha) * _half_cosine(done) + self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts(LearningRateSchedule):
    """Half a cosine again and again (SGDR: Loshchilov and Hutter 2017).

        lr * ((1 - alpha) * m_mul ^ i * (1 + cos(pi * f)) / 2 + alpha)

    where i counts the restarts and f is the elapsed share of the current period. The first period has
    first_decay_steps steps, each later one t_mul times as many as the one before.
    """

    name: ClassVar[str] = "cosine_decay_restarts"

    initial_learning_rate: float = field(metadata=_RATE)
    first_decay_steps: int = field(metadata=_STEPS)
    t_mul: float = field(default=2.0, metadata=checked(partial(real, at_least=1)))
    m_mul: float = field(default=1.0, metadata=_RATE)
    alpha: float = field(default=0.0, metadata=_SHARE)

    def at(self, step: int) -> float:
        restarts, done = self._period(step)
        peak = _power(self.m_mul, restarts)
        return self.initial_learning_rate * ((1.0 - self.alpha) * peak * _half_cosine(done) + self.alpha)

    def _period(self, step: int) -> tuple[int, float]:
        """Return the number of restarts, and the elapsed share of the current period."""
        if self.t_mul == 1.0:
            restarts, rest = divmod(step, self.first_decay_steps)
            return restarts, rest / self.first_decay_steps
        # In units of the first period: period i starts at (t_mul^i - 1) / (t_mul - 1), and lasts t_mul^i.
        growth = self.t_mul - 1.0
        reached = 1.0 + step / self.first_decay_steps * growth  # t_mul^i at the start of period i
        restarts = int(math.log(reached) / math.log(self.t_mul))
        # Rounding errors must not decide at a restart's step, nor at the one before: these differ by more than that.
        enough = reached * (1 + 1e-13)
        if _power(self.t_mul, restarts + 1) <= enough:
            restarts += 1
        elif _power(self.t_mul, restarts) > enough:
            restarts -= 1
        length = _power(self.t_mul, restarts)
        return restarts, max(0.0, (reached - length) / growth / length)


@dataclass(frozen=True)
class WarmUp(LearningRateSchedule):
    """A straight line up to a rate or to a schedule, which begins then (Goyal et al. 2017).

        start + (target - start) * s / warmup_steps                  s < warmup_steps
        schedule(s - warmup_steps)                                   from there on

    where the target is the schedule's first rate, schedule(0), or the rate given, and start is
    initial_learning_rate. As in Keras' CosineDecay, the first update has the rate `start`: with the default of 0 it
    only changes the slots.
    """

    name: ClassVar[str] = "warm_up"

    learning_rate: LearningRateSchedule | float = field(metadata=checked(_rate_or_schedule))
    warmup_steps: int = field(metadata=_STEPS)
    initial_learning_rate: float = field(default=0.0, metadata=_RATE)

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return _line(self.initial_learning_rate, self._then(0), step / self.warmup_steps)
        return self._then(step - self.warmup_steps)

    def _then(self, step: int) -> float:
        rate = self.learning_rate
        return rate.at(step) if isinstance(rate, LearningRateSchedule) else rate


_DECAYS = (ExponentialDecay, PiecewiseConstantDecay, PolynomialDecay, InverseTimeDecay)
_KINDS = (*_DECAYS, CosineDecay, CosineDecayRestarts, WarmUp)
SCHEDULES: Mapping[str, type[LearningRateSchedule]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""The schedules that come with pscluster, by name."""


def _line(start: float, end: float, done: float) -> float:
    return start + (end - start) * done


def _half_cosine(done: float) -> float:
    """Return a value that falls from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf
