"""Short steps are taken by the replicas among themselves, and committed together: what they leave is what single steps
leave, whatever a step does in their midst, and whatever dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.coordinator.synchronous.support import joint, numbers_of, rank
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    errors,
    metrics,
    optimizers,
    replica_context,
)
from pscluster.ps.optim.schedules import ExponentialDecay

REPLICAS = 3
STEPS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


class Model:
    """Variables of several types and cuts, with several rules; a step on them depends on all that came before."""

    def __init__(self, strategy: SynchronousStrategy, name: str) -> None:
        halves = FixedShardsPartitioner(2)
        rate = ExponentialDecay(0.1, 3, 0.5)
        with strategy.scope():
            self.variables = [
                Variable(np.linspace(1, 2, 12).reshape(6, 2), name=f"{name}-double", partitioner=halves),
                Variable(np.linspace(-1, 1, 5, dtype=np.float32), name=f"{name}-single"),
                Variable(np.ones(3, np.float16), name=f"{name}-half"),
                Variable(np.float64(0.5), name=f"{name}-scalar"),
            ]
            self.seen = Variable(np.zeros(2, np.int64), name=f"{name}-seen")
            self.loss = metrics.Mean(name=f"{name}-loss")
            self.adam = optimizers.Adam(rate, name=f"{name}-adam", use_ema=True)
            self.ftrl = optimizers.Ftrl(0.05, name=f"{name}-ftrl")
        self.strategy = strategy

    def step(self, number: int) -> tuple[float, bool]:
        double, single, half, scalar = self.strategy.read(self.variables)
        x = number % 5 + rank()
        scale = np.float32(half.sum()) * single.mean()
        first, second, third, fourth = self.variables
        self.adam.apply_gradients([(double * 0.1 + x, first), (single * scale, second)])
        self.ftrl.apply_gradients([(half * np.float16(0.25), third), (scalar + x, fourth)], examples=x + 1)
        self.seen.assign_add([1, x])
        self.loss.update_state(float(x))
        return float(scalar), joint()

    def values(self) -> list[Any]:
        slots = [self.adam.slot(self.variables[0], "m"), self.adam.average(self.variables[1])]
        return [*self.variables, *slots, self.ftrl.slot(self.variables[3], "linear"), self.seen]

    def check(self, other: Model) -> None:
        """Compare everything with another model that has taken as many steps, alone."""
        for mine, theirs in zip(self.values(), other.values(), strict=True):
            half = mine.dtype == np.float16
            np.testing.assert_allclose(mine.read_value(), theirs.read_value(), rtol=2e-3 if half else 1e-5)
        np.testing.assert_allclose(self.variables[0].numpy(), other.variables[0].numpy(), rtol=1e-3 if half else 1e-12)
        assert self.loss.result() == other.loss.result()
        assert self.adam.iterations == other.adam.iterations
        assert self.ftrl.iterations == other.ftrl.iterations


@pytest.fixture
def alone(strategy: SynchronousStrategy) -> Model:
    """A model whose steps were committed one by one."""
    model = Model(strategy, "alone")
    for number in range(STEPS):
        result = strategy.run(lambda number: model.step(number), (number,))
        assert not any(together for _, together in strategy.local_results(result))
    return model


def run(model: Model, step: Callable[[Iterator[int]], Any], numbers: Any, steps: int = STEPS) -> list[Any]:
    """Take steps in one call, and return the results of the first replica."""
    results = model.strategy.run(step, (numbers,), steps=steps, collect="all")
    return list(model.strategy.local_results(results)[0])


def test_they_leave_what_single_steps_leave(strategy: SynchronousStrategy, alone: Model) -> None:
    model, numbers = Model(strategy, "model"), numbers_of(strategy, STEPS)
    before = strategy.traffic().pushed
    results = [result for steps in (5, 7) for result in run(model, lambda i: model.step(next(i)), numbers, steps)]
    assert [together for _, together in results] == [False, *[True] * 11]  # the second call goes on like the first one
    assert strategy.traffic().pushed >= before
    model.check(alone)
    with pytest.raises(errors.EndOfDatasetError):
        strategy.run(lambda i: model.step(next(i)), (numbers,))


ODD = 4, 9  # steps in which a model does something that the servers must know all steps for


def _reads_a_slot(model: Model) -> None:
    assert np.isfinite(model.adam.slot(model.variables[0], "m").read_value()).all()


def _counts(model: Model) -> None:
    assert model.adam.iterations in ODD


def _reads_rows(model: Model) -> None:
    whole = model.variables[0].read_value()
    assert model.variables[0].sparse_read([5, 0]).tolist() == whole[[5, 0]].tolist()


def _reads_what_it_adds_to(model: Model) -> None:
    assert model.seen.read_value()[0] in [number * REPLICAS for number in ODD]


def _sets_the_rate(model: Model) -> None:
    model.ftrl.learning_rate = 0.05


def _only_one_asks(model: Model) -> None:
    if rank() == 1:
        _counts(model)


def _all_reduces(model: Model) -> None:
    assert replica_context().all_reduce("sum", 1) == REPLICAS


@pytest.mark.parametrize(
    "odd",
    [_reads_a_slot, _counts, _reads_rows, _reads_what_it_adds_to, _sets_the_rate, _only_one_asks, _all_reduces],
    ids=lambda odd: odd.__name__.strip("_"),
)
def test_a_step_may_ask_what_only_servers_know(
    strategy: SynchronousStrategy, alone: Model, odd: Callable[[Model], None]
) -> None:
    model, numbers = Model(strategy, "model"), numbers_of(strategy, STEPS)

    def step(iterator: Iterator[int]) -> tuple[float, bool]:
        number = next(iterator)
        if number in ODD:
            odd(model)
        return model.step(number)

    results = run(model, step, numbers)
    assert [together for _, together in results] == [
        False,
        *[True] * 3,
        *[odd in (_all_reduces, _only_one_asks)],
        *[False] * 7,
    ]
    model.check(alone)


def test_a_call_goes_on_like_the_last_one(strategy: SynchronousStrategy) -> None:
    """It expects the same gradients from its first step on, with the values and rates that there are then."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w", partitioner=FixedShardsPartitioner(2))
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int]) -> tuple[float, bool]:
        number, before = next(iterator), float(w.read_value()[1])
        if number == 9:
            assert sgd.iterations == 9
        if number == 15:
            replica_context().barrier()
        if number == 21:
            w.sparse_read([1])
        rows = np.ones(2)
        sgd.apply_gradients([(IndexedSlices(rows, np.arange(2)) if number == 27 else rows, w)])
        return before, joint()

    def call(*, first: float) -> list[bool]:
        """Take three steps, check the values that they read, and return which are taken with others."""
        results = strategy.run(step, (numbers,), steps=3, collect="all")
        (begin, second, end), together = zip(*strategy.local_results(results)[1], strict=True)
        assert (begin, second, end) == (first, first - 3 * rate, first - 6 * rate)
        return list(together)

    numbers, rate = numbers_of(strategy, 99), 1.0
    assert call(first=0) == [False, True, True]
    w.assign([0, 10])
    assert call(first=10) == [True, True, True]
    sgd.learning_rate = rate = 0.5
    assert call(first=1) == [True, True, True]
    for odd in (9, 15, 21, 27):  # what is odd about this step is found out at its end
        assert call(first=1 - 1.5 * (odd - 6)) == [True, False, False]
        assert call(first=1 - 1.5 * (odd - 3)) == [False, True, True]
    assert sgd.iterations == 33


def test_a_step_may_update_rows(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        table = Variable(np.zeros((4, 2)), name="table", partitioner=FixedShardsPartitioner(2))
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int]) -> bool:
        number = next(iterator)
        rows = np.ones((4, 2))
        sgd.apply_gradients([(rows if number % 4 else IndexedSlices(rows, np.arange(4)), table)])
        return joint()

    numbers = numbers_of(strategy, STEPS)
    assert strategy.local_results(strategy.run(step, (numbers,), steps=4)) == (False,) * REPLICAS
    assert strategy.local_results(strategy.run(step, (numbers,), steps=STEPS - 4, collect="all"))[0] == [False] * 8
    table.assign(np.zeros((4, 2)))

    def dense_first(iterator: Iterator[int]) -> tuple[float, bool]:
        number = next(iterator)
        rows = np.ones((4, 2))
        before = float(table.read_value()[3, 1])
        sgd.apply_gradients([(IndexedSlices(rows, np.arange(4)) if number == 5 else rows, table)])
        return before, joint()

    results = strategy.run(dense_first, (numbers_of(strategy, STEPS),), steps=STEPS, collect="all")
    expected = [(-3.0 * number, 0 < number < 6) for number in range(STEPS)]
    assert strategy.local_results(results)[2] == expected
    assert table.numpy().tolist() == [[-3.0 * STEPS] * 2] * 4


def test_the_data_of_one_ends_in_their_midst(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int]) -> tuple[int, bool]:
        number = next(iterator)
        sgd.apply_gradients([(np.full(2, number + 1.0), w)])
        return number, joint()

    numbers = iter(
        strategy.distribute_datasets_from_function(lambda context: range(5 if context.input_pipeline_id == 1 else 90))
    )
    with pytest.raises(errors.EndOfDatasetError) as ended:
        strategy.run(step, (numbers,), steps=STEPS, collect="all")
    assert ended.value.steps == 5
    assert w.numpy().tolist() == [-3.0 * (1 + 2 + 3 + 4 + 5)] * 2


def test_what_is_taken_is_committed_before_an_error(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w, v = (Variable(np.zeros(2), name=name) for name in "wv")
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int], how: str) -> int:
        number = next(iterator)
        if number == 4 and rank() == 1:
            if how == "raises":
                raise ValueError("not this one")
            sgd.apply_gradients([(np.ones(2), v)])
            return number
        sgd.apply_gradients([(np.ones(2), w)])
        return number

    for how, error, match in (
        ("raises", ValueError, "not this one"),
        ("other", errors.MisuseError, r"replica \d has applied gradients to '[wv]', and replica \d to '[wv]'"),
    ):
        w.assign(np.zeros(2))
        numbers = numbers_of(strategy, STEPS)
        with pytest.raises(error, match=match):
            strategy.run(step, (numbers, how), steps=STEPS)
        assert w.numpy().tolist() == [-3.0 * 4] * 2
        assert v.numpy().tolist() == [0.0, 0.0]


def test_what_a_script_does_meanwhile_is_not_lost(strategy: SynchronousStrategy, tmp_path: Path) -> None:
    """It reads the last step that is committed, and its updates count beside those of the steps."""
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        sgd = optimizers.SGD(1.0)
    begun, go = tmp_path / "begun", tmp_path / "go"

    def step(iterator: Iterator[int]) -> bool:
        if next(iterator) == 3 and rank() == 0:
            begun.touch()
            until(go.exists, "the script has read")
        sgd.apply_gradients([(np.ones(2), w)])
        return joint()

    coordinator = ClusterCoordinator(strategy)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(strategy.run(step, (numbers_of(strategy, STEPS),), steps=6, collect="all"))
    )
    thread.start()
    until(begun.exists, "the fourth step has begun")
    committed = -w.numpy()[0] / REPLICAS  # the first step, by itself; also the next two, if they took long
    assert committed in (1, 2, 3)
    assert w.numpy().tolist() == [-REPLICAS * committed] * 2
    w.assign_add([10.0, 0.0])
    go.touch()
    thread.join(TIMEOUT)
    assert strategy.local_results(results[0])[0] == [False, *[True] * 5]
    assert w.numpy().tolist() == [-18.0 + 10.0, -18.0]
    assert coordinator.done()


def test_one_replica_can_take_steps_alone() -> None:
    with LocalCluster(1, 1, log_level="ERROR") as small, SynchronousStrategy(small) as strategy:
        model, numbers = Model(strategy, "model"), numbers_of(strategy, STEPS)
        results = run(model, lambda i: model.step(next(i)), numbers)
        assert [together for _, together in results] == [False, *[True] * (STEPS - 1)]
        assert model.adam.iterations == STEPS


# Deaths

DEATHS_AT = 7, 22
MANY = 30


def expected() -> Any:
    """The parameters of one process that has read the batches of all replicas."""
    w = np.zeros((6, 2))
    for number in range(MANY):
        w = w - 0.5 * sum(w * 0.01 + number * (replica + 1) for replica in range(REPLICAS))
    return w


@pytest.mark.parametrize("dies", [("worker", 1), ("ps", 0), ("ps", 1)], ids=lambda task: "-".join(map(str, task)))
def test_whatever_dies_the_parameters_are_those_of_one_process(dies: tuple[str, int], tmp_path: Path) -> None:
    """A task is killed in the midst of steps that are not committed."""
    with LocalCluster(2, REPLICAS, log_level="ERROR", durability="log", state_dir=tmp_path / "state") as cluster:
        pids = tmp_path / "pids"
        pids.mkdir()
        with SynchronousStrategy(cluster) as strategy:
            coordinator = ClusterCoordinator(strategy)
            until(lambda: coordinator.workers_up == REPLICAS, "all workers are up")
            with strategy.scope():
                w = Variable(np.zeros((6, 2)), name="w", partitioner=FixedShardsPartitioner(2))
                loss = metrics.Sum(name="loss")
                sgd = optimizers.SGD(0.5)

            def step(numbers: Iterator[int], victim: int) -> int:
                number = next(numbers)
                gradient = w.read_value() * 0.01 + number * (rank() + 1)
                if number in DEATHS_AT and rank() == (1 if not victim else 2):
                    mark = pids / str(number)
                    if not mark.exists():
                        mark.write_text(str(joint()))
                        os.kill(victim or os.getpid(), signal.SIGKILL)
                sgd.apply_gradients([(gradient, w)])
                loss.update_state(1.0)
                return number

            numbers = iter(strategy.distribute_datasets_from_function(lambda: range(MANY)))
            for start in range(0, MANY, 10):
                victim = 0 if dies[0] == "worker" else cluster.pids[dies]
                last = strategy.run(step, (numbers, victim), steps=10, timeout=TIMEOUT)
                assert strategy.local_results(last) == (start + 9,) * REPLICAS
            np.testing.assert_allclose(w.numpy(), expected(), rtol=1e-12)
            assert loss.result() == MANY * REPLICAS
            assert sgd.iterations == MANY
            assert {path.read_text() for path in pids.iterdir()} == {"True"}
            assert len(list(pids.iterdir())) == len(DEATHS_AT)
            assert strategy.lost_updates() == {}
