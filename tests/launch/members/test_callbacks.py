"""ReportCheckpoint in a training loop of our own; `tests/frameworks/test_trainer_keras.py` has Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.coordinator import Checkpoint as Variables
from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable, optimizers
from pscluster.core.errors import MisuseError
from pscluster.launch import (
    ReportCheckpoint,
    ReportCheckpointCallback,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    get_checkpoint,
)

pytestmark = pytest.mark.timeout(180)


def train(config: dict[str, Any]) -> list[float]:
    """Train by `coordinator.fit`, from the newest checkpoint if there is one."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            w, adam = Variable(np.zeros(2), name="w"), optimizers.Adam(0.1)
        coordinator, done = ClusterCoordinator(strategy), 0
        if (saved := get_checkpoint()) is not None:
            with saved.as_directory() as folder:
                Variables(strategy).read(folder, progress=False)
            done = saved.get_metadata()["epochs"]

        def step(batch: Any) -> dict[str, float]:
            adam.apply_gradients([(np.full(2, batch.mean()), w)])
            return {"loss": float(batch.mean()), "other": 1.0}

        data = coordinator.distribute_dataset(np.arange(1.0, 9.0)).batch(2)
        callback = ReportCheckpoint(**config["options"])
        coordinator.fit(step, data, epochs=config["epochs"] - done, callbacks=[callback], verbose=0)
        values: list[float] = w.numpy().tolist()
        return values


def fit(folder: Path, name: str, epochs: int, **options: Any) -> Result:
    config = {"epochs": epochs, "options": options}
    return Trainer(train, config, ScalingConfig(workers=0), RunConfig(name, str(folder))).fit()


def test_a_report_and_a_checkpoint_with_each_epoch(tmp_path: Path) -> None:
    """A run that goes on begins with the values and slots of the checkpoint."""
    whole = fit(tmp_path, "whole", 4)
    assert [metrics["loss"] for metrics in whole.metrics_history] == [4.5] * 4
    assert whole.checkpoint is not None
    assert whole.checkpoint.get_metadata() == {"epochs": 4, "steps": 0}
    assert len(whole.best_checkpoints) == 4
    fit(tmp_path, "parts", 2)
    assert fit(tmp_path, "parts", 4).return_values == whole.return_values


def test_what_is_reported_and_when(tmp_path: Path) -> None:
    result = fit(tmp_path, "steps", 2, metrics={"train_loss": "loss"}, report_freq=2, checkpoint_freq=3)
    assert [set(metrics) for metrics in result.metrics_history] == [{"train_loss"}] * 4
    ((checkpoint, _),) = result.best_checkpoints
    assert checkpoint.get_metadata() == {"epochs": 1, "steps": 2}
    none = fit(tmp_path, "none", 1, metrics=["other"], checkpoint_freq=0)
    assert (none.metrics, none.checkpoint) == ({"other": 1.0}, None)


def test_what_is_wrong(tmp_path: Path) -> None:
    assert ReportCheckpointCallback is ReportCheckpoint
    with pytest.raises(ValueError, match=r"report_freq is 0; it must be a whole number, 1 or more, or .epoch."):
        ReportCheckpoint(report_freq=0)
    with pytest.raises(ValueError, match="checkpoint_freq is -1"):
        ReportCheckpoint(checkpoint_freq=-1)
    with pytest.raises(TypeError, match="metrics is the string 'loss': give a list of names"):
        ReportCheckpoint("loss")
    with pytest.raises(TrainingFailedError, match="can't report 'accuracy': the logs have loss, other"):
        fit(tmp_path, "wrong", 1, metrics=["accuracy"])
    with pytest.raises(MisuseError, match=r"report\(\) is for the function that Trainer.fit\(\) runs"):
        ReportCheckpoint(checkpoint_freq=0).on_epoch_end(0, {"loss": 1.0})
