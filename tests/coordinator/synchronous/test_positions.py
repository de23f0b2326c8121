"""Where the iterators of replicas stand after a death: each element counts once, also after a restore."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.coordinator.synchronous.support import numbers_of, rank
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import Checkpoint, ClusterCoordinator, LocalCluster, SynchronousStrategy, Variable


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1, 2, log_level="ERROR") as cluster:
        yield cluster


@pytest.mark.parametrize("options", [{}, {"staleness": 1}], ids=["in step", "staleness"])
@pytest.mark.parametrize("progress", [False, True])
def test_positions_outlast_a_restore(
    cluster: LocalCluster, tmp_path: Path, options: dict[str, Any], progress: bool
) -> None:
    """A worker that dies before the first step after it is committed goes on with its data, and so do the others.

    Neither where the checkpoint was made, nor at the beginning.
    """
    with SynchronousStrategy(cluster, **options) as strategy:
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == 2, "all workers are up")
        with strategy.scope():
            seen = Variable(np.zeros((2, 10)), name="seen")

        def step(numbers: Iterator[int], death: str) -> None:
            one = np.zeros((2, 10))
            one[rank(), next(numbers)] = 1.0
            if death and rank() and not os.path.exists(death):
                Path(death).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            seen.assign_add(one)

        numbers, checkpoint = numbers_of(strategy, 10), Checkpoint(strategy)
        strategy.run(step, (numbers, ""), steps=2, timeout=TIMEOUT)
        checkpoint.write(str(tmp_path / "saved"))
        strategy.run(step, (numbers, ""), steps=3, timeout=TIMEOUT)
        checkpoint.read(str(tmp_path / "saved"), progress=progress)
        with pytest.raises(ValueError, match="no step"):
            strategy.run(refuse, timeout=TIMEOUT)
        checkpoint.read(str(tmp_path / "saved"), progress=progress)  # and no step was committed meanwhile
        strategy.run(step, (numbers, str(tmp_path / "death")), steps=3, timeout=TIMEOUT)
        assert seen.numpy().tolist() == [[1, 1, 0, 0, 0, 1, 1, 1, 0, 0]] * 2


def refuse() -> None:
    raise ValueError("no step")
