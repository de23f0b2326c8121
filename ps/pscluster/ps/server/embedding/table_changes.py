"""Rows of a table's shard that come and go with an update: decided, or as the log says, and carried out.

    decide    what to drop and what to make, by `table_policy` and the shard's limits; nothing has changed if it raises
    carry_out rows are dropped and made, and those that the update names are used once more
    record    of a table with an admission or an eviction, what the log says of it; `recorded` reads that

All need the shard's lock. The array of a shard that drops rows has room for those that come: it is not given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from pscluster.core.errors import InvalidUpdateError
from pscluster.core.numbers.unique import sorted_unique, without
from pscluster.ps.row_ids import RowIds, are_strings, shown
from pscluster.ps.server.embedding import table_policy
from pscluster.ps.server.embedding.table_policy import CountMinSketch, RecentlyEvicted
from pscluster.ps.server.embedding.table_rows import TableRows
from pscluster.ps.server.embedding.tables import rows_of, space_of
from pscluster.ps.server.state.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.state.shard import Array, Shard
from pscluster.ps.table_policies import NEED_LIMIT
from pscluster.ps.tables import Ids, Rows, initial_rows
from pscluster.v1 import ps_pb2, state_pb2

_CLOCK_AT_START = time.time() - time.monotonic()
"""What makes a time of day of monotonic seconds: rows must not expire because the machine's clock has jumped."""

_NONE: Ids = np.empty(0, np.int64)
_NO_IDS: RowIds = _NONE


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What an update does to the rows of a shard before it changes values."""

    places: Ids  # of the update's ids before; -1: no row
    made: RowIds  # ids, ascending, as the rows have them
    evicted: RowIds
    now: int  # by the clock by which rows age

    def record(self, item: int) -> state_pb2.TableChange:
        """Return what the log says of it, of this item of the update."""
        return state_pb2.TableChange(item=item, evicted=self.evicted.tobytes(), made=self.made.tobytes(), now=self.now)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the rows of an update's ids are, once they have been made."""

    places: Ids
    kept: Ids | None  # which of the ids have rows; None: all
    distinct: bool  # whether it is known that these are as many rows
    undo: Callable[[], None]  # to be called if the update fails


def has_policy(table: ps_pb2.TableSpec) -> bool:
    """Return whether what an update does to rows has to be logged."""
    return table.HasField("admission") or table.HasField("eviction")


def record_bytes(table: ps_pb2.TableSpec, ids: int) -> int:
    """Return the most bytes that a record of the log has for an update of this many ids."""
    size = table.id_bytes or 8
    return 64 + size * (2 * ids + table_policy.window_for_expiry(ids)) if has_policy(table) else 0


def check_room(held: HeldVariable, shard: Shard, ids: RowIds, optimizer: HeldOptimizer | None = None) -> None:
    """Raise InvalidUpdateError if there is no room for the rows that these ids lack, which the optimizer updates.

    What room a table with policies has is known only to `decide`.
    """
    if not has_policy(held.spec.table):
        rows, (limit, hint) = rows_of(shard, held.spec.table.dim), _limit_of(held, shard, optimizer)
        if len(ids) > limit - rows.count and len(missing := rows.missing(ids)) > limit - rows.count:
            raise _full(held, rows, limit, missing, hint)


def decide(
    held: HeldVariable, shard: Shard, ids: RowIds, optimizer: HeldOptimizer | None, *, gradient: bool
) -> RowChanges:
    """Decide what an update of these ids does to the rows; count those that are not admitted as seen.

    `optimizer`: which will have slots beside the shard. InvalidUpdateError if there is no room.
    """
    table, step = held.spec.table, shard.updates + 1
    rows = rows_of(shard, table.dim)
    places = rows.find(ids)
    new = sorted_unique(ids[places < 0]).astype(rows.id_dtype, copy=False)
    now = table_policy.in_steps(step)
    if _in_seconds(table):
        now = table_policy.in_seconds(_CLOCK_AT_START + time.monotonic())
    if gradient and len(new) and table.HasField("admission"):
        shard.sightings = shard.sightings or CountMinSketch()
        new = new[table_policy.admitted(table.admission, new, shard.sightings, step)]
    going = _NONE
    if table.HasField("eviction") and table.eviction.kind not in NEED_LIMIT:
        going = _expired(table.eviction, shard, rows, places, table_policy.window_for_expiry(len(ids)), now)
    if not len(new):
        return RowChanges(places, new, rows.ids_at(going), now)
    limit, hint = _limit_of(held, shard, optimizer)
    over = rows.count - len(going) + len(new) - limit
    if over > 0 and table.HasField("eviction"):
        if table.eviction.kind in NEED_LIMIT:
            going = _least_used(table.eviction, shard, rows, places, over, now)
        else:
            going = _expired(table.eviction, shard, rows, places, rows.count, now)
        over = rows.count - len(going) + len(new) - limit
    if over > 0:
        raise _full(held, rows, limit, new, hint)
    return RowChanges(places, new, rows.ids_at(going), now)


def recorded(held: HeldVariable, shard: Shard, ids: RowIds, change: state_pb2.TableChange | None) -> RowChanges:
    """Return what an update has done to the rows, as a log says; where it says nothing, it made those it lacked."""
    rows = rows_of(shard, held.spec.table.dim)
    places = rows.find(ids)
    if change is None:
        return RowChanges(places, sorted_unique(ids[places < 0]), _NO_IDS, 0)
    made, evicted = (np.frombuffer(some, rows.id_dtype) for some in (change.made, change.evicted))
    return RowChanges(places, made, evicted, change.now)


def carry_out(
    held: HeldVariable, shard: Shard, ids: RowIds, changes: RowChanges, fills: Callable[[int], Mapping[str, float]]
) -> Placed:
    """Drop and make rows; return the places of these ids' rows.

    Snapshots and moves of the shard get to know of it, and averages begin as the values. InvalidUpdateError if the
    machine has too little memory; then nothing has changed.

    Args:
        held: the table.
        shard: of it.
        ids: those of the update.
        changes: what was decided.
        fills: what slots begin with, by optimizer and name.
    """
    table, rows = held.spec.table, rows_of(shard, held.spec.table.dim)
    undone = _Undo(held, shard, changes, fills)
    places = changes.places
    if len(changes.evicted):
        _drop(shard, rows, undone.going())
        places = rows.find(ids)
    try:
        first = _make(held, shard, rows, changes, fills)
    except MemoryError as error:
        wanted = rows.count + len(changes.made)
        undone()
        raise InvalidUpdateError(
            f"table {held.spec.name!r} can't have {wanted:,} rows in a shard: the server has no memory for {error}: "
            "add servers"
        ) from None
    kept = None
    if len(missing := np.flatnonzero(places < 0)):
        at = np.searchsorted(changes.made, ids[missing])
        at[at == len(changes.made)] = 0
        made = changes.made[at] == ids[missing] if len(changes.made) else np.zeros(len(at), np.bool_)
        places[missing[made]] = first + at[made]
        if not made.all():
            kept = np.flatnonzero(places >= 0)
            held.metrics.rows_not_admitted += len(places) - len(kept)
            places = places[kept]
    if table.HasField("eviction"):
        used = sorted_unique(places)
        shard.before_rows_change(used)
        rows.set_uses(used, table_policy.uses(rows.uses(used), changes.now))
    held.metrics.rows_made += len(changes.made)
    if shard.dropped is not None and len(changes.made):
        made_again = shard.dropped.count(changes.made)
        held.metrics.rows_made_again += made_again
    if len(changes.evicted):
        held.metrics.rows_evicted += len(changes.evicted)
        shard.dropped = shard.dropped or RecentlyEvicted()
        shard.dropped.add(changes.evicted)
    # As our clients send them. Strings are not compared: that takes longer than what it may save.
    distinct = not are_strings(ids) and bool(np.count_nonzero(ids[1:] > ids[:-1]) >= len(ids) - 1)
    return Placed(places, kept, distinct, undone)


def _make(
    held: HeldVariable,
    shard: Shard,
    rows: TableRows,
    changes: RowChanges,
    fills: Callable[[int], Mapping[str, float]],
) -> int:
    """Make rows; return the place of the first one. MemoryError changes nothing."""
    spec, new, first = held.spec, changes.made, rows.count
    if len(new):
        _grow(shard, rows, first + len(new), fills)
        evicts = spec.table.HasField("eviction")
        rows.append(new, initial_rows(spec.table, spec.name).of(new), changes.now << 32 if evicts else 1)
        for average in shard.averages.values():
            average[first:] = shard.array[first:, : rows.dim]
    return first


def _grow(shard: Shard, rows: TableRows, count: int, fills: Callable[[int], Mapping[str, float]]) -> None:
    shard.grow(count, fills)
    if rows.space.base is not shard.array.base:
        rows.attach(space_of(shard))


def _drop(shard: Shard, rows: TableRows, places: Ids) -> None:
    shard.shrink(rows.count - len(places), *rows.drop(places))


class _Undo:
    """Takes back what was done to rows, if the update then fails: it is not logged."""

    def __init__(
        self,
        held: HeldVariable,
        shard: Shard,
        changes: RowChanges,
        fills: Callable[[int], Mapping[str, float]],
    ) -> None:
        self._held, self._shard, self._changes, self._fills = held, shard, changes, fills
        self._gone: dict[str, Array] = {}

    def going(self) -> Ids:
        """Return the places of the rows to be dropped, and remember what they have. ValueError if there are none."""
        places = rows_of(self._shard, self._held.spec.table.dim).find(self._changes.evicted)
        if (places < 0).any() or len(sorted_unique(places)) < len(places):
            raise ValueError(f"table {self._held.spec.name!r} has no such rows to drop")
        self._gone = {name: array[places] for name, array in self._shard.arrays().items()}
        return places

    def __call__(self) -> None:
        shard, rows = self._shard, rows_of(self._shard, self._held.spec.table.dim)
        made = rows.find(self._changes.made)
        if len(made := made[made >= 0]):
            _drop(shard, rows, made)
        if not self._gone:
            return
        first, evicted = rows.count, self._changes.evicted
        _grow(shard, rows, first + len(evicted), self._fills)
        rows.append(evicted, cast(Rows, self._gone["value"][:, : rows.dim]))
        for name, array in shard.arrays().items():
            if name in self._gone:
                array[first:] = self._gone[name]


def _in_seconds(table: ps_pb2.TableSpec) -> bool:
    return table.eviction.kind == ps_pb2.TableEviction.SECONDS


def _expired(policy: ps_pb2.TableEviction, shard: Shard, rows: TableRows, used: Ids, window: int, now: int) -> Ids:
    """Return the places of rows in the next window that have expired, without those that are used now."""
    places, shard.hand = table_policy.window(rows.count, shard.hand, window)
    gone = table_policy.expired(policy, rows.uses(places), rows.values[places], now)
    return without(places[gone], used)


def _least_used(policy: ps_pb2.TableEviction, shard: Shard, rows: TableRows, used: Ids, room: int, now: int) -> Ids:
    """Return the places of rows that make room, of those in the next window that are not used now."""
    size = table_policy.candidates_for(room) + len(used)
    places, shard.hand = table_policy.window(rows.count, shard.hand, size)
    places = without(places, used)
    return places[table_policy.least_used(policy, rows.uses(places), now, room)]


def _limit_of(held: HeldVariable, shard: Shard, optimizer: HeldOptimizer | None) -> tuple[int, str]:
    """Return how many rows a shard may have now, and what to do if that is too few."""
    table = held.spec.table
    evicts = table.eviction.kind in NEED_LIMIT  # all rows but those of the update itself
    if table.max_bytes:
        slots = {} if optimizer is None else _slots_to_come(shard, optimizer)
        row_bytes = sum(array.strides[0] for array in shard.arrays().values()) + len(slots) * table.dim * 4
        others = sum(other.nbytes for other in list(held.shards.values()) if other is not shard)
        rows = max(table.max_bytes - others, 0) // row_bytes
        if rows < shard.row_limit:
            more = "add servers, or update fewer ids at once" if evicts else "or add servers"
            return rows, f"its limit is {table.max_bytes:,} bytes a server: give it a larger max_bytes, {more}"
    more = ", or update fewer ids at once" if evicts else "" if table.eviction.kind else ", or an eviction"
    return shard.row_limit, f"give the table a larger capacity{more}"


def _slots_to_come(shard: Shard, optimizer: HeldOptimizer) -> Mapping[str, object]:
    known = shard.slots.get(optimizer.spec.id)
    return optimizer.rule.slots if known is None else {}


def _full(held: HeldVariable, rows: TableRows, limit: int, missing: RowIds, hint: str) -> InvalidUpdateError:
    return InvalidUpdateError(
        f"table {held.spec.name!r} is full: a shard has {rows.count:,} rows and room for "
        f"{max(limit - rows.count, 0):,} more, and an update has {len(missing):,} new "
        f"{'id' if len(missing) == 1 else 'ids, such as'} {shown(missing[-1])}: {hint}"
    )
