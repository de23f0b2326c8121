"""Which worker runs which replica: several of one worker, those of a worker that is lost, and who comes back."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.coordinator.synchronous.support import rank
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    LocalCluster,
    PerReplica,
    SynchronousStrategy,
    Variable,
    errors,
    experimental_get_current_worker_index,
    optimizers,
    replica_context,
)

DEVICES = 2
STEPS = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, 2)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[SynchronousStrategy]:
    with SynchronousStrategy(cluster, devices_per_worker=DEVICES) as strategy:
        yield strategy


def where() -> tuple[int, int, int]:
    return rank(), experimental_get_current_worker_index(), os.getpid()


# Several replicas of one worker


def test_each_worker_is_several_replicas(strategy: SynchronousStrategy) -> None:
    assert strategy.num_replicas_in_sync == 4

    def step(x: int) -> tuple[int, int, float, list[int]]:
        context = replica_context()
        total = context.all_reduce("sum", np.float64(x))
        return rank(), experimental_get_current_worker_index(), float(total), context.all_gather(rank()).tolist()

    results = strategy.run(step, (PerReplica([1, 2, 3, 4]),))
    of_replicas = strategy.local_results(results)
    assert of_replicas == tuple((at, at // DEVICES, 10.0, [0, 1, 2, 3]) for at in range(4))


def test_they_share_what_is_their_worker_s(strategy: SynchronousStrategy) -> None:
    """Objects and variables of each worker are there in its steps, one for all of its replicas."""
    coordinator = ClusterCoordinator(strategy)
    jitted = coordinator.per_worker(object)
    seen = coordinator.per_worker_variable(np.zeros(DEVICES), name="seen")

    def step() -> int:
        seen.assign_add(np.eye(DEVICES)[rank() % DEVICES])
        return id(jitted.get())

    for _ in range(3):
        objects = strategy.local_results(strategy.run(step))
    assert objects[0] == objects[1]
    assert objects[2] == objects[3]
    assert [value.tolist() for value in seen.read_all(TIMEOUT)] == [[3, 3]] * 2


def test_they_run_at_the_same_time(strategy: SynchronousStrategy, tmp_path: Path) -> None:
    def meet(folder: str) -> bool:
        (Path(folder) / str(rank())).touch()
        until(lambda: len(os.listdir(folder)) == 4, "all replicas are in the step")
        return True

    assert strategy.run(meet, (str(tmp_path),)).values == (True,) * 4


def test_each_has_its_own_data_and_gradients(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(3), name="w")
        sgd = optimizers.SGD(1.0, global_clipnorm=1e9)  # whose norm the replicas find together

    def dataset_fn(context: Any) -> Iterator[tuple[int, int, int, int]]:
        while True:
            size = context.get_per_replica_batch_size(8)
            yield context.input_pipeline_id, context.num_input_pipelines, context.worker_index, size

    def step(numbers: Iterator[Any]) -> Any:
        element = next(numbers)
        sgd.apply_gradients([(np.full(3, 10.0 ** element[0]), w)])
        return element

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    last = strategy.run(step, (iterator,), steps=3)
    assert strategy.local_results(last) == tuple((at, 4, at // DEVICES, 2) for at in range(4))
    np.testing.assert_allclose(w.numpy(), np.full(3, -3333.0), rtol=1e-12)
    assert sgd.iterations == 3
    sliced = iter(strategy.distribute_dataset([np.arange(8)]))
    assert [rows.tolist() for rows in strategy.run(next, (sliced,)).values] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    coordinator = ClusterCoordinator(strategy)
    alone = iter(coordinator.create_per_worker_dataset(dataset_fn))
    pipelines = {coordinator.schedule(next, (alone,)).fetch()[0] for _ in range(8)}
    assert pipelines <= {0, 2}, "a function that runs alone takes from the worker's first replica"


def test_one_that_raises_stops_the_others(strategy: SynchronousStrategy) -> None:
    def step() -> None:
        if rank() == 1:
            raise ValueError("from replica 1")
        replica_context().barrier()

    with pytest.raises(ValueError, match="from replica 1"):
        strategy.run(step)
    assert strategy.run(rank).values == (0, 1, 2, 3)


def test_a_thread_that_a_replica_starts_must_say_whose_it_is(strategy: SynchronousStrategy) -> None:
    def step() -> tuple[str, int]:
        told: list[Any] = []

        def ask() -> None:
            try:
                told.append(rank())
            except errors.MisuseError as error:
                told.append(str(error))

        context = replica_context()
        context.barrier()  # all are in the step
        copied = contextvars.copy_context()
        for thread in (threading.Thread(target=ask), threading.Thread(target=copied.run, args=(ask,))):
            thread.start()
            thread.join()
        context.barrier()
        return told[0], told[1]

    for at, (refusal, own) in enumerate(strategy.local_results(strategy.run(step))):
        assert "it is unclear which" in refusal
        assert own == at


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"devices_per_worker": 0}, "devices_per_worker is 0"),
        ({"devices_per_worker": 17}, "devices_per_worker is 17"),
        ({"min_replicas": 0}, "min_replicas is 0"),
        ({"min_replicas": 5, "devices_per_worker": 2}, "min_replicas is 5, but there are 4 replicas"),
    ],
)
def test_arguments_are_checked(cluster: LocalCluster, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SynchronousStrategy(cluster, **arguments)


# Workers that are lost


def expected(replicas: int) -> Any:
    """The parameters of one process that has read the batches of all replicas."""
    w = np.zeros((4, 2))
    for number in range(STEPS):
        gradient = np.zeros((4, 2))
        for replica in range(replicas):
            gradient += w * 0.01 + number * (replica + 1)
        w = w - 0.5 * gradient
    return w


@pytest.mark.parametrize("devices", [1, 2])
def test_others_run_the_replicas_of_a_worker_that_is_lost_until_it_is_back(devices: int, tmp_path: Path) -> None:
    """The parameters are bit for bit those of one process; each element is read once; the one that is back joins."""
    replicas, home = 3 * devices, 1 // devices
    with (
        LocalCluster(2, 3, log_level="ERROR", restart=False) as cluster,
        SynchronousStrategy(cluster, devices_per_worker=devices) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == 3, "all workers are up")
        with strategy.scope():
            w = Variable(np.zeros((4, 2)), name="w", partitioner=FixedShardsPartitioner(2))
            sgd = optimizers.SGD(0.5)
        back = tmp_path / "back"

        def step(numbers: Iterator[int], dies_at: int, wait: bool) -> tuple[int, int]:
            number = next(numbers)
            if wait and number == 24 and not back.exists():
                # Nothing is committed before the worker is back. Then this attempt is told to stop.
                replica_context().barrier()
                until(back.exists, "the worker is back")
            if number == dies_at and (rank(), experimental_get_current_worker_index()) == (1, home):
                os.kill(os.getpid(), signal.SIGKILL)
            gradient = w.read_value() * 0.01 + number * (rank() + 1)
            replica_context().barrier()  # which all must reach, also those that share a process
            sgd.apply_gradients([(gradient, w)])
            return number, os.getpid()

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(STEPS)))
        lost = cluster.pids["worker", home]
        for start, dies_at in ((0, -1), (10, 14)):
            last = strategy.local_results(strategy.run(step, (numbers, dies_at, False), steps=10, timeout=TIMEOUT))
            assert [number for number, _ in last] == [start + 9] * replicas
        pids = [pid for _, pid in last]
        assert lost not in pids, "others have taken the last step"
        assert len(set(pids)) == 2
        assert max(map(pids.count, pids)) - min(map(pids.count, pids)) <= 1, "evenly"

        def come_back() -> None:
            cluster.restart("worker", home)
            until(lambda: coordinator.workers_up == 3, "all workers are up again")
            back.touch()

        returned = threading.Thread(target=come_back)
        returned.start()
        last = strategy.local_results(strategy.run(step, (numbers, -1, True), steps=10, timeout=TIMEOUT))
        returned.join()
        assert [number for number, _ in last] == [STEPS - 1] * replicas
        pids = [pid for _, pid in strategy.local_results(strategy.run(lambda: (0, os.getpid())))]
        assert pids == [cluster.pids["worker", at // devices] for at in range(replicas)], "each is at home again"
        assert w.numpy().tolist() == expected(replicas).tolist()
        assert sgd.iterations == STEPS


def test_fewer_than_min_replicas_wait_for_the_others(tmp_path: Path) -> None:
    with (
        LocalCluster(1, 2, log_level="ERROR", restart=False) as cluster,
        SynchronousStrategy(cluster, min_replicas=2) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        assert strategy.run(rank).values == (0, 1)
        cluster.kill("worker", 1)
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(strategy.run(where)))
        running.start()
        until(lambda: "or on 2 of them" in coordinator.explain(), "it waits, and says for what", coordinator.explain)
        assert "worker 1" in coordinator.explain()
        cluster.restart("worker", 1)
        running.join(TIMEOUT)
        assert [at for at, _, _ in strategy.local_results(results[0])] == [0, 1]


def test_one_process_runs_all_replicas_if_only_one_is_left_and_global_state_is_safe() -> None:
    """Replicas that are one worker each take turns where they share a process: what a step changes there is its own."""
    with (
        LocalCluster(1, 3, log_level="ERROR", restart=False) as cluster,
        SynchronousStrategy(cluster) as strategy,
    ):
        strategy.run(rank)
        for index in (0, 2):
            cluster.kill("worker", index)

        def step(x: int) -> tuple[int, float, int]:
            os.environ["PSCLUSTER_TEST_STATE"] = str(rank())  # shared by all that run in this process
            total = sum(i % 7 for i in range(20_000))
            assert os.environ["PSCLUSTER_TEST_STATE"] == str(rank())
            assert total
            mean = replica_context().all_reduce("mean", np.arange(100_000.0) + rank())[0]
            return x * rank(), float(mean), os.getpid()

        results = strategy.local_results(strategy.run(step, (2,), steps=3))
        assert results == tuple((2 * at, 1.0, cluster.pids["worker", 1]) for at in range(3))


def test_a_step_that_kills_its_workers_has_applied_nothing() -> None:
    """And neither its error nor a checkpoint says that it may have, unless a variable is updated at once."""
    with LocalCluster(1, 2, log_level="ERROR") as cluster, SynchronousStrategy(cluster) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(2), name="w")

        def step(victim: int) -> None:
            w.assign_add(np.ones(2))
            if rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            replica_context().barrier()

        def error() -> errors.WorkerLostError:
            with pytest.raises(errors.WorkerLostError, match="on 3 workers that died") as raised:
                strategy.run(step, (1,))
            return raised.value

        lost, partly_applied = error(), strategy.context.partly_applied
        assert str(lost).count(" at unix:") == 3, "each of them is named"
        assert not lost.partly_applied
        assert partly_applied.count == 0
        strategy.run(step, (-1,))
        assert w.numpy().tolist() == [2, 2]
        with strategy.scope():
            Variable(np.zeros(2), name="seen", consistency="async")
        assert error().partly_applied
        assert partly_applied.count > 0
