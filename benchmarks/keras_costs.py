"""What the adapters of JAX and Keras cost: a served step beside one written by hand, and Keras' `fit` beside ours.

Each handler runs in a process of its own, since the backend of Keras is that of a process. All processes compute with
one thread.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
from driver import THREADS, Handlers, serve, timed
from serve_turns import in_turn

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, __version__, optimizers

ENVIRONMENT = THREADS | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
WIDTH, CLASSES = 256, 10
BATCH = 64


def images(n: int) -> tuple[Any, Any]:
    """Noise in the form of MNIST's images, and labels."""
    rng = np.random.default_rng(0)
    return rng.random((n, 28, 28, 1), np.float32), rng.integers(0, CLASSES, n).astype(np.int32)


def batches() -> list[Any]:
    """Batches of the dense networks, four times as large as those of the convolutions."""
    x, y = images(16 * BATCH)
    return list(zip(np.split(x.reshape(len(x), -1), 4), np.split(y, 4), strict=True))


def jax(layers: int, n: int, rounds: int) -> dict[str, list[float]]:
    """Both ways of a step of a dense network in JAX, with this number of layers."""
    os.environ.update(ENVIRONMENT)
    import jax
    import jax.numpy as jnp

    import pscluster.jax

    sizes = [28 * 28, *[WIDTH] * (layers - 1), CLASSES]
    rng = np.random.default_rng(0)
    initial = {
        f"layer {at:02}": {"w": rng.normal(0, 0.05, sizes[at : at + 2]).astype(np.float32), "b": np.zeros(size, "f4")}
        for at, size in enumerate(sizes[1:])
    }

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        *hidden, last = params.values()
        for layer in hidden:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        scores = jax.nn.log_softmax(x @ last["w"] + last["b"])
        return -jnp.take_along_axis(scores, y[:, None], 1).mean()

    with (
        LocalCluster(2, 1, transport="tcp", env=ENVIRONMENT, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            adam = optimizers.Adam(1e-3)
            served = pscluster.jax.serve(jax.tree.map(jnp.asarray, initial), adam)
        flat = list(served.variables.values())  # as those who write the step by hand have them
        variables = jax.tree.unflatten(jax.tree.structure(initial), flat)
        kept: dict[str, Any] = {}  # of the worker

        def prepared() -> Any:
            if not kept:
                kept.update(data=batches(), step=jax.jit(jax.value_and_grad(loss_of)))
            return kept["data"], {"by hand": by_hand, "served": by_serve}

        def by_hand(x: Any, y: Any) -> float:
            loss, gradients = kept["step"](strategy.read(variables), x, y)
            arrays = map(np.asarray, jax.tree.leaves(gradients))
            adam.apply_gradients(zip(arrays, flat, strict=True))
            return float(loss)

        def by_serve(x: Any, y: Any) -> float:
            loss, gradients = kept["step"](served.read(), x, y)
            served.apply(gradients)
            return float(loss)

        return in_turn(ClusterCoordinator(strategy), prepared, n, rounds)


def _dense(layers: int) -> Any:
    import keras

    hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(layers - 1)]
    model = keras.Sequential([keras.Input((28 * 28,)), *hidden, keras.layers.Dense(CLASSES)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def keras(backend: str, layers: int, n: int, rounds: int) -> dict[str, list[float]]:
    """Both ways of a step of a dense network in Keras; the loss and the accuracy are returned."""
    environment = ENVIRONMENT | {"KERAS_BACKEND": backend}
    os.environ.update(environment)
    import pscluster.keras

    with (
        LocalCluster(2, 1, transport="tcp", env=environment, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            served = pscluster.keras.serve(lambda: _dense(layers))
        adam, variables = served.optimizer, list(served.variables.values())
        kept: dict[str, Any] = {}  # of the worker

        def prepared() -> Any:
            if not kept:
                make = _jax_step if backend == "jax" else _torch_step
                kept.update(data=batches(), step=make(_dense(layers)))
            return kept["data"], {"by hand": by_hand, "served": lambda x, y: served.train_on_batch((x, y))}

        def by_hand(x: Any, y: Any) -> tuple[float, float]:
            loss, accuracy, gradients = kept["step"](strategy.read(variables), x, y)
            adam.apply_gradients(zip(gradients, variables, strict=True))
            return float(loss), float(accuracy)

        return in_turn(ClusterCoordinator(strategy), prepared, n, rounds)


def _jax_step(model: Any) -> Any:
    """The loss, the accuracy and the gradients for given weights, as one writes it with Keras on JAX."""
    import jax
    import keras

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        scores, _ = model.stateless_call(weights, [], x, training=True)
        accuracy = keras.metrics.sparse_categorical_accuracy(y, scores).mean()
        return model.loss(y, scores), accuracy

    of_step = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

    def step(weights: Any, x: Any, y: Any) -> Any:
        (loss, accuracy), gradients = of_step(weights, x, y)
        return loss, accuracy, [np.asarray(gradient) for gradient in gradients]

    return step


def _torch_step(model: Any) -> Any:
    """The same with Keras on torch, with a metric of Keras', as in its guide on training loops."""
    import keras
    import torch

    torch.set_num_threads(1)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(weights: Any, x: Any, y: Any) -> Any:
        for variable, value in zip(model.trainable_variables, weights, strict=True):
            variable.value.data = torch.from_numpy(value)
            variable.value.grad = None
        labels = torch.from_numpy(y)
        scores = model(torch.from_numpy(x), training=True)
        loss = model.loss(labels, scores)
        loss.backward()
        accuracy.reset_state()
        accuracy.update_state(labels, scores)
        return loss.detach(), accuracy.result(), [variable.value.grad.numpy() for variable in model.trainable_variables]

    return step


def _convolutions() -> Any:
    """The model of Keras' example "Simple MNIST convnet"."""
    import keras
    from keras import layers

    parts: list[Any] = [keras.Input((28, 28, 1))]
    for filters in (32, 64):
        parts += [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D(2)]
    model = keras.Sequential([*parts, layers.Flatten(), layers.Dropout(0.5), layers.Dense(CLASSES)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def fit(backend: str, workers: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of an epoch's step, in each round: of Keras' `fit` in this process, and of ours on these workers."""
    environment = ENVIRONMENT | {"KERAS_BACKEND": backend}
    os.environ.update(environment)
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    import pscluster.keras

    x, y = images(steps * BATCH)
    with (
        LocalCluster(2, workers, transport="tcp", env=environment, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        plain = _convolutions()
        with strategy.scope():
            served = pscluster.keras.serve(_convolutions)
        coordinator = ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset((x, y)).shuffle(seed=0).batch(BATCH)

        def of_keras() -> None:
            plain.fit(x, y, batch_size=BATCH, verbose=0)

        def ours() -> None:
            coordinator.fit(served, data, verbose=0)

        measured: dict[str, list[float]] = {"Keras": [], "ours": [], "Keras, cpu": []}
        for number in range(rounds + 1):
            for name, epoch in (("Keras", of_keras), ("ours", ours))[:: 1 if number % 2 else -1]:
                begin = time.process_time()
                seconds = timed(epoch)
                if number:
                    measured[name].append(seconds / steps)
                    if name == "Keras":
                        measured["Keras, cpu"].append((time.process_time() - begin) / steps)
        return measured


def main() -> None:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # torch imports the library's `profile`, not ours
    handlers: Handlers = {"jax": jax, "keras": keras, "fit": fit}
    serve(lambda _: (handlers, {"pscluster": __version__}))


if __name__ == "__main__":
    main()
