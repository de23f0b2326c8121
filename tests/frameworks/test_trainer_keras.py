"""ReportCheckpoint in the training loop of Keras, on torch: what it reports, and how another run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.launch import (
    ReportCheckpoint,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    get_checkpoint,
    get_dataset_shard,
)
from pscluster.launch.members.callbacks import KERAS_FILE

pytestmark = pytest.mark.timeout(300)


def train(config: dict[str, Any]) -> list[int]:
    """Learn y = 2x, as the guide does."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    first = 0
    if (saved := get_checkpoint()) is not None:
        first = saved.get_metadata()["epochs"]
        with saved.as_directory() as folder:
            model = keras.saving.load_model(Path(folder, KERAS_FILE))
    else:
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.3), loss="mse")
    (rows,) = get_dataset_shard().iter_batches(1000)
    history = model.fit(
        rows["x"],
        rows["y"],
        batch_size=10,
        epochs=config["epochs"],
        initial_epoch=first,
        validation_split=0.1,
        callbacks=[ReportCheckpoint(**config["options"])],
        verbose=0,
    )
    assert model.predict(rows["x"][:2], verbose=0, callbacks=[ReportCheckpoint()]).shape == (2, 1)
    epochs: list[int] = history.epoch
    return epochs


def fit(folder: Path, epochs: int, **options: Any) -> Result:
    x = (np.arange(200, dtype=np.float32) / 200)[:, None]
    return Trainer(
        train,
        {"epochs": epochs, "options": options},
        ScalingConfig(workers=2),
        RunConfig("keras", str(folder)),
        datasets={"train": {"x": x, "y": 2 * x}},
        backend="torch",
    ).fit()


def test_reports_and_checkpoints_of_keras(tmp_path: Path) -> None:
    result = fit(tmp_path, 3)
    assert len(result.metrics_history) == 3
    assert set(result.metrics) == {"loss", "val_loss"}
    assert [saved.get_metadata()["epochs"] for saved, _ in result.best_checkpoints] == [3, 2, 1]
    more = fit(tmp_path, 6, metrics=["loss"])
    assert more.return_values == [[3, 4, 5]] * 2
    losses = [metrics["loss"] for metrics in more.metrics_history]
    assert losses == sorted(losses, reverse=True), "it goes on from the checkpoint"
    assert set(more.metrics) == {"loss"}
