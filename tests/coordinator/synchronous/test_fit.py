"""fit with replicas that step together: the same training as of one process, its logs, callbacks, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_cluster

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    SynchronousStrategy,
    Variable,
    callbacks,
    compute_average_loss,
    errors,
    optimizers,
    replica_context,
)

REPLICAS, BATCH, EPOCHS = 3, 12, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, REPLICAS)


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 3))
    return x, x @ [1.0, -2.0, 0.5]


def batches() -> Iterator[tuple[Any, Any]]:
    x, y = data()
    for _ in range(EPOCHS + 1):
        for start in range(0, len(x), BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


def alone() -> tuple[Any, list[float]]:
    """The weights, and the mean loss of each epoch, of one process with the whole batches."""
    w, losses = np.zeros(3), []
    for number, (x, y) in enumerate(batches()):
        if number == EPOCHS * 5:
            break
        wrong = x @ w - y
        losses.append(float(np.mean(wrong**2)))
        w = w - 0.1 * 2 * x.T @ wrong / len(y)
    return w, np.mean(np.reshape(losses, (EPOCHS, 5)), axis=1).tolist()


@pytest.mark.parametrize("at_once", [1, 4, "auto"])
def test_it_is_the_training_of_one_process(strategy: SynchronousStrategy, at_once: Any, tmp_path: Path) -> None:
    with strategy.scope():
        w = Variable(np.zeros(3), name="w")
        sgd = optimizers.SGD(0.1)

    def step(element: tuple[Any, Any]) -> dict[str, float]:
        x, y = element
        wrong = x @ w.read_value() - y
        sgd.apply_gradients([(2 * x.T @ wrong / BATCH, w)])
        loss = compute_average_loss(wrong**2) * replica_context().num_replicas
        return {"loss": loss, "examples": len(y)}

    seen: list[int] = []

    class Seen(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            assert list(logs or ()) == ["loss", "examples"]
            seen.append(batch)

    coordinator = ClusterCoordinator(strategy)
    checkpoint = callbacks.ModelCheckpoint(str(tmp_path / "saved"))
    history = coordinator.fit(
        step,
        strategy.distribute_dataset(batches),
        epochs=EPOCHS,
        steps_per_epoch=5,
        steps_per_execution=at_once,
        callbacks=[Seen(), checkpoint],
        verbose=0,
    )
    weights, losses = alone()
    np.testing.assert_allclose(w.numpy(), weights, rtol=1e-12)
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-12)
    assert history.history["examples"] == [BATCH / REPLICAS] * EPOCHS
    assert seen == list(range(5)) * EPOCHS
    assert sgd.iterations == 5 * EPOCHS
    w.assign(np.zeros(3))
    assert strategy.restore_or_initialize(str(tmp_path / "saved")) is not None
    np.testing.assert_allclose(w.numpy(), weights, rtol=1e-12)
    strategy.run(lambda: sgd.apply_gradients([(np.ones(3), w)]))
    np.testing.assert_allclose(w.numpy(), weights - 0.3, rtol=1e-12, err_msg="steps go on after a restore")


def test_data_that_ends_too_early(strategy: SynchronousStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    short = strategy.distribute_datasets_from_function(lambda: range(7))
    with pytest.raises(errors.EndOfDatasetError, match="ended after 7 of 10 steps of epoch 1"):
        coordinator.fit(float, short, steps_per_epoch=10, steps_per_execution=4, verbose=0)
    with pytest.raises(errors.EndOfDatasetError, match=r"ended after 2 of 5 steps of epoch 2\. An epoch continues"):
        coordinator.fit(float, short, epochs=2, steps_per_epoch=5, verbose=0)


def test_what_fit_takes(strategy: SynchronousStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    endless = strategy.distribute_datasets_from_function(lambda: range(7))
    with pytest.raises(ValueError, match="needs steps_per_epoch: how many global batches an epoch takes"):
        coordinator.fit(float, endless, verbose=0)
    with pytest.raises(TypeError, match=r"not a list: give what strategy\.distribute_dataset\(\) returns"):
        coordinator.fit(float, [1, 2], steps_per_epoch=4, verbose=0)  # type: ignore[arg-type]
    with pytest.raises(errors.MisuseError, match=r"give fit what strategy\.distribute_dataset"):
        coordinator.fit(float, coordinator.distribute_dataset(np.arange(8)), verbose=0)


def test_replicas_that_return_other_logs(strategy: SynchronousStrategy) -> None:
    def step(_: int) -> dict[str, float]:
        return {"a" if replica_context().replica_id else "b": 1.0}

    endless = strategy.distribute_datasets_from_function(lambda: range(100))
    with pytest.raises(errors.MisuseError, match=r"replica 1 returned logs named \['a'\], and replica 0 \['b'\]"):
        ClusterCoordinator(strategy).fit(step, endless, steps_per_epoch=4, verbose=0)
