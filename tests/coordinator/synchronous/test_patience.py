"""Replicas wait for one that computes for longer than a worker may be silent, and not for one that is frozen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.coordinator.synchronous.support import rank
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    optimizers,
    replica_context,
)

LEASE = 1.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1, 2, log_level="ERROR") as cluster:
        yield cluster


def until_asked(folder: str, act: Callable[[], object]) -> None:
    """Hold replica 1 until replica 0, which acts meanwhile, has asked whether its worker is there."""
    if rank():
        until(lambda: bool(os.listdir(folder)), "replica 0 has asked")
        act()
        return
    links = replica_context()._gang
    assert links is not None
    answers = links._pool.answers

    def counted(member: Any, seconds: float) -> bool:
        answered = answers(member, seconds)
        (Path(folder) / str(answered)).touch()
        return answered

    links._pool.answers = counted  # type: ignore[method-assign]
    act()


@pytest.mark.parametrize("where", ["the end of a step", "a collective", "large gradients", "the bound"])
def test_one_that_computes_is_awaited(cluster: LocalCluster, tmp_path: Path, where: str) -> None:
    """Its worker answers. No step runs twice."""
    with SynchronousStrategy(cluster, staleness=1 if where == "the bound" else 0) as strategy:
        coordinator = ClusterCoordinator(strategy, worker_lease=LEASE)
        until(lambda: coordinator.workers_up == 2, "all workers are up")
        with strategy.scope():
            w = Variable(np.zeros(40_000 if where == "large gradients" else 4), name="w")
            sgd = optimizers.SGD(1.0)

        def step(folder: str) -> int:
            def act() -> None:
                if where == "a collective":
                    replica_context().barrier()
                sgd.apply_gradients([(np.ones(w.shape), w)])

            until_asked(folder, act)
            return os.getpid()

        pids = strategy.run(step, (str(tmp_path),), timeout=TIMEOUT)
        assert pids.values == tuple(cluster.pids["worker", index] for index in range(2))
        assert (w.numpy() == -2.0).all()
        assert os.listdir(tmp_path) == ["True"]


def test_one_that_is_frozen_is_not_awaited(cluster: LocalCluster, tmp_path: Path) -> None:
    """After its lease another worker runs its replica, and once it thaws it is used again."""
    with SynchronousStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy, worker_lease=LEASE)
        until(lambda: coordinator.workers_up == 2, "all workers are up")
        with strategy.scope():
            w = Variable(np.zeros(2), name="w")
        home = cluster.pids["worker", 1]

        def step(folder: str) -> int:
            mark = Path(folder) / "frozen"
            if rank() and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            w.assign_add(np.full(2, rank() + 1.0))
            return os.getpid()

        try:
            pids = strategy.run(step, (str(tmp_path),), steps=2, timeout=TIMEOUT)
            assert pids.values == (cluster.pids["worker", 0],) * 2
            assert w.numpy().tolist() == [6.0, 6.0]
        finally:
            os.kill(home, signal.SIGCONT)
        until(lambda: strategy.run(os.getpid)[1] == home, "it is back")
