"""Rows of several tables by id, planned at once: one sort finds the distinct rows of all, and who owns them.

Tables are laid end to end, so that a row's place in its table becomes one after those of all tables before. A
function usually looks rows up and then applies gradients to the same ones, so each thread keeps its last plan for the
next request of equal ids. A plan holds no table, and depends on nothing that changes: not on who owns a shard.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RANGE
from pscluster.core.geometry.rows import ShardRows
from pscluster.ps.handles.indexing import Array, Ids
from pscluster.ps.optim.row_sums import Groups, sum_rows, take_rows


class Share(NamedTuple):
    """What one shard has of the distinct rows."""

    table: int
    shard: int
    rows: slice | Ids  # of the distinct rows
    ids: Ids  # their numbers within the shard


Split = Callable[[Ids], Sequence[tuple[int, ShardRows]]]
"""Returns each shard, with which of some ids are its, and under which numbers."""


class RowPlan:
    """Which rows of which shards are wanted, each once, and where they are in the lists of ids."""

    def __init__(
        self, partitions: tuple[Partition, ...], sizes: tuple[int, ...], ids: Ids, split: Split | None = None
    ) -> None:
        self._partitions, self._sizes, self._by_split = partitions, sizes, split is not None
        self._ids = ids.tobytes() if split is None else ids
        self._groups = Groups.of(ids if split is not None else _places(partitions, sizes, ids))
        self._spans = [slice(a, b) for a, b in itertools.pairwise((0, *itertools.accumulate(sizes)))]  # of the ids
        self.shares = self._shares() if split is None else _shares_of_one(split(self._groups.ids))
        """Of all shards of all tables, in order, those of no row included."""

    @staticmethod
    def of(partitions: tuple[Partition, ...], ids: Sequence[Ids]) -> RowPlan:
        """Return the plan for these ids: this thread's last one, if it is the same.

        Args:
            partitions: of each table.
            ids: a flat array for each table, from `check_ids`.
        """
        last = last_plan_for(partitions, ids)
        return _new(partitions, tuple(map(len, ids)), np.concatenate(ids), None) if last is None else last

    @staticmethod
    def by_split(partition: Partition, ids: Ids, split: Split) -> RowPlan:
        """Return the plan for any ids of a table whose shards `split` finds by the ids and this partition alone."""
        last = _threads.last
        if last is not None and last.is_for((partition,), (ids,), by_split=True):
            return last
        return _new((partition,), (len(ids),), ids.copy(), split)

    def is_for(self, partitions: tuple[Partition, ...], ids: Sequence[Ids], *, by_split: bool = False) -> bool:
        """Return whether a plan for these arguments would be this one: then the ids need no check.

        Each of `ids` is flat and, unless `by_split`, of type int64.
        """
        if self._by_split != by_split or self._sizes != tuple([len(of_table) for of_table in ids]):
            return False
        if self._partitions != partitions:
            return False
        if isinstance(self._ids, bytes):
            # Comparing bytes takes a third of the time of arrays, and mostly the first ones differ.
            return self._ids.startswith(ids[0][:8].tobytes()) and self._ids == _end_to_end(ids)
        return self._ids.dtype.kind == ids[0].dtype.kind and bool((self._ids == ids[0]).all())

    @property
    def distinct(self) -> int:
        """The number of distinct rows of all tables."""
        return len(self._groups.ids)

    def _shares(self) -> list[Share]:
        shares: list[Share] = []
        ids, (starts, ends) = self._groups.ids, _pieces(self._partitions)  # both ascending, over all tables
        stops = ids.searchsorted(ends)
        counts = stops.copy()
        counts[1:] -= stops[:-1]
        local_ids = ids - starts.repeat(counts)
        spans = (slice(a, b) for a, b in itertools.pairwise((0, *stops.tolist())))
        for table, partition in enumerate(self._partitions):
            count = len(partition.ends[0])
            across = partition.num_shards // count  # shards that share a piece of axis 0
            for piece, span in enumerate(itertools.islice(spans, count)):
                of_piece = local_ids[span]
                shards = range(piece * across, (piece + 1) * across)
                shares += [Share(table, shard, span, of_piece) for shard in shards]
        return shares

    def spread(self, rows: Array) -> list[Array]:
        """Return the rows of each table in the order of its ids, from the distinct ones, of shape (distinct, ...)."""
        if self._groups.order is not None:
            flat, inverse = rows.reshape(len(rows), math.prod(rows.shape[1:])), self._groups.inverse
            rows = take_rows(flat, inverse).reshape(len(inverse), *rows.shape[1:])
        return [rows[span] for span in self._spans]

    def sums(self, rows: Sequence[Array]) -> Array:
        """Return the sum of the rows of each distinct one, of shape (distinct, width), in the order given.

        Args:
            rows: for each table, of shape (ids, width), in one floating type above 2 bytes.
        """
        return sum_rows(self._groups, rows)


def _end_to_end(ids: Sequence[Ids]) -> bytes:
    buffers: Sequence[Any] = ids
    try:
        return b"".join(buffers)
    except TypeError:  # one has gaps
        return np.concatenate(ids).tobytes()


class _Threads(threading.local):
    last: RowPlan | None = None


_threads = _Threads()


def last_plan() -> RowPlan | None:
    """Return this thread's last plan."""
    return _threads.last


def use_plan(plan: RowPlan | None) -> None:
    """Make a plan of another thread the last one of this: it made the plan for what this one does next."""
    _threads.last = plan


def last_plan_for(partitions: tuple[Partition, ...], ids: Sequence[Ids]) -> RowPlan | None:
    """Return this thread's last plan if it is for these ids, flat arrays which need no check; otherwise None."""
    last = _threads.last
    return last if last is not None and last.is_for(partitions, ids) else None


def _new(partitions: tuple[Partition, ...], sizes: tuple[int, ...], ids: Ids, split: Split | None) -> RowPlan:
    plan = _threads.last = RowPlan(partitions, sizes, ids, split)
    return plan


def _places(partitions: tuple[Partition, ...], sizes: tuple[int, ...], ids: Ids) -> Ids:
    """Return where the rows of these ids, one table's after another's, are when the tables lie end to end."""
    if any(partition.order != RANGE for partition in partitions):
        spans = itertools.pairwise((0, *itertools.accumulate(sizes)))
        pieces = zip(partitions, spans, strict=True)
        ids = np.concatenate([partition.places(ids[start:stop]) for partition, (start, stop) in pieces])
    return ids if len(partitions) == 1 else ids + _offsets(partitions, sizes)


def _shares_of_one(split: Sequence[tuple[int, ShardRows]]) -> list[Share]:
    return [Share(0, shard, positions, ids) for shard, (positions, ids) in split]


@functools.lru_cache(maxsize=256)
def _starts(partitions: tuple[Partition, ...]) -> tuple[int, ...]:
    """Return the place of each table's first row."""
    return (0, *itertools.accumulate(partition.shape[0] for partition in partitions[:-1]))


@functools.lru_cache(maxsize=16)
def _offsets(partitions: tuple[Partition, ...], sizes: tuple[int, ...]) -> Ids:
    """Return the place of the first row of its table for each of that many ids of each table."""
    return np.repeat(np.array(_starts(partitions), np.int64), sizes)


@functools.lru_cache(maxsize=256)
def _pieces(partitions: tuple[Partition, ...]) -> tuple[Ids, Ids]:
    """Return the places at which the pieces of axis 0 of all tables start and end."""
    cuts = zip(_starts(partitions), partitions, strict=True)
    bounds = [(first + a, first + b) for first, cut in cuts for a, b in itertools.pairwise((0, *cut.ends[0]))]
    starts, ends = np.array(bounds, np.int64).T
    return np.ascontiguousarray(starts), np.ascontiguousarray(ends)
