"""Partitions: how an array of N axes is cut into blocks.

Each axis is cut independently, so the blocks form a grid. An axis' cuts are given by the ends of its pieces: length 10
in four pieces ends at (3, 6, 8, 10). Blocks are numbered in C order over the grid, the last axis fastest. Embeddings
use the special case of rows, with cuts along axis 0 only. These may be in another order than that of their ids, see
`row_orders`. Pieces and blocks are then of places on axis 0, not of ids; `Partition.index` says which rows those are.

Ends were chosen over (number, remainder): an uneven split, a checkpoint's older split and a mesh of unequal machines
are then the same thing, and owners are found by bisection.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pscluster.core.geometry.row_orders import RANGE, Ids, JoinedOrder, RowOrder


def even_ends(length: int, parts: int) -> tuple[int, ...]:
    """Return the ends of the pieces of an axis that is cut as evenly as possible, larger pieces first.

    As in `numpy.array_split`: 10 over 4 is 3, 3, 2, 2, thus (3, 6, 8, 10). If `parts` is above `length`, the last
    pieces are empty. Raise ValueError for a negative length, or fewer than one part.
    """
    if length < 0:
        raise ValueError(f"a length must not be negative, but it is {length}")
    if parts < 1:
        raise ValueError(f"an axis is cut into at least 1 part, not into {parts}")
    base, extra = divmod(length, parts)
    return tuple(base * i + min(i, extra) for i in range(1, parts + 1))


@dataclass(frozen=True, slots=True)
class Block:
    """An axis-aligned box of an array: on axis k the indices from `start[k]` up to but excluding `stop[k]`.

    A block of rank 0 is the single element of a scalar. Raises ValueError if ranks differ, or not 0 <= start <= stop.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"a block's start {self.start} and stop {self.stop} differ in rank")
        for axis, (start, stop) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= start <= stop:
                raise ValueError(f"axis {axis}: a block can't reach from {start} to {stop}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """The number of elements; 1 for rank 0."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this block in the array: `array[block.slices]`.

        Write with `array[block.slices] = values`, not into `array[block.slices]`, which at rank 0 is a scalar, not a
        view.
        """
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Partition:
    """A shape, the ends of the pieces of each axis, and the order of rows on axis 0.

    Raises ValueError, with the axis and the value, if the ends don't fit the shape, or the order does not fit the cut;
    TypeError for a non-integer.
    """

    shape: tuple[int, ...]  # of the whole array
    ends: tuple[tuple[int, ...], ...]  # for each axis, non-decreasing up to the axis' length: pieces may be empty
    order: RowOrder | JoinedOrder = RANGE

    def __post_init__(self) -> None:
        # NumPy and protobuf have their own integers and sequences: convert them, so that equal partitions are equal,
        # hashable and picklable.
        object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        object.__setattr__(self, "ends", tuple(tuple(map(operator.index, ends)) for ends in self.ends))
        if len(self.ends) != len(self.shape):
            raise ValueError(f"shape {self.shape} has {len(self.shape)} axes, but ends are given for {len(self.ends)}")
        for axis, (length, ends) in enumerate(zip(self.shape, self.ends, strict=True)):
            if length < 0:
                raise ValueError(f"axis {axis}: the length must not be negative, but it is {length}")
            if not ends:
                raise ValueError(f"axis {axis}: there must be at least 1 piece, but the ends are {ends}")
            if any(a > b for a, b in itertools.pairwise((0, *ends))):
                raise ValueError(f"axis {axis}: the ends must rise from 0, but they are {ends}")
            if ends[-1] != length:
                raise ValueError(f"axis {axis}: the last piece must end at {length}, not at {ends[-1]}")
        if self.order == RANGE:
            return
        if not self.shape or any(self.cut_axes):
            raise ValueError(f"rows are cut by {self.order.kind} along axis 0 alone, not into {self.grid}")
        due = self.order.ends if isinstance(self.order, JoinedOrder) else even_ends(self.shape[0], len(self.ends[0]))
        if self.ends[0] != due:
            raise ValueError(f"axis 0: by {self.order.kind}, pieces end at {due}, not at {self.ends[0]}")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ends, self.order))

    def __reduce__(self) -> tuple[type[Partition], tuple[object, ...]]:
        """Pickle without cached properties: equal partitions have equal pickles."""
        return type(self), (self.shape, self.ends, self.order)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Partition:
        """Return a single block."""
        return cls.even(shape, ())

    @classmethod
    def even(cls, shape: Sequence[int], parts_per_axis: Sequence[int]) -> Partition:
        """Cut each axis by `even_ends`. Axes without a number stay whole.

        Raise ValueError for more numbers than axes, and, with the axis, for a number below 1 or a negative length.
        """
        if len(parts_per_axis) > len(shape):
            raise ValueError(f"shape {tuple(shape)} can't be cut along {len(parts_per_axis)} axes")
        ends = []
        for axis, length in enumerate(shape):
            parts = parts_per_axis[axis] if axis < len(parts_per_axis) else 1
            try:
                ends.append(even_ends(length, parts))
            except ValueError as error:
                raise ValueError(f"axis {axis}: {error}") from None
        return cls(tuple(shape), tuple(ends))

    @classmethod
    def joined(cls, partitions: Sequence[Partition]) -> Partition:
        """Return the cut of arrays that lie end to end along axis 0, and are of one shape but for that.

        Raise ValueError if one of them is cut along another axis, or joined itself.
        """
        parts, columns = [], partitions[0].shape[1:]
        for partition in partitions:
            if any(partition.cut_axes) or isinstance(partition.order, JoinedOrder):
                raise ValueError(f"arrays are joined that are cut along axis 0 alone, not into {partition.grid}")
            parts.append((partition.order, partition.ends[0]))
        order = JoinedOrder(tuple(parts))
        ends = order.ends
        in_order = all(of_part == RANGE for of_part, _ in parts)
        return cls((ends[-1], *columns), (ends, *((length,) for length in columns)), RANGE if in_order else order)

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of pieces of each axis."""
        return tuple(map(len, self.ends))

    @functools.cached_property
    def num_shards(self) -> int:
        """The number of blocks, including empty ones; 1 for rank 0."""
        return math.prod(self.grid)

    @functools.cached_property
    def of_rows(self) -> Partition:
        """The partition of the first axis alone."""
        return Partition(self.shape[:1], self.ends[:1], self.order)

    @functools.cached_property
    def of_places(self) -> Partition:
        """The partition whose rows have the numbers of this one's places."""
        return Partition(self.shape, self.ends)

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The axes that have more than one piece."""
        return tuple(axis for axis, ends in enumerate(self.ends) if len(ends) > 1)

    def block(self, shard: int) -> Block:
        """Return the block with this number. IndexError if there is none; negative numbers don't count from the end."""
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"there is no shard {shard} of {self.num_shards}")
        return self.blocks[shard]

    def places(self, ids: Ids) -> Ids:
        """Return the places of the rows with these ids, which are from `check_ids`."""
        return self.order.places(ids, self.ends[0])

    def row_ids(self, shard: int) -> Ids:
        """Return the ids of a shard's rows, in its order. IndexError if there is no such shard, or rank is 0."""
        block = self.block(shard)
        return self.order.row_ids(block.start[0], block.stop[0], self.ends[0])

    def index(self, shard: int) -> tuple[Any, ...]:
        """Return the index of a shard's elements in the whole: `array[partition.index(shard)]`. IndexError as `block`.

        It begins with a slice or, where rows are hashed, with an array of row ids.
        """
        block = self.block(shard)
        if self.order == RANGE:
            return (*block.slices, ...)  # with the ellipsis, a scalar's selection is a view, too
        columns = block.slices[1:]
        return (slice(shard, None, len(self.ends[0])) if self.order.kind == "modulo" else self.row_ids(shard), *columns)

    def has_order_of(self, other: Partition) -> bool:
        """Return whether rows have the same places in both partitions, which are of one shape."""
        return self.order == other.order and (self.order.kind != "modulo" or self.ends == other.ends)

    def columns(self, shard: int) -> tuple[slice, ...]:
        """Return which part of a row a shard has. IndexError if there is no such shard."""
        return self._columns[shard]

    @functools.cached_property
    def _columns(self) -> tuple[tuple[slice, ...], ...]:
        return tuple(block.slices[1:] for block in self.blocks)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        axes = [[piece_bounds(ends, piece) for piece in range(len(ends))] for ends in self.ends]
        return tuple(
            Block(tuple(a for a, _ in bounds), tuple(b for _, b in bounds)) for bounds in itertools.product(*axes)
        )

    def shard_index(self, pieces: Iterator[int]) -> int:
        """Return the number of the block that is made of these pieces, one of each axis."""
        index = 0
        for count, piece in zip(self.grid, pieces, strict=True):
            index = index * count + piece
        return index


def piece_bounds(ends: tuple[int, ...], piece: int) -> tuple[int, int]:
    """Return where a piece of an axis with these ends starts and stops."""
    return (ends[piece - 1] if piece else 0), ends[piece]
