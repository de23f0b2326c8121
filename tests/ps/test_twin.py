"""Random operations on sharded variables of all types, ranks and cuts, each compared with a NumPy twin.

PSCLUSTER_EXAMPLES sets how many variables are tried: 40 by default; 100,000 take a night.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pscluster.coordinator import IndexedSlices, LocalCluster, ParameterServerStrategy, Variable, embedding_lookup
from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry.partition import Partition

try:
    import ml_dtypes
except ImportError:
    HALF: tuple[Any, ...] = (np.float16,)
else:
    HALF = (np.float16, ml_dtypes.bfloat16)

Array = npt.NDArray[Any]

EXAMPLES = int(os.environ.get("PSCLUSTER_EXAMPLES", "40"))
FLOATS = [np.dtype(t) for t in (*HALF, np.float32, np.float64)]
INTEGERS = [np.dtype(t) for t in (np.int8, np.int16, np.int32, np.int64, np.uint8)]
COMPLEX, BOOL = np.dtype(np.complex64), np.dtype(bool)

# The operations for each type; others are refused.
ARITHMETIC: dict[str, list[np.dtype[Any]]] = {
    "add": [*FLOATS, *INTEGERS, COMPLEX],
    "sub": [*FLOATS, *INTEGERS, COMPLEX],
    "mul": [*FLOATS, *INTEGERS, COMPLEX],
    "div": [*FLOATS, COMPLEX],
    "min": [*FLOATS, *INTEGERS],
    "max": [*FLOATS, *INTEGERS],
}
ONE_BY_ONE: dict[str, Any] = {"mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum}


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    """Three servers."""
    with LocalCluster(3, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        yield strategy


def some_values(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Values for which sums and products of a few are exact, except in the half types; integers may be any."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(rng.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    values = rng.integers(-8, 9, shape) / 2
    if dtype.kind == "c":
        values = values + 1j * rng.integers(-8, 9, shape)
    return np.asarray(values, dtype)


def factors(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Values for which products and quotients are exact."""
    rng = np.random.default_rng(seed)
    powers = rng.choice([1, 2, -1, 0.5] if dtype.kind in "fcV" else [1, 2, 3], shape)
    return np.asarray(powers, dtype)


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which rows with equal ids are summed."""
    return np.dtype(np.float32) if dtype in FLOATS and dtype.itemsize == 2 else dtype


def assert_same(got: Any, expected: Any, context: str = "") -> None:
    """Check for the same type, shape and values; NaN equals NaN."""
    assert np.shape(got) == np.shape(expected), context
    assert np.asarray(got).dtype == np.asarray(expected).dtype, context
    if np.asarray(got).dtype.kind == "V":  # bfloat16
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_array_equal(got, expected, err_msg=context)


SEED = st.integers(0, 1 << 30)


class Twin(RuleBasedStateMachine):
    """A variable on the servers and an array here, to which the same operations are applied."""

    strategy: ParameterServerStrategy
    lengths: st.SearchStrategy[int]
    dtypes: st.SearchStrategy[np.dtype[Any]] = st.sampled_from([*FLOATS, *INTEGERS, COMPLEX, BOOL])
    v: Variable
    twin: Array

    @initialize(data=st.data(), seed=SEED, as_function=st.booleans())
    def create(self, data: st.DataObject, seed: int, as_function: bool) -> None:
        """Create them with any type, rank 0 to 3 and cut, with a value given or made on the servers."""
        dtype = data.draw(self.dtypes, "dtype")
        shape = tuple(data.draw(st.lists(self.lengths, max_size=3), "shape"))
        parts = [data.draw(st.integers(1, 4), "parts") for _ in shape]
        self.twin = some_values(seed, shape, dtype)
        copy = self.twin.copy()
        with self.strategy.scope():
            if as_function:
                self.v = Variable(lambda _s, _d: copy, shape=shape, dtype=dtype, partitioner=lambda _s, _d: parts)
            else:
                self.v = Variable(copy, dtype=dtype, partitioner=lambda _s, _d: parts)
        clipped = [max(1, min(count, length)) for count, length in zip(parts, shape, strict=True)]
        assert self.v.partition == Partition.even(shape, clipped)
        assert self.v.num_shards == math.prod(clipped)

    def teardown(self) -> None:
        """Leave the servers as they were."""
        if hasattr(self, "v"):
            self.strategy.client.delete_variable(self.v.name, self.v.id)

    @invariant()
    def equal(self) -> None:
        """Both are equal after every operation."""
        if hasattr(self, "v"):
            assert_same(self.v.numpy(), self.twin)

    # Reads

    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        """Read with integers, slices of any step, ellipsis and newaxis."""
        index = data.draw(hnp.basic_indices(self.twin.shape, allow_newaxis=True, max_dims=8), "index")
        assert_same(self.v[index], self.twin[index], f"[{index}]")

    @precondition(lambda self: self.twin.ndim > 0)
    @rule(data=st.data(), seed=SEED, density=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    def mask(self, data: st.DataObject, seed: int, density: float) -> None:
        """Read with Boolean masks of leading axes."""
        axes = data.draw(st.integers(1, self.twin.ndim), "axes")
        mask = np.asarray(np.random.default_rng(seed).random(self.twin.shape[:axes]) < density)
        assert_same(self.v[mask], self.twin[mask], f"[{mask}]")

    def draw_ids(self, data: st.DataObject, lowest: int) -> Array:
        """Row numbers of any shape, if there are rows."""
        shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9), "shape of ids")
        seed = data.draw(SEED, "ids")
        return np.random.default_rng(seed).integers(lowest, len(self.twin), shape, endpoint=False)

    @precondition(lambda self: self.twin.ndim > 0 and len(self.twin) > 0)
    @rule(data=st.data(), dtype=st.sampled_from([np.int64, np.int32, np.int8]))
    def rows(self, data: st.DataObject, dtype: npt.DTypeLike) -> None:
        """Read by row numbers, negative ones counted from the end."""
        ids = self.draw_ids(data, max(-len(self.twin), -128)).clip(-128, 127).astype(dtype)
        assert_same(self.v[ids], self.twin[ids], f"[{ids}]")

    @precondition(lambda self: self.twin.ndim > 0 and len(self.twin) > 0)
    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        """Read rows by id, in the order of the ids."""
        ids = self.draw_ids(data, 0)
        assert_same(self.v.gather(ids), self.twin[ids], f"gather {ids}")
        assert_same(embedding_lookup(self.v, ids), self.twin[ids], f"lookup {ids}")

    @precondition(lambda self: self.twin.ndim > 0 and self.twin.size > 0)
    @rule(data=st.data())
    def mixture(self, data: st.DataObject) -> None:
        """Read with an array of ids beside slices, for which NumPy has special rules."""
        ids = self.draw_ids(data, 0)
        index = (*[slice(None, None, -1)] * (self.twin.ndim - 1), ids % self.twin.shape[-1])
        assert_same(self.v[index], self.twin[index], f"[{index}]")

    @rule()
    def shards(self) -> None:
        """Each shard equals its block of the whole."""
        for shard in self.v.variables:
            assert_same(shard.numpy(), np.asarray(self.twin[shard.block.slices]), shard.name)
        assert_same(self.strategy.read([self.v, {"again": self.v}])[1]["again"], self.twin)

    # Updates of all or of a box

    @rule(seed=SEED, kind=st.sampled_from(["assign", "assign_add", "assign_sub"]))
    def update_whole(self, seed: int, kind: str) -> None:
        """Update with an array of the whole shape."""
        self._update(kind, some_values(seed, self.twin.shape, self.twin.dtype), None)

    @rule(seed=SEED, kind=st.sampled_from(["assign", "assign_add", "assign_sub"]))
    def update_by_scalar(self, seed: int, kind: str) -> None:
        """Update with one value for all."""
        self._update(kind, some_values(seed, (), self.twin.dtype)[()], None)

    @rule(data=st.data(), seed=SEED, kind=st.sampled_from(["assign", "assign_add", "assign_sub"]))
    def update_part(self, data: st.DataObject, seed: int, kind: str) -> None:
        """Update a box with values of its shape, of one that NumPy broadcasts to it, or with one value."""
        index = data.draw(hnp.basic_indices(self.twin.shape, allow_newaxis=True, max_dims=8), "index")
        shape = np.shape(self.twin[index])
        suffix = shape[data.draw(st.integers(0, len(shape)), "leading axes left out") :]
        shape = tuple(1 if data.draw(st.booleans(), "length 1") else length for length in suffix)
        value = some_values(seed, shape, self.twin.dtype)
        if kind == "assign":
            self.v[index] = value
            self.twin[index] = value
        else:
            self._update(kind, value, index if isinstance(index, tuple) else (index,))

    def _update(self, kind: str, value: Any, at: Any) -> None:
        update = getattr(self.v, kind)
        if kind != "assign" and self.twin.dtype == BOOL:
            with pytest.raises(InvalidUpdateError, match="elements of that type can't be updated by"):
                update(value, at=at)
            return
        assert update(value, at=at) is self.v
        at = ... if at is None else at
        target = self.twin[at]
        with np.errstate(all="ignore"):
            if kind == "assign":
                self.twin[at] = value
            elif kind == "assign_add":
                self.twin[at] = target + value
            else:
                self.twin[at] = target - value

    # Updates of rows

    @precondition(lambda self: self.twin.ndim > 0 and len(self.twin) > 0)
    @rule(data=st.data(), seed=SEED, kind=st.sampled_from(list(ARITHMETIC)))
    def scatter(self, data: st.DataObject, seed: int, kind: str) -> None:
        """Update rows by id, duplicates included, with every operation."""
        dtype = self.twin.dtype
        ids = self.draw_ids(data, 0)
        make = factors if kind in ("mul", "div") else some_values
        values = make(seed, (*ids.shape, *self.twin.shape[1:]), dtype)
        operation = getattr(self.v, f"scatter_{kind}")
        if dtype not in ARITHMETIC[kind]:
            with pytest.raises(InvalidUpdateError, match="elements of that type can't be updated by"):
                operation(IndexedSlices(values, ids))
            return
        operation(IndexedSlices(values, ids))
        flat, rows = ids.reshape(-1), values.reshape(ids.size, *self.twin.shape[1:])
        with np.errstate(all="ignore"):
            if kind in ONE_BY_ONE:
                for row, value in zip(flat, rows, strict=True):
                    self.twin[row] = ONE_BY_ONE[kind](self.twin[row], value)
            else:
                self._add(flat, rows, np.add if kind == "add" else np.subtract)

    def _add(self, ids: Array, rows: Array, operation: Callable[[Array, Array], Array]) -> None:
        """Sum rows with equal ids first, those of half types in float32."""
        for row in np.unique(ids):
            total = np.zeros(rows.shape[1:], wide(rows.dtype))
            for value in rows[ids == row]:
                total = (total + value.astype(total.dtype)).astype(total.dtype)
            self.twin[row] = operation(self.twin[row].astype(total.dtype), total).astype(rows.dtype)

    @precondition(lambda self: self.twin.ndim > 0 and len(self.twin) > 0)
    @rule(data=st.data(), seed=SEED)
    def scatter_update(self, data: st.DataObject, seed: int) -> None:
        """Replace rows; the last of equal ids counts."""
        ids = self.draw_ids(data, 0)
        values = some_values(seed, (*ids.shape, *self.twin.shape[1:]), self.twin.dtype)
        self.v.scatter_update(IndexedSlices(values, ids))
        for row, value in zip(ids.reshape(-1), values.reshape(ids.size, *self.twin.shape[1:]), strict=True):
            self.twin[row] = value

    @precondition(lambda self: self.twin.ndim > 1 and self.twin.shape[1] > 0)
    @rule(seed=SEED, per_batch=st.integers(0, 4))
    def batch_scatter_update(self, seed: int, per_batch: int) -> None:
        """Replace rows batch by batch."""
        rows, length = self.twin.shape[:2]
        ids = np.random.default_rng(seed).integers(0, length, (rows, per_batch))
        values = some_values(seed, (*ids.shape, *self.twin.shape[2:]), self.twin.dtype)
        self.v.batch_scatter_update(IndexedSlices(values, ids))
        for i, j in np.ndindex(ids.shape):
            self.twin[i, ids[i, j]] = values[i, j]

    # Refused operations change nothing: the invariant checks that

    @rule(data=st.data(), seed=SEED)
    def refused(self, data: st.DataObject, seed: int) -> None:
        """Refuse ids, shapes and types that do not fit."""
        if self.twin.ndim:
            bad = np.array([data.draw(st.sampled_from([-1, len(self.twin), 1 << 40]), "id")])
            rows = some_values(seed, (1, *self.twin.shape[1:]), self.twin.dtype)
            with pytest.raises(InvalidUpdateError, match="out of range"):
                self.v.scatter_update(IndexedSlices(rows, bad))
            with pytest.raises(InvalidUpdateError, match="out of range"):
                self.v.gather(bad)
            with pytest.raises(IndexError):
                self.v[(len(self.twin),)] = np.zeros((), self.twin.dtype)
        with pytest.raises(InvalidUpdateError, match="shape"):
            self.v.assign(some_values(seed, (*self.twin.shape, 2, 3), self.twin.dtype))
        if self.twin.dtype.kind in "iub":
            with pytest.raises(InvalidUpdateError, match="convert it with"):
                self.v.assign(0.5)


def run(strategy: ParameterServerStrategy, lengths: st.SearchStrategy[int], examples: int, **more: Any) -> None:
    """Run the machine with these lengths of axes."""
    machine = type("Twin", (Twin,), {"strategy": strategy, "lengths": lengths, **more})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


def test_small_variables(strategy: ParameterServerStrategy) -> None:
    """Axes of length 0 to 7 work with every cut, including empty and uneven ones."""
    run(strategy, st.integers(0, 7), EXAMPLES)


def test_large_variables(strategy: ParameterServerStrategy) -> None:
    """Axes so long that reads and updates are streamed in pieces work."""
    lengths = st.sampled_from([1, 3, 60, 130])
    run(strategy, lengths, max(1, EXAMPLES // 8), dtypes=st.sampled_from([np.dtype(np.float32), np.dtype(np.int64)]))
