"""Checks of the numbers and flags that users give, and what errors about arguments have in common.

Each check returns the value as a built-in type, or raises an error with its name, the value, the limits and what to do:
"adam: beta_1 is 1.5; it must be a number, at least 0 and below 1: the default is 0.9".
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self, TypedDict, Unpack

import numpy as np

from pscluster.core.errors import ConfigurationError


class Limits(TypedDict, total=False):
    """The limits of a number."""

    at_least: float
    above: float
    at_most: float
    below: float


_COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
_NO_NUMBERS = (bool, np.bool_, complex, np.complexfloating, str, bytes, bytearray)  # though float() or int() may accept


def real(
    name: str, value: object, hint: str = "", *, kind: str = "number", finite: bool = True, **limits: Unpack[Limits]
) -> float:
    """Return a number, of any type that `float` accepts, as a float. ValueError if it is none, or outside the limits.

    `kind` is the error's term for such a number, such as "number of seconds"; `hint` is appended to the error, such as
    ", or None". NaN is refused, and so are infinities, unless `finite` is False.
    """
    if not isinstance(value, _NO_NUMBERS):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]  # the error is the check
            if (math.isfinite(number) or (not finite and not math.isnan(number))) and _within(number, limits):
                return number
    article = "a finite" if finite and not limits else "a"
    raise _refusal(name, value, f"{article} {kind}", limits, hint)


def whole(name: str, value: object, hint: str = "", *, kind: str = "whole number", **limits: Unpack[Limits]) -> int:
    """Return a whole number, which may be given as a float such as 1e6, as an int; see `real`."""
    if type(value) is int and _within(value, limits):
        return value
    if not isinstance(value, _NO_NUMBERS):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = int(value)  # type: ignore[call-overload]  # the error is the check
            if number == value and _within(number, limits):
                return int(number)
    raise _refusal(name, value, f"a {kind}", limits, hint)


def per_axis(name: str, value: Any) -> tuple[int, ...]:
    """Return an array's shape, or a place in it, as a tuple. ValueError if it is none; an integer is for one axis."""
    try:
        numbers = tuple(map(operator.index, value if hasattr(value, "__iter__") else (value,)))
    except TypeError:
        numbers = (-1,)
    if min(numbers, default=0) < 0:
        raise ValueError(f"{name} is {value!r}; it must be integers, 0 or more, one for each axis")
    return numbers


@contextlib.contextmanager
def configuration_errors() -> Iterator[None]:
    """Raise a ValueError of the block, such as one of these checks, as a ConfigurationError."""
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def mib_of_environ(variable: str, default: int, at_least: int) -> int:
    """Return a whole number of MiB from the environment. ConfigurationError if it is none, or below the limit."""
    text = os.environ.get(variable) or str(default)
    with configuration_errors():
        number = int(text) if text.isascii() and text.isdecimal() else text
        return whole(variable, number, kind="whole number of MiB", at_least=at_least)


def type_of(value: object) -> str:
    """Return a value's type as an error names it: "a list", "an int", "None"."""
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIO" or name == "ndarray" else "a"
    return "None" if value is None else f"{article} {name}"


def text(name: str, value: object, wanted: str = "a string") -> str:
    """Return a string. TypeError, which says what is wanted, if it is none."""
    if isinstance(value, str):
        return value
    raise TypeError(f"{name} is {type_of(value)}; give {wanted}")


def path(name: str, value: object) -> str:
    """Return a path as a string. TypeError if it is none."""
    return text(name, os.fspath(value) if isinstance(value, os.PathLike) else value, "a path")


def flag(name: str, value: object) -> bool:
    """Return a flag as a bool. Numbers and strings are refused."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueError(f"{name} is {value!r}; it must be True or False")


def checked(check: Callable[[str, Any], object]) -> dict[str, Any]:
    """Return the `metadata` of a `Parameters` field whose values go through `check(name, value)`."""
    return {"check": check}


class Parameters:
    """Base of frozen dataclasses whose fields are checked at construction.

    A field without its own check (see `checked`) is a flag if its default is one, else a finite number.
    """

    name: ClassVar[str]  # of the class, on the wire and in errors

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # a dataclass, as above
            check = item.metadata.get("check", flag if isinstance(item.default, bool) else real)
            object.__setattr__(self, item.name, check(f"{self.name}: {item.name}", getattr(self, item.name)))

    def values_by_name(self) -> dict[str, Any]:
        """Return the values of all fields, for `made_of`."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def made_of(cls, values: Mapping[str, Any]) -> Self:
        """Make an instance from values by name; the others have their defaults.

        Raise ValueError if a value is refused, a name is unknown, or one without a default is missing.
        """
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise ValueError(f"{cls.name} has no parameter {name!r}: it has {', '.join(known) or 'none'}")
        try:
            return cls(**values)
        except TypeError as error:  # it names the missing parameters
            raise ValueError(f"{cls.name}: {error}") from None


def _within(number: float, limits: Mapping[str, Any]) -> bool:
    return all(_COMPARISONS[limit](number, bound) for limit, bound in limits.items())


def _refusal(name: str, value: object, wanted: str, limits: Mapping[str, Any], hint: str) -> ValueError:
    if limits.keys() == {"at_least"}:
        wanted += f", {_shown(limits['at_least'])} or more"
    elif limits:
        wanted += ", " + " and ".join(f"{limit.replace('_', ' ')} {_shown(bound)}" for limit, bound in limits.items())
    return ValueError(f"{name} is {value!r}; it must be {wanted}{hint}")


def _shown(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
