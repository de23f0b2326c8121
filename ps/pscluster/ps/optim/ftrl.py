"""FTRL-Proximal, an update rule. Notation and conventions as in `rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pscluster.ps.optim.rule import Array, Buffers, DecayingRule, Scalars, Slots, hyperparameter

# Keeps 0 / 0 from becoming NaN, and vanishes in any sum that is not itself close to 0. Normal in float32.
_TINY = 1.2e-38


@dataclass(frozen=True)
class Ftrl(DecayingRule):
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
