"""The checks of numbers and flags: what they accept, and how they refuse."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pscluster.core import checks


@pytest.mark.parametrize("value", [3, 3.0, np.int8(3), np.float32(3.0), np.array(3.0), Fraction(3)])
def test_numbers_of_any_kind_become_pythons(value: Any) -> None:
    """Python's and NumPy's numbers become a float, or, if they are whole, an int."""
    assert (checks.real("x", value), type(checks.real("x", value))) == (3.0, float)
    assert (checks.whole("x", value), type(checks.whole("x", value))) == (3, int)


@pytest.mark.parametrize("value", [True, np.False_, "3", b"3", None, 3j, [3], math.nan, math.inf])
def test_what_is_no_number_is_refused(value: Any) -> None:
    """Flags, strings and non-finite numbers are refused."""
    with pytest.raises(ValueError, match=r"^x is .*; it must be a finite number$"):
        checks.real("x", value)
    with pytest.raises(ValueError, match=r"^x is .*; it must be a whole number$"):
        checks.whole("x", value)


def test_limits_and_what_to_do_are_said() -> None:
    """A refusal has the name, the value, the limits and the remedy; a limit itself is in or out, as the message
    says."""
    assert checks.real("x", 0, at_least=0, below=1) == 0
    assert checks.real("x", 1, above=0, at_most=1) == 1
    assert checks.whole("x", 10**400) == 10**400  # too large for a float
    with pytest.raises(ValueError, match=r"it must be a finite number$"):
        checks.real("x", 10**400)
    for value in (-0.1, 1):
        with pytest.raises(ValueError, match=rf"^x is {value}; it must be a number, at least 0 and below 1, or None$"):
            checks.real("x", value, ", or None", at_least=0, below=1)
    with pytest.raises(ValueError, match=r"^x is 0; it must be a number of seconds, above 0$"):
        checks.real("x", 0, kind="number of seconds", finite=False, above=0)
    with pytest.raises(ValueError, match=r"^x is 1.5; it must be a whole number, at least 1 and at most 1,000$"):
        checks.whole("x", 1.5, at_least=1, at_most=1000)


def test_infinity_where_it_is_allowed() -> None:
    """Without `finite` infinities are numbers; NaN is none."""
    assert checks.real("x", math.inf, finite=False, above=0) == math.inf
    with pytest.raises(ValueError, match="x is nan; it must be a number"):
        checks.real("x", math.nan, finite=False)


def test_flags() -> None:
    """True and False, Python's or NumPy's, are flags; nothing else is."""
    assert checks.flag("x", np.True_) is True
    with pytest.raises(ValueError, match=r"^x is 1; it must be True or False$"):
        checks.flag("x", 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [((), ()), ([3, 0], (3, 0)), (np.array([2, 5]), (2, 5)), (range(2), (0, 1)), (7, (7,)), (np.int32(4), (4,))],
)
def test_numbers_per_axis(value: Any, expected: tuple[int, ...]) -> None:
    """A shape may be any sequence of integers, or the length of a single axis, and becomes a tuple of Python's."""
    numbers = checks.per_axis("shape", value)
    assert numbers == expected
    assert all(type(number) is int for number in numbers)


@pytest.mark.parametrize("value", [(3, -1), -1, (2.0,), 2.5, "12", None, ((1, 2),), np.array(3.0)])
def test_what_is_no_shape_is_refused(value: Any) -> None:
    """The error has the name, the value and what it should be."""
    with pytest.raises(ValueError, match="v: shape is ") as refused:
        checks.per_axis("v: shape", value)
    assert str(refused.value) == f"v: shape is {value!r}; it must be integers, 0 or more, one for each axis"
