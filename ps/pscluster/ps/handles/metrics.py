"""The metrics that users make in `strategy.scope()`, or pass to `evaluate`. For what they share, see metric.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError
from pscluster.ps.handles.metric import (
    Floats,
    State,
    Weights,
    as_numbers,
    as_pair,
    broadcast_weights,
    check_shapes,
    ratio,
)
from pscluster.ps.handles.metric import Metric as Metric
from pscluster.ps.handles.metric import MetricLike as MetricLike
from pscluster.v1 import ps_pb2

_MAX_THRESHOLDS = 1_000_000


class Mean(Metric):
    """The (weighted) mean of all values; 0 without values.

    Examples:
        >>> with strategy.scope():
        ...     m = metrics.Mean(name="mean")
        >>> m.update_state([1.0, 2.0, 6.0])
        >>> m.result()
        3.0
    """

    def update_state(self, values: npt.ArrayLike, sample_weight: Weights = None) -> None:
        """Add values, on the servers: one update, which counts once even if the function runs again.

        Args:
            values: numbers of any shape.
            sample_weight: their weights, of a shape that NumPy broadcasts to theirs. Default: 1 each.

        Raises:
            MisuseError: values or weights are no numbers, or their shapes do not fit. Nothing was added.
        """
        self._update(ps_pb2.ADD, self._amounts(values, sample_weight))

    def _amounts(self, values: npt.ArrayLike, sample_weight: Weights = None) -> State:
        return self._sums(as_numbers(values, self.name, "values"), sample_weight)


class Sum(Mean):
    """The (weighted) sum of all values.

    Examples:
        >>> with strategy.scope():
        ...     m = metrics.Sum(name="sum")
        >>> m.update_state([1.0, 2.0])
        >>> m.result()
        3.0
    """

    states = ("total",)

    def _result(self, state: State) -> float:
        return float(state["total"])


class _OfPairs(Metric):
    """Base of metrics of labels and predictions. By default the mean of `_of_pairs`."""

    def update_state(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: Weights = None) -> None:
        """Add examples, on the servers: one update, which counts once even if the function runs again.

        Args:
            y_true: the labels.
            y_pred: the predictions or scores, one for each label; the class says of which shape.
            sample_weight: the examples' weights, of a shape that NumPy broadcasts to the labels'. Default: 1 each.

        Raises:
            MisuseError: something is not a number, or the shapes do not fit. Nothing was added.
        """
        self._update(ps_pb2.ADD, self._amounts(y_true, y_pred, sample_weight))

    def _amounts(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: Weights = None) -> State:
        return self._sums(self._of_pairs(y_true, y_pred), sample_weight)

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> Floats:
        raise NotImplementedError


class Accuracy(_OfPairs):
    """The share of predictions that equal their labels.

    Examples:
        >>> with strategy.scope():
        ...     m = metrics.Accuracy(name="accuracy")
        >>> m.update_state([1, 2, 3, 4], [1, 2, 3, 0])
        >>> m.result()
        0.75
    """

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> Floats:
        true, predicted = array_of(y_true), array_of(y_pred)
        check_shapes(true, predicted, self.name, "predicted classes")
        return np.asarray(true == predicted, np.float64)


class SparseCategoricalAccuracy(_OfPairs):
    """The share of rows whose largest score is the label's. Labels have shape (...,), scores (..., classes).

    Args:
        name: of the metric, unique in the strategy; default: one of its kind.

    Examples:
        >>> with strategy.scope():
        ...     m = metrics.SparseCategoricalAccuracy(name="of classes")
        >>> m.update_state([1, 0], [[0.2, 0.8], [0.1, 0.9]])
        >>> m.result()
        0.5
    """

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> Floats:
        true, predicted = array_of(y_true), as_numbers(y_pred, self.name, "predictions")
        if predicted.ndim and true.shape == (*predicted.shape[:-1], 1):
            true = true[..., 0]
        if true.shape != predicted.shape[:-1] or not predicted.ndim:
            raise MisuseError(
                f"metric {self.name!r}: y_true has shape {true.shape}, y_pred {predicted.shape}: give labels, and for "
                "each a row of scores, one a class"
            )
        return np.asarray(true == predicted.argmax(-1), np.float64)


class MeanSquaredError(_OfPairs):
    """The mean of the squared differences. Labels and predictions have the same shape.

    Args:
        name: of the metric, unique in the strategy; default: one of its kind.

    Examples:
        >>> with strategy.scope():
        ...     m = metrics.MeanSquaredError(name="mse")
        >>> m.update_state([1.0, 2.0], [1.0, 4.0])
        >>> m.result()
        2.0
    """

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> Floats:
        true, predicted = as_pair(y_true, y_pred, self.name)
        return np.asarray((true - predicted) ** 2)


class _AtThresholds(_OfPairs):
    """Base of metrics of scores for labels 0 and 1. The state has the weights of scores above thresholds, by label."""

    _thresholds: Floats

    def initial(self) -> State:
        """Return weights of the true and false positives above each threshold, and of all positives and negatives."""
        above = np.zeros(self._thresholds.shape)
        return {"true": above, "false": above.copy(), "positives": np.zeros(()), "negatives": np.zeros(())}

    def _check_scores(self, scores: Floats) -> None:
        if np.isnan(scores).any():
            raise MisuseError(f"metric {self.name!r}: the predictions contain NaN")

    def _amounts(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: Weights = None) -> State:
        true, scores = as_pair(y_true, y_pred, self.name)
        self._check_scores(scores)
        if not np.isin(true, (0, 1)).all():
            raise MisuseError(f"metric {self.name!r}: the labels must be 0 or 1, or False or True")
        weights = broadcast_weights(true, sample_weight, self.name).ravel()
        # Thresholds ascend, so a score exceeds all those before its position: one histogram serves all thresholds.
        positions = np.searchsorted(self._thresholds, scores.ravel(), "left")
        state: State = {}
        for name, total, label in (("true", "positives", 1), ("false", "negatives", 0)):
            labelled = true.ravel() == label
            histogram = np.bincount(positions[labelled], weights[labelled], len(self._thresholds) + 1)
            state[name] = histogram[::-1].cumsum()[::-1][1:]
            state[total] = weights[labelled].sum()
        return state


class _AtOneThreshold(_AtThresholds):
    def __init__(self, name: str | None = None, *, threshold: float = 0.5) -> None:
        super().__init__(name, threshold=float(threshold))

    def _configure(self, **config: Any) -> None:
        self._thresholds = np.array([config["threshold"]])


class Precision(_AtOneThreshold):
    """The share of positives among examples with a score above the threshold; 0 if there are none.

    Args:
        name: of the metric, unique in the strategy; default: one of its kind.
        threshold: of the scores, which have the labels' shape. Labels are 0 and 1, or False and True.

    Examples:
        >>> with strategy.scope():
        ...     m = metrics.Precision(name="precision")
        >>> m.update_state([1, 0, 0], [0.9, 0.7, 0.1])
        >>> m.result()
        0.5
    """

    def _result(self, state: State) -> float:
        return ratio(state["true"][0], state["true"][0] + state["false"][0])


class Recall(_AtOneThreshold):
    """The share of positive examples with a score above the threshold; 0 if there are none.

    Args:
        name: of the metric, unique in the strategy; default: one of its kind.
        threshold: of the scores, which have the labels' shape. Labels are 0 and 1, or False and True.

    Examples:
        >>> with strategy.scope():
        ...     m = metrics.Recall(name="recall")
        >>> m.update_state([1, 0, 0], [0.9, 0.7, 0.1])
        >>> m.result()
        1.0
    """

    def _result(self, state: State) -> float:
        return ratio(state["true"][0], state["positives"])


class AUC(_AtThresholds):
    """The area under the ROC curve, as TensorFlow computes it, from thresholds between 0 and 1; 0 without both labels.

    Args:
        name: of the metric.
        num_thresholds: 2 or more. Scores must lie in [0, 1].
    """

    def __init__(self, name: str | None = None, *, num_thresholds: int = 200) -> None:
        super().__init__(name, num_thresholds=num_thresholds)

    def _configure(self, **config: Any) -> None:
        num_thresholds = checks.whole("num_thresholds", config["num_thresholds"], at_least=2, at_most=_MAX_THRESHOLDS)
        inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        self._thresholds = np.array([-1e-7, *inner, 1 + 1e-7])

    def _check_scores(self, scores: Floats) -> None:
        if scores.size and not (scores.min() >= 0 and scores.max() <= 1):
            raise MisuseError(
                f"metric {self.name!r}: the scores range from {scores.min():g} to {scores.max():g}; give "
                "probabilities between 0 and 1"
            )

    def _result(self, state: State) -> float:
        if not state["positives"] or not state["negatives"]:
            return 0.0
        true, false = state["true"] / state["positives"], state["false"] / state["negatives"]
        return float(((true[:-1] + true[1:]) / 2 * (false[:-1] - false[1:])).sum())
