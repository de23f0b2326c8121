"""A parameter server that dies: the next call says which one, and nothing hangs."""

from __future__ import annotations

import numpy as np
import pytest

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.errors import PSUnavailableError


def test_the_next_calls_name_the_server_that_died() -> None:
    """A waiting join raises by itself, then reads and updates of what lived there do; what lives elsewhere is read."""
    with LocalCluster(2, 2, restart=False, log_level="ERROR") as cluster:
        address = cluster.cluster_spec().task_address("ps", 1)
        with ParameterServerStrategy(cluster, placement="round_robin", ps_timeout=10) as strategy:
            with strategy.scope():
                kept = Variable(np.zeros(3, np.float32), name="kept")
                lost = Variable(np.zeros(3, np.float32), name="lost")
            coordinator = ClusterCoordinator(strategy)

            def step() -> None:
                kept.assign_add(1.0)
                lost.assign_add(1.0)

            for _ in range(2000):
                coordinator.schedule(step)
            cluster.kill("ps", 1)

            with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
                coordinator.join(timeout=100)
            with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
                lost.assign(0.0)
            assert kept.numpy().shape == (3,)
