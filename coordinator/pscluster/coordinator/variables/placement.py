"""Which parameter server gets which shard.

By bytes, unless told otherwise: a table of a million rows and a bias should not count the same. TensorFlow's
rule, one round robin over all shards of whatever size, is the option for those who rely on it, and a function
of the user's own may know what no rule can: which variables are hot.

The placer decides and remembers; it moves nothing and makes no calls. It is not thread-safe: variables are
created one at a time. The same calls in the same order give the same places.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from pscluster.coordinator.cli.tables import rendered
from pscluster.coordinator.variables.partitioners import element_bytes
from pscluster.core.errors import ConfigurationError
from pscluster.core.geometry import Block, Partition
from pscluster.core.sanitize import shown
from pscluster.ps.handles.variable import Variable


@dataclass(frozen=True, slots=True)
class Load:
    """What a parameter server holds: so many shards, of so many bytes (their values, not optimizer slots)."""

    shards: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ShardToPlace:
    """What a placement policy is told of a shard.

    Attributes:
        variable: its variable's name.
        shard: its number in the variable.
        num_shards: of the variable.
        block: which part of the variable it is.
        dtype: of the variable.
        nbytes: its size; strings of no fixed width count by estimate.
        ordinal: how many shards, of all variables, the policy placed before it.
    """

    variable: str
    shard: int
    num_shards: int
    block: Block
    dtype: np.dtype[Any]
    nbytes: int
    ordinal: int


PlacementPolicy = Callable[[ShardToPlace, tuple[Load, ...]], int]
"""Asked with a shard and what every parameter server holds so far, answers the index of one of them."""


def least_bytes(
    shard: ShardToPlace,  # noqa: ARG001  (a policy is told of it; this one looks at the servers only)
    loads: tuple[Load, ...],
) -> int:
    """The server with the fewest bytes; of several the one with the fewest shards, then the first."""
    return min(range(len(loads)), key=lambda ps: (loads[ps].nbytes, loads[ps].shards, ps))


def round_robin(shard: ShardToPlace, loads: tuple[Load, ...]) -> int:
    """Each shard to the next server in turn, over all variables, whatever the size: TensorFlow's rule."""
    return shard.ordinal % len(loads)


POLICIES: dict[str, PlacementPolicy] = {"bytes": least_bytes, "round_robin": round_robin}
"""The policies that have a name."""


class ShardPlacer:
    """Assigns shards to parameter servers and keeps account of what each holds.

    Args:
        num_ps: how many parameter servers there are.
        policy: "bytes", "round_robin" or a function (`PlacementPolicy`).
        bytes_per_string: the estimate for one string, where strings have no fixed width.

    Raises:
        ConfigurationError (ValueError): there is no server, or no policy of that name.
    """

    def __init__(self, num_ps: int, policy: str | PlacementPolicy = "bytes", *, bytes_per_string: int = 16) -> None:
        if num_ps < 1:
            raise ConfigurationError(f"shards are placed on 1 parameter server at least, not on {num_ps}")
        if isinstance(policy, str):
            if policy not in POLICIES:
                names = ", ".join(map(repr, POLICIES))
                raise ConfigurationError(
                    f"there is no placement policy {policy!r}: use {names} or a function of (shard, loads)"
                )
            policy = POLICIES[policy]
        elif not callable(policy):
            raise ConfigurationError(f"a placement policy is a name or a function, not {policy!r}")
        self._policy = policy
        self._bytes_per_string = bytes_per_string
        self._loads = (Load(),) * num_ps
        self._placed = 0

    @property
    def loads(self) -> tuple[Load, ...]:
        """What each parameter server holds, by index."""
        return self._loads

    def place(self, variable: str, partition: Partition, dtype: np.dtype[Any]) -> tuple[int, ...]:
        """The ps index for every shard of a new variable, by shard number, entered into the account.

        Raises:
            ConfigurationError (ValueError): the policy's answer is no index of a parameter server. Nothing is
                then entered. What the policy itself raises passes, likewise.
        """
        loads, owners = self._loads, []
        blocks = partition.blocks
        for number, (block, nbytes) in enumerate(zip(blocks, self._sizes(blocks, dtype), strict=True)):
            shard = ShardToPlace(variable, number, len(blocks), block, np.dtype(dtype), nbytes, self._placed + number)
            owner = self._check(shard, self._policy(shard, loads))
            owners.append(owner)
            loads = _enter(loads, owner, 1, nbytes)
        self._loads = loads
        self._placed += len(owners)
        return tuple(owners)

    def adopt(self, partition: Partition, dtype: np.dtype[Any], owners: Sequence[int]) -> None:
        """Enters a variable whose places are known: found on its servers, or put beside another one.

        The policy is not asked, and its count of shards doesn't advance (as TensorFlow's with
        `colocate_vars_with`).
        """
        self._account(partition, dtype, owners, 1)

    def release(self, partition: Partition, dtype: np.dtype[Any], owners: Sequence[int]) -> None:
        """Strikes a deleted variable from the account."""
        self._account(partition, dtype, owners, -1)

    def _account(self, partition: Partition, dtype: np.dtype[Any], owners: Sequence[int], sign: int) -> None:
        if len(owners) != partition.num_shards or any(not 0 <= owner < len(self._loads) for owner in owners):
            raise ValueError(
                f"{list(owners)} are not the places of {partition.num_shards} shards "
                f"on {len(self._loads)} parameter servers"
            )
        for owner, nbytes in zip(owners, self._sizes(partition.blocks, dtype), strict=True):
            self._loads = _enter(self._loads, owner, sign, sign * nbytes)

    def _sizes(self, blocks: Sequence[Block], dtype: np.dtype[Any]) -> list[int]:
        each = element_bytes(dtype, self._bytes_per_string)
        return [block.size * each for block in blocks]

    def _check(self, shard: ShardToPlace, answer: object) -> int:
        try:
            if isinstance(answer, bool | np.bool_):
                raise TypeError
            owner = operator.index(answer)  # type: ignore[arg-type]  # that it may not be one is the question
        except TypeError:
            owner = -1
        if not 0 <= owner < len(self._loads):
            raise ConfigurationError(
                f"variable {shard.variable!r}, shard {shard.shard}: the placement policy answered "
                f"{answer!r}. It must return the index of a parameter server, "
                f"an integer in 0..{len(self._loads) - 1}."
            )
        return owner


def _enter(loads: tuple[Load, ...], owner: int, shards: int, nbytes: int) -> tuple[Load, ...]:
    load = loads[owner]
    entered = replace(load, shards=load.shards + shards, nbytes=load.nbytes + nbytes)
    return (*loads[:owner], entered, *loads[owner + 1 :])


def placement_table(variables: Iterable[Variable], num_servers: int) -> str:
    """Show which shard lives where, and how full each server is; see `ParameterServerStrategy.placement`."""
    table = Table("shard", "shape", "type", "place", "bytes", title="placement")
    per_server: dict[str, int] = {}
    for variable in variables:
        for shard in variable.variables:
            per_server[shard.device] = per_server.get(shard.device, 0) + shard.nbytes
            shape = "x".join(map(str, shard.shape)) or "scalar"
            table.add_row(Text(shown(shard.name)), shape, shard.dtype.name, shard.device, f"{shard.nbytes:,}")
    fullest = max(per_server.values(), default=0) or 1
    picture = []
    for index in range(num_servers):
        size = per_server.get(f"/job:ps/task:{index}", 0)
        picture.append(f"ps {index} |{'#' * round(40 * size / fullest):40}| {size:,} bytes")
    return "\n".join([rendered(table), *picture])
