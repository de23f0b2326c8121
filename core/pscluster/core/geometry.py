"""Sharding geometry: how an array of N axes is cut into blocks, and what follows from it.

Each axis is cut independently, so the blocks form a grid. An axis' cuts are given by the ends of its pieces: length 10
in four pieces ends at (3, 6, 8, 10). Blocks are numbered in C order over the grid, the last axis fastest. Embeddings
use the special case of rows, with cuts along axis 0 only. These may be in another order than that of their ids, see
`row_orders`. Pieces and blocks are then of places on axis 0, not of ids; `Partition.index` says which rows those are.

All of this is integer arithmetic over whole axes, never over elements, except for `check_ids` and `split_rows`, which
take arrays of ids, and for orders of rows. Ends were chosen over (number, remainder): an uneven split, a checkpoint's
older split and a mesh of unequal machines are then the same thing, and owners are found by bisection.
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

from pscluster.core.dtypes import as_array, dtype_name
from pscluster.core.errors import InvalidUpdateError
from pscluster.core.row_orders import RANGE, Ids, RowOrder, by_modulo

BasicIndexItem = SupportsIndex | slice | EllipsisType | None
BasicIndex = BasicIndexItem | tuple[BasicIndexItem, ...]
"""NumPy's basic indexing: integers, slices, `...`, `np.newaxis`, and tuples of these."""


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
    order: RowOrder = RANGE

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
        if self.ends[0] != (even := even_ends(self.shape[0], len(self.ends[0]))):
            raise ValueError(f"axis 0: by {self.order.kind}, pieces end at {even}, not at {self.ends[0]}")

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
        axes = [[_bounds(ends, piece) for piece in range(len(ends))] for ends in self.ends]
        return tuple(
            Block(tuple(a for a, _ in bounds), tuple(b for _, b in bounds)) for bounds in itertools.product(*axes)
        )

    def _shard_index(self, pieces: Iterator[int]) -> int:
        index = 0
        for count, piece in zip(self.grid, pieces, strict=True):
            index = index * count + piece
        return index


def _bounds(ends: tuple[int, ...], piece: int) -> tuple[int, int]:
    return (ends[piece - 1] if piece else 0), ends[piece]


# --- Rows by id -------------------------------------------------------------------------------------------


class ShardRows(NamedTuple):
    """The row ids in a list that belong to one shard."""

    positions: Ids  # [n]; their positions in the list, rising
    local_ids: Ids  # [n]; their row numbers within the shard


def check_ids(ids: npt.ArrayLike, rows: int, name: str) -> Ids:
    """Return row ids as a contiguous int64 array of the same shape, or themselves if they are such an array.

    They may be of any shape and integer dtype, or an empty list. Raise InvalidUpdateError for another dtype, or if ids,
    the first of which is named, are not in 0..rows-1.
    """
    is_common = type(ids) is np.ndarray and ids.dtype == np.int64 and ids.flags.c_contiguous
    if is_common and (not ids.size or np.maximum.reduce(ids.view(np.uint64), None) < rows):  # type: ignore[union-attr]
        return ids  # type: ignore[return-value]
    array = integers(as_array(ids, name, "row ids"), ids, f"variable {name!r}: row ids")
    # As unsigned, negative ids become very large; as signed, large unsigned ids would become negative.
    unsigned = np.asarray(array, np.int64).view(np.uint64) if array.dtype.kind == "i" else array
    if array.size and np.maximum.reduce(unsigned, None) >= rows:  # what `max` calls, through a wrapper
        flat = array.ravel()
        position = int(np.argmax((flat < 0) | (flat >= rows)))
        limit = f"they must lie in 0..{rows - 1}" if rows else "there are no rows"
        raise InvalidUpdateError(
            f"variable {name!r}: row id {flat[position]} (position {position}) is out of range: "
            f"the variable has {rows} rows, {limit}"
        )
    return np.asarray(array, dtype=np.int64, order="C")


def integers(array: npt.NDArray[Any], given: object, subject: str) -> npt.NDArray[Any]:
    """Return the array of the ids that were given, an empty list as int64. InvalidUpdateError unless they are integers.

    `subject` begins the message.
    """
    if array.size == 0 and not isinstance(given, np.ndarray | np.generic):
        return array.astype(np.int64)  # NumPy makes an empty list float64
    if array.dtype.kind not in "iu":
        raise InvalidUpdateError(f"{subject} must be integers, but they are {_not_integers(array)}")
    return array


def _not_integers(array: npt.NDArray[Any]) -> str:
    """Return the type of ids that are not integers, the first that is no whole number, its place, and what to do."""
    flat, kind = array.reshape(-1), array.dtype.kind
    wrong = np.zeros(flat.size, bool)
    if kind == "O":
        wrong = np.array([isinstance(item, bool) or not isinstance(item, int | np.integer) for item in flat], bool)
    elif kind == "f":
        wrong = ~(np.isfinite(flat) & (flat == np.trunc(flat)))
    elif kind != "b":
        wrong[:] = True
    mend = "give whole numbers" if wrong.any() else "convert them first, for instance with ids.astype(np.int64)"
    place = int(wrong.argmax()) if flat.size else 0
    such = f", such as {flat[place : place + 1].tolist()[0]!r:.60} (position {place})" if flat.size else ""
    return f"{dtype_name(array.dtype)}{such}: {mend}"


_FEW_SHARDS = 8  # up to here, scanning all ids for each shard is faster than sorting them


def split_rows(partition: Partition, ids: Ids) -> list[ShardRows]:
    """Return the ids that each shard owns, so that rows can be distributed and reassembled in the order of the ids.

    Assemble rows that are read with `result[positions] = rows_of_the_shard`; distribute values to be written with
    `values[positions]`. Duplicates stay duplicates. Shards without ids are included. The ids are from `check_ids`; if
    they have several axes, positions count in C order. Raise ValueError if an axis other than 0 is cut, or the rank
    is 0, so there are no rows.
    """
    if not partition.shape or any(partition.cut_axes):
        raise ValueError(
            f"rows are found by id only where axis 0 alone is cut, but shape {partition.shape} "
            f"is cut into {partition.grid}"
        )
    flat = ids.reshape(-1)
    shards, kind = partition.num_shards, partition.order.kind
    if kind == "hash":
        flat = partition.places(flat)
    if shards == 1:
        return [ShardRows(np.arange(flat.size, dtype=np.int64), flat)]
    if kind == "modulo":
        owners, local_ids = by_modulo(flat, shards)
        if shards <= _FEW_SHARDS:
            positions = ((owners == shard).nonzero()[0] for shard in range(shards))
            return [ShardRows(own, local_ids[own]) for own in positions]
        return _grouped(owners, local_ids, shards)
    ends = np.array(partition.ends[0], dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))
    # Sorted, as from a plan of distinct rows: common, and several times faster.
    if kind == "range" and bool((flat[1:] >= flat[:-1]).all()):
        order = np.arange(flat.size, dtype=np.int64)
        cuts = itertools.pairwise((0, *np.searchsorted(flat, ends).tolist()))
        return [ShardRows(order[a:b], flat[a:b] - starts[shard]) for shard, (a, b) in enumerate(cuts)]
    if shards <= _FEW_SHARDS:
        below = [flat < end for end in ends[:-1].tolist()]
        masks = [below[0], *(low > before for before, low in itertools.pairwise(below)), ~below[-1]]
        positions = (mask.nonzero()[0] for mask in masks)
        return [ShardRows(own, flat[own] - start) for own, start in zip(positions, starts, strict=True)]
    # "right": of pieces that end at the same row, only the first can hold the rows before it.
    owners = np.searchsorted(ends, flat, side="right")
    return _grouped(owners, flat - starts[owners], shards)


def _grouped(owners: Ids, local_ids: Ids, shards: int) -> list[ShardRows]:
    """Return `split_rows`'s answer, given the owner of each id and its row number there."""
    if shards <= 1 << 16:
        owners = owners.astype(np.uint16)  # NumPy radix-sorts 16 bits, in linear time
    order = np.argsort(owners, kind="stable").astype(np.int64, copy=False)
    local_ids = local_ids[order]
    stops = np.cumsum(np.bincount(owners, minlength=shards)).tolist()
    return [ShardRows(order[start:stop], local_ids[start:stop]) for start, stop in itertools.pairwise((0, *stops))]


# --- From one splitting to another ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A block that goes from an old shard to a new one: in coordinates of the whole array, but places instead of rows.

    If the rows' places change, it is all rows, and it goes what both shards have of them; see `common_rows`.
    """

    old_shard: int
    new_shard: int
    block: Block


def moves(old: Partition, new: Partition) -> Iterator[Move]:
    """Yield the blocks to move between two splittings of one shape.

    The blocks are not empty, don't overlap and together cover the whole, unless the rows' places change. An unchanged
    shard also yields one move: whether it actually moves depends on the owners, which this module doesn't know. Raise
    ValueError, at the first step, if the shapes differ.
    """
    if old.shape != new.shape:
        raise ValueError(f"shape {old.shape} can't be split again as shape {new.shape}")
    axes = [list(_common_pieces(a, b)) for a, b in zip(old.ends, new.ends, strict=True)]
    if not old.has_order_of(new):
        pairs = itertools.product(range(len(old.ends[0])), range(len(new.ends[0])))
        axes[0] = [_CommonPiece(a, b, 0, old.shape[0]) for a, b in pairs if old.shape[0]]
    for pieces in itertools.product(*axes):
        yield Move(
            old._shard_index(p.old for p in pieces),
            new._shard_index(p.new for p in pieces),
            Block(tuple(p.start for p in pieces), tuple(p.stop for p in pieces)),
        )


def common_rows(old: Partition, old_piece: int, new: Partition, new_piece: int) -> tuple[Ids, Ids]:
    """Return the rows that an old and a new piece of axis 0 have in common: their numbers in the old, and in the new.

    The partitions are of rows, as `of_rows` is, and of the same ones.
    """
    local = new.places(old.row_ids(old_piece)) - new.block(new_piece).start[0]
    inside = np.flatnonzero((local >= 0) & (local < new.block(new_piece).shape[0]))
    return inside, local[inside]


class _CommonPiece(NamedTuple):
    old: int
    new: int
    start: int
    stop: int


def _common_pieces(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[_CommonPiece]:
    """Yield the non-empty pieces of one axis that both cuts leave whole, in order."""
    i = j = start = 0
    while i < len(old) and j < len(new):
        stop = min(old[i], new[j])
        if stop > start:
            yield _CommonPiece(i, j, start, stop)
        start = stop
        # Advance both if they end together, else the one that ends first.
        i, j = i + (old[i] == stop), j + (new[j] == stop)


# --- Slices -----------------------------------------------------------------------------------------------


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
            partition._shard_index(p.piece for p in chosen),
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
        start, stop = _bounds(ends, piece)
        # To the last index within the piece.
        steps = (stop - 1 - indices[at]) // axis.step if axis.step > 0 else (start - indices[at]) // axis.step
        count = min(steps + 1, axis.count - at)
        first = indices[at] - start
        yield _OwnedPiece(piece, AxisSlice.of(range(first, first + count * axis.step, axis.step)), at)
        at += count
