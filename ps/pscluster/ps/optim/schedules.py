"""Learning-rate schedules: pure functions of the step.

As with Keras a schedule is asked with the number of updates that were applied before: 0 for the first one,
`schedule(step - 1)` for the `step`-th gradient of an update rule, whose steps count from 1. Nothing is kept
between two calls, so each shard asks with its own count, in any order, and nobody waits for a variable that
everybody reads.

Names, parameters, defaults and formulas are those of Keras 3's `keras.optimizers.schedules`, computed in
float64 where Keras has float32; `WarmUp` is ours. In the formulas s is the step and lr the initial learning
rate; ^ is a power. What Keras lets pass and can't mean (a share above 1, a warm-up without an end) is refused.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Unpack

import numpy as np

from pscluster.core import checks

__all__ = [
    "SCHEDULES",
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "WarmUp",
    "from_spec",
]


@dataclass(frozen=True)
class LearningRateSchedule(ABC):
    """A learning rate for every step; its parameters are the fields of the dataclass.

    There are those of `SCHEDULES`. A rate by another formula is set between steps, or comes from a rule of your own
    (`rules.UpdateRule.learning_rate_at`).

    Attributes:
        name: what the schedule is called on the wire and in `SCHEDULES`.
    """

    name: ClassVar[str]

    def __call__(self, step: int) -> float:
        """The learning rate of the update before which `step` updates were applied.

        Raises:
            ValueError: the step is negative.
            TypeError: it is no integer.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step {step} is below 0: a schedule takes the number of updates applied so far")
        return self.at(step)

    @abstractmethod
    def at(self, step: int) -> float:
        """The same for a step that is known to be an integer, 0 or more."""

    def to_spec(self) -> dict[str, Any]:
        """The name and the parameters, as JSON has them, for `from_spec`."""
        return {"name": self.name} | {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


def from_spec(spec: Mapping[str, Any]) -> LearningRateSchedule:
    """The schedule that `to_spec` described; parameters not named have their defaults.

    Raises:
        ValueError: no such schedule or parameter, one without a default is missing, or a value is out of its
            limits.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"a schedule is an object with a name and parameters, not {spec!r:.40}")
    name = spec.get("name")
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    kind = SCHEDULES[name]
    values = {
        item: from_spec(value) if isinstance(value, Mapping) else value
        for item, value in spec.items()
        if item != "name"
    }
    known = [item.name for item in fields(kind)]
    for item in values:
        if item not in known:
            raise ValueError(f"{name} has no parameter {item!r}: it has {', '.join(known)}")
    try:
        return kind(**values)
    except TypeError as error:  # it names the parameters that are missing
        raise ValueError(f"{name}: {error}") from None


def _plain(value: object) -> object:
    if isinstance(value, LearningRateSchedule):
        return value.to_spec()
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """Multiplied by `decay_rate` every `decay_steps` steps.

        lr * decay_rate ^ (s / decay_steps)          the exponent rounded down if staircase

    A rate above 1 grows, at last to infinity.
    """

    name: ClassVar[str] = "exponential_decay"

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _real(self, "initial_learning_rate")
        _whole(self, "decay_steps")
        _real(self, "decay_rate", above=0)
        _flag(self, "staircase")

    def at(self, step: int) -> float:
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.initial_learning_rate * _power(self.decay_rate, exponent)


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """One value up to each boundary, the boundary's own step included, and one behind the last.

    values[0]                                    s <= boundaries[0]
    values[i]                                    boundaries[i - 1] < s <= boundaries[i]
    values[-1]                                   s > boundaries[-1]
    """

    name: ClassVar[str] = "piecewise_constant_decay"

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for item in ("boundaries", "values"):
            given = getattr(self, item)
            if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray):
                raise ValueError(f"{self.name}: {item} is {given!r}; it must be a sequence of numbers")
        _set(self, "boundaries", tuple(_steps(self, "boundaries", value, 0) for value in self.boundaries))
        _set(self, "values", tuple(checks.real(f"{self.name}: values", value, at_least=0) for value in self.values))
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
    """From the initial rate to `end_learning_rate` in `decay_steps` steps, where it stays or begins again.

        (lr - end) * (1 - min(s, decay_steps) / decay_steps) ^ power + end

    With cycle, n = decay_steps * max(1, ceil(s / decay_steps)) stands for decay_steps, and min(s, n) is s: the
    rate jumps up behind each multiple of decay_steps, every time less far.
    """

    name: ClassVar[str] = "polynomial_decay"

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        _real(self, "initial_learning_rate")
        _whole(self, "decay_steps")
        _real(self, "end_learning_rate")
        _real(self, "power", above=0)
        _flag(self, "cycle")

    def at(self, step: int) -> float:
        length = self.decay_steps * (max(1, -(-step // self.decay_steps)) if self.cycle else 1)
        left = 1.0 - min(step, length) / length
        return (self.initial_learning_rate - self.end_learning_rate) * _power(left, self.power) + self.end_learning_rate


@dataclass(frozen=True)
class InverseTimeDecay(LearningRateSchedule):
    """Divided by a number that grows by `decay_rate` every `decay_steps` steps.

    lr / (1 + decay_rate * s / decay_steps)      s / decay_steps rounded down if staircase
    """

    name: ClassVar[str] = "inverse_time_decay"

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _real(self, "initial_learning_rate")
        _whole(self, "decay_steps")
        _real(self, "decay_rate")
        _flag(self, "staircase")

    def at(self, step: int) -> float:
        periods = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.initial_learning_rate / (1.0 + self.decay_rate * periods)


@dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """Half a cosine, without restarts, down to the share `alpha` (Loshchilov and Hutter 2017), after a warm-up.

        lr * ((1 - alpha) * (1 + cos(pi * min(s, decay_steps) / decay_steps)) / 2 + alpha)

    With a warm-up, a straight line (Goyal et al. 2017), warmup_target stands for lr above and
    s - warmup_steps for s, and before that the rate is

        lr + (warmup_target - lr) * s / warmup_steps                 s < warmup_steps

    The target and the steps of a warm-up are given together or not at all (Keras ignores the one or the other).
    """

    name: ClassVar[str] = "cosine_decay"

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _real(self, "initial_learning_rate")
        _whole(self, "decay_steps")
        _real(self, "alpha", at_least=0, at_most=1)
        if self.warmup_target is not None:
            _real(self, "warmup_target")
        _whole(self, "warmup_steps", at_least=0)
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

    where i counts the restarts and f is the part of the current period that is over. The first period has
    first_decay_steps steps, each later one t_mul times those of the one before.
    """

    name: ClassVar[str] = "cosine_decay_restarts"

    initial_learning_rate: float
    first_decay_steps: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        _real(self, "initial_learning_rate")
        _whole(self, "first_decay_steps")
        _real(self, "t_mul", at_least=1)
        _real(self, "m_mul")
        _real(self, "alpha", at_least=0, at_most=1)

    def at(self, step: int) -> float:
        restarts, done = self._period(step)
        peak = _power(self.m_mul, restarts)
        return self.initial_learning_rate * ((1.0 - self.alpha) * peak * _half_cosine(done) + self.alpha)

    def _period(self, step: int) -> tuple[int, float]:
        """How many restarts there were, and which part of the current period is over."""
        if self.t_mul == 1.0:
            restarts, rest = divmod(step, self.first_decay_steps)
            return restarts, rest / self.first_decay_steps
        # In first periods: period i starts at (t_mul^i - 1) / (t_mul - 1), and is t_mul^i long.
        growth = self.t_mul - 1.0
        reached = 1.0 + step / self.first_decay_steps * growth  # t_mul^i at the start of period i
        restarts = int(math.log(reached) / math.log(self.t_mul))
        # Rounding errors must not decide at a restart's own step, nor at the one before: these differ by more.
        enough = reached * (1 + 1e-13)
        if _power(self.t_mul, restarts + 1) <= enough:
            restarts += 1
        elif _power(self.t_mul, restarts) > enough:
            restarts -= 1
        length = _power(self.t_mul, restarts)
        return restarts, max(0.0, (reached - length) / growth / length)


@dataclass(frozen=True)
class WarmUp(LearningRateSchedule):
    """A straight line up to a rate or a schedule, which then begins (Goyal et al. 2017).

        start + (target - start) * s / warmup_steps                  s < warmup_steps
        schedule(s - warmup_steps)                                   from there on

    where the target is what the schedule begins with, schedule(0), or the rate, and start is
    initial_learning_rate. As in Keras' CosineDecay the first update has the rate `start`: with the default, 0,
    it only moves the slots.
    """

    name: ClassVar[str] = "warm_up"

    learning_rate: LearningRateSchedule | float
    warmup_steps: int
    initial_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.learning_rate, LearningRateSchedule):
            _real(self, "learning_rate")
        _whole(self, "warmup_steps")
        _real(self, "initial_learning_rate")

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return _line(self.initial_learning_rate, self._then(0), step / self.warmup_steps)
        return self._then(step - self.warmup_steps)

    def _then(self, step: int) -> float:
        rate = self.learning_rate
        return rate.at(step) if isinstance(rate, LearningRateSchedule) else rate


SCHEDULES: Mapping[str, type[LearningRateSchedule]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            *(ExponentialDecay, PiecewiseConstantDecay, PolynomialDecay, InverseTimeDecay),
            *(CosineDecay, CosineDecayRestarts, WarmUp),
        )
    }
)
"""The schedules that come with pscluster, by name."""


def _line(start: float, end: float, done: float) -> float:
    return start + (end - start) * done


def _half_cosine(done: float) -> float:
    """From 1 down to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


# --- Parameters -------------------------------------------------------------------------------------------


def _set(schedule: LearningRateSchedule, item: str, value: object) -> None:
    object.__setattr__(schedule, item, value)  # the dataclass is frozen


def _real(schedule: LearningRateSchedule, item: str, **limits: Unpack[checks.Limits]) -> None:
    """Make a parameter a float within its limits, 0 or more unless others are given."""
    name = f"{schedule.name}: {item}"
    _set(schedule, item, checks.real(name, getattr(schedule, item), **limits or checks.Limits(at_least=0)))


def _whole(schedule: LearningRateSchedule, item: str, *, at_least: int = 1) -> None:
    """Make a parameter an int within its limit."""
    _set(schedule, item, _steps(schedule, item, getattr(schedule, item), at_least))


def _steps(schedule: LearningRateSchedule, item: str, value: object, at_least: int) -> int:
    return checks.whole(f"{schedule.name}: {item}", value, kind="whole number of steps", at_least=at_least)


def _flag(schedule: LearningRateSchedule, item: str) -> None:
    _set(schedule, item, checks.flag(f"{schedule.name}: {item}", getattr(schedule, item)))
