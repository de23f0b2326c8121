"""Encoded gradients while processes die: each counts once, and what its encoding has lost is kept where it belongs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from tests.conftest import wait_for_file
from tests.faults.support import running_job

from pscluster.coordinator.api import EmbeddingTable, IndexedSlices, Variable, initializers, optimizers

FUNCTIONS, WORKERS = 300, 2


@pytest.mark.timeout(180)
def test_gradients_count_once(tmp_path: Any) -> None:
    """Servers and a worker are killed in the midst of pushes: the sums are true within a quantum a worker process."""
    rows = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    whole = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
    ids = np.array([1, 3, 5, 6])
    with running_job(num_ps=2, num_workers=WORKERS, shards=2, durability="log") as job:
        with job.strategy.scope():
            table = Variable(np.zeros((8, 8), np.float32), name="table", wire_dtype="int8")
            dense = Variable(np.zeros((6, 5), np.float32), name="dense", wire_dtype="bfloat16", push_top_k=0.5)
            exact = Variable(np.zeros(2, np.float32), name="exact")
            by_id = EmbeddingTable(8, initializer=initializers.Zeros(), name="by id", wire_dtype="int8")
            sgd = optimizers.SGD(1.0)

        def step() -> tuple[int, int]:
            slices = IndexedSlices(rows, ids)
            of_ids = IndexedSlices(rows, ids << 50)
            ones = np.ones(2, np.float32)
            sgd.apply_gradients([(slices, table), (whole, dense), (ones, exact), (of_ids, by_id)])
            return os.getpid(), table.client.metrics.residual_rows

        def residuals(path: str) -> tuple[int, int]:
            wait_for_file(path)
            return os.getpid(), table.client.metrics.residual_rows

        values = [job.coordinator.schedule(step) for _ in range(FUNCTIONS)]
        for share, servers in ((60, (0,)), (120, (1,)), (180, (0, 1))):
            job.until_done(values, share)
            old = {index: job.cluster.kill("ps", index) for index in servers}
            for index, pid in old.items():
                job.cluster.wait_restarted("ps", index, pid)
        job.until_done(values, 240)
        killed = job.kill(0)
        job.join()
        assert exact.numpy().tolist() == [-FUNCTIONS] * 2
        assert sgd.iterations == FUNCTIONS
        # Of the process that was killed, what was kept is lost, and a push that it had repeated elsewhere.
        processes = WORKERS + 2
        true = np.zeros((8, 8))
        true[ids] = rows.astype(np.float64) * FUNCTIONS
        for held, wanted in ((table.numpy(), true), (by_id.lookup(ids << 50), true[ids])):
            error = np.abs(held + wanted)
            assert 0 < error.max() <= processes * np.abs(rows).max() / 127
        # An element is pushed once it is among the largest half: what is kept of it is not above a few gradients.
        error = np.abs(dense.numpy() + whole.astype(np.float64) * FUNCTIONS)
        assert error.max() <= processes * 4 * np.abs(whole).max()
        assert np.median(error / np.abs(whole) / FUNCTIONS) < 0.1

        job.until_up(WORKERS)
        one = [job.coordinator.schedule(residuals, args=(str(tmp_path / "go"),)) for _ in range(WORKERS)]
        (tmp_path / "go").touch()
        job.join()
        kept = dict(job.coordinator.fetch(one))
        assert killed not in kept
        # 4 rows each, and 2 shards of the dense one: a process that has pushed has them, a new one begins without.
        assert set(kept.values()) <= {0, 10}
