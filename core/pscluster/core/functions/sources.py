"""Where functions come from: the files of their modules, the globals they use, and the handles among those."""

from __future__ import annotations

import dis
import functools
import hashlib
import itertools
import os
import stat
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pscluster.core.handles import Handle

MAX_ITEMS = 1000  # of a container that are searched. A larger one holds data, not variables
_PACKAGES = frozenset(["site-packages", "dist-packages"])
_READS = frozenset(["LOAD_GLOBAL", "LOAD_NAME"])
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")


@functools.lru_cache(maxsize=4096)
def in_library(path: str) -> bool:
    """Return whether a file is installed, or Python's own, rather than the user's."""
    folders = [os.path.join(os.path.realpath(sysconfig.get_paths()[key]), "") for key in _LIBRARIES]
    path = os.path.realpath(path)
    return path.startswith(tuple(folders)) or not _PACKAGES.isdisjoint(Path(path).parts)


def importer_of(error: ImportError) -> str:
    """Return the installed package that could not import a module, such as Keras its backend; "" if none was it."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        if top not in sys.stdlib_module_names:  # the machinery of imports
            return top if in_library(frame.f_code.co_filename) and top not in ("pscluster", "cloudpickle") else ""
    return ""


def is_library(module_name: str) -> bool:
    """Return whether a module is installed or built in, rather than the user's own source."""
    top = module_name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "pscluster":
        return True
    path = getattr(sys.modules.get(module_name), "__file__", None)
    return isinstance(path, str) and in_library(path)


def _is_record_class(cls: type) -> bool:
    from pscluster.core.values.records import is_record_class  # loads NumPy, which commands for the shell do without

    return is_record_class(cls)


def import_folders() -> list[str]:
    """Return the folders from which this process imports the user's modules, in order."""
    folders = dict.fromkeys(os.path.abspath(folder) for folder in sys.path)  # "" is the current one
    return [folder for folder in folders if not in_library(os.path.join(folder, "__init__.py"))]


def source_of(module: types.ModuleType) -> Path | None:
    """Return the module's source file, or None."""
    path = getattr(module, "__file__", None)
    if isinstance(path, str) and path.endswith(".py") and os.path.isfile(path):
        return Path(path).absolute()
    return None


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. The file is read again only if its time or size has changed."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a device may have no end
        raise OSError(f"{path} is not a file")
    return _digest(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, _modified: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.lru_cache(maxsize=4096)
def globals_read(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, including the functions inside it, looks up as globals."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _READS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= globals_read(constant)
    return frozenset(names)


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the current values of the globals that a function uses."""
    space = function.__globals__
    return {name: space[name] for name in sorted(globals_read(function.__code__)) if name in space}


ABSENT = object()  # no value


def cells_of(function: types.FunctionType) -> list[Any]:
    """Return the values that a function closes over, in order; `ABSENT` for those not yet assigned."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(ABSENT)
    return values


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function uses, except those not yet assigned."""
    cells = zip(function.__code__.co_freevars, cells_of(function), strict=True)
    return {name: value for name, value in cells if value is not ABSENT}


def holds_handle(value: Any, depth: int = 4) -> bool:
    """Return whether a value is a handle, or plain data, a record or an object of the user's that contains one."""
    if isinstance(value, Handle):
        return True
    if depth == 0 or isinstance(value, type | types.ModuleType | types.FunctionType):
        return False
    items: Iterable[Any] = ()
    cls: type = type(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif _is_record_class(cls) or not is_library(cls.__module__):
        items = attributes_of(value).values()
    return any(holds_handle(item, depth - 1) for item in list(itertools.islice(items, MAX_ITEMS)))


def attributes_of(obj: Any) -> dict[str, Any]:
    """Return an object's own attributes; none if it hides them, as proxies do."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except Exception:  # slots, or a property of the user's
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _users_module(name: str) -> types.ModuleType | None:
    """Return an imported module of the user's. None for the script."""
    return None if name == "__main__" or is_library(name) else sys.modules.get(name)


def module_holds_handles(module_name: str) -> bool:
    """Return whether a module of the user's has a handle among its globals. A worker that imports it lacks it."""
    module = _users_module(module_name)
    return module is not None and any(map(holds_handle, list(vars(module).values())))


_sources: dict[str, str] = {}  # by module: its file's digest when something from it was first sent


def was_edited(module_name: str) -> bool:
    """Return whether a module of the user's differs from what workers may have imported: then it goes by value."""
    module = _users_module(module_name)
    path = None if module is None else source_of(module)
    if path is None:
        return False
    try:
        digest = digest_of(path)
    except OSError:  # the file was removed
        return False
    return _sources.setdefault(module_name, digest) != digest


def reached(function: Any) -> Iterator[tuple[types.ModuleType | None, str, Any]]:
    """Yield what a function uses, directly or through the functions and classes of the user's that it reaches.

    For a global: its module, name and value. For anything else, such as closed-over values: (None, "", value).
    """
    yield None, "", function
    todo, seen = [function], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        used = list(_used_by(item))
        yield from used
        todo += [value for _, _, value in used]


def _used_by(item: Any) -> Iterator[tuple[types.ModuleType | None, str, Any]]:
    parts = list(parts_of(item))
    if isinstance(item, types.FunctionType):
        parts += closure_of(item).values()
        yield from _globals_used_by(item)
    elif isinstance(item, type) and not is_library(item.__module__):
        parts += [*vars(item).values(), *item.__bases__]
    yield from ((None, "", part) for part in parts)


def parts_of(item: Any) -> Iterator[Any]:
    """Yield the parts of a method, a partial, a property or a decorator's wrapper."""
    yield attributes_of(item).get("__wrapped__")  # as `functools.wraps` leaves it
    if isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, staticmethod | classmethod):
        yield item.__func__
    elif isinstance(item, property):
        yield from (item.fget, item.fset)


def _globals_used_by(function: types.FunctionType) -> Iterator[tuple[types.ModuleType | None, str, Any]]:
    name = function.__globals__.get("__name__", "")
    if is_library(name):
        return
    home = sys.modules.get(name)
    if home is not None and vars(home) is not function.__globals__:
        home = None  # for example, a notebook's
    for name, value in globals_of(function).items():
        yield home, name, value
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            for attribute in function.__code__.co_names:
                if attribute in vars(value):
                    yield value, attribute, vars(value)[attribute]


def reaches_handle(function: Any) -> bool:
    """Return whether a function reaches a handle, or a module of the user's that has one among its globals."""
    homes = set[str]()
    for _, _, value in reached(function):
        if holds_handle(value):
            return True
        homes.add(_home_of(value))
    return any(map(module_holds_handles, homes))


def reaches_edited(function: Any) -> bool:
    """Return whether a function reaches a module, other than its own, that was edited since it was first sent from.

    A reference carries the digest of the function's own module: a worker that imported another version refuses it.
    """
    own = getattr(function, "__module__", "")
    homes = {_home_of(value) for _, _, value in reached(function)}
    return any(was_edited(home) for home in homes if home != own)


def _home_of(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return value.__module__ if isinstance(value, type) else ""
