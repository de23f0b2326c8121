"""Functions that follow each other: what devices have in common is computed once, and the rest by threads, the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.programs.support import Tasks, grid, typed

from pscluster.worker.programs import stretches
from pscluster.worker.programs.computing import Computation

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
    calls = 0

    class Counted(Computation):
        def run(self, registers: Any) -> None:
            nonlocal calls
            calls += 1  # not atomic: only counted without threads
            super().run(registers)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(stretches, "WORTH_WORK", worth)
        patch.setattr(stretches, "Computation", Counted)
        (found,) = Tasks(MESH).run(types, text, loads=loads)
    for blocks, register in zip(found, fetched, strict=True):
        for block, wanted in zip(blocks, expected[register], strict=True):
            np.testing.assert_array_equal(block, wanted)
    if worth:
        assert calls == sum(map(len, devices_in_common(code)))


def test_the_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were none."""
    monkeypatch.setattr(stretches, "WORTH_WORK", 0)
    array, specs = LOADED[0]
    of = typed(array, specs, MESH)
    code: list[Any] = [["load", 0, 0], ["compute", [1], "linalg.inv", [0], [["in", 0]], {}]]
    with pytest.raises(np.linalg.LinAlgError, match="two-dimensional"):
        Tasks(MESH).run([of, of], code, loads=[(array, of)])
