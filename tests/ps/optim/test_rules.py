"""Update rules against their formulas in float64, torch and Keras; their drivers against NumPy."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.optim import kernels, row_sums
from pscluster.ps.optim.kernels import apply_dense, apply_rows, new_slots
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.optim.row_sums import deduplicate
from pscluster.ps.optim.rules import (
    RULES,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Lion,
    RMSprop,
    UpdateRule,
    hyperparameter,
)

Array = npt.NDArray[Any]
State = dict[str, Array]
Formula = Callable[[Array, Array, State, int], Array]

STEPS = 100


@contextlib.contextmanager
def blocks_of(elements: int, few: int = 32) -> Iterator[None]:
    """Drivers with small blocks, so that small arrays have several, both full ones and a remainder."""
    with (
        mock.patch.multiple(kernels, _BLOCK=elements, ROW_BLOCK=elements),
        mock.patch.multiple(row_sums, ROW_BLOCK=elements, _FEW=few),
    ):
        yield


# The formulas as in the papers: new p from p, g, the state and t. They share neither code nor rearrangements with
# the rules.


def sgd(rate: float, mu: float = 0.0, nesterov: bool = False) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        velocity = state["momentum"] = mu * state.get("momentum", 0.0) - rate * g
        return p + (mu * velocity - rate * g if nesterov else velocity)

    return formula


def adam(rate: float, b1: float, b2: float, eps: float, decay: float = 0.0, amsgrad: bool = False) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
        if amsgrad:
            v = state["v_hat"] = np.maximum(state.get("v_hat", 0.0), v)
        m_corrected, v_corrected = m / (1 - b1**t), v / (1 - b2**t)
        return p - rate * (m_corrected / (np.sqrt(v_corrected) + eps) + decay * p)

    return formula


def adam_of_keras(rate: float, b1: float, b2: float, eps: float) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
        alpha: float = rate * np.sqrt(1 - b2**t) / (1 - b1**t)
        return p - alpha * m / (np.sqrt(v) + eps)

    return formula


def adagrad(rate: float, start: float, eps: float) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        state["accumulator"] = state.get("accumulator", start) + g**2
        return p - rate * g / np.sqrt(state["accumulator"] + eps)

    return formula


def rmsprop(rate: float, rho: float, eps: float, mu: float = 0.0, centered: bool = False) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        variance = state["velocity"] = rho * state.get("velocity", 0.0) + (1 - rho) * g**2
        if centered:
            mean = state["average_gradient"] = rho * state.get("average_gradient", 0.0) + (1 - rho) * g
            variance = variance - mean**2
        state["momentum"] = mu * state.get("momentum", 0.0) + rate * g / np.sqrt(variance + eps)
        return p - state["momentum"]

    return formula


def ftrl(rate: float, power: float, start: float, l1: float, l2: float, shrinkage: float, beta: float) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        old = state.get("accumulator", start)
        new = state["accumulator"] = old + g**2
        sigma = (new**-power - old**-power) / rate
        z = state["linear"] = state.get("linear", 0.0) + g + 2 * shrinkage * p - sigma * p
        p = -(z - np.sign(z) * l1) / ((beta + new**-power) / rate + 2 * l2)
        return np.where(np.abs(z) <= l1, 0.0, p)

    return formula


def adadelta(rate: float, rho: float, eps: float) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        mean = state["accumulated_grad"] = rho * state.get("accumulated_grad", 0.0) + (1 - rho) * g**2
        moved = state.get("accumulated_delta_var", np.zeros_like(p))
        delta = -np.sqrt(moved + eps) / np.sqrt(mean + eps) * g
        state["accumulated_delta_var"] = rho * moved + (1 - rho) * delta**2
        return p + rate * delta

    return formula


def lion(rate: float, b1: float, b2: float, decay: float = 0.0) -> Formula:
    def formula(p: Array, g: Array, state: State, t: int) -> Array:
        m = state.get("m", np.zeros_like(p))
        state["m"] = b2 * m + (1 - b2) * g
        return p - rate * (np.sign(b1 * m + (1 - b1) * g) + decay * p)

    return formula


CASES: dict[str, tuple[UpdateRule, Formula]] = {
    "sgd": (SGD(0.01), sgd(0.01)),
    "sgd-momentum": (SGD(0.01, momentum=0.9), sgd(0.01, 0.9)),
    "sgd-nesterov": (SGD(0.01, momentum=0.9, nesterov=True), sgd(0.01, 0.9, True)),
    "adam-defaults": (Adam(), adam(0.001, 0.9, 0.999, 1e-7)),
    "adam": (Adam(0.02, beta_1=0.8, beta_2=0.95, epsilon=1e-3), adam(0.02, 0.8, 0.95, 1e-3)),
    "adam-no-averages": (Adam(beta_1=0.0, beta_2=0.0), adam(0.001, 0.0, 0.0, 1e-7)),
    "adam-amsgrad": (Adam(0.01, beta_2=0.9, amsgrad=True), adam(0.01, 0.9, 0.9, 1e-7, amsgrad=True)),
    "adam-epsilon-hat": (Adam(0.01, epsilon=1e-2, epsilon_hat=True), adam_of_keras(0.01, 0.9, 0.999, 1e-2)),
    "adamw-defaults": (AdamW(), adam(0.001, 0.9, 0.999, 1e-7, 0.004)),
    "adamw": (AdamW(0.01, weight_decay=0.3), adam(0.01, 0.9, 0.999, 1e-7, 0.3)),
    "adagrad-defaults": (Adagrad(), adagrad(0.001, 0.1, 1e-7)),
    "adagrad": (Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-3), adagrad(0.1, 0.0, 1e-3)),
    "rmsprop-defaults": (RMSprop(), rmsprop(0.001, 0.9, 1e-7)),
    "rmsprop-momentum": (RMSprop(0.01, rho=0.8, momentum=0.5), rmsprop(0.01, 0.8, 1e-7, 0.5)),
    "rmsprop-centered": (
        RMSprop(0.01, momentum=0.5, epsilon=1e-2, centered=True),
        rmsprop(0.01, 0.9, 1e-2, 0.5, True),
    ),
    "ftrl-defaults": (Ftrl(), ftrl(0.001, -0.5, 0.1, 0, 0, 0, 0)),
    "ftrl": (
        Ftrl(0.1, l1_regularization_strength=2.0, l2_regularization_strength=0.1, beta=1.0),
        ftrl(0.1, -0.5, 0.1, 2.0, 0.1, 0, 1.0),
    ),
    "ftrl-power": (
        Ftrl(0.1, learning_rate_power=-0.7, l2_shrinkage_regularization_strength=0.05),
        ftrl(0.1, -0.7, 0.1, 0, 0, 0.05, 0),
    ),
    "ftrl-no-power": (Ftrl(0.001, learning_rate_power=0.0), ftrl(0.001, 0.0, 0.1, 0, 0, 0, 0)),
    "adadelta-defaults": (Adadelta(), adadelta(0.001, 0.95, 1e-7)),
    "adadelta": (Adadelta(1.0, rho=0.8, epsilon=1e-4), adadelta(1.0, 0.8, 1e-4)),
    "lion-defaults": (Lion(), lion(0.001, 0.9, 0.99)),
    "lion": (Lion(0.01, beta_1=0.5, beta_2=0.7, weight_decay=0.1), lion(0.01, 0.5, 0.7, 0.1)),
}
each_case = pytest.mark.parametrize(("rule", "formula"), CASES.values(), ids=CASES.keys())


def gradients(shape: tuple[int, ...], steps: int = STEPS) -> list[Array]:
    """Gradients exact in float32, of several sizes, with a mean that is not 0."""
    draw = np.random.default_rng(7)
    scale = draw.choice([0.1, 1.0, 10.0], shape)
    return [(scale * (draw.standard_normal(shape) + 0.5)).astype(np.float32).astype(float) for _ in range(steps)]


def start(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(8).uniform(1.0, 2.0, shape).astype(np.float32).astype(float)


def reference(formula: Formula, p: Array, grads: Sequence[Array]) -> tuple[Array, State]:
    state: State = {}
    with np.errstate(all="ignore"):
        for t, g in enumerate(grads, 1):
            p = formula(p, g, state, t)
    return p, state


def assert_same(rule: UpdateRule, param: Array, slots: State, expected: tuple[Array, State]) -> None:
    p, state = expected
    rtol = 1e-5 if param.dtype == np.float32 else 1e-11
    # Where a value has crossed 0, its error counts relative to its usual size.
    np.testing.assert_allclose(param, p, rtol, rtol * float(np.abs(p).mean()))
    assert set(slots) == set(rule.slots)
    for name, slot in slots.items():
        np.testing.assert_allclose(slot, state[name], rtol, rtol * float(np.abs(state[name]).mean()))


@each_case
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dense_follows_the_formula(rule: UpdateRule, formula: Formula, dtype: str) -> None:
    """After 100 steps a dense parameter and its slots equal those of the formula in float64."""
    grads, begin = gradients((700,)), start((700,))
    param, slots = begin.astype(dtype), new_slots(rule, (700,), dtype)
    with blocks_of(64):
        for step, g in enumerate(grads, 1):
            apply_dense(rule, param, g.astype(dtype), slots, step)
    assert_same(rule, param, slots, reference(formula, begin, grads))


@each_case
def test_two_shards_follow_the_formula(rule: UpdateRule, formula: Formula) -> None:
    """A parameter cut in two shards of different sizes, with slots beside them, learns like the whole one."""
    grads, begin = gradients((31, 9)), start((31, 9))
    cuts = [slice(0, 20), slice(20, 31)]
    params = [begin[cut].astype(np.float32) for cut in cuts]
    slots = [new_slots(rule, param.shape, np.float32) for param in params]
    for step, g in enumerate(grads, 1):
        for cut, param, slot in zip(cuts, params, slots, strict=True):
            apply_dense(rule, param, g[cut].astype(np.float32), slot, step)
    joined = {name: np.concatenate([slot[name] for slot in slots]) for name in rule.slots}
    assert_same(rule, np.concatenate(params), joined, reference(formula, begin, grads))


@each_case
@pytest.mark.parametrize("block", [8, 64, 1 << 16], ids=["wide-rows", "blocks", "one-block"])
def test_rows_touched_every_step_follow_the_formula(rule: UpdateRule, formula: Formula, block: int) -> None:
    """Sparse gradients that touch all rows, in any order and with duplicates, do what the dense sum does."""
    draw = np.random.default_rng(9)
    rows, width = 23, 9
    begin = start((rows, width))
    param, slots = begin.astype(np.float32), new_slots(rule, (rows, width), np.float32)
    sums = []
    with blocks_of(block):
        for step, g in enumerate(gradients((rows * 3, width)), 1):
            ids = draw.permutation(np.concatenate([np.arange(rows), draw.integers(0, rows, rows * 2)]))
            total = np.zeros((rows, width))
            np.add.at(total, ids, g)
            sums.append(total)
            apply_rows(rule, param, ids, g.astype(np.float32), slots, step)
    assert_same(rule, param, slots, reference(formula, begin, sums))


@each_case
def test_rows_are_lazy(rule: UpdateRule, formula: Formula) -> None:
    """A row and its slots change only in steps that touch it, while the step counts for all."""
    draw = np.random.default_rng(10)
    rows, width = 12, 3
    begin = start((rows, width))
    param, slots = begin.astype(np.float32), new_slots(rule, (rows, width), np.float32)
    expected, states = [*begin], [dict[str, Array]() for _ in range(rows)]
    for step, g in enumerate(gradients((5, width), 30), 1):
        ids = draw.permutation(rows - 1)[:5]
        apply_rows(rule, param, ids, g.astype(np.float32), slots, step)
        for row, grad in zip(ids, g, strict=True):
            expected[row] = formula(expected[row], grad, states[row], step)
    np.testing.assert_allclose(param, expected, 1e-5, 1e-5)
    np.testing.assert_array_equal(param[-1], begin[-1])
    for name, fill in rule.slots.items():
        np.testing.assert_allclose(slots[name][:-1], [state[name] for state in states[:-1]], 1e-5, 1e-5)
        np.testing.assert_array_equal(slots[name][-1], np.float32(fill))


# Computed by torch.optim (torch 2.13.0) and by Keras 3.15.1 on torch, in float64: 100 steps from GOLDEN_START
# with the gradients of golden_gradient, for t from 1.
GOLDEN_START = [1.0, -2.0, 0.5, 3.0]
GOLDEN: dict[str, tuple[UpdateRule, list[float]]] = {
    # torch.optim.SGD(lr=0.01)
    "torch-sgd": (SGD(0.01), [0.6189662341563, -2.008892085916, 0.7956576106622, 1.995600193931]),
    # torch.optim.SGD(lr=0.01, momentum=0.9)
    "torch-sgd-momentum": (
        SGD(0.01, momentum=0.9),
        [-2.542463690006, -2.115093818656, 3.160322086894, -6.107890267573],
    ),
    # torch.optim.SGD(lr=0.01, momentum=0.9, nesterov=True)
    "torch-sgd-nesterov": (
        SGD(0.01, momentum=0.9, nesterov=True),
        [-2.569251086849, -2.112476522707, 3.189947488866, -6.201501046885],
    ),
    # torch.optim.Adam(lr=0.01, eps=1e-3)
    "torch-adam": (
        Adam(0.01, epsilon=1e-3),
        [0.4892487537397, -2.051069318407, 0.8538944679321, 2.183040887405],
    ),
    # torch.optim.Adam(lr=0.01, betas=(0.8, 0.9), eps=1e-3, amsgrad=True)
    "torch-amsgrad": (
        Adam(0.01, beta_1=0.8, beta_2=0.9, epsilon=1e-3, amsgrad=True),
        [0.5628921067917, -2.035650745086, 0.8408851656481, 2.220413278303],
    ),
    # torch.optim.AdamW(lr=0.01, eps=1e-3, weight_decay=0.1)
    "torch-adamw": (
        AdamW(0.01, epsilon=1e-3, weight_decay=0.1),
        [0.4210924805835, -1.855755631016, 0.7908860827289, 1.936690613224],
    ),
    # torch.optim.Adadelta(lr=0.5, rho=0.95, eps=1e-3), and Keras' with the same numbers
    "torch-adadelta": (
        Adadelta(0.5, rho=0.95, epsilon=1e-3),
        [-4.265710849456, -2.081641452033, 2.923576000537, -2.134225651195],
    ),
    # keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.1)
    "keras-sgd": (
        SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
        [-2.494997812596, -1.910044329625, 3.025277166802, -6.077095719854],
    ),
    # keras.optimizers.Adagrad(0.1, epsilon=1e-3)
    "keras-adagrad": (
        Adagrad(0.1, epsilon=1e-3),
        [-0.1832349226431, -2.156399356269, 1.097166011997, 1.491868520363],
    ),
    # keras.optimizers.RMSprop(0.01, epsilon=1e-3)
    "keras-rmsprop": (
        RMSprop(0.01, epsilon=1e-3),
        [0.4747265519858, -2.04811666688, 0.8681943602891, 2.120256648983],
    ),
    # keras.optimizers.RMSprop(0.01, rho=0.8, epsilon=1e-3, centered=True, momentum=0.5)
    "keras-rmsprop-centered": (
        RMSprop(0.01, rho=0.8, epsilon=1e-3, centered=True, momentum=0.5),
        [-2.350372128668, -2.082736712199, 1.30675009528, 0.09439720111781],
    ),
    # keras.optimizers.Ftrl(0.1)
    "keras-ftrl": (Ftrl(0.1), [-0.9093433149718, -1.27522487786, 0.8820072506543, 0.7500391644083]),
    # keras.optimizers.Ftrl(0.1, with the same names and numbers as here)
    "keras-ftrl-all": (
        Ftrl(
            0.1,
            learning_rate_power=-0.7,
            l1_regularization_strength=0.5,
            l2_regularization_strength=0.1,
            l2_shrinkage_regularization_strength=0.05,
            beta=0.3,
        ),
        [-0.5148048607032, -0.8297452291511, 0.4517829809014, 1.201043569875],
    ),
    # keras.optimizers.Lion(0.01, weight_decay=0.1)
    "keras-lion": (
        Lion(0.01, weight_decay=0.1),
        [-0.0472863817492, -1.923004283295, 1.294859740445, 1.762297912478],
    ),
}


def golden_gradient(t: int) -> Array:
    gradient: Array = np.sin(t * np.array([0.1, 0.7, 1.3, 2.9])) + np.array([0.2, 0.0, -0.3, 1.0])
    return gradient


@pytest.mark.parametrize(("rule", "expected"), GOLDEN.values(), ids=GOLDEN.keys())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_golden_values_of_torch_and_keras(rule: UpdateRule, expected: list[float], dtype: str) -> None:
    """100 steps end at torch's and Keras' values."""
    param, slots = np.array(GOLDEN_START, dtype), new_slots(rule, (4,), dtype)
    for step in range(1, STEPS + 1):
        apply_dense(rule, param, golden_gradient(step).astype(dtype), slots, step)
    tolerance = 1e-5 if dtype == "float32" else 1e-11
    np.testing.assert_allclose(param, expected, tolerance, tolerance)


@pytest.mark.parametrize("rule", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_everything_happens_in_place(rule: UpdateRule) -> None:
    """Views into larger arrays are updated in place, and nothing beside them changes."""
    whole = np.ones(30, np.float32)
    whole_slots = {name: np.full(30, 0.0625, np.float32) for name in rule.slots}
    slots: Mapping[str, Array] = {name: array[10:20] for name, array in whole_slots.items()}
    grad = np.full(10, 0.5, np.float32)
    grad.flags.writeable = False
    apply_dense(rule, whole[10:20], grad, slots, 1)
    apply_rows(
        rule,
        whole[10:20].reshape(5, 2),
        np.array([4, 0, 4]),
        grad[:6].reshape(3, 2),
        {name: slot.reshape(5, 2) for name, slot in slots.items()},
        2,
    )
    for array, was in ((whole, 1), *((slot, 0.0625) for slot in whole_slots.values())):
        assert (array[:10] == was).all()
        assert (array[20:] == was).all()
        assert (array[10:20] != was).all()


@pytest.mark.parametrize("rule", [SGD(0.1), Adam(0.1)], ids=["sgd", "adam"])
def test_gradients_may_be_views_of_received_bytes(rule: UpdateRule) -> None:
    """A read-only gradient at an odd address gives the same bits as an aligned one, and so do its rows."""
    grads = gradients((20, 6), 1)[0].astype(np.float32)
    received = np.frombuffer(b"?" + grads.tobytes(), np.float32, grads.size, 1).reshape(grads.shape)
    assert not received.flags.aligned
    for ids in (np.arange(20), np.arange(20)[::-1].copy(), np.arange(20) // 3):
        results = []
        for given_grads in (grads, received):
            param = np.ones((20, 6), np.float32)
            slots = new_slots(rule, param.shape, np.float32)
            with blocks_of(32):
                apply_dense(rule, param, given_grads, slots, 1)
                apply_rows(rule, param, ids, given_grads, slots, 2)
            results.append(param)
        np.testing.assert_array_equal(results[0], results[1])


def half_types() -> list[Any]:
    try:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return [np.float16]
    return [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("half", half_types(), ids=lambda half: np.dtype(half).name)
@pytest.mark.parametrize("rule", [SGD(0.1, momentum=0.5), Adam(0.1)], ids=["sgd", "adam"])
def test_half_types_are_computed_in_single_precision(rule: UpdateRule, half: Any) -> None:
    """A half-precision parameter is the float32 result rounded once per step; its slots are float32."""
    exact, param = np.ones((10, 5), np.float32), np.ones((10, 5), half)
    slots, exact_slots = (new_slots(rule, (10, 5), dtype) for dtype in (half, np.float32))
    ids = np.array([3, 9, 3, 0, 1])
    with blocks_of(16):
        for step, g in enumerate(gradients((10, 5), 6), 1):
            grad = g.astype(half)
            if step % 2:
                apply_dense(rule, param, grad, slots, step)
                apply_dense(rule, exact, grad.astype(np.float32), exact_slots, step)
            else:
                apply_rows(rule, param, ids, grad[:5], slots, step)
                apply_rows(rule, exact, ids, grad[:5].astype(np.float32), exact_slots, step)
            exact[:] = exact.astype(half)
    np.testing.assert_array_equal(param.astype(np.float32), exact)
    for name, slot in slots.items():
        assert slot.dtype == np.float32
        np.testing.assert_array_equal(slot, exact_slots[name])


def test_slots_may_be_of_the_half_type() -> None:
    """Slots in the parameter's half type work too, rounded once per step."""
    param, slots = np.ones(5, np.float16), {"momentum": np.ones(5, np.float16)}
    apply_dense(SGD(0.5, momentum=0.5), param, np.full(5, 1.0, np.float32), slots, 1)
    assert slots["momentum"].tolist() == [0.0] * 5
    assert param.tolist() == [1.0] * 5


def test_compute_dtype() -> None:
    """Single and double precision are computed in themselves, half in single; anything else is refused."""
    assert compute_dtype("float16") == compute_dtype(np.float32) == np.float32
    assert compute_dtype(np.float64) == np.float64
    for dtype in (np.complex64, np.int32, np.bool_):
        with pytest.raises(InvalidUpdateError, match=f"dtype {np.dtype(dtype)} can't be optimized: make it"):
            compute_dtype(dtype)


# ids within a few, or anywhere in int64: these don't fit beside a position, and are sorted differently
id_lists = st.one_of(
    st.lists(st.integers(0, 12), max_size=120),
    st.lists(st.integers(0, 2**40), unique=True, max_size=40),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.lists(st.sampled_from([-5, 2**63 - 1, 3]), max_size=40),
)


@settings(max_examples=300, deadline=None)
@given(
    ids=id_lists,
    width=st.integers(0, 5),
    dtype=st.sampled_from(["float32", "float64", "float16", "int8", "int64", "complex64"]),
    block=st.integers(1, 40),
    few=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_deduplicate_is_add_at(ids: list[int], width: int, dtype: str, block: int, few: int, seed: int) -> None:
    """Sums for equal ids are, to the bit, those of adding the rows one by one in order."""
    given_ids = np.array(ids, np.int64)
    rows = (np.random.default_rng(seed).standard_normal((len(ids), width)) * 100).astype(dtype)
    with blocks_of(block, few):
        unique, sums = deduplicate(given_ids, rows)
    expected_ids, inverse = np.unique(given_ids, return_inverse=True)
    expected = np.zeros((len(expected_ids), width), np.float32 if dtype == "float16" else dtype)
    np.add.at(expected, inverse, rows.astype(expected.dtype))
    assert unique.dtype == np.int64
    assert sums.dtype == expected.dtype
    np.testing.assert_array_equal(unique, expected_ids)
    np.testing.assert_array_equal(sums, expected)


def test_deduplicate_gives_back_what_is_in_order() -> None:
    """Strictly ascending ids cost no copy; the wrong number of them is refused."""
    ids, rows = np.array([1, 4, 9]), np.ones((3, 2), np.float32)
    unique, sums = deduplicate(ids, rows)
    assert unique is ids
    assert sums is rows
    with pytest.raises(InvalidUpdateError, match=re.escape("rows of shape (3, 2) for ids of shape (2,)")):
        deduplicate(ids[:2], rows)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 14), max_size=100),
    width=st.integers(0, 5),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    grad_dtype=st.sampled_from(["float16", "float32", "float64"]),
    block=st.integers(1, 40),
    few=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_apply_rows_is_add_at_then_the_rule(
    ids: list[int], width: int, dtype: str, grad_dtype: str, block: int, few: int, seed: int
) -> None:
    """Rows change, to the bit, as if gradients had been added up and the rows cut out."""
    draw = np.random.default_rng(seed)
    rule = Adagrad(0.1, weight_decay=0.5)
    param = draw.standard_normal((15, width)).astype(dtype)
    grads = draw.standard_normal((len(ids), width)).astype(grad_dtype)
    slots = new_slots(rule, param.shape, dtype)
    given_ids = np.array(ids, np.int64)

    touched = np.unique(given_ids)
    total = np.zeros((15, width), compute_dtype(dtype))
    np.add.at(total, given_ids, grads.astype(total.dtype))
    expected, expected_slots = param.copy(), {name: slot.copy() for name, slot in slots.items()}
    rows, part_slots = expected[touched], {name: slot[touched] for name, slot in expected_slots.items()}
    apply_dense(rule, rows, total[touched], part_slots, 3)
    expected[touched] = rows
    for name, slot in part_slots.items():
        expected_slots[name][touched] = slot

    with blocks_of(block, few):
        apply_rows(rule, param, given_ids, grads, slots, 3)
    np.testing.assert_array_equal(param, expected)
    np.testing.assert_array_equal(slots["accumulator"], expected_slots["accumulator"])


def test_distinct_rows_in_any_order_give_the_same_bits() -> None:
    """Rows that are known to be distinct are taken as they come, in one block or several."""
    rng = np.random.default_rng(2)
    ids, grads = rng.permutation(50)[:20], rng.normal(size=(20, 3)).astype(np.float32)
    sides: list[tuple[Array, State]] = []
    for distinct in (False, True):
        param = start((50, 3)).astype(np.float32)
        slots = new_slots(Adam(0.1), param.shape, param.dtype)
        with blocks_of(12):
            apply_rows(Adam(0.1), param, ids, grads, slots, 1, distinct=distinct)
        sides.append((param, slots))
    (param, slots), (other, others) = sides
    np.testing.assert_array_equal(param, other)
    for name, slot in slots.items():
        np.testing.assert_array_equal(slot, others[name])


def test_large_gradients_in_real_blocks() -> None:
    """Blocks of the real size work: a dense parameter with several, and rows by a power law with many layers."""
    draw = np.random.default_rng(11)
    rule = Adam(0.1)
    param, slots = np.ones(150_000, np.float32), new_slots(rule, (150_000,), np.float32)
    grad = draw.uniform(-1, 3, 150_000).round(2).astype(np.float32)
    apply_dense(rule, param, grad, slots, 1)
    np.testing.assert_allclose(param, 1 - 0.1 * np.sign(grad), 1e-5)

    ids = draw.zipf(1.2, 20_000) % 9_000
    rows = draw.standard_normal((20_000, 33)).astype(np.float32)
    table, expected = np.zeros((9_000, 33), np.float32), np.zeros((9_000, 33), np.float32)
    apply_rows(SGD(1.0), table, ids, rows, {}, 1)
    np.add.at(expected, ids, rows)
    np.testing.assert_array_equal(table, -expected)


def test_threads_have_their_own_buffers() -> None:
    """Parameters updated by several threads at once end as if updated one after another."""
    rule = Adam(0.1)
    grads = gradients((4, 50_000), 10)

    def train(index: int, param: Array) -> None:
        slots = new_slots(rule, param.shape, param.dtype)
        for step, g in enumerate(grads, 1):
            apply_dense(rule, param, g[index], slots, step)

    alone, together = np.ones((4, 50_000), np.float32), np.ones((4, 50_000), np.float32)
    for index in range(4):
        train(index, alone[index])
    threads = [threading.Thread(target=train, args=(index, together[index])) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("rule", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_zero_gradients_are_harmless(rule: UpdateRule) -> None:
    """Gradients of 0 from the first step on give no NaN, whatever the dtype."""
    for dtype in ("float16", "float32", "float64"):
        param, slots = np.ones(10, dtype), new_slots(rule, (10,), dtype)
        for step in range(1, 4):
            apply_dense(rule, param, np.zeros(10, dtype), slots, step)
        assert np.isfinite(param).all()
        assert isinstance(rule, Ftrl) or (param > 0.9).all()


@pytest.mark.parametrize("rule", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_infinite_gradients_do_not_warn(rule: UpdateRule) -> None:
    """NaN and Inf affect only their own elements, and no error is raised in the middle of an update."""
    param, slots = np.ones(10, np.float32), new_slots(rule, (10,), np.float32)
    grad = np.ones(10, np.float32)
    grad[2:5] = np.nan, np.inf, 3e38
    apply_dense(rule, param, grad, slots, 1)
    assert np.isnan(param[2])
    assert np.isfinite(np.delete(param, [2, 3, 4])).all()


def test_centered_rmsprop_under_a_constant_gradient() -> None:
    """If the variance is 0 but rounding would make it negative, no root of a negative number is taken."""
    rule = RMSprop(centered=True, epsilon=1e-12)
    param, slots = np.ones(1000, np.float32), new_slots(rule, (1000,), np.float32)
    grad = np.linspace(1, 1000, 1000, dtype=np.float32)
    for step in range(1, 300):
        apply_dense(rule, param, grad, slots, step)
    assert np.isfinite(param).all()


@pytest.mark.parametrize("power", [-0.5, -0.7])
def test_ftrl_with_a_large_accumulator(power: float) -> None:
    """The growth of the accumulator's power is right even if a difference in float32 would lose its digits."""
    rule = Ftrl(0.1, learning_rate_power=power, initial_accumulator_value=1e8)
    formula = ftrl(0.1, power, 1e8, 0, 0, 0, 0)
    grads, begin = gradients((100,), 20), start((100,))
    param, slots = begin.astype(np.float32), new_slots(rule, (100,), np.float32)
    for step, g in enumerate(grads, 1):
        apply_dense(rule, param, g.astype(np.float32), slots, step)
    _, state = reference(formula, begin, grads)
    np.testing.assert_allclose(slots["linear"], state["linear"], rtol=1e-4, atol=1e-4)


def test_ftrl_from_an_empty_accumulator() -> None:
    """With nothing to divide by, the parameter is 0, not NaN."""
    for power in (-0.5, -0.7, 0.0):
        rule = Ftrl(0.1, learning_rate_power=power, initial_accumulator_value=0.0)
        param, slots = np.ones(2, np.float32), new_slots(rule, (2,), np.float32)
        apply_dense(rule, param, np.array([0.0, 1e-30], np.float32), slots, 1)
        assert param[0] == 0
        assert np.isfinite(param).all()


def test_sgd_without_momentum_has_no_slots() -> None:
    """Slots cost memory, so they exist only if a hyperparameter needs them."""
    assert SGD().slots == {}
    assert SGD(momentum=0.1).slots == {"momentum": 0.0}
    assert Adam().slots == {"m": 0.0, "v": 0.0}
    assert Adam(amsgrad=True).slots == {"m": 0.0, "v": 0.0, "v_hat": 0.0}
    assert Adagrad().slots == {"accumulator": 0.1}
    assert RMSprop().slots == {"velocity": 0.0}
    assert Ftrl(initial_accumulator_value=0.5).slots == {"accumulator": 0.5, "linear": 0.0}
    slots = new_slots(Adagrad(), (2, 3), np.float16)
    assert (slots["accumulator"] == np.full((2, 3), 0.1, np.float32)).all()


def test_rules_by_name() -> None:
    """Each rule is found by its name, with Keras' defaults."""
    assert list(RULES) == ["sgd", "adagrad", "adam", "adamw", "rmsprop", "ftrl", "adadelta", "lion"]
    for name, rule in RULES.items():
        assert rule.name == name
        assert rule().learning_rate == (0.01 if name == "sgd" else 0.001)


@pytest.mark.parametrize("rule", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_spec_round_trip(rule: UpdateRule) -> None:
    """Numbers and flags by name determine the rule; missing ones have defaults."""
    numbers, flags = rule.to_spec()
    assert {type(value) for value in numbers.values()} == {float}
    assert {type(value) for value in flags.values()} <= {bool}
    again = RULES[rule.name].from_spec(numbers, flags)
    assert again == rule
    assert type(again) is type(rule)
    assert type(rule).from_spec({}, {}) == type(rule)()
    assert hash(again) == hash(rule)


def test_numbers_become_floats() -> None:
    """Integers and NumPy numbers are accepted, and become plain floats and bools."""
    rule = Adam(1, beta_1=np.float32(0.5), amsgrad=np.bool_(True))  # type: ignore[arg-type]
    numbers, flags = rule.to_spec()
    assert numbers["learning_rate"] == 1.0
    assert {type(value) for value in numbers.values()} == {float}
    assert flags == {"amsgrad": True, "epsilon_hat": False}
    assert type(flags["amsgrad"]) is bool


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SGD(-1),
            "sgd: learning_rate is -1; it must be a number, 0 or more: the default is 0.01",
        ),
        (
            lambda: Adam(beta_1=1.0),
            "adam: beta_1 is 1.0; it must be a number, at least 0 and below 1: the default is 0.9",
        ),
        (
            lambda: Adam(epsilon=0.0),
            "adam: epsilon is 0.0; it must be a number, above 0: the default is 1e-07",
        ),
        (lambda: AdamW(weight_decay=-0.1), "adamw: weight_decay is -0.1; it must be a number, 0 or more"),
        (lambda: SGD(momentum=1.5), "sgd: momentum is 1.5; it must be a number, at least 0 and at most 1"),
        (lambda: SGD(float("nan")), "sgd: learning_rate is nan"),
        (lambda: SGD(float("inf")), "sgd: learning_rate is inf"),
        (lambda: SGD("0.1"), "sgd: learning_rate is '0.1'; it must be a number"),  # type: ignore[arg-type]
        (lambda: SGD(None), "sgd: learning_rate is None; it must be a number"),  # type: ignore[arg-type]
        (lambda: SGD(momentum=True), "sgd: momentum is True; it must be a number"),
        (lambda: Adam(amsgrad=1), "adam: amsgrad is 1; it must be True or False"),  # type: ignore[arg-type]
        (lambda: SGD(nesterov=True), "sgd: nesterov is set, but momentum is 0: give a momentum above 0"),
        (lambda: Ftrl(0.0), "ftrl: learning_rate is 0.0; it must be a number, above 0"),
        (
            lambda: Ftrl(learning_rate_power=0.5),
            "ftrl: learning_rate_power is 0.5; it must be a number, at most 0",
        ),
        (
            lambda: Ftrl(l2_shrinkage_regularization_strength=1, initial_accumulator_value=0),
            "would divide by 0 before the first gradient: make one of them positive",
        ),
        (
            lambda: Lion.from_spec({"beta": 1.0}, {}),
            "lion has no parameter 'beta': it has learning_rate, weight_decay, beta_1, beta_2",
        ),
        (lambda: Adam.from_spec({"amsgrad": 1.0}, {}), "adam: amsgrad is 1.0; it must be True or False"),
        (lambda: Adam.from_spec({}, {"beta_1": True}), "adam: beta_1 is True; it must be a number"),
        (lambda: Adam().scalars(0), "step 0 is below 1: steps count from 1"),
    ],
)
def test_bad_hyperparameters(make: Callable[[], object], message: str) -> None:
    """A hyperparameter outside its limits is refused with its value, the limits, and a value that works."""
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_rules_are_frozen() -> None:
    """A rule in use can't be changed, only replaced, and a new one is checked too."""
    rule = SGD(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.learning_rate = 0.2  # type: ignore[misc]
    assert dataclasses.replace(rule, learning_rate=0.2) == SGD(0.2)
    with pytest.raises(ValueError, match="learning_rate is -1"):
        dataclasses.replace(rule, learning_rate=-1)


def test_drivers_refuse_what_does_not_fit() -> None:
    """What does not fit is refused with a message before anything has changed."""
    rule = Adam()
    param, grad = np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)
    slots = new_slots(rule, (4, 3), np.float32)
    ids = np.arange(4)
    frozen = param.copy()
    frozen.flags.writeable = False
    bad: list[tuple[Callable[[], None], str]] = [
        (
            lambda: apply_dense(rule, param, grad[:3], slots, 1),
            "of shape (3, 3) for a variable of shape (4, 3)",
        ),
        (lambda: apply_dense(rule, param, grad.astype(int), slots, 1), "a gradient of dtype int64: make it"),
        (lambda: apply_dense(rule, param, grad.astype("c8"), slots, 1), "a gradient of dtype complex64"),
        (lambda: apply_dense(rule, param.astype("c8"), grad, slots, 1), "a variable of dtype complex64"),
        (lambda: apply_dense(rule, param, grad, {"m": slots["m"]}, 1), "adam needs a slot 'v'"),
        (
            lambda: apply_dense(rule, param, grad, slots | {"v": slots["v"][1:]}, 1),
            "slot 'v' has shape (3, 3)",
        ),
        (
            lambda: apply_dense(rule, param, grad, slots | {"v": slots["v"].astype(float)}, 1),
            "slot 'v' is float64, but must be float32",
        ),
        (lambda: apply_dense(rule, frozen, grad, slots, 1), "must be contiguous, writeable arrays"),
        (lambda: apply_dense(SGD(), param[:, ::2], grad[:, ::2], {}, 1), "must be contiguous"),
        (
            lambda: apply_rows(rule, param, ids[1:], grad, slots, 1),
            "rows of shape (4, 3) for ids of shape (3,)",
        ),
        (lambda: apply_rows(rule, param, ids.astype("i4"), grad, slots, 1), "ids of dtype int32"),
        (lambda: apply_rows(rule, param, ids, grad.astype(int), slots, 1), "a gradient of dtype int64"),
        (
            lambda: apply_rows(SGD(), param.reshape(-1), ids, grad, {}, 1),
            "rows of shape (4, 3) for ids of shape (4,) and a variable of shape (12,)",
        ),
    ]
    for call, message in bad:
        with pytest.raises(InvalidUpdateError, match=re.escape(message)):
            call()
    with pytest.raises(ValueError, match="step 0 is below 1"):
        apply_dense(rule, param, grad, slots, 0)
    assert (param == 1).all()
    assert (slots["m"] == 0).all()


def test_nothing_is_a_gradient_too() -> None:
    """Empty parameters, empty gradients and rows without elements are left unchanged."""
    rule = Adam()
    for shape in ((0,), (0, 3), (3, 0)):
        param, slots = np.ones(shape, np.float32), new_slots(rule, shape, np.float32)
        apply_dense(rule, param, np.ones(shape, np.float32), slots, 1)
    param, slots = np.ones((3, 2), np.float32), new_slots(rule, (3, 2), np.float32)
    apply_rows(rule, param, np.empty(0, np.int64), np.empty((0, 2), np.float32), slots, 1)
    empty, slots = np.ones((3, 0), np.float32), new_slots(rule, (3, 0), np.float32)
    apply_rows(rule, empty, np.array([1, 2]), np.empty((2, 0), np.float32), slots, 1)
    assert (param == 1).all()


def test_a_scalar_has_slots_too() -> None:
    """A parameter of rank 0 is updated as one element."""
    param, slots = np.array(1.0), new_slots(SGD(momentum=0.5), (), np.float64)
    apply_dense(SGD(0.1, momentum=0.5), param, np.array(2.0), slots, 1)
    assert float(param) == pytest.approx(0.8)
    assert float(slots["momentum"]) == pytest.approx(-0.2)


@dataclass(frozen=True)
class SignDescent(UpdateRule):
    """A user-defined rule: steps of a size that halves every few steps, along the signs of the gradient."""

    name: ClassVar[str] = "sign-descent"
    half_life: float = hyperparameter(2.0, above=0)
    backwards: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        return {"seen": 0.0}

    def learning_rate_at(self, step: int) -> float:
        return self.learning_rate * float(0.5 ** ((step - 1) / self.half_life))

    def apply(
        self,
        param: Array,
        grad: Array,
        slots: Mapping[str, Array],
        scalars: tuple[float, ...],
        scratch: Sequence[Array],
    ) -> None:
        (rate,) = scalars
        np.sign(grad, out=scratch[0])
        np.multiply(scratch[0], rate if self.backwards else -rate, out=scratch[0])
        np.add(param, scratch[0], out=param)
        np.add(slots["seen"], 1.0, out=slots["seen"])


def test_a_rule_of_ones_own() -> None:
    """A user-defined rule with a schedule takes a few lines, and gets checks, specs, blocks and rows for free."""
    rule = SignDescent(0.8)
    param, slots = np.zeros((3, 2), np.float16), new_slots(rule, (3, 2), np.float16)
    grad = np.array([[1.0, -3.0]], np.float32)
    for step in range(1, 6):
        apply_rows(rule, param, np.array([1]), grad, slots, step)
    assert param[1] == pytest.approx(np.array([-1, 1]) * 0.8 * (1 + 0.5**0.5 + 0.5 + 0.5**1.5 + 0.25), rel=1e-2)
    assert slots["seen"].tolist() == [[0, 0], [5, 5], [0, 0]]
    assert rule.to_spec() == ({"learning_rate": 0.8, "half_life": 2.0}, {"backwards": False})
    with pytest.raises(ValueError, match="sign-descent: half_life is 0; it must be a number, above 0"):
        SignDescent(half_life=0)
