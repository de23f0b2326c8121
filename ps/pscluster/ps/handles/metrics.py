"""Metrics: they accumulate labels and predictions in a state, and compute a result from it.

A metric's state is a dict of arrays. Four methods without side effects make an empty one (`initial`), add examples to
it (`update`), combine two (`merge`), and compute the `result`. `ClusterCoordinator.evaluate` takes any object that has
them, and the states travel back with the functions' results; metrics of Keras or torchmetrics can be wrapped this way.

The states of the metrics here are sums. Those of metrics made in `strategy.scope()` live on the servers, as variables
to which step functions add (`update_state`), once each however often they are retried. Metrics made elsewhere have no
state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError, ProtocolError, PsClusterError, UnknownVariableError
from pscluster.core.handles import Handle
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.handles.reads import read_variables
from pscluster.ps.handles.scope import current_creator, has_creator
from pscluster.ps.handles.variables.variable import Variable
from pscluster.v1 import ps_pb2

State = dict[str, npt.NDArray[Any]]
"""The state of a metric: arrays of any shapes, by name."""

Floats = npt.NDArray[np.float64]
Weights = npt.ArrayLike | None

_MAX_THRESHOLDS = 1_000_000


class MetricLike(Protocol):
    """A metric that `evaluate` takes."""

    name: str

    def initial(self) -> State:
        """Return the state without examples."""

    def update(self, state: State, *values: Any) -> State:
        """Return the state with these examples added."""

    def merge(self, state: State, other: State) -> State:
        """Return the state of the examples of both, those of `other` last."""

    def result(self, state: State) -> Any:
        """Return the value of the metric."""


class Metric(Handle):
    """Base of metrics whose states are sums, named by `states`. By default a weighted mean, 0 without values."""

    handle_kind = "metric"
    states: ClassVar[Sequence[str]] = ("total", "count")
    name: str
    _variables: list[Variable]

    def __init_subclass__(cls) -> None:
        """Refuse users' subclasses: handles travel by the names of the classes here."""
        super().__init_subclass__()
        if cls.__module__ != __name__:
            raise TypeError(
                f"{cls.__qualname__} can't be a subclass of pscluster's metrics: write a separate class with a name "
                "and the methods initial, update, merge and result, which may call another metric's (docs/datasets.md, "
                "Exact evaluation)"
            )

    def __init__(self, name: str | None = None, **config: Any) -> None:
        self._configure(**config)
        self._config, self._variables = config, []
        kind = type(self).__name__
        if not has_creator():
            self.name = kind.lower() if name is None else name
            return
        creator = current_creator(f"metric {kind}")
        with creator.reserving("metric", name, kind.lower()) as self.name:
            try:
                for state, values in self.initial().items():
                    self._variables.append(Variable(values, name=f"{self.name}/{state}", trainable=False))
            except BaseException:
                for variable in self._variables:
                    creator.delete_variable(variable)
                raise

    def _configure(self, **config: Any) -> None:
        """Set the arguments of this kind of metric."""

    @property
    def handle_key(self) -> str:
        states = [variable.handle_key for variable in self._variables]
        return json.dumps([type(self).__name__, self.name, self._config, states])

    @staticmethod
    def of(key: str, variable: Callable[[str], Variable]) -> Metric:
        """Return the handle of an existing metric, its states by calling `variable` with their keys.

        ProtocolError if the key is invalid.
        """
        try:
            kind, name, config, states = json.loads(key)
            cls = _CLASSES.get(kind)
            if cls is None:
                raise UnknownVariableError(f"unknown kind of metric: {kind!r:.80}")
            handle: Metric = object.__new__(cls)
            handle.name, handle._config = str(name), config
            handle._configure(**config)
            if not isinstance(states, list) or len(states) not in (0, len(handle.initial())):
                raise ValueError("it has other states")
            if not all(isinstance(state, str) for state in states):
                raise ValueError("a state has a key that is not text")
        except PsClusterError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"{key[:80]!r} is not the key of a metric: {error}") from None
        handle._variables = [variable(state) for state in states]
        return handle

    # States that travel

    def initial(self) -> State:
        """Return the state without examples."""
        return {name: np.zeros(()) for name in self.states}

    def update(self, state: State, *values: Any) -> State:
        """Return the state with these examples added; for the arguments see `update_state`."""
        return self.merge(state, self._amounts(*values))

    def merge(self, state: State, other: State) -> State:
        """Return the state of the examples of both."""
        return {name: values + other[name] for name, values in state.items()}

    def _amounts(self, *values: Any) -> State:
        raise NotImplementedError

    def _sums(self, values: Floats, sample_weight: Weights) -> State:
        weights = _weights(values, sample_weight, self.name)
        return {"total": (values * weights).sum(), "count": weights.sum()}

    def _result(self, state: State) -> float:
        return _ratio(state["total"], state["count"])

    # A state on the servers

    def _update(self, kind: ps_pb2.UpdateKind, state: State) -> None:
        variables, updates = self._on_servers(), list[ShardUpdate]()
        with variables[0].client.gate:
            for name, variable in zip(self.initial(), variables, strict=True):
                updates += variable.shard_updates(kind, state[name])
            variables[0].client.update(updates)

    def _on_servers(self) -> list[Variable]:
        if not self._variables:
            raise MisuseError(
                f"metric {self.name!r} was made outside of `with strategy.scope():` and has no state: make it there, "
                "or pass it to evaluate()"
            )
        return self._variables

    def result(self, state: State | None = None) -> float:
        """Return the value for a state; without one, for all examples added on the servers since the last reset."""
        if state is None:
            variables = self._on_servers()
            state = dict(zip(self.initial(), map(np.asarray, read_variables(variables)), strict=True))
        return float(self._result(state))

    def reset_states(self) -> None:
        """Reset the state on the servers."""
        self._update(ps_pb2.ASSIGN, self.initial())

    reset_state = reset_states

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _numbers(values: npt.ArrayLike, metric: str, argument: str) -> npt.NDArray[np.float64]:
    """Return values as float64. MisuseError unless they are real numbers."""
    try:
        array = array_of(values)
    except ValueError as error:  # a ragged list
        raise MisuseError(f"metric {metric!r}: the {argument} are not an array: {error}") from None
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise MisuseError(f"metric {metric!r}: the {argument} are {array.dtype.name}, but must be real numbers")
    return array.astype(np.float64)


def _weights(array: npt.NDArray[Any], sample_weight: Weights, metric: str) -> Floats:
    if sample_weight is None:
        return np.ones(array.shape)
    weights = _numbers(sample_weight, metric, "weights")
    try:
        return np.broadcast_to(weights.reshape(weights.shape + (1,) * (array.ndim - weights.ndim)), array.shape)
    except ValueError:
        raise MisuseError(
            f"metric {metric!r}: sample_weight has shape {weights.shape}, which does not fit values of shape "
            f"{array.shape}"
        ) from None


def _check_shapes(true: npt.NDArray[Any], predicted: npt.NDArray[Any], metric: str, argument: str) -> None:
    if true.shape != predicted.shape:
        raise MisuseError(
            f"metric {metric!r}: y_true has shape {true.shape}, y_pred {predicted.shape}: give {argument} with the "
            "shape of the labels"
        )


def _pair(y_true: npt.ArrayLike, y_pred: npt.ArrayLike, metric: str) -> tuple[Floats, Floats]:
    """Return labels and predictions as float64. MisuseError unless they have one shape."""
    true, predicted = _numbers(y_true, metric, "labels"), _numbers(y_pred, metric, "predictions")
    _check_shapes(true, predicted, metric, "predictions")
    return true, predicted


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
        return self._sums(_numbers(values, self.name, "values"), sample_weight)


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
        _check_shapes(true, predicted, self.name, "predicted classes")
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
        true, predicted = array_of(y_true), _numbers(y_pred, self.name, "predictions")
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
        true, predicted = _pair(y_true, y_pred, self.name)
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
        true, scores = _pair(y_true, y_pred, self.name)
        self._check_scores(scores)
        if not np.isin(true, (0, 1)).all():
            raise MisuseError(f"metric {self.name!r}: the labels must be 0 or 1, or False or True")
        weights = _weights(true, sample_weight, self.name).ravel()
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
        return _ratio(state["true"][0], state["true"][0] + state["false"][0])


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
        return _ratio(state["true"][0], state["positives"])


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


def _ratio(total: npt.ArrayLike, count: npt.ArrayLike) -> float:
    return float(np.asarray(total) / np.asarray(count)) if count else 0.0


_CLASSES: dict[str, type[Metric]] = {
    cls.__name__: cls
    for cls in (Sum, Mean, Accuracy, SparseCategoricalAccuracy, MeanSquaredError, Precision, Recall, AUC)
}
