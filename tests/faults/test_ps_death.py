"""A parameter server that dies: the next call says which one, and nothing hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    optimizers,
)
from pscluster.core.errors import PSUnavailableError
from pscluster.core.role.options import DATA_PORT_VARIABLE
from pscluster.ps.spec import SESSION_BYTES


def freeze(pid: int) -> None:
    """Stop a process; when this returns, none of its threads is running."""
    os.kill(pid, signal.SIGSTOP)

    def states() -> set[str]:
        tasks = Path(f"/proc/{pid}/task").glob("*/stat")
        try:
            return {task.read_text().rpartition(")")[2].split()[0] for task in tasks}
        except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
            return set()

    until(lambda: states() == {"T"}, "it is stopped", lambda: str(states()))


def test_the_next_calls_name_the_server_that_died() -> None:
    """A waiting join raises by itself, then reads and updates on that server do; other variables can be read."""
    with LocalCluster(2, 2, restart=False, log_level="ERROR") as cluster:
        address = cluster.cluster_spec().task_address("ps", 1)
        with ParameterServerStrategy(cluster, placement="round_robin", ps_timeout=2) as strategy:
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

            with pytest.raises(PSUnavailableError, match=f"^(?!.*failed to connect to all).*ps 1 at {address}"):
                coordinator.join(timeout=100)
            with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
                lost.assign(0.0)
            assert kept.numpy().shape == (3,)


@pytest.mark.timeout(45)  # less than one attempt may take while a server is slow to answer
@pytest.mark.parametrize(("transport", "data_port"), [("unix", "0"), ("tcp", "0"), ("unix", "off")])
def test_a_server_that_is_frozen_for_good(monkeypatch: pytest.MonkeyPatch, transport: str, data_port: str) -> None:
    """Every wait for it ends by `ps_timeout`, though the kernel accepts all that is sent there."""
    monkeypatch.setenv(DATA_PORT_VARIABLE, data_port)
    with (
        LocalCluster(2, 1, restart=False, transport=transport, log_level="ERROR", grace=0.5) as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(2), ps_timeout=2) as strategy,
    ):
        with strategy.scope():
            small = Variable(np.zeros(4, np.float32), name="small")
            large = Variable(np.zeros((2, SESSION_BYTES), np.float32), name="large")
            rule = optimizers.SGD(0.1)
            rule.apply_gradients([(np.ones(4, np.float32), small)])
        coordinator = ClusterCoordinator(strategy)
        coordinator.schedule(lambda: small.assign_add(1.0))
        coordinator.join()

        def set_rate() -> None:
            rule.learning_rate = 0.2

        waits = (
            small.numpy,
            lambda: small.assign_add(1.0),
            large.numpy,
            lambda: large.assign(np.ones(large.shape, np.float32)),
            set_rate,
            strategy.lost_updates,
            lambda: coordinator.schedule(lambda: small.assign_add(1.0)).fetch(),
        )
        freeze(cluster.pids["ps", 1])
        try:
            with ThreadPoolExecutor(len(waits)) as pool:
                errors = [waiting.exception() for waiting in [pool.submit(wait) for wait in waits]]
            # A worker and the coordinator's client have reported it; the coordinator's link has noticed nothing yet.
            calls = (coordinator.join, coordinator.done, lambda: coordinator.schedule(small.numpy), coordinator.join)
            for call in calls:
                with pytest.raises(PSUnavailableError, match="ps 1 at"):
                    call()
            assert "wait for it" not in coordinator.explain()
            # It is given up: not even dialled, as that would take as long again.
            monkeypatch.setattr(strategy.client._servers[1], "_transport", None)
            monkeypatch.setattr(coordinator._dispatcher.servers, "report_seen", None)  # by workers, who would wait
            for wait in waits:
                with pytest.raises(PSUnavailableError, match="ps 1 at"):
                    wait()
            monkeypatch.undo()
        finally:
            os.kill(cluster.pids["ps", 1], signal.SIGCONT)
        for error in errors:
            assert isinstance(error, PSUnavailableError), errors
            assert "ps 1 at" in str(error)
        for wait in waits:  # it answers again, but remains lost
            with pytest.raises(PSUnavailableError, match="ps 1 at"):
                wait()


@pytest.mark.timeout(60)  # far less than `ps_timeout`
def test_waits_end_when_a_server_is_given_up() -> None:
    """Also those that began long after the server was last heard from, and those amid an attempt."""
    with (
        LocalCluster(1, 1, restart=False, log_level="ERROR", grace=0.5) as cluster,
        ParameterServerStrategy(cluster, ps_timeout=600) as strategy,
    ):
        with strategy.scope():
            small = Variable(np.zeros(4, np.float32), name="small")
            large = Variable(np.zeros(2 * SESSION_BYTES, np.float32), name="large")
        freeze(cluster.pids["ps", 0])
        try:
            with ThreadPoolExecutor(3) as pool:
                calls: list[Callable[[], object]] = [small.numpy, large.numpy, lambda: small.assign_add(1.0)]
                waiting = [pool.submit(call) for call in calls]
                until(lambda: all(future.running() for future in waiting), "they wait")
                strategy.client.give_up(0, PSUnavailableError("it was given up"))
                errors = [future.exception() for future in waiting]
        finally:
            os.kill(cluster.pids["ps", 0], signal.SIGCONT)
        assert [(type(error), str(error)) for error in errors] == [(PSUnavailableError, "it was given up")] * 3


@pytest.mark.timeout(60)
def test_a_server_that_thaws_in_time() -> None:
    """Waiting calls get their answers, once."""
    with (
        LocalCluster(1, 1, restart=False, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, ps_timeout=12) as strategy,
    ):
        with strategy.scope():
            counter = Variable(np.zeros(4, np.float32), name="counter")
        counter.assign_add(1.0)
        asked = strategy.client._servers[0].liveness
        freeze(cluster.pids["ps", 0])
        try:
            with ThreadPoolExecutor(1) as pool:
                update = pool.submit(counter.assign_add, 1.0)
                until(lambda: asked.unanswered, "it was asked in vain whether it answers")
                assert not update.done()
                os.kill(cluster.pids["ps", 0], signal.SIGCONT)
                update.result()
        finally:
            os.kill(cluster.pids["ps", 0], signal.SIGCONT)
        assert counter.numpy().tolist() == [2] * 4
