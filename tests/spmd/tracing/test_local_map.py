"""Plain functions on local blocks, on virtual devices and on workers, eagerly and in programs; errors name devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.spmd.conftest import MakeMesh
from tests.spmd.local_functions import standardized

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy
from pscluster.core.errors import MisuseError
from pscluster.spmd import Layout

A = np.random.default_rng(1).random((7, 5))
W = np.random.default_rng(2).random((5, 4))


def by_hand(array: Any) -> Any:
    """What `standardized` makes of the whole."""
    return (array - array.mean(axis=1, keepdims=True)) / array.std(axis=1, keepdims=True)


def test_blocks_and_collectives(grid: spmd.Mesh) -> None:
    """Arrays are relaid out to what the function wants; the types of results follow from its blocks."""
    a = spmd.distribute(A, Layout([None, "x"], grid))
    result = spmd.local_map(standardized, [["x", "y"]], ["x", "y"])(a)
    np.testing.assert_allclose(result.full(), by_hand(A))
    assert (result.shape, result.dtype, result.layout) == ((7, 5), A.dtype, Layout(["x", "y"], grid))
    np.testing.assert_allclose((result + a).full(), by_hand(A) + A)  # it is an array like others


def test_nested_arguments_and_results(grid: spmd.Mesh) -> None:
    """In lists, tuples and dicts; blocks are as they lie where no layout is given, and can't be written to."""
    arrays = {
        "w": spmd.distribute(W, Layout([None, "y"], grid)),
        "b": [spmd.distribute(np.arange(4), Layout(["y"], grid))],
    }

    def layer(parameters: Any, x: Any) -> Any:
        assert not x.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            x[0] = 1
        out = x @ parameters["w"] + parameters["b"][0]
        place = np.full(1, 2 * spmd.axis_index("x") + spmd.axis_index("y"), np.int8)
        return {"out": out, "rest": (spmd.psum(out.sum(), ("x", "y")), [spmd.all_gather(place, "y")])}

    mapped = spmd.local_map(layer, [None, Layout(["x", None], grid)], {"out": ["x", "y"], "rest": ([], [["x"]])})
    for _ in range(2):
        made = mapped(arrays, A)
        np.testing.assert_allclose(made["out"].full(), A @ W + np.arange(4))
        assert float(made["rest"][0]) == pytest.approx(np.sum(A @ W + np.arange(4)))
        assert made["rest"][1][0].full().tolist() == [0, 1, 2, 3, 4, 5]
        assert made["rest"][1][0].dtype == np.int8


class Pair(NamedTuple):
    """Two arrays."""

    first: Any
    second: Any


def test_named_tuples() -> None:
    """The function gets them as they are."""
    mesh = spmd.create_mesh({"x": 2})
    a = spmd.distribute(A, Layout(["x", None], mesh))
    mapped = spmd.local_map(lambda pair: pair.first - pair.second, None, ["x", None])
    np.testing.assert_array_equal(mapped(Pair(a, a)).full(), 0 * A)


def test_in_programs(grid: spmd.Mesh) -> None:
    """With the types of its results, one call is one program, which other operations are part of."""
    a, w = spmd.distribute(A, Layout(["x", "y"], grid)), spmd.distribute(W, Layout(["y", None], grid))

    def product(x: Any, w: Any) -> Any:
        return spmd.psum(x @ w, "y")

    types = [((7, 4), "float64"), spmd.zeros((7, 4), layout=Layout(["x", None], grid)), lambda x, w: ((7, 4), x.dtype)]
    for of in types:
        mapped = spmd.local_map(product, None, ["x", None], out_types=of)
        traced = spmd.function(lambda x, w, mapped=mapped: np.tanh(mapped(x, w)) + 1)
        for _ in range(2):
            np.testing.assert_allclose(traced(a, w).full(), np.tanh(A @ W) + 1)
        np.testing.assert_allclose(mapped(a, w).full(), A @ W)
        assert spmd.explain(traced, a, w).steps[0].name.startswith("local_map(")


def test_errors_of_calls(grid: spmd.Mesh) -> None:
    """The function's own, with a fetch or at once; those of collectives name the devices. Then all goes on."""
    a = spmd.distribute(A, Layout(["x", "y"], grid))

    def fails(block: Any) -> Any:
        if spmd.axis_index("x") == 1 and spmd.axis_index("y") == 0:
            raise ZeroDivisionError("on the third device")
        return spmd.psum(block, "x")

    def returns_early(block: Any) -> Any:
        return block if spmd.axis_index("x") == 2 else spmd.psum(1.0, "x") * block

    calls: list[tuple[Callable[..., Any], Any, type[Exception], str]] = [
        (fails, ["x", "y"], ZeroDivisionError, "on the third device"),
        (
            returns_early,
            ["x", "y"],
            MisuseError,
            r"device 0 \(.*\) waits in psum over x at test_local_map.py:\d+ for dev.* 4",
        ),
        (lambda block: block[0], ["x", "y"], MisuseError, r"has shape \(.*\) on device 0 .* layout \[x, y\] .* 2 axes"),
        (
            lambda block: block[: spmd.axis_index("x")],
            ["x", "y"],
            MisuseError,
            "an array of shape .* has a block of shape",
        ),
        (
            lambda block: block.sum(),
            [],
            MisuseError,
            "differs between device 0 .* and device 1 .*, which are replicas by",
        ),
        (
            lambda block: (block, block),
            [["x", "y"]] * 3,
            MisuseError,
            "has returned 2 results, where out_layouts has 3",
        ),
        (lambda block: block, {"a": ["x", "y"]}, MisuseError, r"where out_layouts has \['a'\]"),
        (lambda block: spmd.psum(block, 5), ["x", "y"], MisuseError, "psum over 5: the mesh has the dimensions"),  # type: ignore[arg-type]
        (lambda block: "text", [], MisuseError, "has returned a str, of str.*: return arrays of numbers"),
    ]
    for fn, out, error, message in calls:
        with pytest.raises(error, match=message):
            spmd.local_map(fn, None, out)(a)
    late = spmd.local_map(fails, None, ["x", "y"], out_types=a)(a)
    with pytest.raises(ZeroDivisionError, match="on the third device"):
        late.full()
    wrong = spmd.local_map(lambda block: block * 1, None, ["x", "y"], out_types=((8, 5), "float64"))(a)
    message = r"has shape .* on device . .*, where an array of shape \(8, 5\) and type float64 in layout \[x, y\] has a"
    with pytest.raises(MisuseError, match=message):
        wrong.full()
    unchecked = spmd.local_map(lambda block: block.sum(), None, [], check=False)(a)
    assert len({block.item() for block in spmd.unpack(unchecked)}) == 6
    np.testing.assert_array_equal((a + 0).full(), A)


def test_what_is_refused(make_mesh: MakeMesh) -> None:
    """Before anything is called: layouts that do not fit, what is no array, types that are missing in a program."""
    mesh = make_mesh({"x": 3, "y": 2})
    a = spmd.distribute(A, Layout(["x", "y"], mesh))

    def fn(*blocks: Any) -> Any:
        raise AssertionError("it is called")

    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: spmd.local_map(3, None, []), MisuseError, "local_map takes a function, not an int"),  # type: ignore[arg-type]
        (lambda: spmd.local_map(fn, None, [])(3), MisuseError, "at least one global array"),
        (
            lambda: spmd.local_map(fn, None, [])(a, 3),
            MisuseError,
            r"argument 1 of local_map\(.*fn\) is an int, not an array",
        ),
        (
            lambda: spmd.local_map(fn, [None], [])(a, a),
            spmd.LayoutError,
            "is called with 2 arguments, and in_layouts is for 1",
        ),
        (lambda: spmd.local_map(fn, [["x"]], [])(a), spmd.LayoutError, "has 2 axes, but the layout has 1"),
        (lambda: spmd.local_map(fn, [["z", None]], [])(a), spmd.LayoutError, "can't be sharded over 'z'"),
        (lambda: spmd.local_map(fn, [3], [])(a), spmd.LayoutError, "argument 0 of local_map: 3 is not a layout"),
        (
            lambda: spmd.local_map(fn, [{"a": None}], [])([a]),
            spmd.LayoutError,
            "argument 0 of local_map.* in_layouts has",
        ),
        (lambda: spmd.local_map(fn, None, 3)(a), spmd.LayoutError, "out_layouts of local_map has 3, not a layout"),
        (lambda: spmd.local_map(fn, None, {})(a), spmd.LayoutError, "has no layout"),
        (
            lambda: spmd.local_map(fn, None, Layout([], spmd.create_mesh({"z": 2})))(a),
            spmd.LayoutError,
            "another mesh",
        ),
        (lambda: spmd.function(spmd.local_map(fn, None, []))(a), MisuseError, "in a traced function needs out_types"),
        (lambda: spmd.local_map(fn, None, [], out_types=3)(a), MisuseError, "out_types of local_map has 3: give"),
        (lambda: spmd.local_map(fn, None, [], out_types=((-1,), int))(a), MisuseError, "of lengths of at least 0"),
        (lambda: spmd.local_map(fn, None, [], out_types=((1,), int))(a), spmd.LayoutError, "has 1 axes"),
        (lambda: spmd.local_map(fn, None, ([], []), out_types=3)(a), MisuseError, "not nested as out_layouts"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    b = spmd.ones(3, layout=Layout(["x"], mesh))
    with pytest.raises(MisuseError, match="gets NumPy arrays, and can't use global arrays"):
        spmd.local_map(lambda block: spmd.ones(3, layout=Layout(["x"], spmd.create_mesh({"x": 1}))), None, ["x"])(b)


def test_gradients(grid: spmd.Mesh) -> None:
    """A vjp makes gradients go through; without one they are refused, with the ways out."""
    a, w = spmd.distribute(A, Layout(["x", "y"], grid)), spmd.distribute(W, Layout(["y", None], grid))

    def product(x: Any, w: Any) -> Any:
        return spmd.psum(x @ w, "y"), x

    def vjp(gradients: Any, results: Any, x: Any, w: Any) -> Any:
        g, unused = gradients
        assert unused is None
        assert results[1].shape == x.shape
        return g @ w.T, {"w": None} if isinstance(w, dict) else x.T @ g

    types = ((7, 4), "float64"), ((7, 5), "float64")
    mapped = spmd.local_map(product, None, (["x", None], ["x", "y"]), out_types=types, vjp=vjp)
    value, (of_a, of_w) = spmd.value_and_grad(lambda a, w: np.sum(mapped(a * 2, w)[0] ** 2), (0, 1))(a, w)
    out = 2 * A @ W
    np.testing.assert_allclose(value.full(), np.sum(out**2))
    np.testing.assert_allclose(of_a.full(), 4 * out @ W.T)
    np.testing.assert_allclose(of_w.full(), 4 * A.T @ out)
    assert (of_a.layout, of_w.layout) == (a.layout, w.layout)
    wrong_ones: list[tuple[Any, str]] = [
        (None, "Either give local_map a vjp"),
        (lambda *_: None, "has returned None, for 2 arguments"),
        (lambda *_: (None,) * 3, "has returned 3 gradients, for 2 arguments"),
        (lambda *_: ([None, None], None), "has returned 3 gradients, for 2 arrays"),
        (lambda *_: (3, None), "as the gradient of an array of shape"),
    ]
    for wrong, message in wrong_ones:
        other = spmd.local_map(product, None, (["x", None], ["x", "y"]), out_types=types, vjp=wrong)
        with pytest.raises((spmd.UnsupportedFunctionError, MisuseError), match=message):
            spmd.value_and_grad(lambda a, w, other=other: np.sum(other(a, w)[0]))(a, w)


def as_a_client() -> Any:
    """What several clients make of a gradient, of functions on blocks, and of calls that do not fit."""
    mesh = spmd.create_distributed_mesh({"x": 3, "y": 2}, devices_per_task=3)
    a, w = spmd.distribute(A, Layout(["x", None], mesh)), spmd.distribute(W, Layout([None, "y"], mesh))
    _, gradient = spmd.value_and_grad(lambda w, a: np.sum(np.tanh(a @ w)))(w, a)
    doubled = spmd.local_map(lambda block: spmd.psum(block, "y"), None, ["x", None])(a)
    with pytest.raises(MisuseError, match=r"device 0 .* waits .* for device 4 .*, whose call has returned"):
        spmd.local_map(lambda block: spmd.axis_index("x") == 2 or spmd.psum(1, "x"), None, [])(a)
    return gradient.full(), doubled.full()


def test_in_several_clients(workers: ClusterCoordinator) -> None:
    """As in one."""
    for value in workers.schedule_together(as_a_client):
        gradient, doubled = value.fetch()
        np.testing.assert_allclose(gradient, A.T @ (1 - np.tanh(A @ W) ** 2))
        np.testing.assert_array_equal(doubled, 2 * A)


def test_where_pickles_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function goes by name; one that has none is refused with the reason, and then all goes on."""
    monkeypatch.setenv("PSCLUSTER_ALLOW_PICKLE", "0")
    with LocalCluster(num_ps=1, num_workers=2) as cluster, ParameterServerStrategy(cluster) as strategy:
        mesh = spmd.create_mesh({"x": 1, "y": 2}, coordinator=ClusterCoordinator(strategy))
        a = spmd.distribute(A, Layout(["x", "y"], mesh))
        with pytest.raises(TypeError, match=re.escape("can't be sent without a pickle")):
            spmd.local_map(lambda block: block, None, ["x", "y"])(a)
        result = spmd.local_map(standardized, None, ["x", "y"])(a)
        np.testing.assert_allclose(result.full(), by_hand(A))
