"""The one rule for layouts: how operands must lie to be computed with block by block, and how the result then lies.

An operation is described as in `numpy.einsum`: a label for each axis of each operand and of the result. For a product
of matrices these are mk, kn -> mn; for elementwise functions the axes have the same labels, aligned at the right. An
axis that is broadcast has no label.

1. A label takes the dimension of the mesh that shards it in the first operand in which it is sharded; if operands
   disagree, in the largest of them. A label that the operation needs whole takes none.
2. A dimension shards one label: labels of the result choose before the others, and each group in order. A label whose
   dimension is gone takes that of the next operand in which it is sharded, if there is one.
3. Operands are relaid out to what their labels have. That takes no communication where what is replicated becomes
   sharded.
4. Over the dimensions of labels that are not in the result, each device has only a part of each sum.

Pure functions, which never fail: there is a result for any layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pscluster.core.layouts.mesh import UNSHARDED

Label = Hashable
"""Of an axis. None: an axis of length 1 that is broadcast, or one that stands alone: it is not sharded."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand: its labels, how it lies, and how large it is."""

    labels: tuple[Label, ...]
    specs: tuple[str, ...]
    size: int = 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """How operands must lie, how the result does, and over which dimensions it is a sum of parts."""

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    partial: tuple[str, ...]
    dims: Mapping[Label, str]  # that labels are sharded over

    def work(self, lengths: Mapping[Any, int], sizes: Mapping[str, int]) -> int:
        """Return the number of multiplications on the busiest device, given lengths of labels, and sizes of the mesh.

        That is the product of the lengths of all labels there.
        """
        return math.prod(
            -(-length // sizes[self.dims[label]]) if label in self.dims else length for label, length in lengths.items()
        )


def resolve(operands: Sequence[Operand], result: Sequence[Label], whole: Collection[Label] = ()) -> Resolved:
    """Apply the rule to an operation, of which labels in `whole` can't be sharded."""
    unsharded = {None, *whole}
    for operand in operands:  # such as the diagonal of a matrix
        unsharded.update(label for label in operand.labels if operand.labels.count(label) > 1)
    asked: dict[Label, list[str]] = {}  # the dimensions that each label would take, in order
    for operand in sorted(operands, key=lambda operand: -operand.size):  # stable: among equals, the first
        for label, spec in zip(operand.labels, operand.specs, strict=True):
            if spec != UNSHARDED and label not in unsharded:
                asked.setdefault(label, []).append(spec)
    labels = dict.fromkeys((*result, *(label for operand in operands for label in operand.labels)))
    dims: dict[Label, str] = {}
    for label in labels:
        if free := [dim for dim in asked.get(label, ()) if dim not in dims.values()]:
            dims[label] = free[0]
    return Resolved(
        tuple(tuple(dims.get(label, UNSHARDED) for label in operand.labels) for operand in operands),
        tuple(dims.get(label, UNSHARDED) for label in result),
        tuple(dim for label, dim in dims.items() if label not in result),
        dims,
    )


def elementwise(shapes: Sequence[Sequence[int]]) -> list[tuple[Label, ...]]:
    """Return the labels of operands that are broadcast to each other: axes counted from the last, -1, -2, ..."""
    lengths: dict[int, int] = {}
    for shape in shapes:
        for back, length in enumerate(reversed(shape), 1):
            if length != 1:
                lengths[-back] = length
    return [
        tuple(
            axis if length != 1 or axis not in lengths else None
            for axis, length in zip(_axes(shape), shape, strict=True)
        )
        for shape in shapes
    ]


def _axes(shape: Sequence[int]) -> range:
    return range(-len(shape), 0)
