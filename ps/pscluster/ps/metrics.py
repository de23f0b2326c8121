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
from pscluster.ps.creating import current_creator
from pscluster.ps.variables import Variable, read_variables
from pscluster.v1 import ps_pb2


class Metric(Handle):
    """Base of metrics that are sums: `states` names the float64 scalars that are added up."""

    handle_kind = "metric"
    states: tuple[str, ...] = ("total",)
    name: str
    _variables: list[Variable]

    def __init__(self, name: str | None = None) -> None:
        creator = current_creator(f"metric {type(self).__name__}")
        with creator.reserving("metric", name, type(self).__name__.lower()) as self.name:
            self._variables = []
            try:
                for state in self.states:
                    made = Variable(np.float64(0), name=f"{self.name}/{state}", trainable=False)
                    self._variables.append(made)
            except BaseException:
                for made in self._variables:
                    creator.delete_variable(made)
                raise

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


def _numbers(values: npt.ArrayLike, metric: str, what: str) -> npt.NDArray[np.float64]:
    """As float64. MisuseError if they are no real numbers: one NaN would spoil the metric until its reset."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # a ragged list
        raise MisuseError(f"metric {metric!r}: the {what} are no array: {error}") from None
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise MisuseError(f"metric {metric!r}: the {what} are {array.dtype.name}, but must be real numbers")
    return array.astype(np.float64)


def _weighted(values: npt.ArrayLike, sample_weight: npt.ArrayLike | None, metric: str) -> tuple[float, float]:
    """Weighted sum of the values, and the sum of the weights."""
    array = _numbers(values, metric, "values")
    if sample_weight is None:
        return float(array.sum()), float(array.size)
    weights = _numbers(sample_weight, metric, "weights")
    try:
        weights = np.broadcast_to(weights.reshape(weights.shape + (1,) * (array.ndim - weights.ndim)), array.shape)
    except ValueError:
        raise MisuseError(
            f"metric {metric!r}: sample_weight has shape {weights.shape}, which does not fit values of shape "
            f"{array.shape}"
        ) from None
    return float((array * weights).sum()), float(weights.sum())


class Sum(Metric):
    """The (weighted) sum of all values."""

    def update_state(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> None:
        """Add the values."""
        self._add(_weighted(values, sample_weight, self.name)[0])

    def result(self) -> float:
        """The sum."""
        return self._read()[0]


class Mean(Metric):
    """The (weighted) mean of all values; 0 of none, as the peer."""

    states = ("total", "count")

    def update_state(self, values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> None:
        """Take the values in."""
        self._add(*_weighted(values, sample_weight, self.name))

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
                f"metric {self.name!r}: y_true has shape {true.shape}, y_pred {predicted.shape}: "
                "give predicted classes of the labels' shape"
            )
        self._add(*_weighted(true == predicted, sample_weight, self.name))


_CLASSES: dict[str, type[Metric]] = {cls.__name__: cls for cls in (Sum, Mean, Accuracy)}
