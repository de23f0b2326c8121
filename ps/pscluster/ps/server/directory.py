"""The directory of a server: which variables and optimizers the job has, and the shards that live here.

Pure; its owner serialises what changes it. A variable is pending while its shards are made: whoever deletes it
meanwhile takes it from there, and it is not entered when they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pscluster.core.errors import InvalidUpdateError, StaleError, UnavailableError, UnknownVariableError
from pscluster.core.geometry import Partition
from pscluster.ps.optim import UpdateRule
from pscluster.ps.request_metrics import VariableCounts
from pscluster.ps.server.shard import Shard
from pscluster.v1 import definition_pb2, ps_pb2

_MAX_DELETED_PREFIXES = 256
"""So many deletions of all names with a prefix are remembered: a late copy of a creation makes none of them again."""


@dataclass(slots=True)
class HeldVariable:
    """A variable of the directory and the shards of it that live here."""

    spec: ps_pb2.VariableSpec
    dtype: np.dtype[Any]
    partition: Partition
    shards: dict[int, Shard]
    counts: VariableCounts = field(default_factory=VariableCounts)


@dataclass(slots=True)
class HeldOptimizer:
    """An optimizer of the directory."""

    spec: ps_pb2.OptimizerSpec
    rule: UpdateRule
    definition: definition_pb2.Definition | None = None  # of a rule of the user's own
    by_value: bool = False  # its class came as a pickle


Contents = tuple[list[HeldVariable], list[HeldOptimizer], dict[int, ps_pb2.OptimizerSpec]]
"""Variables, optimizers, and by number those optimizers whose rule is awaited."""


class Directory:
    """Variables and optimizers by their numbers.

    Attributes:
        variables: by number.
        pending: the names of those that are being made, by number.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self.variables: dict[int, HeldVariable] = {}
        self.pending: dict[int, str] = {}
        self._optimizers: dict[int, HeldOptimizer] = {}
        self._awaited: dict[int, ps_pb2.OptimizerSpec] = {}  # restored, and their rule has to be sent again
        self._deleted_prefixes: deque[str] = deque(maxlen=_MAX_DELETED_PREFIXES)

    # Looking up: what is looked for is there or not, so these need no lock

    def find(self, variable: int, shard: int) -> tuple[HeldVariable, Shard]:
        """Return a variable and one of its shards. UnknownVariableError if it does not live here."""
        held = self.variables.get(variable)
        if held is None:
            raise UnknownVariableError(f"there is no variable with id {variable} in this job")
        if shard not in held.shards:
            raise UnknownVariableError(f"shard {shard} of {held.spec.name!r} does not live on ps {self._server}")
        return held, held.shards[shard]

    def optimizer(self, number: int) -> HeldOptimizer:
        """Return an optimizer. UnknownVariableError if there is none; UnavailableError if its rule is awaited."""
        known = self._optimizers.get(number)
        if known is None and number in self._awaited:
            raise UnavailableError(
                f"ps {self._server} is waiting for the rule of optimizer {self._awaited[number].name!r}"
            )
        if known is None:
            raise UnknownVariableError(f"there is no optimizer with id {number} in this job")
        return known

    # Under the owner's lock

    def contents(self) -> Contents:
        """Return copies of the lists."""
        return list(self.variables.values()), list(self._optimizers.values()), dict(self._awaited)

    def shards(self) -> list[Shard]:
        """Return all that live here."""
        return [shard for held in self.variables.values() for shard in held.shards.values()]

    def has_optimizer(self, spec: ps_pb2.OptimizerSpec) -> bool:
        """Is there one of this number and name, with this rule?"""
        held = self._optimizers.get(spec.id)
        return held is not None and (held.spec.name, held.spec.rule) == (spec.name, spec.rule)

    def check_name(self, spec: ps_pb2.VariableSpec) -> None:
        """Refuse a variable whose name is taken or was deleted."""
        if spec.name.startswith(tuple(self._deleted_prefixes)):
            raise StaleError(f"variable {spec.name!r} was deleted, with all others whose names share its prefix")
        # The same spec again is a repetition of this request: its first answer was lost.
        if any(held.spec.name == spec.name and held.spec != spec for held in self.variables.values()):
            raise InvalidUpdateError(f"there is a variable {spec.name!r} already: names are unique in a strategy")

    def put_optimizer(self, optimizer: HeldOptimizer) -> None:
        """Enter an optimizer, or another form of it."""
        self._optimizers[optimizer.spec.id] = optimizer
        self._awaited.pop(optimizer.spec.id, None)

    def delete(self, name: str, variable: int = 0, prefix: str = "") -> list[int]:
        """Remove what `Store.delete` says; return the numbers of those that were there."""

        def matches(number: int, named: str) -> bool:
            return named.startswith(prefix) if prefix else named == name and variable in (0, number)

        if prefix and prefix not in self._deleted_prefixes:
            self._deleted_prefixes.append(prefix)
        deleted = [number for number, held in self.variables.items() if matches(number, held.spec.name)]
        for number in deleted:
            del self.variables[number]
        self.pending = {number: named for number, named in self.pending.items() if not matches(number, named)}
        return deleted

    def forget_deleted(self) -> None:
        """Late copies of creations are of another job now."""
        self._deleted_prefixes.clear()

    def restore(self, variables: Sequence[HeldVariable], awaited: Mapping[int, ps_pb2.OptimizerSpec]) -> None:
        """Put in what was saved."""
        self.variables = {held.spec.id: held for held in variables}
        self._awaited = dict(awaited)


def described(
    contents: Contents, variables: Sequence[str], optimizers: Sequence[str], everything: bool = False
) -> ps_pb2.DescribeReply:
    """Return what a directory knows of these names. UnknownVariableError names the first unknown one."""
    reply = ps_pb2.DescribeReply()
    held_variables, held_optimizers, awaited = contents
    by_name = {held.spec.name: held for held in held_variables}
    rules = {held.spec.name: held.spec for held in held_optimizers}
    rules |= {spec.name: spec for spec in awaited.values()}
    if everything:
        variables, optimizers = list(by_name), list(rules)
    for name in variables:
        if name not in by_name:
            raise UnknownVariableError(f"there is no variable {name!r} in this job")
        reply.variables.append(by_name[name].spec)
    for name in optimizers:
        if name not in rules:
            raise UnknownVariableError(f"there is no optimizer {name!r} in this job")
        spec = reply.optimizers.add()
        spec.CopyFrom(rules[name])
        shards = (shard for held in held_variables for shard in held.shards.values())
        spec.iterations = max((shard.steps.get(spec.id, 0) for shard in shards), default=0)
    return reply
