"""The replicas' copies of large variables: when they are made, kept and dropped, what a step may do with arrays that it
reads, and changes that are larger than a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.coordinator.synchronous.test_joint_steps import joint

from pscluster.coordinator import LocalCluster, SynchronousStrategy, Variable, optimizers
from pscluster.ps.spec import SESSION_BYTES

SIZE = SESSION_BYTES // 4 + 1000  # elements, of a shard that is pulled in frames and may be cached


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1, 2, log_level="ERROR", env={"PSCLUSTER_IN_FLIGHT_MIB": "1"}) as cluster:
        yield cluster


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[SynchronousStrategy]:
    with SynchronousStrategy(cluster) as strategy:
        yield strategy


def test_the_read_cache_has_no_part_in_it(strategy: SynchronousStrategy) -> None:
    """A shard's version, which the cache asks for before a large read, is nothing that a step has read."""
    with strategy.scope():
        w = Variable(np.zeros(SIZE, np.float32), name="w")
        sgd = optimizers.SGD(1.0)

    def step() -> tuple[float, bool]:
        value = float(w.read_value()[-1])
        sgd.apply_gradients([(np.ones(SIZE, np.float32), w)])
        return value, joint()

    for call in range(3):
        results = strategy.local_results(strategy.run(step, steps=4, collect="all"))
        assert results[0] == [(-8.0 * call - 2 * number, bool(call or number)) for number in range(4)]
