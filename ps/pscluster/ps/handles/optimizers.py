"""Optimizers with built-in rules, as users make them: the arguments of each are the hyperparameters of its rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Unpack

from pscluster.ps.handles.gradients.optimizer import CLASSES, Common, LearningRate, Optimizer
from pscluster.ps.optim import rules
from pscluster.ps.optim.schedules import LearningRateSchedule

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Common",
    "Ftrl",
    "Lion",
    "Optimizer",
    "RMSprop",
]


class _BuiltIn(Optimizer):
    """An optimizer with a built-in rule, whose hyperparameters are its arguments, beside those of `Common`.

    The rule declares hyperparameters, defaults and limits. A subclass only spells out the signature, for editors and
    type checkers.
    """

    _rule: ClassVar[type[rules.UpdateRule]]

    def __init_subclass__(cls, rule: type[rules.UpdateRule] | None = None) -> None:
        if rule is not None:
            cls._rule = rule
            CLASSES[rule.name] = cls

    def _make(self, arguments: Mapping[str, Any]) -> None:
        """Create it with the arguments of `__init__`, given as its `locals()`."""
        common = arguments["common"]
        given = {item.name: arguments[item.name] for item in fields(self._rule) if item.name in arguments}
        if "weight_decay" in common:
            given["weight_decay"] = common["weight_decay"]
        schedule = given.pop("learning_rate") if isinstance(given["learning_rate"], LearningRateSchedule) else None
        self._create(self._rule(**given), schedule, common)


class SGD(_BuiltIn, rule=rules.SGD):
    """Stochastic gradient descent, with momentum or Nesterov's; see `rules.SGD` for the formula.

    Args:
        learning_rate: a number, at least 0, or a schedule of the steps of each shard. Default 0.01.
        momentum: the share of the last change that is added to the next one, 0 to 1. Default 0: none.
        nesterov: whether the momentum is Nesterov's.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.SGD(0.1, momentum=0.9, name="sgd")
    """

    def __init__(
        self,
        learning_rate: LearningRate = rules.SGD.learning_rate,
        momentum: float = rules.SGD.momentum,
        nesterov: bool = rules.SGD.nesterov,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Adagrad(_BuiltIn, rule=rules.Adagrad):
    """Adagrad; see `rules.Adagrad` for the formula.

    Args:
        learning_rate: a number, at least 0, or a schedule of the steps of each shard. Default 0.001.
        initial_accumulator_value: of each element's sum of squared gradients, at least 0. Default 0.1.
        epsilon: added within the root, above 0. Default 1e-7.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.Adagrad(0.05, name="adagrad")
    """

    def __init__(
        self,
        learning_rate: LearningRate = rules.Adagrad.learning_rate,
        initial_accumulator_value: float = rules.Adagrad.initial_accumulator_value,
        epsilon: float = rules.Adagrad.epsilon,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Adam(_BuiltIn, rule=rules.Adam):
    """Adam, or AMSGrad; see `rules.Adam` for the formula.

    Args:
        learning_rate: a number, at least 0, or a schedule of the steps of each shard. Default 0.001.
        beta_1, beta_2: how much of the last averages of gradients and of their squares is kept, below 1. Default 0.9,
            0.999.
        epsilon: added to the root, above 0. Default 1e-7.
        amsgrad: whether the second average may only grow.
        epsilon_hat: whether epsilon is added to the root before its bias is corrected, as Keras does.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.Adam(1e-3, global_clipnorm=1.0, name="adam")
    """

    def __init__(
        self,
        learning_rate: LearningRate = rules.Adam.learning_rate,
        beta_1: float = rules.Adam.beta_1,
        beta_2: float = rules.Adam.beta_2,
        epsilon: float = rules.Adam.epsilon,
        amsgrad: bool = rules.Adam.amsgrad,
        epsilon_hat: bool = rules.Adam.epsilon_hat,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class AdamW(Adam, rule=rules.AdamW):
    """Adam with decoupled weight decay, 0.004 by default; see `rules.AdamW`.

    Args:
        learning_rate: a number, at least 0, or a schedule of the steps of each shard. Default 0.001.
        beta_1, beta_2, epsilon, amsgrad, epsilon_hat: as of Adam.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.AdamW(1e-3, weight_decay=0.01, name="adamw")
    """


class RMSprop(_BuiltIn, rule=rules.RMSprop):
    """RMSprop, optionally centered and with momentum; see `rules.RMSprop` for the formula.

    Args:
        learning_rate: a number, at least 0, or a schedule of the steps of each shard. Default 0.001.
        rho: how much of the last average of squared gradients is kept, below 1. Default 0.9.
        momentum: the share of the last change that is added to the next one, 0 to 1. Default 0: none.
        epsilon: added within the root, above 0. Default 1e-7.
        centered: whether the average gradient is subtracted, so that the scale is a variance.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.RMSprop(1e-3, name="rmsprop")
    """

    def __init__(
        self,
        learning_rate: LearningRate = rules.RMSprop.learning_rate,
        rho: float = rules.RMSprop.rho,
        momentum: float = rules.RMSprop.momentum,
        epsilon: float = rules.RMSprop.epsilon,
        centered: bool = rules.RMSprop.centered,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Ftrl(_BuiltIn, rule=rules.Ftrl):
    """Follow the regularised leader; see `rules.Ftrl` for the formula.

    Args:
        learning_rate: a number, above 0, or a schedule of the steps of each shard. Default 0.001.
        learning_rate_power: how the rate falls with the sum of squared gradients, at most 0. Default -0.5.
        initial_accumulator_value: of that sum, at least 0. Default 0.1.
        l1_regularization_strength, l2_regularization_strength, l2_shrinkage_regularization_strength: at least 0; l1
            makes weights exactly 0. Default 0.
        beta: at least 0; as if the root of the sum were larger by this. Default 0.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.Ftrl(0.05, l1_regularization_strength=0.01, name="ftrl")
    """

    def __init__(
        self,
        learning_rate: LearningRate = rules.Ftrl.learning_rate,
        learning_rate_power: float = rules.Ftrl.learning_rate_power,
        initial_accumulator_value: float = rules.Ftrl.initial_accumulator_value,
        l1_regularization_strength: float = rules.Ftrl.l1_regularization_strength,
        l2_regularization_strength: float = rules.Ftrl.l2_regularization_strength,
        l2_shrinkage_regularization_strength: float = rules.Ftrl.l2_shrinkage_regularization_strength,
        beta: float = rules.Ftrl.beta,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Adadelta(_BuiltIn, rule=rules.Adadelta):
    """Adadelta; see `rules.Adadelta` for the formula.

    Args:
        learning_rate: a number, at least 0, or a schedule of the steps of each shard. Default 0.001.
        rho: how much of the last averages is kept, below 1. Default 0.95.
        epsilon: added within the roots, above 0. Default 1e-7.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.Adadelta(1.0, name="adadelta")
    """

    def __init__(
        self,
        learning_rate: LearningRate = rules.Adadelta.learning_rate,
        rho: float = rules.Adadelta.rho,
        epsilon: float = rules.Adadelta.epsilon,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Lion(_BuiltIn, rule=rules.Lion):
    """Lion; see `rules.Lion` for the formula.

    Args:
        learning_rate: a number, at least 0, or a schedule of the steps of each shard. Default 0.001.
        beta_1, beta_2: how much of the average gradient counts for the sign, and is kept. Default 0.9, 0.99.
        **common: what all optimizers take: see `Common`.

    Raises:
        ValueError, TypeError: an argument is out of range, or unknown.
        MisuseError: outside of `strategy.scope()`, or the name is taken.

    Examples:
        >>> with strategy.scope():
        ...     optimizer = optimizers.Lion(1e-4, weight_decay=0.01, name="lion")
    """

    def __init__(
        self,
        learning_rate: LearningRate = rules.Lion.learning_rate,
        beta_1: float = rules.Lion.beta_1,
        beta_2: float = rules.Lion.beta_2,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())
