"""A run whose process is killed while it commits a checkpoint of the servers' variables goes on as if it were not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pscluster.launch import Result

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import os, signal, sys

import numpy as np
from pscluster.coordinator import Variable, optimizers
from pscluster.core import fault_points
from pscluster.launch import Checkpoint, CheckpointConfig, RunConfig, Trainer, barrier, get_context, report
from pscluster.launch import get_checkpoint


def variables(_):
    return {"w": Variable(np.zeros(8), name="w"), "adam": optimizers.Adam(0.1)}


def train(folders):
    made, rank, first = get_context().variables, get_context().world_rank, 0
    if (checkpoint := get_checkpoint()) is not None:
        first = checkpoint.get_metadata()["epochs"]
    for epoch in range(first, 5):
        barrier()
        made["adam"].apply_gradients([(np.full(8, 1.0 + epoch), made["w"])])
        mine = None
        if rank == 0:
            folder = os.path.join(folders, str(epoch))
            os.makedirs(folder, exist_ok=True)
            mine = Checkpoint.from_variables(folder)
            mine.set_metadata({"epochs": epoch + 1})
        report({"epoch": epoch}, mine)
    barrier()
    return made["adam"].iterations, made["w"].numpy().tolist()


if __name__ == "__main__":
    storage, name, point = sys.argv[1:]
    reached = []

    def die_at_the_second(reached_point):
        reached.append(reached_point)
        if reached.count(point) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    fault_points.on_reach = die_at_the_second
    run = RunConfig(name, storage, checkpoint=CheckpointConfig(num_to_keep=1))
    Trainer(train, f"{storage}-{name}", run=run, variables=variables).fit()
"""

POINTS = ("coordinator.parts.after", "coordinator.index.after")


def test_kills_while_a_checkpoint_is_committed(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)

    def start(name: str, point: str) -> int:
        command = [sys.executable, str(script), str(tmp_path / "runs"), name, point]
        return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode

    assert start("whole", "never") == 0
    assert [start("cut", point) for point in POINTS] == [-signal.SIGKILL] * len(POINTS)
    assert len(Result.load(tmp_path / "runs" / "cut").metrics_history) == len(POINTS)
    assert start("cut", "never") == 0
    whole, cut = (Result.load(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert cut.return_values == whole.return_values
    assert [metrics["epoch"] for metrics in cut.metrics_history] == [0, 1, 2, 3, 4]
    assert cut.checkpoint is not None
    assert cut.checkpoint.has_variables
