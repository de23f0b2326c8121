"""`schedule(key=)`: named pieces of work, which count once, whichever coordinators schedule them and how often."""

from __future__ import annotations

import random
import signal
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tests.faults.steps import note, wait_for
from tests.faults.support import running_job
from tests.faults.test_coordinator_death import started
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import (
    CheckpointManager,
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
)
from pscluster.coordinator.checkpoints import restore_plan
from pscluster.core.errors import MisuseError

SCRIPT = """
    import sys, time
    import numpy as np
    from pscluster.coordinator import (
        ClusterCoordinator, FixedShardsPartitioner, IndexedSlices, ParameterServerStrategy, TFConfigClusterResolver,
        Variable, optimizers,
    )
    from tests.faults.steps import note, wait_for

    folder, total, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        count = Variable(np.zeros((4, 2)), name="count")
        table = Variable(np.zeros((total, 3)), name="table")
        momentum = optimizers.SGD(1.0, momentum=0.5, name="momentum")
        trained = Variable(np.zeros(4, np.float32), name="trained")
    coordinator = ClusterCoordinator(strategy)

    def step(number):
        count.assign_add(np.ones((4, 2)))
        time.sleep(0.01)
        table.scatter_add(IndexedSlices(np.ones((1, 3)), [number]))
        momentum.apply_gradients([(np.ones(4, np.float32), trained)])

    values = [coordinator.schedule(step, args=(number,), key=f"step {number}") for number in range(total)]
    if not strategy.resumed:
        coordinator.fetch(values[:stop])
        note(folder, "enough")
        wait_for(folder, "never")
    coordinator.join()
    found = [set(count.numpy().reshape(-1).tolist()), set(table.numpy().reshape(-1).tolist()), {momentum.iterations}]
    note(folder, "result", str(strategy.resumed) + " ".join(map(str, found)))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("servers_die", [False, True], ids=["alone", "with all servers"])
def test_what_was_done_before_the_coordinator_died_counts_once(tmp_path: Path, servers_die: bool) -> None:
    """Its successor does not know what had ended or was running, and schedules everything again."""
    total = 60
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with LocalCluster(2, 2, log_level="ERROR", durability="log") as cluster:
        with started(cluster, script, tmp_path, total, random.Random(3).randrange(10, 40)) as first:
            wait_for(str(tmp_path), "enough")
            first.send_signal(signal.SIGKILL)
        if servers_die:
            for index in range(2):
                cluster.wait_restarted("ps", index, cluster.kill("ps", index, timeout=TIMEOUT), timeout=TIMEOUT)
        with started(cluster, script, tmp_path, total, 0) as second:
            assert second.wait(TIMEOUT) == 0
        assert wait_for(str(tmp_path), "result") == f"True{{{total}.0}} {{1.0}} {{{total}}}"


def test_a_key_counts_once_until_it_is_forgotten() -> None:
    """A function that ended, or failed, under a key changes nothing when it is run again."""
    with running_job(2, 2) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(4), name="count")

        def step(fail: bool = False) -> int:
            count.assign_add(np.ones(4))
            if fail:
                raise ValueError("after its update")
            return 7

        def counted() -> set[float]:
            return set(count.numpy().tolist())

        schedule = job.coordinator.schedule
        assert schedule(step, key="one").fetch(TIMEOUT) == 7
        assert schedule(step, key="one").fetch(TIMEOUT) == 7, "it runs, and changes nothing"
        assert counted() == {1.0}
        with pytest.raises(ValueError, match="after its"):
            schedule(step, args=(True,), key="two").fetch(TIMEOUT)
        with pytest.raises(ValueError, match="after its"):
            job.coordinator.join(TIMEOUT)
        schedule(step, key="two").fetch(TIMEOUT)
        assert counted() == {2.0}
        schedule(step).fetch(TIMEOUT)
        assert counted() == {3.0}, "without a key every function counts"
        job.coordinator.forget_keys(["one", "never seen"])

        def forgotten() -> bool:
            schedule(step, key="one").fetch(TIMEOUT)
            return counted() == {4.0}

        until(forgotten, "the servers have been told")
        schedule(step, key="two").fetch(TIMEOUT)
        assert counted() == {4.0}, "the other one is remembered"


def test_a_key_names_one_piece_of_work(tmp_path: Path) -> None:
    """Two functions at a time under one key are refused; so are keys that are not strings."""
    with running_job(1, 1) as job:
        folder = str(tmp_path)
        held = job.coordinator.schedule(wait_for, args=(folder, "go"), key="held")
        with pytest.raises(MisuseError, match="a function with the key 'held' is already scheduled and has not ended"):
            job.coordinator.schedule(wait_for, args=(folder, "go"), key="held")
        with pytest.raises(MisuseError, match=r"functions with the keys \['held'\] have not ended: call join"):
            job.coordinator.forget_keys(["other", "held"])
        note(folder, "go")
        held.fetch(TIMEOUT)
        job.coordinator.schedule(wait_for, args=(folder, "go"), key="held").fetch(TIMEOUT)
        with pytest.raises(TypeError, match="a key is a string, not an int"):
            job.coordinator.schedule(wait_for, args=(folder, "go"), key=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"write forget_keys\(\[key\]\)"):
            job.coordinator.forget_keys("held")


def test_after_a_restored_checkpoint_only_what_it_lacks_is_done_again(tmp_path: Path) -> None:
    """Work done before the checkpoint counts once; later updates went with the values that it replaced."""
    with running_job(2, 1) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(4), name="count")

        def step() -> None:
            count.assign_add(np.ones(4))

        def twice(*keys: str) -> set[float]:
            for key in (*keys, *keys):
                job.coordinator.schedule(step, key=key).fetch(TIMEOUT)
            return set(count.numpy().tolist())

        manager = CheckpointManager(str(tmp_path), strategy=job.strategy)
        assert twice("before") == {1.0}
        assert twice("before and forgotten") == {2.0}
        job.coordinator.forget_keys(["before and forgotten"])
        manager.save()
        assert twice("after") == {3.0}
        manager.restore()
        assert set(count.numpy().tolist()) == {2.0}
        assert twice("before", "after") == {3.0}
        job.coordinator.schedule(step, key="before and forgotten").fetch(TIMEOUT)
        assert set(count.numpy().tolist()) == {4.0}, "it was not to be scheduled again"
        manager.restore(progress=False)
        assert twice("before", "after") == {4.0}, "what was done before is a part of the progress"


def test_many_keys_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that exceed a request are sent in pieces, and are complete nonetheless."""
    monkeypatch.setattr(restore_plan, "KEYS_PER_REQUEST", 16)
    with running_job(2, 1, shards=2) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(4), name="count")

        def add() -> set[float]:
            for index in range(40):
                job.coordinator.schedule(count.assign_add, args=(np.ones(4),), key=f"step {index}")
            job.coordinator.join(TIMEOUT)
            return set(count.numpy().tolist())

        with CheckpointManager(str(tmp_path), strategy=job.strategy) as manager:
            assert add() == {40.0}
            manager.save()
            count.assign(np.zeros(4))
            manager.restore()
            assert add() == {40.0}
            manager.restore(progress=False)
            assert add() == {80.0}


def test_workers_that_die(tmp_path: Path) -> None:
    """A function with a key that another worker runs again counts once, like one without a key."""
    with running_job(2, 2) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(4), name="count")
        folder = str(tmp_path)

        def step(index: int) -> None:
            count.assign_add(np.ones(4))
            note(folder, f"begun-{index}")

        total = 200
        for index in range(total):
            job.coordinator.schedule(step, args=(index,), key=f"step {index}")
        for worker in range(2):
            wait_for(folder, f"begun-{40 * (worker + 1)}")
            job.kill(worker)
        job.coordinator.join(TIMEOUT)
        assert set(count.numpy().tolist()) == {float(total)}


def test_another_job_does_not_know_the_keys() -> None:
    """Keys are forgotten with the variables."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster:
        for _ in range(2):
            with ParameterServerStrategy(cluster) as strategy:
                with strategy.scope():
                    count = Variable(np.zeros(4), name="count")
                coordinator = ClusterCoordinator(strategy)
                coordinator.schedule(count.assign_add, args=(np.ones(4),), key="one").fetch(TIMEOUT)
                assert set(count.numpy().tolist()) == {1.0}
