"""Functions along an axis, which they need whole: sorting, accumulating, positions, quantiles."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from pscluster.spmd.functions.applying import (
    Result,
    apply,
    as_tensor,
    axes_of,
    block,
    implements,
    mesh_of,
    normal_axes,
    normal_axis,
    numpys,
    probe,
    refuse_out,
    xp,
)
from pscluster.spmd.functions.reductions import reduced
from pscluster.spmd.tensor import UFUNCS, DTensor, unsupported
from pscluster.worker.programs.operations import COMBINES, OPERATIONS

_NO_VALUE = np._NoValue


def along(name: str, a: DTensor, axis: int, length: int | None = None, *args: Any, **kwargs: Any) -> DTensor:
    """Return what a function makes of an array along an axis: as long, or of another length there."""
    function = OPERATIONS[name]
    at = normal_axis(axis, a.ndim)
    (of,) = probe(lambda tensor: function(np.repeat(tensor, 4, at), *args, axis=at, **kwargs), a)
    shape = tuple(n if k != at or length is None else length for k, n in enumerate(a.shape))
    labels = tuple(None if k == at else k for k in range(a.ndim))
    result = Result(labels, shape, of)
    return apply(name, [a], [axes_of(a)], [result], [block(0), *args], {**kwargs, "axis": at})[0]


def _flat(a: Any, axis: int | None) -> tuple[DTensor, int]:
    return (xp.ravel(a), 0) if axis is None else (a, axis)


@implements(np.sort)
def sort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """See `numpy.sort`."""
    del order
    array, at = _flat(a, axis)
    return along("sort", array, at, kind="stable" if stable else kind)


@implements(np.argsort)
def argsort(a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """See `numpy.argsort`."""
    del order
    array, at = _flat(a, axis)
    return along("argsort", array, at, kind="stable" if stable else kind)


def _register_partition(name: str, function: Any) -> None:
    @implements(function)
    def partition(a: Any, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> Any:
        del order
        array, at = _flat(a, axis)
        length = array.shape[normal_axis(at, array.ndim)]
        places = [int(k) for k in np.atleast_1d(kth)]
        if any(not -length <= k < length for k in places):
            raise ValueError(f"kth(={places[0]}) out of bounds ({length})")  # NumPy's words
        labels = tuple(None if k == normal_axis(at, array.ndim) else k for k in range(array.ndim))
        of = array.dtype if name == "partition" else np.dtype(np.intp)
        options = {"axis": at, "kind": kind}
        return apply(name, [array], [axes_of(array)], [Result(labels, array.shape, of)], [block(0), places], options)[0]


_register_partition("partition", np.partition)
_register_partition("argpartition", np.argpartition)


def _register_cumulative(name: str) -> None:
    @implements(getattr(np, name))
    def cumulative(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        refuse_out(name, {"out": out})
        array, at = _flat(a, axis)
        return along(name, array, at, dtype=None if dtype is None else np.dtype(dtype).name)


for _name in ("cumsum", "cumprod", "nancumsum", "nancumprod"):
    _register_cumulative(_name)


def accumulate(ufunc: np.ufunc, array: DTensor, axis: int = 0, dtype: Any = None, out: Any = None) -> DTensor:
    """Accumulate, as `ufunc.accumulate` does."""
    name = {"add": "cumsum", "multiply": "cumprod"}.get(ufunc.__name__, f"{ufunc.__name__}.accumulate")
    if COMBINES.get(ufunc.__name__) is not ufunc:
        raise unsupported(f"{ufunc.__name__}.accumulate")
    refuse_out(name, {"out": out})
    return along(name, array, axis, dtype=None if dtype is None else np.dtype(dtype).name)


UFUNCS["accumulate"] = accumulate


def _register_cumulative_of_standard(name: str, old: str) -> None:
    @implements(*numpys(name))
    def cumulative(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Any:
        x = xp.atleast_1d(x)
        if axis is None and x.ndim > 1:
            raise ValueError("For arrays which have more than one dimension ``axis`` argument is required.")  # NumPy's
        at = normal_axis(axis or 0, x.ndim)
        result = along(old, x, at, dtype=None if dtype is None else np.dtype(dtype).name)
        if not include_initial:
            return result
        shape = tuple(1 if k == at else n for k, n in enumerate(x.shape))
        return xp.concatenate([xp.broadcast_to(np.asarray(old == "cumprod", result.dtype), shape), result], at)


_register_cumulative_of_standard("cumulative_sum", "cumsum")
_register_cumulative_of_standard("cumulative_prod", "cumprod")


def _register_position(name: str) -> None:
    @implements(getattr(np, name))
    def position(a: Any, axis: int | None = None, out: Any = None, *, keepdims: Any = False) -> Any:
        refuse_out(name, {"out": out})
        keep = keepdims is not _NO_VALUE and bool(keepdims)
        array, at = _flat(a, axis)
        axes = normal_axes(at, array.ndim)
        if not array.shape[axes[0]]:
            raise ValueError(f"attempt to get {name} of an empty sequence")  # NumPy's words
        result = reduced(array, axes, np.dtype(np.intp), keepdims=keep and axis is not None)
        options = {"axis": axes[0], "keepdims": keep and axis is not None}
        made = apply(name, [array], [axes_of(array)], [result], [block(0)], options)[0]
        return xp.reshape(made, (1,) * a.ndim) if keep and axis is None else made


for _name in ("argmax", "argmin", "nanargmax", "nanargmin"):
    _register_position(_name)


def _quantile(name: str, a: DTensor, q: Any, axis: Any, keepdims: Any, **kwargs: Any) -> DTensor:
    """Return medians and quantiles over axes, which are needed whole."""
    axes = normal_axes(axis, a.ndim)
    keep = keepdims is not _NO_VALUE and bool(keepdims)
    function = getattr(np, name)
    plain = () if q is None else (np.asarray(q).tolist(),)
    if not a.size:  # NumPy has shapes of its own for what comes of nothing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nothing = function(np.empty(a.shape, a.dtype), *plain, axis=axis, keepdims=keep, **kwargs)
        return as_tensor(nothing, a.mesh)
    (of,) = probe(lambda array: function(array, *plain, **kwargs), a)
    result = reduced(a, axes, of, keepdims=keep)
    count = np.shape(q) if q is not None else ()
    result = Result((*(None,) * len(count), *result.labels), (*count, *result.shape), of)
    options = {"axis": axes, "keepdims": keep, **kwargs}
    return apply(name, [a], [axes_of(a)], [result], [block(0), *plain], options)[0]


def _register_median(name: str) -> None:
    @implements(getattr(np, name))
    def median(a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: Any = False) -> Any:
        del overwrite_input
        refuse_out(name, {"out": out})
        return _quantile(name, a, None, axis, keepdims)


def _register_quantile(name: str) -> None:
    @implements(getattr(np, name))
    def quantile(
        a: Any,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        method: str = "linear",
        keepdims: Any = False,
        *,
        weights: Any = None,
    ) -> Any:
        del overwrite_input
        refuse_out(name, {"out": out})
        if weights is not None:
            raise unsupported(name, "with weights")
        return _quantile(name, a, q, axis, keepdims, method=method)


for _name in ("median", "nanmedian"):
    _register_median(_name)
for _name in ("quantile", "percentile", "nanquantile", "nanpercentile"):
    _register_quantile(_name)


@implements(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = _NO_VALUE, append: Any = _NO_VALUE) -> Any:
    """See `numpy.diff`."""
    if n < 0:
        raise ValueError(f"order must be non-negative but got {n}")  # NumPy's words
    if not n:
        return a
    at = normal_axis(axis, a.ndim)
    edges: list[Sequence[Any]] = [[], []]
    for place, value in enumerate((prepend, append)):
        if value is not _NO_VALUE:
            one = tuple(1 if k == at else m for k, m in enumerate(a.shape))
            edges[place] = [xp.broadcast_to(value, one) if np.ndim(value) == 0 else value]
    if edges[0] or edges[1]:
        a = xp.concatenate([*edges[0], a, *edges[1]], at)
    return along("diff", a, at, max(0, a.shape[at] - n), n)


@implements(np.ediff1d)
def ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> Any:
    """See `numpy.ediff1d`."""
    parts: list[Any] = [diff(xp.ravel(ary))]
    for name, value in (("to_end", to_end), ("to_begin", to_begin)):
        if value is not None:
            edge = as_tensor(value, ary.mesh)
            if not np.can_cast(edge.dtype, ary.dtype, "same_kind"):
                raise TypeError(
                    f"dtype of `{name}` must be compatible with input `ary` under the `same_kind` rule."  # NumPy's
                )
            parts.insert(0 if name == "to_begin" else 1, xp.ravel(edge).astype(ary.dtype))
    return xp.concatenate(parts) if len(parts) > 1 else parts[0]


@implements(np.unwrap)
def unwrap(p: Any, discont: Any = None, axis: int = -1, *, period: float = 6.283185307179586) -> Any:
    """See `numpy.unwrap`."""
    return along("unwrap", p, axis, discont=discont, period=period)


@implements(*numpys("trapezoid"))
def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    """See `numpy.trapezoid`."""
    at = normal_axis(axis, y.ndim)
    before = tuple(slice(None, -1) if k == at else slice(None) for k in range(y.ndim))
    after = tuple(slice(1, None) if k == at else slice(None) for k in range(y.ndim))
    if x is None:
        width: Any = dx
    else:
        width = xp.diff(x) if np.ndim(x) == 1 else xp.diff(x, axis=at)
        if np.ndim(x) == 1:
            width = xp.reshape(width, tuple(-1 if k == at else 1 for k in range(y.ndim)))
    return xp.sum(width * (y[after] + y[before]) / 2.0, axis=at)


@implements(np.gradient)
def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """See `numpy.gradient`, of evenly spaced values."""
    axes = normal_axes(axis, f.ndim)
    steps = [float(step) for step in varargs] or [1.0]
    if len(steps) not in (1, len(axes)):
        raise TypeError("invalid number of arguments")  # NumPy's words
    steps *= len(axes) // len(steps)
    made = [along("gradient", f, at, None, step, edge_order=edge_order) for at, step in zip(axes, steps, strict=True)]
    mesh_of(*made)
    return made[0] if len(made) == 1 else tuple(made)
