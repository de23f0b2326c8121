"""A training that is killed or stopped, and started again: each example once per epoch, from the step it had
reached."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest
from tests.faults.armed import armed_cluster
from tests.faults.arming.faults import environment
from tests.faults.steps import wait_for
from tests.faults.support import stopped
from tests.faults.test_coordinator_death import started
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import LocalCluster

EXAMPLES, BATCH = 2000, 10

# How long a server is unreachable until a training that is to end no longer waits for it.
UNREACHABLE_SECONDS = {
    f"pscluster.coordinator.{module}.UNREACHABLE_SECONDS": 0.5 for module in ("job.context", "training.fit")
}

SCRIPT = """
    import sys
    import time
    import numpy as np
    from pscluster.coordinator import (
        ClusterCoordinator, FixedShardsPartitioner, IndexedSlices, ParameterServerStrategy, TFConfigClusterResolver,
        Variable, callbacks,
    )
    from tests.faults.steps import note, wait_for

    folder, hold, save_freq = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        counts = Variable(np.zeros(2000, np.int64), name="visited")
    coordinator = ClusterCoordinator(strategy)

    class Holds(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            note(folder, f"begun-{backup.restored.value}-{epoch}", str(2000 * data.epoch + data.visited))

        def on_train_batch_end(self, batch, logs=None):
            if hold and self.training.epoch == 1 and batch >= hold:
                note(folder, "enough")
                if hold < 1000:
                    wait_for(folder, "go on")
                    if "callback" in sys.argv:
                        counts.numpy()

    takes_long = "long" in sys.argv  # each step

    def step(numbers):
        if takes_long:
            time.sleep(0.005)
        counts.scatter_add(IndexedSlices(np.ones(len(numbers), np.int64), numbers))
        return float(len(numbers))

    data = coordinator.distribute_dataset(np.arange(2000), name="numbers").shuffle(seed=1).batch(10)
    backup = callbacks.BackupAndRestore(folder + "/backup", save_freq=save_freq or "epoch")
    history = coordinator.fit(
        step, data, epochs=3, steps_per_execution=8 if takes_long else "auto", callbacks=[backup, Holds()]
    )
    found = sorted(set(counts.numpy().tolist()))
    note(folder, "result", f"{data.epoch} {found} {history.epoch} {history.history}")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The training's script."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def check_result(tmp_path: Path, visited: int | None, how: str) -> None:
    """Check that it resumed in the second epoch, after at least this many examples, and visited each three times."""
    begun = int(wait_for(str(tmp_path), f"begun-{how}-1"))
    assert EXAMPLES + (visited or 0) <= begun <= 2 * EXAMPLES, "functions that ran when it was killed are done, too"
    assert not list(tmp_path.glob(f"begun-{how}-0"))
    assert wait_for(str(tmp_path), "result") == "3 [3] [1, 2] {'loss': [10.0, 10.0]}"


@pytest.mark.timeout(180)
def test_the_coordinator_is_killed(script: Path, tmp_path: Path) -> None:
    """Its successor repeats what it does not know to be done, in the same pieces, and each counts once."""
    with LocalCluster(2, 2, log_level="ERROR", durability="log") as cluster:
        with started(cluster, script, tmp_path, 60, 0) as first:
            wait_for(str(tmp_path), "enough")
            first.send_signal(signal.SIGKILL)
        with started(cluster, script, tmp_path, 0, 0) as second:
            assert second.wait(TIMEOUT) == 0
        check_result(tmp_path, None, "live")


@pytest.mark.timeout(180)
def test_all_are_killed(script: Path, tmp_path: Path) -> None:
    """On another cluster it resumes at the step of the newest checkpoint, not at the epoch."""
    with (
        LocalCluster(2, 2, log_level="ERROR", durability="none") as cluster,
        started(cluster, script, tmp_path, 80, 25),
    ):
        wait_for(str(tmp_path), "enough")
        # Every 25 steps: the one after the first 200 + 75 is written in the background.
        until(lambda: list(tmp_path.glob("backup/ckpt-00001[1-9]/index.json")), "it has a checkpoint of this epoch")
    with (
        LocalCluster(3, 1, log_level="ERROR", durability="none") as cluster,
        started(cluster, script, tmp_path, 0, 0) as second,
    ):
        assert second.wait(TIMEOUT) == 0
    check_result(tmp_path, 75 * BATCH, "checkpoint")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_is_asked_to_end(script: Path, tmp_path: Path, signum: signal.Signals) -> None:
    """Running functions end, a checkpoint is made, and the process ends as by the signal; the next one resumes."""
    with LocalCluster(2, 2, log_level="ERROR", durability="none") as cluster:
        errors = tmp_path / "errors"
        # Few functions that take long are scheduled ahead. Else the epoch might end before its first results are seen.
        with started(cluster, script, tmp_path, 30, 0, "long", errors=errors) as first:
            wait_for(str(tmp_path), "enough")
            first.send_signal(signum)
            until(lambda: f"{signum.name}: training stops" in errors.read_text(), "it has heard")
            (tmp_path / "go on").touch()
            assert first.wait(TIMEOUT) == 128 + signum
        assert not (tmp_path / "result").exists()
        with started(cluster, script, tmp_path, 0, 0) as second:
            assert second.wait(TIMEOUT) == 0
    check_result(tmp_path, 30 * BATCH, "checkpoint")


@pytest.mark.timeout(180)
def test_it_is_asked_twice(script: Path, tmp_path: Path) -> None:
    """It ends immediately, whatever it is waiting for."""
    with (
        LocalCluster(1, 1, log_level="ERROR", durability="none") as cluster,
        started(cluster, script, tmp_path, 30, 0) as first,
    ):
        wait_for(str(tmp_path), "enough")
        first.send_signal(signal.SIGINT)
        while first.poll() is None:  # two pending signals would merge into one
            first.send_signal(signal.SIGINT)
        assert first.wait(TIMEOUT) == 128 + signal.SIGINT
        assert not (tmp_path / "result").exists()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("waiting", ["function", "callback", "checkpoint"])
def test_the_cluster_is_gone(script: Path, tmp_path: Path, waiting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is asked to end when no checkpoint can be made any more, it does not wait for its servers like a job does.

    This holds whatever waits for them: a function, a callback in the script's thread, or a checkpoint in the
    background.
    """
    for name, value in environment(tmp_path / "faults", seconds=UNREACHABLE_SECONDS).items():  # for the script, too
        monkeypatch.setenv(name, value)
    fault = "chief/coordinator.mark.after=stop@1"
    with armed_cluster(tmp_path / "faults", 1, 1, durability="none") as armed:
        if waiting == "checkpoint":
            armed.arm(fault)
        with started(armed.cluster, script, tmp_path, 30, 0, waiting) as first:
            if waiting == "checkpoint":
                until(lambda: stopped(first.pid), f"{fault} strikes")
            else:
                wait_for(str(tmp_path), "enough")
            os.kill(armed.cluster.pids["ps", 0], signal.SIGKILL)
            first.send_signal(signal.SIGTERM)
            (tmp_path / "go on").touch()
            first.send_signal(signal.SIGCONT)
            assert first.wait(TIMEOUT) == 128 + signal.SIGTERM
        assert not (tmp_path / "result").exists()
