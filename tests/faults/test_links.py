"""Links that are cut, stalled or bad, for everything they carry, the data plane included. The tests compare numbers.

Unlike those of `test_cut_links` they need no root, and connections end with a reset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.faults.counting import Counting
from tests.faults.proxied import Link, ProxiedCluster
from tests.faults.support import quiet, ready
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import (
    ClusterCoordinator,
    ClusterSpec,
    FixedShardsPartitioner,
    ParameterServerStrategy,
    RemoteValue,
    SimpleClusterResolver,
    Variable,
)
from pscluster.ps.spec import SESSION_BYTES

FUNCTIONS = 80


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProxiedCluster]:
    """Two parameter servers and two workers."""
    with ProxiedCluster(2, 2, log_level="ERROR", durability="none") as cluster:
        yield cluster


class Running:
    """A job of functions that count, over links."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.counting = Counting(strategy)
        with strategy.scope():
            self.large = Variable(np.zeros(2 * SESSION_BYTES, np.uint8), name="large")
        self.coordinator = ClusterCoordinator(strategy, worker_lease=1.5)
        count, large = self.counting.step(), self.large

        def step() -> None:
            count()
            large.assign_add(np.ones(large.shape, np.uint8))  # its shards are too large for a session
            values = large.numpy()
            assert all((half == half[0]).all() for half in np.split(values, 2)), "a torn read"

        self.values: list[RemoteValue] = [self.coordinator.schedule(step) for _ in range(FUNCTIONS)]

    def until_more(self, count: int) -> None:
        """Wait until this many more functions are done, or all."""
        before = ready(self.values)
        until(lambda: ready(self.values) >= min(before + count, FUNCTIONS), "functions end", self.coordinator.explain)

    def check(self) -> None:
        """Check that each has counted once."""
        self.coordinator.join(TIMEOUT)
        assert self.counting.one_count() == FUNCTIONS
        assert (self.large.numpy() == FUNCTIONS).all()


@contextmanager
def running(cluster: ProxiedCluster) -> Iterator[Running]:
    """A job whose coordinator uses the links, too."""
    spec = ClusterSpec({role: cluster.addresses(role) for role in ("ps", "worker")})
    with (
        quiet("pscluster.coordinator", logging.CRITICAL),
        ParameterServerStrategy(
            SimpleClusterResolver(spec),
            FixedShardsPartitioner(2),
            token=cluster.token,
            ps_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
        ) as strategy,
    ):
        yield Running(strategy)


def parted(link: Link) -> None:
    """The link is cut, and refuses connections."""
    before = link.refused
    link.part()
    until(lambda: link.refused > before + 1, "it is tried in vain")
    link.join()


def stalled(link: Link, *, back: bool) -> None:
    """Nothing gets through in one direction, though no connection ends."""
    before = link.held
    link.stall(back)
    until(lambda: link.held > before + 1, "something is on its way")
    link.flow()


def deaf(link: Link) -> None:
    """Nothing reaches the role."""
    stalled(link, back=False)


def mute(link: Link) -> None:
    """Nothing from the role arrives."""
    stalled(link, back=True)


TROUBLES: list[Callable[[Link], None]] = [parted, deaf, mute]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_link_that_comes_and_goes(cluster: ProxiedCluster, role: str, trouble: Callable[[Link], None]) -> None:
    """The job ends, and each function has counted once."""
    with running(cluster) as job:
        job.until_more(15)
        for index in range(2):
            link = cluster.links[role, index]
            trouble(link)
            before = link.carried
            job.until_more(15)
            assert link.carried > before, "the data plane is not used any more"
        job.check()


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_bad_link(cluster: ProxiedCluster, role: str) -> None:
    """With late and slow pieces the job ends, and each function has counted once."""
    with running(cluster) as job:
        link = cluster.links[role, 0]
        link.stutter(0.1, 1)
        job.until_more(5)
        link.flow()
        link.slow(5e6)
        job.until_more(5)
        link.flow()
        job.check()


def test_the_data_plane_goes_over_the_links(cluster: ProxiedCluster) -> None:
    """The data plane uses the links; otherwise these tests would show little."""
    before = {task: link.carried for task, link in cluster.links.items()}
    with running(cluster) as job:
        job.check()
    for (role, index), link in cluster.links.items():
        assert link.carried - before[role, index] > (FUNCTIONS * SESSION_BYTES if role == "ps" else 0)


def test_large_transfers_that_take_longer_than_a_server_may_be_gone(cluster: ProxiedCluster) -> None:
    """They continue, slowly: a server that answers is not given up."""
    spec, link = ClusterSpec({role: cluster.addresses(role) for role in ("ps", "worker")}), cluster.links["ps", 0]
    with ParameterServerStrategy(SimpleClusterResolver(spec), token=cluster.token, ps_timeout=1.0) as strategy:
        with strategy.scope():
            large = Variable(np.zeros(2 * SESSION_BYTES, np.uint8), name="large", partitioner=FixedShardsPartitioner(2))
        link.slow(2e6)
        try:
            large.assign(np.full(large.shape, 7, np.uint8))
            assert (large.numpy() == 7).all()
        finally:
            link.flow()
