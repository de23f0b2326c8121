"""Functions by value: cloudpickle, with handles by name. Where pickles are off, nothing here makes or reads one.

A pickle starts with a line that names the Python it is for: code of another minor version must not be loaded.

Which classes and functions go into a pickle whole, and which only by name: those of `__main__` and of modules
that were registered with `cloudpickle.register_pickle_by_value` go whole, as always with cloudpickle. So does
what comes from a module of the user's that has a handle among its globals, since a worker that imported it
would not have that handle. We use cloudpickle's documented registry for that, under a lock, rather than its
reducers, which are its own business and have changed.
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
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # ships neither stubs nor py.typed

from pscluster.core.functions.loading import UnresolvedReference
from pscluster.core.functions.policy import chosen_policy
from pscluster.core.functions.sources import (
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
_PYTHON = f"{sys.implementation.cache_tag}\n".encode()
_registry = threading.RLock()

_LOOK_AT = 1000  # parts of a container: there are few large ones, or very many small ones


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped, as above
    """Handles go by name, modules that hold some are taken apart. Use under `_registry`, then `restore`."""

    def __init__(self, file: io.BytesIO, own_module: str, *, whole: bool) -> None:
        super().__init__(file, protocol=5)
        self._own_module = own_module
        self._registered: list[types.ModuleType] = []
        self._met: set[str] = set()
        self.names_own_module = False
        self.handles: list[Handle] = []
        if whole and not (is_library(own_module) and hasattr(sys.modules.get(own_module), "__path__")):
            self._take_apart(own_module)

    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not isinstance(obj, Handle):
            return None
        self.handles.append(obj)
        return (_HANDLE, obj.handle_kind, obj.handle_key)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and obj in self._registered:
            return importlib.import_module, (obj.__name__,)  # the module itself stays a name
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
                self._take_apart(module_name)
        if module_name == self._own_module and "<" not in qualname and not _is_registered(module_name):
            self.names_own_module = True

    def _by_name(self, obj: Any) -> bool:
        module_name, qualname = str(obj.__module__), obj.__qualname__
        self._meet(module_name, qualname)
        return module_name != "__main__" and "<" not in qualname and not _is_registered(module_name)

    def _take_apart(self, module_name: str) -> None:
        module = sys.modules.get(module_name)
        if module is not None and module_name != "__main__" and not _is_registered(module_name):
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)

    def restore(self) -> None:
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)
        self._registered.clear()


def _is_registered(module_name: str) -> bool:
    registered: set[str] = cloudpickle.list_registry_pickle_by_value()
    return any(f"{module_name}.".startswith(f"{name}.") for name in registered)


def _cached_again(function: Any, maxsize: int | None, typed: bool) -> Any:
    """What `functools.lru_cache` made of a function; by itself it would go by name."""
    return functools.lru_cache(maxsize, typed)(function)


@dataclass(frozen=True, slots=True)
class Dumped:
    """A pickle and what is to be known of it.

    Attributes:
        data: the pickle.
        names_own_module: it names something of the function's own module, which the worker must have then.
        handles: those that it names, which must not go out of use while it is in use.
    """

    data: bytes
    names_own_module: bool
    handles: tuple[Handle, ...]


def dump(function: Any, name: str, *, whole: bool = False) -> Dumped:
    """The pickle of a function or class.

    Args:
        function: or class.
        name: for people.
        whole: what it uses of its own module goes along, so that a worker needs not have that module.

    Raises:
        TypeError: something it captured can't be pickled. The message names the variable.
    """
    try:
        return _dump(function, whole=whole)
    except Exception as error:
        label, culprit, reason = _blame(function, error)
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
    """The module that a function, or whatever else is callable, comes from."""
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
    """What `dump` dumped.

    Raises:
        MisuseError: pickles are off here. It was not looked at.
        UnresolvedReference: it is for another Python. Whatever the imports and classes that it names raise
            comes through as it is.
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
    """What takes most of what a function brings with it: its name as the user would write it, itself, and its bytes."""
    label, found, size, obj = "", None, 0, function
    for _ in range(6):
        sizes = [(_size_of(part), step, part) for step, part in _parts(obj)]
        largest = max(sizes, key=lambda each: each[0], default=(0, "", None))
        if largest[0] == 0 or 2 * largest[0] < size:  # what is in it is many small things
            break
        size, step, obj = largest
        label, found = (step if step[0] not in ".[" else label + step), obj
        if _own_size(obj):
            break
    return label.lstrip("."), found, size


def _own_size(obj: Any) -> int:
    size: Any = 0
    with contextlib.suppress(Exception):  # a property of the user's
        size = len(obj) if isinstance(obj, str | bytes | bytearray) else getattr(obj, "nbytes", 0)
    return size if isinstance(size, int) and not isinstance(obj, Handle) else 0


def _size_of(obj: Any, depth: int = 4) -> int:
    """Bytes of the arrays and texts in something, about: of the first of many."""
    if (own := _own_size(obj)) or not depth or isinstance(obj, types.ModuleType | Handle):
        return own
    return sum(_size_of(part, depth - 1) for _, part in itertools.islice(_parts(obj), _LOOK_AT))


def _blame(obj: Any, error: Exception, label: str = "", depth: int = 6) -> tuple[str, Any, Exception]:
    """The innermost part that can't be pickled: its name as the user would write it, itself, and why not."""
    if depth and not isinstance(obj, StaysHere):
        for step, part in _parts(obj):
            try:
                _dump(part)
            except Exception as cause:
                whole = step if step[0] not in ".[" else label + step
                return _blame(part, cause, whole.lstrip("."), depth - 1)
    return label, obj, error


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.FunctionType):
        yield from closure_of(obj).items()
        yield from globals_of(obj).items()
        for number, default in enumerate(obj.__defaults__ or ()):
            names = obj.__code__.co_varnames[: obj.__code__.co_argcount]
            yield names[number - len(obj.__defaults__ or ())], default
        yield from (obj.__kwdefaults__ or {}).items()
    elif isinstance(obj, types.MethodType):
        yield "self", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield from ((f".args[{number}]", argument) for number, argument in enumerate(obj.args))
        yield from ((f".keywords[{name!r}]", argument) for name, argument in obj.keywords.items())
    elif isinstance(obj, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(obj))
    elif isinstance(obj, dict):
        yield from ((f"[{key!r:.40}]", item) for key, item in obj.items())
    elif isinstance(obj, type):
        if obj.__module__ == "__main__" or not is_library(obj.__module__):
            yield from ((f".{name}", part) for name, part in vars(obj).items() if not name.startswith("__"))
    else:
        yield from ((f".{name}", part) for name, part in attributes_of(obj).items())
