"""Keras models on the parameter servers, on the JAX backend, and most of it again on torch: parity with one
process, step by step; fit, evaluation and saving; deaths; what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.frameworks.keras_models.conftest import ENVIRONMENT

import pscluster.keras
from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    SynchronousStrategy,
    callbacks,
    optimizers,
)
from pscluster.core.context import current_function
from pscluster.core.errors import ConfigurationError, FunctionError, InvalidUpdateError, MisuseError
from pscluster.keras.making import check_backend

# Keras' own conversions of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BACKEND = keras.config.backend()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(320, 8)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(np.int32)
BATCHES = [(X[at : at + 32], Y[at : at + 32]) for at in range(0, len(X), 32)]
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy


def classifier(optimizer: Any, *layers: Any, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(2)])
    model.compile(optimizer, CROSSENTROPY(from_logits=True), metrics=["accuracy"], **options)
    return model


def with_statistics(optimizer: Any) -> Any:
    # Without a bias, whose gradients the normalization would make rounding errors that Adam takes for gradients.
    regularizer, initializer = keras.regularizers.L2(1e-2), keras.initializers.GlorotUniform(seed=1)
    dense = keras.layers.Dense(6, "tanh", False, initializer, kernel_regularizer=regularizer)
    return classifier(optimizer, dense, keras.layers.BatchNormalization(momentum=0.9))


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, loss_scale_factor=8.0)


def adam() -> Any:
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 8), global_clipnorm=0.5)


def weights_of(model: Any) -> list[Any]:
    return [np.asarray(weight) for weight in model.get_weights()]


@pytest.mark.parametrize("make", [sgd, adam])
def test_every_step_is_that_of_one_process(strategy: ParameterServerStrategy, make: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        served = pscluster.keras.serve(lambda: with_statistics(make()))
    plain = served.to_keras()
    coordinator = ClusterCoordinator(strategy)
    for x, y in BATCHES:  # any worker takes the next one
        logs = coordinator.schedule(lambda batch: served.train_on_batch(batch), args=((x, y),)).fetch()
        plain.reset_metrics()
        expected = plain.train_on_batch(x, y, return_dict=True)
        assert list(logs) == ["loss", "accuracy"]
        for name, value in expected.items():
            assert logs[name] == pytest.approx(float(value), rel=1e-5), name
    for mine, theirs in zip(weights_of(served.to_keras()), weights_of(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    names = list(served.variables)
    assert names[0] == "model/sequential/dense/kernel"
    assert names[-1] == "model/sequential/batch_normalization/moving_variance"


def test_workers_drop_other_units(strategy: ParameterServerStrategy) -> None:
    """The first one those that one process would drop."""
    with strategy.scope():
        served = pscluster.keras.serve(lambda: classifier("sgd", keras.layers.Dropout(0.5, seed=3)))
    plain, coordinator = served.to_keras(), ClusterCoordinator(strategy)
    plain.optimizer.learning_rate = served.optimizer.learning_rate = 0.0
    expected = float(plain.train_on_batch(*BATCHES[0], return_dict=True)["loss"])

    def loss() -> float:
        return served.train_on_batch(BATCHES[0])["loss"]

    (first,) = coordinator.fetch(coordinator.schedule_together(loss, workers=[0]))
    (second,) = coordinator.fetch(coordinator.schedule_together(loss, workers=[1]))
    assert first == pytest.approx(expected, rel=1e-4)
    assert second != pytest.approx(expected, rel=1e-4)


def test_fit_evaluates_and_saves(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """What TensorFlow's tutorial does with Model.fit, and back in plain Keras."""
    with strategy.scope():
        served = pscluster.keras.serve(lambda: with_statistics(keras.optimizers.Adam(0.02)))
    coordinator = ClusterCoordinator(strategy)
    data = coordinator.distribute_dataset((X, Y)).shuffle(seed=1).batch(32)
    validation = coordinator.distribute_dataset((X, Y)).batch(48)  # the last batch is smaller
    reduce = callbacks.ReduceLROnPlateau(served.optimizer, monitor="loss", patience=100)
    stop = callbacks.EarlyStopping(monitor="val_loss", patience=100)
    history = coordinator.fit(served, data, epochs=4, validation_data=validation, callbacks=[reduce, stop], verbose=0)
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"}
    assert history.history["val_accuracy"][-1] > 0.8
    assert served.optimizer.iterations == 4 * len(BATCHES)

    results = coordinator.evaluate(served, validation)
    assert results["loss"] == history.history["val_loss"][-1]
    model = served.to_keras()
    assert results == pytest.approx(model.evaluate(X, Y, verbose=0, return_dict=True), rel=1e-5)
    np.testing.assert_allclose(coordinator.predict(served, validation), model.predict(X, verbose=0), atol=1e-5)
    model.save(tmp_path / "whole.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    assert results == pytest.approx(loaded.evaluate(X, Y, verbose=0, return_dict=True), rel=1e-5)

    model.save_weights(tmp_path / "model.weights.h5")
    for variable in served.variables.values():
        variable.assign(np.ones(variable.shape))
    served.load_weights(tmp_path / "model.weights.h5")
    assert coordinator.evaluate(served, validation) == results

    per_worker = coordinator.create_per_worker_dataset(lambda: endless())
    history = coordinator.fit(
        served,
        per_worker,
        epochs=2,
        steps_per_epoch=10,
        callbacks=[callbacks.ModelCheckpoint(str(tmp_path / "checkpoints"))],
        verbose=0,
    )
    assert len(history.history["loss"]) == 2


def endless() -> Iterator[Any]:
    while True:
        yield from BATCHES


def one_layer() -> Any:
    return classifier("sgd")


def test_a_model_is_sent_without_pickles() -> None:
    """Where its function is in a file that workers have. And copies are evaluated while others train."""
    with (
        LocalCluster(1, 1, log_level="ERROR", env=ENVIRONMENT, allow_pickle=False) as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            served = pscluster.keras.serve(one_layer)
        coordinator = ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset((X, Y)).batch(64)
        coordinator.fit(served, data, verbose=0)
        assert served.optimizer.iterations == 5
        assert coordinator.evaluate(served, data, concurrent=True) == coordinator.evaluate(served, data)


class Outputs(keras.Model):
    """Named inputs, two outputs, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        hidden = self.first(inputs["a"]) + inputs["b"]
        return {"hidden": hidden, "last": self.last(hidden)}

    def build(self, input_shape: Any) -> None:
        self.first.build((None, 8))
        self.last.build((None, 4))
        self.built = True


def outputs() -> Any:
    model = Outputs()
    model.build(None)
    metrics = {"hidden": [keras.metrics.MeanAbsoluteError()], "last": [keras.metrics.AUC(name="auc")]}
    model.compile("sgd", {"hidden": "mse", "last": "mse"}, metrics=metrics, weighted_metrics={"last": ["mae"]})
    return model


def test_nested_inputs_and_weighted_outputs(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(outputs)
    x = {"a": X, "b": X[:, :4]}
    y = {"hidden": X[:, 4:], "last": (Y[:, None] > 0).astype(np.float32)}
    weights = {"hidden": np.ones(len(X), np.float32), "last": np.linspace(0, 1, len(X), dtype=np.float32)}
    plain, coordinator = served.to_keras(), ClusterCoordinator(strategy)
    data = coordinator.distribute_dataset((x, y, weights)).batch(len(X) // 4)
    results = coordinator.evaluate(served, data)
    expected = plain.evaluate(x, y, sample_weight=weights, batch_size=len(X) // 4, verbose=0, return_dict=True)
    assert results == pytest.approx(expected, rel=1e-4)
    predicted = coordinator.predict(served, coordinator.distribute_dataset(x).batch(32))
    for name, of_output in plain.predict(x, verbose=0).items():
        np.testing.assert_allclose(predicted[name], of_output, atol=1e-5)
    coordinator.fit(served, coordinator.distribute_dataset((x, y, weights)).batch(len(X)), verbose=0)
    plain.train_on_batch(x, y, sample_weight=weights)
    for mine, theirs in zip(weights_of(served.to_keras()), weights_of(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_replicas_that_step_together_are_one_process(cluster: LocalCluster) -> None:
    """Their gradients are averaged over all examples, and what they change in moving statistics among themselves."""
    with SynchronousStrategy(cluster) as strategy:
        with strategy.scope():
            served = pscluster.keras.serve(
                lambda: classifier("sgd", keras.layers.BatchNormalization(momentum=0.0), keras.layers.Dense(4))
            )
        plain = served.to_keras()
        data = strategy.distribute_datasets_from_function(lambda context: [BATCHES[context.input_pipeline_id]])
        ClusterCoordinator(strategy).fit(served, data, steps_per_epoch=1, verbose=0)
        means = [BATCHES[rank][0].mean(axis=0) for rank in range(2)]
        at = "model/sequential/batch_normalization/moving_mean"
        np.testing.assert_allclose(served.variables[at].numpy(), np.mean(means, axis=0), rtol=1e-4, atol=1e-5)
        both = [served.to_keras(), plain]
        assert not np.allclose(*(model.get_weights()[-1] for model in both))
        assert served.optimizer.iterations == 1


def test_steps_count_once_though_a_worker_dies(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(lambda: classifier("sgd", keras.layers.Dense(4)))

    def step(number: int) -> float:
        logs = served.train_on_batch(BATCHES[number])
        if number == 2 and not (flag := tmp_path / "died").exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return logs["loss"]

    coordinator, plain = ClusterCoordinator(strategy), served.to_keras()
    losses = [coordinator.schedule(step, args=(number,)).fetch() for number in range(5)]
    expected = [float(plain.train_on_batch(x, y, return_dict=True)["loss"]) for x, y in BATCHES[:5]]
    assert (tmp_path / "died").exists()
    assert served.optimizer.iterations == 5
    assert losses[:2] == pytest.approx(expected[:2], rel=1e-3)
    for one, other in zip(weights_of(served.to_keras()), weights_of(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1

    def get_config(self) -> dict[str, Any]:
        return {}


def not_built() -> Any:
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def excluding() -> Any:
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@pytest.mark.parametrize(
    ("model_fn", "error", "message"),
    [
        (lambda: 3, TypeError, "model_fn returned an int"),
        (keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), TypeError, "give a function that makes and"),
        (lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), MisuseError, "is not compiled"),
        (not_built, MisuseError, "no trainable weights yet: begin it with keras.Input"),
        (
            lambda: classifier("nadam"),
            MisuseError,
            "they have SGD, Adagrad, Adam, AdamW, RMSprop, Ftrl, Ada",
        ),
        (lambda: classifier(keras.optimizers.LossScaleOptimizer(sgd())), MisuseError, "mixed_bfloat16"),
        (
            lambda: classifier(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
            MisuseError,
            "SGD has gradient_accumulation_steps=2",
        ),
        (lambda: classifier(keras.optimizers.SGD(Rate())), MisuseError, "schedule 'Rate', .* they have Exponential"),
        (
            lambda: classifier(keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3)),
            MisuseError,
            "SGD has ema_overwrite_frequency=3",
        ),
        (lambda: classifier(excluding()), MisuseError, "AdamW excludes variables from weight decay"),
    ],
)
def test_a_model_that_cannot_be_served_leaves_nothing(
    strategy: ParameterServerStrategy, model_fn: Any, error: type[Exception], message: str
) -> None:
    with strategy.scope(), pytest.raises(error, match=message):
        pscluster.keras.serve(model_fn)
    assert strategy.variables == []


def test_an_optimizer_of_ours_is_used_in_place_of_the_models(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(lambda: classifier("nadam"), optimizer=optimizers.SGD(0.0))
    before = weights_of(served.to_keras())
    served.train_on_batch(BATCHES[0])  # in the script it can be, too
    assert all((one == other).all() for one, other in zip(before, weights_of(served.to_keras()), strict=True))
    assert served.optimizer.iterations == 1


def test_averages_are_those_with_which_keras_ends_a_training(strategy: ParameterServerStrategy) -> None:
    def model_fn() -> Any:
        keras.utils.set_random_seed(1)
        return classifier(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))

    with strategy.scope():
        served = pscluster.keras.serve(model_fn)
    plain = model_fn()
    plain.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    for batch in BATCHES:
        served.train_on_batch(batch)
    for mine, theirs in zip(weights_of(served.to_keras(averages=True)), weights_of(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not np.allclose(weights_of(served.to_keras())[0], weights_of(plain)[0], rtol=1e-3)


class Scoring(keras.Sequential):
    def predict_step(self, data: Any) -> Any:
        return data


def scoring() -> Any:
    model = Scoring([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


def test_what_is_wrong_in_a_step_is_named(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    with strategy.scope():
        served = pscluster.keras.serve(
            lambda: classifier("sgd", keras.layers.Dense(4 if current_function() is None else 5)), name="a"
        )
        other = pscluster.keras.serve(lambda: classifier("sgd"), name="b")
        unlabeled = pscluster.keras.serve(lambda: classifier("sgd"), name="c")
        own = pscluster.keras.serve(scoring, name="d")
        assigning = pscluster.keras.serve(
            lambda: classifier("sgd", keras.layers.SpectralNormalization(keras.layers.Dense(3))), name="e"
        )
    coordinator = ClusterCoordinator(strategy)
    with pytest.raises(FunctionError, match=r"'sequential/dense/kernel' of shape \(8, 5\) where 'a' has .*\(8, 4\)"):
        coordinator.schedule(lambda: served.train_on_batch(BATCHES[0])).fetch()
    with pytest.raises(FunctionError):
        coordinator.join()
    with pytest.raises(InvalidUpdateError, match=r"NaN or infinity in the gradient of b/sequential/dense/kernel.* nan"):
        other.train_on_batch((X[:4] * np.nan, Y[:4]))
    assert other.optimizer.iterations == 0
    with pytest.raises(MisuseError, match=r"this model has 'sequential.*' of shape \(8, 4\) where 'b' has"):
        other.load_weights(served.to_keras())
    with pytest.raises(TypeError, match="takes a Keras model or a path, not an int"):
        other.load_weights(3)
    with pytest.raises(MisuseError, match="without examples: give batches"):
        other.train_on_batch((np.float32(1),))
    with pytest.raises(MisuseError, match="is an ndarray without labels, which the loss of 'sequential' needs: give"):
        unlabeled.train_on_batch(X[:4])
    with pytest.raises(MisuseError, match="Scoring has a predict_step of its own, which workers don't call"):
        own.predict_on_batch(X[:4])
    with pytest.raises(MisuseError, match="optimizer 'b/optimizer' keeps no averages: make it with use_ema=True"):
        other.to_keras(averages=True)
    if BACKEND == "torch":  # on JAX Keras itself drops what is assigned
        with pytest.raises(
            MisuseError, match=r"assigns sequential/.*kernel in its call, as SpectralNormalization does"
        ):
            assigning.train_on_batch(BATCHES[0])
    with pytest.raises(AttributeError, match=r"no 'fit': write coordinator.fit\(served, data\)"):
        other.fit(X, Y)
    with pytest.raises(AttributeError, match=r"no 'summary': write served.to_keras\(\).summary"):
        other.summary()
    with pytest.raises(AttributeError, match=r"a ServedModel has no 'wieghts'$"):
        _ = other.wieghts
    (tmp_path / "text.keras").write_text("text")
    with pytest.raises(ValueError, match=r"text\.keras' has no weights that 'b' can load: File is not a zip file"):
        other.load_weights(tmp_path / "text.keras")


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.last = self.add_weight(name="last", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.last.assign(0.5 * self.last + keras.ops.max(y_pred))

    def result(self) -> Any:
        return self.last


def test_a_metric_that_is_no_sum_is_refused(strategy: ParameterServerStrategy) -> None:
    def model_fn() -> Any:
        model = classifier("sgd")
        model.compile("sgd", CROSSENTROPY(from_logits=True), metrics=[Largest()])
        return model

    with strategy.scope():
        served = pscluster.keras.serve(model_fn)
    with pytest.raises(MisuseError, match="the metric of 'largest/last' can't be computed on several workers"):
        served.test_on_batch(BATCHES[0])


def test_the_policy_of_types_is_that_of_the_script(strategy: ParameterServerStrategy) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with strategy.scope():
            served = pscluster.keras.serve(lambda: classifier("sgd"))
    finally:
        keras.config.set_dtype_policy(before)

    def dtypes() -> tuple[str, float]:
        loss = served.train_on_batch(BATCHES[0])["loss"]
        return served._copy.model.layers[-1].compute_dtype, loss

    dtype, loss = ClusterCoordinator(strategy).schedule(dtypes).fetch()
    assert (dtype, loss > 0) == ("bfloat16", True)


def test_the_backend_must_be_the_scripts() -> None:
    other = "torch" if BACKEND == "jax" else "jax"
    with pytest.raises(ConfigurationError, match=f"backend is '{BACKEND}' here, and must be {other}: set"):
        check_backend(other)
