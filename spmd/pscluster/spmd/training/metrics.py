"""Metrics of global arrays. Their states are variables of the mesh, so a program updates them with everything else."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core.errors import InvalidUpdateError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.methods import xp
from pscluster.spmd.variables.variable import DVariable, update_together


class _Average:
    """A mean of values with weights: it is 0 without values.

    Args:
        name: its variables are `name/total` and `name/count`; generated if not given.
        mesh: that its state lies on, whole on each device.
    """

    def __init__(self, name: str | None = None, *, mesh: Mesh) -> None:
        self.name = name or type(self).__name__.lower()
        total, count = (None, None) if name is None else (f"{name}/total", f"{name}/count")
        zero, layout = np.float64(0), Layout.replicated(mesh, 0)
        self._total = DVariable(zero, layout, total, trainable=False)
        self._count = DVariable(zero, layout, count, trainable=False)

    def _add(self, values: Any, sample_weight: Any) -> None:
        weighted = values if sample_weight is None else values * sample_weight
        count: Any = float(np.prod(np.shape(values), dtype=np.int64))
        if sample_weight is not None:
            count = xp.broadcast_to(sample_weight, np.shape(values)).sum(dtype=np.float64)
        update_together("add", [(self._total, xp.sum(weighted, dtype=np.float64)), (self._count, count)])

    def result(self) -> float:
        """Return the mean, once all that was added before is there."""
        total, count = float(self._total.full()), float(self._count.full())
        return total / count if count else 0.0

    def reset_state(self) -> None:
        """Begin anew."""
        update_together("assign", [(self._total, 0.0), (self._count, 0.0)])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class Mean(_Average):
    """The mean of all values since the last reset: see `_Average`."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, all with weight 1, or each with its own. Returns without waiting."""
        self._add(values, sample_weight)


class SparseCategoricalAccuracy(_Average):
    """The share of rows whose largest score is that of the label, since the last reset: see `_Average`."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add rows: labels, and a score for each class."""
        if np.shape(y_pred)[:-1] != np.shape(y_true):
            raise InvalidUpdateError(
                f"metric {self.name!r}: scores of shape {np.shape(y_pred)} do not belong to labels of shape "
                f"{np.shape(y_true)}: give a score for each label and class"
            )
        self._add((xp.argmax(y_pred, axis=-1) == y_true).astype(np.float64), sample_weight)
