"""The training loop of TensorFlow's guide (rows T9 to T20), in NumPy: a dataset function, a step that feeds metrics,
several steps a call, and a report for each epoch. One process that reads the same batches gives what to expect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster

from pscluster.coordinator import (
    InputContext,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    compute_average_loss,
    metrics,
    optimizers,
    scale_regularization_loss,
)

DATA = Path(__file__).resolve().parents[3] / "examples" / "data" / "digits.npz"
REPLICAS, BATCH, EPOCHS, STEPS = 4, 200, 3, 10
L2 = 1e-3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


def parts_of_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Training and test images, (n, 64) from 0 to 1, with their labels."""
    with np.load(DATA) as file:
        x, y = file["images"] / 16.0, file["labels"].astype(np.int64)
    return (x[:1600], y[:1600]), (x[1600:], y[1600:])


def batches_of(pipeline: int, pipelines: int, size: int, *, is_training: bool) -> Iterator[tuple[Any, Any]]:
    """The batches of one input pipeline: shuffled and repeated only in training (row T10)."""
    x, y = (part[pipeline::pipelines] for part in parts_of_data()[not is_training])
    rng = np.random.default_rng(pipeline)
    while True:
        order = rng.permutation(len(y)) if is_training else np.arange(len(y))
        for begin in range(0, len(y) - size + 1 if is_training else len(y), size):
            rows = order[begin : begin + size]
            yield x[rows], y[rows]
        if not is_training:
            return


def losses_and_gradients(x: Any, y: Any, w: Any, b: Any, examples: int) -> tuple[Any, Any, Any, Any]:
    """The logits and cross-entropies of a batch, and the gradients of their sum divided by `examples`."""
    logits = x @ w + b
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    losses = -np.log(p[np.arange(len(y)), y])
    p[np.arange(len(y)), y] -= 1
    return logits, losses, x.T @ p / examples, p.sum(axis=0) / examples


def report_line(iterations: int, loss: float, accuracy: float) -> str:
    """As the guide prints it."""
    return f"Current step: {iterations}, training loss: {loss:.4f}, accuracy: {100 * accuracy:.2f}%"


def alone() -> tuple[list[str], Any, Any]:
    """The report, and the parameters, of one process that reads the batches of all replicas."""
    w, b, report = np.zeros((64, 10)), np.zeros(10), []
    pipelines = [batches_of(rank, REPLICAS, BATCH // REPLICAS, is_training=True) for rank in range(REPLICAS)]
    for epoch in range(EPOCHS):
        losses, right = [], []
        for _ in range(STEPS):
            x, y = (np.concatenate(parts) for parts in zip(*map(next, pipelines), strict=True))
            logits, of_examples, d_w, d_b = losses_and_gradients(x, y, w, b, BATCH)
            losses.append(of_examples.mean() + L2 * np.sum(w**2))
            right.append(logits.argmax(axis=1) == y)
            w, b = w - 0.5 * (d_w + 2 * L2 * w), b - 0.5 * d_b
        report.append(report_line((epoch + 1) * STEPS, float(np.mean(losses)), float(np.mean(right))))
    return report, w, b


@pytest.mark.parametrize("steps", [1, 4, STEPS])
def test_the_loop_of_the_guide(strategy: SynchronousStrategy, steps: int, tmp_path: Path) -> None:
    """However many steps a call takes, also where the last call of an epoch takes fewer, the report is that of one
    process, and the data is read once by each worker."""
    with strategy.scope():
        w, b = Variable(np.zeros((64, 10)), name="w"), Variable(np.zeros(10), name="b")
        optimizer = optimizers.SGD(0.5)
        training_loss = metrics.Mean(name="training_loss")
        training_accuracy = metrics.SparseCategoricalAccuracy(name="training_accuracy")
    per_replica_batch = BATCH // strategy.num_replicas_in_sync

    def dataset_fn(context: InputContext) -> Iterator[tuple[Any, Any]]:
        assert context.get_per_replica_batch_size(BATCH) == per_replica_batch == 50
        (tmp_path / f"{context.input_pipeline_id}").touch(exist_ok=False)
        return batches_of(context.input_pipeline_id, context.num_input_pipelines, per_replica_batch, is_training=True)

    def step(iterator: Iterator[tuple[Any, Any]]) -> None:
        x, y = next(iterator)
        w_, b_ = strategy.read([w, b])
        logits, losses, d_w, d_b = losses_and_gradients(x, y, w_, b_, BATCH)
        loss = compute_average_loss(losses) + scale_regularization_loss([L2 * np.sum(w_**2)])
        optimizer.apply_gradients([(d_w + 2 * L2 * w_ / strategy.num_replicas_in_sync, w), (d_b, b)])
        training_loss.update_state(loss * strategy.num_replicas_in_sync)
        training_accuracy.update_state(y, logits)

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    report = []
    for _ in range(EPOCHS):
        for taken in range(0, STEPS, steps):
            strategy.run(step, args=(iterator,), steps=min(steps, STEPS - taken))
        report.append(report_line(optimizer.iterations, training_loss.result(), training_accuracy.result()))
        training_loss.reset_states()
        training_accuracy.reset_states()

    expected, weights, biases = alone()
    assert report == expected
    assert re.fullmatch(r"Current step: 30, training loss: 1\.\d{4}, accuracy: 9\d\.\d\d%", report[-1])
    np.testing.assert_allclose(w.numpy(), weights, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(b.numpy(), biases, rtol=1e-12, atol=1e-14)
    assert len(list(tmp_path.iterdir())) == REPLICAS


def test_data_for_evaluation_ends(strategy: SynchronousStrategy) -> None:
    """Row T10: not shuffled, not repeated, with a partial last batch; the sum over the replicas has each example."""

    def dataset_fn(context: InputContext) -> Iterator[tuple[Any, Any]]:
        return batches_of(context.input_pipeline_id, context.num_input_pipelines, 30, is_training=False)

    def count(iterator: Iterator[tuple[Any, Any]]) -> int:
        examples = 0
        while (batch := next(iterator, None)) is not None:  # any Python is allowed in a step (row T20)
            examples += len(batch[1])
        return examples

    counted = strategy.run(count, args=(iter(strategy.distribute_datasets_from_function(dataset_fn)),))
    assert counted.values == (50, 49, 49, 49)
    assert strategy.reduce("sum", counted, axis=None) == 197
