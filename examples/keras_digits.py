"""Train a Keras 3 model on handwritten digits, with its weights on parameter servers; save it for plain Keras.

KERAS_BACKEND=jax pscluster run --ps 2 --workers 2 examples/keras_digits.py digits.keras
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import pscluster.keras
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, callbacks

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
TARGET = 0.85


def load() -> tuple[Any, Any]:
    with np.load(DATA) as file:
        return (file["images"].astype(np.float32).reshape(-1, 8, 8, 1) - 8) / 16, file["labels"].astype(np.int32)


def model_fn() -> Any:
    import keras
    from keras import layers

    hidden = [layers.Conv2D(16, 3, activation="relu"), layers.BatchNormalization(), layers.Flatten()]
    model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, layers.Dropout(0.2), layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    images, labels = load()
    with ParameterServerStrategy(TFConfigClusterResolver()) as strategy:
        with strategy.scope():
            served = pscluster.keras.serve(model_fn)
        coordinator = ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset((images[:1400], labels[:1400])).shuffle(seed=1).batch(64)
        test = coordinator.distribute_dataset((images[1400:], labels[1400:])).batch(64)
        stop = callbacks.EarlyStopping(monitor="val_loss", patience=3)
        coordinator.fit(served, data, epochs=20, validation_data=test, callbacks=[stop])
        accuracy = coordinator.evaluate(served, test)["accuracy"]
        for path in sys.argv[1:]:
            served.to_keras().save(path)
    print(f"test accuracy {accuracy:.3f}")
    if accuracy < TARGET:
        sys.exit(f"that is less than the {TARGET} that this example promises")


if __name__ == "__main__":
    main()
