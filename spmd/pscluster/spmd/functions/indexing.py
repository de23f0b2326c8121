"""Indexing and taking: axes that are taken whole keep their sharding, the others are needed whole.

Indices may be global arrays of integers. Masks must be here, since the shape of the result depends on their values.
"""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from pscluster.core.layouts.rule import Label
from pscluster.spmd.functions.applying import (
    Result,
    apply,
    as_tensor,
    axes_of,
    block,
    implements,
    mesh_of,
    normal_axis,
    probe,
    refuse_out,
    xp,
)
from pscluster.spmd.tensor import DTensor, unsupported

_EVERYTHING = slice(None)


class Picked(NamedTuple):
    """What an index picks: axes of which everything is taken keep their sharding, and arrays theirs."""

    labels: list[Label]  # of the result
    shape: tuple[int, ...]
    arrays: list[DTensor]  # in the index
    of_arrays: list[tuple[Label, ...]]  # the labels of these
    inner: tuple[Any, ...]  # the index of a block, with `block(n)` for the n-th array, counted from 1


@implements("getitem")
def getitem(a: DTensor, index: Any) -> DTensor:
    """Return `a[index]`, as NumPy does."""
    if isinstance(index, bool | np.bool_) or (_is_mask(index) and not index.ndim):
        return a[None][: int(index)]
    labels, shape, arrays, of_arrays, inner = picked(a, index)
    result = Result(tuple(labels), shape, a.dtype)
    return apply("getitem", [a, *arrays], [axes_of(a), *of_arrays], [result], [block(0), inner])[0]


def picked(a: DTensor, index: Any) -> Picked:
    """Return what an index picks of an array. Raise IndexError as NumPy does, and UnsupportedFunctionError."""
    items = _expanded(index, a)
    if any(not isinstance(item, int | slice | None) for item in items):
        return _advanced(a, items)
    labels: list[Label] = []
    shape: list[int] = []
    axis = 0
    for item in items:
        if item is None or isinstance(item, slice):
            label, length = _kept(item, axis, a)
            labels.append(label)
            shape.append(length)
        axis += item is not None
    return Picked(labels, tuple(shape), [], [], _sliced(items, a))


def _kept(item: slice | None, axis: int, a: DTensor) -> tuple[Label, int]:
    """Return the label and the length of the result's axis that a slice makes of this one, or that None adds."""
    if item is None:
        return None, 1
    whole = range(a.shape[axis])
    return axis if whole[item] == whole else None, len(whole[item])


def _sliced(items: list[Any], a: DTensor) -> tuple[Any, ...]:
    """Return an index for blocks: an axis of which everything is taken may have another length there."""
    lengths = iter(a.shape)
    sliced = []
    for item in items:
        length = 0 if item is None else next(lengths)
        sliced.append(_EVERYTHING if isinstance(item, slice) and range(length)[item] == range(length) else item)
    return tuple(sliced)


def _expanded(index: Any, a: DTensor) -> list[Any]:
    """Return an index as one item for each axis, and None for each new one: integers, slices, or arrays."""
    items = list(index) if isinstance(index, tuple) else [index]
    given = [_item(item) for item in items]
    taken = sum(item.ndim if _is_mask(item) else 1 for item in given if item is not None and item is not Ellipsis)
    dots = [at for at, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")  # NumPy's words
    if taken > a.ndim:
        raise IndexError(f"too many indices for array: array is {a.ndim}-dimensional, but {taken} were indexed")
    at = dots[0] if dots else len(given)
    given[at : at + bool(dots)] = [_EVERYTHING] * (a.ndim - taken)
    axis, expanded = 0, list[Any]()
    for item in given:
        if _is_mask(item):
            if item.shape != a.shape[axis : axis + item.ndim]:
                raise IndexError(f"a mask of shape {item.shape} does not fit an array of shape {a.shape}")
            expanded += item.nonzero()
            axis += item.ndim
            continue
        if isinstance(item, int):
            if not -a.shape[axis] <= item < a.shape[axis]:
                raise IndexError(f"index {item} is out of bounds for axis {axis} with size {a.shape[axis]}")
        elif isinstance(item, np.ndarray) and item.size:
            low, high = int(item.min()), int(item.max())
            if low < -a.shape[axis] or high >= a.shape[axis]:
                wrong = low if low < -a.shape[axis] else high
                raise IndexError(f"index {wrong} is out of bounds for axis {axis} with size {a.shape[axis]}")
        expanded.append(item)
        axis += item is not None
    return expanded


def _is_mask(item: Any) -> bool:
    return isinstance(item, np.ndarray) and item.dtype.kind == "b"


def _item(item: Any) -> Any:
    if item is None or isinstance(item, slice | EllipsisType):
        return item
    if isinstance(item, DTensor):
        if item.dtype.kind == "b":
            raise unsupported("indexing", "by a global array of bools, since the shape of the result depends on values")
        if item.dtype.kind not in "iu":
            raise IndexError("arrays used as indices must be of integer (or boolean) type")  # NumPy's words
        return item
    if isinstance(item, bool | np.bool_):
        return np.asarray(item)
    try:
        return operator.index(item)
    except TypeError:
        pass
    array = np.asarray(item)
    if not array.size and not isinstance(item, np.ndarray):
        array = array.astype(np.intp)
    if array.dtype.kind not in "iub":
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`), numpy.newaxis (`None`) and integer or boolean arrays are "
            "valid indices"  # NumPy's words
        )
    return array


def _advanced(a: DTensor, items: list[Any]) -> Picked:
    mesh = mesh_of(a, *items)
    arrays = [as_tensor(item, mesh) for item in items if isinstance(item, np.ndarray | DTensor)]
    picked = np.broadcast_shapes(*(array.shape for array in arrays))
    labels_of_index: tuple[Label, ...] = tuple(("index", back) for back in range(-len(picked), 0))
    # An integer beside arrays is one, too. The result's place of their axes: of the first, if all stand side by side.
    advanced = [at for at, item in enumerate(items) if isinstance(item, int | np.ndarray | DTensor)]
    together = advanced[-1] - advanced[0] == len(advanced) - 1
    labels: list[Label] = []
    shape: list[int] = []
    axis, place = 0, 0
    for at, item in enumerate(items):
        if at == advanced[0] and together:
            place = len(labels)
        if item is None or isinstance(item, slice):
            label, length = _kept(item, axis, a)
            labels.append(label)
            shape.append(length)
        axis += item is not None
    labels[place:place] = labels_of_index
    shape[place:place] = picked
    numbers = iter(range(1, len(arrays) + 1))
    sliced = _sliced(items, a)
    inner = tuple(block(next(numbers)) if isinstance(item, np.ndarray | DTensor) else item for item in sliced)
    of_arrays: list[tuple[Label, ...]] = []
    for array in arrays:
        own = labels_of_index[len(picked) - array.ndim :]
        lengths = picked[len(picked) - array.ndim :]
        of_arrays.append(tuple(x if n == m else None for x, n, m in zip(own, array.shape, lengths, strict=True)))
    return Picked(labels, tuple(shape), arrays, of_arrays, inner)


@implements(np.take)
def take(a: Any, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise") -> Any:
    """See `numpy.take`."""
    refuse_out("take", {"out": out})
    mesh = mesh_of(a, indices)
    if isinstance(indices, list | tuple) and not np.size(indices):
        indices = np.zeros(np.shape(indices), np.intp)  # NumPy makes floats of an empty list
    array, index = as_tensor(a, mesh), as_tensor(indices, mesh)
    if axis is None:
        array, axis = xp.ravel(array), 0
    at = normal_axis(axis, array.ndim)
    others = array.shape[:at] + array.shape[at + 1 :]
    if not isinstance(indices, DTensor) and mode == "raise" and 0 not in others:  # else NumPy takes nothing
        _expanded((*(_EVERYTHING,) * at, indices), array)  # raises IndexError here, not on a device
    places: tuple[Label, ...] = tuple(("index", n) for n in range(index.ndim))
    axes = axes_of(array)
    labels = (*axes[:at], *places, *axes[at + 1 :])
    shape = (*array.shape[:at], *index.shape, *array.shape[at + 1 :])
    result = Result(labels, shape, array.dtype)
    options = {"axis": at, "mode": mode}
    return apply("take", [array, index], [axes, places], [result], [block(0), block(1)], options)[0]


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    """See `numpy.take_along_axis`."""
    mesh = mesh_of(arr, indices)
    array, index = as_tensor(arr, mesh), as_tensor(indices, mesh)
    if axis is None:
        array, axis = xp.ravel(array), 0
    at = normal_axis(axis, array.ndim)
    if index.ndim != array.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")  # NumPy's words
    shape = list(np.broadcast_shapes(*((*t.shape[:at], 1, *t.shape[at + 1 :]) for t in (array, index))))
    shape[at] = index.shape[at]
    operands: list[tuple[Label, ...]] = []
    for n, tensor in enumerate((array, index)):
        lengths = enumerate(zip(tensor.shape, shape, strict=True))
        operands.append(tuple(("along", n) if k == at else (k if x == y else None) for k, (x, y) in lengths))
    labels = tuple(("along", 1) if k == at else k for k in range(array.ndim))
    result = Result(labels, tuple(shape), array.dtype)
    args = [block(0), block(1)]
    return apply("take_along_axis", [array, index], operands, [result], args, {"axis": at})[0]


@implements(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """See `numpy.searchsorted`: needs the sorted array whole; the result is sharded as the values are."""
    if sorter is not None:
        a = take(a, sorter)
    return _looked_up("searchsorted", a, v, lambda array, values: [array, values], side=side)


@implements(np.digitize)
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """See `numpy.digitize`: needs the bins whole; the result is sharded as the values are."""
    return _looked_up("digitize", bins, x, lambda array, values: [values, array], right=right)


@implements(np.isin)
def isin(
    element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None
) -> Any:
    """See `numpy.isin`: needs the elements to test against whole; the result is sharded as the others are."""
    options = {"assume_unique": assume_unique, "invert": invert, "kind": kind}
    return _looked_up("isin", test_elements, element, lambda array, values: [values, array], **options)


def _looked_up(name: str, table: Any, values: Any, order: Any, **kwargs: Any) -> DTensor:
    mesh = mesh_of(table, values)
    known, sought = as_tensor(table, mesh), as_tensor(values, mesh)
    labels = axes_of(sought)
    function = getattr(np, name)
    (of,) = probe(lambda array, many: function(*order(array.ravel(), many), **kwargs), known, sought)
    operands = [tuple(("table", k) for k in range(known.ndim)), labels]
    result = Result(labels, sought.shape, of)
    return apply(name, [known, sought], operands, [result], order(block(0), block(1)), kwargs)[0]
