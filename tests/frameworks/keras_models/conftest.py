"""A cluster for all tests of Keras models, whose workers import Keras once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pscluster.coordinator import LocalCluster, ParameterServerStrategy

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

ENVIRONMENT = {
    "KERAS_BACKEND": os.environ["KERAS_BACKEND"],
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, 2, log_level="ERROR", env=ENVIRONMENT) as cluster:  # of which a test kills a worker
        yield cluster


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    with ParameterServerStrategy(cluster) as strategy:
        yield strategy
