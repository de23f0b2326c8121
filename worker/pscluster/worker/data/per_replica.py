"""A worker's part of the datasets of a SynchronousStrategy, whose replicas step together: each worker is a replica."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.values import map_structure
from pscluster.worker.collectives.replica import ReplicaContext
from pscluster.worker.data.per_worker import InputContext, call_dataset_fn, share_of


def made_in_sync(dataset_fn: Callable[..., Any], context: InputContext) -> Any:
    """Call a `dataset_fn` with a context that counts all workers as replicas, as `replica_context()` does in it."""
    function = current_function()
    if function is not None and function.replica is None:
        function.replica = ReplicaContext(rank=context.worker_index, size=context.num_workers)
    return call_dataset_fn(dataset_fn, dataclasses.replace(context, num_replicas_in_sync=context.num_workers))


def sliced(source: Callable[[], Any], uneven: bool, context: InputContext) -> Iterable[Any]:
    """Return this replica's slice of each of the global batches of what `source()` returns."""
    batches = source()
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"the function given to distribute_dataset returned {type_of(batches)}: it must return global batches, in "
            "something to iterate over"
        )
    return _slices(batches, context.worker_index, context.num_workers, uneven)


def _slices(batches: Iterable[Any], rank: int, replicas: int, uneven: bool) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        start, length = share_of(_examples_in(batch, number), replicas, rank, f"batch {number}", uneven)
        yield map_structure(operator.itemgetter(slice(start, start + length)), batch)


def _examples_in(batch: Any, number: int) -> int:
    """Return the length of the first axis of all arrays in a batch. Raise ValueError if they have no common one."""
    lengths: list[int] = []

    def note(leaf: Any) -> None:
        if not getattr(leaf, "shape", None):
            raise ValueError(
                f"batch {number} has {type_of(leaf)} in it: distribute_dataset takes batches of arrays, whose first "
                "axis is that of the examples"
            )
        lengths.append(int(leaf.shape[0]))

    map_structure(note, batch)
    if not lengths:
        raise ValueError(f"batch {number} has no array in it: distribute_dataset takes batches of arrays")
    if min(lengths) < max(lengths):
        raise ValueError(
            f"batch {number} has arrays of {min(lengths)} and of {max(lengths)} examples in it: all arrays of a batch "
            "must have as many"
        )
    return lengths[0]
