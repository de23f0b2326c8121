"""torch's optimizers as ours: the same formulas, or a refusal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch

from pscluster.core.checks import type_of
from pscluster.ps.handles import optimizers
from pscluster.ps.handles.optimizers import Common, Optimizer

logger = logging.getLogger(__name__)

_Group = Mapping[str, Any]


def optimizer_from(optimizer: torch.optim.Optimizer | Callable[..., Any], **common: Unpack[Common]) -> Optimizer:
    """Make the optimizer that does on the servers what one of torch's does to a module, in `strategy.scope()`.

    Known are SGD, Adam, AdamW, SparseAdam, Adagrad, RMSprop and Adadelta. The log says in what the result differs:
    Adagrad and RMSprop add the square of epsilon within the root, where torch adds epsilon outside; momentum includes
    the learning rate, which matters if that changes; and Adam changes rows of tables only in steps that push them, as
    SparseAdam does. State of torch's optimizer, such as moments, is not taken over.

    Args:
        optimizer: an optimizer of torch, or what makes one of parameters: `partial(torch.optim.Adam, lr=1e-3)`.
        common: arguments of ours, such as `global_clipnorm`; see `optimizers`.

    Raises:
        TypeError: it is not an optimizer of torch.
        ValueError: it is none that the servers have, or uses what they have not; the message names it.
    """
    is_new = not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer)
    if is_new:
        optimizer = optimizer([torch.nn.Parameter(torch.zeros(1))])
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = "; for a scheduler see pscluster.torch.schedule" if hasattr(optimizer, "get_last_lr") else ""
        raise TypeError(
            f"optimizer_from takes an optimizer of torch, or what makes one, not {type_of(optimizer)}{hint}"
        )
    kind = type(optimizer).__name__
    make = _MAPPED.get(type(optimizer))
    if make is None:
        known = ", ".join(cls.__name__ for cls in _MAPPED)
        raise ValueError(f"torch.optim.{kind} has no counterpart on the servers; these have one: {known}")
    group, *others = optimizer.param_groups
    for other in others:
        for key in group.keys() - {"params", "param_names"}:
            if other[key] != group[key]:
                raise ValueError(
                    f"the {kind} has groups of parameters that differ in {key} ({group[key]} and {other[key]}): serve "
                    "with tables=, or several modules, to have several optimizers"
                )
    if "initial_lr" in group:
        raise ValueError(
            f"a scheduler of torch changes the learning rate of the {kind}, which the servers can't follow: leave it "
            "out, and set optimizer.learning_rate to pscluster.torch.schedule(...), which has its rates"
        )
    if group.get("maximize"):
        raise ValueError(f"the {kind} has maximize=True: change the sign of the loss instead")
    if optimizer.state and not is_new:  # Adagrad begins with some
        logger.warning("the state of the %s, such as its moments, is not taken over: it starts from zero", kind)
    result, differs = make(kind, group, common)
    if differs:
        logger.info("torch.optim.%s on the servers: %s", kind, differs)
    return result


def _refuse(kind: str, group: _Group, key: str, hint: str) -> None:
    if group.get(key):
        raise ValueError(f"{kind} with {key}={group[key]} has no counterpart on the servers: {hint}")


def _rate(group: _Group) -> float:
    return float(group["lr"])


def _sgd(kind: str, group: _Group, common: Common) -> tuple[Optimizer, str]:
    _refuse(kind, group, "dampening", "leave it out")
    momentum = float(group["momentum"])
    if momentum:
        _refuse(kind, group, "weight_decay", f"with momentum {_DECAY}")
    elif group["weight_decay"]:
        common["weight_decay"] = float(group["weight_decay"])  # without momentum both are the same
    made = optimizers.SGD(_rate(group), momentum, bool(group["nesterov"]), **common)
    return made, "momentum includes the learning rate, which matters if that changes" if momentum else ""


_DECAY = "ours is decoupled, which differs; leave it out"
_LAZY = "rows of tables change only in steps that push them, as with SparseAdam"


def _adam(kind: str, group: _Group, common: Common) -> tuple[Optimizer, str]:
    decoupled = kind == "AdamW" or group.get("decoupled_weight_decay")
    if not decoupled:
        _refuse(kind, group, "weight_decay", "use AdamW, whose decay is decoupled")
    beta_1, beta_2 = map(float, group["betas"])
    arguments = _rate(group), beta_1, beta_2, float(group["eps"]), bool(group.get("amsgrad", False))
    if decoupled:
        common["weight_decay"] = float(group["weight_decay"])
        return optimizers.AdamW(*arguments, **common), _LAZY
    return optimizers.Adam(*arguments, **common), "" if kind == "SparseAdam" else _LAZY


def _squared(group: _Group) -> tuple[float, str]:
    """Return our epsilon, within the root, for torch's outside, and how they differ: not at 0, nor far from it."""
    epsilon = float(group["eps"])
    return max(epsilon**2, 1e-30), f"epsilon is within the root, {max(epsilon**2, 1e-30):g} for {epsilon:g} outside"


def _adagrad(kind: str, group: _Group, common: Common) -> tuple[Optimizer, str]:
    _refuse(kind, group, "weight_decay", _DECAY)
    _refuse(kind, group, "lr_decay", "give optimizers.Adagrad a schedule, InverseTimeDecay")
    epsilon, differs = _squared(group)
    return optimizers.Adagrad(_rate(group), float(group["initial_accumulator_value"]), epsilon, **common), differs


def _rmsprop(kind: str, group: _Group, common: Common) -> tuple[Optimizer, str]:
    _refuse(kind, group, "weight_decay", _DECAY)
    epsilon, differs = _squared(group)
    arguments = _rate(group), float(group["alpha"]), float(group["momentum"]), epsilon, bool(group["centered"])
    return optimizers.RMSprop(*arguments, **common), differs


def _adadelta(kind: str, group: _Group, common: Common) -> tuple[Optimizer, str]:
    _refuse(kind, group, "weight_decay", _DECAY)
    return optimizers.Adadelta(_rate(group), float(group["rho"]), float(group["eps"]), **common), ""


_MAPPED: dict[type, Callable[[str, _Group, Common], tuple[Optimizer, str]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SparseAdam: _adam,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
}
