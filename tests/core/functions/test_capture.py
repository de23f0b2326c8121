"""Whether a function is unchanged since it was captured: its code, its values, and what is not checked."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pscluster.core.functions.capture import Captures, Changes

CELLS = """
rate, weights, unused = 0.1, array([1.0]), 1
class Model:
    def loss(self, x): return x * rate
model = Model()
def helper(x): return other(x)
def other(x): return x * rate
def step(x): return helper(x) + weights + missing(x) + len(x)
class Stepper:
    def run(self, x): return helper(x)
    @staticmethod
    def twice(x): return other(other(x))
def with_model(x): return model.loss(x)
shortened = partial(step, 1)
@cache
def cached(x): return other(x)
compiled = frompyfunc(other, 1, 1)
def uses_compiled(x): return compiled(x)
def uses_cached(x): return cached(x)
"""


@pytest.fixture
def cell() -> dict[str, Any]:
    """The names of a notebook, for example."""
    names: dict[str, Any] = {
        "__name__": "notebook",
        "array": np.array,
        "frompyfunc": np.frompyfunc,
        "partial": functools.partial,
        "cache": functools.cache,
    }
    exec(CELLS, names)
    return names


class Token:
    """An object that can be deleted."""


def changed(captures: Captures) -> Changes | None:
    """The changes that a check reports; None if there are none."""
    return None if captures.are_same() else captures.changes()


SAME, CODE = None, Changes(True, [])


@pytest.mark.parametrize("name", ["helper", "step", "with_model", "shortened", "uses_cached", "model", "Stepper"])
def test_nothing_has_changed(cell: dict[str, Any], name: str) -> None:
    """What has not changed stays unchanged at every check, whatever other values change."""
    captures = Captures(cell[name])
    cell["unused"] = 2
    assert [changed(captures) for _ in range(3)] == [SAME] * 3


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("step", "def other(x): return 2 * x", CODE),  # a helper's helper
        ("step", "def helper(x): return other(x)", CODE),  # a cell that is run again
        ("step", "helper.__code__ = (lambda x: 3).__code__", CODE),  # like autoreload
        ("step", "step.__code__ = (lambda x: 3).__code__", CODE),
        ("step", "def missing(x): return x", CODE),
        ("step", "len = 3", CODE),
        ("shortened", "def other(x): return 2 * x", CODE),
        ("uses_cached", "def other(x): return 2 * x", CODE),
        ("uses_compiled", "compiled = frompyfunc(other, 1, 1)", CODE),
        ("with_model", "Model.loss = lambda self, x: x", CODE),
        ("with_model", "model = Model(); old = model", Changes(False, ["model"])),
        ("with_model", "class Model:\n    pass", SAME),  # the object is of the first class
        ("Stepper", "Stepper.twice = staticmethod(lambda x: x)", CODE),
        ("step", "rate = 0.2", Changes(False, ["rate"])),
        ("step", "rate = helper", CODE),
        ("step", "helper = 3", CODE),
        ("step", "weights = array([1.0])", Changes(False, ["weights"])),
        ("step", "del weights", Changes(False, ["weights"])),
        ("step", "weights[0] = 3", SAME),  # in place
        ("step", "rate = float('0.1')", Changes(False, [])),  # another object, equal to the first
        ("step", "rate, weights = 1, 2", Changes(False, ["rate", "weights"])),
    ],
)
def test_changes(cell: dict[str, Any], name: str, line: str, expected: Changes | None) -> None:
    """Changed code, including that of helpers, makes a new function; a changed value is reported once, by name."""
    captures = Captures(cell[name])
    cell["old"] = cell["model"]
    exec(line, cell)
    first = changed(captures)
    assert (first and (first.code, sorted(first.values))) == (expected and (expected.code, sorted(expected.values)))
    if expected != CODE:
        assert changed(captures) is SAME, "once"
        exec("def other(x): return 7\ntype(old).loss = None", cell)
        assert changed(captures) == CODE, "the rest is still looked at"


def test_closures() -> None:
    """Variables of enclosing functions are names as well."""

    def make() -> tuple[Callable[[], Any], Callable[..., None]]:
        rate = 0.1
        helper: Callable[[], int] = lambda: 1  # noqa: E731  (it is rebound below)

        def step() -> Any:
            return rate, helper()

        def assign(new_rate: float, new_helper: Callable[[], int] | None = None) -> None:
            nonlocal rate, helper
            rate, helper = new_rate, new_helper or helper

        return step, assign

    step, assign = make()
    captures = Captures(step)
    assert changed(captures) is SAME
    assign(0.2)
    assert changed(captures) == Changes(False, ["rate"])
    assign(0.3)
    assert changed(captures) is SAME, "told of once"
    assign(0.3, lambda: 2)
    assert changed(captures) == CODE


def test_methods(cell: dict[str, Any]) -> None:
    """A bound method is checked as its function and those of its class; the object may change in place."""
    stepper: Any = cell["Stepper"]()
    captures = Captures(stepper.run)
    stepper.attribute = 3
    assert changed(captures) is SAME
    exec("def helper(x): return 0", cell)
    assert changed(captures) == CODE


def test_large_functions(cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is too much for one check a part is checked in turn, and all of it after a pause."""
    lines = [f"v{i} = {i}\ndef f{i}(): return v{i}" for i in range(100)]
    exec("\n".join(lines) + "\ndef big(): return " + " + ".join(f"f{i}()" for i in range(100)), cell)
    now = 100.0
    monkeypatch.setattr("pscluster.core.functions.capture.time.monotonic", lambda: now)
    for line in ("v77 = -1", "def f3(): return 0"):
        captures = Captures(cell["big"])
        assert changed(captures) is SAME  # a complete check
        exec(line, cell)
        assert False in [captures.are_same() for _ in captures._groups]
        now += 1.0
        assert not captures.are_same()


def test_nothing_is_kept_alive() -> None:
    """Captured functions and values are freed when their owner drops them, even a function that names itself."""

    def make() -> tuple[Callable[[], Any], list[weakref.ref[Any]]]:
        token, array = Token(), np.zeros(3)

        def step() -> Any:
            return token, array, step

        return step, [weakref.ref(step), weakref.ref(token), weakref.ref(array)]

    step, kept = make()
    captures = Captures(step)
    del step
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    assert changed(captures) == CODE


def test_an_id_that_is_used_again(cell: dict[str, Any]) -> None:
    """A deleted value is not mistaken for another one at the same address."""
    captures = Captures(cell["step"])
    for _ in range(50):
        cell["weights"] = None
        cell["weights"] = np.array([1.0])
        if (told := changed(captures)) is not SAME:
            break
    assert told == Changes(False, ["weights"])


def test_several_threads(cell: dict[str, Any]) -> None:
    """Checks from several threads report changes, and none fails."""
    captures, told, failed = Captures(cell["step"]), list[str](), list[BaseException]()

    def look() -> None:
        try:
            for _ in range(2000):
                if not captures.are_same():
                    told.extend(captures.changes().values)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    cell["rate"] = 7
    for thread in threads:
        thread.join(30)
    assert not failed
    look()
    assert told == ["rate"]
