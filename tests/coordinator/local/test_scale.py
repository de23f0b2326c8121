"""`LocalCluster.scale`: workers are started and stopped under load, and every function counts once."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
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


def test_a_worker_that_registers_while_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed and restarted just then, it leaves the cluster all the same, and its place is free at once."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        ClusterCoordinator(strategy)
        context, remove = strategy.context, cluster._remove
        cluster.scale(workers=2)
        until(lambda: context.dispatcher is not None and context.dispatcher.state.workers_up == 2, "both are up")

        def late(*task: Any) -> bool:
            before = context._boot_ids.get(1)
            cluster.kill("worker", 1)
            until(lambda: context._boot_ids.get(1, before) != before, "its next process has registered")
            return remove(*task)

        monkeypatch.setattr(cluster, "_remove", late)
        cluster.scale(workers=1)
        until(lambda: context._members.indices == [0], "it has left", timeout=30)


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


def test_workers_that_have_ended_are_started_again() -> None:
    """One that was given up, and one that was stopped from outside."""
    with LocalCluster(1, 2, max_restarts=0, log_level="ERROR", env=lambda _, index: {"MINE": "abc"[index]}) as cluster:
        with pytest.raises(ConfigurationError, match=r"env\('worker', 3\) raised IndexError"):
            cluster.scale(workers=4)
        cluster.scale(workers=3)  # the new one serves
        cluster.kill("worker", 0)
        until(lambda: "giving it up" in cluster.why_gone("worker", 0), "it is given up")
        cluster.kill("worker", 2, signal.SIGTERM)
        until(lambda: "worker 2 finished" in repr(cluster), "it has ended", lambda: repr(cluster))
        cluster.scale(workers=3)
        assert set(cluster.pids) == {("ps", 0), *(("worker", index) for index in range(3))}
        cluster.check()
        with ParameterServerStrategy(cluster) as strategy:
            coordinator = ClusterCoordinator(strategy)
            found = coordinator.schedule_together(lambda: os.environ["MINE"])
            assert coordinator.fetch(found, TIMEOUT) == ["a", "b", "c"], "each has its own variables"


def test_data_across_a_join() -> None:
    """Parts of a distributed dataset are visited once while workers join and leave; a new one has iterators."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            visits = Variable(np.zeros(201, np.int64), name="visits")
        coordinator = ClusterCoordinator(strategy)

        def visit(part: Any) -> int:
            for rows in part:
                visits.scatter_add(IndexedSlices(np.ones(len(rows), np.int64), rows))
            return experimental_get_current_worker_index()

        def element(iterator: Any) -> tuple[int, Any]:
            return experimental_get_current_worker_index(), next(iterator)

        def pipelines(context: Any) -> Iterator[tuple[int, int]]:
            return itertools.repeat((context.input_pipeline_id, context.num_input_pipelines))

        iterator = iter(coordinator.create_per_worker_dataset(pipelines))
        epochs = 0
        for size in (3, 1, 2):
            data = coordinator.distribute_dataset(np.arange(201), name=f"rows {size}").shuffle(seed=size).batch(2)
            values = [coordinator.schedule(visit, args=(part,)) for part in data.repeat(3)]
            cluster.scale(workers=size)
            coordinator.join(TIMEOUT)
            epochs += 3
            assert visits.numpy().tolist() == [epochs] * 201
            assert len(values) >= 3
            until(lambda size=size: coordinator.workers_up == size, "all are up", coordinator.describe)  # type: ignore[misc]

            def workers() -> set[int]:
                some = [coordinator.schedule(element, args=(iterator,)) for _ in range(20)]
                found = coordinator.fetch(some, TIMEOUT)
                for worker, (pipeline, of) in found:
                    assert pipeline == worker < of <= 3
                return {worker for worker, _ in found}

            seen: set[int] = set()
            while len(seen) < size:
                seen |= workers()
            assert seen == set(range(size))


def test_wrong_values() -> None:
    """A number that is none, or out of range, changes nothing; a cluster that is stopped can't be scaled."""
    cluster = LocalCluster(1, 1)
    with pytest.raises(MisuseError, match="isn't running"):
        cluster.scale(2)
    for workers in (0, -1, 1001, 1.5, True):
        with pytest.raises((ConfigurationError, TypeError), match="workers"):
            cluster.scale(workers)  # type: ignore[arg-type]
    cluster.stop()
