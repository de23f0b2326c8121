"""Steps that overlap, while workers and servers are killed and functions raise or are stopped: updates count once."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from tests.faults.steps import die_once, first_time, note, wait_for
from tests.faults.support import kill_when_up, running_job
from tests.waiting import TIMEOUT

from pscluster.coordinator.api import IndexedSlices, Variable, embedding_lookup, optimizers

ROWS = 40


def test_updates_count_once_whatever_dies() -> None:
    """400 functions count to exactly 400, while workers die in lookups, between pushes and after the last one, and a
    server and workers are killed from outside; some functions raise, and run again. Every other one takes a part."""
    functions = 400
    with running_job(num_ps=2, num_workers=2, shards=2, durability="log") as job:
        with job.strategy.scope():
            table = Variable(np.zeros((ROWS, 2), np.float32), name="table")
            dense = Variable(np.zeros((4, 3), np.float32), name="dense")
            sgd = optimizers.SGD(1.0)
        folder = job.folder

        def number(given: Any) -> int:
            return given if isinstance(given, int) else int(next(given))

        def named(given: Any) -> Any:
            if (at := number(given)) in (50, 121):
                die_once(folder, f"named-{at}")
            return [(table, np.arange(at % 10, ROWS))]

        def step(given: Any) -> int:
            at, ids = number(given), np.arange(ROWS)
            rows = embedding_lookup(table, ids[at % 10 :])
            assert rows.shape == (ROWS - at % 10, 2)
            sgd.apply_gradients([(IndexedSlices(-np.ones((ROWS, 2), np.float32), ids), table)])
            if at in (70, 151):
                die_once(folder, f"between-{at}")
            dense.assign_add(np.ones((4, 3), np.float32))
            if at in (90, 171):
                die_once(folder, f"after-{at}")
            if at in (100, 210) and first_time(folder, f"raised-{at}"):
                raise ValueError("once")
            return at

        parts = iter(job.coordinator.distribute_dataset(np.arange(1, functions, 2)))
        values = [
            job.coordinator.schedule(step, args=(next(parts) if at % 2 else at,), lookups=named, retries=1)
            for at in range(functions)
        ]
        generator = random.Random(5)
        for count, (role, index) in zip((200, 250, 300), (("ps", 0), ("worker", 1), ("ps", 1)), strict=True):
            job.until_done(values, count + generator.randrange(20))
            kill_when_up(job.cluster, role, index)
        job.join()
        assert job.coordinator.fetch(values) == list(range(functions))
        assert set(table.numpy().reshape(-1).tolist()) == {functions}
        assert set(dense.numpy().reshape(-1).tolist()) == {functions}
        assert sgd.iterations == functions
        assert not any(first_time(folder, f"{name}") for name in ("named-50", "between-151", "after-90", "raised-210"))

        # In a training, also while the first rows of the next function are fetched.
        def train(at: Any) -> float:
            if at == 114:  # the last step of a function of five
                time.sleep(0.01)  # in which rows of the next function may be fetched
                die_once(folder, f"last-{at}")
            step(int(at) + functions)
            return float(at)

        def rows_of(at: Any) -> Any:
            if at == 75:
                die_once(folder, f"rows-{at}")
            return [(table, np.arange(int(at) % 10, ROWS))]

        data = job.coordinator.distribute_dataset(np.arange(200))
        history = job.coordinator.fit(train, data, lookups=rows_of, overlap=1, steps_per_execution=5, verbose=0)
        assert history.history["loss"] == [np.arange(200).mean()]
        assert set(table.numpy().reshape(-1).tolist()) == {functions + 200}
        assert not any(first_time(folder, name) for name in ("last-114", "rows-75"))


def test_a_worker_that_dies_in_the_next_function_costs_the_first_nothing() -> None:
    """The first has returned, with pushes under way, when the next one kills the worker: it is not what fails."""
    with running_job(num_workers=1, max_attempts=2) as job:
        with job.strategy.scope():
            table = Variable(np.zeros((ROWS, 2), np.float32), name="table")
        folder = job.folder

        def step(at: int) -> int:
            if at == 1:
                die_once(folder, "one")
                die_once(folder, "two")
            for row in range(30):
                table.scatter_add(IndexedSlices(np.ones((1, 2), np.float32), [row]))
            return at

        values = [job.coordinator.schedule(step, args=(at,), lookups=lambda at: [(table, [at])]) for at in range(3)]
        with pytest.raises(Exception, match="worker"):
            job.join()
        assert values[0].fetch(TIMEOUT) == 0
        assert table.numpy()[0, 0] in (1, 2)  # the third may have begun before


def test_a_function_is_stopped_while_a_server_is_down() -> None:
    """It has returned, and its push waits for a server; cancelled, it ends, and nothing of it is applied later."""
    with running_job(num_ps=1, num_workers=1, restart=False, durability="log") as job:
        with job.strategy.scope():
            table = Variable(np.zeros((ROWS, 2), np.float32), name="table")
        folder = job.folder

        def step(at: int) -> int:
            if at:
                note(folder, "begun")
                wait_for(folder, "down")
            table.scatter_add(IndexedSlices(np.ones((1, 2), np.float32), [0]))
            return at

        def run(at: int) -> Any:
            return [(table, [at])]

        job.coordinator.schedule(step, args=(0,), lookups=run).fetch(TIMEOUT)
        value = job.coordinator.schedule(step, args=(1,), lookups=run)
        wait_for(folder, "begun")
        job.cluster.kill("ps", 0)
        note(folder, "down")
        job.coordinator.cancel([value])
        job.cluster.restart("ps", 0)
        job.join()
        assert table.numpy()[0, 0] in (1, 2)
        before = table.numpy()
        assert job.coordinator.schedule(lambda: "next").fetch(TIMEOUT) == "next"
        assert np.array_equal(before, table.numpy())
