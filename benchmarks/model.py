"""The embedding model of the end-to-end row, in NumPy: a table, 26 ids and 13 numbers per example, two hidden
layers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

ROWS, WIDTH, IDS, DENSE, HIDDEN = 1_000_000, 32, 26, 13, (256, 128)
Array = np.ndarray[Any, np.dtype[Any]]


def dense_shapes() -> list[tuple[int, ...]]:
    """The shapes of the weights and biases, in turn."""
    sizes = (IDS * WIDTH + DENSE, *HIDDEN, 1)
    return [shape for a, b in itertools.pairwise(sizes) for shape in ((a, b), (b,))]


def batches(seed: int, size: int, count: int = 16) -> list[tuple[Array, Array, Array]]:
    """Ids (uniform over the table), features and labels."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(ROWS, size=(size, IDS)),
            rng.normal(size=(size, DENSE)).astype(np.float32),
            rng.integers(2, size=size).astype(np.float32),
        )
        for _ in range(count)
    ]


def forward_and_backward(
    rows: Array, features: Array, labels: Array, weights: list[Array]
) -> tuple[float, list[Array], Array]:
    """The mean logistic loss, and its gradients by the weights and by the rows of the table."""
    w1, b1, w2, b2, w3, b3 = weights
    x = np.concatenate([rows.reshape(len(labels), -1), features], axis=1)
    h1 = np.maximum(x @ w1 + b1, 0)
    h2 = np.maximum(h1 @ w2 + b2, 0)
    logits = (h2 @ w3 + b3)[:, 0]
    loss = np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
    d = ((1 / (1 + np.exp(-logits)) - labels) / len(labels)).astype(np.float32)[:, None]
    d2 = (d @ w3.T) * (h2 > 0)
    d1 = (d2 @ w2.T) * (h1 > 0)
    gradients = [x.T @ d1, d1.sum(0), h1.T @ d2, d2.sum(0), h2.T @ d, d.sum(0)]
    d_rows = (d1 @ w1[: IDS * WIDTH].T).reshape(rows.shape)
    return float(loss.mean()), gradients, d_rows


LOOP_SIDE = 200
"""A step of the training loop's rows multiplies two matrices of this many rows and columns: about 0.3 ms here."""
