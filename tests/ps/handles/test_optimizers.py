"""Optimizers on the servers against the same rules, run here on the whole variable; clipping, NaN and averages against
their formulas."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from tests.conftest import run_strategy

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    ParameterServerStrategy,
    Variable,
    metrics,
    optimizers,
)
from pscluster.core import errors
from pscluster.core.values import decode, encode
from pscluster.ps.optim import rules, schedules
from pscluster.ps.optim.kernels import apply_dense, apply_rows, new_slots

Array = npt.NDArray[Any]
Gradient = Array | IndexedSlices

SHAPE = (7, 3)
CUTS: dict[str, list[int]] = {"whole": [1], "rows": [3], "blocks": [2, 2]}


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    """Two servers and a worker."""
    yield from run_strategy(2, 1)


@pytest.fixture(autouse=True)
def scope(strategy: ParameterServerStrategy) -> Iterator[None]:
    """Make variables and optimizers in the strategy's scope."""
    with strategy.scope():
        yield


def make(value: npt.ArrayLike, cut: str = "rows", name: str | None = None) -> Variable:
    """A variable with that value and cut."""
    return Variable(np.asarray(value), name=name, partitioner=lambda shape, dtype: CUTS[cut][: len(shape)])


class Pure:
    """A rule, run here on the whole parameter."""

    def __init__(self, rule: rules.UpdateRule, start: Array) -> None:
        self.rule = rule
        self.value = start.copy()
        self.slots = new_slots(rule, start.shape, start.dtype)
        self.steps = 0

    def apply(self, gradient: Gradient) -> None:
        """Make one step."""
        self.steps += 1
        if isinstance(gradient, IndexedSlices):
            flat = {name: slot.reshape(len(slot), -1) for name, slot in self.slots.items()}
            ids = np.asarray(gradient.indices, np.int64).reshape(-1)
            rows = np.asarray(gradient.values, self.value.dtype).reshape(len(ids), math.prod(self.value.shape[1:]))
            apply_rows(self.rule, self.value.reshape(len(self.value), -1), ids, rows, flat, self.steps)
        else:
            gradient = np.asarray(gradient, self.value.dtype, order="C")
            apply_dense(self.rule, self.value, gradient, self.slots, self.steps)


def gradients(seed: int, steps: int, dtype: npt.DTypeLike = np.float32) -> Iterator[Gradient]:
    """Dense and sparse gradients in turn; the sparse ones have duplicates, rows in any order, and once none."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        if step % 2:
            ids = rng.integers(0, SHAPE[0], 0 if step == 3 else 5)
            yield IndexedSlices(rng.normal(size=(len(ids), *SHAPE[1:])).astype(dtype), ids)
        else:
            yield rng.normal(size=SHAPE).astype(dtype)


RULES: dict[str, tuple[Callable[[], optimizers.Optimizer], rules.UpdateRule]] = {
    "sgd": (lambda: optimizers.SGD(0.1), rules.SGD(0.1)),
    "momentum": (lambda: optimizers.SGD(0.1, momentum=0.9), rules.SGD(0.1, momentum=0.9)),
    "nesterov": (lambda: optimizers.SGD(0.1, 0.8, True), rules.SGD(0.1, momentum=0.8, nesterov=True)),
    "decayed": (lambda: optimizers.SGD(0.1, weight_decay=0.1), rules.SGD(0.1, weight_decay=0.1)),
    "adagrad": (
        lambda: optimizers.Adagrad(0.1, 0.2, 1e-5),
        rules.Adagrad(0.1, initial_accumulator_value=0.2, epsilon=1e-5),
    ),
    "adam": (lambda: optimizers.Adam(0.1, 0.8, 0.9, 1e-5), rules.Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-5)),
    "amsgrad": (lambda: optimizers.Adam(amsgrad=True), rules.Adam(amsgrad=True)),
    "adam of keras": (lambda: optimizers.Adam(0.1, epsilon_hat=True), rules.Adam(0.1, epsilon_hat=True)),
    "adamw": (lambda: optimizers.AdamW(0.1), rules.AdamW(0.1)),
    "adamw own decay": (lambda: optimizers.AdamW(0.1, weight_decay=0.3), rules.AdamW(0.1, weight_decay=0.3)),
    "rmsprop": (lambda: optimizers.RMSprop(0.01, rho=0.8), rules.RMSprop(0.01, rho=0.8)),
    "centered": (
        lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
        rules.RMSprop(0.01, momentum=0.5, centered=True),
    ),
    "ftrl": (lambda: optimizers.Ftrl(0.1), rules.Ftrl(0.1)),
    "ftrl regularized": (
        lambda: optimizers.Ftrl(0.1, -0.4, 0.2, 0.01, 0.02, 0.03, 0.04),
        rules.Ftrl(
            0.1,
            learning_rate_power=-0.4,
            initial_accumulator_value=0.2,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            l2_shrinkage_regularization_strength=0.03,
            beta=0.04,
        ),
    ),
    "adadelta": (lambda: optimizers.Adadelta(1.0, 0.9, 1e-6), rules.Adadelta(1.0, rho=0.9, epsilon=1e-6)),
    "lion": (lambda: optimizers.Lion(0.01, 0.8, 0.9), rules.Lion(0.01, beta_1=0.8, beta_2=0.9)),
}


class TestRules:
    """The eight rules, through their handles."""

    @pytest.mark.parametrize("cut", CUTS)
    @pytest.mark.parametrize("name", RULES)
    def test_like_the_pure_rule(self, name: str, cut: str) -> None:
        """However the variable is cut, values and slots equal those of the rule on the whole, bit for bit."""
        handle, rule = RULES[name]
        optimizer = handle()
        start = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
        variable, pure = make(start, cut), Pure(rule, start)
        for gradient in gradients(1, 8):
            optimizer.apply_gradients([(gradient, variable)])
            pure.apply(gradient)
            np.testing.assert_array_equal(variable.numpy(), pure.value)
        for slot, expected in pure.slots.items():
            np.testing.assert_array_equal(optimizer.slot(variable, slot).numpy(), expected)
        assert optimizer.iterations == 8

    @pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
    @pytest.mark.parametrize("name", ["adam", "ftrl", "momentum"])
    def test_other_floats(self, name: str, dtype: str) -> None:
        """Variables of other floating types work; the slots of half types are float32."""
        if dtype == "bfloat16":
            pytest.importorskip("ml_dtypes")
        handle, rule = RULES[name]
        optimizer = handle()
        start = np.random.default_rng(0).normal(size=SHAPE).astype(dtype)
        variable, pure = make(start), Pure(rule, start)
        for gradient in gradients(1, 6, dtype):
            optimizer.apply_gradients([(gradient, variable)])
            pure.apply(gradient)
            np.testing.assert_array_equal(variable.numpy(), pure.value)
        for slot, expected in pure.slots.items():
            handle_of_slot = optimizer.slot(variable, slot)
            assert handle_of_slot.dtype == (np.float64 if dtype == "float64" else np.float32)
            np.testing.assert_array_equal(handle_of_slot.numpy(), expected)

    @pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 3)])
    def test_any_rank(self, shape: tuple[int, ...]) -> None:
        """Scalars, vectors, empty variables and those with three axes work."""
        start = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        variable, optimizer, pure = make(start, "blocks"), optimizers.Adam(0.1), Pure(rules.Adam(0.1), np.array(start))
        for seed in range(3):
            gradient = np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)
            optimizer.apply_gradients([(gradient, variable)])
            pure.apply(gradient)
        np.testing.assert_array_equal(variable.numpy(), pure.value)
        assert optimizer.iterations == 3, "also where there is no element"

    def test_large_gradients_in_pieces(self) -> None:
        """A streamed gradient gives the same as one sent at once."""
        start = np.random.default_rng(0).normal(size=(3500, 1000)).astype(np.float32)
        variable, optimizer, pure = make(start), optimizers.Adam(0.1), Pure(rules.Adam(0.1), start)
        gradient = np.random.default_rng(1).normal(size=start.shape).astype(np.float32)
        ids = np.random.default_rng(2).integers(0, 3500, 3700)
        for given in (gradient, IndexedSlices(np.concatenate((gradient, gradient[:200])), ids)):
            optimizer.apply_gradients([(given, variable)])
            pure.apply(given)
            np.testing.assert_array_equal(variable.numpy(), pure.value)

    def test_several_variables_in_a_call(self) -> None:
        """Each gets its gradient; pairs without one are skipped and do not count."""
        optimizer = optimizers.SGD(1.0)
        a, b, c = make(np.zeros(4), "rows"), make(np.zeros((2, 2)), "whole"), make(0.0)
        optimizer.apply_gradients([(np.arange(4), a), (None, b), (2.0, c)])
        optimizer.apply_gradients(zip([IndexedSlices([[1.0, 1.0]], [1]), 1.0], [b, c], strict=True))
        assert a.numpy().tolist() == [0, -1, -2, -3]
        assert b.numpy().tolist() == [[0, 0], [-1, -1]]
        assert float(c) == -3
        assert optimizer.iterations == 2

    def test_no_gradient_at_all(self) -> None:
        """Nothing happens, and nothing is counted."""
        optimizer, v = optimizers.Adam(), make([1.0])
        optimizer.apply_gradients([])
        optimizer.apply_gradients([(None, v)])
        assert (optimizer.iterations, v.numpy().tolist()) == (0, [1.0])

    def test_a_step_counts_on_all_shards(self) -> None:
        """The step counts for rows that a sparse gradient does not touch, too, as Adam's correction shows."""
        v, optimizer, pure = make(np.zeros(SHAPE)), optimizers.Adam(0.1), Pure(rules.Adam(0.1), np.zeros(SHAPE))
        first = IndexedSlices(np.ones((1, 3)), [0])
        later = IndexedSlices(np.ones((1, 3)), [6])
        for gradient in [first] * 9 + [later]:
            optimizer.apply_gradients([(gradient, v)])
            pure.apply(gradient)
        np.testing.assert_array_equal(v.numpy(), pure.value)

    def test_two_optimizers_of_one_variable(self) -> None:
        """Each has separate slots and a separate count."""
        v = make(np.zeros(3))
        one, two = optimizers.Adam(0.1), optimizers.Adam(0.1)
        one.apply_gradients([(np.ones(3), v)])
        one.apply_gradients([(np.ones(3), v)])
        two.apply_gradients([(np.full(3, 5.0), v)])
        assert (one.iterations, two.iterations) == (2, 1)
        np.testing.assert_allclose(two.slot(v, "m").numpy(), np.full(3, 0.5), rtol=1e-6)

    def test_in_a_function(self, strategy: ParameterServerStrategy) -> None:
        """A step applies gradients, reads the rate, the count and a slot, with the handles it captured."""
        coordinator = ClusterCoordinator(strategy)
        v, optimizer = make(np.zeros(3, np.float32)), optimizers.SGD(0.5, momentum=0.9)
        momentum = optimizer.slot(v, "momentum")

        def step(gradient: Array) -> tuple[int, Any, list[float]]:
            optimizer.apply_gradients([(gradient, v)])
            return optimizer.iterations, optimizer.learning_rate, momentum.numpy().tolist()

        results = [coordinator.schedule(step, args=(np.full(3, n, np.float32),)) for n in (2.0, 4.0)]
        coordinator.join()
        assert coordinator.fetch(results)[-1][:2] == (2, 0.5)
        np.testing.assert_allclose(coordinator.fetch(results)[1][2], [-2.9] * 3, rtol=1e-6)
        np.testing.assert_allclose(v.numpy(), np.full(3, -3.9), rtol=1e-6)


SCHEDULES: list[schedules.LearningRateSchedule] = [
    schedules.ExponentialDecay(0.5, 3, 0.5),
    schedules.ExponentialDecay(0.5, 3, 0.5, staircase=True),
    schedules.PiecewiseConstantDecay((1, 3), (1.0, 0.5, 0.25)),
    schedules.PolynomialDecay(0.5, 4, 0.1, power=2.0),
    schedules.InverseTimeDecay(0.5, 2, 0.5),
    schedules.CosineDecay(0.5, 4, 0.1),
    schedules.CosineDecay(0.1, 4, warmup_target=0.5, warmup_steps=2),
    schedules.CosineDecayRestarts(0.5, 2, t_mul=2.0, m_mul=0.5),
    schedules.WarmUp(schedules.ExponentialDecay(0.5, 3, 0.5), 3),
    schedules.WarmUp(0.5, 3, 0.1),
]


class TestLearningRate:
    """The rate is a number, a schedule of the shard's own count, or set between steps."""

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
    def test_schedules(self, schedule: schedules.LearningRateSchedule) -> None:
        """The n-th gradient has the rate schedule(n - 1), dense or sparse, on every shard."""
        optimizer, v = optimizers.SGD(schedule), make(np.zeros((3, 1)))
        assert optimizer.learning_rate == schedule
        expected = np.zeros((3, 1))
        for n in range(7):
            if n % 2:
                optimizer.apply_gradients([(IndexedSlices([[1.0]], [n % 3]), v)])
                expected[n % 3] -= schedule(n)
            else:
                optimizer.apply_gradients([(np.ones((3, 1)), v)])
                expected -= schedule(n)
            np.testing.assert_allclose(v.numpy(), expected, rtol=1e-12)

    def test_set_between_steps(self) -> None:
        """It is set to a number, to a schedule, which sees the steps so far, and back; slots and count stay."""
        optimizer, v = optimizers.SGD(1.0, momentum=0.5), make([0.0, 0.0], "rows")
        pure = Pure(rules.SGD(1.0, momentum=0.5), np.zeros(2))
        schedule = schedules.PiecewiseConstantDecay((1, 2), (100.0, 10.0, 5.0))
        for rate, expected in ((None, 1.0), (0.5, 0.5), (schedule, 10.0), (None, 5.0), (0.25, 0.25)):
            if rate is not None:
                optimizer.learning_rate = rate
                assert optimizer.learning_rate == rate
            optimizer.apply_gradients([(np.ones(2), v)])
            pure.rule = rules.SGD(expected, momentum=0.5)
            pure.apply(np.ones(2))
            np.testing.assert_allclose(v.numpy(), pure.value, rtol=1e-12)
        assert optimizer.iterations == 5

    def test_set_in_a_function(self, strategy: ParameterServerStrategy) -> None:
        """A rate set by a step applies everywhere."""
        coordinator, optimizer, v = ClusterCoordinator(strategy), optimizers.SGD(1.0), make([0.0])

        def step() -> None:
            optimizer.learning_rate = 0.125

        coordinator.schedule(step)
        coordinator.join()
        assert optimizer.learning_rate == 0.125
        optimizer.apply_gradients([(np.ones(1), v)])
        assert v.numpy().tolist() == [-0.125]

    @pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "fast", None, [0.1]], ids=repr)
    def test_rates_that_are_none(self, rate: Any) -> None:
        """The constructor and the setter refuse them with the value, and the rate stays."""
        optimizer = optimizers.SGD(0.5)
        with pytest.raises(ValueError, match="learning_rate is"):
            optimizer.learning_rate = rate
        assert optimizer.learning_rate == 0.5
        with pytest.raises(ValueError, match="learning_rate is"):
            optimizers.SGD(rate)

    def test_a_rate_of_zero_under_ftrl(self) -> None:
        """In a warm-up from 0, by which Ftrl would divide, the step says so and changes no value."""
        optimizer = optimizers.Ftrl(schedules.WarmUp(0.1, 3), name="warm")
        v = make(np.ones(3), name="warmed")
        with pytest.raises(
            errors.MisuseError, match=r"optimizer 'warm' .*variable 'warmed'.*learning rate at step 1 is 0"
        ):
            optimizer.apply_gradients([(np.ones(3), v)])
        assert v.numpy().tolist() == [1, 1, 1]
        assert optimizer.iterations == 0

    @pytest.mark.parametrize(
        "make_one",
        [
            lambda: optimizers.Adam(0.1, beta_1=1.0, name="refused"),
            lambda: optimizers.SGD(0.1, momentum=-0.5, name="refused"),
            lambda: optimizers.SGD(0.1, weight_decay=-1.0, name="refused"),
            lambda: optimizers.SGD(0.1, clipnorm=0.0, name="refused"),
            lambda: optimizers.SGD(0.1, clipvalue=float("nan"), name="refused"),
            lambda: optimizers.SGD(0.1, clipnorm=1.0, global_clipnorm=1.0, name="refused"),
            lambda: optimizers.SGD(0.1, nonfinite="ignore", name="refused"),  # type: ignore[arg-type]
            lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=1.0, name="refused"),
            lambda: optimizers.SGD(schedules.ExponentialDecay(0.1, 0, 0.5), name="refused"),
        ],
    )
    def test_bad_hyperparameters(self, strategy: ParameterServerStrategy, make_one: Callable[[], object]) -> None:
        """A ValueError has the value, and no such optimizer is made."""
        with pytest.raises(ValueError, match=r"must be|give one of|decay_steps"):
            make_one()
        with pytest.raises(errors.UnknownVariableError, match="'refused'"):
            strategy.client.describe_optimizer("refused")

    def test_misspelt_arguments(self) -> None:
        """An unknown argument is an error, since a misspelt clipnorm would clip nothing."""
        with pytest.raises(TypeError, match="SGD has no argument 'clipnrom'"):
            optimizers.SGD(0.1, clipnrom=1.0)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="weight_decay belongs to the rule"):
            optimizers.Optimizer(rules.SGD(0.1), weight_decay=0.1)


def clipped_by_norm(arrays: Sequence[Array], limit: float) -> list[Array]:
    """The formula: if the norm of all together is above the limit, they are scaled to it."""
    norm = math.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays))
    return [array * min(1.0, limit / norm) if norm else array for array in arrays]


class TestTreatment:
    """What is done to gradients before they are sent: scaling, clipping, the check for NaN."""

    dense = np.array([[3.0, -4.0], [0.5, 0.0], [-12.0, 0.25]])
    sparse = IndexedSlices(np.array([[3.0, 0.0], [1.0, -2.0], [-1.0, 0.0]]), [2, 0, 2])  # rows 0: 1 -2, 2: 2 0
    summed = np.array([[1.0, -2.0], [0.0, 0.0], [2.0, 0.0]])

    def sent(self, dtype: npt.DTypeLike = np.float64, **treatment: Any) -> tuple[Array, Array]:
        """What becomes of a dense and a sparse gradient in one call: SGD with rate 1 shows it."""
        v, w = make(np.zeros((3, 2), dtype)), make(np.zeros((3, 2), dtype))
        rows = IndexedSlices(np.asarray(self.sparse.values, dtype), self.sparse.indices)
        optimizers.SGD(1.0, **treatment).apply_gradients([(self.dense.astype(dtype), v), (rows, w)])
        return -v.numpy(), -w.numpy()

    def test_plain(self) -> None:
        """They are sent as given; rows with equal ids are summed."""
        for got, expected in zip(self.sent(), (self.dense, self.summed), strict=True):
            np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize("limit", [0.75, 3.0, 100.0])
    def test_by_value(self, limit: float) -> None:
        """Every element of the summed gradient is clipped."""
        for got, whole in zip(self.sent(clipvalue=limit), (self.dense, self.summed), strict=True):
            np.testing.assert_allclose(got, np.clip(whole, -limit, limit), rtol=1e-12)

    @pytest.mark.parametrize("limit", [0.5, 2.5, 100.0])
    def test_by_norm(self, limit: float) -> None:
        """This limits the norm of each variable's gradient, which for a sparse one is that of the sums."""
        for got, whole in zip(self.sent(clipnorm=limit), (self.dense, self.summed), strict=True):
            np.testing.assert_allclose(got, clipped_by_norm([whole], limit)[0], rtol=1e-12)

    @pytest.mark.parametrize("limit", [0.5, 2.5, 100.0])
    def test_by_global_norm(self, limit: float) -> None:
        """This limits the norm of all gradients in a call together."""
        expected = clipped_by_norm([self.dense, self.summed], limit)
        for got, whole in zip(self.sent(global_clipnorm=limit), expected, strict=True):
            np.testing.assert_allclose(got, whole, rtol=1e-12)

    def test_scaling_comes_first(self) -> None:
        """A scaled loss's gradients are divided before they are clipped."""
        expected = [np.clip(whole / 4, -0.5, 0.5) for whole in (self.dense, self.summed)]
        for got, whole in zip(self.sent(loss_scale_factor=4.0, clipvalue=0.5), expected, strict=True):
            np.testing.assert_allclose(got, whole, rtol=1e-12)

    @pytest.mark.parametrize("treatment", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"loss_scale_factor": 65536.0}])
    def test_half_types(self, treatment: Mapping[str, float]) -> None:
        """It is done in float32: neither a scale beyond float16 nor the squares of large values overflow."""
        v = make(np.zeros((2, 2), np.float16))
        optimizers.SGD(1.0, **treatment).apply_gradients([(np.full((2, 2), 400.0, np.float16), v)])  # type: ignore[arg-type]
        expected = 400 / 65536 if "loss_scale_factor" in treatment else 0.5
        np.testing.assert_allclose(-v.numpy(), np.full((2, 2), expected), rtol=1e-3)

    def test_empty_and_integer_gradients(self) -> None:
        """Gradients without rows, and integers, are clipped too."""
        v = make(np.zeros((3, 2)))
        optimizer = optimizers.SGD(1.0, clipnorm=1.0)
        optimizer.apply_gradients([(IndexedSlices(np.zeros((0, 2)), []), v)])
        assert optimizer.iterations == 1
        assert not v.numpy().any()
        optimizer.apply_gradients([(np.full((3, 2), 7), v)])
        np.testing.assert_allclose(v.numpy(), np.full((3, 2), -(6**-0.5)), rtol=1e-12)

    NAN, INF = float("nan"), float("inf")

    @pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=repr)
    @pytest.mark.parametrize("kind", ["dense", "sparse"])
    @pytest.mark.parametrize("policy", ["apply", "count", "skip", "refuse"])
    def test_nonfinite(self, policy: str, kind: str, bad: float) -> None:
        """They are not checked for, applied and counted, only counted, or refused with the variable's name."""
        v, w = make(np.zeros(3)), make(np.zeros(3), name=f"bad{policy}{kind}{bad}")
        optimizer = optimizers.SGD(1.0, nonfinite=policy)  # type: ignore[arg-type]
        gradient: Gradient = np.array([1.0, bad, 1.0]) if kind == "dense" else IndexedSlices([1.0, bad], [0, 1])
        pairs: list[tuple[Any, Variable]] = [(np.ones(3), v), (gradient, w)]
        optimizer.apply_gradients([(np.ones(3), v)])
        if policy == "refuse":
            with pytest.raises(
                errors.InvalidUpdateError, match=f"NaN or infinity in the gradient of {w.name}: nothing"
            ):
                optimizer.apply_gradients(pairs)
        else:
            optimizer.apply_gradients(pairs)
        applied = policy in ("apply", "count")
        assert v.numpy().tolist() == [-2.0 if applied else -1.0] * 3
        np.testing.assert_array_equal(w.numpy(), [-1, -bad, 0 if kind == "sparse" else -1] if applied else [0, 0, 0])
        assert optimizer.iterations == (2 if applied else 1)
        assert optimizer.nonfinite_count == (0 if policy == "apply" else 1)

    def test_nonfinite_in_functions(self, strategy: ParameterServerStrategy) -> None:
        """They are counted over all workers."""
        coordinator, v = ClusterCoordinator(strategy), make(np.zeros(2))
        optimizer = optimizers.SGD(1.0, nonfinite="skip", clipnorm=5.0)

        def step(value: float) -> None:
            optimizer.apply_gradients([(np.full(2, value), v)])

        for value in (1.0, self.NAN, 2.0, self.INF):
            coordinator.schedule(step, args=(value,))
        coordinator.join()
        assert (optimizer.nonfinite_count, optimizer.iterations) == (2, 2)
        assert v.numpy().tolist() == [-3, -3]


class TestAverages:
    """Exponential averages of the weights."""

    @pytest.mark.parametrize("cut", CUTS)
    def test_the_formula(self, cut: str) -> None:
        """The first average is the values themselves; each step moves it, a sparse one only its rows."""
        start = np.random.default_rng(0).normal(size=SHAPE)
        v, optimizer = make(start, cut), optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        average = optimizer.average(v)
        np.testing.assert_array_equal(average.numpy(), start)
        expected: Array | None = None
        for gradient in gradients(3, 7, np.float64):
            optimizer.apply_gradients([(gradient, v)])
            value = v.numpy()
            if expected is None:
                expected = value.copy()
            elif isinstance(gradient, IndexedSlices):
                rows = np.unique(np.asarray(gradient.indices, np.int64))
                expected[rows] = 0.9 * expected[rows] + 0.1 * value[rows]
            else:
                expected = 0.9 * expected + 0.1 * value
            np.testing.assert_allclose(average.numpy(), expected, rtol=1e-12)
        assert average.shape == SHAPE
        np.testing.assert_array_equal(average[1:5, ::-1], average.numpy()[1:5, ::-1])
        np.testing.assert_array_equal(average.gather([6, 0]), average.numpy()[[6, 0]])

    def test_of_half_types(self) -> None:
        """It is stored in float32, in which a share of 0.001 is not lost."""
        v, optimizer = make(np.zeros(2, np.float16)), optimizers.SGD(1.0, use_ema=True, ema_momentum=0.999)
        average = optimizer.average(v)
        assert average.dtype == np.float32
        assert average.numpy().tolist() == [0, 0]
        optimizer.apply_gradients([(np.full(2, -1000, np.float16), v)])
        optimizer.apply_gradients([(np.full(2, -1, np.float16), v)])
        np.testing.assert_allclose(average.numpy(), np.full(2, 1000.001), rtol=1e-7)

    def test_without(self) -> None:
        """There is none by default."""
        v, optimizer = make([1.0]), optimizers.SGD(name="averageless")
        with pytest.raises(errors.MisuseError, match="optimizer 'averageless' keeps no averages: make it with use_ema"):
            optimizer.average(v)


class TestSlots:
    """Slots are read like variables, and are read-only."""

    def test_what_they_are(self) -> None:
        """They are named after variable, optimizer and slot, have the variable's shape and placement, and are
        filled."""
        v, optimizer = make(np.ones(SHAPE), "blocks", name="slotted"), optimizers.Adagrad(0.1, 0.5, name="ada")
        slot = optimizer.slot(v, "accumulator")
        assert slot.name == "slotted/ada/accumulator"
        assert (slot.shape, slot.dtype, slot.trainable) == (SHAPE, v.dtype, False)
        assert [shard.device for shard in slot.variables] == [shard.device for shard in v.variables]
        np.testing.assert_array_equal(slot.numpy(), np.full(SHAPE, 0.5))
        optimizer.apply_gradients([(IndexedSlices(np.full((1, 3), 2.0), [4]), v)])
        expected = np.full(SHAPE, 0.5)
        expected[4] += 4
        for index in (np.s_[:], np.s_[4], np.s_[::-2, 1:], np.s_[expected > 1]):
            np.testing.assert_array_equal(slot[index], expected[index])
        np.testing.assert_array_equal(slot.variables[1].numpy(), expected[slot.variables[1].block.slices])
        np.testing.assert_array_equal(slot.gather([5, 4]), expected[[5, 4]])
        np.testing.assert_array_equal(slot + v, expected + v.numpy())

    def test_they_are_not_written(self) -> None:
        """Assignments, scatters and gradients are refused."""
        v, optimizer = make(np.ones(SHAPE)), optimizers.Adam()
        slot = optimizer.slot(v, "m")
        calls: list[Callable[[], object]] = [
            lambda: slot.assign(1.0),
            lambda: slot.scatter_add(IndexedSlices(np.ones((1, 3)), [0])),
            lambda: optimizer.apply_gradients([(np.ones(SHAPE), slot)]),
        ]
        for call in calls:
            with pytest.raises(errors.MisuseError, match="belongs to its optimizer: it can be read, but not assigned"):
                call()

    def test_one_that_there_is_not(self) -> None:
        """The error has its name."""
        v, optimizer = make(np.ones(2), name="unslotted"), optimizers.SGD()
        with pytest.raises(KeyError, match="has no slot 'momentum' for 'unslotted'"):
            optimizer.slot(v, "momentum").numpy()


class TestBadGradients:
    """Gradients that do not fit are refused with the variable's name, and no variable of the call changes."""

    @pytest.mark.parametrize("treatment", [{}, {"clipnorm": 1.0}, {"nonfinite": "refuse"}], ids=str)
    @pytest.mark.parametrize(
        ("gradient", "message"),
        [
            (np.ones((3, 2)), r"the gradient has shape \(3, 2\), but must have shape \(4, 2\)"),
            (np.float64(1), r"the gradient has shape \(\), but must have shape \(4, 2\)"),
            (np.ones((4, 2), complex), r"is float32, but the gradient is complex128"),
            (np.ones((4, 2), bool), r"is float32, but the gradient is bool"),
            ("steep", r"is float32, but the gradient is str"),
            (IndexedSlices(np.ones((2, 2)), [0, 4]), r"row id 4 \(position 1\) is out of range"),
            (IndexedSlices(np.ones((2, 2)), [-1, 0]), r"row id -1 \(position 0\) is out of range"),
            (IndexedSlices(np.ones((2, 2)), [0.0, 1.0]), r"row ids must be integers, but they are float64"),
            (IndexedSlices(np.ones((3, 2)), [0, 1]), r"have shape \(3, 2\), but must have shape \(2, 2\)"),
            (IndexedSlices(np.ones((2, 2), complex), [0, 1]), r"are complex128"),
        ],
        ids=lambda value: "" if isinstance(value, str) else None,
    )
    def test_refused(self, gradient: Any, message: str, treatment: Mapping[str, Any]) -> None:
        """Shape, type and ids are checked, with and without treatment."""
        good, bad = make(np.zeros(3, np.float32)), make(np.zeros((4, 2), np.float32))
        optimizer = optimizers.SGD(1.0, **treatment)
        with pytest.raises(errors.InvalidUpdateError, match=message) as caught:
            optimizer.apply_gradients([(np.ones(3), good), (gradient, bad)])
        assert repr(bad.name) in str(caught.value)
        assert not good.numpy().any()
        assert not bad.numpy().any()
        assert optimizer.iterations == 0

    def test_other_floats_are_converted(self) -> None:
        """A gradient of another floating type, or of integers, is converted to the variable's."""
        v = make(np.zeros(2, np.float32))
        optimizer = optimizers.SGD(1.0)
        for gradient in (np.ones(2, np.float64), np.ones(2, np.float16), np.ones(2, np.int64), [1.0, 1.0]):
            optimizer.apply_gradients([(gradient, v)])
        assert v.numpy().tolist() == [-4, -4]

    def test_integer_variables(self) -> None:
        """They take no gradients."""
        v = make(np.zeros(2, np.int32), name="counts")
        with pytest.raises(errors.InvalidUpdateError, match="variable 'counts' is int32: only floats take gradients"):
            optimizers.SGD().apply_gradients([(np.ones(2), v)])

    def test_pairs(self) -> None:
        """A variable given twice, pairs in the wrong order, and no pairs are refused."""
        v, optimizer = make(np.zeros(2), name="twice"), optimizers.SGD(1.0)
        with pytest.raises(errors.MisuseError, match="'twice' is given twice"):
            optimizer.apply_gradients([(np.ones(2), v), (np.ones(2), v)])
        with pytest.raises(TypeError, match=r"takes pairs \(gradient, variable\), not an ndarray"):
            optimizer.apply_gradients([(v, np.ones(2))])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"takes pairs \(gradient, variable\), not an int"):
            optimizer.apply_gradients(3)  # type: ignore[arg-type]
        assert not v.numpy().any()

    def test_names(self) -> None:
        """A name is generated if none is given, is unique, and is free again after a refusal."""
        first, second = optimizers.Lion(), optimizers.Lion()
        assert first.name != second.name
        optimizers.SGD(name="only one")
        with pytest.raises(errors.MisuseError, match="already an optimizer 'only one'"):
            optimizers.Adam(name="only one")


@pytest.mark.parametrize("rule", rules.RULES.values(), ids=str)
def test_the_arguments_of_optimizers_are_the_hyperparameters_of_their_rules(rule: type[rules.UpdateRule]) -> None:
    """Each handle accepts its rule's hyperparameters, by position, in the rule's order and with its defaults."""
    handle = next(
        value for name, value in vars(optimizers).items() if name.lower() == rule.name and isinstance(value, type)
    )
    taken = inspect.signature(handle).parameters.values()
    positional = {
        parameter.name: parameter.default for parameter in taken if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    declared = {item.name: item.default for item in fields(rule) if item.name != "weight_decay"}
    assert list(positional.items()) == list(declared.items())


@dataclass(frozen=True)
class SignSGD(rules.UpdateRule):
    """A user-defined rule, in a module: steps of equal length, with a count of the steps of each element."""

    name: ClassVar[str] = "sign_sgd"
    slots: ClassVar[Mapping[str, float]] = {"steps": 10.0}

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: tuple[float, ...],
        scratch: Sequence[Array],
    ) -> None:
        """p <- p - lr * sign(g)."""
        (rate,) = scalars
        np.sign(grad, out=scratch[0])
        np.multiply(scratch[0], rate, out=scratch[0])
        np.subtract(param, scratch[0], out=param)
        np.add(slots["steps"], 1, out=slots["steps"])


MODULE = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pscluster.ps.optim.rules import UpdateRule


@dataclass(frozen=True)
class Halving(UpdateRule):
    """Of a module beside the script, which the servers import."""

    name: ClassVar[str] = "halving"
    slots = {}

    def apply(self, param, grad, slots, scalars, scratch):
        np.multiply(param, 0.5, out=param)
'''

SCRIPT = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from halving import Halving

from pscluster.coordinator import (
    ClusterCoordinator, FixedShardsPartitioner, IndexedSlices, ParameterServerStrategy, TFConfigClusterResolver,
    Variable, optimizers,
)
from pscluster.ps.optim.rules import UpdateRule


@dataclass(frozen=True)
class Plain(UpdateRule):
    """Of the script itself."""

    name: ClassVar[str] = "plain"
    factor: float = 3.0
    slots = {"seen": 0.0}

    def apply(self, param, grad, slots, scalars, scratch):
        np.subtract(param, scalars[0] * self.factor * grad, out=param)
        slots["seen"] += 1


if __name__ == "__main__":
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        v = Variable(np.zeros((4, 1)), name="v")
        plain, halving = optimizers.Optimizer(Plain(2.0)), optimizers.Optimizer(Halving())
    plain.apply_gradients([(np.ones((4, 1)), v)])
    halving.apply_gradients([(np.zeros((4, 1)), v)])
    coordinator = ClusterCoordinator(strategy)

    def step():
        plain.apply_gradients([(IndexedSlices([[1.0]], [3]), v)])

    coordinator.schedule(step)
    coordinator.join()
    plain.learning_rate = 1.0
    plain.apply_gradients([(IndexedSlices([[1.0]], [0]), v)])
    seen = plain.slot(v, "seen").numpy()
    print("values", v.numpy().ravel().tolist(), "seen", seen.ravel().tolist(), plain.iterations)
'''


class TestOwnRules:
    """User-defined optimizers."""

    @pytest.mark.parametrize("cut", CUTS)
    def test_of_a_module(self, cut: str) -> None:
        """It works densely and sparsely, with slots, a schedule and the common options, like the built-in ones."""
        start = np.random.default_rng(0).normal(size=SHAPE)
        v, pure = make(start, cut), Pure(SignSGD(0.5), start)
        optimizer = optimizers.Optimizer(SignSGD(0.5), use_ema=True)
        for gradient in gradients(5, 6, np.float64):
            optimizer.apply_gradients([(gradient, v)])
            pure.apply(gradient)
        np.testing.assert_array_equal(v.numpy(), pure.value)
        np.testing.assert_array_equal(optimizer.slot(v, "steps").numpy(), pure.slots["steps"])
        assert (optimizer.iterations, optimizer.learning_rate) == (6, 0.5)
        assert optimizer.average(v).shape == SHAPE

    def test_of_a_function(self) -> None:
        """A class that is not in a module is sent by value."""

        @dataclass(frozen=True)
        class Local(SignSGD):
            name: ClassVar[str] = "local"

        v, optimizer = make(np.zeros(3)), optimizers.Optimizer(Local(0.25), schedule=SCHEDULES[2])
        for _ in range(2):
            optimizer.apply_gradients([(np.ones(3), v)])
        assert v.numpy().tolist() == [-2, -2, -2]

    def test_of_the_script(self, tmp_path: Path) -> None:
        """One in `__main__` and one in a module beside it work on servers that `pscluster run` starts."""
        (tmp_path / "halving.py").write_text(MODULE)
        (tmp_path / "script.py").write_text(SCRIPT)
        environ = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
        pscluster = [sys.executable, "-c", "from pscluster.coordinator.cli.main import main; main()"]
        command = [*pscluster, "run", "--ps", "2", "--workers", "1", "script.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert "values [-6.0, -3.0, -3.0, -9.0] seen [2.0, 1.0, 1.0, 2.0] 3" in done.stdout, done.stdout + done.stderr
        assert done.returncode == 0

    def test_one_that_raises(self) -> None:
        """The error names the optimizer, variable, shard and server, and has the rule's message."""

        @dataclass(frozen=True)
        class Broken(SignSGD):
            name: ClassVar[str] = "broken"

            def apply(self, *_: object) -> None:
                raise RuntimeError("no such thing as a slope")

        v, optimizer = make(np.zeros(3), name="flat"), optimizers.Optimizer(Broken(), name="broken one")
        with pytest.raises(
            errors.MisuseError, match=r"'broken one' .*'flat', shard \d, on ps \d: RuntimeError: no such"
        ):
            optimizer.apply_gradients([(np.ones(3), v)])
        assert not v.numpy().any()

    @pytest.mark.parametrize("rule", [3, SignSGD, "sgd", None], ids=repr)
    def test_what_is_no_rule(self, rule: Any) -> None:
        """It is refused on the coordinator."""
        with pytest.raises(TypeError, match="an Optimizer needs an UpdateRule"):
            optimizers.Optimizer(rule)


# Other frameworks' tensors


class Tensor:
    """Behaves like torch's: NumPy accepts it only detached, in memory, dense and of a type that it knows."""

    def __init__(self, array: Array, *, hindrances: Sequence[str] = (), dtype: str = "torch.float32") -> None:
        self._array, self._hindrances, self.dtype = array, tuple(hindrances), dtype
        self.layout = "torch.sparse_coo" if "sparse" in hindrances else "torch.strided"
        self.is_sparse = "sparse" in hindrances
        self.shape = array.shape

    def _without(self, hindrance: str, dtype: str = "") -> Tensor:
        left = [other for other in self._hindrances if other != hindrance]
        return Tensor(self._array, hindrances=left, dtype=dtype or self.dtype)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        if self._hindrances:
            raise TypeError(f"can't convert to numpy: {self._hindrances}")
        return self._array if dtype is None else self._array.astype(dtype)

    def detach(self) -> Tensor:
        """Return it without its graph."""
        return self._without("graph")

    def cpu(self) -> Tensor:
        """Return it in memory."""
        return self._without("device")

    def float(self) -> Tensor:
        """Return it in 32 bits."""
        return self._without("bfloat16", "torch.float32")

    def to_dense(self) -> Tensor:
        """Return all of it."""
        return self._without("sparse")

    # Of a sparse one, as for an embedding: two of its rows, the last one twice.

    def coalesce(self) -> Tensor:
        """Return each row once."""
        return self

    def sparse_dim(self) -> int:
        """The number of indexed axes."""
        return 1

    def indices(self) -> Tensor:
        """The indices, of shape (1, rows)."""
        return Tensor(np.flatnonzero(self._array.any(1))[None])

    def values(self) -> Tensor:
        """The rows."""
        return Tensor(self._array[self._array.any(1)], hindrances=["device"])


EVERYTHING = ["graph", "device", "bfloat16"]


@pytest.mark.parametrize(
    "hindrances", [["graph"], ["device"], EVERYTHING, ["sparse"], [*EVERYTHING[:2], "sparse"]], ids=str
)
def test_tensors_of_other_frameworks(strategy: ParameterServerStrategy, hindrances: list[str]) -> None:
    """They work as gradients, values, initial values, metrics and results: with a graph, on a device, sparse or
    bfloat16."""
    rows = np.zeros(SHAPE, np.float32)
    rows[[1, 4]] = [[1, 2, 3], [4, 5, 6]]
    kind = "torch.bfloat16" if "bfloat16" in hindrances else "torch.float32"
    tensor: Any = Tensor(rows, hindrances=hindrances, dtype=kind)
    made = Variable(tensor)
    np.testing.assert_array_equal(made.numpy(), rows)
    w = make(np.ones(SHAPE, np.float32))
    for sgd in (optimizers.SGD(1.0), optimizers.SGD(1.0, clipnorm=1e9)):
        sgd.apply_gradients([(tensor, w)])
    np.testing.assert_array_equal(w.numpy(), 1 - 2 * rows)
    w.assign(tensor)
    w.assign_add(tensor)
    if "sparse" in hindrances:
        w.scatter_sub(tensor)
        w.assign_add(tensor)
    np.testing.assert_array_equal(w.numpy(), 2 * rows)
    mean = metrics.Sum()
    assert mean.result(mean.update(mean.initial(), tensor)) == rows.sum()
    np.testing.assert_array_equal(decode(encode(tensor)), rows)


def test_tensors_that_give_no_array(strategy: ParameterServerStrategy) -> None:
    """The error names the variable and the reason."""
    with pytest.raises(
        errors.InvalidUpdateError, match="variable 'no array': the value is not an array: can't convert"
    ):
        make(np.ones(SHAPE), name="no array").assign(Tensor(np.ones(SHAPE), hindrances=["quantized"]))
