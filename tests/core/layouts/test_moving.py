"""What moves between layouts, compared with whole arrays."""

import itertools
from typing import Any

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts

from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.core.layouts.moving import Moving, combine_through, gathering, moving, owners_of


def grid(tasks: int) -> Mesh:
    """A 3x2 mesh of six devices that belong to `tasks` tasks."""
    each = 6 // tasks
    names = [f"/job:worker/task:{task}/device:CPU:{number}" for task in range(tasks) for number in range(each)]
    return Mesh({"x": 3, "y": 2}, names)


def assembled(plan: Moving, target: Layout, shape: tuple[int, ...], blocks: list[Any], source: Layout) -> list[Any]:
    """The block of each device, put together from pieces of those that devices had."""
    results = []
    for device, pieces in enumerate(plan.pieces):
        own = target.block(shape, device)
        out = np.full(own.shape, -1, np.int64)
        for box, sources in pieces:
            terms = [_part(blocks[of], source.block(shape, of).start, box.start, box.stop) for of in sources]
            where = tuple(slice(a - s, b - s) for a, b, s in zip(box.start, box.stop, own.start, strict=True))
            out[where] = sum(terms)
        results.append(out)
    return results


def _part(block: Any, origin: Any, start: Any, stop: Any) -> Any:
    return block[tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, origin, strict=True))]


@pytest.mark.parametrize("tasks", [1, 2, 6])
@pytest.mark.parametrize("shape", [(3, 2), (7, 5), (2, 1), (0, 3)])
def test_between_all_layouts(shape: tuple[int, ...], tasks: int) -> None:
    """Every device gets its block of the new layout, from blocks of the old one."""
    mesh = grid(tasks)
    array = np.arange(np.prod(shape)).reshape(shape)
    for source, target in itertools.product(all_layouts(mesh, 2), repeat=2):
        plan = moving(source, target, shape)
        blocks = [array[source.slices(shape, device)] for device in range(6)]
        for device, block in enumerate(assembled(plan, target, shape, blocks, source)):
            np.testing.assert_array_equal(block, array[target.slices(shape, device)])
        if source == target or source.is_replicated:
            assert plan.is_free
        for (of, to), sent in plan.transfers.items():
            assert of != to
            assert len(set(sent)) == len(sent)


@pytest.mark.parametrize("partial", [("x",), ("y",), ("x", "y"), ("y", "x")])
def test_terms_are_combined_in_order(partial: tuple[str, ...]) -> None:
    """Each element is the sum of one term of every place along the partial dimensions, in C order."""
    mesh, shape = grid(2), (5, 4)
    for source in all_layouts(mesh, 2):
        if source.used.intersection(partial):
            continue
        for target in all_layouts(mesh, 2):
            for pieces in moving(source, target, shape, partial).pieces:
                for _, sources in pieces:
                    places = [
                        tuple(
                            place for place, dim in zip(mesh.coords(of), mesh.dim_names, strict=True) if dim in partial
                        )
                        for of in sources
                    ]
                    every = itertools.product(*(range(mesh[dim]) for dim in mesh.dim_names if dim in partial))
                    assert places == list(every)


def test_what_a_task_has_is_not_sent_to_it() -> None:
    """A device takes what it or its task has; of the rest, a task gets each piece once."""
    shape, mesh = (6, 6), Mesh({"x": 2, "y": 2}, [f"/job:worker/task:{n // 2}/device:CPU:{n % 2}" for n in range(4)])
    replicated = Layout.replicated(mesh, 2)
    assert not moving(Layout([None, "y"], mesh), replicated, shape).transfers  # each task has both places of y
    plan = moving(Layout(["x", None], mesh), replicated, shape)
    assert {pair: len(sent) for pair, sent in plan.transfers.items()} == {(0, 1): 1, (1, 0): 1}
    assert plan.elements == 4 * 18


def test_elements_that_move() -> None:
    """To gather 3 blocks on 3 x 2 devices, each gets what it lacks; to shard takes nothing."""
    mesh = grid(6)
    replicated, rows = Layout.replicated(mesh, 2), Layout(["x", None], mesh)
    assert moving(rows, replicated, (6, 4)).elements == 6 * 16
    assert moving(replicated, rows, (6, 4)).elements == 0
    assert moving(replicated, rows, (6, 4), ("y",)).elements == 6 * 8
    assert moving(Layout([], mesh), Layout([], mesh), (), ("x",)).elements == 12


def test_large_sums_are_combined_on_one_device_each() -> None:
    """As reduce-scatter and all-gather: through a layout that shards over the partial dimensions."""
    mesh, large = grid(6), 1 << 20
    assert combine_through(Layout([None, None], mesh), ("x",), (2, 9), large) == Layout([None, "x"], mesh)
    assert combine_through(Layout([None, None], mesh), ("x", "y"), (8, 9), large) == Layout(["y", "x"], mesh)
    assert combine_through(Layout(["y", None], mesh), ("x",), (8, 9), large) == Layout(["y", "x"], mesh)
    assert combine_through(Layout(["x", None], mesh), ("x",), (8, 9), large) is None
    assert combine_through(Layout([None], mesh), ("x",), (2,), large) is None
    assert combine_through(Layout([], mesh), ("x",), (), large) is None
    assert combine_through(Layout([None, None], mesh), ("x",), (2, 9), 1 << 10) is None, "it is small"
    assert combine_through(Layout([None, None], mesh), ("y",), (8, 9), large) is None, "of two terms"


@pytest.mark.parametrize("nth", range(3))
def test_each_block_is_gathered_once(nth: int) -> None:
    """On one of the devices that have it, of all of which some array is gathered; nothing else moves."""
    mesh, shape = grid(2), (7, 5)
    for source, target in itertools.product(all_layouts(mesh, 2), repeat=2):
        plan, owners = gathering(source, target, shape, (), nth), owners_of(target, nth)
        assert [target.shard_of(owner) for owner in owners] == list(range(len(owners)))
        assert {device for device, pieces in enumerate(plan.pieces) if pieces} <= set(owners)
        assert sum(piece.box.size for pieces in plan.pieces for piece in pieces) == 35
        assert plan.elements <= moving(source, target, shape).elements
    everyone = Layout.replicated(mesh, 1)
    assert {owners_of(everyone, number) for number in range(6)} == {(device,) for device in range(6)}
