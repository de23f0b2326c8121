"""The rows of a table's shard, by their ids.

A shard's array holds each row's values, then its id and whether it is in use (`TableSpec`), and rows are in use from
the first on. So all that copies, saves, logs or moves a shard carries the ids as well, and nothing else has to be kept:
`TableRows`, the index from ids to row numbers ("places"), is made anew from the array when it is first needed, and
dropped when the array gets other rows.

    no row  --(first update of its id: placed at the end, with its initial values)-->  in use, until the shard is
    replaced by a checkpoint's

Reads make no rows: what has had no update is computed (`InitialRows`). An update says ids, in the log, too, and places
are never sent nor stored, so that a replay may give other places to the same rows. Optimizer slots have one row for
each of the array's, with whatever they begin with until the row is in use.

Memory: arrays are of all rows that the shard may have, and the system gives them memory where they are written, so
that a shard in use grows row by row without copies. The index is a hash table of row numbers, 4 bytes each, whose ids
are compared in the rows themselves. Slot after slot is tried at distances of 1, 2, 3 and so on, which reaches all of
them, for a batch of ids at a time. It is at most 0.6 full, and doubles.

Pure; `tables` applies it to shards, under their locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from pscluster.ps.tables import Ids, Rows, mixed, rows_in_use, tails_of

_MIN_SLOTS = 1 << 10
_FULL = 0.6
"""The share of its slots that an index uses at most: with more, searches become long."""

_AT_ONCE = 1 << 20
"""Rows that are entered at once when an index is made."""


class TableRows:
    """The rows that a shard has, by id."""

    def __init__(self, array: npt.NDArray[np.float32], dim: int) -> None:
        self.values = array[:, :dim]
        self._tails = array[:, dim:]
        self._ids, self._in_use = tails_of(array, dim)
        opaque = np.dtype((np.void, dim * array.itemsize))  # rows are moved as plain bytes
        self._items = np.ndarray(len(array), opaque, array, 0, array.strides[:1])
        self.count = rows_in_use(self._in_use)
        self._slots = np.zeros(_MIN_SLOTS // 2, np.int32)  # row number + 1; 0: free
        self._reserve(max(self.count, int(_FULL * _MIN_SLOTS)))  # more than there are, so that all are entered

    @property
    def room(self) -> int:
        """How many rows can still be made."""
        return len(self._ids) - self.count

    def ids(self) -> Ids:
        """Return the ids of all rows, in the order of their places."""
        return self._ids[: self.count].copy()

    def find(self, ids: Ids) -> Ids:
        """Return the places of these ids' rows, and -1 for those that have none."""
        slots, mask = self._slots, len(self._slots) - 1
        at = self._first_slots(ids)
        places = slots.take(at).astype(np.int64)
        places -= 1
        # A free slot ends the search: its place is -1, which indexes the last row, whatever that is.
        open_ = np.flatnonzero((self._ids[places] != ids) & (places >= 0))
        at, wanted, step = at[open_], ids[open_], 1
        while len(open_):
            at += step
            at &= mask
            found = slots.take(at).astype(np.int64)
            found -= 1
            places[open_] = found
            on = np.flatnonzero((self._ids[found] != wanted) & (found >= 0))
            open_, at, wanted, step = open_[on], at[on], wanted[on], step + 1
        return places

    def missing(self, ids: Ids) -> Ids:
        """Return those ids that have no row, each once, ascending."""
        return np.unique(ids[self.find(ids) < 0])

    def take(self, places: Ids) -> Rows:
        """Return copies of the values of these rows."""
        return self._items[places].view(np.float32).reshape(len(places), self.values.shape[1])

    def append(self, ids: Ids, values: Rows) -> None:
        """Make rows for ids that have none, each once. There must be room."""
        self._reserve(self.count + len(ids))
        places = slice(self.count, self.count + len(ids))
        self.values[places] = values
        self._ids[places] = ids
        self._in_use[places] = 1
        self._enter(ids, np.arange(places.start, places.stop))
        self.count = places.stop

    @contextmanager
    def only_values(self, places: Ids) -> Iterator[None]:
        """Have zeros in place of these rows' ids during the block, which may do arithmetic with whole rows."""
        tails = self._tails[places]
        self._tails[places] = 0
        try:
            yield
        finally:
            self._tails[places] = tails

    def _reserve(self, count: int) -> None:
        """Have enough slots for this many rows; enter all again if there are more slots than before."""
        size = len(self._slots)
        while count > _FULL * size:
            size *= 2
        if size == len(self._slots):
            return
        self._slots = np.zeros(size, np.int32)
        for start in range(0, self.count, _AT_ONCE):
            stop = min(start + _AT_ONCE, self.count)
            self._enter(self._ids[start:stop].copy(), np.arange(start, stop))

    def _enter(self, ids: Ids, places: Ids) -> None:
        """Enter rows that the index does not have."""
        slots, mask = self._slots, len(self._slots) - 1
        at, step = self._first_slots(ids), 1
        entries = (places + 1).astype(np.int32)
        while len(at):
            free = slots.take(at) == 0
            slots[at[free]] = entries[free]  # of several that want one slot, the last gets it
            lost = np.flatnonzero(slots.take(at) != entries)
            at, entries = (at[lost] + step) & mask, entries[lost]
            step += 1

    def _first_slots(self, ids: Ids) -> Ids:
        return (mixed(ids.view(np.uint64)) & np.uint64(len(self._slots) - 1)).view(np.int64)
