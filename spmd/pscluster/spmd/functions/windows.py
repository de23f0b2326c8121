"""Windows that slide along axes, and sums of them: each device needs those axes whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core.layouts.mesh import MATCH, UNSHARDED
from pscluster.spmd.functions.applying import as_tensor, implements, mesh_of, normal_axis, numpys, xp
from pscluster.spmd.tensor import unsupported


@implements(*numpys("lib.stride_tricks.sliding_window_view"))
def sliding_window_view(
    x: Any, window_shape: Any, axis: Any = None, *, subok: bool = False, writeable: bool = False
) -> Any:
    """See `numpy.lib.stride_tricks.sliding_window_view`; the windows are copies."""
    del subok, writeable
    lengths = tuple(np.atleast_1d(window_shape).tolist())
    given = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    axes = [normal_axis(one, x.ndim) for one in given]
    if len(axes) != len(lengths):
        raise ValueError(f"window_shape has {len(lengths)} entries, for {len(axes)} axes")
    if any(length < 0 for length in lengths):
        raise ValueError("`window_shape` cannot contain negative values")  # NumPy's words
    if 0 in lengths:
        raise unsupported("numpy.lib.stride_tricks.sliding_window_view", "with windows of no elements")
    for at, length in zip(axes, lengths, strict=True):
        count = x.shape[at] - length + 1
        if count < 1:
            raise ValueError("window shape cannot be larger than input array shape")  # NumPy's words
        x = x.relayout([UNSHARDED if n == at else MATCH for n in range(x.ndim)])
        before = (slice(None),) * at
        x = xp.stack([x[(*before, slice(start, start + count))] for start in range(length)], axis=-1)
    return x


@implements(np.convolve)
def convolve(a: Any, v: Any, mode: str = "full") -> Any:
    """See `numpy.convolve`."""
    mesh = mesh_of(a, v)
    array, weights = (xp.atleast_1d(as_tensor(value, mesh)) for value in (a, v))
    if len(array) < len(weights):
        array, weights = weights, array
    if array.ndim != 1 or weights.ndim != 1 or not len(weights):
        raise ValueError("convolve: a and v must be one-dimensional, and not empty")
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"mode must be one of 'valid', 'same', or 'full' (got {mode!r})")  # NumPy's words
    more = len(weights) - 1
    widths = {"full": (more, more), "same": (more - more // 2, more // 2), "valid": (0, 0)}[mode]
    dtype = np.result_type(array.dtype, weights.dtype)
    return sliding_window_view(xp.pad(array.astype(dtype), widths), more + 1) @ weights[::-1].astype(dtype)


@implements(np.correlate)
def correlate(a: Any, v: Any, mode: str = "valid") -> Any:
    """See `numpy.correlate`."""
    mesh = mesh_of(a, v)
    array, weights = (as_tensor(value, mesh) for value in (a, v))
    if len(array) >= len(weights):
        return convolve(array, xp.conj(weights)[::-1], mode)
    return xp.conj(convolve(weights, xp.conj(array)[::-1], mode))[::-1]
