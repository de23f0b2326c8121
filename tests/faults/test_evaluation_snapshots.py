"""Evaluation while training continues and roles die: it has the variables of the barrier, or says that it does not."""

from __future__ import annotations

import logging
import resource
import signal
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import in_one_process
from tests.faults.armed import Armed, armed_cluster
from tests.faults.steps import note, wait_for
from tests.faults.test_coordinator_death import started
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    metrics,
)
from pscluster.core.errors import PSUnavailableError, UnavailableError

EXAMPLES = 2000
SHARDS = 40
TRAINED = 300

DEATHS = [
    f"worker/{point}=kill@{nth}"
    for point, nth in {
        "worker.define.after": 2,
        "worker.run.before": 15,
        "client.exchange.after": 40,
        "worker.run.after": 30,
        "worker.result.before": 25,
        "worker.result.after": 45,
    }.items()
]


@contextmanager
def running(armed: Armed, **options: Any) -> Iterator[tuple[ParameterServerStrategy, ClusterCoordinator, Variable]]:
    """A job with a variable that is cut in two."""
    options.setdefault("ps_timeout", TIMEOUT)
    partitioner = FixedShardsPartitioner(2)
    with ParameterServerStrategy(armed.cluster, partitioner, connect_timeout=TIMEOUT, **options) as strategy:
        with strategy.scope():
            w = Variable(np.random.default_rng(0).normal(size=8), name="w")
        yield strategy, ClusterCoordinator(strategy, max_attempts=len(DEATHS) + 1), w


def copies(strategy: ParameterServerStrategy) -> list[set[str]]:
    """The number of copies on each server."""
    directories = strategy.client.directory()
    return [{spec.name for spec in directory.variables if spec.evaluation} for directory in directories]


def examples() -> Any:
    """Rows whose sums, in their last bits, depend on the order of addition."""
    return np.random.default_rng(1).normal(size=(EXAMPLES, 8))


def as_one_process(step: Any, data: Any, shards: int) -> Any:
    """What one process finds with the current variables."""
    return in_one_process(step, {"sum": metrics.Sum()}, data, shards)


@pytest.mark.timeout(180)
def test_workers_die_at_named_points(tmp_path: Path) -> None:
    """The evaluation equals that of one process bit for bit, and each function beside it has counted once."""
    with (
        armed_cluster(tmp_path / "faults", 2, 2, durability="log", revive=True) as armed,
        running(armed) as (strategy, coordinator, w),
    ):
        with strategy.scope():
            count = Variable(np.zeros(4), name="count")
        data = coordinator.distribute_dataset(examples()).shuffle(seed=1).batch(16)

        def step(batch: Any) -> tuple[Any]:
            return (batch @ w.numpy(),)

        def train(index: int) -> int:
            w.assign_add(np.full(8, 0.1))
            count.assign_add(np.ones(4))
            return index

        expected = as_one_process(step, data, SHARDS)
        armed.arm(*DEATHS)
        with ThreadPoolExecutor(1) as pool:
            evaluation = pool.submit(
                coordinator.evaluate, step, data, [metrics.Sum()], shards=SHARDS, concurrent=True, timeout=TIMEOUT
            )
            until(lambda: evaluation.done() or all(copies(strategy)), "they are pinned")
            values = [coordinator.schedule(train, args=(index,)) for index in range(TRAINED)]
            assert evaluation.result(TIMEOUT) == expected
            coordinator.join(TIMEOUT)
        assert coordinator.fetch(values, TIMEOUT) == list(range(TRAINED))
        armed.until_struck(*DEATHS, calls=False)
        assert count.numpy().tolist() == [TRAINED] * 4
        assert copies(strategy) == [set(), set()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_servers_die(tmp_path: Path, durability: str) -> None:
    """Both servers die at once, in the middle: they have their evaluation snapshots again when they are back."""
    folder = str(tmp_path)
    with (
        armed_cluster(tmp_path / "faults", 2, 2, durability=durability, revive=True) as armed,
        running(armed) as (strategy, coordinator, w),
    ):
        data = coordinator.distribute_dataset(examples()).batch(100)

        def step(batch: Any) -> tuple[Any]:
            Path(folder, "evaluating").touch()
            wait_for(folder, "gate")
            return (batch @ w.numpy(),)

        note(folder, "gate")
        expected = as_one_process(step, data, 3)
        Path(folder, "gate").unlink()
        Path(folder, "evaluating").unlink()
        with ThreadPoolExecutor(1) as pool:
            evaluation = pool.submit(coordinator.evaluate, step, data, [metrics.Sum()], shards=3, concurrent=True)
            try:
                wait_for(folder, "evaluating")
                w.assign(np.zeros(8))
                for index in range(2):
                    armed.cluster.kill("ps", index, signal.SIGKILL, timeout=TIMEOUT)
                armed.until_all_live()
            finally:
                note(folder, "gate")
            assert evaluation.result(TIMEOUT) == expected
        assert copies(strategy) == [set(), set()]


@pytest.mark.timeout(180)
def test_a_server_dies_while_it_copies(tmp_path: Path) -> None:
    """A copy not yet made is made when the server is back; if one is lost, the evaluation says so."""
    with (
        armed_cluster(tmp_path / "faults", 2, 1, durability="log", revive=True) as armed,
        running(armed) as (strategy, coordinator, w),
    ):
        with strategy.scope():
            v = Variable(np.arange(4.0), name="v")
        data = coordinator.distribute_dataset(examples()).batch(100)

        def step(batch: Any) -> tuple[Any]:
            return (batch @ w.numpy() + v.numpy().sum(),)

        def evaluate() -> Any:
            return coordinator.evaluate(step, data, [metrics.Sum()], shards=3, concurrent=True, timeout=TIMEOUT)

        expected = as_one_process(step, data, 3)
        for point in ("before", "after"):
            armed.arm(fault := f"ps/ps.create.{point}=kill@1")
            assert evaluate() == expected
            armed.until_struck(fault, calls=False)
            assert copies(strategy) == [set(), set()]
        armed.arm(fault := "ps/ps.create.before=kill@2")
        with pytest.raises(
            UnavailableError, match=r"was restarted without the evaluation snapshot: evaluate again"
        ) as raised:
            evaluate()
        assert not isinstance(raised.value, PSUnavailableError), "the job is not lost"
        armed.until_struck(fault, calls=False)
        assert copies(strategy) == [set(), set()]
        assert evaluate() == expected
        coordinator.join(TIMEOUT)


@pytest.mark.timeout(180)
def test_a_server_that_is_not_there_at_the_end(tmp_path: Path) -> None:
    """The server still has its copies when it comes back; the next evaluation deletes them."""
    folder = str(tmp_path)
    with armed_cluster(tmp_path / "faults", 2, 1) as armed, running(armed) as (strategy, coordinator, _):
        with strategy.scope():
            whole = Variable(np.ones(4), name="whole", partitioner=FixedShardsPartitioner(1))
        data = coordinator.distribute_dataset(np.arange(10.0))

        def step(example: Any) -> tuple[Any]:
            note(folder, "evaluating")
            wait_for(folder, "gate")
            return (example * whole.numpy(),)

        def evaluate() -> Any:
            return coordinator.evaluate(step, data, [metrics.Sum()], shards=1, concurrent=True, timeout=TIMEOUT)

        with ThreadPoolExecutor(1) as pool:
            evaluation = pool.submit(evaluate)
            try:
                wait_for(folder, "evaluating")
                away = 1 - whole.owners[0]
                armed.cluster.kill("ps", away, signal.SIGKILL, timeout=TIMEOUT)
            finally:
                note(folder, "gate")
            assert evaluation.result(TIMEOUT) == {"sum": 180.0}
        armed.cluster.restart("ps", away, timeout=TIMEOUT)
        until(lambda: copies(strategy)[away], "it is back, with the copy")
        assert evaluate() == {"sum": 180.0}
        assert copies(strategy) == [set(), set()]


@pytest.mark.timeout(180)
def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Like training, an evaluation continues, with copies in memory, as the log says; they are lost with the server."""
    folder = str(tmp_path)
    caplog.set_level(logging.WARNING, "pscluster.coordinator.variables.evaluation_snapshot")
    with armed_cluster(tmp_path / "faults", 2, 1, revive=True) as armed, running(armed) as (strategy, coordinator, w):
        data = coordinator.distribute_dataset(np.arange(10.0))

        def step(example: Any) -> tuple[Any]:
            note(folder, "evaluating")
            wait_for(folder, "gate")
            return (example * w.numpy(),)

        def evaluate() -> Any:
            return coordinator.evaluate(step, data, [metrics.Sum()], shards=1, concurrent=True, timeout=TIMEOUT)

        note(folder, "gate")
        expected = evaluate()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(armed.cluster.pids["ps", 1], resource.RLIMIT_FSIZE, (0, hard))  # nothing can be saved
        w.assign_add(0.0)
        assert evaluate() == expected
        (told,) = [text for text in caplog.messages if "only in memory" in text]
        assert "ps 1: the state could not be saved: File too large" in told
        Path(folder, "gate").unlink()
        Path(folder, "evaluating").unlink()
        with ThreadPoolExecutor(1) as pool:
            evaluation = pool.submit(evaluate)
            try:
                wait_for(folder, "evaluating")
                armed.cluster.kill("ps", 1, signal.SIGKILL, timeout=TIMEOUT)
            finally:
                note(folder, "gate")
            with pytest.raises(UnavailableError, match="without the evaluation snapshot: evaluate again"):
                evaluation.result(TIMEOUT)
        assert evaluate() == expected, "with the next process there is room again"
        assert copies(strategy) == [set(), set()]


SCRIPT = """
    import sys
    import numpy as np
    from pscluster.coordinator import (
        ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy, TFConfigClusterResolver, Variable, metrics,
    )
    from tests.faults.steps import note, wait_for

    folder = sys.argv[1]
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    names = [sorted(spec.name for spec in each.variables) for each in strategy.client.directory()]
    with strategy.scope():
        w = Variable(np.ones(4), name="w")
    coordinator = ClusterCoordinator(strategy)
    data = coordinator.distribute_dataset(np.arange(10.0))
    resumed = strategy.resumed

    def step(number):
        note(folder, f"evaluating-{resumed}")
        wait_for(folder, "gate")
        return number * w.numpy()

    if resumed:
        note(folder, "names", f"{names} {strategy.variables}")
        note(folder, "gate")
    found = coordinator.evaluate(step, data, [metrics.Sum()], shards=3, concurrent=True)
    names = [sorted(spec.name for spec in each.variables) for each in strategy.client.directory()]
    note(folder, "result", f"{found['sum']} {names}")
"""


@pytest.mark.timeout(180)
def test_the_coordinator_dies(tmp_path: Path) -> None:
    """After a death in the middle of an evaluation the next coordinator finds the variables, and nothing else."""
    script = tmp_path / "evaluate.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with LocalCluster(2, 1, log_level="ERROR", durability="log") as cluster:
        with started(cluster, script, tmp_path) as first:
            wait_for(str(tmp_path), "evaluating-False")
            first.send_signal(signal.SIGKILL)
        with started(cluster, script, tmp_path) as second:
            names = wait_for(str(tmp_path), "names")
            assert second.wait(TIMEOUT) == 0
        assert names.startswith("[['w'], ['w']] [<ShardedVariable 'w' ")
        assert "evaluation" not in names
        assert wait_for(str(tmp_path), "result") == "180.0 [['w'], ['w']]"
