"""Embedding tables that grow, admit rows and drop them, on real servers: through kills, moves and checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
