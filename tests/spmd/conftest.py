"""Meshes of six devices: of this process, and of two workers with three each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy

MakeMesh = Callable[[Any], spmd.Mesh]
"""Makes a mesh of these dimensions."""


@pytest.fixture(scope="module")
def workers(cluster: LocalCluster) -> Iterator[ClusterCoordinator]:
    """A coordinator of two workers."""
    with ParameterServerStrategy(cluster) as strategy:
        yield ClusterCoordinator(strategy)


@pytest.fixture(params=["here", "workers"])
def make_mesh(request: pytest.FixtureRequest) -> MakeMesh:
    """Make meshes, of this process or of workers."""
    if request.param == "here":
        return spmd.create_mesh
    coordinator = request.getfixturevalue("workers")
    return lambda dims: spmd.create_mesh(dims, coordinator=coordinator, devices_per_task=3)


@pytest.fixture
def grid(make_mesh: MakeMesh) -> spmd.Mesh:
    """A 3x2 mesh."""
    return make_mesh({"x": 3, "y": 2})


@pytest.fixture
def line(make_mesh: MakeMesh) -> spmd.Mesh:
    """Six devices in a row."""
    return make_mesh([("x", 6)])
