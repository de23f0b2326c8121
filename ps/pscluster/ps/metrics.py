"""Metrics whose state lives on the servers: updated by step functions, once each however often they are retried.

The state is a few scalar variables, made where the metric is made, in `strategy.scope()`. An update adds to
them in one request.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import MisuseError, UnknownVariableError
from pscluster.core.handles import Handle
from pscluster.ps.client import UpdatePart
from pscluster.ps.variables import Variable, read_variables
from pscluster.v1 import ps_pb2


class Metric(Handle):
    """Base of metrics that are sums: `states` names the float64 scalars that are added up."""

    handle_kind = "metric"
    states: tuple[str, ...] = ("total",)
    name: str
    _variables: list[Variable]

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__.lower()
        self._variables = [
            Variable(np.float64(0), name=f"{self.name}/{state}", trainable=False) for state in self.states
        ]

    @property
    def handle_key(self) -> str:
        """The class and the name."""
        return f"{type(self).__name__}:{self.name}"

    @staticmethod
    def of(key: str, variable: Callable[[str], Variable]) -> Metric:
        """The handle of a metric that exists."""
        kind, _, name = key.partition(":")
        cls = _CLASSES.get(kind)
        if cls is None:
            raise UnknownVariableError(f"there is no metric of the kind {kind!r}")
        handle: Metric = object.__new__(cls)
        handle.name = name
        handle._variables = [variable(f"{name}/{state}") for state in cls.states]
        return handle

    def _add(self, *amounts: float) -> None:
        parts: list[UpdatePart] = []
        for variable, amount in zip(self._variables, amounts, strict=True):
            parts += variable.update_parts(ps_pb2.ADD, np.float64(amount))
        self._variables[0].client.update(parts)

    def _read(self) -> list[float]:
        return [float(value) for value in read_variables(self._variables)]

    def result(self) -> float:
        """The metric over everything since the last reset."""
        raise NotImplementedError

    def reset_states(self) -> None:
        """Begin anew."""
        parts: list[UpdatePart] = []
        for variable in self._variables:
            parts += variable.update_parts(ps_pb2.ASSIGN, np.float64(0))
        self._variables[0].client.update(parts)

    reset_state = reset_states

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _weighted(values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> tuple[float, float]:
    """Weighted sum of the values, and the sum of the weights."""
    array = np.asarray(values, np.float64)
    if sample_weight is None:
        return float(array.sum()), float(array.size)
    weights = np.asarray(sample_weight, np.float64)
    try:
        weights = np.broadcast_to(weights.reshape(weights.shape + (1,) * (array.ndim - weights.ndim)), array.shape)
    except ValueError:
        raise MisuseError(
            f"sample_weight has shape {weights.shape}, which does not fit values of shape {array.shape}"
        ) from None
    return float((array * weights).sum()), float(weights.sum())


class Sum(Metric):
    """The (weighted) sum of all values."""

    def update_state(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> None:
        """Add the values."""
        self._add(_weighted(values, sample_weight)[0])

    def result(self) -> float:
        """The sum."""
        return self._read()[0]


class Mean(Metric):
    """The (weighted) mean of all values; 0 of none, as the peer."""

    states = ("total", "count")

    def update_state(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> None:
        """Take the values in."""
        self._add(*_weighted(values, sample_weight))

    def result(self) -> float:
        """The mean."""
        total, count = self._read()
        return total / count if count else 0.0


class Accuracy(Mean):
    """How often predictions equal labels."""

    def update_state(  # type: ignore[override]  # two arrays, as the peer
        self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Compare labels and predictions, element by element."""
        true, predicted = np.asarray(y_true), np.asarray(y_pred)
        if true.shape != predicted.shape:
            raise MisuseError(
                f"y_true has shape {true.shape}, y_pred {predicted.shape}: give predicted classes of the labels' shape"
            )
        self._add(*_weighted(true == predicted, sample_weight))


_CLASSES: dict[str, type[Metric]] = {cls.__name__: cls for cls in (Sum, Mean, Accuracy)}
