"""Rules for functions that rearrange, join, repeat and index: the gradient goes back to where elements came from."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from pscluster.core.errors import UnsupportedFunctionError
from pscluster.core.layouts.rule import Label
from pscluster.spmd.functions.applying import Result, apply, as_tensor, axes_of, block, local_shape, xp
from pscluster.spmd.gradients.rules import added_at, rule, summed_to
from pscluster.spmd.gradients.tape import Node
from pscluster.spmd.tensor import DTensor

_EVERYTHING = slice(None)


@rule("reshape", "expand_dims", "squeeze")
def _reshape(node: Node, position: int, g: Any) -> Any:
    shape = node.operands[position].shape
    if node.function == "expand_dims":
        return xp.squeeze(g, node.args[1])
    return xp.expand_dims(g, node.args[1]) if node.function == "squeeze" else xp.reshape(g, shape)


@rule("transpose")
def _transpose(node: Node, position: int, g: Any) -> Any:
    del position
    return xp.transpose(g, np.argsort(node.args[1]).tolist())


@rule("broadcast_to")
def _broadcast_to(node: Node, position: int, g: Any) -> Any:
    return None if position else summed_to(g, node.operands[0].shape)


@rule("stack")
def _stack(node: Node, position: int, g: Any) -> Any:
    return g[(*(_EVERYTHING,) * node.args[1], position)]


@rule("concatenate")
def _concatenate(node: Node, position: int, g: Any) -> Any:
    axis = node.args[1]
    ends = list(accumulate(operand.shape[axis] for operand in node.operands))
    start = ends[position] - node.operands[position].shape[axis]
    return g[(*(_EVERYTHING,) * axis, slice(start, ends[position]))]


@rule("tile")
def _tile(node: Node, position: int, g: Any) -> Any:
    a = node.operands[position]
    pairs = [n for pair in zip(node.args[1], a.shape, strict=True) for n in pair]
    return xp.sum(xp.reshape(g, pairs), axis=tuple(range(0, 2 * a.ndim, 2)), dtype=g.dtype)


@rule("repeat")
def _repeat(node: Node, position: int, g: Any) -> Any:
    a, axis = node.operands[position], node.kwargs["axis"]
    return _added_along(node, g, np.repeat(np.arange(a.shape[axis]), node.args[1]), axis)


@rule("pad")
def _pad(node: Node, position: int, g: Any) -> Any:
    _, widths, mode = node.args
    if mode != "constant":
        raise UnsupportedFunctionError(
            f"pad has no gradient with mode={mode!r}: pad by a constant, or with concatenate()"
        )
    shape = node.operands[position].shape
    return g[tuple(slice(before, before + n) for (before, _), n in zip(widths, shape, strict=True))]


@rule("roll")
def _roll(node: Node, position: int, g: Any) -> Any:
    del position
    _, shift, axes = node.args
    return xp.roll(g, tuple(-n for n in shift) if isinstance(shift, tuple) else -shift, axes)


@rule("flip")
def _flip(node: Node, position: int, g: Any) -> Any:
    del position
    return xp.flip(g, node.args[1])


@rule("tril", "triu")
def _triangle(node: Node, position: int, g: Any) -> Any:
    del position
    return getattr(xp, node.function)(g, node.args[1])


@rule("diagonal")
def _diagonal(node: Node, position: int, g: Any) -> Any:
    a = node.operands[position]
    offset, first, second = node.args[1:]
    places = np.arange(g.shape[-1])
    index: list[Any] = [_EVERYTHING] * a.ndim
    index[first], index[second] = places + max(-offset, 0), places + max(offset, 0)
    kept = [at for at in range(a.ndim) if at not in (first, second)]
    # Indices that are apart come first in an index, as they do in the values.
    place = min(first, second) if abs(first - second) == 1 else 0
    values = xp.moveaxis(g, -1, place)
    labels: list[Label] = list(kept)
    labels.insert(place, "diagonal")
    arrays = [as_tensor(index[at], a.mesh) for at in sorted((first, second))]
    numbers = iter((1, 2))
    inner = tuple(block(next(numbers)) if isinstance(item, np.ndarray) else item for item in index)
    return added_at(values, labels, inner, arrays, [("diagonal",)] * 2, a)


@rule("diag")
def _diag(node: Node, position: int, g: Any) -> Any:
    del position
    return xp.diagonal(g, node.args[1])


@rule("getitem")
def _getitem(node: Node, position: int, g: Any) -> Any:
    del position  # indices have none
    return added_at(g, node.result_labels[0], node.args[1], node.operands[1:], node.labels[1:], node.operands[0])


@rule("add_at")
def _add_at(node: Node, position: int, g: Any) -> Any:
    """Take what was put there. For gradients of gradients."""
    index = node.args[1]
    values = node.operands[position]
    kept = set(node.labels[0]).difference((None,))
    labels = tuple(axis if axis in kept else ("whole", axis) for axis in range(g.ndim))
    result = Result(tuple(node.labels[0]), values.shape, g.dtype)
    operands = [labels, *node.labels[1:]]
    return apply("getitem", [g, *node.operands[1:]], operands, [result], [block(0), index])[0]


@rule("update_at")
def _update_at(node: Node, position: int, g: Any) -> Any:
    """Pass on what has not been replaced to the array, and what was put there to the values."""
    (array, *arrays, values), (_, index, place, kind) = node.operands, node.args
    if kind not in ("set", "add", "subtract"):
        raise UnsupportedFunctionError(f"at[].{kind}() has no gradient: those of set, add and subtract are there")

    def put(into: Any, of: Any) -> Any:
        result = Result(tuple(node.result_labels[0]), array.shape, into.dtype)
        return apply("update_at", [into, *arrays, of], node.labels, [result], [block(0), index, place, "set"])[0]

    def taken(of: Any) -> Any:
        result = Result(tuple(node.labels[-1]), values.shape, of.dtype)
        return apply("getitem", [of, *arrays], node.labels[:-1], [result], [block(0), index])[0]

    if position == 0:
        return put(g, xp.zeros_like(values)) if kind == "set" else g
    if kind != "set" or not arrays:
        return -taken(g) if kind == "subtract" else taken(g)
    # Of values that are set at the same element the last one counts.
    numbers = xp.reshape(xp.arange(values.size, like=values), values.shape)
    return xp.where(taken(put(xp.zeros_like(array, dtype=numbers.dtype), numbers)) == numbers, taken(g), 0)


def _added_along(node: Node, g: DTensor, indices: Any, axis: int) -> DTensor:
    """Return the gradient of an array of whose axis elements were taken by indices."""
    a = node.operands[0]
    index = as_tensor(indices, a.mesh)
    places: tuple[Label, ...] = tuple(("index", n) for n in range(index.ndim))
    axes = axes_of(a)
    labels = (*axes[:axis], *places, *axes[axis + 1 :])
    return added_at(g, labels, (*(_EVERYTHING,) * axis, block(1)), [index], [places], a)


@rule("take")
def _take(node: Node, position: int, g: Any) -> Any:
    del position
    a, indices = node.operands
    axis, mode = node.kwargs["axis"], node.kwargs["mode"]
    index: Any = indices
    if mode == "wrap":
        index = xp.mod(indices, a.shape[axis])
    elif mode == "clip":
        index = xp.clip(indices, 0, a.shape[axis] - 1)
    return _added_along(node, g, index, axis)


@rule("take_along_axis")
def _take_along_axis(node: Node, position: int, g: Any) -> Any:
    del position
    a, indices = node.operands
    axis = node.kwargs["axis"]
    own = tuple(None if at == axis else label for at, label in enumerate(node.labels[0]))
    result = Result(own, a.shape, g.dtype)
    labels = [node.result_labels[0], node.labels[1]]
    args = [local_shape(), block(1), axis, block(0)]
    return apply("add_along_axis", [g, indices], labels, [result], args, combine="add")[0]


@rule("add_along_axis")
def _add_along_axis(node: Node, position: int, g: Any) -> Any:
    del position
    return xp.take_along_axis(g, node.operands[1], node.args[2])


@rule("sort")
def _sort(node: Node, position: int, g: Any) -> Any:
    a, axis = node.operands[position], node.kwargs["axis"]
    order = xp.argsort(a, axis=axis, kind="stable")
    return xp.take_along_axis(g, xp.argsort(order, axis=axis), axis)


@rule("cumsum")
def _cumsum(node: Node, position: int, g: Any) -> Any:
    del position
    axis = node.kwargs["axis"]
    return xp.flip(xp.cumsum(xp.flip(g, axis), axis=axis), axis)


@rule("diff")
def _diff(node: Node, position: int, g: Any) -> Any:
    axis = node.kwargs["axis"]
    shape = node.operands[position].shape
    for _ in range(min(node.args[1], shape[axis])):
        before, after = [(0, 0)] * g.ndim, [(0, 0)] * g.ndim
        before[axis], after[axis] = (1, 0), (0, 1)
        g = xp.pad(g, before) - xp.pad(g, after)
    return g
