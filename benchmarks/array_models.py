"""The network of TensorFlow's DTensor guide, 784-128-10, and a step of Adam, in NumPy's functions: for all sides.

NumPy's own arrays, dask's and ours go through the same lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH, SIZES, CLASSES = 128, (784, 128, 10), 10
BATCHES = 10
RATE, BETA_1, BETA_2, EPSILON = 0.01, 0.9, 0.999, 1e-7


def parameters() -> list[Any]:
    """Return kernels and biases."""
    random = np.random.default_rng(0)
    made: list[Any] = []
    for inputs, outputs in itertools.pairwise(SIZES):
        made.append((random.standard_normal((inputs, outputs)) / np.sqrt(inputs)).astype(np.float32))
        made.append(np.zeros(outputs, np.float32))
    return made


def batches() -> list[tuple[Any, Any]]:
    """Return images, and their classes as rows of an identity matrix."""
    random = np.random.default_rng(1)
    return [
        (
            random.random((BATCH, SIZES[0]), np.float32),
            np.eye(CLASSES, dtype=np.float32)[random.integers(10, size=BATCH)],
        )
        for _ in range(BATCHES)
    ]


def initial_state() -> list[list[Any]]:
    """Return parameters and Adam's two moments of each."""
    return [[value, np.zeros_like(value), np.zeros_like(value)] for value in parameters()]


def train_step(
    state: Any, x: Any, classes: Any, summed: Callable[[list[Any]], list[Any]] = lambda gradients: gradients
) -> tuple[Any, Any]:
    """Return the state after a step, and the loss, a mean of the batch's.

    `summed` is called on gradients before they are applied, where the batch is a part of one.
    """
    (kernel_1, *_), (bias_1, *_), (kernel_2, *_), (bias_2, *_) = state
    hidden = np.maximum(x @ kernel_1 + bias_1, 0)
    logits = hidden @ kernel_2 + bias_2
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponents = np.exp(shifted)
    sums = exponents.sum(axis=1, keepdims=True)
    loss = (np.log(sums) - (shifted * classes).sum(axis=1, keepdims=True)).sum() / BATCH
    wrong = (exponents / sums - classes) / BATCH
    back = (wrong @ kernel_2.T) * (hidden > 0)
    gradients = summed([x.T @ back, back.sum(axis=0), hidden.T @ wrong, wrong.sum(axis=0)])
    after = []
    for (value, first, second), gradient in zip(state, gradients, strict=True):
        first = BETA_1 * first + (1 - BETA_1) * gradient
        second = BETA_2 * second + (1 - BETA_2) * (gradient * gradient)
        after.append([value - RATE * first / (np.sqrt(second) + EPSILON), first, second])
    return after, loss
