"""Steps of a Keras model's own, and losses that its layers add: as in one process, on JAX, and again on torch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import pscluster.keras
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy
from pscluster.core.errors import MisuseError

# Keras' own conversions of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BACKEND = keras.config.backend()
X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Stepping(keras.Model):
    """Takes the steps of Keras' guide on custom training, with a loss and a metric that it was not compiled with."""

    mistake = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    @property
    def metrics(self) -> list[Any]:
        return [self.error]

    def loss_of(self, y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y - y_pred) ** 1.5)

    if BACKEND == "jax":

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, others, of_optimizer, of_metrics = state
            x, y = data

            def loss_and_updates(trainable: Any) -> Any:
                y_pred, updated = self.stateless_call(trainable, others, x, training=True)
                return self.loss_of(y, y_pred), (y_pred, updated)

            (loss, (y_pred, others)), grads = jax.value_and_grad(loss_and_updates, has_aux=True)(trainable)
            trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, trainable)
            if self.mistake == "assign":
                trainable = [trainable[0] + 1, *trainable[1:]]
            if self.mistake == "twice":
                self.optimizer.stateless_apply(of_optimizer, grads, trainable)
            of_metrics = self.error.stateless_update_state(of_metrics, y, y_pred)
            logs = {"loss": loss, "error": self.error.stateless_result(of_metrics)}
            return logs, (trainable, others, of_optimizer, of_metrics)

    else:

        def train_step(self, data: Any) -> Any:  # type: ignore[misc]  # Keras calls it otherwise on torch
            import torch

            x, y = data
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.loss_of(y, y_pred)
            loss.backward()
            weights = list(self.trainable_weights)
            gradients = [weight.value.grad for weight in weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, weights)
                if self.mistake == "assign":
                    weights[0].assign_add(weights[0] * 0 + 1)
                if self.mistake == "twice":
                    self.optimizer.apply(gradients, weights)
            self.error.update_state(y, y_pred)
            return {"loss": loss, "error": self.error.result()}


def stepping(mistake: str = "", *, embedding: bool = False) -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization(momentum=0.8)(keras.layers.Dense(3, "tanh", use_bias=False)(inputs))
    if embedding:
        hidden += keras.layers.Embedding(5, 3)(keras.ops.cast(keras.ops.sum(inputs, axis=1), "int32") % 5)
    model = Stepping(inputs, keras.layers.Dense(1)(hidden))
    model.mistake = mistake
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return model


class Adding(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.3 * keras.ops.mean(inputs**2))
        return inputs


class Reporting(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        results: dict[str, Any] = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"worst": keras.ops.max(keras.ops.abs(y - y_pred))}


def adding() -> Any:
    dense = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))
    model = Reporting([keras.Input((4,)), dense, Adding(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("model_fn", [stepping, adding])
def test_every_step_is_that_of_one_process(strategy: ParameterServerStrategy, model_fn: Any) -> None:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        served = pscluster.keras.serve(model_fn, name=model_fn.__name__)
    plain, coordinator = served.to_keras(), ClusterCoordinator(strategy)
    for at in range(0, len(X), 16):  # any worker takes the next one
        x, y = X[at : at + 16], Y[at : at + 16]
        logs = coordinator.schedule(lambda of: served.train_on_batch(of), args=((x, y),)).fetch()
        expected = plain.fit(x, y, batch_size=16, verbose=0).history  # one step
        assert logs == {name: pytest.approx(value, rel=2e-3) for name, (value,) in expected.items()}
    assert served.optimizer.iterations == 4
    for mine, theirs in zip(served.to_keras().get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [("assign", "Stepping.train_step changes dense.*/kernel without self.opt"), ("twice", "more than once")],
)
def test_what_the_servers_would_not_see_is_refused(
    strategy: ParameterServerStrategy, mistake: str, message: str
) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(lambda: stepping(mistake), name=mistake)
        with pytest.raises(MisuseError, match="Stepping has a train_step of its own, which would see no gradients"):
            pscluster.keras.serve(lambda: stepping(embedding=True), tables=["*"], name="rows")
    with pytest.raises(MisuseError, match=message):
        served.train_on_batch((X, Y))
    assert served.optimizer.iterations == 0
