"""What a function that `spmd.local_map` calls may ask of the other calls, by the names of the mesh's dimensions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import array_of, is_variable_dtype
from pscluster.core.errors import MisuseError
from pscluster.core.values import describe, map_structure
from pscluster.worker.collectives.replica import user_place
from pscluster.worker.programs.local.calls import Call, current_call
from pscluster.worker.programs.local.rounds import GATHER, ArrayShape, Waiting

Array = npt.NDArray[Any]
Dims = str | Sequence[str]


def psum(values: Any, dim: Dims) -> Any:
    """Return the sum over the devices along a dimension of the mesh, or several.

    All of them have to call it, with arrays of the same types and shapes; a call that ends without it makes those that
    wait raise MisuseError.

    Args:
        values: arrays or numbers, in lists, tuples and dicts. Bools are summed as int64.
        dim: the name of the dimension, or several names.
    """
    return _combined("psum", values, dim, lambda array: array.astype(np.int64) if array.dtype.kind == "b" else array)


def pmean(values: Any, dim: Dims) -> Any:
    """Return the mean over the devices along a dimension: see `psum`. Of integers and bools it is float64."""
    size = axis_size(dim)

    def number(array: Array) -> Array:
        return array.astype(np.float64) if array.dtype.kind in "biu" else array

    total = _combined("psum", values, dim, number)
    return map_structure(lambda array: (array / array.dtype.type(size)).astype(array.dtype)[()], total)


def pmax(values: Any, dim: Dims) -> Any:
    """Return the largest of the devices' values along a dimension, element by element: see `psum`."""
    return _combined("pmax", values, dim)


def pmin(values: Any, dim: Dims) -> Any:
    """Return the smallest of the devices' values along a dimension, element by element: see `psum`."""
    return _combined("pmin", values, dim)


def all_gather(values: Any, dim: Dims, axis: int = 0) -> Any:
    """Return the arrays of the devices along a dimension, joined along an axis: of a sharded array, the whole axis.

    They may differ in length along the axis. Numbers become an array of them. See `psum`.
    """
    axis = operator.index(axis)

    def prepared(array: Array) -> Array:
        array = np.atleast_1d(array)
        if not -array.ndim <= axis < array.ndim:
            raise MisuseError(f"all_gather along axis {axis} of an array with {array.ndim} axes")
        return array

    return _collective(GATHER, values, dim, prepared, axis)


def axis_index(dim: str) -> int:
    """Return the place of this call's device on a dimension of the mesh, from 0."""
    call = _current("axis_index")
    (name,) = _dims("axis_index", dim, call)
    return call.mesh.coords(call.device)[call.mesh.dim_names.index(name)]


def axis_size(dim: Dims) -> int:
    """Return the size of a dimension of the mesh, or the number of devices along several."""
    call = _current("axis_size")
    return int(np.prod([call.mesh[name] for name in _dims("axis_size", dim, call)]))


def _current(name: str) -> Call:
    if (call := current_call()) is None:
        raise MisuseError(f"{name} is for functions that local_map calls, on the thread that it calls them on")
    return call


def _dims(name: str, dim: Dims, call: Call) -> tuple[str, ...]:
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    if not dims or len(set(dims)) < len(dims) or not all(one in call.mesh for one in dims):
        raise MisuseError(f"{name} over {dim!r}: the mesh has the dimensions {', '.join(call.mesh.dim_names)}")
    return tuple(one for one in call.mesh.dim_names if one in dims)  # in one order, as on the other devices


def _combined(name: str, values: Any, dim: Dims, prepare: Callable[[Array], Array] = lambda array: array) -> Any:
    return _collective(name, values, dim, prepare, 0)


def _collective(name: str, values: Any, dim: Dims, prepare: Callable[[Array], Array], axis: int) -> Any:
    """Take part in a collective with all arrays of a structure, and return it with the results."""
    call = _current(name)
    dims = _dims(name, dim, call)
    arrays: list[Array] = []

    def number(leaf: Any) -> int:
        try:
            array = array_of(leaf)
        except (ValueError, TypeError) as error:  # such as a ragged list
            raise MisuseError(f"{name} takes arrays and numbers, not {describe(leaf)}: {error}") from None
        if not is_variable_dtype(array.dtype):
            raise MisuseError(f"{name} takes arrays of numbers, not {describe(leaf)}, of {array.dtype.name}")
        arrays.append(prepare(array.astype(array.dtype.newbyteorder("="), copy=False)))
        return len(arrays) - 1

    numbered = map_structure(number, values)
    if name == GATHER and arrays:  # one axis for all of them: counted from 0
        axes = {axis % array.ndim for array in arrays}
        if len(axes) > 1:
            raise MisuseError(f"all_gather along axis {axis} of arrays of different ranks: gather them one by one")
        axis = axes.pop()
    shapes = tuple(ArrayShape(array.dtype.name, array.shape) for array in arrays)
    results = call.wait(Waiting(name, dims, shapes, axis, user_place()), arrays)
    return map_structure(lambda at: results[at][()], numbered)
