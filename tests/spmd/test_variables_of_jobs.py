"""Variables of global arrays in other jobs: what a checkpoint has of them, and strategies that can't have any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster import spmd
from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    HashPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    SynchronousStrategy,
    Variable,
)
from pscluster.core.errors import FunctionError, MisuseError
from pscluster.spmd import DVariable, Layout, optimizers

W = np.random.default_rng(1).normal(size=(7, 4))


@pytest.mark.parametrize("options", [{"backup": 1}, {"staleness": 1}])
def test_strategies_that_can_not_have_any(cluster: LocalCluster, options: Any) -> None:
    """Not all workers take part in their steps."""
    with SynchronousStrategy(cluster, **options) as synchronous:
        mesh = spmd.create_mesh({"x": 2}, coordinator=ClusterCoordinator(synchronous))
        with pytest.raises(MisuseError, match="make the strategy without backup= and staleness="):
            DVariable(W, Layout.replicated(mesh, 2))


def test_checkpoints_go_into_other_layouts(cluster: LocalCluster, tmp_path: Path) -> None:
    """Of another mesh and number of servers: values, slots and steps; it goes on as if nothing had happened."""

    def trained(specs: Any, dims: Any, restore: bool, job: LocalCluster = cluster) -> Any:
        with ParameterServerStrategy(job) as strategy:
            mesh = spmd.create_mesh(dims, coordinator=ClusterCoordinator(strategy), devices_per_task=3)
            v = DVariable(np.zeros((7, 4)) if restore else W, Layout(specs, mesh), "v")
            adam = optimizers.Adam(0.1, mesh=mesh, name="adam")
            manager = CheckpointManager(str(tmp_path), strategy=strategy)
            if restore:
                before = v + 1
                manager.restore_or_initialize()
                assert np.array_equal(before.full(), np.ones((7, 4))), "what was read before it is of that moment"
            for _ in range(2):
                adam.apply_gradients([(v * 2, v)])
            if not restore:
                manager.save().result()
                for _ in range(2):
                    adam.apply_gradients([(v * 2, v)])
            return v.full(), adam.iterations

    values, steps = trained(["x", "y"], {"x": 3, "y": 2}, restore=False)
    with LocalCluster(num_ps=1, num_workers=2) as other:
        for specs, dims, job in (
            (["x", None], {"x": 6}, other),
            ([None, "y"], {"x": 3, "y": 2}, cluster),
            ([None, None], {"x": 6}, cluster),
        ):
            again, steps_again = trained(specs, dims, True, job)
            np.testing.assert_array_equal(again, values)
            assert steps_again == steps == 4


def test_a_checkpoint_while_a_function_has_failed(cluster: LocalCluster, tmp_path: Path) -> None:
    """It raises the function's own error, which `join` still does; after that it has what was asked for before."""

    def fails() -> None:
        raise KeyError("this one")

    with ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        mesh = spmd.create_mesh({"x": 2}, coordinator=coordinator)
        v = DVariable(W, Layout.replicated(mesh, 2), "v")
        manager = CheckpointManager(str(tmp_path), strategy=strategy)
        v.assign_add(v * 0)
        spmd.barrier(mesh)
        coordinator.schedule(fails).wait()
        v.assign_add(v)
        with pytest.raises(FunctionError, match="this one") as caught:
            manager.save()
        assert isinstance(caught.value, KeyError)
        with pytest.raises(KeyError, match="this one"):
            coordinator.join()
        manager.save().result()
        v.assign_add(v)  # before the restore, which takes its place
        manager.restore_or_initialize()
        assert np.array_equal(v.full(), 2 * W)


def test_rows_that_are_hashed_are_no_blocks() -> None:
    """A variable of another kind that the job has, cut into as many shards, does not become a global one."""
    with LocalCluster(1, 1, log_level="ERROR") as other:
        first = ParameterServerStrategy(other, job_name="job")
        with first.scope():
            v = Variable(W, name="v", partitioner=HashPartitioner(2))
        layout_blocks = v.partition.blocks
        with ParameterServerStrategy(other, job_name="job", take_over=True) as second:
            mesh = spmd.create_mesh({"x": 2}, coordinator=ClusterCoordinator(second), devices_per_task=2)
            layout = Layout(["x", None], mesh)
            assert layout.partition(W.shape).blocks == layout_blocks
            with pytest.raises(MisuseError, match="is on the servers already, in other shards"):
                DVariable(np.zeros_like(W), layout, "v")
        first.close()


def test_functions_on_workers_make_none(cluster: LocalCluster) -> None:
    """Their arrays end with them."""

    def make() -> str:
        mesh = spmd.create_distributed_mesh({"x": 2})
        try:
            DVariable(np.ones(2), Layout.replicated(mesh, 1), "v")
        except MisuseError as error:
            return str(error)
        return ""

    with ParameterServerStrategy(cluster) as strategy:
        for value in ClusterCoordinator(strategy).schedule_together(make):
            assert value.fetch().endswith("whose arrays end with it: make it in the script")
