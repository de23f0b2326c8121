"""Rows of equal ids: grouped, and summed in the order in which they are given, so that sums depend on nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.optim.buffers import items_of, workspace
from pscluster.ps.optim.precision import DType, compute_dtype, is_real
from pscluster.ps.optim.rule import Array
from pscluster.ps.row_ids import RowIds, are_strings, numbers_of

Ids = npt.NDArray[np.int64]

# Elements, of whole rows. The larger, the more rows of equal ids are summed at once, which pays off if the ids
# follow a power law.
ROW_BLOCK = 128 << 10

# Elements of a buffer for rows end to end. Memory for more is not the workspace's to keep.
_BUFFERED = 1 << 20

# Rows are summed layer by layer until at most this many ids have further rows, then id by id.
_FEW = 32

# In its default mode, np.take with out= writes through a buffer, in case ids are out of range.
IN_RANGE: Literal["clip"] = "clip"


@dataclass(frozen=True)
class Groups:
    """Rows grouped by id, from `of`."""

    ids: RowIds  # the distinct ones, ascending; strings by their hashes
    order: Ids | None = None  # the rows' positions sorted as `ids`, stably; None: the rows are in order
    starts: Ids | None = None  # for each of `ids`, where in `order` its positions start; None: each id has one row
    counts: Ids | None = None  # for each of `ids`, the number of its rows; None: as above

    @classmethod
    def of(cls, ids: RowIds) -> Groups:
        if are_strings(ids):
            return cls._of_strings(ids)
        n = len(ids)
        if n < 2 or (bool(ids[0] < ids[1] <= ids[-1]) and bool((ids[1:] > ids[:-1]).all())):
            return cls(ids)
        bits = (n - 1).bit_length()
        if int(np.maximum.reduce(ids.view(np.uint64))) < 1 << (63 - bits):  # negative ones would be larger
            # Id and position in one integer: sorting these is stable, and ten times as fast as a stable argsort.
            keys = ids << bits
            keys |= np.arange(n)
            keys.sort()
            order = keys & ((1 << bits) - 1)
            keys >>= bits
        else:
            order = np.argsort(ids, kind="stable")
            keys = ids[order]
        first = np.empty(n, np.bool_)
        first[0] = True
        np.not_equal(keys[1:], keys[:-1], out=first[1:])
        starts = first.nonzero()[0]  # methods: NumPy's functions go through wrappers
        if len(starts) == n:
            return cls(keys, order)
        counts = np.empty_like(starts)
        np.subtract(starts[1:], starts[:-1], out=counts[:-1])  # `diff` with `append` takes several times as long
        counts[-1] = n - starts[-1]
        return cls(keys[starts], order, starts, counts)

    @classmethod
    def _of_strings(cls, ids: RowIds) -> Groups:
        """Group by hashes of as many bits as `of` sorts fast; by the strings themselves if two share such a hash."""
        hashes = numbers_of(ids) >> np.uint64(max(len(ids) - 1, 1).bit_length() + 1)
        groups = cls.of(hashes.view(np.int64))
        order, starts, counts = groups.order, groups.starts, groups.counts
        if order is None:
            return cls(ids)
        if starts is None or counts is None:
            return cls(ids[order], order)
        distinct = ids[order[starts]]
        if (ids[order] == np.repeat(distinct, counts)).all():
            return cls(distinct, order, starts, counts)
        distinct, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        starts = np.cumsum(counts) - counts
        return cls(distinct, np.argsort(inverse, kind="stable"), starts, counts)

    @functools.cached_property
    def inverse(self) -> Ids:
        """For each row, which of `ids` is its own."""
        groups = np.arange(len(self.ids), dtype=np.int64)
        if self.order is None:
            return groups
        inverse = np.empty(len(self.order), np.int64)
        inverse[self.order] = groups if self.counts is None else groups.repeat(self.counts)
        return inverse

    def positions(self, index: int) -> list[int]:
        if self.order is None:
            return [index]
        if self.starts is None or self.counts is None:
            return [int(self.order[index])]
        start = self.starts[index]
        return [int(position) for position in self.order[start : start + self.counts[index]]]


class RowSums:
    """Sums of the rows of equal ids, for one range of ids after another.

    Rows are added layer by layer: one operation adds the second rows of all ids that have two, the next one the third
    rows, and so on; finally, the few ids with very many rows are summed one at a time. Unlike those of `np.add.at` and
    `np.add.reduceat`, these operations run along the rows, and each id's rows are added in order.
    """

    def __init__(self, groups: Groups, rows: Array, many: int, dtype: DType) -> None:
        self._groups = groups
        self._rows = np.ascontiguousarray(rows)
        self._items = items_of(self._rows)
        width = rows.shape[1]
        cast = rows.dtype != dtype
        shared = groups.starts is not None
        self._sums = workspace.array((many, width), dtype) if groups.order is not None else None
        self._totals = workspace.array((many if shared else 0, width), dtype)
        self._layer = workspace.array((max(many, 2) if shared else 0, width), dtype)
        self._uncast = workspace.array((max(many, 2), width), rows.dtype) if cast else None

    def block(self, start: int, stop: int) -> Array:
        """Return the sums for the ids from `start` to `stop`, at most `many`; valid until the next call."""
        if self._sums is None:
            return self._rows[start:stop]
        sums = self._sums[: stop - start]
        self.write(start, sums)
        return sums

    def write(self, start: int, out: Array) -> None:
        """Write the sums for the ids from `start` on, one per row of `out`, at most `many`."""
        span = slice(start, start + len(out))
        order = self._groups.order
        if order is None:
            np.copyto(out, self._rows[span], casting="unsafe")
        elif self._groups.starts is None or self._groups.counts is None:
            self._gather(order[span], out)
        else:
            self._sum(order, self._groups.starts[span], self._groups.counts[span], out)

    def _sum(self, order: Ids, starts: Ids, counts: Ids, out: Array) -> None:
        self._gather(order[starts], out)
        several = np.flatnonzero(counts > 1)
        if not len(several):
            return
        # Ids with the most rows first: those with a row in a layer are the first `active` ones.
        several = several[np.argsort(-counts[several], kind="stable")]
        starts, fewer = starts[several], -counts[several]
        totals = self._totals[: len(several)]
        np.take(items_of(out), several, out=items_of(totals), mode=IN_RANGE)
        layer, active = 1, len(several)
        while active > _FEW:
            rows = self._layer[:active]
            self._gather(order[starts[:active] + layer], rows)
            np.add(totals[:active], rows, out=totals[:active])
            layer += 1
            active = int(np.searchsorted(fewer, -layer))
        for index in range(active):
            positions = order[starts[index] + layer : starts[index] - fewer[index]]
            if len(positions) <= _FEW:
                add_rows(totals[index], self._rows, positions.tolist())
            else:
                self._add_all(totals[index], positions)
        items_of(out)[several] = items_of(totals)

    def _add_all(self, total: Array, positions: Ids) -> None:
        """Add the rows at these positions to one total, in order."""
        room = len(self._layer) - 1
        for start in range(0, len(positions), room):
            piece = positions[start : start + room]
            rows = self._layer[: len(piece) + 1]
            rows[0] = total
            self._gather(piece, rows[1:])
            if rows.shape[1] == 1:  # reduce would add pairwise
                np.cumsum(rows, axis=0, dtype=rows.dtype, out=rows)
                total[:] = rows[-1]
            else:
                np.add.reduce(rows, axis=0, dtype=rows.dtype, out=total)

    def _gather(self, positions: Ids, out: Array) -> None:
        if self._uncast is None:
            np.take(self._items, positions, out=items_of(out), mode=IN_RANGE)
        else:
            uncast = self._uncast[: len(positions)]
            np.take(self._items, positions, out=items_of(uncast), mode=IN_RANGE)
            np.copyto(out, uncast, casting="unsafe")


def deduplicate(ids: Ids, rows: Array) -> tuple[Ids, Array]:
    """Return the distinct ids, ascending, and for each the sum of its rows, added in the order given.

    The rows, of shape (n, width), may be read-only and unaligned. The sums have their dtype or, for a half type,
    float32. If the ids are strictly ascending and the dtype does not change, the arguments themselves are returned.
    """
    if rows.ndim != 2 or ids.shape != rows.shape[:1]:
        raise InvalidUpdateError(f"rows of shape {rows.shape} for ids of shape {ids.shape}")
    summed_in = compute_dtype(rows.dtype) if is_real(rows.dtype) and rows.itemsize == 2 else rows.dtype
    groups = Groups.of(ids)
    if groups.order is None and summed_in == rows.dtype:
        return ids, rows
    return groups.ids, _summed(groups, rows, summed_in)


def sum_rows(groups: Groups, rows: Sequence[Array]) -> Array:
    """Return the sum of the rows of each group, added in the order given; an array that needs no sum is returned as is.

    Args:
        groups: of all rows, counted from one array to the next.
        rows: arrays of shape (n, width) and one dtype, which the sums have; they may be read-only and unaligned.
    """
    order, starts = groups.order, groups.starts
    more = 0 if order is None or starts is None else len(order) - len(starts)  # rows that are added to another one
    if order is None or more > _FEW:
        whole = rows[0] if len(rows) == 1 else _end_to_end(rows)
        return whole if order is None else _summed(groups, whole, whole.dtype)
    whole = np.ascontiguousarray(rows[0]) if len(rows) == 1 else _end_to_end(rows, reused=True)
    sums = take_rows(whole, order if starts is None else order[starts])
    if more:
        _add_later_rows(groups, whole, sums)
    return sums


def _end_to_end(arrays: Sequence[Array], *, reused: bool = False) -> Array:
    """Return the rows of all arrays in one: a new one or, if `reused`, and they are not many, a buffer.

    Rows that lie apart, as the gradients of what was stacked do, are moved whole, too.
    """
    shape, dtype = (sum(map(len, arrays)), arrays[0].shape[1]), arrays[0].dtype
    workspace.begin()
    joined = workspace.array(shape, dtype) if reused and math.prod(shape) <= _BUFFERED else np.empty(shape, dtype)
    if joined.size:
        items, start = items_of(joined), 0
        for array in arrays:
            if array.strides[1] != array.itemsize:
                array = np.ascontiguousarray(array)
            items[start : start + len(array)] = items_of(array)
            start += len(array)
    return joined


def _add_later_rows(groups: Groups, rows: Array, sums: Array) -> None:
    """Add to the first row of each group the others, in the order given."""
    order, starts, counts = groups.order, groups.starts, groups.counts
    assert order is not None
    assert starts is not None
    assert counts is not None  # see `sum_rows`
    several = (counts > 1).nonzero()[0]
    with np.errstate(all="ignore"):
        sums[several] += rows[order[starts[several] + 1]]
        for group in several[counts[several] > 2].tolist():
            add_rows(sums[group], rows, groups.positions(group)[2:])


def take_rows(rows: Array, positions: Ids) -> Array:
    """Return the rows, of shape (n, width) and contiguous, at these positions, each of which there is."""
    taken = np.empty((len(positions), rows.shape[1]), rows.dtype)
    if taken.size:
        np.take(items_of(rows), positions, out=items_of(taken), mode=IN_RANGE)
    return taken


def _summed(groups: Groups, rows: Array, summed_in: DType) -> Array:
    width = rows.shape[1]
    result = np.empty((len(groups.ids), width), summed_in)
    if not result.size:
        return result
    workspace.begin()
    with np.errstate(all="ignore"):
        if width > ROW_BLOCK:
            for index, total in enumerate(result):
                first, *more = groups.positions(index)
                np.copyto(total, rows[first], casting="unsafe")
                add_rows(total, rows, more)
        else:
            many = min(ROW_BLOCK // width, len(result))
            sums = RowSums(groups, rows, many, summed_in)
            for start in range(0, len(result), many):
                sums.write(start, result[start : start + many])
    return result


def add_rows(total: Array, rows: Array, positions: Sequence[int]) -> None:
    """Add the rows at these positions to a total, one after the other."""
    for position in positions:
        np.add(total, rows[position], out=total, dtype=total.dtype, casting="unsafe")
