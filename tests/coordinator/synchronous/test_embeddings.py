"""A model with an embedding table that is cut over the servers, trained by replicas that step together (row T21): its
dense parameters in step, the table in step, too, or running free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from tests.conftest import run_cluster

from pscluster.coordinator import (
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    LocalCluster,
    ModuloPartitioner,
    Partitioner,
    SynchronousStrategy,
    Variable,
    embedding_lookup,
    optimizers,
    replica_context,
)
from pscluster.ps.client.synchronous.reduction import REDUCED_BYTES

REPLICAS, BATCH, STEPS = 4, 8, 40
ROWS, DIM, IDS = 1000, 4, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


def initial() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.normal(0, 0.1, (ROWS, DIM)), np.ones(DIM)


def batches() -> Iterator[tuple[Any, Any]]:
    """Global batches of ids, most of them of few rows, and what to predict: a sum of a number for each."""
    rng = np.random.default_rng(4)
    truth = rng.normal(size=ROWS)
    for _ in range(STEPS):
        ids = (rng.zipf(1.5, (BATCH, IDS)) - 1) % ROWS
        yield ids, truth[ids].sum(axis=1)


def loss_and_gradients(rows: Any, y: Any, head: Any) -> tuple[float, Any, Any]:
    """The mean squared error of a batch, and its gradients by the rows, (n, IDS, DIM), and the head."""
    wrong = rows.sum(axis=1) @ head - y
    d = 2 * wrong / len(y)
    d_rows = np.broadcast_to((d[:, np.newaxis] * head)[:, np.newaxis], rows.shape)
    return float(np.mean(wrong**2)), d_rows, d @ rows.sum(axis=1)


def alone() -> tuple[list[float], Any, Any]:
    """The losses, and the parameters, of one process with the whole batches and the same rules."""
    table, head = initial()
    squares, losses = np.full_like(table, 0.1), []
    for ids, y in batches():
        loss, d_rows, d_head = loss_and_gradients(table[ids], y, head)
        losses.append(loss)
        d_table = np.zeros_like(table)
        np.add.at(d_table, ids, d_rows)
        squares += d_table**2
        table -= 0.1 * d_table / np.sqrt(squares + 1e-7)
        head = head - 0.01 * d_head
    return losses, table, head


@pytest.mark.parametrize(
    ("consistency", "partitioner"),
    [("sync", FixedShardsPartitioner(2)), ("sync", HashPartitioner(2)), ("async", ModuloPartitioner(2))],
)
def test_tables_beside_dense_parameters(
    strategy: SynchronousStrategy, consistency: Literal["sync", "async"], partitioner: Partitioner
) -> None:
    """In step it is the training of one process. A table that runs free has every row's gradients, too, each replica's
    for itself, and the model learns as well."""
    rows, ones = initial()
    with strategy.scope():
        table = Variable(rows, name="table", partitioner=partitioner, consistency=consistency)
        head = Variable(ones, name="head")
        adagrad = optimizers.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-7)
        sgd = optimizers.SGD(0.01)
    assert sorted(shard.device for shard in table.variables) == ["/job:ps/task:0", "/job:ps/task:1"]

    def step(iterator: Iterator[tuple[Any, Any]]) -> float:
        ids, y = next(iterator)
        loss, d_rows, d_head = loss_and_gradients(embedding_lookup(table, ids), y, head.numpy())
        adagrad.apply_gradients([(IndexedSlices(d_rows.reshape(-1, DIM), ids.reshape(-1)), table)], examples=len(y))
        sgd.apply_gradients([(d_head, head)], examples=len(y))
        return loss

    iterator = iter(strategy.distribute_dataset(batches))
    each = strategy.run(step, args=(iterator,), steps=STEPS, collect="all")
    losses = [strategy.reduce("mean", loss, axis=None) for loss in each]
    expected, of_table, of_head = alone()
    if consistency == "sync":
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        np.testing.assert_allclose(table.numpy(), of_table, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(head.numpy(), of_head, rtol=1e-9)
    else:
        assert ((table.numpy() != rows) == (of_table != rows)).all(), "the rows of the batches have changed, no others"
        assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    assert np.mean(expected[-10:]) < 0.7 * np.mean(expected[:10])
    assert sgd.iterations == STEPS
    assert adagrad.iterations == STEPS * (1 if consistency == "sync" else REPLICAS)


@pytest.mark.parametrize("steps", [1, 3])  # committed one by one, or together, on the replicas' copies
def test_dense_gradients_of_rows_in_other_orders(strategy: SynchronousStrategy, steps: int) -> None:
    """The gradients of a table, small or large enough for the workers to reduce it, belong to their rows."""
    shapes = [(23, 2), (3 * REDUCED_BYTES // 64, 8)]
    with strategy.scope():
        tables = [
            Variable(np.zeros(shape), name=f"{partitioner} {shape}", partitioner=partitioner)
            for shape in shapes
            for partitioner in (ModuloPartitioner(2), HashPartitioner(3))
        ]
        momentum = optimizers.SGD(1.0, momentum=0.5)

    def step() -> None:
        own = 1.0 + replica_context().replica_id
        for table in tables:
            values = table.numpy()
            np.testing.assert_allclose(values, values[0, 1] * np.arange(table.size).reshape(table.shape))
        gradients = [np.arange(table.size, dtype=float).reshape(table.shape) * own for table in tables]
        momentum.apply_gradients(zip(gradients, tables, strict=True))

    strategy.run(step, steps=steps)
    velocity = factor = 0.0
    for _ in range(steps):
        velocity = 0.5 * velocity - sum(range(1, REPLICAS + 1))
        factor += velocity
    for table in tables:
        np.testing.assert_allclose(table.numpy(), factor * np.arange(table.size).reshape(table.shape))
