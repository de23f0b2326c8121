"""The update rules: what one gradient does to a parameter and its slots, element by element.

A rule is a frozen set of hyperparameters and three pure functions of it: which slots a parameter has, what
depends on the step alone, and the update of one block of elements. A rule does not know shards, blocks, rows,
locks or half-precision types: `drivers` cuts the work into blocks and sees to all that.

Names and defaults of hyperparameters are those of Keras' optimizers, and so are the formulas but where a
docstring says otherwise. In them t is the step, counted from 1; p the parameter, g its gradient, lr the
learning rate; an arrow replaces the left side in place, and lines run from top to bottom. The weight decay is
decoupled everywhere, as in Keras: before the update p <- p * (1 - lr * weight_decay). torch's `weight_decay`
means that for AdamW only; its other optimizers add weight_decay * p to the gradient.

Averages are moved as s + (x - s) * (1 - beta) where beta is large, and not as beta * s + (1 - beta) * x: to
round beta = 0.999 to float32 would by itself shift the second form's limit by 1.3e-5 of its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from math import sqrt
from types import MappingProxyType
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import numpy.typing as npt

from pscluster.core import checks

__all__ = [
    "RULES",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Array",
    "Ftrl",
    "Lion",
    "RMSprop",
    "Scalars",
    "UpdateRule",
    "number",
]

Array = npt.NDArray[Any]
Scalars = tuple[float, ...]

# Keeps 0 / 0 from becoming NaN, and is lost in any sum that is not itself next to nothing. Normal in float32.
_TINY = 1.2e-38

# Makes all but the smallest subnormal numbers larger than a learning rate, or infinite. Finite in float32.
_HUGE = 3e38


def number(default: float, **limits: Unpack[checks.Limits]) -> float:
    """Declare a hyperparameter of a rule: a field with its default and the limits that `UpdateRule` checks."""
    made: float = field(default=default, metadata=limits)
    return made


@dataclass(frozen=True)
class UpdateRule(ABC):
    """An update rule and its hyperparameters, which are the fields of the dataclass: floats and bools.

    A rule of your own derives from this as a frozen dataclass, names itself, and gives `slots` and `apply`.

    Attributes:
        name: what the rule is called on the wire and in `RULES`.
        scratch: how many buffers `apply` needs.
    """

    name: ClassVar[str]
    scratch: ClassVar[int] = 1

    learning_rate: float = number(0.001, at_least=0)

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, float]:
        """The slots of a parameter, of its shape each: name and the value that fills it at first."""

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of the `step`-th gradient, from 1: always the same one, unless overridden."""
        del step
        return self.learning_rate

    def scalars(self, step: int) -> Scalars:
        """All that depends on the step alone, in float64: computed once for each gradient, not each block.

        Steps count from 1, and all of a parameter's gradients count, sparse ones for every row.
        """
        return (self.learning_rate_at(_counted(step)),)

    @abstractmethod
    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        """Update one block of elements in place.

        Args:
            param: the block of the parameter, shape (n,), float32 or float64, contiguous.
            grad: its gradient, shape (n,), of the same dtype. Not to be written to.
            slots: by name, the same block of each slot, shape (n,), of the same dtype.
            scalars: what `scalars` returned for this step.
            scratch: as many buffers as the rule asked for, shape (n,), of the same dtype, their content
                arbitrary. The blocks fit the processor's cache, so write intermediate results there
                (`out=`): a fresh array costs more than the arithmetic.
        """

    @classmethod
    def from_spec(cls, numbers: Mapping[str, float], flags: Mapping[str, bool]) -> Self:
        """The rule of these hyperparameters by name; those not named have their defaults."""
        known = {item.name: isinstance(item.default, bool) for item in fields(cls)}
        for given, are_flags in ((numbers, False), (flags, True)):
            for name in given:
                if name not in known:
                    raise ValueError(f"{cls.name} has no hyperparameter {name!r}: it has {', '.join(known)}")
                if known[name] is not are_flags:
                    kinds = ("a number", "a flag")
                    raise ValueError(f"{cls.name}: {name} is {kinds[known[name]]}, but was given as {kinds[are_flags]}")
        return cls(**numbers, **flags)

    def to_spec(self) -> tuple[dict[str, float], dict[str, bool]]:
        """The hyperparameters as numbers and flags by name, for `from_spec`."""
        numbers: dict[str, float] = {}
        flags: dict[str, bool] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool):
                flags[item.name] = value
            else:
                numbers[item.name] = value
        return numbers, flags

    def __post_init__(self) -> None:
        for item in fields(self):
            value = _checked(self.name, item, getattr(self, item.name))
            object.__setattr__(self, item.name, value)  # the dataclass is frozen


def _checked(rule: str, item: Field[Any], value: object) -> float | bool:
    """Return a hyperparameter's value as float or bool, if it is within its limits."""
    name = f"{rule}: {item.name}"
    if isinstance(item.default, bool):
        return checks.flag(name, value)
    return checks.real(name, value, f": the default is {item.default:g}", **item.metadata)


def _counted(step: int) -> int:
    if step < 1:
        raise ValueError(f"step {step} is below 1: steps count from 1, the first gradient")
    return step


@dataclass(frozen=True)
class _Decaying(UpdateRule):
    """A rule with decoupled weight decay. Its first scalar is what is left of the parameter."""

    _: KW_ONLY
    weight_decay: float = number(0.0, at_least=0)

    def scalars(self, step: int) -> Scalars:
        rate = self.learning_rate_at(_counted(step))
        return (1.0 - rate * self.weight_decay, rate)


def _decay(param: Array, keep: float) -> None:
    if keep != 1.0:
        np.multiply(param, keep, out=param)


def _average(slot: Array, value: Array, beta: float, scratch: Array) -> None:
    """slot <- beta * slot + (1 - beta) * value, where `value` may be the scratch itself."""
    if beta < 0.5:  # the slot follows the value closely: one much smaller than the last must not drown in it
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

        with it            m <- momentum * m - lr * g
                           p <- p + m                              plain
                           p <- p + momentum * m - lr * g          Nesterov

    Without momentum there are no slots. As in Keras the learning rate is inside m; torch's buffer is m / -lr,
    which is the same unless the rate changes between steps. Nesterov without momentum is an error, as in
    torch (Keras ignores the flag).
    """

    name: ClassVar[str] = "sgd"

    learning_rate: float = number(0.01, at_least=0)
    _: KW_ONLY
    momentum: float = number(0.0, at_least=0, at_most=1)
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("sgd: nesterov is set, but momentum is 0: give a momentum above 0, such as 0.9")

    @property
    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        keep, rate = scalars
        (t,) = scratch
        _decay(param, keep)
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
        v_hat <- max(v_hat, v)                                     AMSGrad only, used below for v
        p <- p - lr * (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)

    Epsilon stands as in the paper and in torch, beside the bias-corrected root. Keras has the paper's
    "epsilon hat", beside the root that is not corrected: its steps are smaller at first where the gradients
    are of epsilon's size. The default of epsilon is Keras' 1e-7; torch's is 1e-8. AMSGrad's maximum is taken
    before the bias correction, as in Keras and torch; the paper has no correction. For sparse gradients see
    `apply_rows`: t counts all gradients, also those that did not touch the row.
    """

    name: ClassVar[str] = "adam"

    _: KW_ONLY
    beta_1: float = number(0.9, at_least=0, below=1)
    beta_2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-7, above=0)
    amsgrad: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        return {"m": 0.0, "v": 0.0} | ({"v_hat": 0.0} if self.amsgrad else {})

    def scalars(self, step: int) -> Scalars:
        keep, rate = super().scalars(step)
        # The corrections are factored out of the root: alpha * m / (sqrt(v) + epsilon_t) is one pass less.
        root = sqrt(1.0 - self.beta_2**step)
        return (keep, rate * root / (1.0 - self.beta_1**step), self.epsilon * root)

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        keep, alpha, epsilon_t = scalars
        m, v = slots["m"], slots["v"]
        (t,) = scratch
        _decay(param, keep)
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

    The same as Adam with the same `weight_decay`; the default is Keras' 0.004 (torch's is 0.01). As in Keras
    and torch the decay is multiplied by the learning rate, which stands for the paper's schedule multiplier.
    """

    name: ClassVar[str] = "adamw"

    _: KW_ONLY
    weight_decay: float = number(0.004, at_least=0)


@dataclass(frozen=True)
class Adagrad(_Decaying):
    """Adagrad (Duchi, Hazan and Singer 2011), diagonal.

        accumulator <- accumulator + g^2
        p <- p - lr * g / sqrt(accumulator + epsilon)

    As Keras. torch has epsilon (1e-10) outside the root and starts from an accumulator of 0.
    """

    name: ClassVar[str] = "adagrad"

    _: KW_ONLY
    initial_accumulator_value: float = number(0.1, at_least=0)
    epsilon: float = number(1e-7, above=0)

    @property
    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        keep, rate = scalars
        accumulator = slots["accumulator"]
        (t,) = scratch
        _decay(param, keep)
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
        m <- momentum * m + i                                      with momentum only, used below for i
        p <- p - i

    Slots: v is "velocity", a "average_gradient", m "momentum". As Keras, but for the maximum: there v - a^2,
    which rounding may make negative where the gradient hardly changes, can give NaN. torch has epsilon (1e-8)
    outside the root, calls rho alpha (0.99), and keeps the learning rate outside m.
    """

    name: ClassVar[str] = "rmsprop"

    _: KW_ONLY
    rho: float = number(0.9, at_least=0, below=1)
    momentum: float = number(0.0, at_least=0, at_most=1)
    epsilon: float = number(1e-7, above=0)
    centered: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        wanted = {"velocity": True, "average_gradient": self.centered, "momentum": self.momentum > 0}
        return {name: 0.0 for name, used in wanted.items() if used}

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        keep, rate = scalars
        v = slots["velocity"]
        (t,) = scratch
        _decay(param, keep)
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
    l2_regularization_strength, l2_shrinkage_regularization_strength. As Keras; the paper has k = 1/2, beta =
    1, l2 for 2 * l2, n = 0 at first and no shrinkage. torch has no Ftrl.

    p is computed anew from z and n at each step: what it was at first is soon forgotten, at once where it
    gets a gradient of 0. Weight decay therefore hardly acts; use l2. The difference of powers is computed
    without subtracting them, which in float32 would lose all digits of it once n is large. Where n and the
    denominator are 0, so is z, and p becomes 0 (in Keras NaN).
    """

    name: ClassVar[str] = "ftrl"
    scratch: ClassVar[int] = 3

    learning_rate: float = number(0.001, above=0)
    _: KW_ONLY
    learning_rate_power: float = number(-0.5, at_most=0)
    initial_accumulator_value: float = number(0.1, at_least=0)
    l1_regularization_strength: float = number(0.0, at_least=0)
    l2_regularization_strength: float = number(0.0, at_least=0)
    l2_shrinkage_regularization_strength: float = number(0.0, at_least=0)
    beta: float = number(0.0, at_least=0)

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

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        keep, per_rate, plain = scalars
        n, z = slots["accumulator"], slots["linear"]
        t, sigma, power = scratch
        _decay(param, keep)
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
        """n <- n + grad^2, power = n^k afterwards, sigma = how much n^k grew."""
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

    Slots: a is "accumulated_grad", b "accumulated_delta_var". As Keras and torch but for defaults: the paper
    has no learning rate, that is 1, as torch's default; Keras', and ours, is 0.001. torch's epsilon is 1e-6,
    its rho 0.9.
    """

    name: ClassVar[str] = "adadelta"
    scratch: ClassVar[int] = 2

    _: KW_ONLY
    rho: float = number(0.95, at_least=0, below=1)
    epsilon: float = number(1e-7, above=0)

    @property
    def slots(self) -> Mapping[str, float]:
        return {"accumulated_grad": 0.0, "accumulated_delta_var": 0.0}

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        keep, rate = scalars
        a, b = slots["accumulated_grad"], slots["accumulated_delta_var"]
        t, d = scratch
        _decay(param, keep)
        np.multiply(grad, grad, out=t)
        _average(a, t, self.rho, t)
        # One root of the quotient would be a pass less, but overflows in float32 where a is next to nothing.
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

    As Keras and the paper, whose weight decay is the same as decoupled decay before the step; the paper's
    learning rate is 1e-4. torch has no Lion.
    """

    name: ClassVar[str] = "lion"
    scratch: ClassVar[int] = 2

    _: KW_ONLY
    beta_1: float = number(0.9, at_least=0, at_most=1)
    beta_2: float = number(0.99, at_least=0, below=1)

    @property
    def slots(self) -> Mapping[str, float]:
        return {"m": 0.0}

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: Scalars,
        scratch: Sequence[Array],
    ) -> None:
        keep, rate = scalars
        m = slots["m"]
        t, u = scratch
        _decay(param, keep)
        np.multiply(m, self.beta_1, out=t)
        np.multiply(grad, 1.0 - self.beta_1, out=u)
        np.add(t, u, out=t)
        # rate * sign(t), which np.sign takes six times as long for. 0 stays 0.
        np.multiply(t, _HUGE, out=t)
        np.minimum(t, rate, out=t)
        np.maximum(t, -rate, out=t)
        np.subtract(param, t, out=param)
        _average(m, grad, self.beta_2, t)


RULES: Mapping[str, type[UpdateRule]] = MappingProxyType(
    {rule.name: rule for rule in (SGD, Adagrad, Adam, AdamW, RMSprop, Ftrl, Adadelta, Lion)}
)
"""The rules that come with pscluster, by name."""
