"""Train a network of JAX on handwritten digits, with its parameters on parameter servers.

pscluster run --ps 2 --workers 2 examples/jax_digits.py
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pscluster.jax
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, optimizers

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
TARGET = 0.9


def load() -> tuple[Any, Any]:
    with np.load(DATA) as file:
        return (file["images"].astype(np.float32) - 8) / 16, file["labels"].astype(np.int32)


def initial() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    weights = [jax.random.normal(key, shape) / 8 for key, shape in zip(keys, [(64, 128), (128, 10)], strict=True)]
    return [{"w": w, "b": jnp.zeros(w.shape[1])} for w in weights]


def logits_of(params: Any, images: Any) -> Any:
    first, last = params
    return jax.nn.relu(images @ first["w"] + first["b"]) @ last["w"] + last["b"]


def loss_of(params: Any, images: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


loss_and_grads = jax.jit(jax.value_and_grad(loss_of))


def main() -> None:
    images, labels = load()
    with ParameterServerStrategy(TFConfigClusterResolver()) as strategy:
        rate = pscluster.jax.schedule(optax.cosine_decay_schedule(0.01, 400), steps=400)
        with strategy.scope():
            served = pscluster.jax.serve(initial(), optimizers.Adam(rate, epsilon=1e-8))

        def step(batch: Any) -> float:  # runs on a worker
            loss, grads = loss_and_grads(served.read(), *batch)
            served.apply(grads)
            return float(loss)

        coordinator = ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset((images[:1400], labels[:1400])).shuffle(seed=1).batch(64)
        coordinator.fit(step, data, epochs=10)
        accuracy = float((logits_of(served.read(), images[1400:]).argmax(axis=1) == labels[1400:]).mean())
    print(f"test accuracy {accuracy:.3f}")
    if accuracy < TARGET:
        sys.exit(f"that is less than the {TARGET} that this example promises")


if __name__ == "__main__":
    main()
