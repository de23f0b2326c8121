"""Every example is visited once per epoch, whatever dies: a variable with an element for each example counts visits."""

from __future__ import annotations

import random
import signal
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import in_one_process
from tests.faults.armed import armed_cluster
from tests.faults.steps import note, wait_for
from tests.faults.test_coordinator_death import started
from tests.waiting import TIMEOUT

from pscluster.coordinator.api import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    metrics,
)
from pscluster.coordinator.data import dataset_progress

EXAMPLES = 40_000

DEATHS = [
    f"worker/{point}=kill@{nth}"
    for point, nth in {
        "worker.define.after": 3,
        "worker.run.before": 10,
        "client.update.before": 20,
        "client.exchange.after": 30,
        "client.update.after": 40,
        "worker.run.after": 40,
        "worker.result.before": 50,
        "worker.result.after": 60,
    }.items()
]


@pytest.mark.timeout(300)
def test_workers_die_at_named_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty thousand numbered examples and three epochs, while positions are written and keys forgotten all the
    time."""
    monkeypatch.setattr(dataset_progress, "SAVE_SECONDS", 0.2)
    with (
        armed_cluster(tmp_path / "faults", 2, 2, durability="log", revive=True) as armed,
        ParameterServerStrategy(armed.cluster, FixedShardsPartitioner(2), connect_timeout=TIMEOUT) as strategy,
    ):
        with strategy.scope():
            counts = Variable(np.zeros(EXAMPLES, np.int64), name="visited")
        coordinator = ClusterCoordinator(strategy, max_attempts=len(DEATHS) + 1)
        armed.arm(*DEATHS)

        def step(part: Any) -> int:
            seen = 0
            for numbers in part:
                counts.scatter_add(IndexedSlices(np.ones(len(numbers), np.int64), numbers))
                seen += len(numbers)
            return seen

        data = coordinator.distribute_dataset(np.arange(EXAMPLES)).shuffle(seed=1).batch(64).parts(3)
        values = [coordinator.schedule(step, args=(part,)) for part in data.repeat(3)]
        coordinator.join(TIMEOUT)
        armed.until_struck(*DEATHS, calls=False)
        assert sum(coordinator.fetch(values, TIMEOUT)) == 3 * EXAMPLES
        assert set(counts.numpy().tolist()) == {3}


SCRIPT = """
    import sys
    import numpy as np
    from pscluster.coordinator import (
        CheckpointManager, ClusterCoordinator, FixedShardsPartitioner, IndexedSlices, ParameterServerStrategy,
        TFConfigClusterResolver, Variable,
    )
    from pscluster.coordinator.data import dataset_progress
    from tests.faults.steps import note, wait_for

    folder, examples, stop, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    dataset_progress.SAVE_SECONDS = seconds
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        counts = Variable(np.zeros(examples, np.int64), name="visited")
    coordinator = ClusterCoordinator(strategy)
    manager = CheckpointManager(folder + "/checkpoints", strategy=strategy)
    found = manager.restore_or_initialize()

    def step(part):
        for numbers in part:
            counts.scatter_add(IndexedSlices(np.ones(len(numbers), np.int64), numbers))

    data = coordinator.distribute_dataset(np.arange(examples), name="numbers").shuffle(seed=1).batch(10).repeat(3)
    note(folder, f"begun-{found.value}", f"{data.epoch} {data.visited}")
    for number, part in enumerate(data):
        value = coordinator.schedule(step, args=(part,))
        if stop and number == stop:
            value.fetch()
            manager.save()
            note(folder, "enough")
            wait_for(folder, "never")
    coordinator.join()
    note(folder, "result", f"{data.epoch} " + " ".join(map(str, sorted(set(counts.numpy().tolist())))))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seconds", [0.05, 1000.0], ids=["positions written", "positions of a checkpoint only"])
def test_the_coordinator_dies_in_the_middle_of_an_epoch(tmp_path: Path, seconds: float) -> None:
    """The servers survive: the next coordinator repeats what it does not know to be done, and that counts once."""
    script, examples = tmp_path / "train.py", 2000
    script.write_text(textwrap.dedent(SCRIPT))
    with LocalCluster(2, 2, log_level="ERROR", durability="log") as cluster:
        with started(cluster, script, tmp_path, examples, random.Random(5).randrange(250, 350), seconds) as first:
            assert wait_for(str(tmp_path), "begun-nothing") == "0 0"
            wait_for(str(tmp_path), "enough")
            first.send_signal(signal.SIGKILL)
        with started(cluster, script, tmp_path, examples, 0, seconds) as second:
            assert second.wait(TIMEOUT) == 0
        wait_for(str(tmp_path), "begun-live")
        assert wait_for(str(tmp_path), "result") == "3 3"


@pytest.mark.timeout(180)
def test_all_die_and_a_checkpoint_is_restored(tmp_path: Path) -> None:
    """On another cluster, in the middle of the second epoch: examples that the checkpoint records are not visited
    again."""
    script, examples = tmp_path / "train.py", 2000
    script.write_text(textwrap.dedent(SCRIPT))
    stop = 310
    with (
        LocalCluster(2, 2, log_level="ERROR", durability="none") as cluster,
        started(cluster, script, tmp_path, examples, stop, 1000.0),
    ):
        wait_for(str(tmp_path), "enough")
    (tmp_path / "enough").unlink()
    with (
        LocalCluster(3, 1, log_level="ERROR", durability="none") as cluster,
        started(cluster, script, tmp_path, examples, 0, 1000.0) as second,
    ):
        assert second.wait(TIMEOUT) == 0
    epoch, visited = map(int, wait_for(str(tmp_path), "begun-checkpoint").split())
    assert examples < epoch * examples + visited <= (stop + 1) * 10
    assert wait_for(str(tmp_path), "result") == "3 3"
    note(str(tmp_path), "never")


@pytest.mark.timeout(180)
def test_evaluation_while_workers_die(tmp_path: Path) -> None:
    """With workers killed before, in and after its functions, each example counts once, bit for bit as in one
    process."""
    deaths = [
        "worker/worker.define.after=kill@3",
        "worker/worker.run.before=kill@5",
        "worker/worker.run.after=kill@9",
        "worker/worker.result.before=kill@12",
    ]
    with (
        armed_cluster(tmp_path / "faults", 2, 2, revive=True) as armed,
        ParameterServerStrategy(armed.cluster, FixedShardsPartitioner(2), connect_timeout=TIMEOUT) as strategy,
    ):
        rng = np.random.default_rng(0)
        with strategy.scope():
            w = Variable(rng.normal(size=(64, 3)).astype(np.float32), name="w")
        coordinator = ClusterCoordinator(strategy, max_attempts=len(deaths) + 1)
        labels, x = rng.integers(0, 3, 20_000), rng.normal(size=(20_000, 64)).astype(np.float32)
        data = coordinator.distribute_dataset((labels, x)).shuffle(seed=2).batch(32)
        armed.arm(*deaths)

        def step(batch: Any) -> dict[str, Any]:
            labels, x = batch
            scores = x @ w.numpy()
            return {"accuracy": (labels, scores), "scores": (scores,), "count": (np.ones(len(labels)),)}

        named = {
            "accuracy": metrics.SparseCategoricalAccuracy(),
            "scores": metrics.Mean(),
            "count": metrics.Sum(),
        }
        results = coordinator.evaluate(step, data, named, shards=60, timeout=TIMEOUT)
        armed.until_struck(*deaths, calls=False)
        assert results == in_one_process(step, named, data, 60)
        assert results["count"] == 20_000
