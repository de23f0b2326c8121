"""Gradients of all replicas of a synchronous step, combined on each of them: for what needs the whole of a gradient.

The servers combine gradients, and cheaper; but they see only their own shards, and clipping needs the norm of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pscluster.core.context import current_function
from pscluster.ps.handles.indexing import Gradient, IndexedSlices

if TYPE_CHECKING:
    from pscluster.ps.handles.variables.variable import Variable


class Replica(Protocol):
    """What is used of a ReplicaContext, which stands above this package."""

    @property
    def replica_id(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    def all_reduce(self, op: str, structure: Any) -> Any: ...

    def all_gather(self, value: Any, axis: int = 0) -> Any: ...


def current_replica() -> Replica | None:
    """Return the replica whose synchronous step runs here, if all of several take part in it; otherwise None."""
    function = current_function()
    if function is None or function.steps is None or function.steps.backup or function.replica is None:
        return None
    replica: Replica = function.replica
    return replica if replica.num_replicas > 1 else None


def may_be_dropped() -> bool:
    """Return whether a synchronous step runs here that may be done without this replica, or others."""
    function = current_function()
    return function is not None and function.steps is not None and function.steps.backup > 0


def replicas_out_of_step() -> int:
    """Return how many replicas there are if this one's updates are applied as they come, under a bound; otherwise 1."""
    function = current_function()
    count: int = 1 if function is None or function.bounded is None else function.bounded.replicas
    return count


def shared_out(
    pairs: Sequence[tuple[Gradient, Variable]], examples: float, replicas: int
) -> list[tuple[Gradient, Variable]]:
    """Return a replica's part of the mean of this many replicas, each of whose gradients is applied alone.

    Those of asynchronous variables stay, as in synchronous steps. Half types become float32.
    """
    share = 1 / replicas if examples else 0.0
    result: list[tuple[Gradient, Variable]] = []
    for gradient, variable in pairs:
        if variable.asynchronous:
            result.append((gradient, variable))
        elif isinstance(gradient, IndexedSlices):
            result.append((IndexedSlices(_scaled(np.asarray(gradient.values), share), gradient.indices), variable))
        else:
            result.append((_scaled(np.asarray(gradient), share), variable))
    return result


def combined(
    pairs: Sequence[tuple[Gradient, Variable]], examples: float | None, replica: Replica
) -> list[tuple[Gradient, Variable]]:
    """Return the gradients of all replicas, summed or averaged over their examples: the same on each of them.

    Rows of sparse ones are put one after another. Half types become float32.
    """
    share = 1.0
    if examples is not None:
        share = examples / (float(replica.all_reduce("sum", float(examples))) or 1.0)
    dense: list[Any] = []
    rows: list[Any] = []
    for gradient, variable in pairs:
        if isinstance(gradient, IndexedSlices):
            ids = _same_type(np.asarray(gradient.indices).reshape(-1), variable.id_bytes)
            values = np.asarray(gradient.values).reshape(len(ids), *variable.shape[1:])
            rows.append((ids, _scaled(values, share)))
        else:
            dense.append(_scaled(np.asarray(gradient), share))
    sums = iter(replica.all_reduce("sum", dense) if dense else ())
    joined = iter(replica.all_gather(rows) if rows else ())
    result: list[tuple[Gradient, Variable]] = []
    for gradient, variable in pairs:
        if isinstance(gradient, IndexedSlices):
            ids, values = next(joined)
            ids = ids.view(f"S{variable.id_bytes}").reshape(-1) if variable.id_bytes else ids
            result.append((IndexedSlices(values, ids), variable))
        else:
            result.append((next(sums), variable))
    return result


def _same_type(ids: Any, id_bytes: int) -> Any:
    """Return ids in the form that they have on all replicas: strings as rows of bytes."""
    return ids.astype(f"S{id_bytes}").view(np.uint8).reshape(len(ids), id_bytes) if id_bytes else ids


def _scaled(values: Any, share: float) -> Any:
    if values.itemsize == 2:
        values = values.astype(np.float32)
    return values if share == 1.0 else values * values.dtype.type(share)
