"""A worker's part of the datasets of a SynchronousStrategy: an iterator for each replica that runs here."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.handles import Handle
from pscluster.core.values import map_structure
from pscluster.worker.collectives.replica import ReplicaContext
from pscluster.worker.data.per_worker import (
    InputContext,
    WorkerDataset,
    WorkerIterator,
    begun_at,
    call_dataset_fn,
    share_of,
)


class OfReplicas(Handle):
    """The iterators, or datasets, of the replicas that run on this worker: each uses its own, made at first use.

    Args:
        key: of the handle.
        kind: of what `make` makes.
        make: makes that of a replica.
        homes: the replicas that run here unless a worker is lost; none on a worker that has joined later. A function
            that runs alone uses that of the first.
    """

    def __init__(
        self, key: str, kind: str, make: Callable[[int], WorkerIterator | WorkerDataset], homes: Collection[int]
    ) -> None:
        self._key, self.handle_kind = key, kind  # type: ignore[misc]
        self._make, self._homes = make, homes
        self._lock = threading.Lock()
        self._by_rank: dict[int, WorkerIterator | WorkerDataset] = {}
        for rank in homes:
            self.of(rank)

    @property
    def handle_key(self) -> str:
        return self._key

    def of(self, rank: int) -> WorkerIterator | WorkerDataset:
        """Return that of a replica."""
        with self._lock:
            if (known := self._by_rank.get(rank)) is None:
                known = self._by_rank[rank] = self._make(rank)
            return known

    def keep(self, ranks: Collection[int]) -> None:
        """Drop those of replicas that neither belong here nor are among these."""
        with self._lock:
            for rank in [rank for rank in self._by_rank if rank not in ranks and rank not in self._homes]:
                del self._by_rank[rank]

    def _own(self) -> Any:
        function = current_function()
        pipeline = None if function is None else function.pipeline
        return self.of(min(self._homes, default=0) if pipeline is None else pipeline)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __next__(self) -> Any:
        return next(self._own())

    def get_next(self) -> Any:
        """Return the replica's next element (TensorFlow's name). Raise EndOfDatasetError after the last one."""
        return self._own().get_next()


def made_in_sync(dataset_fn: Callable[..., Any], context: InputContext) -> Any:
    """Call a `dataset_fn` with a context that counts all replicas, as `replica_context()` does in it."""
    function, replicas = current_function(), context.num_input_pipelines
    if function is not None and function.replica is None:
        function.replica = ReplicaContext(rank=context.input_pipeline_id, size=replicas)
    return call_dataset_fn(dataset_fn, dataclasses.replace(context, num_replicas_in_sync=replicas))


def sliced(source: Callable[[], Any], uneven: bool, context: InputContext) -> Iterable[Any]:
    """Return this replica's slice of each of the global batches of what `source()` returns."""
    batches = source()
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"the function given to distribute_dataset returned {type_of(batches)}: it must return global batches, in "
            "something to iterate over"
        )
    return _Slices(batches, context.input_pipeline_id, context.num_input_pipelines, uneven)


class _Slices:
    """A replica's slices of global batches."""

    def __init__(self, batches: Iterable[Any], rank: int, replicas: int, uneven: bool) -> None:
        self._batches, self._rank, self._replicas, self._uneven = batches, rank, replicas, uneven

    def __iter__(self) -> Iterator[Any]:
        return self._of(self._batches, 0)

    def skip(self, count: int) -> Iterator[Any]:
        """Return those of all batches but the first ones, which are not sliced, and not read if they need not be."""
        batches = begun_at(self._batches, count)
        return self._of(itertools.islice(self._batches, count, None) if batches is None else batches, count)

    def _of(self, batches: Iterable[Any], first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, first):
            examples = _examples_in(batch, number)
            start, length = share_of(examples, self._replicas, self._rank, f"batch {number}", self._uneven)
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
            "must have the same number"
        )
    return lengths[0]
