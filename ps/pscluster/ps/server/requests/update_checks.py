"""What updates on a server ask for, checked whole: most of it before their payloads arrive, their row numbers after.

Of each item a `Change` is left, which `updates` applies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import numpy as np

from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.core.security.access import check_coordinator
from pscluster.core.transport.frames import padding
from pscluster.ps import row_ids
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.row_ids import RowIds
from pscluster.ps.server.embedding import table_changes
from pscluster.ps.server.requests import encoded
from pscluster.ps.server.requests.changes import Change, plain_gradient
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.requests.selection import Array, Box, box_of, check_ids, table_of
from pscluster.ps.server.state.dedup import Origin
from pscluster.ps.server.state.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.state.metadata import check_texts
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import MAX_TOGETHER, METADATA, check_kind
from pscluster.v1 import ps_pb2

ARITHMETIC: dict[int, np.ufunc] = {
    ps_pb2.ADD: np.add,
    ps_pb2.SUB: np.subtract,
    ps_pb2.MUL: np.multiply,
    ps_pb2.DIV: np.divide,
    ps_pb2.MIN: np.minimum,
    ps_pb2.MAX: np.maximum,
}


FROZEN_SECONDS = 1.0
"""How long an update waits for a shard that is about to move before its client has to try again."""


_BY_OPTIMIZER = ps_pb2.APPLY_GRADIENT, ps_pb2.APPLY_CHANGE


_BY_BLOCK = ps_pb2.ASSIGN, ps_pb2.ADD, ps_pb2.SUB
"""Besides gradients, what one replica of a synchronous step may do with a whole shard."""


def check_update(
    store: Store, request: ps_pb2.UpdateRequest, total_bytes: int, context: grpc.ServicerContext | None = None
) -> list[Change]:
    """Admit an update, and check all that can be checked before its payload arrives; `context` is of its call."""
    admit(store, request)
    return changes_of(store, request, total_bytes, context)


def wait_for_moves(changes: Sequence[Change]) -> None:
    """Wait a while for shards that are about to move: their updates are refused until then."""
    for change in changes:
        if (frozen := change.shard.frozen) is not None:
            frozen.wait(FROZEN_SECONDS)


def admit(store: Store, request: ps_pb2.UpdateRequest) -> None:
    """Raise StaleError if updates of this origin may no longer be applied."""
    store.check_job(request.job)
    with store.ledger() as ledger:
        ledger.admit(origin_of(request))


def changes_of(
    store: Store, request: ps_pb2.UpdateRequest, total_bytes: int, context: grpc.ServicerContext | None = None
) -> list[Change]:
    """Return what each item of an update changes, and where its bytes are. Refuse items that do not fit."""
    changes, at = [], 0
    for item in request.items:
        if (change := plain_gradient(store, item, at)) is not None:
            changes.append(change)
            size = item.value_bytes
            at = change.values_at + size + padding(size)
            continue
        if item.kind == ps_pb2.PUT:
            if context is not None:
                check_coordinator(context, "a job's metadata")
            changes.append(_put_of(store, item, at))
            continue
        held, shard = store.find(item.variable, item.shard)
        name = held.spec.name
        if item.kind != ps_pb2.ASSIGN and item.kind not in _BY_OPTIMIZER and item.kind not in ARITHMETIC:
            raise ProtocolError(f"update kind {item.kind} of {name!r}")
        check_kind(item.kind, held.dtype, name)
        optimizer = None
        if item.kind in _BY_OPTIMIZER:
            optimizer = store.directory.optimizer(item.optimizer)
        ids_at = at
        which = item.rows.WhichOneof("kind")
        index: Box | None = None
        if held.spec.HasField("table"):
            _check_table_item(request, item, held.spec, optimizer)
        if which == "ids":
            expected = item.rows.ids * _row_bytes(item, held, shard)
            row_ids.check_kind(item.rows, held.spec)
            ids_bytes = row_ids.bytes_by(item.rows)
            at += ids_bytes + padding(ids_bytes)
            if item.scalar:
                raise ProtocolError("an update of rows by number has a single value")
        elif which == "all":
            expected = shard.array.nbytes
        elif which == "slices":
            index = box_of(item.rows.slices, shard.array, name)
            expected = math.prod(axis.count for axis in item.rows.slices.axes) * shard.array.itemsize
        else:
            raise ProtocolError(f"an update of {name!r} without rows")
        if optimizer is not None and (which == "slices" or item.scalar):
            raise ProtocolError(f"a gradient of {name!r} must be for the whole shard or for rows by number")
        if item.scalar:
            expected = shard.array.itemsize
        if item.kind == ps_pb2.APPLY_CHANGE and optimizer is not None:
            _check_change(request, item, held, optimizer, from_peer=context is not None)
        if item.wire_dtype or item.elements:
            if which == "ids":
                width = _row_bytes(item, held, shard) // shard.array.itemsize
            else:
                width = shard.array.size
            expected = encoded.update_bytes(request, item, held.dtype, width, name)
        elif item.HasField("offset") or item.gradients:
            _check_piece(request, item, shard, name)
            expected = item.value_bytes
        if item.value_bytes != expected:
            raise InvalidUpdateError(
                f"got {item.value_bytes} bytes of values for shard {item.shard} of {name!r}, expected {expected}"
            )
        changes.append(Change(item, held, shard, optimizer, index, ids_at, at))
        at += expected + padding(expected)
    if at != total_bytes:
        raise ProtocolError(f"an update of {total_bytes} bytes whose items need {at}")
    return changes


def _check_table_item(
    request: ps_pb2.UpdateRequest,
    item: ps_pb2.UpdateItem,
    spec: ps_pb2.VariableSpec,
    optimizer: HeldOptimizer | None,
) -> None:
    """Raise ProtocolError for an update of a table that is not of rows by their ids, or by another's optimizer."""
    name = spec.name
    if spec.table.optimizer and optimizer is not None and optimizer.spec.name != spec.table.optimizer:
        raise ProtocolError(
            f"a gradient of table {name!r} by {optimizer.spec.name!r}; its optimizer is {spec.table.optimizer!r}"
        )
    by_ids = item.rows.WhichOneof("kind") == "ids" and item.rows.leading <= 1
    piece = item.HasField("offset") or item.gradients or item.elements or item.kind == ps_pb2.APPLY_CHANGE
    if not by_ids or piece or request.HasField("contribution"):
        raise ProtocolError(f"an update of table {name!r} that is not of rows by their ids, applied at once")


def _row_bytes(item: ps_pb2.UpdateItem, held: HeldVariable, shard: Shard) -> int:
    """Return the bytes of the values of one row that an item has by number, or by id."""
    if held.spec.HasField("table"):
        return held.spec.table.dim * shard.array.itemsize
    table = _table(item, shard, held.spec.name)
    return int(table.shape[1]) * table.itemsize


def _check_piece(request: ps_pb2.UpdateRequest, item: ps_pb2.UpdateItem, shard: Shard, name: str) -> None:
    """Raise ProtocolError for pieces of gradients that are none, or do not lie within the shard's."""
    size, itemsize = shard.array.nbytes, shard.array.itemsize
    if not item.rows.all:
        fits = False
    elif item.kind not in _BY_OPTIMIZER:  # one replica has all of the shard
        whole = item.kind in _BY_BLOCK and not (item.offset or item.gradients or item.scalar)
        fits = whole and request.HasField("contribution") and item.value_bytes == size
    elif item.kind == ps_pb2.APPLY_CHANGE and not item.HasField("offset"):
        fits = item.value_bytes == size
    elif item.kind == ps_pb2.APPLY_GRADIENT and item.gradients:
        fits = item.value_bytes == item.gradients * size and not item.offset and item.gradients <= MAX_TOGETHER
    else:
        fits = not (item.offset % itemsize or item.value_bytes % itemsize) and (
            request.HasField("contribution") and 0 < item.value_bytes <= size - item.offset
        )
    if not fits:
        raise ProtocolError(
            f"{item.value_bytes} bytes at {item.offset} are not a piece of a gradient of {name!r}, whose shard "
            f"{item.shard} has {size}"
        )


def _check_change(
    request: ps_pb2.UpdateRequest,
    item: ps_pb2.UpdateItem,
    held: HeldVariable,
    optimizer: HeldOptimizer,
    *,
    from_peer: bool,
) -> None:
    """Raise ProtocolError for a change that replicas do not make of a variable by an optimizer."""
    name = held.spec.name
    if from_peer and not request.HasField("contribution"):
        raise ProtocolError(f"a change of {name!r} outside a synchronous step")
    limit = 0 if item.slot or not item.rows.all else MAX_TOGETHER  # the values' piece counts for all
    if item.gradients > limit:
        raise ProtocolError(f"a change of {name!r} by {item.gradients} gradients; the limit is {limit}")
    if compute_dtype(held.dtype) != held.dtype or optimizer.spec.ema_momentum:
        raise ProtocolError(f"a change of {name!r}, which replicas can't update by {optimizer.spec.name!r}")
    if item.slot and item.slot not in optimizer.rule.slots:
        raise ProtocolError(f"a change of the slot {item.slot[:80]!r}, which {optimizer.spec.name!r} does not have")


def _put_of(store: Store, item: ps_pb2.UpdateItem, at: int) -> Change:
    if (
        (item.variable, item.shard) != METADATA
        or store.index
        or item.value_bytes
        or item.scalar
        or item.HasField("rows")
    ):
        raise ProtocolError(f"metadata {item.name[:80]!r} that is not for the metadata of ps 0 alone")
    check_texts({item.name: item.text})
    return Change(item, store.directory.held_metadata, store.directory.metadata, None, None, at, at)


class Rows(NamedTuple):
    """The row numbers of an item, or ids of a table, which are checked; None if it has none."""

    ids: RowIds | None
    join: bool  # whether these are strictly ascending, if there are any


_ALL_ROWS = Rows(None, True)


def checked_rows(change: Change, payload: Payload) -> Rows:
    """Return an item's row numbers as `checked_ids`."""
    if not change.joins:
        return Rows(checked_ids(change, payload), True)
    if change.rows < 0:
        return _ALL_ROWS
    ids = payload.array(change.ids_at, change.rows, np.int64)
    join = np.count_nonzero(ids[1:] > ids[:-1]) == len(ids) - 1
    if not (join and ids.item(0) >= 0 and ids.item(-1) < change.shard.array.shape[0]):
        check_ids(change.table, ids, change.held.spec.name)
    return Rows(ids, join)


def checked_ids(change: Change, payload: Payload) -> RowIds | None:
    """Return the row numbers of an item, or ids of a table; None if it has none.

    InvalidUpdateError if there are no such rows, or no room in a table for new ones.
    """
    if change.item.rows.WhichOneof("kind") != "ids":
        return None
    ids = payload.ids(change.ids_at, change.item.rows)
    if change.held.spec.HasField("table"):
        if change.item.rows.id_bytes:
            row_ids.check_strings(ids, change.held.spec.name)
        with change.shard.lock:
            table_changes.check_room(change.held, change.shard, ids, change.optimizer)
        return ids
    check_ids(_table(change.item, change.shard, change.held.spec.name), ids, change.held.spec.name)
    return ids


def _table(item: ps_pb2.UpdateItem, shard: Shard, name: str) -> Array:
    """Return a shard as the rows that an item numbers: of a change, each element is one."""
    leading = shard.array.ndim if item.kind == ps_pb2.APPLY_CHANGE else item.rows.leading
    return table_of(shard.array, leading, name)


def origin_of(request: ps_pb2.UpdateRequest) -> Origin:
    return Origin(request.incarnation, request.function, request.sequence, request.key, request.term)
