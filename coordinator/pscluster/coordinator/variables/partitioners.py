"""Into how many shards a variable is cut: TensorFlow's partitioners, for any axis.

A partitioner is asked `(shape, dtype)` and answers with the number of shards of every axis. Any callable
will do. The classes here have the names, arguments, defaults and formulas of those in
`tf.distribute.experimental.partitioners`, so that ported code cuts as before. Where they differ, nothing that
worked there changes:

- an axis of length 0, or rows of 0 bytes, give one shard, where TensorFlow fails or divides by zero;
- `axis` works for every axis, counted from the end too, where its strategy takes 0 only;
- `FixedShardsPartitioner` checks its argument as the others do;
- `MinSizePartitioner(strict=True)` is new.

Throughout, D is the length of the axis, B the bytes of the variable, and r = B / D the bytes of a row, that
is of one step along the axis. Where the pieces end is not decided here, but by `geometry.even_ends`.
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
from pscluster.core.errors import ConfigurationError
from pscluster.core.geometry import Partition

PartitionerLike = Callable[[tuple[int, ...], "np.dtype[Any]"], Sequence[int]]
"""What `variable_partitioner` takes: `(shape, dtype)` to the number of shards per axis."""


def element_bytes(dtype: np.dtype[Any], bytes_per_string: int = 16) -> int:
    """Bytes of one element. Where strings have no fixed width, `bytes_per_string` is the estimate for one."""
    dtype = np.dtype(dtype)
    # "O" and "T" elements are pointers to their strings; np.dtype(str) and np.dtype(bytes) have no width yet.
    if dtype.kind in "OT" or (dtype.kind in "US" and not dtype.itemsize):
        return bytes_per_string
    return dtype.itemsize


MAX_SHARDS = 10_000
"""Of one variable: each costs a server, and every whole read and update, some work of its own."""


class Partitioner(abc.ABC):
    """Base of the partitioners here, and for the user's own."""

    @abc.abstractmethod
    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int = 0) -> list[int]:
        """How many shards along every axis: one number an axis, 1 but for `axis`.

        Args:
            shape: of the variable, of rank 1 at least.
            dtype: of the variable.
            axis: to cut along; negative counts from the end.

        Raises:
            ValueError: the shape has no such axis.
        """


@dataclass(frozen=True, slots=True)
class FixedShardsPartitioner(Partitioner):
    """So many shards: min(num_shards, D), and 1 at least.

    Raises:
        ValueError: the argument is below 1.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_positive("num_shards", self.num_shards)

    def __call__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],  # noqa: ARG002  (every partitioner is told; this one need not care)
        axis: int = 0,
    ) -> list[int]:
        axis = _axis(shape, axis)
        return _along(shape, axis, min(self.num_shards, shape[axis]))


@dataclass(frozen=True, slots=True)
class MinSizePartitioner(Partitioner):
    """As many shards as there can be of a minimum size: min(D, max_shards, ceil(B / min_shard_bytes)).

    Because of the ceil, TensorFlow's own, shards may be smaller than `min_shard_bytes`: 120 bytes with a
    minimum of 100 make two shards of 60. With `strict` none is, unless the variable as a whole is: the
    smallest of n shards has floor(D / n) rows, hence n = floor(D / ceil(min_shard_bytes / r)).

    Args:
        min_shard_bytes: the minimum, in bytes.
        max_shards: the most shards. Left at 1, nothing is ever cut (TensorFlow's default).
        bytes_per_string: the estimate for one string, where strings have no fixed width.
        strict: keep the minimum.

    Raises:
        ValueError: a number is below 1.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16
    strict: bool = False

    def __post_init__(self) -> None:
        _check_positive("min_shard_bytes", self.min_shard_bytes)
        _check_positive("max_shards", self.max_shards)
        _check_positive("bytes_per_string", self.bytes_per_string)

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int = 0) -> list[int]:
        axis = _axis(shape, axis)
        total = math.prod(shape) * element_bytes(dtype, self.bytes_per_string)
        if total == 0:
            return [1] * len(shape)
        length = shape[axis]
        if self.strict:
            by_size = length // _ceil(self.min_shard_bytes, total // length)
        else:
            by_size = _ceil(total, self.min_shard_bytes)
        return _along(shape, axis, min(length, self.max_shards, by_size))


@dataclass(frozen=True, slots=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as keep to a maximum size: ceil(D / rows) with rows = max(1, floor(max_shard_bytes / r)).

    A shard has one row at least, however large that is. `max_shards` goes before the maximum size.

    Args:
        max_shard_bytes: the maximum, in bytes.
        max_shards: the most shards; None for no limit, or 0, as TensorFlow has it.
        bytes_per_string: the estimate for one string, where strings have no fixed width.

    Raises:
        ValueError: a number is below 1, but for a `max_shards` of 0.
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _check_positive("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards:
            _check_positive("max_shards", self.max_shards)
        _check_positive("bytes_per_string", self.bytes_per_string)

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int = 0) -> list[int]:
        axis = _axis(shape, axis)
        total = math.prod(shape) * element_bytes(dtype, self.bytes_per_string)
        if total == 0:
            return [1] * len(shape)
        length = shape[axis]
        rows = max(1, self.max_shard_bytes // (total // length))
        shards = _ceil(length, rows)
        return _along(shape, axis, min(shards, self.max_shards or shards))


def partition_for(
    partitioner: PartitionerLike | None, shape: Sequence[int], dtype: np.dtype[Any], name: str
) -> Partition:
    """How a variable is cut: the partitioner's answer, checked, as pieces of every axis.

    Without a partitioner, or with rank 0, there is one shard and nobody is asked. An answer for fewer axes
    than there are leaves the others whole. More shards than an axis is long are as many as it is long.

    Args:
        partitioner: any callable, or None.
        shape: of the variable.
        dtype: of the variable.
        name: of the variable, for the errors.

    Raises:
        ConfigurationError (ValueError): the answer is not a non-empty sequence of integers from 1, or is for
            more axes than the shape has. What the partitioner itself raises passes, with a note that names
            the variable.
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

    def wrong(what: str, mend: str) -> ConfigurationError:
        return ConfigurationError(
            f"variable {name!r} of shape {shape}: variable_partitioner answered {answer!r}, {what}. {mend}"
        )

    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise wrong(
            "which is not a sequence of integers",
            "It must return one number of shards per axis, e.g. [2, 1].",
        )
    if not answer:
        raise wrong("which is empty", "It must return one number of shards per axis; [1] leaves the variable whole.")
    if len(answer) > len(shape):
        raise wrong(
            f"numbers for {len(answer)} axes, but the variable has {len(shape)}",
            "It must return at most one number of shards per axis.",
        )
    parts = []
    for axis, (count, length) in enumerate(zip(answer, shape, strict=False)):
        try:
            if isinstance(count, bool | np.bool_):
                raise TypeError
            count = operator.index(count)
        except TypeError:
            raise wrong(
                f"in which {count!r} for axis {axis} is no integer", "Round it and convert it with int()."
            ) from None
        if count < 1:
            raise wrong(f"in which {count} for axis {axis} is below 1", "Return 1 for an axis that is not to be cut.")
        parts.append(max(1, min(count, length)))
    if math.prod(parts) > MAX_SHARDS:
        raise wrong(f"which makes {math.prod(parts)} shards, more than {MAX_SHARDS}", "Cut it into larger shards.")
    return Partition.even(shape, parts)


def _check_positive(name: str, value: object) -> None:
    try:
        checks.whole(name, value, at_least=1)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _axis(shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ConfigurationError(f"a variable of shape {shape} can't be partitioned along axis {axis}")
    return axis % len(shape)


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _along(shape: tuple[int, ...], axis: int, shards: int) -> list[int]:
    """The answer of a partitioner. The int() is for those who write sizes as 1e6."""
    return [max(1, int(shards)) if number == axis else 1 for number in range(len(shape))]
