"""Variables of several shards: cut by a partitioner, or existing variables joined as the shards of one."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pscluster.core.errors import ProtocolError
from pscluster.core.geometry.partition import Partition
from pscluster.core.values import describe
from pscluster.ps.client.cuts import Cut, SharedCut
from pscluster.ps.client.shard_update import ShardUpdate
from pscluster.ps.handles.reads import one_client
from pscluster.ps.handles.shard_requests import ALL
from pscluster.ps.handles.slots import SlotVariable
from pscluster.ps.handles.variable import Shard, Variable, VariableList
from pscluster.v1 import ps_pb2


class ShardedVariable(Variable):
    """A variable that is cut into several shards. `Variable(...)` makes one if the partitioner cuts it.

    `ShardedVariable([a, b])` joins existing variables along axis 0, as the shards of one. They remain variables: their
    values are its rows, checkpoints have each on its own, and an optimizer keeps slots beside each of them.

    Args:
        variables: of one type, and of one shape except for the first axis.
        name: for people; it need not be unique.

    Raises:
        TypeError: not a list, an empty one, or an element is not a variable.
        ValueError: they differ in type or in shape after axis 0, or one is a scalar, cut, or given twice.
        MisuseError: they belong to several strategies.
    """

    def __new__(cls, variables: Sequence[Variable], name: str = "ShardedVariable") -> JoinedVariable:
        return JoinedVariable.of_members(variables, name)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.variables)


class JoinedVariable(ShardedVariable):
    """Several variables as the shards of one. Each numbers the updates that concern it."""

    handle_kind = "joined"
    takes_whole_reads = False
    _members: tuple[Variable, ...]

    @staticmethod
    def of_members(variables: Sequence[Variable], name: str) -> JoinedVariable:
        members = _checked_members(variables)
        first = members[0]
        stops = tuple(itertools.accumulate(member.shape[0] for member in members))
        handle: JoinedVariable = object.__new__(JoinedVariable)
        handle.name, handle.dtype, handle.client, handle._slot = str(name), first.dtype, first.client, None
        handle.shape = (stops[-1], *first.shape[1:])
        handle.trainable = all(member.trainable for member in members)
        handle.ephemeral = first.ephemeral
        partition = Partition(handle.shape, (stops, *((length,) for length in first.shape[1:])))
        handle._cut, handle.origin, handle._members = SharedCut(Cut(0, partition, ())), 0, members  # unknown to servers
        for member in members:
            member.joined = True
        return handle

    @staticmethod
    def of_key(key: str, variable: Callable[[str], Variable]) -> JoinedVariable:
        """Return the handle of a key, its members by calling `variable` with theirs; or raise ProtocolError."""
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            match json.loads(key):
                case [str() as name, list(members)] if all(isinstance(member, str) for member in members):
                    return JoinedVariable.of_members([variable(member) for member in members], name)
        raise ProtocolError(f"{key[:80]!r} is not the key of joined variables")

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(member.owners[0] for member in self._members)

    @property
    def handle_key(self) -> str:
        return json.dumps([self.name, [member.handle_key for member in self._members]])

    def key_with(self, prefix: str) -> str:
        return json.dumps([self.name, [member.key_with(prefix) for member in self._members]])

    @property
    def member_names(self) -> list[str]:
        return [member.name for member in self._members]

    @property
    def variables(self) -> list[Variable]:  # type: ignore[override]  # as in TensorFlow
        return VariableList(self._members)

    def __iter__(self) -> Iterator[Variable]:  # type: ignore[override]  # as above
        return iter(self._members)

    def _read_item(self, shard: int, rows: ps_pb2.Rows = ALL) -> ps_pb2.ReadItem:
        return self._members[shard]._read_item(0, rows)

    def _shard_update(self, kind: ps_pb2.UpdateKind, shard: int, nth: int, *args: Any, **kwargs: Any) -> ShardUpdate:
        del nth
        member = self._members[shard]
        return member._shard_update(kind, 0, member.next_update(), *args, **kwargs)

    def next_update(self) -> int:
        return 0  # see `_shard_update`


def _checked_members(variables: object) -> tuple[Variable, ...]:
    if not isinstance(variables, Sequence) or isinstance(variables, str | bytes) or not variables:
        raise TypeError(
            f"a ShardedVariable takes a list of variables, not {variables!r:.80}: to partition a single variable, "
            "give Variable a partitioner"
        )
    for index, member in enumerate(variables):
        if isinstance(member, Shard):
            raise ValueError(f"variables[{index}] is {member.name!r}, a shard of a variable: give whole variables")
        if not isinstance(member, Variable) or isinstance(member, SlotVariable | Variable._table_type):
            raise TypeError(f"variables[{index}] is {describe(member)}, not a variable: make one with Variable(...)")
        if member.num_shards > 1 or isinstance(member, JoinedVariable):
            raise ValueError(f"variables[{index}], {member.name!r}, is itself partitioned: give variables that are not")
        if not member.shape:
            raise ValueError(f"variables[{index}], {member.name!r}, is a scalar: it has no axis to join along")
    first, names = variables[0], [member.name for member in variables]
    for index, member in enumerate(variables):
        if member.dtype != first.dtype:
            raise ValueError(f"variables[{index}] is {member.dtype.name}, and the first one {first.dtype.name}")
        if member.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"variables[{index}] has shape {member.shape}, and the first one {first.shape}: they may differ in the "
                "first axis only"
            )
        if member.name in names[:index]:
            raise ValueError(f"variables[{index}], {member.name!r}, is given twice")
    one_client(variables)
    return tuple(variables)


Variable._sharded_type = ShardedVariable
