"""An optimizer as users hold it: a handle; the arithmetic (`rules`) runs on the servers, beside the shards.

The sender does what needs the whole gradient: scaling, clipping, checking for NaN and infinity. The servers do what
needs the parameter: the rule, its slots, the averages. `optimizers` has one for each built-in rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, TypedDict, Unpack

import numpy as np

from pscluster.core import checks
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.core.functions.definitions import capture
from pscluster.core.handles import Handle
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.handles.gradients.plans import GradientPlan
from pscluster.ps.handles.gradients.preprocessing import NonFinite, Preprocessing
from pscluster.ps.handles.gradients.replicas import (
    combined,
    current_replica,
    may_be_dropped,
    replicas_out_of_step,
    shared_out,
)
from pscluster.ps.handles.indexing import Array, Gradient, IndexedSlices, gradient_of
from pscluster.ps.handles.rows.requests import gradient_updates
from pscluster.ps.handles.rows.table import EmbeddingTable
from pscluster.ps.handles.scope import current_creator
from pscluster.ps.handles.variables.sharded import JoinedVariable
from pscluster.ps.handles.variables.slots import SlotVariable
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.optim import rules
from pscluster.ps.optim.schedules import LearningRateSchedule
from pscluster.ps.optim.schedules import from_spec as schedule_from_spec
from pscluster.ps.spec import AVERAGE, OWN_RULE
from pscluster.v1 import ps_pb2

LearningRate = float | LearningRateSchedule

_MOST_PLANS = 16
"""Of an optimizer: sets of variables whose gradients are applied together; the oldest makes room."""


class Common(TypedDict, total=False):
    """Arguments of all optimizers.

    Keys:
        name: unique in the strategy.
        weight_decay: decoupled: each step multiplies the parameter by 1 - learning rate x this.
        clipvalue: clip gradients to [-clipvalue, clipvalue].
        clipnorm: scale each variable's gradient down to this Euclidean norm.
        global_clipnorm: scale all gradients of a call, taken together, down to this Euclidean norm.
        loss_scale_factor: divide gradients by it first.
        nonfinite: what to do with a call that has NaN or infinity in a gradient: "apply" (without checking),
            "count" (apply and count it), "skip" (count it, apply nothing), "refuse" (count it, raise
            InvalidUpdateError).
        use_ema, ema_momentum: keep exponential averages of the weights; read them with `average(variable)`.
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


class Optimizer(Handle):
    """Applies gradients on the parameter servers. Make one inside `strategy.scope()`.

    Use a subclass, or pass a custom update rule: a frozen dataclass derived from `rules.UpdateRule`, pure functions
    on arrays, which the servers load by reference or by value.
    """

    handle_kind = "optimizer"
    name: str
    _spec: ps_pb2.OptimizerSpec
    _client: PsClient
    _preprocessing: Preprocessing
    _forms: Sequence[Any] = ()
    _nonfinite: Variable | None  # counts calls with NaN or infinity

    def __init__(
        self, rule: rules.UpdateRule, *, schedule: LearningRateSchedule | None = None, **common: Unpack[Common]
    ) -> None:
        if not isinstance(rule, rules.UpdateRule):
            raise TypeError(
                f"an Optimizer needs an UpdateRule, not {checks.type_of(rule)}; see optimizers.SGD and others"
            )
        if "weight_decay" in common:
            raise TypeError("weight_decay belongs to the rule: pass it to the rule, if the rule supports it")
        self._create(rule, schedule, common)

    def _create(self, rule: rules.UpdateRule, schedule: LearningRateSchedule | None, common: Common) -> None:
        for key in common:
            if key not in Common.__annotations__:
                known = ", ".join(Common.__annotations__)
                raise TypeError(f"{type(self).__name__} has no argument {key!r}; all optimizers have {known}")
        use_ema = checks.flag("use_ema", common.get("use_ema", False))
        momentum = checks.real("ema_momentum", common.get("ema_momentum", 0.99), above=0, below=1)
        options = {item.name: common[item.name] for item in fields(Preprocessing) if item.name in common}  # type: ignore[literal-required]
        preprocessing = Preprocessing(**options)
        creator = current_creator(f"optimizer {type(self).__name__}")
        numbers, flags = rule.to_spec()
        custom = type(rule) is not rules.RULES.get(rule.name)
        self._forms = list(capture(type(rule), policy=creator.serialization).forms()) if custom else ()
        spec = ps_pb2.OptimizerSpec(
            rule=OWN_RULE if custom else rule.name,
            numbers=numbers,
            flags=flags,
            schedule="" if schedule is None else json.dumps(schedule.to_spec()),
            ema_momentum=momentum if use_ema else 0.0,
            options="" if preprocessing == Preprocessing() else json.dumps(asdict(preprocessing)),
        )
        with creator.reserving("variable", common.get("name"), rule.name) as spec.name:
            spec, client = creator.create_optimizer(spec, self._forms)
            self._bind(spec, client)
            if preprocessing.nonfinite != "apply":
                self._nonfinite = Variable(np.int64(0), name=f"{self.name}/nonfinite", trainable=False)

    @staticmethod
    def of(spec: ps_pb2.OptimizerSpec, client: PsClient) -> Optimizer:
        """Return the handle of an existing optimizer."""
        handle: Optimizer = object.__new__(CLASSES.get(spec.rule, Optimizer))
        handle._bind(spec, client)
        if handle._preprocessing.nonfinite != "apply":
            handle._nonfinite = Variable.of(client.describe_variable(f"{spec.name}/nonfinite"), client)
        return handle

    def _bind(self, spec: ps_pb2.OptimizerSpec, client: PsClient) -> None:
        self.name, self._spec, self._client = spec.name, spec, client
        client.optimizers[spec.id] = spec.name
        self._preprocessing = Preprocessing(**json.loads(spec.options)) if spec.options else Preprocessing()
        self._nonfinite = None
        # By the kinds of gradients that were applied, and their variables.
        self._plans: dict[tuple[tuple[type, int], ...], GradientPlan] = {}

    @property
    def handle_key(self) -> str:
        return self.name

    # What it is

    @property
    def id(self) -> int:
        """Its number on the servers; for internal use."""
        return self._spec.id

    @property
    def preprocessing(self) -> Preprocessing:
        """What it does with gradients before they are sent; for internal use."""
        return self._preprocessing

    @property
    def sends_as_given(self) -> bool:
        """Whether dense gradients are sent without being looked at, or changed; for internal use."""
        return self._nonfinite is None and not self._preprocessing.changes

    @property
    def iterations(self) -> int:
        """The number of gradients applied, on the shard with the most."""
        return self._client.describe_optimizer(self.name).iterations

    @property
    def nonfinite_count(self) -> int:
        """The number of calls with NaN or infinity in a gradient; always 0 with the policy "apply"."""
        return 0 if self._nonfinite is None else int(self._nonfinite)

    @property
    def learning_rate(self) -> LearningRate:
        """The rate, or its schedule, on the servers."""
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
        """Return a slot beside a variable, such as Adam's "m", which can be read like a variable.

            moments = adam.slot(kernel, "m").numpy()             # of the variable's shape

        Args:
            variable: whose slot it is; no `EmbeddingTable`.
            name: of the slot, as the rule names it; see `rules`.

        Raises:
            TypeError: it is no variable, or a joined one.
            MisuseError: the name is no string, or the variable is a table.
        """
        if not isinstance(variable, Variable) or isinstance(variable, SlotVariable):
            raise TypeError(f"slots belong to variables, not to {checks.type_of(variable)}")
        if isinstance(variable, JoinedVariable):
            raise TypeError(
                f"a joined variable has no slots of its own; ask for a slot of one of {variable.member_names}"
            )
        if not name or not isinstance(name, str):
            raise MisuseError(f"a slot's name is a string such as 'm', not {name!r}")
        if isinstance(variable, EmbeddingTable):
            raise MisuseError(f"{variable.name!r} is an EmbeddingTable, whose slots and averages can't be read")
        return SlotVariable.beside(variable, self._spec.id, self.name, name)

    @property
    def use_ema(self) -> bool:
        """Whether it keeps averages of the weights."""
        return bool(self._spec.ema_momentum)

    def average(self, variable: Variable) -> SlotVariable:
        """Return the exponential average of a variable's values. MisuseError without `use_ema`."""
        if not self.use_ema:
            raise MisuseError(f"optimizer {self.name!r} keeps no averages: make it with use_ema=True")
        return self.slot(variable, AVERAGE)

    # Applying

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]], *, examples: float | None = None
    ) -> None:
        """Apply gradients on the servers, once per shard: one request per server, all servers at once.

        A call counts as one step on every shard of the variables given. Pairs whose gradient is None are skipped. The
        gradients of an `EmbeddingTable` that has an optimizer of its own are applied, and clipped, by that one.

        In a step of a `SynchronousStrategy` the gradients of all replicas are first summed, and applied once. What the
        optimizer does with gradients, such as clipping, is done with the sum; with `backup` or `staleness` above 0 each
        replica does it with its own.

        Args:
            grads_and_vars: pairs of a gradient, dense (of the variable's shape) or `IndexedSlices`, and its variable.
            examples: in such a step: of how many examples this replica's gradients are the mean. The gradients of all
                replicas are then averaged over all of their examples, not summed.

        Raises:
            ValueError: `examples` is below 0.
            InvalidUpdateError: a gradient of another shape or dtype, ids out of range, or NaN or infinity with the
                policy "refuse". Nothing was applied.
            PSUnavailableError: a server is unreachable.

        Examples:
            >>> with strategy.scope():
            ...     v = Variable(np.zeros(3), name="v")
            ...     sgd = optimizers.SGD(0.5)
            >>> sgd.apply_gradients([(np.array([1.0, 0.0, -1.0]), v)])
            >>> v.numpy()
            array([-0.5,  0. ,  0.5])
        """
        if not isinstance(grads_and_vars, Iterable):
            raise TypeError(f"apply_gradients takes pairs (gradient, variable), not {checks.type_of(grads_and_vars)}")
        pairs = list(grads_and_vars)
        with self._client.gate:
            if updates := self.plan_for(pairs).updates_of(pairs, examples=examples):
                self._client.update(updates)

    def plan_for(self, pairs: Sequence[Any]) -> GradientPlan:
        """Return the plan for gradients of these variables, as far as they are pairs; for internal use."""
        if not {tuple, list}.issuperset(map(type, pairs)) and not all(map(_is_pair, pairs)):
            return GradientPlan(self)  # which finds out what is no pair
        try:
            key = tuple([(type(gradient), id(variable)) for gradient, variable in pairs])
        except ValueError:  # some are of other than two
            return GradientPlan(self)
        plan = self._plans.get(key)
        if plan is None:
            plan = GradientPlan(self)
            while len(self._plans) >= _MOST_PLANS:
                self._plans.pop(next(iter(list(self._plans)), key), None)  # a copy: other threads add plans, too
            self._plans[key] = plan
        return plan

    def updates_of(
        self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]], *, examples: float | None = None
    ) -> list[ShardUpdate]:
        """Return what `apply_gradients` sends, for one request with other updates; for internal use."""
        if examples is not None:
            examples = checks.real("examples", examples, at_least=0)
        updates: list[ShardUpdate] = []
        for optimizer, own_pairs in self._by_optimizer(self._checked(grads_and_vars)):
            updates += optimizer._updates_of(own_pairs, examples)
        return updates

    def _by_optimizer(
        self, pairs: Sequence[tuple[Gradient, Variable]]
    ) -> Iterable[tuple[Optimizer, list[tuple[Gradient, Variable]]]]:
        """Divide the pairs among this optimizer and those of tables that have one of their own."""
        groups: dict[str, tuple[Optimizer, list[tuple[Gradient, Variable]]]] = {self.name: (self, [])}
        for pair in pairs:
            own = pair[1].optimizer if isinstance(pair[1], EmbeddingTable) else None
            groups.setdefault(self.name if own is None else own.name, (own, []))[1].append(pair)  # type: ignore[arg-type]
        return [group for group in groups.values() if group[1]]

    def _updates_of(self, pairs: Sequence[tuple[Gradient, Variable]], examples: float | None) -> Sequence[ShardUpdate]:
        """Return the updates by this optimizer, which counts gradients with NaN or infinity, and may raise for them.

        With none of them applied, nothing is to be sent.
        """
        nonfinite: set[str] = set()  # names of variables
        replica = None
        if self._preprocessing.nonfinite == "skip" and may_be_dropped():
            raise MisuseError(
                f'optimizer {self.name!r} has nonfinite="skip", which all replicas have to agree on, and with backup '
                'above 0 not all take part in a step: use "refuse" or "count", or backup=0'
            )
        if self._preprocessing.changes or self._nonfinite is not None:
            pairs = [(variable.checked_gradient(gradient), variable) for gradient, variable in pairs]
            if (replica := current_replica()) is not None:
                # What is decided here is decided by the whole gradient; then only that of one replica counts.
                pairs = combined(pairs, examples, replica)
                examples = float(replica.replica_id == 0)
        if self._preprocessing.changes:
            if self._nonfinite is not None:  # before clipping, which makes infinity finite
                nonfinite = {variable.name for gradient, variable in pairs if not np.isfinite(_values(gradient)).all()}
            pairs = self._preprocessing.apply_to(pairs)
        if examples is not None and (replicas := replicas_out_of_step()) > 1:
            pairs = shared_out(pairs, examples, replicas)
        updates: list[ShardUpdate] = []
        for (_, variable), own_updates in zip(pairs, gradient_updates(pairs, self._spec.id), strict=True):
            if examples is not None:
                for update in own_updates:
                    update.item.weight = examples
            if replica is not None and replica.replica_id:
                own_updates = [update for update in own_updates if not update.asynchronous]
            updates.extend(own_updates)
            # As sent, too: summing rows, or converting to a narrower type, may have made infinities.
            if self._nonfinite is not None and not all(
                np.isfinite(np.frombuffer(update.values, variable.dtype)).all() for update in own_updates
            ):
                nonfinite.add(variable.name)
        if nonfinite and self._nonfinite is not None:
            count = self._nonfinite.shard_updates(ps_pb2.ADD, int(replica is None or replica.replica_id == 0))
            if self._preprocessing.nonfinite == "count":
                updates += count
            else:
                self._client.update(count)
                if self._preprocessing.nonfinite == "skip":
                    return []
                names = ", ".join(sorted(nonfinite))
                raise InvalidUpdateError(f"NaN or infinity in the gradient of {names}: nothing was applied")
        return updates

    def _checked(self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]]) -> list[tuple[Gradient, Variable]]:
        pairs: list[tuple[Gradient, Variable]] = []
        names: list[str] = []
        for pair in grads_and_vars:
            if not _is_pair(pair):
                raise TypeError(f"apply_gradients takes pairs (gradient, variable), not {checks.type_of(pair)}")
            gradient, variable = pair
            if not isinstance(variable, Variable):
                raise TypeError(f"apply_gradients takes pairs (gradient, variable), not {checks.type_of(variable)}")
            if gradient is None:
                continue
            if variable.client is not self._client:
                raise MisuseError(
                    f"variable {variable.name!r} belongs to a different strategy than optimizer {self.name!r}"
                )
            names += variable.member_names
            pairs.append((gradient_of(gradient), variable))
        if len(set(names)) < len(names):
            twice = min(name for name in names if names.count(name) > 1)
            raise MisuseError(f"variable {twice!r} is given twice: add its gradients first")
        return pairs

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2


def _values(gradient: Gradient) -> Array:
    return np.asarray(gradient.values if isinstance(gradient, IndexedSlices) else gradient)


CLASSES: dict[str, type[Optimizer]] = {}
"""The optimizers by the names of their rules."""

EmbeddingTable._optimizer_of = Optimizer.of
