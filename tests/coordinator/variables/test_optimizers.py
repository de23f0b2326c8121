"""Optimizers on real servers, on whole variables and on shards, against twins in NumPy and float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    errors,
    optimizers,
)

Array = npt.NDArray[Any]
ROWS = 7


class Sgd:
    """The formula of stochastic gradient descent, in float64."""

    def __init__(self, value: Array, rate: float, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.value = value.astype(np.float64)
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.velocity = np.zeros_like(self.value)

    def step(self, gradient: Array, rows: Any = ...) -> None:
        """One step of these rows; the others are as they were."""
        velocity = self.velocity[rows] * self.momentum - self.rate * gradient
        self.velocity[rows] = velocity
        self.value[rows] += velocity * self.momentum - self.rate * gradient if self.nesterov else velocity


class Adam:
    """The formula of Adam and AMSGrad, in float64; rows that a gradient does not touch keep their moments."""

    def __init__(self, value: Array, rate: float, b1: float = 0.9, b2: float = 0.999, amsgrad: bool = False) -> None:
        self.value = value.astype(np.float64)
        self.rate, self.b1, self.b2, self.amsgrad, self.steps = rate, b1, b2, amsgrad, 0
        self.m, self.v, self.largest = (np.zeros_like(self.value) for _ in range(3))

    def step(self, gradient: Array, rows: Any = ...) -> None:
        """One step of these rows; every call counts as one for all."""
        self.steps += 1
        self.m[rows] = self.b1 * self.m[rows] + (1 - self.b1) * gradient
        self.v[rows] = self.b2 * self.v[rows] + (1 - self.b2) * gradient**2
        self.largest[rows] = np.maximum(self.largest[rows], self.v[rows])
        v = (self.largest if self.amsgrad else self.v)[rows]
        m_hat, v_hat = self.m[rows] / (1 - self.b1**self.steps), v / (1 - self.b2**self.steps)
        self.value[rows] -= self.rate * m_hat / (np.sqrt(v_hat) + 1e-7)


Twin = Sgd | Adam
Pair = tuple[Callable[[], optimizers.Optimizer], Callable[[Array], Twin]]
PAIRS: dict[str, Pair] = {
    "sgd": (lambda: optimizers.SGD(0.1), lambda w: Sgd(w, 0.1)),
    "momentum": (lambda: optimizers.SGD(0.1, momentum=0.9), lambda w: Sgd(w, 0.1, 0.9)),
    "nesterov": (lambda: optimizers.SGD(0.1, 0.8, nesterov=True), lambda w: Sgd(w, 0.1, 0.8, nesterov=True)),
    "adam": (lambda: optimizers.Adam(0.01), lambda w: Adam(w, 0.01)),
    "amsgrad": (
        lambda: optimizers.Adam(0.02, beta_1=0.8, beta_2=0.95, amsgrad=True),
        lambda w: Adam(w, 0.02, 0.8, 0.95, amsgrad=True),
    ),
}


@pytest.fixture(params=[1, 2, 3], ids=lambda cuts: f"{cuts} shards")
def cutting(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[ParameterServerStrategy]:
    """A strategy that cuts variables into that many shards."""
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(request.param)) as strategy:
        yield strategy


def table(seed: int, dtype: npt.DTypeLike = np.float32) -> Array:
    """An initial value."""
    return np.random.default_rng(seed).normal(size=(ROWS, 4)).astype(dtype)


def close(variable: Variable, twin: Twin) -> None:
    """Assert that a variable has the twin's value."""
    rtol = 1e-5 if variable.dtype == np.float32 else 1e-12
    np.testing.assert_allclose(variable.numpy(), twin.value, rtol=rtol, atol=rtol)


def unchanged(value: Array, variable: Variable, call: Callable[[], object], error: type[Exception], said: str) -> None:
    """Assert that the call is refused with this error, and nothing has changed on any shard."""
    with pytest.raises(error, match=said):
        call()
    np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PAIRS)
def test_dense_gradients(cutting: ParameterServerStrategy, name: str, dtype: Any) -> None:
    """40 dense gradients do to a table, a vector and a scalar what the formula does."""
    make, twin_of = PAIRS[name]
    values = [table(0, dtype), table(1, dtype)[:, 0].copy(), np.asarray(0.5, dtype)]
    with cutting.scope():
        optimizer = make()
        variables = [Variable(value) for value in values]
    twins = [twin_of(value) for value in values]
    rng = np.random.default_rng(2)
    for step in range(40):
        gradients = [rng.normal(size=value.shape).astype(dtype) for value in values]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.step(gradient)
        assert optimizer.iterations == step + 1
    for variable, twin in zip(variables, twins, strict=True):
        close(variable, twin)


@pytest.mark.parametrize("name", PAIRS)
def test_sparse_gradients(cutting: ParameterServerStrategy, name: str) -> None:
    """40 gradients of rows do what the formula does: duplicates are summed, other rows and slots are left alone."""
    make, twin_of = PAIRS[name]
    with cutting.scope():
        optimizer, variable = make(), Variable(table(0))
    twin = twin_of(table(0))
    rng = np.random.default_rng(3)
    for step in range(40):
        ids = rng.integers(0, ROWS, size=rng.integers(0, 6))
        rows = rng.normal(size=(len(ids), 4)).astype(np.float32)
        optimizer.apply_gradients([(IndexedSlices(rows, ids, (ROWS, 4)), variable)])
        summed = np.zeros((ROWS, 4))
        np.add.at(summed, ids, rows)
        unique = np.unique(ids)
        twin.step(summed[unique], unique)
        assert optimizer.iterations == step + 1, "a gradient without rows counts, too"
    close(variable, twin)


@pytest.mark.parametrize("name", ["nesterov", "adam"])
def test_dense_and_sparse_in_turn(cutting: ParameterServerStrategy, name: str) -> None:
    """Dense and sparse gradients of one variable, and of several in one call, share steps and slots."""
    make, twin_of = PAIRS[name]
    with cutting.scope():
        optimizer = make()
        first, second = Variable(table(0)), Variable(table(1))
    one, two = twin_of(table(0)), twin_of(table(1))
    rng = np.random.default_rng(4)
    for step in range(20):
        dense = rng.normal(size=(ROWS, 4)).astype(np.float32)
        ids = np.array([6, step % ROWS])
        rows = rng.normal(size=(2, 4)).astype(np.float32)
        sparse = IndexedSlices(rows, ids)
        summed = np.zeros((ROWS, 4))
        np.add.at(summed, ids, rows)
        unique = np.unique(ids)
        pairs: list[tuple[Any, Variable]] = [(dense, first), (sparse, second)]
        steps = [functools.partial(one.step, dense), functools.partial(two.step, summed[unique], unique)]
        if step % 2:
            pairs = [(sparse, first), (dense, second)]
            steps = [functools.partial(one.step, summed[unique], unique), functools.partial(two.step, dense)]
        optimizer.apply_gradients(pairs)
        for apply in steps:
            apply()
    close(first, one)
    close(second, two)
    assert optimizer.iterations == 20


def test_large_gradients(cutting: ParameterServerStrategy) -> None:
    """Gradients of megabytes, which are streamed, do the same."""
    value = np.linspace(-1, 1, 2_700_000, dtype=np.float32).reshape(-1, 3)
    gradient = np.cos(np.arange(2_700_000, dtype=np.float32)).reshape(-1, 3)
    with cutting.scope():
        optimizer, variable = optimizers.Adam(0.01), Variable(value)
    twin = Adam(value, 0.01)
    every = np.arange(len(value))[::-1]
    for step in range(4):
        optimizer.apply_gradients([(IndexedSlices(gradient[::-1], every) if step % 2 else gradient, variable)])
        twin.step(gradient)
    close(variable, twin)


def test_none_is_no_gradient(cutting: ParameterServerStrategy) -> None:
    """Pairs whose gradient is None are passed over; a call of nothing else does nothing and counts for nothing."""
    with cutting.scope():
        optimizer = optimizers.SGD(1.0)
        v, w = Variable(np.ones(5, np.float32)), Variable(np.ones(5, np.float32))
    optimizer.apply_gradients([(None, v), (None, w)])
    optimizer.apply_gradients([])
    assert optimizer.iterations == 0
    optimizer.apply_gradients([(None, v), (np.ones(5, np.float32), w)])
    optimizer.apply_gradients(iter([(np.ones(5, np.float32), w)]))
    np.testing.assert_array_equal(v.numpy(), np.ones(5))
    np.testing.assert_array_equal(w.numpy(), np.full(5, -1))
    assert optimizer.iterations == 2


def test_every_shard_counts_the_same(cutting: ParameterServerStrategy) -> None:
    """A gradient of rows that one shard has counts on all, so that Adam's bias correction is the same everywhere."""
    with cutting.scope():
        optimizer, variable = optimizers.Adam(0.1), Variable(np.zeros((ROWS, 1), np.float32))
    twin = Adam(np.zeros((ROWS, 1)), 0.1)
    for _ in range(10):
        optimizer.apply_gradients([(IndexedSlices(np.ones((1, 1), np.float32), [0]), variable)])
        twin.step(np.ones((1, 1)), [0])
    optimizer.apply_gradients([(np.ones((ROWS, 1), np.float32), variable)])
    twin.step(np.ones((ROWS, 1)))
    close(variable, twin)


WRONG: list[tuple[Any, str]] = [
    (np.ones((4, ROWS), np.float32), r"the gradient has shape \(4, 7\), but must have shape \(7, 4\)"),
    (np.ones((ROWS, 1), np.float32), r"the gradient has shape \(7, 1\)"),
    (np.ones(4, np.float32), r"the gradient has shape \(4,\)"),
    (1.0, r"the gradient has shape \(\)"),
    (np.ones((ROWS, 4), complex), "the gradient is complex128"),
    (np.ones((ROWS, 4), bool), "the gradient is bool"),
    ("gradient", "the gradient is"),
    (np.full((ROWS, 4), None), "the gradient is object"),
    (IndexedSlices(np.ones((2, 4), np.float32), [0, ROWS]), r"row id 7 \(position 1\) is out of range"),
    (IndexedSlices(np.ones((2, 4), np.float32), [0, -1]), "row id -1"),
    (IndexedSlices(np.ones((2, 4), np.float32), [0.0, 6.0]), "row ids must be integers"),
    (IndexedSlices(np.ones((2, 3), np.float32), [0, 6]), r"the values of the rows ha(s|ve) shape \(2, 3\)"),
    (IndexedSlices(np.ones((3, 4), np.float32), [0, 6]), r"the values of the rows ha(s|ve) shape \(3, 4\)"),
    (IndexedSlices(np.ones((2, 4), complex), [0, 6]), "the values of the rows (is|are) complex128"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_gradients_that_do_not_fit(cutting: ParameterServerStrategy, wrong: Any, said: str) -> None:
    """They are refused with a sentence that names the variable, and nothing of the call is applied on any shard."""
    with cutting.scope():
        optimizer = optimizers.SGD(1.0, momentum=0.9)
        good, bad = Variable(table(0), name="good"), Variable(table(1), name="bad")
    for pairs in ([(wrong, bad)], [(np.ones((ROWS, 4), np.float32), good), (wrong, bad)]):
        call = functools.partial(optimizer.apply_gradients, pairs)
        unchanged(table(1), bad, call, errors.InvalidUpdateError, f"'bad'.*{said}")
        np.testing.assert_array_equal(good.numpy(), table(0))
    assert optimizer.iterations == 0


def test_variables_that_take_no_gradients(cutting: ParameterServerStrategy) -> None:
    """Integers, the same variable twice, something else, and variables of another strategy are refused by name."""
    with cutting.scope():
        optimizer = optimizers.SGD(1.0, name="opt")
        counts, w = Variable(np.zeros(5, np.int32), name="counts"), Variable(np.zeros(5, np.float32), name="w")
    ones = np.ones(5, np.float32)
    calls: list[tuple[list[Any], type[Exception], str]] = [
        ([(ones, w), (ones, counts)], errors.InvalidUpdateError, "'counts' is int32: only floats take gradients"),
        ([(ones, w), (ones, w)], errors.MisuseError, "'w' is given twice: add its gradients first"),
        ([(ones, w), (ones, np.zeros(5))], TypeError, r"takes pairs \(gradient, variable\).* an ndarray"),
        ([(w, ones)], TypeError, r"takes pairs \(gradient, variable\)"),
    ]
    for pairs, error, said in calls:
        unchanged(np.zeros(5), w, functools.partial(optimizer.apply_gradients, pairs), error, said)
    assert optimizer.iterations == 0


def test_an_optimizer_of_another_strategy(cluster: LocalCluster) -> None:
    """An optimizer and a variable of different strategies do not go together: a sentence says so."""
    with ParameterServerStrategy(cluster) as strategy, strategy.scope():
        old = optimizers.SGD(1.0, name="old")
    with ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(2, np.float32), name="w")
        with pytest.raises(errors.MisuseError, match=r"'w'.*a different strategy than optimizer 'old'"):
            old.apply_gradients([(np.ones(2, np.float32), w)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: optimizers.SGD(-1), "learning_rate is -1"),
        (lambda: optimizers.SGD(0.1, nesterov=True), "nesterov is set, but momentum is 0"),
        (lambda: optimizers.Adam(0.1, beta_1=1.0), "beta_1 is 1.0"),
        (lambda: optimizers.Adam(float("nan")), "learning_rate is nan"),
        (lambda: optimizers.Adam("fast"), "learning_rate is 'fast'"),  # type: ignore[arg-type]
    ],
)
def test_impossible_hyperparameters(strategy: ParameterServerStrategy, make: Any, said: str) -> None:
    """They are refused with a ValueError that says what may be; no name is used up."""
    with strategy.scope():
        name = optimizers.SGD(0.1).name
        with pytest.raises(ValueError, match=said):
            make()
        other = optimizers.SGD(0.1).name
    assert name != other


def test_names_of_optimizers(strategy: ParameterServerStrategy) -> None:
    """Optimizers have names, unique among variables and optimizers, and are made in a scope only."""
    with strategy.scope():
        Variable(0, name="w")
        given = optimizers.Adam(name="mine")
        made_up = [optimizers.Adam().name for _ in range(2)]
        for name in ("w", "mine"):
            with pytest.raises(errors.MisuseError, match=f"'{name}': names are unique in a strategy"):
                optimizers.SGD(name=name)
    assert given.name == "mine"
    assert len({"w", "mine", *made_up}) == 4
    assert repr(given) == "<Adam 'mine'>"
    with pytest.raises(errors.MisuseError, match="optimizer Adam was created outside a strategy's scope"):
        optimizers.Adam()


def test_two_optimizers_have_slots_of_their_own(cutting: ParameterServerStrategy) -> None:
    """Two optimizers of one variable do not share slots or steps."""
    with cutting.scope():
        variable = Variable(np.zeros(5, np.float32))
        one, two = optimizers.SGD(1.0, momentum=0.5), optimizers.SGD(1.0, momentum=0.5)
    gradient = np.ones(5, np.float32)
    for optimizer in (one, two, one):
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable.numpy(), np.full(5, -3.5))
    assert (one.iterations, two.iterations) == (2, 1)


def test_gradients_from_steps(cutting: ParameterServerStrategy) -> None:
    """Every gradient of every function is applied, once: with SGD the order does not matter."""
    with cutting.scope():
        variable, optimizer = Variable(np.zeros((ROWS, 2), np.float64)), optimizers.SGD(1.0)
        extra = Variable(np.zeros(3, np.float64))
    coordinator = ClusterCoordinator(cutting)

    def step(i: int, optimizer_: Any) -> int:
        pairs: list[tuple[Any, Variable]] = [(np.full((7, 2), -1.0), variable), (np.full(3, -2.0), extra)]
        optimizer.apply_gradients(pairs)
        optimizer_.apply_gradients([(IndexedSlices(np.full((1, 2), -1.0), [i % 7]), variable)])
        return int(optimizer_.iterations)

    values = [coordinator.schedule(step, args=(i, optimizer)) for i in range(70)]
    iterations = coordinator.fetch(values, TIMEOUT)
    np.testing.assert_array_equal(variable.numpy(), np.full((ROWS, 2), 80.0))
    np.testing.assert_array_equal(extra.numpy(), np.full(3, 140.0))
    assert max(iterations) == optimizer.iterations == 140
