"""Updates on a server that `update_checks` has checked: applied item by item, each once.

`update_values` is the arithmetic of an item. Small gradients that follow each
other are applied together, by one run of their rule, under the locks of all their shards; see `joint`.

See `pscluster.ps.server.state.store` for what happens at the same time, and `pscluster.ps.server.write_path` for what
comes before and after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pscluster.core.errors import MisuseError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.ps.optim.joint import MAX_ELEMENTS
from pscluster.ps.row_ids import RowIds
from pscluster.ps.server.embedding import table_changes
from pscluster.ps.server.embedding.table_changes import RowChanges
from pscluster.ps.server.requests import encoded
from pscluster.ps.server.requests.changes import Change
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.requests.update_checks import Rows, checked_rows, origin_of
from pscluster.ps.server.requests.update_values import apply_joined, apply_values, have_slots
from pscluster.ps.server.state.dedup import Origin
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.v1 import ps_pb2, state_pb2


@dataclass(slots=True)
class Applied:
    """What has been applied of an update, for the log."""

    counts: list[int] = field(default_factory=list)
    """By item: the shard's count of updates after it; 0 if it was applied before."""
    tables: list[state_pb2.TableChange] = field(default_factory=list)


def apply(
    store: Store,
    request: ps_pb2.UpdateRequest,
    changes: list[Change],
    payload: Payload,
    applied: Applied | None = None,
) -> ps_pb2.UpdateReply:
    """Apply each item of a checked request, whose payload has fully arrived, once. Enters each in `applied`."""
    applied = Applied() if applied is None else applied
    origin = origin_of(request)
    store.note_lost((item.variable, item.shard, item.boot_id, item.seen) for item in request.items)
    rows_of = [checked_rows(change, payload) for change in changes]
    for change in changes:
        if not change.joins and change.encoded:
            encoded.check_values(change.item, change.values_at, change.unit, payload, change.held.spec.name)
    boot_id, metrics = store.losses.boot_id, store.metrics
    reply = ps_pb2.UpdateReply(boot_id=boot_id)
    done = repeated = 0
    while done < len(changes):
        begin = time.monotonic()
        group = _locked(store, changes, rows_of, done)
        try:
            counts = _apply_once(store, request.job, origin, group, rows_of[done:], payload, applied)
            applied.counts += counts
            reply.updates.extend([change.shard.updates for change in group])
        finally:
            for change in group:
                change.shard.lock.release()
        now = time.monotonic()
        seconds = (now - begin) / len(group)
        for change, count in zip(group, counts, strict=True):
            if not count:
                repeated += 1
                continue
            item = change.item
            if item.boot_id == boot_id:
                metrics.staleness.add(count - 1 - item.seen)
            nbytes = item.value_bytes
            change.held.metrics.updated(nbytes, seconds, item.rows.ids)
            change.shard.traffic.add(nbytes, now)
            reach("ps.ledger.after")
        done += len(group)
    metrics.duplicates += repeated
    reply.applied, reply.repeated_ = len(changes) - repeated, repeated
    if not origin.function:
        with store.ledger() as ledger:
            ledger.forget_answered(origin.incarnation, request.settled)
    return reply


def _locked(store: Store, changes: list[Change], rows_of: Sequence[Rows], start: int) -> list[Change]:
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
        assert first.optimizer is not None  # it joins others
        optimizer = first.optimizer.spec.id
        step = _step(first.shard, optimizer)
        for change, rows in zip(changes[start + 1 :], rows_of[start + 1 :], strict=True):
            room -= change.joins
            if not (change.joins and rows.join and room >= 0 and change.optimizer is first.optimizer):
                break
            if change.held.dtype != first.held.dtype or not change.shard.lock.acquire(blocking=False):
                break  # its own shard, too, if it is in the group
            group.append(change)
            shard = change.shard
            if shard.moved or shard.frozen is not None or _step(shard, optimizer) != step:
                group.pop().shard.lock.release()
                break
    return group


def _apply_once(
    store: Store,
    job: int,
    origin: Origin,
    group: Sequence[Change],
    rows_of: Sequence[Rows],
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
        keys = [(change.item.variable, change.item.shard, change.item.nth) for change in group]
        seen = ledger.seen(origin, keys)
    fresh = [(change, rows.ids) for change, rows, again in zip(group, rows_of, seen, strict=False) if not again]
    for change, _ in fresh:
        reach("ps.update.before")
        change.shard.changes += 1
    try:
        if len(fresh) > 1:
            apply_joined(fresh, payload)
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
        ledger.record(origin, [key for key, again in zip(keys, seen, strict=True) if not again])
        for change, _ in fresh:
            change.shard.updates += 1
    if row_changes is not None and table_changes.has_policy(group[0].held.spec.table):
        applied.tables.append(row_changes.record(len(applied.counts)))
    return [0 if again else change.shard.updates for change, again in zip(group, seen, strict=True)]


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
    origin, ids = origin_of(request), None
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
        ledger.record(origin, [(change.item.variable, change.item.shard, change.item.nth)])


def _apply(
    store: Store, change: Change, ids: RowIds | None, payload: Payload, row_changes: RowChanges | None = None
) -> None:
    """Apply one item, of a table to the rows of these ids, once their rows are made. Needs the shard's lock."""
    if ids is not None and row_changes is not None:

        def fills(optimizer: int) -> Mapping[str, float]:
            return store.directory.optimizer(optimizer).rule.slots

        have_slots(change)
        placed = table_changes.carry_out(change.held, change.shard, ids, row_changes, fills)
        try:
            apply_values(change, placed.places, payload, placed)
        except BaseException:
            placed.undo()
            raise
    else:
        apply_values(change, ids, payload)


def _step(shard: Shard, optimizer: int) -> int:
    """Return the number of the optimizer's last gradient on the shard; -1 if it has no slots there."""
    return shard.steps.get(optimizer, 0) if optimizer in shard.slots else -1
