"""Replicas that step together, in torch: the convolutional network and the `fit` of TensorFlow's guide (rows T8, T11),
with smaller layers, on digits of 8 x 8 pixels. One process that trains with the whole batches gives what to expect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import run_cluster
from torch import nn

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    compute_average_loss,
    metrics,
    optimizers,
    replica_context,
    scale_regularization_loss,
)

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "digits.npz"
REPLICAS = 4
BATCH, EPOCHS, STEPS_PER_EPOCH, VALIDATION_STEPS = 200, 5, 6, 2
L2 = 1e-5
RATE, EPSILON = 1e-2, 1e-7


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[SynchronousStrategy]:
    with SynchronousStrategy(cluster) as strategy:
        yield strategy


def images_and_labels(is_training: bool) -> tuple[Any, Any]:
    """Scaled to 0 to 1, (n, 1, 8, 8), and their digits."""
    with np.load(DATA) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    x = images.astype(np.float32).reshape(-1, 1, 8, 8) / 16
    held_out = VALIDATION_STEPS * BATCH
    return (x[:-held_out], labels[:-held_out]) if is_training else (x[-held_out:], labels[-held_out:])


def training_batches() -> Iterator[tuple[Any, Any]]:
    """Shuffled and endless, so that no batch is partial (row T10)."""
    x, y = images_and_labels(is_training=True)
    rng = np.random.default_rng(0)
    rows = np.empty(0, int)
    while True:
        if len(rows) < BATCH:
            rows = np.append(rows, rng.permutation(len(y)))
        yield x[rows[:BATCH]], y[rows[:BATCH]]
        rows = rows[BATCH:]


def made_network() -> nn.Sequential:
    """Two 3 x 3 convolutions of 8 filters (the guide: 256), then dense layers of 32 (256), 16 (128) and 10."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(
        *convolutions, nn.Linear(8 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)
    )


def regularization(network: nn.Sequential) -> list[torch.Tensor]:
    """The loss of every kernel."""
    return [L2 * (parameter**2).sum() for parameter in network.parameters() if parameter.ndim > 1]


def alone() -> tuple[list[float], list[float], dict[str, Any]]:
    """The loss of each epoch, the accuracy on validation data after it, and the parameters at the end."""
    network, batches = made_network(), training_batches()
    optimizer = torch.optim.Adam(network.parameters(), RATE, eps=EPSILON)
    held_out, labels = map(torch.from_numpy, images_and_labels(is_training=False))
    losses, accuracies = [], []
    for _ in range(EPOCHS):
        total = 0.0
        for _ in range(STEPS_PER_EPOCH):
            x, y = map(torch.from_numpy, next(batches))
            loss = nn.functional.cross_entropy(network(x), y) + sum(regularization(network))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / STEPS_PER_EPOCH)
        with torch.no_grad():
            accuracies.append(float((network(held_out).argmax(dim=1) == labels).float().mean()))
    return losses, accuracies, {name: value.numpy() for name, value in network.state_dict().items()}


def test_fit_trains_the_network_of_the_guide(strategy: SynchronousStrategy) -> None:
    """As one process would with the whole batches: its losses, accuracies on validation data, and parameters."""
    network = made_network()
    with strategy.scope():
        variables = {name: Variable(parameter, name=name) for name, parameter in network.named_parameters()}
        adam = optimizers.Adam(RATE, epsilon=EPSILON)
    coordinator = ClusterCoordinator(strategy)

    def load_parameters() -> None:
        values = strategy.read(variables)
        network.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})

    def step(element: tuple[Any, Any]) -> float:
        x, y = map(torch.from_numpy, element)
        assert len(x) == BATCH // REPLICAS
        load_parameters()
        network.zero_grad()
        loss = compute_average_loss(nn.functional.cross_entropy(network(x), y, reduction="none"))
        loss = loss + scale_regularization_loss(regularization(network))
        loss.backward()
        adam.apply_gradients([(parameter.grad, variables[name]) for name, parameter in network.named_parameters()])
        return float(loss.item() * replica_context().num_replicas)

    def predict(element: tuple[Any, Any]) -> tuple[Any, Any]:
        x, y = element
        load_parameters()
        with torch.no_grad():
            return y, network(torch.from_numpy(x))

    history = coordinator.fit(
        step,
        strategy.distribute_dataset(training_batches),
        epochs=EPOCHS,
        steps_per_epoch=STEPS_PER_EPOCH,
        validation_data=coordinator.distribute_dataset(images_and_labels(is_training=False)).batch(BATCH),
        validation_step=predict,
        validation_metrics={"accuracy": metrics.SparseCategoricalAccuracy()},
        verbose=0,
    )
    losses, accuracies, parameters = alone()
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(history.history["val_accuracy"], accuracies, atol=1.5 / (VALIDATION_STEPS * BATCH))
    assert losses[-1] < 0.7 * losses[0]
    assert adam.iterations == EPOCHS * STEPS_PER_EPOCH
    for name, value in strategy.read(variables).items():
        # Adam's step is up to its rate in size also where rounding is all there is of a gradient.
        np.testing.assert_allclose(value, parameters[name], atol=RATE / 10, err_msg=name)
