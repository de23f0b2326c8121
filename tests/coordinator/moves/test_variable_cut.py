"""Rows of variables of all kinds get into new shards as they are, also those that change after they were copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.faults.support import Job, running_job

from pscluster.coordinator.api import (
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    ModuloPartitioner,
    Variable,
)
from pscluster.coordinator.moves import decision, resharder, variable_cut
from pscluster.coordinator.moves.plan import ProposedCut
from pscluster.coordinator.moves.variable_cut import page_elements, rows_of_pages
from pscluster.coordinator.variables.partitioners import partition_for
from pscluster.ps.spec import MOVE_BYTES


@pytest.mark.parametrize("shape", [(5000,), (700, 3), (7, 3000), (40, 50, 3), (9, 0), (1, 1)])
@pytest.mark.parametrize(
    "partitioner",
    [
        FixedShardsPartitioner(3),
        HashPartitioner(3),
        ModuloPartitioner(3),
        lambda shape, dtype: [2, *[1] * len(shape[1:])],
    ],
)
def test_the_rows_of_pages(partitioner: Any, shape: tuple[int, ...]) -> None:
    """They are those that have an element there, of however many rows a page is, or a row of pages."""
    partition = partition_for(partitioner, shape, np.dtype(np.float32), "v")
    rows = np.broadcast_to(np.arange(shape[0]).reshape(-1, *[1] * len(shape[1:])), shape)
    for shard in range(partition.num_shards):
        elements = rows[partition.index(shard)].reshape(-1)
        for pages in ([], [0], [0, 2], list(range(0, 1000, 2))):
            size = page_elements(partition.block(shard).shape)
            there = np.array([page for page in pages if page * size < len(elements)], np.int64)
            expected = {row for page in there for row in elements[page * size :][:size].tolist()}
            assert set(rows_of_pages(partition, shard, there).tolist()) == expected


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with running_job(num_ps=2, num_workers=1) as job:
        yield job


Cut = Callable[[tuple[int, ...], Any], list[int]]

KINDS: dict[str, tuple[tuple[int, ...], str, Cut | None, int, bool]] = {
    "single elements": ((200_000,), "float64", FixedShardsPartitioner(2), 5, True),
    "rows of more than one message": ((3, MOVE_BYTES // 4 + 1000), "float32", FixedShardsPartitioner(2), 3, False),
    "cut along the columns": ((900, 40), "int64", lambda shape, dtype: [1, 3], 4, True),
    "matrices": ((500, 4, 5), "complex64", FixedShardsPartitioner(2), 3, False),
    "by modulo": ((3000, 4), "float16", ModuloPartitioner(2), 7, True),
    "no elements": ((30, 0), "float32", FixedShardsPartitioner(2), 3, True),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_after_it_was_copied(job: Job, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied once more, with whichever rows are on its pages; the rest is not."""
    shape, dtype, partitioner, shards, by_rows = KINDS[kind]
    monkeypatch.setattr(decision, "SMALL_BYTES", 0)
    monkeypatch.setattr(variable_cut, "MAX_ROWS", 100)
    values = (np.arange(np.prod(shape)) % 1009).astype(dtype).reshape(shape)
    changed = [0, shape[0] // 3, shape[0] - 1]
    with job.strategy.scope():
        variable = Variable(values, partitioner=partitioner)

    def reach(point: str) -> None:
        if point == "coordinator.reshard.ahead":
            for row in changed:
                values[row] = row + 1
                variable.scatter_update(IndexedSlices(values[row : row + 1], [row]))

    monkeypatch.setattr(resharder, "reach", reach)
    cut = ProposedCut(variable.name, 0, 0.9, variable.num_shards, shards, by_rows)
    (made,) = job.strategy.apply(replace(job.strategy.plan("bytes"), moves=(), cuts=(cut,))).cuts
    np.testing.assert_array_equal(variable.numpy(), values)
    assert variable.num_shards == shards
    assert values.nbytes <= made.nbytes <= 2 * values.nbytes
    if kind == "single elements":
        assert made.nbytes <= values.nbytes + 3 * page_elements(shape) * values.itemsize
