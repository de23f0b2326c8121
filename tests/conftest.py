"""Fixtures for tests on a real cluster: one cluster for all of them, since starting one takes a second."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
from tests import fork_client
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    DistributedDataset,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    experimental_get_current_worker_index,
    metrics,
)
from pscluster.coordinator.local import local_cluster
from pscluster.coordinator.local.tasks import RestartPolicy
from pscluster.core.role.node import Role
from pscluster.core.transport.unix_sockets import path_of
from pscluster.v1 import node_pb2
from pscluster.worker.steps.evaluation import results_of, states_of

# A shared machine may be slow at any moment: no test depends on time.
hypothesis.settings.register_profile("pscluster", deadline=None)
hypothesis.settings.load_profile("pscluster")

SEARCH = float(os.environ.get("PSCLUSTER_SEARCH", "1"))
"""How many times more examples state machines try: 1 for every run of the tests, 1000 takes a night."""


def search(examples: int, steps: int) -> hypothesis.settings:
    """Settings of a state machine: this many examples, of at most this many steps."""
    return hypothesis.settings(max_examples=round(examples * SEARCH), stateful_step_count=steps, deadline=None)


NUM_PS = 2
NUM_WORKERS = 2

# Threads that live as long as the process: the library's, those of gRPC and fsspec, and the one that limits a test's
# time.
_LASTING_THREADS = ("pscluster-loop", "stall-watchdog", "devices", "(_poll_wrapper)", "fsspecIO", "pytest_timeout")


_LONGEST = (
    "packaging/test_compose.py",
    "faults/test_fault_points.py",
    "faults/test_every_rpc.py",
    "packaging/test_wheel.py",
    "ps/test_big_table.py",
    "faults/test_applied_once.py",
    "faults/test_ps_healing.py",
    "faults/test_training.py",
    "examples/test_word2vec.py",
    "faults/test_worker_death.py",
    "roles/test_bad_config.py",
    "coordinator/local/test_local_cluster.py",
    "faults/test_links.py",
    "faults/test_cut_links.py",
    "roles/test_tls.py",
    "faults/test_worker_extremes.py",
    "roles/test_signals.py",
    "faults/test_cuts.py",
    "coordinator/queue/test_schedule.py",
    "faults/test_visit_once.py",
    "faults/test_ps_death.py",
    "coordinator/variables/test_variables.py",
    "coordinator/checkpoints/test_checkpoints.py",
    "faults/test_keys.py",
    "coordinator/variables/test_optimizers.py",
    "roles/test_health_status.py",
    "roles/test_hostile.py",
    "docs/test_docs.py",
    "faults/test_coordinator_death.py",
    "faults/test_chaos.py",
    "core/transport/test_payload_sink.py",
    "coordinator/dashboard/test_page.py",
    "roles/test_unix_sockets.py",
    "roles/test_returning_servers.py",
    "coordinator/observability/test_roles.py",
    "faults/test_evaluation_snapshots.py",
    "benchmarks/test_soak.py",
    "examples/test_examples.py",
    "coordinator/dashboard/test_command_line.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no process runs one alone at the end while the others idle."""
    order = {Path(__file__).parent / file: position for position, file in enumerate(_LONGEST)}
    assert all(map(Path.exists, order)), "_LONGEST names a file that is not there"
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that shows whether a failure comes from the quick starts."""
    parser.addoption("--plain-starts", action="store_true", help="Start all processes in new interpreters.")


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C, which some tests send: a shell that starts them in the background makes all processes ignore
    it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Parameter servers started by tests keep their state here, not in the user's directory.
    folder = tempfile.mkdtemp(prefix="pscluster-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["PSCLUSTER_STATE_DIR"] = folder
    os.environ["XDG_CONFIG_HOME"] = folder  # and use a token of this user that is not the real one
    # Roles that die are restarted at once. The delays that grow with each death are shown by those of the supervisor.
    vars(local_cluster)["RestartPolicy"] = functools.partial(RestartPolicy, base_delay=0.0)
    for library in ("OMP", "OPENBLAS", "MKL"):  # the cores are shared by many processes
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    if not config.getoption("plain_starts"):
        fork_client.install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start processes quickly, unless the test is about that."""
    fork_client.enabled = item.get_closest_marker("plain_starts") is None


def wait_for_file(path: str) -> None:
    """For a step: wait until the file exists, without calling the library."""
    deadline = time.monotonic() + TIMEOUT
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"waited in vain for {path}"
        time.sleep(0.002)


def attached(role: Role, request: node_pb2.AttachRequest) -> node_pb2.AttachEvent:
    """Attach a coordinator to a role, and return what it is told."""
    event = node_pb2.AttachEvent()
    role.attached(request, event)
    return event


class Gate:
    """A gate at which steps wait, with `wait_for_file(gate.path)`, until the test opens it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.path = str(folder / "open")

    def open(self) -> None:
        """Let them pass."""
        Path(self.path).touch()


def leave_mark(path: str, name: str) -> None:
    """For a step: record that it was here."""
    (Path(path).parent / f"mark-{name}").touch()


def marks(gate: Gate) -> set[str]:
    """The marks that steps have left."""
    return {path.name.removeprefix("mark-") for path in Path(gate.path).parent.glob("mark-*")}


def in_one_process(
    step: Callable[[Any], Any], named: Mapping[str, metrics.MetricLike], data: DistributedDataset, shards: int
) -> dict[str, Any]:
    """The result of an evaluation in this process alone, with the same shards, batches and order of merging."""
    elements = list(data.local())
    cuts = [len(elements) * shard // shards for shard in range(shards + 1)]
    parts = [elements[first:after] for first, after in itertools.pairwise(cuts) if first < after]
    return results_of(named, [states_of(step, named, part) for part in parts])


def is_gone(pid: int) -> bool:
    """Whether the process no longer exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def is_free(address: str) -> bool:
    """Whether this address can be listened on, with nothing left of a socket."""
    if (path := path_of(address)) is not None:
        return not Path(path).parent.exists()
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


@contextmanager
def grpc_server(threads: int, **settings: Any) -> Iterator[grpc.Server]:
    """A gRPC server, not yet started; it and its threads end with the block, not with the garbage collector."""
    with ThreadPoolExecutor(threads) as pool:
        server = grpc.server(pool, **settings)
        try:
            yield server
        finally:
            server.stop(0).wait()


def run_cluster(num_ps: int, num_workers: int, **options: Any) -> Iterator[LocalCluster]:
    """A cluster for a fixture. At its end check that nothing has crashed, and nothing is left."""
    threads = set(threading.enumerate())
    with LocalCluster(num_ps, num_workers, log_level="ERROR", **options) as cluster:
        pids = cluster.pids
        spec = cluster.cluster_spec()
        addresses = [spec.task_address(job, index) for job in spec.jobs for index in spec.task_indices(job)]
        yield cluster
        assert cluster.pids == pids, "a role died, and was restarted, during the tests"
        cluster.check()
    assert all(is_gone(pid) for pid in pids.values())
    assert [address for address in addresses if not is_free(address)] == []

    def left() -> list[threading.Thread]:
        gc.collect()  # some thread pools of the tests' gRPC servers end only with them
        new = [thread for thread in threading.enumerate() if thread not in threads]
        return [thread for thread in new if not any(name in thread.name for name in _LASTING_THREADS)]

    # gRPC's own threads notice the end of their channels a little later.
    until(lambda: not left(), "no thread is left", left)


def run_strategy(num_ps: int, num_workers: int) -> Iterator[ParameterServerStrategy]:
    """A strategy on a separate cluster, for a module's fixture."""
    with LocalCluster(num_ps, num_workers, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        yield strategy


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two parameter servers and two workers, for all tests of the session."""
    yield from run_cluster(NUM_PS, NUM_WORKERS)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    """A strategy for this test alone; its variables are whole."""
    with ParameterServerStrategy(cluster) as strategy:
        yield strategy


@pytest.fixture
def sharding_strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    """A strategy for this test alone that cuts every variable in three."""
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(3)) as strategy:
        yield strategy


@pytest.fixture
def coordinator(strategy: ParameterServerStrategy) -> ClusterCoordinator:
    """The coordinator of the test's strategy."""
    return ClusterCoordinator(strategy)


def _held(step: Callable[..., Any], args: tuple[Any, ...], path: str) -> tuple[int, Any]:
    """A step that holds its worker until all workers have got theirs."""
    worker, result = experimental_get_current_worker_index(), step(*args)
    leave_mark(path, str(worker))
    wait_for_file(path)
    return worker, result


Everywhere = Callable[..., list[Any]]
"""(coordinator, step, *args): runs the step once on every worker, and gives its results by worker."""


@pytest.fixture
def everywhere(tmp_path: Path) -> Iterator[Everywhere]:
    """Run a step once on every worker, after what ran on them before has ended."""
    gates: list[Gate] = []

    def run(coordinator: ClusterCoordinator, step: Callable[..., Any], *args: Any) -> list[Any]:
        gate = Gate(tmp_path / f"everywhere-{len(gates)}")
        gates.append(gate)
        held = functools.partial(_held, step)
        values = [coordinator.schedule(held, args=(args, gate.path)) for _ in range(NUM_WORKERS)]
        until(lambda: coordinator.done() or len(marks(gate)) == NUM_WORKERS, "every worker has had one")
        gate.open()
        by_worker = dict(coordinator.fetch(values, TIMEOUT))
        return [by_worker[worker] for worker in range(NUM_WORKERS)]

    yield run
    for gate in gates:
        gate.open()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that is always opened at the end of the test, so that no step outlives it."""
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()
