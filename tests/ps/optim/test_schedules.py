"""Learning-rate schedules against Keras 3, at their extremes, and when sent."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.ps.optim.schedules import (
    SCHEDULES,
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
    WarmUp,
    from_spec,
)

# Step and learning rate, computed by Keras 3.15.1 (JAX backend, 64 bits enabled) with the same parameters, the
# rates given as float64 arrays. Keras still computes its cosines in float32.
KERAS: list[tuple[LearningRateSchedule, dict[int, float]]] = [
    (
        ExponentialDecay(0.1, 100, 0.96),
        {
            0: 0.1,
            1: 0.09995918633652226,
            50: 0.09797958971132713,
            100: 0.096,
            1000: 0.06648326359915008,
            123456: 1.2965028068557955e-23,
        },
    ),
    (ExponentialDecay(0.1, 100, 0.5, staircase=True), {0: 0.1, 99: 0.1, 100: 0.05, 101: 0.05, 250: 0.025}),
    (
        PiecewiseConstantDecay((10, 20), (1.0, 0.5, 0.1)),
        {0: 1.0, 9: 1.0, 10: 1.0, 11: 0.5, 20: 0.5, 21: 0.1, 1000: 0.1},
    ),
    (PiecewiseConstantDecay((5,), (0.3, 0.2)), {0: 0.3, 5: 0.3, 6: 0.2}),
    (
        PolynomialDecay(0.1, 10),
        {0: 0.1, 1: 0.09001, 5: 0.05005, 9: 0.01009, 10: 0.0001, 11: 0.0001, 1000: 0.0001},
    ),
    (
        PolynomialDecay(0.1, 100, 0.01, power=0.5),
        {0: 0.1, 1: 0.09954886933959581, 50: 0.07363961030678928, 99: 0.019, 100: 0.01, 150: 0.01},
    ),
    (
        PolynomialDecay(0.1, 10, 0.01, power=2.0, cycle=True),
        {0: 0.1, 5: 0.0325, 10: 0.01, 11: 0.028225, 20: 0.01, 21: 0.0181, 35: 0.01140625},
    ),
    (
        InverseTimeDecay(0.1, 10, 0.5),
        {0: 0.1, 1: 0.09523809523809523, 10: 0.06666666666666667, 15: 0.05714285714285715, 1000: 0.00196078431372549},
    ),
    (
        InverseTimeDecay(0.1, 10, 0.5, staircase=True),
        {0: 0.1, 9: 0.1, 10: 0.06666666666666667, 19: 0.06666666666666667, 1000: 0.00196078431372549},
    ),
    (
        CosineDecay(0.1, 100),
        {0: 0.1, 1: 0.099975323677063, 50: 0.04999999701976776, 99: 2.4673342704772952e-05, 100: 0.0, 101: 0.0},
    ),
    (
        CosineDecay(0.1, 100, alpha=0.1),
        {0: 0.1, 33: 0.07790687084197999, 100: 0.010000000149011612, 1000: 0.010000000149011612},
    ),
    (
        CosineDecay(0.0, 100, warmup_target=0.1, warmup_steps=10),
        {
            0: 0.0,
            1: 0.010000000000000002,
            9: 0.09000000000000001,
            10: 0.1,
            11: 0.099975323677063,
            60: 0.04999999701976776,
            109: 2.4673342704772952e-05,
            110: 0.0,
            200: 0.0,
        },
    ),
    (
        CosineDecay(0.02, 100, alpha=0.2, warmup_target=0.1, warmup_steps=7),
        {
            0: 0.02,
            3: 0.054285714285714284,
            6: 0.08857142857142856,
            7: 0.1,
            57: 0.059999996423721315,
            107: 0.020000000298023225,
            108: 0.020000000298023225,
        },
    ),
    (
        CosineDecayRestarts(0.1, 10),
        {
            0: 0.1,
            5: 0.04999999701976776,
            9: 0.002447175979614258,
            10: 0.1,
            11: 0.09938441514968872,
            29: 0.0006155818700790405,
            30: 0.1,
            31: 0.09984586238861085,
            69: 0.00015413165092468262,
            70: 0.1,
            100: 0.06913416981697083,
        },
    ),
    (
        CosineDecayRestarts(0.1, 10, t_mul=1.0, m_mul=0.5, alpha=0.1),
        {
            0: 0.1,
            5: 0.05499999731779098,
            10: 0.05500000000000001,
            15: 0.03249999865889549,
            25: 0.02124999932944775,
            39: 0.010275307297706605,
        },
    ),
    (
        CosineDecayRestarts(0.1, 8, t_mul=1.5, m_mul=0.9),
        {
            0: 0.1,
            7: 0.0038060247898101807,
            9: 0.08846666157245636,
            19: 0.0015333384275436402,
            21: 0.08038471305370332,
            37: 0.000615286946296692,
            39: 0.07265353712439539,
            1000: 0.03146143438942277,
        },
    ),
]

EVERY = [
    *(schedule for schedule, _ in KERAS),
    WarmUp(0.1, 10),
    WarmUp(CosineDecay(0.1, 100), 10, initial_learning_rate=0.01),
    WarmUp(WarmUp(PiecewiseConstantDecay((5,), (0.3, 0.2)), 3), 2),
]


@pytest.mark.parametrize(("schedule", "rates"), KERAS, ids=repr)
def test_rates_are_keras(schedule: LearningRateSchedule, rates: dict[int, float]) -> None:
    """Every schedule gives Keras' learning rate at its beginning, its end, its jumps and in between."""
    cosine = isinstance(schedule, CosineDecay | CosineDecayRestarts)
    relative, absolute = (1e-6, 1e-8) if cosine else (1e-12, 0.0)
    assert {step: schedule(step) for step in rates} == pytest.approx(rates, rel=relative, abs=absolute)


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (ExponentialDecay, {"staircase": False}),
        (PiecewiseConstantDecay, {}),
        (PolynomialDecay, {"end_learning_rate": 0.0001, "power": 1.0, "cycle": False}),
        (InverseTimeDecay, {"staircase": False}),
        (CosineDecay, {"alpha": 0.0, "warmup_target": None, "warmup_steps": 0}),
        (CosineDecayRestarts, {"t_mul": 2.0, "m_mul": 1.0, "alpha": 0.0}),
        (WarmUp, {"initial_learning_rate": 0.0}),
    ],
)
def test_defaults_are_keras(kind: type[LearningRateSchedule], defaults: dict[str, Any]) -> None:
    """The same parameters as in Keras have defaults, with the same values."""
    required = 2 if kind in (PiecewiseConstantDecay, PolynomialDecay, CosineDecay, CosineDecayRestarts, WarmUp) else 3
    optional = fields(kind)[required:]
    assert {item.name: item.default for item in optional} == defaults


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_rates_are_plain_floats(schedule: LearningRateSchedule) -> None:
    """A rate is a Python float, finite and not negative, at the first step and far beyond the last."""
    for step in (0, 1, np.int64(7), np.uint8(200), 10**6, 10**15):
        rate = schedule(int(step))
        assert type(rate) is float
        assert 0 <= rate < 1.01
        assert schedule(step) == rate  # type: ignore[arg-type]  # NumPy's integers are no ints to mypy


def test_steps_that_make_no_sense_are_refused() -> None:
    """A negative step is refused with the convention, and a fraction because it is not an integer."""
    schedule = ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(ValueError, match="step -1 is below 0: a schedule takes the number of updates applied"):
        schedule(-1)
    with pytest.raises(TypeError):
        schedule(1.5)  # type: ignore[arg-type]


# The single schedules at their edges


def test_a_growing_rate_ends_at_infinity() -> None:
    """Growth beyond all floats is infinity, as in Keras, not an error."""
    assert ExponentialDecay(0.1, 1, 2.0)(5000) == math.inf
    assert ExponentialDecay(0.1, 1, 2.0, staircase=True)(5000) == math.inf
    assert ExponentialDecay(0.1, 1, 0.5)(5000) == 0.0


def test_piecewise_without_boundaries_is_constant() -> None:
    """Without boundaries its one value is the rate at all steps."""
    schedule = PiecewiseConstantDecay((), (0.25,))
    assert [schedule(step) for step in (0, 1, 1000)] == [0.25] * 3


def test_polynomial_cycles() -> None:
    """With cycle the rate jumps up after each multiple of decay_steps, and reaches the end at each."""
    schedule = PolynomialDecay(1.0, 4, 0.0, cycle=True)
    rates = [schedule(step) for step in range(13)]
    assert rates == pytest.approx([1, 3 / 4, 1 / 2, 1 / 4, 0, 3 / 8, 1 / 4, 1 / 8, 0, 1 / 4, 1 / 6, 1 / 12, 0])


@pytest.mark.parametrize("t_mul", [1.0, 1.001, 1.01, 1.1, 1.2, 1.25, 1.3, 1.5, 1.7, 2.0, 2.3, 3.0, 7.0, 10.0])
@pytest.mark.parametrize("first", [5, 7, 100, 1000, 123_456, 1_000_000])
def test_restarts_happen_at_their_own_step(t_mul: float, first: int) -> None:
    """A restart's own step has the full rate, and the one before almost none: rounding does not decide."""
    schedule = CosineDecayRestarts(1.0, first, t_mul=t_mul)
    growth, start = Fraction(str(t_mul)), Fraction(0)
    for period in range(200):
        start += first * growth**period
        if start > 10**9:
            break
        assert schedule(math.ceil(start)) > 0.75
        if not 0 < start % 1 < 0.01:  # otherwise the step before is as good as the restart's own
            assert schedule(math.ceil(start) - 1) < 0.15
        if start.denominator == 1:
            assert schedule(int(start)) > 1 - 1e-9


def test_restarts_multiply_the_peak() -> None:
    """Each restart begins at m_mul times the last peak, above the share alpha that always remains."""
    schedule = CosineDecayRestarts(1.0, 4, t_mul=2.0, m_mul=0.5, alpha=0.1)
    assert [schedule(step) for step in (0, 4, 12, 28)] == pytest.approx([0.1 + 0.9 * 0.5**i for i in range(4)])
    assert CosineDecayRestarts(1.0, 4, m_mul=0.0)(5) == 0.0


def test_warm_up_of_a_rate() -> None:
    """A rate is reached in a straight line from 0, or from another rate, and then kept."""
    schedule = WarmUp(0.1, 4)
    assert [schedule(step) for step in (0, 1, 2, 3, 4, 5, 1000)] == pytest.approx(
        [0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    )
    schedule = WarmUp(0.1, 2, initial_learning_rate=0.2)
    assert [schedule(step) for step in (0, 1, 2)] == pytest.approx([0.2, 0.15, 0.1])


@given(st.integers(0, 300))
def test_warm_up_of_a_cosine_is_keras_own(step: int) -> None:
    """A warm-up wrapped around a cosine is the cosine with its own warm-up."""
    wrapped = WarmUp(CosineDecay(0.1, 100, alpha=0.2), 30, initial_learning_rate=0.01)
    own = CosineDecay(0.01, 100, alpha=0.2, warmup_target=0.1, warmup_steps=30)
    assert wrapped(step) == pytest.approx(own(step), rel=1e-12)


def test_the_schedule_begins_after_the_warm_up() -> None:
    """The warmed-up schedule counts its steps from the end of the warm-up, in nested warm-ups too."""
    inner = ExponentialDecay(0.1, 10, 0.5)
    schedule = WarmUp(inner, 5)
    assert [schedule(step) for step in (5, 6, 15)] == [inner(0), inner(1), inner(10)]
    nested = WarmUp(schedule, 3)
    assert [nested(step) for step in (0, 2, 3, 8, 18)] == [0.0, 0.0, 0.0, inner(0), inner(10)]


# Refusals


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ExponentialDecay(-0.1, 10, 0.5),
            "exponential_decay: initial_learning_rate is -0.1; it must be a number, 0 or more",
        ),
        (lambda: ExponentialDecay(math.nan, 10, 0.5), "initial_learning_rate is nan; it must be a number"),
        (lambda: ExponentialDecay(True, 10, 0.5), "initial_learning_rate is True; it must be a number"),
        (lambda: ExponentialDecay("1", 10, 0.5), "initial_learning_rate is '1'"),  # type: ignore[arg-type]
        (lambda: ExponentialDecay(0.1, 0, 0.5), "decay_steps is 0; it must be a whole number of steps, 1 or more"),
        (lambda: ExponentialDecay(0.1, 1.5, 0.5), "decay_steps is 1.5; it must be a whole"),  # type: ignore[arg-type]
        (lambda: ExponentialDecay(0.1, True, 0.5), "decay_steps is True; it must be a whole number"),
        (lambda: ExponentialDecay(0.1, None, 0.5), "decay_steps is None; it must be a whole"),  # type: ignore[arg-type]
        (lambda: ExponentialDecay(0.1, 10, 0.0), "decay_rate is 0.0; it must be a number, above 0"),
        (lambda: ExponentialDecay(0.1, 10, 0.5, staircase=1), "staircase is 1; it must be True or False"),  # type: ignore[arg-type]
        (lambda: PiecewiseConstantDecay((5, 5), (1, 1, 1)), "boundaries are (5, 5), but each must be above the one"),
        (lambda: PiecewiseConstantDecay((-1,), (1, 1)), "boundaries is -1; it must be a whole number of steps"),
        (lambda: PiecewiseConstantDecay((5,), (1,)), "there are 1 values for 1 boundaries, but there must be one more"),
        (lambda: PiecewiseConstantDecay((5,), (1, -1)), "values is -1; it must be a number, 0 or more"),
        (lambda: PiecewiseConstantDecay(5, (1, 1)), "boundaries is 5; it must be a sequence"),  # type: ignore[arg-type]
        (lambda: PolynomialDecay(0.1, 10, power=0.0), "power is 0.0; it must be a number, above 0"),
        (lambda: PolynomialDecay(0.1, 10, end_learning_rate=-1), "end_learning_rate is -1"),
        (lambda: InverseTimeDecay(0.1, 10, -0.5), "decay_rate is -0.5; it must be a number, 0 or more"),
        (
            lambda: CosineDecay(0.1, 10, alpha=1.5),
            "alpha is 1.5; it must be a number, at least 0 and at most 1",
        ),
        (lambda: CosineDecay(0.1, 10, warmup_steps=5), "warmup_target is None and warmup_steps is 5: a warm-up needs"),
        (lambda: CosineDecay(0.1, 10, warmup_target=1.0), "warmup_target is 1.0 and warmup_steps is 0: a warm-up"),
        (lambda: CosineDecay(0.1, 10, warmup_target=1.0, warmup_steps=-1), "warmup_steps is -1; it must be a whole"),
        (lambda: CosineDecayRestarts(0.1, 10, t_mul=0.5), "t_mul is 0.5; it must be a number, 1 or more"),
        (lambda: CosineDecayRestarts(0.1, 10, m_mul=-1), "m_mul is -1; it must be a number, 0 or more"),
        (lambda: WarmUp(0.1, 0), "warmup_steps is 0; it must be a whole number of steps, 1 or more"),
        (lambda: WarmUp("x", 5), "learning_rate is 'x'; it must be a number"),  # type: ignore[arg-type]
    ],
)
def test_parameters_out_of_their_limits_are_refused(make: Any, said: str) -> None:
    """A wrong parameter is refused when the schedule is made, with its name, value and limit."""
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


# On the wire


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_specs(schedule: LearningRateSchedule) -> None:
    """A schedule comes back from its spec, even through JSON, nested ones included."""
    spec = schedule.to_spec()
    assert SCHEDULES[spec["name"]] is type(schedule)
    assert from_spec(spec) == schedule
    assert json.loads(json.dumps(spec, allow_nan=False)) == spec
    assert hash(from_spec(json.loads(json.dumps(spec)))) == hash(schedule)


def test_a_spec_is_plain() -> None:
    """A spec consists of the name and the parameters, nested if they are."""
    assert WarmUp(PiecewiseConstantDecay(np.array([5, 9]), [1, 0.5, 0.25]), 10.0).to_spec() == {  # type: ignore[arg-type]
        "name": "warm_up",
        "learning_rate": {"name": "piecewise_constant_decay", "boundaries": [5, 9], "values": [1.0, 0.5, 0.25]},
        "warmup_steps": 10,
        "initial_learning_rate": 0.0,
    }


def test_numpy_parameters_become_pythons() -> None:
    """NumPy parameters, and whole floats for steps, give the same schedule as Python's numbers."""
    made = ExponentialDecay(np.float32(0.5), np.int32(10), np.float64(0.5), np.bool_(True))  # type: ignore[arg-type]
    assert repr(made) == "ExponentialDecay(initial_learning_rate=0.5, decay_steps=10, decay_rate=0.5, staircase=True)"
    assert made == ExponentialDecay(0.5, 10.0, 0.5, staircase=True)  # type: ignore[arg-type]


def test_specs_that_make_no_sense_are_refused() -> None:
    """An unknown name or parameter, a missing one, or a wrong value in a nested one is refused."""
    with pytest.raises(ValueError, match="there is no schedule 'linear'; choose one of exponential_decay, "):
        from_spec({"name": "linear"})
    with pytest.raises(ValueError, match="there is no schedule None"):
        from_spec({})
    with pytest.raises(ValueError, match="there is no schedule"):
        from_spec({"name": ["cosine_decay"]})
    with pytest.raises(ValueError, match="cosine_decay has no parameter 'beta': it has initial_learning_rate, decay_"):
        from_spec({"name": "cosine_decay", "beta": 1})
    with pytest.raises(ValueError, match=r"cosine_decay: .*missing.* 'decay_steps'"):
        from_spec({"name": "cosine_decay", "initial_learning_rate": 0.1})
    inner = {"name": "cosine_decay", "initial_learning_rate": 0.1, "decay_steps": 0}
    with pytest.raises(ValueError, match="cosine_decay: decay_steps is 0"):
        from_spec({"name": "warm_up", "learning_rate": inner, "warmup_steps": 1})


def test_a_schedule_of_ones_own() -> None:
    """A frozen dataclass with a name and `at` is a schedule, and can be warmed up."""

    @dataclass(frozen=True)
    class InverseRoot(LearningRateSchedule):
        name: ClassVar[str] = "inverse_root"

        scale: float = 1.0

        def at(self, step: int) -> float:
            return self.scale / math.sqrt(step + 1)

    assert InverseRoot(2.0)(3) == 1.0
    assert WarmUp(InverseRoot(), 4)(2) == 0.5
    assert InverseRoot().to_spec() == {"name": "inverse_root", "scale": 1.0}
