"""Evaluation while training goes on: bit for bit of the variables at the barrier, and nothing of it is left."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import NUM_WORKERS, Everywhere, Gate, in_one_process, leave_mark, marks, wait_for_file
from tests.coordinator.queue.test_evaluate import Examples
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    Checkpoint,
    ClusterCoordinator,
    DistributedDataset,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    RemoteValue,
    ShardedVariable,
    Variable,
    embedding_lookup,
    errors,
    metrics,
    optimizers,
)
from pscluster.coordinator.checkpoints.index import read_index

EXAMPLES = 203
ROWS = 10


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    """Cuts every variable in two, one half on each server. At its end no copy is left."""
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy:
        yield strategy
        assert copies(strategy) == []


@pytest.fixture
def table(strategy: ParameterServerStrategy) -> Variable:
    """An embedding table: its rows are on both servers."""
    with strategy.scope():
        return Variable(np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32), name="table")


@pytest.fixture
def data(coordinator: ClusterCoordinator) -> DistributedDataset:
    """Numbers and inputs, in batches."""
    x = np.random.default_rng(1).normal(size=(EXAMPLES, 3)).astype(np.float32)
    return coordinator.distribute_dataset((np.arange(EXAMPLES), x)).shuffle(seed=3).batch(16)


def copies(strategy: ParameterServerStrategy) -> list[str]:
    """Those that the servers hold."""
    directories = strategy.client.directory()
    return sorted({spec.name for directory in directories for spec in directory.variables if spec.evaluation})


def at_first(path: str) -> None:
    """For a step: the first of the evaluation says so, and waits at the gate."""
    try:
        (Path(path).parent / "mark-evaluating").touch(exist_ok=False)
    except FileExistsError:
        return
    wait_for_file(path)


def close(gate: Gate) -> None:
    """For another evaluation."""
    for path in (gate.path, Path(gate.path).parent / "mark-evaluating"):
        Path(path).unlink()


@contextmanager
def evaluating(gate: Gate, evaluate: Callable[[], Any]) -> Iterator[Any]:
    """Within the block an evaluation, a step of which waits at the gate, is under way; gives what it finds."""
    with ThreadPoolExecutor(1) as pool:
        evaluation = pool.submit(evaluate)
        try:
            until(lambda: evaluation.done() or "evaluating" in marks(gate), "it is evaluated")
            yield evaluation
        finally:
            gate.open()


def as_one_process(step: Any, data: DistributedDataset, shards: int) -> Any:
    """What one process finds with the variables as they are now."""
    return in_one_process(step, {"examples": Examples()}, data, shards)


def test_bit_for_bit_what_was_there(
    coordinator: ClusterCoordinator,
    strategy: ParameterServerStrategy,
    table: Variable,
    data: DistributedDataset,
    gate: Gate,
) -> None:
    """However often functions change the variables meanwhile, and however the step reads them."""
    with strategy.scope():
        w = Variable(np.arange(3, dtype=np.float32), name="w")
        bias = Variable(np.float32(0.5), name="bias")
    path = gate.path

    def step(batch: Any) -> tuple[Any, Any]:
        at_first(path)
        numbers, x = batch
        w_, bias_ = strategy.read([w, bias])
        rows = embedding_lookup(table, numbers % ROWS)
        return numbers, x @ w_ + bias_ + rows.sum(1) + table[2:8].sum() + w.variables[1].numpy().sum()

    def train(index: int) -> int:
        w.assign_add(np.full(3, 0.25, np.float32))
        bias.assign(np.float32(index))
        table.assign_add(np.full((ROWS, 3), 0.5, np.float32))
        return index

    gate.open()
    expected = as_one_process(step, data, 7)
    close(gate)
    before = table.numpy()
    with evaluating(
        gate, lambda: coordinator.evaluate(step, data, [Examples()], shards=7, concurrent=True)
    ) as evaluation:
        assert copies(strategy), "they are there while it goes on"
        assert [variable.name for variable in strategy.variables] == ["table", "w", "bias"]
        for count in (10, 20):
            values = [coordinator.schedule(train, args=(index,)) for index in range(count)]
            assert coordinator.fetch(values, TIMEOUT) == list(range(count))
        np.testing.assert_allclose(table.numpy(), before + 15, rtol=1e-5)
        gate.open()
        assert evaluation.result(TIMEOUT) == expected
    np.testing.assert_allclose(table.numpy(), before + 15, rtol=1e-5)
    assert sorted(expected["examples"][0]) == list(range(EXAMPLES))
    assert data.epoch == data.visited == 0


def test_of_one_moment(
    coordinator: ClusterCoordinator,
    strategy: ParameterServerStrategy,
    table: Variable,
    data: DistributedDataset,
    gate: Gate,
) -> None:
    """Functions run all the time, before and after the barrier: none is half in the copies, on any server."""
    with strategy.scope():
        other = Variable(np.zeros(4), name="other")
    table.assign(np.zeros((ROWS, 3)))
    path = gate.path

    def train() -> None:
        table.assign_add(np.ones((ROWS, 3)))
        other.assign_add(np.ones(4))

    def step(batch: Any) -> tuple[Any, Any]:
        at_first(path)
        return np.unique(table.numpy()), np.unique(other.numpy()).astype(np.float32)

    for again in range(5):
        values: list[RemoteValue] = [coordinator.schedule(train) for _ in range(30)]

        def evaluate() -> Any:
            return coordinator.evaluate(step, data, [Examples()], shards=3, concurrent=True, timeout=TIMEOUT)

        with evaluating(gate, evaluate) as evaluation:
            values += [coordinator.schedule(train) for _ in range(30)]
            coordinator.fetch(values, TIMEOUT)
            gate.open()
            seen, total = evaluation.result(TIMEOUT)["examples"]
        (moment,) = set(seen)
        assert 60 * again <= moment <= 60 * again + 60
        assert len(seen) == len(data)
        assert total == moment * len(data)
        close(gate)


def test_averages_and_slots(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, data: DistributedDataset, gate: Gate
) -> None:
    """What an optimizer that the step reaches keeps beside its variables is pinned, too."""
    with strategy.scope():
        w = Variable(np.zeros(4, np.float32), name="w")
        sgd = optimizers.SGD(0.5, momentum=0.5, use_ema=True, ema_momentum=0.5, name="sgd")
    momentum, path = sgd.slot(w, "momentum"), gate.path

    def train() -> None:
        sgd.apply_gradients([(np.ones(4, np.float32), w)])

    def step(batch: Any) -> tuple[Any, Any]:
        at_first(path)
        return np.zeros(1, np.int64), np.concatenate([sgd.average(w).numpy(), momentum.numpy(), w.numpy()])

    coordinator.fetch([coordinator.schedule(train) for _ in range(5)], TIMEOUT)
    gate.open()
    expected = as_one_process(step, data, 2)
    assert expected["examples"][1] not in (0, float(w.numpy().sum()))
    close(gate)
    with evaluating(
        gate, lambda: coordinator.evaluate(step, data, [Examples()], shards=2, concurrent=True)
    ) as evaluation:
        coordinator.fetch([coordinator.schedule(train) for _ in range(5)], TIMEOUT)
        gate.open()
        assert evaluation.result(TIMEOUT) == expected
    assert sgd.iterations == 10


def test_what_the_step_writes(
    coordinator: ClusterCoordinator, table: Variable, data: DistributedDataset, strategy: ParameterServerStrategy
) -> None:
    """Goes to the copy, and is gone with it."""

    def step(batch: Any) -> tuple[Any]:
        table.assign_add(np.ones((ROWS, 3)))
        return (batch[0],)

    before = table.numpy()
    for _ in range(3):
        results = coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True, timeout=TIMEOUT)
        assert results["sum"] == sum(range(EXAMPLES))
    np.testing.assert_array_equal(table.numpy(), before)
    assert copies(strategy) == []


def test_without_variables(coordinator: ClusterCoordinator, data: DistributedDataset) -> None:
    """A step that reaches none, such as a function by its name, needs no barrier: nothing is copied."""
    results = coordinator.evaluate(as_it_is, data, [metrics.Sum()], concurrent=True, timeout=TIMEOUT)
    assert results["sum"] == sum(range(EXAMPLES))


def as_it_is(batch: Any) -> tuple[Any]:
    """A step of this module."""
    return (batch[0],)


def test_a_step_that_fails(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, table: Variable, data: DistributedDataset
) -> None:
    """Its error is raised once, there; what others have scheduled goes on, and nothing is left."""

    def fails(batch: Any) -> tuple[Any]:
        if 7 in batch[0]:
            raise ValueError(f"not like this: {table.shape}")
        return (batch[0],)

    def train() -> None:
        table.assign_add(np.ones((ROWS, 3)))

    before = table.numpy()
    values = [coordinator.schedule(train) for _ in range(100)]
    with pytest.raises(ValueError, match="not like this"):
        coordinator.evaluate(fails, data, [metrics.Sum()], concurrent=True, timeout=TIMEOUT)
    values += [coordinator.schedule(train) for _ in range(100)]
    coordinator.join(TIMEOUT)
    coordinator.fetch(values, TIMEOUT)
    np.testing.assert_allclose(table.numpy(), before + 200, rtol=1e-5)
    results = coordinator.evaluate(as_it_is, data, [metrics.Sum()], concurrent=True, timeout=TIMEOUT)
    assert results["sum"] == sum(range(EXAMPLES))
    assert copies(strategy) == []


def test_a_function_that_fails_elsewhere(
    coordinator: ClusterCoordinator,
    strategy: ParameterServerStrategy,
    table: Variable,
    data: DistributedDataset,
    gate: Gate,
) -> None:
    """It cancels the evaluation, and its error is raised where it belongs: by join, once."""
    path = gate.path

    def fails() -> None:
        raise ValueError("mine")

    def step(batch: Any) -> tuple[Any]:
        at_first(path)
        return (table.numpy(),)

    with evaluating(gate, lambda: coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True)) as evaluation:
        failed = coordinator.schedule(fails)
        with pytest.raises(ValueError, match="mine"):
            failed.fetch(TIMEOUT)
        with pytest.raises(
            errors.CancelledError, match=r"cancelled because another function failed first \(.*ValueError"
        ):
            evaluation.result(TIMEOUT)
        with pytest.raises(
            errors.CancelledError, match=r"cancelled because another function failed first \(.*ValueError"
        ):
            coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True, timeout=TIMEOUT)
        gate.open()
    with pytest.raises(ValueError, match="mine"):
        coordinator.join(TIMEOUT)
    coordinator.join(TIMEOUT)
    assert copies(strategy) == []


def test_a_timeout(
    coordinator: ClusterCoordinator,
    strategy: ParameterServerStrategy,
    table: Variable,
    data: DistributedDataset,
    gate: Gate,
) -> None:
    """Functions that have not begun never do, running ones are asked to stop; no error of theirs is raised."""
    path = gate.path

    def step(batch: Any) -> tuple[Any]:
        at_first(path)
        leave_mark(path, "read")
        return (table.numpy(),)

    def train() -> None:
        table.assign_add(np.ones((ROWS, 3)))

    with evaluating(
        gate, lambda: coordinator.evaluate(step, data, [metrics.Sum()], shards=1, concurrent=True, timeout=1)
    ) as evaluation:
        with pytest.raises(errors.WaitTimeoutError, match=r"not evaluated after 1 s: .* with workers"):
            evaluation.result(TIMEOUT)
        assert copies(strategy) == [], "it is not waited for the step that still runs"
        coordinator.fetch([coordinator.schedule(train) for _ in range(20)], TIMEOUT)
        assert "read" not in marks(gate)
        gate.open()
    coordinator.join(TIMEOUT)
    assert coordinator.fetch(coordinator.schedule(as_it_is, args=((3,),)), TIMEOUT) == (3,)


def test_functions_that_do_not_end(
    coordinator: ClusterCoordinator,
    strategy: ParameterServerStrategy,
    table: Variable,
    data: DistributedDataset,
    gate: Gate,
) -> None:
    """There is no moment at which none runs: the message names it, no copy was made, and it goes on."""
    path = gate.path

    def holds() -> int:
        leave_mark(path, "held")
        wait_for_file(path)
        return 5

    def step(batch: Any) -> tuple[Any]:
        return (table.numpy(),)

    held = coordinator.schedule(holds)
    until(lambda: "held" in marks(gate), "it runs")
    with pytest.raises(errors.WaitTimeoutError, match=r"functions still run: .*holds on worker"):
        coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True, timeout=0.2)
    assert copies(strategy) == []
    gate.open()
    assert held.fetch(TIMEOUT) == 5


def test_one_cut_at_a_time(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, table: Variable, data: DistributedDataset
) -> None:
    """While a checkpoint takes the place of the variables, say, nothing is copied."""

    def step(batch: Any) -> tuple[Any]:
        return (table.numpy(),)

    with (
        coordinator._dispatcher.waits.barrier(TIMEOUT),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(errors.WaitTimeoutError, match=r"after 0\.\d+ s another checkpoint or evaluation snapshot"),
    ):
        pool.submit(coordinator.evaluate, step, data, [metrics.Sum()], concurrent=True, timeout=0.2).result(TIMEOUT)
    assert copies(strategy) == []
    coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True, timeout=TIMEOUT)


def test_a_checkpoint_meanwhile(
    coordinator: ClusterCoordinator,
    strategy: ParameterServerStrategy,
    table: Variable,
    data: DistributedDataset,
    gate: Gate,
    tmp_path: Path,
) -> None:
    """No copy is in it. Restored, it changes the variables, and what is evaluated stays."""
    path, saved = gate.path, str(tmp_path / "saved")

    def step(batch: Any) -> tuple[Any]:
        at_first(path)
        return (table.numpy().mean(),)

    def ends() -> int:
        return 1

    coordinator.schedule(ends).fetch(TIMEOUT)
    table.assign(np.ones((ROWS, 3)))
    Checkpoint(strategy).write(saved + "-before")
    table.assign(np.full((ROWS, 3), 2))

    def evaluate() -> Any:
        return coordinator.evaluate(step, data, [metrics.Mean()], shards=4, concurrent=True)

    with evaluating(gate, evaluate) as evaluation, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(Checkpoint(strategy).write, saved)
        until(lambda: "a checkpoint" in coordinator.explain(), "it is to be made")
        gate.open()  # a checkpoint waits for functions that run, those of an evaluation, too
        writing.result(TIMEOUT)
        assert evaluation.result(TIMEOUT) == {"mean": 2.0}
    index = read_index(saved)
    assert set(index.variables) == {"table"}
    close(gate)
    with evaluating(gate, evaluate) as evaluation, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(Checkpoint(strategy).read, saved + "-before")
        until(lambda: "a checkpoint" in coordinator.explain(), "it is to be restored")
        gate.open()
        reading.result(TIMEOUT)
        assert evaluation.result(TIMEOUT) == {"mean": 2.0}
    np.testing.assert_array_equal(table.numpy(), np.ones((ROWS, 3)))


def test_several_at_once(coordinator: ClusterCoordinator, table: Variable, data: DistributedDataset) -> None:
    """Each has its own copies; one that needs the job to pause waits for them, or they for it."""
    table.assign(np.ones((ROWS, 3)))

    def step(batch: Any) -> tuple[Any]:
        return (table.numpy().mean(),)

    with ThreadPoolExecutor(4) as pool:
        evaluations = [
            pool.submit(coordinator.evaluate, step, data, [metrics.Mean()], concurrent=index != 2) for index in range(4)
        ]
        assert [evaluation.result(TIMEOUT) for evaluation in evaluations] == [{"mean": 1.0}] * 4


def test_what_is_refused(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, table: Variable, data: DistributedDataset
) -> None:
    """Functions of the dataset that reach variables, which would not be pinned; and names that are ours."""

    def scaled(batch: Any) -> Any:
        return batch[0] * table.numpy().mean()

    with pytest.raises(errors.MisuseError, match="the dataset's own functions reach 'table', which training changes"):
        coordinator.evaluate(as_it_is, data.map(scaled), [metrics.Sum()], concurrent=True)
    with (
        strategy.scope(),
        pytest.raises(errors.MisuseError, match="can't be named 'pscluster/pinned/w': names that begin"),
    ):
        Variable(np.zeros(3), name="pscluster/pinned/w")


def test_ctrl_c(
    coordinator: ClusterCoordinator,
    strategy: ParameterServerStrategy,
    table: Variable,
    data: DistributedDataset,
    gate: Gate,
) -> None:
    """Wherever it strikes, the copies go, and what else is scheduled goes on."""
    path = gate.path

    def step(batch: Any) -> tuple[Any]:
        at_first(path)
        return (table.numpy(),)

    def interrupt() -> None:
        until(lambda: "evaluating" in marks(gate), "it is evaluated")
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        struck = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True)
        struck.result(TIMEOUT)
    assert copies(strategy) == []
    assert coordinator.fetch(coordinator.schedule(as_it_is, args=((3,),)), TIMEOUT) == (3,)
    gate.open()
    coordinator.join(TIMEOUT)


def test_nothing_is_left_on_the_workers(
    coordinator: ClusterCoordinator, table: Variable, data: DistributedDataset, everywhere: Everywhere
) -> None:
    """Neither the step nor its handles are kept: every evaluation has its own step."""

    def step(batch: Any) -> tuple[Any]:
        return (table.numpy(),)

    def left() -> int:
        gc.collect()
        return sum(variable.ephemeral for variable in gc.get_objects() if type(variable) in (Variable, ShardedVariable))

    for _ in range(3):
        coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True, timeout=TIMEOUT)
    until(lambda: everywhere(coordinator, left) == [0] * NUM_WORKERS, "the workers have dropped them")
