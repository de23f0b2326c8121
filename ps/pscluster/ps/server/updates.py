"""Updates on a server: admitted by the ledger, checked whole, then applied item by item, each once.

Small gradients that follow each other are applied together, by one run of their rule, under the locks of all their
shards; see `joint`.

See `pscluster.ps.server.store` for what happens at the same time, and `write_path` for what comes before and after.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import grpc
import numpy as np

from pscluster.core.errors import InvalidUpdateError, MisuseError, ProtocolError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.security.access import check_coordinator
from pscluster.core.transport.frames import padding
from pscluster.ps import row_ids
from pscluster.ps.optim.joint import MAX_ELEMENTS, Part, apply_together
from pscluster.ps.optim.kernels import apply_dense, apply_rows, compute_dtype, deduplicate, new_slots
from pscluster.ps.row_ids import RowIds
from pscluster.ps.server import encoded, table_changes, tables
from pscluster.ps.server.dedup import Origin
from pscluster.ps.server.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.metadata import Metadata, check_texts
from pscluster.ps.server.payload import Ids, Payload
from pscluster.ps.server.selection import Array, Box, box_of, check_ids, table_of
from pscluster.ps.server.shard import Shard
from pscluster.ps.server.store import Store
from pscluster.ps.server.table_changes import RowChanges
from pscluster.ps.spec import MAX_TOGETHER, METADATA, OWN_RULE, SESSION_BYTES, check_kind
from pscluster.v1 import ps_pb2, state_pb2

_ARITHMETIC: dict[int, np.ufunc] = {
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


@dataclass(slots=True)  # not frozen: that would make the creation take three times as long
class Change:
    """A checked item of an update: what it changes, and where its bytes are in the payload. Not changed itself."""

    item: ps_pb2.UpdateItem
    held: HeldVariable
    shard: Shard
    optimizer: HeldOptimizer | None
    index: Box | None
    ids_at: int
    values_at: int
    joins: int = 0  # the elements of a gradient that may be applied together with others; 0: it is applied alone

    @property
    def encoded(self) -> bool:
        """Whether its values are a gradient in another type, or only some elements of one."""
        return bool(self.item.wire_dtype or self.item.elements)

    @property
    def decoded_bytes(self) -> int:
        """The memory that its values take, in addition to what has come, while they are applied."""
        elements = self.item.rows.ids * self.unit or self.item.elements
        return self.item.value_bytes + elements * 4 if self.encoded and elements else 0  # joined, and in float32

    @property
    def unit(self) -> int:
        """The number of elements of each of its rows, or of the shard."""
        if self.held.spec.HasField("table"):
            return self.held.spec.table.dim
        if self.item.rows.WhichOneof("kind") != "ids":
            return self.shard.array.size
        return math.prod(self.shard.array.shape[self.item.rows.leading or 1 :])

    @property
    def table(self) -> Array:
        """The shard as rows, which are numbered over its first axis."""
        return table_of(self.shard.array, 1, self.held.spec.name)

    @property
    def replaces_array(self) -> bool:
        """Whether it assigns a whole shard, whose array may be replaced: prepared reads hold views of small ones."""
        whole = self.item.kind == ps_pb2.ASSIGN and self.item.rows.WhichOneof("kind") == "all" and not self.item.scalar
        return whole and self.shard.array.nbytes > SESSION_BYTES


@dataclass(slots=True)
class Applied:
    """What has been applied of an update, for the log."""

    counts: list[int] = field(default_factory=list)
    """By item: the shard's count of updates after it; 0 if it was applied before."""
    tables: list[state_pb2.TableChange] = field(default_factory=list)


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
        ledger.admit(_origin(request))


def changes_of(
    store: Store, request: ps_pb2.UpdateRequest, total_bytes: int, context: grpc.ServicerContext | None = None
) -> list[Change]:
    """Return what each item of an update changes, and where its bytes are. Refuse items that do not fit."""
    changes, at = [], 0
    for item in request.items:
        if item.kind == ps_pb2.PUT:
            if context is not None:
                check_coordinator(context, "a job's metadata")
            changes.append(_put_of(store, item, at))
            continue
        held, shard = store.find(item.variable, item.shard)
        name = held.spec.name
        if item.kind != ps_pb2.ASSIGN and item.kind not in _BY_OPTIMIZER and item.kind not in _ARITHMETIC:
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
        joins = _joins(item, held, shard, optimizer, expected) if optimizer is not None else 0
        changes.append(Change(item, held, shard, optimizer, index, ids_at, at, joins))
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
            f"{item.value_bytes} bytes at {item.offset} are no piece of a gradient of {name!r}, whose shard "
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


def apply(
    store: Store,
    request: ps_pb2.UpdateRequest,
    changes: list[Change],
    payload: Payload,
    applied: Applied | None = None,
) -> ps_pb2.UpdateReply:
    """Apply each item of a checked request, whose payload has fully arrived, once. Enters each in `applied`."""
    applied = Applied() if applied is None else applied
    origin = _origin(request)
    store.note_lost((item.variable, item.shard, item.boot_id, item.seen) for item in request.items)
    rows_of = [_checked_rows(change, payload) for change in changes]
    for change in changes:
        if change.encoded:
            encoded.check_values(change.item, change.values_at, change.unit, payload, change.held.spec.name)
    reply = ps_pb2.UpdateReply(boot_id=store.losses.boot_id)
    done = 0
    while done < len(changes):
        begin = time.monotonic()
        group = _locked(store, changes, rows_of, done)
        try:
            counts = _apply_once(store, request.job, origin, group, rows_of[done:], payload, applied)
            for change, count in zip(group, counts, strict=True):
                if count:
                    if change.item.boot_id == reply.boot_id:
                        store.metrics.staleness.add(count - 1 - change.item.seen)
                    reply.applied += 1
                else:
                    store.metrics.duplicates += 1
                    reply.repeated_ += 1
                applied.counts.append(count)
                reply.updates.append(change.shard.updates)
        finally:
            for change in group:
                change.shard.lock.release()
        seconds = (time.monotonic() - begin) / len(group)
        for change, count in zip(group, counts, strict=True):
            if count:
                change.held.metrics.updated(change.item.value_bytes, seconds, change.item.rows.ids)
                change.shard.traffic.add(change.item.value_bytes)
                reach("ps.ledger.after")
        done += len(group)
    if not origin.function:
        with store.ledger() as ledger:
            ledger.forget_answered(origin.incarnation, request.settled)
    return reply


def _locked(store: Store, changes: list[Change], rows_of: Sequence[_Rows], start: int) -> list[Change]:
    """Return the next changes that are applied together, with the locks of their shards, which the caller releases.

    It waits for the first lock alone, while it has no other: so two updates can't wait for each other.
    """
    first = changes[start]
    if not first.shard.lock.acquire(blocking=False):
        begin = time.monotonic()
        first.shard.lock.acquire()
        took = time.monotonic() - begin
        store.metrics.lock_waits += 1
        store.metrics.lock_seconds += took
    group, room = [first], MAX_ELEMENTS - first.joins
    if first.joins and rows_of[start].join:
        step = _step(first)
        for change, rows in zip(changes[start + 1 :], rows_of[start + 1 :], strict=True):
            room -= change.joins
            if not (change.joins and rows.join and room >= 0 and change.optimizer is first.optimizer):
                break
            if change.held.dtype != first.held.dtype or not change.shard.lock.acquire(blocking=False):
                break  # its own shard, too, if it is in the group
            group.append(change)
            if change.shard.moved or change.shard.frozen is not None or _step(change) != step:
                group.pop().shard.lock.release()
                break
    return group


def _apply_once(
    store: Store,
    job: int,
    origin: Origin,
    group: Sequence[Change],
    rows_of: Sequence[_Rows],
    payload: Payload,
    applied: Applied,
) -> list[int]:
    """Apply changes whose shards are locked, and remember them; return the counts of updates, 0 for one that was seen.

    Of several, all are applied or, if this raises, none. `rows_of` begins with theirs. Enters in `applied` what was
    done to the rows of a table, as of the next item.
    """
    row_changes: RowChanges | None = None
    group[0].shard.check_here(group[0].held.spec.name)
    with store.ledger() as ledger:
        store.check_job(job)  # it may have been taken over since
        ledger.admit(origin)
        seen = [ledger.seen(origin, change.item.variable, change.item.shard, change.item.nth) for change in group]
    fresh = [(change, rows.ids) for change, rows, again in zip(group, rows_of, seen, strict=False) if not again]
    for change, _ in fresh:
        reach("ps.update.before")
        change.shard.changes += 1
    try:
        if len(fresh) > 1:
            _apply_together(fresh, payload)
        elif fresh:
            with np.errstate(all="ignore"):  # infinity and NaN are for the caller to check
                row_changes = _row_changes(*fresh[0])
                _apply(store, *fresh[0], payload, row_changes)
    except PsClusterError:
        raise
    except Exception as error:  # the rule, which may be the user's, or its learning rate
        change = fresh[0][0]
        if change.optimizer is None:
            raise
        raise MisuseError(
            f"optimizer {change.optimizer.spec.name!r} failed to update variable {change.held.spec.name!r}, "
            f"shard {change.item.shard}, on ps {store.index}: {type(error).__name__}: {error}"
        ) from error
    for _ in fresh:
        reach("ps.update.after")
    with store.ledger() as ledger:
        for change, _ in fresh:
            ledger.record(origin, change.item.variable, change.item.shard, change.item.nth)
            change.shard.updates += 1
    if row_changes is not None and table_changes.has_policy(group[0].held.spec.table):
        applied.tables.append(row_changes.record(len(applied.counts)))
    return [0 if again else change.shard.updates for change, again in zip(group, seen, strict=True)]


class _Rows(NamedTuple):
    """The row numbers of an item, or ids of a table, which are checked; None if it has none."""

    ids: RowIds | None
    join: bool  # whether these are strictly ascending, if there are any


def _checked_rows(change: Change, payload: Payload) -> _Rows:
    """Return an item's row numbers as `checked_ids`."""
    if not change.joins or change.item.rows.WhichOneof("kind") != "ids":
        return _Rows(checked_ids(change, payload), True)
    ids = payload.ids(change.ids_at, change.item.rows)
    if not (join := bool((ids[1:] > ids[:-1]).all())) or (len(ids) and not 0 <= ids[0] <= ids[-1] < len(change.table)):
        check_ids(change.table, ids, change.held.spec.name)
    return _Rows(ids, join)


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


def _row_changes(change: Change, ids: RowIds | None) -> RowChanges | None:
    """Decide what an item does to the rows of a table; None of a variable. InvalidUpdateError if there is no room."""
    if ids is None or not change.held.spec.HasField("table"):
        return None
    gradient = change.item.kind == ps_pb2.APPLY_GRADIENT
    return table_changes.decide(change.held, change.shard, ids, change.optimizer, gradient=gradient)


def replay(
    store: Store,
    request: ps_pb2.UpdateRequest,
    change: Change,
    payload: Payload,
    count: int,
    table: state_pb2.TableChange | None = None,
) -> None:
    """Apply one item of a logged request as its shard's update number `count`, and remember it.

    `table`: what it has done to the rows of a table, if that was logged.
    """
    origin, ids = _origin(request), None
    if change.item.rows.WhichOneof("kind") == "ids":
        ids = payload.ids(change.ids_at, change.item.rows)
    with change.shard.lock, np.errstate(all="ignore"):
        change.shard.changes += 1
        row_changes = None
        if ids is not None and change.held.spec.HasField("table"):
            row_changes = table_changes.recorded(change.held, change.shard, ids, table)
        _apply(store, change, ids, payload, row_changes)
        change.shard.updates = count
    if origin.function and request.job != store.job:
        return  # of a previous coordinator; the present one numbers its functions anew
    with store.ledger() as ledger:
        ledger.record(origin, change.item.variable, change.item.shard, change.item.nth)


def _apply(
    store: Store, change: Change, ids: RowIds | None, payload: Payload, row_changes: RowChanges | None = None
) -> None:
    """Apply one item, of a table to the rows of these ids, once their rows are made. Needs the shard's lock."""
    if ids is not None and row_changes is not None:

        def fills(optimizer: int) -> Mapping[str, float]:
            return store.directory.optimizer(optimizer).rule.slots

        _have_slots(change)
        placed = table_changes.carry_out(change.held, change.shard, ids, row_changes, fills)
        try:
            _apply_values(store, change, placed.places, payload, placed.kept)
        except BaseException:
            placed.undo()
            raise
    else:
        _apply_values(store, change, ids, payload)


def _apply_values(store: Store, change: Change, ids: Ids | None, payload: Payload, kept: Ids | None = None) -> None:
    """Apply one item, to the rows at `ids` if it names rows: of a table, those of them that are `kept`."""
    shard = change.shard
    slots: dict[str, Array] = {}
    step = 0
    if change.optimizer is not None:
        optimizer = change.optimizer.spec.id
        _have_slots(change)
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
                _apply_values(store, replace(change, item=item, values_at=change.values_at + nth * size), ids, payload)
            return
    if change.optimizer is not None and change.optimizer.spec.rule == OWN_RULE:
        _apply_own(change, ids, slots, step, payload, kept)
    elif ids is not None:
        _apply_rows(change, ids, slots, step, payload, kept)
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


def _joins(
    item: ps_pb2.UpdateItem, held: HeldVariable, shard: Shard, optimizer: HeldOptimizer, value_bytes: int
) -> int:
    """Return how many elements a gradient has that may be applied together with others; 0 if it may not."""
    array = shard.array
    if (
        item.kind != ps_pb2.APPLY_GRADIENT
        or not 0 < value_bytes <= MAX_ELEMENTS * array.itemsize // 2
        or optimizer.spec.rule == OWN_RULE
        or optimizer.spec.ema_momentum
        or compute_dtype(held.dtype) != held.dtype
        or item.wire_dtype
        or item.elements
        or item.gradients
        or item.HasField("offset")
        or held.spec.HasField("table")
        or (item.rows.leading > 1 and item.rows.WhichOneof("kind") == "ids")
    ):
        return 0
    return value_bytes // array.itemsize


def _step(change: Change) -> int:
    """Return the number of the optimizer's last gradient on the shard; -1 if it has no slots there."""
    assert change.optimizer is not None  # it joins others
    optimizer = change.optimizer.spec.id
    return change.shard.steps.get(optimizer, 0) if optimizer in change.shard.slots else -1


def _apply_together(changes: Sequence[tuple[Change, Ids | None]], payload: Payload) -> None:
    """Apply gradients that join each other, and are for the same step. Needs the locks of their shards."""
    first, _ = changes[0]
    assert first.optimizer is not None  # see `_joins`
    optimizer, rule, dtype = first.optimizer.spec.id, first.optimizer.rule, first.held.dtype
    parts, names = [], list(rule.slots)
    for change, ids in changes:
        shard = change.shard
        _have_slots(change)
        arrays = [shard.array, *map(shard.slots[optimizer].__getitem__, names)]
        if ids is None:
            shard.before_span_changes(0, shard.array.size)
        else:
            shard.before_rows_change(ids)
            arrays = [table_of(array, 1, change.held.spec.name) for array in arrays]
        parts.append(Part(arrays, payload.array(change.values_at, change.joins, dtype), ids))
    step = first.shard.steps.get(optimizer, 0) + 1
    apply_together(rule, parts, step)
    for change, _ in changes:
        change.shard.steps[optimizer] = step


def _have_slots(change: Change) -> None:
    """Give a shard the slots of the optimizer, if there is one. InvalidUpdateError if a table has no memory for it."""
    optimizer, shard = change.optimizer, change.shard
    if optimizer is None or optimizer.spec.id in shard.slots:
        return
    try:
        if change.held.spec.HasField("table"):
            slots = tables.new_slots(optimizer.rule, len(shard.array), shard.row_limit, shard.array.shape[1])
        else:
            slots = new_slots(optimizer.rule, shard.array.shape, shard.array.dtype)
        shard.slots[optimizer.spec.id] = slots
    except MemoryError as error:
        raise InvalidUpdateError(
            f"{change.held.spec.name!r} can't have slots of {optimizer.spec.name!r}: the server has no memory for "
            f"{error}: have more servers"
        ) from None


def _apply_own(
    change: Change, ids: Ids | None, slots: dict[str, Array], step: int, payload: Payload, kept: Ids | None
) -> None:
    """Apply a gradient by a user's rule, which may raise at any block; then restore the shard."""
    rows = slice(None) if ids is None else ids
    arrays = [change.shard.array, *slots.values()]
    before = [array[rows].copy() if array.ndim else array.copy() for array in arrays]
    try:
        if ids is None:
            _apply_dense(change, slots, step, payload)
        else:
            _apply_rows(change, ids, slots, step, payload, kept)
    except BaseException:
        for array, old in zip(arrays, before, strict=True):
            array[rows if array.ndim else ...] = old
        raise


def _apply_rows(
    change: Change, ids: Ids, slots: dict[str, Array], step: int, payload: Payload, kept: Ids | None
) -> None:
    """Apply the rows of an item, or those of them that are `kept`, to the rows at `ids`."""
    shard, dtype = change.shard, change.shard.array.dtype
    whole = table = table_of(shard.array, change.item.rows.leading, change.held.spec.name)
    if is_table := change.held.spec.HasField("table"):
        table = table[:, : change.held.spec.table.dim]
    if change.encoded:
        rows: Array = encoded.rows_of(change.item, change.values_at, table.shape[1], payload)
    else:
        values = payload.array(change.values_at, change.item.value_bytes // dtype.itemsize, dtype)
        rows = values.reshape(change.item.rows.ids, table.shape[1])
    if kept is not None:
        rows = rows[kept]
    shard.before_rows_change(ids, change.item.rows.leading or 1)
    if change.optimizer is not None:
        slot_tables = {name: array.reshape(whole.shape) for name, array in slots.items()}
        if is_table:
            tables.apply_rows(change.optimizer.rule, shard, ids, rows, slot_tables, step)
        else:
            apply_rows(change.optimizer.rule, whole, ids, rows, slot_tables, step)
    elif change.item.kind == ps_pb2.ASSIGN:
        table[ids] = rows
    elif change.item.kind in (ps_pb2.ADD, ps_pb2.SUB):
        unique, sums = deduplicate(ids, rows)
        table[unique] = _ARITHMETIC[change.item.kind](table[unique], sums)  # sums of half types are float32
    else:
        _ARITHMETIC[change.item.kind].at(table, ids, rows)


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
        _ARITHMETIC[change.item.kind](target, values, out=target, casting="same_kind")


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
            operation = _ARITHMETIC[change.item.kind]
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


def _origin(request: ps_pb2.UpdateRequest) -> Origin:
    return Origin(request.incarnation, request.function, request.sequence, request.key, request.term)
