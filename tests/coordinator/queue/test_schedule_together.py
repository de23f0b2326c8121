"""Functions that run on several workers at the same time, on a real cluster: placed, failed and retried as a whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.waiting import TIMEOUT, until, write_whole

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    PerReplica,
    Variable,
    errors,
    experimental_get_current_worker_index,
    replica_context,
)

WORKERS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(1, WORKERS)


@pytest.fixture
def coordinator(cluster: LocalCluster) -> Iterator[ClusterCoordinator]:
    yield from coordinator_of(cluster)


def coordinator_of(cluster: LocalCluster) -> Iterator[ClusterCoordinator]:
    """A coordinator with all of its workers: one that is not up yet would let a later gang go first."""
    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == WORKERS, "all workers are up")
        yield coordinator


@pytest.fixture
def mortal() -> Iterator[ClusterCoordinator]:
    with LocalCluster(1, WORKERS, log_level="ERROR") as cluster:
        yield from coordinator_of(cluster)


def meet(folder: str, name: str, others: int) -> int:
    """Wait until all members have come here; return this worker's index."""
    with open(f"{folder}/{name}-{experimental_get_current_worker_index()}", "w"):
        pass
    until(
        lambda: len([mark for mark in os.listdir(folder) if mark.startswith(f"{name}-")]) == others,
        "all members are here",
    )
    return experimental_get_current_worker_index()


def process_of(folder: str, counted: Variable, rank: int) -> int:
    """Count once, then hold until a file appears; return the rank."""
    counted.assign_add(1)
    write_whole(f"{folder}/pid-{rank}", os.getpid())
    until(lambda: os.path.exists(f"{folder}/go"), "the test goes on")
    return rank


def test_each_runs_on_a_worker_of_its_own_with_its_own_argument(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    """They run at the same time: each waits for the others. Workers may be named, in the order of ranks."""

    def member(base: int, *, rank: int) -> tuple[int, int]:
        return meet(str(tmp_path), f"all-{base}", 3 if base < 2 else 2), base + rank

    values = coordinator.schedule_together(member, (0,), {"rank": PerReplica([10, 20, 30])})
    assert coordinator.fetch(values, TIMEOUT) == [(0, 10), (1, 20), (2, 30)]
    values = coordinator.schedule_together(member, (1,), {"rank": 5}, workers=[2, 0, 1])
    assert coordinator.fetch(values, TIMEOUT) == [(2, 6), (0, 6), (1, 6)]
    values = coordinator.schedule_together(member, (2,), {"rank": 7}, workers=2)
    assert [result for _, result in coordinator.fetch(values, TIMEOUT)] == [9, 9]
    coordinator.join(TIMEOUT)


def test_what_all_get_is_sent_to_each_as_it_was(coordinator: ClusterCoordinator) -> None:
    """A large array travels beside the arguments, and is copied once for all members."""
    large, ready = np.ones(1 << 16), coordinator.schedule(lambda: 5)
    ready.fetch()
    shared = coordinator.schedule_together(lambda array, more: array.sum() + sum(more), (large, [1, 2]))
    own = coordinator.schedule_together(lambda array, of: array.sum() + of, (large, PerReplica([1, 2, 3])))
    remote = coordinator.schedule_together(lambda array, value: array.sum() + value, (large, ready))
    large[:] = 0
    assert coordinator.fetch(shared) == [65539] * 3
    assert coordinator.fetch(own) == [65537, 65538, 65539]
    assert coordinator.fetch(remote) == [65541] * 3


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (0, "workers is 0; it must be a whole number, 1 or more, or their indices"),
        (4, "workers is 4, but the cluster has 3"),
        ([0, 0], r"workers is \[0, 0\]; give different indices of workers; the cluster has 3 tasks \(0 to 2\)"),
        ([3], r"workers is \[3\]; give different indices of workers; the cluster has 3 tasks \(0 to 2\)"),
        ([], r"workers is \[\]; give different indices"),
    ],
)
def test_workers_that_do_not_exist_are_refused(
    coordinator: ClusterCoordinator, workers: int | list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        coordinator.schedule_together(os.getpid, workers=workers)


def test_other_wrong_arguments_are_refused(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    def same(argument: object) -> object:
        return argument

    def held() -> None:
        until((tmp_path / "go").exists, "the test goes on")

    with pytest.raises(ValueError, match="a PerReplica argument has 2 values, but there are 3 replicas"):
        coordinator.schedule_together(same, (PerReplica([1, 2]),))
    with pytest.raises(TypeError, match="schedule_together takes a function, not an int"):
        coordinator.schedule_together(3)  # type: ignore[arg-type]
    unready = coordinator.schedule(held)
    with pytest.raises(errors.MisuseError, match=r"an argument of .*same is not ready"):
        coordinator.schedule_together(same, (unready,))
    (tmp_path / "go").touch()
    coordinator.join(TIMEOUT)
    assert coordinator.fetch(coordinator.schedule_together(same, (unready,)), TIMEOUT) == [None] * WORKERS


def test_one_that_raises_stops_the_others_and_is_the_error_of_all(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    with coordinator.strategy.scope():
        counted = Variable(np.zeros(()), name="counted")

    def member(rank: int) -> None:
        meet(str(tmp_path), "raise", WORKERS)
        if rank == 1:
            raise LookupError("not here")
        until(lambda: counted.numpy() < 0, "a read stops it")  # it never is: a read that stops the function

    values = coordinator.schedule_together(member, (PerReplica(range(WORKERS)),))
    with pytest.raises(LookupError, match="not here"):
        coordinator.join(TIMEOUT)
    for value in values:
        with pytest.raises(errors.FunctionError, match=r"member failed on worker 1 \(attempt 1\): LookupError"):
            value.fetch(TIMEOUT)
    assert coordinator.schedule(os.getpid, wait=TIMEOUT).fetch(TIMEOUT), "the workers are free again"


def test_the_error_of_an_isolated_gang_concerns_no_other_function(coordinator: ClusterCoordinator) -> None:
    """It is that of its values only: what else was scheduled runs, and nothing raises it later."""

    def fail() -> None:
        raise ValueError("isolated")

    homes, size = coordinator.members(None)
    failed = coordinator.schedule_gang(fail, None, None, homes, size, None, 0, None, isolated=True)
    values = [coordinator.schedule(lambda: 7) for _ in range(5)]
    for value in failed:
        with pytest.raises(ValueError, match="isolated"):
            value.fetch(TIMEOUT)
    coordinator.join(TIMEOUT)
    assert coordinator.done()
    assert coordinator.fetch(values) == [7] * 5

    coordinator.schedule(fail)
    until(lambda: bool(coordinator.pending()), "a function has failed")
    with pytest.raises(errors.CancelledError):
        coordinator.schedule_gang(meet, None, None, homes, size, None, 0, None, isolated=True)
    with pytest.raises(ValueError, match="isolated"):
        coordinator.join(TIMEOUT)


def test_a_retry_runs_all_again_and_updates_count_once(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    with coordinator.strategy.scope():
        counted = Variable(np.zeros(()), name="counted")

    def member(rank: int) -> int:
        counted.assign_add(1)
        attempts = len(os.listdir(tmp_path))
        if rank == 0 and attempts == 0:
            (tmp_path / "failed").touch()
            raise LookupError("once")
        until((tmp_path / "failed").exists, "one has failed")
        return rank

    values = coordinator.schedule_together(member, (PerReplica(range(WORKERS)),), retries=1)
    assert coordinator.fetch(values, TIMEOUT) == [0, 1, 2]
    coordinator.join(TIMEOUT)
    assert counted.numpy() == WORKERS


def test_two_overlapping_gangs_and_a_kill(mortal: ClusterCoordinator, tmp_path: Path) -> None:
    """A worker that both need is killed. Both end, neither waits for the other, and updates count once."""
    coordinator = mortal
    with coordinator.strategy.scope():
        counted = Variable(np.zeros(()), name="counted")
    first = coordinator.schedule_together(process_of, (str(tmp_path), counted, PerReplica([0, 1])), workers=[0, 1])
    second = coordinator.schedule_together(process_of, (str(tmp_path), counted, PerReplica([2, 3])), workers=[1, 2])
    third = coordinator.schedule(os.getpid)
    until(
        lambda: (tmp_path / "pid-0").exists() and (tmp_path / "pid-1").exists() and counted.numpy() == 2,
        "the first gang runs",
    )
    assert "process_of: waits until worker 1 at" in coordinator.explain()
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    assert third.fetch(TIMEOUT), "worker 2 is free while the second waits for a worker that is gone or busy"
    (tmp_path / "go").touch()
    assert coordinator.fetch([first, second], TIMEOUT) == [[0, 1], [2, 3]]
    coordinator.join(TIMEOUT)
    assert counted.numpy() == 4


def add_up(counted: Variable, folder: str) -> float:
    """Compute sums together until a file appears; count once; return the last sum."""
    replica = replica_context()
    write_whole(f"{folder}/pid-{replica.replica_id}", os.getpid())
    total = np.zeros(())
    done = False
    while not done:
        total, ready = replica.all_reduce("sum", (np.float64(1 + replica.replica_id), os.path.exists(f"{folder}/go")))
        done = ready == replica.num_replicas
    counted.assign_add(1)
    return float(total)


def test_a_worker_that_dies_amid_collectives_has_all_run_again(mortal: ClusterCoordinator, tmp_path: Path) -> None:
    """The others' errors, that they miss it, are not the job's: the cause is the death, which is retried."""
    with mortal.strategy.scope():
        counted = Variable(np.zeros(()), name="counted")
    values = mortal.schedule_together(add_up, (counted, str(tmp_path)))
    until((tmp_path / "pid-2").exists, "they run")
    killed = int((tmp_path / "pid-2").read_text())
    os.kill(killed, signal.SIGKILL)
    until(lambda: (tmp_path / "pid-2").read_text() != str(killed), "it runs again")
    (tmp_path / "go").touch()
    assert mortal.fetch(values, TIMEOUT) == [6.0] * WORKERS
    mortal.join(TIMEOUT)
    assert counted.numpy() == WORKERS


def test_the_cause_is_raised_not_that_others_missed_the_one_that_failed(coordinator: ClusterCoordinator) -> None:
    def member() -> None:
        replica = replica_context()
        if replica.replica_id == 1:
            raise LookupError("the cause")
        replica.barrier()

    coordinator.schedule_together(member)
    with pytest.raises(LookupError, match="the cause"):
        coordinator.join(TIMEOUT)


def test_functions_that_take_its_results_run_on_all_workers(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """They wait until it has ended; then all idle workers get them, not only the one that ended last."""

    def member() -> int:
        until((tmp_path / "go").exists, "the test goes on")
        return replica_context().replica_id

    def after(rank: int) -> int:
        meet(str(tmp_path), "after", WORKERS)
        return rank

    values = coordinator.schedule_together(member)
    later = [coordinator.schedule(after, (value,)) for value in values]
    (tmp_path / "go").touch()
    assert coordinator.fetch(later, TIMEOUT) == list(range(WORKERS))


def test_cancelling_one_ends_all(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    with coordinator.strategy.scope():
        counted = Variable(np.zeros(()), name="counted")

    def member() -> None:
        meet(str(tmp_path), "cancel", WORKERS)
        until(lambda: counted.numpy() < 0, "a read stops it")

    values = coordinator.schedule_together(member)
    until(lambda: len(os.listdir(tmp_path)) == WORKERS, "all workers are here")
    coordinator.cancel([values[1]])
    for value in values:
        with pytest.raises(errors.CancelledError):
            value.fetch(TIMEOUT)
    coordinator.join(TIMEOUT)
    assert coordinator.fetch(coordinator.schedule_together(os.getpid), TIMEOUT)


def test_it_waits_for_a_worker_that_is_gone_and_says_so(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    def busy() -> int:
        (tmp_path / f"busy-{experimental_get_current_worker_index()}").write_text(str(os.getpid()))
        until((tmp_path / "go").exists, "the test goes on")
        return os.getpid()

    held = [coordinator.schedule(busy) for _ in range(WORKERS)]
    until(lambda: len(os.listdir(tmp_path)) == WORKERS, "all workers are here")
    values = coordinator.schedule_together(os.getpid)
    assert not coordinator.done()
    assert "getpid: waits until worker 0 at" in coordinator.explain()
    assert "3 functions waiting" in coordinator.describe()
    (tmp_path / "go").touch()
    assert set(coordinator.fetch(values, TIMEOUT)) == set(coordinator.fetch(held, TIMEOUT))
