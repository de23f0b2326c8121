"""Variables of several shards: cut by a partitioner, or existing variables joined as the shards of one.

Joined variables may be cut themselves, from the start or while the job lives: then all their shards are those of the
whole, in which each has its rows in its own order. A handle of the whole follows the cuts of its members.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pscluster.core.errors import ProtocolError
from pscluster.core.geometry.partition import Partition
from pscluster.core.values import describe
from pscluster.ps.client.placement.cuts import Cut, SharedCut
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.handles.reads import one_client
from pscluster.ps.handles.shard_requests import ALL
from pscluster.ps.handles.variables.slots import SlotVariable
from pscluster.ps.handles.variables.variable import Shard, Variable, VariableList
from pscluster.v1 import ps_pb2


class ShardedVariable(Variable):
    """A variable that is cut into several shards. `Variable(...)` makes one if the partitioner cuts it.

    `ShardedVariable([a, b])` joins existing variables along axis 0, as the shards of one. They remain variables: their
    values are its rows, checkpoints have each on its own, and an optimizer keeps slots beside each of them. One that is
    cut by rows brings all its shards.

    Args:
        variables: of one type, and of one shape except for the first axis.
        name: for people; it need not be unique.

    Raises:
        TypeError: not a list, an empty one, or an element is not a variable.
        ValueError: they differ in type or in shape after axis 0, or one is a scalar, joined itself, cut along another
            axis, or given twice.
        MisuseError: they belong to several strategies.
    """

    def __new__(cls, variables: Sequence[Variable], name: str = "ShardedVariable") -> JoinedVariable:
        return JoinedVariable.of_members(variables, name)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.variables)


class _UpdateOfMembers(int):
    """What numbers an update of joined variables: each of them that it concerns does, once, for all of its shards.

    So an update that runs again has the same numbers, also if a member is resharded by then.
    """

    def __init__(self, *_: object) -> None:
        self._numbers: dict[int, int] = {}

    def of(self, place: int, member: Variable) -> int:
        """Return the number that the member at this place gives it."""
        if place not in self._numbers:
            self._numbers[place] = member.next_update()
        return self._numbers[place]


class JoinedVariable(ShardedVariable):
    """Several variables as the shards of one. Each numbers the updates that concern it."""

    handle_kind = "joined"
    takes_whole_reads = False
    _members: tuple[Variable, ...]
    _sources: tuple[tuple[int, int], ...]  # of each shard: the place of its member, and which of that one's it is

    @staticmethod
    def of_members(variables: Sequence[Variable], name: str) -> JoinedVariable:
        members = _checked_members(variables)
        first = members[0]
        handle: JoinedVariable = object.__new__(JoinedVariable)
        handle.name, handle.dtype, handle.client, handle._slot = str(name), first.dtype, first.client, None
        handle.trainable = all(member.trainable for member in members)
        handle.ephemeral = first.ephemeral
        handle._cut, handle.origin, handle._members = SharedCut(_cut_of(members)), 0, members  # unknown to servers
        handle.cut_changed()
        handle.shape = handle.partition.shape
        for member in members:
            member._cut.follow(handle)
        return handle

    def cut_changed(self) -> None:
        self._cut.change(_cut_of(self._members))
        self._sources = tuple(
            (place, shard) for place, member in enumerate(self._members) for shard in range(member.num_shards)
        )

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
        return tuple(owner for member in self._members for owner in member.owners)

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
        place, of_member = self._sources[shard]
        return self._members[place]._read_item(of_member, rows)

    def _shard_update(self, kind: ps_pb2.UpdateKind, shard: int, nth: int, *args: Any, **kwargs: Any) -> ShardUpdate:
        assert isinstance(nth, _UpdateOfMembers)
        place, of_member = self._sources[shard]
        member = self._members[place]
        return member._shard_update(kind, of_member, nth.of(place, member), *args, **kwargs)

    def next_update(self) -> int:
        return _UpdateOfMembers()


def _cut_of(members: Sequence[Variable]) -> Cut:
    return Cut(0, Partition.joined([member.partition for member in members]), ())


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
        if isinstance(member, JoinedVariable):
            raise ValueError(f"variables[{index}], {member.name!r}, is joined itself: give the variables it is made of")
        if not member.shape:
            raise ValueError(f"variables[{index}], {member.name!r}, is a scalar: it has no axis to join along")
        if others := [axis for axis in member.partition.cut_axes if axis]:
            raise ValueError(
                f"variables[{index}], {member.name!r}, is cut along axis {others[0]}: variables are joined along axis "
                "0, and may be cut along that alone"
            )
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
