"""Plans of rows of several tables, beside NumPy table by table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RANGE, RowOrder
from pscluster.ps.handles.rows.plans import RowPlan

WIDTH = 3
TABLE = st.tuples(
    st.integers(1, 40),  # rows
    st.integers(1, 5),  # shards
    st.integers(1, 2),  # pieces of axis 1
    st.sampled_from([RANGE, RowOrder("modulo"), RowOrder("hash", 7)]),
    st.lists(st.integers(0, 1 << 30), max_size=60),  # ids, before they are cut down to the rows
)


@given(st.lists(TABLE, min_size=1, max_size=5), st.integers(0, 1 << 30), st.booleans())
def test_a_plan_is_unique_and_add_at_of_each_table(
    tables: list[tuple[int, int, int, RowOrder, list[int]]], seed: int, apart: bool
) -> None:
    rng = np.random.default_rng(seed)
    partitions = tuple(
        replace(Partition.even((rows, WIDTH), (shards, across)), order=order if across == 1 else RANGE)
        for rows, shards, across, order, _ in tables
    )
    ids = [np.array(ids, np.int64) % rows for rows, *_, ids in tables]
    values = [rng.normal(size=(rows, WIDTH)).astype(np.float32) for rows, *_ in tables]
    stacked = [rng.normal(size=(len(of_table), 2, WIDTH)).astype(np.float32) for of_table in ids]
    gradients = [stack[:, 1] if apart else stack[:, 1].copy() for stack in stacked]  # rows that lie apart, or do not
    plan = RowPlan.of(partitions, ids)

    out = np.full((plan.distinct, WIDTH), np.nan, np.float32)
    sums = plan.sums(gradients)
    summed = [np.zeros_like(table) for table in values]
    seen: list[set[int]] = [set() for _ in tables]
    for table, shard, rows, local_ids in plan.shares:
        index, columns = partitions[table].index(shard), partitions[table].block(shard).slices[1]
        out[rows, columns] = values[table][index][local_ids]
        of_shard = summed[table][index].copy()
        of_shard[local_ids] += sums[rows, columns]
        summed[table][index] = of_shard
        seen[table].add(shard)
        assert len(set(local_ids.tolist())) == len(local_ids)
    assert [len(shards) for shards in seen] == [partition.num_shards for partition in partitions]
    for table, of_table in enumerate(ids):
        expected = np.zeros_like(values[table])
        np.add.at(expected, of_table, gradients[table])
        np.testing.assert_array_equal(summed[table], expected)
        np.testing.assert_array_equal(plan.spread(out)[table], values[table][of_table])


def test_the_last_plan_is_used_again_for_equal_ids_only() -> None:
    partitions = (Partition.even((10, WIDTH), (2,)), Partition.even((10, WIDTH), (1,)))
    ids = [np.array([1, 2, 1]), np.array([7])]
    first = RowPlan.of(partitions, ids)
    assert RowPlan.of(partitions, [array.copy() for array in ids]) is first
    assert RowPlan.of(partitions[::-1], ids) is not first
    again = RowPlan.of(partitions, ids)
    ids[0][0] = 3  # the caller's array, which the plan must not share
    changed = RowPlan.of(partitions, ids)
    assert changed is not again
    assert changed.distinct == 4
    assert RowPlan.of(partitions, [np.stack([array, array], 1)[:, 0] for array in ids]) is changed  # with gaps
    assert RowPlan.of(partitions, [np.array([1, 2]), np.array([1, 7])]) is not changed  # shared out differently
