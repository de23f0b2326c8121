"""Where functions come from: the files of their modules, the globals that they use, and handles among those."""

from __future__ import annotations

import dis
import functools
import hashlib
import itertools
import os
import stat
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pscluster.core.handles import Handle

_LOOK_AT = 1000
"""Items of a container that are searched for handles. Whoever captures more has a data set, not variables."""

_PACKAGES = frozenset(["site-packages", "dist-packages"])
_READS = frozenset(["LOAD_GLOBAL", "LOAD_NAME"])
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


@functools.lru_cache(maxsize=4096)
def globals_read(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, functions inside it included, looks up as globals."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname in _READS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= globals_read(constant)
    return frozenset(names)


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function uses, as they are now."""
    found = function.__globals__
    return {name: found[name] for name in sorted(globals_read(function.__code__)) if name in found}


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


def reached(function: Any) -> Iterator[tuple[types.ModuleType | None, str, Any]]:
    """What a function uses, itself or by the functions and classes of the user's that it reaches.

    Of a global its module, its name and its value; of all else, what they close over among it, the value alone.
    """
    yield None, "", function
    todo, seen = [function], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        found = list(_used_by(item))
        yield from found
        todo += [value for _, _, value in found]


def _used_by(item: Any) -> Iterator[tuple[types.ModuleType | None, str, Any]]:
    parts = [attributes_of(item).get("__wrapped__")]  # as `functools.wraps` leaves it
    if isinstance(item, types.MethodType):
        parts += [item.__func__, item.__self__]
    elif isinstance(item, functools.partial):
        parts += [item.func, *item.args, *item.keywords.values()]
    elif isinstance(item, types.FunctionType):
        parts += closure_of(item).values()
        yield from _globals_used_by(item)
    elif isinstance(item, type):
        if not is_library(item.__module__):
            parts += [*vars(item).values(), *item.__bases__]
    elif isinstance(item, staticmethod | classmethod):
        parts.append(item.__func__)
    elif isinstance(item, property):
        parts += [item.fget, item.fset]
    yield from ((None, "", part) for part in parts)


def _globals_used_by(function: types.FunctionType) -> Iterator[tuple[types.ModuleType | None, str, Any]]:
    name = function.__globals__.get("__name__", "")
    if is_library(name):
        return
    home = sys.modules.get(name)
    if home is not None and vars(home) is not function.__globals__:
        home = None  # a notebook's, perhaps
    for name, value in globals_of(function).items():
        yield home, name, value
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            for attribute in function.__code__.co_names:
                if attribute in vars(value):
                    yield value, attribute, vars(value)[attribute]


def reaches_handle(function: Any) -> bool:
    """Does the function reach a handle, or a module of the user's that has one among its globals?"""
    homes = set[str]()
    for _, _, value in reached(function):
        if holds_handle(value):
            return True
        homes.add(_home_of(value))
    return any(map(module_holds_handles, homes))


def reaches_edited(function: Any) -> bool:
    """Does the function reach another module than its own that was edited since something of it was sent?

    Of its own a reference has the digest, so that a worker that has imported another version refuses it.
    """
    own = getattr(function, "__module__", "")
    homes = {_home_of(value) for _, _, value in reached(function)}
    return any(was_edited(home) for home in homes if home != own)


def _home_of(value: Any) -> str:
    """The module of a function or class."""
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return value.__module__ if isinstance(value, type) else ""
