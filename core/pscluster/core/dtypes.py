"""The element types that variables and arrays may have, by NumPy's name."""

from __future__ import annotations

import sys
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
    """Return the numeric dtype of that name. Raise ProtocolError for any other: names come from the wire."""
    if name == "bfloat16":
        try:
            import ml_dtypes  # optional
        except ImportError:
            raise MisuseError("bfloat16 needs the package ml_dtypes on every task: pip install ml_dtypes") from None
        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    if name not in _NUMERIC:
        raise ProtocolError(f"unknown element type {name[:40]!r}; known types: {', '.join(sorted(_NUMERIC))}")
    return np.dtype(name)


def is_variable_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether a variable can have elements of this type."""
    return dtype.name in _NUMERIC or dtype.name == "bfloat16"


def is_masked_array(value: Any) -> bool:
    """Return whether a value is a masked array of NumPy's."""
    # Not there: then no such array has been made, and to import it takes 50 ms. Another thread may just be doing that.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return masked is not None and isinstance(value, masked)


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return `np.asarray`, also of a torch tensor with a graph, on a device, sparse, or of bfloat16 (as float32)."""
    if type(value) is not np.ndarray and callable(getattr(value, "detach", None)) and hasattr(value, "layout"):
        value = value.detach().cpu()
        if "strided" not in str(value.layout):
            value = value.to_dense()
        if "bfloat16" in str(value.dtype):
            value = value.float()
    return np.asarray(value)


def as_array(value: npt.ArrayLike, variable: str, noun: str, *, holder: str = "variable") -> npt.NDArray[Any]:
    """Return a user's value for a variable as an array. Raise InvalidUpdateError, with its name, if it is none.

    `holder` says what has that name: it may be a table.
    """
    if type(value) is np.ndarray:  # as nearly always in a step
        return value
    if is_masked_array(value) and np.ma.is_masked(value):
        raise InvalidUpdateError(f"{holder} {variable!r}: the {noun} has masked elements: fill them with .filled(...)")
    try:
        return array_of(value)
    except (ValueError, TypeError) as error:  # such as a ragged list
        raise InvalidUpdateError(f"{holder} {variable!r}: the {noun} {is_or_are(noun)} not an array: {error}") from None


def converted(
    value: npt.ArrayLike,
    dtype: np.dtype[Any],
    variable: str,
    noun: str,
    *,
    overflow: bool = False,
    holder: str = "variable",
) -> npt.NDArray[Any]:
    """Convert a value to the dtype of the variable that it is for.

    Integers may change to another integer type that holds all of them; arrays may gain precision and, among floats,
    lose some, as with NumPy's in-place operators. With `overflow`, values too large for a narrower float become
    infinity, as gradients may. Raise InvalidUpdateError if values would be lost, or the value is not an array; it names
    the variable, or whatever the `holder` of the values is.
    """
    array = as_array(value, variable, noun, holder=holder)
    if array.dtype == dtype:
        return array
    if _kind(array.dtype) in "iu" and _kind(dtype) in "iu":
        limits = np.iinfo(dtype)
        if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
            raise InvalidUpdateError(
                f"{holder} {variable!r} is {dtype.name}, which holds {limits.min}..{limits.max}, but the "
                f"{noun} {'lie' if is_or_are(noun) == 'are' else 'lies'} in {array.min()}..{array.max()}"
            )
    # NumPy's rule "same_kind", plus bfloat16; but a bool does not count as a number here, nor a number as a bool.
    elif _kind(array.dtype) not in {"f": "iuf", "c": "iufc"}.get(_kind(dtype), ""):
        shown = f" ({array.reshape(-1)[:1].tolist()[0]!r:.60})" if array.size else ""
        hint = "give numbers"
        if _kind(array.dtype) in "biufc":
            hint = f"convert it with .astype({dtype.name!r}) if that is meant"
        raise InvalidUpdateError(
            f"{holder} {variable!r} is {dtype.name}, but the {noun} {is_or_are(noun)} "
            f"{dtype_name(array.dtype)}{shown}: {hint}"
        )
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if not overflow and result.dtype.itemsize < array.dtype.itemsize and _kind(dtype) in "fc":
        lost = ~np.isfinite(result) & np.isfinite(array)
        if lost.any():
            first = array[lost].reshape(-1)[0]
            raise InvalidUpdateError(f"{holder} {variable!r} is {dtype.name}, which can't hold {first} of the {noun}")
    return result


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype as an error shows it: of strings and bytes without their length."""
    return {"U": "str", "S": "bytes"}.get(dtype.kind, dtype.name)


def is_or_are(noun: str) -> str:
    """Return the verb for what is in a value: "are" for "values of the rows", "is" for "initial value"."""
    return "are" if noun.split(" of ")[0].endswith("s") else "is"


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if dtype.name == "bfloat16" else dtype.kind
