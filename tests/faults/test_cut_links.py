"""Links that are cut silently, lose packets, are slow, or come and go: the job continues. The tests compare numbers.

The roles are in separate network namespaces. What is dropped there is dropped silently: no connection is reset, and a
waiting role is not notified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.far import FarCluster, FarJob, far_cluster, far_job
from tests.faults.namespaces import COORDINATOR, Network, missing
from tests.faults.steps import where
from tests.faults.support import ready
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import FunctionError

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

FUNCTIONS = 200

WAYS = ("both ways", "one way", "the other way")
"""Which direction of a link is cut."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarCluster]:
    """Two parameter servers and two workers, each at a separate place."""
    with far_cluster(tmp_path_factory.mktemp("far"), 2, 2) as cluster:
        yield cluster


def cut(network: Network, one: str, other: str, way: str = "both ways") -> None:
    """Cut the link between the two."""
    if way != "the other way":
        network.cut_one_way(one, other)
    if way != "one way":
        network.cut_one_way(other, one)


def begin(job: FarJob) -> list[Any]:
    """Schedule the functions, and wait until some are done and both workers have one."""
    job.until_up(2)
    step = job.counting.step()
    values = [job.coordinator.schedule(step) for _ in range(FUNCTIONS)]
    job.run_until(values, FUNCTIONS // 5)
    return values


def finish(job: FarJob, functions: int = FUNCTIONS) -> None:
    """Wait for all, and check that each has counted once, on every element."""
    job.coordinator.join(timeout=TIMEOUT)
    assert job.counting.counts() == {name: [functions] * 2 for name in ("dense", "sparse", "trained")}
    assert job.counting.sgd.iterations == functions
    assert job.strategy.lost_updates() == {}


def until_used(job: FarJob, worker: int) -> None:
    """Wait until the worker gets functions."""

    def gets_one() -> bool:
        values = [job.coordinator.schedule(where, args=(index,)) for index in range(20)]
        return worker in {index for _, index, _ in job.coordinator.fetch(values, timeout=TIMEOUT)}

    until(gets_one, f"worker {worker} gets a function", job.coordinator.explain)


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_cut_off_from_the_coordinator(cluster: FarCluster, way: str) -> None:
    """Its functions run elsewhere when its lease expires, none counts twice, and it is used again later."""
    with far_job(cluster, worker_lease=1.5) as job:
        begin(job)
        cut(job.network, COORDINATOR, "worker0", way)
        job.coordinator.join(timeout=TIMEOUT)  # the link stays cut
        job.until_up(1)
        job.network.heal()
        until_used(job, 0)
        finish(job)


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_cut_off_from_a_server(cluster: FarCluster, way: str) -> None:
    """Its functions wait while the others do the rest; once the link is healed it continues where it was."""
    with far_job(cluster, worker_lease=1.5) as job:
        values = begin(job)
        cut(job.network, "worker0", "ps0", way)
        link = job.coordinator._dispatcher._scheduler.workers[0].sent
        until(
            lambda: job.network.dropped() > 2 and 0 < FUNCTIONS - ready(values) == len(link),
            "all is done but what the worker has that is cut off",
            job.coordinator.explain,
        )
        assert job.coordinator.workers_up == 2  # the coordinator still reaches it
        job.network.heal()
        finish(job)


@pytest.mark.parametrize(
    ("connected", "words"),
    [
        (True, r"ps 0 at .* is still unreachable after 1 s of retries: no con"),
        (False, r"gave up after 1 s: .* missing: ps 0 at "),
    ],
)
def test_a_worker_cut_off_from_a_server_for_good(cluster: FarCluster, connected: bool, words: str) -> None:
    """When an answer never comes the connection is given up, and after `ps_timeout` the function names the server."""
    with far_job(cluster, ps_timeout=1.0) as job:
        job.until_up(2)
        assert all(link.heard for link in job.coordinator._dispatcher.state.workers)  # from which explain() counts
        step = job.counting.step()
        if connected:  # otherwise the worker has not dialled the server yet
            begin(job)
        cut(job.network, "worker0", "ps0")
        for _ in range(FUNCTIONS):
            job.coordinator.schedule(step)
        with pytest.raises(FunctionError, match=words):
            job.coordinator.join(timeout=TIMEOUT)
        job.coordinator.join(timeout=TIMEOUT)  # the coordinator still reaches the server: the job is not lost


@pytest.mark.parametrize("way", WAYS)
def test_the_coordinator_cut_off_from_a_server(cluster: FarCluster, way: str) -> None:
    """The workers do everything scheduled meanwhile; a waiting read is answered when the link is healed."""
    with far_job(cluster, worker_lease=1.5) as job:
        begin(job)
        cut(job.network, COORDINATOR, "ps0", way)
        values: list[Any] = []
        reading = threading.Thread(target=lambda: values.append(job.counting.sparse.numpy()))
        reading.start()
        job.coordinator.join(timeout=TIMEOUT)
        until(lambda: job.network.dropped() > 2, "something was lost")
        assert reading.is_alive()
        assert job.coordinator.workers_up == 2
        job.network.heal()
        reading.join(TIMEOUT)
        assert not reading.is_alive()
        assert values[0].shape == job.counting.sparse.shape
        finish(job)


LINKS = [
    pytest.param("worker0", COORDINATOR, id="worker and coordinator"),
    pytest.param("worker0", "ps0", id="worker and server"),
    pytest.param("ps0", COORDINATOR, id="server and coordinator"),
]


@pytest.mark.parametrize(("one", "other"), LINKS)
def test_a_link_that_comes_and_goes(cluster: FarCluster, one: str, other: str) -> None:
    """When links are repeatedly cut and healed, sometimes in one direction only, nothing is lost or counts twice."""
    with far_job(cluster, worker_lease=1.5) as job:
        values = begin(job)
        for round_ in range(6):
            cut(job.network, one, other, WAYS[round_ % len(WAYS)])
            until(
                lambda: job.network.dropped() > 1 or job.coordinator.done(),
                "something was lost",
                job.coordinator.explain,
            )
            job.network.heal()
            job.run_until(values, min(FUNCTIONS, ready(values) + 5))
        until_used(job, 0)
        finish(job)


def lossy(network: Network, one: str, other: str) -> None:
    """Lose one packet in seven, in both directions."""
    network.lossy(one, other, 0.15)


def slow(network: Network, one: str, _other: str) -> None:
    """Limit all links of one role to 400 kbit/s."""
    network.slow(one, 400)


@pytest.mark.parametrize("trouble", [lossy, slow])
@pytest.mark.parametrize(("one", "other"), LINKS)
def test_a_bad_link(cluster: FarCluster, trouble: Callable[[Network, str, str], None], one: str, other: str) -> None:
    """A link that loses packets or is slow costs time: no worker is given up, and every number is right."""
    with far_job(cluster) as job:
        begin(job)
        trouble(job.network, one, other)
        until_used(job, 0)
        finish(job)
        assert (job.coordinator._dispatcher.state.workers[0].restarts, job.coordinator.workers_up) == (0, 2)


def test_large_arguments_on_a_slow_link(cluster: FarCluster) -> None:
    """A worker that takes longer than its lease to receive an argument is not considered silent."""
    with far_job(cluster, worker_lease=1.5) as job:
        job.until_up(2)
        job.coordinator.schedule(where, args=(0,)).fetch(timeout=TIMEOUT)
        for worker in (0, 1):
            job.network.slow(f"worker{worker}", 4000)  # 3 MiB take 6 s
        sizes = [job.coordinator.schedule(len, args=(np.ones(3 << 20, np.uint8),)) for _ in range(2)]
        assert job.coordinator.fetch(sizes, timeout=TIMEOUT) == [3 << 20] * 2
        assert [link.restarts for link in job.coordinator._dispatcher.state.workers] == [0, 0]


def test_nothing_is_left_of_a_network(tmp_path: Path) -> None:
    """Afterwards neither a namespace, nor an interface, nor a process is left."""
    from tests.faults import namespaces

    with far_cluster(tmp_path, 1, 1) as far:
        key = far.network._key
        assert sum(name.startswith(key) for _, name in namespaces._namespaces()) == 3
        pids = [process.pid for process in far.processes.values()]
    assert not any(name.startswith(key) for _, name in namespaces._namespaces())
    assert far.network._outer not in namespaces._run("ip", "-brief", "link")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
