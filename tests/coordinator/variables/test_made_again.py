"""Variables that were deleted and made again under the same name, as functions on workers see them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import Everywhere
from tests.faults.support import running_job
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    EmbeddingTable,
    IndexedSlices,
    ParameterServerStrategy,
    ShardedVariable,
    Variable,
    initializers,
    metrics,
    optimizers,
)
from pscluster.coordinator.api import Checkpoint
from pscluster.core.errors import UnknownVariableError


def made_again(strategy: ParameterServerStrategy, old: Variable, make: Callable[[], Any]) -> Any:
    """Delete a variable, and make another one of its name."""
    strategy.delete_variable(old)
    with strategy.scope():
        return make()


def test_arguments_captures_and_results(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator, everywhere: Everywhere
) -> None:
    """Workers that had the old one use the new one, of another shape and type; the old one is an error that says so."""
    with strategy.scope():
        old = Variable(np.ones(3, np.float32), name="v")
        join = ShardedVariable([Variable(np.ones(3), name="other"), Variable(np.ones(3), name="joined")])

    def read_old(variable: Variable) -> Any:
        return [variable.numpy().tolist(), old.numpy().tolist(), join.numpy().tolist()]

    assert everywhere(coordinator, read_old, old)[1] == [[1] * 3, [1] * 3, [1] * 6]
    new = made_again(strategy, old, lambda: Variable(np.zeros((2, 2), np.int64), name="v"))
    again = lambda: Variable(np.full(1, 2.0), name="joined")  # noqa: E731
    members = [join.variables[0], made_again(strategy, join.variables[1], again)]
    join_again = ShardedVariable(members)

    def read_new(variable: Variable) -> Any:
        return [variable.numpy().tolist(), new.assign_add(1).shape, join_again.numpy().tolist()]

    zeros = [[0, 0], [0, 0]]
    assert everywhere(coordinator, read_new, new)[0][1:] == [(2, 2), [1, 1, 1, 2]]
    assert (new.numpy() == 2).all()
    assert coordinator.schedule(lambda: new).fetch(TIMEOUT) is new
    assert coordinator.schedule(lambda: strategy.read([new])[0].tolist() != zeros).fetch(TIMEOUT)
    for use in (lambda: old.numpy(), lambda: old.assign([0, 0, 0])):
        with pytest.raises(UnknownVariableError, match="variable 'v' was deleted"):
            coordinator.schedule(use).fetch(TIMEOUT)
        with pytest.raises(UnknownVariableError):
            coordinator.join(TIMEOUT)
        with pytest.raises(UnknownVariableError, match="variable 'v' was deleted: use the one that was made"):
            use()
    with pytest.raises(UnknownVariableError, match="variables that are not in this job: v"):
        coordinator.evaluate(
            lambda _: old.numpy()[:1],
            coordinator.distribute_dataset(np.arange(4.0)),
            {"mean": metrics.Mean()},
            concurrent=True,
        )


def test_workers_keep_nothing_of_a_variable_that_was_deleted(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator, everywhere: Everywhere
) -> None:
    """A job may make and delete variables for weeks; those that are left are used as before."""
    with strategy.scope():
        optimizer = optimizers.SGD(1.0, momentum=0.5, name="of those that go")
        gone, stays = (Variable(np.zeros(3), name=name) for name in ("goes", "stays"))
    join = ShardedVariable([gone, stays], name="goes with it")

    def use(*handles: Variable) -> Any:
        return [handle.numpy().tolist() for handle in handles]

    def kept() -> Any:
        return sorted(
            {item.name for item in gc.get_objects() if isinstance(item, Variable) and item.name[:4] in ("goes", "stay")}
        )

    optimizer.apply_gradients([(np.zeros(3), gone)])
    everywhere(coordinator, use, gone, stays, join, optimizer.slot(gone, "momentum"))
    assert everywhere(coordinator, kept)[0] == ["goes", "goes with it", "goes/of those that go/momentum", "stays"]
    strategy.delete_variable(gone)
    until(lambda: all(names == ["stays"] for names in everywhere(coordinator, kept)), "workers have let go of it")
    assert everywhere(coordinator, use, stays)[0] == [[0] * 3]
    with pytest.raises(UnknownVariableError, match="goes"):
        coordinator.schedule(use, (gone,)).fetch(TIMEOUT)
    with pytest.raises(UnknownVariableError):
        coordinator.join(TIMEOUT)


def test_slots_and_tables_through_a_death_and_a_restore(tmp_path: Path) -> None:
    """The optimizer keeps its slots beside the new ones; a new worker, and a restored checkpoint, have them as well."""
    with running_job(num_ps=2, num_workers=1) as job:
        strategy, schedule = job.strategy, job.coordinator.schedule
        with strategy.scope():
            optimizer = optimizers.SGD(1.0, momentum=0.5, name="sgd")
        ones = np.ones(2, np.float32)

        def make() -> tuple[Variable, EmbeddingTable]:
            with strategy.scope():
                dense = Variable(np.zeros(2, np.float32), name="dense")
                rows = EmbeddingTable(2, name="rows", capacity=10, initializer=initializers.Constant(5.0))
            return dense, rows

        def train(dense: Variable, rows: EmbeddingTable) -> Any:
            optimizer.apply_gradients([(ones, dense), (IndexedSlices(ones[None], [7]), rows)])
            slot = optimizer.slot(dense, "momentum")
            return dense.numpy()[0], slot.numpy()[0], rows.lookup([7])[0, 0], len(rows)

        old = make()
        assert schedule(train, old).fetch(TIMEOUT) == (-1, -1, 4, 1)
        assert schedule(train, old).fetch(TIMEOUT) == (-2.5, -1.5, 2.5, 1)
        for variable in old:
            strategy.delete_variable(variable)
        new = make()
        slot = optimizer.slot(new[0], "momentum")
        assert schedule(train, new).fetch(TIMEOUT) == (-1, -1, 4, 1)
        saved = Checkpoint(strategy).write(str(tmp_path / "saved"))
        job.kill(0)
        assert schedule(train, new).fetch(TIMEOUT) == (-2.5, -1.5, 2.5, 1)
        assert schedule(lambda: slot.numpy()[0]).fetch(TIMEOUT) == -1.5
        for variable in new:
            strategy.delete_variable(variable)
        newest = make()
        assert schedule(train, newest).fetch(TIMEOUT) == (-1, -1, 4, 1)
        assert schedule(train, newest).fetch(TIMEOUT) == (-2.5, -1.5, 2.5, 1)
        Checkpoint(strategy).read(saved)
        assert schedule(train, newest).fetch(TIMEOUT) == (-2.5, -1.5, 2.5, 1)
