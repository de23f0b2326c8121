"""Large dense gradients of a synchronous step, reduced by the replicas among themselves: each pushes one block.

The gradients are laid one after another, in the order in which the step has applied them, and that array is cut into a
block for each replica, whatever the limits of the shards. So a server receives each gradient once, in pieces, instead
of once from each replica. That all replicas have the same gradients is compared by server 0, by their `digest`: see
`steps`. What is summed, and in which order, depends only on sizes and ranks, so that runs repeat bit for bit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from pscluster.core.errors import MisuseError
from pscluster.core.geometry.partition import even_ends
from pscluster.core.transport.frames import view
from pscluster.ps.client.synchronous.gradient_forms import Array, Forms, GradientForm
from pscluster.ps.optim.precision import compute_dtype
from pscluster.v1 import ps_pb2

REDUCED_BYTES = 64 << 10
"""A shard's dense gradient is reduced among the replicas from this size on. Smaller ones cost a server less than the
replicas' messages to each other would."""


def is_large(item: ps_pb2.UpdateItem) -> bool:
    """Return whether an update is a gradient that the replicas reduce."""
    return item.kind == ps_pb2.APPLY_GRADIENT and item.rows.all and item.value_bytes >= REDUCED_BYTES


class Reducer(Protocol):
    """What is used of a ReplicaContext, which stands above this package."""

    @property
    def replica_id(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    def all_reduce(self, op: str, structure: Any) -> Any: ...

    def calls_ahead(self) -> Mapping[int, MisuseError]: ...

    def check_answer(self, ranks: Collection[int], failing: str, spare: int = 0) -> None: ...

    def summed(self, array: Any, label: str) -> Any: ...

    def summed_part(self, array: Any, divisor: float | None, label: str) -> Any: ...

    def gather_parts(self, array: Any, label: str) -> None: ...


def agree(replica: Reducer, digest: int) -> bool:
    """Return whether all replicas have the same digest, of 63 bits. All must call this."""
    low, high = replica.all_reduce("min", np.array([digest, -digest]))  # of all digests
    return bool(low == -high)


@dataclass(frozen=True, slots=True)
class _Large:
    """One gradient."""

    number: int  # from 1, in the step
    server: int
    item: ps_pb2.UpdateItem
    dtype: np.dtype[Any]  # of the shard
    values: Array  # of the type in which it is updated


class Reduction:
    """The large gradients of one replica's step. For one thread."""

    def __init__(self) -> None:
        self._gradients: list[_Large] = []
        self._memory: dict[np.dtype[Any], Array] = {}  # by type, of the last step: new memory costs as much as a copy
        self._used: defaultdict[np.dtype[Any], int] = defaultdict(int)  # elements of it

    def __bool__(self) -> bool:
        return bool(self._gradients)

    @property
    def digest(self) -> int:
        """Identify what must be the same for all replicas; 0 if there are no gradients."""
        if not self._gradients:
            return 0
        forms = [
            (item.variable, item.shard, item.optimizer, item.value_bytes, item.HasField("weight"))
            for item in (gradient.item for gradient in self._gradients)
        ]
        return xxhash.xxh3_64_intdigest(repr(forms).encode())

    @property
    def forms(self) -> Forms:
        """Of the gradients, in the order in which the step has applied them."""
        return tuple(GradientForm.of(each.server, each.item, each.dtype) for each in self._gradients)

    def add(self, server: int, item: ps_pb2.UpdateItem, values: memoryview, dtype: np.dtype[Any]) -> None:
        """Take a gradient of a shard of this type, as it is now."""
        given = np.frombuffer(values, dtype)
        kind = compute_dtype(dtype)
        memory, start = self._memory.get(kind), self._used[kind]
        self._used[kind] += len(given)
        if memory is not None and start + len(given) <= len(memory):
            copy = memory[start : start + len(given)]
        else:
            copy = np.empty(len(given), kind)
        if item.HasField("weight"):
            with np.errstate(all="ignore"):
                np.multiply(given, kind.type(item.weight), out=copy)
        else:
            copy[...] = given
        self._gradients.append(_Large(len(self._gradients) + 1, server, item, dtype, copy))

    def clear(self) -> None:
        """Drop all gradients."""
        self._gradients.clear()
        self._used.clear()

    def reduced(self, replica: Reducer) -> Iterator[tuple[int, ps_pb2.UpdateItem, memoryview]]:
        """Yield what this replica is to push: servers, pieces of gradients, and their values. Errors as of `sums`."""
        for gradient, start, piece in self._sums(replica):
            yield gradient.server, *_piece(gradient, start, piece)

    def sums(self, replica: Reducer) -> Iterator[tuple[int, int, Array]]:
        """Yield the pieces of gradients in this replica's block: variables, shards, and values.

        The others must call this, too. What the collectives raise is raised here.
        """
        for gradient, _, piece in self._sums(replica):
            yield gradient.item.variable, gradient.item.shard, piece

    def _sums(self, replica: Reducer) -> Iterator[tuple[_Large, int, Array]]:
        totals = self._total_weights(replica)
        by_type: defaultdict[np.dtype[Any], list[_Large]] = defaultdict(list)
        for gradient in self._gradients:
            by_type[gradient.values.dtype].append(gradient)
        for dtype in sorted(by_type, key=str):
            gradients = by_type[dtype]
            divisors = {totals.get(gradient.number) for gradient in gradients}
            common = divisors.pop() or None if len(divisors) == 1 else None
            block = replica.summed_part(self._joined(dtype, gradients), common, "large gradients of a step")
            start, stop = (0, *even_ends(self._used[dtype], replica.num_replicas))[replica.replica_id :][:2]
            ends = itertools.accumulate((len(gradient.values) for gradient in gradients), initial=0)
            for gradient, begin in zip(gradients, ends, strict=False):
                low, high = max(begin, start), min(begin + len(gradient.values), stop)
                if low < high:
                    piece = block[low - start : high - start]
                    total = totals.get(gradient.number)
                    if total and common is None:  # without any examples the sum is 0, and so is the mean
                        with np.errstate(all="ignore"):
                            np.divide(piece, dtype.type(total), out=piece)
                    yield gradient, low - begin, piece

    def _total_weights(self, replica: Reducer) -> dict[int, float]:
        """Return the sum of all replicas' weights for each gradient that is to be averaged, by its number."""
        averaged = [gradient for gradient in self._gradients if gradient.item.HasField("weight")]
        if not averaged:
            return {}
        totals = replica.all_reduce("sum", np.array([gradient.item.weight for gradient in averaged]))
        return {gradient.number: float(total) for gradient, total in zip(averaged, totals, strict=True)}

    def _joined(self, dtype: np.dtype[Any], gradients: list[_Large]) -> Array:
        """Return the gradients of one type as one array, in memory that the next step uses again."""
        memory, size = self._memory.get(dtype), self._used[dtype]
        if memory is None or len(memory) < size:
            memory = self._memory[dtype] = np.concatenate([gradient.values for gradient in gradients])
        return memory[:size]


def _piece(gradient: _Large, start: int, values: Array) -> tuple[ps_pb2.UpdateItem, memoryview]:
    """Return the update of a gradient's elements from `start` on."""
    with np.errstate(all="ignore"):
        data = view(values.astype(gradient.dtype, copy=False))
    piece = ps_pb2.UpdateItem()
    piece.CopyFrom(gradient.item)
    piece.ClearField("weight")
    piece.nth, piece.offset, piece.value_bytes = gradient.number, start * gradient.dtype.itemsize, len(data)
    return piece, data
