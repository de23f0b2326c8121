"""Cuts an `EmbeddingTable` into another number of shards: what differs from a variable, whose rows have numbers.

Before anything has changed, the old shards count how many rows each new one will have. Once they are frozen, their rows
are taken in blocks, with all that is kept beside them, and put into the new shards as their ids say, at the end of what
has come. Ages go along, and so do counts of ids without a row, see `pscluster.ps.server.embedding.table_resharding`.

The new shards together have room for the table's capacity, as if it were made with that many. If a hash has given one
of them more rows than that, since the table was full, it has room for those.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pscluster.coordinator.moves.copying import copied
from pscluster.coordinator.moves.reshard import merged, pieces
from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry.partition import Partition
from pscluster.core.transport.frames import view
from pscluster.ps.client.placement.reshard_steps import ReshardSteps
from pscluster.ps.spec import MOVE_BYTES
from pscluster.ps.tables import (
    SEEN,
    SEEN_BYTES,
    Ids,
    Rows,
    most_rows,
    rows_of_shard,
    shards_before,
    shards_of,
    tails_of,
    width_of,
)
from pscluster.v1 import ps_pb2

_ITEM_BYTES = 4  # all arrays of tables are of float32


class _Block(NamedTuple):
    """Rows of an old shard."""

    split: Sequence[tuple[int, Ids]]  # the new shards that get some of them, and which
    arrays: list[tuple[str, Rows]]  # what is kept of them, values first


def counted(steps: ReshardSteps, old: ps_pb2.VariableSpec, num_shards: int) -> tuple[list[int], int]:
    """Return how many rows each new shard will have, and how many bytes a row has in all arrays."""
    rows, arrays = np.zeros(num_shards, np.int64), set[str]()
    for shard, server in enumerate(old.owners):
        of_shard, names = steps.count(server, shard, num_shards)
        rows += np.array(of_shard, np.int64)
        arrays.update(names)
    return rows.tolist(), sum(width_of(old, name) for name in arrays) * _ITEM_BYTES


def partition_of_table(old: ps_pb2.VariableSpec, rows: Sequence[int]) -> Partition:
    """Return the cut of a table into shards with these numbers of rows."""
    width, each = old.shape[1], max(rows_of_shard(old.table.capacity, len(rows)), *rows)
    return Partition((len(rows) * each, width), (tuple(each * (n + 1) for n in range(len(rows))), (width,)))


def check_bytes(final: ps_pb2.VariableSpec, rows: Sequence[int], row_bytes: int) -> None:
    """Raise InvalidUpdateError if a server would have more of a table than its limit, by more than a hash may do."""
    most = final.table.max_bytes
    for server in sorted(set(final.owners)) if most else ():
        here = sum(count for count, owner in zip(rows, final.owners, strict=True) if owner == server)
        if here > most_rows(most, row_bytes):
            raise InvalidUpdateError(
                f"table {final.name!r} was not resharded: in {len(rows)} shards ps {server} would hold "
                f"{here * row_bytes:,} bytes of it, more than its max_bytes, {most:,}: add servers, or choose another "
                "number of shards"
            )


class TableCopy:
    """Copies the rows of one table once its old shards are frozen: until then they come and go."""

    def __init__(self, steps: ReshardSteps, old: ps_pb2.VariableSpec, final: ps_pb2.VariableSpec) -> None:
        """Take the table as it is cut now, and as it will be."""
        self.copied = 0  # bytes so far
        self._steps, self._old, self._final = steps, old, final
        self._captured: Sequence[ps_pb2.ShardState] = ()
        self._updates = 0  # of the table

    def track(self) -> None:
        """Do nothing: nothing is copied before the old shards are frozen."""

    def copy_ahead(self) -> None:
        """Do nothing, for the same reason."""

    def capture(self, states: Sequence[ps_pb2.ShardState], changed: Sequence[Ids]) -> ps_pb2.ShardState:
        """Take the states of the old shards, which are frozen; return the state of the table."""
        del changed
        self._captured, state = states, merged(states)
        self._updates = state.updates
        return state

    def copy_rest(self) -> None:
        """Copy all rows, and what was counted of ids without a row."""
        about = self._steps, self._old, self._final, self._captured
        self.copied = copy_rows(*about, self._updates)
        copy_seen(*about)


def copy_rows(
    steps: ReshardSteps,
    old: ps_pb2.VariableSpec,
    final: ps_pb2.VariableSpec,
    captured: Sequence[ps_pb2.ShardState],
    updates: int,
) -> int:
    """Copy all rows into the new shards; return how many bytes.

    `captured`: the states of the old shards. `updates`: how many the new ones will have had.
    """
    filled = [0] * len(final.owners)  # rows that a new shard has by now

    def fill(block: _Block) -> int:
        for name, data in block.arrays:
            for target, places in block.split:
                rows = data[places]
                start = filled[target] * rows.shape[1]
                steps.fill(final.owners[target], target, name, start, view(rows), _ITEM_BYTES)
        for target, places in block.split:
            filled[target] += len(places)
        return sum(data.nbytes for _, data in block.arrays)

    return copied(_taken(steps, old, captured, updates, len(final.owners)), fill)


def _taken(
    steps: ReshardSteps,
    old: ps_pb2.VariableSpec,
    captured: Sequence[ps_pb2.ShardState],
    updates: int,
    num_shards: int,
) -> Iterator[_Block]:
    """Yield all rows of the old shards, block by block."""
    width, dim = old.shape[1], old.table.dim
    names = list(dict.fromkeys(("value", *(name for state in captured for name in state.arrays))))
    for shard, (server, state) in enumerate(zip(old.owners, captured, strict=True)):
        for first, last in pieces(0, state.rows, max(MOVE_BYTES // (width * _ITEM_BYTES), 1)):
            size = {"first": first, "rows": last - first, "updates": updates}

            def take(name: str, server: int = server, shard: int = shard, size: dict[str, int] = size) -> Rows:
                width = width_of(old, name)
                data = steps.take(server, shard, name, nbytes=size["rows"] * width * _ITEM_BYTES, **size)
                return np.frombuffer(data, np.float32).reshape(-1, width)

            values = take("value")
            block = _Block(_split(values, dim, num_shards), [])
            for name in names:
                if name == "value":
                    block.arrays.append((name, values))
                elif name in state.arrays:
                    block.arrays.append((name, take(name)))
                elif name.startswith("average/"):
                    block.arrays.append((name, values[:, :dim]))  # as which it begins
                # Otherwise the slot is as before the first gradient.
            yield block


def copy_seen(
    steps: ReshardSteps,
    old: ps_pb2.VariableSpec,
    final: ps_pb2.VariableSpec,
    captured: Sequence[ps_pb2.ShardState],
) -> None:
    """Give each new shard what those old ones whose ids it may get have counted of ids without a row."""
    for target, server in enumerate(final.owners):
        sources = [n for n in shards_before(target, len(final.owners), len(old.owners)) if captured[n].seen]
        if sources:
            taken = (steps.take(old.owners[n], n, SEEN, 0, 0, SEEN_BYTES, 0) for n in sources)
            counts = functools.reduce(np.maximum, (np.frombuffer(each, np.uint8) for each in taken))
            steps.fill(server, target, SEEN, 0, view(counts), 1, seen=max(captured[n].seen for n in sources))


def _split(values: Rows, dim: int, num_shards: int) -> list[tuple[int, Ids]]:
    """Return those new shards that get some of these rows, each with their numbers."""
    shards = shards_of(tails_of(values, dim)[0], num_shards)
    order = np.argsort(shards, kind="stable")
    ends = np.cumsum(np.bincount(shards, minlength=num_shards))[:-1]
    return [(target, places) for target, places in enumerate(np.split(order, ends)) if len(places)]
