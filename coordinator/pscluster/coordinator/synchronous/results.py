"""What the script does with the values of replicas: merges, lists, reduces and joins them. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.synchronous.per_replica import PerReplica
from pscluster.core.checks import type_of
from pscluster.core.dtypes import array_of, is_variable_dtype
from pscluster.core.errors import MisuseError
from pscluster.core.values import describe, map_structure
from pscluster.core.values.records import is_record_class, layout_of, structure_of
from pscluster.worker.steps.results import NO_RESULT
from pscluster.worker.strategy import COMBINE, ReduceOp

Array: TypeAlias = npt.NDArray[Any]

_SHOWN_KEYS = 8


def merge(results: Sequence[Any]) -> Any:
    """Return one structure of the replicas' results, by rank, with a `PerReplica` in place of each leaf.

    A replica that has `NO_RESULT` has None in each leaf.

    Raises:
        MisuseError: the structures differ. The first replica whose structure is not that of replica 0 is named.
    """
    return _merged(list(results), "")


def _merged(values: list[Any], path: str) -> Any:
    there = next((replica for replica, value in enumerate(values) if value is not NO_RESULT), None)
    if there is None:
        return PerReplica([None] * len(values))
    first = values[there]
    kind = structure_of(first)
    for replica, value in enumerate(values):
        if value is not NO_RESULT and structure_of(value) != kind:
            raise MisuseError(
                f"{f'at {path} ' if path else ''}replica {replica} returned {_described(value)} where replica {there} "
                f"returned {_described(first)}: all replicas must return the same structure"
            )

    def column(rows: list[Any], key: Any, name: str) -> Any:
        return _merged([row if row is NO_RESULT else row[key] for row in rows], path + name)

    cls: type = type(first)
    if is_record_class(cls):
        layout = layout_of(cls)
        rows = [value if value is NO_RESULT else layout.values(value) for value in values]
        columns = [column(rows, at, f".{name}") for at, name in enumerate(layout.fields)]
        return layout.build(layout.fields, columns)
    if isinstance(first, dict):
        return {key: column(values, key, f"[{key!r}]") for key in first}
    if isinstance(first, list | tuple):
        merged = [column(values, at, f"[{at}]") for at in range(len(first))]
        return tuple(merged) if isinstance(first, tuple) else merged
    return PerReplica([None if value is NO_RESULT else value for value in values])


def _described(value: Any) -> str:
    if isinstance(value, dict):
        keys = ", ".join(map(repr, list(value)[:_SHOWN_KEYS]))
        more = ", ..." if len(value) > _SHOWN_KEYS else ""
        return f"a dict with keys {keys}{more}" if value else "an empty dict"
    if isinstance(value, list | tuple) and not is_record_class(type(value)):
        return f"a {'tuple' if isinstance(value, tuple) else 'list'} of {len(value)}"
    return type_of(value)


def local_results(value: Any) -> tuple[Any, ...]:
    """Return what each replica has of a structure, by rank. Without a `PerReplica` in it that is a tuple of one.

    Raises:
        ValueError: the structure has `PerReplica` values of different lengths.
    """
    sizes = sorted({len(leaf) for leaf in _leaves(value) if isinstance(leaf, PerReplica)})
    if len(sizes) > 1:
        raise ValueError(f"the value is of {sizes[0]} replicas in one place and of {sizes[-1]} in another")

    def of_rank(rank: int) -> Any:
        return map_structure(lambda leaf: leaf[rank] if isinstance(leaf, PerReplica) else leaf, value)

    return tuple(map(of_rank, range(sizes[0]))) if sizes else (value,)


def _leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    map_structure(found.append, structure)
    return found


def reduce(reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any:
    """Return a structure with the replicas' values combined in place of each `PerReplica`.

    Args:
        reduce_op: sums have their arrays' type, but those of bools are int64; means of integers and bools are float64.
        value: what `run` returned, or a part of it.
        axis: None: element by element. A number: of all elements along this axis, of all replicas, which may differ in
            length there. A mean is one of elements, not of the replicas' means.

    Raises:
        TypeError: a leaf is not a `PerReplica` of arrays or numbers, or the axis is not a whole number.
        ValueError: there is no such operation or axis, shapes differ, or there is no element to take the mean, the
            minimum or the maximum of.
    """
    op = ReduceOp.of(reduce_op)
    noun = f"reduce({op.value!r}, axis={axis!r})"
    _check_is_axis(axis, noun, optional=True)

    def reduced(arrays: list[Array]) -> Any:
        arrays = _prepared(op, arrays)
        dtype, combine, count = arrays[0].dtype, COMBINE[op], len(arrays)
        if axis is None:
            _check_shapes(arrays, None, noun)
        else:
            at = _position(axis, arrays, noun)
            _check_shapes(arrays, at, noun)
            count = sum(array.shape[at] for array in arrays)
            if not count and op is not ReduceOp.SUM:
                raise ValueError(f"{noun}: no replica has an element along axis {axis}")
            # An empty one has no minimum.
            arrays = [_along(combine, array, at) for array in arrays if array.shape[at] or not count]
        total = functools.reduce(combine, arrays)
        if op is ReduceOp.MEAN:
            total = total / count
        return np.asarray(total).astype(dtype, copy=False)[()]

    return _of_arrays(reduced, value, noun)


def gather(value: Any, axis: int) -> Any:
    """Return a structure with the replicas' arrays joined along an axis, by rank, in place of each `PerReplica`.

    Numbers become an array of them. Arrays may differ in length along the axis.

    Raises:
        TypeError: a leaf is not a `PerReplica` of arrays or numbers, or the axis is not a whole number.
        ValueError: there is no such axis, or shapes differ elsewhere.
    """
    noun = f"gather(axis={axis!r})"
    _check_is_axis(axis, noun, optional=False)

    def joined(arrays: list[Array]) -> Any:
        arrays = [np.atleast_1d(array) for array in arrays]
        at = _position(axis, arrays, noun)
        _check_shapes(arrays, at, noun)
        return np.concatenate(arrays, at)

    return _of_arrays(joined, value, noun)


def _of_arrays(fn: Callable[[list[Array]], Any], structure: Any, noun: str) -> Any:
    """Return a structure with `fn` of the replicas' arrays in place of each `PerReplica`."""

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            raise TypeError(
                f"{noun} takes PerReplica values, such as those that run() returns, not {describe(leaf)}: give "
                "PerReplica([...]) with one value for each replica"
            )
        if not leaf:
            raise ValueError(f"{noun}: a PerReplica value has no values")
        return fn([_array(value, noun, replica) for replica, value in enumerate(leaf)])

    return map_structure(of_leaf, structure)


def _array(value: Any, noun: str, replica: int) -> Array:
    try:
        array = array_of(value)
    except (ValueError, TypeError) as error:  # such as a ragged list
        raise TypeError(f"{noun}: the value of replica {replica} is not an array: {error}") from None
    if not is_variable_dtype(array.dtype):
        raise TypeError(
            f"{noun}: the value of replica {replica} is {describe(value)}: it takes arrays of numbers, or numbers"
        )
    return array


def _check_is_axis(axis: object, noun: str, *, optional: bool) -> None:
    if isinstance(axis, bool) or not (isinstance(axis, int | np.integer) or (optional and axis is None)):
        hint = ", or None, which combines the replicas' values element by element" if optional else ""
        raise TypeError(f"{noun}: an axis is a whole number{hint}")


def _position(axis: int, arrays: Sequence[Array], noun: str) -> int:
    """Return an axis counted from 0. Raise ValueError if not all arrays have it, or they differ in rank."""
    for replica, array in enumerate(arrays):
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(f"{noun}: the value of replica {replica} has the shape {array.shape}, without that axis")
    return int(axis) % arrays[0].ndim


def _check_shapes(arrays: Sequence[Array], free: int | None, noun: str) -> None:
    """Raise ValueError if shapes differ, except in the length of axis `free`."""

    def fixed(array: Array) -> list[int]:
        return [length for axis, length in enumerate(array.shape) if axis != free]

    for replica, array in enumerate(arrays):
        if array.ndim != arrays[0].ndim or fixed(array) != fixed(arrays[0]):
            hint = "give an axis along which lengths may differ" if free is None else "only that axis may differ"
            raise ValueError(
                f"{noun}: replica {replica} has a value of shape {array.shape}, but replica 0 one of shape "
                f"{arrays[0].shape}: {hint}"
            )


def _prepared(op: ReduceOp, arrays: Sequence[Array]) -> list[Array]:
    """Convert arrays to the type of their result, which integers keep in sums."""
    dtype = np.result_type(*(array.dtype for array in arrays))
    if op is ReduceOp.SUM and dtype.kind == "b":
        dtype = np.dtype(np.int64)
    elif op is ReduceOp.MEAN and dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    return [array.astype(dtype, copy=False) for array in arrays]


def _along(combine: np.ufunc, array: Array, axis: int) -> Any:
    if combine is not np.add:
        return combine.reduce(array, axis)
    # Thousands of elements soon exceed what 16 bits can hold.
    narrow = array.dtype.itemsize <= 2 and array.dtype.kind not in "iu"
    return combine.reduce(array, axis, dtype=np.float32 if narrow else array.dtype)
