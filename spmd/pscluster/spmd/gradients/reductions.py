"""Rules for sums, products and extremes. Elements that are all the largest, or smallest, share the gradient evenly."""

from __future__ import annotations

from typing import Any

from pscluster.spmd.functions.applying import xp
from pscluster.spmd.gradients.rules import rule, spread
from pscluster.spmd.gradients.tape import Node


def _wide(node: Node, array: Any) -> Any:
    """Return an array like the result, with axes of length 1 for those that the result has lost."""
    axes = node.kwargs["axis"]
    return array if node.kwargs["keepdims"] or not axes else xp.expand_dims(array, axes)


def _parts(node: Node, g: Any) -> tuple[Any, Any, Any]:
    """Return the operand, and the result and its gradient as they are broadcast to it."""
    return node.operands[0], _wide(node, node.results[0]), _wide(node, g)


@rule("add.reduce")
def _sum(node: Node, position: int, g: Any) -> Any:
    del position
    return spread(_wide(node, g), node.operands[0])


@rule("maximum.reduce", "minimum.reduce", "fmax.reduce", "fmin.reduce")
def _extreme(node: Node, position: int, g: Any) -> Any:
    del position
    a, out, g = _parts(node, g)
    chosen = a == out
    count = xp.sum(chosen, axis=node.kwargs["axis"], keepdims=True)  # none, if `initial` is the largest
    return xp.where(chosen, g / xp.maximum(count, 1).astype(g.dtype), 0)


@rule("multiply.reduce")
def _product(node: Node, position: int, g: Any) -> Any:
    """Multiply by the product of all others, which is not out / a where one is zero."""
    del position
    a, out, g = _parts(node, g)
    axes = node.kwargs["axis"]
    is_zero = a == 0
    zeros = xp.sum(is_zero, axis=axes, keepdims=True)
    without = xp.where(is_zero, 1, a)
    rest = xp.prod(without, axis=axes, keepdims=True) * node.kwargs.get("initial", 1)
    others = xp.where(is_zero, xp.where(zeros == 1, rest, 0), xp.where(zeros == 0, out / without, 0))
    return g * others


@rule("logaddexp.reduce")
def _logaddexp(node: Node, position: int, g: Any) -> Any:
    del position
    a, out, g = _parts(node, g)
    return g * xp.exp(a - out)


@rule("logaddexp2.reduce")
def _logaddexp2(node: Node, position: int, g: Any) -> Any:
    del position
    a, out, g = _parts(node, g)
    return g * xp.exp2(a - out)


@rule("hypot.reduce")
def _hypot(node: Node, position: int, g: Any) -> Any:
    del position
    a, out, g = _parts(node, g)
    return g * (a / out)
