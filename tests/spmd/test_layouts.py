"""Where results lie, and what moves for it: the tables of docs/spmd.md, for all layouts of a 3x2 mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts

from pscluster import spmd
from pscluster.core.layouts.moving import moving
from pscluster.spmd import UNSHARDED, Layout
from pscluster.spmd.execution.recording import Ref
from pscluster.spmd.execution.session import Session
from pscluster.worker.programs.program import ArrayType

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/spmd.md"
SHAPES = [(6, 4), (7, 5)]

Specs = tuple[str, ...]
N = None  # a new axis


@pytest.fixture(scope="module")
def mesh() -> spmd.Mesh:
    """Six devices of this process."""
    return spmd.create_mesh({"x": 3, "y": 2})


@pytest.fixture
def moved_elements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements have gone from one device to another, in each move."""
    moved: list[int] = []
    move = Session.move

    def counted(self: Session, source: Ref, of: ArrayType) -> Ref:
        plan = moving(source.type.layout, of.layout, of.shape, source.type.partial)
        moved.append(plan.elements)
        return move(self, source, of)

    monkeypatch.setattr(Session, "move", counted)
    return moved


class Row(NamedTuple):
    """A function of a matrix: the axes that it needs whole, and which axis of the matrix each of the result's is."""

    function: str
    call: Callable[[Any], Any]
    whole: Sequence[int]
    result: Sequence[int | None]


ROWS = [
    Row("transpose", np.transpose, [], [1, 0]),
    Row("expand_dims", lambda a: np.expand_dims(a, 1), [], [0, N, 1]),
    Row("broadcast_to", lambda a: np.broadcast_to(a, (2, *a.shape)), [], [N, 0, 1]),
    Row("reshape", lambda a: np.reshape(a, (*a.shape, 1)), [], [0, 1, N]),
    Row("diagonal", np.diagonal, [0, 1], [N]),
    Row("array_split", lambda a: np.array_split(a, 2, axis=1)[0], [1], [0, N]),
    Row("concatenate", lambda a: np.concatenate([a, a], axis=0), [0], [N, 1]),
    Row("stack", lambda a: np.stack([a, a], axis=1), [], [0, N, 1]),
    Row("tile", lambda a: np.tile(a, (2, 1)), [0], [N, 1]),
    Row("repeat", lambda a: np.repeat(a, 2, axis=1), [1], [0, N]),
    Row("pad", lambda a: np.pad(a, ((1, 0), (0, 0))), [0], [N, 1]),
    Row("roll", lambda a: np.roll(a, 1, axis=1), [1], [0, N]),
    Row("flip", lambda a: np.flip(a, axis=0), [0], [N, 1]),
    Row("tril", np.tril, [0, 1], [N, N]),
    Row("a[i]", lambda a: a[1], [0], [1]),
    Row("a[start:stop]", lambda a: a[1:3], [0], [N, 1]),
    Row("a[:]", lambda a: a[:, :], [], [0, 1]),
    Row("a[indices]", lambda a: a[[1, 0, 2]], [0], [N, 1]),
    Row("take", lambda a: np.take(a, [1, 0], axis=1), [1], [0, N]),
    Row("sort", lambda a: np.sort(a, axis=0), [0], [N, 1]),
    Row("argsort", lambda a: np.argsort(a, axis=1), [1], [0, N]),
    Row("argmax", lambda a: np.argmax(a, axis=0), [0], [1]),
    Row("median", lambda a: np.median(a, axis=1), [1], [0]),
    Row("cumsum", lambda a: np.cumsum(a, axis=0), [0], [N, 1]),
    Row("diff", lambda a: np.diff(a, axis=1), [1], [0, N]),
    Row("searchsorted", lambda a: np.searchsorted([0.5], a), [], [0, 1]),
    Row("linalg.svd", lambda a: np.linalg.svd(a, compute_uv=False), [0, 1], [N]),
    Row("negative", np.negative, [], [0, 1]),
    Row("zeros_like", np.zeros_like, [], [0, 1]),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.function for row in ROWS])
def test_the_table_of_functions(row: Row, mesh: spmd.Mesh, moved_elements: list[int]) -> None:
    """Axes needed whole are gathered, and unsharded in the result; the others stay as they are, where they are."""
    tables = DOCUMENT.read_text(encoding="utf-8").partition("## Which functions")[0]
    assert f"`{row.function}" in tables
    for shape, layout in itertools.product(SHAPES, all_layouts(mesh, 2)):
        array = spmd.distribute(np.random.default_rng(1).random(shape), layout)
        moved_elements.clear()
        result = row.call(array)
        needed = Layout([UNSHARDED if at in row.whole else spec for at, spec in enumerate(layout.specs)], mesh)
        wanted = tuple(UNSHARDED if at is None or at in row.whole else layout.specs[at] for at in row.result)
        assert result.layout.specs == wanted
        lacking = sum(
            np.prod(needed.local_shape(shape, device)) - np.prod(layout.local_shape(shape, device))
            for device in range(mesh.size)
        )
        assert sum(moved_elements) == lacking


def test_axes_that_are_merged_or_cut(mesh: spmd.Mesh) -> None:
    """The first of several keeps its dimension if that divides it."""
    cases: list[Any] = [
        ((6, 4, 5), (24, 5), ["x", N, "y"], ("x", "y")),
        ((6, 4, 5), (24, 5), ["y", "x", N], ("y", UNSHARDED)),
        ((7, 4, 5), (28, 5), ["x", N, "y"], (UNSHARDED, "y")),
        ((24, 5), (6, 4, 5), ["x", "y"], ("x", UNSHARDED, "y")),
        ((24, 5), (4, 6, 5), ["x", "y"], (UNSHARDED, UNSHARDED, "y")),
        ((6, 4), (4, 6), ["x", "y"], (UNSHARDED, UNSHARDED)),
        ((6, 1, 4), (6, 4), ["x", N, "y"], ("x", "y")),
    ]
    for shape, to, specs, wanted in cases:
        array = np.arange(np.prod(shape)).reshape(shape)
        result: Any = np.reshape(spmd.distribute(array, Layout(specs, mesh)), to)
        assert result.layout.specs == wanted
        np.testing.assert_array_equal(result.full(), array.reshape(to))


def test_sums_lie_as_what_is_left(mesh: spmd.Mesh, moved_elements: list[int]) -> None:
    """A sum over a sharded axis is combined; each device takes the terms that it lacks."""
    for layout in all_layouts(mesh, 2):
        array = spmd.distribute(np.ones((7, 5)), layout)
        moved_elements.clear()
        result: Any = np.sum(array, axis=0)
        assert result.layout == layout.delete([0])
        np.testing.assert_array_equal(result.full(), np.full(5, 7.0))
        terms = array.layout.num_shards(0)
        length = sum(result.layout.local_shape((5,), device)[0] for device in range(mesh.size))
        assert sum(moved_elements) == (terms - 1) * length


def test_a_sum_that_is_relaid_out_is_combined_on_the_way(mesh: spmd.Mesh, moved_elements: list[int]) -> None:
    """As reduce-scatter: devices take only the terms of the block that they need."""
    a = spmd.distribute(np.ones((6, 9)), Layout([None, "x"], mesh))
    b = spmd.distribute(np.ones((9, 4)), Layout(["x", None], mesh))
    moved_elements.clear()
    result = (a @ b).relayout(["x", "y"])
    assert moved_elements == [2 * 6 * 4]  # two terms of each of 24 elements
    np.testing.assert_array_equal(result.full(), np.full((6, 4), 9.0))


def test_large_sums_are_combined_once(mesh: spmd.Mesh, moved_elements: list[int]) -> None:
    """Each element on one device of those that have its terms; then the others get it."""
    array = spmd.distribute(np.ones((3, 60_000)), Layout(["x", None], mesh))
    moved_elements.clear()
    total: Any = np.sum(array, axis=0)
    assert total.full().sum() == 180_000
    assert moved_elements == [6 * 20_000 * 2, 6 * 40_000]  # by all at once 6 * 60,000 * 2


@pytest.mark.parametrize("name", ["here", "workers"])
def test_the_products_of_the_overview(name: str, request: pytest.FixtureRequest) -> None:
    """The layouts and components that the overview of DTensor prints."""
    dims: Any
    for dims, specs, result, components in (
        ({"x": 6}, ([N, N], [N, N]), (UNSHARDED, UNSHARDED), [[[20, 14], [56, 41]]] * 6),
        ({"x": 3, "y": 2}, ([N, "x"], ["x", N]), (UNSHARDED, UNSHARDED), [[[20, 14], [56, 41]]] * 6),
        ({"x": 3, "y": 2}, (["y", "x"], ["x", N]), ("y", UNSHARDED), [[[20, 14]], [[56, 41]]] * 3),
    ):
        options: Any = {}
        if name == "workers":
            options = {"coordinator": request.getfixturevalue("workers"), "devices_per_task": 3}
        mesh = spmd.create_mesh(dims, **options)
        a = spmd.distribute([[1, 2, 3], [4, 5, 6]], Layout(specs[0], mesh))
        b = spmd.distribute([[6, 5], [4, 3], [2, 1]], Layout(specs[1], mesh))
        c = a @ b
        assert c.layout.specs == result
        assert [component.tolist() for component in spmd.unpack(c)] == components
