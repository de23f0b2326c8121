"""Reads and updates of a table's shards, by ids; see `table_rows`, and `table_changes` for rows that come and go.

All need the shard's lock, unless they say that they take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from pscluster.core.errors import CheckpointMismatchError
from pscluster.ps.optim import kernels
from pscluster.ps.optim.rules import UpdateRule
from pscluster.ps.row_ids import USE_COLUMNS, RowIds, can_hold
from pscluster.ps.server.embedding import table_policy
from pscluster.ps.server.embedding.reserved_rows import reservation_of, reserved, resized
from pscluster.ps.server.embedding.table_rows import TableRows
from pscluster.ps.server.state.shard import Array, Shard
from pscluster.ps.tables import Ids, InitialRows, Rows, ids_in, most_rows, shards_of, tails_of
from pscluster.v1 import ps_pb2


def new_array(rows: int, limit: int, width: int) -> Rows:
    """Return an array of zeros, of this many rows, that can grow to `limit`. MemoryError if it can't be."""
    array = resized(reserved(limit, width, np.dtype(np.float32)), rows, limit)
    return cast(Rows, array)


def new_slots(rule: UpdateRule, rows: int, limit: int, dim: int) -> dict[str, Array]:
    """Return the slots of a table's shard before the first gradient, as `kernels.new_slots` does."""
    slots: dict[str, Array] = {}
    for name, fill in rule.slots.items():
        array = slots[name] = new_array(rows, limit, dim)
        if fill:
            array[...] = fill
    return slots


def rows_of(shard: Shard, dim: int) -> TableRows:
    """Return the rows of a table's shard."""
    if shard.rows is None:
        if not len(shard.array):
            shard.array = resized(shard.array, 0, shard.row_limit)  # with space for the index to look at
        shard.rows = TableRows(space_of(shard), len(shard.array), dim)
    return shard.rows


def space_of(shard: Shard) -> Rows:
    """Return a table's array with all rows that are reserved for it."""
    space = reservation_of(shard.array)
    return cast(Rows, shard.array if space is None else space)


def read_rows(shard: Shard, ids: RowIds, initial: InitialRows) -> tuple[Rows, Ids]:
    """Return the rows of these ids, and which of them, as positions, the shard has not: they have initial values."""
    rows = rows_of(shard, initial.dim)
    places = rows.find(ids)
    missing = np.flatnonzero(places < 0)
    out = rows.take(places)
    if len(missing):
        out[missing] = initial.of(ids[missing])
    return out, missing


def apply_rows(
    rule: UpdateRule,
    shard: Shard,
    places: Ids,
    gradients: Rows,
    slots: Mapping[str, Array],
    step: int,
    *,
    distinct: bool,
) -> None:
    """Apply a sparse gradient, of rows of values, to the rows at these places, as `kernels.apply_rows` does."""
    param = shard.array[:, : gradients.shape[1]]
    kernels.apply_rows(rule, param, places, gradients, slots, step, distinct=distinct)


def restore_rows(
    spec: ps_pb2.VariableSpec,
    shard: int,
    limit: int,
    now: int,
    arrays: dict[str, Array],
    fills: Mapping[str, float],
    sources: Mapping[str, Sequence[ps_pb2.RestoreSource]],
    read: Callable[[ps_pb2.SavedTensor], Array],
) -> None:
    """Give new arrays of a shard those saved rows whose ids are its own. CheckpointMismatchError if it can't.

    Args:
        spec: of the table.
        shard: which one it is.
        limit: how many rows it may have.
        now: what the clock by which rows age shows here: that of the saved shard has shown at least its last use.
        arrays: of no rows; those with the rows take their places.
        fills: what each slot holds before the first gradient: not all may be saved.
        sources: of each array; those of all arrays of a saved shard have one `from`.
        read: returns a saved array.
    """
    of_shards = {key: {tuple(getattr(each, "from")): each.tensor for each in of} for key, of in sources.items()}
    dim, count = spec.table.dim, 0
    for saved_shard, tensor in of_shards["value"].items():
        saved = _saved_rows(spec, read(tensor))
        chosen = np.flatnonzero(shards_of(ids_in(saved, dim), len(spec.owners)) == shard)
        places = slice(count, count + len(chosen))
        count = places.stop
        if count > limit:
            raise CheckpointMismatchError(
                f"shard {shard} of table {spec.name!r} has room for {limit:,} rows, and the checkpoint has more: give "
                "the table a larger capacity"
            )
        for key, before in arrays.items():
            array = arrays[key] = resized(before, count, limit)
            array[places] = fills.get(key, 0.0)
            if key == "value":
                array[places] = saved[chosen]
            elif (of_shard := of_shards[key].get(saved_shard)) is not None:
                array[places] = _saved_beside(spec, read(of_shard))[chosen]
            elif key.startswith("average/"):
                array[places] = saved[chosen, :dim]
        if count > places.start and table_policy.counts_steps(spec.table):
            _, of_saved = tails_of(saved, dim)
            _, uses = tails_of(cast(Rows, arrays["value"][places]), dim)
            uses[...] = table_policy.moved_to(uses, table_policy.newest(of_saved), now)


def check_bytes(spec: ps_pb2.VariableSpec, arrays: Mapping[str, Array], taken: int, server: int) -> None:
    """Raise CheckpointMismatchError if restored shards, which have such arrays, take a server more than its limit."""
    most, row_bytes = spec.table.max_bytes, sum(array.strides[0] for array in arrays.values())
    if most and taken // row_bytes > most_rows(most, row_bytes):
        raise CheckpointMismatchError(
            f"table {spec.name!r} would take {taken:,} bytes on ps {server}, and its max_bytes are {most:,}: give it "
            "larger max_bytes, or add servers"
        )


def _saved_beside(spec: ps_pb2.VariableSpec, array: Array) -> Rows:
    """Return a saved slot or average."""
    if array.ndim != 2 or array.dtype != np.float32 or array.shape[1] != spec.table.dim:
        raise CheckpointMismatchError(f"{array.dtype}{list(array.shape)} are not slots of table {spec.name!r}")
    return cast(Rows, array)


def _saved_rows(spec: ps_pb2.VariableSpec, array: Array) -> Rows:
    """Return saved rows as wide as the table's: ids that are strings may have had less room."""
    dim, width = spec.table.dim, spec.shape[1]
    if array.ndim != 2 or array.dtype != np.float32 or not can_hold(width, array.shape[1], dim):
        raise CheckpointMismatchError(f"{array.dtype}{list(array.shape)} are not rows of table {spec.name!r}")
    saved = cast(Rows, array)
    if saved.shape[1] == width:
        return saved
    rows = np.zeros((len(saved), width), np.float32)
    rows[:, : saved.shape[1] - USE_COLUMNS] = saved[:, :-USE_COLUMNS]
    rows[:, -USE_COLUMNS:] = saved[:, -USE_COLUMNS:]
    return rows
