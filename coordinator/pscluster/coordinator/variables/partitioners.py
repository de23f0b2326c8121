"""Into how many shards a variable is cut: TensorFlow's partitioners, for any axis.

A partitioner is any callable that takes `(shape, dtype)` and returns the number of shards of every axis. The classes
here have the names, arguments, defaults and formulas of `tf.distribute.experimental.partitioners`, so that ported code
cuts as before. They differ only in what did not work there: an axis of length 0, or rows of 0 bytes, give one shard;
any axis may be cut; all arguments are checked; `MinSizePartitioner(strict=True)` is new, and so are `ModuloPartitioner`
and `HashPartitioner`, which TensorFlow lacks.

Throughout, D is the length of the axis, B the bytes of the variable, and r = B / D the bytes of a row, that is of one
step along the axis. `geometry.even_ends` decides where the shards end.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.errors import ConfigurationError
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RANGE, RowOrder
from pscluster.ps.spec import MAX_SHARDS

PartitionerLike = Callable[[tuple[int, ...], "np.dtype[Any]"], Sequence[int]]
"""What `variable_partitioner` takes: `(shape, dtype)` to the number of shards per axis."""


def element_bytes(dtype: np.dtype[Any], bytes_per_string: int = 16) -> int:
    """Return the bytes of one element; of strings without a fixed width, the estimate `bytes_per_string`."""
    dtype = np.dtype(dtype)
    # "O" and "T" elements are pointers to their strings; np.dtype(str) and np.dtype(bytes) have no width yet.
    if dtype.kind in "OT" or (dtype.kind in "US" and not dtype.itemsize):
        return bytes_per_string
    return dtype.itemsize


MAX_SCATTERED_SHARDS = 1024  # of rows by modulo or hash: to restore into another cut, every shard reads every other


class Partitioner(abc.ABC):
    """Base class of these partitioners, and of users' own."""

    @abc.abstractmethod
    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int = 0) -> list[int]:
        """Return how many shards to cut along each axis: 1 for all axes but `axis`; a negative one counts from the end.

        Raises:
            ValueError: the shape has no such axis.
        """


@dataclass(frozen=True, slots=True)
class _ByRow(Partitioner):
    """Base class of partitioners that spread neighbouring rows over shards, for tables that are read by row ids."""

    num_shards: int

    def __post_init__(self) -> None:
        with configuration_errors():
            checks.whole("num_shards", self.num_shards, at_least=1, at_most=MAX_SCATTERED_SHARDS)

    def __call__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],  # noqa: ARG002  (part of the interface)
        axis: int = 0,
    ) -> list[int]:
        if _axis(shape, axis):
            raise ConfigurationError(f"{type(self).__name__} cuts rows, on axis 0, not along axis {axis}")
        return _along(shape, 0, min(self.num_shards, shape[0]))

    @property
    @abc.abstractmethod
    def row_order(self) -> RowOrder:
        """In which order the rows are cut."""


@dataclass(frozen=True, slots=True)
class ModuloPartitioner(_ByRow):
    """Cuts rows into min(num_shards, D) shards by `id % num_shards`, so that neighbours lie on different shards.

    Use it for tables whose frequent ids are neighbours, as when ids are ranks. Ids of which many have the same
    remainder need `HashPartitioner`. The shards' sizes differ by one row at most.

    Raises:
        ValueError: the argument is not in 1..1024.
    """

    @property
    def row_order(self) -> RowOrder:
        return RowOrder("modulo")


@dataclass(frozen=True, slots=True)
class HashPartitioner(_ByRow):
    """Cuts rows into min(num_shards, D) shards by a hash of their ids, so that any pattern of ids is spread.

    The hash is a bijection (see `core/geometry/row_orders.py`): the shards' sizes differ by one row at most, and no row
    takes more memory. It is the same on every machine.

    Args:
        num_shards: at most 1024.
        seed: tables of one length, number of shards and seed have the same rows on the same shards.

    Raises:
        ValueError: an argument is out of range; a seed is in 0..2**64 - 1.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        _ByRow.__post_init__(self)
        with configuration_errors():
            checks.whole("seed", self.seed, at_least=0, below=1 << 64)

    @property
    def row_order(self) -> RowOrder:
        return RowOrder("hash", int(self.seed))


@dataclass(frozen=True, slots=True)
class FixedShardsPartitioner(Partitioner):
    """Cuts into a fixed number of shards: min(num_shards, D), and 1 at least.

    Raises:
        ValueError: the argument is below 1.

    Examples:
        >>> FixedShardsPartitioner(2)((10, 3), np.dtype(np.float32))
        [2, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_positive(self, "num_shards")

    def __call__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],  # noqa: ARG002  (part of the interface)
        axis: int = 0,
    ) -> list[int]:
        axis = _axis(shape, axis)
        return _along(shape, axis, min(self.num_shards, shape[axis]))


class _BySize(Partitioner):
    """Base class of partitioners whose number of shards follows from the bytes of the variable."""

    bytes_per_string: int

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int = 0) -> list[int]:
        axis = _axis(shape, axis)
        total = math.prod(shape) * element_bytes(dtype, self.bytes_per_string)
        return _along(shape, axis, self._count(shape[axis], total) if total else 1)

    @abc.abstractmethod
    def _count(self, length: int, total: int) -> int:
        """Return how many shards to cut `total` bytes into, along an axis of this length; both are above 0."""


@dataclass(frozen=True, slots=True)
class MinSizePartitioner(_BySize):
    """Cuts into as many shards of a minimum size as possible: min(D, max_shards, ceil(B / min_shard_bytes)).

    Because of the ceil, which is TensorFlow's, shards may be smaller than `min_shard_bytes`: 120 bytes with a minimum
    of 100 make two shards of 60. With `strict` none is, unless the whole variable is: the smallest of n shards has
    floor(D / n) rows, hence n = floor(D / ceil(min_shard_bytes / r)).

    Args:
        min_shard_bytes: the minimum, in bytes.
        max_shards: the most shards. With 1, TensorFlow's default, nothing is ever cut.
        bytes_per_string: the estimate for one string, if strings have no fixed width.
        strict: make no shard smaller than the minimum.

    Raises:
        ValueError: a number is below 1.

    Examples:
        >>> MinSizePartitioner(256 << 10, max_shards=2)((1024, 1024), np.dtype(np.float32))
        [2, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16
    strict: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "min_shard_bytes", "max_shards", "bytes_per_string")

    def _count(self, length: int, total: int) -> int:
        if self.strict:
            by_size = length // _ceil(self.min_shard_bytes, total // length)
        else:
            by_size = _ceil(total, self.min_shard_bytes)
        return min(length, self.max_shards, by_size)


@dataclass(frozen=True, slots=True)
class MaxSizePartitioner(_BySize):
    """Cuts into as few shards of a maximum size as possible: ceil(D / rows), rows = max(1, floor(max_shard_bytes / r)).

    A shard has one row at least, however large that is. `max_shards` takes precedence over the maximum size.

    Args:
        max_shard_bytes: the maximum, in bytes.
        max_shards: the most shards; None or, as in TensorFlow, 0 for no limit.
        bytes_per_string: the estimate for one string, if strings have no fixed width.

    Raises:
        ValueError: a number is below 1, except a `max_shards` of 0.

    Examples:
        >>> MaxSizePartitioner(1 << 20)((1024, 1024), np.dtype(np.float32))
        [4, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _check_positive(self, "max_shard_bytes", *(["max_shards"] if self.max_shards else []), "bytes_per_string")

    def _count(self, length: int, total: int) -> int:
        rows = max(1, self.max_shard_bytes // (total // length))
        shards = _ceil(length, rows)
        return min(shards, self.max_shards or shards)


def partition_for(
    partitioner: PartitionerLike | None, shape: Sequence[int], dtype: np.dtype[Any], name: str
) -> Partition:
    """Return how the variable of this name is cut: the partitioner's answer, or ConfigurationError if it is invalid.

    Without a partitioner, or with rank 0, there is one shard. Axes that the answer leaves out stay whole. An axis gets
    at most as many shards as it is long. What the partitioner raises passes, with a note that names the variable.
    """
    shape = tuple(shape)
    if partitioner is not None and not callable(partitioner):
        raise ConfigurationError(
            f"variable {name!r}: a partitioner is a function of (shape, dtype), not {partitioner!r:.60}"
        )
    if partitioner is None or not shape:
        return Partition.whole(shape)
    try:
        answer: object = partitioner(shape, np.dtype(dtype))
    except Exception as error:
        error.add_note(f"raised by variable_partitioner for variable {name!r} of shape {shape}")
        raise

    def wrong(problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"variable {name!r} of shape {shape}: variable_partitioner returned {answer!r}, {problem}"
        )

    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise wrong("which is not a sequence of integers. It must return one number of shards per axis, e.g. [2, 1].")
    if not answer:
        raise wrong("which is empty. It must return one number of shards per axis; [1] leaves the variable whole.")
    if len(answer) > len(shape):
        raise wrong(
            f"numbers for {len(answer)} axes, but the variable has {len(shape)}. It must return at most that many."
        )
    counts = []
    for axis, (count, length) in enumerate(zip(answer, shape, strict=False)):
        try:
            if isinstance(count, bool | np.bool_):
                raise TypeError
            count = operator.index(count)
        except TypeError:
            raise wrong(
                f"in which {count!r} for axis {axis} is not an integer. Round it and convert it with int()."
            ) from None
        if count < 1:
            raise wrong(f"in which {count} for axis {axis} is below 1. Return 1 for an axis that is not to be cut.")
        counts.append(max(1, min(count, length)))
    if math.prod(counts) > MAX_SHARDS:
        raise wrong(f"which makes {math.prod(counts)} shards, more than {MAX_SHARDS}. Cut it into larger shards.")
    even = Partition.even(shape, counts)
    order = partitioner.row_order if isinstance(partitioner, _ByRow) and even.num_shards > 1 else RANGE
    return Partition(even.shape, even.ends, order)


def _check_positive(partitioner: Partitioner, *names: str) -> None:
    with configuration_errors():
        for name in names:
            checks.whole(name, getattr(partitioner, name), at_least=1)


def _axis(shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ConfigurationError(f"a variable of shape {shape} can't be partitioned along axis {axis}")
    return axis % len(shape)


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _along(shape: tuple[int, ...], axis: int, shards: int) -> list[int]:
    return [max(1, int(shards)) if other == axis else 1 for other in range(len(shape))]  # sizes may be 1e6
