"""Exceptions of step functions: taken apart on the worker, put together on the coordinator, nothing pickled.

What the coordinator raises is a FunctionError that is also an instance of the class that the function raised,
where that class is known there, so that `except ValueError` works. It is put together without `__new__`,
`__init__` and `__setattr__` of a class of the user's.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import types
from typing import Any

from pscluster.core.errors import FunctionError, ProtocolError
from pscluster.core.sanitize import shown
from pscluster.core.values import decode, encode, imported_class, module_of
from pscluster.v1 import value_pb2, worker_pb2

_MAX_MESSAGE = 16 << 10
_MAX_TRACEBACK = 64 << 10
_MAX_ARGUMENTS = 256 << 10
_OWN = "pscluster.worker."

PARTLY_APPLIED = "Some of its updates may have been applied: they stay, and are in checkpoints made from now on."


def failure_of(error: BaseException) -> worker_pb2.Failure:
    """The failure that describes an exception. Never raises, however badly the exception behaves."""
    cls = type(error)
    failure = worker_pb2.Failure(
        module=_text(module_of(cls)),
        qualname=_text(cls.__qualname__),
        message=_message_of(error),
        traceback=_traceback_of(error),
    )
    arguments = _encoded((_sendable(error.args), _attributes_of(error)))
    if arguments is not None:
        failure.arguments.CopyFrom(arguments)
    return failure


def _message_of(error: BaseException) -> str:
    try:
        return _text(_shortened(str(error), _MAX_MESSAGE))
    except Exception as broken:
        return f"<its message can't be shown: str() raised {type(broken).__name__}>"


def _traceback_of(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OWN):
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
    except Exception as broken:
        lines = [f"<the traceback can't be shown: {type(broken).__name__}>\n"]
    return _text(_shortened("".join(lines).rstrip("\n"), _MAX_TRACEBACK))


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-limit // 2 :]}"


def _encoded(obj: Any) -> value_pb2.Value | None:
    try:
        value = encode(obj)
    except Exception:  # the object's own code may run: a property, __array__
        return None
    return value if value.ByteSize() <= _MAX_ARGUMENTS else None


def _sendable(args: Any) -> tuple[Any, ...] | None:
    return args if isinstance(args, tuple) and _encoded(args) is not None else None


def _attributes_of(error: BaseException) -> dict[str, Any]:
    """What can be sent of it: its `__dict__`, slots, and members of built-in classes such as `errno`."""
    found: dict[str, Any] = {}
    for base in type(error).__mro__:
        if base in (Exception, BaseException):
            break
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and not name.startswith("__"):
                found.setdefault(name, getattr(error, name, None))
    found |= {name: value for name, value in vars(error).items() if not name.startswith("__")}
    return {name: value for name, value in found.items() if value is not None and _encoded(value) is not None}


def rebuild_failure(
    failure: worker_pb2.Failure, *, function: str, worker: int | None, attempts: int, partly_applied: bool = False
) -> FunctionError:
    """The error to raise for a failure.

    It is also an instance of the class that the function raised, where that is an Exception, built in or in a
    module already imported, and its instances can be FunctionErrors too. Anything else is a plain
    FunctionError; its summary says what was raised either way.
    """
    args, attributes = _decoded(failure)
    error = _instance(failure, args)
    error.args = args
    for name, value in attributes.items():
        try:
            object.__setattr__(error, name, value)
        except (AttributeError, TypeError, ValueError):  # read-only, or of another type in this version
            continue
    error.function = function
    error.worker = worker
    error.attempts = attempts
    error.remote_traceback = shown(failure.traceback, lines=True)
    error.partly_applied = partly_applied
    error.summary = _summary(failure, function, worker, attempts, partly_applied)
    return error


def _decoded(failure: worker_pb2.Failure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: Any = None
    attributes: Any = {}
    if failure.HasField("arguments"):
        try:
            match decode(failure.arguments):
                case (args, dict() as attributes):
                    pass
        except ProtocolError:  # a handle, or an object whose class is not known here
            pass
    if not all(isinstance(name, str) and not name.startswith("__") for name in attributes):
        attributes = {}
    return (args if isinstance(args, tuple) else (failure.message,)), attributes


def _instance(failure: worker_pb2.Failure, args: tuple[Any, ...]) -> FunctionError:
    try:
        original = imported_class("", failure.module, failure.qualname)
        combined = _combined(original)
        # Of the built-in base, so that the user's __new__ does not run.
        base = next(base for base in original.__mro__ if base.__module__ == "builtins")
        if base is MemoryError:
            base = Exception  # MemoryError has a __new__ of its own, which adds nothing and refuses to be used here
        error = base.__new__(combined, *args)
        assert isinstance(error, FunctionError), "every combined class is one"
        _init_builtin(base, error, args)
        return error
    except Exception:  # no such class, or it can't be combined: its metaclass may raise anything
        return FunctionError(*args)


def _init_builtin(base: Any, error: FunctionError, args: tuple[Any, ...]) -> None:
    """Let a built-in class take its attributes from the arguments, as UnicodeDecodeError does."""
    with contextlib.suppress(TypeError, ValueError):  # not these, then it was the user's __init__ that gave others
        base.__init__(error, *args)


@functools.cache
def _combined(original: type) -> type[FunctionError]:
    """The class of errors that are FunctionErrors and `original`s. TypeError if there can't be one."""
    if issubclass(FunctionError, original):
        return FunctionError
    if not issubclass(original, Exception):
        raise TypeError(f"{original.__qualname__} is no Exception")
    if issubclass(original, BaseExceptionGroup):
        raise TypeError("a group would need its exceptions, and they are on the worker")
    namespace = {
        "__doc__": f"A scheduled function raised {original.__qualname__}.",
        "__module__": FunctionError.__module__,
        "__reduce__": _reduce,
    }
    name = f"FunctionError[{original.__name__}]"
    return types.new_class(name, (FunctionError, original), exec_body=lambda body: body.update(namespace))


def _reduce(self: FunctionError) -> tuple[Any, ...]:
    """The class can't be found by name: pickle and copy make the plain error of it."""
    state = {name: value for name, value in vars(self).items() if name in _STATE}
    return FunctionError, (self.summary,), state


_STATE = frozenset(["function", "worker", "attempts", "remote_traceback", "partly_applied", "summary"])


def _summary(
    failure: worker_pb2.Failure, function: str, worker: int | None, attempts: int, partly_applied: bool
) -> str:
    where = "" if worker is None else f" on worker {worker}"
    hidden = failure.module in ("builtins", "__main__")
    name = failure.qualname if hidden else f"{failure.module}.{failure.qualname}"
    what = f"{name}: {failure.message}" if failure.message else name
    head = f"{function} failed{where} (attempt {attempts}): {what}"
    if partly_applied:
        head += f"\n{PARTLY_APPLIED}"
    return shown(f"{head}\n\n{failure.traceback}" if failure.traceback else head, lines=True)
