"""The metrics that a Keras model is compiled with, computed in parts on several workers.

The state of a part is the sum, over its batches, of what each adds to the variables of the metrics. Keras makes these
variables when it first sees labels and predictions. So the form of a batch travels along, and where the results are
computed a batch of zeros of that form is used to make them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.ps.handles.metric import State

if TYPE_CHECKING:
    from pscluster.keras.served import ServedModel


@dataclass(eq=False)
class ModelMetrics:
    """All metrics of a served model, as one of `evaluate`'s: its result is a dict."""

    served: ServedModel
    name: str = "metrics of the model"
    several: bool = True

    def initial(self) -> State:
        return {"sums": np.zeros(()), "form": np.empty(0, np.uint8)}

    def update(self, state: State, sums: Any, form: Any) -> State:
        return self.merge(state, {"sums": sums, "form": form})

    def merge(self, state: State, other: State) -> State:
        form = state["form"] if state["form"].size else other["form"]
        return {"sums": np.asarray(state["sums"] + other["sums"]), "form": form}

    def result(self, state: State) -> dict[str, Any]:
        if not state["form"].size:
            raise MisuseError("there were no examples to evaluate the model with")
        copy = self.served._copy
        x, y, weights = _zeros_of(json.loads(state["form"].tobytes()))
        copy.build(x, y, copy.model(x, training=False), weights)
        total, size, *_ = sums = state["sums"]
        parts, at = [], 2
        for start in copy.initial_metrics:
            parts.append(sums[at : at + start.size])
            at += start.size
        results = copy.results(parts)
        return {
            name: float(value) if not np.ndim(value) else value
            for name, value in (results | {"loss": total / size}).items()
        }

    @staticmethod
    def form_of(batch: Any) -> Any:
        """Return the form of a batch as JSON, in bytes."""
        import keras

        parts = keras.utils.unpack_x_y_sample_weight(batch)
        return np.frombuffer(json.dumps([_form(part) for part in parts]).encode(), np.uint8)


def _form(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, dict):
        return {"dict": {key: _form(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {"tuple": [_form(item) for item in value]}
    array = np.asarray(value)
    return {"shape": [min(1, array.shape[0]), *array.shape[1:]] if array.ndim else [], "dtype": array.dtype.name}


def _zeros_of(form: Any) -> Any:
    if isinstance(form, list):
        return [_zeros_of(part) for part in form]
    if form is None:
        return None
    if "dict" in form:
        return {key: _zeros_of(item) for key, item in form["dict"].items()}
    if "tuple" in form:
        return tuple(_zeros_of(item) for item in form["tuple"])
    return np.zeros(form["shape"], form["dtype"])
