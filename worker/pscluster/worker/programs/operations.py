"""The functions that programs may call on blocks: a closed list. None opens, writes, imports or evaluates anything.

Most are NumPy's own, under their names there. Those of linear algebra are "linalg.norm" and so on, reductions by a
ufunc "add.reduce". The others are defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

UFUNCS = (
    *("absolute", "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "bitwise_and"),
    *("bitwise_or", "bitwise_xor", "cbrt", "ceil", "conjugate", "copysign", "cos", "cosh", "deg2rad", "degrees"),
    *("divide", "divmod", "equal", "exp", "exp2", "expm1", "fabs", "float_power", "floor", "floor_divide", "fmax"),
    *("fmin", "fmod", "frexp", "gcd", "greater", "greater_equal", "heaviside", "hypot", "invert", "isfinite", "isinf"),
    *("isnan", "lcm", "ldexp", "left_shift", "less", "less_equal", "log", "log10", "log1p", "log2", "logaddexp"),
    *("logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "modf"),
    *("multiply", "negative", "nextafter", "not_equal", "positive", "power", "rad2deg", "radians", "reciprocal"),
    *("remainder", "right_shift", "rint", "sign", "signbit", "sin", "sinh", "spacing", "sqrt", "square", "subtract"),
    *("tan", "tanh", "trunc"),
)
"""Elementwise ones, with which NumPy 1.26 has begun."""

LATER_UFUNCS = tuple(name for name in ("bitwise_count",) if hasattr(np, name))

ELEMENTWISE = frozenset(
    (
        *(*UFUNCS, *LATER_UFUNCS, "around", "astype", "clip", "divide_by", "i0", "isclose", "isneginf", "isposinf"),
        *("nan_to_num", "sinc", "taken", "where"),
    )
)
"""Functions of corresponding elements of arrays that are broadcast to each other: also of parts of the arrays."""

COMBINES: Mapping[str, np.ufunc] = MappingProxyType(
    {
        name: getattr(np, name)
        for name in (
            *("add", "multiply", "maximum", "minimum", "fmax", "fmin", "logical_and", "logical_or", "logical_xor"),
            *("bitwise_and", "bitwise_or", "bitwise_xor", "logaddexp", "logaddexp2", "hypot", "gcd", "lcm"),
        )
    }
)
"""What may combine terms, in any grouping."""

_FUNCTIONS = (
    *("angle", "argmax", "argmin", "argpartition", "argsort", "around", "broadcast_to", "clip", "concatenate"),
    *("cross", "cumprod", "cumsum", "diag", "diagonal", "diff", "digitize", "einsum", "expand_dims", "flip"),
    *("gradient", "i0", "imag", "interp", "isclose", "iscomplex", "isin", "isneginf", "isposinf", "isreal"),
    *("linalg.cholesky", "linalg.cond", "linalg.det", "linalg.eigh", "linalg.eigvalsh", "linalg.inv"),
    *("linalg.matrix_power", "linalg.matrix_rank", "linalg.norm", "linalg.pinv", "linalg.qr", "linalg.slogdet"),
    *("linalg.solve", "linalg.svd", "matmul", "nan_to_num", "nanargmax", "nanargmin", "nancumprod"),
    *("nancumsum", "pad", "partition"),
    *("real", "repeat", "reshape", "resize", "roll", "searchsorted", "sinc", "sort", "squeeze", "stack", "take"),
    *("take_along_axis", "tensordot", "tile", "transpose", "tril", "triu", "unwrap", "where"),
)

_UPDATES = {name: getattr(np, name) for name in ("add", "subtract", "multiply", "minimum", "maximum")}

_QUANTILES = ("median", "nanmedian", "nanpercentile", "nanquantile", "percentile", "quantile")


def _getitem(array: Array, index: Any) -> Any:
    return array[index]


def _astype(array: Array, dtype: str) -> Array:
    return array.astype(dtype)


def _divide_by(total: Array, count: int, dtype: str) -> Array:
    """Return a mean, given the sum, as NumPy computes it: in the sum's type, then of the result's."""
    with np.errstate(all="ignore"):
        return np.true_divide(total, count).astype(dtype)


def _add_at(shape: tuple[int, ...], index: Any, values: Array) -> Array:
    """Return zeros of this shape with values added at an index: those at the same element are summed."""
    out = np.zeros(shape, values.dtype)
    if any(isinstance(item, np.ndarray) for item in index):
        np.add.at(out, index, values)
    else:  # no element twice
        out[index] = values
    return out


def _update_at(array: Array, index: Any, values: Array, kind: str) -> Array:
    """Return an array with elements at an index set to values, or combined with them by the ufunc of that name."""
    out = array.copy()
    if kind == "set":
        out[index] = values
    else:
        _UPDATES[kind].at(out, index, values)
    return out


def _add_along_axis(shape: tuple[int, ...], indices: Array, axis: int, values: Array) -> Array:
    """Return zeros of this shape with values added where `numpy.take_along_axis` takes from."""
    out = np.zeros(shape, values.dtype)
    grid = list(np.ogrid[tuple(slice(n) for n in shape)])
    grid[axis] = indices
    np.add.at(out, tuple(grid), values)
    return out


def _quantile(name: str) -> Callable[..., Any]:
    """Return a function of quantiles whose results have their shape and type where a block is empty, too."""
    function = getattr(np, name)

    def quantile(array: Array, *args: Any, axis: tuple[int, ...], keepdims: bool, **kwargs: Any) -> Any:
        if array.size:
            return function(array, *args, axis=axis, keepdims=keepdims, **kwargs)
        one = np.ones([max(1, n) for n in array.shape], array.dtype)
        made = function(one, *args, axis=axis, keepdims=keepdims, **kwargs)
        kept = [1 if at in axis else n for at, n in enumerate(array.shape) if keepdims or at not in axis]
        return made[(..., *map(slice, kept))]

    return quantile


def _taken(g: Array, out: Array, own: Any, other: Any) -> Any:
    """Return the gradient of the larger, or smaller, of two operands with respect to one of them, given that of it.

    Where both are equal each gets half.
    """
    half = g.dtype.type(0.5)
    return np.where(own == out, np.where(other == out, half * g, g), g.dtype.type(0))


def _named(name: str) -> Any:
    """Return a function of NumPy by its name, or None if this version has none."""
    found: Any = np
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


OPERATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{name: getattr(np, name) for name in (*UFUNCS, *LATER_UFUNCS)},
        **{f"{name}.reduce": ufunc.reduce for name, ufunc in COMBINES.items()},
        **{f"{name}.accumulate": ufunc.accumulate for name, ufunc in COMBINES.items()},
        **{name: _named(name) for name in _FUNCTIONS if _named(name) is not None},
        "add_along_axis": _add_along_axis,
        "add_at": _add_at,
        "getitem": _getitem,
        **{name: _quantile(name) for name in _QUANTILES},
        "taken": _taken,
        "update_at": _update_at,
        "astype": _astype,
        "divide_by": _divide_by,
    }
)
"""By name."""
