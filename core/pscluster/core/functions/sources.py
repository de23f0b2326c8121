"""Where functions come from: their modules' files, the globals they use, and handles among those."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import stat
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pscluster.core.values.handles import Handle

_LOOK_AT = 1000
"""Items of a container that are searched for handles. Whoever captures more has a data set, not variables."""

_PACKAGES = frozenset(["site-packages", "dist-packages"])
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")


@functools.lru_cache(maxsize=4096)
def in_library(path: str) -> bool:
    """Is this file installed, or Python's own, rather than the user's?"""
    folders = [os.path.join(os.path.realpath(sysconfig.get_paths()[key]), "") for key in _LIBRARIES]
    path = os.path.realpath(path)
    return path.startswith(tuple(folders)) or not _PACKAGES.isdisjoint(Path(path).parts)


def is_library(module_name: str) -> bool:
    """Is this module one that is installed (or built in), rather than the user's own source?"""
    top = module_name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "pscluster":
        return True
    path = getattr(sys.modules.get(module_name), "__file__", None)
    return isinstance(path, str) and in_library(path)


def import_folders() -> list[str]:
    """The folders that this process imports the user's modules from, in order."""
    folders = dict.fromkeys(os.path.abspath(folder) for folder in sys.path)  # "" is the current one
    return [folder for folder in folders if not in_library(os.path.join(folder, "__init__.py"))]


def source_of(module: types.ModuleType) -> Path | None:
    """The module's source file, where it has one."""
    path = getattr(module, "__file__", None)
    if isinstance(path, str) and path.endswith(".py") and os.path.isfile(path):
        return Path(path).absolute()
    return None


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex. Read again only when the file's time or size is another."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a device may have no end
        raise OSError(f"{path} is no file")
    return _digest(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, _modified: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_in(code: types.CodeType) -> set[str]:
    """What code, functions inside it included, may look up as globals; names of attributes are among them."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function may use, as they are now."""
    found = function.__globals__
    return {name: found[name] for name in sorted(names_in(function.__code__)) if name in found}


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses, those that are set."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def holds_handle(value: Any, depth: int = 4) -> bool:
    """Is this a handle, or plain data or an object of the user's that has one inside?"""
    if isinstance(value, Handle):
        return True
    if depth == 0 or isinstance(value, type | types.ModuleType | types.FunctionType):
        return False
    return any(holds_handle(part, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        parts = iter(value)
    elif isinstance(value, dict):
        parts = iter(value.values())
    elif not is_library(type(value).__module__):
        parts = iter(attributes_of(value).values())
    else:
        return iter(())
    return iter(list(itertools.islice(parts, _LOOK_AT)))


def attributes_of(obj: Any) -> dict[str, Any]:
    """The attributes of an object's own; none if it hides them, as proxies do."""
    try:
        found = object.__getattribute__(obj, "__dict__")
    except Exception:  # slots; or a property of the user's
        return {}
    return found if isinstance(found, dict) else {}


def module_holds_handles(module_name: str) -> bool:
    """Has a module of the user's a handle among its globals? A worker that imported it would not have it."""
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__" or is_library(module_name):
        return False
    return any(holds_handle(value) for value in list(vars(module).values()))


_sources: dict[str, str] = {}  # by module: its file's digest when something of it was sent first


def was_edited(module_name: str) -> bool:
    """Is a module of the user's another one than workers may have imported? Then what is here goes by value."""
    module = sys.modules.get(module_name)
    path = None if module is None or module_name == "__main__" or is_library(module_name) else source_of(module)
    if path is None:
        return False
    try:
        digest = digest_of(path)
    except OSError:  # it is gone
        return False
    return _sources.setdefault(module_name, digest) != digest


def reaches_handle(function: Any) -> bool:
    """Does the function use a global that is a handle, itself or by the user's functions that it calls?"""
    return _reaches(function, module_holds_handles, holds_handle)


def reaches_edited(function: Any) -> bool:
    """Does the function reach another module than its own that was edited since something of it was sent?

    Of its own a reference has the digest, so that a worker that has imported another version refuses it.
    """
    own = getattr(function, "__module__", "")
    return _reaches(function, lambda name: name != own and was_edited(name), lambda _: False)


def _reaches(function: Any, is_module: Callable[[str], bool], is_value: Callable[[Any], bool]) -> bool:
    todo, seen = [function], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        todo.append(attributes_of(item).get("__wrapped__"))  # as `functools.wraps` leaves it
        if isinstance(item, types.MethodType):
            todo += [item.__func__, item.__self__]
        elif isinstance(item, functools.partial):
            todo += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, types.FunctionType):
            module_name = item.__globals__.get("__name__", "")
            if not is_library(module_name):
                if is_module(module_name):
                    return True
                todo += globals_of(item).values()
            todo += closure_of(item).values()
        elif isinstance(item, type):
            if is_module(item.__module__):
                return True
        elif is_value(item):
            return True
    return False
