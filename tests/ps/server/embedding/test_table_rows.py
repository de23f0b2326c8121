"""The rows of a table's shard against a dictionary, and their initial values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry.partition import Partition
from pscluster.core.numbers.splitmix import mixed
from pscluster.ps.initializers import (
    Constant,
    GlorotUniform,
    Initializer,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    Zeros,
)
from pscluster.ps.optim.rules import Adagrad, Adam
from pscluster.ps.server.embedding import reserved_rows
from pscluster.ps.server.embedding.table_changes import carry_out, check_room, decide
from pscluster.ps.server.embedding.table_rows import TableRows
from pscluster.ps.server.embedding.tables import new_array, new_slots, read_rows, rows_of
from pscluster.ps.server.state.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.storage.files.spill import Spill
from pscluster.ps.tables import TAIL, Ids, InitialRows, initial_rows, shards_of, table_ids
from pscluster.v1 import ps_pb2

DIM = 3
INITIAL = InitialRows(RandomUniform(seed=5), DIM)
MOST = (1 << 63) - 1


def table_of(capacity: int) -> tuple[HeldVariable, Shard]:
    """A table of one shard."""
    spec = ps_pb2.VariableSpec(id=1, name="t", dtype="float32", shape=(capacity, DIM + TAIL), owners=[0])
    spec.table.dim, spec.table.initializer = DIM, "random_uniform"
    spec.table.numbers = json.dumps(RandomUniform(seed=5).values_by_name())
    shard = Shard(new_array(0, capacity, DIM + TAIL), row_limit=capacity)
    return HeldVariable(spec, np.dtype(np.float32), Partition.even(tuple(spec.shape), (1, 1)), {0: shard}), shard


def no_fills(optimizer: int) -> Mapping[str, float]:
    raise AssertionError(optimizer)


def update(
    held: HeldVariable, shard: Shard, ids: Ids, fills: Callable[[int], Mapping[str, float]] = no_fills
) -> tuple[Ids, int]:
    """Do what an update does before it changes values; return the places of its rows, and how many were made."""
    changes = decide(held, shard, ids, None, gradient=True)
    return carry_out(held, shard, ids, changes, fills).places, len(changes.made)


def ids_of(*ids: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(ids, np.int64)


class Twin:
    """A shard and a dictionary that get the same updates."""

    def __init__(self, capacity: int) -> None:
        self.held, self.shard = table_of(capacity)
        self.known: dict[int, int] = {}  # by id, the number of its row in `values`
        self.values = np.zeros((capacity, DIM), np.float32)

    def add(self, ids: list[int], amount: float) -> None:
        places, made = update(self.held, self.shard, ids_of(*ids))
        rows_of(self.shard, DIM).values[places] += np.float32(amount)  # once for each distinct id
        new = [each for each in set(ids) if each not in self.known]
        assert made == len(new)
        self.values[len(self.known) : len(self.known) + made] = INITIAL.of(ids_of(*new))
        self.known |= {each: len(self.known) + at for at, each in enumerate(new)}
        self.values[[self.known[each] for each in set(ids)]] += np.float32(amount)

    def check(self, ids: list[int]) -> None:
        read, missing = read_rows(self.shard, ids_of(*ids), INITIAL)
        expected = INITIAL.of(ids_of(*ids))
        known = [at for at, each in enumerate(ids) if each in self.known]
        np.testing.assert_array_equal(missing, np.delete(np.arange(len(ids)), known))
        expected[known] = self.values[[self.known[ids[at]] for at in known]]
        np.testing.assert_array_equal(read, expected)

    def rebuild(self) -> None:
        """Go on as after a restart: with the array alone."""
        self.shard = Shard(self.shard.array.copy(), row_limit=self.shard.row_limit)

    def check_all(self) -> None:
        rows = rows_of(self.shard, DIM)
        assert rows.count == len(self.known)
        assert set(rows.ids().tolist()) == self.known.keys()
        self.check(list(self.known))


some_ids = st.lists(st.one_of(st.integers(-5, 5), st.integers(-MOST - 1, MOST)), max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["add", "check", "rebuild"]), some_ids), max_size=12))
@settings(max_examples=60, deadline=None)
def test_rows_are_those_of_a_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    twin = Twin(300)
    for number, (step, ids) in enumerate(steps):
        if step == "add":
            twin.add(ids, number + 0.5)
        elif step == "check":
            twin.check(ids)
        else:
            twin.rebuild()
    twin.check_all()


def test_a_million_random_operations_give_what_a_dictionary_has() -> None:
    rng, twin = np.random.default_rng(3), Twin(80_000)
    for number in range(200):
        ids = rng.zipf(1.1, 5000)
        ids = (ids % 40_000) * np.where(rng.random(5000) < 0.5, 7919, -1)
        twin.add(ids.tolist(), float(number))
        if number % 40 == 13:
            twin.rebuild()
    twin.check(list(range(-100, 100)))
    twin.check_all()


def test_ids_whose_hashes_collide_are_kept_apart() -> None:
    wanted = mixed(np.arange(1 << 16, dtype=np.uint64)) & np.uint64(1023)
    same = np.flatnonzero(wanted == wanted[0]).astype(np.int64)  # they all want one slot of an index of 1024
    array = np.zeros((100, DIM + TAIL), np.float32)
    rows = TableRows(array, 0, DIM)
    assert 20 < len(same) < 100
    rows.append(same, np.repeat(same, DIM).reshape(-1, DIM).astype(np.float32))
    np.testing.assert_array_equal(rows.find(same), np.arange(len(same)))
    np.testing.assert_array_equal(rows.take(rows.find(same))[:, 0], same)
    assert (rows.find(ids_of(-1, MOST)) == -1).all()


def test_a_full_shard_takes_known_ids_only_and_stays_as_it_was() -> None:
    held, shard = table_of(4)
    update(held, shard, ids_of(1, 2, 3))
    before = shard.array.copy()
    for ids in (ids_of(4, 5), ids_of(5, 1, 4)):
        with pytest.raises(InvalidUpdateError, match="table 't' is full: a shard has 3 rows and room for 1 more"):
            check_room(held, shard, ids)
        with pytest.raises(InvalidUpdateError, match="such as 5: give the table a larger capacity"):
            check_room(held, shard, ids)
    np.testing.assert_array_equal(shard.array, before)
    check_room(held, shard, ids_of(4, 4, 4, 1))
    with pytest.raises(InvalidUpdateError, match="room for 1 more"):
        update(held, shard, ids_of(4, 5))
    assert update(held, shard, ids_of(4, 4, 1))[1] == 1
    assert len(shard.array) == 4
    check_room(held, shard, ids_of(1, 2, 3, 4))


def test_a_limit_of_bytes_counts_all_arrays_and_the_other_shards() -> None:
    held, shard = table_of(100)
    row = (DIM + TAIL) * 4
    held.spec.table.max_bytes = 20 * row
    held.shards[1] = Shard(new_array(4, 100, DIM + TAIL), row_limit=100)
    adam = HeldOptimizer(ps_pb2.OptimizerSpec(id=7), Adam())
    check_room(held, shard, np.arange(16))
    check_room(held, shard, np.arange(8), adam)
    with pytest.raises(InvalidUpdateError, match=f"room for 8 more.* its limit is {20 * row} bytes a server"):
        check_room(held, shard, np.arange(9), adam)
    shard.slots[7] = new_slots(adam.rule, 0, 100, DIM)
    with pytest.raises(InvalidUpdateError, match="give it a larger max_bytes, or add servers"):
        check_room(held, shard, np.arange(9))


def test_rows_grow_where_they_are_and_slots_begin_as_they_should() -> None:
    """What a snapshot holds stays as it was; averages begin as the values."""
    held, shard = table_of(1 << 20)
    adagrad = Adagrad()
    shard.slots[3] = new_slots(adagrad, 0, shard.row_limit, DIM)
    fills = {3: adagrad.slots}.__getitem__
    update(held, shard, np.arange(10), fills)
    shard.averages[3] = shard.array[:, :DIM].copy()
    captured = shard.capture(Spill())
    first, before = shard.array, shard.array.copy()
    update(held, shard, np.arange(50_000), fills)
    assert np.shares_memory(first, shard.array)
    shapes = [array.shape for array in shard.arrays().values()]
    assert shapes == [(50_000, DIM + TAIL), (50_000, DIM), (50_000, DIM)]
    assert (shard.slots[3]["accumulator"] == 0.1).all()
    np.testing.assert_array_equal(shard.averages[3], shard.array[:, :DIM])
    assert b"".join(captured["value"]) == before.tobytes()
    assert len(b"".join(captured["slot/3/accumulator"])) == before[:, :DIM].nbytes


def test_where_little_can_be_reserved_rows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved_rows, "_memory", lambda: 64 * (DIM + TAIL) * 4)
    held, shard = table_of(10_000)
    for stop in (3, 60, 200, 5000, 10_000):
        update(held, shard, np.arange(stop))
        np.testing.assert_array_equal(read_rows(shard, np.arange(stop), INITIAL)[0], INITIAL.of(np.arange(stop)))
        assert rows_of(shard, DIM).count == len(shard.array) == stop


@pytest.mark.parametrize(
    ("initializer", "low", "high", "mean", "deviation"),
    [
        (RandomUniform(-1.0, 3.0, seed=1), -1, 3, 1, 4 / np.sqrt(12)),
        (RandomNormal(2.0, 0.5, seed=1), -2, 6, 2, 0.5),
        (TruncatedNormal(0.0, 1.0, seed=1), -2, 2, 0, 0.8796),
        (Zeros(), 0, 0, 0, 0),
        (Constant(0.25), 0.25, 0.25, 0.25, 0),
    ],
)
def test_initial_rows_have_the_distribution(
    initializer: Initializer, low: float, high: float, mean: float, deviation: float
) -> None:
    drawn = InitialRows(initializer, 50).of(np.arange(-2000, 2000))
    assert drawn.dtype == np.float32
    assert low <= drawn.min() <= drawn.max() <= high
    assert abs(drawn.mean() - mean) < 0.01
    assert abs(drawn.std() - deviation) < 0.01


def test_initial_rows_depend_on_seed_and_id_alone() -> None:
    ids = np.concatenate([np.arange(5000), ids_of(-1, MOST, -MOST - 1)])
    initial = InitialRows(RandomNormal(seed=1), 40)
    rows = initial.of(ids)
    for at in (0, 1, 4999, 5000, 5002):
        np.testing.assert_array_equal(initial.of(ids[at : at + 1])[0], rows[at])
    assert len(np.unique(rows)) > 0.99 * rows.size
    assert not np.array_equal(InitialRows(RandomNormal(seed=2), 40).of(ids), rows)
    # Rows that were never stored must be the same in every version.
    digest = hashlib.sha256(InitialRows(RandomUniform(seed=7), 8).of(ids).tobytes()).hexdigest()
    assert digest[:16] == "9b0b898f5ea231a0"


def test_normal_numbers_are_those_of_the_standard_library() -> None:
    from statistics import NormalDist

    from pscluster.ps.tables import _normal_quantiles

    p = np.concatenate([[2.0**-33, 1 - 2.0**-33, 0.5, 0.075, 0.925], np.linspace(0.001, 0.999, 500)])
    expected = [NormalDist().inv_cdf(each) for each in p]
    np.testing.assert_allclose(_normal_quantiles(p - 0.5), expected, rtol=1e-9, atol=1e-15)


def test_ids_are_spread_evenly_over_shards() -> None:
    for ids in (np.arange(100_000), np.arange(100_000) << 40, -np.arange(100_000) * 64):
        counts = np.bincount(shards_of(ids, 7), minlength=7)
        assert counts.min() > 0.95 * len(ids) / 7
        assert counts.max() < 1.05 * len(ids) / 7


def test_wrong_ids_and_initializers_are_refused_by_name() -> None:
    np.testing.assert_array_equal(table_ids([[1], [-2]], "t"), [[1], [-2]])
    assert table_ids([], "t").dtype == np.int64
    with pytest.raises(InvalidUpdateError, match="table 't': ids must be integers, but they are float64"):
        table_ids([1.5], "t")
    with pytest.raises(InvalidUpdateError, match="id 18446744073709551615 does not fit in int64"):
        table_ids(np.array([2**64 - 1], np.uint64), "t")
    with pytest.raises(ValueError, match="glorot_uniform can't make the rows of a table"):
        InitialRows(GlorotUniform(seed=1), 4)
    for table, wanted in [
        (ps_pb2.TableSpec(dim=0, initializer="zeros"), "rows of 0 values"),
        (ps_pb2.TableSpec(dim=4, initializer="none"), "no initializer 'none'"),
        (ps_pb2.TableSpec(dim=4, initializer="random_normal", numbers="["), "table 't': "),
        (ps_pb2.TableSpec(dim=4, initializer="random_normal", numbers="{}"), "the seed is missing"),
    ]:
        with pytest.raises(InvalidUpdateError, match=wanted):
            initial_rows(table, "t")
