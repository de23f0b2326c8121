"""What a checked change does to the arrays of its shard: values assigned or added, gradients by their optimizer's rule.

The caller holds the lock of the shard: see `updates`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.optim.joint import Part, apply_together, views_of
from pscluster.ps.optim.kernels import apply_dense, apply_rows, new_slots
from pscluster.ps.optim.row_sums import deduplicate
from pscluster.ps.server.embedding import tables
from pscluster.ps.server.embedding.table_changes import Placed
from pscluster.ps.server.requests import encoded
from pscluster.ps.server.requests.changes import Change
from pscluster.ps.server.requests.payload import Ids, Payload
from pscluster.ps.server.requests.selection import Array, table_of
from pscluster.ps.server.requests.update_checks import ARITHMETIC
from pscluster.ps.server.state.metadata import Metadata
from pscluster.ps.server.state.shard import GradientViews
from pscluster.ps.spec import OWN_RULE
from pscluster.v1 import ps_pb2


def apply_values(change: Change, ids: Ids | None, payload: Payload, placed: Placed | None = None) -> None:
    """Apply one item, to the rows at `ids` if it names rows: of a table, those that it has placed."""
    shard = change.shard
    slots: dict[str, Array] = {}
    step = 0
    if change.optimizer is not None:
        optimizer = change.optimizer.spec.id
        have_slots(change)
        slots, step = shard.slots[optimizer], shard.steps.get(optimizer, 0) + 1
        if change.item.kind == ps_pb2.APPLY_CHANGE:
            _add(change, ids, slots[change.item.slot] if change.item.slot else shard.array, payload)
            shard.steps[optimizer] = step - 1 + change.item.gradients
            return
        if change.item.gradients > 1:
            size, item = shard.array.nbytes, ps_pb2.UpdateItem()
            item.CopyFrom(change.item)
            item.gradients, item.value_bytes = 0, size
            for nth in range(change.item.gradients):
                apply_values(replace(change, item=item, values_at=change.values_at + nth * size), ids, payload)
            return
    if change.optimizer is not None and change.optimizer.spec.rule == OWN_RULE:
        _apply_own(change, ids, slots, step, payload, placed)
    elif ids is not None:
        _apply_rows(change, ids, slots, step, payload, placed)
    elif change.index is not None or change.item.scalar:
        _apply_slices(change, payload)
    elif isinstance(shard, Metadata):
        shard.assign(change.item.name, change.item.text)
    else:
        _apply_dense(change, slots, step, payload)
    if change.optimizer is not None:
        shard.steps[change.optimizer.spec.id] = step
        if change.optimizer.spec.ema_momentum:
            shard.average(change.optimizer.spec.id, change.optimizer.spec.ema_momentum, ids)


def have_slots(change: Change) -> None:
    """Give a shard the slots of the optimizer, if there is one. InvalidUpdateError if a table has no memory for it."""
    optimizer, shard = change.optimizer, change.shard
    if optimizer is None or optimizer.spec.id in shard.slots:
        return
    try:
        if change.held.spec.HasField("table"):
            dim = change.held.spec.table.dim
            slots = tables.new_slots(optimizer.rule, len(shard.array), shard.row_limit, dim)
        else:
            slots = new_slots(optimizer.rule, shard.array.shape, shard.array.dtype)
        shard.slots[optimizer.spec.id] = slots
    except MemoryError as error:
        raise InvalidUpdateError(
            f"{change.held.spec.name!r} can't have slots of {optimizer.spec.name!r}: the server has no memory for "
            f"{error}: add servers"
        ) from None


def _apply_own(
    change: Change, ids: Ids | None, slots: dict[str, Array], step: int, payload: Payload, placed: Placed | None
) -> None:
    """Apply a gradient by a user's rule, which may raise at any block; then restore the shard."""
    rows = slice(None) if ids is None else ids
    arrays = [change.shard.array, *slots.values()]
    before = [array[rows].copy() if array.ndim else array.copy() for array in arrays]
    try:
        if ids is None:
            _apply_dense(change, slots, step, payload)
        else:
            _apply_rows(change, ids, slots, step, payload, placed)
    except BaseException:
        for array, old in zip(arrays, before, strict=True):
            array[rows if array.ndim else ...] = old
        raise


def _apply_rows(
    change: Change, ids: Ids, slots: dict[str, Array], step: int, payload: Payload, placed: Placed | None
) -> None:
    """Apply the rows of an item, of a table those that it keeps, to the rows at `ids`."""
    shard, dtype = change.shard, change.shard.array.dtype
    whole = table = table_of(shard.array, change.item.rows.leading, change.held.spec.name)
    if placed is not None:
        table = table[:, : change.held.spec.table.dim]
    if change.encoded:
        rows: Array = encoded.rows_of(change.item, change.values_at, table.shape[1], payload)
    else:
        values = payload.array(change.values_at, change.item.value_bytes // dtype.itemsize, dtype)
        rows = values.reshape(change.item.rows.ids, table.shape[1])
    if placed is not None and placed.kept is not None:
        rows = rows[placed.kept]
    shard.before_rows_change(ids, change.item.rows.leading or 1)
    if change.optimizer is not None:
        if placed is not None:
            tables.apply_rows(change.optimizer.rule, shard, ids, rows, slots, step, distinct=placed.distinct)
        else:
            slot_tables = {name: array.reshape(whole.shape) for name, array in slots.items()}
            apply_rows(change.optimizer.rule, whole, ids, rows, slot_tables, step)
    elif change.item.kind == ps_pb2.ASSIGN:
        table[ids] = rows
    elif change.item.kind in (ps_pb2.ADD, ps_pb2.SUB):
        unique, sums = deduplicate(ids, rows)
        table[unique] = ARITHMETIC[change.item.kind](table[unique], sums)  # sums of half types are float32
    else:
        ARITHMETIC[change.item.kind].at(table, ids, rows)


def _apply_slices(change: Change, payload: Payload) -> None:
    """Apply values for a box of the shard, or one value for all selected elements."""
    shard, dtype = change.shard, change.shard.array.dtype
    target = shard.array if change.index is None else shard.array[change.index]
    values = payload.array(change.values_at, change.item.value_bytes // dtype.itemsize, dtype)
    values = values.reshape(() if change.item.scalar else target.shape)
    shard.before_change()
    if change.item.kind == ps_pb2.ASSIGN:
        target[...] = values
    else:
        ARITHMETIC[change.item.kind](target, values, out=target, casting="same_kind")


def _apply_dense(change: Change, slots: dict[str, Array], step: int, payload: Payload) -> None:
    shard = change.shard
    if (whole := payload.own(change.values_at)) is not None and shard.replace(whole):
        return
    flat = shard.array.reshape(-1)
    for start, values in _spans(change, payload):
        span = slice(start, start + len(values))
        # Not for the whole shard at the beginning: old values then take memory only as chunks of new ones are freed.
        shard.before_span_changes(span.start, span.stop)
        if change.optimizer is not None:
            parts = {name: array.reshape(-1)[span] for name, array in slots.items()}
            apply_dense(change.optimizer.rule, flat[span], values, parts, step)
        elif change.item.kind == ps_pb2.ASSIGN:
            flat[span] = values
        else:
            operation = ARITHMETIC[change.item.kind]
            operation(flat[span], values, out=flat[span], casting="same_kind")


def _spans(change: Change, payload: Payload) -> Iterator[tuple[int, Array]]:
    """Return the values for a whole shard in pieces, each with its first element's number."""
    if change.encoded:
        return encoded.spans(change.item, change.values_at, change.unit, payload)
    dtype = change.shard.array.dtype
    blocks = payload.blocks(change.values_at, change.item.value_bytes, dtype.itemsize)
    return ((offset // dtype.itemsize, np.frombuffer(piece, dtype)) for offset, piece in blocks)


def _add(change: Change, ids: Ids | None, array: Array, payload: Payload) -> None:
    """Add a change to the shard's values, or to a slot."""
    flat, dtype = array.reshape(-1), array.dtype
    if ids is not None:
        change.shard.before_rows_change(ids, array.ndim)
        flat[ids] += payload.array(change.values_at, change.item.value_bytes // dtype.itemsize, dtype)
        return
    for offset, piece in payload.blocks(change.values_at, change.item.value_bytes, dtype.itemsize):
        values = np.frombuffer(piece, dtype)
        span = slice(offset // dtype.itemsize, offset // dtype.itemsize + len(values))
        change.shard.before_span_changes(span.start, span.stop)
        np.add(flat[span], values, out=flat[span])


def apply_joined(changes: Sequence[tuple[Change, Ids | None]], payload: Payload) -> None:
    """Apply gradients that join each other, and are for the same step. Needs the locks of their shards."""
    first, _ = changes[0]
    assert first.optimizer is not None  # see `plain_gradient`
    optimizer, rule, dtype = first.optimizer.spec.id, first.optimizer.rule, first.held.dtype
    parts = []
    for change, ids in changes:
        shard = change.shard
        if optimizer not in shard.slots:
            have_slots(change)
        if ids is None:
            shard.before_span_changes(0, shard.array.size)
        else:
            shard.before_rows_change(ids)
        views = _views_of(change, shard.slots[optimizer], by_rows=ids is not None)
        parts.append(Part(views, payload.array(change.values_at, change.joins, dtype), ids))
    step = first.shard.steps.get(optimizer, 0) + 1
    apply_together(rule, parts, step)
    for change, _ in changes:
        change.shard.steps[optimizer] = step


def _views_of(change: Change, slots: dict[str, Array], *, by_rows: bool) -> list[Array]:
    """Return what such a gradient changes, as `views_of`. It is kept for the next one, which nearly always finds it."""
    shard, optimizer = change.shard, change.optimizer
    assert optimizer is not None
    form = shard.gradients
    if form is not None and form.optimizer is not optimizer:  # another request's, since this one was checked
        form = None
    known = None if form is None else form.views.get(by_rows)
    if known is not None and known.array is shard.array and known.slots is slots:
        return known.views
    arrays = [shard.array, *[slots[name] for name in optimizer.rule.slots]]
    if by_rows:
        arrays = [table_of(array, 1, change.held.spec.name) for array in arrays]
    views = views_of(arrays, by_rows=by_rows)
    if form is not None:
        form.views[by_rows] = GradientViews(shard.array, slots, views)
    return views
