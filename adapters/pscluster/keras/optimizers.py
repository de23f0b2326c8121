"""Keras' optimizers as those that run on the servers."""

from __future__ import annotations

from typing import Any

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.ps.handles import optimizers
from pscluster.ps.handles.gradients.optimizer import LearningRate, Optimizer
from pscluster.ps.optim import schedules

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.__name__: cls
    for cls in (
        *(optimizers.SGD, optimizers.Adagrad, optimizers.Adam, optimizers.AdamW),
        *(optimizers.RMSprop, optimizers.Ftrl, optimizers.Adadelta, optimizers.Lion),
    )
}
_SCHEDULES = {cls.__name__: cls for cls in schedules.SCHEDULES.values() if cls is not schedules.WarmUp}
_NOT_MAPPED = ("name", "learning_rate", "ema_overwrite_frequency", "gradient_accumulation_steps")


def mapped(optimizer: Any, name: str) -> Optimizer:
    """Make our optimizer with the hyperparameters of a Keras optimizer, in the strategy's scope, under this name.

    Raises:
        MisuseError: there is none of its kind, or an option of it, or its schedule, has no counterpart. The message
            lists what there is.
    """
    kind = type(optimizer).__name__
    if kind not in _OPTIMIZERS or not type(optimizer).__module__.startswith("keras."):
        hint = "give serve() one of pscluster.coordinator.optimizers as optimizer="
        if kind == "LossScaleOptimizer":
            hint = 'use the policy "mixed_bfloat16" in place of "mixed_float16", which needs no scale'
        raise MisuseError(
            f"the model is compiled with {type_of(optimizer)}, which the servers don't have: they have "
            f"{', '.join(_OPTIMIZERS)}; compile it with one of these, or {hint}"
        )
    config: dict[str, Any] = optimizer.get_config()
    if steps := config.get("gradient_accumulation_steps"):
        raise MisuseError(
            f"{kind} has gradient_accumulation_steps={steps}, but the servers apply each gradient as it comes: leave "
            "it out, and take larger batches"
        )
    if config.get("use_ema") and (every := config.get("ema_overwrite_frequency")):
        raise MisuseError(
            f"{kind} has ema_overwrite_frequency={every}, but the servers keep averages beside the weights: leave it "
            "out, and take them with served.to_keras(averages=True)"
        )
    if getattr(optimizer, "_exclude_from_weight_decay", None) or getattr(
        optimizer, "_exclude_from_weight_decay_pattern", None
    ):
        raise MisuseError(
            f"{kind} excludes variables from weight decay, but the servers have one decay for all: leave it out, or "
            "put a regularizer on the layers that are to decay"
        )
    options = {key: value for key, value in config.items() if key not in _NOT_MAPPED and value is not None}
    if not options.get("momentum"):
        options.pop("nesterov", None)  # without momentum Keras ignores it, and ours refuses it
    if kind in ("Adam", "AdamW"):
        options["epsilon_hat"] = True
    cls: Any = _OPTIMIZERS[kind]
    made: Optimizer = cls(learning_rate=_rate_of(config["learning_rate"], kind), name=name, **options)
    return made


def _rate_of(rate: Any, kind: str) -> LearningRate:
    if not isinstance(rate, dict):
        return float(rate)
    schedule = rate.get("class_name")
    if schedule not in _SCHEDULES or not str(rate.get("module")).startswith("keras."):
        raise MisuseError(
            f"the learning rate of {kind} is the schedule {schedule!r}, which the servers don't have: they have "
            f"{', '.join(_SCHEDULES)}; use one of these, or set the rate between epochs with callbacks"
        )
    values = {key: value for key, value in rate["config"].items() if key != "name"}
    return _SCHEDULES[schedule].made_of(values)
