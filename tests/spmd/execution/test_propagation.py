"""What is only needed in shards is made in them: the same bits, and never more bytes or work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.layouts.support import all_layouts
from tests.spmd.conftest import MakeMesh

from pscluster import spmd
from pscluster.core.layouts import moving
from pscluster.spmd import Layout
from pscluster.spmd.execution.recording import Recording
from pscluster.spmd.tracing.explain import Explanation

MESHES = [spmd.create_mesh(dims) for dims in ({"x": 3, "y": 2}, {"x": 5}, {"a": 2, "b": 2, "c": 2})]
SHAPE = (7, 5)

Maker = Callable[..., Any]

ELEMENTWISE: list[Maker] = [
    lambda a, b: a + b,
    lambda a, b: a * 0.5 - b,
    lambda a, b: np.where(a > b, a, 2.0),
    lambda a, b: np.clip(a, -1, 1) - b,
    lambda a, b: a / (1 + np.sqrt(np.abs(b))),
    lambda a, b: a * b[0] + np.arange(5.0, dtype=a.dtype),
    lambda a, b: np.maximum(a, b[:, :1]),
    lambda a, b: a.astype("float32") + np.ones_like(b),
    lambda a, b: a**2 - b,
]
OTHERS: list[Maker] = [
    lambda a, b: a - b.sum(axis=0),
    lambda a, b: a * (1 + (b * b).mean()),
    lambda a, b: (a @ b.T) @ a,
    lambda a, b: a - b.max(axis=1, keepdims=True),
    lambda a, b: np.cumsum(a, axis=0) - b,
    lambda a, b: a.T.reshape(-1).reshape(SHAPE) + b,
]
WITHOUT_GRADIENT: list[Maker] = [
    lambda a, b: np.divmod(a, 0.25 + b * b)[1],
    lambda a, b: sum(np.divmod(a, 0.25 + b * b)),
    lambda a, b: (a * (1 + 1j)).imag + b,
]


@st.composite
def programs(draw: st.DrawFn, more: list[Maker] = WITHOUT_GRADIENT) -> tuple[list[Layout], Maker]:
    """Layouts of three arrays, and a function of them, made of others and of relayouts."""
    mesh = draw(st.sampled_from(MESHES))
    layouts = all_layouts(mesh, 2)
    steps: list[tuple[Any, int, int]] = []
    for number in range(3, 3 + draw(st.integers(1, 12))):
        relayouts = st.sampled_from(layouts)
        kind = draw(st.one_of(st.sampled_from(ELEMENTWISE), st.sampled_from(OTHERS + more), relayouts, relayouts))
        steps.append((kind, draw(st.integers(0, number - 1)), draw(st.integers(0, number - 1))))
    returned = draw(st.sets(st.integers(0, len(steps) + 2), min_size=1, max_size=3)) | {len(steps) + 2}

    def program(*arrays: Any) -> list[Any]:
        made = list(arrays)
        for kind, a, b in steps:
            made.append(made[a].relayout(kind) if isinstance(kind, Layout) else kind(made[a], made[b]))
        return [made[place] for place in sorted(returned)]

    return [draw(st.sampled_from(layouts)) for _ in range(3)], program


def arrays_of(layouts: list[Layout]) -> list[Any]:
    """Arrays in these layouts."""
    random = np.random.default_rng(0)
    return [spmd.distribute(random.standard_normal(SHAPE), layout) for layout in layouts]


def bits(block: Any) -> bytes:
    """Return a block's bits, but for the signs of NaNs."""
    values = np.where(np.isnan(block), np.nan, block) if block.dtype.kind == "f" else block
    return bytes(values.tobytes())


def check(function: Maker, arrays: list[Any]) -> Explanation:
    """Compare a function's program with the same one as it is recorded, or one by one; return what it does."""
    found = spmd.function(function)(*arrays)
    explained = spmd.explain(function, *arrays)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Recording, "propagate_shardings", lambda self, results: None)
        for one, other in zip(found, function(*arrays), strict=True):
            assert one.layout == other.layout
            pairs = zip(spmd.unpack(one), spmd.unpack(other), strict=True)
            assert all(bits(block) == bits(wanted) for block, wanted in pairs)
        recorded = spmd.explain(function, *arrays)
    assert explained.moved_bytes <= recorded.moved_bytes
    assert sum(step.work for step in explained.steps) <= sum(step.work for step in recorded.steps)
    return explained


def check_combining(through: int, function: Maker, arrays: list[Any]) -> None:
    """Check a function's program where sums of more than this many bytes are combined on the way."""
    with pytest.MonkeyPatch.context() as monkeypatch, np.errstate(all="ignore"):
        monkeypatch.setattr(moving, "THROUGH_BYTES", through)
        check(function, arrays)


@pytest.mark.parametrize("through", [0, 1 << 20])
@given(case=programs())
def test_a_program_has_the_bits_of_its_functions(through: int, case: tuple[list[Layout], Maker]) -> None:
    """Any functions and relayouts, with results in between; large sums are combined on the way or not."""
    layouts, program = case
    check_combining(through, program, arrays_of(layouts))


TYPES = ["float32", "float64", "bool", "int8", "int64", "uint8"]
SHAPES = [(7, 5), (1, 5), (7, 1), (1, 1), (5,), (1,)]
OF_ANY_TYPE: list[Maker] = [
    *(np.add, np.multiply, np.maximum, np.fmin, np.true_divide, np.arctan2, np.greater, np.logical_xor, np.hypot),
    lambda a, b: np.abs(a).astype("float32") ** b,
    lambda a, b: np.divmod(a + 0.5, b)[0],
    lambda a, b: np.modf(a / 3)[1] + b,
    lambda a, b: np.where(a != 0, a, b),
    lambda a, b: np.where(b > 0, 1, a),
    lambda a, b: np.clip(a, b, 3),
    lambda a, b: np.exp(a),
    lambda a, b: a * a,
    lambda a, b: a + np.arange(a.shape[-1]),
    lambda a, b: np.full_like(a, 2) * b,
    lambda a, b: a.sum(axis=0, keepdims=True),
    lambda a, b: a.mean(axis=-1, keepdims=True),
    lambda a, b: a.max(axis=0, keepdims=True) + b,
    lambda a, b: np.cumsum(a, axis=0) + b.any(),
    lambda a, b: a + spmd.random.uniform(a.shape, 3, layout=a.layout),
]


@st.composite
def mixed_programs(draw: st.DrawFn) -> tuple[list[Any], Maker]:
    """Arrays of any types and shapes that can be broadcast, and a function of them, as `programs` makes them."""
    mesh = draw(st.sampled_from(MESHES))
    layouts = [all_layouts(mesh, rank) for rank in range(3)]
    random, arrays = np.random.default_rng(draw(st.integers(0, 9))), []
    for shape in draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=3)):
        values = np.rint(2 * random.standard_normal(shape)) + 2 * draw(st.booleans())
        values = np.abs(values).astype(draw(st.sampled_from(TYPES)))
        arrays.append(spmd.distribute(values, draw(st.sampled_from(layouts[len(shape)]))))
    steps: list[tuple[Any, int, int]] = []
    for number in range(len(arrays), len(arrays) + draw(st.integers(2, 14))):
        kind = draw(st.one_of(st.sampled_from(OF_ANY_TYPE), st.sampled_from(TYPES), *[st.integers(0, 99)] * 2))
        steps.append((kind, draw(st.integers(0, number - 1)), draw(st.integers(0, number - 1))))
    last = len(arrays) + len(steps) - 1
    returned = draw(st.sets(st.integers(0, last), max_size=2)) | {last}

    def program(*arrays: Any) -> list[Any]:
        made = list(arrays)
        for kind, a, b in steps:
            if isinstance(kind, int):
                choices = layouts[made[a].ndim]
                made.append(made[a].relayout(choices[kind % len(choices)]))
            else:
                made.append(made[a].astype(kind) if isinstance(kind, str) else kind(made[a], made[b]))
        return [made[place] for place in sorted(returned)]

    return arrays, program


@pytest.mark.parametrize("through", [0, 1 << 20])
@given(case=mixed_programs())
def test_a_program_of_mixed_types_and_shapes(through: int, case: tuple[list[Any], Maker]) -> None:
    """Also where axes of 1 are sharded, and one array has several uses."""
    arrays, program = case
    check_combining(through, program, arrays)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: np.power(np.abs(a).astype("float32"), np.full_like(b[:1], 2, "float32")),
        lambda a, b: np.fmin(a * 0, -(b[:, :1] * 0)),
        lambda a, b: np.fmax(np.sign(a) * 0, 0.0),
        lambda a, b: (a * 1e12).astype("uint32"),
    ],
)
def test_functions_that_depend_on_where_an_element_is(make_mesh: MakeMesh, function: Maker) -> None:
    """In NumPy: if an exponent is the same for a whole column, and at the end, where vectors are not full."""
    mesh = make_mesh({"x": 3, "y": 2})
    random = np.random.default_rng(0)
    whole = Layout([None, None], mesh)
    arrays = [spmd.distribute(random.standard_normal((67, 3)), whole) for _ in range(2)]
    for layout in all_layouts(mesh, 2):
        check(lambda a, b, layout=layout: [function(a, b).relayout(layout)], arrays)


@given(case=programs([]), of_moments=st.integers(0, 99))
def test_a_step_has_the_bits_of_its_functions(case: tuple[list[Layout], Maker], of_moments: int) -> None:
    """Gradients of any functions, and a moment in any layout."""
    layouts, program = case
    choices = all_layouts(layouts[0].mesh, 2)
    moments = choices[of_moments % len(choices)]

    def step(a: Any, b: Any, moment: Any) -> list[Any]:
        loss, gradients = spmd.value_and_grad(lambda p: np.tanh(program(p, b, b)[-1]).mean())(a)
        moment = 0.9 * moment + 0.1 * gradients
        return [loss, (a - moment / (1 + np.abs(moment))).relayout(a.layout), moment]

    with np.errstate(all="ignore"):
        check(step, arrays_of([*layouts[:2], moments]))


def adam(gradient: Any, value: Any, first: Any, second: Any) -> list[Any]:
    """What people write."""
    first = 0.9 * first + (1 - 0.9) * gradient
    second = 0.999 * second + (1 - 0.999) * (gradient * gradient)
    return [value - 0.01 * first / (np.sqrt(second) + 1e-7), first, second]


def test_an_optimizer_whose_state_is_sharded(make_mesh: MakeMesh) -> None:
    """Terms of a gradient are combined in shards, and only the parameters gathered: the bytes of an all-reduce."""
    mesh = make_mesh({"x": 6})
    random = np.random.default_rng(0)
    x, w, moments = random.standard_normal((20, 11)), random.standard_normal((11, 4)), np.zeros((11, 4))
    rows, whole = Layout(["x", None], mesh), Layout([None, None], mesh)

    def step(x: Any, w: Any, *moments: Any) -> list[Any]:
        loss, gradient = spmd.value_and_grad(lambda w: np.square(x @ w).mean())(w)
        w, *moments_after = adam(gradient + 0.01 * w, w, *moments)
        return [loss, w.relayout(whole), *moments_after]

    arrays = [spmd.distribute(array, layout) for array, layout in ((x, rows), (w, whole), *[(moments, rows)] * 2)]
    explained = check(step, arrays)
    combined = [of.outputs[0] for of in explained.steps if of.name == "combine"]
    assert [of.layout for of in combined] == [Layout([], mesh), rows]
    assert explained.moved_bytes == 2 * w.nbytes * (6 - 1) + 8 * 6 * (6 - 1)
    of_adam = [of for of in explained.steps if of.work and of.outputs[0].shape == w.shape and of.name != "tensordot"]
    assert {(of.outputs[0].layout, of.work) for of in of_adam} == {(rows, 2 * 4)}
    assert len(of_adam) == 14


LINE = spmd.create_mesh({"x": 6})
ROWS, COLUMNS, WHOLE = (Layout(specs, LINE) for specs in (["x", None], [None, "x"], [None, None]))


def in_rows(*arrays: Any) -> list[Any]:
    """All of them in rows."""
    return [array.relayout(ROWS) for array in arrays]


@pytest.mark.parametrize(
    ("uses", "layout"),
    [
        (lambda g, w: in_rows(g * 2), ROWS),
        (lambda g, w: in_rows(g * 2, np.sqrt(g * g) + w), ROWS),
        (lambda g, w: in_rows(sum(np.divmod(g, 0.5))), ROWS),
        (lambda g, w: [(g.relayout(WHOLE) / 3).relayout(COLUMNS)], COLUMNS),
        (lambda g, w: [*in_rows(g + 1), w.sum(axis=0) + w], ROWS),
        (lambda g, w: [w.relayout(ROWS) * g], ROWS),
        (lambda g, w: [*in_rows(g * 2), g], WHOLE),
        (lambda g, w: [*in_rows(h := g * 2), h], WHOLE),
        (lambda g, w: [*in_rows(g * 2), np.square(g).sum()], WHOLE),
        (lambda g, w: [*in_rows(g * 2), g @ w.T], WHOLE),
        (lambda g, w: [*in_rows(g * 2), (g + 1).relayout(COLUMNS)], WHOLE),
        (lambda g, w: in_rows(np.cumsum(g, axis=0)), WHOLE),
        (lambda g, w: in_rows(g.astype("complex128") * g), WHOLE),
        (lambda g, w: in_rows(np.arctan(g.astype("float16"))), WHOLE),
        (lambda g, w: in_rows(g**2), ROWS),
        (lambda g, w: in_rows(np.abs(g) ** (2 * np.ones_like(w[:, :1]))), WHOLE),
        (lambda g, w: in_rows(1.5**g), WHOLE),
        (lambda g, w: in_rows(np.fmax(g, 0.0)), WHOLE),
        (lambda g, w: in_rows(g.astype("int32")), WHOLE),
        (lambda g, w: in_rows(np.rint(g).astype("float32")), ROWS),
        (lambda g, w: in_rows(spmd.local_map(np.negative, [WHOLE], WHOLE, out_types=(SHAPE, "float64"))(g)), WHOLE),
    ],
)
def test_where_terms_are_combined(uses: Maker, layout: Layout) -> None:
    """In shards if nothing else needs them, in the same ones through elementwise functions; else as ever."""
    (w,) = arrays_of([WHOLE])
    x = spmd.random.normal((8, *SHAPE), 1, dtype="float64", layout=Layout.batch_sharded(LINE, "x", 3))
    explained = check(lambda x, w: uses(x.sum(axis=0), w), [x, w])
    combined = [of.outputs[0].layout for of in explained.steps if of.name == "combine" and of.outputs[0].shape == SHAPE]
    assert combined == [layout]
