"""Exact evaluation: each example once, bit for bit what one process finds, whatever dies and whatever else runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import NUM_WORKERS, Gate, in_one_process, leave_mark, marks, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    DistributedDataset,
    ParameterServerStrategy,
    Variable,
    errors,
    metrics,
)
from pscluster.core.checks import type_of

EXAMPLES = 1003


class Examples:
    """A metric of one's own: the numbers that were seen, in order, and a sum whose bits depend on that order."""

    name = "examples"

    def initial(self) -> dict[str, Any]:
        """None."""
        return {"seen": np.zeros(0, np.int64), "sum": np.float32(0).reshape(())}

    def update(self, state: dict[str, Any], numbers: Any, values: Any) -> dict[str, Any]:
        """A batch more."""
        return {"seen": np.concatenate([state["seen"], numbers]), "sum": state["sum"] + values.sum(dtype=np.float32)}

    def merge(self, state: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        """One after the other."""
        return {"seen": np.concatenate([state["seen"], other["seen"]]), "sum": state["sum"] + other["sum"]}

    def result(self, state: dict[str, Any]) -> tuple[list[int], float]:
        """All of it."""
        return state["seen"].tolist(), float(state["sum"])


@pytest.fixture
def w(strategy: ParameterServerStrategy) -> Variable:
    """A model."""
    with strategy.scope():
        return Variable(np.random.default_rng(0).normal(size=4).astype(np.float32), name="w")


@pytest.fixture
def data(coordinator: ClusterCoordinator) -> DistributedDataset:
    """Numbers and inputs, in batches."""
    x = np.random.default_rng(1).normal(size=(EXAMPLES, 4)).astype(np.float32)
    return coordinator.distribute_dataset((np.arange(EXAMPLES), x)).shuffle(seed=3).batch(16)


def test_as_one_process_does_it(coordinator: ClusterCoordinator, w: Variable, data: DistributedDataset) -> None:
    """The same shards, batches and order of merging: the same bits."""

    def step(batch: Any) -> tuple[Any, Any]:
        numbers, x = batch
        return numbers, x @ w.numpy()

    named = {"examples": Examples()}
    for shards in (1, 3, 200):
        results = coordinator.evaluate(step, data, [Examples()], shards=shards, timeout=TIMEOUT)
        assert sorted(results["examples"][0]) == list(range(EXAMPLES))
        assert results == in_one_process(step, named, data, shards)
    assert data.epoch == data.visited == 0


def test_metrics_of_ours(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, data: DistributedDataset
) -> None:
    """Several at once, of different values, made in the scope or not; what lives on the servers stays as it is."""
    with strategy.scope():
        kept = metrics.Mean("kept")
    free = metrics.AUC()

    def step(batch: Any) -> dict[str, Any]:
        numbers, x = batch
        labels = numbers % 2
        return {"mean": (numbers,), "area": (labels, np.where(labels, 0.8, 0.3)), "sum": x[:, 0]}

    results = coordinator.evaluate(step, data, {"mean": kept, "area": free, "sum": metrics.Sum()}, timeout=TIMEOUT)
    assert results["mean"] == (EXAMPLES - 1) / 2
    assert results["area"] == 1.0
    assert results["sum"] == pytest.approx(sum(float(x[:, 0].sum()) for _, x in data.local()), abs=1e-3)
    assert kept.result() == 0.0


def test_nothing_else_runs(coordinator: ClusterCoordinator, w: Variable, gate: Gate) -> None:
    """What was scheduled before has ended, what other threads schedule waits: the variables stand still."""
    data = coordinator.distribute_dataset(np.arange(40))
    folder = str(Path(gate.path).parent)
    w.assign(np.zeros(4))

    def train() -> None:
        w.assign_add(np.ones(4))

    def step(example: Any) -> tuple[Any]:
        if example == 0:
            (Path(folder) / "mark-evaluating").touch()
            wait_for_file(gate.path)
        return (w.numpy()[0],)

    before = [coordinator.schedule(train) for _ in range(10)]
    with ThreadPoolExecutor(2) as pool:
        evaluation = pool.submit(coordinator.evaluate, step, data, [metrics.Mean(), metrics.Sum()])
        until(lambda: (Path(folder) / "mark-evaluating").exists(), "it is evaluated")
        assert all(value.status.value == "ready" for value in before)
        later = pool.submit(coordinator.schedule, train)
        with pytest.raises(TimeoutError):
            later.result(0.2)
        gate.open()
        assert evaluation.result(TIMEOUT) == {"mean": 10.0, "sum": 400.0}
        later.result(TIMEOUT).fetch(TIMEOUT)
    assert w.numpy()[0] == 11


def test_updates_in_an_evaluation(coordinator: ClusterCoordinator, w: Variable, data: DistributedDataset) -> None:
    """Each evaluation's count, and none is in the way of a checkpoint's position."""
    w.assign(np.zeros(4))
    for part in data.parts(100):
        coordinator.schedule(lambda part: list(part) and None, args=(part,))

    def step(batch: Any) -> tuple[Any]:
        w.assign_add(np.ones(4))
        return (batch[0],)

    for times in range(1, 4):
        coordinator.evaluate(step, data, [metrics.Sum()], timeout=TIMEOUT)
        assert w.numpy()[0] == times * len(data)


def test_an_evaluation_waits_for_another_one(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """As long as its timeout lets it."""
    data, path = coordinator.distribute_dataset(np.arange(4)), gate.path

    def step(example: Any) -> tuple[Any]:
        (Path(path).parent / "mark-running").touch()
        wait_for_file(path)
        return (example,)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(coordinator.evaluate, step, data, [metrics.Sum()])
        until(lambda: (Path(path).parent / "mark-running").exists(), "it runs")
        with pytest.raises(errors.WaitTimeoutError, match=r"after 0.05 s another evaluation still runs"):
            coordinator.evaluate(step, data, [metrics.Sum()], timeout=0.05)
        gate.open()
        assert first.result(TIMEOUT) == {"sum": 6.0}


def test_an_evaluation_that_takes_too_long(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """Leaves nothing behind: what has not begun never does."""
    data, path = coordinator.distribute_dataset(np.arange(40)), gate.path

    def step(example: Any) -> tuple[Any]:
        leave_mark(path, str(example))
        wait_for_file(path)
        return (example,)

    with pytest.raises(errors.WaitTimeoutError, match=r"not done after"):
        coordinator.evaluate(step, data, [metrics.Sum()], shards=40, timeout=0.5)
    gate.open()
    coordinator.join(TIMEOUT)
    assert len(marks(gate)) <= 2 * NUM_WORKERS
    assert coordinator.evaluate(lambda example: (example,), data, [metrics.Sum()], timeout=TIMEOUT) == {"sum": 780.0}


def test_what_is_refused(coordinator: ClusterCoordinator, data: DistributedDataset) -> None:
    """Before anything runs, with what to do."""
    evaluate = coordinator.evaluate
    with pytest.raises(errors.MisuseError, match="no metrics are given"):
        evaluate(len, data, [])
    with pytest.raises(errors.MisuseError, match=r"several metrics are named \['sum'\]: give them names, or a dict"):
        evaluate(len, data, [metrics.Sum(), metrics.Sum()])
    with pytest.raises(errors.MisuseError, match=r"metric 'x', an int, has no initial, update"):
        evaluate(len, data, {"x": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="shards is 0; it must be a whole number, 1 or more, or 'auto'"):
        evaluate(len, data, [metrics.Sum()], shards=0)
    with pytest.raises(TypeError, match="evaluate takes a step function, not an int"):
        evaluate(3, data, [metrics.Sum()])  # type: ignore[arg-type]
    for named in (["accuracy"], [metrics.Sum(), metrics.Accuracy], {"x": "accuracy"}):
        with pytest.raises(errors.MisuseError, match=r"(\[.\]|'x') is .*ccuracy.*: give an object, such as metrics"):
            evaluate(len, data, named)  # type: ignore[arg-type]
    for several in ("accuracy", metrics.Accuracy(), None):
        with pytest.raises(errors.MisuseError, match=r"the metrics are .*: give a list, such as \[metrics.Accuracy"):
            evaluate(len, data, several)  # type: ignore[arg-type]
    for wrong in ((np.arange(3),), [1], coordinator.create_per_worker_dataset([1]), None):
        with pytest.raises(TypeError, match=f"not {type_of(wrong)}: give coordinator.distribute_dataset"):
            evaluate(len, wrong, [metrics.Sum()])  # type: ignore[arg-type]


class Totals(Examples):
    """A metric that takes a dict."""

    def update(self, state: dict[str, Any], batch: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"seen": state["seen"], "sum": state["sum"] + batch["values"].sum()}


def test_dicts_of_results(coordinator: ClusterCoordinator, data: DistributedDataset) -> None:
    """Each metric has its own; or, where a dict has none's, the whole; what it lacks is named."""

    def evaluate(step: Callable[[Any], Any], *names: str, **more: Any) -> dict[str, Any]:
        named = {name: metrics.Sum() for name in names}
        return coordinator.evaluate(step, data, {**named, **more}, timeout=TIMEOUT)

    total = sum(batch[1].sum(dtype=np.float64) for batch in data.local())
    assert evaluate(lambda batch: {"a": batch[1]}, "a") == {"a": pytest.approx(total)}
    assert evaluate(lambda batch: {"a": batch[1], "more": 1}, "a") == {"a": pytest.approx(total)}
    assert evaluate(lambda batch: {"values": batch[1]}, whole=Totals())["whole"][1] == pytest.approx(total)
    with pytest.raises(
        errors.MisuseError,
        match=r"returned a dict with \['a'\], and nothing for the metrics \['b'\]: return .* \['a', 'b'\]",
    ):
        evaluate(lambda batch: {"a": batch[1]}, "a", "b")
    with pytest.raises(
        errors.MisuseError,
        match=r"\['x'\], which has none of the metrics' names, and metric 'a' does not .*: return .* \['a'\]",
    ):
        evaluate(lambda batch: {"x": batch[1]}, "a")


def test_states_that_do_not_merge(coordinator: ClusterCoordinator, data: DistributedDataset) -> None:
    """The metric is named, and what its states are."""

    class Odd(Examples):
        def update(self, state: dict[str, Any], numbers: Any, values: Any) -> dict[str, Any]:
            return {"seen": np.zeros((2, int(numbers[0]) + 2)), "sum": state["sum"]}

    class Other(Examples):
        def update(self, state: dict[str, Any], numbers: Any, values: Any) -> dict[str, Any]:
            return {"something": numbers}

    def step(batch: Any) -> Any:
        return batch

    with pytest.raises(errors.MisuseError, match=r"metric 'odd' does not merge: .*the states' shapes are"):
        coordinator.evaluate(step, data, {"odd": Odd()}, timeout=TIMEOUT)
    with pytest.raises(errors.MisuseError, match=r"one state has \['seen', 'sum'\], another \['something'\]"):
        coordinator.evaluate(step, data, {"other": Other()}, timeout=TIMEOUT)


def test_a_step_that_fails(coordinator: ClusterCoordinator, data: DistributedDataset) -> None:
    """Its error is raised, and the next evaluation works."""

    def fails(batch: Any) -> None:
        raise ValueError("not like this")

    def passes(batch: Any) -> tuple[Any]:
        return (batch[0],)

    with pytest.raises(ValueError, match="not like this"):
        coordinator.evaluate(fails, data, [metrics.Sum()], timeout=TIMEOUT)
    assert coordinator.evaluate(passes, data, [metrics.Sum()], timeout=TIMEOUT)["sum"] == sum(range(EXAMPLES))


@dataclass
class Found:
    """What a step returns."""

    score: Any
    more: tuple[Any, dict[str, Any]]


def test_predictions(coordinator: ClusterCoordinator, w: Variable) -> None:
    """They come in the order of the data, whatever their structure, and however many functions make them."""
    x = np.random.default_rng(1).normal(size=(101, 4)).astype(np.float32)
    data = coordinator.distribute_dataset((np.arange(101), x)).batch(16)

    def step(batch: Any) -> Found:
        numbers, rows = batch
        return Found(rows @ w.numpy(), (int(numbers[0]), {"numbers": numbers}))

    for shards in (1, 5):
        found = coordinator.predict(step, data, shards=shards, timeout=TIMEOUT)
        batches = [x[at : at + 16] @ w.numpy() for at in range(0, 101, 16)]
        assert found.score.tolist() == np.concatenate(batches).tolist()
        assert found.more[0].tolist() == list(range(0, 101, 16))
        assert found.more[1]["numbers"].tolist() == list(range(101))
    assert coordinator.predict(lambda batch: batch[0], data).tolist() == list(range(101))
    assert data.epoch == data.visited == 0


def _chosen(outputs: list[Any], batch: Any) -> Any:
    return outputs[int(batch[0])]


def test_predictions_that_do_not_fit(coordinator: ClusterCoordinator) -> None:
    """Other structures and shapes, and what is no step or dataset, are refused."""
    data = coordinator.distribute_dataset(np.arange(4)).batch(1)
    for outputs, words in (
        ([1, {"a": 1}, 1, 1], "returned an int for one element and a dict for another"),
        ([(1,), (1, 2), (1,), (1,)], "for one element and"),
        ([np.zeros((1, 2)), np.zeros((1, 3)), 0, 0], "can't be joined along their first axis: .* match"),
    ):
        with pytest.raises(errors.MisuseError, match=words):
            coordinator.predict(functools.partial(_chosen, outputs), data, timeout=TIMEOUT)
    with pytest.raises(TypeError, match=r"predict takes a distributed dataset, not a list: give coordinator.distrib"):
        coordinator.predict(lambda batch: 0, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="predict takes a step function, not an int"):
        coordinator.predict(5, data)  # type: ignore[arg-type]
