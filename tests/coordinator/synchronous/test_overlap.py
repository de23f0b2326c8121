"""Steps that overlap in runs with bounded staleness: what they read, what they count, what may die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.coordinator.synchronous.support import rank

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    embedding_lookup,
)
from pscluster.core.errors import FunctionError, MisuseError

REPLICAS, STEPS, WIDTH = 2, 30, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[SynchronousStrategy]:
    with SynchronousStrategy(cluster, staleness=2) as strategy:
        yield strategy


def elements(strategy: SynchronousStrategy, count: int = STEPS) -> Any:
    return strategy.distribute_datasets_from_function(lambda: range(count))


def table_of(strategy: SynchronousStrategy, rows: int) -> Variable:
    """A table of zeros, that each replica has some rows of."""
    with strategy.scope():
        return Variable(np.zeros((REPLICAS * rows, WIDTH), np.float32), name="table")


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("at_once", [1, 7])
def test_rows_lack_few_steps_and_each_step_counts(
    strategy: SynchronousStrategy, tmp_path: Path, overlap: int, at_once: int
) -> None:
    """Rows that were named lack at most `overlap + 1` of the replica's steps; elements come once, and in order."""
    table, folder = table_of(strategy, 1), str(tmp_path)

    def named(element: int) -> Any:
        with open(f"{folder}/named-{rank()}", "a") as file:
            file.write(f"{element}\n")
        return [(table, [rank()])]

    def step(element: int) -> float:
        row = embedding_lookup([table], [rank()])[0]
        assert element - overlap - 1 <= row[0] <= element, (element, row)
        table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [rank()]))
        return float(element)

    history = ClusterCoordinator(strategy).fit(
        step,
        elements(strategy, 2 * STEPS),
        epochs=2,
        steps_per_epoch=STEPS,
        steps_per_execution=at_once,
        verbose=0,
        lookups=named,
        overlap=overlap,
    )
    assert history.history["loss"] == [np.mean(range(STEPS)), np.mean(range(STEPS, 2 * STEPS))]
    assert table.numpy().tolist() == np.full((REPLICAS, WIDTH), 2 * STEPS).tolist()
    for replica in range(REPLICAS):
        assert [int(line) for line in (tmp_path / f"named-{replica}").read_text().splitlines()] == [*range(2 * STEPS)]


def test_workers_that_die(tmp_path: Path) -> None:
    """A step is taken again unless it was complete: each updates its own row once, with whatever was under way."""
    with (
        LocalCluster(1, REPLICAS, log_level="ERROR") as cluster,
        SynchronousStrategy(cluster, staleness=1) as strategy,
    ):
        table = table_of(strategy, STEPS)
        folder = str(tmp_path)

        def step(element: int) -> None:
            mark = Path(folder, f"{rank()}-{element}")
            if element in (5, 11 + rank()) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            at = rank() * STEPS + element
            embedding_lookup([table], [at])
            table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [at]))

        def named(element: int) -> Any:
            return [(table, [rank() * STEPS + element])]

        ClusterCoordinator(strategy).fit(
            step,
            elements(strategy),
            steps_per_epoch=STEPS,
            steps_per_execution=10,
            verbose=0,
            lookups=named,
            overlap=1,
        )
        assert table.numpy().tolist() == np.ones((REPLICAS * STEPS, WIDTH)).tolist()
        assert len(list(tmp_path.iterdir())) == 2 * REPLICAS


def test_a_push_that_fails_fails_the_call(strategy: SynchronousStrategy) -> None:
    """Nothing that its replica pushed before is lost, nothing after it is sent; and the next training is in order."""
    table, coordinator = table_of(strategy, 1), ClusterCoordinator(strategy)
    with strategy.scope():
        gone = Variable(np.zeros(2, np.float32), name="gone")

    def step(element: int) -> None:
        if element == 4:
            gone.assign_add(np.ones(2, np.float32))
        table.scatter_add(IndexedSlices(np.ones((1, WIDTH), np.float32), [rank()]))

    def fit(first: int) -> None:
        data = strategy.distribute_datasets_from_function(lambda: range(first, first + STEPS))
        coordinator.fit(step, data, steps_per_epoch=STEPS, steps_per_execution=10, verbose=0, overlap=1)

    fit(10)  # so that workers have the function, and with it the handle
    strategy.delete_variable(gone)
    with pytest.raises(FunctionError, match="was deleted"):
        fit(0)
    counts = table.numpy()[:, 0].tolist()
    assert max(counts) == STEPS + 4.0
    assert min(counts) >= STEPS + 2.0, "the other one was at most two steps behind"
    fit(10)
    assert (table.numpy()[:, 0] - counts).tolist() == [STEPS] * REPLICAS


def test_more_overlap_than_staleness_is_refused(cluster: LocalCluster, strategy: SynchronousStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with pytest.raises(MisuseError, match=r"overlap is 3, and the staleness .* 2: .* staleness=3, .* overlap=2"):
        coordinator.fit(lambda _: None, elements(strategy), steps_per_epoch=2, verbose=0, overlap=3)
    with pytest.raises(MisuseError, match="lookups with a SynchronousStrategy"):
        coordinator.schedule(lambda _: None, args=(1,), lookups=lambda _: [])
