"""NumPy's basic indexing of an array that is cut into shards: which part of each shard an index selects."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from pscluster.core.geometry.partition import Block, Partition, piece_bounds
from pscluster.core.geometry.row_orders import RANGE

BasicIndexItem = SupportsIndex | slice | EllipsisType | None
BasicIndex = BasicIndexItem | tuple[BasicIndexItem, ...]
"""NumPy's basic indexing: integers, slices, `...`, `np.newaxis`, and tuples of these."""


@dataclass(frozen=True, slots=True)
class AxisSlice:
    """The `count` indices `start`, `start + step`, ... of one axis.

    `of` makes a canonical form: an empty selection is (0, 1, 0), and a single index has step 1.
    """

    start: int
    step: int
    count: int

    @classmethod
    def of(cls, indices: range) -> AxisSlice:
        """Return the selection of these indices, none of which is negative."""
        if not indices:
            return cls(0, 1, 0)
        return cls(indices.start, indices.step if len(indices) > 1 else 1, len(indices))

    @property
    def indices(self) -> range:
        return range(self.start, self.start + self.count * self.step, self.step)

    @property
    def as_slice(self) -> slice:
        stop = self.start + self.count * self.step
        # Going down past index 0 there is no number to stop at: -1 would mean the last index.
        return slice(self.start, stop if stop >= 0 else None, self.step)


@dataclass(frozen=True, slots=True)
class ShardSelection:
    """One shard's part of a selection."""

    shard: int  # its number
    local: tuple[AxisSlice, ...]  # of each axis, in the shard's coordinates; dropped axes have a count of 1
    target: Block  # of the shape that `local` selects, in an array of shape `Selection.counts`

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this selection in the shard: `shard_array[selected.slices]`."""
        return tuple(axis.as_slice for axis in self.local)


@dataclass(frozen=True, slots=True)
class Selection:
    """A basic index in normal form, and each shard's part of it.

    An integer selects one index of its axis, which is then dropped, and `np.newaxis` adds an axis of length 1. Neither
    changes the order of the elements, so a result is gathered with all axes in place and then reshaped:

        gathered = np.empty(selection.counts, dtype)
        for selected in selection.shards:
            gathered[selected.target.slices] = shard_arrays[selected.shard][selected.slices]
        result = gathered.reshape(selection.result_shape)
    """

    axes: tuple[AxisSlice, ...]  # of the whole array
    dropped: tuple[int, ...]  # axes of the whole that the result lacks, rising
    added: tuple[int, ...]  # axes of the result that the whole lacks, rising
    # Of the shards that hold any, by number; disjoint, they fill `counts` completely.
    shards: tuple[ShardSelection, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of indices selected on each axis of the whole."""
        return tuple(axis.count for axis in self.axes)

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        """Return whether everything in an array of this shape is selected, in its order."""
        return self.axes == tuple(AxisSlice.of(range(length)) for length in shape)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result, as in NumPy."""
        shape = [count for axis, count in enumerate(self.counts) if axis not in self.dropped]
        for axis in self.added:
            shape.insert(axis, 1)
        return tuple(shape)


def select(partition: Partition, index: BasicIndex) -> Selection:
    """Return which part of which shard a NumPy basic index selects, and where it belongs in the result.

    Raise IndexError for an integer out of range, more indices than axes, or more than one `...`; ValueError for a slice
    with step 0; TypeError for any other index, such as a float (an IndexError in NumPy), a bool, a list or an array
    ("advanced indexing" in NumPy).
    """
    if partition.order != RANGE:
        raise ValueError(f"rows that are cut by {partition.order.kind} are selected by their ids")
    axes, dropped, added = _normalise(partition.shape, index)
    pieces = [list(_owned(axis, ends)) for axis, ends in zip(axes, partition.ends, strict=True)]
    selected = tuple(
        ShardSelection(
            partition.shard_index(p.piece for p in chosen),
            tuple(p.local for p in chosen),
            Block(tuple(p.start for p in chosen), tuple(p.start + p.local.count for p in chosen)),
        )
        for chosen in itertools.product(*pieces)
    )
    # With a negative step, the pieces of an axis come in reverse.
    return Selection(axes, dropped, added, tuple(sorted(selected, key=lambda of_shard: of_shard.shard)))


def _normalise(shape: tuple[int, ...], index: Any) -> tuple[tuple[AxisSlice, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the selection on each axis, the dropped axes, and the added axes of the result."""
    items = list(index) if isinstance(index, tuple) else [index]
    # By identity: comparing an array with == would give an array.
    consuming = sum(item is not None and item is not Ellipsis for item in items)
    if consuming > len(shape):
        raise IndexError(f"too many indices: the variable is {len(shape)}-dimensional, but {consuming} were indexed")
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    position = ellipses[0] if ellipses else len(items)
    items[position : position + 1] = [slice(None)] * (len(shape) - consuming)

    axes: list[AxisSlice] = []
    dropped: list[int] = []
    added: list[int] = []
    for item in items:
        if item is None:
            added.append(len(axes) - len(dropped) + len(added))
            continue
        axis = len(axes)
        if isinstance(item, slice):
            axes.append(AxisSlice.of(range(shape[axis])[item]))
        else:
            axes.append(AxisSlice(_integer(item, axis, shape[axis]), 1, 1))
            dropped.append(axis)
    return tuple(axes), tuple(dropped), tuple(added)


def _integer(item: Any, axis: int, length: int) -> int:
    try:
        if isinstance(item, bool | np.bool_):
            raise TypeError
        i = operator.index(item)
    except TypeError:
        raise TypeError(
            "a variable is indexed by integers, slices, `...` and `None`, "
            f"not by {type(item).__name__} (axis {axis}). To read rows by number use `sparse_read`, to write them "
            "`scatter_update`; for anything else, index the result of `read_value`."
        ) from None
    if not -length <= i < length:
        raise IndexError(f"index {i} is out of bounds for axis {axis} with size {length}")  # NumPy's words
    return i % length


class _OwnedPiece(NamedTuple):
    piece: int
    local: AxisSlice
    start: int  # of its `local.count` indices in the selection


def _owned(axis: AxisSlice, ends: tuple[int, ...]) -> Iterator[_OwnedPiece]:
    """Yield the pieces that hold selected indices, in the selection's order: one run each, since it is monotonic."""
    indices = axis.indices
    at = 0
    while at < axis.count:
        piece = bisect_right(ends, indices[at])
        start, stop = piece_bounds(ends, piece)
        # To the last index within the piece.
        steps = (stop - 1 - indices[at]) // axis.step if axis.step > 0 else (start - indices[at]) // axis.step
        count = min(steps + 1, axis.count - at)
        first = indices[at] - start
        yield _OwnedPiece(piece, AxisSlice.of(range(first, first + count * axis.step, axis.step)), at)
        at += count
