"""What an optimizer does with whole gradients before they are sent: it scales and clips them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.ps.handles.indexing import Array, Gradient, IndexedSlices
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.optim.row_sums import deduplicate

NonFinite = Literal["apply", "count", "skip", "refuse"]
_POLICIES = ("apply", "count", "skip", "refuse")


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What to do with gradients before they are sent."""

    clipvalue: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    loss_scale_factor: float | None = None
    nonfinite: str = "apply"

    def __post_init__(self) -> None:
        for name in ("clipvalue", "clipnorm", "global_clipnorm", "loss_scale_factor"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checks.real(name, value, ", or None for none", above=0))
        if self.clipnorm is not None and self.global_clipnorm is not None:
            raise ValueError("clipnorm and global_clipnorm are both set: give one of them")
        if self.nonfinite not in _POLICIES:
            raise ValueError(f"nonfinite is {self.nonfinite!r}; give one of {', '.join(_POLICIES)}")

    @property
    def changes(self) -> bool:
        """Whether gradients are scaled or clipped."""
        return self != Preprocessing(nonfinite=self.nonfinite)

    def apply(self, gradients: list[Array]) -> list[Array]:
        """Return the gradients (or summed rows of sparse ones), scaled and clipped."""
        if self.loss_scale_factor is not None:
            gradients = [gradient / gradient.dtype.type(self.loss_scale_factor) for gradient in gradients]
        if self.clipvalue is not None:
            gradients = [np.clip(gradient, -self.clipvalue, self.clipvalue) for gradient in gradients]
        if self.clipnorm is not None:
            gradients = [_scaled(gradient, self.clipnorm, _norm([gradient])) for gradient in gradients]
        if self.global_clipnorm is not None:
            norm = _norm(gradients)
            gradients = [_scaled(gradient, self.global_clipnorm, norm) for gradient in gradients]
        return gradients

    def apply_to(self, pairs: Sequence[tuple[Gradient, Variable]]) -> list[tuple[Gradient, Variable]]:
        """Scale and clip gradients. Rows of equal ids are summed first, so that the norm is that of the whole."""
        ids: list[npt.NDArray[np.int64] | None] = []
        arrays: list[Array] = []
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                flat = np.asarray(gradient.indices).reshape(-1)
                width = math.prod(variable.shape[1:])
                unique, sums = deduplicate(flat, np.asarray(gradient.values).reshape(len(flat), width))
                ids.append(unique)
                arrays.append(sums.reshape(len(unique), *variable.shape[1:]))
            else:
                array = np.asarray(gradient)
                ids.append(None)
                # Half types are too narrow for scales and squares.
                arrays.append(array.astype(np.float32) if array.itemsize == 2 else array)
        arrays = self.apply(arrays)
        return [
            (array if rows is None else IndexedSlices(array, rows), variable)
            for array, rows, (_, variable) in zip(arrays, ids, pairs, strict=True)
        ]


def _norm(gradients: Sequence[Array]) -> float:
    """Return the Euclidean norm of all arrays together, in float64; squares of large numbers do not overflow."""
    with np.errstate(over="ignore"):
        norm = float(np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in gradients)))
    if not math.isinf(norm):
        return norm
    largest = max(float(np.abs(gradient).max(initial=0)) for gradient in gradients)
    return norm if math.isinf(largest) else largest * _norm([gradient / largest for gradient in gradients])


def _scaled(gradient: Array, limit: float, norm: float) -> Array:
    return gradient * gradient.dtype.type(limit / norm) if norm > limit else gradient
