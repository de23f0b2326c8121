"""Layouts: which block each device has, and what is refused."""

import pickle
from typing import Any

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts

from pscluster.core.errors import LayoutError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import MATCH, UNSHARDED, Mesh

LINE = Mesh({"x": 6})
GRID = Mesh({"x": 3, "y": 2})
EIGHT = Mesh({"batch": 8})


def components(array: Any, layout: Layout) -> list[Any]:
    """The block of each device."""
    return [array[layout.slices(array.shape, device)].tolist() for device in range(layout.mesh.size)]


def test_the_layouts_of_a_line() -> None:
    """Both axes unsharded: all have all. Axis 1 sharded: each has a column."""
    array = np.arange(12).reshape(2, 6)
    assert components(array, Layout([UNSHARDED, UNSHARDED], LINE)) == [array.tolist()] * 6
    assert components(array, Layout([UNSHARDED, "x"], LINE)) == [array[:, k : k + 1].tolist() for k in range(6)]


def test_the_layouts_of_a_grid() -> None:
    """The values that the overview of DTensor prints for 3x2 arrays on a 3x2 mesh."""
    array = np.arange(6).reshape(3, 2)
    assert components(array, Layout(["x", "y"], GRID)) == [[[k]] for k in range(6)]
    assert components(array, Layout.replicated(GRID, 2)) == [[[0, 1], [2, 3], [4, 5]]] * 6
    assert components(array, Layout(["x", UNSHARDED], GRID)) == [
        *([[[0, 1]]] * 2),
        *([[[2, 3]]] * 2),
        *([[[4, 5]]] * 2),
    ]


def test_the_order_of_axes_may_differ_from_that_of_the_mesh() -> None:
    """An array sharded by ['y', 'x'] has two pieces of axis 0, and three of axis 1."""
    array = np.arange(6).reshape(2, 3)
    assert components(array, Layout(["y", "x"], GRID)) == [[[0]], [[3]], [[1]], [[4]], [[2]], [[5]]]


@pytest.mark.parametrize("shape", [(3, 2), (7, 5), (2, 1), (0, 4), (1, 1)])
def test_blocks_are_those_of_array_split(shape: tuple[int, ...]) -> None:
    """Along each axis, for every layout of a 3x2 mesh and any lengths."""
    array = np.arange(np.prod(shape)).reshape(shape)
    for layout in all_layouts(GRID, 2):
        for device in range(GRID.size):
            wanted = array
            for axis, spec in enumerate(layout.specs):
                if spec != UNSHARDED:
                    place = GRID.coords(device)[GRID.dim_names.index(spec)]
                    wanted = np.array_split(wanted, GRID[spec], axis)[place]
            np.testing.assert_array_equal(array[layout.slices(shape, device)], wanted)
            assert layout.local_shape(shape, device) == wanted.shape
        owners = [layout.shard_of(device) for device in layout.owners]
        assert owners == list(range(layout.partition(shape).num_shards))


def test_more_axes_than_dimensions() -> None:
    """The rank of a layout does not depend on the number of dimensions."""
    layout = Layout([None, "y", None, "x"], GRID)
    assert (layout.rank, layout.num_shards(1), layout.num_shards(0)) == (4, 2, 1)
    assert layout.local_shape((2, 4, 5, 7), 0) == (2, 2, 5, 3)
    assert Layout([], GRID).local_shape((), 5) == ()


def test_makers() -> None:
    """The helpers equal the layouts written out."""
    assert Layout.replicated(EIGHT, rank=2) == Layout([UNSHARDED, UNSHARDED], EIGHT)
    assert Layout.batch_sharded(EIGHT, "batch", rank=2) == Layout(["batch", UNSHARDED], EIGHT)
    assert Layout.batch_sharded(EIGHT, "batch", rank=4).specs == ("batch", *[UNSHARDED] * 3)
    assert Layout.batch_sharded(EIGHT, "batch", rank=1).specs == ("batch",)
    assert Layout.batch_sharded(EIGHT, "batch", rank=3, axis=-2).specs == (UNSHARDED, "batch", UNSHARDED)
    assert Layout.inner_sharded(GRID, "y", rank=3).specs == (UNSHARDED, UNSHARDED, "y")
    assert Layout(["x", None, "y"], GRID).delete([0, -1]) == Layout([None], GRID)
    assert Layout(["x", None], GRID).matched([MATCH, "y"]) == Layout(["x", "y"], GRID)


def test_layouts_are_values() -> None:
    """They are equal, hashed, pickled and written by specs and mesh; None and UNSHARDED are the same."""
    for layout in all_layouts(GRID, 2) + all_layouts(GRID, 0):
        same = pickle.loads(pickle.dumps(layout))
        assert same == layout == Layout.from_string(str(layout))
        assert hash(same) == hash(layout)
    assert Layout([None, "x"], GRID) == Layout([UNSHARDED, "x"], GRID) != Layout([UNSHARDED, "x"], LINE)
    assert str(Layout(["x", None], GRID)).startswith("sharding_specs:x,unsharded, mesh:|x=3,y=2|")
    assert repr(Layout(["x", None], GRID)) == "<Layout [x, unsharded] of mesh x=3, y=2>"
    assert len(set(all_layouts(GRID, 2))) == 7
    with pytest.raises(AttributeError, match="make another one"):
        Layout([], GRID).specs = ()


def test_replicas_are_numbered() -> None:
    """By the order of their devices."""
    layout = Layout(["x", None], GRID)
    assert [layout.replica_of(device) for device in range(6)] == [0, 1] * 3
    assert layout.owners == (0, 2, 4)
    assert layout.used == {"x"}
    assert not layout.is_replicated


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["z", None], "axis 0 can't be sharded over 'z': the mesh has the dimensions x, y"),
        (["x", "x"], "axes 0 and 1 are both sharded over 'x'"),
        ([MATCH], "MATCH is only for relayout"),
        ("xy", "give a list with one entry for each axis"),
        ([3], "axis 0 can't be sharded over 3"),
        (None, "give a list"),
    ],
)
def test_what_is_no_layout_is_refused(specs: Any, message: str) -> None:
    """The error says which axis, and what the mesh has."""
    with pytest.raises(LayoutError, match=message):
        Layout(specs, GRID)


def test_what_does_not_fit_is_refused() -> None:
    """Shapes of another rank, axes that are not there, and what is not a mesh."""
    with pytest.raises(LayoutError, match=r"shape \(3,\) has 1 axes, but the layout has 2: \[x, unsharded\]"):
        Layout(["x", None], GRID).partition((3,))
    with pytest.raises(LayoutError, match="rank 2 has no axis 2 to shard"):
        Layout.batch_sharded(GRID, "x", 2, axis=2)
    with pytest.raises(LayoutError, match="rank 1 has no axis 1"):
        Layout(["x"], GRID).delete([1])
    with pytest.raises(LayoutError, match="1 specs were given for an array of rank 2"):
        Layout(["x", None], GRID).matched(["x"])
    with pytest.raises(LayoutError, match="needs a Mesh, not a dict"):
        Layout(["x"], {"x": 3})  # type: ignore[arg-type]
    wrong: Any
    for wrong in (-1, "2", None):
        with pytest.raises(LayoutError, match=r"rank is .*; it must be the number of an array's axes"):
            Layout.replicated(GRID, wrong)
    for wrong in (None, "x", 5):
        with pytest.raises(LayoutError, match=r"specs is .*; give a list"):
            Layout(["x"], GRID).matched(wrong)
    for text in ("", "sharding_specs:x", f"specs:x, mesh:{GRID}"):
        with pytest.raises(LayoutError, match="is not a layout"):
            Layout.from_string(text)
