"""A cluster whose roles are in network namespaces, and jobs on it, for the tests of cut links."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.counting import Counting
from tests.faults.namespaces import Network
from tests.faults.support import quiet, ready
from tests.roles.processes import Process, environ, tf_config
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import (
    ClusterCoordinator,
    ClusterSpec,
    ParameterServerStrategy,
    RemoteValue,
    SimpleClusterResolver,
)
from pscluster.coordinator.variables.partitioners import FixedShardsPartitioner
from pscluster.core.security.tokens import new_token

PORT = 12_345


PLAIN = {"PSCLUSTER_INSECURE": "1"}
"""The network between is this machine's own."""


@dataclass(frozen=True)
class FarCluster:
    """Running roles, each at a place in the network that has its name, such as "worker1"."""

    network: Network
    addresses: dict[str, list[str]]
    processes: dict[str, Process]
    token: str


@contextmanager
def far_cluster(folder: Path, num_ps: int, num_workers: int) -> Iterator[FarCluster]:
    """Start the roles; afterwards no process and no namespace is left."""
    tasks = [("ps", index) for index in range(num_ps)] + [("worker", index) for index in range(num_workers)]
    with ExitStack() as stack:
        network = stack.enter_context(Network([f"{role}{index}" for role, index in tasks]))
        addresses: dict[str, list[str]] = {}
        for role, index in tasks:
            addresses.setdefault(role, []).append(f"{network.address(f'{role}{index}')}:{PORT}")
        cluster = FarCluster(network, addresses, {}, new_token())
        env = {"PSCLUSTER_TOKEN": cluster.token, "PSCLUSTER_STATE_DIR": str(folder / "state"), **PLAIN}
        for role, index in tasks:
            host = f"{role}{index}"
            cluster.processes[host] = stack.enter_context(
                Process(
                    [*network.command(host), sys.executable, "-m", f"pscluster.{role}", "--exit-with-parent"],
                    environ(tf_config(addresses, role, index), **env),
                    folder,
                    stdin=subprocess.PIPE,
                )
            )
        yield cluster


@dataclass(frozen=True)
class FarJob:
    """A job in this process on that cluster."""

    network: Network
    strategy: ParameterServerStrategy
    coordinator: ClusterCoordinator
    counting: Counting

    def run_until(self, values: list[RemoteValue], count: int) -> None:
        """Wait until this many are ready; raises the error of one that failed."""
        until(
            lambda: ready(values) >= count or (self.coordinator.done() and ready(values) >= count),
            f"{count} functions are done",
            self.coordinator.explain,
        )

    def until_up(self, count: int) -> None:
        """Wait until exactly this many workers accept functions."""
        until(lambda: self.coordinator.workers_up == count, f"{count} workers are up", self.coordinator.explain)


@contextmanager
def far_job(cluster: FarCluster, *, worker_lease: float = 30.0, ps_timeout: float = TIMEOUT) -> Iterator[FarJob]:
    """Yield a new job; restore the network afterwards."""
    with quiet("pscluster.coordinator", 50), pytest.MonkeyPatch.context() as patch:  # it is unreachable on purpose
        for name, value in PLAIN.items():
            patch.setenv(name, value)
        strategy = ParameterServerStrategy(
            SimpleClusterResolver(ClusterSpec(cluster.addresses)),
            FixedShardsPartitioner(len(cluster.addresses["ps"])),
            token=cluster.token,
            connect_timeout=TIMEOUT,
            ps_timeout=ps_timeout,
        )
        try:
            coordinator = ClusterCoordinator(strategy, worker_lease=worker_lease)
            yield FarJob(cluster.network, strategy, coordinator, Counting(strategy))
        finally:
            cluster.network.heal()
            strategy.close()
