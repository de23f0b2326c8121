"""Trains the network of `examples/dtensor_digits.py` in plain NumPy, and as the example does, and compares them.

Run as a script it does so for all types and layouts, and prints the differences: on one thread, since the devices of
one process share the machine with all other tests.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pscluster import spmd

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

SPEC = importlib.util.spec_from_file_location("dtensor_digits", EXAMPLES / "dtensor_digits.py")
assert SPEC is not None
assert SPEC.loader is not None
digits = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = digits
SPEC.loader.exec_module(digits)

X, Y = digits.images(900)
BATCH = 101  # eight devices get 13 or 12 each, and of the last batch 12 or 11


def batches(steps: int, dtype: str) -> list[tuple[Any, Any]]:
    """The batches of the first steps."""
    starts = [step * BATCH % len(Y) for step in range(steps)]
    return [(X[start : start + BATCH].astype(dtype), Y[start : start + BATCH]) for start in starts]


def trained_alone(steps: int, dtype: str) -> tuple[Any, float]:
    """Train the model in NumPy, with Adam (Kingma and Ba 2015); return it, and the last loss."""
    model, loss = digits.Model(1337, dtype), 0.0
    first, second = ([np.zeros_like(weight) for weight in model.weights] for _ in range(2))
    for step, (x, y) in enumerate(batches(steps, dtype), 1):
        hidden = model.hidden(x)
        active = np.maximum(hidden, 0)
        logits = model.output(active)
        loss = float(digits.losses(logits, y).sum())
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        d_logits = p / p.sum(axis=1, keepdims=True) - np.eye(10, dtype=dtype)[y]
        d_hidden = (d_logits @ model.output.kernel.T) * (hidden > 0)
        gradients = [x.T @ d_hidden, d_hidden.sum(0), active.T @ d_logits, d_logits.sum(0)]
        for weight, gradient, m, v in zip(model.weights, gradients, first, second, strict=True):
            m += (gradient - m) * 0.1
            v += (gradient**2 - v) * 0.001
            weight -= 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-7)
    return model, loss


def trained(mesh: spmd.Mesh, rules: Any, steps: int, dtype: str) -> tuple[Any, float]:
    """Train it as the example does."""
    training, loss = digits.Training(mesh, "model", rules, dtype=dtype), None
    for x, y in batches(steps, dtype):
        loss = training.step(training.model.weights, *training.packed(x, y))
    return training, float(np.asarray(loss))


def accuracy(weights: Any) -> float:
    """The share of the images that a model with these weights has right."""
    kernel, bias, kernel_2, bias_2 = weights
    return float(((np.maximum(X @ kernel + bias, 0) @ kernel_2 + bias_2).argmax(axis=1) == Y).mean())


def compared(rules: Any, dtype: str, steps: int) -> dict[str, Any]:
    """How the training differs from that of one process after these steps."""
    alone, loss_alone = trained_alone(steps, dtype)
    training, loss = trained(spmd.create_mesh({"batch": 8}), rules, steps, dtype)
    weights = [weight.full() for weight in training.model.weights]
    differences = [ours - theirs for ours, theirs in zip(weights, alone.weights, strict=True)]
    return {
        "dtype": dtype,
        "largest": max(float(np.abs(difference).max()) for difference in differences),
        "relative": max(
            float(np.linalg.norm(difference) / np.linalg.norm(theirs))
            for difference, theirs in zip(differences, alone.weights, strict=True)
        ),
        "loss": abs(loss / loss_alone - 1),
        "accuracies": [accuracy(weights), accuracy(alone.weights)],
        "steps": training.optimizer.iterations,
    }


if __name__ == "__main__":
    found = [
        compared(rules, dtype, 50)
        for dtype in ("float64", "float32")
        for rules in (digits.DATA_PARALLEL, digits.SHARDED)
    ]
    print(json.dumps(found))
