"""Sums, means, extremes: reductions over sharded axes leave terms, which are combined.

Results over a sharded axis are sums of the blocks' sums: NumPy's, up to rounding. Means and variances count elements,
not blocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pscluster.spmd.functions.applying import (
    Result,
    apply,
    axes_of,
    block,
    implements,
    normal_axes,
    normal_axis,
    numpys,
    probe,
    refuse_out,
    xp,
)
from pscluster.spmd.tensor import UFUNCS, DTensor, unsupported
from pscluster.worker.programs.operations import COMBINES

_NO_VALUE = np._NoValue


def reduce(
    ufunc: np.ufunc,
    array: DTensor,
    axis: Any = 0,
    dtype: Any = None,
    out: Any = None,
    keepdims: bool = False,
    initial: Any = _NO_VALUE,
    where: Any = True,
) -> DTensor:
    """Reduce an array by a ufunc, as `ufunc.reduce` does. Over a sharded axis, blocks' results are combined by it."""
    name = f"{ufunc.__name__}.reduce"
    refuse_out(name, {"out": out, "where": where})
    if COMBINES.get(ufunc.__name__) is not ufunc:
        raise unsupported(name)
    axes = normal_axes(axis, array.ndim)
    kwargs: dict[str, Any] = {"axis": axes, "keepdims": bool(keepdims)}
    if dtype is not None:
        kwargs["dtype"] = np.dtype(dtype).name
    if initial is not _NO_VALUE and initial is not None:
        kwargs["initial"] = initial
    elif ufunc.identity is None and any(not array.shape[at] for at in axes):
        raise ValueError(f"zero-size array to reduction operation {ufunc.__name__} which has no identity")  # NumPy's
    (of,) = probe(ufunc.reduce, array, **kwargs)
    result = reduced(array, axes, of, keepdims=bool(keepdims))
    combine = "" if "initial" in kwargs else ufunc.__name__  # which would count once for every block
    return apply(name, [array], [axes_of(array)], [result], [block(0)], kwargs, combine=combine)[0]


def reduced(array: DTensor, axes: tuple[int, ...], dtype: np.dtype[Any], *, keepdims: bool) -> Result:
    """Return what is known of an array reduced over axes."""
    if keepdims:
        labels = tuple(None if at in axes else at for at in range(array.ndim))
        return Result(labels, tuple(1 if at in axes else n for at, n in enumerate(array.shape)), dtype)
    kept = [at for at in range(array.ndim) if at not in axes]
    return Result(tuple(kept), tuple(array.shape[at] for at in kept), dtype)


UFUNCS["reduce"] = reduce


def _register(ufunc: np.ufunc, *functions: Any) -> None:
    name = functions[0].__name__

    @implements(*functions)
    def handler(
        a: Any,
        axis: Any = None,
        *args: Any,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = _NO_VALUE,
        where: Any = True,
    ) -> Any:
        if args:
            raise unsupported(name, "with that many positional arguments: name them")
        keep = keepdims is not _NO_VALUE and bool(keepdims)
        refuse_out(name, {"out": out, "where": where})
        return reduce(ufunc, a, axis, dtype, None, keep, initial)


_register(np.add, np.sum)
_register(np.multiply, np.prod)
_register(np.maximum, np.max, np.amax)
_register(np.minimum, np.min, np.amin)
_register(np.logical_and, np.all)
_register(np.logical_or, np.any)


@implements(np.nanmax)
def nanmax(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, **kwargs: Any) -> Any:
    """See `numpy.nanmax`."""
    return reduce(np.fmax, a, axis, None, out, _flag(keepdims), **kwargs)


@implements(np.nanmin)
def nanmin(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, **kwargs: Any) -> Any:
    """See `numpy.nanmin`."""
    return reduce(np.fmin, a, axis, None, out, _flag(keepdims), **kwargs)


def _flag(value: Any) -> bool:
    return value is not _NO_VALUE and bool(value)


def _without_nans(a: DTensor, instead: float) -> DTensor:
    result: DTensor = a if a.dtype.kind not in "fc" else xp.where(xp.isnan(a), a.dtype.type(instead), a)
    return result


@implements(np.nansum)
def nansum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, **kwargs: Any) -> Any:
    """See `numpy.nansum`."""
    return reduce(np.add, _without_nans(a, 0), axis, dtype, out, _flag(keepdims), **kwargs)


@implements(np.nanprod)
def nanprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, **kwargs: Any) -> Any:
    """See `numpy.nanprod`."""
    return reduce(np.multiply, _without_nans(a, 1), axis, dtype, out, _flag(keepdims), **kwargs)


def _mean_types(a: DTensor, dtype: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the types in which NumPy adds up for a mean, and of the mean."""
    if dtype is not None:
        return np.dtype(dtype), np.dtype(dtype)
    if a.dtype.kind in "biu":
        return np.dtype(np.float64), np.dtype(np.float64)
    return np.dtype(np.float32) if a.dtype == np.float16 else a.dtype, a.dtype


def _divided(total: DTensor, count: float, dtype: np.dtype[Any]) -> DTensor:
    labels = axes_of(total)
    result = Result(labels, total.shape, dtype)
    return apply("divide_by", [total], [labels], [result], [block(0), count, dtype.name])[0]


def _count(a: DTensor, axis: Any) -> int:
    return math.prod(a.shape[at] for at in normal_axes(axis, a.ndim))


@implements(np.mean)
def mean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """See `numpy.mean`."""
    refuse_out("mean", {"out": out, "where": True if where is _NO_VALUE else where})
    work, of = _mean_types(a, dtype)
    return _divided(reduce(np.add, a, axis, work, None, _flag(keepdims)), _count(a, axis), of)


@implements(np.var)
def var(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: float = 0,
    keepdims: Any = False,
    *,
    where: Any = True,
    mean: Any = _NO_VALUE,
    correction: Any = _NO_VALUE,
) -> Any:
    """See `numpy.var`."""
    refuse_out("var", {"out": out, "where": True if where is _NO_VALUE else where})
    if correction is not _NO_VALUE:
        ddof = correction
    work, of = _mean_types(a, dtype)
    count = _count(a, axis)
    centre = _divided(reduce(np.add, a, axis, work, None, True), count, work) if mean is _NO_VALUE else mean
    apart: Any = a - centre
    square = apart.real**2 + apart.imag**2 if apart.dtype.kind == "c" else apart * apart
    of_real = np.empty(0, of).real.dtype
    total = reduce(np.add, square, axis, np.empty(0, work).real.dtype, None, _flag(keepdims))
    return _divided(total, max(count - ddof, 0), of_real)


@implements(np.std)
def std(*args: Any, **kwargs: Any) -> Any:
    """See `numpy.std`."""
    return xp.sqrt(var(*args, **kwargs))


def _counted(a: DTensor, axis: Any, *, keepdims: bool) -> Any:
    """Return how many elements are not NaN."""
    return reduce(np.add, ~xp.isnan(a), axis, None, None, keepdims)


@implements(np.nanmean)
def nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """See `numpy.nanmean`."""
    refuse_out("nanmean", {"out": out, "where": True if where is _NO_VALUE else where})
    if a.dtype.kind not in "fc":
        return mean(a, axis, dtype, None, keepdims)
    if dtype is not None and np.dtype(dtype).kind not in "fc":
        raise TypeError("If a is inexact, then dtype must be inexact")  # NumPy's words
    keep = _flag(keepdims)
    total = reduce(np.add, _without_nans(a, 0), axis, dtype, None, keep)
    return xp.divide(total, _counted(a, axis, keepdims=keep)).astype(total.dtype)


@implements(np.nanvar)
def nanvar(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: Any = False, **kwargs: Any
) -> Any:
    """See `numpy.nanvar`."""
    refuse_out("nanvar", {"out": out, **kwargs})
    if a.dtype.kind not in "fc":
        return var(a, axis, dtype, None, ddof, keepdims)
    apart: Any = xp.where(xp.isnan(a), a.dtype.type(0), a - nanmean(a, axis, dtype, None, True))
    square = apart.real**2 + apart.imag**2 if apart.dtype.kind == "c" else apart * apart
    keep = _flag(keepdims)
    left: Any = _counted(a, axis, keepdims=keep) - ddof
    total: Any = reduce(np.add, square, axis, None, None, keep)
    return xp.where(left > 0, total / left, np.nan).astype(total.dtype)


@implements(np.nanstd)
def nanstd(*args: Any, **kwargs: Any) -> Any:
    """See `numpy.nanstd`."""
    return xp.sqrt(nanvar(*args, **kwargs))


@implements(np.average)
def average(a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False) -> Any:
    """See `numpy.average`."""
    keep = _flag(keepdims)
    if weights is None:
        result: Any = mean(a, axis, None, None, keep)
        total: Any = result * 0 + _count(a, axis)
    else:
        if np.shape(weights) != a.shape:
            if axis is None or np.ndim(weights) != 1:
                raise TypeError("Axis must be specified when shapes of a and weights differ.")  # NumPy's words
            at = normal_axis(axis, a.ndim)
            weights = xp.reshape(weights, (-1,) + (1,) * (a.ndim - 1 - at))
        if not _count(a, axis):
            raise ZeroDivisionError("Weights sum to zero, can't be normalized")  # NumPy's words
        of = xp.result_type(a, weights if isinstance(weights, DTensor) else np.asarray(weights))
        if a.dtype.kind in "biu":
            of = np.result_type(of, np.float64)
        total = xp.sum(xp.zeros_like(a, of) + weights, axis=axis, dtype=of, keepdims=keep)
        result = xp.sum(xp.multiply(a, weights, dtype=of), axis=axis, keepdims=keep) / total
    return (result, total) if returned else result


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: Any = False) -> Any:
    """See `numpy.count_nonzero`."""
    return reduce(np.add, a != 0, axis, np.intp, None, _flag(keepdims))


@implements(np.ptp)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """See `numpy.ptp`."""
    refuse_out("ptp", {"out": out})
    keep = _flag(keepdims)
    return xp.subtract(reduce(np.maximum, a, axis, keepdims=keep), reduce(np.minimum, a, axis, keepdims=keep))


@implements(np.trace)
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Any:
    """See `numpy.trace`."""
    refuse_out("trace", {"out": out})
    return reduce(np.add, xp.diagonal(a, offset, axis1, axis2), -1, dtype)


@implements(*numpys("linalg.trace"))
def trace_of_matrices(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    """See `numpy.linalg.trace`."""
    return trace(x, offset, -2, -1, dtype)


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
        square = x.real**2 + x.imag**2 if x.dtype.kind == "c" else x * x
        return xp.sqrt(xp.sum(square, axis=axes, keepdims=keepdims))
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
