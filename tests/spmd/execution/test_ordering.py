"""The order of a program's instructions: whatever depends on something still follows it, and exchanges are together."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.spmd.conftest import MakeMesh

from pscluster import spmd
from pscluster.spmd import Layout
from pscluster.spmd.execution.ordering import Recorded, ordered, reads_and_writes
from pscluster.worker.programs.program import Compute, Move
from pscluster.worker.programs.reading import parse


@st.composite
def programs(draw: st.DrawFn) -> list[Recorded]:
    """Instructions that read what comes before them, or from elsewhere: arrays 0 to 2."""
    code: list[Recorded] = []
    for number in range(3, 3 + draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["move", "compute", "fetch", "load"]))
        source = draw(st.integers(0, number - 1))
        while source > 2 and code[source - 3][0] == "fetch":  # which makes nothing
            source -= 1
        match kind:
            case "move":
                code.append(("move", source, number))
            case "compute":
                code.append(("compute", [number], "add", [source, source], [], {}, 1))
            case "fetch":
                code.append(("fetch", source, False))
            case "load":
                code.append(("load", number, 0))
    return code


@given(programs())
def test_what_depends_on_something_follows_it(code: list[Recorded]) -> None:
    """Nothing is lost; fetches keep their order; exchanges that need nothing of each other are together."""
    result = ordered(code, lambda instruction: instruction[0] == "move")
    assert sorted(map(repr, result)) == sorted(map(repr, code))
    made = {0, 1, 2}
    depth = dict.fromkeys(made, 0)
    groups, within = 0, set[int]()
    for instruction in result:
        read, written = reads_and_writes(instruction)
        assert made.issuperset(read)
        made.update(written)
        before = max((depth[number] for number in read), default=0)
        is_move = instruction[0] == "move"
        if is_move and (not within or within.intersection(read)):
            groups, within = groups + 1, set()
        within = within.union(written) if is_move else set()
        depth.update(dict.fromkeys(written, before + is_move))
    if sum(instruction[0] == "move" for instruction in code) > 1:
        assert groups == max(depth.values())
    fetched = [instruction for instruction in code if instruction[0] == "fetch"]
    assert fetched == [instruction for instruction in result if instruction[0] == "fetch"]


def test_a_step_waits_for_others_once(make_mesh: MakeMesh) -> None:
    """Gradients of all layers and the loss are summed in one exchange, and each once, however often they are used.

    What needs no gradient is computed after they are sent.
    """
    mesh = make_mesh({"x": 6})
    random = np.random.default_rng(0)
    x, *weights = random.random((12, 5)), random.random((5, 4)), random.random(4), random.random((4, 2))
    sharded: Any = spmd.distribute(x, Layout(["x", None], mesh))
    replicated: list[Any] = [spmd.distribute(array, Layout.replicated(mesh, array.ndim)) for array in weights]

    def step(x: Any, w: Any, b: Any, v: Any) -> Any:
        hidden = np.tanh(x @ w + b)
        out = hidden @ v
        back = (out @ v.T) * (1 - hidden * hidden)
        gradients = x.T @ back, back.sum(axis=0), hidden.T @ out
        moved = [0.9 * p - 0.1 * g / (1 + g * g) for p, g in zip((w, b, v), gradients, strict=True)]
        return (out * out).sum(), moved

    traced = spmd.function(step)
    for found, wanted in zip(rest_of(traced(sharded, *replicated)), rest_of(step(x, *weights)), strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)
    (known,) = traced._traces.values()
    program = parse(known.program.text)
    (nth,) = (nth for nth, group in enumerate(program.groups) if isinstance(group[0], Move))
    assert len(program.groups[nth]) == 4
    for (item,) in program.groups[nth + 1 : nth + 4]:
        assert isinstance(item, Compute)
        assert (item.function, item.inputs[0] < program.inputs) == ("multiply", True), "the decay of parameters"


def test_large_arrays_move_one_by_one(make_mesh: MakeMesh) -> None:
    """A message does not grow without limit."""
    mesh = make_mesh({"x": 6})
    layout = Layout(["x", None], mesh)
    arrays: list[Any] = [spmd.full((n << 17, 3), n, "uint8", layout=layout) for n in (5, 1, 2, 13)]
    traced = spmd.function(lambda arrays: [array.relayout([None, "x"]) for array in arrays])
    for found, array in zip(traced(arrays), arrays, strict=True):
        np.testing.assert_array_equal(found.full(), array.full())
    (known,) = traced._traces.values()
    groups = [group for group in parse(known.program.text).groups if isinstance(group[0], Move)]
    assert [len(group) for group in groups] == [3, 1]


def rest_of(result: Any) -> list[Any]:
    """The arrays of a step's result."""
    loss, moved = result
    return [loss, *moved]
