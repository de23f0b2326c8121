"""Optimizers as the user holds them: handles; the arithmetic (`rules`) runs on the servers, beside the shards.

What needs the whole gradient is done by whoever sends it, before it is sent: scaling, clipping, the look for
NaN and infinity. What needs the parameter is done where it lives: the rule, its slots, the averages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.core.functions.definitions import capture
from pscluster.core.handles import Handle
from pscluster.ps import optim
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.updates import UpdatePart
from pscluster.ps.handles.scope import current_creator
from pscluster.ps.handles.variable import Array, IndexedSlices, JoinedVariable, SlotVariable, Variable, gradient_of
from pscluster.ps.optim.schedules import LearningRateSchedule
from pscluster.ps.optim.schedules import from_spec as schedule_from_spec
from pscluster.ps.spec import AVERAGE, OWN_RULE
from pscluster.v1 import ps_pb2

Gradient = npt.ArrayLike | IndexedSlices | None
LearningRate = float | LearningRateSchedule
NonFinite = Literal["apply", "count", "skip", "refuse"]
_POLICIES = ("apply", "count", "skip", "refuse")


class Common(TypedDict, total=False):
    """What all optimizers take.

    Keys:
        name: unique in the strategy.
        weight_decay: decoupled: every step the parameter loses learning rate x this of itself.
        clipvalue: gradients are cut to [-clipvalue, clipvalue].
        clipnorm: each variable's gradient is scaled down to this Euclidean norm.
        global_clipnorm: all gradients of a call together are.
        loss_scale_factor: gradients are divided by it first.
        nonfinite: what becomes of a call with NaN or infinity in a gradient: "apply" (not looked for), "count"
            (applied and counted), "skip" (counted, nothing applied), "refuse" (counted, InvalidUpdateError).
        use_ema, ema_momentum: keep exponential averages of the weights, to be read with `average(variable)`.
    """

    name: str | None
    weight_decay: float
    clipvalue: float | None
    clipnorm: float | None
    global_clipnorm: float | None
    loss_scale_factor: float | None
    nonfinite: NonFinite
    use_ema: bool
    ema_momentum: float


@dataclass(frozen=True, slots=True)
class _Treatment:
    """What is done with gradients before they are sent."""

    clipvalue: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    loss_scale_factor: float | None = None
    nonfinite: str = "apply"

    def __post_init__(self) -> None:
        for name in ("clipvalue", "clipnorm", "global_clipnorm", "loss_scale_factor"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checks.real(name, value, ", or None for none", above=0))
        if self.clipnorm is not None and self.global_clipnorm is not None:
            raise ValueError("clipnorm and global_clipnorm are both set: give one of them")
        if self.nonfinite not in _POLICIES:
            raise ValueError(f"nonfinite is {self.nonfinite!r}; give one of {', '.join(_POLICIES)}")

    @property
    def is_plain(self) -> bool:
        """Gradients are sent as they are."""
        return self == _Treatment()

    @property
    def changes(self) -> bool:
        """Gradients are scaled or clipped."""
        return self != _Treatment(nonfinite=self.nonfinite)

    def treated(self, gradients: list[Array]) -> list[Array]:
        """The gradients, scaled and clipped; of sparse ones, the summed rows."""
        if self.loss_scale_factor is not None:
            gradients = [gradient / gradient.dtype.type(self.loss_scale_factor) for gradient in gradients]
        if self.clipvalue is not None:
            gradients = [np.clip(gradient, -self.clipvalue, self.clipvalue) for gradient in gradients]
        if self.clipnorm is not None:
            gradients = [_scaled(gradient, self.clipnorm, _norm([gradient])) for gradient in gradients]
        if self.global_clipnorm is not None:
            norm = _norm(gradients)
            gradients = [_scaled(gradient, self.global_clipnorm, norm) for gradient in gradients]
        return gradients


def _norm(gradients: Sequence[Array]) -> float:
    """The Euclidean norm of all of them together, in float64; of numbers whose squares are too large, too."""
    with np.errstate(over="ignore"):
        norm = float(np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in gradients)))
    if not math.isinf(norm):
        return norm
    largest = max(float(np.abs(gradient).max(initial=0)) for gradient in gradients)
    return norm if math.isinf(largest) else largest * _norm([gradient / largest for gradient in gradients])


def _scaled(gradient: Array, limit: float, norm: float) -> Array:
    return gradient * gradient.dtype.type(limit / norm) if norm > limit else gradient


class Optimizer(Handle):
    """Applies gradients on the parameter servers. Make one inside `strategy.scope()`.

    Use a subclass, or give an update rule of your own: a frozen dataclass derived from `rules.UpdateRule`, pure
    functions on arrays, which is loaded on the servers by reference or by value.
    """

    handle_kind = "optimizer"
    name: str
    _spec: ps_pb2.OptimizerSpec
    _client: PsClient
    _treatment: _Treatment
    _forms: Sequence[Any] = ()
    _bad: Variable | None

    def __init__(
        self, rule: optim.UpdateRule, *, schedule: LearningRateSchedule | None = None, **common: Unpack[Common]
    ) -> None:
        if not isinstance(rule, optim.UpdateRule):
            raise TypeError(
                f"an Optimizer needs an UpdateRule, not a {type(rule).__name__}; see optimizers.SGD and others"
            )
        if "weight_decay" in common:
            raise TypeError("weight_decay belongs to the rule: pass it to the rule, if the rule supports it")
        self._create(rule, schedule, common)

    def _create(self, rule: optim.UpdateRule, schedule: LearningRateSchedule | None, common: Common) -> None:
        for key in common:
            if key not in Common.__annotations__:
                known = ", ".join(Common.__annotations__)
                raise TypeError(f"{type(self).__name__} has no argument {key!r}; all optimizers have {known}")
        use_ema = checks.flag("use_ema", common.get("use_ema", False))
        momentum = checks.real("ema_momentum", common.get("ema_momentum", 0.99), above=0, below=1)
        treatment = _Treatment(**{key: common[key] for key in _Treatment.__dataclass_fields__ if key in common})  # type: ignore[literal-required]
        creator = current_creator(f"optimizer {type(self).__name__}")
        numbers, flags = rule.to_spec()
        own = type(rule) is not optim.RULES.get(rule.name)
        self._forms = list(capture(type(rule), policy=creator.serialization).forms()) if own else ()
        spec = ps_pb2.OptimizerSpec(
            rule=OWN_RULE if own else rule.name,
            numbers=numbers,
            flags=flags,
            schedule="" if schedule is None else json.dumps(schedule.to_spec()),
            ema_momentum=momentum if use_ema else 0.0,
            options="" if treatment.is_plain else json.dumps(asdict(treatment)),
        )
        with creator.reserving("variable", common.get("name"), rule.name) as spec.name:
            spec, client = creator.create_optimizer(spec, self._forms)
            self._bind(spec, client)
            if treatment.nonfinite != "apply":
                self._bad = Variable(np.int64(0), name=f"{self.name}/nonfinite", trainable=False)

    @staticmethod
    def of(spec: ps_pb2.OptimizerSpec, client: PsClient) -> Optimizer:
        """The handle of an optimizer that exists."""
        handle: Optimizer = object.__new__(_CLASSES.get(spec.rule, Optimizer))
        handle._bind(spec, client)
        if handle._treatment.nonfinite != "apply":
            handle._bad = Variable.of(client.describe_variable(f"{spec.name}/nonfinite"), client)
        return handle

    def _bind(self, spec: ps_pb2.OptimizerSpec, client: PsClient) -> None:
        self.name, self._spec, self._client = spec.name, spec, client
        self._treatment = _Treatment(**json.loads(spec.options)) if spec.options else _Treatment()
        self._bad = None

    @property
    def handle_key(self) -> str:
        """An optimizer is named by its name."""
        return self.name

    # What it is

    @property
    def iterations(self) -> int:
        """How many gradients were applied, on the shard that has seen the most."""
        return self._client.describe_optimizer(self.name).iterations

    @property
    def nonfinite_count(self) -> int:
        """How many calls had NaN or infinity in a gradient; not counted under the policy "apply"."""
        return 0 if self._bad is None else int(self._bad)

    @property
    def learning_rate(self) -> LearningRate:
        """The rate, or the schedule of it, as the servers have it."""
        spec = self._client.describe_optimizer(self.name)
        return schedule_from_spec(json.loads(spec.schedule)) if spec.schedule else spec.numbers["learning_rate"]

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        spec = ps_pb2.OptimizerSpec()
        spec.CopyFrom(self._spec)
        spec.schedule = ""
        if isinstance(value, LearningRateSchedule):
            spec.schedule = json.dumps(value.to_spec())
        else:
            spec.numbers["learning_rate"] = checks.real("learning_rate", value, ", or a schedule", at_least=0)
        if spec.rule == OWN_RULE and not self._forms:
            raise MisuseError(f"the learning rate of {self.name!r}, a custom rule, can be set only on the coordinator")
        self._client.create_optimizer(spec, self._forms)
        self._spec = spec

    def slot(self, variable: Variable, name: str) -> SlotVariable:
        """A slot that is kept beside a variable, such as "m" of Adam, to be read like a variable."""
        if not isinstance(variable, Variable) or isinstance(variable, SlotVariable):
            raise TypeError(f"slots belong to variables, not to a {type(variable).__name__}")
        if isinstance(variable, JoinedVariable):
            raise TypeError(f"slots belong to each of {variable.member_names}: ask for one of these")
        if not name or not isinstance(name, str):
            raise MisuseError(f"a slot's name is a string such as 'm', not {name!r}")
        return SlotVariable.beside(variable, self._spec.id, self.name, name)

    def average(self, variable: Variable) -> SlotVariable:
        """The exponential average of a variable's values, where `use_ema` was asked for."""
        if not self._spec.ema_momentum:
            raise MisuseError(f"optimizer {self.name!r} keeps no averages: make it with use_ema=True")
        return self.slot(variable, AVERAGE)

    # Applying

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> None:
        """Apply gradients on the servers: one request a server, all servers at once, each shard once.

        A call counts as one step on every shard of the variables given. Pairs whose gradient is None are
        passed over.

        Args:
            grads_and_vars: pairs of a gradient, dense (of the variable's shape) or `IndexedSlices`, and its variable.

        Raises:
            InvalidUpdateError: a gradient of another shape or dtype, ids out of range, or NaN under the policy
                "refuse": nothing was applied then.
            PSUnavailableError: a server can't be reached.
        """
        pairs = self._checked(grads_and_vars)
        bad: set[str] = set()
        if self._treatment.changes:
            pairs = [(variable.checked_gradient(gradient), variable) for gradient, variable in pairs]
            if self._bad is not None:  # before clipping, which makes an infinity a number
                bad = {variable.name for gradient, variable in pairs if not np.isfinite(_values(gradient)).all()}
            pairs = self._treated(pairs)
        parts: list[UpdatePart] = []
        for gradient, variable in pairs:
            mine = variable.gradient_parts(gradient, self._spec.id)
            parts.extend(mine)
            # And as sent: a sum of rows, or a number in a narrower type, may be infinite only now.
            if self._bad is not None and not all(_is_finite(part, variable) for part in mine):
                bad.add(variable.name)
        if bad and self._bad is not None:
            count = self._bad.update_parts(ps_pb2.ADD, 1)
            if self._treatment.nonfinite == "count":
                parts += count
            else:
                self._client.update(count)
                if self._treatment.nonfinite == "skip":
                    return
                names = ", ".join(sorted(bad))
                raise InvalidUpdateError(f"NaN or infinity in the gradient of {names}: nothing was applied")
        if parts:
            self._client.update(parts)

    def _checked(
        self, grads_and_vars: Iterable[tuple[Gradient, Variable]]
    ) -> list[tuple[npt.ArrayLike | IndexedSlices, Variable]]:
        pairs: list[tuple[npt.ArrayLike | IndexedSlices, Variable]] = []
        seen: set[str] = set()
        for pair in grads_and_vars:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"apply_gradients takes pairs (gradient, variable), not a {type(pair).__name__}")
            gradient, variable = pair
            if not isinstance(variable, Variable):
                raise TypeError(f"apply_gradients takes pairs (gradient, variable), not a {type(variable).__name__}")
            if gradient is None:
                continue
            if variable.client is not self._client:
                raise MisuseError(
                    f"variable {variable.name!r} belongs to a different strategy than optimizer {self.name!r}"
                )
            if twice := seen.intersection(variable.member_names):
                raise MisuseError(f"variable {min(twice)!r} is given twice: add its gradients first")
            seen.update(variable.member_names)
            pairs.append((gradient_of(gradient), variable))
        return pairs

    def _treated(
        self, pairs: Sequence[tuple[npt.ArrayLike | IndexedSlices, Variable]]
    ) -> list[tuple[npt.ArrayLike | IndexedSlices, Variable]]:
        """Scaled and clipped. Rows of sparse gradients are summed first: the norm is that of the whole."""
        ids: list[npt.NDArray[np.int64] | None] = []
        arrays: list[Array] = []
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                flat = np.asarray(gradient.indices).reshape(-1)
                width = math.prod(variable.shape[1:])
                unique, sums = optim.deduplicate(flat, np.asarray(gradient.values).reshape(len(flat), width))
                ids.append(unique)
                arrays.append(sums.reshape(len(unique), *variable.shape[1:]))
            else:
                array = np.asarray(gradient)
                ids.append(None)  # half types are too narrow for scales and squares
                arrays.append(array.astype(np.float32) if array.itemsize == 2 else array)
        treated = self._treatment.treated(arrays)
        return [
            (array if where is None else IndexedSlices(array, where), variable)
            for array, where, (_, variable) in zip(treated, ids, pairs, strict=True)
        ]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _is_finite(part: UpdatePart, variable: Variable) -> bool:
    return bool(np.isfinite(np.frombuffer(part.values, variable.dtype)).all())


def _values(gradient: npt.ArrayLike | IndexedSlices) -> Array:
    return np.asarray(gradient.values if isinstance(gradient, IndexedSlices) else gradient)


class _BuiltIn(Optimizer):
    """One of the rules that the servers know. Its arguments are the rule's hyperparameters, and `Common`."""

    _rule: ClassVar[type[optim.UpdateRule]]

    def _make(self, arguments: Mapping[str, Any]) -> None:
        """Create it with the arguments of `__init__`, given as its `locals()`."""
        common = arguments["common"]
        given = {item.name: arguments[item.name] for item in fields(self._rule) if item.name in arguments}
        if "weight_decay" in common:
            given["weight_decay"] = common["weight_decay"]
        schedule = given.pop("learning_rate") if isinstance(given["learning_rate"], LearningRateSchedule) else None
        self._create(self._rule(**given), schedule, common)


class SGD(_BuiltIn):
    """Stochastic gradient descent, with momentum or Nesterov's; see `rules.SGD` for the formula."""

    _rule = optim.SGD

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Adagrad(_BuiltIn):
    """Adagrad; see `rules.Adagrad` for the formula."""

    _rule = optim.Adagrad

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Adam(_BuiltIn):
    """Adam, or AMSGrad; see `rules.Adam` for the formula."""

    _rule = optim.Adam

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class AdamW(Adam):
    """Adam with decoupled weight decay, 0.004 unless given; see `rules.AdamW`."""

    _rule = optim.AdamW


class RMSprop(_BuiltIn):
    """RMSprop, also centered and with momentum; see `rules.RMSprop` for the formula."""

    _rule = optim.RMSprop

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Ftrl(_BuiltIn):
    """Follow the regularised leader; see `rules.Ftrl` for the formula."""

    _rule = optim.Ftrl

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Adadelta(_BuiltIn):
    """Adadelta; see `rules.Adadelta` for the formula."""

    _rule = optim.Adadelta

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


class Lion(_BuiltIn):
    """Lion; see `rules.Lion` for the formula."""

    _rule = optim.Lion

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **common: Unpack[Common],
    ) -> None:
        self._make(locals())


_CLASSES: dict[str, type[Optimizer]] = {
    cls._rule.name: cls for cls in (SGD, Adagrad, Adam, AdamW, RMSprop, Ftrl, Adadelta, Lion)
}
