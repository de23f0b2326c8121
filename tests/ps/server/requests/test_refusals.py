"""Refusals, which leave nothing behind. Each case was once accepted, or had a message that did not help."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from tests.conftest import run_strategy

from pscluster.coordinator import (
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    MaxSizePartitioner,
    ParameterServerStrategy,
    Variable,
    embedding_bag,
    embedding_lookup,
    metrics,
    optimizers,
)
from pscluster.core.errors import ConfigurationError, InvalidUpdateError, MisuseError
from pscluster.ps.optim import rules

IDS = IndexedSlices


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    """Start two servers."""
    yield from run_strategy(2, 1)


@pytest.fixture(autouse=True)
def scope(strategy: ParameterServerStrategy) -> Iterator[None]:
    """Let all tests create variables."""
    with strategy.scope():
        yield


@pytest.fixture
def w() -> Variable:
    """Create a table in two shards."""
    return Variable(np.ones((4, 2), np.float32), partitioner=FixedShardsPartitioner(2))


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda w: w.assign(1e300), "can't hold 1e\\+300"),
        (lambda w: w.assign([[1], [1, 2]]), "is not an array"),
        (lambda w: w.assign(None), "object \\(None\\): give numbers"),
        (lambda w: w.assign(["1"]), "\\('1'\\): give numbers"),
        (lambda w: w.assign(np.ma.array([1.0, 2.0], mask=[False, True])), "masked"),
        (lambda w: w.sparse_read([[1], [1, 2]]), "row ids are not an array"),
        (lambda w: w.scatter_add(IDS([[1.0, 1.0]], [0], dense_shape=(99, 2))), "dense_shape \\(99, 2\\)"),
        (lambda w: w.scatter_add(IDS([[1.0, 1.0]], [0], dense_shape="foo")), "dense_shape 'foo'"),  # type: ignore[arg-type]
        (lambda w: optimizers.SGD(1.0).apply_gradients([(IDS([[1.0, 1.0]], [0], (9, 9)), w)]), "dense_shape"),
        (lambda w: embedding_bag(w, [[0, 1]], weights=[[None, 1]]), "weights"),  # type: ignore[list-item]
        (lambda w: embedding_bag(w, [[0, 1]], weights=[["a", "b"]]), "weights"),
        (lambda w: embedding_bag(w, [[0, 1]], weights=[[1j, 1]]), "weights"),
    ],
)
def test_updates_and_reads(w: Variable, do: Callable[[Variable], object], said: str) -> None:
    """The message names the variable and the value; the variable is unchanged."""
    with pytest.raises(InvalidUpdateError, match=f"{w.name}.*{said}"):
        do(w)
    np.testing.assert_array_equal(w.numpy(), np.ones((4, 2)))


@pytest.mark.parametrize(
    ("do", "error"),
    [
        (lambda w: w.__setitem__([0, 1], 5), "`scatter_update`"),
        (lambda w: embedding_lookup(None, [0]), "not None"),  # type: ignore[arg-type]
        (lambda w: embedding_lookup([None], [[0]]), "not None"),  # type: ignore[list-item]
        (lambda w: embedding_bag([w, w], [[0]]), "one variable"),  # type: ignore[arg-type]
        (lambda w: optimizers.SGD().apply_gradients([w]), "pairs"),
        (lambda w: optimizers.SGD().slot(None, "m"), "not to None"),  # type: ignore[arg-type]
        (lambda w: list(Variable(1.5)), "scalar"),
    ],
)
def test_wrong_things(w: Variable, do: Callable[[Variable], object], error: str) -> None:
    """Not a variable, a pair, or rows."""
    with pytest.raises(TypeError, match=error):
        do(w)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Variable(1e300, dtype="float32"),
        lambda: Variable(70000.0, dtype="float16"),
        lambda: Variable(lambda shape, dtype: np.full(shape, 1e300), shape=(2,)),
        lambda: Variable([1.5], dtype="int32"),
        lambda: Variable([300], dtype="int8"),
        lambda: Variable(np.ma.array([1.0, 2.0], mask=[False, True])),
        lambda: Variable([[1], [1, 2]]),
    ],
)
def test_initial_values_that_would_lose_something(make: Callable[[], Variable], strategy: Any) -> None:
    """No variable is created."""
    before = len(strategy.variables)
    with pytest.raises(InvalidUpdateError, match="variable"):
        make()
    assert len(strategy.variables) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedShardsPartitioner(1.5),  # type: ignore[arg-type]
        lambda: FixedShardsPartitioner("2"),  # type: ignore[arg-type]
        lambda: FixedShardsPartitioner(True),
        lambda: MaxSizePartitioner(None),  # type: ignore[arg-type]
        lambda: Variable(1.0, partitioner=3),  # type: ignore[arg-type]
        lambda: Variable(np.zeros(4), partitioner="fixed"),  # type: ignore[arg-type]
        lambda: Variable(np.zeros(200_000, np.uint8), partitioner=MaxSizePartitioner(4)),
    ],
)
def test_partitioners(make: Callable[[], object]) -> None:
    """They are checked where they are given."""
    with pytest.raises(ConfigurationError):
        make()


@pytest.mark.parametrize("name", ["", "\ud800", 5])
def test_names(name: Any) -> None:
    """Names must be strings that can be encoded."""
    with pytest.raises(MisuseError, match="1 to 1000 characters"):
        Variable(1.0, name=name)
    with pytest.raises(MisuseError, match="1 to 1000 characters"):
        metrics.Mean(name=name)


def test_names_are_shown_as_they_are(strategy: ParameterServerStrategy) -> None:
    """Brackets are not markup."""
    Variable(1.0, name="r[/foo][red]")
    assert "r[/foo][red]" in strategy.placement()


def test_a_metric_or_optimizer_that_fails_leaves_nothing() -> None:
    """Neither variables nor a name."""
    Variable(0.0, name="m/count")
    with pytest.raises(MisuseError, match="already a variable 'm/count'"):
        metrics.Mean(name="m")
    Variable(0.0, name="m/total")
    metrics.Sum(name="free")
    Variable(0.0, name="o/nonfinite")
    with pytest.raises(MisuseError, match="already a variable 'o/nonfinite'"):
        optimizers.SGD(name="o", nonfinite="skip")
    optimizers.SGD(name="o")


def test_metrics_are_numbered_and_keep_their_state() -> None:
    """A second one of its kind needs no name; an update that is not a number changes nothing."""
    first, second = metrics.Mean(), metrics.Mean()
    assert first.name != second.name
    first.update_state([1, 2])
    for wrong in (None, "a", np.array([1j]), [[1], [1, 2]]):
        with pytest.raises(MisuseError, match=first.name):
            first.update_state(wrong)  # type: ignore[arg-type]
    assert first.result() == 1.5


def test_colocation_is_within_a_strategy(strategy: ParameterServerStrategy) -> None:
    """The server of another strategy's variable has no meaning here."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as other:
        made: list[Variable] = []

        def make() -> None:
            with other.scope():
                made.append(Variable(1.0, name="theirs"))

        thread = threading.Thread(target=make)  # this one is within the scope of the first strategy
        thread.start()
        thread.join()
        (theirs,) = made
        with (
            pytest.raises(MisuseError, match="'theirs' belongs to another strategy"),
            strategy.colocate_vars_with(theirs),
        ):
            pass


@pytest.mark.parametrize(
    ("gradient", "value"),
    [
        (np.full((4, 2), 1e300), np.float32),
        (np.full((4, 2), 1e6, np.float32), np.float16),
        (IDS(np.full((2, 2), 3e38, np.float32), [0, 0]), np.float32),
    ],
)
@pytest.mark.parametrize("policy", ["refuse", "skip"])
def test_infinities_that_come_of_conversion_or_sums(gradient: Any, value: Any, policy: Any) -> None:
    """They are found, too: counted, and not applied."""
    v, optimizer = Variable(np.ones((4, 2), value)), optimizers.SGD(1.0, nonfinite=policy)
    if policy == "refuse":
        with pytest.raises(InvalidUpdateError, match=v.name):
            optimizer.apply_gradients([(gradient, v)])
    else:
        optimizer.apply_gradients([(gradient, v)])
    np.testing.assert_array_equal(v.numpy(), np.ones((4, 2)))
    assert (optimizer.nonfinite_count, optimizer.iterations) == (1, 0)


def test_a_gradient_that_clipping_would_make_finite_counts() -> None:
    """It was infinite."""
    v, optimizer = (
        Variable(np.zeros(2, np.float32)),
        optimizers.SGD(1.0, nonfinite="count", clipvalue=cast(float, np.float32(1))),
    )
    optimizer.apply_gradients([(np.array([np.inf, 0.5], np.float32), v)])
    assert (v.numpy().tolist(), optimizer.nonfinite_count) == ([-1.0, -0.5], 1)


def test_norms_whose_squares_overflow() -> None:
    """The direction is preserved."""
    v = Variable(np.zeros(2, np.float64))
    optimizers.SGD(1.0, clipnorm=1.0).apply_gradients([(np.array([3e200, 4e200]), v)])
    np.testing.assert_allclose(v.numpy(), [-0.6, -0.8])


@pytest.mark.parametrize(
    "arguments",
    [
        {"clipnorm": True},
        {"clipvalue": np.inf},
        {"use_ema": "no"},
        {"ema_momentum": 7},
        {"use_ema": True, "ema_momentum": None},
        {"use_ema": True, "ema_momentum": 0},
        {"loss_scale_factor": "8"},
    ],
)
def test_arguments_of_optimizers(arguments: Mapping[str, Any]) -> None:
    """The message names the argument and its value."""
    with pytest.raises(ValueError, match=f"{list(arguments)[-1]} is"):
        optimizers.SGD(**arguments)


@pytest.mark.parametrize("rate", [True, np.complex64(0.1), 10**400, -1, "a"])
def test_learning_rates(rate: Any) -> None:
    """A rate that is set is checked like one that is given."""
    optimizer = optimizers.SGD(0.5)
    with pytest.raises(ValueError, match="learning_rate is"):
        optimizer.learning_rate = rate
    assert optimizer.learning_rate == 0.5


@dataclass(frozen=True)
class Fussy(rules.UpdateRule):
    """Subtracts gradients, and counts them in a slot, until it meets a negative one."""

    name: ClassVar[str] = "fussy"

    @property
    def slots(self) -> Mapping[str, float]:
        return {"n": 0.0}

    def apply(
        self, param: Any, grad: Any, slots: Mapping[str, Any], scalars: Sequence[float], scratch: Sequence[Any]
    ) -> None:
        """Apply one block."""
        param -= grad
        counts = slots["n"]
        counts += 1
        if grad.min() < 0:
            raise ValueError("negative")


@pytest.mark.parametrize("sparse", [False, True])
def test_a_rule_that_raises_leaves_its_shard(sparse: bool) -> None:
    """Whatever it had changed before it raised."""
    v, optimizer = Variable(np.zeros((200_000, 1), np.float32)), optimizers.Optimizer(Fussy())
    gradient = np.ones((200_000, 1), np.float32)
    optimizer.apply_gradients([(gradient, v)])
    gradient[-10:] = -1
    with pytest.raises(MisuseError, match=f"{v.name}.*negative"):
        optimizer.apply_gradients([(IDS(gradient, np.arange(200_000)) if sparse else gradient, v)])
    assert (v.numpy() == -1).all()
    assert (optimizer.slot(v, "n").numpy() == 1).all()
    assert optimizer.iterations == 1


def test_reads_of_shards_and_of_containers(strategy: ParameterServerStrategy, w: Variable) -> None:
    """A shard is read like a variable; other things in its place are refused."""
    value = strategy.read({"a": w.variables[1], "b": [w]})
    np.testing.assert_array_equal(value["a"], np.ones((2, 2)))
    np.testing.assert_array_equal(value["b"][0], np.ones((4, 2)))
    for container in (collections.deque([w]), {"a": w}.values(), {w}, iter([w])):
        with pytest.raises(TypeError, match="make a list of it"):
            strategy.read(container)


def test_bags_of_other_types() -> None:
    """Complex rows stay complex, sums of integers exact."""
    table = Variable(np.array([[1 + 2j], [3j]], np.complex64))
    np.testing.assert_array_equal(embedding_bag(table, [[0, 1], []], combiner="sum"), [[1 + 5j], [0]])
    whole = Variable(np.array([[2**24 + 1], [2]], np.int64))
    assert embedding_bag(whole, [[0]], combiner="sum").tolist() == [[2**24 + 1]]
    assert embedding_bag(whole, [[0, 1]], combiner="mean").tolist() == [[(2**24 + 3) / 2]]


def test_numpy_functions(w: Variable) -> None:
    """They take a variable like an array; nothing is written through them."""
    ones = np.ones((4, 2), np.float32)
    for mine, theirs in (
        (np.exp(w), np.exp(ones)),
        (np.add(w, 1), ones + 1),
        (np.sum(w), np.sum(ones)),
        (np.matmul(w, ones.T), ones @ ones.T),
        (np.isfinite(w), np.isfinite(ones)),
        (divmod(w, 2)[1], ones),
        (divmod(2, w)[0], ones * 2),
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert round(Variable(1.5)) == 2
    assert round(Variable(np.float64(1.26)), 1) == 1.3
    with pytest.raises(MisuseError, match="assign"):
        np.add(ones, 1, out=w)  # type: ignore[call-overload]
    with pytest.raises(MisuseError, match="scatter"):
        np.add.at(w, [0], 1)


def test_indexing_as_numpy(w: Variable) -> None:
    """Ranges and tuples of indices, too."""
    table = Variable(np.arange(24).reshape(4, 3, 2))
    value = np.arange(24).reshape(4, 3, 2)
    np.testing.assert_array_equal(table[range(3)], value[range(3)])
    np.testing.assert_array_equal(table[0, (1, 2)], value[0, (1, 2)])
    with pytest.raises(IndexError):
        table[np.array([], float)]


def test_functions_that_take_one_of_the_part_s_arguments() -> None:
    """They get that one; functions that accept neither get an error that lists the arguments."""

    def from_offset(shape: Any, dtype: Any, partition_offset: Any) -> Any:
        return np.full((3, 4), partition_offset[0], dtype)

    v = Variable(from_offset, shape=(6, 4), partitioner=FixedShardsPartitioner(2))
    assert v.numpy()[:, 0].tolist() == [0, 0, 0, 3, 3, 3]
    with pytest.raises(InvalidUpdateError, match="is called with \\(shape, dtype\\)"):
        Variable(lambda s: 1, shape=(3,))


def test_an_average_of_a_half_type_is_read_whole() -> None:
    """Also before the first gradient, when it is the value itself."""
    v = Variable(np.zeros(2_000_000, np.float16))
    average, stop = optimizers.SGD(1.0, use_ema=True).average(v), threading.Event()

    def assign() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            v.assign(count % 100)

    thread = threading.Thread(target=assign)
    thread.start()
    try:
        for _ in range(10):
            read = average.numpy()
            assert read.min() == read.max()
    finally:
        stop.set()
        thread.join()


def test_creation_counts_as_traffic(strategy: ParameterServerStrategy) -> None:
    """The initial values count as pushed bytes."""
    before = strategy.traffic()
    Variable(np.zeros(1000, np.float32))
    assert strategy.traffic() - before == (0, 4000)
