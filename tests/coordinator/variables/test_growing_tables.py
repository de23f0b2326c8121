"""Embedding tables that grow, admit rows and drop them, on real servers: through kills, moves and checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.coordinator.variables.test_embedding_tables import DIM, INITIAL, move_all
from tests.core.metrics.scraping import addresses, scrape
from tests.faults.support import Job, running_job
from tests.faults.test_ps_healing import kill
from tests.ps.strings import texts_of
from tests.waiting import until

from pscluster.coordinator import (
    EmbeddingTable,
    IndexedSlices,
    SavedVariables,
    initializers,
    optimizers,
    table_policies,
)
from pscluster.coordinator.api import Checkpoint
from pscluster.coordinator.moves.plan import ProposedCut
from pscluster.coordinator.serving import ServingTable, export_delta
from pscluster.ps.tables import shards_of

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two servers with logs."""
    with running_job(num_ps=2, num_workers=1, durability="log") as job:
        yield job


@pytest.mark.timeout(120)
@pytest.mark.parametrize("capacity", [None, 20_000])
def test_rows_come_and_go_while_a_table_moves(job: Job, capacity: int | None) -> None:
    """Slots come along with the rows that were made meanwhile; what the target has saved is whole."""
    eviction = None if capacity is None else table_policies.LeastRecentlyUsed()
    with job.strategy.scope():
        table = EmbeddingTable(
            DIM, capacity=capacity, initializer=initializers.Zeros(), eviction=eviction, num_shards=1
        )
        adagrad = optimizers.Adagrad(1.0)
        spread = EmbeddingTable(DIM)
    assert sorted(spread.owners) == [0, 1]
    assert table.capacity == capacity
    ids = np.arange(200_000) * 7919
    ended = threading.Event()

    def train() -> None:
        for start in range(0, len(ids), 5000):
            rows = ids[start : start + 5000]
            adagrad.apply_gradients([(IndexedSlices(np.ones((len(rows), DIM), np.float32), rows), table)])
        ended.set()

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        until(lambda: len(table) > 10_000, "the table has rows")
        target = 1 - table.owners[0]
        moves = 0
        while not ended.is_set() or not moves:
            assert job.strategy.move_shard(table.variables[0], target) is not None
            moves, target = moves + 1, 1 - target
        training.result()
    kill(job, 0, 1)
    kept = ids[-len(table) :]  # the least recently used have gone
    assert len(kept) == (capacity or len(ids))
    assert not table.lookup(ids[: -len(kept)]).any()
    adagrad.apply_gradients([(IndexedSlices(np.ones((len(kept), DIM), np.float32), kept), table)])
    expected = -(1 / np.sqrt(1.1) + 1 / np.sqrt(2.1))
    np.testing.assert_allclose(table.lookup(kept), expected, rtol=1e-4)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ids", "policy"), [(str, table_policies.LeastRecentlyUsed()), (int, table_policies.Unused(steps=4))], ids=str
)
def test_rows_that_are_dropped_stay_so_through_kills_and_moves(
    job: Job, ids: Any, policy: table_policies.Eviction
) -> None:
    """Servers that return have the rows that there were, no others; each has the values of a dictionary."""
    with job.strategy.scope():
        table = EmbeddingTable(DIM, ids=ids, capacity=300, initializer=INITIAL, eviction=policy)
        adagrad = optimizers.Adagrad(1.0)
    rng, known = np.random.default_rng(2), dict[Any, float]()
    ids = texts_of(np.arange(1000)) if ids is str else np.arange(1000) * 7919
    initial = table.lookup(ids)

    def rows() -> npt.NDArray[np.bool_]:
        """Which ids have rows, all of which have the values of the dictionary."""
        found = table.lookup(ids)
        here: npt.NDArray[np.bool_] = (found != initial).any(1)
        assert here.sum() == len(table)
        np.testing.assert_array_equal(found[here], [[known[each]] * DIM for each in ids[here].tolist()])
        return here

    dropped = 0
    for number in range(1, 60):
        some = ids[rng.zipf(1.2, 60) * 17 % len(ids)]
        table.scatter_update(IndexedSlices(np.full((len(some), DIM), number), some))
        known |= dict.fromkeys(some.tolist(), float(number))
        if number in (15, 40):
            before = rows()
            kill(job, 0, 1)
            np.testing.assert_array_equal(rows(), before)
        if number == 30:
            before = rows()
            move_all(job, table)
            np.testing.assert_array_equal(rows(), before)
        dropped = max(dropped, len(known) - len(table))
    assert dropped > 50
    before, slots = rows(), IndexedSlices(np.ones((1, DIM), np.float32), ids[:1])
    adagrad.apply_gradients([(slots, table)])
    path = Path(job.folder) / f"checkpoint of {table.name}"
    Checkpoint(job.strategy).write(str(path))
    saved = table.lookup(ids)
    assert len(SavedVariables(path).rows(table.name)[0]) == len(table)
    table.scatter_update(IndexedSlices(np.zeros((200, DIM)), ids[::5]))
    Checkpoint(job.strategy).read(str(path))
    np.testing.assert_array_equal(table.lookup(ids), saved)


def cut(job: Job, shards: int, *tables: EmbeddingTable) -> list[int]:
    """Cut tables into this number of shards; return how many bytes were copied of each."""
    cuts = tuple(ProposedCut(table.name, 0, 0.9, table.num_shards, shards, True) for table in tables)
    applied = job.strategy.apply(replace(job.strategy.plan("bytes"), moves=(), cuts=cuts))
    assert applied.left == ()
    return [made.nbytes for made in applied.cuts]


def test_plans_weigh_the_rows_that_there_are(job: Job) -> None:
    """Not those that a table has room for."""
    with job.strategy.scope():
        table = EmbeddingTable(DIM, initializer=INITIAL, capacity=1 << 20)
    before = sum(job.strategy.plan("bytes").before)
    table.scatter_update(IndexedSlices(np.ones((100, DIM)), np.arange(100)))
    assert sum(job.strategy.plan("bytes").before) - before == 100 * 4 * table.partition.shape[1]
    job.strategy.delete_variable(table)


@pytest.mark.timeout(120)
def test_tables_are_cut_into_other_numbers_of_shards(job: Job, tmp_path: Path) -> None:
    """Rows, slots and residuals are those of tables that stay as they are, for functions as for the script.

    So they are through kills, checkpoints of other cuts, and deltas.
    """
    options: list[dict[str, Any]] = [{}, {"ids": str, "capacity": 3000}, {"wire_dtype": "int8"}]
    with job.strategy.scope():
        pairs = [[EmbeddingTable(DIM, initializer=INITIAL, num_shards=2, **of) for _ in range(2)] for of in options]
        adam = optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)
    tables, rng, ids = [table for table, _ in pairs], np.random.default_rng(4), np.arange(2000) * 7919

    def ids_of(table: EmbeddingTable, some: Array) -> Array:
        return texts_of(some) if table.id_type is str else some

    def step(some: Array, gradient: Array) -> list[int]:
        adam.apply_gradients(
            [(IndexedSlices(gradient, ids_of(each, some)), each) for pair in pairs for each in pair],
        )
        return [each.num_shards for each in tables]

    def train(shards: int) -> None:
        for _ in range(4):
            some = ids[rng.choice(len(ids), 300, replace=False)]
            gradient = rng.normal(size=(len(some), DIM)).astype(np.float32)
            assert job.coordinator.schedule(step, args=(some, gradient)).fetch() == [shards] * len(tables)

    def check() -> None:
        for table, twin in pairs:
            asked = ids_of(table, ids)
            np.testing.assert_array_equal(table.lookup(asked), twin.lookup(asked))
            assert len(table) == len(twin) > 0

    train(2)
    earlier = tmp_path / "earlier"
    Checkpoint(job.strategy).write(str(earlier))
    before = tables[1].lookup(ids_of(tables[1], ids))
    copied = cut(job, 5, *tables)
    assert copied[0] == len(tables[0]) * (4 * 4 * DIM + 16), "values, two slots, an average, and ids once"
    check()
    train(5)
    check()
    kill(job, 0, 1)
    check()
    later = tmp_path / "later"
    Checkpoint(job.strategy).write(str(later))
    for table in tables:
        changed = export_delta(later, table.name, since=earlier, out=tmp_path / "delta")
        served = ServingTable.open(earlier, table.name)
        served.follow(tmp_path / "delta")
        asked = ids_of(table, ids)
        np.testing.assert_array_equal(served.lookup(asked), table.lookup(asked))
        ever = ServingTable.open(earlier, table.name).lookup(asked)
        assert changed.changed == np.count_nonzero((ever != table.lookup(asked)).any(1))
    assert tables[1].capacity == 3000
    cut(job, 3, *tables)
    check()
    train(3)
    check()
    Checkpoint(job.strategy).read(str(earlier))
    np.testing.assert_array_equal(tables[1].lookup(ids_of(tables[1], ids)), before)
    train(3)
    check()


@pytest.mark.timeout(60)
def test_a_cut_keeps_ages_and_what_was_seen(job: Job) -> None:
    """Rows are dropped as old as ever, and ids admitted as soon. A full table can be cut, too."""
    policies = table_policies
    with job.strategy.scope():
        ages = EmbeddingTable(DIM, initializer=INITIAL, eviction=policies.Unused(steps=4), num_shards=2)
        seen = EmbeddingTable(DIM, initializer=INITIAL, admission=policies.SeenTimes(3), num_shards=2)
        full = EmbeddingTable(
            DIM, initializer=INITIAL, capacity=1000, eviction=policies.LeastFrequentlyUsed(), num_shards=2
        )
        sgd = optimizers.SGD(1.0)
    ids = np.arange(5000)
    busy, quiet = ids[shards_of(ids, 2) == 0][:1], ids[shards_of(ids, 4) == 2][:2]
    popular = ids[:400]
    initial = full.lookup(popular)

    def update(table: EmbeddingTable, *of: Array) -> None:
        for some in of:
            sgd.apply_gradients([(IndexedSlices(np.ones((len(some), DIM), np.float32), some), table)])

    for some in (*[busy] * 6, quiet[:1]):  # unlike gradients these are updates of the shards of their ids alone
        ages.scatter_add(IndexedSlices(np.ones((1, DIM)), some))
    update(seen, ids[:50], ids[:50], ids[50:60])
    update(full, popular, popular, *np.split(ids[1000:], 40))
    rows = len(full)
    assert rows > 1000, "each shard has some room beyond its share, and all of it is taken"
    cut(job, 4, ages, seen, full)
    assert (len(ages), len(seen), len(full)) == (2, 0, rows)
    for _ in range(4):
        ages.scatter_add(IndexedSlices(np.ones((1, DIM)), quiet[1:]))
    assert len(ages) == 3, "the row is as many steps old as it may be"
    ages.scatter_add(IndexedSlices(np.ones((1, DIM)), quiet[1:]))
    assert len(ages) == 2
    update(seen, ids[:100])
    assert len(seen) == 50, "seen for the third time"
    update(full, *np.split(ids[3000:], 20))
    assert 1000 < len(full) <= full.partition.shape[0]
    np.testing.assert_allclose(full.lookup(popular), initial - 2, rtol=1e-5, err_msg="used more than once")


@pytest.mark.timeout(60)
def test_ids_are_admitted_by_gradients_of_functions(job: Job, tmp_path: Path) -> None:
    """A server that dies knows what it has admitted; counts of those that it has not begin anew, as in a restore."""
    with job.strategy.scope():
        admission = table_policies.SeenTimes(3)
        table = EmbeddingTable(DIM, initializer=INITIAL, admission=admission, name="admitting", num_shards=1)
        sgd = optimizers.SGD(1.0)

    def step(ids: Array) -> None:
        sgd.apply_gradients([(IndexedSlices(np.ones((len(ids), DIM), np.float32), ids), table)])

    seen, later = np.arange(5), np.array([77])
    before = table.lookup(seen)
    for number in range(4):
        job.coordinator.schedule(step, args=(seen,)).fetch()
        np.testing.assert_allclose(table.lookup(seen), before - max(number - 1, 0), rtol=1e-5)
    step(later)
    step(later)
    assert sgd.iterations == 6
    scraped = scrape(addresses(job.strategy)[f"ps {table.owners[0]}"])
    assert scraped.value("pscluster_ps_table_rows_not_admitted_total", variable="admitting") == 12
    kill(job, table.owners[0])
    assert len(table) == 5
    np.testing.assert_allclose(table.lookup(seen), before - 2, rtol=1e-5)
    path = str(tmp_path / "checkpoint")
    Checkpoint(job.strategy).write(path)
    for _ in range(2):
        step(later)
        step(later)
        assert len(table) == 5
        Checkpoint(job.strategy).read(path)
    table.scatter_add(IndexedSlices(np.ones((1, DIM)), later))
    assert len(table) == 6
