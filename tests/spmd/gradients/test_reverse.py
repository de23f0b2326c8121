"""Gradients of whole functions: of nested arguments, in their layouts, by one program; and what is refused."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts
from tests.spmd.conftest import MakeMesh

from pscluster import spmd
from pscluster.core.errors import MisuseError
from pscluster.spmd import Layout
from pscluster.spmd.meshes import session_of

RANDOM = np.random.default_rng(3)
X = RANDOM.random((7, 5))
LABELS = RANDOM.integers(0, 3, 7)
PARAMETERS: dict[str, Any] = {
    "hidden": [RANDOM.normal(size=(5, 6)), np.zeros(6)],
    "out": (RANDOM.normal(size=(6, 3)), np.zeros(3)),
}
RATE = 0.3


def loss(parameters: Any, x: Any, labels: Any) -> Any:
    """The mean cross-entropy of a network with one hidden layer, as people write it."""
    (w1, b1), (w2, b2) = parameters["hidden"], parameters["out"]
    scores = np.maximum(x @ w1 + b1, 0) @ w2 + b2
    scores = scores - np.max(scores, axis=1, keepdims=True)
    logs = scores - np.log(np.sum(np.exp(scores), axis=1, keepdims=True))
    return -np.mean(np.take_along_axis(logs, labels[:, None], axis=1))


def by_hand(parameters: Any, x: Any, labels: Any) -> tuple[Any, Any]:
    """The same and its gradient, in plain NumPy."""
    (w1, b1), (w2, b2) = parameters["hidden"], parameters["out"]
    before = x @ w1 + b1
    hidden = np.maximum(before, 0)
    scores = hidden @ w2 + b2
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    of_scores = (likely - np.eye(3)[labels]) / len(x)
    of_before = of_scores @ w2.T * (before > 0)
    return -np.mean(np.log(likely[np.arange(len(x)), labels])), {
        "hidden": [x.T @ of_before, of_before.sum(axis=0)],
        "out": (hidden.T @ of_scores, of_scores.sum(axis=0)),
    }


def mapped(function: Any, *trees: Any) -> Any:
    """Apply a function to the corresponding leaves of parameters."""
    return {
        layer: type(trees[0][layer])(function(*leaves) for leaves in zip(*(tree[layer] for tree in trees), strict=True))
        for layer in trees[0]
    }


DATA = [["x", None], ["x"]], [[None, None], [None]] * 2
MODEL = [[None, None], [None]], [[None, "y"], ["y"]], [["y", None], [None]]
BOTH = [["x", None], ["x"]], *MODEL[1:]


@pytest.mark.parametrize("specs", [DATA, MODEL, BOTH], ids=["data", "model", "both"])
def test_training_is_that_of_one_process(specs: Any, make_mesh: MakeMesh) -> None:
    """Parallel over the data, the model, and both: steps as one program each, equal to NumPy's to 1e-12."""
    mesh = make_mesh({"x": 3, "y": 2})
    of_data, of_hidden, of_out = specs if len(specs) == 3 else (specs[0], specs[1][:2], specs[1][2:])
    x, labels = (spmd.distribute(array, Layout(of, mesh)) for array, of in zip((X, LABELS), of_data, strict=True))
    layouts = {"hidden": [Layout(of, mesh) for of in of_hidden], "out": tuple(Layout(of, mesh) for of in of_out)}

    @spmd.function
    def step(parameters: Any, x: Any, labels: Any) -> Any:
        value, gradients = spmd.value_and_grad(loss)(parameters, x, labels)
        return value, mapped(lambda p, g: p - RATE * g, parameters, gradients)

    parameters, wanted = mapped(spmd.distribute, PARAMETERS, layouts), PARAMETERS
    for _ in range(4):
        value, parameters = step(parameters, x, labels)
        expected, gradients = by_hand(wanted, X, LABELS)
        wanted = mapped(lambda p, g: p - RATE * g, wanted, gradients)
        np.testing.assert_allclose(value.full(), expected, rtol=1e-12)
    mapped(lambda found, of: np.testing.assert_allclose(found.full(), of, rtol=1e-12, atol=1e-12), parameters, wanted)
    mapped(lambda found, layout: spmd.check_layout(found, layout), parameters, layouts)
    assert step.traces == 1


TOKENS = RANDOM.integers(0, 7, (5, 4))
BLOCK: dict[str, Any] = {
    "embedding": RANDOM.normal(size=(7, 6)),
    "scale": RANDOM.random(6) + 0.5,
    "qkv": RANDOM.normal(size=(6, 18)) / 3,
    "out": RANDOM.normal(size=(6, 6)) / 3,
}


def normalized(x: Any, scale: Any) -> Any:
    """Over the last axis."""
    return (x - np.mean(x, axis=-1, keepdims=True)) / np.sqrt(np.var(x, axis=-1, keepdims=True) + 1e-5) * scale


def attention(parameters: Any, tokens: Any) -> Any:
    """How well a block of a transformer, with two causal heads and tied embeddings, predicts the tokens themselves."""
    x = parameters["embedding"][tokens]
    parts = np.split(normalized(x, parameters["scale"]) @ parameters["qkv"], 3, axis=-1)
    q, k, v = (np.transpose(np.reshape(part, (5, 4, 2, 3)), (0, 2, 1, 3)) for part in parts)
    scores = np.where(np.tril(np.ones((4, 4))) > 0, np.einsum("bhtd,bhsd->bhts", q, k), -1e9)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    heads = weights / np.sum(weights, axis=-1, keepdims=True) @ v
    x = x + np.reshape(np.transpose(heads, (0, 2, 1, 3)), (5, 4, 6)) @ parameters["out"]
    logits = x @ np.transpose(parameters["embedding"])
    found = np.take_along_axis(logits, tokens[..., None], axis=-1)
    return np.mean(np.log(np.sum(np.exp(logits), axis=-1)) - found[..., 0])


def test_a_transformer_in_any_layout(mesh: spmd.Mesh) -> None:
    """Gradients do not depend on layouts, and are those of differences along a direction."""
    source, step = random.Random(2), 1e-6
    direction = {name: RANDOM.normal(size=array.shape) for name, array in BLOCK.items()}
    ends = [
        attention({name: array + sign * step * direction[name] for name, array in BLOCK.items()}, TOKENS)
        for sign in (1, -1)
    ]
    first: dict[str, Any] = {}
    for _ in range(4):
        layouts = {name: source.choice(all_layouts(mesh, array.ndim)) for name, array in BLOCK.items()}
        parameters = {name: spmd.distribute(array, layouts[name]) for name, array in BLOCK.items()}
        tokens = spmd.distribute(TOKENS, source.choice(all_layouts(mesh, 2)))
        _, gradients = spmd.value_and_grad(attention)(parameters, tokens)
        found = {name: gradient.full() for name, gradient in gradients.items()}
        first = first or found
        for name, gradient in gradients.items():
            spmd.check_layout(gradient, layouts[name])
            np.testing.assert_allclose(found[name], first[name], rtol=1e-9, atol=1e-12)
    slope = sum(np.sum(first[name] * direction[name]) for name in BLOCK)
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


@pytest.fixture
def mesh() -> spmd.Mesh:
    """Six devices of this process."""
    return spmd.create_mesh({"x": 3, "y": 2})


@pytest.fixture
def array(mesh: spmd.Mesh) -> Any:
    """A sharded matrix."""
    return spmd.distribute(X, Layout(["x", "y"], mesh))


def test_arguments_that_are_chosen(array: Any) -> None:
    """Several, counted from either end; others, by position or name, are constants. Each call is traced anew."""
    factor = [2.0]

    def total(a: Any, b: Any, *, c: Any) -> Any:
        return np.sum(a * a * b * c * factor[0])

    other = array.relayout([None, "x"])
    value, (of_b, of_a) = spmd.value_and_grad(total, (-1, 0))(array, other, c=3)
    np.testing.assert_allclose(value.full(), 6 * np.sum(X**3))
    np.testing.assert_allclose(of_a.full(), 12 * X * X)
    np.testing.assert_allclose(of_b.full(), 6 * X * X)
    assert (of_a.layout, of_b.layout) == (array.layout, other.layout)
    factor[0] = 1.0
    _, (gradient,) = spmd.value_and_grad(total, [1])(array, array, c=np.float32(2))  # the same array twice
    np.testing.assert_allclose(gradient.full(), 2 * X * X)
    _, gradient = spmd.value_and_grad(lambda host, b: np.sum(host * b))(X, array)  # an array of this process
    np.testing.assert_allclose(gradient.numpy(), X)
    _, gradient = spmd.value_and_grad(lambda a: np.sum(a["used"]) + 1)({"used": array, "other": array, "none": None})
    assert gradient["none"] is None
    assert not gradient["other"].full().any()
    spmd.check_layout(gradient["other"], array.layout)


def test_arguments_that_are_sums_of_terms(array: Any) -> None:
    """Which are combined first; eagerly, and where they are made in the program."""

    def total(a: Any) -> Any:
        return np.sum(a**3)

    def differentiated(a: Any) -> Any:
        return spmd.value_and_grad(total)(np.sum(a, axis=0))[1]

    for gradient in (differentiated(array), spmd.function(differentiated)(array)):
        np.testing.assert_allclose(gradient.full(), 3 * X.sum(axis=0) ** 2)
        spmd.check_layout(gradient, Layout(["y"], array.mesh))


def test_others_beside_the_value(array: Any) -> None:
    """`has_aux`: they are returned, and have no part in the gradient; also what has no gradient may be among them."""

    def total(a: Any) -> Any:
        return np.sum(a * a), {"median": np.median(a), "same": a}

    (value, others), gradient = spmd.value_and_grad(total, has_aux=True)(array)
    np.testing.assert_allclose(value.full(), np.sum(X * X))
    assert others["median"].item() == np.median(X)
    np.testing.assert_array_equal(others["same"].full(), X)
    np.testing.assert_allclose(gradient.full(), 2 * X)


def test_types(mesh: spmd.Mesh) -> None:
    """A gradient has its argument's type, whatever it meets."""
    narrow = spmd.distribute(X.astype(np.float32), Layout(["x", None], mesh))
    half = spmd.distribute(X.astype(np.float16), Layout([None, "y"], mesh))
    wide = spmd.distribute(X, Layout(["y", None], mesh))
    counts = spmd.distribute(np.arange(5), Layout(["x"], mesh))

    def total(a: Any, b: Any, c: Any) -> Any:
        return np.sum(a * b * c * counts, dtype=np.float32) + np.sum(a.astype(np.int32) * c)

    value, gradients = spmd.value_and_grad(total, (0, 1, 2))(narrow, half, wide)
    assert value.dtype == np.float64
    for gradient, argument in zip(gradients, (narrow, half, wide), strict=True):
        assert (gradient.dtype, gradient.layout) == (argument.dtype, argument.layout)
        np.testing.assert_allclose(gradient.full(), X * X * np.arange(5), rtol=5e-3)


def test_ties(mesh: spmd.Mesh) -> None:
    """Equal elements share the gradient evenly, however they lie; `clip` passes it on at its limits."""
    for specs in (["x"], ["y"], [None]):
        a = spmd.distribute(np.array([1.0, 3, 3, 0, 3]), Layout(specs, mesh))
        _, gradient = spmd.value_and_grad(np.max)(a)
        np.testing.assert_allclose(gradient.full(), [0, 1 / 3, 1 / 3, 0, 1 / 3])
        _, gradient = spmd.value_and_grad(lambda a: np.sum(np.maximum(a, 1) + np.clip(a, 1, 3)))(a)
        np.testing.assert_allclose(gradient.full(), [1.5, 2, 2, 0, 2])
        _, gradient = spmd.value_and_grad(lambda a: np.sum(np.abs(a)))(a)
        np.testing.assert_allclose(gradient.full(), [1, 1, 1, 0, 1])


def test_gradients_of_gradients(array: Any) -> None:
    """What a gradient computes has a gradient: for indexing and broadcasting, too."""
    rows = np.array([0, 1, 1])

    def total(a: Any) -> Any:
        picked = np.take_along_axis(a[rows][:, 1:], np.array([[0, 0], [1, 2], [3, 3]]), axis=1)
        return np.sum(picked**3) + np.sum(np.maximum(a * a, 0.3 * a)) + np.sum(np.exp(a).sum(axis=1) ** 2)

    def slope(a: Any) -> Any:
        _, gradient = spmd.value_and_grad(total)(a)
        return np.sum(gradient * direction)

    direction = np.arange(35.0).reshape(7, 5) / 35
    _, found = spmd.value_and_grad(slope)(array)
    step = 1e-6
    ends = [spmd.value_and_grad(total)(array + sign * step * direction)[1].full() for sign in (1, -1)]
    np.testing.assert_allclose(found.full(), (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-7)


def test_one_program_and_what_it_would_do(array: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is one message; terms of a gradient go straight into its argument's layout."""
    mesh = array.mesh
    x = spmd.distribute(X, Layout(["x", None], mesh))
    w = spmd.distribute(np.ones((5, 4)), Layout(["x", None], mesh))
    differentiated = spmd.value_and_grad(lambda w, x: np.sum(np.tanh(x @ w)))
    spmd.barrier(mesh)
    executor, sent = session_of(mesh).executor, list[Any]()
    start = executor.start

    def started(program: Any) -> Any:
        sent.append(program)
        return start(program)

    monkeypatch.setattr(executor, "start", started)
    differentiated(w, x)
    assert len(sent) == 1
    explained = spmd.explain(differentiated, w, x)
    *_, product, combined = [step for step in explained.steps if step.outputs[0].shape == (5, 4)]
    assert (product.name, product.outputs[0].partial) == ("tensordot", ("x",))
    assert (combined.name, combined.outputs[0].layout) == ("combine", w.layout)
    assert combined.moved_bytes == 2 * 2 * 5 * 4 * 8  # each row goes to its device from the two others, for each y
    assert len(sent) == 1


def test_what_has_no_gradient_is_refused_before_anything_runs(
    array: Any, mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the function, and the ways out; or the argument, or the value."""
    spmd.barrier(mesh)
    monkeypatch.setattr(session_of(mesh).executor, "start", None)  # nothing is sent
    for call, name in (
        (lambda a: np.median(a), "median has no gradient"),
        (lambda a: np.sum(np.linalg.svd(a)[1]), r"linalg.svd has no gradient"),
        (lambda a: np.sum(np.modf(a)[0]), "modf has no gradient"),
        (lambda a: np.sum(np.pad(a, 1, "edge")), "pad has no gradient with mode='edge'"),
        (lambda a: np.sum((a * 1j).real), "no gradient of complex numbers"),
    ):
        with pytest.raises(spmd.UnsupportedFunctionError, match=name) as caught:
            spmd.value_and_grad(call)(array)
        if "pad" not in name:
            assert "Either write the function with those that docs/spmd.md lists" in str(caught.value)
            assert "local_map()" in str(caught.value)
    for call, message in (
        (lambda a: a * 2, "an array of shape (7, 5) and type float64: return its sum() or mean()"),
        (lambda a: np.sum(a > 0), "an array of shape () and type int64"),
        (lambda a: 3.0, "the function has returned a float"),
    ):
        with pytest.raises(MisuseError, match=re.escape(message)):
            spmd.value_and_grad(call)(array)
    with pytest.raises(MisuseError, match=r"with has_aux a function returns \(value, others\), not "):
        spmd.value_and_grad(np.sum, has_aux=True)(array)


def test_arguments_that_are_refused(array: Any, mesh: spmd.Mesh) -> None:
    """Integers and what is no array, by its place; numbers of arguments that there are not."""
    integers = spmd.ones(3, np.int64, layout=Layout(["x"], mesh))
    gradient = spmd.value_and_grad(lambda a, b: np.sum(a["w"][0]))
    with pytest.raises(MisuseError, match=re.escape("argument a['w'][1] is int64, and gradients are of real")):
        gradient({"w": [array, integers]}, 1)
    with pytest.raises(
        MisuseError, match=re.escape("argument a['w'][1] is a float, and gradients are of global arrays")
    ):
        gradient({"w": [array, 2.0]}, 1)
    with pytest.raises(MisuseError, match="argument 2 is asked for, but the function is called with 1 positional"):
        spmd.value_and_grad(np.sum, 2)(array)
    with pytest.raises(MisuseError, match="names one of 2 positional arguments twice"):
        spmd.value_and_grad(np.multiply, (0, -2))(array, array)
    wrong_ones: list[Any] = [(), (0, 0), True, "a", 1.0]
    for wrong in wrong_ones:
        with pytest.raises(MisuseError, match="argnums is the number of a positional argument"):
            spmd.value_and_grad(np.sum, wrong)
    with pytest.raises(MisuseError, match="at least one global array"):
        spmd.value_and_grad(np.sum)(X)
    with pytest.raises(MisuseError, match="while a function is traced"):
        spmd.value_and_grad(lambda a: np.sum(a) if np.sum(a) > 0 else np.sum(-a))(array)
