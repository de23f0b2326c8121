"""`LocalCluster.scale`: workers are started and stopped under load, and every function counts once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    experimental_get_current_worker_index,
)
from pscluster.core.errors import ConfigurationError, MisuseError


@contextmanager
def load(coordinator: ClusterCoordinator, count: Variable) -> Iterator[set[int]]:
    """Schedule counted functions within the block, and check the count after it; yields the workers that ran some."""
    workers: set[int] = set()
    over = threading.Event()

    def step() -> int:
        count.assign_add(np.ones(1))
        return experimental_get_current_worker_index()

    scheduled = 0

    def schedule() -> None:
        nonlocal scheduled
        while not over.is_set():
            values = [coordinator.schedule(step) for _ in range(50)]
            scheduled += len(values)
            workers.update(coordinator.fetch(values, TIMEOUT))

    thread = threading.Thread(target=schedule)
    thread.start()
    try:
        yield workers
    finally:
        over.set()
        thread.join(TIMEOUT)
    coordinator.join(TIMEOUT)
    assert count.numpy()[0] == scheduled > 0


@pytest.mark.parametrize("options", [{}, {"transport": "tcp"}, {"tls": True}], ids=["unix", "tcp", "tls"])
def test_up_and_down_under_load(options: dict[str, object]) -> None:
    """New workers get work at once, those with the highest indices are stopped, and each function counts once."""
    with (
        LocalCluster(1, 2, log_level="ERROR", **options) as cluster,  # type: ignore[arg-type]
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            count = Variable(np.zeros(1), name="count")
        coordinator = ClusterCoordinator(strategy)
        with load(coordinator, count) as workers:
            cluster.scale(workers=4)
            until(lambda: {2, 3} < workers, "the new ones have run functions", coordinator.explain)
            assert len(cluster.pids) == 5
            cluster.scale(workers=1)
            assert set(cluster.pids) == {("ps", 0), ("worker", 0)}
            until(
                lambda: coordinator.describe().endswith("1 of 1 workers up"), "nothing is missing", coordinator.describe
            )
            cluster.scale(workers=2)
            workers.clear()
            until(lambda: 1 in workers, "the second one has run functions again", coordinator.explain)
        assert [peer.index for peer in strategy.context.workers] == [0, 1]


def test_before_there_is_a_strategy() -> None:
    """A strategy that is made later has them, also those that were started then; they are restarted as all others."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster:
        cluster.scale(workers=2)
        with ParameterServerStrategy(cluster) as strategy:
            coordinator = ClusterCoordinator(strategy)
            assert len(strategy.context.workers) == 2
            until(lambda: coordinator.workers_up == 2, "both are up", coordinator.describe)
            pid = cluster.kill("worker", 1)
            cluster.wait_restarted("worker", 1, pid)
            until(lambda: coordinator.workers_up == 2, "both are up again", coordinator.describe)
        cluster.scale(workers=1)
        with ParameterServerStrategy(cluster) as strategy:
            assert ClusterCoordinator(strategy).schedule(experimental_get_current_worker_index).fetch(TIMEOUT) == 0


def test_wrong_values() -> None:
    """A number that is none, or out of range, changes nothing; a cluster that is stopped can't be scaled."""
    cluster = LocalCluster(1, 1)
    with pytest.raises(MisuseError, match="isn't running"):
        cluster.scale(2)
    for workers in (0, -1, 1001, 1.5, True):
        with pytest.raises((ConfigurationError, TypeError), match="workers"):
            cluster.scale(workers)  # type: ignore[arg-type]
    cluster.stop()
