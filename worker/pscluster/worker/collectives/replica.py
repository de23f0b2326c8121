"""What a step function sees of its gang: its rank, and the collectives."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import xxhash

import pscluster
from pscluster.core.context import current_function
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import MisuseError
from pscluster.core.geometry.partition import even_ends
from pscluster.core.transport.frames import view
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives import algorithms
from pscluster.worker.collectives.algorithms import Array, Finish, Incoming, Links, Meanwhile, Outgoing, Receipt
from pscluster.worker.collectives.leaves import Leaves, as_array, described_array
from pscluster.worker.collectives.links import MemberLinks
from pscluster.worker.strategy import COMBINE, ReduceOp

_OWN = tuple(os.path.join(folder, "") for folder in pscluster.__path__)
_MAX_LAYOUT = 120  # characters of a layout in errors
_MAX_PLACE = 200

_HEADER = 1 + 64  # numbers that describe an array's shape to its receiver: its rank, and up to 64 axes


class _NoLinks:
    """The links of a function that runs on one worker only, or of a dataset function, which is not in a gang."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def send(self, to: int, *buffers: Any) -> None:
        raise self._refusal(f"{len(buffers)} buffers for replica {to}")

    def post(self, source: int, memory: memoryview) -> Receipt:
        raise self._refusal(f"{len(memory)} bytes from replica {source}")

    def _refusal(self, call: str) -> MisuseError:
        return MisuseError(
            f"a dataset function can't exchange anything with other replicas ({call}): call collectives in the step"
        )


class ReplicaContext:
    """The gang of a step function: `replica_context()` returns it, also on threads that the function starts.

    All replicas must make the same calls in the same order, with arrays of the same types and shapes (where a method
    does not say otherwise); MisuseError names a replica that does not, and where. Arrays are NumPy arrays, what NumPy
    makes arrays of, or numbers; results are NumPy arrays, and NumPy scalars for numbers. They are bitwise the same on
    all replicas, and in every run. The arguments are never changed, unless `in_place`.

    A collective waits for as long as the others compute. It raises MemberUnavailableError if another replica has died,
    failed or was stopped, and its subclass MemberTimeoutError if the worker of one does not answer any more. After an
    error no other collective may follow.
    """

    def __init__(self, links: MemberLinks | None = None, rank: int = 0, size: int = 1) -> None:
        """Take the links to the others; without them only the rank and the number of replicas are known."""
        self._links: Links = links or _NoLinks(rank, size)
        self._gang = links
        self._refusal = ""
        self.calls = 0
        """Of a function's collectives, so far."""
        self.last_call = ""
        """Which was the last, and where."""
        self.attached: dict[Any, Any] = {}
        """What modules above this one keep for as long as it lives."""
        self._signatures: dict[Any, worker_pb2.Signature] = {}

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0."""
        return self._links.rank

    replica_id = replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._links.size

    num_replicas = num_replicas_in_sync

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self._links.rank} of {self._links.size})"

    def all_reduce(self, op: ReduceOp | str, structure: Any) -> Any:
        """Combine nested arrays of all replicas, element by element.

        Args:
            op: "sum", "mean", "min" or "max". Sums have their arrays' types, and wrap around or lose precision like
                NumPy's `+`; those of bools are int64. Means of integers and bools are float64.
            structure: arrays or numbers, in lists, tuples, dicts, named tuples and dataclass instances.

        Returns:
            The same structure of the results.
        """
        op = _op(op)
        leaves = Leaves(structure, lambda array: _prepared(op, array))
        with self._collective(f"all_reduce({op.value})", leaves.layout):
            finish = self._finish(op)
            return leaves.mapped(lambda flat: algorithms.all_reduce(self._links, COMBINE[op], flat, finish))

    def summed(self, array: Array, label: str) -> Array:
        """Return the sum of all replicas' arrays, which are flat, contiguous, of one size and of a floating type.

        For internal use: quicker than `all_reduce`. `label` says in errors what is summed.
        """
        if self._gang is None:
            return array.copy()
        key = label, array.dtype, array.size
        if (signature := self._signatures.get(key)) is None:
            signature = _signature(f"the sum of {label}", described_array(array), "the end of a step")
            self._signatures[key] = signature
        with self._gang.collective(signature):
            return algorithms.all_reduce(self._links, np.add, array)

    def gather_parts(self, array: Array, label: str) -> None:
        """Replace each part of a flat array, other than this replica's, by what its replica has there.

        For internal use: the parts are those of `reduce_scatter`. `label` says in errors what is gathered.
        """
        if self._gang is not None:
            with self._collective(f"the parts of {label}", described_array(array)):
                algorithms.fill_parts(self._links, array, even_ends(array.size, self._links.size))

    def summed_part(self, array: Array, divisor: float | None, label: str) -> Array:
        """Return this replica's part of the sum of flat arrays as a view of its own, which is overwritten.

        For internal use: the parts are those of `reduce_scatter`. Sums are divided while they are in the processor's
        cache, by the same number on all replicas. `label` says in errors what is summed.
        """
        finish = None if divisor is None else _divide_by(divisor)
        with self._collective(f"the sum of {label}", described_array(array)):
            ends = even_ends(array.size, self._links.size)
            return algorithms.reduce_scatter(self._links, np.add, array, ends, finish, in_place=True)

    def exchange(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        label: str,
        place: str = "a program",
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Send some other replicas bytes, and fill memory with those of some, which know how many.

        For internal use: `label` says in errors what is exchanged, and `place` where. `meanwhile` is called before what
        comes is awaited.
        """
        if self._gang is None:
            meanwhile()
            return
        with self._gang.collective(_signature(f"an exchange of {label}", "", place)):
            algorithms.exchange(self._links, outgoing, incoming, meanwhile)

    def reduce_scatter(self, op: ReduceOp | str, array: Any, axis: int = 0, *, in_place: bool = False) -> Any:
        """Combine arrays of all replicas, and return this replica's part of the result.

            own = replica_context().reduce_scatter("sum", gradient)      # of (10, 3): (5, 3) on each of 2 replicas

        Args:
            op: as in `all_reduce`.
            array: of the same shape on all replicas.
            axis: along which the result is divided, as by `numpy.array_split(result, num_replicas, axis)`.
            in_place: the array may be overwritten, which takes less memory and time; the result may be a view of it.

        Raises:
            MisuseError: another replica calls something else, or the array has no such axis.
        """
        op = _op(op)
        whole = _prepared(op, as_array(array, "reduce_scatter"))
        axis = _axis(axis, whole, "reduce_scatter")
        with self._collective(f"reduce_scatter({op.value}, axis={axis})", described_array(whole)):
            rows = np.moveaxis(whole, axis, 0)
            size = int(np.prod(rows.shape[1:], dtype=np.int64))
            ends = [end * size for end in even_ends(rows.shape[0], self._links.size)]
            flat = np.ascontiguousarray(rows).reshape(-1)
            part = algorithms.reduce_scatter(
                self._links, COMBINE[op], flat, ends, self._finish(op), in_place=in_place and flat.flags.writeable
            )
            own = np.diff((0, *even_ends(rows.shape[0], self._links.size)))[self._links.rank]
            return np.ascontiguousarray(np.moveaxis(part.reshape(own, *rows.shape[1:]), 0, axis))

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Return the arrays of all replicas, joined along an axis by replica; numbers become an array of them.

            losses = replica_context().all_gather(loss)                  # of shape (num_replicas,)

        Args:
            value: an array or a number, or nested ones. Arrays may differ in size along the axis only.
            axis: along which they are joined.

        Raises:
            MisuseError: another replica calls something else, or an array has no such axis.
        """
        leaves = Leaves(value, lambda array: np.atleast_1d(array))
        axes = [_axis(axis, leaf, "all_gather") for leaf in leaves.arrays]
        layout = "; ".join(described_array(leaf, at) for leaf, at in zip(leaves.arrays, axes, strict=True))
        with self._collective(f"all_gather(axis={axis})", layout):
            own = np.array([leaf.shape[at] for leaf, at in zip(leaves.arrays, axes, strict=True)], np.int64)
            size = self._links.size
            lengths = algorithms.all_gather(self._links, own, [len(own) * (rank + 1) for rank in range(size)])
            by_leaf = lengths.reshape(size, len(own)).T
            gathered = map(self._gathered, leaves.arrays, axes, by_leaf)
            return leaves.replaced(list(gathered))

    def _gathered(self, array: Array, axis: int, lengths: Array) -> Array:
        rows = np.ascontiguousarray(np.moveaxis(array, axis, 0))
        size = int(np.prod(rows.shape[1:], dtype=np.int64))
        ends = [int(end) * size for end in np.cumsum(lengths)]
        flat = algorithms.all_gather(self._links, rows.reshape(-1), ends)
        return np.ascontiguousarray(np.moveaxis(flat.reshape(int(lengths.sum()), *rows.shape[1:]), 0, axis))

    def all_to_all(self, arrays: Sequence[Any]) -> list[Any]:
        """Send the n-th array to the n-th replica, and return what each replica has sent to this one.

            from_each = replica_context().all_to_all(np.array_split(rows, num_replicas))

        Args:
            arrays: one for each replica, by rank. Shapes may differ; the element type may not.

        Raises:
            MisuseError: there are not as many arrays as replicas, or they have several types.
        """
        outgoing = [np.ascontiguousarray(as_array(array, "all_to_all")) for array in arrays]
        size = self._links.size
        if len(outgoing) != size:
            raise MisuseError(f"all_to_all takes one array per replica: {size}, not {len(outgoing)}")
        types = sorted({array.dtype.name for array in outgoing})
        if len(types) > 1:
            raise MisuseError(f"all_to_all takes arrays of one type, not {' and '.join(types)}: convert them")
        with self._collective("all_to_all()", types[0]):
            headers, theirs = np.zeros((2, size, _HEADER), np.int64)
            for header, array in zip(headers, outgoing, strict=True):
                header[: 1 + array.ndim] = array.ndim, *array.shape
            algorithms.all_to_all(self._links, [view(row) for row in headers], [view(row) for row in theirs])
            incoming = [np.empty(tuple(row[1 : 1 + row[0]]), outgoing[0].dtype) for row in theirs]
            algorithms.all_to_all(self._links, [view(array) for array in outgoing], [view(array) for array in incoming])
            return incoming

    def broadcast(self, structure: Any, source: int = 0) -> Any:
        """Return the nested arrays of one replica on all of them.

            weights = replica_context().broadcast(weights)               # those of replica 0

        Args:
            structure: arrays or numbers, as in `all_reduce`; on all replicas of the same types and shapes.
            source: the replica whose arrays are returned.

        Raises:
            MisuseError: there is no such replica, or another one calls something else.
        """
        if not 0 <= source < self._links.size:
            raise MisuseError(f"broadcast from replica {source}: there are {self._links.size}, counted from 0")
        leaves = Leaves(structure, lambda array: array)

        def spread(flat: Array) -> Array:
            result = flat.copy() if source == self._links.rank else np.empty_like(flat)
            algorithms.broadcast(self._links, view(result), source)
            return result

        with self._collective(f"broadcast(source={source})", leaves.layout):
            return leaves.mapped(spread)

    def barrier(self) -> None:
        """Return once all replicas have called it."""
        with self._collective("barrier()", ""):
            algorithms.barrier(self._links)

    def _finish(self, op: ReduceOp) -> Finish | None:
        return _divide_by(self._links.size) if op is ReduceOp.MEAN else None

    def calls_ahead(self) -> dict[int, MisuseError]:
        """Return which replicas have called a collective that this one has not, with the error if it never will."""
        return {} if self._gang is None else self._gang.mailbox.calls_ahead()

    def check_answer(self, ranks: Collection[int], failing: str, spare: int = 0) -> None:
        """Raise MemberTimeoutError if the workers of more than `spare` of these replicas do not answer.

        For internal use. The error names them, and says in the words of `failing` what they have not done for long.
        """
        if self._gang is not None:
            self._gang.check_answer(ranks, failing, spare)

    def raise_failure(self) -> None:
        """Raise the error of a collective that has failed, which the function may have caught. For internal use."""
        if self._gang is not None:
            self._gang.raise_failure()

    def refuse_collectives(self, why: str) -> None:
        """Have all collectives of this function raise MisuseError."""
        self._refusal = why

    def _collective(self, operation: str, layout: str) -> Any:
        if self._refusal:
            raise MisuseError(f"{operation}: {self._refusal}")
        self.calls += 1
        if self._gang is None:
            return nullcontext()
        place = user_place()
        self.last_call = f"{operation} at {place}"
        return self._gang.collective(_signature(operation, layout, place))


def _divide_by(divisor: float) -> Finish:
    def finish(array: Array) -> None:
        with np.errstate(all="ignore"):
            np.divide(array, array.dtype.type(divisor), out=array)

    return finish


def _signature(operation: str, layout: str, place: str) -> worker_pb2.Signature:
    short = layout if len(layout) <= _MAX_LAYOUT else f"{layout[:_MAX_LAYOUT]}..."
    digest = xxhash.xxh3_64_intdigest(layout.encode())
    return worker_pb2.Signature(operation=operation, layout=short, digest=digest, place=place)


def replica_context() -> ReplicaContext:
    """Return the replica that this step function is. Raise RuntimeError outside of one.

    A function that runs on one worker only is the only replica, and its collectives return at once.
    """
    function = current_function()
    if function is None:
        raise RuntimeError(
            "replica_context() works only inside a function that runs on a worker: call it in a step function"
        )
    if function.replica is None:
        function.replica = ReplicaContext()
    replica: ReplicaContext = function.replica
    return replica


def _prepared(op: ReduceOp, array: Array) -> Array:
    """Convert an array to the type of its result, as NumPy does, except that integers keep their size in sums."""
    if op is ReduceOp.SUM and array.dtype.kind == "b":
        return array.astype(np.int64)
    if op is ReduceOp.MEAN and array.dtype.kind in "biu":
        return array.astype(np.float64)
    return array


def _op(op: ReduceOp | str) -> ReduceOp:
    try:
        return ReduceOp.of(op)
    except ValueError as error:
        raise MisuseError(str(error)) from None


def _axis(axis: int, array: Array, noun: str) -> int:
    if not -array.ndim <= axis < array.ndim:
        raise MisuseError(f"{noun} along axis {axis} of an array with {array.ndim} axes")
    return axis % array.ndim


def user_place() -> str:
    """Return file and line of the user's call that has led here."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return shown(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"[-_MAX_PLACE:])
