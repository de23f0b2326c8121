"""Train a two-layer network on 1,797 handwritten digits, with its parameters on parameter servers.

    pscluster run --ps 2 --workers 3 examples/digits.py

The file does not say where the cluster is: TF_CONFIG does, and `pscluster run` sets it.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pscluster.coordinator import (
    ClusterCoordinator,
    InputContext,
    MinSizePartitioner,
    ParameterServerStrategy,
    ProgressLine,
    TFConfigClusterResolver,
    Variable,
    optimizers,
)

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
HIDDEN = 128
BLOCK = 100  # steps between two reports
Array = np.ndarray[Any, np.dtype[Any]]


def load() -> tuple[Array, Array, Array, Array]:
    """Training images and labels, then test images and labels: one fifth of every class, always the same."""
    with np.load(DATA) as file:
        images, labels = file["images"], file["labels"]
    x = (images.astype(np.float32) - 8) / 16  # pixels 0..16 become -0.5..0.5
    rng, test = np.random.default_rng(1998), np.zeros(len(labels), bool)
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        test[rows[: round(len(rows) / 5)]] = True
    return x[~test], labels[~test], x[test], labels[test]


def loss_and_gradients(x: Array, y: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> tuple[float, list[Array]]:
    """Softmax cross-entropy of one batch, and its gradients by w1, b1, w2 and b2."""
    hidden = np.maximum(x @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(y))
    d_logits = np.exp(log_p)
    d_logits[rows, y] -= 1
    d_logits /= len(y)
    d_hidden = (d_logits @ w2.T) * (hidden > 0)
    gradients = [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]
    return float(-log_p[rows, y].mean()), gradients


def batches(batch_size: int, seed: int, context: InputContext) -> Iterator[tuple[Array, Array]]:
    """Run on each worker, without end."""
    x, y, _, _ = load()
    rng = np.random.default_rng([seed, context.worker_index])
    while True:
        rows = rng.integers(len(y), size=batch_size)
        yield x[rows], y[rows]


def step(
    strategy: ParameterServerStrategy,
    parameters: list[Variable],
    optimizer: optimizers.Optimizer,
    iterator: Iterator[tuple[Array, Array]],
) -> float:
    """Run on whichever worker is free."""
    x, y = next(iterator)
    loss, gradients = loss_and_gradients(x, y, *strategy.read(parameters))  # one request a server
    optimizer.apply_gradients(zip(gradients, parameters, strict=True))  # applied on the servers
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier on a parameter-server cluster.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    # Variables of 1 KiB and more are cut in two, so that both servers share the work.
    strategy = ParameterServerStrategy(
        TFConfigClusterResolver(),
        variable_partitioner=MinSizePartitioner(min_shard_bytes=1 << 10, max_shards=2),
    )
    rng = np.random.default_rng(options.seed)
    with strategy.scope():
        w1 = Variable(rng.normal(0, (2 / 64) ** 0.5, (64, HIDDEN)).astype(np.float32), name="w1")
        b1 = Variable(np.zeros(HIDDEN, np.float32), name="b1")
        w2 = Variable(rng.normal(0, (2 / HIDDEN) ** 0.5, (HIDDEN, 10)).astype(np.float32), name="w2")
        b2 = Variable(np.zeros(10, np.float32), name="b2")
        optimizer = optimizers.Adam(learning_rate=1e-3)
    parameters = [w1, b1, w2, b2]
    coordinator = ClusterCoordinator(strategy)

    # Functions at the top level that get what they need as arguments also run without pickles (--no-pickle).
    train = functools.partial(step, strategy, parameters, optimizer)
    dataset = coordinator.create_per_worker_dataset(functools.partial(batches, options.batch_size, options.seed))
    iterator = iter(dataset)
    begin = strategy.progress.get("steps", 0)  # more than 0 where a coordinator before this one has died
    with ProgressLine(coordinator, total=options.steps - begin) as progress:
        for start in range(begin, options.steps, BLOCK):
            steps = range(start, min(start + BLOCK, options.steps))
            losses = [coordinator.schedule(train, args=(iterator,)) for _ in steps]
            coordinator.join()
            progress.update(len(losses), loss=float(np.mean(coordinator.fetch(losses))))
            strategy.save_progress(steps=steps.stop)

    _, _, x, y = load()
    w1_, b1_, w2_, b2_ = strategy.read(parameters)
    predicted = (np.maximum(x @ w1_ + b1_, 0) @ w2_ + b2_).argmax(axis=1)
    accuracy = float((predicted == y).mean())
    print(strategy.placement())
    print(f"test accuracy {accuracy:.4f}")
    if accuracy < 0.96:
        sys.exit("that is less than the 0.96 this network reaches in 2,000 steps")


if __name__ == "__main__":
    main()
