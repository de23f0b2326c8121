"""The element types that variables and arrays may have, by NumPy's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError, MisuseError, ProtocolError

_NUMERIC = frozenset(
    (
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


def dtype_named(name: str) -> np.dtype[Any]:
    """The numeric dtype of that name. ProtocolError for any other: names come from the wire."""
    if name == "bfloat16":
        dtype: np.dtype[Any] = np.dtype(_bfloat16())
        return dtype
    if name not in _NUMERIC:
        raise ProtocolError(f"unknown element type {name[:40]!r}; there are {', '.join(sorted(_NUMERIC))}")
    return np.dtype(name)


def _bfloat16() -> Any:
    try:
        import ml_dtypes  # optional
    except ImportError:
        raise MisuseError("bfloat16 needs the package ml_dtypes on every task: pip install ml_dtypes") from None
    return ml_dtypes.bfloat16


def is_variable_dtype(dtype: np.dtype[Any]) -> bool:
    """Can a variable have elements of this type?"""
    return dtype.name in _NUMERIC or dtype.name == "bfloat16"


def converted(value: npt.ArrayLike, dtype: np.dtype[Any], variable: str, what: str) -> npt.NDArray[Any]:
    """A value in the dtype of the variable that it is for.

    Integers take another integer type where all of them fit; arrays may gain precision and, among floats, lose
    some, as NumPy's in-place operators allow.

    Raises:
        InvalidUpdateError: something would be lost.
    """
    array = np.asarray(value)
    if array.dtype == dtype:
        return array
    if _kind(array.dtype) in "iu" and _kind(dtype) in "iu":
        limits = np.iinfo(dtype)
        if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
            raise InvalidUpdateError(
                f"variable {variable!r} is {dtype.name}, which holds {limits.min}..{limits.max}, but the "
                f"{what} lies in {array.min()}..{array.max()}"
            )
    # NumPy's rule "same_kind", which knows nothing of bfloat16; a bool is no number here, nor a number a bool.
    elif _kind(array.dtype) not in {"f": "iuf", "c": "iufc"}.get(_kind(dtype), ""):
        python_scalar = not array.ndim and not isinstance(value, np.ndarray | np.generic)
        shown = f" ({value!r})" if python_scalar else ""
        raise InvalidUpdateError(
            f"variable {variable!r} is {dtype.name}, but the {what} is {array.dtype.name}{shown}: "
            f"convert it with .astype({dtype.name!r}) if that is meant"
        )
    return array.astype(dtype)


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if dtype.name == "bfloat16" else dtype.kind
