"""The directory of a server: the variables and optimizers of the job, and the shards that live here.

Pure; its owner serializes changes. A variable is pending while its shards are made. If it is deleted meanwhile, it is
removed from the pending ones, and not entered afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from pscluster.core.errors import (
    InvalidUpdateError,
    ProtocolError,
    ShardMovedError,
    StaleError,
    UnavailableError,
    UnknownVariableError,
)
from pscluster.core.geometry.partition import Partition
from pscluster.ps.optim.rules import UpdateRule
from pscluster.ps.request_metrics import VariableMetrics
from pscluster.ps.server.state.losses import NAMES
from pscluster.ps.server.state.metadata import Metadata
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.spec import METADATA
from pscluster.v1 import definition_pb2, ps_pb2

_MAX_DELETED = 256
"""The most deleted variables whose names are remembered."""

_MAX_DELETED_EVALUATIONS = 256
"""The most deletions by evaluation that are remembered, so that late copies of creations are refused."""

_HINT = ": it was deleted, or is of an earlier job; make it again, and the functions that use it"
"""What to do about a name that is unknown."""


@dataclass(frozen=True, slots=True)
class HeldVariable:
    """A variable of the directory, with its shards that live here. Another one takes its place if shards move."""

    spec: ps_pb2.VariableSpec
    dtype: np.dtype[Any]
    partition: Partition
    shards: dict[int, Shard]
    metrics: VariableMetrics = field(default_factory=VariableMetrics)


@dataclass(slots=True)
class HeldOptimizer:
    """An optimizer of the directory."""

    spec: ps_pb2.OptimizerSpec
    rule: UpdateRule
    definition: definition_pb2.Definition | None = None  # of a rule of the user's own
    by_value: bool = False  # its class came as a pickle
    digest: int = field(init=False)  # of the spec

    def __post_init__(self) -> None:
        self.digest = xxhash.xxh3_64_intdigest(self.spec.SerializeToString(deterministic=True))


Contents = tuple[list[HeldVariable], list[HeldOptimizer], dict[int, ps_pb2.OptimizerSpec]]
"""Variables, optimizers, and, by id, the optimizers whose rule is awaited."""


class Directory:
    """Variables and optimizers by their ids."""

    def __init__(self, server: int) -> None:
        self._server = server
        self.variables: dict[int, HeldVariable] = {}
        self.pending: dict[int, ps_pb2.VariableSpec] = {}
        self.metadata = Metadata()  # the job's, on server 0; it is not one of the variables
        spec = ps_pb2.VariableSpec(name=NAMES[METADATA])
        # The same, in the form in which updates need it.
        self.held_metadata = HeldVariable(spec, np.dtype(np.uint8), Partition((), ()), {METADATA[1]: self.metadata})
        self._optimizers: dict[int, HeldOptimizer] = {}
        self._awaited: dict[int, ps_pb2.OptimizerSpec] = {}  # restored, but their rule must be sent again
        self._deleted: dict[int, str] = {}  # names of the variables that were deleted last, for messages
        self._deleted_evaluations: deque[int] = deque(maxlen=_MAX_DELETED_EVALUATIONS)

    # Lookups, each of a single dictionary entry, so these need no lock

    def find(self, variable: int, shard: int) -> tuple[HeldVariable, Shard]:
        """Return a variable and one of its shards.

        UnknownVariableError if it does not live here, ShardMovedError if that may have been otherwise, UnavailableError
        if it does not yet.
        """
        held = self.variables.get(variable)
        if held is None:
            if (name := self._deleted.get(variable)) is not None:
                raise UnknownVariableError(
                    f"variable {name!r} was deleted: use the one that was made in its place, or make one"
                )
            raise UnknownVariableError(f"there is no variable with id {variable} in this job")
        found = held.shards.get(shard)
        if found is None:
            text = f"shard {shard} of {held.spec.name!r} does not live on ps {self._server}"
            raise ShardMovedError(text) if held.spec.placement else UnknownVariableError(text)
        if found.arriving is not None:
            raise UnavailableError(f"shard {shard} of {held.spec.name!r} is still arriving on ps {self._server}")
        return held, found

    def optimizer(self, optimizer_id: int) -> HeldOptimizer:
        """Return an optimizer. UnknownVariableError if there is none; UnavailableError if its rule is awaited."""
        known = self._optimizers.get(optimizer_id)
        if known is None and optimizer_id in self._awaited:
            raise UnavailableError(
                f"ps {self._server} is waiting for the rule of optimizer {self._awaited[optimizer_id].name!r}"
            )
        if known is None:
            raise UnknownVariableError(f"there is no optimizer with id {optimizer_id} in this job")
        return known

    def has_optimizer(self, spec: ps_pb2.OptimizerSpec) -> bool:
        """Return whether there is an optimizer with this id, name and rule."""
        held = self._optimizers.get(spec.id)
        return held is not None and (held.spec.name, held.spec.rule) == (spec.name, spec.rule)

    # These need the owner's lock

    def contents(self) -> Contents:
        """Return a copy of the contents."""
        return list(self.variables.values()), list(self._optimizers.values()), dict(self._awaited)

    def shards(self) -> list[Shard]:
        """Return all shards that live here, and the metadata."""
        return [self.metadata, *(shard for held in self.variables.values() for shard in held.shards.values())]

    def check_name(self, spec: ps_pb2.VariableSpec) -> None:
        """Refuse a variable whose name is taken or was deleted."""
        if spec.evaluation in self._deleted_evaluations:
            raise StaleError(f"variable {spec.name!r} was deleted, with all others of its evaluation")
        # The same spec again is a repetition of this request: its first answer was lost.
        if any(held.spec.name == spec.name and held.spec != spec for held in self.variables.values()):
            raise InvalidUpdateError(f"there is already a variable {spec.name!r}: names are unique in a strategy")

    def put_optimizer(self, optimizer: HeldOptimizer) -> None:
        """Enter an optimizer, or a new form of it."""
        self._optimizers[optimizer.spec.id] = optimizer
        self._awaited.pop(optimizer.spec.id, None)

    def delete(self, name: str, variable: int = 0, evaluation: int = 0) -> list[int]:
        """Remove variables as described in `Store.delete`; return the ids of those that existed."""

        def matches(spec: ps_pb2.VariableSpec) -> bool:
            return spec.evaluation == evaluation if evaluation else spec.name == name and variable in (0, spec.id)

        if evaluation and evaluation not in self._deleted_evaluations:
            self._deleted_evaluations.append(evaluation)
        deleted = [id_ for id_, held in self.variables.items() if matches(held.spec)]
        for id_ in deleted:
            held = self.variables.pop(id_)
            if not evaluation:
                self._note_deleted(id_, held.spec.name)
        self.pending = {id_: spec for id_, spec in self.pending.items() if not matches(spec)}
        return deleted

    def place(self, spec: ps_pb2.VariableSpec, arrived: Mapping[int, Shard] | None = None) -> dict[int, Shard]:
        """Take a later spec, and shards that have come here with it; return those that are here no longer.

        None are if the variable was deleted, or the spec is not later. StaleError if it has shards here that are not.
        """
        held = self.variables.get(spec.id)
        if held is None or spec.placement <= held.spec.placement:
            return {}
        same = ps_pb2.VariableSpec()
        same.CopyFrom(spec)
        same.owners[:], same.placement = held.spec.owners, held.spec.placement
        if same != held.spec or len(spec.owners) != len(held.spec.owners):
            raise ProtocolError(f"a placement of {held.spec.name!r} that makes another variable of it")
        here = {**held.shards, **(arrived or {})}
        mine = {shard for shard, owner in enumerate(spec.owners) if owner == self._server}
        if missing := mine.difference(here):
            raise StaleError(
                f"ps {self._server} lacks shard {min(missing)} of {spec.name!r}, which has moved here: it was "
                "restarted with what it held before: start a new coordinator, and restore a checkpoint"
            )
        kept = {index: shard for index, shard in here.items() if index in mine}
        self.variables[spec.id] = replace(held, spec=spec, shards=kept)
        return {index: shard for index, shard in here.items() if index not in mine}

    def adopt(self, spec: ps_pb2.VariableSpec) -> list[HeldVariable]:
        """Enter a variable under its final spec in place of those of its name, which are returned. See `resharding`.

        StaleError if it is not here, ProtocolError if it is another one.
        """
        held = self.variables.get(spec.id)
        if held is None:
            raise StaleError(
                f"ps {self._server} lacks the shards of {spec.name!r} as it is cut now: it was restarted with what it "
                "held before: start a new coordinator, and restore a checkpoint"
            )
        final = ps_pb2.VariableSpec()
        final.CopyFrom(held.spec)
        final.name, final.evaluation = spec.name, 0
        if final != spec:
            raise ProtocolError(f"the cut of {spec.name!r} that is here is another one")
        if held.spec == spec:
            return []
        gone = [other for other in self.variables.values() if other.spec.name == spec.name and other.spec.id != spec.id]
        for other in gone:
            del self.variables[other.spec.id]
            self._note_deleted(other.spec.id, spec.name)
        metrics = gone[0].metrics if gone else held.metrics
        self.variables[spec.id] = replace(held, spec=spec, metrics=metrics)
        return gone

    def _note_deleted(self, variable: int, name: str) -> None:
        while len(self._deleted) >= _MAX_DELETED:
            del self._deleted[next(iter(self._deleted))]
        self._deleted[variable] = name

    def put_back(self, held: HeldVariable) -> None:
        """Undo the last `place` of a variable, unless it was deleted."""
        if held.spec.id in self.variables:
            self.variables[held.spec.id] = held

    def forget_deleted(self) -> None:
        """Forget deletions by evaluation: late copies of creations are of another job now."""
        self._deleted_evaluations.clear()

    def restore(self, variables: Sequence[HeldVariable], awaited: Mapping[int, ps_pb2.OptimizerSpec]) -> None:
        """Enter the saved variables and optimizers."""
        self.variables = {held.spec.id: held for held in variables}
        self._awaited = dict(awaited)


def described(
    contents: Contents,
    variables: Sequence[str],
    optimizers: Sequence[str],
    everything: bool = False,
    moved: bool = False,
) -> ps_pb2.DescribeReply:
    """Return the specs of these names, and of variables that have moved. UnknownVariableError names an unknown one."""
    reply = ps_pb2.DescribeReply()
    held_variables, held_optimizers, awaited = contents
    by_name = {held.spec.name: held for held in held_variables}
    rules = {held.spec.name: held.spec for held in held_optimizers}
    rules |= {spec.name: spec for spec in awaited.values()}
    if everything:
        variables, optimizers = list(by_name), list(rules)
    elif moved:
        variables = [
            *variables,
            *(held.spec.name for held in held_variables if held.spec.placement or held.spec.origin),
        ]
    for name in variables:
        if name not in by_name:
            raise UnknownVariableError(f"there is no variable {name!r} in this job{_HINT}")
        reply.variables.append(by_name[name].spec)
    for name in optimizers:
        if name not in rules:
            raise UnknownVariableError(f"there is no optimizer {name!r} in this job{_HINT}")
        spec = reply.optimizers.add()
        spec.CopyFrom(rules[name])
        shards = (shard for held in held_variables for shard in held.shards.values())
        spec.iterations = max((shard.steps.get(spec.id, 0) for shard in shards), default=0)
    return reply
