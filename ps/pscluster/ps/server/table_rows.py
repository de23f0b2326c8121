"""The rows of a table's shard, by their ids.

A shard's array holds the rows that are in use, of each its values, then its id and a number that is not 0
(`TableSpec`). So all that copies, saves, logs or moves a shard carries the ids as well, and nothing else has to be
kept: `TableRows`, the index from ids to row numbers ("places"), is made anew from the array when it is first needed,
and dropped when the array gets other rows. Ids are int64 or, whole, strings (`row_ids`).

    no row  --(an update of its id: placed at the end, with its initial values)-->  in use
    in use  --(dropped: the last row takes its place)-->  no row
    all rows  --(the shard is replaced by a checkpoint's)-->  those of the checkpoint

Reads make no rows: what has had no update is computed (`InitialRows`). An update says ids, in the log, too, and places
are never sent nor stored, so that a replay may give other places to the same rows. Optimizer slots have one row for
each of the array's.

Memory: arrays have the rows in use, and grow where they are (`reserved_rows`), row by row without copies. The index is
a hash table of row numbers, 4 bytes each, whose ids are compared in the rows themselves. Slot after slot is tried at
distances of 1, 2, 3 and so on, which reaches all of them, for a batch of ids at a time. It is at most 0.6 full, and
doubles. The slot of a row that was dropped is marked, since others were reached over it, until the index is made anew.

Pure; `tables` applies it to shards, under their locks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.splitmix import mixed
from pscluster.ps.row_ids import RowIds, are_strings, hashes
from pscluster.ps.tables import Ids, Rows, tails_of

_MIN_SLOTS = 1 << 10
_FULL = 0.6
"""The share of its slots that an index uses at most: with more, searches become long."""

_KEY = secrets.randbits(64)
"""Of the hashes that an index has of strings. Users' names may have been chosen by others, who do not know it."""

_AT_ONCE = 1 << 20
"""Rows that are entered at once when an index is made."""


class TableRows:
    """The rows that a shard has, by id."""

    def __init__(self, space: Rows, count: int, dim: int) -> None:
        """Take the array, with all that is reserved for it, and how many of its rows are in use."""
        self.dim, self.count = dim, count
        self.attach(space)
        self._slots = np.zeros(_MIN_SLOTS // 2, np.int32)  # row number + 1; 0: free; -1: of a row that was dropped
        self._dropped = 0  # slots marked so, at most
        self._reserve(max(self.count, int(_FULL * _MIN_SLOTS)))  # more than there are, so that all are entered

    def attach(self, space: Rows) -> None:
        """Go on with an array that has the same rows."""
        self.space, dim = space, self.dim
        self.values = space[:, :dim]
        self._tails = space[:, dim:]
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
        if self._dropped:
            return self._search(ids)[1]
        slots, mask = self._slots, len(self._slots) - 1
        at = self._first_slots(ids)
        places = slots.take(at).astype(np.int64)
        places -= 1
        # A free slot ends the search: its place is -1, which indexes the last row of the space, whatever that is.
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

    def _search(self, ids: RowIds) -> tuple[Ids, Ids]:
        """Return the slots that the search for ids ends at, and the places, as `find` does, past slots of no row."""
        slots, mask = self._slots, len(self._slots) - 1
        at = self._first_slots(ids)
        places = np.full(len(ids), -1, np.int64)
        open_, step = np.arange(len(ids)), 1
        while len(open_):
            found = slots.take(at[open_]).astype(np.int64)
            found -= 1
            places[open_] = found
            # -2 is no place, but what it indexes can be compared.
            open_ = open_[(found != -1) & ((found < 0) | (self._ids[found] != ids[open_]))]
            at[open_] = (at[open_] + step) & mask
            step += 1
        return at, places

    def missing(self, ids: RowIds) -> RowIds:
        """Return those ids that have no row, each once, ascending."""
        return np.unique(ids[self.find(ids) < 0])

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
        at = self._search(self._ids[np.concatenate((places, moved))])[0]
        self._slots[at[: len(places)]] = -1
        self._slots[at[len(places) :]] = free + 1
        self._dropped += len(places)
        self.count = kept
        return moved, free

    def uses(self, places: Ids) -> npt.NDArray[np.uint64]:
        """Return what is beside the ids of these rows: in a table that drops rows, when they were last used."""
        return self._in_use[places]

    def set_uses(self, places: Ids, uses: npt.NDArray[np.uint64]) -> None:
        self._in_use[places] = uses

    def append(self, ids: RowIds, values: Rows, use: int = 1) -> None:
        """Make rows for ids that have none, each once. The array must have got them."""
        self._reserve(self.count + len(ids))
        places = slice(self.count, self.count + len(ids))
        self.values[places] = values
        self._ids[places] = ids
        self._in_use[places] = use
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
        if count + self._dropped <= _FULL * size:
            return
        full = _FULL if not self._dropped else 0.75 * _FULL  # not to be made anew soon, where rows come and go
        while count > full * size:
            size *= 2
        self._dropped = 0
        self._slots = np.zeros(size, np.int32)
        for start in range(0, self.count, _AT_ONCE):
            stop = min(start + _AT_ONCE, self.count)
            self._enter(self._ids[start:stop].copy(), np.arange(start, stop))

    def _enter(self, ids: RowIds, places: Ids) -> None:
        """Enter rows that the index does not have."""
        slots, mask = self._slots, len(self._slots) - 1
        at, step = self._first_slots(ids), 1
        entries = (places + 1).astype(np.int32)
        while len(at):
            free = slots.take(at) <= 0
            slots[at[free]] = entries[free]  # of several that want one slot, the last gets it
            lost = np.flatnonzero(slots.take(at) != entries)
            at, entries = (at[lost] + step) & mask, entries[lost]
            step += 1

    def _first_slots(self, ids: RowIds) -> Ids:
        numbers = hashes(ids, _KEY) if are_strings(ids) else mixed(ids.view(np.uint64))
        return (numbers & np.uint64(len(self._slots) - 1)).view(np.int64)
