"""Meshes: their dimensions and devices, and what is refused."""

import pickle
from typing import Any

import pytest

from pscluster.core.errors import MeshError
from pscluster.core.layouts.mesh import Device, Mesh


def test_a_mesh_of_one_dimension() -> None:
    """Six virtual devices in a row."""
    mesh = Mesh([("x", 6)], devices=[f"CPU:{number}" for number in range(6)])
    assert (mesh.shape, mesh.dim_names, mesh.size, mesh["x"], "x" in mesh, "y" in mesh) == (
        (6,),
        ("x",),
        6,
        6,
        True,
        False,
    )
    names = ",".join(f"/job:localhost/task:0/device:CPU:{number}" for number in range(6))
    assert str(mesh) == f"|x=6|0,1,2,3,4,5|0,1,2,3,4,5|{names}"
    assert mesh == Mesh({"x": 6})


def test_devices_are_in_c_order() -> None:
    """Device k of a 3x2 mesh is at (k // 2, k % 2)."""
    mesh = Mesh([("x", 3), ("y", 2)])
    assert [mesh.coords(device) for device in range(6)] == [(device // 2, device % 2) for device in range(6)]
    assert str(mesh).startswith("|x=3,y=2|0,1,2,3,4,5|")
    with pytest.raises(IndexError, match="no device 6 in a mesh of 6"):
        mesh.coords(6)


def test_a_size_is_inferred() -> None:
    """-1 means as many as fit."""
    devices = [f"CPU:{number}" for number in range(6)]
    assert Mesh({"x": -1, "y": 2}, devices).dims == (("x", 3), ("y", 2))
    assert Mesh({"x": -1}, devices).shape == (6,)


def test_several_devices_of_a_task() -> None:
    """Six devices may be one task, two or six."""
    for tasks in (1, 2, 6):
        each = 6 // tasks
        names = [f"/job:worker/task:{task}/device:CPU:{number}" for task in range(tasks) for number in range(each)]
        mesh = Mesh({"x": 3, "y": 2}, names)
        assert mesh.tasks == tuple(("worker", task) for task in range(tasks))
        assert [mesh.devices_of(task) for task in range(tasks)] == [
            tuple(range(task * each, (task + 1) * each)) for task in range(tasks)
        ]
    assert Device.parse("/job:worker/task:3") == Device("worker", 3, 0)


def test_meshes_are_values() -> None:
    """They are equal, hashed and pickled by dimensions, devices and name, and can't be changed."""
    mesh = Mesh({"x": 3, "y": 2}, name="train")
    same = pickle.loads(pickle.dumps(mesh))
    assert same == mesh
    assert hash(same) == hash(mesh)
    assert Mesh.from_string(str(mesh)) == mesh
    for other in (
        Mesh({"y": 3, "x": 2}, name="train"),
        Mesh({"x": 3, "y": 2}),
        Mesh({"x": 3, "y": 2}, [f"CPU:{number}" for number in range(1, 7)], name="train"),
        Mesh({"x": 6}, name="train"),
    ):
        assert other != mesh
    with pytest.raises(AttributeError, match="make another one"):
        mesh.dims = ()


@pytest.mark.parametrize(
    ("dims", "devices", "message"),
    [
        ([], None, "at least one dimension"),
        (3, None, "give names and sizes"),
        ([("x", 2), ("x", 3)], None, "two dimensions of a mesh are named 'x'"),
        ({"unsharded": 2}, None, "has a meaning in layouts"),
        ({"match": 2}, None, "has a meaning in layouts"),
        ({"a b": 2}, None, "'a b' does not name a dimension"),
        ({"": 2}, None, "does not name a dimension"),
        ({"x": 0}, None, "has size 0; give 1 or more"),
        ({"x": True}, None, "has size True"),
        ({"x": 1.5}, None, "has size 1.5"),
        ({"x": 1 << 20}, None, "at most 65,536 devices"),
        ({"x": 1 << 10, "y": 1 << 10}, None, "more than 65,536 devices"),
        ({"x": -1}, None, "needs devices to infer it from"),
        ({"x": -1, "y": -1}, ["CPU:0"], "more than one size"),
        ({"x": -1, "y": 2}, ["CPU:0", "CPU:1", "CPU:2"], "3 devices can't be arranged as x=-1, y=2"),
        ({"x": 2}, ["CPU:0"], "has 2 devices, but 1 are given"),
        ({"x": 2}, ["CPU:0", "CPU:0"], "occurs more than once"),
        ({"x": 1}, ["GPU:0"], "'GPU:0' is not the name of a device"),
        ({"x": 1}, [f"CPU:{'9' * 5000}"], "is not the name of a device"),
        ({"x": 1}, "CPU:0", "give a list of names"),
    ],
)
def test_what_is_no_mesh_is_refused(dims: Any, devices: Any, message: str) -> None:
    """The error says what is wrong, and what to give."""
    with pytest.raises(MeshError, match=message):
        Mesh(dims, devices)


@pytest.mark.parametrize("text", ["", "x", "|x|0|0|CPU:0", "|x=a|0|0|CPU:0", "|x=2|0|0|CPU:0", "|x=1|0|0|CPU:0|"])
def test_what_is_no_string_of_a_mesh_is_refused(text: str) -> None:
    """Nothing but what `to_string` returns is a mesh."""
    with pytest.raises(MeshError):
        Mesh.from_string(text)
