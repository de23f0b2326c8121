"""Where the residuals of a shard's rows are: places, from 1, of row numbers or of ids of any kind. 0: nowhere.

Who asks keeps the ids by place, and passes them as `known`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pscluster.core.splitmix import mixed
from pscluster.ps.row_ids import RowIds, numbers_of

Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]

_MIN_SLOTS = 1 << 10
_FULL = 0.6
"""The share of its slots that an index uses at most: with more, searches become long."""


class RowPlaces(Protocol):
    row_bytes: int
    """The most memory that it takes for each row."""

    def of(self, ids: RowIds, known: RowIds) -> Places:
        """Return the places of these ids."""

    def enter(self, known: RowIds, first: int) -> None:
        """Enter those known from `first` on, which it does not have."""

    def replace(self, known: RowIds, rest: RowIds) -> None:
        """Enter only the rest of those that are known, in other places."""


class ByNumber:
    """Places of row numbers: an array by number, of which pages are made when they are written to."""

    row_bytes = 4

    def __init__(self, rows: int) -> None:
        self._places = np.zeros(rows, np.int32)

    def of(self, ids: RowIds, known: RowIds) -> Places:
        del known
        return self._places[ids]

    def enter(self, known: RowIds, first: int) -> None:
        self._places[known[first:]] = np.arange(first + 1, len(known) + 1)

    def replace(self, known: RowIds, rest: RowIds) -> None:
        self._places[known] = 0
        self.enter(rest, 0)


class ById:
    """Places of ids of any kind: a hash table of places, tried at distances of 1, 2, 3 and so on, many ids at once."""

    row_bytes = 14  # slots are at least 0.3 full

    def __init__(self) -> None:
        self._slots = np.zeros(_MIN_SLOTS, np.int32)

    def of(self, ids: RowIds, known: RowIds) -> Places:
        if not len(known):
            return np.zeros(len(ids), np.int32)
        at, step = self._first_slots(ids), 1
        places = self._slots[at]
        # A free slot ends the search: its place is 0, and what that indexes, the last one known, does not matter.
        open_ = np.flatnonzero((places > 0) & (known[places - 1] != ids))
        at, wanted = at[open_], ids[open_]
        while len(open_):
            at = (at + step) & (len(self._slots) - 1)
            found = self._slots[at]
            places[open_] = found
            on = np.flatnonzero((found > 0) & (known[found - 1] != wanted))
            open_, at, wanted, step = open_[on], at[on], wanted[on], step + 1
        return places

    def enter(self, known: RowIds, first: int) -> None:
        size = len(self._slots)
        while len(known) > _FULL * size:
            size *= 2
        if size > len(self._slots):
            self._slots, first = np.zeros(size, np.int32), 0
        at, step = self._first_slots(known[first:]), 1
        places = np.arange(first + 1, len(known) + 1, dtype=np.int32)
        while len(at):
            free = self._slots[at] == 0
            self._slots[at[free]] = places[free]  # of several that want one slot, the last gets it
            lost = np.flatnonzero(self._slots[at] != places)
            at, places = (at[lost] + step) & (size - 1), places[lost]
            step += 1

    def replace(self, known: RowIds, rest: RowIds) -> None:
        del known
        self._slots = np.zeros(_MIN_SLOTS, np.int32)
        self.enter(rest, 0)

    def _first_slots(self, ids: RowIds) -> Ids:
        return (mixed(numbers_of(ids)) & np.uint64(len(self._slots) - 1)).view(np.int64)
