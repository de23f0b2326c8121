"""Sharding geometry: how an array of N axes is cut into blocks, and what follows from it.

Every axis is cut on its own, so the blocks form a grid. An axis' cuts are given by where its pieces end:
length 10 in four pieces ends at (3, 6, 8, 10). Blocks are numbered in C order over the grid, the last axis
fastest. Rows, that is cuts along axis 0 alone, are the special case that embeddings use.

All of it is integer arithmetic over whole axes, never over elements, but for `check_ids` and `split_rows`,
which are handed arrays of ids. Ends were chosen over (number, remainder): an uneven split, a checkpoint's
older split and a mesh of unequal machines are then the same thing, and owners are found by bisection.

This module does not know servers, variables, dtypes or bytes. It keeps no arrays.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import as_array
from pscluster.core.errors import InvalidUpdateError

Ids = npt.NDArray[np.int64]

BasicIndexItem = SupportsIndex | slice | EllipsisType | None
BasicIndex = BasicIndexItem | tuple[BasicIndexItem, ...]
"""What NumPy calls basic indexing: integers, slices, `...`, `np.newaxis`, and tuples of these."""


def even_ends(length: int, parts: int) -> tuple[int, ...]:
    """Where the pieces end when an axis is cut as evenly as it goes, larger pieces first.

    The rule of `numpy.array_split`: 10 over 4 is 3, 3, 2, 2, thus (3, 6, 8, 10). With more parts than
    length the last pieces are empty.

    Raises:
        ValueError: a negative length, or fewer than one part.
    """
    if length < 0:
        raise ValueError(f"a length must not be negative, but it is {length}")
    if parts < 1:
        raise ValueError(f"an axis is cut into 1 part at least, not into {parts}")
    base, extra = divmod(length, parts)
    return tuple(base * i + min(i, extra) for i in range(1, parts + 1))


@dataclass(frozen=True, slots=True)
class Block:
    """An axis-aligned box of an array: on axis k the indices `start[k]` up to, without, `stop[k]`.

    A block of rank 0 is the single element of a scalar.

    Raises:
        ValueError: ranks differ, or on some axis not 0 <= start <= stop.
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
        """Number of elements; 1 for rank 0."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this block out of the array: `array[block.slices]`.

        Write with `array[block.slices] = values`, not into `array[block.slices]`: at rank 0 that is NumPy's
        scalar, not a view.
        """
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Block) -> Block | None:
        """What both blocks hold, or None where they share no element.

        Raises:
            ValueError: the blocks differ in rank.
        """
        self._check_rank(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Block(start, stop)

    def relative_to(self, other: Block) -> Block:
        """This block in the coordinates of a block that encloses it, whose start becomes the origin.

        Raises:
            ValueError: the blocks differ in rank, or this one is not inside the other.
        """
        self._check_rank(other)
        inside = all(a >= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a <= b for a, b in zip(self.stop, other.stop, strict=True)
        )
        if not inside:
            raise ValueError(f"{self} is not inside {other}")
        return Block(
            tuple(map(operator.sub, self.start, other.start)),
            tuple(map(operator.sub, self.stop, other.start)),
        )

    def _check_rank(self, other: Block) -> None:
        if len(self.start) != len(other.start):
            raise ValueError(f"{self} and {other} differ in rank")


@dataclass(frozen=True)
class Partition:
    """A shape and where the pieces of each of its axes end.

    Attributes:
        shape: of the whole array.
        ends: one tuple an axis, never falling, the last one the axis' length. Pieces may be empty.

    Raises:
        ValueError: with the axis and the value, where the ends don't fit the shape.
        TypeError: a length or an end is no integer.
    """

    shape: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        # NumPy and protobuf hand over integers and sequences of their own kinds: one form, so that equal
        # partitions are equal, hashable and picklable.
        object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        object.__setattr__(self, "ends", tuple(tuple(map(operator.index, ends)) for ends in self.ends))
        if len(self.ends) != len(self.shape):
            raise ValueError(f"shape {self.shape} has {len(self.shape)} axes, but ends are given for {len(self.ends)}")
        for axis, (length, ends) in enumerate(zip(self.shape, self.ends, strict=True)):
            if length < 0:
                raise ValueError(f"axis {axis}: the length must not be negative, but it is {length}")
            if not ends:
                raise ValueError(f"axis {axis}: there must be 1 piece at least, but the ends are {ends}")
            if any(a > b for a, b in itertools.pairwise((0, *ends))):
                raise ValueError(f"axis {axis}: the ends must rise from 0, but they are {ends}")
            if ends[-1] != length:
                raise ValueError(f"axis {axis}: the last piece must end at {length}, not at {ends[-1]}")

    def __reduce__(self) -> tuple[type[Partition], tuple[object, ...]]:
        """By what it is, without what is kept of it: equal partitions have equal pickles."""
        return type(self), (self.shape, self.ends)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Partition:
        """One block that is everything."""
        return cls.even(shape, ())

    @classmethod
    def even(cls, shape: Sequence[int], parts_per_axis: Sequence[int]) -> Partition:
        """Each axis cut by `even_ends`. Axes behind the last one named stay whole.

        Raises:
            ValueError: more numbers than axes; a number below 1, or a negative length, with its axis.
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

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of pieces of each axis."""
        return tuple(map(len, self.ends))

    @functools.cached_property
    def num_shards(self) -> int:
        """Number of blocks, empty ones included; 1 for rank 0."""
        return math.prod(self.grid)

    @functools.cached_property
    def of_rows(self) -> Partition:
        """Of its first axis alone."""
        return Partition(self.shape[:1], self.ends[:1])

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The axes that have more than one piece."""
        return tuple(axis for axis, ends in enumerate(self.ends) if len(ends) > 1)

    def block(self, shard: int) -> Block:
        """The block with this number.

        Raises:
            IndexError: there is none; negative numbers don't count from the end.
        """
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"there is no shard {shard} of {self.num_shards}")
        return self.blocks[shard]

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in the order of their numbers."""
        axes = [[_bounds(ends, piece) for piece in range(len(ends))] for ends in self.ends]
        return tuple(
            Block(tuple(a for a, _ in bounds), tuple(b for _, b in bounds)) for bounds in itertools.product(*axes)
        )

    def shard_of(self, index: Sequence[int]) -> int:
        """The number of the block that holds the element at `index` (one integer an axis, none negative).

        Raises:
            ValueError: not one integer an axis.
            IndexError: no such element, with the axis.
        """
        if len(index) != len(self.shape):
            raise ValueError(f"shape {self.shape} needs {len(self.shape)} indices, not {len(index)}")
        for axis, (i, length) in enumerate(zip(index, self.shape, strict=True)):
            if not 0 <= i < length:
                raise IndexError(_out_of_bounds(i, axis, length))
        return self._number(bisect_right(ends, i) for ends, i in zip(self.ends, index, strict=True))

    def _number(self, pieces: Iterator[int]) -> int:
        number = 0
        for count, piece in zip(self.grid, pieces, strict=True):
            number = number * count + piece
        return number


def _bounds(ends: tuple[int, ...], piece: int) -> tuple[int, int]:
    return (ends[piece - 1] if piece else 0), ends[piece]


def _out_of_bounds(index: int, axis: int, length: int) -> str:
    return f"index {index} is out of bounds for axis {axis} with size {length}"  # NumPy's words


# --- Rows by id -------------------------------------------------------------------------------------------


class ShardRows(NamedTuple):
    """What one shard has to do with a list of row ids. Both arrays have the same length.

    Attributes:
        positions: int64 [n]; which of the ids are this shard's, rising.
        local_ids: int64 [n]; their row numbers within the shard.
    """

    positions: Ids
    local_ids: Ids


def check_ids(ids: npt.ArrayLike, rows: int, name: str) -> Ids:
    """Row ids as a contiguous int64 array of the same shape, once each is known to be a row.

    Args:
        ids: of any shape and any signed or unsigned integer dtype. An empty list is fine.
        rows: how many rows the variable has.
        name: of the variable, for the error.

    Returns:
        The ids; the very array given where it had that form already.

    Raises:
        InvalidUpdateError: the dtype is not of integers, or an id is negative or not below `rows`. The
            first such id is named.
    """
    array = as_array(ids, name, "row ids")
    if array.size == 0 and not isinstance(ids, np.ndarray | np.generic):
        array = array.astype(np.int64)  # NumPy takes an empty list for floats
    if array.dtype.kind not in "iu":
        raise InvalidUpdateError(
            f"variable {name!r}: row ids must be integers, but they are {array.dtype}. "
            "Convert them first, for instance with ids.astype(np.int64)."
        )
    # As unsigned numbers, in which negative ids are very large ones; as signed ones large ids would turn negative.
    unsigned = np.asarray(array, np.int64).view(np.uint64) if array.dtype.kind == "i" else array
    if array.size and unsigned.max() >= rows:
        flat = array.ravel()
        position = int(np.argmax((flat < 0) | (flat >= rows)))
        limit = f"they must lie in 0..{rows - 1}" if rows else "there are no rows"
        raise InvalidUpdateError(
            f"variable {name!r}: row id {flat[position]} (position {position}) is out of range: "
            f"the variable has {rows} rows, {limit}"
        )
    return np.asarray(array, dtype=np.int64, order="C")


_FEW_SHARDS = 8  # to look through all ids for each of so many is faster than to sort them


def split_rows(partition: Partition, ids: Ids) -> list[ShardRows]:
    """Which of the ids each shard owns, so that rows can be sent out and put back in the order of the ids.

    Rows that are read come back with `result[positions] = rows_of_the_shard`; values to be written go out
    with `values[positions]`. Duplicates stay duplicates. All shards are listed, also those asked nothing.

    Args:
        partition: cut along axis 0 at most.
        ids: int64 ids that `check_ids` has passed. Of more than one axis they are taken in C order, and the
            positions count in that order too.

    Raises:
        ValueError: another axis is cut, or there are no rows because the rank is 0.
    """
    if not partition.shape or any(partition.cut_axes):
        raise ValueError(
            f"rows are found by id only where axis 0 alone is cut, but shape {partition.shape} "
            f"is cut into {partition.grid}"
        )
    flat = ids.reshape(-1)
    shards = partition.num_shards
    if shards == 1:
        return [ShardRows(np.arange(flat.size, dtype=np.int64), flat)]
    ends = np.array(partition.ends[0], dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))
    if bool((flat[1:] >= flat[:-1]).all()):  # as from np.unique: several times faster, and common
        order = np.arange(flat.size, dtype=np.int64)
        cuts = itertools.pairwise((0, *np.searchsorted(flat, ends).tolist()))
        return [ShardRows(order[a:b], flat[a:b] - starts[shard]) for shard, (a, b) in enumerate(cuts)]
    if shards <= _FEW_SHARDS:
        below = [flat < end for end in ends[:-1].tolist()]
        masks = [below[0], *(low > before for before, low in itertools.pairwise(below)), ~below[-1]]
        found = [mask.nonzero()[0] for mask in masks]
        return [ShardRows(mine, flat[mine] - start) for mine, start in zip(found, starts, strict=True)]
    # From the right: of pieces that end at the same row only the first can hold the rows before it.
    owners = np.searchsorted(ends, flat, side="right")
    local_ids = flat - starts[owners]
    if shards <= 1 << 16:
        owners = owners.astype(np.uint16)  # NumPy sorts 16 bits by radix, in linear time
    order = np.argsort(owners, kind="stable").astype(np.int64, copy=False)
    local_ids = local_ids[order]
    stops = np.cumsum(np.bincount(owners, minlength=shards)).tolist()
    return [ShardRows(order[start:stop], local_ids[start:stop]) for start, stop in itertools.pairwise((0, *stops))]


# --- From one splitting to another ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A block, in the coordinates of the whole, that goes from an old shard to a new one.

    Where in the shards it lies: `block.relative_to(old.block(old_shard))`, and likewise for the new.
    """

    old_shard: int
    new_shard: int
    block: Block


def moves(old: Partition, new: Partition) -> Iterator[Move]:
    """What must move between two splittings of one shape.

    The blocks are not empty, don't overlap and together are the whole. Shards that stay as they are yield
    their one move too: whether it is one depends on the owners, which this module doesn't know.

    Raises:
        ValueError: the shapes differ (at the first step of the iteration).
    """
    if old.shape != new.shape:
        raise ValueError(f"shape {old.shape} can't be split anew as shape {new.shape}")
    axes = [list(_common_pieces(a, b)) for a, b in zip(old.ends, new.ends, strict=True)]
    for pieces in itertools.product(*axes):
        yield Move(
            old._number(p.old for p in pieces),
            new._number(p.new for p in pieces),
            Block(tuple(p.start for p in pieces), tuple(p.stop for p in pieces)),
        )


class _CommonPiece(NamedTuple):
    old: int
    new: int
    start: int
    stop: int


def _common_pieces(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[_CommonPiece]:
    """The pieces of one axis that both cuts leave whole, in order, empty ones left out."""
    i = j = start = 0
    while i < len(old) and j < len(new):
        stop = min(old[i], new[j])
        if stop > start:
            yield _CommonPiece(i, j, start, stop)
        start = stop
        # Both when they end together; else the one that ends first.
        i, j = i + (old[i] == stop), j + (new[j] == stop)


# --- Slices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AxisSlice:
    """The indices `start`, `start + step`, ... of one axis, `count` of them.

    Made by `select`, it has one form only: nothing selected is (0, 1, 0), and a single index has step 1.
    """

    start: int
    step: int
    count: int

    @classmethod
    def of(cls, indices: range) -> AxisSlice:
        """The selection of these indices, none of which is negative."""
        if not indices:
            return cls(0, 1, 0)
        return cls(indices.start, indices.step if len(indices) > 1 else 1, len(indices))

    @property
    def indices(self) -> range:
        return range(self.start, self.start + self.count * self.step, self.step)

    @property
    def as_slice(self) -> slice:
        """The same as a Python slice."""
        stop = self.start + self.count * self.step
        # Downwards past index 0 there is no number to stop at: -1 would be the last index.
        return slice(self.start, stop if stop >= 0 else None, self.step)


@dataclass(frozen=True, slots=True)
class SelectionPart:
    """What one shard gives to a selection.

    Attributes:
        shard: its number.
        local: one entry an axis, in the shard's own coordinates; dropped axes with a count of 1.
        landing: where it belongs in an array of shape `Selection.counts`; of the same shape as what `local`
            selects.
    """

    shard: int
    local: tuple[AxisSlice, ...]
    landing: Block

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this part out of the shard: `shard_array[part.slices]`."""
        return tuple(axis.as_slice for axis in self.local)


@dataclass(frozen=True, slots=True)
class Selection:
    """A basic index, made plain, and what each shard gives to it.

    An integer selects one index of its axis, which is then dropped, and `np.newaxis` adds an axis of length
    1. Neither changes the order of the elements, so a result is gathered with all axes in place and reshaped:

        gathered = np.empty(selection.counts, dtype)
        for part in selection.parts:
            gathered[part.landing.slices] = shard_arrays[part.shard][part.slices]
        result = gathered.reshape(selection.result_shape)

    Attributes:
        axes: what is selected, one entry an axis of the whole.
        dropped: the axes of the whole that the result lacks, rising.
        added: the axes of the result that the whole lacks, rising.
        parts: the shards that hold any of it, by number. They never overlap and fill `counts` wholly.
    """

    axes: tuple[AxisSlice, ...]
    dropped: tuple[int, ...]
    added: tuple[int, ...]
    parts: tuple[SelectionPart, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of indices selected on each axis of the whole."""
        return tuple(axis.count for axis in self.axes)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape that NumPy gives the result."""
        shape = [axis.count for number, axis in enumerate(self.axes) if number not in self.dropped]
        for axis in self.added:
            shape.insert(axis, 1)
        return tuple(shape)


def select(partition: Partition, index: BasicIndex) -> Selection:
    """Which part of which shard a NumPy basic index asks for, and where it belongs in the result.

    Args:
        partition: of the array that is read.
        index: an integer, a slice of any step, `...`, `np.newaxis`, or a tuple of these.

    Raises:
        IndexError: an integer out of range, more indices than axes, more than one `...`.
        ValueError: a slice with step 0.
        TypeError: anything else, such as a float, a bool, a list or an array. For arrays and masks NumPy has
            other rules ("advanced indexing"), and for floats its class is IndexError; one class says here
            that the index is of a kind that is not supported.
    """
    axes, dropped, added = _normalise(partition.shape, index)
    pieces = [list(_owned(axis, ends)) for axis, ends in zip(axes, partition.ends, strict=True)]
    parts = tuple(
        SelectionPart(
            partition._number(p.piece for p in chosen),
            tuple(p.local for p in chosen),
            Block(tuple(p.start for p in chosen), tuple(p.start + p.local.count for p in chosen)),
        )
        for chosen in itertools.product(*pieces)
    )
    # A negative step walks an axis' pieces backwards.
    return Selection(axes, dropped, added, tuple(sorted(parts, key=lambda part: part.shard)))


def _normalise(shape: tuple[int, ...], index: Any) -> tuple[tuple[AxisSlice, ...], tuple[int, ...], tuple[int, ...]]:
    """What is selected on every axis, the axes dropped, and the axes of the result that are added."""
    items = list(index) if isinstance(index, tuple) else [index]
    # By identity: an array among the items would answer == with an array.
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
            "`scatter_update`; for anything else index what `read_value` returns."
        ) from None
    if not -length <= i < length:
        raise IndexError(_out_of_bounds(i, axis, length))
    return i % length


class _OwnedPiece(NamedTuple):
    piece: int
    local: AxisSlice
    start: int  # in the selection: its indices from here on, `local.count` of them


def _owned(axis: AxisSlice, ends: tuple[int, ...]) -> Iterator[_OwnedPiece]:
    """The pieces of one axis that hold any of the selected indices, in the order of the selection.

    Each owns a run of the selection without gaps, because the indices only rise or only fall.
    """
    indices = axis.indices
    at = 0
    while at < axis.count:
        piece = bisect_right(ends, indices[at])
        start, stop = _bounds(ends, piece)
        # How far to the last index within the piece, in steps.
        steps = (stop - 1 - indices[at]) // axis.step if axis.step > 0 else (start - indices[at]) // axis.step
        count = min(steps + 1, axis.count - at)
        first = indices[at] - start
        yield _OwnedPiece(piece, AxisSlice.of(range(first, first + count * axis.step, axis.step)), at)
        at += count
