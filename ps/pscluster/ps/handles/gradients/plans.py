"""Plans of updates: what a step's gradients are sent with, when each step has those of the same variables.

To look at each pair of a gradient and a variable, and to write the request's item for it, takes as long as to send a
hundred KiB. All but the values, the ids and a few numbers is the same in each step, so it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pscluster.core import checks
from pscluster.core.context import current_function
from pscluster.core.geometry.partition import Partition
from pscluster.core.transport.frames import view
from pscluster.ps.client.updates.shard_update import Encoding, ShardUpdate
from pscluster.ps.handles.gradients.replicas import replicas_out_of_step
from pscluster.ps.handles.indexing import Array, Gradient, Ids, IndexedSlices
from pscluster.ps.handles.rows.plans import RowPlan, last_plan_for
from pscluster.ps.handles.variables.variable import Variable
from pscluster.v1 import ps_pb2

Pairs = Sequence[tuple[Gradient | None, Variable]]


class Maker(Protocol):
    """What makes updates of gradients without a plan: an `Optimizer`."""

    @property
    def sends_as_given(self) -> bool: ...

    def updates_of(self, grads_and_vars: Pairs, *, examples: float | None = None) -> list[ShardUpdate]: ...


class _Share(NamedTuple):
    """What a shard gets of each gradient, and the fields of its update."""

    index: Any  # of the shard, in the gradient, or in the shard's rows; None: all of it
    server: int
    name: str
    dtype: np.dtype[Any] | None
    asynchronous: bool
    encoding: Encoding | None


class _Planned(NamedTuple):
    """A variable, under which number the servers have it, and what its shards get."""

    variable: Variable
    id: int
    shares: Sequence[_Share]
    row_shape: tuple[int, ...] | None  # of gradients by rows; None: they are dense


class _Plan(NamedTuple):
    """What is kept of each pair; and how the variables that have gradients by rows are cut."""

    pairs: Sequence[_Planned]
    partitions: tuple[Partition, ...]
    items: bytes  # of all shards, in a request, to be parsed at once; without what differs from step to step
    changes: int  # how often this process had learned that shards had moved

    def is_for(self, pairs: Pairs) -> bool:
        """Return whether it may be for these pairs: no variable has moved, or been resharded, since it was made."""
        if len(self.pairs) != len(pairs):
            return False
        return not self.pairs or _changes_of(self.pairs[0].variable) == self.changes


_NONE = _Plan((), (), b"", 0)

_ATTEMPTS = 3
"""How often a plan is tried for."""


class GradientPlan:
    """Makes the updates by one optimizer of pairs of gradients and variables, the same variables each time.

    Thread-safe. What it has kept is used only where it fits: all gradients are arrays of their variables' shapes and
    types, or such rows by int64 ids, and the variables are cut as they were, and where they were. Otherwise, and where
    the optimizer has to look at gradients, as to clip them, it does what `Optimizer.updates_of` does.
    """

    def __init__(self, optimizer: Maker) -> None:
        self._optimizer = optimizer
        self._plan = _NONE
        self._calls = 0  # without a plan

    def updates_of(self, pairs: Pairs, *, examples: float | None = None) -> list[ShardUpdate]:
        """Return what `Optimizer.updates_of` does. Call it within the gate in which the updates are sent."""
        plan = self._plan
        if not plan.is_for(pairs):
            updates = self._optimizer.updates_of(pairs, examples=examples)
            # What is an argument is new, and used once. Where there was no plan a few times, there will be none.
            if 0 < self._calls <= _ATTEMPTS and self._optimizer.sends_as_given:
                self._plan = _plan_of(pairs, updates)
            self._calls = 1 if self._plan.pairs else self._calls + 1
            return updates
        is_scaled = examples is not None and replicas_out_of_step() > 1
        if is_scaled or not _fits(plan.pairs, pairs):
            return self._optimizer.updates_of(pairs, examples=examples)
        return _filled(plan, pairs, None if examples is None else checks.real("examples", examples, at_least=0))


def _plan_of(pairs: Pairs, updates: Sequence[ShardUpdate]) -> _Plan:
    """Return what to keep of the updates by these pairs: nothing if they are not one of each shard."""
    planned: list[_Planned] = []
    rest, request = iter(updates), ps_pb2.UpdateRequest()
    changes = _changes_of(pairs[0][1]) if pairs else 0  # before the servers are compared
    for gradient, variable in pairs:
        by_rows = isinstance(gradient, IndexedSlices)
        partition, owners, shares = variable.partition, variable.owners, []
        for shard in range(partition.num_shards):
            update = next(rest, None)
            if update is None or (update.ids is not None) != by_rows or update.server != owners[shard]:
                return _NONE
            if (update.item.variable, update.item.shard) != (variable.id, shard):
                return _NONE
            if by_rows and (update.encoding is not None or variable.splits_ids or variable.dtype.itemsize <= 2):
                return _NONE
            request.items.append(update.item)
            request.items[-1].ClearField("weight")
            index: Any = None if partition.num_shards == 1 else partition.index(shard)
            if by_rows:
                whole_rows = partition.num_shards == len(partition.ends[0])
                index = None if whole_rows else (slice(None), *variable.columns(shard))
            fields = update.server, update.name, update.dtype, update.asynchronous, update.encoding
            shares.append(_Share(index, *fields))
        planned.append(_Planned(variable, variable.id, shares, variable.shape[1:] if by_rows else None))
    of_rows = [kept.variable for kept in planned if kept.row_shape is not None]
    if len({(variable.dtype, variable.shape[1:]) for variable in of_rows}) > 1:
        return _NONE  # they would need several plans of rows
    return _Plan(planned, tuple(variable.partition for variable in of_rows), request.SerializeToString(), changes)


def _changes_of(variable: Variable) -> int:
    return variable.client.placements.changes


def _fits(planned: Sequence[_Planned], pairs: Sequence[Any]) -> bool:
    """Return whether these are the variables planned, each with a gradient as planned."""
    for (kept, _, _, row_shape), (gradient, variable) in zip(planned, pairs, strict=True):
        values = gradient
        if variable is not kept:
            return False
        if row_shape is None:
            shape = variable.shape
        else:
            if type(gradient) is not IndexedSlices or gradient.dense_shape is not None:
                return False
            values, ids = gradient.values, gradient.indices
            if type(ids) is not np.ndarray or ids.dtype != np.int64 or ids.ndim != 1:
                return False
            shape = (len(ids), *row_shape)
        if type(values) is not np.ndarray or values.dtype != variable.dtype or values.shape != shape:
            return False
    return True


def _filled(plan: _Plan, pairs: Sequence[Any], examples: float | None) -> list[ShardUpdate]:
    updates: list[ShardUpdate] = []
    of_rows = _of_rows(plan, pairs) if plan.partitions else iter(())
    items, function = iter(ps_pb2.UpdateRequest.FromString(plan.items).items), current_function()
    if function is not None and function.function:
        nths = function.nth_updates([kept.id for kept in plan.pairs])
    else:
        nths = [1] * len(pairs)
    for (_, _, shares, row_shape), (gradient, _), nth in zip(plan.pairs, pairs, nths, strict=True):
        for index, server, name, dtype, asynchronous, encoding in shares:
            item = next(items)
            item.nth = nth
            if examples is not None:
                item.weight = examples
            ids, values, is_owned = None, gradient, False
            if row_shape is not None:
                ids, values, is_owned = next(of_rows)
            if index is not None:
                values = values[index]
            if ids is not None:
                item.rows.ids = len(ids)
                item.value_bytes = values.nbytes
            data = view(np.ascontiguousarray(values))
            updates.append(ShardUpdate(server, item, data, ids, name, dtype, asynchronous, encoding, is_owned))
    return updates


def _of_rows(plan: _Plan, pairs: Sequence[Any]) -> Iterator[tuple[Ids, Array, bool]]:
    """Yield the row numbers of each shard, the sums of their rows, and whether only the update has these."""
    variables = [kept.variable for kept in plan.pairs if kept.row_shape is not None]
    slices = [pair[0] for pair, kept in zip(pairs, plan.pairs, strict=True) if kept.row_shape is not None]
    ids: list[Ids] = [each.indices for each in slices]
    row_plan = last_plan_for(plan.partitions, ids)  # as a rule that of the lookup
    if row_plan is None:
        checked = [variable.row_ids(of_one) for variable, of_one in zip(variables, ids, strict=True)]
        row_plan = RowPlan.of(plan.partitions, checked)
    row_shape = variables[0].shape[1:]
    width = math.prod(row_shape)
    rows: list[Array] = [each.values.reshape(len(of_one), width) for each, of_one in zip(slices, ids, strict=True)]
    sums = row_plan.sums(rows)
    is_owned = len(rows) > 1 or not np.may_share_memory(sums, rows[0])
    sums = sums.reshape(len(sums), *row_shape)
    for share in row_plan.shares:
        yield np.ascontiguousarray(share.ids), sums[share.rows], is_owned
