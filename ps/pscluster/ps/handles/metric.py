"""What a metric is: it accumulates labels and predictions in a state, and computes a result from it.

A metric's state is a dict of arrays. Four methods without side effects make an empty one (`initial`), add examples to
it (`update`), combine two (`merge`), and compute the `result`. `ClusterCoordinator.evaluate` takes any object that has
them, and the states travel back with the functions' results; metrics of Keras or torchmetrics can be wrapped this way.

The states of pscluster's own metrics (see metrics.py) are sums. Those of metrics made in `strategy.scope()` live on the
servers, as variables to which step functions add (`update_state`), once each however often they are retried. Metrics
made elsewhere have no state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

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

_MODULE = "pscluster.ps.handles.metrics"
_KINDS: dict[str, type[Metric]] = {}
"""By name: all kinds of metrics, which register as they are defined."""


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
        """Register a kind of metric. Refuse users' subclasses: handles travel by the names of pscluster's classes."""
        super().__init_subclass__()
        if cls.__module__ != _MODULE:
            raise TypeError(
                f"{cls.__qualname__} can't be a subclass of pscluster's metrics: write a separate class with a name "
                "and the methods initial, update, merge and result, which may call another metric's (docs/datasets.md, "
                "Exact evaluation)"
            )
        if not cls.__name__.startswith("_"):
            _KINDS[cls.__name__] = cls

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
            cls = _KINDS.get(kind)
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
        weights = broadcast_weights(values, sample_weight, self.name)
        return {"total": (values * weights).sum(), "count": weights.sum()}

    def _result(self, state: State) -> float:
        return ratio(state["total"], state["count"])

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


def as_numbers(values: npt.ArrayLike, metric: str, argument: str) -> npt.NDArray[np.float64]:
    """Return values as float64. MisuseError unless they are real numbers."""
    try:
        array = array_of(values)
    except ValueError as error:  # a ragged list
        raise MisuseError(f"metric {metric!r}: the {argument} are not an array: {error}") from None
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        given, hint = array.dtype.name, ""
        if not array.ndim and array.item() is None:
            given, hint = "None", ": the step of an evaluation has to return what update_state() takes"
        raise MisuseError(f"metric {metric!r}: the {argument} are {given}, but must be real numbers{hint}")
    return array.astype(np.float64)


def broadcast_weights(array: npt.NDArray[Any], sample_weight: Weights, metric: str) -> Floats:
    if sample_weight is None:
        return np.ones(array.shape)
    weights = as_numbers(sample_weight, metric, "weights")
    try:
        return np.broadcast_to(weights.reshape(weights.shape + (1,) * (array.ndim - weights.ndim)), array.shape)
    except ValueError:
        raise MisuseError(
            f"metric {metric!r}: sample_weight has shape {weights.shape}, which does not fit values of shape "
            f"{array.shape}"
        ) from None


def check_shapes(true: npt.NDArray[Any], predicted: npt.NDArray[Any], metric: str, argument: str) -> None:
    if true.shape != predicted.shape:
        raise MisuseError(
            f"metric {metric!r}: y_true has shape {true.shape}, y_pred {predicted.shape}: give {argument} with the "
            "shape of the labels"
        )


def as_pair(y_true: npt.ArrayLike, y_pred: npt.ArrayLike, metric: str) -> tuple[Floats, Floats]:
    """Return labels and predictions as float64. MisuseError unless they have one shape."""
    true, predicted = as_numbers(y_true, metric, "labels"), as_numbers(y_pred, metric, "predictions")
    check_shapes(true, predicted, metric, "predictions")
    return true, predicted


def ratio(total: npt.ArrayLike, count: npt.ArrayLike) -> float:
    return float(np.asarray(total) / np.asarray(count)) if count else 0.0
