"""What each server is to read of a checkpoint, however variables were cut and placed when it was made. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pscluster.coordinator.checkpoints.index import SavedTensor, SavedVariable
from pscluster.core.errors import CheckpointMisfitError
from pscluster.core.geometry import moves
from pscluster.ps.handles.variable import Variable
from pscluster.v1 import ps_pb2

KEYS_AT_ONCE = 1 << 19  # of functions, in a request to restore: 4 MiB


def plan_variable(
    variable: Variable,
    saved: SavedVariable,
    path: str,
    requests: dict[int, ps_pb2.RestoreRequest],
    *,
    named: bool = True,
) -> None:
    """Add to the servers' requests what their shards of a variable are to read.

    Args:
        variable: as it is cut and placed now.
        saved: as it was when it was saved.
        path: of the checkpoint, for what is said of it.
        requests: by server.
        named: with the updates under keys that the saved shards have.

    Raises:
        CheckpointMisfitError: the two are of different shapes or types.
    """
    if saved.shape != variable.shape or saved.dtype != variable.dtype.name:
        raise CheckpointMisfitError(
            f"variable {variable.name!r} is {variable.dtype.name}{list(variable.shape)}, but {saved.dtype}"
            f"{list(saved.shape)} in {path}"
        )
    old, new = saved.partition, variable.partition
    shards = [
        requests[owner].shards.add(variable=variable.number, shard=number)
        for number, owner in enumerate(variable.owners)
    ]
    tensors = {key: {each.shard: each for each in parts} for key, parts in saved.arrays.items()}
    arrays: dict[tuple[int, str], Any] = {}
    updates = [dict[int, set[int]]() for _ in shards]  # of each shard, by key of a function
    for move in moves(old, new):
        shard = shards[move.new_shard]
        for same in saved.named[move.old_shard] if named else ():
            for function in same.numbers:
                updates[move.new_shard].setdefault(function, set()).update(same.nth)
        for optimizer, step in saved.steps[move.old_shard].items():
            shard.steps[optimizer] = max(step, shard.steps[optimizer])
        before, here = old.block(move.old_shard), new.block(move.new_shard)
        for key, parts in tensors.items():
            if move.old_shard not in parts:
                continue  # this shard had had no gradient yet
            array = arrays.get((move.new_shard, key))
            if array is None:
                array = arrays[move.new_shard, key] = shard.arrays.add(array=key)
            source = array.sources.add(file=parts[move.old_shard].file, tensor=_tensor(key, parts[move.old_shard]))
            getattr(source, "from").extend(a - b for a, b in zip(move.block.start, before.start, strict=True))
            source.to.extend(a - b for a, b in zip(move.block.start, here.start, strict=True))
            source.count.extend(move.block.shape)
    for number, shard in enumerate(shards):
        if (number, "value") not in arrays:
            shard.arrays.add(array="value")  # an empty one
        by_updates: dict[tuple[int, ...], list[int]] = {}
        for function, nths in updates[number].items():
            by_updates.setdefault(tuple(sorted(nths)), []).append(function)
        for nth, keys in by_updates.items():
            shard.named.add(nth=nth, keys=keys)


def sent_ahead(requests: dict[int, ps_pb2.RestoreRequest]) -> Iterator[dict[int, ps_pb2.RestoreRequest]]:
    """Take out what functions with keys had done, where that is much: to be sent before, in pieces."""
    for server, request in requests.items():
        if sum(len(same.keys) for shard in request.shards for same in shard.named) <= KEYS_AT_ONCE:
            continue
        for shard in request.shards:
            for same in shard.named:
                for first in range(0, len(same.keys), KEYS_AT_ONCE):
                    piece = ps_pb2.RestoreRequest(id=request.id, ahead=True)
                    mine = piece.shards.add(variable=shard.variable, shard=shard.shard)
                    mine.named.add(nth=same.nth, keys=same.keys[first : first + KEYS_AT_ONCE])
                    yield {server: piece}
            shard.ClearField("named")


def _tensor(key: str, saved: SavedTensor) -> ps_pb2.CheckpointTensor:
    return ps_pb2.CheckpointTensor(
        array=key,
        tensor=saved.tensor,
        dtype=saved.dtype,
        shape=saved.shape,
        offset=saved.offset,
        bytes=saved.bytes,
        sha256=saved.sha256,
    )
