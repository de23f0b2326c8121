"""What JAX models carry along beside parameters: statistics and counts on the servers, and the randomness of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    LocalCluster,
    ParameterServerStrategy,
    SynchronousStrategy,
    optimizers,
    replica_context,
)
from pscluster.core.errors import InvalidUpdateError, MisuseError

STEPS = 5
RNG = np.random.default_rng(0)
X = RNG.normal(1.0, 2.0, size=(STEPS, 16, 5)).astype(np.float32)
Y = RNG.normal(size=(STEPS, 16, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    one_thread = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    yield from run_cluster(2, 2, env=one_thread)


@pytest.fixture
def strategy(cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    with ParameterServerStrategy(cluster) as strategy:
        yield strategy


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(5, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(self.norm(self.first(x))))


class Module(linen.Module):
    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(8)(x))
        return linen.Dense(1)(linen.Dropout(0.5, deterministic=False)(x))


class Equinox(eqx.Module):
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.norm, self.last = eqx.nn.BatchNorm(5, "batch", mode="batch"), eqx.nn.Linear(5, 1, key=key)

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(x, state)
        return self.last(x), state


def of_nnx() -> tuple[Any, Any, Callable[..., Any]]:
    graph, params, stats, rest = nnx.split(Network(nnx.Rngs(0, dropout=1)), nnx.Param, nnx.BatchStat, ...)

    def apply(params: Any, stats: Any, seed: Any, x: Any) -> Any:
        model = nnx.merge(graph, params, stats, rest, copy=True)
        nnx.reseed(model, dropout=jax.random.key(seed))
        return model(x), nnx.state(model, nnx.BatchStat)

    return params, stats, apply


def of_linen() -> tuple[Any, Any, Callable[..., Any]]:
    module = Module()
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X[0])

    def apply(params: Any, stats: Any, seed: Any, x: Any) -> Any:
        of = {"params": params, "batch_stats": stats}
        y, changed = module.apply(of, x, mutable=["batch_stats"], rngs={"dropout": jax.random.key(seed)})
        return y, changed["batch_stats"]

    return variables["params"], variables["batch_stats"], apply


def of_equinox() -> tuple[Any, Any, Callable[..., Any]]:
    model, state = eqx.nn.make_with_state(Equinox)(jax.random.key(0))

    def apply(model: Any, state: Any, seed: Any, x: Any) -> Any:
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    return model, state, apply


@pytest.mark.parametrize("kind", [of_nnx, of_linen, of_equinox])
def test_every_step_is_that_of_one_process(strategy: ParameterServerStrategy, kind: Callable[[], Any]) -> None:
    params, state, apply = kind()

    @eqx.filter_jit  # type: ignore[untyped-decorator]
    def train(params: Any, state: Any, seed: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            outputs, changed = apply(params, state, seed, x)
            return jnp.mean((outputs - y) ** 2), changed

        return eqx.filter_value_and_grad(loss_of, has_aux=True)(params)

    with strategy.scope():
        served = pscluster.jax.serve(params, optimizers.SGD(0.1), state=state)

    def step(seed: int, x: Any, y: Any) -> float:  # any worker takes the next one
        params, state = served.read()
        (loss, state), grads = train(params, state, jnp.uint32(seed), x, y)
        served.apply(grads, state=state)
        return float(loss)

    coordinator, optimizer = ClusterCoordinator(strategy), optax.sgd(0.1)
    for seed, (x, y) in enumerate(zip(X, Y, strict=True)):
        loss = coordinator.schedule(step, args=(seed, x, y)).fetch()
        (expected, state), grads = train(params, state, jnp.uint32(seed), x, y)
        updates, _ = optimizer.update(grads, optimizer.init(eqx.filter(params, eqx.is_array)))
        params = eqx.apply_updates(params, updates)
        assert loss == pytest.approx(float(expected), rel=1e-4)
    trained = served.read()
    assert jax.tree.structure(trained) == jax.tree.structure((params, state))
    for mine, theirs in zip(jax.tree.leaves(trained), jax.tree.leaves((params, state)), strict=True):
        if isinstance(theirs, jax.Array):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


STATE = {"mean": np.zeros(2, np.float32), "count": np.uint32(0), "begun": np.False_}


def count(served: pscluster.jax.ServedParams, amount: float) -> None:
    """A step that adds to a mean, counts, and sets a flag if there is one."""
    params, state = served.read()
    changes = {"mean": state["mean"] + amount, "count": state["count"] + 1, "begun": jnp.asarray(True)}
    state = {name: changes[name] for name in state}
    served.apply(jax.tree.map(jnp.ones_like, params), state=state)


def test_steps_of_all_workers_count(strategy: ParameterServerStrategy) -> None:
    """What steps that run at the same time have changed is added; an evaluation changes nothing."""
    with strategy.scope():
        served = pscluster.jax.serve({"w": jnp.zeros(3)}, optimizers.SGD(1.0), state=STATE)
    assert list(served.variables) == ["params/w", "params/state/begun", "params/state/count", "params/state/mean"]
    assert [variable.trainable for variable in served.variables.values()] == [True, False, False, False]
    coordinator = ClusterCoordinator(strategy)
    for amount in range(20):
        coordinator.schedule(count, args=(served, amount / 4))
    coordinator.join()
    params, state = served.read()
    np.testing.assert_array_equal(params["w"], np.full(3, -20))
    np.testing.assert_array_equal(state["mean"], np.full(2, sum(range(20)) / 4))
    assert (state["count"], state["begun"]) == (20, True)
    served.apply({"w": jnp.ones(3)})
    served.assign(params)
    assert served.read()[1]["count"] == 20
    served.assign(params, state=STATE)
    assert served.read()[1]["count"] == 0


def test_of_replicas_that_step_together_the_mean_counts(cluster: LocalCluster) -> None:
    with SynchronousStrategy(cluster) as strategy:
        with strategy.scope():
            params, numbers = {"w": jnp.zeros(3)}, {"mean": STATE["mean"], "count": STATE["count"]}
            served = pscluster.jax.serve(params, optimizers.SGD(1.0), state=numbers)

        def step() -> None:
            count(served, 1.0 + replica_context().replica_id)

        coordinator = ClusterCoordinator(strategy)
        for _ in range(3):
            coordinator.fetch(strategy.run(step))
        _, state = served.read()
        np.testing.assert_array_equal(state["mean"], np.full(2, 4.5))
        assert state["count"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"other": 1}, "values of the state are not a tree like that of 'params': 'state/other' is not in it"),
        ({"mean": jnp.ones(3)}, r"'params/state/mean' has shape \(3,\), float32, and was served with shape \(2,\)"),
        ({"count": jnp.ones(())}, r"'params/state/count' has shape \(\), float32, and was served with .*uint32"),
        ({"mean": jnp.asarray([1, jnp.nan])}, "NaN or infinity in the state of params/state/mean: nothing was"),
    ],
)
def test_a_wrong_state_is_refused_before_anything_is_applied(
    strategy: ParameterServerStrategy, changes: Any, message: str
) -> None:
    with strategy.scope():
        served = pscluster.jax.serve({"w": jnp.zeros(3)}, optimizers.SGD(1.0), state=STATE)
        frozen = pscluster.jax.serve({"w": jnp.zeros(3)}, optimizers.SGD(1.0), state={}, name="frozen")
        plain = pscluster.jax.serve({"w": jnp.zeros(3)}, optimizers.SGD(1.0), name="plain")
        with pytest.raises(MisuseError, match="'state/dropout' is a random key, which all workers would share"):
            pscluster.jax.serve(plain.read(), plain.optimizer, state={"dropout": jax.random.key(0)}, name="keys")
    grads = {"w": jnp.ones(3)}
    with pytest.raises(MisuseError, match=r"the state of 'params' was not read .*: compute it from that of params"):
        served.apply(grads, state=STATE)
    with pytest.raises(MisuseError, match="'plain' was served without a state: give it to serve, too"):
        plain.apply(grads, state=STATE)
    _, state = served.read()
    with pytest.raises(InvalidUpdateError, match=message):
        served.apply(grads, state=state | changes)
    assert served.optimizer.iterations == 0
    np.testing.assert_array_equal(served.read()[0]["w"], np.zeros(3))
    params, nothing = frozen.read()
    frozen.apply(params, state=nothing)
