"""Metrics: what is kept of labels and predictions, and what comes of it.

A metric's state is a dict of arrays. It is made empty (`initial`), takes examples in (`update`), is put together with
another one's (`merge`), and gives the `result`: four methods without side effects. `ClusterCoordinator.evaluate` takes
whatever has them, and its states travel back with the functions' results; Keras' or torchmetrics' metrics can be
wrapped so.

The states of the metrics here are sums. Made in `strategy.scope()`, they live on the servers, as variables that step
functions add to (`update_state`), once each however often they are retried. Made elsewhere a metric keeps nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError, ProtocolError, PsClusterError, UnknownVariableError
from pscluster.core.handles import Handle
from pscluster.ps.client.updates import UpdatePart
from pscluster.ps.handles.scope import current_creator, has_creator
from pscluster.ps.handles.variable import Variable, read_variables
from pscluster.v1 import ps_pb2

State = dict[str, npt.NDArray[Any]]
"""Of a metric; arrays of any shapes."""

Floats = npt.NDArray[np.float64]

_MAX_THRESHOLDS = 1_000_000


class MetricLike(Protocol):
    """What can be evaluated."""

    name: str

    def initial(self) -> State:
        """The state of no examples."""
        ...

    def update(self, state: State, *values: Any) -> State:
        """The state with these examples taken in."""
        ...

    def merge(self, state: State, other: State) -> State:
        """Of the examples of both, the other's behind."""
        ...

    def result(self, state: State) -> Any:
        """What it comes to."""
        ...


class Metric(Handle):
    """Base of metrics that are sums: `shapes` gives the float64 states that are added up."""

    handle_kind = "metric"
    shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {"total": ()}
    name: str
    _variables: list[Variable]

    def __init_subclass__(cls) -> None:
        """Refuse classes of the user's: handles travel by the names of the classes here."""
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
                for made in self._variables:
                    creator.delete_variable(made)
                raise

    def _configure(self, **config: Any) -> None:
        """Take the arguments that a kind of metric has."""

    @property
    def handle_key(self) -> str:
        """The class, the name, the arguments, and whether it lives on the servers."""
        return json.dumps([type(self).__name__, self.name, self._config, bool(self._variables)])

    @staticmethod
    def of(key: str, variable: Callable[[str], Variable]) -> Metric:
        """The handle of a metric that exists. ProtocolError if the key is none of a metric."""
        try:
            kind, name, config, lives = json.loads(key)
            cls = _CLASSES.get(kind)
            if cls is None:
                raise UnknownVariableError(f"unknown kind of metric: {kind!r:.80}")
            handle: Metric = object.__new__(cls)
            handle.name, handle._config = str(name), config
            handle._configure(**config)
        except PsClusterError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"{key[:80]!r} is not the key of a metric: {error}") from None
        handle._variables = [variable(f"{name}/{state}") for state in handle.initial()] if lives else []
        return handle

    # States that travel

    def initial(self) -> State:
        """Zeros."""
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}

    def update(self, state: State, *values: Any) -> State:
        """The state with these examples taken in; see `update_state` for what they are."""
        return self.merge(state, self._amounts(*values))

    def merge(self, state: State, other: State) -> State:
        """The sums."""
        return {name: values + other[name] for name, values in state.items()}

    def _amounts(self, *values: Any) -> State:
        raise NotImplementedError

    def _result(self, state: State) -> float:
        raise NotImplementedError

    # A state on the servers

    def _add(self, *values: Any) -> None:
        parts: list[UpdatePart] = []
        for variable, amount in zip(self._on_servers(), self._amounts(*values).values(), strict=True):
            parts += variable.update_parts(ps_pb2.ADD, amount)
        self._variables[0].client.update(parts)

    def _on_servers(self) -> list[Variable]:
        if not self._variables:
            raise MisuseError(
                f"metric {self.name!r} was made outside of `with strategy.scope():` and has no state: make it there, "
                "or pass it to evaluate()"
            )
        return self._variables

    def result(self, state: State | None = None) -> float:
        """The metric over a state; without one, over all that was added on the servers since the last reset."""
        if state is None:
            variables = self._on_servers()
            state = dict(zip(self.initial(), map(np.asarray, read_variables(variables)), strict=True))
        return float(self._result(state))

    def reset_states(self) -> None:
        """Begin anew."""
        parts: list[UpdatePart] = []
        for variable, values in zip(self._on_servers(), self.initial().values(), strict=True):
            parts += variable.update_parts(ps_pb2.ASSIGN, values)
        self._variables[0].client.update(parts)

    reset_state = reset_states

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _numbers(values: npt.ArrayLike, metric: str, what: str) -> npt.NDArray[np.float64]:
    """As float64. MisuseError if they are no real numbers: one NaN would spoil the metric until its reset."""
    try:
        array = array_of(values)
    except ValueError as error:  # a ragged list
        raise MisuseError(f"metric {metric!r}: the {what} are not an array: {error}") from None
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise MisuseError(f"metric {metric!r}: the {what} are {array.dtype.name}, but must be real numbers")
    return array.astype(np.float64)


def _weights(array: npt.NDArray[Any], sample_weight: npt.ArrayLike | None, metric: str) -> Floats:
    """One for each of the values."""
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


def _pair(y_true: npt.ArrayLike, y_pred: npt.ArrayLike, metric: str) -> tuple[Floats, Floats]:
    """Labels and predictions of one shape. MisuseError if they are not."""
    true, predicted = _numbers(y_true, metric, "labels"), _numbers(y_pred, metric, "predictions")
    if true.shape != predicted.shape:
        raise MisuseError(
            f"metric {metric!r}: y_true has shape {true.shape}, y_pred {predicted.shape}: give predictions with "
            "the shape of the labels"
        )
    return true, predicted


class Sum(Metric):
    """The (weighted) sum of all values."""

    def update_state(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> None:
        """Add the values."""
        self._add(values, sample_weight)

    def _amounts(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> State:
        array = _numbers(values, self.name, "values")
        return {"total": (array * _weights(array, sample_weight, self.name)).sum()}

    def _result(self, state: State) -> float:
        return float(state["total"])


class _Average(Metric):
    """Base of weighted means; 0 of none, as the peer."""

    shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {"total": (), "count": ()}

    def _averaged(self, values: Floats, sample_weight: npt.ArrayLike | None) -> State:
        weights = _weights(values, sample_weight, self.name)
        return {"total": (values * weights).sum(), "count": weights.sum()}

    def _result(self, state: State) -> float:
        return _ratio(state["total"], state["count"])


class Mean(_Average):
    """The (weighted) mean of all values."""

    def update_state(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> None:
        """Take the values in."""
        self._add(values, sample_weight)

    def _amounts(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> State:
        return self._averaged(_numbers(values, self.name, "values"), sample_weight)


class _OfPairs(Metric):
    """Base of metrics of labels and predictions."""

    def update_state(
        self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Compare labels and predictions."""
        self._add(y_true, y_pred, sample_weight)


class _MeanOfPairs(_OfPairs, _Average):
    """Base of means of something that each pair gives."""

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> Floats:
        raise NotImplementedError

    def _amounts(
        self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> State:
        return self._averaged(self._of_pairs(y_true, y_pred), sample_weight)


class Accuracy(_MeanOfPairs):
    """How often predictions equal labels."""

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> Floats:
        true, predicted = array_of(y_true), array_of(y_pred)
        if true.shape != predicted.shape:
            raise MisuseError(
                f"metric {self.name!r}: y_true has shape {true.shape}, y_pred {predicted.shape}: "
                "give predicted classes with the shape of the labels"
            )
        return np.asarray(true == predicted, np.float64)


class SparseCategoricalAccuracy(_MeanOfPairs):
    """How often the largest of a row of scores is at the label: labels of shape (...,), scores (..., classes)."""

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


class MeanSquaredError(_MeanOfPairs):
    """The mean of the squared differences."""

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> Floats:
        true, predicted = _pair(y_true, y_pred, self.name)
        return np.asarray((true - predicted) ** 2)


class _AtThresholds(_OfPairs):
    """Base of metrics of labels that are 0 or 1, and scores: how many are above thresholds, by label."""

    _thresholds: Floats

    def initial(self) -> State:
        """Weights of the true and false positives above each threshold, and of all positives and negatives."""
        above = np.zeros(self._thresholds.shape)
        return {"true": above, "false": above.copy(), "positives": np.zeros(()), "negatives": np.zeros(())}

    def _amounts(
        self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> State:
        true, predicted = _pair(y_true, y_pred, self.name)
        if np.isnan(predicted).any():
            raise MisuseError(f"metric {self.name!r}: the predictions contain NaN")
        if not np.isin(true, (0, 1)).all():
            raise MisuseError(f"metric {self.name!r}: the labels must be 0 or 1, or False or True")
        weights = _weights(true, sample_weight, self.name).ravel()
        # Thresholds rise: a score is above all up to its place, so that one histogram does for all of them.
        places = np.searchsorted(self._thresholds, predicted.ravel(), "left")
        found: State = {}
        for name, total, label in (("true", "positives", 1), ("false", "negatives", 0)):
            mine = true.ravel() == label
            histogram = np.bincount(places[mine], weights[mine], len(self._thresholds) + 1)
            found[name] = histogram[::-1].cumsum()[::-1][1:]
            found[total] = weights[mine].sum()
        return {name: found[name] for name in ("true", "false", "positives", "negatives")}


class _AtOneThreshold(_AtThresholds):
    """Base of those that ask whether a score is above one."""

    def __init__(self, name: str | None = None, *, threshold: float = 0.5) -> None:
        super().__init__(name, threshold=float(threshold))

    def _configure(self, **config: Any) -> None:
        self._thresholds = np.array([config["threshold"]])


class Precision(_AtOneThreshold):
    """Of the examples with a score above the threshold, the share that is positive; 0 of none."""

    def _result(self, state: State) -> float:
        return _ratio(state["true"][0], state["true"][0] + state["false"][0])


class Recall(_AtOneThreshold):
    """Of the positive examples, the share with a score above the threshold; 0 of none."""

    def _result(self, state: State) -> float:
        return _ratio(state["true"][0], state["positives"])


class AUC(_AtThresholds):
    """The area under the ROC curve, by so many thresholds from 0 to 1 (trapezoids, as the peer); 0 without both labels.

    Args:
        name: of the metric.
        num_thresholds: 2 or more; scores must lie in [0, 1].
    """

    def __init__(self, name: str | None = None, *, num_thresholds: int = 200) -> None:
        super().__init__(name, num_thresholds=num_thresholds)

    def _configure(self, **config: Any) -> None:
        num_thresholds = checks.whole("num_thresholds", config["num_thresholds"], at_least=2, at_most=_MAX_THRESHOLDS)
        inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        self._thresholds = np.array([-1e-7, *inner, 1 + 1e-7])

    def _amounts(
        self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> State:
        scores = _numbers(y_pred, self.name, "predictions")
        if scores.size and not (scores.min() >= 0 and scores.max() <= 1):
            raise MisuseError(
                f"metric {self.name!r}: the scores range from {scores.min():g} to {scores.max():g}; give "
                "probabilities between 0 and 1"
            )
        return super()._amounts(y_true, y_pred, sample_weight)

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
