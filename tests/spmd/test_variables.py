"""Variables: their values, updates and layouts, in this process and on parameter servers; optimizers and metrics."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.spmd.conftest import MakeMesh

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, Variable, initializers
from pscluster.coordinator import optimizers as whole_optimizers
from pscluster.coordinator.moves.plan import ProposedCut
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.spmd import UNSHARDED, DVariable, Layout, LayoutMap, optimizers

_names = (f"variable-{number}" for number in itertools.count())
W = np.random.default_rng(1).normal(size=(7, 4))


def variable(value: Any, specs: Any, mesh: spmd.Mesh, **options: Any) -> DVariable:
    """A variable with a name of its own."""
    return DVariable(value, Layout(specs, mesh), next(_names), **options)


def test_the_document(grid: spmd.Mesh) -> None:
    """A variable has the layout of its initial value; it is computed with, and assigned; another mesh is refused."""
    values = np.random.default_rng(2).normal(size=(64, 32)).astype(np.float32)
    a = spmd.distribute(values, Layout(["x", "y"], grid))
    v = DVariable(a, name=next(_names))
    assert spmd.fetch_layout(v) == spmd.fetch_layout(a)
    assert (v.shape, v.dtype.name, v.trainable) == ((64, 32), "float32", True)
    total: Any = v + a
    assert isinstance(total, spmd.DTensor)
    assert total.layout == a.layout
    np.testing.assert_array_equal(total.full(), values + values)
    v.assign(spmd.ones((64, 32), np.float32, layout=a.layout))
    np.testing.assert_array_equal(v.full(), np.ones((64, 32)))
    np.testing.assert_array_equal(total.full(), values + values)
    with pytest.raises(
        spmd.LayoutError, match=r"lies on <Mesh x=3, y=2.*, and the value on <Mesh z=6.*: give an array of"
    ):
        v.assign(spmd.ones((64, 32), np.float32, layout=Layout.replicated(spmd.create_mesh({"z": 6}), 2)))
    for attribute in ("layout", "shape", "dtype", "name"):
        with pytest.raises(AttributeError, match=f"{attribute} of variable 'variable-.*' does not change: "):
            setattr(v, attribute, None)
    assert repr(v).startswith("<DVariable 'variable-")
    assert str(v).startswith("DVariable('variable-")
    with pytest.raises(TypeError, match="take its `variable`"):
        pickle.dumps(v)


@pytest.mark.parametrize("specs", [("x", "y"), ("y", None), (None, "x"), (None, None)])
def test_values_and_updates_in_any_layout(grid: spmd.Mesh, specs: Any) -> None:
    """Every block is where the layout says; updates come in any layout, also as terms that are yet to be added."""
    v = variable(W, specs, grid)
    np.testing.assert_array_equal(v.full(), W)
    for block, device in zip(spmd.unpack(v), range(6), strict=True):
        np.testing.assert_array_equal(block, W[v.layout.slices(W.shape, device)])
    for other in (("x", "y"), (None, "y")):
        v.assign_add(spmd.distribute(W, Layout(other, grid))).assign_sub(1)
    np.testing.assert_allclose(v.full(), 3 * W - 2)
    a: Any = spmd.distribute(W, Layout([None, "x"], grid))
    v.assign(a @ a.T @ a)  # terms over x
    np.testing.assert_allclose(v.full(), W @ W.T @ W)
    product: Any = np.matmul(v, W.T)
    np.testing.assert_allclose(product.full(), W @ W.T @ W @ W.T)
    joined: Any = np.concatenate([v, a])
    np.testing.assert_allclose(joined.full(), np.concatenate([W @ W.T @ W, W]))
    assert v.relayout([None, None]).layout.is_replicated
    np.testing.assert_allclose(v[2:4].full(), (W @ W.T @ W)[2:4])
    assert float(v.astype(np.float32).sum()) == pytest.approx((W @ W.T @ W).sum(), rel=1e-5)
    if v.layout.is_replicated:
        np.testing.assert_allclose(np.asarray(v), v.full())
    else:
        with pytest.raises(spmd.ShardedGatherError):
            v.numpy()


def test_blocks_without_elements_and_scalars(line: spmd.Mesh) -> None:
    """Axes may be shorter than their dimension; numbers have no axes."""
    few = variable(np.arange(2.0), ["x"], line)
    assert [len(block) for block in spmd.unpack(few.assign_add([1, 2]))] == [1, 1, 0, 0, 0, 0]
    assert (few * 2).full().tolist() == [2, 6]
    assert variable(np.zeros((0, 3)), ["x", None], line).assign_add(1).full().shape == (0, 3)
    number = variable(3.0, [], line, trainable=False).assign_add(1)
    assert (number.dtype.name, float(number), number.trainable) == ("float32", 4.0, False)
    assert variable([True, False], [None], line).assign([False, True]).numpy().tolist() == [False, True]


def test_operations_see_the_assignments_before_them(line: spmd.Mesh) -> None:
    """And none after them, though nothing waits."""
    v = variable(np.zeros(6), ["x"], line)
    seen = []
    for _ in range(5):
        seen.append(v * 1.0)
        v.assign_add(1)
        seen.append(v.value())
    assert [float(array.full().max()) for array in seen] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_function_that_reads_a_variable_has_a_gradient(line: spmd.Mesh) -> None:
    """Written as outside of it, though it gets the variable's value."""
    v = variable(np.arange(6.0), ["x"], line)
    _, gradient = spmd.value_and_grad(lambda w: np.sum(w.value() ** 2) + w.read_value().sum())(v)
    assert gradient.full().tolist() == [1, 3, 5, 7, 9, 11]


def test_programs_update_variables(line: spmd.Mesh) -> None:
    """All of a program's updates are made at its end; variables may be arguments or captured."""
    a, b = variable(np.arange(6.0), ["x"], line), variable(np.ones(6), [None], line)

    @spmd.function
    def swap(a: DVariable, factor: Any) -> Any:
        total = (a + b).sum()
        before = b * factor
        b.assign(a)
        a.assign(before)
        return total

    assert [float(swap(a, np.float64(2).reshape(()))) for _ in range(2)] == [21, 27]
    assert (a.full().tolist(), b.full().tolist()) == ([0, 2, 4, 6, 8, 10], [2, 2, 2, 2, 2, 2])
    assert swap.traces == 1
    assert [step.name for step in spmd.explain(swap.plain, a, np.float64(2).reshape(())).steps][:2] == ["read", "read"]

    @spmd.function
    def reads_again(a: DVariable) -> Any:
        a.assign_add(1)
        return a + 1

    with pytest.raises(MisuseError, match=r"reads a variable, float64\[6\], after it has updated it: read it before"):
        reads_again(a)
    with pytest.raises(MisuseError, match="a variable can't be made while a function is traced"):
        spmd.function(lambda a: DVariable(a))(a)
    assert a.full().tolist() == [0, 2, 4, 6, 8, 10]


def test_plain_functions_get_their_blocks(line: spmd.Mesh) -> None:
    """A variable is an array to `local_map`, whether the types of results are known or not."""
    v = variable(np.arange(7.0), ["x"], line)
    doubled = spmd.local_map(lambda block: 2 * block, None, ["x"])
    assert doubled(v).full().tolist() == (2 * np.arange(7.0)).tolist()
    inside = spmd.function(
        lambda v: spmd.local_map(lambda block: 3 * block, None, ["x"], out_types=((7,), "float64"))(v)
    )
    for factor in (1, 2):
        assert inside(v.assign(np.arange(7.0) * factor)).full().tolist() == (3 * factor * np.arange(7.0)).tolist()


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (lambda v: v.assign(np.ones(3)), InvalidUpdateError, r"has shape \(6,\), but the value has shape \(3,\)"),
        (lambda v: v.assign_add(1j), InvalidUpdateError, "variable-.*complex128"),
        (
            lambda v: v.assign(spmd.ones(6, complex, layout=v.layout)),
            InvalidUpdateError,
            "is float32, but .* complex128",
        ),
        (lambda v: v.assign("text"), MisuseError, "holds numbers or bools"),
        (lambda v: v.__iadd__(1), MisuseError, r"v \+= x would put an array .* use v.assign_add\(x\)"),
        (lambda v: v.__imul__(2), MisuseError, r"v \*= x would put an array .* use v.assign\(v \* x\)"),
        (lambda v: v.__setitem__(0, 1), MisuseError, "a part of variable .* can't be assigned"),
    ],
)
def test_updates_that_are_refused(line: spmd.Mesh, change: Callable[[Any], Any], error: Any, why: str) -> None:
    """They say why; the variable keeps its value."""
    v = variable(np.arange(6, dtype=np.float32), ["x"], line)
    with pytest.raises(error, match=why):
        change(v)
    assert v.full().tolist() == [0, 1, 2, 3, 4, 5]


def test_how_a_variable_gets_its_layout(make_mesh: MakeMesh) -> None:
    """From its initial value, an argument, or the rules of a LayoutMap in whose scope it is made."""
    mesh = make_mesh({"x": 6})
    a = spmd.ones((6, 6), layout=Layout(["x", None], mesh))
    with pytest.raises(
        spmd.LayoutError, match=r"but that of its initial value .*: give initial_value.relayout\(layout\)"
    ):
        DVariable(a, layout=Layout([None, "x"], mesh))
    with pytest.raises(spmd.LayoutError, match="variable 'w' has no layout: give layout=, or a global array"):
        DVariable(W, name="w")
    with pytest.raises(MisuseError, match="the name of a variable is a text, not an int"):
        DVariable(a, name=5)  # type: ignore[arg-type]
    with pytest.raises(spmd.LayoutError, match=r"shape \(7, 4\) has 2 axes, but the layout has 1"):
        variable(W, ["x"], mesh)
    rules, prefix = LayoutMap(mesh), next(_names)
    rules[r".*\.kernel"] = (None, "x")
    with rules.scope():
        kernel = DVariable(W, name=f"{prefix}.kernel")
        made = DVariable(initializers.RandomNormal(seed=1), name=f"{prefix}.more.kernel", shape=(5, 6))
        bias = DVariable(np.zeros(4), name=f"{prefix}.bias")
        with pytest.raises(spmd.LayoutError, match="without a name has no rule"):
            DVariable(W)
    assert [v.layout.specs for v in (kernel, made, bias)] == [(UNSHARDED, "x"), (UNSHARDED, "x"), (UNSHARDED,)]
    np.testing.assert_array_equal(made.full(), initializers.RandomNormal(seed=1)((5, 6), np.float32))
    tree = rules.variables({prefix: {"layer": {"kernel": W, "bias": np.zeros(4)}}})
    weight: Any = tree[prefix]["layer"]["kernel"]
    assert (type(weight), weight.name, weight.layout) == (DVariable, f"{prefix}.layer.kernel", kernel.layout)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optimizers.Adam, {"learning_rate": 0.1}),
        (optimizers.SGD, {"learning_rate": 0.1, "momentum": 0.9, "clipvalue": 0.5}),
        (optimizers.RMSprop, {"learning_rate": 0.01, "global_clipnorm": 0.1}),
        (optimizers.SGD, {"learning_rate": 0.1, "clipnorm": 0.1, "loss_scale_factor": 2.0}),
    ],
)
def test_optimizers(make_mesh: MakeMesh, workers: ClusterCoordinator, make: Any, options: Any) -> None:
    """Gradients are applied to each block once, as if the variable were whole, and all variables at once."""
    mesh = make_mesh({"x": 3, "y": 2})
    with workers.strategy.scope():
        wholes = [Variable(W), Variable(W[0])]
        whole = getattr(whole_optimizers, make.__name__)(**options)
    optimizer = make(**options, mesh=mesh)
    variables = [variable(W, ["x", "y"], mesh), variable(W[0], [None], mesh)]
    a: Any = spmd.distribute(W, Layout(["y", "x"], mesh))
    for step in range(3):
        optimizer.apply_gradients([(a * step - 1, variables[0]), (a.sum(axis=0), variables[1])])
        whole.apply_gradients([(W * step - 1, wholes[0]), (W.sum(axis=0), wholes[1])])
    for ours, theirs in zip(variables, wholes, strict=True):
        np.testing.assert_allclose(ours.full(), theirs.numpy(), rtol=1e-12)
    assert optimizer.iterations == 3
    optimizer.learning_rate = 0.0
    assert optimizer.learning_rate == 0.0
    optimizer.apply_gradients([(None, variables[0]), (W[0], variables[1])])
    assert optimizer.iterations == 4


def test_gradients_that_are_refused(line: spmd.Mesh) -> None:
    """Each is named; nothing is applied, also not of the others."""
    optimizer, v = optimizers.SGD(mesh=line), variable(np.ones(6), ["x"], line)
    integers = variable(np.ones(6, np.int64), ["x"], line)
    g = np.ones(6)
    for pairs, error, why in [
        ([(g[1:], v)], InvalidUpdateError, r"has shape \(6,\), but the gradient has shape \(5,\)"),
        ([(g, v), (g, v)], MisuseError, "is given twice"),
        ([(g, v), (g, integers)], InvalidUpdateError, "is int64: only floats take gradients"),
        ([(g, g)], TypeError, r"takes pairs \(gradient, DVariable\), not an ndarray"),
        ([g], TypeError, "takes pairs"),
        ([v], TypeError, r"takes pairs \(gradient, DVariable\), not a DVariable"),
        (v.value(), TypeError, r"takes pairs \(gradient, DVariable\), not a DTensor"),
    ]:
        with pytest.raises(error, match=why):
            optimizer.apply_gradients(pairs)  # type: ignore[arg-type]
    other = DVariable(g, Layout(["z"], spmd.create_mesh({"z": 2})))
    with pytest.raises(spmd.LayoutError, match="make another optimizer"):
        optimizer.apply_gradients([(g, other)])
    with pytest.raises(MisuseError, match="nonfinite= is not available"):
        optimizers.SGD(mesh=line, nonfinite="skip")
    assert v.full().tolist() == [1] * 6


def test_metrics(line: spmd.Mesh) -> None:
    """They count what programs add, until they are reset."""
    mean, accuracy = spmd.metrics.Mean(mesh=line), spmd.metrics.SparseCategoricalAccuracy(next(_names), mesh=line)
    scores = np.eye(3)[[0, 1, 2, 2, 1, 0, 0]]
    y = spmd.distribute(np.array([0, 1, 2, 0, 0, 0, 0]), Layout(["x"], line))
    z = spmd.distribute(scores, Layout(["x", None], line))

    @spmd.function
    def step(y: Any, z: Any) -> None:
        accuracy.update_state(y, z)
        mean.update_state(z, 2.0)

    assert accuracy.result() == 0.0
    step(y, z)
    step(y, z)
    assert accuracy.result() == pytest.approx(5 / 7)
    assert mean.result() == pytest.approx(1 / 3)
    accuracy.reset_state()
    accuracy.update_state(y, z, spmd.distribute([0, 0, 0, 1, 0, 0, 1], y.layout))
    assert accuracy.result() == 0.5
    with pytest.raises(InvalidUpdateError, match=r"scores of shape \(7, 3\) do not belong to labels of shape \(6,\)"):
        accuracy.update_state(y[:6], z)


def test_where_blocks_live(workers: ClusterCoordinator) -> None:
    """One shard for each block, over all servers; each worker reads its own, and sends each once."""
    mesh = spmd.create_mesh({"x": 3, "y": 2}, coordinator=workers, devices_per_task=3)
    v = variable(W, ["x", "y"], mesh)
    assert [shard.shape for shard in v.variable.variables] == [(3, 2), (3, 2), (2, 2), (2, 2), (2, 2), (2, 2)]
    assert set(v.variable.owners) == {0, 1}
    assert v.variable in workers.strategy.variables
    cut = ProposedCut(v.variable.name, 0, 0.9, 6, 12, by_rows=True)
    ((_, why),) = workers.strategy.apply(replace(workers.strategy.plan("bytes"), moves=(), cuts=(cut,))).left
    assert "its shards are the blocks of a global array" in why
    with pytest.raises(MisuseError, match="is in this process: there are no parameter servers"):
        variable(W, [None, None], spmd.create_mesh({"x": 2})).variable  # noqa: B018
    with pytest.raises(MisuseError, match="there is already a variable"):
        DVariable(W, v.layout, v.name)
