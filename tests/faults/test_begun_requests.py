"""Requests that were sent, but whose replies no thread waits for yet, as in steps that overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.faults.support import kill_when_up, running_job

from pscluster.coordinator.api import ParameterServerStrategy, Variable
from pscluster.core.phases import Begun
from pscluster.ps.handles.rows.fetched_rows import FetchedRows
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import ps_pb2

IDS = np.array([39, 0, 39, 20])


def adding_one(strategy: ParameterServerStrategy, variable: Any) -> Begun[None]:
    """Add 1 to all elements; the requests have been sent."""
    updates = variable.shard_updates(ps_pb2.ADD, np.ones(variable.shape))
    return Begun(strategy.client.updater._applying(updates, None))


def fetching(table: Variable, whole: Variable) -> tuple[FetchedRows, Begun[None]]:
    """Fetch some rows of a table, and another variable; if both are small, the requests have been sent."""
    fetched = FetchedRows()
    fetched.name([(table, IDS), whole])
    return fetched, Begun(fetched.fetching())


def test_whatever_happens_to_servers_in_between() -> None:
    """They move shards, are killed, and come back: what was asked is answered, and what was pushed counts once."""
    with running_job(num_ps=2, num_workers=1, shards=2, durability="log") as job:
        with job.strategy.scope():
            table = Variable(np.zeros((40, 2), np.float32), name="table")
            dense = Variable(np.zeros(3, np.float32), name="dense")

        def move() -> None:
            for shard in (*table.variables, *dense.variables):
                job.strategy.move_shard(shard, 1 - shard.owners[0])

        def kill_both() -> None:
            for index in (0, 1):
                kill_when_up(job.cluster, "ps", index)

        between: list[Callable[[], Any]] = [
            lambda: None,
            move,
            lambda: kill_when_up(job.cluster, "ps", 0),
            kill_both,
            lambda: job.strategy.client._servers[1].drop_sessions(),
        ]
        for value, happens in enumerate(between, 1):
            push = adding_one(job.strategy, table)
            assert push.is_under_way
            happens()
            push.finish()
            rows, pull = fetching(table, dense)
            assert pull.is_under_way
            happens()
            pull.finish()
            taken, whole = rows.take(table, IDS), rows.take_whole([dense.id])
            assert taken is not None
            assert taken.tolist() == [[value, value]] * 4
            assert whole is not None
            assert whole[0].tolist() == [0, 0, 0]


def test_those_that_are_given_up_leave_no_reply_behind(sharding_strategy: ParameterServerStrategy) -> None:
    """Later requests get their own answers. What is too large for one message is sent only when it is finished."""
    with sharding_strategy.scope():
        table = Variable(np.arange(80, dtype=np.float32).reshape(40, 2))
        dense = Variable(np.zeros(3, np.float32))
        large = Variable(np.zeros(SESSION_BYTES, np.float32))
    for begun in (fetching(table, dense)[1], adding_one(sharding_strategy, dense)):
        assert begun.is_under_way
        begun.close()
        np.testing.assert_array_equal(table.sparse_read(IDS), table.numpy()[IDS])
    for variable in (large, dense):
        rows, begun = fetching(table, variable)
        assert begun.is_under_way == (variable is dense)
        begun.finish()
        np.testing.assert_array_equal(rows.take(table, IDS), table.numpy()[IDS])
        (whole,) = rows.take_whole([variable.id]) or []
        np.testing.assert_array_equal(whole, variable.numpy())
    push = adding_one(sharding_strategy, large)
    assert not push.is_under_way
    assert not large.numpy().any()
    push.finish()
    assert large.numpy().all()
