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
    *("count_nonzero", "cov", "cross", "cumprod", "cumsum", "diag", "diagflat", "diagonal", "diff", "digitize", "dot"),
    *("ediff1d", "einsum", "expand_dims", "fix", "flip", "imag", "interp", "isclose", "iscomplex", "isin", "isneginf"),
    *("isposinf", "isreal", "kron", "matmul", "median", "moveaxis", "nan_to_num", "nanargmax", "nanargmin"),
    *("nancumprod", "nancumsum", "nanmedian", "nanpercentile", "nanquantile", "outer", "pad", "partition"),
    *("percentile", "quantile", "real", "repeat", "reshape", "roll", "rot90", "searchsorted", "select", "sinc", "sort"),
    *("squeeze", "stack", "swapaxes", "take", "take_along_axis", "tensordot", "tile", "transpose", "tril", "triu"),
    *("unwrap", "vander", "where", "i0", "corrcoef", "gradient", "trapezoid", "convolve", "correlate"),
    *("histogram", "bincount", "polyval", "resize", "insert", "delete", "ptp"),
    *("linalg.cholesky", "linalg.cond", "linalg.det", "linalg.eig", "linalg.eigh", "linalg.eigvals"),
    *("linalg.eigvalsh", "linalg.inv", "linalg.lstsq", "linalg.matrix_power", "linalg.matrix_rank", "linalg.norm"),
    *("linalg.pinv", "linalg.qr", "linalg.slogdet", "linalg.solve", "linalg.svd", "linalg.tensorinv"),
    *("linalg.tensorsolve",),
)


def _getitem(array: Array, index: Any) -> Any:
    return array[index]


def _astype(array: Array, dtype: str) -> Array:
    return array.astype(dtype)


def _divide_by(total: Array, count: int, dtype: str) -> Array:
    """Return a mean, given the sum, as NumPy computes it: in the sum's type, then of the result's."""
    with np.errstate(all="ignore"):
        return np.true_divide(total, count).astype(dtype)


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
        **{name: _named(name) for name in _FUNCTIONS if _named(name) is not None},
        "getitem": _getitem,
        "astype": _astype,
        "divide_by": _divide_by,
    }
)
"""By name."""
