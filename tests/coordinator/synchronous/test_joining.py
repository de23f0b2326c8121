"""Workers that join and leave between the steps of a SynchronousStrategy, and within a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import Gate, leave_mark, marks, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    optimizers,
    replica_context,
)
from pscluster.core.errors import UnavailableError


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """A server and two workers, for one test, which may change that."""
    with LocalCluster(1, 2, log_level="ERROR") as cluster:
        yield cluster


def ranks() -> int:
    """The number of replicas of the step."""
    return replica_context().num_replicas_in_sync


def test_between_runs(cluster: LocalCluster) -> None:
    """The next run has the workers that are there; one with an older iterator those that it was made for."""
    with SynchronousStrategy(cluster) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(1), name="w")
            optimizer = optimizers.SGD(1.0)
        coordinator = ClusterCoordinator(strategy)

        def step(iterator: Any) -> tuple[int, np.ndarray[Any, Any]]:
            batch = next(iterator)
            optimizer.apply_gradients([(-np.ones(1), w)])
            return ranks(), batch

        data = strategy.distribute_dataset([np.arange(6)] * 20)
        old = iter(data)
        assert strategy.local_results(strategy.run(step, (old,)))[0][0] == 2
        cluster.scale(workers=3)
        until(lambda: coordinator.workers_up == 3, "the third one is up", coordinator.describe)
        assert strategy.num_replicas_in_sync == 3
        assert list(strategy.local_results(strategy.run(ranks))) == [3, 3, 3]
        sizes, batches = zip(*strategy.local_results(strategy.run(step, (old,))), strict=True)
        assert sizes == (2, 2)
        assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
        new = iter(data)
        sizes, batches = zip(*strategy.local_results(strategy.run(step, (new,), steps=2)), strict=True)
        assert sizes == (3, 3, 3)
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
        cluster.scale(workers=2)
        until(lambda: len(strategy.context.workers) == 2, "the third one has left", coordinator.describe)
        sizes, batches = zip(*strategy.local_results(strategy.run(step, (new,))), strict=True)
        assert sizes == (3, 3, 3), "another worker runs its replica"
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
        assert strategy.local_results(strategy.run(step, (iter(data),)))[0][0] == 2
        assert w.numpy()[0] == 2 + 2 + 3 + 3 + 3 + 2, "each step of each replica once"


def test_within_a_run(tmp_path: Path) -> None:
    """A run that can't do without a worker that leaves fails, and says so; the next one has those that are left."""
    gate = Gate(tmp_path / "gate")
    with (
        LocalCluster(1, 3, log_level="ERROR", grace=0.1) as cluster,
        SynchronousStrategy(cluster, min_replicas=3) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)

        def step(path: str) -> None:
            leave_mark(path, str(replica_context().replica_id_in_sync_group))
            wait_for_file(path)

        errors: list[BaseException] = []

        def run() -> None:
            try:
                strategy.run(step, (gate.path,), steps=1000)
            except UnavailableError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: len(marks(gate)) == 3, "all have begun", coordinator.describe)
        cluster.scale(workers=2)
        gate.open()
        thread.join(TIMEOUT)
        assert len(errors) == 1
        assert "worker 2" in str(errors[0])
        assert "has left the cluster" in str(errors[0])
        with pytest.raises(ValueError, match="min_replicas is 3, but there are 2 replicas"):
            strategy.run(ranks)
        cluster.scale(workers=3)
        assert strategy.local_results(strategy.run(ranks)) == (3, 3, 3)
