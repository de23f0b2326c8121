"""The update rules that come with pscluster, and what one's own are made of. `rule` says what a rule is.

Hyperparameters have Keras' names and defaults, and the formulas are Keras' unless a docstring says otherwise. In them
t is the step, counted from 1; p the parameter, g its gradient, lr the learning rate; an arrow replaces the left side
in place, and lines run from top to bottom. Weight decay is always decoupled, as in Keras: before the update,
p <- p * (1 - lr * weight_decay). In torch `weight_decay` means that for AdamW only; its other optimizers add
weight_decay * p to the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from math import sqrt
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from pscluster.ps.optim.ftrl import Ftrl
from pscluster.ps.optim.rule import (
    Array,
    Buffers,
    DecayingRule,
    Scalars,
    Slots,
    UpdateRule,
    hyperparameter,
    move_average,
)

__all__ = [
    "RULES",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Array",
    "Buffers",
    "Ftrl",
    "Lion",
    "RMSprop",
    "Scalars",
    "Slots",
    "UpdateRule",
    "hyperparameter",
]

# Multiplied by this, all but the smallest subnormal numbers exceed a learning rate, or are infinite. Finite in float32.
_HUGE = 3e38


@dataclass(frozen=True)
class SGD(DecayingRule):
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
class Adam(DecayingRule):
    """Adam (Kingma and Ba 2015, algorithm 1) and AMSGrad (Reddi, Kale and Kumar 2018).

        m <- beta_1 * m + (1 - beta_1) * g
        v <- beta_2 * v + (1 - beta_2) * g^2
        v_hat <- max(v_hat, v)                                     AMSGrad only, replaces v below
        p <- p - lr * (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)

    As in the paper and in torch, epsilon is added to the bias-corrected root. With `epsilon_hat` it is what the paper
    calls so, and is added to sqrt(v), as in Keras: the first steps are smaller where gradients are below some thousand
    epsilons. The default of epsilon is Keras' 1e-7; torch's is 1e-8. AMSGrad's maximum is taken before the bias
    correction, as in Keras and torch; the paper has no correction. For sparse gradients see `apply_rows`: t counts all
    gradients, including those that did not touch the row.
    """

    name: ClassVar[str] = "adam"

    beta_1: float = hyperparameter(0.9, at_least=0, below=1)
    beta_2: float = hyperparameter(0.999, at_least=0, below=1)
    epsilon: float = hyperparameter(1e-7, above=0)
    amsgrad: bool = False
    epsilon_hat: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        return {"m": 0.0, "v": 0.0} | ({"v_hat": 0.0} if self.amsgrad else {})

    def scalars(self, step: int) -> Scalars:
        keep, rate = super().scalars(step)
        # Factoring the corrections out of the root saves a pass: alpha * m / (sqrt(v) + epsilon_t).
        root = sqrt(1.0 - self.beta_2**step)
        epsilon_t = self.epsilon if self.epsilon_hat else self.epsilon * root
        return (keep, rate * root / (1.0 - self.beta_1**step), epsilon_t)

    def _step(self, param: Array, grad: Array, slots: Slots, scalars: Scalars, scratch: Buffers) -> None:
        _, alpha, epsilon_t = scalars
        m, v = slots["m"], slots["v"]
        (t,) = scratch
        move_average(m, grad, self.beta_1, t)
        np.multiply(grad, grad, out=t)
        move_average(v, t, self.beta_2, t)
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
class Adagrad(DecayingRule):
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
class RMSprop(DecayingRule):
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
        move_average(v, t, self.rho, t)
        if self.centered:
            a = slots["average_gradient"]
            move_average(a, grad, self.rho, t)
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
class Adadelta(DecayingRule):
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
        move_average(a, t, self.rho, t)
        # A single root of the quotient would save a pass, but overflows in float32 where a is close to 0.
        np.add(b, self.epsilon, out=d)
        np.sqrt(d, out=d)
        np.add(a, self.epsilon, out=t)
        np.sqrt(t, out=t)
        np.divide(d, t, out=d)
        np.multiply(d, grad, out=d)
        np.multiply(d, d, out=t)
        move_average(b, t, self.rho, t)
        np.multiply(d, rate, out=d)
        np.subtract(param, d, out=param)


@dataclass(frozen=True)
class Lion(DecayingRule):
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
        move_average(m, grad, self.beta_2, t)


RULES: Mapping[str, type[UpdateRule]] = MappingProxyType(
    {rule.name: rule for rule in (SGD, Adagrad, Adam, AdamW, RMSprop, Ftrl, Adadelta, Lion)}
)
"""The rules that come with pscluster, by name."""
