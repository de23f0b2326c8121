"""What an update rule is: what one gradient does to a parameter and its slots, element by element.

A rule is a frozen set of hyperparameters and three pure functions of it: which slots a parameter has, what
depends only on the step, and the update of one block of elements. A rule knows nothing of shards, blocks, rows,
locks or half-precision types: `kernels` cuts the work into blocks and takes care of the rest.

Averages are computed as s + (x - s) * (1 - beta) where beta is large, not as beta * s + (1 - beta) * x: rounding
beta = 0.999 to float32 would alone shift the limit of the second form by 1.3e-5 of its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import numpy.typing as npt

from pscluster.core import checks

Array = npt.NDArray[Any]
Scalars = tuple[float, ...]
Slots = Mapping[str, Array]
Buffers = Sequence[Array]


def hyperparameter(default: float, **limits: Unpack[checks.Limits]) -> float:
    """Declare a hyperparameter of a rule: a field with its default, and the limits that `UpdateRule` checks."""
    check = partial(checks.real, hint=f": the default is {default:g}", **limits)
    declared: float = field(default=default, metadata=checks.checked(check))
    return declared


@dataclass(frozen=True)
class UpdateRule(checks.Parameters, ABC):
    """An update rule and its hyperparameters, which are the fields of the dataclass: floats and bools.

    Write a custom rule as a frozen dataclass derived from this, with a `name`, `slots` and `apply`.
    """

    scratch: ClassVar[int] = 1  # the number of buffers that `apply` needs

    learning_rate: float = hyperparameter(0.001, at_least=0)

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, float]:
        """The slots of a parameter, each of its shape: name and initial value."""

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the `step`-th gradient, counted from 1: constant unless overridden."""
        del step
        return self.learning_rate

    def scalars(self, step: int) -> Scalars:
        """Compute what depends only on the step, in float64: once per gradient, not per block.

        Steps count from 1. Every gradient of a parameter counts; sparse ones count for every row.
        """
        if step < 1:
            raise ValueError(f"step {step} is below 1: steps count from 1, the first gradient")
        return (self.learning_rate_at(step),)

    @abstractmethod
    def apply(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        """Update one block of elements in place.

        Args:
            param: the block of the parameter, shape (n,), float32 or float64, contiguous.
            grad: its gradient, shape (n,), of the same dtype. Do not write to it.
            slots: by name, the same block of each slot, shape (n,), of the same dtype.
            scalars: what `scalars` returned for this step.
            scratch: `self.scratch` buffers, shape (n,), of the same dtype, with arbitrary content. Blocks fit
                in the processor's cache, so write intermediate results to the buffers (`out=`): allocating an
                array costs more than the arithmetic.
        """

    @classmethod
    def from_spec(cls, numbers: Mapping[str, float], flags: Mapping[str, bool]) -> Self:
        """Return the rule with these hyperparameters; the others have their defaults."""
        return cls.made_of({**numbers, **flags})

    def to_spec(self) -> tuple[dict[str, float], dict[str, bool]]:
        """Return the hyperparameters as numbers and flags by name, for `from_spec`."""
        values = self.values_by_name()
        flags = {name: value for name, value in values.items() if isinstance(value, bool)}
        return {name: value for name, value in values.items() if name not in flags}, flags


@dataclass(frozen=True)
class DecayingRule(UpdateRule):
    """Base of rules with decoupled weight decay. Their first scalar is the factor that the parameter decays by."""

    _: KW_ONLY
    weight_decay: float = hyperparameter(0.0, at_least=0)

    def scalars(self, step: int) -> Scalars:
        (rate,) = super().scalars(step)
        return (1.0 - rate * self.weight_decay, rate)

    def apply(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        if scalars[0] != 1.0:
            np.multiply(param, scalars[0], out=param)
        self._step(param, grad, slots, scalars, scratch)

    @abstractmethod
    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        """Update one block, which has decayed, in place; see `apply`."""


def move_average(slot: Array, value: Array, beta: float, scratch: Array) -> None:
    """Set slot <- beta * slot + (1 - beta) * value, where `value` may be the scratch itself."""
    if beta < 0.5:  # the slot follows the value closely: keep the digits of a value much smaller than the last
        np.subtract(slot, value, out=slot)
        np.multiply(slot, beta, out=slot)
        np.add(slot, value, out=slot)
    else:
        np.subtract(value, slot, out=scratch)
        np.multiply(scratch, 1.0 - beta, out=scratch)
        np.add(slot, scratch, out=slot)
