"""Functions that join and split arrays, along axes that they need whole; the others keep their sharding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pscluster.core.geometry.partition import even_ends
from pscluster.core.layouts.rule import Label
from pscluster.spmd.functions.applying import (
    Result,
    apply,
    as_tensor,
    axes_of,
    block,
    implements,
    mesh_of,
    normal_axes,
    normal_axis,
    numpys,
    probe,
    refuse_out,
    xp,
)
from pscluster.spmd.functions.shapes import atleast_1d, atleast_2d, atleast_3d
from pscluster.spmd.tensor import DTensor


def _tensors(arrays: Any) -> list[DTensor]:
    if isinstance(arrays, DTensor):
        arrays = list(arrays)
    mesh = mesh_of(*arrays)
    return [as_tensor(array, mesh) for array in arrays]


@implements(np.concatenate)
def concatenate(arrays: Any, /, axis: int | None = 0, out: Any = None, *, dtype: Any = None, casting: str = "") -> Any:
    """See `numpy.concatenate`."""
    del casting
    refuse_out("concatenate", {"out": out})
    tensors = _tensors(arrays)
    if axis is None:
        tensors, axis = [xp.ravel(tensor) for tensor in tensors], 0
    first = tensors[0]
    at = normal_axis(axis, first.ndim)
    for tensor in tensors:
        if tensor.ndim != first.ndim or any(tensor.shape[k] != first.shape[k] for k in range(first.ndim) if k != at):
            raise ValueError(f"arrays of shapes {first.shape} and {tensor.shape} can't be joined along axis {at}")
    shape = list(first.shape)
    shape[at] = sum(tensor.shape[at] for tensor in tensors)
    options = {} if dtype is None else {"dtype": np.dtype(dtype).name}
    (of,) = probe(np.concatenate, list(tensors), at, **options)
    # An axis that operands have in different lengths has a label in each.
    labels = [tuple(("joined", n) if k == at else k for k in range(first.ndim)) for n in range(len(tensors))]
    result = Result(tuple(None if k == at else k for k in range(first.ndim)), tuple(shape), of)
    args = [[block(n) for n in range(len(tensors))], at]
    return apply("concatenate", tensors, labels, [result], args, options)[0]


@implements(np.stack)
def stack(arrays: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "") -> Any:
    """See `numpy.stack`."""
    del casting
    refuse_out("stack", {"out": out})
    tensors = _tensors(arrays)
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        raise ValueError("all input arrays must have the same shape")  # NumPy's words
    at = normal_axis(axis, first.ndim + 1)
    labels: list[Label] = list(axes_of(first))
    labels.insert(at, None)
    shape = list(first.shape)
    shape.insert(at, len(tensors))
    options = {} if dtype is None else {"dtype": np.dtype(dtype).name}
    (of,) = probe(np.stack, list(tensors), at, **options)
    args = [[block(n) for n in range(len(tensors))], at]
    operands = [axes_of(tensor) for tensor in tensors]
    return apply("stack", tensors, operands, [Result(tuple(labels), tuple(shape), of)], args, options)[0]


def _at_least(arrays: Any, fn: Any) -> list[Any]:
    return [fn(tensor) for tensor in _tensors(arrays)]


@implements(np.vstack)
def vstack(tup: Any, *, dtype: Any = None, casting: str = "") -> Any:
    """See `numpy.vstack`."""
    del casting
    return concatenate(_at_least(tup, atleast_2d), 0, dtype=dtype)


@implements(np.hstack)
def hstack(tup: Any, *, dtype: Any = None, casting: str = "") -> Any:
    """See `numpy.hstack`."""
    del casting
    arrays = _at_least(tup, atleast_1d)
    return concatenate(arrays, 0 if arrays[0].ndim == 1 else 1, dtype=dtype)


@implements(np.dstack)
def dstack(tup: Any) -> Any:
    """See `numpy.dstack`."""
    return concatenate(_at_least(tup, atleast_3d), 2)


@implements(np.column_stack)
def column_stack(tup: Any) -> Any:
    """See `numpy.column_stack`."""
    return concatenate(_at_least(tup, lambda a: xp.reshape(a, (-1, 1)) if a.ndim < 2 else a), 1)


@implements(np.append)
def append(arr: Any, values: Any, axis: int | None = None) -> Any:
    """See `numpy.append`."""
    return concatenate([arr, values], axis)


@implements(np.block)
def block_of_blocks(arrays: Any) -> Any:
    """See `numpy.block`."""

    def depth(nested: Any) -> int:
        return 1 + max(map(depth, nested)) if isinstance(nested, list) else 0

    levels = depth(arrays)

    def leaves(nested: Any) -> list[Any]:
        return [leaf for item in nested for leaf in leaves(item)] if isinstance(nested, list) else [nested]

    mesh = mesh_of(*leaves(arrays))
    ndim = max(levels, *(as_tensor(leaf, mesh).ndim for leaf in leaves(arrays)))

    def joined(nested: Any, level: int) -> Any:
        if not isinstance(nested, list):
            tensor = as_tensor(nested, mesh)
            return xp.reshape(tensor, (1,) * (ndim - tensor.ndim) + tensor.shape)
        return concatenate([joined(item, level + 1) for item in nested], ndim - levels + level)

    return joined(arrays, 0)


def unsharded(a: DTensor, axis: int) -> DTensor:
    """Return an array with one axis whole on each device."""
    return a.relayout([None if at == axis else spec for at, spec in enumerate(a.layout.specs)])


@implements(np.array_split)
def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """See `numpy.array_split`; also what `numpy.split` does, where the pieces are equal."""
    at = normal_axis(axis, ary.ndim)
    length = ary.shape[at]
    if isinstance(indices_or_sections, int | np.integer):
        cuts = list(even_ends(length, int(indices_or_sections)))[:-1]
    else:
        cuts = [int(cut) for cut in indices_or_sections]
    bounds = [slice(a, b).indices(length)[:2] for a, b in pairwise([0, *cuts, length])]
    whole = unsharded(ary, at)  # once for all pieces
    return [whole[(*(slice(None),) * at, slice(a, max(a, b)))] for a, b in bounds]


@implements(np.split)
def even_split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """See `numpy.split`."""
    if isinstance(indices_or_sections, int | np.integer) and ary.shape[axis] % indices_or_sections:
        raise ValueError("array split does not result in an equal division")  # NumPy's words
    return split(ary, indices_or_sections, axis)


@implements(np.hsplit)
def hsplit(ary: Any, indices_or_sections: Any) -> Any:
    """See `numpy.hsplit`."""
    return even_split(ary, indices_or_sections, 1 if ary.ndim > 1 else 0)


@implements(np.vsplit)
def vsplit(ary: Any, indices_or_sections: Any) -> Any:
    """See `numpy.vsplit`."""
    return even_split(ary, indices_or_sections, 0)


@implements(np.dsplit)
def dsplit(ary: Any, indices_or_sections: Any) -> Any:
    """See `numpy.dsplit`."""
    return even_split(ary, indices_or_sections, 2)


@implements(*numpys("unstack"))
def unstack(x: Any, /, *, axis: int = 0) -> Any:
    """See `numpy.unstack`."""
    at = normal_axis(axis, x.ndim)
    x = unsharded(x, at)
    return tuple(x[(*(slice(None),) * at, n)] for n in range(x.shape[at]))


def _changed_along(
    name: str, a: DTensor, axes: Sequence[int], shape: Sequence[int], *args: Any, **kwargs: Any
) -> DTensor:
    """Return an array that a function makes longer or shorter along axes, which it needs whole."""
    labels = tuple(("whole", at) if at in axes else at for at in range(a.ndim))
    result = Result(tuple(None if at in axes else at for at in range(a.ndim)), tuple(shape), a.dtype)
    return apply(name, [a], [labels], [result], [block(0), *args], kwargs)[0]


@implements(np.tile)
def tile(A: Any, reps: Any) -> Any:  # noqa: N803  # as in NumPy
    """See `numpy.tile`."""
    counts = [int(n) for n in (reps if isinstance(reps, tuple | list | np.ndarray) else (reps,))]
    ndim = max(A.ndim, len(counts))
    a = xp.reshape(A, (1,) * (ndim - A.ndim) + A.shape)
    counts = [1] * (ndim - len(counts)) + counts
    changed = [at for at, n in enumerate(counts) if n != 1]
    shape = [n * count for n, count in zip(a.shape, counts, strict=True)]
    return _changed_along("tile", a, changed, shape, tuple(counts))


@implements(np.repeat)
def repeat(a: Any, repeats: Any, axis: int | None = None) -> Any:
    """See `numpy.repeat`."""
    if isinstance(repeats, DTensor):
        repeats = repeats.numpy()
    array = xp.ravel(a) if axis is None else a
    at = normal_axis(axis or 0, array.ndim)
    counts = xp.broadcast_to(repeats, array.shape[at])
    if counts.size and counts.min() < 0:
        raise ValueError("repeats may not contain negative values.")  # NumPy's words
    shape = [int(counts.sum()) if k == at else n for k, n in enumerate(array.shape)]
    each = int(repeats) if np.ndim(repeats) == 0 else [int(n) for n in counts]
    return _changed_along("repeat", array, [at], shape, each, axis=at)


@implements(np.pad)
def pad(array: Any, pad_width: Any, mode: str = "constant", **kwargs: Any) -> Any:
    """See `numpy.pad`."""
    if not isinstance(mode, str):
        raise TypeError("a global array is padded by a mode of NumPy's, not by a function")
    if isinstance(pad_width, dict):
        pad_width = [pad_width.get(at, pad_width.get(at - array.ndim, (0, 0))) for at in range(array.ndim)]
    widths = [(int(a), int(b)) for a, b in xp.broadcast_to(pad_width, (array.ndim, 2))]
    if any(min(width) < 0 for width in widths):
        raise ValueError("index can't contain negative values")  # NumPy's words
    changed = [at for at, (before, after) in enumerate(widths) if before or after]
    shape = [n + before + after for n, (before, after) in zip(array.shape, widths, strict=True)]
    options = {name: np.asarray(value).tolist() for name, value in kwargs.items()}
    return _changed_along("pad", array, changed, shape, widths, mode, **options)


@implements(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    """See `numpy.roll`."""
    if axis is None:
        return xp.reshape(roll(xp.ravel(a), shift, 0), a.shape)
    axes = normal_axes(axis, a.ndim)
    return _changed_along("roll", a, axes, a.shape, _plain(shift), axes if isinstance(axis, tuple | list) else axes[0])


def _plain(shift: Any) -> Any:
    return tuple(int(n) for n in shift) if isinstance(shift, tuple | list) else int(shift)


@implements(np.flip)
def flip(m: Any, axis: Any = None) -> Any:
    """See `numpy.flip`."""
    axes = normal_axes(axis, m.ndim)
    return _changed_along("flip", m, axes, m.shape, axes)


@implements(np.fliplr)
def fliplr(m: Any) -> Any:
    """See `numpy.fliplr`."""
    return flip(m, 1)


@implements(np.flipud)
def flipud(m: Any) -> Any:
    """See `numpy.flipud`."""
    return flip(m, 0)


@implements(np.rot90)
def rot90(m: Any, k: int = 1, axes: Any = (0, 1)) -> Any:
    """See `numpy.rot90`."""
    first, second = normal_axes(tuple(axes), m.ndim)
    match k % 4:
        case 0:
            return m
        case 1:
            return xp.swapaxes(flip(m, second), first, second)
        case 2:
            return flip(m, (first, second))
        case _:
            return flip(xp.swapaxes(m, first, second), second)


@implements(np.delete)
def delete(arr: Any, obj: Any, axis: int | None = None) -> Any:
    """See `numpy.delete`."""
    array = xp.ravel(arr) if axis is None else arr
    at = normal_axis(axis or 0, array.ndim)
    left = np.delete(np.arange(array.shape[at]), obj)
    return array[(*(slice(None),) * at, left)]


def _register_triangle(name: str, function: Any) -> None:
    @implements(function)
    def triangle(m: Any, k: int = 0) -> Any:
        if m.ndim == 1:  # as many rows like it
            m = xp.broadcast_to(m, m.shape * 2)
        axes = [m.ndim - 2, m.ndim - 1]
        return _changed_along(name, m, axes, m.shape, k)


_register_triangle("tril", np.tril)
_register_triangle("triu", np.triu)
