"""What TensorFlow promises of its ShardedVariable and of variables made under a partitioner, held to here.

The cases are those of its tests for both. Where one of its answers is wrong or missing (rows in the wrong
order, axis 0 only), the test says what is right.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    LocalCluster,
    MinSizePartitioner,
    ModuloPartitioner,
    ParameterServerStrategy,
    ShardedVariable,
    Variable,
    embedding_bag,
    embedding_lookup,
    embedding_lookup_sparse,
    errors,
    metrics,
    optimizers,
)
from pscluster.core.geometry.row_orders import RANGE

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    """Three servers, to be placed on in turn, as TensorFlow does."""
    with LocalCluster(3, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def two_servers() -> Iterator[LocalCluster]:
    """Two servers, for strategies of several partitioners in turn."""
    with LocalCluster(2, 1, log_level="ERROR") as cluster:
        yield cluster


def make(strategy: ParameterServerStrategy, value: npt.ArrayLike, shards: int, **more: Any) -> Variable:
    """A variable of that value, cut into that many shards along axis 0."""
    with strategy.scope():
        return Variable(value, partitioner=FixedShardsPartitioner(shards), **more)


def assert_shards(variable: Variable, *expected: npt.ArrayLike) -> None:
    """The variable has these shards."""
    assert [shard.numpy().tolist() for shard in variable.variables] == [np.asarray(e).tolist() for e in expected]


class TestContainer:
    """What a sharded variable is."""

    def test_simple(self, strategy: ParameterServerStrategy) -> None:
        """The parts, and the whole's shape, dtype and name."""
        v = make(strategy, [0, 1], 2, name="s")
        assert isinstance(v, ShardedVariable)
        assert v.num_shards == len(v.variables) == 2
        assert (v.shape, v.ndim, v.size, len(v), v.nbytes) == ((2,), 1, 2, 2, 16)
        assert v.dtype == v.variables[0].dtype == np.int64
        assert v.name == "s"
        assert [shard.name for shard in v.variables] == ["s/part_0", "s/part_1"]
        assert [shard.shape for shard in v.variables] == [(1,), (1,)]
        assert [shard.device for shard in v.variables] == ["/job:ps/task:0", "/job:ps/task:1"]
        assert v.device == "/job:ps/task:0"
        assert "'s' shape=(2,) dtype=int64 on /job:ps/task:0, /job:ps/task:1" in repr(v)

    def test_iteration_is_over_shards(self, strategy: ParameterServerStrategy) -> None:
        """`for part in v` gives the shards in order."""
        v = make(strategy, np.arange(7), 3)
        assert [shard.index for shard in v] == [0, 1, 2]
        assert np.concatenate([shard.numpy() for shard in v]).tolist() == list(range(7))

    def test_shards_know_their_container(self, strategy: ParameterServerStrategy) -> None:
        """A shard leads back to the variable it is of, and says which part it is."""
        v = make(strategy, np.zeros((5, 2)), 3)
        assert all(shard.variable is v for shard in v.variables)
        assert [(shard.block.start, shard.block.stop) for shard in v.variables] == [
            ((0, 0), (2, 2)),
            ((2, 0), (4, 2)),
            ((4, 0), (5, 2)),
        ]
        assert sum(shard.nbytes for shard in v.variables) == v.nbytes == 80

    def test_shards_are_operands(self, strategy: ParameterServerStrategy) -> None:
        """A shard counts as its values in arithmetic, comparison and NumPy."""
        first, second = make(strategy, [1.0, 2.0, 3.0, 4.0], 2).variables
        assert (first + second).tolist() == [4.0, 6.0]
        assert (first == [1.0, 5.0]).tolist() == [True, False]
        assert np.asarray(second).tolist() == second.read_value().tolist() == [3.0, 4.0]

    def test_variables_are_hashable_and_distinct(self, strategy: ParameterServerStrategy) -> None:
        """Variables are keys of dictionaries and elements of sets by what they are, not by their values."""
        a, b = make(strategy, [1.0], 1), make(strategy, [1.0], 1)
        assert len({a, b, a}) == 2
        assert {a: 1, b: 2}[b] == 2

    def test_a_scalar_has_no_length(self, strategy: ParameterServerStrategy) -> None:
        """`len` of a scalar is a TypeError, as NumPy's."""
        v = make(strategy, 3.0, 2, name="no_length")
        assert not isinstance(v, ShardedVariable)
        with pytest.raises(TypeError, match="'no_length' is a scalar"):
            len(v)

    @pytest.mark.parametrize("shards", [1, 3])
    def test_numpy(self, strategy: ParameterServerStrategy, shards: int) -> None:
        """All ways to the value return a new array with the shards concatenated."""
        v = make(strategy, [[0, 0], [1, 1], [2, 2], [3, 3]], shards)
        expected = [[0, 0], [1, 1], [2, 2], [3, 3]]
        for value in (v.numpy(), v.read_value(), v.value(), np.asarray(v), np.array(v), v[...]):
            assert isinstance(value, np.ndarray)
            assert value.tolist() == expected
            value[:] = 9
        assert np.asarray(v, np.float32).dtype == np.float32
        assert v.numpy().tolist() == expected
        with pytest.raises(ValueError, match="always makes a copy"):
            np.array(v, copy=False)

    def test_as_function_input(self, strategy: ParameterServerStrategy) -> None:
        """A sharded variable is an argument of a scheduled function, which changes the one it was given."""
        one, two = make(strategy, [1, 1], 2), make(strategy, [2, 2], 2)
        coordinator = ClusterCoordinator(strategy)

        def reset(v: Variable) -> list[int]:
            before = v.numpy().tolist()
            v.assign([0, 0])
            return [int(n) for n in before]

        results = [coordinator.schedule(reset, args=(v,)) for v in (one, two)]
        assert coordinator.fetch(results) == [[1, 1], [2, 2]]
        assert one.numpy().tolist() == two.numpy().tolist() == [0, 0]

    def test_read_takes_any_nesting(self, strategy: ParameterServerStrategy) -> None:
        """`strategy.read` gives values in the places of variables and leaves the rest alone."""
        a, b = make(strategy, [1, 2, 3], 3), make(strategy, 4, 1)
        read = strategy.read({"a": a, "rest": [b, (a, "text", None)]})
        assert read["a"].tolist() == [1, 2, 3]
        assert read["rest"][0] == 4
        assert read["rest"][1][0].tolist() == [1, 2, 3]
        assert read["rest"][1][1:] == ("text", None)


class TestAssign:
    """Updates of the whole value go to the shards' parts."""

    def test_assign(self, strategy: ParameterServerStrategy) -> None:
        """Every shard gets its slice, and the container is returned."""
        v = make(strategy, [[0, 0], [1, 1], [2, 2], [3, 3]], 3)
        assert v.assign([[4, 4], [5, 5], [6, 6], [7, 7]]) is v
        assert_shards(v, [[4, 4], [5, 5]], [[6, 6]], [[7, 7]])

    def test_assign_add(self, strategy: ParameterServerStrategy) -> None:
        """Every shard adds its slice."""
        v = make(strategy, [[0, 0], [1, 1], [2, 2], [3, 3]], 3)
        assert v.assign_add([[1, 1], [1, 1], [2, 2], [2, 2]]) is v
        assert_shards(v, [[1, 1], [2, 2]], [[4, 4]], [[5, 5]])

    def test_assign_sub(self, strategy: ParameterServerStrategy) -> None:
        """Every shard subtracts its slice."""
        v = make(strategy, [[0, 0], [1, 1], [2, 2], [3, 3]], 3)
        assert v.assign_sub([[0, 0], [1, 1], [1, 1], [3, 3]]) is v
        assert_shards(v, [[0, 0], [0, 0]], [[1, 1]], [[0, 0]])

    def test_assign_a_slice(self, strategy: ParameterServerStrategy) -> None:
        """What TensorFlow does not support: assignment to a part, through `at` or as NumPy writes it."""
        v = make(strategy, np.zeros((5, 2), np.int64), 3)
        v[1:4, 1] = [1, 2, 3]
        v.assign_add(10, at=(slice(None, None, -2), 0))
        assert v.numpy().tolist() == [[10, 0], [0, 1], [10, 2], [0, 3], [10, 0]]


def set_at(array: Array, ids: Any, values: Array) -> None:
    """Of equal ids the last counts."""
    array[ids] = values


SPARSE_OPS: dict[str, Callable[[Array, Any, Array], None]] = {
    "scatter_update": set_at,
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
}


class TestScatter:
    """Updates of rows by id."""

    @pytest.mark.parametrize("op", SPARSE_OPS)
    @pytest.mark.parametrize("rows", [30, 32])
    @pytest.mark.parametrize("where", ["here", "worker"])
    def test_scatter(self, strategy: ParameterServerStrategy, op: str, rows: int, where: str) -> None:
        """Each of the family, on an even and an uneven cut, here and in a scheduled function, against NumPy."""
        start = np.linspace(-4, 4, rows, dtype=np.float32).reshape(rows, 1)
        v, expected = make(strategy, start, 3), start.copy()
        delta = IndexedSlices(values=np.array([[1], [2], [3], [4], [5]], np.float32), indices=[0, 10, 11, 21, rows - 1])
        SPARSE_OPS[op](expected, np.asarray(delta.indices), np.asarray(delta.values))
        if where == "here":
            assert getattr(v, op)(delta, name="scatter") is v
        else:
            coordinator = ClusterCoordinator(strategy)

            def step(v: Variable, values: Array, indices: list[int]) -> None:
                getattr(v, op)(IndexedSlices(values, indices))

            coordinator.schedule(step, args=(v, np.asarray(delta.values), list(delta.indices)))  # type: ignore[arg-type]
            coordinator.join()
        np.testing.assert_array_equal(v.numpy(), expected)

    @pytest.mark.parametrize("op", SPARSE_OPS)
    def test_duplicates(self, strategy: ParameterServerStrategy, op: str) -> None:
        """Of an id given several times all values count; in an update, the last."""
        start = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
        v, expected = make(strategy, start, 4), start.copy()
        ids, values = [5, 0, 5, 3, 5], np.array([[1, 2], [3, 4], [4, 2], [1, 1], [2, 8]], np.float32)
        SPARSE_OPS[op](expected, ids, values)
        getattr(v, op)(IndexedSlices(values, ids))
        np.testing.assert_array_equal(v.numpy(), expected)

    def test_batch_scatter_update(self, strategy: ParameterServerStrategy) -> None:
        """With indices of one axis it is scatter_update; with more, their other axes are the variable's."""
        v = make(strategy, np.zeros((4, 5), np.int64), 3)
        assert v.batch_scatter_update(IndexedSlices([[1] * 5, [2] * 5], [3, 0])) is v
        v.batch_scatter_update(IndexedSlices([[7, 8], [9, 10], [11, 12], [13, 14]], [[0, 4], [1, 1], [2, 0], [4, 3]]))
        assert v.numpy().tolist() == [[7, 2, 2, 2, 8], [0, 10, 0, 0, 0], [12, 0, 11, 0, 0], [1, 1, 1, 14, 13]]

    def test_bad_scatters_change_nothing(self, strategy: ParameterServerStrategy) -> None:
        """Ids of a wrong kind or range, and values of a wrong shape, are refused with the name and the value."""
        v = make(strategy, np.zeros((6, 2), np.float32), 3, name="scattered")
        rows = np.ones((2, 2), np.float32)
        with pytest.raises(ValueError, match=r"'scattered'.*row id 6 .*out of range"):
            v.scatter_add(IndexedSlices(rows, [0, 6]))
        with pytest.raises(ValueError, match=r"'scattered'.*row id -1 .*out of range"):
            v.scatter_add(IndexedSlices(rows, [-1, 0]))
        with pytest.raises(ValueError, match=r"'scattered'.*ids must be integers, but they are float64"):
            v.scatter_add(IndexedSlices(rows, [0.0, 1.0]))
        with pytest.raises(ValueError, match=r"'scattered'.*shape \(2, 2\), but must have shape \(3, 2\)"):
            v.scatter_add(IndexedSlices(rows, [0, 1, 2]))
        with pytest.raises(ValueError, match=r"'scattered' has shape \(6, 2\), the indices \(2, 1\)"):
            v.batch_scatter_update(IndexedSlices(rows[:, :1], [[0], [1]]))
        with pytest.raises(TypeError, match=r"'scattered'.*IndexedSlices"):
            v.scatter_add(rows)  # type: ignore[arg-type]
        assert not v.numpy().any()


class TestSparseRead:
    """Rows by id."""

    @pytest.mark.parametrize("shards", [1, 2, 3])
    def test_order_is_that_of_the_ids(self, strategy: ParameterServerStrategy, shards: int) -> None:
        """TensorFlow gives ids [11, 0, 5, 1] as rows 0, 1, 5, 11; here they come as asked, duplicates included."""
        table = np.arange(24, dtype=np.float32).reshape(12, 2)
        v = make(strategy, table, shards)
        for ids in ([11, 0, 5, 1], [3, 3, 3], [], list(range(11, -1, -1))):
            expected = table[np.asarray(ids, np.int64)]
            np.testing.assert_array_equal(v.sparse_read(ids), expected)
            np.testing.assert_array_equal(v.gather(ids), expected)
        np.testing.assert_array_equal(v.gather([[1, 11], [7, 1]]), table[[[1, 11], [7, 1]]])

    @pytest.mark.parametrize("bad", [-1, 12, 2**40])
    def test_ids_out_of_range(self, strategy: ParameterServerStrategy, bad: int) -> None:
        """A negative or too large id is named; nothing wraps around."""
        v = make(strategy, np.zeros((12, 2), np.float32), 3, name=f"ranged{bad}")
        with pytest.raises(ValueError, match=rf"'ranged{bad}': row id {bad} \(position 1\) is out of range.* 12 rows"):
            v.sparse_read([0, bad, 1])


class TestEmbeddingLookup:
    """Lookups go to the shards; nothing but the rows asked for travels."""

    def test_lookup(self, strategy: ParameterServerStrategy) -> None:
        """Plain, in bags with combiners, and with weights, on five rows in three shards."""
        v = make(strategy, np.arange(1, 11, dtype=np.float32).reshape(5, 2), 3)
        assert embedding_lookup(v, [0, 3, 4]).tolist() == [[1, 2], [7, 8], [9, 10]]
        assert embedding_lookup(v, [[4], [0]]).tolist() == [[[9, 10]], [[1, 2]]]
        assert embedding_lookup_sparse is embedding_bag
        bags = [[0, 3], [4], [1]]
        assert embedding_bag(v, bags).tolist() == [[4, 5], [9, 10], [3, 4]]  # TensorFlow's default: mean
        assert embedding_bag(v, bags, combiner="sum").tolist() == [[8, 10], [9, 10], [3, 4]]
        by_root = np.array([[8 / 2**0.5, 10 / 2**0.5], [9, 10], [3, 4]])
        np.testing.assert_allclose(embedding_bag(v, bags, combiner="sqrtn"), by_root, rtol=1e-6)
        weights = [[1.0, 3.0], [2.0], [0.5]]
        assert embedding_bag(v, bags, weights, "mean").tolist() == [[5.5, 6.5], [9, 10], [3, 4]]
        assert embedding_bag(v, bags, weights, "sum").tolist() == [[22, 26], [18, 20], [1.5, 2]]

    def test_ragged_and_empty_bags(self, strategy: ParameterServerStrategy) -> None:
        """Bags may have any length; an empty one gives zeros, as in TensorFlow's safe lookup."""
        v = make(strategy, np.arange(1, 11, dtype=np.float32).reshape(5, 2), 3)
        means = np.array([[0, 0], [19 / 3, 22 / 3], [0, 0]])
        np.testing.assert_allclose(embedding_bag(v, [[], [2, 2, 4], []]), means, rtol=1e-6)
        assert embedding_bag(v, [[], []], combiner="sum").tolist() == [[0, 0], [0, 0]]
        assert embedding_bag(v, []).shape == (0, 2)
        assert embedding_bag(v, np.array([[0, 1], [3, 4]])).tolist() == [[2, 3], [8, 9]]

    def test_only_the_rows_travel(self, strategy: ParameterServerStrategy) -> None:
        """A lookup moves each distinct row once, and its id; TensorFlow's dense reads are none."""
        v = make(strategy, np.zeros((3000, 4), np.float32), 3)
        before = strategy.traffic()
        embedding_lookup(v, [5, 2999, 5, 5, 1500])
        moved = strategy.traffic() - before
        assert (moved.pulled, moved.pushed) == (3 * 16, 3 * 8)

    def test_several_tables(self, strategy: ParameterServerStrategy) -> None:
        """A list of tables with a list of ids each gives a list of rows."""
        a = make(strategy, np.arange(6, dtype=np.float32).reshape(3, 2), 3)
        b = make(strategy, np.arange(4, dtype=np.float64), 2, dtype=np.float64)
        rows_a, rows_b = embedding_lookup([a, b], [[2, 0], [3, 1, 3]])
        assert rows_a.tolist() == [[4, 5], [0, 1]]
        assert (rows_b.dtype, rows_b.tolist()) == (np.float64, [3, 1, 3])

    def test_bad_lookups(self, strategy: ParameterServerStrategy) -> None:
        """A wrong id, combiner, weight or number of tables: a sentence each."""
        v = make(strategy, np.zeros((5, 2), np.float32), 3, name="looked_up")
        with pytest.raises(ValueError, match=r"'looked_up'.*row id 5 "):
            embedding_lookup(v, [0, 5])
        with pytest.raises(ValueError, match=r"'looked_up'.*row id -1 "):
            embedding_bag(v, [[0], [-1]])
        with pytest.raises(ValueError, match="combiner is 'max'"):
            embedding_bag(v, [[0]], combiner="max")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="weights must have the same lengths"):
            embedding_bag(v, [[0], [1]], [[1.0], [1.0, 2.0]])
        with pytest.raises(ValueError, match="1 tables, but 2 arrays of ids"):
            embedding_lookup([v], [[0], [1]])


S = np.s_
POSITIVE = [S[:], S[:2], S[-8:2], S[-10:2], S[5:], S[5:-1], S[::3], S[::5], S[1::6], S[1:5:6], S[1::7], S[2:7]]
POSITIVE += [S[2:7:2], S[2:7:3]]
NEGATIVE = [S[::-1], S[2::-1], S[2:-8:-1], S[2:-10:-1], S[4::-1], S[-1:-3:-1], S[::-5], S[6::-6], S[6:5:-6]]
NEGATIVE += [S[6::-7], S[7:1:-1], S[7:1:-2], S[7:1:-4]]
EMPTY = [S[0:0], S[5:3], S[3:5:-1], S[-1:0], S[2:-1:-1]]
OTHERS = [S[:, 0], S[:, 0:1], S[2], S[6], S[2, 1], S[-2], S[...], S[..., 0], S[0:1, ...], S[np.newaxis, ...]]
OTHERS += [S[:, np.newaxis, ::-1], S[3:, ..., np.newaxis], S[np.int64(3)], S[-1, -1]]


WHOLE = np.arange(1, 17).reshape(8, 2)


@pytest.fixture(scope="module", params=["cut", "joined", "joined and cut"])
def sharded(strategy: ParameterServerStrategy, request: pytest.FixtureRequest) -> Variable:
    """Eight rows as 3, 3, 2; or several variables that were joined, of 1, 0, 5 and 2, perhaps cut themselves."""
    if request.param == "cut":
        return make(strategy, WHOLE, 3)
    whole = FixedShardsPartitioner(1)
    cut = request.param == "joined and cut"
    partitioners = [whole, whole, HashPartitioner(3, seed=1) if cut else whole, ModuloPartitioner(2) if cut else whole]
    with strategy.scope():
        return ShardedVariable(
            [
                Variable(rows, partitioner=partitioner)
                for rows, partitioner in zip(np.split(WHOLE, [1, 1, 6]), partitioners, strict=True)
            ]
        )


class TestSlicing:
    """NumPy's indexing, each shard giving what it has."""

    @pytest.mark.parametrize("index", POSITIVE + NEGATIVE + EMPTY + OTHERS, ids=repr)
    def test_slicing(self, sharded: Variable, index: Any) -> None:
        """As NumPy, and of NumPy's shape and type."""
        got, expected = sharded[index], WHOLE[index]
        assert type(got) is type(expected)
        assert np.shape(got) == np.shape(expected)
        np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize("index", [100, -100, (0, 2), (0, 0, 0)], ids=repr)
    def test_out_of_range(self, sharded: Variable, index: Any) -> None:
        """IndexError, as NumPy."""
        with pytest.raises(IndexError, match=r"out of bounds|too many indices"):
            sharded[index]

    def test_step_of_zero(self, sharded: Variable) -> None:
        """ValueError, as NumPy."""
        with pytest.raises(ValueError, match="step cannot be zero"):
            sharded[::0]

    @pytest.mark.parametrize("index", [1.0, "rows", True, slice(0.5, None)], ids=repr)
    def test_of_a_wrong_kind(self, sharded: Variable, index: Any) -> None:
        """TypeError: an index that is none."""
        with pytest.raises(TypeError, match=r"indexed by|slice indices must be"):
            sharded[index]

    def test_masks(self, sharded: Variable) -> None:
        """Boolean masks over leading axes or all, as NumPy; of a wrong shape, IndexError."""
        assert sharded[sharded > 10].tolist() == [11, 12, 13, 14, 15, 16]
        rows = np.array([0, 1, 0, 0, 1, 0, 0, 1], bool)
        np.testing.assert_array_equal(sharded[rows], WHOLE[rows])
        np.testing.assert_array_equal(sharded[rows.tolist()], WHOLE[rows])
        with pytest.raises(IndexError, match="the mask has shape"):
            sharded[rows[:-1]]

    def test_arrays_of_ids(self, sharded: Variable) -> None:
        """Arrays of row numbers, negative ones from the end as NumPy has it; out of range, IndexError."""
        for ids in ([7, 0, 3], np.array([[1, -1], [5, 1]]), [], np.array([2], np.uint8)):
            np.testing.assert_array_equal(sharded[ids], WHOLE[np.asarray(ids, np.int64)])
        with pytest.raises(IndexError, match="index 8 is out of range"):
            sharded[[0, 8]]
        with pytest.raises(IndexError, match="integers or booleans"):
            sharded[[0.5, 1.0]]

    def test_in_a_function(self, strategy: ParameterServerStrategy, sharded: Variable) -> None:
        """The same on a worker."""
        coordinator = ClusterCoordinator(strategy)
        column = coordinator.schedule(lambda v: v[:, 0], args=(sharded,))
        assert column.fetch().tolist() == WHOLE[:, 0].tolist()

    def test_slices_move_what_they_select(self, strategy: ParameterServerStrategy, sharded: Variable) -> None:
        """No more bytes travel than the selection has."""
        for index in (S[2:7:2], S[::-3, 1], S[5], S[4:4]):
            before = strategy.traffic()
            sharded[index]
            moved = strategy.traffic() - before
            assert moved.pulled == WHOLE[index].nbytes
            assert not moved.pushed or sharded.partition.order != RANGE, "rows in another order are asked for by ids"


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]
BITWISE = ["and_", "or_", "xor", "lshift", "rshift"]


class TestOperators:
    """NumPy's operators on the values."""

    @pytest.mark.parametrize("name", BINARY)
    def test_binary(self, strategy: ParameterServerStrategy, name: str) -> None:
        """A variable with an array, a number and another variable, on either side."""
        operation = getattr(operator, name)
        a, b = np.array([1.5, 2.0, 3.0], np.float32), np.array([2.0, 2.0, 0.5], np.float32)
        v, w = make(strategy, a, 3), make(strategy, b, 2)
        np.testing.assert_array_equal(operation(v, b), operation(a, b))
        np.testing.assert_array_equal(operation(a, w), operation(a, b))
        np.testing.assert_array_equal(operation(v, w), operation(a, b))
        np.testing.assert_array_equal(operation(v, 2), operation(a, 2))
        np.testing.assert_array_equal(operation(2, w), operation(2, b))

    @pytest.mark.parametrize("name", BITWISE)
    def test_bitwise(self, strategy: ParameterServerStrategy, name: str) -> None:
        """Those of integers."""
        operation = getattr(operator, name)
        a, b = np.array([1, 6, 12]), np.array([3, 2, 1])
        v, w = make(strategy, a, 3), make(strategy, b, 2)
        np.testing.assert_array_equal(operation(v, w), operation(a, b))
        np.testing.assert_array_equal(operation(a, w), operation(a, b))
        np.testing.assert_array_equal(operation(v, 1), operation(a, 1))

    def test_unary_and_matmul(self, strategy: ParameterServerStrategy) -> None:
        """Sign, inverse, magnitude, matrix product, and the conversions of a scalar."""
        m = np.arange(6, dtype=np.float32).reshape(3, 2) - 2
        v = make(strategy, m, 3)
        assert ((-v).tolist(), abs(v).tolist(), (+v).tolist()) == ((-m).tolist(), abs(m).tolist(), m.tolist())
        np.testing.assert_array_equal(m.T @ v, m.T @ m)
        np.testing.assert_array_equal(v @ m.T, m @ m.T)
        assert (~make(strategy, [True, False], 2)).tolist() == [False, True]
        scalar = make(strategy, 2.5, 1)
        assert (float(scalar), int(scalar), bool(scalar)) == (2.5, 2, True)
        np.testing.assert_array_equal(np.exp(np.asarray(v)), np.exp(m))

    def test_equality_is_of_the_elements(self, strategy: ParameterServerStrategy) -> None:
        """As with TensorFlow `v == w` compares values; `is` distinguishes variables."""
        v, w = make(strategy, [1.0, 2.0], 2), make(strategy, [1.0, 3.0], 2)
        assert (v == w).tolist() == [True, False]
        assert (v != w).tolist() == [False, True]
        assert (v == v).all()

    @pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"])
    def test_no_change_in_place(self, strategy: ParameterServerStrategy, name: str) -> None:
        """`v += 1` would make `v` an array and leave the variable: it is refused, with what to write instead."""
        v = make(strategy, [1.0, 2.0], 2)
        with pytest.raises(Exception, match=r"can't be changed with .*: use its assign"):
            getattr(operator, name)(v, 1)
        assert v.numpy().tolist() == [1.0, 2.0]


class TestPartitioning:
    """When and how a variable is cut, under a strategy's partitioner (rows 10 to 12 and 21 to 24)."""

    def test_without_a_partitioner(self, two_servers: LocalCluster) -> None:
        """Nothing is cut."""
        with ParameterServerStrategy(two_servers) as strategy, strategy.scope():
            v = Variable([0, 1, 2, 3])
        assert not isinstance(v, ShardedVariable)

    def test_initial_values(self, two_servers: LocalCluster) -> None:
        """Arrays, functions with and without arguments, with and without shape and dtype: cut in the same way."""

        def identity(shape: tuple[int, ...], dtype: Any, partition_shape: Any, partition_offset: Any) -> Array:
            rows, columns = partition_shape
            return np.eye(*shape, dtype=dtype)[partition_offset[0] :][:rows, :columns]

        with ParameterServerStrategy(two_servers, FixedShardsPartitioner(2), placement="round_robin") as strategy:
            with strategy.scope():
                array = Variable(np.arange(10).reshape(5, 2))
                function = Variable(lambda shape, dtype: np.arange(6, dtype=dtype), shape=(6,), dtype=np.int64)
                aware = Variable(identity, shape=(4, 4), dtype=np.int64)
                unknown = [
                    Variable(lambda: np.arange(4), dtype=np.int64),
                    Variable(lambda: np.arange(4)),
                ]
            for v in (array, function, aware, *unknown):
                assert isinstance(v, ShardedVariable)
                assert [shard.device for shard in v] == ["/job:ps/task:0", "/job:ps/task:1"]
            assert_shards(array, [[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]])
            assert_shards(function, [0, 1, 2], [3, 4, 5])
            assert_shards(aware, [[1, 0, 0, 0], [0, 1, 0, 0]], [[0, 0, 1, 0], [0, 0, 0, 1]])
            for v in unknown:
                assert_shards(v, [0, 1], [2, 3])

    def test_uneven_and_few_rows(self, two_servers: LocalCluster) -> None:
        """10 over 4 is 3, 3, 2, 2, on the servers in turn; 3 rows make 3 shards at most."""
        with ParameterServerStrategy(two_servers, FixedShardsPartitioner(4), placement="round_robin") as strategy:
            with strategy.scope():
                ten = Variable(np.arange(10))
                three = Variable([0, 1, 2])
                after = Variable([5])
            assert_shards(ten, [0, 1, 2], [3, 4, 5], [6, 7], [8, 9])
            assert [shard.device[-1] for shard in ten.variables] == ["0", "1", "0", "1"]
            assert_shards(three, [0], [1], [2])
            assert [shard.device[-1] for shard in three.variables] == ["0", "1", "0"]
            assert after.device[-1] == "1", "every shard counts, as with TensorFlow"

    def test_too_small_to_cut(self, two_servers: LocalCluster) -> None:
        """What the partitioner leaves in one part is a plain variable, on the servers in turn."""
        partitioner = MinSizePartitioner(min_shard_bytes=64 << 20, max_shards=2)
        with ParameterServerStrategy(two_servers, partitioner, placement="round_robin") as strategy, strategy.scope():
            first, second = Variable(np.zeros(10, np.int64)), Variable(np.arange(10))
            assert not isinstance(first, ShardedVariable)
            assert (first.device, second.device) == ("/job:ps/task:0", "/job:ps/task:1")
            assert second.numpy().tolist() == list(range(10))

    def test_scalars_are_never_cut(self, two_servers: LocalCluster) -> None:
        """The partitioner is not even asked."""
        asked: list[tuple[int, ...]] = []

        def partitioner(shape: tuple[int, ...], dtype: object) -> list[int]:
            asked.append(shape)
            return [2]

        with ParameterServerStrategy(two_servers, partitioner) as strategy, strategy.scope():
            assert not isinstance(Variable(1.0), ShardedVariable)
            assert isinstance(Variable([1.0, 2.0]), ShardedVariable)
        assert asked == [(2,)]

    @pytest.mark.parametrize("beside", ["variable", "shard"])
    def test_colocate(self, two_servers: LocalCluster, beside: str) -> None:
        """Beside a variable or one of its shards, whole, and the round robin does not advance."""
        with ParameterServerStrategy(two_servers, FixedShardsPartitioner(3), placement="round_robin") as strategy:
            with strategy.scope():
                v = Variable([0, 1, 2])
                other = v.variables[1] if beside == "shard" else v
                with strategy.extended.colocate_vars_with(other):
                    w = Variable([4, 5, 6])
                after = Variable([7])
            assert not isinstance(w, ShardedVariable)
            assert w.device == other.device
            assert w.numpy().tolist() == [4, 5, 6]
            assert after.device == "/job:ps/task:1"

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (None, "not a sequence of integers"),
            ("21", "not a sequence of integers"),
            ([], "empty"),
            ([0, 1, 1], "0 for axis 0 is below 1"),
            ([-2], "-2 for axis 0 is below 1"),
            ([2, 1, 1, 1], "4 axes, but the variable has 3"),
            ([1.5], "1.5 for axis 0 is not an integer"),
            ([True], "True for axis 0 is not an integer"),
        ],
        ids=repr,
    )
    def test_nonsense_of_a_partitioner(self, strategy: ParameterServerStrategy, answer: Any, message: str) -> None:
        """A ValueError that names variable_partitioner, the variable and the answer; the name stays free."""
        value = [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
        with strategy.scope():
            name = f"nonsense {answer!r}"
            with pytest.raises(ValueError, match="variable_partitioner") as caught:
                Variable(value, name=name, partitioner=lambda shape, dtype: answer)
            assert message in str(caught.value)
            assert name in str(caught.value)
            Variable(value, name=name)

    def test_a_partitioner_that_raises(self, strategy: ParameterServerStrategy) -> None:
        """Its own error comes through, with a note that names the variable."""

        def partitioner(shape: tuple[int, ...], dtype: object) -> list[int]:
            raise KeyError("no such table")

        with strategy.scope(), pytest.raises(KeyError) as caught:
            Variable([1, 2], name="unlucky", partitioner=partitioner)
        assert "raised by variable_partitioner for variable 'unlucky' of shape (2,)" in caught.value.__notes__

    def test_several_axes(self, strategy: ParameterServerStrategy) -> None:
        """What TensorFlow refuses: cuts along another axis, and along several."""
        value = np.arange(30).reshape(5, 6)
        with strategy.scope():
            columns = Variable(value, partitioner=lambda shape, dtype: [1, 3])
            blocks = Variable(value, partitioner=lambda shape, dtype: [2, 2])
        assert [shard.shape for shard in columns.variables] == [(5, 2)] * 3
        assert [shard.shape for shard in blocks.variables] == [(3, 3), (3, 3), (2, 3), (2, 3)]
        for v in (columns, blocks):
            np.testing.assert_array_equal(v.numpy(), value)

    def test_no_initial_value(self, strategy: ParameterServerStrategy) -> None:
        """It is asked for."""
        with strategy.scope(), pytest.raises(Exception, match="'empty_handed' needs an initial_value"):
            Variable(name="empty_handed", shape=(2,))

    def test_outside_of_a_scope(self) -> None:
        """There is no variable without servers: the message says where to make it."""
        with pytest.raises(Exception, match=r"Variable 'homeless' was created outside a strategy's scope"):
            Variable([1], name="homeless")

    def test_inside_a_function(self, strategy: ParameterServerStrategy) -> None:
        """A step can't make variables: the message says so."""
        coordinator = ClusterCoordinator(strategy)

        def step() -> None:
            Variable([1.0, 2.0])

        coordinator.schedule(step)
        with pytest.raises(Exception, match="in a step function, which is not allowed"):
            coordinator.join()


class TestJoined:
    """`ShardedVariable(variables)`: variables that there are, as the shards of one."""

    @pytest.mark.parametrize("wrong", [[], (), None, 3, "ab", np.zeros(2), {}], ids=repr)
    def test_no_variables(self, wrong: Any) -> None:
        """None, or no list of them: TypeError."""
        with pytest.raises(TypeError, match="a ShardedVariable takes a list of variables, not"):
            ShardedVariable(wrong)

    def test_what_does_not_fit(self, strategy: ParameterServerStrategy, two_servers: LocalCluster) -> None:
        """TypeError for what is no variable, ValueError for variables that differ; the odd one is named."""
        a, b = make(strategy, np.zeros((2, 3)), 1, name="fit/a"), make(strategy, np.zeros((1, 3)), 1)
        cut, scalar = make(strategy, np.zeros((2, 3)), 2, name="fit/cut"), make(strategy, np.float64(1), 1)
        with strategy.scope():
            across = Variable(np.zeros((2, 3)), partitioner=lambda shape, dtype: [1, 3], name="fit/across")
        for wrong in (1.0, np.zeros((2, 3)), None):
            with pytest.raises(TypeError, match=r"variables\[1\] is .*, not a variable: make one with"):
                ShardedVariable([a, wrong])  # type: ignore[list-item]
        for other, said in [
            (make(strategy, np.zeros((2, 3), np.float32), 1), r"\[2\] is float32, and the first one float64"),
            (make(strategy, np.zeros((2, 4)), 1), r"\[2\] has shape \(2, 4\), and the first one \(2, 3\): they may"),
            (a, r"\[2\], 'fit/a', is given twice"),
            (across, r"\[2\], 'fit/across', is cut along axis 1: variables are joined along axis 0"),
            (cut.variables[0], r"\[2\] is 'fit/cut/part_0', a shard of a variable"),
            (ShardedVariable([a, b]), r"\[2\], 'ShardedVariable', is joined itself: give the variables"),
            (scalar, r"\[2\], .*, is a scalar"),
        ]:
            with pytest.raises(ValueError, match=said):
                ShardedVariable([a, b, other])  # type: ignore[list-item]
        with ParameterServerStrategy(two_servers) as elsewhere:
            far = make(elsewhere, np.zeros((2, 3)), 1)
            with pytest.raises(errors.MisuseError, match="belong to different strategies"):
                ShardedVariable([a, far])

    def test_container(self, strategy: ParameterServerStrategy) -> None:
        """The variables themselves, and the whole's shape, dtype and value; an update of one is one of the other."""
        a, b = make(strategy, [0, 1], 1), make(strategy, [2, 3, 4], 1, trainable=False)
        v = ShardedVariable([a, b], name="both")
        assert isinstance(v, Variable)
        assert (v.name, v.shape, v.num_shards, v.trainable) == ("both", (5,), 2, False)
        assert v.dtype == np.int64
        assert v.variables[0] is a
        assert [*v][1] is b
        assert v not in strategy.variables
        assert a in strategy.variables
        v.assign([5, 6, 7, 8, 9])
        assert_shards(v, [5, 6], [7, 8, 9])
        v.assign_add(1, at=slice(1, 3))
        b.assign_sub([0, 0, 9])
        assert v.numpy().tolist() == (v + 0).tolist() == [5, 7, 8, 8, 0]
        v.scatter_update(IndexedSlices([70, 20, 30], [4, 0, 2]))
        assert_shards(v, [20, 7], [30, 8, 70])
        assert v.sparse_read([[4, 0], [0, 2]]).tolist() == [[70, 20], [20, 30]]
        assert strategy.read({"v": v, "a": a})["v"].tolist() == [20, 7, 30, 8, 70]
        assert repr(v).startswith("<JoinedVariable 'both' shape=(5,) dtype=int64 on /job:ps/task:")

    def test_embedding(self, strategy: ParameterServerStrategy) -> None:
        """Rows by id, alone and in bags, as of one that is cut."""
        v = ShardedVariable([make(strategy, rows, 1) for rows in np.split(WHOLE.astype(np.float32), [1, 6])])
        np.testing.assert_array_equal(embedding_lookup(v, [7, 0, 5, 0]), WHOLE[[7, 0, 5, 0]])
        np.testing.assert_array_equal(embedding_bag(v, [[7, 0], [5]], combiner="sum"), [WHOLE[7] + WHOLE[0], WHOLE[5]])

    def test_optimizers(self, strategy: ParameterServerStrategy) -> None:
        """Gradients of the whole, and sparse ones, go to each variable; slots are beside each of them."""
        a, b = make(strategy, np.zeros((1, 2), np.float32), 1), make(strategy, np.zeros((3, 2), np.float32), 1)
        same, v = make(strategy, np.zeros((4, 2), np.float32), 2), ShardedVariable([a, b])
        with strategy.scope():
            adam = optimizers.Adam(0.1)
        gradient = np.arange(8, dtype=np.float32).reshape(4, 2)
        for target in (same, v):
            adam.apply_gradients([(gradient, target)])
            adam.apply_gradients([(IndexedSlices(gradient[:2], [3, 0]), target)])
        np.testing.assert_array_equal(v.numpy(), same.numpy())
        np.testing.assert_array_equal(adam.slot(b, "m").numpy(), adam.slot(same, "m").numpy()[1:])
        with pytest.raises(TypeError, match="no slots of its own; ask for a slot of one of"):
            adam.slot(v, "m")
        with pytest.raises(errors.MisuseError, match="is given twice: add its gradients first"):
            adam.apply_gradients([(gradient, v), (gradient[:1], a)])

    def test_in_functions(self, strategy: ParameterServerStrategy) -> None:
        """Captured, as an argument, and as a result; every update of the whole and of a part counts, and once."""
        a, b = make(strategy, [0, 0], 1), make(strategy, [0, 0], 1)
        v, coordinator = ShardedVariable([a, b]), ClusterCoordinator(strategy)
        fails = make(strategy, 1, 1)

        def step(given: Any) -> Any:
            v.assign_add([1, 1, 1, 1])
            a.assign_add([10, 10])
            given.scatter_add(IndexedSlices([100], [1]))
            v.assign_add([1000, 1000, 1000, 1000])
            given.variables[1].assign_add([5, 5])
            if fails.numpy() == 1:
                fails.assign(0)
                raise OSError("try again")
            return given, given.numpy()

        returned, value = coordinator.schedule(step, args=(v,), retries=1).fetch(60)
        assert value.tolist() == [1011, 1111, 1006, 1006]
        assert type(returned) is type(v)
        assert returned.variables[0] is a
        data = coordinator.distribute_dataset(np.arange(4)).batch(2)

        def total(batch: Any) -> Any:
            return batch * v.numpy().sum()

        for concurrent in (False, True):
            results = coordinator.evaluate(total, data, [metrics.Sum()], concurrent=concurrent, timeout=60)
            assert results == {"sum": 6 * 4134.0}
