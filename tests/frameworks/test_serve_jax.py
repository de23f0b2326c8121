"""Pytrees on the parameter servers: parity with optax in one process, step by step; deaths; what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests.conftest import run_cluster

import pscluster.jax
from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    optimizers,
)
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.jax.arrays import direct_put, on_device
from pscluster.ps.handles.reads import read_variables
from pscluster.ps.optim.tabulated import MAX_RATES

ONE_THREAD = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
STEPS = 15
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, 16, 5)).astype(np.float32)
Y = RNG.normal(size=(STEPS, 16, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from run_cluster(2, 2, env=ONE_THREAD)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    with ParameterServerStrategy(cluster) as strategy:
        yield strategy


def dictionary() -> Any:
    rng = np.random.default_rng(1)
    layers = [
        {"w": jnp.asarray(rng.normal(size=shape), jnp.float32), "b": jnp.zeros(shape[1])} for shape in ((5, 8), (8, 1))
    ]
    return {"layers": layers, "scale": np.float32(1.5), "size": 8}


def apply_dictionary(params: Any, x: Any) -> Any:
    first, last = params["layers"]
    return (jnp.tanh(x @ first["w"] + first["b"]) @ last["w"] + last["b"]) * params["scale"]


class Network(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.first(x)))


class Module(linen.Module):
    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        return linen.Dense(1)(jnp.tanh(linen.Dense(8)(x)))


def of_dictionary() -> tuple[Any, Callable[..., Any]]:
    return dictionary(), apply_dictionary


def of_nnx() -> tuple[Any, Callable[..., Any]]:
    graph, params = nnx.split(Network())
    return params, lambda params, x: nnx.merge(graph, params)(x)


def of_linen() -> tuple[Any, Callable[..., Any]]:
    module = Module()
    return module.init(jax.random.key(0), X[0]), module.apply


def of_equinox() -> tuple[Any, Callable[..., Any]]:
    model = eqx.nn.MLP(5, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    return model, lambda model, x: jax.vmap(model)(x)


def training_of(apply: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """A jitted function that returns loss and gradients."""

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((apply(params, x) - y) ** 2)

    return eqx.filter_jit(eqx.filter_value_and_grad(loss_of))  # type: ignore[no-any-return]


KINDS = [of_dictionary, of_nnx, of_linen, of_equinox]


@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (lambda: optimizers.SGD(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
        (lambda: optimizers.Adam(0.01, epsilon=1e-8), optax.adam(0.01)),
        (
            lambda: optimizers.SGD(pscluster.jax.schedule(optax.cosine_decay_schedule(0.2, 10), 10)),
            optax.sgd(optax.cosine_decay_schedule(0.2, 10)),
        ),
    ],
    ids=["sgd", "adam", "schedule"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_one_process(
    strategy: ParameterServerStrategy, kind: Callable[[], Any], make: Callable[[], Any], reference: Any
) -> None:
    params, apply = kind()
    with strategy.scope():
        served = pscluster.jax.serve(params, make())
    value_and_grad = training_of(apply)

    def step(x: Any, y: Any) -> float:  # any worker takes the next one
        loss, grads = value_and_grad(served.read(), x, y)
        served.apply(grads)
        return float(loss)

    coordinator = ClusterCoordinator(strategy)
    state = reference.init(eqx.filter(params, eqx.is_array))
    for x, y in zip(X, Y, strict=True):
        loss = coordinator.schedule(step, args=(x, y)).fetch()
        expected, grads = value_and_grad(params, x, y)
        updates, state = reference.update(grads, state)
        params = eqx.apply_updates(params, updates)
        assert loss == pytest.approx(float(expected), rel=1e-4)
    trained = served.read()
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    for mine, theirs in zip(jax.tree.leaves(trained), jax.tree.leaves(params), strict=True):
        if isinstance(theirs, jax.Array):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        else:
            assert mine is theirs or mine == theirs


def test_a_module_of_nnx_takes_what_its_own_gradients_are(strategy: ParameterServerStrategy) -> None:
    """They are a State, which is another tree with the same paths; one read from a file may be a plain dictionary."""
    module = Network()
    with strategy.scope():
        served = pscluster.jax.serve(module, optimizers.SGD(0.1))

    def loss_of(module: Network, x: Any) -> Any:
        return jnp.mean(module(x) ** 2)

    x = np.ones((4, 5), np.float32)
    leaves, gradients = jax.tree.leaves(module), jax.tree.leaves(nnx.grad(loss_of)(module, x))
    expected = [leaf - 0.1 * gradient for leaf, gradient in zip(leaves, gradients, strict=True)]
    for grads in (nnx.grad(loss_of), jax.grad(loss_of)):
        served.assign(nnx.to_pure_dict(nnx.state(module)))
        served.apply(grads(served.read(), x))
        for mine, theirs in zip(jax.tree.leaves(served.read()), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    with pytest.raises(InvalidUpdateError, match="not a tree like that of 'params': 'last/kernel' is missing"):
        served.apply({"first": {"bias": x, "kernel": x}, "last": {"bias": x}})


def test_names_are_paths(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        for index, kind in enumerate(KINDS):
            pscluster.jax.serve(kind()[0], optimizers.SGD(0.1), name=f"m{index}")
    names = {variable.name for variable in strategy.variables}
    assert {"m0/layers/0/w", "m0/scale", "m1/first/kernel", "m2/params/Dense_0/bias", "m3/layers/1/weight"} <= names
    assert not any("value" in name or "size" in name for name in names)


def test_updates_count_once_though_a_worker_dies(tmp_path: Path) -> None:
    with (
        LocalCluster(2, 2, log_level="ERROR", env=ONE_THREAD) as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            served = pscluster.jax.serve({"w": jnp.zeros(4)}, optimizers.SGD(1.0))

        def step(number: int) -> None:
            served.apply(jax.grad(lambda params: params["w"].sum())(served.read()))
            if number % 10 == 5 and not (flag := tmp_path / str(number)).exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        coordinator = ClusterCoordinator(strategy)
        for number in range(30):
            coordinator.schedule(step, args=(number,))
        coordinator.join()
        assert len(list(tmp_path.iterdir())) == 3
        np.testing.assert_array_equal(served.read()["w"], np.full(4, -30.0))


def with_leaf(**changes: Any) -> Any:
    grads: dict[str, Any] = {"a": jnp.ones(3), "b": {"c": jnp.ones((2, 2))}, "size": None} | changes
    return grads


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (with_leaf(b={}), "'b/c' is missing"),
        (with_leaf(b={"c": jnp.ones((2, 2)), "d": jnp.ones(1)}), "'b/d' is not in it"),
        (jnp.ones(3), "'a' is missing"),
        (with_leaf(a=jnp.ones(4)), r"'params/a' has shape \(4,\), and the parameter \(3,\)"),
        (with_leaf(a=None), "'params/a' is None"),
        (with_leaf(b={"c": jnp.full((2, 2), jnp.nan)}), "NaN or infinity in the gradient of params/b/c: nothing"),
        (with_leaf(a=jnp.asarray([1, 2, jnp.inf])), "gradient of params/a: nothing was applied"),
        (with_leaf(size=jnp.ones(())), "a gradient for 'size', which is not served"),
    ],
)
def test_wrong_gradients_are_refused_before_any_is_applied(
    strategy: ParameterServerStrategy, grads: Any, message: str
) -> None:
    with strategy.scope():
        served = pscluster.jax.serve({"a": jnp.ones(3), "b": {"c": jnp.ones((2, 2))}, "size": 3}, optimizers.SGD(0.1))
    with pytest.raises(InvalidUpdateError, match=message):
        served.apply(grads)
    assert served.optimizer.iterations == 0
    assert all((leaf == np.ones(np.shape(leaf))).all() for leaf in jax.tree.leaves(served.read()["b"]))


def test_what_is_jitted_can_neither_read_nor_apply(strategy: ParameterServerStrategy) -> None:
    """It would keep the first values that it has read. Differentiation alone computes at once, and may read."""
    with strategy.scope():
        served = pscluster.jax.serve({"w": jnp.ones(3)}, optimizers.SGD(0.1))
    with pytest.raises(MisuseError, match=r"'params' is read in a function that JAX traces .*: call read"):
        jax.jit(lambda x: served.read()["w"] @ x)(jnp.ones(3))
    with pytest.raises(MisuseError, match=r"applied to 'params' in a function that JAX traces .*: return them from it"):
        jax.jit(served.apply)({"w": jnp.ones(3)})
    assert jax.grad(lambda x: (served.read()["w"] * x).sum())(2.0) == 3
    assert served.optimizer.iterations == 0


def test_what_to_do_with_nan_is_the_optimizers_policy_if_it_has_one(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        served = pscluster.jax.serve({"w": jnp.ones(3)}, optimizers.SGD(0.1, nonfinite="skip"))
    served.apply({"w": jnp.full(3, jnp.nan)})
    assert served.optimizer.nonfinite_count == 1
    np.testing.assert_array_equal(served.read()["w"], np.ones(3))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"a": 1.0, "b": jnp.ones(2, jnp.int32)}, MisuseError, "no floating-point array to serve in a dict"),
        ({"w": jnp.ones(2), "key": jax.random.key(0)}, MisuseError, "'key' is a random key"),
        ({"params": jnp.ones(2), "batch_stats": jnp.ones(2)}, MisuseError, r"state=variables\['batch_stats'\], which"),
        ({"w": jnp.ones(2), "taken": jnp.ones(1)}, MisuseError, "already a variable 'params/taken'"),
    ],
)
def test_a_tree_that_cannot_be_served_leaves_nothing(
    strategy: ParameterServerStrategy, params: Any, error: type[Exception], message: str
) -> None:
    with strategy.scope():
        Variable(0.0, name="params/taken")
        optimizer = optimizers.SGD(0.1)
        with pytest.raises(error, match=message):
            pscluster.jax.serve(params, optimizer)
        with pytest.raises(TypeError, match=r"not .*GradientTransformation.*: optimizers.Adam"):
            pscluster.jax.serve({"w": jnp.ones(2)}, optax.adam(0.1))
    with pytest.raises(MisuseError, match="outside a strategy's scope"):
        pscluster.jax.serve({"w": jnp.ones(2)}, optimizer)
    assert [variable.name for variable in strategy.variables] == ["params/taken"]


def test_values_can_be_replaced(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        served = pscluster.jax.serve(dictionary(), optimizers.SGD(0.1))
    other = jax.tree.map(lambda leaf: leaf + 1, dictionary())
    served.assign(other)
    np.testing.assert_array_equal(served.read()["layers"][1]["w"], other["layers"][1]["w"])
    with pytest.raises(InvalidUpdateError, match="'scale' is missing"):
        served.assign({"layers": other["layers"], "size": 8})
    with pytest.raises(InvalidUpdateError, match=r"'params/scale' has shape \(\), but the value has shape \(2,\)"):
        served.assign(other | {"scale": np.ones(2)})


def test_types_are_those_of_jax(strategy: ParameterServerStrategy) -> None:
    """Without `jax_enable_x64` JAX has no float64; bfloat16 stays what it is."""
    with strategy.scope():
        params = {"double": np.ones(2), "half": jnp.ones(2, jnp.bfloat16)}
        served = pscluster.jax.serve(params, optimizers.SGD(0.5))
    read = served.read()
    assert (read["double"].dtype, read["half"].dtype) == (jnp.float32, jnp.bfloat16)
    served.apply(jax.tree.map(jnp.ones_like, read))
    np.testing.assert_array_equal(served.read()["half"].astype(np.float32), np.full(2, 0.5))


def test_integers_stay_as_they_are(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        served = pscluster.jax.serve({"w": jnp.ones(2), "size": jnp.arange(3)}, optimizers.SGD(1.0))

    def step() -> Any:
        served.apply(jax.grad(lambda params: params["w"].sum(), allow_int=True)(served.read()))
        return served.read()

    read = ClusterCoordinator(strategy).schedule(step).fetch()
    np.testing.assert_array_equal(read["w"], np.zeros(2))
    np.testing.assert_array_equal(read["size"], np.arange(3))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("shapes", [[(3, 1 << 20)], [(3,), (1 << 14,), (5,), (1 << 15,)]], ids=["frames", "message"])
def test_large_arrays_are_not_copied(cluster: LocalCluster, shapes: list[tuple[int, ...]], shards: int) -> None:
    """JAX takes the memory in which a value of 64 KiB or more was received, and NumPy that of a gradient."""
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(shards)) as strategy:
        with strategy.scope():
            variables = [Variable(np.full(shape, 2, np.float32)) for shape in shapes]
        values = read_variables(variables)
        for value, array in zip(values, on_device(values), strict=True):
            np.testing.assert_array_equal(array, np.full(value.shape, 2))
            assert value.nbytes < 1 << 16 or array.unsafe_buffer_pointer() == value.ctypes.data
            gradient = jax.jit(lambda array: 2 * array)(array)
            assert np.asarray(gradient).ctypes.data == gradient.unsafe_buffer_pointer()


def test_arrays_are_put_as_device_put_does() -> None:
    """Of every type that may be served, also empty and without axes; without the time that it takes."""
    assert direct_put() is not None
    arrays = [np.ones(shape, dtype) for shape in [(), (0, 3), (2, 3)] for dtype in ("f2", "f4", "f8", jnp.bfloat16)]
    for mine, theirs in zip(on_device(arrays), jax.device_put(arrays), strict=True):
        assert (mine.aval, mine.sharding, mine.committed) == (theirs.aval, theirs.sharding, theirs.committed)
        assert mine.weak_type == theirs.weak_type
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("fn", "steps", "message"),
    [
        (lambda step: 0.1 - 0.02 * step, 10, "the rate of step 6 is -0.0199"),
        (lambda step: jnp.nan, 10, "the rate of step 0 is nan"),
        (lambda step: 0.1, 0, "steps is 0"),
        (lambda step: np.ones(2), 5, "returned an ndarray for step 0"),
    ],
)
def test_a_schedule_that_is_none_is_refused(fn: Any, steps: int, message: str) -> None:
    with pytest.raises((ValueError, MisuseError), match=message):
        pscluster.jax.schedule(fn, steps)


def test_a_long_schedule_is_a_table_of_bounded_size() -> None:
    exact = optax.polynomial_schedule(1.0, 0.0, 2, 3 * MAX_RATES)
    table: Any = pscluster.jax.schedule(lambda step: float(np.float32((1 - step / 3 / MAX_RATES) ** 2)), 3 * MAX_RATES)
    assert len(table.values) == MAX_RATES + 1
    for step in (0, 2, 3, 3 * MAX_RATES - 1, 3 * MAX_RATES, 10 * MAX_RATES):
        held = min(step // 3 * 3, 3 * MAX_RATES)
        assert table(step) == pytest.approx(float(exact(held)), abs=1e-6)
