"""Steps with large gradients that are taken together: each replica updates one block of its copies, and what is
committed is by how much they have changed. What they leave is what single steps leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
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
    LocalCluster,
    SynchronousStrategy,
    Variable,
    metrics,
    optimizers,
    replica_context,
)
from pscluster.ps.client.synchronous.joint_steps import MAX_SECONDS
from pscluster.worker.synchronous.steps import COSTLY_BYTES

REPLICAS = 3
STEPS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


class Model:
    """Large and small variables of two types, cut and uncut, with several rules and slots."""

    def __init__(self, strategy: SynchronousStrategy, name: str) -> None:
        with strategy.scope():
            self.variables = [
                Variable(
                    np.linspace(1, 2, 24_000).reshape(3000, 8),
                    name=f"{name}-double",
                    partitioner=FixedShardsPartitioner(2),
                ),
                Variable(np.linspace(-1, 1, 30_000, dtype=np.float32), name=f"{name}-single"),
                Variable(np.ones((7, 2500), np.float32), name=f"{name}-third"),
                Variable(np.zeros(5, np.float32), name=f"{name}-small"),
            ]
            self.seen = Variable(np.int64(0), name=f"{name}-seen")
            self.loss = metrics.Mean(name=f"{name}-loss")
            self.adam = optimizers.Adam(0.01, name=f"{name}-adam", amsgrad=True)
            self.ftrl = optimizers.Ftrl(0.05, name=f"{name}-ftrl")
        self.strategy = strategy

    def step(self, number: int) -> tuple[float, bool]:
        double, single, third, small = self.strategy.read(self.variables)
        x = number % 5 + rank()
        scale = np.float32(small.mean() + 0.1)
        self.ftrl.apply_gradients([(third * scale, self.variables[2])], examples=x + 1)
        self.adam.apply_gradients([(double * 0.1 + x, self.variables[0]), (single * scale, self.variables[1])])
        self.adam.apply_gradients([(small + np.float32(single.mean() + x), self.variables[3])], examples=x + 1)
        self.seen.assign_add(x)
        self.loss.update_state(float(x))
        return float(double.sum()), joint()

    def run(self, numbers: Any, steps: int) -> list[bool]:
        """Take steps in one call, and return which of the first replica's were taken with others."""
        results = self.strategy.run(lambda i: self.step(next(i)), (numbers,), steps=steps, collect="all")
        return [together for _, together in self.strategy.local_results(results)[0]]

    def check(self, other: Model) -> None:
        """Compare everything with another model that has taken as many steps, alone."""
        for mine, theirs in zip(self.variables, other.variables, strict=True):
            double = mine.dtype == np.float64
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-12 if double else 2e-5, atol=1e-6)
        for at in (0, 1):
            for name in ("m", "v", "v_hat"):
                ours, alone = (model.adam.slot(model.variables[at], name).read_value() for model in (self, other))
                np.testing.assert_allclose(ours, alone, rtol=2e-4, atol=1e-7)
        for name in ("linear", "accumulator"):
            ours, alone = (model.ftrl.slot(model.variables[2], name).read_value() for model in (self, other))
            np.testing.assert_allclose(ours, alone, rtol=2e-4, atol=1e-5)
        assert self.seen.numpy() == other.seen.numpy()
        assert self.loss.result() == other.loss.result()
        assert self.adam.iterations == other.adam.iterations
        assert self.ftrl.iterations == other.ftrl.iterations


def test_they_leave_what_single_steps_leave(strategy: SynchronousStrategy) -> None:
    model, alone = Model(strategy, "model"), Model(strategy, "alone")
    numbers = numbers_of(strategy, 3 * STEPS)
    together = [*model.run(numbers, 3), *model.run(numbers, STEPS - 3)]
    assert together == [False, *[True] * (STEPS - 1)], "the second call goes on like the first one"
    others = numbers_of(strategy, 3 * STEPS)
    for _ in range(STEPS):
        assert alone.run(others, 1) == [False]
    model.check(alone)
    for each in (model, alone):  # all that a script may change between two calls
        each.adam.learning_rate = 0.002
        each.variables[0].assign(np.full((3000, 8), 0.25))
        each.variables[1].sparse_read([0])
    assert model.run(numbers, STEPS) == [True] * STEPS
    for _ in range(STEPS):
        alone.run(others, 1)
    model.check(alone)


def test_the_bits_are_those_of_single_steps(strategy: SynchronousStrategy) -> None:
    """On the servers, and in the copies that the next call begins with, however the steps are divided into calls."""
    halves = FixedShardsPartitioner(2)
    with strategy.scope():
        ws = [Variable(np.linspace(-1, 1, 40_000, dtype=np.float32), name=f"w{n}", partitioner=halves) for n in (0, 1)]
        adams = [optimizers.Adam(0.3) for _ in ws]  # with such a rate values change their signs

    def step(iterator: Iterator[int], which: int) -> tuple[Any, bool]:
        before = ws[which].read_value()
        adams[which].apply_gradients([(np.sin(before * next(iterator) * 7), ws[which])])
        return before, joint()

    for which, calls in ((0, (7, 2, 9)), (1, (1,) * 18)):
        numbers = numbers_of(strategy, 18)
        for at, steps in enumerate(calls):
            on_servers = ws[which].numpy()
            first = strategy.run(step, (numbers, which), steps=steps, collect="all")[0]
            for values, together in strategy.local_results(first):
                assert np.array_equal(values, on_servers)
                assert together is (which == 0 and at > 0)
    assert np.array_equal(ws[0].numpy(), ws[1].numpy())
    for slot in ("m", "v"):
        first, second = (adam.slot(w, slot).read_value() for adam, w in zip(adams, ws, strict=True))
        assert np.array_equal(first, second)


def test_what_a_script_adds_meanwhile_is_not_lost(strategy: SynchronousStrategy, tmp_path: Path) -> None:
    with strategy.scope():
        w = Variable(np.zeros(20_000), name="w")
        sgd = optimizers.SGD(1.0)
    begun, go = tmp_path / "begun", tmp_path / "go"

    def step(iterator: Iterator[int]) -> bool:
        if next(iterator) == 3 and rank() == 0:
            begun.touch()
            until(go.exists, "the script has added")
        sgd.apply_gradients([(np.ones(20_000), w)])
        return joint()

    results: list[Any] = []
    numbers = numbers_of(strategy, 12)
    thread = threading.Thread(target=lambda: results.append(strategy.run(step, (numbers,), steps=6, collect="all")))
    thread.start()
    until(begun.exists, "the fourth step has begun")
    w.assign_add(np.arange(20_000.0))
    go.touch()
    thread.join(TIMEOUT)
    assert strategy.local_results(results[0])[0] == [False, *[True] * 5]
    assert np.array_equal(w.numpy(), np.arange(20_000.0) - 18)
    strategy.run(step, (numbers,), steps=6)
    assert np.array_equal(w.numpy(), np.arange(20_000.0) - 36)


def test_a_large_gradient_after_one_small_step_is_applied_once(strategy: SynchronousStrategy) -> None:
    """One step is taken, and the next is not like it: only the first is committed with what was taken."""
    with strategy.scope():
        small, large = Variable(np.zeros(2), name="small"), Variable(np.zeros(20_000), name="large")
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int]) -> bool:
        number = next(iterator)
        gradients = [(np.ones(2), small)]
        if number == 2:
            gradients.append((np.ones(20_000), large))
        sgd.apply_gradients(gradients)
        return joint()

    results = strategy.run(step, (numbers_of(strategy, 4),), steps=4, collect="all")
    assert strategy.local_results(results)[0] == [False, True, True, False]
    assert small.numpy().tolist() == [-4.0 * REPLICAS] * 2
    assert np.array_equal(large.numpy(), np.full(20_000, -1.0 * REPLICAS))


def test_what_does_not_change_stays_even_if_it_is_infinite(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.where(np.arange(20_000) % 2, -np.inf, 1.0), name="w")
        sgd = optimizers.SGD(1.0)

    def step() -> bool:
        sgd.apply_gradients([(np.where(np.arange(20_000) % 2, 0.0, 1.0), w)])
        return joint()

    assert strategy.local_results(strategy.run(step, steps=4)) == (True,) * REPLICAS
    assert np.array_equal(w.numpy(), np.where(np.arange(20_000) % 2, -np.inf, 1.0 - 4 * REPLICAS))


def test_slow_steps_of_many_bytes_are_taken_alone(strategy: SynchronousStrategy, tmp_path: Path) -> None:
    """A commit of what has changed would be larger than a gradient, and only one step would be in it."""
    size = COSTLY_BYTES // 4 + 1
    with strategy.scope():
        w = Variable(np.zeros(size, np.float32), name="w")
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int], slow: bool) -> bool:
        number = next(iterator)
        began = time.monotonic()
        until(lambda: not slow or time.monotonic() > began + MAX_SECONDS, "the step is a slow one")
        sgd.apply_gradients([(np.full(size, number + 1, np.float32), w)])
        return joint()

    numbers = numbers_of(strategy, 8)
    slow = strategy.local_results(strategy.run(step, (numbers, True), steps=4, collect="all"))
    strategy.run(step, (numbers, False), steps=2)
    strategy.run(step, (numbers, True), steps=2)  # the first of them may be taken by what is left of the call before
    assert w.numpy()[[0, -1]].tolist() == [-REPLICAS * sum(range(1, 9))] * 2
    assert slow[0] == [False] * 4


def _averages(strategy: SynchronousStrategy) -> tuple[Variable, Any]:
    return Variable(np.zeros(40_000), name="w"), optimizers.SGD(1.0, use_ema=True)


def _half(strategy: SynchronousStrategy) -> tuple[Variable, Any]:
    return Variable(np.zeros(40_000, np.float16), name="w"), optimizers.SGD(1.0)


@pytest.mark.parametrize("make", [_averages, _half], ids=lambda make: make.__name__.strip("_"))
def test_others_are_taken_alone(strategy: SynchronousStrategy, make: Any) -> None:
    with strategy.scope():
        w, sgd = make(strategy)

    def step() -> bool:
        sgd.apply_gradients([(np.ones(40_000, w.dtype), w)])
        return joint()

    for _ in range(2):
        assert strategy.local_results(strategy.run(step, steps=3, collect="all"))[0] == [False] * 3
    assert np.array_equal(w.numpy(), np.full(40_000, -6.0 * REPLICAS))


def test_a_step_that_calls_a_collective_or_reads_rows_is_taken_alone(strategy: SynchronousStrategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(20_000), name="w")
        sgd = optimizers.SGD(1.0)

    def step(iterator: Iterator[int]) -> tuple[float, bool]:
        number = next(iterator)
        value = float(w.sparse_read([5])[0]) if number == 12 else float(w.read_value()[5])
        if number == 4:
            replica_context().barrier()
        sgd.apply_gradients([(np.ones(20_000), w)])
        return value, joint()

    results = []
    numbers = numbers_of(strategy, 24)
    for _ in range(4):
        results += strategy.local_results(strategy.run(step, (numbers,), steps=6, collect="all"))[1]
    assert [value for value, _ in results] == [-1.0 * REPLICAS * number for number in range(24)]
    together = [flag for _, flag in results]
    assert together[:6] == [False, True, True, True, True, False], "what calls a collective is found out at its end"
    assert together[6:12] == [False, True, True, True, True, True]
    assert together[12:] == [True] + [False] * 5 + [False, True, True, True, True, True]


# Deaths

DEATHS_AT = 7, 22
MANY = 30
SIZE = 20_000


def expected() -> Any:
    """The parameters of one process that has read the batches of all replicas."""
    w, momentum = np.linspace(0, 1, SIZE), np.zeros(SIZE)
    for number in range(MANY):
        gradient = sum(w * 0.01 + number * (replica + 1) for replica in range(REPLICAS))
        momentum = 0.5 * momentum - 0.01 * gradient
        w = w + momentum
    return w


@pytest.mark.parametrize("dies", [("worker", 1), ("ps", 0), ("ps", 1)], ids=lambda task: "-".join(map(str, task)))
def test_whatever_dies_the_parameters_are_those_of_one_process(dies: tuple[str, int], tmp_path: Path) -> None:
    """A task is killed in the midst of steps that are not committed."""
    pids = tmp_path / "pids"
    pids.mkdir()
    with (
        LocalCluster(2, REPLICAS, log_level="ERROR", durability="log", state_dir=tmp_path / "state") as cluster,
        SynchronousStrategy(cluster) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == REPLICAS, "all workers are up")
        with strategy.scope():
            w = Variable(np.linspace(0, 1, SIZE), name="w", partitioner=FixedShardsPartitioner(2))
            sgd = optimizers.SGD(0.01, momentum=0.5)

        def step(numbers: Iterator[int], victim: int) -> int:
            number = next(numbers)
            gradient = w.read_value() * 0.01 + number * (rank() + 1)
            if number in DEATHS_AT and rank() == (1 if not victim else 2):
                mark = pids / str(number)
                if not mark.exists():
                    mark.write_text(str(joint()))
                    os.kill(victim or os.getpid(), signal.SIGKILL)
            sgd.apply_gradients([(gradient, w)])
            return number

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(MANY)))
        for start in range(0, MANY, 10):
            victim = 0 if dies[0] == "worker" else cluster.pids[dies]
            last = strategy.run(step, (numbers, victim), steps=10, timeout=TIMEOUT)
            assert strategy.local_results(last) == (start + 9,) * REPLICAS
        np.testing.assert_allclose(w.numpy(), expected(), rtol=1e-11)
        assert sgd.iterations == MANY
        assert {path.read_text() for path in pids.iterdir()} == {"True"}
        assert len(list(pids.iterdir())) == len(DEATHS_AT)
        assert strategy.lost_updates() == {}
