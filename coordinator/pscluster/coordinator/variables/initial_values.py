"""Initial values of variables: value, shape and type as requested, checked."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.dtypes import as_array, converted, dtype_named, is_variable_dtype
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import capture, split_off_bulk
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.core.geometry.partition import Partition
from pscluster.ps.handles.indexing import Array
from pscluster.ps.handles.scope import VariableRequest
from pscluster.ps.initializers import Initializer
from pscluster.v1 import ps_pb2


@dataclass(frozen=True, slots=True)
class InitialValue:
    """A variable's initial value, or the initializers that compute it on the servers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value: Array | None = None
    initializers: tuple[tuple[ps_pb2.Initializer, bytes], ...] = ()

    def shards(self, partition: Partition) -> list[Array] | None:
        """Return the value, cut into one array per shard; None if the servers compute it."""
        if self.value is None:
            return None
        return [np.ascontiguousarray(self.value[partition.index(shard)]) for shard in range(partition.num_shards)]


def initial_value_of(request: VariableRequest, name: str, policy: SerializationPolicy) -> InitialValue:
    """Return the requested initial value, checked. MisuseError, with the variable's name, if it is invalid."""
    initial = request.initial_value
    if initial is None:
        raise MisuseError(f"variable {name!r} needs an initial_value: an array, a number, an initializer or a function")
    if not isinstance(request.trainable, bool):
        raise MisuseError(f"variable {name!r}: trainable is {request.trainable!r}; it must be True or False")
    if request.consistency not in ("sync", "async"):
        raise MisuseError(f"variable {name!r}: consistency is {request.consistency!r}; it must be 'sync' or 'async'")
    shape = None if request.shape is None else _shape_of(request.shape, name)
    requested_dtype = None if request.dtype is None else _dtype_named(request.dtype, name)
    if callable(initial) and not isinstance(initial, np.ndarray | np.generic):
        if shape is not None:
            dtype = requested_dtype or np.dtype(np.float32)
            _check_dtype(dtype, name)
            return InitialValue(shape, dtype, None, tuple(_initializers(initial, policy)))
        if isinstance(initial, Initializer) or not _callable_without_arguments(initial):
            raise MisuseError(f"variable {name!r}: its initializer needs the shape: give shape=(...)")
        initial = initial()
    value = array_for(cast(npt.ArrayLike, initial), requested_dtype, name)
    try:
        whole = np.broadcast_to(value, value.shape if shape is None else shape)
    except ValueError:
        raise MisuseError(f"variable {name!r}: the initial value has shape {value.shape}, not {shape}") from None
    return InitialValue(whole.shape, value.dtype, whole)


def array_for(initial: npt.ArrayLike, dtype: npt.DTypeLike | None, name: str) -> Array:
    """Return an initial value as an array of this type, or of its own.

    Raises:
        MisuseError: variables can't have elements of the type.
        InvalidUpdateError: it is not an array, or does not fit the type without loss.
    """
    value = as_array(initial, name, "initial value")
    wanted = _dtype_of(value, initial) if dtype is None else _dtype_named(dtype, name)
    _check_dtype(wanted, name)
    return converted(value, wanted, name, "initial value")


def _shape_of(requested: Any, name: str) -> tuple[int, ...]:
    try:
        return checks.per_axis(f"variable {name!r}: shape", requested)
    except ValueError as error:
        raise MisuseError(str(error)) from None


def _callable_without_arguments(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    try:
        signature.bind()
    except TypeError:
        return False
    return True


def _initializers(
    initial: Callable[..., Any], policy: SerializationPolicy
) -> Iterator[tuple[ps_pb2.Initializer, bytes]]:
    if isinstance(initial, Initializer):
        yield ps_pb2.Initializer(name=initial.name, numbers=json.dumps(initial.values_by_name())), b""
        return
    for form in capture(initial, policy=policy).forms():
        message = ps_pb2.Initializer(function=form)
        bulk = split_off_bulk(message.function)
        yield message, bulk


def _dtype_named(requested: npt.DTypeLike, name: str) -> np.dtype[Any]:
    if isinstance(requested, str) and requested == "bfloat16":
        return dtype_named(requested)
    try:
        return np.dtype(requested)
    except TypeError:
        raise MisuseError(
            f"variable {name!r}: dtype is {requested!r}, which is not a dtype: give one such as float32"
        ) from None


def _dtype_of(value: Array, initial: object) -> np.dtype[Any]:
    if value.dtype == np.float64 and not hasattr(initial, "dtype"):
        return np.dtype(np.float32)  # Python's floats, as in TensorFlow
    return value.dtype


def _check_dtype(dtype: np.dtype[Any], name: str) -> None:
    if not is_variable_dtype(dtype):
        raise MisuseError(f"variable {name!r} can't have elements of type {dtype}: give a number type such as float32")
