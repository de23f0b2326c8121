"""Train a wide embedding model on generated clicks; only the rows that a batch touches are sent.

    pscluster run --ps 2 --workers 2 examples/embedding.py

A click has 26 categorical features, few values of which are frequent, and 13 dense ones. It is drawn with a
probability that the generator knows, so the best log-loss that any model could reach is known too.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    InputContext,
    ParameterServerStrategy,
    ProgressLine,
    TFConfigClusterResolver,
    Variable,
    embedding_lookup,
    initializers,
    metrics,
    optimizers,
)

FIELDS, DENSE = 26, 13
BLOCK = 100  # steps between two reports
Array = np.ndarray[Any, np.dtype[Any]]


def clicks(rng: np.random.Generator, size: int, rows: int) -> tuple[Array, Array, Array]:
    """Ids (size, FIELDS), dense features (size, DENSE), and the probability of each click. All fields share one
    table."""
    per_field = rows // FIELDS
    truth = np.random.default_rng(1)  # the true weights: the same wherever this runs
    of_ids, of_dense = truth.normal(0, 0.5, rows), truth.normal(0, 0.2, DENSE)
    ids = np.arange(FIELDS) * per_field + (rng.zipf(1.5, (size, FIELDS)) - 1) % per_field
    x = rng.standard_normal((size, DENSE))
    return ids, x.astype(np.float32), sigmoid(of_ids[ids].sum(axis=1) + x @ of_dense - 1)


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def log_loss(p: Array, predicted: Array | float) -> float:
    """The expected log-loss of such predictions if p is the truth; p itself is the best prediction."""
    return float(-(p * np.log(predicted) + (1 - p) * np.log1p(-predicted)).mean())


def predict(rows: Array, x: Array, head: Array, w: Array, b: Array) -> Array:
    """The model: the sum of the rows of all ids, seen through a head; the dense features directly."""
    return sigmoid(rows.sum(axis=1) @ head + x @ w + b)


def numpy_step(
    x: Array, y: Array, rows: Array, head: Array, w: Array, b: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    """The log-losses of a batch, and the gradients of their mean by rows (size, FIELDS, dim), head, w and b."""
    p = predict(rows, x, head, w, b)
    losses = -np.log(np.where(y, p, 1 - p))
    d = ((p - y) / len(y)).astype(np.float32)
    d_rows = np.broadcast_to((d[:, np.newaxis] * head)[:, np.newaxis], rows.shape)
    return losses, (d_rows, d @ rows.sum(axis=1), d @ x, d.sum())


def torch_step(
    x: Array, y: Array, rows: Array, head: Array, w: Array, b: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    """The same by PyTorch's autograd."""
    import torch

    parameters = [torch.from_numpy(array).requires_grad_() for array in (rows, head, w, b.reshape(1))]
    rows_, head_, w_, b_ = parameters
    logits = rows_.sum(dim=1) @ head_ + torch.from_numpy(x) @ w_ + b_
    target = torch.from_numpy(y.astype(np.float32))
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    losses.mean().backward()
    d_rows, d_head, d_w, d_b = (parameter.grad.numpy() for parameter in parameters)
    return losses.detach().numpy(), (d_rows, d_head, d_w, d_b.reshape(()))


class Model(NamedTuple):
    """What the step trains, and with what."""

    table: Variable
    head: Variable
    w: Variable
    b: Variable
    optimizer: optimizers.Optimizer
    loss: metrics.Mean


def batches(batch_size: int, rows: int, context: InputContext) -> Iterator[tuple[Array, Array, Array]]:
    """Run on each worker, endlessly."""
    rng = np.random.default_rng([2, context.worker_index])
    while True:
        ids, x, p = clicks(rng, batch_size, rows)
        yield ids, x, rng.random(batch_size) < p


def step(
    strategy: ParameterServerStrategy,
    model: Model,
    gradients: Callable[..., tuple[Array, tuple[Array, ...]]],
    iterator: Iterator[tuple[Array, Array, Array]],
) -> tuple[int, int]:
    """Run on whichever worker is free."""
    table, head, w, b, optimizer, training_loss = model
    ids, x, y = next(iterator)
    before = strategy.traffic()
    touched = embedding_lookup(table, ids)  # each distinct row once
    losses, (d_touched, d_head, d_w, d_b) = gradients(x, y, touched, *strategy.read([head, w, b]))
    d_table = IndexedSlices(d_touched.reshape(ids.size, -1), ids.reshape(-1))  # duplicates are summed
    optimizer.apply_gradients([(d_table, table), (d_head, head), (d_w, w), (d_b, b)])
    training_loss.update_state(losses)
    moved = strategy.traffic() - before
    return moved.pulled, moved.pushed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a click model with a large embedding table.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=100_000, help="of the table, all fields together")
    parser.add_argument("--dim", type=int, default=8, help="length of a row")
    parser.add_argument("--framework", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--checkpoints", metavar="DIR", help="save the model there in the end, for serve.py")
    parser.add_argument("--target", type=float, default=0.42, help="the log-loss to reach")
    options = parser.parse_args()
    rows = options.rows

    strategy = ParameterServerStrategy(TFConfigClusterResolver())
    num_ps = strategy.cluster_resolver.cluster_spec().num_tasks("ps")
    with strategy.scope():
        # A part of the table is on each server, where its initial values are made: they are not sent, either.
        table = Variable(
            initializers.RandomNormal(stddev=0.01, seed=0),
            name="table",
            shape=(rows, options.dim),
            partitioner=FixedShardsPartitioner(num_ps),
        )
        head = Variable(np.ones(options.dim, np.float32), name="head")
        w = Variable(np.zeros(DENSE, np.float32), name="w")
        b = Variable(0.0, name="b")
        optimizer = optimizers.Adagrad(0.02, initial_accumulator_value=1e-5)
        training_loss = metrics.Mean("training_loss")
    coordinator = ClusterCoordinator(strategy)

    # Functions at the top level that get what they need as arguments also run without pickles (--no-pickle).
    model = Model(table, head, w, b, optimizer, training_loss)
    train = functools.partial(step, strategy, model, torch_step if options.framework == "torch" else numpy_step)
    dataset = coordinator.create_per_worker_dataset(functools.partial(batches, options.batch_size, rows))
    iterator = iter(dataset)
    moved: list[tuple[int, int]] = []
    with ProgressLine(coordinator, total=options.steps) as progress:
        for start in range(0, options.steps, BLOCK):
            steps = range(start, min(start + BLOCK, options.steps))
            results = [coordinator.schedule(train, args=(iterator,)) for _ in steps]
            coordinator.join()
            moved += coordinator.fetch(results)
            progress.update(len(results), loss=training_loss.result())
            training_loss.reset_states()

    if options.checkpoints:
        with CheckpointManager(options.checkpoints) as manager:
            manager.save()
    ids, x, p = clicks(np.random.default_rng(3), 20_000, rows)
    reached = log_loss(p, predict(embedding_lookup(table, ids), x, *strategy.read([head, w, b])))
    pulled, pushed = np.mean(moved, axis=0)
    print(strategy.placement())
    print(f"a step pulled {pulled:,.0f} bytes; whole tables would be {table.nbytes:,}")
    print(f"a step pushed {pushed:,.0f} bytes; whole gradients would be {table.nbytes:,}")
    best, constant = log_loss(p, p), log_loss(p, p.mean())
    print(f"log-loss {reached:.4f}; the best possible is {best:.4f}, the best of a constant {constant:.4f}")
    if reached > options.target:
        sys.exit(f"that is more than the {options.target} that 1,000 steps reach; --target sets another one")


if __name__ == "__main__":
    main()
