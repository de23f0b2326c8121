"""`local_map` with torch: gradients by autograd on each device's rows, summed over the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy
from pscluster.spmd import Layout

X = np.random.default_rng(1).random((13, 4))
W = np.arange(4.0)


def step(weights: Any, x: Any, y: Any) -> Any:
    """The loss of all rows, and its gradient."""
    weights = torch.tensor(weights, requires_grad=True)
    loss = ((torch.tensor(x) @ weights - torch.tensor(y)) ** 2).sum()
    loss.backward()
    return spmd.psum(loss, "b"), spmd.psum(weights.grad, "b")


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ClusterCoordinator]:
    """Of two workers."""
    with LocalCluster(num_ps=1, num_workers=2) as cluster, ParameterServerStrategy(cluster) as strategy:
        yield ClusterCoordinator(strategy)


@pytest.mark.parametrize("where", ["here", "workers"])
def test_gradients_by_autograd(where: str, coordinator: ClusterCoordinator) -> None:
    """The same as of all rows at once."""
    mesh = spmd.create_mesh({"b": 4})
    if where == "workers":
        mesh = spmd.create_mesh({"b": 4}, coordinator=coordinator, devices_per_task=2)
    x, y = spmd.distribute(X, Layout(["b", None], mesh)), spmd.distribute(X @ W + 1, Layout(["b"], mesh))
    mapped = spmd.local_map(step, [[None], ["b", None], ["b"]], ([], [None]))
    loss, gradient = mapped(spmd.distribute(W, Layout([None], mesh)), x, y)
    assert float(loss) == pytest.approx(13.0)
    np.testing.assert_allclose(gradient.numpy(), -2 * X.sum(axis=0))
