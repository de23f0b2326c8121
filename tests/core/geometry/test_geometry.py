"""Geometry against NumPy: small cases by brute force, larger ones drawn by Hypothesis."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry.moves import moves
from pscluster.core.geometry.partition import Block, Partition, even_ends
from pscluster.core.geometry.rows import check_ids, split_rows
from pscluster.core.geometry.selection import AxisSlice, BasicIndex, Selection, select

Array = npt.NDArray[np.int64]

SMALL_SHAPES = [shape for rank in range(4) for shape in itertools.product(range(5), repeat=rank)]


def numbered(shape: tuple[int, ...]) -> Array:
    """An array whose elements are all different."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def even_partitions(shape: tuple[int, ...]) -> Iterator[Partition]:
    """Every even split into 1 to 4 parts per axis."""
    for parts in itertools.product(range(1, 5), repeat=len(shape)):
        yield Partition.even(shape, parts)


def all_ends(length: int, most: int) -> list[tuple[int, ...]]:
    """Every way, even or not, to cut an axis into 1 to `most` pieces, empty pieces included."""
    return [
        (*cuts, length)
        for count in range(most)
        for cuts in itertools.combinations_with_replacement(range(length + 1), count)
    ]


def cut(whole: Array, partition: Partition) -> list[Array]:
    """The shards as a server would hold them: copies without any knowledge of the whole."""
    return [whole[block.slices].copy() for block in partition.blocks]


def gather(selection: Selection, shards: list[Array]) -> Array:
    """The result of a selection, assembled as its docstring says, with each element written once."""
    gathered = np.full(selection.counts, -1, dtype=np.int64)
    for selected in selection.shards:
        values = shards[selected.shard][selected.slices]
        assert values.shape == selected.target.shape
        assert values.size > 0
        assert np.all(gathered[selected.target.slices] == -1)
        gathered[selected.target.slices] = values
    return gathered.reshape(selection.result_shape)


@st.composite
def partitions(
    draw: st.DrawFn, shape: tuple[int, ...] | None = None, max_rank: int = 3, max_length: int = 40
) -> Partition:
    """Any partition of a shape, uneven and with empty pieces."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, max_length), max_size=max_rank)))
    ends = []
    for length in shape:
        cuts = draw(st.lists(st.integers(0, length), max_size=6))
        ends.append((*sorted(cuts), length))
    return Partition(shape, tuple(ends))


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> BasicIndex:
    """Any basic index that is valid for a shape."""
    items: list[Any] = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        if length and draw(st.booleans()):
            items.append(draw(st.integers(-length, length - 1)))
        else:
            bound = st.none() | st.integers(-length - 3, length + 3)
            step = st.none() | st.integers(-7, 7).filter(bool)
            items.append(slice(draw(bound), draw(bound), draw(step)))
    for _ in range(draw(st.integers(0, 2))):
        items.insert(draw(st.integers(0, len(items))), None)
    if len(items) - items.count(None) == len(shape) and draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), Ellipsis)
    return tuple(items)


# --- Cuts -------------------------------------------------------------------------------------------------


def test_even_ends_cut_as_array_split() -> None:
    """Any length in any number of parts ends where NumPy's pieces end."""
    assert even_ends(10, 4) == (3, 6, 8, 10)
    assert even_ends(13, 5) == (3, 6, 9, 11, 13)
    assert even_ends(2, 4) == (1, 2, 2, 2)
    assert even_ends(0, 2) == (0, 0)
    for length, parts in itertools.product(range(20), range(1, 25)):
        pieces = np.array_split(np.arange(length), parts)
        assert even_ends(length, parts) == tuple(np.cumsum([piece.size for piece in pieces]).tolist())


@pytest.mark.parametrize(("length", "parts"), [(-1, 1), (3, 0), (3, -2)])
def test_even_ends_refuses_what_can_not_be_cut(length: int, parts: int) -> None:
    """Negative lengths and fewer than one part are errors that name the value."""
    with pytest.raises(ValueError, match=str(min(length, parts))):
        even_ends(length, parts)


@pytest.mark.parametrize("rank", range(4))
def test_every_small_split_tiles_the_array(rank: int) -> None:
    """Blocks, assembled in C order over the grid, are the array, and each knows its own elements."""
    for shape in (shape for shape in SMALL_SHAPES if len(shape) == rank):
        whole = numbered(shape)
        for partition in even_partitions(shape):
            blocks = partition.blocks
            assert len(blocks) == partition.num_shards == math.prod(partition.grid)
            assert blocks == tuple(map(partition.block, range(partition.num_shards)))
            seen = np.full(shape, -1)
            for shard, block in enumerate(blocks):
                assert np.all(seen[block.slices] == -1)
                seen[block.slices] = shard
                assert whole[block.slices].shape == block.shape
                assert whole[block.slices].size == block.size
            assert np.all(seen >= 0)
            grid = np.empty(partition.grid, dtype=object)
            for cell, shard in zip(np.ndindex(*partition.grid), range(len(blocks)), strict=True):
                grid[cell] = whole[blocks[shard].slices]
            if rank:
                assert np.array_equal(np.block(grid.tolist()), whole)


@given(partitions())
@settings(deadline=None)
def test_uneven_splits_tile_the_array(partition: Partition) -> None:
    """Blocks of any cuts hold every element once."""
    seen = np.zeros(partition.shape, dtype=np.int64)
    for block in partition.blocks:
        seen[block.slices] += 1
    assert np.all(seen == 1)
    assert sum(block.size for block in partition.blocks) == seen.size


def test_rank_0_is_one_block() -> None:
    """A scalar has an empty grid, one shard and one element."""
    partition = Partition.whole(())
    assert partition.grid == ()
    assert partition.num_shards == 1
    assert partition.blocks == (Block((), ()),)
    assert partition.block(0).size == 1


def test_axes_not_named_stay_whole() -> None:
    """An even split of the first axes leaves the others in one piece."""
    partition = Partition.even((10, 3), (4,))
    assert partition == Partition((10, 3), ((3, 6, 8, 10), (3,)))
    assert partition.cut_axes == (0,)
    assert Partition.whole((10, 3)).cut_axes == ()
    assert Partition.even((10, 3), (1, 2)).cut_axes == (1,)


@pytest.mark.parametrize(
    ("shape", "ends", "message"),
    [
        ((4,), (), "1 axes.*for 0"),
        ((4,), ((4,), (1,)), "1 axes.*for 2"),
        ((2, 4), ((2,), ()), "axis 1.*1 piece"),
        ((2, 4), ((2,), (3,)), "axis 1.*at 4, not at 3"),
        ((2, 4), ((2,), (3, 2, 4)), r"axis 1.*rise.*\(3, 2, 4\)"),
        ((2, 4), ((-1, 2), (4,)), r"axis 0.*rise.*\(-1, 2\)"),
        ((-2,), ((-2,),), "axis 0.*negative.*-2"),
    ],
)
def test_a_partition_refuses_ends_that_do_not_fit(
    shape: tuple[int, ...], ends: tuple[tuple[int, ...], ...], message: str
) -> None:
    """The error gives the axis and the value."""
    with pytest.raises(ValueError, match=message):
        Partition(shape, ends)


def test_even_splits_name_the_axis_they_can_not_cut() -> None:
    """Too many numbers, and numbers below 1, are refused."""
    with pytest.raises(ValueError, match=r"axis 1.*not into 0"):
        Partition.even((3, 3), (1, 0))
    with pytest.raises(ValueError, match="along 2 axes"):
        Partition.even((3,), (1, 1))
    with pytest.raises(ValueError, match=r"axis 0.*-3"):
        Partition.whole((-3,))


def test_partitions_are_values() -> None:
    """Equal cuts are equal whatever kinds of sequences and integers they came in, and survive pickling."""
    one = Partition.even((10, 3), (4, 1))
    other = Partition([np.int64(10), 3], [np.array([3, 6, 8, 10]), [3]])  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
    assert type(other.shape[0]) is type(other.ends[0][0]) is int
    fresh = pickle.dumps(one)
    assert pickle.loads(fresh) == one
    assert one.of_rows.num_shards == len(one.blocks) == 4
    assert pickle.dumps(one) == fresh, "what is kept of it is no part of it"
    with pytest.raises(TypeError):
        Partition((1.5,), ((1.5,),))  # type: ignore[arg-type]


def test_questions_about_shards_that_do_not_exist() -> None:
    """Numbers out of range, negative ones too, are IndexErrors."""
    partition = Partition.even((4, 4), (2, 1))
    for shard in (-1, 2):
        with pytest.raises(IndexError, match=f"no shard {shard} of 2"):
            partition.block(shard)


# --- Blocks -----------------------------------------------------------------------------------------------


def test_blocks_refuse_nonsense() -> None:
    """Different ranks and stops before starts are errors."""
    with pytest.raises(ValueError, match="rank"):
        Block((0,), (1, 2))
    with pytest.raises(ValueError, match=r"axis 1.*from 3 to 2"):
        Block((0, 3), (1, 2))


# --- Rows by id -------------------------------------------------------------------------------------------


def assert_rows_come_back(partition: Partition, ids: Array) -> None:
    """Check that reading and writing rows shard by shard is the same as on the whole."""
    whole = numbered(partition.shape)
    shards = cut(whole, partition)
    expected = whole[ids]
    read = np.full((ids.size, *partition.shape[1:]), -1, dtype=np.int64)
    parts = split_rows(partition, ids)
    assert len(parts) == partition.num_shards
    for shard, (positions, local_ids) in zip(shards, parts, strict=True):
        assert positions.dtype == local_ids.dtype == np.int64
        assert np.all(positions[1:] > positions[:-1])
        assert np.all(read[positions] == -1)
        read[positions] = shard[local_ids]
    assert np.array_equal(read.reshape(expected.shape), expected)

    gradient = np.arange(ids.size, dtype=np.int64)
    added = np.zeros(partition.shape[0], dtype=np.int64)
    np.add.at(added, ids.reshape(-1), gradient)
    for block, (positions, local_ids) in zip(partition.blocks, parts, strict=True):
        local = np.zeros(block.shape[0], dtype=np.int64)
        np.add.at(local, local_ids, gradient[positions])
        assert np.array_equal(local, added[block.slices[0]])


def test_rows_of_every_small_split() -> None:
    """All lists of up to three ids of all small splits, empty pieces included, come back in their order."""
    for rows in range(5):
        for ends in all_ends(rows, 4):
            partition = Partition((rows, 2), (ends, (2,)))
            for count in range(4):
                for ids in itertools.product(range(rows), repeat=count):
                    assert_rows_come_back(partition, np.array(ids, dtype=np.int64))


@given(st.data())
@settings(deadline=None)
def test_rows_of_larger_splits(data: st.DataObject) -> None:
    """Ids of any shape, sorted or not, with duplicates, come back in their order."""
    rows = data.draw(st.integers(1, 200))
    partition = data.draw(partitions(shape=(rows,)))
    ids = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=60)), dtype=np.int64)
    if data.draw(st.booleans()):
        ids = np.sort(ids)
    if ids.size % 2 == 0:
        ids = ids.reshape(2, -1)
    assert_rows_come_back(partition, ids)


def test_rows_over_very_many_shards() -> None:
    """More shards than 16 bits can number are distinguished."""
    partition = Partition.even((70_000,), (70_000,))
    parts = split_rows(partition, np.array([69_999, 0, 65_536, 0], dtype=np.int64))
    asked = {shard: rows.positions.tolist() for shard, rows in enumerate(parts) if rows.positions.size}
    assert asked == {69_999: [0], 0: [1, 3], 65_536: [2]}


@pytest.mark.parametrize(
    "partition", [Partition.even((4, 4), (1, 2)), Partition.even((4, 4), (2, 2)), Partition.whole(())]
)
def test_rows_are_cut_along_axis_0_only(partition: Partition) -> None:
    """If a row lies on several shards, or there are no rows, ids have no owner."""
    with pytest.raises(ValueError, match="axis 0 alone"):
        split_rows(partition, np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8"])
@pytest.mark.parametrize("shape", [(0,), (6,), (2, 3), (1, 2, 3), ()])
def test_ids_of_every_integer_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    """Ids become contiguous native int64 of the same shape and values, from any layout."""
    ids = numbered(shape).astype(dtype)
    for given_ids in (ids, ids.T, np.flip(ids)):
        checked = check_ids(given_ids, 1000, "w")
        assert checked.dtype == np.int64
        assert checked.flags.c_contiguous
        assert np.array_equal(checked, given_ids)
        assert checked.shape == given_ids.shape


def test_ids_as_lists_and_numbers() -> None:
    """Lists, even empty ones, and single numbers are ids; an array that needs no conversion is not copied."""
    assert check_ids([], 0, "w").shape == (0,)
    assert check_ids([[], []], 3, "w").shape == (2, 0)
    assert check_ids([2, 0], 3, "w").tolist() == [2, 0]
    assert check_ids(2, 3, "w").shape == ()
    assert check_ids(np.uint8(2), 3, "w") == 2
    ids = np.array([1, 2])
    assert check_ids(ids, 3, "w") is ids


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        ([1.0], "float64"),
        (np.zeros(0, np.float32), "float32"),
        ([True], "bool"),
        (np.True_, "bool"),
        (["1"], "str, such as '1'"),
        ([None], "object"),
        (np.array([1], "m8[s]"), "timedelta64"),
    ],
)
def test_ids_of_no_integer_dtype(ids: npt.ArrayLike, kind: str) -> None:
    """Floats, bools and the like are refused with the variable's name and the dtype."""
    with pytest.raises(InvalidUpdateError, match=f"'table'.*must be integers.*{kind}"):
        check_ids(ids, 3, "table")


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ([0, 3, -1], 3, r"row id 3 \(position 1\).*3 rows.*0\.\.2"),
        ([0, -1, 3], 3, r"row id -1 \(position 1\)"),
        ([[0, 1], [2, 7]], 3, r"row id 7 \(position 3\)"),
        ([0], 0, "row id 0 .* 0 rows, there are no rows"),
        (np.array([5, 2**64 - 1], np.uint64), 9, rf"row id {2**64 - 1} \(position 1\)"),
        (np.array([100], np.int8), 7, "row id 100"),
        (np.array([1, -100], np.int8), 70_000, "row id -100"),
        (np.array([], np.int64).sum(), 0, "row id 0"),
    ],
)
def test_ids_out_of_range(ids: npt.ArrayLike, rows: int, message: str) -> None:
    """The first id that is not a row is named, with its place, the limit and the variable."""
    with pytest.raises(InvalidUpdateError, match=f"'table': {message}"):
        check_ids(ids, rows, "table")


# --- From one splitting to another ------------------------------------------------------------------------


def within(block: Block, outer: Block) -> tuple[slice, ...]:
    """The index of a block in an array that is another, enclosing block."""
    assert all(a >= b for a, b in zip(block.start, outer.start, strict=True))
    assert all(a <= b for a, b in zip(block.stop, outer.stop, strict=True))
    bounds = zip(block.start, block.stop, outer.start, strict=True)
    return tuple(slice(start - origin, stop - origin) for start, stop, origin in bounds)


def assert_moves_carry_everything(old: Partition, new: Partition) -> None:
    """Check that the moves make the new shards from the old ones, each element once and none needlessly."""
    whole = numbered(old.shape)
    source = cut(whole, old)
    target = [np.full(block.shape, -1, dtype=np.int64) for block in new.blocks]
    pairs = set()
    for move in moves(old, new):
        old_block, new_block = old.block(move.old_shard), new.block(move.new_shard)
        shard, into = target[move.new_shard], within(move.block, new_block)
        assert np.all(shard[into] == -1)
        shard[into] = source[move.old_shard][within(move.block, old_block)]
        assert (move.old_shard, move.new_shard) not in pairs
        pairs.add((move.old_shard, move.new_shard))
    for block, values in zip(new.blocks, target, strict=True):
        assert np.array_equal(values, whole[block.slices])


def test_moves_between_all_small_splits_of_rank_1() -> None:
    """Any two cuts of one axis work, including uneven ones and empty pieces."""
    for length in range(5):
        for old, new in itertools.product(all_ends(length, 4), repeat=2):
            assert_moves_carry_everything(Partition((length,), (old,)), Partition((length,), (new,)))


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_moves_between_small_splits(rank: int) -> None:
    """Even splits of every small shape work: all pairs or, for very many, a sample."""
    chance = random.Random(rank)
    for shape in (shape for shape in SMALL_SHAPES if len(shape) == rank):
        candidates = list(even_partitions(shape))
        pairs = list(itertools.product(candidates, repeat=2))
        for old, new in chance.sample(pairs, min(len(pairs), 256 if rank == 2 else 16)):
            assert_moves_carry_everything(old, new)


@given(st.data())
@settings(deadline=None)
def test_moves_between_larger_splits(data: st.DataObject) -> None:
    """Any two cuts of any shape work."""
    old = data.draw(partitions(max_length=12))
    assert_moves_carry_everything(old, data.draw(partitions(shape=old.shape)))


def test_moves_are_few() -> None:
    """Four pieces of ten rows become three with six moves, in the order of the rows."""
    told = [
        (move.old_shard, move.new_shard, move.block.start[0], move.block.stop[0])
        for move in moves(Partition.even((10, 2), (4,)), Partition.even((10, 2), (3,)))
    ]
    assert told == [(0, 0, 0, 3), (1, 0, 3, 4), (1, 1, 4, 6), (2, 1, 6, 7), (2, 2, 7, 8), (3, 2, 8, 10)]


def test_moves_keep_the_shape() -> None:
    """Partitions of different shapes are refused."""
    with pytest.raises(ValueError, match="again"):
        list(moves(Partition.whole((3,)), Partition.whole((4,))))


# --- Slices -----------------------------------------------------------------------------------------------


def assert_selects_as_numpy(partition: Partition, index: Any) -> None:
    """Check that the selection has NumPy's shape and elements, and requests no more of a shard than it gives."""
    whole = numbered(partition.shape)
    expected = whole[index]
    selection = select(partition, index)
    assert selection.result_shape == expected.shape
    assert sum(selected.target.size for selected in selection.shards) == expected.size
    shards = [selected.shard for selected in selection.shards]
    assert shards == sorted(set(shards))
    assert np.array_equal(gather(selection, cut(whole, partition)), expected)


def test_every_small_slice_of_one_axis() -> None:
    """All starts, stops and steps around every length up to 4 work, over all cuts of it."""
    bounds = [None, *range(-6, 7)]
    steps = [None, *range(-5, 0), *range(1, 6)]
    for length in range(5):
        whole = numbered((length,))
        splits = [Partition((length,), (ends,)) for ends in all_ends(length, 3)]
        held = [cut(whole, partition) for partition in splits]
        # Many spellings request the same: their parts are compared once.
        done: dict[AxisSlice, Array] = {}
        for start, stop, step in itertools.product(bounds, bounds, steps):
            index = slice(start, stop, step)
            expected = whole[index]
            (axis,) = select(splits[0], index).axes
            if axis in done:
                assert np.array_equal(done[axis], expected)
                continue
            done[axis] = expected
            assert np.array_equal(whole[axis.as_slice], expected)
            assert list(axis.indices) == expected.tolist()
            for partition, shards in zip(splits, held, strict=True):
                assert np.array_equal(gather(select(partition, index), shards), expected)


def test_every_integer_of_one_axis() -> None:
    """All integers around every length up to 4 give NumPy's element, or its error."""
    for length in range(5):
        whole = numbered((length,))
        for ends, i in itertools.product(all_ends(length, 3), range(-6, 6)):
            partition = Partition((length,), (ends,))
            if -length <= i < length:
                assert_selects_as_numpy(partition, i)
                continue
            with pytest.raises(IndexError) as expected:
                whole[i]
            with pytest.raises(IndexError) as raised:
                select(partition, i)
            assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("rank", range(4))
def test_small_indices_of_several_axes(rank: int) -> None:
    """Tuples of integers, slices, ellipses and new axes work: a sample over every small shape and its splits."""
    chance = random.Random(rank)

    def item(length: int) -> Any:
        if length and chance.random() < 0.4:
            return chance.randrange(-length, length)
        bound = [None, *range(-length - 2, length + 3)]
        return slice(chance.choice(bound), chance.choice(bound), chance.choice([None, -3, -2, -1, 1, 2, 3]))

    for shape in (shape for shape in SMALL_SHAPES if len(shape) == rank):
        candidates = list(even_partitions(shape))
        for _ in range(20):
            before = chance.randint(0, rank)
            after = chance.randint(0, rank - before)
            items = [item(length) for length in shape[:before]]
            if after or chance.random() < 0.5:
                items += [Ellipsis, *(item(length) for length in shape[rank - after :])]
            for _ in range(chance.randint(0, 2)):
                items.insert(chance.randint(0, len(items)), None)
            assert_selects_as_numpy(chance.choice(candidates), tuple(items))


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_larger_slices(data: st.DataObject) -> None:
    """Any basic index of any partition works."""
    partition = data.draw(partitions(max_length=12) | partitions(max_rank=1, max_length=500))
    assert_selects_as_numpy(partition, data.draw(indices(partition.shape)))


def test_a_single_item_needs_no_tuple() -> None:
    """An index that is not a tuple is the same as a tuple of one."""
    partition = Partition.even((4, 3), (2, 2))
    for index in (2, -1, np.int8(3), np.array(1), slice(None, None, -2), Ellipsis, None):
        assert_selects_as_numpy(partition, index)
        assert select(partition, index) == select(partition, (index,))


def test_only_what_is_asked_for_moves() -> None:
    """Reading a row on one of four servers sends a request to that server alone."""
    partition = Partition.even((10, 5), (4,))
    (selected,) = select(partition, (7, slice(1, 3))).shards
    assert selected.shard == 2
    assert selected.local == (AxisSlice(1, 1, 1), AxisSlice(1, 1, 2))
    assert selected.slices == (slice(1, 2, 1), slice(1, 3, 1))
    assert selected.target == Block((0, 0), (1, 2))
    assert select(partition, slice(3, 3)).shards == ()
    assert [selected.shard for selected in select(partition, slice(None, None, -9)).shards] == [0, 3]


def test_dropped_and_added_axes() -> None:
    """An integer drops its axis, a new axis counts in the result's numbering."""
    selection = select(Partition.whole((4, 3, 2)), (None, 1, Ellipsis, None, 0))
    assert selection.dropped == (0, 2)
    assert selection.added == (0, 2)
    assert selection.counts == (1, 3, 1)
    assert selection.result_shape == (1, 3, 1)


def test_selections_are_values_in_one_form() -> None:
    """Different spellings of the same request are equal, hash alike and survive pickling."""
    partition = Partition.even((5, 2), (2,))
    same = [select(partition, index) for index in (slice(4, None), slice(-1, 9, 3), slice(4, 3, -1))]
    assert len(set(same)) == 1
    assert len({select(partition, slice(start, 0)) for start in range(5)}) == 1
    assert pickle.loads(pickle.dumps(same[0])) == same[0]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "index 4 is out of bounds for axis 0 with size 4"),
        ((0, -4), IndexError, "index -4 is out of bounds for axis 1 with size 3"),
        ((Ellipsis, 3), IndexError, "index 3 is out of bounds for axis 1 with size 3"),
        ((0, 0, 0), IndexError, "too many indices"),
        ((0, 0, Ellipsis, 0), IndexError, "too many indices"),
        ((Ellipsis, Ellipsis), IndexError, "single ellipsis"),
        (slice(None, None, 0), ValueError, "step cannot be zero"),
        (1.0, TypeError, "not by float"),
        (np.float32(1), TypeError, "not by float32"),
        (slice(0.5), TypeError, "slice indices must be integers"),
        (True, TypeError, "not by bool"),
        (np.True_, TypeError, "not by bool"),
        ([0, 1], TypeError, r"not by list \(axis 0\)"),
        ((0, np.array([0, 1])), TypeError, r"not by ndarray \(axis 1\).*sparse_read"),
        (np.ones((4, 3), bool), TypeError, "not by ndarray"),
        ("a", TypeError, "not by str"),
    ],
)
def test_indices_that_are_refused(index: Any, error: type[Exception], message: str) -> None:
    """Errors have NumPy's classes if basic indexing fails, and TypeError for other kinds."""
    with pytest.raises(error, match=message):
        select(Partition.even((4, 3), (2,)), index)
