"""Blocks of variables, read and updated by the devices of a mesh, each of which has one.

A block that is a shard of its variable is read as such, any other as a box of the shards that it lies on. Only whole
shards are updated, each by one of the replicas of a synchronous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import MisuseError
from pscluster.core.geometry.partition import Block
from pscluster.core.geometry.row_orders import RANGE
from pscluster.core.transport.frames import view
from pscluster.ps.client.reads.plans import ShardRead
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.handles.shard_requests import ALL
from pscluster.ps.handles.variables.variable import Variable
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """An update of a block, which is a shard, by values of its shape and type."""

    kind: ps_pb2.UpdateKind
    variable: Variable
    block: Block
    values: Array
    optimizer: int = 0  # of a gradient


def read_blocks(wanted: Sequence[tuple[Variable, Block]]) -> list[Array]:
    """Read blocks of variables of one strategy: one request per server, all servers at once."""
    if not wanted:
        return []
    with wanted[0][0].client.gate:
        return _read_blocks(wanted)


def _read_blocks(wanted: Sequence[tuple[Variable, Block]]) -> list[Array]:
    results: list[Array] = []
    reads: list[ShardRead] = []
    for variable, block in wanted:
        results.append(out := np.empty(block.shape, variable.dtype))
        shard = shard_of(variable, block)
        if not out.size:
            continue
        if shard is None:
            reads += variable.box_reads(block.slices, out)
        else:
            item = ps_pb2.ReadItem(variable=variable.id, shard=shard, rows=ALL)
            reads.append(ShardRead(variable.owners[shard], item, out.nbytes, view(out)))
    if reads:
        wanted[0][0].client.read(reads)
    return results


def shard_of(variable: Variable, block: Block) -> int | None:
    """Return the number of the shard that a block is. None if it is none."""
    if variable.partition.order != RANGE:
        return None  # its blocks are of places
    blocks = variable.partition.blocks
    return blocks.index(block) if block in blocks else None


def shard_updates(updates: Sequence[BlockUpdate]) -> list[ShardUpdate]:
    """Return updates as they are sent. Raise MisuseError for a block that is no shard."""
    made = []
    for update in updates:
        variable, shard = update.variable, shard_of(update.variable, update.block)
        if shard is None:
            raise MisuseError(
                f"variable {variable.name!r} is not cut as the layout of its global array is: restore a checkpoint "
                "into a new variable"
            )
        data = view(np.ascontiguousarray(update.values))
        item = ps_pb2.UpdateItem(
            variable=variable.id,
            shard=shard,
            kind=update.kind,
            rows=ALL,
            optimizer=update.optimizer,
            nth=variable.next_update(),
            value_bytes=len(data),
        )
        made.append(ShardUpdate(variable.owners[shard], item, data, None, variable.name, variable.dtype))
    return made
