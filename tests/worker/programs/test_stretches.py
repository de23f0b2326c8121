"""Functions that follow each other: what devices have in common is computed once, and the rest by threads, the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.programs.support import Tasks, grid, typed

from pscluster.core.layouts.layout import Layout
from pscluster.worker.programs import nodes, stretches
from pscluster.worker.programs.computing import Computation
from pscluster.worker.programs.program import ArrayType
from pscluster.worker.programs.reading import parse
from pscluster.worker.programs.thread_pool import ThreadPool

MESH = grid(1)
LOADED = [(np.arange(6.0), ["x"]), (np.arange(4.0) + 10, ["y"]), (np.arange(2.0) + 20, ["unsharded"])]
"""Arrays whose blocks have two elements each, on different devices."""

Functions = list[tuple[str, int, int]]


@st.composite
def functions(draw: st.DrawFn) -> Functions:
    """Functions of two registers that come before them."""
    count = draw(st.integers(1, 80))  # more than one stretch has
    return [
        (draw(st.sampled_from(["add", "subtract"])), draw(st.integers(0, nth + 2)), draw(st.integers(0, nth + 2)))
        for nth in range(count)
    ]


def devices_in_common(code: Functions) -> list[set[Any]]:
    """For each function, what its devices compute, by which blocks it is of: as many as there are computations."""
    known: list[list[Any]] = [
        [(nth, tuple(of.layout.block(of.shape, device).start)) for device in range(6)]
        for nth, of in enumerate(typed(array, specs, MESH) for array, specs in LOADED)
    ]
    for nth, (_, a, b) in enumerate(code):
        known.append([(nth, hash((known[a][device], known[b][device]))) for device in range(6)])
    return [set(of) for of in known[len(LOADED) :]]


@given(functions(), st.sampled_from([0, math.inf]), st.integers(0, 3))
def test_each_device_has_what_it_would_compute_alone(code: Functions, worth: float, kept: int) -> None:
    """Whichever devices share blocks, in threads or not; and each function is called once for equal blocks."""
    loads = [(array, typed(array, specs, MESH)) for array, specs in LOADED]
    of = loads[0][1]
    types = [of for _, of in loads] + [of] * len(code)
    text: list[Any] = [["load", register, register] for register in range(len(loads))]
    expected = [[array[of.layout.slices(of.shape, device)] for device in range(6)] for array, of in loads]
    for nth, (name, a, b) in enumerate(code, len(loads)):
        text.append(["compute", [nth], name, [a, b], [["in", 0], ["in", 1]], {}])
        expected.append([getattr(np, name)(*pair) for pair in zip(expected[a], expected[b], strict=True)])
    fetched = list(range(len(types)))[-1 - kept :]
    text += [["fetch", register, True] for register in fetched]
    planned = 0

    class Counted(Computation):
        def __init__(self, *args: Any) -> None:
            nonlocal planned
            planned += 1
            super().__init__(*args)

    parse.cache_clear()
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(stretches, "WORTH_WORK", worth)
        patch.setattr(stretches, "Computation", Counted)
        (found,) = Tasks(MESH).run(types, text, loads=loads)
        if worth:  # it may be all
            assert not planned
            (found,) = Tasks(MESH).run(types, text, loads=loads)
    for blocks, register in zip(found, fetched, strict=True):
        for block, wanted in zip(blocks, expected[register], strict=True):
            np.testing.assert_array_equal(block, wanted)
    assert planned == sum(map(len, devices_in_common(code)))


def test_the_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were none."""
    monkeypatch.setattr(stretches, "WORTH_WORK", 0)
    array, specs = LOADED[0]
    of = typed(array, specs, MESH)
    code: list[Any] = [["load", 0, 0], ["compute", [1], "linalg.inv", [0], [["in", 0]], {}]]
    with pytest.raises(np.linalg.LinAlgError, match="two-dimensional"):
        Tasks(MESH).run([of, of], code, loads=[(array, of)])


LAYOUTS = [Layout(specs, MESH) for specs in (["x", "unsharded"], ["unsharded", "y"], ["y", "x"], ["unsharded"] * 2)]

CALLS: dict[str, tuple[Any, int, list[Any], dict[str, Any]]] = {
    "add": (np.add, 2, [["in", 0], ["in", 1]], {}),
    "multiply": (np.multiply, 2, [["in", 0], ["in", 1]], {}),
    "subtract": (lambda a: np.subtract(0.1, a), 1, [0.1, ["in", 0]], {}),
    "maximum": (lambda a: np.maximum(a, 2), 1, [["in", 0], 2], {}),
    "sqrt": (np.sqrt, 1, [["in", 0]], {}),
    "flip": (lambda a: np.flip(a, 0), 1, [["in", 0]], {"axis": 0}),  # a view
    "reshape": (lambda a: a, 1, [["in", 0], ["shape", 0]], {}),  # another one
}
"""What is called, and on how many operands, and how that is written."""


@given(st.data(), st.integers(0, 5), st.integers(1, 4), st.sampled_from([0, math.inf]), st.sampled_from("fd"))
def test_a_program_does_what_its_functions_do_one_by_one(
    data: st.DataObject, rows: int, columns: int, worth: float, code: str
) -> None:
    """To the bit, run again and again, whatever is written over what: moves, sums of terms, views, and empty blocks."""
    shape, dtype = (rows, columns), np.dtype(code)
    types = [ArrayType(shape, dtype, LAYOUTS[nth]) for nth in range(2)]
    text: list[list[Any]] = [["load", nth, nth] for nth in range(len(types))]

    def add(of: ArrayType, name: str, *rest: Any) -> int:
        text.append([name, [len(types)] if name == "compute" else len(types), *rest])
        types.append(of)
        return len(types) - 1

    def drawn(layout: Layout | None = None) -> int:
        """An array of the whole shape, in a layout."""
        register = data.draw(
            st.sampled_from([nth for nth, of in enumerate(types) if of.shape == shape and not of.partial])
        )
        if layout is None or types[register].layout == layout:
            return register
        return add(ArrayType(shape, dtype, layout), "move", register)

    for _ in range(data.draw(st.integers(1, 20))):
        what = data.draw(st.sampled_from([*CALLS, "move", "terms"]))
        first = drawn()
        layout = types[first].layout
        if what == "move":
            drawn(data.draw(st.sampled_from(LAYOUTS)))
        elif what == "terms":
            dims = [dim for dim in layout.specs[:1] if dim in MESH]
            summed, moved = (Layout(["unsharded", spec], MESH) for spec in (layout.specs[1], "unsharded"))
            of = ArrayType((1, columns), dtype, summed, tuple(dims))
            terms = add(of, "compute", "add.reduce", [first], [["in", 0]], {"axis": 0, "keepdims": True})
            total = add(ArrayType((1, columns), dtype, moved), "move", terms)
            second = drawn(LAYOUTS[3])
            of = ArrayType(shape, dtype, LAYOUTS[3])
            add(of, "compute", "multiply", [second, total], [["in", 0], ["in", 1]], {})
        else:
            _, operands, args, kwargs = CALLS[what]
            inputs = [first, *(drawn(layout) for _ in range(operands - 1))]
            add(ArrayType(shape, dtype, layout), "compute", what, inputs, args, kwargs)
    fetched = data.draw(st.sets(st.sampled_from([nth for nth, of in enumerate(types) if not of.partial]), min_size=1))
    text += [["fetch", register, True] for register in sorted(fetched)]
    tasks, random = Tasks(MESH), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(stretches, "WORTH_WORK", worth)
        for module in (stretches, nodes):
            patch.setattr(module, "thread_pool", lambda: POOL)
        parse.cache_clear()
        for _ in range(3):  # once, checked, and unchecked
            arrays = [random.random(shape).astype(dtype) for _ in range(2)]
            (found,) = tasks.run(types, text, loads=list(zip(arrays, types, strict=False)))
            expected = one_by_one(types, text, arrays)
            for blocks, register in zip(found, sorted(fetched), strict=True):
                for block, wanted in zip(blocks, expected[register], strict=True):
                    assert (block.shape, block.tobytes()) == (wanted.shape, wanted.tobytes())


def test_what_a_view_shows_is_not_written_over() -> None:
    """Although nothing needs the array itself any more."""
    array = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    types = [ArrayType(array.shape, array.dtype, LAYOUTS[0])] * 5
    both = [["in", 0], ["in", 1]]
    text: list[list[Any]] = [
        ["load", 0, 0],
        ["compute", [1], "add", [0, 0], both, {}],
        ["compute", [2], "flip", [1], [["in", 0]], {"axis": 0}],
        ["compute", [3], "multiply", [1, 1], both, {}],
        ["compute", [4], "add", [2, 3], both, {}],
        ["fetch", 4, True],
    ]
    for _ in range(4):
        (found,) = Tasks(MESH).run(types, text, loads=[(array, types[0])])
        np.testing.assert_array_equal(found[0], one_by_one(types, text[:-1], [array])[4])


POOL = ThreadPool(1)


def one_by_one(types: list[ArrayType], text: list[list[Any]], arrays: list[Any]) -> list[list[Any]]:
    """The blocks of all registers: each function called for each device, and each move made of the whole array."""
    blocks = [
        [array[of.layout.slices(of.shape, at)] for at in range(6)] for array, of in zip(arrays, types, strict=False)
    ]
    for name, _, *rest in text[len(arrays) :]:
        if name == "compute":
            function, inputs, _, kwargs = rest
            call = (lambda a: np.add.reduce(a, **kwargs)) if function == "add.reduce" else CALLS[function][0]  # noqa: B023
            blocks.append([call(*(blocks[register][at] for register in inputs)) for at in range(6)])
        elif name == "move":
            (source,), target = rest, types[len(blocks)]
            of = types[source]
            whole = np.empty(of.shape, of.dtype)
            seen = dict[Any, Any]()
            for at in range(6):
                place = of.layout.slices(of.shape, at)
                coords = MESH.coords(at)
                mine = tuple(coords[MESH.dim_names.index(dim)] for dim in of.partial)
                terms = seen.setdefault(str(place), {})
                terms.setdefault(mine, blocks[source][at])
            for at in range(6):
                place = of.layout.slices(of.shape, at)
                total, *more = [block for _, block in sorted(seen[str(place)].items())]
                for block in more:
                    total = total + block
                whole[place] = total
            blocks.append([whole[target.layout.slices(target.shape, at)] for at in range(6)])
    return blocks
