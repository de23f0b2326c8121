"""Reads and updates of a table's shards, by ids; see `table_rows`.

All need the shard's lock, unless they say that they take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from pscluster.core.errors import CheckpointMisfitError, InvalidUpdateError
from pscluster.ps.optim import kernels
from pscluster.ps.optim.rules import UpdateRule
from pscluster.ps.server.shard import Array, Shard
from pscluster.ps.server.table_rows import TableRows
from pscluster.ps.tables import Ids, InitialRows, Rows, ids_in, rows_in_use, shards_of, tails_of
from pscluster.v1 import ps_pb2


def rows_of(shard: Shard, dim: int) -> TableRows:
    """Return the rows of a table's shard."""
    if shard.rows is None:
        shard.rows = TableRows(shard.array, dim)  # type: ignore[arg-type]  # tables are of float32
    return shard.rows


def row_count(shard: Shard, dim: int) -> int:
    """Return how many rows a shard has, without an index. Takes its lock."""
    with shard.lock:
        return rows_in_use(tails_of(cast(Rows, shard.array), dim)[1])


def read_rows(shard: Shard, ids: Ids, initial: InitialRows) -> tuple[Rows, int]:
    """Return the rows of these ids, and how many of them the shard has; the others have their initial values."""
    rows = rows_of(shard, initial.dim)
    places = rows.find(ids)
    missing = np.flatnonzero(places < 0)
    out = rows.take(places)
    if len(missing):
        out[missing] = initial.of(ids[missing])
    return out, len(ids) - len(missing)


def check_room(shard: Shard, ids: Ids, dim: int, name: str) -> None:
    """Raise InvalidUpdateError if the shard has no room for the rows that these ids lack."""
    rows = rows_of(shard, dim)
    if len(ids) > rows.room and len(missing := rows.missing(ids)) > rows.room:
        raise InvalidUpdateError(
            f"table {name!r} is full: a shard has {rows.count:,} rows and room for {rows.room:,} more, and an update "
            f"has {len(missing):,} new ids, such as {missing[-1]}: give the table a larger capacity"
        )


def places_of(shard: Shard, ids: Ids, initial: InitialRows, name: str) -> tuple[Ids, int]:
    """Return the places of these ids' rows, and how many rows were made for it; if there is no room, as `check_room`.

    Snapshots and moves of the shard get to know of the new rows, and averages begin as their values.
    """
    rows = rows_of(shard, initial.dim)
    places = rows.find(ids)
    if not (new := np.unique(ids[places < 0])).size:
        return places, 0
    check_room(shard, new, initial.dim, name)
    first = rows.count
    made = np.arange(first, first + len(new))
    shard.before_rows_change(made)
    rows.append(new, initial.of(new))
    for average in shard.averages.values():
        average[made] = shard.array[made]
    missing = np.flatnonzero(places < 0)
    places[missing] = first + np.searchsorted(new, ids[missing])
    return places, len(new)


def apply_rows(
    rule: UpdateRule, shard: Shard, places: Ids, gradients: Rows, slots: Mapping[str, Array], step: int
) -> None:
    """Apply a sparse gradient, of rows of values, to the rows at these places, as `kernels.apply_rows` does.

    The kernel works with whole, contiguous rows: the columns of ids get a gradient of 0, and are 0 meanwhile.
    """
    whole = np.zeros((len(places), shard.array.shape[1]), gradients.dtype)
    whole[:, : gradients.shape[1]] = gradients
    with rows_of(shard, gradients.shape[1]).only_values(places):
        kernels.apply_rows(rule, shard.array, places, whole, slots, step)


def restore_rows(
    spec: ps_pb2.VariableSpec,
    shard: int,
    arrays: Mapping[str, Array],
    sources: Mapping[str, Sequence[ps_pb2.RestoreSource]],
    read: Callable[[ps_pb2.SavedTensor], Array],
) -> None:
    """Fill new arrays of a shard with those saved rows whose ids are its own. CheckpointMisfitError if it can't.

    `arrays` are as new: slots as before the first gradient. The sources of all arrays of a saved shard have one `from`.
    """
    of_shards = {key: {tuple(getattr(each, "from")): each.tensor for each in of} for key, of in sources.items()}
    dim, count = spec.table.dim, 0
    for saved_shard, tensor in of_shards["value"].items():
        saved = _saved_rows(spec, read(tensor))
        chosen = np.flatnonzero(shards_of(ids_in(saved, dim), len(spec.owners)) == shard)
        places = slice(count, count + len(chosen))
        count = places.stop
        if count > len(arrays["value"]):
            raise CheckpointMisfitError(
                f"shard {shard} of table {spec.name!r} has room for {len(arrays['value']):,} rows, and the checkpoint "
                "has more: give the table a larger capacity"
            )
        for key, array in arrays.items():
            if (of_shard := of_shards[key].get(saved_shard)) is not None:
                array[places] = _saved_rows(spec, read(of_shard) if key != "value" else saved)[chosen]
            elif key.startswith("average/"):
                array[places] = saved[chosen]


def _saved_rows(spec: ps_pb2.VariableSpec, array: Array) -> Rows:
    if array.ndim != 2 or array.dtype != np.float32 or array.shape[1] != spec.shape[1]:
        raise CheckpointMisfitError(f"{array.dtype}{list(array.shape)} are no rows of table {spec.name!r}")
    return cast(Rows, array)
