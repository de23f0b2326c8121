"""Which parameter server gets which shard.

The placer decides and remembers; it moves nothing and makes no calls. It is not thread-safe: variables are created one
at a time. The same calls in the same order give the same placement.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.display.notebook import html_table
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError
from pscluster.core.geometry.partition import Block, Partition
from pscluster.ps.handles.rows.table import EmbeddingTable
from pscluster.ps.handles.variables.variable import Variable


@dataclass(frozen=True, slots=True)
class Load:
    """What a parameter server holds."""

    shards: int = 0
    nbytes: int = 0  # of the shards' values, without optimizer slots


@dataclass(frozen=True, slots=True)
class ShardToPlace:
    """A shard, as a placement policy sees it."""

    variable: str  # the variable's name
    shard: int  # its number in the variable
    num_shards: int  # of the variable
    block: Block  # its elements of the variable
    dtype: np.dtype[Any]
    nbytes: int
    ordinal: int  # how many shards, of all variables, the policy placed before it


PlacementPolicy = Callable[[ShardToPlace, tuple[Load, ...]], int]
"""Takes a shard and what every parameter server holds so far; returns the index of a server."""


def least_bytes(
    shard: ShardToPlace,  # noqa: ARG001  (part of the interface)
    loads: tuple[Load, ...],
) -> int:
    """Return the server with the fewest bytes; among equals the one with the fewest shards, then the first."""
    return min(range(len(loads)), key=lambda ps: (loads[ps].nbytes, loads[ps].shards, ps))


def round_robin(shard: ShardToPlace, loads: tuple[Load, ...]) -> int:
    """Return the next server in turn, over the shards of all variables, whatever their size: TensorFlow's rule."""
    return shard.ordinal % len(loads)


POLICIES: dict[str, PlacementPolicy] = {"bytes": least_bytes, "round_robin": round_robin}


class ShardPlacer:
    """Assigns shards to parameter servers, and records what each holds: in `loads`, by index.

    ConfigurationError (a ValueError) if there is no server, or no policy of that name.
    """

    def __init__(self, num_ps: int, policy: str | PlacementPolicy = "bytes") -> None:
        with configuration_errors():
            num_ps = checks.whole("num_ps", num_ps, at_least=1)
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
        self.loads = (Load(),) * num_ps
        self._limit = num_ps  # those from there on are being removed
        self._placed = 0

    def place(self, variable: str, partition: Partition, dtype: np.dtype[Any]) -> tuple[int, ...]:
        """Place a new variable, and return the ps index of each shard.

        ConfigurationError (a ValueError) if the policy's answer is no index of a parameter server. Nothing is recorded
        then, nor if the policy raises an error, which passes.
        """
        loads, owners = self.loads, []
        blocks = partition.blocks
        for shard_index, block in enumerate(blocks):
            nbytes = block.size * dtype.itemsize
            shard = ShardToPlace(variable, shard_index, len(blocks), block, dtype, nbytes, self._placed + shard_index)
            owner = self._check(shard, self._policy(shard, loads[: self._limit]))
            owners.append(owner)
            loads = _enter(loads, owner, 1, nbytes)
        self.loads = loads
        self._placed += len(owners)
        return tuple(owners)

    def adopt(self, partition: Partition, dtype: np.dtype[Any], owners: Sequence[int]) -> None:
        """Record a variable whose placement is known: found on its servers, or colocated with another one.

        The policy is not called, and its ordinal does not advance (as TensorFlow's with `colocate_vars_with`).
        """
        self._account(partition, dtype, owners, 1)

    def resize(self, count: int) -> None:
        """Place what comes from now on among this many servers."""
        self._limit = count
        self.loads = (*self.loads, *(Load() for _ in range(count - len(self.loads))))

    def move(self, nbytes: int, source: int, target: int) -> None:
        """Record that a shard of this many bytes has moved."""
        self.loads = _enter(_enter(self.loads, source, -1, -nbytes), target, 1, nbytes)

    def release(self, partition: Partition, dtype: np.dtype[Any], owners: Sequence[int]) -> None:
        self._account(partition, dtype, owners, -1)

    def _account(self, partition: Partition, dtype: np.dtype[Any], owners: Sequence[int], sign: int) -> None:
        for owner, block in zip(owners, partition.blocks, strict=True):
            self.loads = _enter(self.loads, owner, sign, sign * block.size * dtype.itemsize)

    def _check(self, shard: ShardToPlace, answer: object) -> int:
        try:
            if isinstance(answer, bool | np.bool_):
                raise TypeError
            owner = operator.index(answer)  # type: ignore[arg-type]  # the error is the check
        except TypeError:
            owner = -1
        if not 0 <= owner < self._limit:
            raise ConfigurationError(
                f"variable {shard.variable!r}, shard {shard.shard}: the placement policy returned "
                f"{answer!r}. It must return the index of a parameter server, "
                f"an integer in 0..{self._limit - 1}."
            )
        return owner


def _enter(loads: tuple[Load, ...], owner: int, shards: int, nbytes: int) -> tuple[Load, ...]:
    load = loads[owner]
    entered = replace(load, shards=load.shards + shards, nbytes=load.nbytes + nbytes)
    return (*loads[:owner], entered, *loads[owner + 1 :])


def placement_table(variables: Iterable[Variable], num_servers: int) -> str:
    """Return a table of the shards' servers, and of how full each is; see `ParameterServerStrategy.placement`."""
    from rich.table import Table  # slow to import
    from rich.text import Text

    from pscluster.coordinator.cli.tables import rendered

    table = Table("shard", "shape", "type", "place", "bytes", title="placement")
    per_server: dict[str, int] = {}
    grows = False
    for variable in variables:
        for shard in variable.variables:
            if isinstance(variable, EmbeddingTable):  # how many rows it has by now is known on the servers alone
                grows, shape, nbytes = True, f"rows of {variable.dim}", ""
            else:
                per_server[shard.device] = per_server.get(shard.device, 0) + shard.nbytes
                shape, nbytes = "x".join(map(str, shard.shape)) or "scalar", f"{shard.nbytes:,}"
            table.add_row(Text(shown(shard.name)), shape, shard.dtype.name, shard.device, nbytes)
    fullest = max(per_server.values(), default=0) or 1
    bars = []
    for index in range(num_servers):
        size = per_server.get(f"/job:ps/task:{index}", 0)
        bars.append(f"ps {index} |{'#' * round(40 * size / fullest):40}| {size:,} bytes")
    if grows:
        bars.append("rows of embedding tables are not counted; pscluster top shows them")
    return "\n".join([rendered(table), *bars])


def placement_html(title: str, variables: Iterable[Variable], num_servers: int) -> str:
    """Return tables for a notebook: of variables with the servers that hold them, and of each server's bytes."""
    per_server: dict[str, int] = {f"/job:ps/task:{index}": 0 for index in range(num_servers)}
    rows = []
    for variable in variables:
        shards = variable.variables
        for shard in shards:
            per_server[shard.device] = per_server.get(shard.device, 0) + shard.nbytes
        places = ", ".join(sorted({shard.device for shard in shards}))
        nbytes = sum(shard.nbytes for shard in shards)
        rows.append((variable.name, variable.shape, variable.dtype.name, len(shards), places, f"{nbytes:,}"))
    servers = [(server, f"{nbytes:,}") for server, nbytes in per_server.items()]
    table = html_table(title, ("variable", "shape", "type", "shards", "place", "bytes"), rows)
    return table + html_table("values held, without slots", ("server", "bytes"), servers)
