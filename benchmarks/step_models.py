"""The models of the synchronous rows: the digits network, and a dense one of 40 MiB, with their batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SIZES = {"digits": (64, 128, 10), "dense": (2048, 2560, 2048)}
"""Of the layers: two, with biases."""

BATCH = {"digits": 64, "dense": 4}
"""Examples of each replica."""


def shapes(model: str) -> list[tuple[int, ...]]:
    """The shapes of weights and biases, in turn."""
    return [shape for a, b in itertools.pairwise(SIZES[model]) for shape in ((a, b), (b,))]


def batch(model: str, rank: int) -> tuple[Array, Array]:
    """Inputs and labels of a replica."""
    rng = np.random.default_rng(rank)
    size, classes = BATCH[model], SIZES[model][-1]
    return rng.normal(size=(size, SIZES[model][0])).astype(np.float32), rng.integers(classes, size=size)


def gradients(x: Array, y: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> list[Array]:
    """The gradients of the mean cross-entropy of a batch by w1, b1, w2 and b2."""
    hidden = np.maximum(x @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= np.float32(len(y))
    d_hidden = (p @ w2.T) * (hidden > 0)
    return [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ p, p.sum(axis=0)]


def torch_gradients(x: Array, y: Array, *parameters: Array) -> list[Any]:
    """The same, computed by torch."""
    import torch

    w1, b1, w2, b2 = leaves = [torch.from_numpy(parameter).requires_grad_() for parameter in parameters]
    logits = torch.relu(torch.from_numpy(x) @ w1 + b1) @ w2 + b2
    return list(torch.autograd.grad(torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)), leaves))
