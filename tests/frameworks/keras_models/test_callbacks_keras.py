"""Keras' own callbacks in `fit`: on JAX, and again on torch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import pscluster.keras
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, callbacks, optimizers
from pscluster.core.errors import MisuseError
from pscluster.keras.callbacks import driven

# Keras' own conversions of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BACKEND = keras.config.backend()
X = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def classifier() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model


class Own(keras.callbacks.Callback):
    """Counts hooks, and sees the weights that there are on the servers."""

    def __init__(self, served: Any) -> None:
        super().__init__()
        self.served, self.batches, self.tests, self.ends = served, 0, 0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        assert set(logs) == {"loss", "accuracy"}

    def on_test_end(self, logs: Any = None) -> None:
        self.tests += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        first, *_ = self.served.variables.values()
        assert (first.numpy() == self.model.get_weights()[0]).all()
        self.params["epochs"], self.params["steps"]

    def on_train_end(self, logs: Any = None) -> None:
        self.ends += 1
        self.model.layers[0].bias.assign(np.full(2, 3.0))  # what a hook assigns, the servers get


def test_callbacks_of_keras_work_in_fit(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(classifier)
    coordinator = ClusterCoordinator(strategy)
    data = coordinator.distribute_dataset((X, Y)).shuffle(seed=1).batch(32)
    rates: list[float] = []
    own, of_epochs = Own(served), keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: rates.append(epoch))
    given = [
        own,
        callbacks.CSVLogger(str(tmp_path / "ours.csv")),
        keras.callbacks.CSVLogger(str(tmp_path / "logs.csv")),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"), monitor="val_accuracy", save_best_only=True),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        of_epochs,
    ]
    history = coordinator.fit(served, data, epochs=3, validation_data=data, callbacks=given, verbose=0)
    assert (own.batches, own.tests, own.ends, rates) == (9, 3, 1, [0, 1, 2])
    assert type(own) is Own
    assert history.history["learning_rate"] == [0.25, 0.125, 0.0625]
    assert served.optimizer.learning_rate == 0.0625
    rows = list(csv.DictReader((tmp_path / "logs.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == pytest.approx(history.history["loss"])
    best = int(np.argmax(history.history["val_accuracy"])) + 1
    loaded = keras.models.load_model(tmp_path / f"{best}.keras")
    metrics = loaded.evaluate(X, Y, verbose=0, return_dict=True)
    assert metrics["accuracy"] == pytest.approx(history.history["val_accuracy"][best - 1])
    loaded.load_weights(tmp_path / "3.weights.h5")
    kernel, bias = (variable.numpy() for variable in served.variables.values())
    assert (kernel == loaded.get_weights()[0]).all()
    assert (bias == 3).all()


def test_the_best_weights_are_restored_on_the_servers(strategy: ParameterServerStrategy) -> None:
    """When Keras' EarlyStopping ends a training whose rate is far too large; a plateau lowers the rate."""
    with strategy.scope():
        served = pscluster.keras.serve(classifier, name="b", optimizer=optimizers.SGD(0.1))
    coordinator = ClusterCoordinator(strategy)
    data = coordinator.distribute_dataset((X, Y)).batch(32)
    kernels: list[Any] = []

    def spoil(epoch: int, logs: Any) -> None:
        kernels.append(served.to_keras().get_weights()[0])
        served.optimizer.learning_rate = 500.0

    stop = keras.callbacks.EarlyStopping("accuracy", patience=1, min_delta=1.0, restore_best_weights=True)
    given = [stop, keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=9)]
    given.append(keras.callbacks.LambdaCallback(on_epoch_end=spoil))
    history = coordinator.fit(served, data, epochs=9, callbacks=given, verbose=0)
    assert len(history.epoch) == 2
    assert "EarlyStopping" in history.stopped
    assert (served.to_keras().get_weights()[0] == kernels[0]).all()
    assert not np.allclose(kernels[0], kernels[1])
    assert history.history["learning_rate"] == [pytest.approx(0.1), 500.0]


def test_numbers_go_on_after_a_restart(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(classifier, name="c")
    (before,) = driven(served, [first := keras.callbacks.EarlyStopping("loss", patience=3)])
    (after,) = driven(served, [second := keras.callbacks.EarlyStopping("loss", patience=3)])
    assert before is not None
    assert after is not None
    for one in (before, after):
        one.begin({"epochs": 3})
        one.call("on_train_begin", {})
    for epoch, loss in enumerate((2.0, 3.0)):
        before.call("on_epoch_end", epoch, {"loss": loss})
    after.load(before.state())
    assert (second.wait, second.best) == (first.wait, first.best) == (1, 2.0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: keras.callbacks.BackupAndRestore(path), MisuseError, "BackupAndRestore also .* work are EarlySt"),
        (lambda path: keras.callbacks.SwapEMAWeights(), MisuseError, r"served.to_keras\(averages=True\)"),
        (lambda path: keras.callbacks.EarlyStopping("val_acuracy"), ValueError, "received monitor=val_acuracy, but"),
        (lambda path: "early", TypeError, "not 'early'"),
    ],
)
def test_a_callback_that_cannot_work_is_refused(
    strategy: ParameterServerStrategy, tmp_path: Path, make: Any, error: type[Exception], message: str
) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(classifier, name=f"d{tmp_path.name}")
    coordinator = ClusterCoordinator(strategy)
    data = coordinator.distribute_dataset((X, Y)).batch(32)
    with pytest.raises(error, match=message):
        coordinator.fit(served, data, callbacks=[make(str(tmp_path))], verbose=0)
    assert served.optimizer.iterations == 0
