"""Reads and updates of rows by id, of several variables at once: each distinct row once, planned by `plans`.

Nothing here talks to a server: `variable` and `optimizers` send the requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pscluster.ps.client.reads.plans import ShardRead
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.handles.indexing import Array, Gradient, Ids, IndexedSlices
from pscluster.ps.handles.rows.plans import RowPlan
from pscluster.ps.handles.shard_requests import ShardRequests
from pscluster.v1 import ps_pb2

_SUMMED = (ps_pb2.APPLY_GRADIENT, ps_pb2.ADD, ps_pb2.SUB)  # updates in which rows of equal ids are summed


class _Together(NamedTuple):
    """Variables with rows of one type and shape, and the rows that are wanted of them."""

    numbers: list[int]  # in the list given
    variables: list[ShardRequests]
    plan: RowPlan


def _planned(wanted: Sequence[tuple[ShardRequests, Ids]]) -> Iterator[_Together]:
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, (variable, ids) in enumerate(wanted):
        if variable.splits_ids:
            plan = RowPlan.by_split(variable.partition, ids, variable.split_ids)
            yield _Together([number], [variable], plan)
        else:
            alike.setdefault((variable.dtype, variable.shape[1:]), []).append(number)
    for numbers in alike.values():
        variables = [wanted[number][0] for number in numbers]
        partitions = tuple(variable.partition for variable in variables)
        yield _Together(numbers, variables, RowPlan.of(partitions, [wanted[number][1] for number in numbers]))


def distinct_reads(wanted: Sequence[tuple[ShardRequests, Ids]]) -> tuple[list[ShardRead], Callable[[], list[Array]]]:
    """Return the reads of rows by flat ids, and what then returns the rows of each variable, in the order of its ids.

    Each distinct row is read once. The ids are from `check_ids`.
    """
    reads: list[ShardRead] = []
    read: list[tuple[_Together, Array]] = []
    for together in _planned(wanted):
        first, plan = together.variables[0], together.plan
        out = np.empty((plan.distinct, *first.shape[1:]), first.dtype)
        read.append((together, out))
        reads += [
            together.variables[share.table].shard_row_read(share.shard, out, share.rows, share.ids)
            for share in plan.shares
            if len(share.ids)
        ]

    def rows() -> list[Array]:
        results: dict[int, Array] = {}
        for together, out in read:
            results.update(zip(together.numbers, together.plan.spread(out), strict=True))
        return [results[number] for number in range(len(wanted))]

    return reads, rows


def row_updates(
    kind: ps_pb2.UpdateKind, wanted: Sequence[tuple[IndexedSlices, ShardRequests]], optimizer: int = 0
) -> list[list[ShardUpdate]]:
    """Return the updates of each variable by rows. An optimizer's step counts on shards without such rows, too.

    Rows of equal ids are summed as the server would; but not half types, which it sums in a wider type.
    """
    checked = [(variable, *variable.checked_rows(kind, slices, optimizer)) for slices, variable in wanted]
    summed = [n for n, (variable, *_) in enumerate(checked) if kind in _SUMMED and variable.dtype.itemsize > 2]
    updates: dict[int, list[ShardUpdate]] = {number: [] for number in summed}
    for together in _planned([checked[number][:2] for number in summed]):
        row_shape = together.variables[0].shape[1:]
        rows = [checked[summed[number]][2] for number in together.numbers]
        sums = together.plan.sums([array.reshape(len(array), math.prod(row_shape)) for array in rows])
        ours = not any(np.may_share_memory(sums, array) for array in rows)
        sums = sums.reshape(len(sums), *row_shape)
        nths = [variable.next_update() for variable in together.variables]
        for table, shard, span, ids in together.plan.shares:
            if len(ids) or optimizer:
                variable = together.variables[table]
                values = sums[(span, *variable.columns(shard))]
                update = variable.shard_row_update(kind, shard, nths[table], ids, values, optimizer)
                update.owned = ours
                updates[summed[together.numbers[table]]].append(update)
    for number, (variable, ids, values) in enumerate(checked):
        if number not in updates:
            updates[number] = variable.row_updates(kind, ids, values, optimizer)
    return [updates[number] for number in range(len(wanted))]


def gradient_updates(pairs: Sequence[tuple[Gradient, ShardRequests]], optimizer: int) -> list[list[ShardUpdate]]:
    """Return the updates of each variable by its gradient."""
    updates: dict[int, list[ShardUpdate]] = {}
    sparse: dict[int, tuple[IndexedSlices, ShardRequests]] = {}
    for number, (gradient, variable) in enumerate(pairs):
        if isinstance(gradient, IndexedSlices):
            variable.check_takes_gradients()
            sparse[number] = gradient, variable
        else:
            updates[number] = variable.dense_gradient_updates(gradient, optimizer)
    planned = row_updates(ps_pb2.APPLY_GRADIENT, list(sparse.values()), optimizer)
    updates.update(zip(sparse, planned, strict=True))
    return [updates[number] for number in range(len(pairs))]
