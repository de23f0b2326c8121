"""Variables on real servers, whole and in shards: what a NumPy array would do, or a refusal that changes nothing."""

from __future__ import annotations

import functools
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.conftest import NUM_PS, NUM_WORKERS
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    MinSizePartitioner,
    ParameterServerStrategy,
    RemoteValue,
    ShardedVariable,
    Variable,
    embedding_lookup,
    errors,
    optimizers,
    safe_embedding_lookup_sparse,
)

Array = npt.NDArray[Any]
DTYPES = [np.float32, np.int32, np.int64]
ROWS = 7
HEIGHTS = {1: [7], 2: [4, 3], 3: [3, 2, 2]}
"""By number of shards, the rows of each."""


@pytest.fixture(params=[1, 2, 3], ids=lambda cuts: f"{cuts} shards")
def cuts(request: pytest.FixtureRequest) -> int:
    """In how many shards variables are cut."""
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture
def cutting(cluster: LocalCluster, cuts: int) -> Iterator[ParameterServerStrategy]:
    """A strategy that cuts them so."""
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(cuts)) as strategy:
        yield strategy


Tables = list[tuple[Variable, Array]]


@pytest.fixture
def tables(cutting: ParameterServerStrategy) -> Tables:
    """A table of every type, and its NumPy twin."""
    made = []
    with cutting.scope():
        for dtype in DTYPES:
            twin = np.arange(10, 10 + 3 * ROWS, dtype=dtype).reshape(ROWS, 3)
            made.append((Variable(twin, name=f"table of {twin.dtype.name}"), twin.copy()))
    return made


def same(variable: Variable, twin: Array) -> None:
    """Assert that a variable has this value, in type and shape too."""
    value = variable.numpy()
    assert (value.dtype, value.shape) == (twin.dtype, twin.shape)
    np.testing.assert_array_equal(value, twin)


def unchanged(variable: Variable, twin: Array, call: Callable[[], object], error: type[Exception], said: str) -> None:
    """Assert that the call is refused with this error, and nothing has changed on any shard."""
    with pytest.raises(error, match=said):
        call()
    same(variable, twin)


# What it is


def test_attributes(cutting: ParameterServerStrategy, cuts: int, tables: Tables) -> None:
    """A variable knows its name, shape, type, size, and where its shards are (row 25)."""
    for variable, twin in tables:
        name = f"table of {twin.dtype.name}"
        assert (variable.name, variable.shape, variable.dtype, variable.trainable) == (
            name,
            (ROWS, 3),
            twin.dtype,
            True,
        )
        assert (variable.ndim, variable.size, variable.nbytes, len(variable)) == (2, 3 * ROWS, twin.nbytes, ROWS)
        assert variable.num_shards == len(variable.variables) == cuts
        assert isinstance(variable, ShardedVariable) is (cuts > 1)
        at = 0
        for index, (shard, height) in enumerate(zip(variable.variables, HEIGHTS[cuts], strict=True)):
            assert shard.name == (name if cuts == 1 else f"{name}/part_{index}")
            assert (shard.shape, shard.dtype, shard.nbytes) == ((height, 3), twin.dtype, 3 * height * twin.itemsize)
            assert shard.device in [f"/job:ps/task:{i}" for i in range(NUM_PS)]
            for read in (shard.read_value(), shard.numpy(), np.asarray(shard)):
                np.testing.assert_array_equal(read, twin[at : at + height])
            assert shard.name in cutting.placement()
            at += height
        assert variable.device == variable.variables[0].device
        if isinstance(variable, ShardedVariable):
            assert [shard.name for shard in variable] == [shard.name for shard in variable.variables]
            assert {shard.device for shard in variable} == {f"/job:ps/task:{i}" for i in range(NUM_PS)}
        kind = type(variable).__name__
        assert repr(variable).startswith(f"<{kind} {name!r} shape=(7, 3) dtype={twin.dtype.name} on /job:ps")
    assert [v.name for v in cutting.variables] == [v.name for v, _ in tables]


def test_reading(tables: Tables) -> None:
    """All ways to read the whole give a fresh, writable array of its own."""
    for variable, twin in tables:
        reads: list[Callable[[], Any]] = [variable.read_value, variable.numpy, variable.value]
        reads += [functools.partial(variable.__getitem__, index) for index in (slice(None), ...)]
        reads += [functools.partial(convert, variable) for convert in (np.asarray, np.array)]
        for read in reads:
            value = read()
            np.testing.assert_array_equal(value, twin)
            assert value.dtype == twin.dtype
            value[:] = 0
        same(variable, twin)
        assert np.asarray(variable, np.float64).dtype == np.float64
        np.testing.assert_array_equal(variable[2:5], twin[2:5])
        np.testing.assert_array_equal(variable[-1, ::-2], twin[-1, ::-2])
        np.testing.assert_array_equal(variable[twin > 12], twin[twin > 12])


class Capsule:
    """What a consumer of DLPack makes of what it was given."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def as_tensor(data: Any) -> Any:
    """As torch.as_tensor, torch.tensor and torch.from_dlpack of PyTorch 2.13: by DLPack, else number by number."""
    if hasattr(data, "__dlpack__"):
        assert data.__dlpack_device__() == (1, 0)
        return np.from_dlpack(Capsule(data.__dlpack__(max_version=(1, 0))))
    return np.array([as_tensor(data[index]) for index in range(len(data))] if hasattr(data, "__len__") else data)


def test_each_way_to_convert_is_one_read(cutting: ParameterServerStrategy, tables: Tables, cuts: int) -> None:
    """Whatever asks for the value gets it in one request a server, not row by row; a shard's and a slot's, too."""
    counts = cutting.client.metrics

    def requests() -> int:
        return sum(sum(histogram.counts) for histogram in counts.pulls)

    whole: list[Callable[[Any], Any]] = [np.asarray, np.array, np.from_dlpack, as_tensor]
    elements: list[Callable[[Any], Any]] = [lambda v: list(reversed(v))[::-1]]
    for variable, twin in tables:
        for convert in [*whole, *elements, *([list] if cuts == 1 else [])]:
            before = requests()
            converted = convert(variable)
            assert requests() - before == min(cuts, NUM_PS)
            np.testing.assert_array_equal(converted, twin)
        converted = as_tensor(variable)
        converted[:] = 0
        same(variable, twin)
        assert (twin[1, 1] in variable, -5 in variable) == (True, False)
        for convert in whole:
            before = requests()
            np.testing.assert_array_equal(convert(variable.variables[0]), twin[: HEIGHTS[cuts][0]])
            assert requests() - before == 1
    for refused in ({"copy": False}, {"dl_device": (2, 0)}):
        with pytest.raises((BufferError, ValueError)):
            tables[0][0].__dlpack__(**refused)
    with cutting.scope():
        half = Variable(np.ones(3), dtype="bfloat16", name="half")
    with pytest.raises(BufferError, match=r"'half'.* can't be exported .*view\(torch.bfloat16\)"):
        as_tensor(half)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators(cutting: ParameterServerStrategy, dtype: Any) -> None:
    """Operators read the value, and the rest is NumPy's: with numbers, arrays and variables on either side (row 25)."""
    a, b = np.arange(1, 7, dtype=dtype).reshape(3, 2), np.arange(2, 8, dtype=dtype).reshape(3, 2)
    with cutting.scope():
        v, w = Variable(a, name="v"), Variable(b, name="w")
    names = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]
    for name in names:
        function = getattr(operator, name)
        for left, right, expected in [
            (v, b, function(a, b)),
            (v, 2, function(a, 2)),
            (v, w, function(a, b)),
            (a, w, function(a, b)),
            (3, w, function(3, b)),
        ]:
            result = function(left, right)
            np.testing.assert_array_equal(result, expected, err_msg=name)
            assert result.dtype == expected.dtype, name
    np.testing.assert_array_equal(v @ b.T, a @ b.T)
    np.testing.assert_array_equal(a.T @ w, a.T @ b)
    np.testing.assert_array_equal(v @ w[:].T, a @ b.T)
    np.testing.assert_array_equal(-v, -a)
    np.testing.assert_array_equal(abs(v), abs(a))
    np.testing.assert_array_equal(np.exp(np.asarray(v)), np.exp(a))
    assert (v is w, len({v, w})) == (False, 2), "a variable can be in a set, by identity"


def test_scalars(cutting: ParameterServerStrategy) -> None:
    """A scalar is never cut, and converts to Python's numbers."""
    with cutting.scope():
        f, i = Variable(1.5), Variable(np.int64(3))
    assert f.dtype == np.float32
    assert i.dtype == np.int64
    assert (f.shape, f.num_shards, f.size) == ((), 1, 1)
    assert (float(f), int(i), bool(i), float(f + i)) == (1.5, 3, True, 4.5)
    f.assign_add(1).assign_sub(0.25)
    i.assign(-2)
    assert f.numpy() == 2.25
    assert i.numpy() == -2
    with pytest.raises(TypeError, match="is a scalar: it has no length"):
        len(f)
    with pytest.raises(errors.InvalidUpdateError, match="is a scalar: it has no rows"):
        f.sparse_read([0])
    with pytest.raises(errors.InvalidUpdateError, match="is a scalar: it has no rows to update"):
        f.scatter_add(IndexedSlices([1.0], [0]))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (2, 0), (1, 1, 1), (5, 2, 3)])
def test_shapes(cutting: ParameterServerStrategy, shape: tuple[int, ...]) -> None:
    """Any shape will do, an empty one and one shorter than the cuts too."""
    twin = np.ones(shape, np.float32)
    with cutting.scope():
        variable = Variable(twin)
    variable.assign_add(np.ones(shape, np.float32)).assign_add(1)
    same(variable, twin + 2)
    rows = np.arange(shape[0])[::-1]
    np.testing.assert_array_equal(variable.sparse_read(rows), (twin + 2)[rows])
    variable.scatter_sub(IndexedSlices(np.ones(shape, np.float32), rows))
    same(variable, twin + 1)


# Updates


def test_assignments(tables: Tables) -> None:
    """assign, assign_add and assign_sub of arrays, scalars and slices do what NumPy would, and return the variable."""
    for variable, twin in tables:
        delta = np.arange(twin.size, dtype=twin.dtype).reshape(twin.shape)
        assert variable.assign_add(delta) is variable
        twin += delta
        same(variable, twin)
        variable.assign_sub(delta[::-1].copy()[::-1] + 1).assign_add(5)
        twin -= delta + 1
        twin += 5
        same(variable, twin)
        variable.assign(np.asfortranarray(delta))
        same(variable, delta)
        variable.assign(delta.tolist())
        same(variable, delta)
        variable.assign_add(np.array([1, 2, 3]))  # broadcast, as NumPy does
        same(variable, delta + np.array([1, 2, 3], twin.dtype))
        variable.assign(delta).assign(9, at=(slice(1, 6, 2), -1)).assign_add(1, at=0)
        delta[1:6:2, -1] = 9
        delta[0] += 1
        same(variable, delta)
        variable[2:4] = 7
        delta[2:4] = 7
        same(variable, delta)
        variable.assign(3)
        same(variable, np.full_like(twin, 3))


SCATTERS: dict[str, Any] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}


def scatters_of(variable: Variable) -> dict[str, Callable[[Any], object]]:
    """The methods that change rows, as far as its type has them."""
    names = [*SCATTERS, "scatter_update"]
    return {name: getattr(variable, name) for name in names if variable.dtype.kind == "f" or name != "scatter_div"}


IDS: list[Any] = [[3], [6, 0, 3], [5, 1, 5, 5], [2, 2], [], [[0, 6], [6, 1]], list(range(ROWS))]


def test_scatters(tables: Tables) -> None:
    """Rows change as ufunc.at would change them, in any order of the ids and however often they occur (row 27)."""
    for variable, twin in tables:
        for name, scatter in scatters_of(variable).items():
            if name == "scatter_update":
                continue
            for ids in IDS:
                shape = (*np.shape(ids), 3)
                values = np.arange(1, 1 + int(np.prod(shape)), dtype=twin.dtype).reshape(shape) * 3
                expected = twin.copy()
                SCATTERS[name].at(expected, np.asarray(ids, np.int64), values)
                assert scatter(IndexedSlices(values, ids)) is variable
                same(variable, expected)
                variable.assign(twin)


@pytest.mark.parametrize("pieces", [[1, 3], [2, 1], [3, 2]], ids=str)
@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [0, 1, 6], [5], [6, 2, 2]], ids=str)
def test_rows_of_a_table_whose_columns_are_cut(
    cutting: ParameterServerStrategy, pieces: list[int], ids: list[int]
) -> None:
    """Rows that follow each other, and others, land in their columns and leave from there."""
    twin = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    with cutting.scope():
        variable = Variable(twin, name="cut", partitioner=lambda _shape, _dtype: pieces)
    np.testing.assert_array_equal(variable.gather(ids), twin[ids])
    values = np.arange(1, 1 + len(ids) * 4, dtype=np.float32).reshape(-1, 4)
    variable.scatter_sub(IndexedSlices(values, ids))
    np.subtract.at(twin, ids, values)
    same(variable, twin)


def test_scatter_update(tables: Tables) -> None:
    """Rows are replaced; of an id that occurs twice the last row counts."""
    for variable, twin in tables:
        values = np.array([[1, 1, 1], [2, 2, 2], [3, 3, 3]], twin.dtype)
        variable.scatter_update(IndexedSlices(values, [6, 0, 6]))
        twin[0], twin[6] = 2, 3
        same(variable, twin)
        variable.scatter_update(IndexedSlices(8, [1, 4]))
        twin[[1, 4]] = 8
        same(variable, twin)


def test_integers_are_not_divided(cutting: ParameterServerStrategy) -> None:
    """scatter_div of integers is refused, by name, and changes nothing."""
    twin = np.arange(14).reshape(ROWS, 2)
    with cutting.scope():
        variable = Variable(twin, name="counts")
    slices = IndexedSlices(np.full((2, 2), 2), [0, 6])
    unchanged(variable, twin, lambda: variable.scatter_div(slices), errors.InvalidUpdateError, "'counts'.*int64")


# Reading rows


LOOKUPS: list[Any] = [
    [0],
    3,
    [6, 5, 4, 3, 2, 1, 0],
    [5, 0, 6, 0, 5, 5],
    [[1, 6], [6, 2]],
    [],
    np.array([4, 1], np.uint8),
    np.array([[2]], np.int32),
    np.arange(ROWS)[::-2],
    np.arange(ROWS),
    [1, 2, 3, 5],
]


def test_rows_in_the_order_of_the_ids(tables: Tables) -> None:
    """Rows come in the order of the ids, duplicates included, where TensorFlow gets it wrong (row 28)."""
    for variable, twin in tables:
        for ids in LOOKUPS:
            expected = twin[np.asarray(ids, np.int64)]
            gathered = [
                variable.sparse_read(ids),
                variable.sparse_read(ids, name="rows"),
                variable.gather(ids),
                embedding_lookup(variable, ids),
                embedding_lookup([variable, variable], [ids, [0]])[0],
            ]
            for rows in gathered:
                np.testing.assert_array_equal(rows, expected)
                assert (rows.dtype, rows.shape) == (expected.dtype, expected.shape)


WRONG_IDS: list[tuple[Any, str]] = [
    ([0, 7], r"row id 7 \(position 1\) is out of range: the variable has 7 rows, they must lie in 0..6"),
    ([[0, 1], [-1, 2]], r"row id -1 \(position 2\) is out of range"),
    ([2**62], "row id 4611686018427387904"),
    (np.array([2**63 + 1], np.uint64), "row id 9223372036854775809"),
    (
        [1.0],
        r"row ids must be integers, but they are float64, such as 1.0 \(position 0\): convert them first, .*astype",
    ),
    (
        [[3.0], [np.nan]],
        r"row ids must be integers, but they are float64, such as nan \(position 1\): give whole numbers",
    ),
    ([0, 1 << 64], r"row ids must .* object, such as 18446744073709551616 \(position 1\): give .* fit in int64"),
    ([-1.0, 2.0**63], r"row ids must .* float64, such as 9.2.*e\+18 \(position 1\): give .* fit in int64"),
    (["a"], r"row ids must be integers, but they are str, such as 'a' \(position 0\): give whole numbers"),
    ([True], "row ids must be integers, but they are bool"),
    (["1"], "row ids must be integers"),
    (None, "row ids must be integers"),
]


def test_ids_that_are_no_rows(tables: Tables) -> None:
    """They are refused, with the id, its place and the variable; of an update nothing is applied on any shard."""
    for variable, twin in tables:
        for ids, said in WRONG_IDS:
            slices = IndexedSlices(np.ones((*np.shape(ids), 3), twin.dtype), ids)
            calls: list[Callable[[], object]] = [
                functools.partial(variable.sparse_read, ids),
                functools.partial(embedding_lookup, variable, ids),
            ]
            calls += [functools.partial(scatter, slices) for scatter in scatters_of(variable).values()]
            for call in calls:
                unchanged(variable, twin, call, errors.InvalidUpdateError, f"'{variable.name}': {said}")


# What is refused


def wrong_values(dtype: np.dtype[Any]) -> list[Any]:
    """Values that a variable of this type can't take without a loss."""
    wrong: list[Any] = [1j, np.ones((3, 2), complex), True, np.ones((3, 2), bool), "1", None, object(), 2**70]
    wrong.append([["1", "2"]] * 3)
    if dtype.kind == "i":
        wrong += [1.5, 1.0, np.ones((3, 2), np.float32), float("nan")]
        limit = int(np.iinfo(dtype).max)
        wrong += [limit + 1, -limit - 2, np.full((3, 2), limit + 1, np.uint64)]
    if dtype == np.int32:
        wrong += [np.int64(2**31), np.full((3, 2), -(2**31) - 1), [[0, 0], [2**40, 0], [0, 0]]]
    return wrong


def test_values_of_a_wrong_type(cutting: ParameterServerStrategy) -> None:
    """What would lose something is refused with a sentence that names the variable; nothing changes on any shard."""
    for dtype in map(np.dtype, DTYPES):
        twin = np.arange(6, dtype=dtype).reshape(3, 2)
        with cutting.scope():
            variable = Variable(twin, name=dtype.name)
        for value in wrong_values(dtype):
            slices = IndexedSlices(value, [0, 1, 2])
            assigns: list[Callable[..., object]] = [
                variable.assign,
                variable.assign_add,
                variable.assign_sub,
                functools.partial(variable.assign, at=0),
            ]
            calls: list[Callable[[], object]] = [functools.partial(assign, value) for assign in assigns]
            calls += [functools.partial(scatter, slices) for scatter in scatters_of(variable).values()]
            for call in calls:
                unchanged(variable, twin, call, errors.InvalidUpdateError, f"variable '{dtype.name}' is {dtype.name}")


def test_integers_that_fit(cutting: ParameterServerStrategy) -> None:
    """An integer of any type is taken where it fits."""
    with cutting.scope():
        variable = Variable(np.zeros((3, 2), np.int32), name="v")
    values: list[Any] = [7, np.int64(7), np.full((3, 2), 7), np.full((3, 2), 7, np.uint64), [[7, 7]] * 3, np.uint8(7)]
    for value in values:
        variable.assign(0).assign_add(value)
        same(variable, np.full((3, 2), 7, np.int32))


def test_values_of_a_wrong_shape(cutting: ParameterServerStrategy) -> None:
    """What NumPy would not broadcast is refused with both shapes; nothing changes on any shard."""
    twin = np.arange(6, dtype=np.float32).reshape(3, 2)
    with cutting.scope():
        variable = Variable(twin, name="v")
    for shape in [(3,), (2, 3), (3, 2, 1), (1, 3, 2), (4, 2), (0, 2), (0,)]:
        value = np.ones(shape, np.float32)
        said = rf"'v': the value has shape {re.escape(str(shape))}, but must have shape \(3, 2\)"
        for assign in (variable.assign, variable.assign_add, variable.assign_sub):
            unchanged(variable, twin, functools.partial(assign, value), errors.InvalidUpdateError, said)
    slices = IndexedSlices(np.ones((2, 3), np.float32), [0, 1, 2])
    for scatter in scatters_of(variable).values():
        said = r"'v': the values of the rows ha(s|ve) shape \(2, 3\), but must have shape \(3, 2\)"
        unchanged(variable, twin, functools.partial(scatter, slices), errors.InvalidUpdateError, said)


@pytest.mark.parametrize("wrong", [None, np.ones((1, 2)), ([1.0, 2.0], [0]), 3, {"values": 1}], ids=str)
def test_updates_of_rows_that_are_none(cutting: ParameterServerStrategy, wrong: Any) -> None:
    """What is no IndexedSlices raises a TypeError that says what to give."""
    twin = np.zeros((3, 2), np.float32)
    with cutting.scope():
        variable = Variable(twin, name="v")
    for scatter in scatters_of(variable).values():
        said = r"'v'.*IndexedSlices"
        unchanged(variable, twin, functools.partial(scatter, wrong), TypeError, said)


def test_a_variable_cannot_be_rebound_by_accident(strategy: ParameterServerStrategy) -> None:
    """`v += 1` would make an array of it: it is refused, with what to call instead."""
    with strategy.scope():
        variable = Variable(np.zeros(2, np.float32), name="v")
    with pytest.raises(errors.MisuseError, match=r"can't be changed with \+=: use its assign_add"):
        variable += 1
    same(variable, np.zeros(2, np.float32))


# Creation


def test_what_the_type_is(strategy: ParameterServerStrategy) -> None:
    """The type is the array's; Python's floats are float32; it may be given."""
    with strategy.scope():
        assert Variable([1.0, 2.0]).dtype == np.float32
        assert Variable(np.float64(1)).dtype == np.float64
        assert Variable([1, 2]).dtype == np.int64
        assert Variable(np.zeros(2, np.int32)).dtype == np.int32
        assert Variable([True]).dtype == np.bool_
        assert Variable([1, 2], dtype=np.float32).dtype == np.float32
        assert Variable(lambda: np.ones(2, np.int32)).dtype == np.int32
        assert Variable(lambda shape, dtype: np.ones(shape, dtype), shape=(2,)).dtype == np.float32


def test_the_initial_value_is_copied(strategy: ParameterServerStrategy) -> None:
    """The array that was given is not the variable, and may be of any layout."""
    array = np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    with strategy.scope():
        variable = Variable(array)
        view = Variable(array[::-1, ::2])
        filled = Variable(5, shape=(2, 2), dtype=np.float32)
    array[:] = 0
    same(variable, np.arange(6.0, dtype=np.float32).reshape(2, 3))
    same(view, np.arange(6.0, dtype=np.float32).reshape(2, 3)[::-1, ::2])
    same(filled, np.full((2, 2), 5, np.float32))


def by_shape(shape: tuple[int, ...], dtype: Any) -> Array:
    """An initial value of the whole."""
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def by_part(shape: tuple[int, ...], dtype: Any, partition_shape: Any = None, partition_offset: Any = None) -> Array:
    """An initial value of a part, which says where it was called."""
    whole: Array = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    slices = tuple(slice(a, a + n) for a, n in zip(partition_offset, partition_shape, strict=True))
    return whole[slices]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [by_shape, by_part])
def test_initial_value_functions(cutting: ParameterServerStrategy, make: Any, dtype: Any) -> None:
    """A function of (shape, dtype), which may take partition_shape and partition_offset, makes it as well (row 24)."""
    with cutting.scope():
        variable = Variable(make, shape=(ROWS, 2), dtype=dtype)
        closure = Variable(
            lambda shape, dtype: make(shape, dtype) if make is by_shape else np.zeros(shape, dtype), shape=[3]
        )
    same(variable, np.arange(2 * ROWS, dtype=dtype).reshape(ROWS, 2))
    assert closure.shape == (3,)


def test_a_part_is_made_for_every_shard(cutting: ParameterServerStrategy, cuts: int) -> None:
    """A function that takes parts is called for each shard, with its shape and offset."""

    def where(shape: Any, dtype: Any, partition_shape: Any, partition_offset: Any) -> Array:
        assert shape == (ROWS, 2)
        return np.full(partition_shape, 100 * partition_shape[0] + partition_offset[0], dtype)

    with cutting.scope():
        variable = Variable(where, shape=(ROWS, 2), dtype=np.int64)
    starts = np.cumsum([0, *HEIGHTS[cuts][:-1]])
    expected = [
        100 * height + start for height, start in zip(HEIGHTS[cuts], starts, strict=True) for _ in range(height)
    ]
    assert variable.numpy()[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda shape, dtype: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda shape, dtype: np.zeros((2, 2)), "'bad'"),
        (lambda shape, dtype: sys.exit(3), "SystemExit"),
        (lambda shape, dtype: np.full(shape, "a"), "'bad'"),
        (lambda shape: 0, "'bad'"),
    ],
    ids=["raises", "wrong shape", "exits", "wrong type", "takes one argument"],
)
def test_initial_value_functions_that_fail(cutting: ParameterServerStrategy, make: Any, said: str) -> None:
    """The error names the variable; there is none then, on any server, and its name is free."""
    with cutting.scope():
        with pytest.raises(errors.MisuseError, match=said):
            Variable(make, shape=(ROWS, 3), name="bad")
        assert cutting.variables == []
        same(Variable(np.zeros(2, np.float32), name="bad"), np.zeros(2, np.float32))


@pytest.mark.parametrize(
    "initial", [None, "text", object(), [object()], np.array(["a"]), np.array(["2026-01-01"], "M8[D]")]
)
def test_initial_values_that_are_none(strategy: ParameterServerStrategy, initial: Any) -> None:
    """What is no array of numbers is refused, with the variable's name; nothing has been created."""
    with strategy.scope():
        with pytest.raises(errors.MisuseError, match="variable 'v'"):
            Variable(initial, name="v")
        with pytest.raises(errors.MisuseError, match=r"'v': the initial value has shape \(3,\), not \(2,\)"):
            Variable(np.zeros(3), name="v", shape=(2,))
        assert strategy.variables == []
        assert Variable(0, name="v").numpy() == 0


def test_names(strategy: ParameterServerStrategy) -> None:
    """Names are unique in a strategy; those not given are made up; a failed creation does not use one up."""
    with strategy.scope():
        first = Variable(0, name="w")
        made_up = [Variable(0).name for _ in range(3)]
        with pytest.raises(errors.MisuseError, match="there is already a variable 'w': names are unique in a strategy"):
            Variable(1, name="w")
        with pytest.raises(errors.MisuseError, match=r"already a variable 'w': .*; give another one or none, or use"):
            optimizers.SGD(0.1, name="w")
        for _ in range(2):  # its name is free again
            strategy.delete_variable(Variable(0, name="deleted"))
        optimizers.SGD(0.1, name="taken")
        with pytest.raises(errors.MisuseError, match=r"there is already an optimizer 'taken': .* variables and optim"):
            Variable(1, name="taken")
        for wrong in ("", 5, "x" * 1001):
            with pytest.raises(errors.MisuseError, match="name must be a string of 1 to 1000 characters"):
                Variable(1, name=wrong)  # type: ignore[arg-type]
        odd = Variable(3, name="größe/0 \"'\n")
    assert len({"w", *made_up}) == 4
    assert [variable.name for variable in strategy.variables] == ["w", *made_up, odd.name]
    assert first.numpy() == 0
    assert odd.numpy() == 3


def test_the_list_of_variables(cutting: ParameterServerStrategy) -> None:
    """It has the very handles that the user has, and `in` asks which of them one is. What is the library's own is not
    in it, nor in the table, and no user's name begins so.
    """
    with cutting.scope():
        first, v, other = (Variable(np.zeros((4, 2), np.float32), name=name) for name in ("first", "v", "other"))
    cutting.save_progress(step=1)
    listed = cutting.variables
    assert listed[1] is v
    assert [variable.name for variable in listed] == ["first", "v", "other"]
    assert v in listed
    assert 0 not in listed
    assert (listed.index(v), listed.count(v)) == (1, 1)
    for shard in v.variables:
        assert shard in v.variables
        assert shard not in other.variables
    listed.remove(v)
    assert v not in listed
    with pytest.raises(ValueError, match=r"<.*Variable 'v' .* is not in the list"):
        listed.index(v)
    with pytest.raises(ValueError, match="is not in the list"):
        listed.index(other, 0, 1)
    assert v in cutting.variables
    assert first is cutting.variables[0]
    assert "pscluster/" not in cutting.placement()
    with cutting.scope(), pytest.raises(errors.MisuseError, match="begin with 'pscluster/' are pscluster's own"):
        Variable(0, name="pscluster/progress")


def test_names_made_up_step_aside(strategy: ParameterServerStrategy) -> None:
    """A name that is made up is none that the user has given."""
    with strategy.scope():
        probe = Variable(0).name
        taken = Variable(0, name=f"{probe}_1")
        names = [Variable(0).name for _ in range(3)]
    assert len({probe, taken.name, *names}) == 5


def test_outside_of_a_scope(strategy: ParameterServerStrategy) -> None:
    """Outside of strategy.scope() nothing can be made, in another thread neither; a sentence says where to make it."""
    with pytest.raises(
        errors.MisuseError, match="Variable 'w' was created outside a strategy's scope: create it inside `with"
    ):
        Variable(0, name="w")
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            Variable(0)
        except errors.MisuseError as error:
            raised.append(error)

    with strategy.scope():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(TIMEOUT)
    assert len(raised) == 1
    with pytest.raises(errors.MisuseError, match="a Variable was created outside a strategy's scope"):
        Variable(0)


def test_a_scope_of_its_own(strategy: ParameterServerStrategy) -> None:
    """A partitioner given with a variable goes before the strategy's; scopes may be entered again and nested."""
    with strategy.scope() as scope:
        assert scope is strategy
        whole = Variable(np.zeros((8, 2), np.float32))
        with strategy.scope():
            cut = Variable(np.zeros((8, 2), np.float32), partitioner=FixedShardsPartitioner(2), trainable=False)
        small = Variable(np.zeros(2, np.float32), partitioner=MinSizePartitioner(1 << 10, max_shards=2))
    assert [variable.num_shards for variable in (whole, cut, small)] == [1, 2, 1]
    assert not cut.trainable


@pytest.mark.parametrize("answer", [[], [0], [-1], "2", None, [1.5], [2, 2, 2], 2])
def test_partitioners_that_answer_nonsense(strategy: ParameterServerStrategy, answer: Any) -> None:
    """They are refused with a ValueError that names the variable; nothing has been created (row 22)."""
    with strategy.scope():
        with pytest.raises(ValueError, match=r"variable 'v' of shape \(4, 2\): variable_partitioner returned"):
            Variable(np.zeros((4, 2)), name="v", partitioner=lambda shape, dtype: answer)
        assert strategy.variables == []


# Together


def test_read_of_a_structure(cutting: ParameterServerStrategy) -> None:
    """strategy.read gives the values of any nesting of variables in the same nesting, each once read."""
    with cutting.scope():
        v, w = Variable(np.arange(6, dtype=np.float32), name="v"), Variable(np.int64(4), name="w")
    read = cutting.read({"a": [v, (w, 3)], "b": v})
    np.testing.assert_array_equal(read["a"][0], np.arange(6))
    assert (read["a"][1], read["b"] is read["a"][0]) == ((4, 3), True)
    assert cutting.read([]) == []
    assert cutting.read(None) is None


def test_variables_of_two_strategies(cluster: LocalCluster) -> None:
    """Variables of different strategies can't be read in one request: a sentence says so."""
    with ParameterServerStrategy(cluster) as strategy, strategy.scope():
        old = Variable(0, name="old")
    with ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            new = Variable(1, name="new")
        with pytest.raises(errors.MisuseError, match="'new' and 'old' belong to different strategies"):
            strategy.read([new, old])


def test_in_a_step_as_outside(cutting: ParameterServerStrategy) -> None:
    """Inside a function a variable is what it is outside, captured or as an argument, updates and refusals included."""
    twin = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    with cutting.scope():
        variable = Variable(twin, name="v")
    coordinator = ClusterCoordinator(cutting)

    def step(argument: Any) -> Any:
        assert argument is variable
        variable.assign_add(np.ones((7, 2), np.float32)).scatter_add(IndexedSlices(np.ones((2, 2), np.float32), [6, 6]))
        try:
            variable.assign(np.zeros((2, 2), np.float32))
        except ValueError as error:
            refused = str(error)
        (value,) = cutting.read([variable])
        return value, variable.gather([6, 0]), variable.shape, [shard.device for shard in variable.variables], refused

    value, rows, shape, devices, refused = coordinator.schedule(step, args=(variable,)).fetch(TIMEOUT)
    twin += 1
    twin[6] += 2
    np.testing.assert_array_equal(value, twin)
    np.testing.assert_array_equal(rows, twin[[6, 0]])
    assert (shape, devices) == (variable.shape, [shard.device for shard in variable.variables])
    assert "must have shape (7, 2)" in refused
    same(variable, twin)


def test_concurrent_updates_add_up(cutting: ParameterServerStrategy) -> None:
    """Updates of all workers and of threads here add up exactly, dense and by rows."""
    with cutting.scope():
        variable = Variable(np.zeros((ROWS, 2), np.int64), name="v")
    coordinator = ClusterCoordinator(cutting)

    def step(i: int) -> None:
        variable.assign_add(np.ones((7, 2), np.int64))
        variable.scatter_add(IndexedSlices(np.ones((2, 2), np.int64), [i % 7, 0]))

    def here() -> None:
        for _ in range(50):
            variable.assign_add(1)

    threads = [threading.Thread(target=here) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(140):
        coordinator.schedule(step, args=(i,))
    for thread in threads:
        thread.join(TIMEOUT)
    coordinator.join(TIMEOUT)
    expected = np.full((ROWS, 2), 140 + 150 + 20)
    expected[0] += 140
    same(variable, expected)


MIB = 1 << 20


@pytest.mark.parametrize("cuts", [1, 2], indirect=True)
def test_a_big_read_never_sees_half_an_update(cutting: ParameterServerStrategy) -> None:
    """20 MiB are read, here and on the workers, while they are updated in every way: each shard is as at one moment."""
    rows = 5 * MIB // 64
    with cutting.scope():
        variable = Variable(np.zeros((rows, 64), np.float32), name="v")
        stop = Variable(0, name="stop")
    assert variable.nbytes == 20 * MIB
    coordinator = ClusterCoordinator(cutting)

    def writes() -> None:
        dense, every = np.ones((rows, 64), np.float32), np.arange(rows)[::-1].copy()
        for i in range(3):
            variable.assign_add(dense)
            variable.scatter_add(IndexedSlices(dense, every))
            variable.assign(10 * i)
            variable.assign_sub(1)

    def heights() -> list[int]:
        return [shard.shape[0] for shard in variable.variables]

    def reads(until_stopped: bool = True) -> int:
        count = 0
        while count == 0 or (until_stopped and not stop.read_value()):
            value, at = variable.read_value(), 0
            for height in heights():
                shard = value[at : at + height]
                assert np.all(shard == shard[0, 0]), "half of an update"
                at += height
            count += 1
        return count

    counts: list[RemoteValue] = [coordinator.schedule(reads) for _ in range(NUM_WORKERS - 1)]
    writer = coordinator.schedule(writes)
    here = 0
    while writer.status.value == "not ready":
        here += reads(until_stopped=False)
    stop.assign(1)
    writer.fetch(TIMEOUT)
    assert here >= 1
    assert all(count >= 1 for count in coordinator.fetch(counts, TIMEOUT))
    same(variable, np.full((rows, 64), 19, np.float32))


def test_safe_lookups(strategy: ParameterServerStrategy) -> None:
    """Empty bags, negative ids and weights that do not count, as in TensorFlow."""
    rows = np.arange(1, 21, dtype=np.float32).reshape(10, 2)
    with strategy.scope():
        table = Variable(rows, name="table")
    lookup = functools.partial(safe_embedding_lookup_sparse, table)
    bags = [[0, 1, -1], [], [2, -4], [3], [-1, -1], [5]]
    mean = [rows[:2].mean(0), [0, 0], rows[2], rows[3], [0, 0], rows[5]]
    np.testing.assert_array_equal(lookup(bags), mean)
    default = [mean[0], rows[7], rows[2], rows[3], rows[7], rows[5]]
    np.testing.assert_array_equal(lookup(bags, default_id=7), default)
    weights = [[1.0, 2.0, 1.0], [], [1.0, 1.0], [0.0], [3.0, 3.0], [-2.0]]
    weighted = rows[0] + 2 * rows[1]
    expected = [weighted / 3, rows[7], rows[2], rows[7], rows[7], rows[7]]
    np.testing.assert_allclose(lookup(bags, weights, default_id=7), expected, rtol=1e-6)
    sums = [weighted, [0, 0], rows[2], [0, 0], [0, 0], -2 * rows[5]]
    np.testing.assert_allclose(lookup(bags, weights, "sum"), sums, rtol=1e-6)
    np.testing.assert_allclose(lookup(bags[:1], weights[:1], "sqrtn"), [weighted / np.sqrt(5)], rtol=1e-6)
    assert (lookup(np.array([[0, 1, -1], [2, -1, -1]]), combiner="sum")[1] == rows[2]).all()
    for bag, more, words in (
        ([[10]], {}, "10"),
        ([[]], {"default_id": -1}, "-1"),
        ([[1]], {"sparse_weights": [[1, 2]]}, "same lengths"),
        ([[1]], {"combiner": "max"}, "combiner"),
        ([[0.5]], {}, "integers"),
    ):
        with pytest.raises(errors.InvalidUpdateError, match=words):
            lookup(bag, **more)
