"""Bounded staleness on a real cluster: nobody is too far ahead, what may die, the end of the data, results."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.coordinator.synchronous.support import fitted_loss, rank
from tests.core.metrics.scraping import addresses, scrape
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    PerReplica,
    SynchronousStrategy,
    Variable,
    errors,
    optimizers,
    replica_context,
)
from pscluster.core.context import current_function
from pscluster.core.errors import FunctionCancelled

REPLICAS = 3
STALENESS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[SynchronousStrategy]:
    with SynchronousStrategy(cluster, staleness=STALENESS) as strategy:
        yield strategy


def begun_by(folder: Path, replica: int) -> int:
    """Return how many steps a replica has begun."""
    return len(list(folder.glob(f"{replica}-*")))


@pytest.mark.parametrize("held", [0, 2])
def test_no_replica_is_too_far_ahead(strategy: SynchronousStrategy, tmp_path: Path, held: int) -> None:
    """One is held before each of its steps until the others have gone as far as they may."""
    steps, others = 6, [replica for replica in range(REPLICAS) if replica != held]
    metrics = {task: address for task, address in addresses(strategy).items() if task.startswith("worker")}

    def staleness() -> float:
        """The sum over all replicas, as the workers' metrics say."""
        return sum(scrape(of).total("pscluster_worker_replica_staleness_steps") for of in metrics.values())

    def step(numbers: Iterator[int]) -> None:
        number = next(numbers)
        (tmp_path / f"{rank()}-{number}").touch()
        begun = begun_by(tmp_path, held)  # at least as many as it has ended
        assert number <= begun + STALENESS, f"step {number} begins, and the slowest has begun {begun}"
        if rank() == held:
            most = min(number + STALENESS + 1, steps)
            until(lambda: all(begun_by(tmp_path, other) >= most for other in others), "the others go ahead")
            assert [begun_by(tmp_path, other) for other in others] == [most, most], "and no further"
            ahead = min(most - 1 - number, STALENESS)
            until(lambda: staleness() >= ahead * len(others), "their metrics say so", staleness)

    numbers = iter(strategy.distribute_datasets_from_function(lambda: range(100)))
    strategy.run(step, (numbers,), steps=steps, timeout=TIMEOUT)
    assert all(begun_by(tmp_path, replica) == steps for replica in range(REPLICAS))
    assert staleness() == 0
    for other in others:
        waited = scrape(metrics[f"worker {other}"]).value(
            "pscluster_worker_replica_wait_seconds_total", replica=str(other)
        )
        assert waited > 0


def test_with_infinite_staleness_none_waits(cluster: LocalCluster, tmp_path: Path) -> None:
    with SynchronousStrategy(cluster, staleness=float("inf")) as strategy:

        def step(numbers: Iterator[int]) -> int:
            number = next(numbers)
            (tmp_path / f"{rank()}-{number}").touch()
            if rank() == 1:
                until(lambda: begun_by(tmp_path, 0) == begun_by(tmp_path, 2) == 20, "the others are done")
            return number

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(100)))
        assert strategy.run(step, (numbers,), steps=20, timeout=TIMEOUT).values == (19,) * REPLICAS


def test_updates_are_applied_as_they_come(strategy: SynchronousStrategy) -> None:
    """A replica reads its own within the step; in the end they make the same sum, or mean, as synchronous ones."""
    with strategy.scope():
        w, v = (Variable(np.zeros(2), name=name) for name in "wv")
        rows = Variable(np.zeros((4, 1)), name="rows")
        seen = Variable(np.int64(0), name="seen")
        sgd = optimizers.SGD(1.0)

    def step() -> float:
        before = float(w.read_value()[0])
        of_rows = IndexedSlices(np.full((1, 1), 3.0), np.array([rank()]))
        sgd.apply_gradients([(np.full(2, rank() + 1.0), w)])
        sgd.apply_gradients([(np.full(2, rank() + 1.0), v), (of_rows, rows)], examples=2)
        seen.assign_add(1)
        return float(w.read_value()[0]) - before

    own = strategy.run(step, steps=10, collect="all")
    assert all(own[at][replica] <= -1.0 - replica for at in range(10) for replica in range(REPLICAS))
    assert w.numpy().tolist() == [-60.0, -60.0]
    np.testing.assert_allclose(v.numpy(), [-20.0, -20.0])
    np.testing.assert_allclose(rows.numpy()[:, 0], [-10.0, -10.0, -10.0, 0.0])
    assert seen.numpy() == 30


def test_results_of_several_steps(strategy: SynchronousStrategy) -> None:
    def step(numbers: Iterator[int]) -> dict[str, int]:
        return {"number": next(numbers), "rank": rank()}

    numbers = iter(strategy.distribute_datasets_from_function(lambda: range(100)))
    last = strategy.run(step, (numbers,), steps=4)
    assert (last["number"].values, last["rank"].values) == ((3, 3, 3), (0, 1, 2))
    every = strategy.run(step, (numbers,), steps=3, collect="all")
    assert [one["number"].values for one in every] == [(at,) * REPLICAS for at in (4, 5, 6)]
    assert strategy.run(step, (numbers,), steps=3, collect="mean")["number"].values == (8.0, 8.0, 8.0)


def test_the_end_of_the_data_of_one_ends_the_call(strategy: SynchronousStrategy) -> None:
    """The number of steps is what all have done, and the results are those."""

    def step(numbers: Iterator[int]) -> int:
        return next(numbers)

    numbers = iter(strategy.distribute_datasets_from_function(lambda context: range(5 + 9 * context.input_pipeline_id)))
    with pytest.raises(errors.EndOfDatasetError, match="ended after 5 of 10 steps") as caught:
        strategy.run(step, (numbers,), steps=10, collect="all")
    assert caught.value.steps == 5
    assert [each.values for each in caught.value.results] == [(at,) * REPLICAS for at in range(5)]
    with pytest.raises(errors.EndOfDatasetError, match="ended after 0 of 10 steps"):
        strategy.run(step, (numbers,), steps=10)


def test_a_step_that_raises_gets_its_elements_again(strategy: SynchronousStrategy) -> None:
    def step(numbers: Iterator[int], bad: int) -> int:
        number = next(numbers)
        if number == bad and rank() == 1:
            raise ValueError(f"no {number}")
        return number

    numbers = iter(strategy.distribute_datasets_from_function(lambda: range(100)))
    with pytest.raises(ValueError, match="no 3"):
        strategy.run(step, (numbers, 3), steps=10)
    assert strategy.run(step, (numbers, -1))[1] == 3


def test_collectives_are_refused(strategy: SynchronousStrategy) -> None:
    for call in (
        lambda: replica_context().all_reduce("sum", 1.0),
        lambda: replica_context().barrier(),
    ):
        with pytest.raises(errors.MisuseError, match=r"staleness above 0 are in different steps.*: use staleness=0"):
            strategy.run(call)


@pytest.mark.parametrize("staleness", [-1, 1.5, "2", float("nan"), float("-inf"), True])
def test_wrong_arguments_are_refused_before_anything_is_connected(staleness: Any) -> None:
    with pytest.raises(ValueError, match=r'staleness is .*; it must be a whole number, .*, or float\("inf"\)'):
        SynchronousStrategy(None, staleness=staleness)  # type: ignore[arg-type]


def test_fit(strategy: SynchronousStrategy) -> None:
    assert fitted_loss(strategy) < 0.01


# Deaths

STEPS = 12


@pytest.mark.parametrize("dies", [("worker", 1), ("ps", 0), ("ps", 1)], ids=lambda task: "-".join(map(str, task)))
def test_whatever_dies_each_step_counts_once(dies: tuple[str, int], tmp_path: Path) -> None:
    """Each element of each replica's data is added once, though a task is killed after half a step, in two calls."""
    pids, deaths = tmp_path / "pids", [3, STEPS + 4]
    pids.mkdir()
    if dies[0] == "worker":
        deaths.append(STEPS - 1)
    with (
        LocalCluster(2, REPLICAS, log_level="ERROR", durability="log", state_dir=tmp_path / "state") as cluster,
        SynchronousStrategy(cluster, staleness=STALENESS) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == REPLICAS, "all workers are up")
        with strategy.scope():
            first, second = (Variable(np.zeros((REPLICAS, 2 * STEPS)), name=name) for name in ("first", "second"))

        def step(numbers: Iterator[int], victim: int) -> int:
            number = next(numbers)
            one = np.zeros((1, 2 * STEPS))
            one[0, number] = 1.0
            first.scatter_add(IndexedSlices(one, np.array([rank()])))
            if number in deaths and rank() == (1 if not victim else 2):
                mark = pids / str(number)
                if not mark.exists():
                    mark.touch()
                    os.kill(victim or os.getpid(), signal.SIGKILL)
            second.scatter_add(IndexedSlices(one, np.array([rank()])))
            return number

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(2 * STEPS)))
        for call in (1, 2):
            victim = 0 if dies[0] == "worker" else cluster.pids[dies]
            last = strategy.run(step, (numbers, victim), steps=STEPS, timeout=TIMEOUT)
            assert last.values == (call * STEPS - 1,) * REPLICAS
        for variable in (first, second):
            assert variable.numpy().tolist() == np.ones((REPLICAS, 2 * STEPS)).tolist()
        assert len(list(pids.iterdir())) == len(deaths)
        assert strategy.lost_updates() == {}


def test_an_attempt_that_ends_before_the_last_step_is_reported(tmp_path: Path) -> None:
    """A replica whose clock does not know of it repeats the step, on the same element, for its result."""
    with (
        LocalCluster(1, 2, log_level="ERROR") as cluster,
        SynchronousStrategy(cluster, staleness=STALENESS) as strategy,
    ):
        with strategy.scope():
            total = Variable(np.zeros(2))

        def step(numbers: Iterator[int]) -> int:
            number = next(numbers)
            total.scatter_add(IndexedSlices(np.ones(1), np.array([rank()])))
            mark = tmp_path / str(rank())
            if number == STEPS - 1 and not mark.exists():
                mark.touch()
                if rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                until(was_cancelled, "the attempt is over")
            return number

        def was_cancelled() -> bool:
            function = current_function()
            assert function is not None
            try:
                function.check()
            except FunctionCancelled:
                return True
            return False

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(2 * STEPS)))
        assert strategy.run(step, (numbers,), steps=STEPS, timeout=TIMEOUT).values == (STEPS - 1,) * 2
        assert strategy.run(step, (numbers,), timeout=TIMEOUT).values == (STEPS,) * 2
        assert total.numpy().tolist() == [STEPS + 1] * 2


def test_a_server_without_a_log_that_dies(tmp_path: Path) -> None:
    """The clock is learned again from the replicas, which go on."""
    with (
        LocalCluster(1, 2, log_level="ERROR", state_dir=tmp_path / "state") as cluster,
        SynchronousStrategy(cluster, staleness=1) as strategy,
    ):
        pid = cluster.pids["ps", 0]

        def step(numbers: Iterator[int], scale: int) -> int:
            number = next(numbers)
            if number == 5 and rank():
                os.kill(pid, signal.SIGKILL)
            return number * scale

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(20)))
        last = strategy.run(step, (numbers, PerReplica([1, 10])), steps=20, timeout=TIMEOUT)
        assert last.values == (19, 190)
