"""The rows of a table's shard against a dictionary, and their initial values."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.initializers import (
    Constant,
    GlorotUniform,
    Initializer,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    Zeros,
)
from pscluster.ps.server.shard import Shard
from pscluster.ps.server.table_rows import TableRows
from pscluster.ps.server.tables import check_room, places_of, read_rows, rows_of
from pscluster.ps.tables import TAIL, InitialRows, initial_rows, mixed, shards_of, table_ids
from pscluster.v1 import ps_pb2

DIM = 3
INITIAL = InitialRows(RandomUniform(seed=5), DIM)
MOST = (1 << 63) - 1


def shard_of(capacity: int) -> Shard:
    return Shard(np.zeros((capacity, DIM + TAIL), np.float32))


def ids_of(*ids: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(ids, np.int64)


class Twin:
    """A shard and a dictionary that get the same updates."""

    def __init__(self, capacity: int) -> None:
        self.shard = shard_of(capacity)
        self.known: dict[int, int] = {}  # by id, the number of its row in `values`
        self.values = np.zeros((capacity, DIM), np.float32)

    def add(self, ids: list[int], amount: float) -> None:
        places, made = places_of(self.shard, ids_of(*ids), INITIAL, "t")
        rows_of(self.shard, DIM).values[places] += np.float32(amount)  # once for each distinct id
        new = [each for each in set(ids) if each not in self.known]
        assert made == len(new)
        self.values[len(self.known) : len(self.known) + made] = INITIAL.of(ids_of(*new))
        self.known |= {each: len(self.known) + at for at, each in enumerate(new)}
        self.values[[self.known[each] for each in set(ids)]] += np.float32(amount)

    def check(self, ids: list[int]) -> None:
        read, found = read_rows(self.shard, ids_of(*ids), INITIAL)
        expected = INITIAL.of(ids_of(*ids))
        known = [at for at, each in enumerate(ids) if each in self.known]
        assert found == len(known)
        expected[known] = self.values[[self.known[ids[at]] for at in known]]
        np.testing.assert_array_equal(read, expected)

    def rebuild(self) -> None:
        """Go on as after a restart: with the array alone."""
        self.shard = Shard(self.shard.array.copy())

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
    rows = TableRows(array, DIM)
    assert 20 < len(same) < 100
    rows.append(same, np.repeat(same, DIM).reshape(-1, DIM).astype(np.float32))
    np.testing.assert_array_equal(rows.find(same), np.arange(len(same)))
    np.testing.assert_array_equal(rows.take(rows.find(same))[:, 0], same)
    assert (rows.find(ids_of(-1, MOST)) == -1).all()


def test_a_full_shard_takes_known_ids_only_and_stays_as_it_was() -> None:
    shard = shard_of(4)
    places_of(shard, ids_of(1, 2, 3), INITIAL, "t")
    before = shard.array.copy()
    for ids in (ids_of(4, 5), ids_of(5, 1, 4)):
        with pytest.raises(InvalidUpdateError, match="table 't' is full: a shard has 3 rows and room for 1 more"):
            check_room(shard, ids, DIM, "t")
        with pytest.raises(InvalidUpdateError, match="such as 5: give the table a larger capacity"):
            places_of(shard, ids, INITIAL, "t")
    np.testing.assert_array_equal(shard.array, before)
    check_room(shard, ids_of(4, 4, 4, 1), DIM, "t")
    assert places_of(shard, ids_of(4, 4, 1), INITIAL, "t")[1] == 1
    assert rows_of(shard, DIM).room == 0
    check_room(shard, ids_of(1, 2, 3, 4), DIM, "t")


def test_ids_survive_arithmetic_on_whole_rows_even_if_it_fails() -> None:
    shard = shard_of(4)
    ids = ids_of(-1, MOST, 0x7FA0_0001_7FA0_0001)  # bits of NaNs, signalling ones, too
    places, _ = places_of(shard, ids, INITIAL, "t")
    rows = rows_of(shard, DIM)

    def fail_halfway() -> None:
        with rows.only_values(places):
            assert not shard.array[places, DIM:].any()
            shard.array[places] = shard.array[places] * 3 + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    np.testing.assert_array_equal(TableRows(np.asarray(shard.array, np.float32), DIM).find(ids), places)
    np.testing.assert_array_equal(rows.take(places), INITIAL.of(ids) * 3 + 1)


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
