"""Several clients: the same programs as functions that run on two workers with three devices each."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.armed import armed_cluster
from tests.waiting import TIMEOUT

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, PerReplica, replica_context
from pscluster.core.errors import MisuseError
from pscluster.spmd import UNSHARDED, Layout
from pscluster.spmd.execution import clients

GRID = [("x", 3), ("y", 2)]


def mesh_of_all(dims: Any = GRID, **options: Any) -> spmd.Mesh:
    """The mesh of a client."""
    return spmd.create_distributed_mesh(dims, devices_per_task=3, **options)


def together(coordinator: ClusterCoordinator, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What each client returns."""
    return [value.fetch(TIMEOUT) for value in coordinator.schedule_together(fn, args=args, **options)]


def blocks(tensor: Any) -> list[Any]:
    """The components of this client's devices."""
    return [block.tolist() for block in spmd.unpack(tensor)]


def overview() -> dict[str, Any]:
    """The programs of the overview; each client sees its own three components."""
    line, grid = mesh_of_all([("x", 6)]), mesh_of_all()
    numbers = np.arange(6).reshape(3, 2)
    sharded: Any = spmd.distribute(numbers, Layout(["x", "y"], grid))
    hybrid = sharded.relayout(["x", UNSHARDED])
    a, b = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[6, 5], [4, 3], [2, 1]])
    left: Any = spmd.distribute(a, Layout.replicated(line, 2))
    every = left @ spmd.distribute(b, Layout.replicated(line, 2))
    contracted: Any = spmd.distribute(a, Layout([UNSHARDED, "x"], grid))
    summed = contracted @ spmd.distribute(b, Layout(["x", UNSHARDED], grid))
    both: Any = spmd.distribute(a, Layout(["y", "x"], grid))
    product = both @ spmd.distribute(b, Layout(["x", UNSHARDED], grid))
    rank = replica_context().replica_id
    packed: Any = spmd.pack([[[3 * rank + nth]] for nth in range(3)], Layout(["x", "y"], grid))
    with pytest.raises(spmd.ShardedGatherError):
        hybrid.numpy()
    return {
        "sharded": blocks(sharded),
        "hybrid": blocks(hybrid),
        "whole": [array.full().tolist() for array in (sharded, hybrid, packed)],
        "replicated": (every.numpy().tolist(), float(summed.sum())),
        "product": (product.layout.sharding_specs, blocks(product)),
        "ones": blocks(spmd.ones((6, 4), layout=Layout(["x", "y"], grid))),
        "normal": spmd.random.normal((6, 4), seed=1, layout=Layout(["x", "y"], grid)).full(),
        "shards": [(str(shard.device), shard.replica, shard.fetch().tolist()) for shard in hybrid.shards],
        "printed": str(sharded),
    }


def test_the_overview(workers: ClusterCoordinator) -> None:
    """Values are those of one client; each has its own components."""
    first, second = together(workers, overview)
    assert first["sharded"] + second["sharded"] == [[[number]] for number in range(6)]
    assert first["hybrid"] + second["hybrid"] == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]], [[4, 5]], [[4, 5]]]
    assert first["product"] == (["y", UNSHARDED], [[[20, 14]], [[56, 41]], [[20, 14]]])
    assert second["product"] == (["y", UNSHARDED], [[[56, 41]], [[20, 14]], [[56, 41]]])
    here = spmd.create_mesh(GRID)
    normal = spmd.random.normal((6, 4), seed=1, layout=Layout.replicated(here, 2)).numpy()
    for client, seen in enumerate((first, second)):
        assert seen["whole"] == [[[0, 1], [2, 3], [4, 5]]] * 3
        assert seen["replicated"] == ([[20, 14], [56, 41]], 131.0)
        assert seen["ones"] == [[[1.0, 1.0], [1.0, 1.0]]] * 3
        np.testing.assert_array_equal(seen["normal"], normal)
        assert [shard[0] for shard in seen["shards"]] == [f"/job:worker/task:{client}/device:CPU:{n}" for n in range(3)]
        assert f"'/job:worker/task:{client}/device:CPU:0': [[{3 * client}]]" in seen["printed"]
    assert [shard[1] for shard in first["shards"] + second["shards"]] == [0, 1, 0, 1, 0, 1]


@spmd.function
def scaled(a: Any, b: Any) -> Any:
    """A traced program."""
    scores = a @ b
    return scores / scores.sum(axis=1, keepdims=True)


def uneven(rows: int) -> Any:
    """A traced program of arrays that do not divide evenly, twice, and eager ones; devices in another order."""
    devices = [f"/job:worker/task:{task}/device:CPU:{number}" for number in range(2) for task in (1, 0)]
    mesh = spmd.create_distributed_mesh({"x": 2, "y": 2}, devices)
    assert spmd.create_distributed_mesh({"x": 2, "y": 2}, devices) == mesh
    host = np.random.default_rng(3).random((rows, 7))
    a: Any = spmd.distribute(host, Layout(["x", "y"], mesh))
    b: Any = spmd.distribute(host.T, Layout(["y", None], mesh))
    results = [scaled(a, b).full() for _ in range(2)]
    if replica_context().replica_id:
        spmd.unpack(a)  # of which each client may do its own
    ordered: Any = np.sort(a, axis=0)
    return [*results, (a + a * 2).sum(axis=0).full(), ordered.relayout([None, "x"]).full()]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_programs(workers: ClusterCoordinator, order: list[int]) -> None:
    """Traced and eager ones, wherever the clients run."""
    host = np.random.default_rng(3).random((5, 7))
    scores = host @ host.T
    wanted = [scores / scores.sum(axis=1, keepdims=True)] * 2 + [3 * host.sum(axis=0), np.sort(host, axis=0)]
    for results in together(workers, uneven, 5, workers=order):
        for found, expected in zip(results, wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def disagree(dims: Any, devices: Any, name: str) -> Any:
    """A mesh that clients describe differently."""
    return str(spmd.create_distributed_mesh(dims, devices, name=name))


SWAPPED = ["/job:worker/task:1/device:CPU:0", "/job:worker/task:0/device:CPU:0"]


@pytest.mark.parametrize(
    ("dims", "devices", "names", "error"),
    [
        ([{"x": 2}, {"y": 2}], [None, None], ["", ""], "client 1 gives dimensions y=2, and client 0 x=2"),
        ([{"x": 2}, {"x": 2}], [None, None], ["a", "b"], "client 1 calls it 'b', and client 0 'a'"),
        (
            [{"x": 2}, {"x": 2}],
            [None, SWAPPED],
            ["", ""],
            "device 0 is /job:worker/task:1/device:CPU:0 for client 1, and /job:worker/task:0/device",
        ),
        ([{"x": 3}] * 2, [None] * 2, [""] * 2, "a mesh of x=3 has 3 devices, but 2 are given"),
        (
            [{"x": 1}] * 2,
            [SWAPPED[:1]] * 2,
            [""] * 2,
            "the devices are of worker 1, but the clients are worker 0",
        ),
    ],
)
def test_clients_that_disagree(workers: ClusterCoordinator, dims: Any, devices: Any, names: Any, error: str) -> None:
    """All of them raise what they disagree on."""
    args = (PerReplica(dims), PerReplica(devices), PerReplica(names))
    for value in workers.schedule_together(disagree, args=args):
        with pytest.raises(spmd.MeshError, match=re.escape(error)):
            value.fetch(TIMEOUT)
    with pytest.raises(spmd.MeshError):
        workers.join()


def diverge(factor: float, shape: tuple[int, int]) -> Any:
    """Operations that differ between clients."""
    mesh = mesh_of_all()
    a: Any = spmd.ones(shape, layout=Layout(["x", None], mesh)) * factor
    return a.sum().full()


def pack_other(components: Any, specs: Any) -> Any:
    """Components that make no array."""
    return spmd.pack(components, Layout(specs, mesh_of_all())).full()


AT = r"\(after 4 operations, \w+\) at test_clients.py:\d+, where"


@pytest.mark.parametrize(
    ("fn", "args", "error", "text"),
    [
        (diverge, (PerReplica([1.0, 2.0]), (6, 2)), MisuseError, AT),
        (diverge, (1.0, PerReplica([(6, 2), (6, 3)])), MisuseError, AT),
        (pack_other, ([1.0, 2.0], [None]), spmd.PackError, "there are 2 components, but the mesh has 3 devices here"),
        (
            pack_other,
            (PerReplica([[[1.0]] * 3, [[1]] * 3]), ["x"]),
            spmd.PackError,
            "component 3 is int64, but component 0 is float64: convert one of them",
        ),
        (
            pack_other,
            (PerReplica([[[1.0], [1.0], [2.0]], [[3.0], [4.0], [4.0]]]), ["x"]),
            spmd.PackError,
            "components 2 and 3 are replicas of one block by the layout .x., but they differ",
        ),
    ],
)
def test_clients_that_part_ways(
    workers: ClusterCoordinator, fn: Any, args: Any, error: type[Exception], text: str
) -> None:
    """They say so, where they next exchange something."""
    values = workers.schedule_together(fn, args=args)
    with pytest.raises(error, match=text):
        values[0].fetch(TIMEOUT)
    with pytest.raises(error):
        workers.join()


def keep() -> int:
    """How many replicas have sessions; this one has."""
    spmd.ones((6,), layout=Layout(["x"], mesh_of_all([("x", 6)])))
    gc.collect()
    return sum(isinstance(found, clients.ClientSession) for found in gc.get_objects())


def seeded(seed: int | None) -> Any:
    """Two random arrays, without seeds of their own."""
    if seed is not None:
        spmd.random.set_seed(seed)
    layout = Layout(["x"], mesh_of_all([("x", 6)]))
    return [spmd.random.uniform((7,), layout=layout).full().tolist() for _ in range(2)]


def test_one_seed_for_all(workers: ClusterCoordinator) -> None:
    """Clients that set one make the same arrays as anyone else; without one, they are told to."""
    values = workers.schedule_together(seeded, args=(None,))
    with pytest.raises(MisuseError, match=r"set_seed\(\) in the function"):
        values[0].fetch(TIMEOUT)
    with pytest.raises(MisuseError):
        workers.join()
    first, second = together(workers, seeded, 5)
    layout = Layout(["x"], spmd.create_mesh({"x": 2}))
    unseeded = spmd.random.uniform((7,), layout=layout).full().tolist()
    spmd.random.set_seed(5)
    assert first == second == [spmd.random.uniform((7,), layout=layout).full().tolist() for _ in range(2)]
    assert first[0] != first[1]
    assert unseeded not in first
    with pytest.raises(ValueError, match="seed is -1"):
        spmd.random.set_seed(-1)


def leak() -> Any:
    """An array of a mesh that ends with the function."""
    return spmd.ones((6,), layout=Layout(["x"], mesh_of_all([("x", 6)])))


def not_connected(mesh: str) -> Any:
    """A mesh from elsewhere."""
    return spmd.ones((6,), layout=Layout(["x"], spmd.Mesh.from_string(mesh)))


def test_meshes_end_with_their_functions(workers: ClusterCoordinator) -> None:
    """Their arrays go, and can't be returned; meshes of the coordinator, or outside a function, are refused."""
    for _ in range(2):
        assert max(together(workers, keep)) <= 2  # the one before may still be about to end
    for fn, args, text in (
        (leak, (), "pass what its full"),
        (not_connected, (str(spmd.create_mesh([("x", 6)], coordinator=workers, devices_per_task=3)),), "not connected"),
    ):
        values = workers.schedule_together(fn, args=args)
        with pytest.raises(Exception, match=text):
            values[0].fetch(TIMEOUT)
        with pytest.raises(Exception, match=text):
            workers.join()
    with pytest.raises(MisuseError, match=r"elsewhere use create_mesh\(\)"):
        spmd.create_distributed_mesh({"x": 1})
    assert workers.schedule(alone).fetch(TIMEOUT) == [0.0, 1.0, 2.0]


def alone() -> Any:
    """A function on one worker is the only client."""
    mesh = mesh_of_all([("x", -1)])
    return spmd.arange(3.0, layout=Layout(["x"], mesh)).full().tolist()


def exchanges() -> Any:
    """A program that exchanges pieces in several ways."""
    mesh = spmd.create_distributed_mesh({"x": 2})
    a: Any = spmd.distribute(np.arange(30.0).reshape(5, 6), Layout([None, "x"], mesh))
    product = a @ spmd.distribute(np.ones((6, 3)), Layout(["x", None], mesh))
    return product.relayout([None, "x"]).relayout(["x", None]).full()


def test_a_client_dies_in_every_exchange(tmp_path: Path) -> None:
    """All clients begin again, and end right."""
    wanted = np.arange(30.0).reshape(5, 6) @ np.ones((6, 3))
    with (
        armed_cluster(tmp_path, 1, 2, revive=True) as armed,
        ParameterServerStrategy(armed.cluster, connect_timeout=TIMEOUT) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy, max_attempts=10)
        for nth in (1, 2, 3):
            fault = f"worker/worker.exchange.{'after' if nth == 2 else 'before'}=kill@{nth}"
            armed.arm(fault)
            for found in together(coordinator, exchanges):
                np.testing.assert_allclose(found, wanted)
            armed.until_struck(fault, calls=False)
