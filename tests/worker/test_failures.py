"""Failures: what a step function raises is caught on the coordinator as the same error, with its place and cause."""

from __future__ import annotations

import copy
import dataclasses
import errno
import linecache
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster.core.errors import EndOfDatasetError, FunctionError, InvalidUpdateError, PsClusterError
from pscluster.core.handles import Handle
from pscluster.core.values import decode
from pscluster.v1 import worker_pb2
from pscluster.worker.failures import failure_of, rebuild_failure
from pscluster.worker.steps.training import logs_of_steps


class NeedsArgumentsError(Exception):
    """An error whose `__init__` needs something that its `args` are not."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class NeverInitError(ValueError):
    """An error whose `__init__` does not call the base's, and must not run again."""

    def __init__(self, first: int, second: int) -> None:
        assert first == 1
        self.sum = first + second


class SlottedError(Exception):
    """An error with slots."""

    __slots__ = ("left", "right")

    def __init__(self, left: int) -> None:
        super().__init__(left)
        self.left = left


class MadeByNewError(KeyError):
    """An error with a `__new__` that needs two arguments."""

    def __new__(cls, key: str, table: str) -> MadeByNewError:
        error = super().__new__(cls, key)
        error.table = table
        return error

    table: str


class NoTextError(Exception):
    """An error that can't be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not today")


class Choosy(type):
    """A metaclass that raises."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if name.startswith("FunctionError"):
            raise RuntimeError("no more classes")
        return super().__new__(cls, name, bases, namespace)


class OfChoosyError(Exception, metaclass=Choosy):
    """A class from which none can be derived."""


class FinalError(Exception):
    """Another class from which none can be derived."""

    def __init_subclass__(cls) -> None:
        raise TypeError("final")


def failed(raises: Callable[[], Any]) -> worker_pb2.Failure:
    """The failure of a function, after being sent."""
    try:
        raises()
    except BaseException as error:
        sent = failure_of(error).SerializeToString()
        return worker_pb2.Failure.FromString(sent)
    raise AssertionError("nothing was raised")


def rebuilt(error: BaseException | Callable[[], Any]) -> Any:
    """What the coordinator raises for it."""

    def raises() -> None:
        if isinstance(error, BaseException):
            raise error
        error()

    return rebuild_failure(failed(raises), function="step", worker=2, attempts=1)


def test_the_error_is_what_was_raised_and_says_where() -> None:
    """`except ValueError` catches it; it is a FunctionError with the function, the worker and the traceback."""

    def step() -> None:
        raise ValueError("a bad batch", 3)

    error = rebuilt(step)
    with pytest.raises(ValueError, match="a bad batch") as caught:
        raise error
    assert caught.value is error
    assert isinstance(error, FunctionError)
    assert isinstance(error, PsClusterError)
    assert (error.function, error.worker, error.attempts) == ("step", 2, 1)
    assert error.args == ("a bad batch", 3)
    head, empty, first, *_ = str(error).splitlines()
    assert head == "step failed on worker 2 (attempt 1): ValueError: ('a bad batch', 3)"
    assert empty == ""
    assert first == "Traceback (most recent call last):"
    assert 'raise ValueError("a bad batch", 3)' in error.remote_traceback
    assert str(error).endswith(error.remote_traceback)
    assert "FunctionError[ValueError]: step failed on worker 2" in "".join(traceback.format_exception(error))


def test_nobody_knows_the_worker() -> None:
    """A failure without a worker says only what it knows; classes of other modules are named in full."""
    failure = worker_pb2.Failure(module="somewhere.else", qualname="Odd.Error", message="")
    error = rebuild_failure(failure, function="step", worker=None, attempts=3)
    assert type(error) is FunctionError
    assert str(error) == "step failed (attempt 3): somewhere.else.Odd.Error"
    assert error.worker is None


def unicode_error() -> None:
    """Raise a UnicodeDecodeError."""
    b"ab\xff".decode()


BUILTIN: list[tuple[Callable[[], Any], type[Exception], dict[str, Any]]] = [
    (Path("/no/such/file").read_bytes, FileNotFoundError, {"errno": errno.ENOENT, "filename": "/no/such/file"}),
    (lambda: dict[str, int]()["key"], KeyError, {"args": ("key",)}),
    (unicode_error, UnicodeDecodeError, {"object": b"ab\xff", "start": 2, "end": 3, "encoding": "utf-8"}),
    (lambda: next(iter([])), StopIteration, {"value": None}),
    (lambda: int("x"), ValueError, {}),
    (lambda: __import__("no_such_module"), ModuleNotFoundError, {"name": "no_such_module"}),
    (lambda: None.nothing, AttributeError, {"name": "nothing", "obj": None}),  # type: ignore[attr-defined]
    (lambda: compile("1 +", "x.py", "exec"), SyntaxError, {"lineno": 1, "filename": "x.py"}),
    (lambda: 1 / 0, ZeroDivisionError, {"args": ("division by zero",)}),
    (lambda: np.zeros(2).reshape(3), ValueError, {}),
    (lambda: np.linalg.inv(np.zeros((2, 2))), np.linalg.LinAlgError, {"args": ("Singular matrix",)}),
]


@pytest.mark.parametrize(("raises", "cls", "attributes"), BUILTIN, ids=lambda value: getattr(value, "__name__", ""))
def test_built_in_exceptions_keep_their_attributes(
    raises: Callable[[], Any], cls: type[Exception], attributes: dict[str, Any]
) -> None:
    """Each is caught as its class and has its attributes: errno and filename, key, position, value."""
    error = rebuilt(raises)
    with pytest.raises(cls):
        raise error
    assert isinstance(error, FunctionError)
    for name, value in attributes.items():
        assert getattr(error, name) == value
    assert str(error).startswith("step failed on worker 2 (attempt 1): ")


def test_exceptions_of_the_users_keep_their_attributes() -> None:
    """Classes with required arguments, slots or a `__new__` are rebuilt without running those."""
    error = rebuilt(NeedsArgumentsError(7, detail="wrong"))
    assert isinstance(error, NeedsArgumentsError)
    assert (error.args, error.code, error.detail) == (("code 7",), 7, "wrong")
    error = rebuilt(NeverInitError(1, 2))
    assert isinstance(error, NeverInitError)
    assert (error.args, error.sum) == ((1, 2), 3)
    error = rebuilt(SlottedError(4))
    assert isinstance(error, SlottedError)
    assert error.left == 4
    assert not hasattr(error, "right")
    error = rebuilt(MadeByNewError("w", "weights"))
    assert isinstance(error, MadeByNewError)
    assert isinstance(error, KeyError)
    assert error.table == "weights"


def test_our_own_errors_stay_what_they_are() -> None:
    """A library error raised in a step function is caught as that error."""
    for cls in (InvalidUpdateError, EndOfDatasetError):
        error = rebuilt(cls("no such row"))
        assert isinstance(error, cls)
        assert isinstance(error, FunctionError)
    assert type(rebuilt(PsClusterError("x"))) is FunctionError
    assert type(rebuilt(Exception("x"))) is FunctionError


def test_what_cannot_be_both_is_a_plain_function_error() -> None:
    """For exits, groups, and classes from which none can be derived, the summary says what the error was."""
    for original in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), OfChoosyError("x"), FinalError("x")):
        error = rebuilt(original)
        assert type(error) is FunctionError
        assert f": {type(original).__qualname__}" in str(error).replace(f"{__name__}.", "")
    error = rebuilt(ExceptionGroup("several", [ValueError("one"), OSError("two")]))
    assert type(error) is FunctionError
    assert "ExceptionGroup: several (2 sub-exceptions)" in str(error)
    assert "ValueError: one" in error.remote_traceback


def test_classes_are_not_imported_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class whose module is not imported here is not searched for."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    failure = worker_pb2.Failure(module="this", qualname="d", message="x")
    assert type(rebuild_failure(failure, function="f", worker=0, attempts=1)) is FunctionError
    assert "this" not in sys.modules
    for qualname in ("len", "int", "", "no.such"):
        failure = worker_pb2.Failure(module="builtins", qualname=qualname, message="x")
        assert type(rebuild_failure(failure, function="f", worker=0, attempts=1)) is FunctionError


def test_classes_are_made_once() -> None:
    """Two failures of one class have the same class here, too."""
    assert type(rebuilt(ValueError("a"))) is type(rebuilt(ValueError("b")))


@dataclasses.dataclass
class Unknown:
    """An error that is unknown where the failure arrives."""

    x: int


def test_arguments_that_cannot_be_sent_are_replaced_by_the_message() -> None:
    """An argument that is not plain data, is too large, or is unknown here costs only itself."""

    class Thing(Handle):
        handle_kind, handle_key = "thing", "w"

    for argument in (object(), np.zeros(1 << 20), Thing()):
        original = ValueError("text", argument)
        original.code = 3  # type: ignore[attr-defined]
        original.lock = argument  # type: ignore[attr-defined]
        error = rebuilt(original)
        assert isinstance(error, ValueError)
        assert error.args == (str(original),)
        if not isinstance(argument, Handle):
            assert error.code == 3  # type: ignore[attr-defined]
            assert not hasattr(error, "lock")
    failure = failed(lambda: (_ for _ in ()).throw(ValueError(Unknown(1))))
    failure.arguments.tuple.items[0].tuple.items[0].record.module = "not.imported"
    error = rebuild_failure(failure, function="f", worker=0, attempts=1)
    assert isinstance(error, ValueError)
    assert error.args == (str(ValueError(Unknown(1))),)


def test_damaged_arguments_do_no_harm() -> None:
    """Whatever is in the place of the arguments, the result is an error."""
    failure = failed(lambda: 1 / 0)
    for junk in (True, 3, "text"):
        failure.arguments.Clear()
        setattr(failure.arguments, {bool: "boolean", int: "integer", str: "text"}[type(junk)], junk)
        error = rebuild_failure(failure, function="f", worker=0, attempts=1)
        assert isinstance(error, ZeroDivisionError)
        assert error.args == ("division by zero",)


def test_failure_of_never_raises() -> None:
    """An exception that can't be shown, or has too much text, is described as far as possible."""
    error = rebuilt(NoTextError())
    assert isinstance(error, NoTextError)
    assert "its message can't be shown: str() raised RuntimeError" in str(error)
    failure = failed(lambda: (_ for _ in ()).throw(ValueError("\ud800" + "x" * 10**6)))
    assert len(failure.message) < 20_000
    assert "characters left out" in failure.message
    assert len(failure.SerializeToString()) < 500_000


def test_frames_of_the_library_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback begins with the step function, and has only the user's code."""

    def step(_: int) -> None:
        logs_of_steps(lambda _: "much", [1])

    error = rebuilt(lambda: logs_of_steps(step, [0]))
    *_, last = error.remote_traceback.split("Traceback (most recent call last):\n")
    lines = last.splitlines()
    steps = next(at for at, line in enumerate(lines) if line.endswith("in step"))
    assert 'logs_of_steps(lambda _: "much", [1])' in lines[steps + 1]
    assert "  [1 frame inside pscluster]" in lines[:steps]
    assert lines[-2].endswith("frames inside pscluster]")
    assert "training.py" not in error.remote_traceback

    framework = compile("def call(function):\n    return function()", "/env/site-packages/torch/nn.py", "exec")
    torch: dict[str, Any] = {}
    exec(framework, torch)
    *_, last = rebuilt(lambda: torch["call"](lambda: 1 / 0)).remote_traceback.split("\n", 1)
    assert "  [1 frame inside torch]\n" in last
    assert "torch/nn.py" not in last
    assert "torch/nn.py" in rebuilt(lambda: torch["call"](None)).remote_traceback, "it was raised there"

    namespace: dict[str, Any] = {"__name__": "pscluster.worker.execution.runner"}
    exec("def run(function, *args):\n    function(*args)", namespace)
    for call, shown in ((lambda: None, ""), (decode, "decode")):
        with pytest.raises((TypeError, AttributeError)) as caught:
            namespace["run"](call, 0)
        caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]  # this test's own
        lines = failure_of(caught.value).traceback.splitlines()
        assert shown in "".join(lines[1:2]), "of a mistake of the library's all is shown, of a wrong call nothing"

    # The source of a notebook's cell exists only where it was written.
    code = "def cell():\n    raise ValueError(1)\n"
    exec(compile(code, "/tmp/cell/1.py", "exec"), namespace)
    failure = failed(namespace["cell"])
    assert "raise ValueError(1)" not in failure.traceback
    monkeypatch.setitem(linecache.cache, "/tmp/cell/1.py", (len(code), None, code.splitlines(True), "/tmp/cell/1.py"))
    error = rebuild_failure(failure, function="cell", worker=0, attempts=1)
    assert "in cell\n    raise ValueError(1)\nValueError: 1" in str(error)
    assert "in cell\n    raise ValueError(1)\nValueError: 1" in error.remote_traceback


@pytest.mark.parametrize("number", ["9" * 5000, "\u0661" * 4, "-1", "1e9", "0", "999999999"])
def test_messages_may_look_like_frames(number: str) -> None:
    """With numbers of lines that there can't be: the error is raised as any other, and not the connection ended."""
    text = f'x\n  File "{__file__}", line {number}, in f\nend'
    linecache.getline(__file__, 1)

    def fail() -> None:
        raise ValueError(text)

    error = rebuild_failure(failed(fail), function="f", worker=0, attempts=1)
    assert isinstance(error, ValueError)
    assert error.args == (text,)


def test_causes_and_notes_are_told() -> None:
    """The remote traceback shows causes and notes."""

    def step() -> None:
        try:
            int("x")
        except ValueError as cause:
            error = RuntimeError("no number")
            error.add_note("in row 3")
            raise error from cause

    text = rebuilt(step).remote_traceback
    assert "invalid literal for int()" in text
    assert "direct cause" in text
    assert text.endswith("RuntimeError: no number\nin row 3")


def test_errors_can_be_copied_and_pickled() -> None:
    """A combined class can't be found by name: copies are plain FunctionErrors that say the same."""
    error = rebuilt(OSError(2, "gone", "file"))
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is FunctionError
        assert str(other) == str(error)
        assert (other.function, other.worker, other.attempts) == ("step", 2, 1)
