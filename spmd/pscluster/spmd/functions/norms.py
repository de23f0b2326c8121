"""Norms: of vectors, whose axes may be sharded; and of matrices, of which a device needs whole ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pscluster.spmd.functions.applying import apply, axes_of, block, implements, normal_axes, numpys, xp
from pscluster.spmd.functions.reductions import reduced, squared
from pscluster.spmd.tensor import DTensor


@implements(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:  # noqa: A002  # as in NumPy
    """See `numpy.linalg.norm`."""
    if x.dtype.kind not in "fc":
        x = x.astype(np.float64)
    axes = normal_axes(axis, x.ndim)
    is_matrix = len(axes) == 2
    if isinstance(ord, str) and not is_matrix:
        raise ValueError(f"Invalid norm order '{ord}' for vectors")  # NumPy's words
    if (ord is None and (axis is None or is_matrix)) or ord == "fro" or (ord in (None, 2) and len(axes) == 1):
        return xp.sqrt(xp.sum(squared(x), axis=axes, keepdims=keepdims))
    if is_matrix:
        return matrix_norm_of_whole(x, ord, axes, keepdims)
    if len(axes) != 1:
        raise ValueError("Improper number of dimensions to norm.")  # NumPy's words
    return _norm_of_vectors(x, ord, axes, keepdims)


def _norm_of_vectors(x: DTensor, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Any:  # noqa: A002  # as in NumPy
    size: Any = abs(x)
    if ord in (math.inf, -math.inf):
        return (xp.max if ord > 0 else xp.min)(size, axis=axes, keepdims=keepdims)
    if ord == 0:
        return xp.sum((x != 0).astype(size.dtype), axis=axes, keepdims=keepdims)
    total = xp.sum(size**ord, axis=axes, keepdims=keepdims)
    return total if ord == 1 else total ** (1.0 / ord)


def matrix_norm_of_whole(x: DTensor, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Any:  # noqa: A002
    """Return norms of matrices, of which each device needs whole ones."""
    result = reduced(x, axes, np.empty(0, x.dtype).real.dtype, keepdims=keepdims)
    kwargs = {"ord": ord, "axis": axes, "keepdims": keepdims}
    return apply("linalg.norm", [x], [axes_of(x)], [result], [block(0)], kwargs)[0]


@implements(*numpys("linalg.vector_norm"))
def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:  # noqa: A002
    """See `numpy.linalg.vector_norm`."""
    axes = normal_axes(axis, x.ndim)
    if len(axes) == 1:
        return norm(x, ord, axes, keepdims)
    x = x if x.dtype.kind in "fc" else x.astype(np.float64)
    if ord == 2:
        return xp.sqrt(xp.sum(abs(x) ** 2, axis=axes, keepdims=keepdims))
    return _norm_of_vectors(x, ord, axes, keepdims)


@implements(*numpys("linalg.matrix_norm"))
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:  # noqa: A002
    """See `numpy.linalg.matrix_norm`."""
    return norm(x, ord, (-2, -1), keepdims)
