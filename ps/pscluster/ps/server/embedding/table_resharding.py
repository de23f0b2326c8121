"""What cutting an `EmbeddingTable` into another number of shards asks of its shards; see `resharding`.

A new shard has the rows whose ids are its own, with all that belongs to them: they come as bytes, from each old shard
that has some, in any order of shards. What is kept by shard is put together from those of the old ones:

    the clock by which rows age   the highest of theirs: `taken` puts uses so that ages stay as they are
    counts of ids without a row   cell by cell the highest (`CountMinSketch.take`)
    where the next search begins  anew

Values come before what is beside them, so that there is a row, with its id, for all that comes. What an old shard
lacks, since it has had no gradient, is in the new one as it is before the first gradient.

All need the shard's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.core.transport.frames import view
from pscluster.ps.server.embedding import table_policy
from pscluster.ps.server.embedding.table_policy import CountMinSketch
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.spec import MOVE_BYTES
from pscluster.ps.tables import SEEN, Ids, shards_of, tails_of, width_of

MAX_SHARDS = 1 << 16
"""The most shards into which a table is cut."""

_AT_ONCE = 1 << 18
"""Rows whose shards are computed at once."""


def counts_by_shard(held: HeldVariable, shard: Shard, num_shards: int) -> Ids:
    """Return how many of a shard's rows are those of each new shard. ProtocolError if there are too many of these."""
    if not held.spec.HasField("table") or not 0 < num_shards <= MAX_SHARDS:
        raise ProtocolError(f"a resharding of {held.spec.name!r} by id into {num_shards:,} shards")
    ids, counts = tails_of(np.asarray(shard.array, np.float32), held.spec.table.dim)[0], np.zeros(num_shards, np.int64)
    for start in range(0, len(ids), _AT_ONCE):
        counts += np.bincount(shards_of(ids[start : start + _AT_ONCE], num_shards), minlength=num_shards)
    return counts


def seen(held: HeldVariable, shard: Shard) -> int:
    """Return how many sightings the counts of ids without a row have; 0: there are none."""
    return shard.sightings.added if held.spec.table.admission.seen and shard.sightings is not None else 0


def taken(held: HeldVariable, shard: Shard, name: str, first: int, rows: int, updates: int) -> memoryview:
    """Return rows of an array of a shard that is frozen; "seen": all counts of ids without a row.

    `updates`: what the clock by which rows age shows in the new shard.
    """
    if name == SEEN and shard.sightings is not None:
        return shard.sightings.data
    array: Any = shard.arrays().get(name)
    if array is None or not held.spec.HasField("table"):
        raise ProtocolError(f"a shard of {held.spec.name!r} has no array {name[:80]!r} to be cut by id")
    if first + rows > len(array) or rows * array.strides[0] > max(MOVE_BYTES, array.strides[0]):
        raise ProtocolError(f"{rows:,} rows from row {first:,} of a shard of {len(array):,} rows")
    some = array[first : first + rows]
    if name == "value" and table_policy.counts_steps(held.spec.table):
        some = some.copy()
        _, uses = tails_of(some, held.spec.table.dim)
        clocks = table_policy.in_steps(shard.updates), table_policy.in_steps(updates)
        uses[...] = table_policy.moved_to(uses, *clocks)
    return view(some)


def make_room(
    held: HeldVariable, shard: Shard, name: str, start: int, count: int, fills: Callable[[int], Mapping[str, float]]
) -> None:
    """Give a new shard rows for elements [start, start + count) of an array that come.

    ProtocolError if they are no rows, or no values have come before; InvalidUpdateError if there is no room for them.
    """
    width = width_of(held.spec, name)
    rows = -(-(start + count) // width)
    if start % width or count % width or start // width > len(shard.array):
        raise ProtocolError(f"{count:,} elements from element {start:,}, which are not rows of {held.spec.name!r}")
    shard.rows = None  # it is made anew from the ids
    if name != "value" or rows <= len(shard.array):
        return  # what is beside values has no rows of its own: what is too much is refused
    if rows > shard.row_limit:
        raise InvalidUpdateError(
            f"table {held.spec.name!r} has {rows:,} rows for a shard with room for {shard.row_limit:,}"
        )
    try:
        shard.grow(rows, fills)
    except MemoryError as error:
        raise InvalidUpdateError(
            f"the server has no memory for {error} of new shards of {held.spec.name!r}: add servers"
        ) from None


def take_seen(held: HeldVariable, shard: Shard, counts: memoryview, added: int) -> None:
    """Give a new shard counts of ids without a row, after this many sightings. ProtocolError if it has none."""
    if not held.spec.table.admission.seen:
        raise ProtocolError(f"counts of ids of {held.spec.name!r}, which admits all")
    shard.sightings = CountMinSketch()
    shard.sightings.take(counts, added)
