"""Arrays on the wire: element types by name, bytes in C order and little-endian, all checked on the way in.

Nothing received is trusted: memory is allocated for the bytes that came, never for a declared shape.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pscluster.core.dtypes import dtype_named, is_variable_dtype
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.limits import MAX_ELEMENT_BYTES, MAX_NAME, MAX_RANK

Buffer = bytes | bytearray | memoryview

_NATIVE = "<" if sys.byteorder == "little" else ">"
_NAMED = re.compile(
    r"<U(?P<characters>\d{1,9})|S(?P<bytes>\d{1,9})"
    r"|(datetime|timedelta)64(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|(?P<extension>(b?float|u?int)\d\w{0,20})",
    re.ASCII,
)

_names: dict[np.dtype[Any], str] = {}  # of dtypes whose arrays are sent as they are in memory; filled on first use


class UnsendableArrayError(TypeError):
    """Elements of this type can't be sent. The message describes the array and says how to fix it."""


def plain_name(dtype: np.dtype[Any]) -> str | None:
    """Return the wire name of a dtype whose elements have the same bytes in memory. None: use `wire_form`."""
    return _names.get(dtype)


def wire_form(array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Return the wire name of an array's dtype, and the array in the wire's byte order.

    Raise UnsendableArrayError for objects, structures and platform-dependent numbers.
    """
    dtype = array.dtype
    if dtype.itemsize == 0:
        raise UnsendableArrayError("an array of empty elements, which can't be sent")
    name = _name_of(dtype)
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and _NATIVE == ">"):
        return name, array.astype(dtype.newbyteorder("<"))
    _names[dtype] = name
    return name, array


def _name_of(dtype: np.dtype[Any]) -> str:
    if is_variable_dtype(dtype):
        return dtype.name
    if dtype.kind in "SUMm" and dtype.itemsize <= MAX_ELEMENT_BYTES:
        if dtype.kind == "U":
            return f"<U{dtype.itemsize // 4}"
        return f"S{dtype.itemsize}" if dtype.kind == "S" else dtype.name
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return dtype.name
    if dtype.kind == "O":
        raise UnsendableArrayError("an array of Python objects, which can't be sent: pass a list, or numbers")
    if dtype.names is not None:
        raise UnsendableArrayError("a structured array, which can't be sent: pass its fields as a dict of arrays")
    hint = "cast it to float64 or complex128" if dtype.kind in "fc" else "cast it to a plain dtype"
    raise UnsendableArrayError(f"an array of dtype {dtype}, which can't be sent: {hint}")


def scalar_form(scalar: np.generic) -> tuple[str, bytes]:
    """Return the wire name of a NumPy scalar's dtype, and its bytes. Raises as `wire_form`."""
    dtype = scalar.dtype
    if isinstance(scalar, np.str_):
        return f"<U{len(scalar)}", scalar.encode("utf-32-le", "surrogatepass")
    if isinstance(scalar, np.bytes_):
        return f"S{len(scalar)}", bytes(scalar)
    name = _names.get(dtype)
    if name is None:
        name = _name_of(dtype)
        if _NATIVE == ">":
            return name, np.asarray(scalar, dtype.newbyteorder("<")).tobytes()
        _names[dtype] = name
    return name, scalar.tobytes()


def wire_bytes(array: NDArray[Any]) -> memoryview:
    """Return an array's bytes in C order: a view of its memory if that is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a wire name, in this machine's byte order.

    Raise ProtocolError if there is none, or it needs the library ml_dtypes, which is not installed here.
    """
    if len(name) > MAX_NAME:
        raise ProtocolError(f"unknown element type {name[:40]!r}...")
    return _dtype_of(name)


@functools.lru_cache(maxsize=256)
def _dtype_of(name: str) -> np.dtype[Any]:
    match = _NAMED.fullmatch(name)
    if match is None or name in ("bool", "complex64", "complex128"):
        return dtype_named(name)
    for group in ("characters", "bytes"):
        if (size := match[group]) is not None:
            if not 0 < int(size) <= MAX_ELEMENT_BYTES:
                raise ProtocolError(f"elements of type {name!r} are empty or too long")
            return np.dtype(name).newbyteorder("=")
    if not match["extension"]:
        try:
            return np.dtype(name)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"unknown element type {name!r}: {error}") from None
    return _extension_dtype(name)


def _extension_dtype(name: str) -> np.dtype[Any]:
    with suppress(MisuseError, ProtocolError):
        return dtype_named(name)
    try:
        scalar = getattr(importlib.import_module("ml_dtypes"), name, None)
    except ImportError:
        raise ProtocolError(
            f"elements of type {name} need the library ml_dtypes, which is not installed here"
        ) from None
    if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
        raise ProtocolError(f"unknown element type {name!r}")
    return np.dtype(scalar)


def described(dtype: np.dtype[Any]) -> Any:
    """Describe a dtype as plain data: by name if it is an extension type, else as in NumPy's file format."""
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return dtype.name
    return np.lib.format.dtype_to_descr(dtype)


def plain_dtype(descr: Any) -> np.dtype[Any]:
    """Return the dtype from `described`. Raise ProtocolError if it is none, or its elements hold pointers."""
    try:
        extension = isinstance(descr, str) and descr.isidentifier()
        dtype = _extension_dtype(descr) if extension else np.lib.format.descr_to_dtype(descr)
    except Exception as error:  # NumPy inspects whatever it is given
        raise ProtocolError(f"{descr!r:.80} describes no element type: {error}") from None
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise ProtocolError(f"{dtype!r:.80} came as an element type; it must be a dtype without Python objects")
    return dtype


def array_from(name: str, shape: Sequence[int], data: Buffer, *, own: bool) -> NDArray[Any]:
    """Return a writable array of these bytes. `own`: it may use the buffer's memory, if that is writable and aligned.

    Raise ProtocolError if the shape does not match the number of bytes, or the elements are invalid.
    """
    if len(shape) > MAX_RANK:
        raise ProtocolError(f"an array of {len(shape)} dimensions")
    shape, dtype, came = tuple(shape), dtype_of(name), memoryview(data).nbytes
    if math.prod(shape) * dtype.itemsize != came:
        raise ProtocolError(f"an array of {name} and shape {shape} came with {came} bytes")
    wire = dtype.newbyteorder("<") if _NATIVE == ">" else dtype
    try:
        array = np.frombuffer(data, wire).reshape(shape) if 0 not in shape else np.empty(shape, wire)
    except (TypeError, ValueError, OverflowError) as error:  # such as (0, 2**63)
        raise ProtocolError(f"an array of {name} can't have the shape {shape}: {error}") from None
    _check_elements(array)
    if own and wire is dtype and array.flags.writeable and array.flags.aligned:
        return array
    return array.copy() if wire is dtype else array.astype(dtype)


def scalar_from(name: str, data: bytes) -> Any:
    """Return one NumPy scalar. Raises as `array_from`."""
    # In an array, text and bytes would lose trailing zeros, and could not be empty.
    if name.startswith("<U"):
        if name == f"<U{len(data) // 4}":
            try:
                return np.str_(str(data, "utf-32-le", "surrogatepass"))
            except UnicodeDecodeError:
                pass
        raise ProtocolError(f"a text of type {name[:40]!r} came with {len(data)} bytes, or no text")
    if name.startswith("S"):
        if name != f"S{len(data)}":
            raise ProtocolError(f"bytes of type {name[:40]!r} came with {len(data)} bytes")
        return np.bytes_(bytes(data))
    dtype = dtype_of(name)
    if len(data) != dtype.itemsize:
        raise ProtocolError(f"a scalar of {name} came with {len(data)} bytes")
    scalar = np.frombuffer(data, dtype.newbyteorder("<") if _NATIVE == ">" else dtype)
    _check_elements(scalar)
    return scalar[0]


def _check_elements(array: NDArray[Any]) -> None:
    """Refuse invalid elements: NumPy accepts them, then fails or gives wrong results when they are used."""
    if array.dtype.kind not in "bU" or array.size == 0:
        return
    if array.dtype.kind == "b" and array.view(np.uint8).max() > 1:
        raise ProtocolError("an array of bool holds a byte that is neither 0 nor 1")
    if array.dtype.kind == "U":
        order = array.dtype.byteorder.replace("=", _NATIVE)
        if array.reshape(-1).view(f"{order}u4").max() > sys.maxunicode:
            raise ProtocolError("an array of text holds a character that doesn't exist")
