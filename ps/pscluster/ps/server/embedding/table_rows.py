"""The rows of a table's shard, by their ids.

A shard's array holds the rows that are in use, of each its values, then its id and a number that is not 0
(`TableSpec`). So all that copies, saves, logs or moves a shard carries the ids as well, and nothing else has to be
kept: `TableRows`, with the index from ids to row numbers ("places"), is made anew from the array when it is first
needed, and dropped when the array gets other rows. Ids are int64 or, whole, strings (`row_ids`).

    no row  --(an update of its id: placed at the end, with its initial values)-->  in use
    in use  --(dropped: the last row takes its place)-->  no row
    all rows  --(the shard is replaced by a checkpoint's)-->  those of the checkpoint

Reads make no rows: what has had no update is computed (`InitialRows`). An update says ids, in the log, too, and places
are never sent nor stored, so that a replay may give other places to the same rows. Optimizer slots have one row, of
values alone, for each of the array's.

Memory: arrays have the rows in use, and grow where they are (`reserved_rows`), row by row without copies. The index
(`row_index`) has no ids: they are compared in the rows themselves.

Pure; `tables` applies it to shards, under their locks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.numbers.unique import sorted_unique
from pscluster.ps.row_ids import RowIds
from pscluster.ps.row_index import RowIndex
from pscluster.ps.tables import Ids, Rows, tails_of

_AT_ONCE = 1 << 20
"""Rows that are entered at once when an index is made."""


class TableRows:
    """The rows that a shard has, by id."""

    def __init__(self, space: Rows, count: int, dim: int) -> None:
        """Take the array, with all that is reserved for it, and how many of its rows are in use."""
        self.dim, self.count = dim, count
        self.attach(space)
        self._index = RowIndex()
        self._index.make_room(count)
        self._enter_all()

    def attach(self, space: Rows) -> None:
        """Go on with an array that has the same rows."""
        self.space, dim = space, self.dim
        self.values = space[:, :dim]
        self._ids, self._in_use = tails_of(space, dim)
        opaque = np.dtype((np.void, dim * space.itemsize))  # rows are moved as plain bytes
        self._items = np.ndarray(len(space), opaque, space, 0, space.strides[:1])

    def ids(self) -> RowIds:
        """Return the ids of all rows, in the order of their places."""
        return self._ids[: self.count].copy()

    @property
    def id_dtype(self) -> np.dtype[Any]:
        return self._ids.dtype

    def ids_at(self, places: Ids) -> RowIds:
        """Return the ids of these rows."""
        return self._ids[places]

    def find(self, ids: RowIds) -> Ids:
        """Return the places of these ids' rows, and -1 for those that have none."""
        return self._index.find(ids, self._ids)

    def missing(self, ids: RowIds) -> RowIds:
        """Return those ids that have no row, each once, ascending."""
        return sorted_unique(ids[self.find(ids) < 0])

    def take(self, places: Ids) -> Rows:
        """Return copies of the values of these rows."""
        return self._items[places].view(np.float32).reshape(len(places), self.values.shape[1])

    def drop(self, places: Ids) -> tuple[Ids, Ids]:
        """Drop the rows at these places, each given once; return the rows to be moved to other places, and to which.

        The caller moves them, in all arrays, before the index is used again.
        """
        kept = self.count - len(places)
        free = np.sort(places[places < kept])
        tail = np.ones(self.count - kept, np.bool_)
        tail[places[places >= kept] - kept] = False
        moved = np.flatnonzero(tail) + kept
        changed = self._ids[np.concatenate((places, moved))]
        self._index.replace(changed, np.concatenate((np.full(len(places), -1), free)), self._ids)
        self.count = kept
        return moved, free

    def uses(self, places: Ids) -> npt.NDArray[np.uint64]:
        """Return what is beside the ids of these rows: in a table that drops rows, when they were last used."""
        return self._in_use[places]

    def set_uses(self, places: Ids, uses: npt.NDArray[np.uint64]) -> None:
        self._in_use[places] = uses

    def append(self, ids: RowIds, values: Rows, use: int = 1) -> None:
        """Make rows for ids that have none, each once. The array must have got them."""
        if self._index.make_room(self.count + len(ids)):
            self._enter_all()
        places = slice(self.count, self.count + len(ids))
        self.values[places] = values
        self._ids[places] = ids
        self._in_use[places] = use
        self._index.enter(ids, np.arange(places.start, places.stop))
        self.count = places.stop

    def _enter_all(self) -> None:
        for start in range(0, self.count, _AT_ONCE):
            stop = min(start + _AT_ONCE, self.count)
            self._index.enter(self._ids[start:stop].copy(), np.arange(start, stop))
