"""The update rules: what one gradient does to a parameter and its slots, element by element.

A rule is a frozen set of hyperparameters and three pure functions of it: which slots a parameter has, what
depends only on the step, and the update of one block of elements. A rule knows nothing of shards, blocks, rows,
locks or half-precision types: `kernels` cuts the work into blocks and takes care of the rest.

Hyperparameters have Keras' names and defaults, and the formulas are Keras' unless a docstring says otherwise. In them
t is the step, counted from 1; p the parameter, g its gradient, lr the learning rate; an arrow replaces the left side
in place, and lines run from top to bottom. Weight decay is always decoupled, as in Keras: before the update,
p <- p * (1 - lr * weight_decay). In torch `weight_decay` means that for AdamW only; its other optimizers add
weight_decay * p to the gradient.

Averages are computed as s + (x - s) * (1 - beta) where beta is large, not as beta * s + (1 - beta) * x: rounding
beta = 0.999 to float32 would alone shift the limit of the second form by 1.3e-5 of its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import numpy.typing as npt

from pscluster.core import checks

Array = npt.NDArray[Any]
Scalars = tuple[float, ...]
Slots = Mapping[str, Array]
Buffers = Sequence[Array]

# Keeps 0 / 0 from becoming NaN, and vanishes in any sum that is not itself close to 0. Normal in float32.
_TINY = 1.2e-38

# Multiplied by this, all but the smallest subnormal numbers exceed a learning rate, or are infinite. Finite in float32.
_HUGE = 3e38


def hyperparameter(default: float, **limits: Unpack[checks.Limits]) -> float:
    """Declare a hyperparameter of a rule: a field with its default, and the limits that `UpdateRule` checks."""
    check = partial(checks.real, mend=f": the default is {default:g}", **limits)
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
class _Decaying(UpdateRule):
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


def _average(slot: Array, value: Array, beta: float, scratch: Array) -> None:
    """Set slot <- beta * slot + (1 - beta) * value, where `value` may be the scratch itself."""
    if beta < 0.5:  # the slot follows the value closely: keep the digits of a value much smaller than the last
        np.subtract(slot, value, out=slot)
        np.multiply(slot, beta, out=slot)
        np.add(slot, value, out=slot)
    else:
        np.subtract(value, slot, out=scratch)
        np.multiply(scratch, 1.0 - beta, out=scratch)
        np.add(slot, scratch, out=slot)


@dataclass(frozen=True)
class SGD(_Decaying):
    """Stochastic gradient descent, with momentum (Polyak 1964) or Nesterov's (1983; Sutskever et al. 2013).

        without momentum   p <- p - lr * g

        with momentum      m <- momentum * m - lr * g
                           p <- p + m                              plain
                           p <- p + momentum * m - lr * g          Nesterov

    Without momentum there are no slots. As in Keras, m includes the learning rate; torch's buffer is m / -lr,
    which is equivalent unless the rate changes between steps. Nesterov without momentum is an error, as in torch
    (Keras ignores the flag).
    """

    name: ClassVar[str] = "sgd"

    learning_rate: float = hyperparameter(0.01, at_least=0)
    momentum: float = hyperparameter(0.0, at_least=0, at_most=1)
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("sgd: nesterov is set, but momentum is 0: give a momentum above 0, such as 0.9")

    @property
    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, rate = scalars
        (t,) = scratch
        np.multiply(grad, rate, out=t)
        if not self.momentum:
            np.subtract(param, t, out=param)
            return
        m = slots["momentum"]
        np.multiply(m, self.momentum, out=m)
        np.subtract(m, t, out=m)
        if self.nesterov:
            np.subtract(param, t, out=param)
            np.multiply(m, self.momentum, out=t)
            np.add(param, t, out=param)
        else:
            np.add(param, m, out=param)


@dataclass(frozen=True)
class Adam(_Decaying):
    """Adam (Kingma and Ba 2015, algorithm 1) and AMSGrad (Reddi, Kale and Kumar 2018).

        m <- beta_1 * m + (1 - beta_1) * g
        v <- beta_2 * v + (1 - beta_2) * g^2
        v_hat <- max(v_hat, v)                                     AMSGrad only, replaces v below
        p <- p - lr * (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)

    As in the paper and in torch, epsilon is added to the bias-corrected root. Keras adds the paper's "epsilon hat"
    to the uncorrected root: its first steps are smaller where gradients are of epsilon's size. The default of
    epsilon is Keras' 1e-7; torch's is 1e-8. AMSGrad's maximum is taken before the bias correction, as in Keras and
    torch; the paper has no correction. For sparse gradients see `apply_rows`: t counts all gradients, including
    those that did not touch the row.
    """

    name: ClassVar[str] = "adam"

    beta_1: float = hyperparameter(0.9, at_least=0, below=1)
    beta_2: float = hyperparameter(0.999, at_least=0, below=1)
    epsilon: float = hyperparameter(1e-7, above=0)
    amsgrad: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        return {"m": 0.0, "v": 0.0} | ({"v_hat": 0.0} if self.amsgrad else {})

    def scalars(self, step: int) -> Scalars:
        keep, rate = super().scalars(step)
        # Factoring the corrections out of the root saves a pass: alpha * m / (sqrt(v) + epsilon_t).
        root = sqrt(1.0 - self.beta_2**step)
        return (keep, rate * root / (1.0 - self.beta_1**step), self.epsilon * root)

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, alpha, epsilon_t = scalars
        m, v = slots["m"], slots["v"]
        (t,) = scratch
        _average(m, grad, self.beta_1, t)
        np.multiply(grad, grad, out=t)
        _average(v, t, self.beta_2, t)
        if self.amsgrad:
            np.maximum(slots["v_hat"], v, out=slots["v_hat"])
            v = slots["v_hat"]
        np.sqrt(v, out=t)
        np.add(t, epsilon_t, out=t)
        np.divide(m, t, out=t)
        np.multiply(t, alpha, out=t)
        np.subtract(param, t, out=param)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay by default (Loshchilov and Hutter 2019).

        p <- p * (1 - lr * weight_decay)
        then as Adam

    Equivalent to Adam with the same `weight_decay`; the default is Keras' 0.004 (torch's is 0.01). As in Keras and
    torch, the decay is multiplied by the learning rate, which stands for the paper's schedule multiplier.
    """

    name: ClassVar[str] = "adamw"

    _: KW_ONLY
    weight_decay: float = hyperparameter(0.004, at_least=0)


@dataclass(frozen=True)
class Adagrad(_Decaying):
    """Adagrad (Duchi, Hazan and Singer 2011), diagonal.

        accumulator <- accumulator + g^2
        p <- p - lr * g / sqrt(accumulator + epsilon)

    As in Keras. torch adds epsilon (1e-10) outside the root and starts with an accumulator of 0.
    """

    name: ClassVar[str] = "adagrad"

    initial_accumulator_value: float = hyperparameter(0.1, at_least=0)
    epsilon: float = hyperparameter(1e-7, above=0)

    @property
    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, rate = scalars
        accumulator = slots["accumulator"]
        (t,) = scratch
        np.multiply(grad, grad, out=t)
        np.add(accumulator, t, out=accumulator)
        np.add(accumulator, self.epsilon, out=t)
        np.sqrt(t, out=t)
        np.divide(grad, t, out=t)
        np.multiply(t, rate, out=t)
        np.subtract(param, t, out=param)


@dataclass(frozen=True)
class RMSprop(_Decaying):
    """RMSprop (Hinton 2012, lecture 6e), centered as in Graves (2013), with momentum.

        v <- rho * v + (1 - rho) * g^2
        a <- rho * a + (1 - rho) * g                               centered only
        d  = v                                                     or, centered, max(v - a^2, 0)
        i  = lr * g / sqrt(d + epsilon)
        m <- momentum * m + i                                      with momentum only, replaces i below
        p <- p - i

    Slots: v is "velocity", a "average_gradient", m "momentum". As in Keras, except for the maximum: where the
    gradient hardly changes, rounding may make v - a^2 negative, which gives NaN in Keras. torch adds epsilon (1e-8)
    outside the root, calls rho alpha (0.99), and does not include the learning rate in m.
    """

    name: ClassVar[str] = "rmsprop"

    rho: float = hyperparameter(0.9, at_least=0, below=1)
    momentum: float = hyperparameter(0.0, at_least=0, at_most=1)
    epsilon: float = hyperparameter(1e-7, above=0)
    centered: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        wanted = {"velocity": True, "average_gradient": self.centered, "momentum": self.momentum > 0}
        return {name: 0.0 for name, used in wanted.items() if used}

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, rate = scalars
        v = slots["velocity"]
        (t,) = scratch
        np.multiply(grad, grad, out=t)
        _average(v, t, self.rho, t)
        if self.centered:
            a = slots["average_gradient"]
            _average(a, grad, self.rho, t)
            np.multiply(a, a, out=t)
            np.subtract(v, t, out=t)
            np.maximum(t, 0.0, out=t)
            np.add(t, self.epsilon, out=t)
        else:
            np.add(v, self.epsilon, out=t)
        np.sqrt(t, out=t)
        np.divide(grad, t, out=t)
        np.multiply(t, rate, out=t)
        if self.momentum:
            m = slots["momentum"]
            np.multiply(m, self.momentum, out=m)
            np.add(m, t, out=m)
            np.subtract(param, m, out=param)
        else:
            np.subtract(param, t, out=param)


@dataclass(frozen=True)
class Ftrl(_Decaying):
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), with Keras' and TensorFlow's extensions.

        k  = -learning_rate_power, l1, l2, s: the three regularization strengths below
        n' = n + g^2
        z <- z + g + 2 * s * p - (n'^k - n^k) / lr * p
        n <- n'
        p <- (clip(z, -l1, l1) - z) / (n^k / lr + beta / lr + 2 * l2)

    Slots: n is "accumulator", z "linear". The fields' names are Keras': l1_regularization_strength,
    l2_regularization_strength, l2_shrinkage_regularization_strength. As in Keras; the paper has k = 1/2, beta = 1,
    l2 instead of 2 * l2, n = 0 initially and no shrinkage. torch has no Ftrl.

    Each step computes p anew from z and n, so its initial value is soon forgotten, at once if the gradient is 0.
    Weight decay therefore has little effect; use l2. The difference of powers is computed without subtracting
    them, which would lose all its digits in float32 once n is large. Where n and the denominator are 0, so is z,
    and p becomes 0 (NaN in Keras).
    """

    name: ClassVar[str] = "ftrl"
    scratch: ClassVar[int] = 3

    learning_rate: float = hyperparameter(0.001, above=0)
    learning_rate_power: float = hyperparameter(-0.5, at_most=0)
    initial_accumulator_value: float = hyperparameter(0.1, at_least=0)
    l1_regularization_strength: float = hyperparameter(0.0, at_least=0)
    l2_regularization_strength: float = hyperparameter(0.0, at_least=0)
    l2_shrinkage_regularization_strength: float = hyperparameter(0.0, at_least=0)
    beta: float = hyperparameter(0.0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l2_shrinkage_regularization_strength and not (
            self.initial_accumulator_value or self.l2_regularization_strength or self.beta
        ):
            raise ValueError(
                "ftrl: l2_shrinkage_regularization_strength with initial_accumulator_value, "
                "l2_regularization_strength and beta all 0 would divide by 0 before the first gradient: "
                "make one of them positive"
            )

    @property
    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value, "linear": 0.0}

    def scalars(self, step: int) -> Scalars:
        keep, rate = super().scalars(step)
        if rate <= 0:
            raise ValueError(f"ftrl: the learning rate at step {step} is {rate:g}; it must be above 0")
        return (keep, 1.0 / rate, self.beta / rate + 2.0 * self.l2_regularization_strength)

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, per_rate, plain = scalars
        n, z = slots["accumulator"], slots["linear"]
        t, sigma, power = scratch
        self._grow(n, grad, sigma, power, t)
        np.multiply(sigma, per_rate, out=sigma)
        np.multiply(sigma, param, out=sigma)
        np.add(z, grad, out=z)
        if self.l2_shrinkage_regularization_strength:
            np.multiply(param, 2.0 * self.l2_shrinkage_regularization_strength, out=t)
            np.add(z, t, out=z)
        np.subtract(z, sigma, out=z)
        np.multiply(power, per_rate, out=power)
        np.add(power, plain + _TINY, out=power)
        np.minimum(z, self.l1_regularization_strength, out=t)
        np.maximum(t, -self.l1_regularization_strength, out=t)
        np.subtract(t, z, out=t)
        np.divide(t, power, out=param)

    def _grow(self, n: Array, grad: Array, sigma: Array, power: Array, t: Array) -> None:
        """Set n <- n + grad^2, power = n^k after that, sigma = the growth of n^k."""
        k = -self.learning_rate_power
        np.multiply(grad, grad, out=sigma)
        if k == 0.5:
            # sqrt(n') - sqrt(n) = g^2 / (sqrt(n') + sqrt(n))
            np.sqrt(n, out=t)
            np.add(n, sigma, out=n)
            np.sqrt(n, out=power)
            np.add(t, power, out=t)
            np.add(t, _TINY, out=t)
            np.divide(sigma, t, out=sigma)
            return
        np.add(n, sigma, out=n)
        np.power(n, k, out=power)
        if k == 0.0:
            sigma.fill(0.0)
            return
        # n'^k - n^k = -n'^k * expm1(k * log1p(-g^2 / n'))
        np.add(n, _TINY, out=t)
        np.divide(sigma, t, out=sigma)
        np.negative(sigma, out=sigma)
        np.log1p(sigma, out=sigma)
        np.multiply(sigma, k, out=sigma)
        np.expm1(sigma, out=sigma)
        np.multiply(sigma, power, out=sigma)
        np.negative(sigma, out=sigma)


@dataclass(frozen=True)
class Adadelta(_Decaying):
    """Adadelta (Zeiler 2012, algorithm 1).

        a <- rho * a + (1 - rho) * g^2
        d  = g * sqrt(b + epsilon) / sqrt(a + epsilon)
        b <- rho * b + (1 - rho) * d^2
        p <- p - lr * d

    Slots: a is "accumulated_grad", b "accumulated_delta_var". As in Keras and torch, except for defaults: the paper
    has no learning rate, which is torch's default of 1; Keras' and ours is 0.001. torch's epsilon is 1e-6, its rho
    0.9.
    """

    name: ClassVar[str] = "adadelta"
    slots: ClassVar[Mapping[str, float]] = {"accumulated_grad": 0.0, "accumulated_delta_var": 0.0}
    scratch: ClassVar[int] = 2

    rho: float = hyperparameter(0.95, at_least=0, below=1)
    epsilon: float = hyperparameter(1e-7, above=0)

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, rate = scalars
        a, b = slots["accumulated_grad"], slots["accumulated_delta_var"]
        t, d = scratch
        np.multiply(grad, grad, out=t)
        _average(a, t, self.rho, t)
        # A single root of the quotient would save a pass, but overflows in float32 where a is close to 0.
        np.add(b, self.epsilon, out=d)
        np.sqrt(d, out=d)
        np.add(a, self.epsilon, out=t)
        np.sqrt(t, out=t)
        np.divide(d, t, out=d)
        np.multiply(d, grad, out=d)
        np.multiply(d, d, out=t)
        _average(b, t, self.rho, t)
        np.multiply(d, rate, out=d)
        np.subtract(param, d, out=param)


@dataclass(frozen=True)
class Lion(_Decaying):
    """Lion (Chen et al. 2023, algorithm 2).

        p <- p - lr * sign(beta_1 * m + (1 - beta_1) * g)
        m <- beta_2 * m + (1 - beta_2) * g

    As in Keras and the paper, whose weight decay is equivalent to decoupled decay before the step; the paper's
    learning rate is 1e-4. torch has no Lion.
    """

    name: ClassVar[str] = "lion"
    slots: ClassVar[Mapping[str, float]] = {"m": 0.0}
    scratch: ClassVar[int] = 2

    beta_1: float = hyperparameter(0.9, at_least=0, at_most=1)
    beta_2: float = hyperparameter(0.99, at_least=0, below=1)

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, rate = scalars
        m = slots["m"]
        t, u = scratch
        np.multiply(m, self.beta_1, out=t)
        np.multiply(grad, 1.0 - self.beta_1, out=u)
        np.add(t, u, out=t)
        # rate * sign(t): np.sign takes six times as long. 0 stays 0.
        np.multiply(t, _HUGE, out=t)
        np.minimum(t, rate, out=t)
        np.maximum(t, -rate, out=t)
        np.subtract(param, t, out=param)
        _average(m, grad, self.beta_2, t)


RULES: Mapping[str, type[UpdateRule]] = MappingProxyType(
    {rule.name: rule for rule in (SGD, Adagrad, Adam, AdamW, RMSprop, Ftrl, Adadelta, Lion)}
)
"""The rules that come with pscluster, by name."""
