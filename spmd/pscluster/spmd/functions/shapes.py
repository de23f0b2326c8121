"""Functions that rearrange axes: what keeps its elements keeps its sharding."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from pscluster.core import checks
from pscluster.core.layouts.rule import Label
from pscluster.spmd.functions.applying import (
    Result,
    apply,
    as_tensor,
    axes_of,
    block,
    implements,
    local_shape,
    mesh_of,
    normal_axes,
    normal_axis,
    numpys,
)
from pscluster.spmd.tensor import DTensor


def _rearranged(name: str, a: DTensor, labels: Sequence[Label], shape: Sequence[int], *args: Any) -> DTensor:
    """Return an array whose elements are those of `a`, with labels that are numbers of its axes, or None for new ones.

    Labels that are not numbers of axes are not sharded.
    """
    return apply(name, [a], [axes_of(a)], [Result(tuple(labels), tuple(shape), a.dtype)], [block(0), *args])[0]


@implements(np.transpose)
def transpose(a: Any, axes: Any = None) -> Any:
    """See `numpy.transpose`."""
    order = tuple(reversed(range(a.ndim))) if axes is None else normal_axes(axes, a.ndim)
    if len(order) != a.ndim:
        raise ValueError("axes don't match array")  # NumPy's words
    return _rearranged("transpose", a, order, [a.shape[at] for at in order], order)


@implements(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """See `numpy.swapaxes`."""
    order = list(range(a.ndim))
    first, second = normal_axis(axis1, a.ndim), normal_axis(axis2, a.ndim)
    order[first], order[second] = second, first
    return transpose(a, order)


@implements(*numpys("matrix_transpose", "linalg.matrix_transpose"))
def matrix_transpose(x: Any, /) -> Any:
    """See `numpy.matrix_transpose`."""
    return x.mT


@implements(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    """See `numpy.moveaxis`."""
    of, to = normal_axes(source, a.ndim), normal_axes(destination, a.ndim)
    if len(of) != len(to):
        raise ValueError("`source` and `destination` arguments must have the same number of elements")  # NumPy's
    order = [at for at in range(a.ndim) if at not in of]
    for target, origin in sorted(zip(to, of, strict=True)):
        order.insert(target, origin)
    return transpose(a, order)


@implements(np.rollaxis)
def rollaxis(a: Any, axis: int, start: int = 0) -> Any:
    """See `numpy.rollaxis`."""
    at = normal_axis(axis, a.ndim)
    to = start + a.ndim if start < 0 else start
    return moveaxis(a, at, to - 1 if at < to else to)


@implements(np.reshape)
def reshape(a: Any, /, shape: Any = None, order: Any = "C", *, newshape: Any = None, copy: Any = None) -> Any:
    """See `numpy.reshape`. An axis that stays as it is keeps its sharding, and so does the first of several that are
    merged, or that one is cut into, if the pieces are whole there."""
    del copy
    if order not in ("C", "A", "F", None):
        raise ValueError(f"order must be one of 'C', 'F', 'A', not {order!r}")
    wanted = newshape if shape is None else shape
    lengths = [operator.index(n) for n in (wanted if isinstance(wanted, tuple | list) else (wanted,))]
    misfit = ValueError(f"cannot reshape array of size {a.size} into shape {tuple(lengths)}")  # NumPy's words
    if lengths.count(-1) == 1:
        if not (known := math.prod(n for n in lengths if n != -1)):
            raise misfit  # -1 could be any
        lengths[lengths.index(-1)] = a.size // known
    if math.prod(lengths) != a.size or min(lengths, default=0) < 0:
        raise misfit
    if tuple(lengths) == a.shape:
        return a
    if order == "F":  # first indices change fastest: those of the transpose, in the usual order
        return transpose(reshape(transpose(a), lengths[::-1]))
    labels: list[Label] = [None] * len(lengths)
    for of, to in axis_groups(a.shape, lengths):
        if not of or not to:
            continue
        parts = a.layout.num_shards(of[0])
        first, after = a.shape[of[0]], lengths[to[0]]
        if (len(of) == len(to) == 1) or (first % parts == 0 and after % parts == 0):
            labels[to[0]] = of[0]
    return _rearranged("reshape", a, labels, lengths, local_shape())


def axis_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return which axes become which in a reshape: the smallest groups with as many elements.

    Axes of length 1 are left out. An empty array has none.
    """
    groups: list[tuple[list[int], list[int]]] = []
    if 0 in old:
        return groups
    before = [at for at, n in enumerate(old) if n != 1]
    after = [at for at, n in enumerate(new) if n != 1]
    while before and after:
        of, to = [before.pop(0)], [after.pop(0)]
        while (left := math.prod(old[at] for at in of)) != (right := math.prod(new[at] for at in to)):
            if left < right:
                of.append(before.pop(0))
            else:
                to.append(after.pop(0))
        groups.append((of, to))
    return groups


@implements(np.ravel)
def ravel(a: Any, order: Any = "C") -> Any:
    """See `numpy.ravel`."""
    return reshape(a, (a.size,), order)


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    """See `numpy.expand_dims`."""
    added = axis if isinstance(axis, tuple | list) else (axis,)
    places = normal_axes(tuple(added), a.ndim + len(added))
    labels: list[Label] = list(range(a.ndim))
    shape = list(a.shape)
    for at in sorted(places):
        labels.insert(at, None)
        shape.insert(at, 1)
    return _rearranged("expand_dims", a, labels, shape, places)


@implements(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> Any:
    """See `numpy.squeeze`."""
    gone = normal_axes(axis, a.ndim) if axis is not None else tuple(at for at, n in enumerate(a.shape) if n == 1)
    if any(a.shape[at] != 1 for at in gone):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")  # NumPy's words
    kept = [at for at in range(a.ndim) if at not in gone]
    return _rearranged("squeeze", a, kept, [a.shape[at] for at in kept], gone)


@implements(np.atleast_1d)
def atleast_1d(*arrays: Any) -> Any:
    """See `numpy.atleast_1d`."""
    return _each(arrays, lambda a: reshape(a, (1,)) if not a.ndim else a)


@implements(np.atleast_2d)
def atleast_2d(*arrays: Any) -> Any:
    """See `numpy.atleast_2d`."""
    return _each(arrays, lambda a: reshape(a, (1,) * (2 - a.ndim) + a.shape) if a.ndim < 2 else a)


@implements(np.atleast_3d)
def atleast_3d(*arrays: Any) -> Any:
    """See `numpy.atleast_3d`."""

    def deeper(a: DTensor) -> Any:
        shape = {0: (1, 1, 1), 1: (1, *a.shape, 1), 2: (*a.shape, 1)}.get(a.ndim, a.shape)
        return reshape(a, shape)

    return _each(arrays, deeper)


def _each(arrays: Sequence[Any], fn: Any) -> Any:
    mesh = mesh_of(*arrays)
    results = tuple(fn(as_tensor(array, mesh)) for array in arrays)
    return results[0] if len(results) == 1 else results


@implements(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    """See `numpy.broadcast_to`."""
    del subok
    lengths = checks.per_axis("shape", shape)
    if np.broadcast_shapes(array.shape, lengths) != lengths:
        raise ValueError(f"an array of shape {array.shape} can't be broadcast to shape {lengths}")
    added = len(lengths) - array.ndim
    labels: list[Label] = [None] * added
    labels += [at if array.shape[at] == lengths[added + at] else None for at in range(array.ndim)]
    return _rearranged("broadcast_to", array, labels, lengths, local_shape())


@implements(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> Any:
    """See `numpy.broadcast_arrays`."""
    del subok
    mesh = mesh_of(*args)
    tensors = [as_tensor(value, mesh) for value in args]
    shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(broadcast_to(tensor, shape) for tensor in tensors)


@implements(np.diagonal)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """See `numpy.diagonal`: both axes are needed whole."""
    first, second = normal_axis(axis1, a.ndim), normal_axis(axis2, a.ndim)
    rows, columns = a.shape[first], a.shape[second]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    kept = [at for at in range(a.ndim) if at not in (first, second)]
    shape = [*(a.shape[at] for at in kept), length]
    return _rearranged("diagonal", a, [*kept, None], shape, offset, first, second)


@implements(*numpys("linalg.diagonal"))
def diagonal_of_matrices(x: Any, /, *, offset: int = 0) -> Any:
    """See `numpy.linalg.diagonal`."""
    return diagonal(x, offset, -2, -1)


@implements(np.diag)
def diag(v: Any, k: int = 0) -> Any:
    """See `numpy.diag`."""
    if v.ndim == 2:
        return diagonal(v, k)
    if v.ndim != 1:
        raise ValueError("Input must be 1- or 2-d.")  # NumPy's words
    length = v.shape[0] + abs(k)
    return _rearranged("diag", v, [None, None], (length, length), k)


@implements(np.diagflat)
def diagflat(v: Any, k: int = 0) -> Any:
    """See `numpy.diagflat`."""
    return diag(ravel(v), k)


@implements(np.resize)
def resize(a: Any, new_shape: Any) -> Any:
    """See `numpy.resize`: needs the whole array."""
    lengths = checks.per_axis("new_shape", new_shape)
    return _rearranged("resize", a, [None] * len(lengths), lengths, lengths)
