"""Orders of rows against NumPy: every id in one place, and the values of a cut table those of the whole one."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.geometry.moves import common_rows, moves
from pscluster.core.geometry.partition import Partition, even_ends
from pscluster.core.geometry.row_orders import KINDS, RANGE, RowOrder
from pscluster.core.geometry.rows import split_rows
from pscluster.core.geometry.selection import select

Array = npt.NDArray[np.int64]

ORDERS = [RowOrder("modulo"), RowOrder("hash"), RowOrder("hash", 7)]
orders = st.sampled_from([RANGE, *ORDERS]) | st.builds(RowOrder, st.just("hash"), st.integers(0, 2**64 - 1))


@st.composite
def tables(draw: st.DrawFn, rows: int) -> Partition:
    """Any cut of the rows of a table with two columns, which is cut too if the rows are in ranges."""
    order, shards = draw(orders), draw(st.integers(1, 12))
    ends = even_ends(rows, shards)
    if order == RANGE and draw(st.booleans()):
        ends = (*sorted(draw(st.lists(st.integers(0, rows), max_size=5))), rows)
    columns = draw(st.sampled_from([(2,), (1, 2)])) if order == RANGE else (2,)
    return Partition((rows, 2), (ends, columns), order)


@st.composite
def several(draw: st.DrawFn, rows: int) -> Partition:
    """Such a table, or several that are joined and are cut along axis 0 alone."""
    if draw(st.booleans()):
        return draw(tables(rows))
    ends = [0, *sorted(draw(st.lists(st.integers(0, rows), max_size=3))), rows]
    parts = [draw(tables(stop - start)) for start, stop in itertools.pairwise(ends)]
    by_rows = (Partition(part.shape, (part.ends[0], (2,)), part.order) for part in parts)
    return Partition.joined(list(by_rows))


def cut(whole: Array, partition: Partition) -> list[Array]:
    """The shards as servers would hold them."""
    return [whole[partition.index(shard)].copy() for shard in range(partition.num_shards)]


@given(st.data(), st.integers(0, 300))
@settings(deadline=None)
def test_orders_are_bijections(data: st.DataObject, rows: int) -> None:
    """Each row has one place, and each place its row; shards are ranges of places."""
    partition = data.draw(several(rows))
    ids = np.arange(rows)
    places = partition.places(ids)
    assert sorted(places.tolist()) == ids.tolist()
    of_shards = [partition.row_ids(shard) for shard in range(partition.num_shards)]
    for row_ids, block in zip(of_shards, partition.blocks, strict=True):
        assert np.array_equal(places[row_ids], np.arange(block.start[0], block.stop[0]))
    whole = np.arange(rows * 2).reshape(rows, 2)
    again = np.full_like(whole, -1)
    for shard, values in enumerate(cut(whole, partition)):
        assert values.shape == partition.block(shard).shape
        again[partition.index(shard)] = values
    assert np.array_equal(again, whole)


@given(st.data(), st.integers(1, 300))
@settings(deadline=None)
def test_rows_come_back_in_the_order_of_their_ids(data: st.DataObject, rows: int) -> None:
    """Sorted or not, with duplicates."""
    partition = data.draw(several(rows)).of_rows
    ids = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=60)), np.int64)
    ids = np.sort(ids) if data.draw(st.booleans()) else ids
    shards, read = cut(np.arange(rows), partition), np.full(ids.shape, -1)
    for shard, (positions, local_ids) in zip(shards, split_rows(partition, ids), strict=True):
        assert positions.dtype == local_ids.dtype == np.int64
        assert np.all(positions[1:] > positions[:-1])
        read[positions] = shard[local_ids]
    assert np.array_equal(read, ids)


@given(st.data(), st.integers(0, 100))
@settings(deadline=None)
def test_any_cut_becomes_any_other(data: st.DataObject, rows: int) -> None:
    """By the rows that each pair of shards has in common, of the columns that they have in common."""
    old, new = data.draw(tables(rows)), data.draw(tables(rows))
    whole = np.arange(rows * 2).reshape(rows, 2)
    sources, targets = cut(whole, old), [np.full(block.shape, -1) for block in new.blocks]
    for move in moves(old, new):
        source, target = old.block(move.old_shard), new.block(move.new_shard)
        columns = range(move.block.start[1], move.block.stop[1])
        if old.has_order_of(new):
            indices = range(move.block.start[0], move.block.stop[0])
            old_rows, new_rows = (np.array(indices) - block.start[0] for block in (source, target))
        else:
            pieces = (move.old_shard // len(old.ends[1]), move.new_shard // len(new.ends[1]))
            old_rows, new_rows = common_rows(old.of_rows, pieces[0], new.of_rows, pieces[1])
        for column in columns:
            written = targets[move.new_shard][new_rows, column - target.start[1]]
            assert np.all(written == -1)
            targets[move.new_shard][new_rows, column - target.start[1]] = sources[move.old_shard][
                old_rows, column - source.start[1]
            ]
    for expected, target_values in zip(cut(whole, new), targets, strict=True):
        assert np.array_equal(expected, target_values)


def test_places_never_change() -> None:
    """They are in checkpoints and logs: other places would be other rows."""
    ids = np.array([0, 1, 2, 3, 50_000, 99_998, 99_999])
    ends = even_ends(100_000, 4)
    assert RowOrder("modulo").places(ids, ends).tolist() == [0, 25_000, 50_000, 75_000, 12_500, 74_999, 99_999]
    assert RowOrder("hash").places(ids, ends).tolist() == [43877, 21110, 95323, 48046, 48444, 28378, 82418]
    assert RowOrder("hash", 7).places(np.arange(10), (10,)).tolist() == [7, 3, 5, 4, 1, 6, 2, 8, 0, 9]
    assert RowOrder("hash", 2**64 - 1).places(np.array([0, 1, 2**40]), (2**40 + 1,)).tolist() == [
        493123489219,
        209376119132,
        853162703437,
    ]


@pytest.mark.parametrize("rows", [1000, 65_536, 65_537, 100_000])
@pytest.mark.parametrize("shards", [2, 3, 4, 16])
def test_hashing_spreads_any_pattern_of_ids(rows: int, shards: int) -> None:
    """Neighbours, and multiples of the number of shards or of powers of two, within what chance does."""
    ends = even_ends(rows, shards)
    for ids in (np.arange(rows // 4), np.arange(0, rows, shards), np.arange(0, rows, 8), np.arange(rows // 2, rows)):
        places = RowOrder("hash").places(ids, ends)
        shares = np.bincount(np.searchsorted(ends, places, "right"), minlength=shards)
        mean = len(ids) / shards
        assert abs(shares - mean).max() < 4 * math.sqrt(mean)


@pytest.mark.parametrize("shards", [2, 4])
def test_skewed_ids_are_spread(shards: int) -> None:
    """Of Zipf's distribution with 1.1 over 100,000 rows, as a batch's distinct ids: ranges are far off."""
    rows, draw = 100_000, np.random.default_rng(0)
    weights = np.arange(1, rows + 1) ** -1.1
    batches = [np.unique(draw.choice(rows, 4096, p=weights / weights.sum())) for _ in range(5)]

    def worst(order: RowOrder) -> float:
        partition = Partition((rows,), (even_ends(rows, shards),), order)
        shares = sum(np.array([len(part.positions) for part in split_rows(partition, ids)]) for ids in batches)
        return float(np.max(shares) / np.mean(shares))

    assert worst(RowOrder("hash")) < 1.3
    assert worst(RowOrder("modulo")) < 1.3
    assert worst(RANGE) > 1.6


def test_orders_that_do_not_fit_are_refused() -> None:
    """Unknown kinds, seeds out of range, cuts of other axes, scalars, and uneven ends by modulo; nothing selects."""
    with pytest.raises(ValueError, match=f"no order of rows 'md5'; choose one of {', '.join(KINDS)}"):
        RowOrder("md5")  # type: ignore[arg-type]
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=str(seed)):
            RowOrder("hash", seed)
    with pytest.raises(ValueError, match="only the order of rows 'hash' has a seed"):
        RowOrder("modulo", 1)
    with pytest.raises(ValueError, match="by hash along axis 0 alone"):
        Partition((4, 4), ((4,), (2, 4)), RowOrder("hash"))
    with pytest.raises(ValueError, match="by modulo along axis 0 alone"):
        Partition((), (), RowOrder("modulo"))
    with pytest.raises(ValueError, match=r"by modulo, pieces end at \(3, 5\), not at \(1, 5\)"):
        Partition((5,), ((1, 5),), RowOrder("modulo"))
    with pytest.raises(ValueError, match="selected by their ids"):
        select(Partition((5,), ((3, 5),), RowOrder("modulo")), 0)


def test_partitions_with_orders_are_values() -> None:
    """The order is part of what is compared and pickled."""
    one = Partition((5,), ((3, 5),), RowOrder("hash", 3))
    assert pickle.loads(pickle.dumps(one)) == one != Partition((5,), ((3, 5),))
    assert one.of_places == Partition((5,), ((3, 5),))
