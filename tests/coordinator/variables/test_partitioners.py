"""Partitioners: TensorFlow's golden values and formulas, the hints, and what a strategy refuses."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.coordinator.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    element_bytes,
    partition_for,
)
from pscluster.core.errors import ConfigurationError
from pscluster.core.geometry.partition import Partition

F32 = np.dtype(np.float32)
STRING = np.dtype(object)
K256 = 256 << 10

Shape = tuple[int, ...]
DType = np.dtype[Any]

shapes = st.lists(st.integers(0, 50), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([np.dtype(name) for name in ("i1", "f2", "f4", "f8", "c16", "O")])


@pytest.mark.parametrize(
    ("shape", "dtype", "partitioner", "shards"),
    [
        ((1024, 1024), "f4", FixedShardsPartitioner(2), 2),
        ((1024, 1024), "f4", MinSizePartitioner(), 1),
        ((1024, 1024), "f4", MinSizePartitioner(K256, 16), 16),
        ((1024, 1024), "f4", MinSizePartitioner(K256, 8), 8),
        ((1024, 1024), "f4", MaxSizePartitioner(K256), 16),
        ((1024, 1024), "f4", MaxSizePartitioner(1), 1024),
        ((10, 3), "f4", FixedShardsPartitioner(20), 10),
        ((10, 3), "f4", MinSizePartitioner(100, 10), 2),
        ((10, 3), "f4", MaxSizePartitioner(100), 2),
        ((10, 3), "f4", MaxSizePartitioner(1), 10),
        ((13,), "f8", MaxSizePartitioner(100), 2),
        ((7, 5), "O", MinSizePartitioner(100, 10), 6),
        ((7, 5), "O", MaxSizePartitioner(100), 7),
        ((7, 5), "O", MaxSizePartitioner(100, max_shards=3), 3),
        ((3, 100), "i1", MinSizePartitioner(100, 10), 3),
    ],
)
def test_golden_values(shape: Shape, dtype: str, partitioner: Partitioner, shards: int) -> None:
    """What TensorFlow was seen to answer is answered here, and becomes that many shards."""
    assert partitioner(shape, np.dtype(dtype)) == [shards] + [1] * (len(shape) - 1)
    assert partition_for(partitioner, shape, np.dtype(dtype), "w").num_shards == shards


@given(
    shapes.filter(all),
    dtypes,
    st.integers(1, 3000),
    st.none() | st.integers(0, 20),
    st.integers(1, 30),
)
@settings(deadline=None)
def test_formulas(shape: Shape, dtype: DType, limit: int, most: int | None, string: int) -> None:
    """The answers are those of TensorFlow's formulas, written with its floating-point arithmetic."""
    rows = shape[0]
    total = math.prod(shape) * element_bytes(dtype, string)
    rest = [1] * (len(shape) - 1)
    if most:
        at_least = max(1, min(rows, most, math.ceil(total / limit)))
        assert MinSizePartitioner(limit, most, string)(shape, dtype) == [at_least, *rest]
        assert FixedShardsPartitioner(most)(shape, dtype) == [min(most, rows), *rest]
    at_most = math.ceil(rows / max(1, math.floor(limit / (total / rows))))
    at_most = min(most, at_most) if most else at_most
    assert MaxSizePartitioner(limit, most, string)(shape, dtype) == [at_most, *rest]


@given(shapes, dtypes, st.integers(1, 3000), st.integers(1, 20), st.integers(0, 2))
@settings(deadline=None)
def test_promises_of_size(shape: Shape, dtype: DType, limit: int, most: int, axis: int) -> None:
    """A strict minimum and a maximum without a limit are kept by every shard that could keep them."""
    axis %= len(shape)

    def sizes(partitioner: Partitioner) -> list[int]:
        partition = Partition.even(shape, partitioner(shape, dtype, axis=axis))
        assert partition.num_shards <= max(1, shape[axis])
        return [block.size * element_bytes(dtype) for block in partition.blocks]

    strict = sizes(MinSizePartitioner(limit, most, strict=True))
    assert len(strict) <= len(sizes(MinSizePartitioner(limit, most)))
    assert len(strict) == 1 or min(strict) >= limit
    row = math.prod(shape[:axis] + shape[axis + 1 :]) * element_bytes(dtype)
    assert max(sizes(MaxSizePartitioner(limit))) <= max(limit, row)


def test_a_strict_minimum_is_one() -> None:
    """Where TensorFlow cuts 120 bytes at a minimum of 100 in two, strict does not; nor 3 rows unevenly."""
    assert MinSizePartitioner(100, 10)((10, 3), F32) == [2, 1]
    assert MinSizePartitioner(100, 10, strict=True)((10, 3), F32) == [1, 1]
    assert MinSizePartitioner(60, 10, strict=True)((10, 3), F32) == [2, 1]
    # floor(150 / 70) is 2, but of 2 shards one has a single row of 50 bytes.
    assert MinSizePartitioner(70, 10, strict=True)((3, 50), np.dtype(np.int8)) == [1, 1]
    assert MinSizePartitioner(1, 10, strict=True)((3, 50), np.dtype(np.int8)) == [3, 1]


@pytest.mark.parametrize(
    "partitioner",
    [
        FixedShardsPartitioner(3),
        MinSizePartitioner(1, 3),
        MinSizePartitioner(1, 3, strict=True),
        MaxSizePartitioner(1),
    ],
)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_to_cut(partitioner: Partitioner, shape: Shape) -> None:
    """Variables without elements make no shards beyond the rows they have, and no division by zero."""
    (shards, *rest) = partitioner(shape, F32)
    assert shards == (3 if partitioner == FixedShardsPartitioner(3) and shape[0] else 1)
    assert rest == [1] * (len(shape) - 1)


def test_other_axes() -> None:
    """Any axis can be cut, counted from either end; one that is not there is an error."""
    assert FixedShardsPartitioner(4)((2, 3, 8), F32, axis=2) == [1, 1, 4]
    assert FixedShardsPartitioner(4)((2, 3, 8), F32, axis=-2) == [1, 3, 1]
    assert MinSizePartitioner(8, 10)((2, 3), F32, axis=1) == [1, 3]
    assert MaxSizePartitioner(16)((2, 3), F32, axis=-1) == [1, 2]
    for axis in (1, -2):
        for partitioner in (FixedShardsPartitioner(2), MinSizePartitioner(), MaxSizePartitioner(1)):
            with pytest.raises(ValueError, match=f"axis {axis}"):
                partitioner((3,), F32, axis=axis)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards", "0"),
        (lambda: MinSizePartitioner(min_shard_bytes=0), "min_shard_bytes", "0"),
        (lambda: MinSizePartitioner(max_shards=-1), "max_shards", "-1"),
        (lambda: MinSizePartitioner(bytes_per_string=0), "bytes_per_string", "0"),
        (lambda: MaxSizePartitioner(max_shard_bytes=0), "max_shard_bytes", "0"),
        (lambda: MaxSizePartitioner(1, max_shards=-2), "max_shards", "-2"),
        (lambda: MaxSizePartitioner(1, bytes_per_string=-16), "bytes_per_string", "-16"),
        (lambda: MaxSizePartitioner(cast(int, math.nan)), "max_shard_bytes", "nan"),
    ],
)
def test_numbers_must_be_positive(make: Callable[[], Partitioner], name: str, value: str) -> None:
    """An argument below 1 is refused with its name and value."""
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be a whole number, 1 or more"):
        make()


def test_numbers_that_are_allowed() -> None:
    """No limit may be written 0, as TensorFlow has it, and sizes as floats."""
    assert MaxSizePartitioner(100, max_shards=0)((10, 3), F32) == [2, 1]
    answer = MaxSizePartitioner(1e2)((10, 3), F32)  # type: ignore[arg-type]
    assert answer == [2, 1]
    assert type(answer[0]) is int
    assert MinSizePartitioner(1e2, 10)((10, 3), F32) == [2, 1]  # type: ignore[arg-type]


def test_partitioners_are_values() -> None:
    """They compare, print as they were made, and survive pickling."""
    partitioner = MinSizePartitioner(1 << 10, max_shards=4)
    assert partitioner == pickle.loads(pickle.dumps(partitioner)) == eval(repr(partitioner))


def test_bytes_of_an_element() -> None:
    """Strings of no fixed width count by estimate, all else by its true width."""
    assert element_bytes(F32) == 4
    assert element_bytes(np.dtype(object), 7) == element_bytes(np.dtype(str), 7) == 7
    assert element_bytes(np.dtype(bytes)) == 16
    assert element_bytes(np.dtype("<U3"), 7) == 12
    assert element_bytes(np.dtype("S3"), 7) == 3
    assert element_bytes(np.float64) == 8  # type: ignore[arg-type]  # as users write dtypes


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ([2, 2], (2, 2)),
        ((2,), (2, 1)),
        ([1], (1, 1)),
        ([99, 99], (10, 3)),
        ([np.int64(2), 1], (2, 1)),
        (np.array([4, 1]), (4, 1)),
    ],
)
def test_answers_that_are_taken(answer: Any, parts: Shape) -> None:
    """Any sequence of integers will do; short ones are filled up, large numbers cut to the axis."""
    asked = []

    def partitioner(shape: Shape, dtype: DType) -> Any:
        asked.append((shape, dtype))
        return answer

    assert partition_for(partitioner, [10, 3], F32, "w") == Partition.even((10, 3), parts)
    assert asked == [((10, 3), F32)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "None, which is not a sequence.*one number of shards per axis"),
        (3, "3, which is not a sequence"),
        ("2", "'2', which is not a sequence"),
        ({2}, r"\{2\}, which is not a sequence"),
        (np.array(2), "which is not a sequence"),
        ([], "which is empty"),
        ([2, 1, 1], "3 axes, but the variable has 2"),
        ([0, 1], "0 for axis 0 is below 1"),
        ([1, -1], "-1 for axis 1 is below 1"),
        ([2.0, 1], r"2\.0 for axis 0 is not an integer"),
        ([1, True], "True for axis 1 is not an integer"),
        ([None], "None for axis 0 is not an integer"),
        (np.array([[2, 1]]), r"\[2, 1\] for axis 0 is not an integer"),
    ],
)
def test_answers_that_are_refused(answer: Any, message: str) -> None:
    """The error names the variable, its shape, variable_partitioner, the value and a hint."""
    with pytest.raises(ConfigurationError, match=message) as raised:
        partition_for(lambda shape, dtype: answer, (10, 3), F32, "table")
    assert isinstance(raised.value, ValueError)
    for word in ("'table'", "(10, 3)", "variable_partitioner"):
        assert word in str(raised.value)


def test_partitioners_are_not_called_where_nothing_can_be_cut() -> None:
    """Scalars, and variables without a partitioner, are one shard."""

    def partitioner(shape: Shape, dtype: DType) -> list[int]:
        raise AssertionError("was asked")

    assert partition_for(partitioner, (), F32, "w") == Partition.whole(())
    assert partition_for(None, (10, 3), F32, "w") == Partition.whole((10, 3))


def test_axes_of_length_0_are_one_shard() -> None:
    """However many shards are asked for, an empty axis has one."""
    assert partition_for(lambda shape, dtype: [5, 5], (0, 3), F32, "w").grid == (1, 3)


def test_a_partitioner_that_fails_is_told_apart() -> None:
    """Its own error passes, with a note on which variable it was asked for."""

    def partitioner(shape: Shape, dtype: DType) -> list[int]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        partition_for(partitioner, (3,), F32, "table")
    assert "'table'" in raised.value.__notes__[0]


def test_the_base_is_for_subclasses() -> None:
    """A class that doesn't answer can't be made; one that does needs nothing else."""

    class Halves(Partitioner):
        def __call__(self, shape: Shape, dtype: DType, axis: int = 0) -> list[int]:
            return [2]

    assert partition_for(Halves(), (4, 4), F32, "w").grid == (2, 1)
    with pytest.raises(TypeError, match="abstract"):
        Partitioner()  # type: ignore[abstract]
