"""Hooks for checkpoints: a variable's values shard by shard, and back into a variable that may be cut otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry import Block
from pscluster.ps.handles.variable import Array, Variable


@dataclass(frozen=True, slots=True)
class ShardState:
    """The values of one shard, and where in the whole they belong.

    Attributes:
        name: of the variable.
        shape: of the whole variable.
        block: the shard's place in it.
        values: of the block's shape.
    """

    name: str
    shape: tuple[int, ...]
    block: Block
    values: Array


def save_shards(variable: Variable) -> Iterator[ShardState]:
    """The variable's shards, read one by one: no more than one is in memory. Each is as it was at one moment."""
    for shard in variable.variables:
        yield ShardState(variable.name, variable.shape, shard.block, shard.read_value())


def restore_shards(variable: Variable, states: Iterable[ShardState]) -> None:
    """Assign saved shards to a variable of the same shape, however either is cut.

    Each state is checked before it is assigned; those before a wrong one have been assigned then.

    Raises:
        InvalidUpdateError: a state of another shape or type, or the states do not fill the variable.
    """
    filled = 0
    seen: set[Block] = set()
    for state in states:
        if state.shape != variable.shape or state.values.shape != state.block.shape:
            raise InvalidUpdateError(
                f"variable {variable.name!r} has shape {variable.shape}, but the saved {state.name!r} has {state.shape}"
            )
        if state.values.dtype != variable.dtype:
            raise InvalidUpdateError(
                f"variable {variable.name!r} is {variable.dtype}, but the saved {state.name!r} is {state.values.dtype}"
            )
        if state.block in seen:
            raise InvalidUpdateError(f"the shard of {state.name!r} at {state.block.start} was saved twice")
        seen.add(state.block)
        variable.assign(state.values, at=(*state.block.slices, ...))
        filled += state.block.size
    if filled != variable.size:
        raise InvalidUpdateError(f"the saved shards hold {filled} of the {variable.size} elements of {variable.name!r}")
