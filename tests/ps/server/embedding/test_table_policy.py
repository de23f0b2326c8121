"""Rows of a table's shard that come and go, against a dictionary, and as a log has them done again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.core.geometry.partition import Partition
from pscluster.ps.initializers import RandomUniform
from pscluster.ps.optim.rules import Adagrad
from pscluster.ps.server.embedding import table_changes, table_policy
from pscluster.ps.server.embedding.table_changes import RowChanges, carry_out, decide, record_bytes, recorded
from pscluster.ps.server.embedding.table_policy import (
    CountMinSketch,
    admitted,
    ages,
    least_used,
    moved_to,
    newest,
    uses,
    window,
)
from pscluster.ps.server.embedding.tables import new_array, new_slots, read_rows, restore_rows, rows_of
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.table_policies import (
    Admission,
    Eviction,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    SeenTimes,
    SmallNorm,
    Unused,
    WithProbability,
    check_policies,
)
from pscluster.ps.tables import TAIL, Ids, InitialRows
from pscluster.v1 import ps_pb2, state_pb2

DIM = 2
ADAGRAD = 1
FILLS: Mapping[int, Mapping[str, float]] = {ADAGRAD: Adagrad().slots}
INITIAL = InitialRows(RandomUniform(0.5, 1.0, seed=5), DIM)
Array = npt.NDArray[Any]


class Table:
    """A shard with slots, and what its log has."""

    def __init__(self, capacity: int, admission: Admission | None = None, eviction: Eviction | None = None) -> None:
        spec = ps_pb2.VariableSpec(id=1, name="t", dtype="float32", shape=(capacity, DIM + TAIL), owners=[0])
        spec.table.dim, spec.table.initializer = DIM, "random_uniform"
        spec.table.numbers = json.dumps(INITIAL.initializer.values_by_name())
        if admission is not None:
            spec.table.admission.CopyFrom(admission.message())
        if eviction is not None:
            spec.table.eviction.CopyFrom(eviction.message())
        check_policies(spec)
        self.shard = Shard(new_array(0, capacity, DIM + TAIL), row_limit=capacity)
        self.shard.slots[ADAGRAD] = new_slots(Adagrad(), 0, capacity, DIM)
        partition = Partition.even(tuple(spec.shape), (1, 1))
        self.held = HeldVariable(spec, np.dtype(np.float32), partition, {0: self.shard})
        self.log: list[tuple[Ids, float, bytes]] = []

    def update(self, ids: Any, value: float = 1.0, *, gradient: bool = True) -> set[int]:
        """Add the value to rows and slots; return the ids that were dropped."""
        ids = np.asarray(ids, np.int64)
        changes = decide(self.held, self.shard, ids, None, gradient=gradient)
        record = changes.record(0).SerializeToString()
        assert len(record) <= record_bytes(self.held.spec.table, len(ids)) + 24
        self._apply(ids, value, changes)
        self.log.append((ids, value, record))
        return set(changes.evicted.tolist())

    def _apply(self, ids: Ids, value: float, changes: RowChanges) -> None:
        places = np.unique(carry_out(self.held, self.shard, ids, changes, FILLS.__getitem__).places)
        arrays: list[Any] = [self.shard.array, self.shard.slots[ADAGRAD]["accumulator"]]
        for array in arrays:
            array[places, :DIM] += np.float32(value)
        self.shard.updates += 1

    def replayed(self) -> Table:
        """Return what another process makes of the log."""
        other = Table(self.shard.row_limit)
        other.held.spec.CopyFrom(self.held.spec)
        for ids, value, record in self.log:
            changes = recorded(other.held, other.shard, ids, state_pb2.TableChange.FromString(record))
            other._apply(ids, value, changes)
        return other

    @property
    def ids(self) -> set[int]:
        return set(rows_of(self.shard, DIM).ids().tolist())

    def contents(self) -> dict[int, tuple[bytes, bytes]]:
        """By id: all of its row, and its slots."""
        rows = rows_of(self.shard, DIM)
        ids = rows.ids()
        np.testing.assert_array_equal(rows.find(ids), np.arange(rows.count))
        values, slots = self.shard.array, self.shard.slots[ADAGRAD]["accumulator"]
        assert (values.shape, slots.shape) == ((rows.count, DIM + TAIL), (rows.count, DIM))
        return {id_: (values[at].tobytes(), slots[at].tobytes()) for at, id_ in enumerate(ids.tolist())}


class Model:
    """Values, and uses, of the rows that a table with an eviction by use has, by id."""

    def __init__(self) -> None:
        self.values: dict[int, Array] = {}
        self.used: dict[int, tuple[int, int]] = {}  # last step, and how often
        self.step = 0

    def update(self, ids: list[int], value: float, gone: set[int]) -> None:
        self.step += 1
        for each in gone:
            del self.values[each], self.used[each]
        for each in set(ids):
            if each not in self.values:
                self.values[each], self.used[each] = INITIAL.of(np.array([each]))[0], (0, 0)
            self.values[each] = self.values[each] + np.float32(value)
            self.used[each] = self.step, self.used[each][1] + 1


operations = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), max_size=40)


@given(operations, st.sampled_from([LeastRecentlyUsed(), LeastFrequentlyUsed()]))
@settings(max_examples=60, deadline=None)
def test_the_least_used_make_room(batches: list[list[int]], policy: Eviction) -> None:
    table, model = Table(8, eviction=policy), Model()
    for number, ids in enumerate(batches):
        before = dict(model.used)
        gone = table.update(ids, number + 1.0)
        assert not gone & set(ids)
        assert len(gone) == max(len(before.keys() | set(ids)) - 8, 0)
        rank = {each: use if policy == LeastRecentlyUsed() else use[::-1] for each, use in before.items()}
        others = before.keys() - gone - set(ids)
        assert max((rank[each] for each in gone), default=(0, 0)) <= min(
            (rank[each] for each in others), default=(99, 0)
        )
        model.update(ids, number + 1.0, gone)
        assert table.ids == model.values.keys()
    known = np.array(list(model.values), np.int64)
    if len(known):
        np.testing.assert_array_equal(read_rows(table.shard, known, INITIAL)[0], list(model.values.values()))
    assert table.replayed().contents() == table.contents()


POLICIES: list[tuple[Admission | None, Eviction | None]] = [
    (SeenTimes(3), None),
    (SeenTimes(2), LeastRecentlyUsed()),
    (WithProbability(0.2), LeastFrequentlyUsed()),
    (None, Unused(steps=20)),
    (WithProbability(0.5, seed=7), Unused(seconds=1)),
    (None, SmallNorm(1.9)),
]


@pytest.mark.parametrize(("admission", "eviction"), POLICIES, ids=str)
def test_a_log_does_again_what_was_decided(
    admission: Admission | None, eviction: Eviction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160,000 random operations each; values of rows that are there are those of a dictionary."""
    by_use = isinstance(eviction, LeastRecentlyUsed | LeastFrequentlyUsed)
    table, rng = Table(2000 if by_use else 20_000, admission, eviction), np.random.default_rng(3)
    tenths = iter(range(10_000, 20_000))
    monkeypatch.setattr(table_changes, "time", SimpleNamespace(monotonic=lambda: next(tenths) / 10))
    known: dict[int, float] = {}
    for number in range(160):
        ids = (rng.zipf(1.1, 1000) % 10_000) * 7919
        for each in table.update(ids, number / 64):
            known.pop(each)
        for each in set(ids.tolist()) & table.ids:
            known[each] = known.get(each, 0.0) + number / 64
        assert known.keys() == table.ids
    initial = INITIAL.of(np.array(list(known), np.int64))
    values = read_rows(table.shard, np.array(list(known), np.int64), INITIAL)[0]
    np.testing.assert_allclose(values, initial + np.array(list(known.values()))[:, None], rtol=1e-4)
    assert table.replayed().contents() == table.contents()
    assert len(known) > 100
    assert (table.held.metrics.rows_evicted > 100) is (eviction is not None)
    assert (table.held.metrics.rows_not_admitted > 100) is (admission is not None)


def test_an_id_that_comes_back_is_new() -> None:
    table = Table(2, eviction=LeastRecentlyUsed())
    with pytest.raises(InvalidUpdateError, match="larger capacity, or update fewer ids at once"):
        table.update([1, 2, 3])
    table.update([1], 5.0)
    first = table.contents()[1]
    table.update([2])
    assert table.update([3]) == {1}
    np.testing.assert_array_equal(read_rows(table.shard, np.array([1]), INITIAL)[0], INITIAL.of(np.array([1])))
    assert table.update([1], 5.0) == {2}
    assert table.contents()[1][1] == first[1]
    np.testing.assert_array_equal(read_rows(table.shard, np.array([1]), INITIAL)[0], INITIAL.of(np.array([1])) + 5)


def test_no_row_expires_because_the_clock_has_jumped(monkeypatch: pytest.MonkeyPatch) -> None:
    table, jumped = Table(100, eviction=Unused(seconds=3600)), time.time() + 86_400
    table.update([1, 2])
    monkeypatch.setattr(time, "time", lambda: jumped)
    assert table.update([2]) == set()
    passed = time.monotonic() + 3602
    monkeypatch.setattr(time, "monotonic", lambda: passed)
    assert table.update([2]) == {1}


def test_rows_that_are_not_used_go_by_age() -> None:
    table = Table(100, eviction=Unused(steps=3))
    table.update([1, 2])
    for _ in range(3):
        assert table.update([2]) == set()
    assert table.update([2]) == {1}
    assert table.update([9]) == set()
    full = Table(3, eviction=Unused(steps=50))
    full.update([1, 2, 3])
    before = full.contents()
    with pytest.raises(InvalidUpdateError, match="table 't' is full: a shard has 3 rows and room for 0 more"):
        full.update([4])
    assert full.contents() == before


def test_rows_of_small_norm_go_but_not_those_just_updated() -> None:
    table = Table(100, eviction=SmallNorm(3.0))
    table.update([1], -0.5)
    table.update([2], 9.0)
    assert table.ids == {2}
    table.update([1, 3], -0.5)
    assert table.ids == {1, 2, 3}


def test_ids_are_admitted_when_they_have_been_seen_often_enough() -> None:
    table = Table(100, admission=SeenTimes(3))
    for seen in range(1, 4):
        table.update([5, 5, 5])
        assert table.ids == ({5} if seen == 3 else set())
    table.update([6], gradient=False)
    assert table.ids == {5, 6}
    counts = CountMinSketch()
    ids = np.arange(100_000)
    for seen in (1, 2, 3):
        found = counts.add(ids)
        assert found.min() == seen
        assert (found > seen).mean() < 0.02
    for _ in range(40):  # it never gets full
        fresh = counts.add(np.random.default_rng(1).integers(0, 1 << 60, 100_000))
    assert fresh.max() <= 255


def test_a_probability_is_decided_by_seed_id_and_step() -> None:
    ids, seen = np.arange(100_000), CountMinSketch()
    policy = WithProbability(0.1, seed=3).message()
    first = admitted(policy, ids, seen, 1)
    assert 0.095 < first.mean() < 0.105
    np.testing.assert_array_equal(admitted(policy, ids, seen, 1), first)
    again = admitted(policy, ids, seen, 2)
    assert 0.008 < (first & again).mean() < 0.012
    assert admitted(WithProbability(1.0).message(), ids, seen, 1).all()


def test_clocks_of_32_bits_go_round_and_may_be_set_back() -> None:
    used = uses(np.array([0, (1 << 64) - 1], np.uint64), 0xFFFF_FFFE)
    assert (used & np.uint64(0xFFFF_FFFF)).tolist() == [1, 0xFFFF_FFFF]
    assert ages(used, 0x0000_0003).tolist() == [5, 5]
    assert ages(used, 0xFFFF_FF00).tolist() == [0, 0]
    assert ages(moved_to(used, 0x0000_0003, 100), 100).tolist() == [5, 5]
    assert newest(used) == 0xFFFF_FFFE
    assert (table_policy.in_steps((1 << 32) + 5), table_policy.in_seconds(3.9)) == (5, 3)


def test_windows_go_round_and_the_least_used_are_found() -> None:
    assert window(0, 5, 3)[0].tolist() == []
    places, hand = window(5, 3, 4)
    assert (places.tolist(), hand) == ([3, 4, 0, 1], 2)
    assert window(5, 99, 50)[0].tolist() == [4, 0, 1, 2, 3]
    used = np.array([(step << 32) | count for step, count in ((5, 9), (2, 3), (5, 1), (2, 8))], np.uint64)
    assert least_used(LeastRecentlyUsed().message(), used, 6, 2).tolist() == [1, 3]
    assert least_used(LeastFrequentlyUsed().message(), used, 6, 2).tolist() == [2, 1]
    assert least_used(LeastFrequentlyUsed().message(), used, 6, 9).tolist() == [0, 1, 2, 3]


def test_an_update_that_fails_leaves_the_rows_as_they_were() -> None:
    table = Table(3, eviction=LeastRecentlyUsed())
    table.update([1, 2, 3])
    before = table.contents()
    ids = np.array([4, 5])
    changes = decide(table.held, table.shard, ids, None, gradient=True)
    placed = carry_out(table.held, table.shard, ids, changes, FILLS.__getitem__)
    assert {4, 5} <= table.ids
    placed.undo()
    assert table.contents() == before
    wrong = state_pb2.TableChange(evicted=np.array([77]).tobytes())
    with pytest.raises(ValueError, match="no such rows to drop"):
        carry_out(table.held, table.shard, ids, recorded(table.held, table.shard, ids, wrong), FILLS.__getitem__)
    assert table.contents() == before


def test_restored_rows_are_as_old_as_they_were() -> None:
    """The clock of the shard that they come to shows something else."""
    saved = Table(100, eviction=Unused(steps=3))
    for ids in ([1, 2], [2], [2]):
        saved.update(ids)
    table = Table(100, eviction=Unused(steps=3))
    table.shard.updates = 1000
    arrays: dict[str, Array] = {"value": new_array(0, 100, DIM + TAIL)}
    source = ps_pb2.RestoreSource(tensor=ps_pb2.SavedTensor(array="value"))
    getattr(source, "from").append(0)
    spec = table.held.spec
    restore_rows(spec, 0, 100, 1000, arrays, {}, {"value": [source]}, lambda _: saved.shard.array)
    table.shard.array = arrays["value"]
    table.shard.slots.clear()
    table.shard.slots[ADAGRAD] = new_slots(Adagrad(), 2, 100, DIM)
    assert table.update([2]) == set()
    assert table.update([2]) == {1}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SeenTimes(0), "count is 0"),
        (lambda: SeenTimes(256), "count is 256"),
        (lambda: WithProbability(1.5), "probability is 1.5"),
        (lambda: WithProbability(0.5, seed=-1), "seed is -1"),
        (lambda: Unused(), "steps or seconds"),
        (lambda: Unused(steps=1, seconds=1), "steps or seconds"),
        (lambda: Unused(seconds=0), "seconds is 0"),
        (lambda: SmallNorm(float("nan")), "below is nan"),
    ],
)
def test_policies_that_make_no_sense_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_server_believes_no_policy() -> None:
    for admission, eviction in (
        (ps_pb2.TableAdmission(seen=1000), None),
        (ps_pb2.TableAdmission(probability=float("nan")), None),
        (ps_pb2.TableAdmission(), None),
        (None, ps_pb2.TableEviction()),
        (None, ps_pb2.TableEviction(kind=ps_pb2.TableEviction.STEPS)),
        (None, ps_pb2.TableEviction(kind=ps_pb2.TableEviction.NORM, norm=float("inf"))),
    ):
        table = ps_pb2.TableSpec(admission=admission, eviction=eviction)
        with pytest.raises(ProtocolError, match="table 't' has an invalid policy"):
            check_policies(ps_pb2.VariableSpec(name="t", table=table))
