"""Exceptions: taken apart where they are raised, rebuilt on the other side, without pickles.

Those of step functions go from a worker to the coordinator; those that it answers a question with, the other way.

The coordinator raises a FunctionError that is also an instance of the class that the function raised, if that class is
known there, so that `except ValueError` works. Rebuilding it does not run `__new__`, `__init__` or `__setattr__` of a
class of the user's.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
import traceback
import types
from typing import Any

from pscluster.core.display.sanitize import shown
from pscluster.core.display.tracebacks import FoldedStack, are_ours
from pscluster.core.errors import FunctionError, ProtocolError, PsClusterError
from pscluster.core.values import decode, encode
from pscluster.core.values.records import imported_class, module_of
from pscluster.v1 import value_pb2, worker_pb2

_MAX_MESSAGE = 16 << 10
_MAX_TRACEBACK = 64 << 10
_MAX_ARGUMENTS = 256 << 10
_RUNNER = ("pscluster.worker.execution.runner", "pscluster.worker.execution.function_calls")
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>[0-9]{1,9}), in ')

PARTLY_APPLIED = "Some of its updates may have been applied: they stay, and are in checkpoints made from now on."


class RelayedFailure(Exception):  # noqa: N818  (a description of an error, not one of its own)
    """What a function raised in another process that it ran in."""

    def __init__(self, failure: worker_pb2.Failure) -> None:
        """Pass a failure on as it is."""
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: BaseException) -> worker_pb2.Failure:
    """Return a description of an exception. Never raises, however badly the exception behaves."""
    if isinstance(error, RelayedFailure):
        return error.failure
    cls, args = type(error), error.args
    return worker_pb2.Failure(
        module=_text(module_of(cls)),
        qualname=_text(cls.__qualname__),
        message=_message_of(error),
        traceback=_traceback_of(error),
        arguments=_encoded((args if _encoded(args) is not None else None, _attributes_of(error))),
    )


def _message_of(error: BaseException) -> str:
    try:
        return _text(_shortened(str(error), _MAX_MESSAGE))
    except Exception as broken:
        return f"<its message can't be shown: str() raised {type(broken).__name__}>"


def _traceback_of(error: BaseException) -> str:
    """Return the traceback as text, with runs of the library's frames folded into one line each.

    If all frames are the library's, they are shown, unless the message is enough: then the text is empty.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in _RUNNER:
        frames = frames.tb_next
    try:
        described = traceback.TracebackException(type(error), error, frames)
        chain = _chain(described)
        if any(not ours for link in chain for ours in are_ours(link.stack)):
            for link in chain:
                link.stack = FoldedStack(link.stack)
        elif (frames is None or isinstance(error, PsClusterError)) and not getattr(error, "__notes__", None):
            return ""
        lines = list(described.format())
    except Exception as broken:
        lines = [f"<the traceback can't be shown: {type(broken).__name__}>\n"]
    return _text(_shortened("".join(lines).rstrip("\n"), _MAX_TRACEBACK))


def _chain(error: traceback.TracebackException) -> list[traceback.TracebackException]:
    """Return the error with its causes and contexts, and the members of groups."""
    chain, todo = list[traceback.TracebackException](), [error]
    while todo:
        link = todo.pop()
        chain.append(link)
        todo += [other for other in (link.__cause__, link.__context__, *(link.exceptions or ())) if other is not None]
    return chain


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-limit // 2 :]}"


def _encoded(obj: Any) -> value_pb2.Value | None:
    try:
        value = encode(obj)
    except Exception:  # from the object's own code: a property, __array__
        return None
    return value if value.ByteSize() <= _MAX_ARGUMENTS else None


def _attributes_of(error: BaseException) -> dict[str, Any]:
    """Return the attributes that can be sent: of `__dict__`, slots, and built-in classes (such as `errno`)."""
    attributes: dict[str, Any] = {}
    for base in type(error).__mro__:
        if base in (Exception, BaseException):
            break
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and not name.startswith("__"):
                attributes.setdefault(name, getattr(error, name, None))
    attributes |= {name: value for name, value in vars(error).items() if not name.startswith("__")}
    return {name: value for name, value in attributes.items() if value is not None and _encoded(value) is not None}


def rebuild_failure(
    failure: worker_pb2.Failure, *, function: str, worker: int | None, attempts: int, partly_applied: bool = False
) -> FunctionError:
    """Return the error to raise for a failure.

    It is also an instance of the class that the function raised, if that is an Exception, built in or from a module
    already imported, and can be combined with FunctionError. Otherwise it is a plain FunctionError. In either case its
    summary says what was raised.
    """
    args, attributes = _decoded(failure)
    traceback_text = _with_sources(failure.traceback)
    error = _instance(failure, args)
    _restore(error, args, attributes)
    error.function = function
    error.worker = worker
    error.attempts = attempts
    error.remote_traceback = shown(traceback_text, lines=True)
    error.partly_applied = partly_applied
    where = "" if worker is None else f" on worker {worker}"
    head = f"{function} failed{where} (attempt {attempts}): {_raised(failure)}"
    if partly_applied:
        head += f"\n{PARTLY_APPLIED}"
    error.summary = shown(f"{head}\n\n{traceback_text}" if traceback_text else head, lines=True)
    return error


def rebuild_error(failure: worker_pb2.Failure, where: str = "On the coordinator") -> Exception:
    """Return the error that was raised in another process, `where`, as an instance of its own class.

    If that is not known here, or is not of an Exception, a PsClusterError says what was raised. A note has the
    traceback there.
    """
    args, attributes = _decoded(failure)
    try:
        cls = imported_class("", failure.module, failure.qualname)
        if not issubclass(cls, Exception) or issubclass(cls, BaseExceptionGroup):
            raise TypeError(f"{cls.__qualname__} is not a single Exception")
        error: Exception = _made(cls, cls, args)
        _restore(error, args, attributes)
    except Exception:  # its metaclass may raise anything
        error = PsClusterError(shown(_raised(failure), lines=True))
    if failure.traceback:
        error.add_note(shown(f"{where}:\n{failure.traceback}", lines=True))
    return error


def _raised(failure: worker_pb2.Failure) -> str:
    """Return the name and message of what was raised."""
    hidden = failure.module in ("builtins", "__main__")
    name = failure.qualname if hidden else f"{failure.module}.{failure.qualname}"
    return f"{name}: {failure.message}" if failure.message else name


def _restore(error: Exception, args: tuple[Any, ...], attributes: dict[str, Any]) -> None:
    """Give an error its arguments and attributes."""
    error.args = args
    for attribute, value in attributes.items():
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # read-only, or of another type here
            object.__setattr__(error, attribute, value)


def _with_sources(text: str) -> str:
    """Add source lines that the worker lacked: those of a notebook's cells, and of a script that is only here."""
    lines = text.split("\n")
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for at in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[at])
        if frame is None or "".join(lines[at + 1 : at + 2]).startswith("    "):
            continue
        # A peer's text must not make us read any other file.
        if frame["file"] in linecache.cache or frame["file"] == script:
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            lines[at + 1 : at + 1] = [f"    {source}"] if source else []
    return "\n".join(lines)


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
        error = _made(_combined(original), original, args)
        assert isinstance(error, FunctionError), "every combined class is one"
        return error
    except Exception:  # no such class, or it can't be combined: its metaclass may raise anything
        return FunctionError(*args)


def _made(cls: type, original: type, args: tuple[Any, ...]) -> Any:
    """Return a new error of a class that is, or inherits from, `original`, without running the user's code."""
    # That of the built-in base, so that the user's __new__ does not run.
    base: Any = next(base for base in original.__mro__ if base.__module__ == "builtins")
    if base is MemoryError:
        base = Exception  # MemoryError's own __new__ adds nothing, and refuses other classes
    error = base.__new__(cls, *args)
    # Built-in classes such as UnicodeDecodeError take attributes from the arguments. This fails if the user's __init__
    # passed others on.
    with contextlib.suppress(TypeError, ValueError):
        base.__init__(error, *args)
    return error


@functools.cache
def _combined(original: type) -> type[FunctionError]:
    """Return a subclass of FunctionError and `original`. Raise TypeError if there can't be one."""
    if issubclass(FunctionError, original):
        return FunctionError
    if not issubclass(original, Exception):
        raise TypeError(f"{original.__qualname__} is not an Exception")
    if issubclass(original, BaseExceptionGroup):
        raise TypeError("a group would need its exceptions, which are on the worker")
    namespace = {
        "__doc__": f"A scheduled function raised {original.__qualname__}.",
        "__module__": FunctionError.__module__,
        "__reduce__": _reduce,
    }
    name = f"FunctionError[{original.__name__}]"
    return types.new_class(name, (FunctionError, original), exec_body=lambda body: body.update(namespace))


def _reduce(self: FunctionError) -> tuple[Any, ...]:
    """Pickle and copy the error as a plain FunctionError: its class can't be found by name."""
    state = ("function", "worker", "attempts", "remote_traceback", "partly_applied", "summary")
    return FunctionError, (self.summary,), {name: value for name, value in vars(self).items() if name in state}
