"""Replicas that step together train as one process with the whole batch: the same parameters after fifty steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster
from tests.waiting import until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    optimizers,
    replica_context,
)
from pscluster.ps.optim import rules
from pscluster.ps.optim.kernels import apply_dense, apply_rows, new_slots
from pscluster.v1 import worker_pb2

Array = np.ndarray[Any, np.dtype[Any]]
WORKERS = 8
STEPS, BATCH, EXAMPLES = 50, 24, 330  # the last batch of the data, and of each epoch, has 18 examples
ROWS = 40
SMALL, LARGE = 12, 516  # hidden units; many make gradients that replicas reduce before they send them


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, WORKERS)


def data() -> tuple[Array, Array, Array]:
    """Digits, their labels, and for each a row of a table: the place of its brightest pixel, in places of two."""
    images = np.load("examples/data/digits.npz")
    x = images["images"][:EXAMPLES].astype(np.float64).reshape(EXAMPLES, 64) / 16 - 0.5
    return x, images["labels"][:EXAMPLES].astype(np.int64), x.argmax(axis=1) % ROWS


def batch_of(step: int) -> tuple[int, int]:
    """The examples [start, stop) of a step: the data again and again, each time with a last batch that is smaller."""
    batches = -(-EXAMPLES // BATCH)
    start = step % batches * BATCH
    return start, min(start + BATCH, EXAMPLES)


def gradients_of(
    x: Array, y: Array, rows: Array, w1: Array, w2: Array, table: Array
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Sums, over these examples, of the gradients of a network with a row of a table added to its hidden layer."""
    hidden = np.tanh(x @ w1 + table[rows])
    logits = hidden @ w2
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    d_hidden = p @ w2.T * (1 - hidden**2)
    return x.T @ d_hidden, hidden.T @ p, (d_hidden, rows)


def initial(dtype: str, hidden: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(3)
    shapes = (64, hidden), (hidden, 10), (ROWS, hidden)
    scale = 0.3 * (SMALL / hidden) ** 0.5
    w1, w2, table = (rng.normal(0, scale, shape).astype(dtype) for shape in shapes)
    return w1, w2, table


RULES: dict[str, tuple[Callable[..., optimizers.Optimizer], rules.UpdateRule]] = {
    "sgd": (lambda: optimizers.SGD(0.5), rules.SGD(0.5)),
    "adam": (lambda: optimizers.Adam(0.01), rules.Adam(0.01)),
    "adagrad": (lambda: optimizers.Adagrad(0.1), rules.Adagrad(0.1)),
}


def in_one_process(dtype: str, hidden: int, rule: rules.UpdateRule, mean: bool) -> list[Array]:
    """The parameters after all steps, each on the whole batch."""
    x, y, rows = data()
    values = list(initial(dtype, hidden))
    slots = [new_slots(rule, value.shape, dtype) for value in values]
    for step in range(STEPS):
        part = slice(*batch_of(step))
        size = part.stop - part.start if mean else BATCH
        g1, g2, (g_rows, ids) = gradients_of(x[part].astype(dtype), y[part], rows[part], *values)
        scale = np.dtype(dtype).type(size)
        apply_dense(rule, values[0], g1 / scale, slots[0], step + 1)
        apply_dense(rule, values[1], g2 / scale, slots[1], step + 1)
        apply_rows(rule, values[2], ids.astype(np.int64), g_rows / scale, slots[2], step + 1)
    return values


@pytest.mark.parametrize(
    ("replicas", "hidden"), [(1, SMALL), (2, SMALL), (4, SMALL), (8, SMALL), (2, LARGE), (4, LARGE)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_parameters_are_those_of_one_process(cluster: LocalCluster, replicas: int, hidden: int, dtype: str) -> None:
    limit = 1e-5 if dtype == "float32" else 1e-12
    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == WORKERS, "all workers are up")
        for name, (make, rule) in RULES.items():
            mean = name == "sgd"  # the others sum what each replica has divided by the size of a whole batch
            with strategy.scope():
                variables = [
                    Variable(value, name=f"{name}-{at}", partitioner=FixedShardsPartitioner(2))
                    for at, value in enumerate(initial(dtype, hidden))
                ]
                optimizer = make()
            train(coordinator, variables, optimizer, replicas, mean)
            expected = in_one_process(dtype, hidden, rule, mean)
            for variable, value in zip(variables, expected, strict=True):
                difference = np.abs(variable.numpy() - value) / np.maximum(np.abs(value), 1)
                assert difference.max() <= limit, f"{variable.name}: {difference.max()}"
            assert optimizer.iterations == STEPS


def train(
    coordinator: ClusterCoordinator,
    variables: list[Variable],
    optimizer: optimizers.Optimizer,
    replicas: int,
    mean: bool,
) -> None:
    w1, w2, table = variables
    dtype = w1.dtype
    x, y, rows = data()
    x = x.astype(dtype)

    def step(counter: Iterator[int]) -> float:
        number = next(counter)
        replica = replica_context()
        start, stop = batch_of(number)
        mine = np.array_split(np.arange(start, stop), replica.num_replicas)[replica.replica_id]
        values = coordinator_strategy.read([w1, w2, table])
        g1, g2, (g_rows, ids) = gradients_of(x[mine], y[mine], rows[mine], *values)
        scale = dtype.type(max(len(mine), 1) if mean else BATCH)
        optimizer.apply_gradients(
            [(g1 / scale, w1), (g2 / scale, w2), (IndexedSlices(g_rows / scale, ids), table)],
            examples=len(mine) if mean else None,
        )
        return float(number)

    coordinator_strategy = coordinator.strategy
    counter = iter(coordinator.create_per_worker_dataset(range(STEPS)))
    results: list[Any] = []
    for count in (1, 9, 40):
        with coordinator.synchronous_run.steps(count, worker_pb2.SynchronousSteps.LAST) as (message, committed):
            values = coordinator.schedule_gang(step, (counter,), None, None, replicas, 60, 0, None, steps=message)
            results = coordinator.fetch(values)
            committed(results[0][0])
    assert results == [(coordinator.synchronous_run.committed, STEPS - 1)] * replicas
