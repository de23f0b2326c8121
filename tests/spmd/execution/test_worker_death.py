"""Workers that die: their arrays are lost, which is said; what is made of host arrays runs again; nothing hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.faults.armed import Armed, armed_cluster
from tests.faults.support import running_job
from tests.waiting import TIMEOUT, until

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy
from pscluster.coordinator.local.local_cluster import LocalClusterError
from pscluster.core.errors import CancelledError, WaitTimeoutError
from pscluster.spmd import DVariable, Layout

A = np.random.default_rng(1).random((5, 6))
B = np.random.default_rng(2).random((6, 3))
EXCHANGES = 4
"""In `program`, at most."""


def program(mesh: spmd.Mesh) -> Any:
    """A program of host arrays that exchanges pieces in several ways, and its result."""
    a: Any = spmd.distribute(A, Layout([None, "x"], mesh))
    b: Any = spmd.distribute(B, Layout(["x", None], mesh))
    product = a @ b  # terms are combined
    scattered = (a @ b).relayout(["x", None])
    turned = product.relayout([None, "x"]).relayout(["x", None])
    return (scattered + turned).full(TIMEOUT)


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Armed]:
    """Two workers that are restarted when they die."""
    with armed_cluster(tmp_path_factory.mktemp("armed"), 1, 2, revive=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def coordinator(armed: Armed) -> Iterator[ClusterCoordinator]:
    """Their coordinator."""
    with ParameterServerStrategy(armed.cluster, connect_timeout=TIMEOUT) as strategy:
        yield ClusterCoordinator(strategy, max_attempts=10)


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Armed]:
    """Two workers, and two servers with a log, that are restarted when they die."""
    folder = tmp_path_factory.mktemp("durable")
    with armed_cluster(folder, 2, 2, revive=True, durability="log", state_dir=folder / "state") as cluster:
        yield cluster


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, EXCHANGES + 1))
def test_a_worker_dies_in_every_exchange(armed: Armed, coordinator: ClusterCoordinator, nth: int, when: str) -> None:
    """The program ends right, or says that arrays are lost; then it runs again."""
    mesh = spmd.create_mesh({"x": 2}, coordinator=coordinator)
    wanted = 2 * (A @ B)
    unused: Any = spmd.distribute(A, Layout(["x", None], mesh))
    kept: Any = spmd.distribute(A, Layout(["x", None], mesh)) + 0
    np.testing.assert_allclose(program(mesh), wanted)
    fault = f"worker/worker.exchange.{when}=kill@{nth}"
    armed.arm(fault)
    lost = 0
    for _ in range(4):
        try:
            np.testing.assert_allclose(program(mesh), wanted)
        except spmd.TensorLostError:
            lost += 1
    assert lost <= 1
    armed.until_struck(fault, calls=False)
    with pytest.raises(spmd.TensorLostError, match=r"shape \(5, 6\) and type float64, the result of add, is lost"):
        (kept + 1).full(TIMEOUT)
    np.testing.assert_array_equal((unused + 1).full(TIMEOUT), A + 1)
    np.testing.assert_allclose(program(mesh), wanted)


def summed(block: Any) -> Any:
    """Of large arrays, in two exchanges; between two others, in which the workers say how far they are."""
    return spmd.psum(block, "x")


@pytest.mark.parametrize(("nth", "when"), [(1, "before"), (2, "after"), (3, "before"), (4, "after")])
def test_a_worker_dies_while_functions_wait(armed: Armed, coordinator: ClusterCoordinator, nth: int, when: str) -> None:
    """What it is called with is sent again; nothing hangs, and all calls are right."""
    mesh = spmd.create_mesh({"x": 2}, coordinator=coordinator)
    array = np.arange(20_000.0)

    def total() -> Any:
        rows = spmd.distribute(np.stack([array, 2 * array]), Layout(["x", None], mesh))
        return spmd.local_map(summed, None, [None, None])(rows).full(TIMEOUT)

    np.testing.assert_array_equal(total(), [3 * array])
    fault = f"worker/worker.exchange.{when}=kill@{nth}"
    armed.arm(fault)
    for _ in range(4):
        np.testing.assert_array_equal(total(), [3 * array])
    armed.until_struck(fault, calls=False)
    np.testing.assert_array_equal(total(), [3 * array])


def trained(mesh: spmd.Mesh, name: str, steps: int = 4, fail: Callable[[], None] = lambda: None) -> Any:
    """A variable after some steps, each of which depends on its value, with terms that are combined."""
    v = DVariable(A, Layout(["x", None], mesh), f"{name}/v")
    w = DVariable(A[0], Layout([None], mesh), f"{name}/w")
    adam = spmd.optimizers.Adam(0.1, mesh=mesh, name=f"{name}/adam")

    @spmd.function
    def step(v: Any, w: Any, number: Any) -> Any:
        b = number * B
        product = np.matmul(v, b)
        gradient = np.matmul(product, b.T)
        adam.apply_gradients([(gradient, v), (gradient.sum(axis=0) + w, w)])
        return product.sum()

    fail()
    done = lost = 0
    while done < steps:
        try:
            float(step(v, w, np.float64(done)))
        except spmd.TensorLostError:  # its argument, or its result
            lost += 1
        assert adam.iterations in (done, done + 1)
        done = adam.iterations
    assert lost <= 1
    return v.full(TIMEOUT), w.full(TIMEOUT)


@pytest.mark.parametrize(
    "fault",
    [
        *("worker/worker.exchange.before=kill@2", "worker/worker.exchange.after=kill@2"),
        *("worker/client.step.staged=kill@2", "worker/client.step.staged=kill@3"),
        *("ps/ps.step.before=kill@2", "ps/ps.step.after=kill@2", "worker/worker.result.before=kill@4"),
    ],
)
def test_variables_survive_workers(durable: Armed, fault: str) -> None:
    """They have the values of a run without deaths, bit for bit: each step is applied as a whole, and once."""
    with ParameterServerStrategy(durable.cluster, connect_timeout=TIMEOUT) as strategy:
        mesh = spmd.create_mesh({"x": 2}, coordinator=ClusterCoordinator(strategy, max_attempts=10))
        wanted = trained(mesh, "undisturbed")
        found = trained(mesh, "disturbed", fail=lambda: durable.arm(fault))
        durable.until_struck(fault, calls=False)
        for array, of_undisturbed in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(array, of_undisturbed)


@pytest.mark.parametrize("returns", [False, True])
def test_a_worker_dies_after_its_updates_were_applied(durable: Armed, returns: bool) -> None:
    """They are applied once, though what it needs to run again is lost; its results are, which is said on use."""
    fault = "worker/worker.result.before=kill@1"
    with ParameterServerStrategy(durable.cluster, connect_timeout=TIMEOUT) as strategy:
        mesh = spmd.create_mesh({"x": 2}, coordinator=ClusterCoordinator(strategy, max_attempts=10))
        v = DVariable(A, Layout(["x", None], mesh), "v")
        a: Any = spmd.distribute(A, Layout(["x", None], mesh))

        @spmd.function
        def add(v: DVariable, a: Any) -> Any:
            v.assign_add(a)
            return a.sum() if returns else None

        spmd.barrier(mesh)
        durable.arm(fault)
        result = add(v, a)
        np.testing.assert_array_equal(v.full(TIMEOUT), A + A)
        durable.until_struck(fault, calls=False)
        if returns:
            with pytest.raises(spmd.TensorLostError, match="after the updates of a program were applied"):
                float(result)
            np.testing.assert_array_equal((a + 1).full(TIMEOUT), A + 1)  # sent again, since that program has failed
            return
        with pytest.raises(spmd.TensorLostError, match=r"\(5, 6\) and type float64, the result of distribute, is lost"):
            (a + 1).full(TIMEOUT)


def test_arrays_of_a_worker_that_died_meanwhile(armed: Armed, coordinator: ClusterCoordinator) -> None:
    """They are lost also where nothing ran; others, on workers that live, are not."""
    mesh = spmd.create_mesh({"x": 2}, coordinator=coordinator)
    alone = spmd.create_mesh({"x": 1}, coordinator=coordinator, tasks=[0])
    both, own = (spmd.arange(4, layout=Layout(["x"], where)) for where in (mesh, alone))
    spmd.barrier(mesh)
    spmd.barrier(alone)
    pid = armed.cluster.pids["worker", 1]
    armed.cluster.kill("worker", 1)
    until(lambda: armed.cluster.pids.get(("worker", 1), pid) != pid, "the worker is restarted")
    with pytest.raises(
        spmd.TensorLostError, match=r"int64, the result of arange, is lost: a worker of its mesh"
    ) as caught:
        both.full(TIMEOUT)
    assert type(caught.value) is spmd.TensorLostError
    assert own.full(TIMEOUT).tolist() == [0, 1, 2, 3]
    assert spmd.arange(4, layout=Layout(["x"], mesh)).full(TIMEOUT).tolist() == [0, 1, 2, 3]


def test_a_worker_that_stays_away() -> None:
    """Whoever waits gives up after the time that they have said; what is done elsewhere goes on."""
    with running_job(num_workers=2, restart=False) as job:
        mesh = spmd.create_mesh({"x": 2}, coordinator=job.coordinator)
        array = spmd.arange(4, layout=Layout(["x"], mesh))
        assert array.full().tolist() == [0, 1, 2, 3]
        job.kill(1)
        with pytest.raises(WaitTimeoutError, match=r"not computed within 0.5 s: .*explain\(\)"):
            array.full(0.5)
        with pytest.raises(WaitTimeoutError):
            spmd.barrier(mesh, 0.5)
        other = spmd.create_mesh({"x": 2}, coordinator=job.coordinator, tasks=[0], devices_per_task=2)
        assert spmd.arange(4, layout=Layout(["x"], other)).full(TIMEOUT).tolist() == [0, 1, 2, 3]
        job.cluster.restart("worker", 1)
        with pytest.raises(spmd.TensorLostError):
            spmd.barrier(mesh, TIMEOUT)
        assert spmd.arange(4, layout=Layout(["x"], mesh)).full(TIMEOUT).tolist() == [0, 1, 2, 3]


def test_whose_fault_it_is_that_a_program_was_cancelled() -> None:
    """A scheduled function's; or that no worker is left: by the error that ends the job's other waits, too."""
    with running_job(num_workers=2, max_restarts=0) as job:
        mesh = spmd.create_mesh({"x": 2}, coordinator=job.coordinator)
        array = spmd.arange(4, layout=Layout(["x"], mesh))
        assert array.full().tolist() == [0, 1, 2, 3]
        job.coordinator.schedule(int, args=("no number",)).wait(TIMEOUT)
        with pytest.raises(CancelledError, match=r"^a program of global arrays was .* function has failed"):
            (array + 1).full(TIMEOUT)
        with pytest.raises(ValueError, match="no number"):
            job.join()
        pids = [job.kill(index) for index in range(2)]
        for _ in range(2):
            with pytest.raises(LocalClusterError, match=rf"^no worker is left: worker 0 \(pid {pids[0]}\) was killed"):
                (array + 1).full(TIMEOUT)
