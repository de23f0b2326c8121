"""Rows of variables of all kinds get into new shards as they are, also those that change after they were copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.support import Job, running_job

from pscluster.coordinator.api import (
    Checkpoint,
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    ModuloPartitioner,
    Variable,
    optimizers,
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
    """They are those that have an element there, whether a page has several rows, or a row several pages."""
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("restores", [False, True])
def test_arrays_that_come_or_go_after_rows_were_copied(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    """An average that begins on one old shard is in all new ones; a slot that a restore ends is in none."""
    monkeypatch.setattr(decision, "SMALL_BYTES", 0)
    values, name = np.arange(400.0).reshape(100, 4), f"average {restores}"
    with job.strategy.scope():
        variable = Variable(values, partitioner=FixedShardsPartitioner(2), name=name)
        averaging = optimizers.SGD(0.5, use_ema=True)
        momentum = optimizers.SGD(0.5, momentum=0.9)
    Checkpoint(job.strategy).write(str(tmp_path / "before"))
    momentum.apply_gradients([(np.ones(values.shape), variable)])

    def reach(point: str) -> None:
        if point == "coordinator.reshard.ahead":
            if restores:
                Checkpoint(job.strategy).read(str(tmp_path / "before"))
            averaging.apply_gradients([(IndexedSlices(np.ones((1, 4)), [0]), variable)])

    monkeypatch.setattr(resharder, "reach", reach)
    cut = ProposedCut(name, 0, 0.9, 2, 3, by_rows=True)
    job.strategy.apply(replace(job.strategy.plan("bytes"), moves=(), cuts=(cut,)))
    expected = values - (0.0 if restores else 0.5)
    average = averaging.average(variable).numpy()
    np.testing.assert_array_equal(average[1:], expected[1:])
    assert (average[0] != expected[0]).all()
    momentum.apply_gradients([(np.ones(values.shape), variable)])
    expected -= 0.5 if restores else 0.95
    expected[0] -= 0.5
    np.testing.assert_allclose(variable.numpy(), expected, err_msg="momentum begins anew after a restore only")
