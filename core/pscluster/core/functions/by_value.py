"""Functions by value: cloudpickle, with handles by name. Where pickles are off, nothing here makes or reads one.

A pickle starts with a line that names the Python it is for: code of another minor version must not be loaded.

Classes and functions of `__main__`, and of modules registered with `cloudpickle.register_pickle_by_value`, go into a
pickle whole, as always with cloudpickle; others go by name. Those of a user's module that has a handle among its
globals also go whole, since a worker that imported the module would lack that handle. For this we use cloudpickle's
documented registry, under a lock, rather than its reducers, which are internal and have changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import pickle  # of functions: docs/security.md says from whom  # nosec B403
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]  # ships neither stubs nor py.typed

from pscluster.core.errors import MisuseError
from pscluster.core.functions.loading import UnresolvedReference
from pscluster.core.functions.policy import chosen_policy
from pscluster.core.functions.sources import (
    MAX_ITEMS,
    attributes_of,
    closure_of,
    globals_of,
    is_library,
    module_holds_handles,
    was_edited,
)
from pscluster.core.handles import Handle, StaysHere
from pscluster.core.values import HandleResolver, describe

_HANDLE = "pscluster"
_FILE_LEFT_OUT = "<dynamic-code>"
_PYTHON = f"{sys.implementation.cache_tag}\n".encode()
_registry = threading.RLock()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped, as above
    """Pickles handles by name, and what modules that hold some define whole. Use under `_registry`, then `restore`."""

    def __init__(self, file: io.BytesIO, own_module: str, *, whole: bool) -> None:
        super().__init__(file, protocol=5)
        self._own_module = own_module
        self._registered: list[types.ModuleType] = []
        self._met: set[str] = set()
        self.names_own_module = False
        self.handles: list[Handle] = []
        if whole and not (is_library(own_module) and hasattr(sys.modules.get(own_module), "__path__")):
            self._register(own_module)

    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not isinstance(obj, Handle):
            return None
        obj = obj.as_sent()
        self.handles.append(obj)
        return (_HANDLE, obj.handle_kind, obj.handle_key)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and obj in self._registered:
            return importlib.import_module, (obj.__name__,)  # the module itself stays a name
        if isinstance(obj, types.CodeType):
            rebuild, args = self.dispatch_table[types.CodeType](obj)
            # cloudpickle >= 3.1.3 leaves out the file's name, which tracebacks show.
            return rebuild, tuple(obj.co_filename if arg == _FILE_LEFT_OUT else arg for arg in args)
        if isinstance(obj, type | types.FunctionType):
            self._meet(obj.__module__, obj.__qualname__)
        elif isinstance(obj, functools._lru_cache_wrapper) and not self._by_name(obj):
            return _cached_again, (obj.__wrapped__, *obj.cache_parameters().values())
        return super().reducer_override(obj)

    def _meet(self, module_name: Any, qualname: str) -> None:
        if not isinstance(module_name, str):
            return
        if module_name not in self._met:
            self._met.add(module_name)
            if module_holds_handles(module_name) or was_edited(module_name):
                self._register(module_name)
        if module_name == self._own_module and "<" not in qualname and not _goes_whole(module_name):
            self.names_own_module = True

    def _by_name(self, obj: Any) -> bool:
        self._meet(obj.__module__, obj.__qualname__)
        return "<" not in obj.__qualname__ and not _goes_whole(str(obj.__module__))

    def _register(self, module_name: str) -> None:
        module = sys.modules.get(module_name)
        if module is not None and not _goes_whole(module_name):
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)

    def restore(self) -> None:
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)
        self._registered.clear()


def _goes_whole(module_name: str) -> bool:
    whole: set[str] = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return any(f"{module_name}.".startswith(f"{name}.") for name in whole)


def _cached_again(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Return the function with its `functools.lru_cache`, which by itself would go by name."""
    return functools.lru_cache(maxsize, typed)(function)


class Dumped(NamedTuple):
    """A pickle."""

    data: bytes
    names_own_module: bool  # something in it is named from the function's own module, which the worker then needs
    handles: tuple[Handle, ...]  # those that it names, which must stay in use while it is


def dump(function: Any, name: str, *, whole: bool = False) -> Dumped:
    """Pickle a function or class; errors call it `name`.

    `whole`: include what it uses of its own module, so that a worker does not need that module. Raise TypeError, naming
    the variable, if something that it captured can't be pickled.
    """
    try:
        return _dump(function, whole=whole)
    except MisuseError:  # of a handle that can't be sent now: it says why
        raise
    except Exception as error:
        label, culprit, reason = _find_culprit(function, error)
        if isinstance(culprit, StaysHere):
            where = f"its variable {label!r} is" if label else "it is"
            raise TypeError(
                f"{name} can't be sent to the workers: {where} {describe(culprit)}, which {culprit.why}"
            ) from error
        where = f"its variable {label!r} is {describe(culprit)}, which" if label else "it"
        raise TypeError(
            f"{name} can't be sent to the workers: {where} can't be pickled ({reason}). "
            f"Make it inside the function, or pass plain data, arrays or handles"
        ) from error


def _dump(function: Any, *, whole: bool = False) -> Dumped:
    file = io.BytesIO()
    file.write(_PYTHON)
    with _registry:
        pickler = _Pickler(file, module_name_of(function), whole=whole)
        try:
            pickler.dump(function)
        finally:
            pickler.restore()
    return Dumped(file.getvalue(), pickler.names_own_module, tuple(pickler.handles))


def module_name_of(function: Any) -> str:
    """Return the name of the module that a function or another callable comes from."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__self__
        elif isinstance(function, types.FunctionType | type):
            return function.__module__ or ""
        else:
            return type(function).__module__


def load(data: bytes | memoryview, resolve_handle: HandleResolver) -> Any:
    """Return what `dump` pickled. Errors of the imports and classes that it names come through unchanged.

    Raise MisuseError, without reading it, where pickles are off; UnresolvedReference if it is for another Python.
    """
    chosen_policy().check_pickle()
    view = memoryview(data)
    if view[: len(_PYTHON)] != _PYTHON:
        written_for = bytes(view[:40]).partition(b"\n")[0].decode("ascii", "replace")
        raise UnresolvedReference(
            f"it was pickled for {written_for!r} and this worker runs {sys.implementation.cache_tag!r}: "
            f"run coordinator and workers with the same minor version of Python"
        )
    return _Unpickler(io.BytesIO(view[len(_PYTHON) :]), resolve_handle).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, resolve_handle: HandleResolver) -> None:
        super().__init__(file)
        self._resolve_handle = resolve_handle

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case (str(tag), str(kind), str(key)) if tag == _HANDLE:
                return self._resolve_handle(kind, key)
        raise pickle.UnpicklingError(f"there are no objects {pid!r} here")


def largest_captured(function: Any) -> tuple[str, Any, int]:
    """Find the largest thing that a function brings with it: its name as the user would write it, itself, its bytes."""
    label, culprit, size, obj = "", None, 0, function
    for _ in range(6):
        sizes = [(_size_of(item), step, item) for step, item in _parts(obj)]
        largest = max(sizes, key=lambda entry: entry[0], default=(0, "", None))
        if largest[0] == 0 or 2 * largest[0] < size:  # it holds many small things
            break
        size, step, obj = largest
        label, culprit = _joined(label, step), obj
        if _own_size(obj):
            break
    return label.lstrip("."), culprit, size


def _joined(label: str, step: str) -> str:
    return label + step if step[0] in ".[" else step


def _own_size(obj: Any) -> int:
    size: Any = 0
    with contextlib.suppress(Exception):  # a property of the user's
        size = len(obj) if isinstance(obj, str | bytes | bytearray) else getattr(obj, "nbytes", 0)
    return size if isinstance(size, int) and not isinstance(obj, Handle) else 0


def _size_of(obj: Any, depth: int = 4) -> int:
    """Estimate the bytes of the arrays and texts in an object, from the first items of long containers."""
    if (own := _own_size(obj)) or not depth or isinstance(obj, types.ModuleType | Handle):
        return own
    return sum(_size_of(item, depth - 1) for _, item in itertools.islice(_parts(obj), MAX_ITEMS))


def _find_culprit(obj: Any, error: Exception, label: str = "", depth: int = 6) -> tuple[str, Any, Exception]:
    """Find the innermost part that can't be pickled: its name as the user would write it, itself, and the reason."""
    if depth and not isinstance(obj, StaysHere):
        for step, item in _parts(obj):
            try:
                _dump(item)
            except Exception as cause:
                return _find_culprit(item, cause, _joined(label, step).lstrip("."), depth - 1)
    return label, obj, error


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.FunctionType):
        yield from closure_of(obj).items()
        yield from globals_of(obj).items()
        defaults = obj.__defaults__ or ()
        yield from zip(obj.__code__.co_varnames[: obj.__code__.co_argcount][-len(defaults) :], defaults, strict=False)
        yield from (obj.__kwdefaults__ or {}).items()
    elif isinstance(obj, types.MethodType):
        yield "self", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield from ((f".args[{index}]", argument) for index, argument in enumerate(obj.args))
        yield from ((f".keywords[{name!r}]", argument) for name, argument in obj.keywords.items())
    elif isinstance(obj, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(obj))
    elif isinstance(obj, dict):
        yield from ((f"[{key!r:.40}]", item) for key, item in obj.items())
    elif isinstance(obj, type):
        if obj.__module__ == "__main__" or not is_library(obj.__module__):
            yield from ((f".{name}", attribute) for name, attribute in vars(obj).items() if not name.startswith("__"))
    else:
        yield from ((f".{name}", attribute) for name, attribute in attributes_of(obj).items())
