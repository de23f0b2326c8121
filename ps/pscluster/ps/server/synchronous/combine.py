"""Combine the contributions of all replicas to one step into one update.

Gradients of a shard are summed in the order of the replicas, or averaged by their weights, and become one gradient,
which the rule then sees as if one process had computed it. Rows of sparse gradients are joined, and summed by id where
they are applied. A gradient that the replicas have reduced among themselves comes in pieces, which are put together;
so does a change that several steps have made, and what its rounding has left is added to it. An update of any kind may
be a single piece, all of a shard, which only one replica has.
Other updates (additions, minima and the like) are applied one after another, in the order of the replicas. So the
result does not depend on which contribution came first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.transport.frames import padded, padding, view
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.server.requests.changes import Change
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.requests.selection import table_of
from pscluster.v1 import ps_pb2


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica has sent to this server for one step: checked, and wholly received."""

    request: ps_pb2.UpdateRequest
    changes: Sequence[Change]
    payload: Payload
    total_bytes: int

    @property
    def replica(self) -> int:
        return self.request.contribution.replica


@dataclass(slots=True)
class Combined:
    """The items of an update, and their payload."""

    items: list[ps_pb2.UpdateItem]
    buffers: list[memoryview]

    def add(self, item: ps_pb2.UpdateItem, *segments: memoryview) -> None:
        self.items.append(item)
        self.buffers.extend(map(memoryview, padded(segments)))


def check_contribution(changes: Sequence[Change]) -> None:
    """Raise MisuseError for an update that can't be combined with those of other replicas."""
    for change in changes:
        name = change.held.spec.name
        if change.item.kind == ps_pb2.ASSIGN and not change.item.HasField("offset"):
            raise MisuseError(
                f"variable {name!r} is assigned in a synchronous step, by every replica: which value counts? Assign it "
                "in the script, between two runs, or add to it"
            )
        if change.item.kind == ps_pb2.PUT:
            raise ProtocolError("metadata in a synchronous step")
        if not 0 <= change.item.weight < float("inf"):
            raise ProtocolError(f"a gradient of {name!r} with a weight of {change.item.weight}")


def difference(contributions: Sequence[Contribution]) -> MisuseError | None:
    """Return the error of contributions that do not have the same gradients; None if they do."""
    forms = {
        tuple(_form(change) for change in contribution.changes if _is_whole_gradient(change))
        for contribution in contributions
    }
    return _different(sorted(contributions, key=lambda each: each.replica)) if len(forms) > 1 else None


def combine(contributions: Sequence[Contribution]) -> Combined:
    """Return the update that these contributions make, which are in the order of the replicas.

    MisuseError if they do not have the same gradients; ProtocolError if pieces of one are missing. Other updates may be
    of some replicas only.
    """
    if (error := difference(contributions)) is not None:
        raise error
    result = Combined([], [])
    gradients: list[list[Change]] = []  # by replica
    pieces: defaultdict[tuple[int, int, int], list[tuple[Change, Payload]]] = defaultdict(list)
    remainders: list[tuple[Change, Payload]] = []  # of changes, after which they are added
    for contribution in contributions:
        gradients.append([])
        for change in contribution.changes:
            if change.item.HasField("offset"):
                pieces[change.item.nth, change.item.variable, change.item.shard].append((change, contribution.payload))
            elif change.item.kind == ps_pb2.APPLY_GRADIENT:
                gradients[-1].append(change)
            elif change.item.kind == ps_pb2.APPLY_CHANGE:
                remainders.append((change, contribution.payload))
            else:
                result.add(_copy_of(change.item), *_segments(change, contribution.payload))
    payloads = [contribution.payload for contribution in contributions]
    for changes in zip(*gradients, strict=True):
        (_join if changes[0].item.rows.WhichOneof("kind") == "ids" else _sum)(result, changes, payloads)
    for _, of_one in sorted(pieces.items()):
        _put_together(result, of_one)
    for change, payload in remainders:
        result.add(_copy_of(change.item), *_segments(change, payload))
    numbers: defaultdict[tuple[int, int], int] = defaultdict(int)
    for item in result.items:
        numbers[item.variable, item.shard] += 1
        item.nth = numbers[item.variable, item.shard]
    return result


def _is_whole_gradient(change: Change) -> bool:
    return change.item.kind == ps_pb2.APPLY_GRADIENT and not change.item.HasField("offset")


def _form(change: Change) -> tuple[Any, ...]:
    """Return what must be the same for the gradients of all replicas."""
    item = change.item
    sparse = item.rows.WhichOneof("kind") == "ids"
    return item.variable, item.shard, item.optimizer, sparse, item.HasField("weight")


def _different(contributions: Sequence[Contribution]) -> MisuseError:
    """Return the error for gradients that differ."""
    first, other = contributions[0], contributions[-1]
    for other in contributions[1:]:
        if _words(other) != _words(first):
            break
    return MisuseError(
        f"replica {other.replica} has gradients of {_words(other)} in a synchronous step, and replica {first.replica} "
        f"of {_words(first)}: all replicas must apply gradients to the same variables, with the same optimizers, all "
        "dense or all sparse, and all with examples= or none"
    )


def _words(contribution: Contribution) -> str:
    words = [
        f"{change.held.spec.name!r}{' (rows)' if change.item.rows.WhichOneof('kind') == 'ids' else ''}"
        for change in contribution.changes
        if _is_whole_gradient(change)
    ]
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "") or "nothing"


def _copy_of(item: ps_pb2.UpdateItem) -> ps_pb2.UpdateItem:
    copy = ps_pb2.UpdateItem()
    copy.CopyFrom(item)
    copy.ClearField("seen")
    copy.ClearField("boot_id")
    copy.ClearField("weight")
    copy.ClearField("offset")
    return copy


def _segments(change: Change, payload: Payload) -> list[memoryview]:
    """Return the bytes of an item: its ids, if it has some, and its values."""
    dtype = change.shard.array.dtype
    segments = []
    if change.item.rows.WhichOneof("kind") == "ids":
        segments.append(view(payload.ids(change.ids_at, change.item.rows)))
    values = payload.array(change.values_at, change.item.value_bytes // dtype.itemsize, dtype)
    return [*segments, view(values)]


def _shares(changes: Sequence[Change]) -> Sequence[float | None]:
    """Return the share of each replica in a mean; None for each in a sum."""
    if not changes[0].item.HasField("weight"):
        return [None] * len(changes)
    weights = [change.item.weight for change in changes]
    total = sum(weights) or 1.0
    return [weight / total for weight in weights]


def _sum(result: Combined, changes: Sequence[Change], payloads: Sequence[Payload]) -> None:
    """Add up dense gradients, block by block as they have arrived: copying them together first takes as long again."""
    dtype, item = changes[0].shard.array.dtype, changes[0].item
    total: Any = np.empty(item.value_bytes // dtype.itemsize, compute_dtype(dtype))
    with np.errstate(all="ignore"):
        for number, (change, payload, share) in enumerate(zip(changes, payloads, _shares(changes), strict=True)):
            for offset, block in payload.blocks(change.values_at, item.value_bytes, dtype.itemsize):
                values = np.frombuffer(block, dtype)
                start = offset // dtype.itemsize
                part = total[start : start + len(values)]
                if share is not None:
                    values = values * total.dtype.type(share)
                if number:
                    part += values
                else:
                    part[...] = values
    result.add(_copy_of(item), view(total.astype(dtype, copy=False)))


def _put_together(result: Combined, pieces: list[tuple[Change, Payload]]) -> None:
    """Add a gradient that has come in pieces, without copying them. ProtocolError if they do not make one."""
    pieces.sort(key=lambda piece: piece[0].item.offset)
    first, at, segments = pieces[0][0], 0, list[memoryview]()
    size = first.shard.array.nbytes
    if first.item.kind == ps_pb2.APPLY_GRADIENT:
        size *= first.item.gradients or 1
    for change, payload in pieces:
        if change.item.offset != at or _made_by(change) != _made_by(first):
            break
        segments += (block for _, block in payload.blocks(change.values_at, change.item.value_bytes, 1))
        at += change.item.value_bytes
    else:
        if at == size:
            item = _copy_of(first.item)
            item.value_bytes = size
            result.items.append(item)
            result.buffers += [*segments, memoryview(bytes(padding(size)))]
            return
    raise ProtocolError(
        f"the pieces of an update of {first.held.spec.name!r}, shard {first.item.shard}, do not make its {size} bytes"
    )


def _made_by(change: Change) -> tuple[Any, ...]:
    item = change.item
    return item.kind, item.optimizer, item.gradients, item.slot


def _join(result: Combined, changes: Sequence[Change], payloads: Sequence[Payload]) -> None:
    """Put rows one after another, with their ids."""
    item, dtype = _copy_of(changes[0].item), changes[0].shard.array.dtype
    table = table_of(changes[0].shard.array, item.rows.leading, changes[0].held.spec.name)
    ids, rows = [], []
    with np.errstate(all="ignore"):
        for change, payload, share in zip(changes, payloads, _shares(changes), strict=True):
            ids.append(payload.ids(change.ids_at, change.item.rows))
            values = payload.array(change.values_at, change.item.value_bytes // dtype.itemsize, dtype)
            if share is not None:
                values = values.astype(compute_dtype(dtype)) * compute_dtype(dtype).type(share)
            rows.append(values.astype(dtype, copy=False))
    item.rows.ids = sum(map(len, ids))
    item.value_bytes = item.rows.ids * table.shape[1] * table.itemsize
    result.add(item, view(np.concatenate(ids)), view(np.concatenate(rows)))


def parts_of_payload(combined: Combined) -> tuple[Payload, int]:
    """Return the payload of a combined update, and its bytes."""
    return Payload(combined.buffers or [memoryview(b"")]), sum(map(len, combined.buffers))
