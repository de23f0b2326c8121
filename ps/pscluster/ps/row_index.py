"""An index from the ids of rows to their places in an array, from 0: a hash table whose ids are those of the array.

It takes 4 bytes for each slot, and its owner passes the array's ids as `known`. Slot after slot is tried at distances
of 1, 2, 3 and so on, which reaches all of them, for a batch of ids at a time. It is at most 0.6 full, and doubles. The
slot of a row that was dropped is marked, since others were reached over it, until the index is made anew.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from pscluster.core.numbers.splitmix import mixed
from pscluster.ps.row_ids import RowIds, are_strings, hashes

Ids = npt.NDArray[np.int64]

_MIN_SLOTS = 1 << 10
_FULL = 0.6
"""The share of its slots that an index uses at most: with more, searches become long."""

_FEW = 16
"""Searching one by one for at most this many remaining ids is quicker than for all at once."""

_KEY = secrets.randbits(64)
"""Of the hashes that an index has. Ids may have been chosen by others, who do not know it: without it they could choose
some that all begin at one slot, and each search would take as many steps as there are."""


class RowIndex:
    """The places of ids of either kind. It is for one thread at a time."""

    def __init__(self) -> None:
        self._slots = np.zeros(_MIN_SLOTS, np.int32)  # place + 1; 0: free; -1: of a row that was dropped
        self._dropped = 0  # slots marked so, at most

    def make_room(self, count: int) -> bool:
        """Have enough slots for this many rows; return whether it was made anew: then all are to be entered again."""
        size = len(self._slots)
        if count + self._dropped <= _FULL * size:
            return False
        full = _FULL if not self._dropped else 0.75 * _FULL  # not to be made anew soon, where rows come and go
        while count > full * size:
            size *= 2
        self._dropped = 0
        self._slots = np.zeros(size, np.int32)
        return True

    def enter(self, ids: RowIds, places: Ids) -> None:
        """Enter rows that it does not have, each once, and has room for."""
        slots, mask = self._slots, len(self._slots) - 1
        at, step = self._first_slots(ids), 1
        entries = (places + 1).astype(np.int32)
        while len(at):
            free = slots.take(at) <= 0
            slots[at[free]] = entries[free]  # of several that want one slot, the last gets it
            lost = np.flatnonzero(slots.take(at) != entries)
            at, entries = (at[lost] + step) & mask, entries[lost]
            step += 1

    def find(self, ids: RowIds, known: RowIds) -> Ids:
        """Return the places of these ids, and -1 for those that have none. There must be a known one."""
        if self._dropped:
            return self._search(ids, known)[1]
        slots, mask = self._slots, len(self._slots) - 1
        at = self._first_slots(ids)
        places = slots.take(at).astype(np.int64)
        places -= 1
        # A free slot ends the search: its place is -1, which indexes the last one known, whatever that is.
        open_ = np.flatnonzero((known[places] != ids) & (places >= 0))
        at, wanted, step = at[open_], ids[open_], 1
        while len(open_) > _FEW:
            at += step
            at &= mask
            found = slots.take(at).astype(np.int64)
            found -= 1
            places[open_] = found
            on = np.flatnonzero((known[found] != wanted) & (found >= 0))
            open_, at, wanted, step = open_[on], at[on], wanted[on], step + 1
        for nth, slot, row_id in zip(open_.tolist(), at.tolist(), wanted.tolist(), strict=True):
            places[nth] = self._place_of(row_id, slot, step, known)
        return places

    def _place_of(self, row_id: int | bytes, slot: int, step: int, known: RowIds) -> int:
        """Go on to search for one id, at this distance from a slot."""
        slots, mask = self._slots, len(self._slots) - 1
        while True:
            slot = (slot + step) & mask
            place = slots.item(slot) - 1
            if place < 0 or known.item(place) == row_id:
                return place
            step += 1

    def _search(self, ids: RowIds, known: RowIds) -> tuple[Ids, Ids]:
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
            open_ = open_[(found != -1) & ((found < 0) | (known[found] != ids[open_]))]
            at[open_] = (at[open_] + step) & mask
            step += 1
        return at, places

    def replace(self, ids: RowIds, places: Ids, known: RowIds) -> None:
        """Enter other places for ids that it has, each once; -1: their rows are dropped."""
        at, dropped = self._search(ids, known)[0], places < 0
        self._slots[at] = np.where(dropped, -1, places + 1)
        self._dropped += int(dropped.sum())

    def _first_slots(self, ids: RowIds) -> Ids:
        numbers = hashes(ids, _KEY) if are_strings(ids) else mixed(ids.view(np.uint64), np.uint64(_KEY))
        return (numbers & np.uint64(len(self._slots) - 1)).view(np.int64)
