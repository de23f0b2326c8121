"""What each server reads of a checkpoint, however variables were cut and placed when it was made. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pscluster.coordinator.checkpoints.index import SavedVariable
from pscluster.core.errors import CheckpointMismatchError
from pscluster.core.geometry.moves import moves
from pscluster.ps.handles.rows.table import EmbeddingTable
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.row_ids import can_hold, kind_of
from pscluster.ps.spec import row_order_message
from pscluster.v1 import ps_pb2

KEYS_PER_REQUEST = 1 << 19  # functions' keys in a request to restore: 4 MiB


def plan_variable(
    variable: Variable,
    saved: SavedVariable,
    path: str,
    requests: dict[int, ps_pb2.RestoreRequest],
    *,
    named: bool = True,
) -> None:
    """Add to the servers' requests what their shards of a variable, as it is cut and placed now, read.

    `named`: include the saved shards' updates under keys. CheckpointMismatchError if the shapes or types differ.
    """
    if isinstance(variable, EmbeddingTable) or saved.dim:
        _plan_table(variable, saved, path, requests, named=named)
        return
    if saved.shape != variable.shape or saved.dtype != variable.dtype.name:
        raise CheckpointMismatchError(
            f"variable {variable.name!r} is {variable.dtype.name}{list(variable.shape)}, but {saved.dtype}"
            f"{list(saved.shape)} in {path}"
        )
    old, new = saved.partition, variable.partition
    same_places = old.has_order_of(new)
    shards = [
        requests[owner].shards.add(variable=variable.id, shard=shard_index)
        for shard_index, owner in enumerate(variable.owners)
    ]
    tensors = {key: {tensor.shard: tensor for tensor in saved_tensors} for key, saved_tensors in saved.arrays.items()}
    arrays: dict[tuple[int, str], Any] = {}
    updates = [dict[int, set[int]]() for _ in shards]  # per shard: which updates each function's key has made
    for move in moves(old, new):
        shard = shards[move.new_shard]
        for same in saved.named[move.old_shard] if named else ():
            for function in same.function_keys:
                updates[move.new_shard].setdefault(function, set()).update(same.nth)
        for optimizer, step in saved.steps[move.old_shard].items():
            shard.steps[optimizer] = max(step, shard.steps[optimizer])
        old_block, new_block = old.block(move.old_shard), new.block(move.new_shard)
        for key, by_shard in tensors.items():
            if move.old_shard not in by_shard:
                continue  # a slot of a shard that had no gradient yet
            array = arrays.get((move.new_shard, key))
            if array is None:
                array = arrays[move.new_shard, key] = shard.arrays.add(array=key)
            fields = asdict(by_shard[move.old_shard])
            del fields["shard"]  # the request names the new one
            source = array.sources.add(tensor=ps_pb2.SavedTensor(array=key, **fields))
            if not same_places:
                source.rows.split.ends.extend(old.ends[0])
                if (order := row_order_message(old.order)) is not None:
                    source.rows.order.CopyFrom(order)
                source.rows.piece = move.old_shard // (old.num_shards // len(old.ends[0]))
            axes = slice(0 if same_places else 1, None)
            start = move.block.start[axes]
            getattr(source, "from").extend(a - b for a, b in zip(start, old_block.start[axes], strict=True))
            source.to.extend(a - b for a, b in zip(start, new_block.start[axes], strict=True))
            source.count.extend(move.block.shape[axes])
    for shard_index, shard in enumerate(shards):
        if (shard_index, "value") not in arrays:
            shard.arrays.add(array="value")  # an empty shard
        _add_named(shard, updates[shard_index])


def _add_named(shard: ps_pb2.RestoreShard, updates: Mapping[int, set[int]]) -> None:
    """Add which updates the keys' functions have made."""
    by_updates: dict[tuple[int, ...], list[int]] = {}
    for function, nths in updates.items():
        by_updates.setdefault(tuple(sorted(nths)), []).append(function)
    for nth, keys in by_updates.items():
        shard.named.add(nth=nth, keys=keys)


def _plan_table(
    variable: Variable, saved: SavedVariable, path: str, requests: dict[int, ps_pb2.RestoreRequest], *, named: bool
) -> None:
    """Have every shard of a table read all saved shards, of which it takes the rows whose ids are its own."""
    dim = variable.dim if isinstance(variable, EmbeddingTable) else 0
    if saved.dim != dim:
        here, there = (f"a table with rows of {n} values" if n else "a variable" for n in (dim, saved.dim))
        raise CheckpointMismatchError(f"{variable.name!r} is {here}, but {there} in {path}")
    if dim and not can_hold(variable.partition.shape[1], saved.shape[1], dim):
        here, there = (kind_of(width, dim) for width in (variable.partition.shape[1], saved.shape[1]))
        raise CheckpointMismatchError(f"{variable.name!r} has ids that are {here}, but {there} in {path}")
    functions: dict[int, set[int]] = {}
    for same in itertools.chain.from_iterable(saved.named if named else ()):
        for function in same.function_keys:
            functions.setdefault(function, set()).update(same.nth)
    for shard_index, owner in enumerate(variable.owners):
        shard = requests[owner].shards.add(variable=variable.id, shard=shard_index)
        for steps in saved.steps:
            for optimizer, step in steps.items():
                shard.steps[optimizer] = max(step, shard.steps[optimizer])
        for key, tensors in saved.arrays.items():
            array = shard.arrays.add(array=key)
            for tensor in sorted(tensors, key=lambda tensor: tensor.shard):
                fields = asdict(tensor)
                start = saved.partition.block(fields.pop("shard")).start
                source = array.sources.add(tensor=ps_pb2.SavedTensor(array=key, **fields))
                getattr(source, "from").extend(start)  # says which of its arrays belong together
        _add_named(shard, functions)


def sent_ahead(requests: dict[int, ps_pb2.RestoreRequest]) -> Iterator[dict[int, ps_pb2.RestoreRequest]]:
    """Move the updates under keys out of requests that have too many of them, into requests to send first."""
    for server, request in requests.items():
        if sum(len(same.keys) for shard in request.shards for same in shard.named) <= KEYS_PER_REQUEST:
            continue
        for shard in request.shards:
            for same in shard.named:
                for first in range(0, len(same.keys), KEYS_PER_REQUEST):
                    ahead = ps_pb2.RestoreRequest(id=request.id, ahead=True)
                    ahead_shard = ahead.shards.add(variable=shard.variable, shard=shard.shard)
                    ahead_shard.named.add(nth=same.nth, keys=same.keys[first : first + KEYS_PER_REQUEST])
                    yield {server: ahead}
            shard.ClearField("named")
