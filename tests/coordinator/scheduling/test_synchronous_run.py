"""Synchronous steps of a gang on a real cluster: each is applied once and whole, whatever is lost in the middle."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.faults.steps import first_time
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    errors,
    optimizers,
    replica_context,
)
from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import MisuseError, UnavailableError
from pscluster.ps.client.connections import Session
from pscluster.ps.client.synchronous.steps import ReplicaSteps
from pscluster.v1 import worker_pb2

LAST, ALL, MEAN = worker_pb2.SynchronousSteps.LAST, worker_pb2.SynchronousSteps.ALL, worker_pb2.SynchronousSteps.MEAN


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, 2)


@pytest.fixture
def coordinator(cluster: LocalCluster) -> Iterator[ClusterCoordinator]:
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy:
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == 2, "all workers are up")
        yield coordinator


@pytest.fixture
def count(coordinator: ClusterCoordinator) -> Variable:
    """A variable with a shard on each server."""
    with coordinator.strategy.scope():
        return Variable(np.zeros(4), name="count")


def take(
    coordinator: ClusterCoordinator,
    fn: Callable[..., Any],
    *args: Any,
    steps: int = 1,
    collect: Any = ALL,
    retries: int = 0,
) -> list[Any]:
    """Take steps; return the results of each replica."""
    with coordinator.synchronous_run.steps(steps, collect) as (message, committed):
        values = coordinator.schedule_gang(fn, args, {}, range(2), 2, None, retries, None, steps=message)
        results = coordinator.fetch(values, TIMEOUT)
        assert len({done for done, _ in results}) == 1
        committed(results[0][0])
    return [result for _, result in results]


def test_a_replica_reads_what_all_have_added(coordinator: ClusterCoordinator, count: Variable) -> None:
    def step() -> list[float]:
        seen: list[float] = count.numpy().tolist()
        count.assign_add(np.full(4, 1.0 + replica_context().replica_id))
        return seen

    assert take(coordinator, step, steps=5) == [[[3.0 * done] * 4 for done in range(5)]] * 2
    assert count.numpy().tolist() == [15.0] * 4
    assert take(coordinator, step, collect=LAST) == [[15.0] * 4] * 2
    assert coordinator.synchronous_run.committed == 6


def test_rows_of_some_shards_only(coordinator: ClusterCoordinator, count: Variable) -> None:
    """Each replica updates rows of another server: both servers have to know that the step is whole."""

    def step() -> None:
        row = 3 * replica_context().replica_id
        count.scatter_add(IndexedSlices(np.ones(1), [row]))

    take(coordinator, step, steps=3)
    assert count.numpy().tolist() == [3.0, 0.0, 0.0, 3.0]


def test_sparse_gradients(coordinator: ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        table = Variable(np.zeros((4, 2), np.float32), name="table")
        sgd = optimizers.SGD(1.0)

    def step() -> None:
        row = 3 * replica_context().replica_id
        sgd.apply_gradients([(IndexedSlices(-np.ones((2, 2), np.float32), [row, 2]), table)])

    take(coordinator, step, steps=3)
    assert table.numpy()[:, 0].tolist() == [3.0, 0.0, 6.0, 3.0]
    assert sgd.iterations == 3


def test_replicas_that_apply_different_gradients(coordinator: ClusterCoordinator, count: Variable) -> None:
    with coordinator.strategy.scope():
        sgd = optimizers.SGD(1.0)

    def step() -> None:
        for _ in range(1 + replica_context().replica_id):
            sgd.apply_gradients([(np.ones(4), count)])

    with pytest.raises(
        MisuseError, match=r"replica . has gradients of 'count', 'count'|replica . has applied gradients"
    ):
        take(coordinator, step)
    with pytest.raises(MisuseError):
        coordinator.join()
    assert count.numpy().tolist() == [0.0] * 4


def test_a_step_that_fails_leaves_nothing_for_the_next_one(coordinator: ClusterCoordinator, count: Variable) -> None:
    """One replica has staged its part of a step that never ends; the next step does not update that server."""
    with coordinator.strategy.scope():
        alone = Variable(0.0, name="alone")

    def fails() -> None:
        count.assign_add(np.ones(4))
        if replica_context().replica_id:
            raise ValueError("of this replica")

    def other() -> None:
        alone.assign_add(1.0)

    with pytest.raises(ValueError, match="of this replica"):
        take(coordinator, fails)
    with pytest.raises(ValueError, match="of this replica"):
        coordinator.join()
    take(coordinator, other, steps=2)
    assert alone.numpy() == 4.0
    assert count.numpy().tolist() == [0.0] * 4


def test_elements_are_given_again_until_a_step_is_committed(
    coordinator: ClusterCoordinator, count: Variable, tmp_path: Path
) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(itertools.count))
    folder = str(tmp_path)

    def step(iterator: Any) -> int:
        element = next(iterator)
        if element == 3 and replica_context().replica_id and first_time(folder, "failed"):
            raise errors.UnavailableError("again")
        count.assign_add(np.full(4, float(element)))
        return int(element)

    assert [results[-1] for results in take(coordinator, step, iterator, steps=6, retries=3)] == [5, 5]
    assert take(coordinator, step, iterator, steps=2) == [[6, 7]] * 2
    assert count.numpy().tolist() == [2.0 * sum(range(8))] * 4


def test_data_that_ends(coordinator: ClusterCoordinator, count: Variable) -> None:
    """The steps end with the first replica whose data does; what others have staged of the next one is dropped."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: range(3)))

    def step(iterator: Any) -> int:
        element = int(next(iterator)) if replica_context().replica_id else 9
        count.assign_add(np.ones(4))
        return element

    def nothing() -> int:
        return 7

    assert take(coordinator, step, iterator, steps=10) == [[9] * 3, [0, 1, 2]]
    assert coordinator.synchronous_run.committed == 3
    assert take(coordinator, nothing, steps=2) == [[7, 7]] * 2
    assert count.numpy().tolist() == [6.0] * 4


# The client alone, against the servers


class Lossy:
    """Loses the first answers on sessions."""

    def __init__(self, patch: pytest.MonkeyPatch, every: int) -> None:
        self._real, self._every, self.count = Session.receive, every, 0
        patch.setattr(Session, "receive", lambda session: self.receive(session))

    def receive(self, session: Session) -> Any:
        """Receive an answer; lose some."""
        data = self._real(session)
        self.count += 1
        if self.count % self._every == 0:
            raise UnavailableError("the connection was lost")
        return data


@contextlib.contextmanager
def replica(
    coordinator: ClusterCoordinator, number: int, *, step: int = 0, epoch: int = 1, run: int = 77
) -> Iterator[tuple[ReplicaSteps, FunctionContext]]:
    """Run the block as one of two replicas."""
    client = coordinator.strategy.context.client
    context = FunctionContext(
        function=1000 + number, attempt=1, worker_index=number, num_workers=2, term=client.updater.term
    )
    header = client.updater.header(context)
    context.steps = ReplicaSteps(
        client.exchanges, header, run=run, step=step, epoch=epoch, replica=number, replicas=2, seconds=TIMEOUT
    )
    with running(context):
        yield context.steps, context


def test_answers_that_are_lost(
    coordinator: ClusterCoordinator, count: Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is repeated changes nothing."""
    lossy = Lossy(monkeypatch, 3)
    failures: list[BaseException] = []

    def steps_of(number: int) -> None:
        try:
            with replica(coordinator, number) as (steps, context):
                for done in range(6):
                    assert count.numpy().tolist() == [3.0 * done] * 4
                    count.assign_add(np.full(4, 1.0 + number))
                    assert steps.end(context, {1: done})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=steps_of, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert failures == []
    assert lossy.count > 12
    with replica(coordinator, 0, step=6, epoch=2) as (steps, _):
        state = steps.open()
        assert (state.committed, dict(state.before), dict(state.after)) == (6, {1: 4}, {1: 5})
        steps.go_on(state)
    assert count.numpy().tolist() == [18.0] * 4


def test_a_step_that_only_server_0_has_applied_is_found_by_the_next_coordinator(
    coordinator: ClusterCoordinator, count: Variable
) -> None:
    client = coordinator.strategy.context.client

    def commit(number: int) -> None:
        with replica(coordinator, number, run=78) as (steps, context):
            count.assign_add(np.ones(4))
            steps.end(context, {})

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert count.numpy().tolist() == [2.0, 2.0, 0.0, 0.0]
    client.updater.settle_recorded(client.metadata())
    assert count.numpy().tolist() == [2.0] * 4
    client.updater.settle_recorded(client.metadata())
    with replica(coordinator, 0, step=1, epoch=1 << 40, run=78) as (steps, _), pytest.raises(errors.StaleError):
        steps.open()
