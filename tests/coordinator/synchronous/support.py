"""What steps in these tests ask, and the data that they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pscluster.coordinator import ClusterCoordinator, SynchronousStrategy, Variable, optimizers, replica_context
from pscluster.core.context import current_function


def rank() -> int:
    return replica_context().replica_id


def joint() -> bool:
    """Whether the step that calls this is taken together with others."""
    function = current_function()
    assert function is not None
    return function.steps.joint is not None


def numbers_of(strategy: SynchronousStrategy, count: int) -> Iterator[Any]:
    """An iterator of numbers from 0 on, the same for each replica."""
    return iter(strategy.distribute_datasets_from_function(lambda: range(count)))


def fitted_loss(strategy: SynchronousStrategy) -> Any:
    """Train a linear model with `fit`, and return its last loss."""
    with strategy.scope():
        w = Variable(np.zeros(3), name="w")
        sgd = optimizers.SGD(0.05)
    x = np.random.default_rng(0).normal(size=(90, 3))
    y = x @ [1.0, -2.0, 0.5]

    def step(element: tuple[Any, Any]) -> float:
        features, targets = element
        wrong = features @ w.read_value() - targets
        sgd.apply_gradients([(2 * features.T @ wrong / len(wrong), w)], examples=len(wrong))
        return float(np.mean(wrong**2))

    data = strategy.distribute_dataset([(x[at : at + 9], y[at : at + 9]) for at in range(0, 90, 9)] * 20)
    history = ClusterCoordinator(strategy).fit(step, data, epochs=4, steps_per_epoch=40, verbose=0)
    return history.history["loss"][-1]
