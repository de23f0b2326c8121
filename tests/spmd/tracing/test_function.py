"""Traced functions: traced once, sent in one message a call, with NumPy's values; and what `explain` says of them."""

from __future__ import annotations

import textwrap
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts
from tests.spmd.conftest import MakeMesh

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator
from pscluster.core.errors import MisuseError
from pscluster.spmd import UNSHARDED, Layout
from pscluster.spmd.execution.recording import Sendable
from pscluster.spmd.meshes import session_of
from pscluster.spmd.tracing.function import MANY_TRACES

A = np.random.default_rng(1).random((7, 5))
B = np.random.default_rng(2).random((5, 4))


def softmax_of_product(a: Any, b: Any) -> Any:
    """What people write."""
    scores = a @ b
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def counted(mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch) -> list[Sendable]:
    """The programs that are sent from now on."""
    executor, sent = session_of(mesh).executor, list[Sendable]()
    start = executor.start

    def started(program: Sendable) -> Any:
        sent.append(program)
        return start(program)

    monkeypatch.setattr(executor, "start", started)
    return sent


def test_a_program_for_all_layouts(grid: spmd.Mesh) -> None:
    """Traced for each kind of arguments once; the values and layouts are those without tracing."""
    traced = spmd.function(softmax_of_product)
    wanted = softmax_of_product(A, B)
    layouts = all_layouts(grid, 2)
    for first, second in zip(layouts, reversed(layouts), strict=True):
        a, b = spmd.distribute(A, first), spmd.distribute(B, second)
        result = traced(a, b)
        np.testing.assert_allclose(result.full(), wanted, rtol=1e-12)
        assert result.layout == softmax_of_product(a, b).layout
        traced(a, b)
    assert traced.traces == len(layouts)
    assert "softmax_of_product" in repr(traced)


def test_the_bits_depend_on_layouts_not_on_tasks(workers: ClusterCoordinator) -> None:
    """Six devices are one process, or two: terms are combined in the same order. NumPy's warnings are not shown."""

    def computed(a: Any, b: Any) -> list[Any]:
        return [a @ b, (a @ b).sum(), a.var(axis=0), np.linalg.norm(a), np.log(a[0] * 0) / 0, *np.split(a @ b, [2])]

    found = []
    dims = {"x": 3, "y": 2}
    for mesh in (spmd.create_mesh(dims), spmd.create_mesh(dims, coordinator=workers, devices_per_task=3)):
        a = spmd.distribute(A.astype(np.float32), Layout(["y", "x"], mesh))
        b = spmd.distribute(B.astype(np.float32), Layout(["x", None], mesh))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for function in (computed, traced := spmd.function(computed), traced, traced):
                found.append([result.full().tobytes() for result in function(a, b)])
    assert all(one == found[0] for one in found)


def test_a_small_result_comes_with_its_program(grid: spmd.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is looked at costs no message of its own, also where an error comes first."""
    a = spmd.distribute(A, Layout(["x", "y"], grid))
    total = spmd.function(lambda a: (a.sum(), a + 1, np.linalg.inv(a[:2, :2] * 0 + a.min())))
    spmd.barrier(grid)
    sent = counted(grid, monkeypatch)
    mean = spmd.function(lambda a: (a.mean(), a * 2))(a)
    assert [float(mean[0]), float(mean[0])] == [pytest.approx(A.mean())] * 2
    assert len(sent) == 1
    np.testing.assert_allclose(mean[1].full(), A * 2)
    summed, _, _ = total(a)
    with pytest.raises(np.linalg.LinAlgError):
        float(summed)
    with pytest.raises(spmd.TensorLostError):
        float(summed)


def test_one_message_a_call(grid: spmd.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls are sent without waiting; each is a program that workers know by its definition."""
    a, b = spmd.distribute(A, Layout(["x", None], grid)), spmd.distribute(B, Layout([None, "y"], grid))
    traced = spmd.function(softmax_of_product)
    spmd.barrier(grid)
    sent = counted(grid, monkeypatch)
    results = [traced(a, b) for _ in range(5)]
    assert len(sent) == 5
    assert len({id(program.definition) for program in sent}) == 1
    assert len({program.text for program in sent}) == 1
    np.testing.assert_allclose(results[-1].full(), softmax_of_product(A, B), rtol=1e-12)


def test_structures_captured_arrays_and_constants(make_mesh: MakeMesh) -> None:
    """Arguments and results are nested; what is returned as it came stays the same array."""
    mesh = make_mesh({"x": 3, "y": 2})
    a = spmd.distribute(A, Layout(["x", "y"], mesh))
    captured = spmd.distribute(A, Layout([None, "x"], mesh))
    unfinished = np.sum(captured, axis=1)  # its terms are not combined yet

    @spmd.function
    def step(arrays: dict[str, Any], factors: tuple[float, ...], *, offset: Any) -> Any:
        total = arrays["a"] * factors[0] + captured + offset
        return {"sums": [total.sum(), total.sum()], "same": arrays["a"], "other": captured, "n": 3}, total + 1 - total

    for _ in range(2):
        result, ones = step({"a": a}, (2.0, 1.0), offset=np.arange(5.0))
        assert result["n"] == 3
        for total in result["sums"]:
            np.testing.assert_allclose(total.full(), (3 * A + np.arange(5.0)).sum())
        np.testing.assert_array_equal(result["same"].full(), A)
        np.testing.assert_array_equal(result["other"].full(), A)
        np.testing.assert_allclose(ones.full(), np.ones((7, 5)))
    assert step.traces == 1
    step({"a": a}, (3.0, 1.0), offset=np.arange(5.0))
    assert step.traces == 2

    @spmd.function
    def with_terms(of: Any) -> Any:
        return of * 0 + unfinished[:, None]

    np.testing.assert_allclose(with_terms(a).full(), A.sum(axis=1)[:, None] + 0 * A)
    np.testing.assert_allclose(unfinished.full(), A.sum(axis=1))


@dataclass(frozen=True)
class State:
    """What people keep arrays in."""

    weights: dict[str, Any]
    steps: Any


def test_dataclasses_methods_and_functions_without_arrays(grid: spmd.Mesh) -> None:
    """What a training script is made of: a state that steps return anew, and an object that has the functions."""

    class Model:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        @spmd.function
        def initial(self) -> State:
            made = spmd.distribute(A, Layout(["x", "y"], grid))
            return State(OrderedDict(w=made, b=spmd.zeros(5, layout=Layout(["y"], grid))), np.zeros_like(made[0, 0]))

        @spmd.function
        def step(self, state: State, x: Any) -> Any:
            def loss(weights: Any) -> Any:
                return np.square(x @ weights["w"] + weights["b"]).sum()

            value, gradients = spmd.value_and_grad(loss)(state.weights)
            weights = OrderedDict({key: w - self.rate * gradients[key] for key, w in state.weights.items()})
            return value, State(weights, state.steps + 1)

    with pytest.raises(MisuseError, match=r"by distribute\(\), or name the devices by `with default_mesh\(mesh\):`"):
        Model(0.01).initial()
    x, (w, b) = np.eye(3, 7) + 0.5, (A, np.zeros(5))
    for rate in (0.01, 0.02):
        model, w, b = Model(rate), A, np.zeros(5)
        with spmd.default_mesh(grid):
            state = model.initial()
        for _ in range(3):
            value, state = model.step(state, spmd.distribute(x, Layout([None, "x"], grid)))
            error = x @ w + b
            np.testing.assert_allclose(value.full(), np.square(error).sum())
            w, b = w - rate * 2 * x.T @ error, b - rate * 2 * error.sum(axis=0)
        np.testing.assert_allclose(state.weights["w"].full(), w)
        np.testing.assert_allclose(state.weights["b"].full(), b)
        assert type(state) is State
        assert type(state.weights) is OrderedDict
        assert state.steps.item() == 3
    assert Model.step.traces == 2, "one for each object"


def test_what_is_seen_of_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Arrays can be printed in it, and not be used outside; functions that are traced all the time are named."""
    mesh = spmd.create_mesh({"x": 3})
    a = spmd.distribute(A, Layout(["x", None], mesh))
    kept: list[Any] = []

    def scaled(v: Any, factor: float) -> Any:
        kept.append(v * factor)
        assert "DTensor(<traced>, layout=" in f"{v}"
        return v * factor

    traced = spmd.function(scaled)
    for count in range(1, MANY_TRACES + 2):
        traced(a, 1 / count)
        assert ("scaled has been traced 16 times" in caplog.text) == (count >= MANY_TRACES)
    assert caplog.text.count("pass numbers that change from call to call as arrays") == 1
    uses: list[Callable[[], Any]] = [
        lambda: kept[0].full(),
        lambda: kept[0] + 1,
        lambda: traced(kept[0], 2),
        lambda: traced(a, 2) + kept[0],
    ]
    for use in uses:
        with pytest.raises(MisuseError, match=r"the result of multiply, is part of a traced function.*: return it"):
            use()
    with pytest.raises(MisuseError, match="is part of a traced function"):
        spmd.function(lambda v: v + kept[0])(a)


def test_creation_inside(grid: spmd.Mesh) -> None:
    """What is made inside is made by each call, in place; random values follow from their seed."""
    layout = Layout(["x", "y"], grid)

    @spmd.function
    def noisy(a: Any) -> Any:
        return a + spmd.random.normal(a.shape, 3, layout=layout, dtype=np.float64) + np.ones_like(a) + [1.0] * 5

    a = spmd.distribute(A, layout)
    wanted = A + spmd.random.normal(A.shape, 3, layout=layout, dtype=np.float64).full() + 2
    for _ in range(2):
        np.testing.assert_allclose(noisy(a).full(), wanted)
    nested = spmd.function(lambda array: noisy(noisy(array)))
    np.testing.assert_allclose(nested(a).full(), 2 * wanted - A)


def test_what_a_traced_function_can_not_do(grid: spmd.Mesh) -> None:
    """Look at values, be called without arrays, or with arrays of two meshes. Errors come at once."""
    a = spmd.distribute(A, Layout(["x", None], grid))
    replicated = a.relayout([None, None])
    for look in (lambda v: v.full(), lambda v: v if v.sum() > 0 else -v, np.asarray, spmd.unpack):
        with pytest.raises(MisuseError, match="while a function is traced"):
            spmd.function(look)(replicated)
    with pytest.raises(MisuseError, match=r"at least one global array, on whose devices it runs: .*\.plain is$"):
        spmd.function(lambda v: v)(3)
    with pytest.raises(MisuseError, match="takes arrays, and numbers, texts and the like"):
        spmd.function(lambda v, w: v)(a, {1, 2})
    other = spmd.ones(5, layout=Layout([None], spmd.create_mesh({"z": 2})))
    with pytest.raises(spmd.LayoutError, match="different meshes"):
        spmd.function(lambda v, w: v + w)(a, other)
    with pytest.raises(spmd.LayoutError, match="on one mesh"):
        spmd.function(lambda v: v + (other * 2))(a)
    with pytest.raises(ValueError, match="not aligned"):
        spmd.function(lambda v: v @ v)(a)
    np.testing.assert_array_equal((a + 0).full(), A)


def test_errors_of_a_call_come_with_the_next_fetch(grid: spmd.Mesh) -> None:
    """As with single operations; results of the call are lost, and the function can be called again."""
    inverse: Any = spmd.function(np.linalg.inv)
    layout = Layout.replicated(grid, 2)
    bad = inverse(spmd.zeros((2, 2), layout=layout))
    with pytest.raises(np.linalg.LinAlgError):
        bad.full()
    with pytest.raises(spmd.TensorLostError):
        bad.full()
    np.testing.assert_array_equal(inverse(spmd.eye(2, layout=layout)).full(), np.eye(2))
    assert inverse.traces == 1


@pytest.mark.parametrize(
    ("dims", "specs", "work", "moved"),
    [
        ({"x": 6}, ([None, None], [None, None]), 72, 0),
        ({"x": 3, "y": 2}, ([None, "x"], ["x", None]), 24, 6 * 2 * 4 * 8),
        ({"x": 3, "y": 2}, (["y", "x"], ["x", None]), 12, 6 * 2 * 2 * 8),
    ],
)
def test_multiplications_of_the_overview(dims: dict[str, int], specs: Any, work: int, moved: int) -> None:
    """72, 24 and 12 on six devices, and the bytes of terms that are combined; nothing runs."""
    mesh = spmd.create_mesh(dims)
    a = spmd.distribute(np.ones((2, 3), np.int64), Layout(specs[0], mesh))
    b = spmd.distribute(np.ones((3, 2), np.int64), Layout(specs[1], mesh))
    for fn in (np.matmul, spmd.function(np.matmul)):
        explained = spmd.explain(fn, a, b)
        assert explained.work("matmul") == work
        assert explained.moved_bytes == moved


def test_an_explanation_is_a_table() -> None:
    """A row for each operation."""
    mesh = spmd.create_mesh({"x": 3, "y": 2})
    a = spmd.distribute(np.ones((2, 3), np.int64), Layout(["y", "x"], mesh))
    b = spmd.distribute(np.ones((3, 2), np.int64), Layout(["x", None], mesh))
    text = """\
        operation  operands                                result                              work  on all  bytes moved
        matmul     int64[2, 3] (y, x), int64[3, 2] (x, -)  int64[2, 2] (y, -) in terms over x  2     12
        combine    int64[2, 2] (y, -) in terms over x      int64[2, 2] (y, -)                                192
        negative   int64[2, 2] (y, -)                      int64[2, 2] (y, -)                  2     12
        3 operations, 192 bytes moved"""
    assert str(spmd.explain(lambda x, y: -(x @ y), a, b)) == textwrap.dedent(text)


def test_pictures_of_layouts() -> None:
    """Blocks with their places and devices; replicas stand together."""
    mesh = spmd.create_mesh({"x": 3, "y": 2})
    assert spmd.visualize(Layout(["y", "x"], mesh), (5, 7)) == textwrap.dedent("""\
             0:3   3:5   5:7
           +-----+-----+-----+
        0:3|  0  |  2  |  4  |
           +-----+-----+-----+
        3:5|  1  |  3  |  5  |
           +-----+-----+-----+""")
    assert spmd.visualize(Layout(["x"], mesh), (5,)) == textwrap.dedent("""\
          0:2   2:4   4:5
        +-----+-----+-----+
        | 0,1 | 2,3 | 4,5 |
        +-----+-----+-----+""")
    assert "0,1,2,3,4,5" in spmd.visualize(Layout([], mesh), ())
    with pytest.raises(spmd.LayoutError, match="at most 2"):
        spmd.visualize(Layout([UNSHARDED] * 3, mesh), (1, 2, 3))
    with pytest.raises(spmd.LayoutError, match="has 1 axes"):
        spmd.visualize(Layout(["x", None], mesh), (3,))
