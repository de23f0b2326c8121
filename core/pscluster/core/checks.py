"""Checks of the numbers and flags that users give.

Each gives the value as Python's own type, or refuses it with its name, the value, the limits and what to do:
"adam: beta_1 is 1.5; it must be a number, at least 0 and below 1: the default is 0.9".
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import numpy as np

__all__ = ["Limits", "flag", "real", "whole"]


class Limits(TypedDict, total=False):
    """What a number may be."""

    at_least: float
    above: float
    at_most: float
    below: float


_COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
_NO_NUMBERS = (bool, np.bool_, complex, np.complexfloating, str, bytes, bytearray)  # though float() or int() takes them


def real(
    name: str, value: object, mend: str = "", *, kind: str = "number", finite: bool = True, **limits: Unpack[Limits]
) -> float:
    """Return a number as a float.

    Args:
        name: what the number is called in the refusal.
        value: a number of Python's, NumPy's or any other kind that `float` takes.
        mend: what else to say in the refusal, such as ", or None".
        kind: what to call such a number, such as "number of seconds".
        finite: refuse infinities and NaN. If not, NaN is still outside of all limits.
        limits: see `Limits`.

    Raises:
        ValueError: it is no number, or outside of the limits.
    """
    if not isinstance(value, _NO_NUMBERS):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]  # the error is the check
            if (math.isfinite(number) or not finite) and _within(number, limits):
                return number
    article = "a finite" if finite and not limits else "a"
    raise _refusal(name, value, f"{article} {kind}", limits, mend)


def whole(name: str, value: object, mend: str = "", *, kind: str = "whole number", **limits: Unpack[Limits]) -> int:
    """Return a whole number, which may come as a float such as 1e6, as an int; see `real`."""
    if not isinstance(value, _NO_NUMBERS):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = int(value)  # type: ignore[call-overload]  # the error is the check
            if number == value and _within(number, limits):
                return int(number)
    raise _refusal(name, value, f"a {kind}", limits, mend)


def flag(name: str, value: object) -> bool:
    """Return a flag as a bool. Numbers and strings are none."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueError(f"{name} is {value!r}; it must be True or False")


def _within(number: float, limits: Mapping[str, Any]) -> bool:
    return all(_COMPARISONS[limit](number, bound) for limit, bound in limits.items())


def _refusal(name: str, value: object, wanted: str, limits: Mapping[str, Any], mend: str) -> ValueError:
    if limits.keys() == {"at_least"}:
        wanted += f", {_shown(limits['at_least'])} or more"
    elif limits:
        wanted += ", " + " and ".join(f"{limit.replace('_', ' ')} {_shown(bound)}" for limit, bound in limits.items())
    return ValueError(f"{name} is {value!r}; it must be {wanted}{mend}")


def _shown(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
