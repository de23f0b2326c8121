"""Real roles, scraped while a job runs: the metrics agree with what was done, even while roles die."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import Gate, run_strategy, wait_for_file
from tests.core.metrics.scraping import Scraped, addresses, get, scrape
from tests.faults.support import running_job
from tests.roles.processes import DONE, IDLE, JOB, Roles, make_cluster, run
from tests.waiting import until

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
)
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.core.errors import FunctionError
from pscluster.core.metrics.registry import MAX_LABELS, OTHER, Telemetry
from pscluster.ps.server.telemetry import ServerTelemetry
from pscluster.worker.telemetry import WorkerTelemetry

ROWS, WIDTH = 100, 16
VALUES = ROWS * WIDTH * 4


@pytest.fixture(scope="module")
def own_strategy() -> Iterator[ParameterServerStrategy]:
    """A strategy on one server and two workers that only this module's tests use."""
    yield from run_strategy(1, 2)


class Since:
    """What roles have counted since this was created."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._addresses = addresses(strategy)
        self._before = self.scrape()

    def scrape(self) -> dict[str, Scraped]:
        """The metrics by role."""
        return {role: scrape(address) for role, address in self._addresses.items()}

    def total(self, role: str, name: str) -> float:
        """The increase, over all roles whose name begins so and all labels."""
        after = self.scrape()
        full = f"pscluster_{role.split()[0]}_{name}"
        return sum(after[task].total(full) - self._before[task].total(full) for task in after if task.startswith(role))

    def value(self, role: str, name: str, **labels: str) -> float:
        """The current value for one role and these labels."""
        return self.scrape()[role].value(f"pscluster_{role.split()[0]}_{name}", **labels)


def test_what_is_counted_is_what_was_done(own_strategy: ParameterServerStrategy) -> None:
    """The coordinator, the workers and the server count functions, reads, updates, rows and bytes."""
    strategy, coordinator = own_strategy, ClusterCoordinator(own_strategy)
    with strategy.scope():
        dense = Variable(np.zeros((ROWS, WIDTH), np.float32), name="dense")
        table = Variable(np.zeros((ROWS, WIDTH), np.float32), name="table")
    data = iter(coordinator.create_per_worker_dataset(lambda: iter(range(1000))))

    def step(iterator: Any) -> None:
        next(iterator)
        strategy.read([dense])
        dense.assign_add(np.ones((ROWS, WIDTH), np.float32))
        table.gather([1, 2, 3])
        table.scatter_add(IndexedSlices(np.ones((2, WIDTH), np.float32), [7, 8]))

    since = Since(strategy)
    for _ in range(40):
        coordinator.schedule(step, args=(data,))
    coordinator.join()
    for role in ("coordinator", "worker"):
        assert since.total(role, "functions_done_total") == 40
        assert since.total(role, "functions_failed_total") == 0
    assert since.total("coordinator", "functions_scheduled_total") == 40
    assert since.total("coordinator", "dispatch_seconds_count") >= 40
    assert since.total("worker", "run_seconds_count") == 40
    assert since.total("worker", "data_wait_seconds_total") > 0
    assert since.total("worker", "idle_seconds_total") > 0
    assert since.total("worker", "pull_seconds_count") == since.total("ps", "pull_seconds_count") == 80
    assert since.total("worker", "push_seconds_count") == since.total("ps", "push_seconds_count") == 80
    assert since.total("worker", "pulled_bytes_total") == since.total("ps", "pulled_bytes_total") > 40 * VALUES
    assert since.total("worker", "pushed_bytes_total") == since.total("ps", "pushed_bytes_total") > 40 * VALUES
    assert since.value("ps 0", "variable_pulls_total", variable="dense") == 40
    assert since.value("ps 0", "variable_pulled_bytes_total", variable="dense") == 40 * VALUES
    assert since.value("ps 0", "variable_pushes_total", variable="dense") == 40
    assert since.value("ps 0", "variable_pushed_bytes_total", variable="dense") == 40 * VALUES
    assert since.value("ps 0", "variable_rows_read_total", variable="table") == 40 * 3
    assert since.value("ps 0", "variable_rows_updated_total", variable="table") == 40 * 2
    assert since.value("ps 0", "variable_pulled_bytes_total", variable="table") == 40 * 3 * WIDTH * 4
    assert since.value("ps 0", "variable_bytes", variable="table") == VALUES
    assert 0 < since.total("ps", "update_staleness_updates_count") <= 80
    assert since.total("ps", "updates_duplicate_total") == 0
    assert [since.value(role, "ready") for role in ("coordinator", "ps 0", "worker 0", "worker 1")] == [1] * 4
    assert all(get(address, "/readyz") == (200, "ready\n") for address in addresses(strategy).values())
    snapshot = coordinator.telemetry.snapshot()
    assert snapshot["queue_functions"] == snapshot["functions_running"] == 0


def test_large_reads_and_updates(own_strategy: ParameterServerStrategy) -> None:
    """Data on separate streams is counted like data in messages."""
    strategy, coordinator = own_strategy, ClusterCoordinator(own_strategy)
    with strategy.scope():
        large = Variable(np.zeros((6 << 10, 256), np.float32), name="large")  # 6 MiB
    since = Since(strategy)

    def step() -> None:
        large.assign_add(np.ones((6 << 10, 256), np.float32))
        strategy.read([large])

    coordinator.schedule(step)
    coordinator.join()
    assert since.value("ps 0", "variable_pulled_bytes_total", variable="large") == 6 << 20
    assert since.value("ps 0", "variable_pushed_bytes_total", variable="large") == 6 << 20
    assert since.total("ps", "push_seconds_count") == since.total("worker", "push_seconds_count") == 1
    assert since.total("ps", "pushed_bytes_total") == 6 << 20
    assert since.total("worker", "pulled_bytes_total") >= 6 << 20
    assert since.value("ps 0", "in_flight_bytes") == 0


def test_every_metric_is_there(own_strategy: ParameterServerStrategy) -> None:
    """Each role serves the metrics that it declares, with the declared types, and nothing else."""
    ClusterCoordinator(own_strategy)
    kinds: dict[str, type[Telemetry]] = {
        "coordinator": CoordinatorTelemetry,
        "ps": ServerTelemetry,
        "worker": WorkerTelemetry,
    }
    for role, address in addresses(own_strategy).items():
        telemetry = kinds[role.split()[0]]
        described = {
            f"pscluster_{telemetry.role}_{metric.name.removesuffix('_total')}": metric.kind
            for metric in telemetry.described()
        }
        assert scrape(address).kinds == described


def test_failures_and_waiting(own_strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """Functions that raise, are run again, or wait are counted while they do."""
    strategy, coordinator = own_strategy, ClusterCoordinator(own_strategy)
    since, gate = Since(strategy), Gate(tmp_path / "gate")

    def wait(path: str) -> None:
        wait_for_file(path)

    for _ in range(20):
        coordinator.schedule(wait, args=(gate.path,))
    until(lambda: since.total("worker", "functions_running") == 2, "both workers run one")
    scraped = since.scrape()["coordinator"]
    waiting = scraped.value("pscluster_coordinator_queue_functions")
    assert waiting + scraped.value("pscluster_coordinator_functions_running") == 20
    assert scraped.total("pscluster_coordinator_worker_functions") == 20 - waiting
    assert waiting > 0
    assert scraped.value("pscluster_coordinator_queue_age_seconds") > 0
    gate.open()
    coordinator.join()

    def fail() -> None:
        raise ValueError("on purpose")

    coordinator.schedule(fail, retries=2)
    with pytest.raises(FunctionError):
        coordinator.join()
    assert since.total("coordinator", "functions_failed_total") == 1
    assert since.total("worker", "functions_failed_total") == 3
    assert since.total("coordinator", "functions_retried_total") == 2
    assert since.value("coordinator", "functions_retried_total", why="worker lost") == 0
    done = since.total("coordinator", "functions_done_total")
    assert done == since.total("worker", "functions_done_total") == 20


def test_many_variables_have_few_labels(own_strategy: ParameterServerStrategy) -> None:
    """Variables beyond the limit are added up, and nothing is missing from the sum."""
    strategy = own_strategy
    since = Since(strategy)
    with strategy.scope():
        made = [Variable(np.zeros(4, np.float32), name=f"one of many {index}") for index in range(MAX_LABELS + 20)]
    for variable in made:
        variable.assign_add(np.ones(4, np.float32))
    scraped = since.scrape()["ps 0"]
    name = "pscluster_ps_variable_pushes_total"
    assert len(scraped.labels(name, "variable")) == MAX_LABELS + 1
    assert scraped.value(name, variable=OTHER) >= 20
    assert since.total("ps", "variable_pushes_total") == len(made)


def test_checkpoints(own_strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """A checkpoint that is written, and one that can't be, are counted."""
    strategy = own_strategy
    ClusterCoordinator(strategy)
    since = Since(strategy)
    with CheckpointManager(str(tmp_path), strategy=strategy) as manager:
        manager.save()
    assert since.total("coordinator", "checkpoint_seconds_count") == 1
    assert since.total("coordinator", "checkpoint_pause_seconds_count") == 1
    assert since.value("coordinator", "checkpoint_timestamp_seconds") > 1e9
    assert since.total("ps", "checkpoint_seconds_count") == 1
    assert since.total("ps", "checkpoint_bytes_total") > VALUES
    (tmp_path / "file").touch()
    with CheckpointManager(str(tmp_path / "file" / "x"), strategy=strategy) as manager, pytest.raises(Exception):  # noqa: B017, PT011
        manager.save()


def test_scraped_while_roles_die() -> None:
    """Scraping all roles all the time gives complete answers or none, and the sums are right at the end."""
    with running_job(num_ps=2, num_workers=2, shards=2) as job:
        strategy, coordinator = job.strategy, job.coordinator
        with strategy.scope():
            total = Variable(np.zeros(8, np.float32), name="total")

        def step() -> None:
            total.assign_add(np.ones(8, np.float32))

        over, scrapes, wrong = threading.Event(), list[int](), list[BaseException]()

        def keep_asking() -> None:
            while not over.is_set():
                try:
                    scrapes.append(len([scrape(address) for address in addresses(strategy).values()]))
                except (OSError, AssertionError, http.client.HTTPException):
                    continue  # the role has just died
                except BaseException as error:
                    wrong.append(error)
                    return

        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            values = [coordinator.schedule(step) for _ in range(1500)]
            job.until_done(values, 300)
            job.kill(0)
            job.until_done(values, 700)
            pid = job.cluster.kill("ps", 1)
            job.cluster.wait_restarted("ps", 1, pid)
            job.join()
            job.until_up(2)
        finally:
            over.set()
            asking.join()
        assert not wrong
        assert scrapes
        own = scrape(strategy.metrics_address)
        assert own.value("pscluster_coordinator_functions_done_total") == 1500
        assert own.value("pscluster_coordinator_worker_reconnects_total", worker="0") >= 1
        assert own.value("pscluster_coordinator_server_returns_total", server="1") >= 1
        assert own.value("pscluster_coordinator_server_up", server="1") == 1
        retried = own.total("pscluster_coordinator_functions_retried_total")
        assert retried <= own.value("pscluster_coordinator_worker_reconnects_total", worker="0") + 1


def test_roles_of_the_command_line(tmp_path: Path) -> None:
    """The option works, the readiness before and after is right, it can be off, and the job runs in any case."""
    cluster = make_cluster()
    with Roles(cluster, tmp_path) as roles:
        ps, worker = roles.ps(0), roles.worker(0, "--metrics-port", "off")
        address = ps.wait_for("metrics on http://").rpartition("http://")[2].partition("/")[0]
        ps.wait_for("serving on")
        worker.wait_for("serving on")
        assert "metrics" not in worker.output
        assert get(address, "/readyz") == (503, "it waits for a coordinator\n")
        assert get(address, "/healthz")[0] == 200
        gate = tmp_path / "gate"
        coordinator = roles.coordinator(IDLE, str(gate), options=["--metrics-port", "0"])
        coordinator.wait_for("connected")
        assert get(address, "/readyz") == (200, "ready\n")
        assert scrape(address).value("pscluster_ps_variable_bytes", variable="w") == 40
        gate.touch()
        assert coordinator.wait() == 0
        until(lambda: get(address, "/readyz")[0] == 503, "the server is free again")


def test_off_loopback_without_a_token(tmp_path: Path) -> None:
    """A role that would show its metrics to everybody does not start; nor does one with an invalid port."""
    with Roles(make_cluster(), tmp_path) as roles:
        for options, words in (
            (["--metrics-host", "0.0.0.0"], "pscluster: refusing to serve metrics on 0.0.0.0 in plain text"),
            (["--metrics-port", "much"], "pscluster: the port for metrics is 'much'; give one from 1 to 65535"),
        ):
            role = roles.ps(0, *options)
            assert role.wait() == 2
            assert words in role.output.splitlines()[-1]


def test_run_takes_one_port_for_the_coordinator(tmp_path: Path) -> None:
    """With `pscluster run --metrics-port` the other roles take free ports; off is off for all."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    code, output = run("run", "--log-level", "INFO", "--metrics-port", "off", str(script), "x")
    assert code == 0
    assert "metrics on" not in output
    assert DONE.replace("\\", "") in output


def test_a_cluster_whose_environment_names_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port in the environment is the coordinator's: roles that it starts do not compete for it."""
    monkeypatch.setenv("PSCLUSTER_METRICS_PORT", "off")
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        assert set(addresses(strategy).values()) == {""}
