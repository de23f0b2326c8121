"""What the tests of synchronous steps share: a strategy on the cluster of the module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pscluster.coordinator import LocalCluster, SynchronousStrategy


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[SynchronousStrategy]:
    with SynchronousStrategy(cluster) as strategy:
        yield strategy
