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
    refuse_out(name, {"out": out})
    if COMBINES.get(ufunc.__name__) is not ufunc:
        raise unsupported(name)
    if not is_everything(where):
        array = _only(ufunc, array, dtype, initial, where)
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


def is_everything(where: Any) -> bool:
    """Return whether this `where` leaves nothing out."""
    return where is True or where is _NO_VALUE


def _only(ufunc: np.ufunc, array: Any, dtype: Any, initial: Any, where: Any) -> DTensor:
    """Return an array in whose place it can be reduced where `where` is true: elsewhere it has what changes nothing."""
    if initial is _NO_VALUE:
        initial = ufunc.identity
    if initial is None:
        raise ValueError(  # NumPy's words
            f"reduction operation '{ufunc.__name__}' does not have an identity, so to use a where mask one has to "
            "specify 'initial'"
        )
    array, mask = masked(array, where)
    (of,) = probe(ufunc.reduce, array, axis=None, **({} if dtype is None else {"dtype": np.dtype(dtype).name}))
    neutral = initial if ufunc.identity is None else ufunc.identity
    result: DTensor = xp.where(mask, array.astype(of), np.asarray(neutral).astype(of).item())
    return result


def masked(array: Any, where: Any) -> tuple[DTensor, DTensor]:
    """Return an array and the mask of a `where`, both global. Raise what NumPy raises if they do not fit."""
    if not isinstance(where, DTensor):
        where = np.asarray(where) if hasattr(where, "dtype") else np.asarray(where, bool)
    if where.dtype != np.bool_:
        raise TypeError(f"Cannot cast array data from {where.dtype!r} to dtype('bool') according to the rule 'safe'")
    array = array if isinstance(array, DTensor) else np.asarray(array)
    pairs = zip(reversed(where.shape), reversed(array.shape), strict=False)
    if where.ndim > array.ndim or any(of_mask not in (1, length) for of_mask, length in pairs):
        raise ValueError(f"where= of shape {where.shape} can't be broadcast to the array's, {array.shape}")
    mesh = mesh_of(array, where)
    return as_tensor(array, mesh), as_tensor(where, mesh)


def _counted_mask(a: Any, where: Any) -> tuple[Any, Any]:
    """Return an array, and its mask in its own shape to count by."""
    a, mask = masked(a, where)
    return a, xp.logical_and(xp.ones_like(a, np.bool_), mask)


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
        refuse_out(name, {"out": out})
        return reduce(ufunc, a, axis, dtype, None, keep, initial, where)


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


def _mean_of(a: DTensor, axis: Any, dtype: np.dtype[Any], mask: DTensor, *, keepdims: bool) -> Any:
    """Return the mean of what a mask of the array's shape lets through."""
    total = reduce(np.add, a, axis, dtype, None, keepdims, where=mask)
    return xp.divide(total, reduce(np.add, mask, axis, keepdims=keepdims)).astype(dtype)


def squared(a: Any) -> Any:
    """Return the squares of numbers' absolute values; real ones of complex numbers."""
    return a.real**2 + a.imag**2 if a.dtype.kind == "c" else a * a


def _count(a: DTensor, axis: Any) -> int:
    return math.prod(a.shape[at] for at in normal_axes(axis, a.ndim))


@implements(np.mean)
def mean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """See `numpy.mean`."""
    refuse_out("mean", {"out": out})
    mask = None
    if not is_everything(where):
        a, mask = _counted_mask(a, where)
    work, of = _mean_types(a, dtype)
    if mask is not None:
        return _mean_of(a, axis, work, mask, keepdims=_flag(keepdims)).astype(of)
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
    refuse_out("var", {"out": out})
    if correction is not _NO_VALUE:
        ddof = correction
    keep, mask = _flag(keepdims), None
    if not is_everything(where):
        a, mask = _counted_mask(a, where)
    work, of = _mean_types(a, dtype)
    if mean is not _NO_VALUE:
        centre = mean
    elif mask is None:
        centre = _divided(reduce(np.add, a, axis, work, None, True), _count(a, axis), work)
    else:
        centre = _mean_of(a, axis, work, mask, keepdims=True)
    apart: Any = a - centre
    square = squared(apart)
    of_real, work = np.empty(0, of).real.dtype, np.empty(0, work).real.dtype
    if mask is None:
        return _divided(reduce(np.add, square, axis, work, None, keep), max(_count(a, axis) - ddof, 0), of_real)
    total = reduce(np.add, square, axis, work, None, keep, where=mask)
    left = xp.maximum(reduce(np.add, mask, axis, keepdims=keep) - ddof, 0)
    return xp.divide(total, left).astype(of_real)


@implements(np.std)
def std(*args: Any, **kwargs: Any) -> Any:
    """See `numpy.std`."""
    return xp.sqrt(var(*args, **kwargs))


def _counted(a: DTensor, axis: Any, *, keepdims: bool, where: Any = True) -> Any:
    """Return how many elements are not NaN."""
    return reduce(np.add, ~xp.isnan(a), axis, None, None, keepdims, where=where)


@implements(np.nanmean)
def nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """See `numpy.nanmean`."""
    refuse_out("nanmean", {"out": out})
    if not is_everything(where):
        a, where = masked(a, where)
    if a.dtype.kind not in "fc":
        return mean(a, axis, dtype, None, keepdims, where=where)
    if dtype is not None and np.dtype(dtype).kind not in "fc":
        raise TypeError("If a is inexact, then dtype must be inexact")  # NumPy's words
    keep = _flag(keepdims)
    total = reduce(np.add, _without_nans(a, 0), axis, dtype, None, keep, where=where)
    return xp.divide(total, _counted(a, axis, keepdims=keep, where=where)).astype(total.dtype)


@implements(np.nanvar)
def nanvar(
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
    """See `numpy.nanvar`."""
    refuse_out("nanvar", {"out": out})
    if correction is not _NO_VALUE:
        ddof = correction
    if not is_everything(where):
        a, where = masked(a, where)
    if a.dtype.kind not in "fc":
        return var(a, axis, dtype, None, ddof, keepdims, where=where, mean=mean)
    centre = nanmean(a, axis, dtype, None, True, where=where) if mean is _NO_VALUE else mean
    apart: Any = xp.where(xp.isnan(a), a.dtype.type(0), a - centre)
    square = squared(apart)
    keep = _flag(keepdims)
    left: Any = _counted(a, axis, keepdims=keep, where=where) - ddof
    total: Any = reduce(np.add, square, axis, None, None, keep, where=where)
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
