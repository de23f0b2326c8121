"""Checkpoints that are restored before the script has made its variables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    Checkpoint,
    CheckpointManager,
    ClusterCoordinator,
    EmbeddingTable,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    metrics,
    optimizers,
)
from pscluster.core.errors import CheckpointError, CheckpointMismatchError

ONES = np.ones((7, 2), np.float32)


def make(strategy: ParameterServerStrategy, *, optimizer_first: bool = False) -> tuple[Any, ...]:
    """A model and what trains it, in either order."""
    with strategy.scope():
        optimizer = optimizers.Adam(0.1, name="adam") if optimizer_first else None
        dense = Variable(np.zeros((7, 2), np.float32), name="dense")
        table = EmbeddingTable(2, capacity=20, name="table")
        mean = metrics.Mean(name="mean")
        return dense, table, mean, optimizer or optimizers.Adam(0.1, name="adam")


def step(dense: Variable, table: EmbeddingTable, mean: metrics.Mean, optimizer: optimizers.Optimizer) -> list[Any]:
    """Train, and return all that it has made of the model."""
    optimizer.apply_gradients([(ONES, dense), (IndexedSlices(ONES[:1], [5]), table)])
    mean.update_state([1.0, dense.numpy()[0, 0]])
    slot = optimizer.slot(dense, "m").numpy()
    return [dense.numpy().tolist(), slot.tolist(), table.lookup([5]).tolist(), float(mean.result())]


@pytest.mark.parametrize("optimizer_first", [False, True], ids=["variables first", "optimizer first"])
def test_before_they_are_made(cluster: LocalCluster, tmp_path: Path, optimizer_first: bool) -> None:
    """Values, slots and tables come with the variables, or with the optimizer, and the next step does the same."""
    with ParameterServerStrategy(cluster) as strategy, CheckpointManager(str(tmp_path), strategy=strategy) as manager:
        made = make(strategy)
        step(*made)
        strategy.save_progress(epoch=3)
        path = manager.save().result()
        expected = step(*made)
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(2), resume=False) as strategy:
        Checkpoint(strategy).read(path)
        assert strategy.progress == {"epoch": 3}
        made = make(strategy, optimizer_first=optimizer_first)
        assert made[3].iterations == 1
        assert ClusterCoordinator(strategy).schedule(step, args=made).fetch(TIMEOUT) == expected
        strategy.delete_variable(made[0])
        with strategy.scope():
            assert not Variable(np.zeros((7, 2), np.float32), name="dense").numpy().any()  # another one


def test_what_can_not_be_restored_later(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another shape is refused, and nothing is made; values that may have changed are not taken back."""
    with ParameterServerStrategy(cluster) as strategy:
        made = make(strategy)
        step(*made)
        path = Checkpoint(strategy).write(str(tmp_path / "saved"))
        dense = made[0].numpy()
    with ParameterServerStrategy(cluster, resume=False) as strategy, strategy.scope():
        Checkpoint(strategy).read(path)
        with pytest.raises(CheckpointMismatchError, match=r"'dense' is float32\[2\], but float32\[7, 2\] in"):
            Variable(np.zeros(2, np.float32), name="dense")
        assert strategy.variables == []
        w = Variable(np.zeros((7, 2), np.float32), name="dense")
        assert (w.numpy() == dense).all()
        w.assign_add(ONES)
        adam = optimizers.Adam(0.1, name="adam")
        assert (w.numpy() == dense + 1).all()
        assert adam.iterations == 0
        assert "optimizer 'adam' begins with new slots" in caplog.text
        shutil.rmtree(path)
        with pytest.raises(CheckpointError, match=r"part-1-of-2\.safetensors"):
            EmbeddingTable(2, capacity=20, name="table")
        Variable(0, name="not in it")
        assert [variable.name for variable in strategy.variables] == ["dense", "not in it"]
