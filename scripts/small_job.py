"""The job beside which `hostile.py` and `unauthenticated.py` measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable


@contextmanager
def small_job(batch: int) -> Iterator[tuple[LocalCluster, Callable[[float], float]]]:
    """Yield a cluster, and a callable that runs functions there for some seconds and returns how many ran per second.

    `batch` functions are waited for at once. In the end it is checked that each ran once.
    """
    with (
        LocalCluster(1, 1, transport="tcp", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            w = Variable(np.zeros(4, np.float32), name="w")
        coordinator, done = ClusterCoordinator(strategy), 0

        def step() -> None:
            w.assign_add(np.ones(4, np.float32))

        def rate(seconds: float) -> float:
            nonlocal done
            begin, before = time.monotonic(), done
            while time.monotonic() < begin + seconds:
                for _ in range(batch):
                    coordinator.schedule(step)
                coordinator.join(timeout=120)
                done += batch
            return (done - before) / (time.monotonic() - begin)

        yield cluster, rate
        assert w.numpy().tolist() == [done] * 4
        print(f"all {done:,} functions ran once")
