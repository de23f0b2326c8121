"""One run of a rule for several small gradients: all are gathered into one block, and written back from it.

A rule makes up to a dozen passes over its arrays, and each takes a microsecond or two however few elements there are,
as does each step around them. So the gradients of eight small tables take a third of the time together. A rule works
element by element: the values are bit for bit those of `kernels.apply_rows` and `apply_dense`, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pscluster.ps.optim.buffers import items_of, workspace
from pscluster.ps.optim.row_sums import Ids
from pscluster.ps.optim.rule import Array, UpdateRule

MAX_ELEMENTS = 128 << 10
"""The most elements of one run: more do not fit in a core's cache together with slots and scratch."""


class Part(NamedTuple):
    """A gradient and what it changes; all arrays of all parts are of the same type, float32 or float64."""

    arrays: Sequence[Array]  # views of the parameter, and of its slots in the rule's order; see `views_of`
    grad: Array  # flat; may be read-only and unaligned
    ids: Ids | None  # the rows that it is for, strictly ascending; None: all


def views_of(arrays: Sequence[Array], *, by_rows: bool) -> list[Array]:
    """Return contiguous arrays as a `Part` has them: flat or, for a gradient by rows, their rows as opaque items.

    By rows, each is of shape (rows, width), with a width above 0.
    """
    return [items_of(array) if by_rows else array.reshape(-1) for array in arrays]


def apply_together(rule: UpdateRule, parts: Sequence[Part], step: int) -> None:
    """Apply gradients to their parameters and slots, in place; `step` is that of all of them, counted from 1.

    Each gradient has elements, and no two parts have the same parameter. What the rule's `scalars` raises is raised
    before anything has changed.
    """
    scalars, names = rule.scalars(step), list(rule.slots)
    sizes = [part.grad.size for part in parts]
    workspace.begin()
    buffers = workspace.arrays(2 + len(names) + rule.scratch, sum(sizes), parts[0].grad.dtype)
    grad, blocks, scratch = buffers[0], buffers[1 : len(names) + 2], buffers[len(names) + 2 :]
    np.concatenate([part.grad for part in parts], out=grad)
    moves: list[tuple[Array, Ids | None, Array]] = []
    stop = 0
    for (arrays, _, ids), size in zip(parts, sizes, strict=True):
        start, stop = stop, stop + size
        for array, block in zip(arrays, blocks, strict=True):
            rows = block[start:stop]
            if ids is None:
                rows[:] = array
            else:
                rows = rows.view(array.dtype)
                array.take(ids, out=rows, mode="clip")  # else NumPy writes through a buffer
            moves.append((array, ids, rows))
    with np.errstate(all="ignore"):
        rule.apply(blocks[0], grad, dict(zip(names, blocks[1:], strict=True)), scalars, scratch)
    for array, ids, rows in moves:
        if ids is None:
            array[:] = rows
        else:
            array.put(ids, rows, mode="clip")  # takes two thirds of what `array[ids] = rows` does
