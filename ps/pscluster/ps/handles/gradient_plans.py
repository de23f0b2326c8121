"""Plans of updates: what a step's dense gradients are sent with, when each step has those of the same variables.

To look at each pair of a gradient and a variable, and to write the request's item for it, takes as long as to send a
hundred KiB. All but the values and two numbers is the same in each step, so it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pscluster.core import checks
from pscluster.core.transport.frames import view
from pscluster.ps.client.shard_update import Encoding, ShardUpdate
from pscluster.ps.handles.indexing import Gradient
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.replicas import replicas_out_of_step
from pscluster.ps.handles.variable import Variable
from pscluster.v1 import ps_pb2

Pairs = Sequence[tuple[Gradient | None, Variable]]


class _Share(NamedTuple):
    """What a shard gets of each gradient, and the fields of its update."""

    index: Any  # of the shard, in the gradient; None: all of it
    item: bytes  # without what differs from step to step
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


class GradientPlan:
    """Makes the updates by one optimizer of pairs of gradients and variables, the same variables each time.

    Thread-safe. What it has kept is used only where it fits: all gradients are arrays of their variables' shapes and
    types, and these are cut as they were. Otherwise, and where the optimizer has to look at gradients, as to clip them,
    it does what `Optimizer.updates_of` does.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._planned: Sequence[_Planned] = ()
        self._was_used = False

    def updates_of(self, pairs: Pairs, *, examples: float | None = None) -> list[ShardUpdate]:
        """Return what `Optimizer.updates_of` does. Call it within the gate in which the updates are sent."""
        planned = self._planned
        if len(planned) != len(pairs) or any(kept.variable.id != kept.id for kept in planned):
            updates = self._optimizer.updates_of(pairs, examples=examples)
            if self._was_used and self._optimizer.sends_as_given:  # what is an argument is new, and used once
                self._planned = _plan_of(pairs, updates)
            self._was_used = True
            return updates
        is_scaled = examples is not None and replicas_out_of_step() > 1
        if is_scaled or not all(map(_fits, planned, pairs)):
            return self._optimizer.updates_of(pairs, examples=examples)
        return _filled(planned, pairs, None if examples is None else checks.real("examples", examples, at_least=0))


def _plan_of(pairs: Pairs, updates: Sequence[ShardUpdate]) -> Sequence[_Planned]:
    """Return what to keep of the updates by these pairs: nothing if they are not one of each shard."""
    planned: list[_Planned] = []
    rest = iter(updates)
    for _, variable in pairs:
        partition, shares = variable.partition, []
        for shard in range(partition.num_shards):
            update = next(rest, None)
            if update is None or update.ids is not None:
                return ()
            if (update.item.variable, update.item.shard) != (variable.id, shard):
                return ()
            item = ps_pb2.UpdateItem()
            item.CopyFrom(update.item)
            item.ClearField("weight")
            index = None if partition.num_shards == 1 else partition.index(shard)
            fields = update.server, update.name, update.dtype, update.asynchronous, update.encoding
            shares.append(_Share(index, item.SerializeToString(), *fields))
        planned.append(_Planned(variable, variable.id, shares))
    return planned


def _fits(kept: _Planned, pair: tuple[Any, Variable]) -> bool:
    gradient, variable = pair
    return (
        variable is kept.variable
        and type(gradient) is np.ndarray
        and gradient.dtype == variable.dtype
        and gradient.shape == variable.shape
    )


def _filled(planned: Sequence[_Planned], pairs: Pairs, examples: float | None) -> list[ShardUpdate]:
    updates: list[ShardUpdate] = []
    parsed = ps_pb2.UpdateItem.FromString
    for (variable, _, shares), (gradient, _) in zip(planned, pairs, strict=True):
        nth = variable.next_update()
        for index, serialized, server, name, dtype, asynchronous, encoding in shares:
            item = parsed(serialized)
            item.nth = nth
            if examples is not None:
                item.weight = examples
            values: Any = gradient if index is None else gradient[index]  # type: ignore[index]  # it is an array
            data = view(np.ascontiguousarray(values))
            updates.append(ShardUpdate(server, item, data, None, name, dtype, asynchronous, encoding))
    return updates
