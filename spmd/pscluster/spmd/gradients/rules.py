"""The rules for gradients, by operation; and what they share.

A rule takes an operation that was applied, which of its operands it is about, and the gradient of a scalar with respect
to the result. It returns that with respect to the operand, of the operand's shape, or None for zero. It is written in
NumPy's functions of whole arrays: so layouts follow from the one rule, programs stay data, and what a rule computes has
a gradient itself. Gradients of sums over a sharded axis come in terms, which are combined into the operand's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pscluster.core.layouts.rule import Label
from pscluster.spmd.functions.applying import Result, apply, axes_of, block, local_shape, xp
from pscluster.spmd.gradients.tape import RELAYOUT, Node
from pscluster.spmd.tensor import DTensor

Rule = Callable[[Node, int, Any], Any]
"""(operation, number of the operand, gradient with respect to the result) -> that with respect to the operand.

Of an operation with several results, the gradient is a list, with None for results that do not matter.
"""

RULES: dict[str, Rule] = {}
"""By the name of the operation in programs."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Application:
    """An elementwise operation that was applied: its first arguments, its result, and the gradient of that."""

    def __init__(self, node: Node, g: Any) -> None:
        self.g: Any = g
        self.out: Any = node.results[0]
        self.a, self.b, self.c, *_ = (*node.values, None, None)


def by_argument(name: str, *functions: Callable[[Application], Any] | None) -> None:
    """Register the rule of an elementwise operation: a function for each positional argument, None where it has none.

    What was broadcast is summed up.
    """

    @rule(name)
    def of_argument(node: Node, position: int, g: Any) -> Any:
        at = node.argument_of(position)
        function = functions[at] if at < len(functions) else None
        return function and summed_to(function(Application(node, g)), node.operands[position].shape)


def summed_to(g: Any, shape: tuple[int, ...]) -> Any:
    """Return a gradient with respect to an array of this shape, given that of what it was broadcast to."""
    if g.shape == shape:
        return g
    added = g.ndim - len(shape)
    ones = [added + at for at, length in enumerate(shape) if length == 1 and g.shape[added + at] != 1]
    if not added:
        return xp.sum(g, axis=tuple(ones), dtype=g.dtype, keepdims=True)
    return xp.reshape(xp.sum(g, axis=(*range(added), *ones), dtype=g.dtype), shape)


def spread(g: Any, like: DTensor) -> Any:
    """Return an array broadcast to the shape of another one, and to its layout: no device has more than its block.

    It has as many axes.
    """
    if g.shape == like.shape:
        return g
    axes = axes_of(like)
    own = [axis if n == length else None for axis, n, length in zip(axes, g.shape, like.shape, strict=True)]
    result = Result(axes, like.shape, g.dtype)
    return apply("broadcast_to", [g, like], [own, axes], [result], [block(0), local_shape()])[0]


def added_at(
    g: DTensor,
    labels: Sequence[Label],
    index: Any,
    indices: Sequence[DTensor],
    labels_of_indices: Sequence[Sequence[Label]],
    of: DTensor,
) -> DTensor:
    """Return zeros like an array, to which at an index values are added: those of the same element are summed.

    Args:
        g: the values; their axes have these labels, which are numbers of the array's axes where these are taken whole.
        index: an index of blocks, with `block(n)` for the n-th array of indices, counted from 1.
        indices: those arrays; with the labels of their axes. Elements of equal index on different devices are summed.
        of: the array.
    """
    kept = tuple(axis if axis in labels else None for axis in range(of.ndim))
    result = Result(kept, of.shape, g.dtype)
    operands = [labels, *labels_of_indices]
    return apply("add_at", [g, *indices], operands, [result], [local_shape(), index, block(0)], combine="add")[0]


@rule(RELAYOUT)
def _relayout(node: Node, position: int, g: Any) -> Any:
    """Return the gradient as it is: it is relaid out as all are, to the operand's layout."""
    del node, position
    return g
