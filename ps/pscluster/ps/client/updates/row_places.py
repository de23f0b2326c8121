"""Where the residuals of a shard's rows are: places, from 1, of row numbers or of ids of any kind. 0: nowhere.

Who asks keeps the ids by place, and passes them as `known`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pscluster.ps.row_ids import RowIds
from pscluster.ps.row_index import RowIndex

Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.integer[Any]]


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
    """Places of ids of any kind."""

    row_bytes = 14  # slots are at least 0.3 full

    def __init__(self) -> None:
        self._index = RowIndex()

    def of(self, ids: RowIds, known: RowIds) -> Places:
        return self._index.find(ids, known) + 1 if len(known) else np.zeros(len(ids), np.int64)

    def enter(self, known: RowIds, first: int) -> None:
        if self._index.make_room(len(known)):
            first = 0
        self._index.enter(known[first:], np.arange(first, len(known)))

    def replace(self, known: RowIds, rest: RowIds) -> None:
        del known
        self._index = RowIndex()
        self.enter(rest, 0)
