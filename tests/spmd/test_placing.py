"""Arrays to the devices and back: the values that the overview of DTensor prints, on one process and on two workers."""

import gc
from typing import Any

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts
from tests.spmd.conftest import MakeMesh
from tests.waiting import TIMEOUT

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.spmd import UNSHARDED, Layout
from pscluster.spmd.meshes import session_of
from pscluster.worker.programs.interpreter import run_program
from pscluster.worker.programs.program import Numbers, encode
from pscluster.worker.programs.store import BlockStore

TALL = np.arange(6, dtype=np.int32).reshape(3, 2)


def components(tensor: spmd.DTensor) -> list[Any]:
    """The values of all devices."""
    return [component.tolist() for component in spmd.unpack(tensor)]


def test_the_anatomy_of_an_array(line: spmd.Mesh) -> None:
    """Shape, type and layout are those of the whole; every device has a component of the same rank."""
    layout = Layout([UNSHARDED], line)
    tensor = spmd.copy_to_mesh(np.array([0, 1], np.int32), layout)
    assert (tensor.shape, tensor.dtype.name, tensor.ndim, tensor.size, len(tensor)) == ((2,), "int32", 1, 2, 2)
    assert spmd.fetch_layout(tensor) == layout
    assert spmd.is_dtensor(tensor)
    assert not spmd.is_dtensor(TALL)
    assert components(tensor) == [[0, 1]] * 6
    assert tensor.numpy().tolist() == [0, 1]
    spmd.check_layout(tensor, layout)
    with pytest.raises(spmd.LayoutError, match="the layout is"):
        spmd.check_layout(tensor, Layout(["x"], line))


def test_printing(grid: spmd.Mesh) -> None:
    """A replicated array shows its value once, a sharded one that of every device; large ones are not fetched."""
    one = spmd.distribute(np.array([0, 1], np.int32), Layout.replicated(grid, 1))
    assert str(one) == f'DTensor([0 1], layout="sharding_specs:unsharded, mesh:{grid}", shape=(2,), dtype=int32)'
    sharded = spmd.distribute(TALL, Layout(["x", "y"], grid))
    values = ", ".join(f"'{device}': [[{number}]]" for number, device in enumerate(grid.devices))
    assert str(sharded).startswith("DTensor({" + values + "}, layout=")
    assert repr(sharded) == "<DTensor of shape (3, 2), int32, <Layout [x, y] of mesh x=3, y=2>>"
    assert "<5,000 elements>" in str(spmd.zeros(5000, layout=Layout(["x"], grid)))


def test_components_of_each_layout(grid: spmd.Mesh) -> None:
    """Fully sharded, replicated, and sharded over one dimension of two."""
    wanted: list[tuple[list[Any], list[Any]]] = [
        (["x", "y"], [[[k]] for k in range(6)]),
        ([None, None], [[[0, 1], [2, 3], [4, 5]]] * 6),
        (["x", None], [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]], [[4, 5]], [[4, 5]]]),
    ]
    for specs, blocks in wanted:
        layout = Layout(specs, grid)
        assert components(spmd.distribute(TALL, layout)) == blocks
        packed = spmd.pack(blocks, layout)
        assert packed.layout == layout
        np.testing.assert_array_equal(packed.full(), TALL)


def test_a_sharded_array_is_not_gathered_by_accident(grid: spmd.Mesh) -> None:
    """`numpy()` and whatever else would gather it raise; `full()` gathers."""
    replicated = spmd.distribute(TALL, Layout.replicated(grid, 2))
    np.testing.assert_array_equal(replicated.numpy(), TALL)
    np.testing.assert_array_equal(np.asarray(replicated), TALL)
    for specs in (["x", "y"], ["x", None], [None, "y"]):
        sharded = spmd.distribute(TALL, Layout(specs, grid))
        for gather in (sharded.numpy, sharded.tolist, lambda of=sharded: np.asarray(of), lambda of=sharded: bool(of)):
            with pytest.raises(spmd.ShardedGatherError, match="call full"):
                gather()
        np.testing.assert_array_equal(sharded.full(), TALL)
    with pytest.raises(spmd.ShardedGatherError, match="iteration over axis 0, which is sharded over 'x'"):
        iter(spmd.distribute(TALL, Layout(["x", None], grid)))
    scalar = spmd.distribute(3.5, Layout([], grid))
    assert (float(scalar), int(scalar), bool(scalar), complex(scalar), scalar.item()) == (3.5, 3, True, 3.5, 3.5)
    with pytest.raises(
        MisuseError, match=r"does not change: array\.at\[index\]\.set\(value\) makes another.*DVariable"
    ):
        replicated[0] = 1


@pytest.mark.parametrize("shape", [(3, 2), (7, 5), (2, 1), (0, 3)])
def test_relayout(grid: spmd.Mesh, shape: tuple[int, ...]) -> None:
    """Between all layouts, also of lengths that the mesh does not divide."""
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    layouts = all_layouts(grid, 2)
    tensor = spmd.distribute(array, layouts[0])
    for layout in [*layouts, *reversed(layouts)]:
        tensor = spmd.relayout(tensor, layout)
        assert tensor.layout == layout
        np.testing.assert_array_equal(tensor.full(), array)
    assert tensor.relayout([spmd.MATCH, "y"]).layout == Layout([tensor.layout.specs[0], "y"], grid)
    other = spmd.distribute(array, layouts[3])
    assert spmd.relayout_like(tensor, other).layout == layouts[3]


def test_shards(grid: spmd.Mesh) -> None:
    """Where each block is, what it is of the whole, and which replica."""
    tensor = spmd.distribute(TALL, Layout(["x", None], grid))
    shards = tensor.shards
    assert [shard.device for shard in shards] == list(grid.devices)
    assert [shard.replica for shard in shards] == [0, 1] * 3
    for shard in shards[::2]:
        np.testing.assert_array_equal(shard.fetch(), TALL[shard.index])


def test_creation(grid: spmd.Mesh) -> None:
    """Made on the devices: each component of ones((6, 4)) over a 3x2 mesh is 2x2."""
    layout = Layout(["x", "y"], grid)
    made_in_each_way: list[Any] = [
        spmd.ones((6, 4), layout=layout),
        spmd.call_with_layout(np.ones, layout, shape=(6, 4)),
        spmd.call_with_layout(spmd.ones, layout, (6, 4)),
        spmd.call_with_layout(lambda: np.ones((6, 4)), layout),
        spmd.call_with_layout(spmd.function(np.ones), layout, shape=(6, 4)),
        spmd.call_with_layout(spmd.function(lambda shape: 2 * np.ones(shape) - 1), layout, shape=(6, 4)),
    ]
    for ones in made_in_each_way:
        assert spmd.fetch_layout(ones) == layout
        assert components(ones) == [[[1.0, 1.0], [1.0, 1.0]]] * 6
    assert isinstance(spmd.call_with_layout(np.ones, None, 3), np.ndarray)
    numbers = spmd.call_with_layout(spmd.random.normal, layout, shape=(6, 4), seed=(1, 1))
    np.testing.assert_array_equal(numbers.full(), spmd.random.normal((6, 4), (1, 1), layout=layout).full())
    rows = Layout(["x"], grid)
    for made, wanted in (
        (spmd.zeros((5, 3), np.int8, layout=layout), np.zeros((5, 3), np.int8)),
        (spmd.full((5, 3), 2.5, layout=layout), np.full((5, 3), 2.5)),
        (spmd.full((5, 3), 1 + 2j, np.complex64, layout=layout), np.full((5, 3), 1 + 2j, np.complex64)),
        (spmd.full((2, 3), [1, 2, 3], layout=layout), np.full((2, 3), [1, 2, 3])),
        (spmd.arange(10, layout=rows), np.arange(10)),
        (spmd.arange(2.0, 3.0, 0.1, layout=rows), np.arange(2.0, 3.0, 0.1)),
        (spmd.arange(5, 0, -2, np.float32, layout=rows), np.arange(5, 0, -2, dtype=np.float32)),
        (spmd.eye(5, 4, 1, layout=layout), np.eye(5, 4, 1)),
        (spmd.identity(4, layout=layout), np.identity(4)),
        (spmd.linspace(0, 1, 7, layout=rows), np.linspace(0, 1, 7)),
        (spmd.empty((0, 3), layout=layout), np.empty((0, 3))),
    ):
        assert made.dtype == wanted.dtype
        np.testing.assert_array_equal(made.full(), wanted)


def test_random_values_do_not_depend_on_the_layout(grid: spmd.Mesh, line: spmd.Mesh) -> None:
    """Nor on the mesh, nor on the number of tasks: they follow from the seed."""
    makers: list[Any] = [
        spmd.random.normal,
        spmd.random.truncated_normal,
        lambda *args, **kwargs: spmd.random.uniform(*args, minval=0, maxval=1000, dtype=np.int64, **kwargs),
    ]
    here = spmd.create_mesh({"x": 1})
    for make in makers:
        wanted = make((6, 4), 11, layout=Layout.replicated(here, 2)).full()
        assert len(np.unique(wanted)) > 20
        for mesh in (grid, line):
            for layout in all_layouts(mesh, 2):
                np.testing.assert_array_equal(make((6, 4), 11, layout=layout).full(), wanted)
        assert (make((6, 4), 12, layout=Layout.replicated(here, 2)).full() != wanted).any()
        several = [make((6, 4), seed, layout=Layout(["x", None], line)).full() for seed in ((1, 1), [1, 1], (1, 2))]
        np.testing.assert_array_equal(several[0], several[1])
        assert (several[0] != several[2]).any()
    for seed in ((), (1, -1), (1, "x")):
        with pytest.raises(ValueError, match="seed is"):
            spmd.random.normal((6, 4), seed, layout=Layout(["x", None], line))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("components", "specs", "message"),
    [
        ([[0]] * 5, [None], "5 components, but the mesh has 6 devices"),
        (np.zeros(6), [None], "takes a list of components"),
        ([0] * 6, [None], r"component 0 has shape \(\), but the layout \[unsharded\] is for arrays with 1 axes"),
        ([[0], *[[0.5]] * 5], [None], "component 1 is float64, but component 0 is int64"),
        ([[0], *[[1]] * 5], [None], "components 0 and 1 are replicas of one block"),
        ([[0], [0], [1], [1], [2], [3]], ["x"], "components 4 and 5 are replicas"),
        ([[0], [0], [1], [1], [2, 3], [2, 3]], ["x"], r"component 0 has shape \(1,\), but of an array of shape \(4,\)"),
    ],
)
def test_components_that_make_no_array_are_refused(components: Any, specs: Any, message: str) -> None:
    """The error names the component, and what it should be."""
    with pytest.raises(spmd.PackError, match=message):
        spmd.pack(components, Layout(specs, spmd.create_mesh({"x": 3, "y": 2})))


def test_mistakes_are_refused_at_once(workers: ClusterCoordinator) -> None:
    """Layouts that do not fit, meshes that are not there, and what is not an array of numbers."""
    mesh = spmd.create_mesh({"x": 3, "y": 2})
    layout = Layout(["x", None], mesh)
    with pytest.raises(spmd.LayoutError, match=r"shape \(3,\) has 1 axes, but the layout has 2"):
        spmd.distribute([1, 2, 3], layout)
    with pytest.raises(spmd.LayoutError, match=r"has 1 axes, but the layout has 2"):
        spmd.ones(3, layout=layout)
    with pytest.raises(spmd.LayoutError, match="a Layout is needed, not a list"):
        spmd.distribute(TALL, ["x", None])  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="holds numbers or bools, not"):
        spmd.distribute(["a"], Layout(["x"], mesh))
    with pytest.raises(MisuseError, match="a list is not an array"):
        spmd.distribute([[1], [2, 3]], layout)
    tensor = spmd.distribute(TALL, layout)
    with pytest.raises(spmd.LayoutError, match="use distribute"):
        tensor.relayout(Layout(["x", None], spmd.create_mesh({"x": 6})))
    with pytest.raises(spmd.LayoutError, match="has 2 axes, but the layout has 1"):
        tensor.relayout(Layout(["x"], mesh))
    wrong: Any = 3
    calls: list[Any] = [spmd.function, spmd.value_and_grad, spmd.explain]
    for call in (spmd.barrier, lambda mesh: spmd.default_mesh(mesh).__enter__()):
        with pytest.raises(spmd.MeshError, match="a Mesh is needed, not an int"):
            call(wrong)
    for call in calls:
        with pytest.raises(MisuseError, match="takes a function, not an int"):
            call(wrong)
    with pytest.raises(spmd.LayoutError, match="a Layout is needed, not an int"):
        spmd.visualize(wrong, (3, 2))
    with pytest.raises(spmd.MeshError, match="coordinator is an int"):
        spmd.create_mesh({"x": 2}, coordinator=wrong)
    with pytest.raises(ValueError, match="larger than any memory"):
        spmd.zeros(1 << 62, layout=Layout(["x"], mesh))
    with pytest.raises(MisuseError, match="fetch_layout takes a global array, not an ndarray"):
        spmd.fetch_layout(TALL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="minval"):
        spmd.random.uniform((3, 2), 1, minval=2, layout=layout)
    with pytest.raises(TypeError, match="pass what its full"):
        workers.schedule(len, args=(tensor,))
    elsewhere = spmd.Mesh({"x": 2}, ["/job:worker/task:7", "/job:worker/task:8"])
    with pytest.raises(spmd.MeshError, match="is not connected"):
        spmd.zeros(3, layout=Layout(["x"], elsewhere))
    for mistake, message in (
        ({"devices": ["/job:worker/task:9"]}, "the cluster has no worker 9; it has the workers 0, 1"),
        ({"devices": ["/job:ps/task:0"]}, "the cluster has no ps 0"),
        ({"devices": ["CPU:0"]}, "the cluster has no localhost 0"),
        ({"devices": ["/job:worker/task:0"], "tasks": [0]}, "have no meaning"),
        ({}, "has 1 devices, but 2 are given"),
    ):
        with pytest.raises(spmd.MeshError, match=message):
            spmd.create_mesh({"x": 1}, coordinator=workers, **mistake)
    with pytest.raises(spmd.MeshError, match="give its coordinator"):
        spmd.create_mesh({"x": 1}, ["/job:worker/task:0"])
    with pytest.raises(spmd.MeshError, match="give its coordinator"):
        spmd.create_mesh({"x": 1}, tasks=[0])


def test_the_default_mesh() -> None:
    """`P` is a layout on it."""
    mesh = spmd.create_mesh({"x": 3})
    with spmd.default_mesh(mesh):
        assert spmd.P("x", None) == Layout(["x", None], mesh)
    with pytest.raises(spmd.MeshError, match="no default mesh"):
        spmd.P("x")


def test_arrays_that_nothing_refers_to_are_forgotten(make_mesh: MakeMesh) -> None:
    """Devices keep no more than there is here."""
    mesh = make_mesh({"x": 2, "y": 3})
    layout = Layout(["x"], mesh)
    kept = spmd.arange(4, layout=layout)
    for _ in range(20):
        kept = spmd.distribute(kept.full() + 1, layout)
    gc.collect()
    spmd.barrier(mesh)
    np.testing.assert_array_equal(kept.full(), np.arange(4) + 20)
    session = session_of(mesh)
    assert len(session.dropped) <= 1


def test_what_is_distributed_may_change_afterwards(grid: spmd.Mesh) -> None:
    """The devices have it as it was; and what is fetched is the caller's own."""
    array = TALL.copy()
    tensor = spmd.distribute(array, Layout(["x", None], grid))
    array[:] = 9
    fetched = tensor.full()
    fetched[:] = 8
    for component in spmd.unpack(tensor):
        component[:] = 7
    np.testing.assert_array_equal(tensor.full(), TALL)


def test_a_worker_refuses_a_malformed_program(workers: ClusterCoordinator) -> None:
    """With a sentence, before anything of it runs; so it does with one for other workers."""
    homes, size = workers.members([0, 1])
    other = spmd.Mesh({"x": 2}, ["/job:worker/task:1", "/job:worker/task:0"])
    for text, message in (
        ("{}", "it has a mesh, arrays, inputs, code and outputs"),
        (encode(other, [], 0, [], []), "but the mesh is of worker 1, worker 0"),
    ):
        args: tuple[Any, ...] = (text, BlockStore(), Numbers([], [], []).encoded())
        for value in workers.schedule_gang(run_program, args, None, homes, size, None, 0, None, isolated=True):
            with pytest.raises(ProtocolError, match=message):
                value.fetch(TIMEOUT)
