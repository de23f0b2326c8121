"""Steps that are done without the last replicas, on a real cluster: who counts, what is dropped, results, deaths."""

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
    FixedShardsPartitioner,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    errors,
    optimizers,
    replica_context,
)

REPLICAS = 3
SLOW = 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[SynchronousStrategy]:
    with SynchronousStrategy(cluster, backup=1) as strategy:
        yield strategy


class Counted:
    """A variable on both servers that a step adds to; and a step in which one replica is late at a number."""

    def __init__(self, strategy: SynchronousStrategy, folder: Path) -> None:
        with strategy.scope():
            self.total = Variable(np.zeros((REPLICAS, 2)), name="total", partitioner=FixedShardsPartitioner(2))
            self.count = Variable(np.int64(0), name="count")
        total, count = self.total, self.count

        def step(numbers: Iterator[int], late_at: int) -> int:
            """Add 1 for each replica, and its number; the slow one waits until its step is done without it."""
            before, number = int(count.numpy()), next(numbers)
            if rank() == SLOW and number == late_at and not (folder / "late").exists():
                (folder / "late").touch()
                until(lambda: int(count.numpy()) >= before + REPLICAS - 1, "the others are ahead")
            one = np.zeros((REPLICAS, 2))
            one[rank()] = 1.0, number
            total.assign_add(one)
            count.assign_add(1)
            return number

        self.step = step


@pytest.mark.parametrize("requeue", [False, True])
def test_a_late_contribution_is_dropped(cluster: LocalCluster, tmp_path: Path, requeue: bool) -> None:
    """That replica goes on with the current step: with its next elements, or with the same ones again."""
    with SynchronousStrategy(cluster, backup=1, requeue_dropped=requeue) as strategy:
        counted = Counted(strategy, tmp_path)
        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(1000)))
        each = strategy.run(counted.step, (numbers, 2), steps=30, collect="all", timeout=TIMEOUT)
        assert len(each) == 30
        name = "pscluster_worker_replica_dropped_total"
        assert scrape(addresses(strategy)[f"worker {SLOW}"]).value(name, replica=str(SLOW)) >= 1
        total = counted.total.numpy()
        taken = {replica: [of[replica] for of in each if of[replica] is not None] for replica in range(REPLICAS)}
        assert all(sum(number is not None for number in of) == REPLICAS - 1 for of in each), "each step counts with two"
        for replica in range(REPLICAS):
            assert total[replica].tolist() == [len(taken[replica]), sum(taken[replica])], "what counted was applied"
        if requeue:
            assert all(numbers == list(range(len(numbers))) for numbers in taken.values()), "nothing is left out"
        else:
            assert 2 not in taken[SLOW]
            assert all(numbers == sorted(set(numbers)) for numbers in taken.values())


def test_results_are_those_of_replicas_that_took_part(strategy: SynchronousStrategy) -> None:
    def step() -> dict[str, float]:
        return {"rank": float(rank())}

    last = strategy.run(step, steps=9)
    assert last["rank"].values == (0.0, 1.0, 2.0), "the last one that each has computed, whether it counted or not"
    mean = strategy.run(step, steps=9, collect="mean")
    assert mean["rank"].values == (0.0, 1.0, 2.0)
    for of in strategy.run(step, steps=9, collect="all"):
        assert sum(value is None for value in of["rank"]) == 1


def test_the_mean_is_of_those_that_took_part(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w, v = (Variable(np.zeros(2), name=name) for name in "wv")
        sgd = optimizers.SGD(1.0)
        clipped = optimizers.SGD(1.0, clipnorm=1.0)

    def step() -> None:
        sgd.apply_gradients([(np.full(2, 2.0), w)], examples=1 + rank())
        clipped.apply_gradients([(np.array([3.0, 4.0]), v)])

    strategy.run(step, steps=10)
    np.testing.assert_allclose(w.numpy(), [-20.0, -20.0])
    np.testing.assert_allclose(v.numpy(), [-10 * 2 * 0.6, -10 * 2 * 0.8]), "each replica clips its own"


def test_what_is_refused(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        skips = optimizers.SGD(1.0, nonfinite="skip")
    with pytest.raises(errors.MisuseError, match=r"with backup above 0 replicas are in different steps.*use backup=0"):
        strategy.run(lambda: replica_context().all_reduce("sum", 1.0))
    with pytest.raises(errors.MisuseError, match='nonfinite="skip", which all replicas have to agree on'):
        strategy.run(lambda: skips.apply_gradients([(np.ones(2), w)]))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"backup": -1}, "backup is -1"),
        ({"backup": 0.5}, "backup is 0.5"),
        ({"backup": 1, "staleness": 2}, "staleness is 2, and backup is 1.*give one of the two"),
        ({"backup": 1, "staleness": float("inf")}, "staleness is inf, and backup is 1"),
        ({"requeue_dropped": True}, "requeue_dropped without backup: no contribution is dropped"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_connected(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SynchronousStrategy(None, **arguments)  # type: ignore[arg-type]


def test_one_replica_at_least_has_to_contribute(cluster: LocalCluster) -> None:
    with pytest.raises(ValueError, match=r"backup is 3, but there are 3 replicas.*give at most 2"):
        SynchronousStrategy(cluster, backup=REPLICAS)


def test_the_end_of_the_data_of_one_ends_all(strategy: SynchronousStrategy) -> None:
    """Though the end may be late for some steps, which are then done without that replica."""

    def step(numbers: Iterator[int]) -> int:
        return next(numbers)

    numbers = iter(
        strategy.distribute_datasets_from_function(lambda context: range(5 + 50 * context.input_pipeline_id))
    )
    with pytest.raises(errors.EndOfDatasetError, match="of 40 steps") as caught:
        strategy.run(step, (numbers,), steps=40, collect="all", timeout=TIMEOUT)
    assert len(caught.value.results) == caught.value.steps >= 5
    assert sum(of[0] is not None for of in caught.value.results) <= 5


def test_fit(strategy: SynchronousStrategy) -> None:
    assert fitted_loss(strategy) < 0.01


# Deaths


def test_a_frozen_replica_holds_up_no_call(tmp_path: Path) -> None:
    """It has no results, others run it in the next call, and once it thaws it takes part again."""
    with LocalCluster(2, REPLICAS, log_level="ERROR") as cluster, SynchronousStrategy(cluster, backup=1) as strategy:
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == REPLICAS, "all workers are up")
        counted = Counted(strategy, tmp_path)
        (tmp_path / "late").touch()
        home = cluster.pids["worker", SLOW]

        def step(numbers: Iterator[int], folder: str) -> tuple[int, int]:
            mark = Path(folder) / "frozen"
            if rank() == SLOW and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return counted.step(numbers, -1), os.getpid()

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(1000)))

        def taken(steps: int) -> Any:
            return strategy.run(step, (numbers, str(tmp_path)), steps=steps, collect="all", timeout=TIMEOUT)

        try:
            each = taken(5)
            assert [list(of[0]) for of in each] == [[at, None, at] for at in range(5)]
            assert counted.total.numpy().tolist() == [[5, 10], [0, 0], [5, 10]], "on both servers"
            each = taken(5)
            assert home not in {pid for of in each for pid in of[1]}
            assert all(sum(number is not None for number in of[0]) == REPLICAS - 1 for of in each)
        finally:
            os.kill(home, signal.SIGCONT)
        # As after a death, the results of steps before it came back are lost.
        until(lambda: any(isinstance(of, tuple) and of[1][SLOW] == home for of in taken(3)), "it is at home")
        steps = counted.count.numpy() / (REPLICAS - 1)
        assert steps == int(steps) >= 13, "each step counts with two"
        assert coordinator.workers_up == REPLICAS, "and nobody was given up"


@pytest.mark.parametrize("dies", [("worker", 1), ("ps", 0), ("ps", 1)], ids=lambda task: "-".join(map(str, task)))
def test_whatever_dies_steps_are_whole(dies: tuple[str, int], tmp_path: Path) -> None:
    """After each death, on both servers, the same replicas have contributed to each step, and as many of them."""
    marks, steps = tmp_path / "marks", 12
    marks.mkdir()
    with (
        LocalCluster(2, REPLICAS, log_level="ERROR", durability="log", state_dir=tmp_path / "state") as cluster,
        SynchronousStrategy(cluster, FixedShardsPartitioner(2), backup=1) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == REPLICAS, "all workers are up")
        with strategy.scope():
            counts = Variable(np.zeros((2, REPLICAS)), name="counts")  # a row on each server

        def step(numbers: Iterator[int], victim: int, call: int) -> bool:
            seen, _ = counts.numpy(), next(numbers)
            one = np.zeros((2, REPLICAS))
            one[:, rank()] = 1.0
            mark = marks / str(call)
            if rank() == (2 if victim else SLOW) and not mark.exists():
                mark.touch()
                os.kill(victim or os.getpid(), signal.SIGKILL)
            counts.assign_add(one)
            return bool((seen[0] == seen[1]).all())

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(1000)))
        for call in (1, 2):
            victim = 0 if dies[0] == "worker" else cluster.pids[dies]
            each = strategy.run(step, (numbers, victim, call), steps=steps, collect="all", timeout=TIMEOUT)
            assert all(whole for of in each for whole in of if whole is not None), "what counts has read steps whole"
            found = counts.numpy()
            assert found[0].tolist() == found[1].tolist()
            assert found[0].sum() == call * steps * (REPLICAS - 1)
        assert len(list(marks.iterdir())) == 2
        assert strategy.lost_updates() == {}
