"""Metrics: their formulas, from one process and from several, and counting once despite retries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable, metrics
from pscluster.core import errors
from pscluster.ps.handles.scope import creating_with


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two servers and two workers, one of which is killed occasionally."""
    with LocalCluster(2, 2, log_level="ERROR") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    """One strategy for all tests."""
    with ParameterServerStrategy(cluster) as strategy:
        yield strategy


@pytest.fixture(autouse=True)
def scope(strategy: ParameterServerStrategy) -> Iterator[None]:
    """Make metrics in the strategy's scope."""
    with strategy.scope():
        yield


def test_mean() -> None:
    """The mean of all values of all updates, whatever their shapes; 0 of none."""
    mean = metrics.Mean("mean of some")
    assert mean.result() == 0.0
    mean.update_state(3.0)
    mean.update_state([1, 2])
    mean.update_state(np.array([[4.0, 5.0], [6.0, 7.0]], np.float32))
    assert mean.result() == 4.0
    mean.update_state([])
    assert mean.result() == 4.0


def test_sum() -> None:
    """The sum of all values."""
    total = metrics.Sum("sum of some")
    assert total.result() == 0.0
    total.update_state([1.5, 2.5])
    total.update_state(-1)
    assert total.result() == 3.0


def test_accuracy() -> None:
    """The share of predictions that equal their labels."""
    accuracy = metrics.Accuracy("accuracy of some")
    assert accuracy.result() == 0.0
    accuracy.update_state([1, 2, 3, 4], [1, 2, 3, 0])
    assert accuracy.result() == 0.75
    accuracy.update_state(np.array([[1], [0]]), np.array([[0], [1]]))
    assert accuracy.result() == 0.5


def test_sparse_categorical_accuracy() -> None:
    """The prediction is the largest score in each row; labels may have an axis for it."""
    metric = metrics.SparseCategoricalAccuracy("by rows")
    scores = np.array([[0.1, 0.7, 0.2], [0.8, 0.1, 0.1], [0.0, 0.1, 0.9]])
    metric.update_state([1, 0, 0], scores)
    metric.update_state([[2]], scores[2:])
    assert metric.result() == 0.75
    metric.update_state([1, 2], scores[:2], sample_weight=[4.0, 2.0])
    assert metric.result() == 0.7
    with pytest.raises(errors.MisuseError, match=r"y_true has shape \(2,\), y_pred \(3, 3\): give labels"):
        metric.update_state([1, 2], scores)


def test_mean_squared_error() -> None:
    """The mean over all elements."""
    metric = metrics.MeanSquaredError("squares")
    metric.update_state([[1.0, 2.0]], [[2.0, 4.0]])
    assert metric.result() == 2.5
    with pytest.raises(errors.MisuseError, match="give predictions with the shape of the labels"):
        metric.update_state([1.0, 2.0], [[1.0, 2.0]])


def test_precision_and_recall() -> None:
    """A prediction is positive above the threshold, not at it; weights count; both are 0 of none."""
    labels, scores = np.array([1, 1, 0, 0, 1]), np.array([0.9, 0.5, 0.8, 0.1, 0.6])
    precision, recall = metrics.Precision("p"), metrics.Recall("r")
    assert (precision.result(), recall.result()) == (0.0, 0.0)
    for metric in (precision, recall):
        metric.update_state(labels[:2], scores[:2])
        metric.update_state(labels[2:], scores[2:])
    assert (precision.result(), recall.result()) == (2 / 3, 2 / 3)
    low = metrics.Recall("low", threshold=0.4)
    low.update_state(labels, scores, sample_weight=[1, 2, 3, 4, 0])
    assert low.result() == 1.0
    with pytest.raises(errors.MisuseError, match="the labels must be 0 or 1"):
        low.update_state([2], [0.5])
    with pytest.raises(errors.MisuseError, match="the predictions contain NaN"):
        low.update_state([1, 1], [0.5, np.nan])


def test_auc() -> None:
    """It is close to the exact area, from the correctly ordered pairs, and exactly the trapezoids' for its
    thresholds."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 5000)
    scores = np.clip(0.5 * labels + rng.normal(0.25, 0.3, 5000), 0, 1)
    coarse, fine = metrics.AUC("coarse", num_thresholds=3), metrics.AUC("fine", num_thresholds=5000)
    for indices in np.array_split(np.arange(5000), 7):
        coarse.update_state(labels[indices], scores[indices])
        fine.update_state(labels[indices], scores[indices])
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None]
    exact = (positive > negative).mean() + (positive == negative).mean() / 2
    assert fine.result() == pytest.approx(exact, abs=1e-3)
    true, false = (positive > 0.5).mean(), (negative > 0.5).mean()
    assert coarse.result() == pytest.approx((1 + true) / 2 * (1 - false) + true / 2 * false)
    assert metrics.AUC("of none").result() == 0.0
    with pytest.raises(errors.MisuseError, match="the scores range from -1 to 2; give probabilities"):
        fine.update_state([0, 1], [-1.0, 2.0])
    with pytest.raises(
        ValueError, match="num_thresholds is 1; it must be a whole number, at least 2 and at most 1,000,000"
    ):
        metrics.AUC("none", num_thresholds=1)


def test_states_that_travel() -> None:
    """Without side effects, and in any portions, they give what the servers' states give."""
    labels, scores = np.array([1, 0, 1, 1, 0]), np.array([0.9, 0.4, 0.3, 0.8, 0.6])
    classes: list[Any] = [metrics.Precision, metrics.Recall, metrics.AUC, metrics.MeanSquaredError]
    for index, cls in enumerate(classes):
        here = cls(f"here {index}")
        with creating_with(None):  # type: ignore[arg-type]
            free = cls()
        assert free.name == cls.__name__.lower()
        here.update_state(labels, scores)
        state = free.merge(free.update(free.initial(), labels[:2], scores[:2]), free.initial())
        state = free.merge(state, free.update(free.initial(), labels[2:], scores[2:]))
        assert free.result(state) == here.result()
        assert here.result(state) == here.result()


def test_weights() -> None:
    """Values count by their weights: one for all, one per row, or one each."""
    mean, total, accuracy = metrics.Mean("weighted mean"), metrics.Sum("weighted sum"), metrics.Accuracy("weighted")
    values = np.arange(6.0).reshape(3, 2)
    for weights in (2.0, [1.0, 0.0, 3.0], np.arange(6.0).reshape(3, 2)):
        full = np.broadcast_to(np.reshape(weights, np.shape(weights) + (1,) * (2 - np.ndim(weights))), (3, 2))
        for metric in (mean, total):
            metric.reset_states()
            metric.update_state(values, sample_weight=weights)
        assert mean.result() == pytest.approx(np.average(values, weights=full))
        assert total.result() == pytest.approx((values * full).sum())
    accuracy.update_state([1, 1, 1], [1, 0, 1], sample_weight=[1, 2, 5])
    assert accuracy.result() == 0.75
    mean.reset_states()
    mean.update_state([1.0, 2.0], sample_weight=[0.0, 0.0])
    assert mean.result() == 0.0


def test_reset() -> None:
    """`reset_states`, or Keras' newer name, starts again."""
    mean = metrics.Mean("mean that is reset")
    mean.update_state(8.0)
    mean.reset_states()
    assert mean.result() == 0.0
    mean.update_state(2.0)
    assert mean.result() == 2.0
    mean.reset_state()
    assert mean.result() == 0.0


def test_large_counts_stay_exact() -> None:
    """The states are float64: a count beyond 2**24 still increases."""
    total = metrics.Sum("many")
    total.update_state(float(1 << 30))
    for _ in range(3):
        total.update_state(1)
    assert total.result() == (1 << 30) + 3


def test_what_they_are() -> None:
    """A metric has a unique name, from its class by default, and states that are not trainable."""
    mean = metrics.Mean("described")
    assert mean.name == "described"
    assert repr(mean) == "<Mean 'described'>"
    unnamed = metrics.Accuracy()
    assert unnamed.name == "accuracy"
    with pytest.raises(errors.MisuseError, match=r"there is already a .* 'described'"):
        metrics.Mean("described")


@pytest.mark.parametrize("bad", [(np.ones(3), np.ones(2)), ([1, 2], [[1], [2]])], ids=["lengths", "ranks"])
def test_labels_and_predictions_that_do_not_fit(bad: tuple[Any, Any]) -> None:
    """They are refused with both shapes, and nothing is counted."""
    accuracy = metrics.Accuracy(f"picky {np.ndim(bad[1])}")
    with pytest.raises(errors.MisuseError, match=r"are None, but .*: the step of an evaluation has to return"):
        metrics.Mean(f"of none {np.ndim(bad[1])}").update_state(None)  # type: ignore[arg-type]
    with pytest.raises(errors.MisuseError, match=r"y_true has shape .*, y_pred"):
        accuracy.update_state(*bad)
    with pytest.raises(errors.MisuseError, match="sample_weight has shape"):
        accuracy.update_state([1, 2], [1, 2], sample_weight=[1, 1, 1])
    assert accuracy.result() == 0.0


def test_outside_of_a_scope() -> None:
    """A metric keeps nothing there: states on the servers are refused, with both remedies."""
    with creating_with(None):  # type: ignore[arg-type]
        mean = metrics.Mean("homeless")
    for call in (lambda: mean.update_state(1.0), mean.result, mean.reset_states):
        with pytest.raises(errors.MisuseError, match=r"outside of `with strategy\.scope.*pass it to evaluate"):
            call()


def test_a_class_derived_from_a_metric() -> None:
    """Workers would not know it: the error where it is defined says so, and what to write instead."""
    with pytest.raises(TypeError, match=r"Twice can't be a subclass of .* and the methods initial, update, merge"):
        type("Twice", (metrics.Mean,), {})


def test_from_functions(strategy: ParameterServerStrategy) -> None:
    """Steps on all workers update metrics that they captured, or were given; the coordinator reads them."""
    coordinator = ClusterCoordinator(strategy)
    mean, accuracy = metrics.Mean("mean of steps"), metrics.Accuracy("accuracy of steps")

    def step(n: int, given: metrics.Accuracy) -> float:
        mean.update_state([n, n + 1])
        given.update_state([n % 2], [0])
        return given.result()

    results = [coordinator.schedule(step, args=(n, accuracy)) for n in range(40)]
    coordinator.join()
    assert mean.result() == 20.0
    assert accuracy.result() == 0.5
    assert all(0 <= result <= 1 for result in coordinator.fetch(results))


def test_once_under_a_killed_worker(cluster: LocalCluster, strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """A worker dies after an update was applied; its function runs again elsewhere and counts once."""
    coordinator = ClusterCoordinator(strategy)
    total, mean = metrics.Sum("sum under a kill"), metrics.Mean("mean under a kill")
    with strategy.scope():
        runs = Variable(np.int64(0), name="runs")
    marker = str(tmp_path / "died")

    def step(n: int) -> None:
        total.update_state(1)
        mean.update_state([n, n])
        if n == 7 and not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(9)
        runs.assign_add(1)

    for n in range(20):
        coordinator.schedule(step, args=(n,))
    coordinator.join()
    assert os.path.exists(marker), "a worker did die"
    assert int(runs) == 20
    assert total.result() == 20
    assert mean.result() == 9.5
