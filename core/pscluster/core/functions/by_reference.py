"""Functions by reference: by name, with the digest of the defining file, which the receiver must also have.

Where pickles may travel, a function goes by reference only if it does the same at the other end; all else goes by
value. A script can't be imported: on the coordinator it is `__main__`, and importing it would run the program again. So
its functions go by reference only if its top level does nothing but define: imports, functions, classes, literals, and
what is under `if __name__ == "__main__":`. Its classes never do, nor functions that use one: a class that travelled
both ways would be two classes on the worker, and `isinstance` would fail.

Where pickles are off, everything goes by reference. A function must be defined at the top level of a file; a
`functools.partial` of one carries its arguments beside it, as data and handles, with functions and classes by name.
Globals are whatever the receiver's own import of the file makes of them: a function that uses others is refused.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
from pathlib import Path
from typing import Any

from pscluster.core.functions.sources import (
    digest_of,
    holds_handle,
    import_folders,
    is_library,
    reached,
    reaches_handle,
    source_of,
)
from pscluster.core.functions.top_level import TopLevel, read_top_level
from pscluster.core.handles import Handle, StaysHere
from pscluster.core.values import describe, encode_call
from pscluster.core.values.encoding import UnsendableError
from pscluster.core.values.records import is_record_class
from pscluster.v1 import definition_pb2, value_pb2

MAIN = "__main__"
INNER = "definition"  # the kind of handles that stand for functions and classes among the arguments of a partial
_AS_VALUES = (Handle, StaysHere, enum.Enum, str, bytes, int, float, complex, list, tuple, dict, set, frozenset)


class NotByReferenceError(TypeError):
    """A function can't be sent by reference. The message says which, why and what to do."""


# With pickles


def _top_level(path: Path) -> TopLevel:
    """Read a file without running it. Raise NotByReferenceError if it can't be read, or is just being changed."""
    try:
        return read_top_level(path, digest_of(path))
    except (OSError, SyntaxError, ValueError) as error:  # an archive, a notebook's cell, compiled code
        raise NotByReferenceError(f"{path} can't be read: {error}") from None


def reference_to(function: Any) -> definition_pb2.Definition | None:
    """Return a function by reference; None if the reference might mean something else at the other end."""
    module_name = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str):
        return None
    if module_name == MAIN:
        if (script := _script_of(function)) is None or reaches_handle(function):
            return None
        return _definition(MAIN, qualname, *script)
    module = sys.modules.get(module_name)
    if module is None or not _is_found(function, module, qualname) or reaches_handle(function):
        return None
    path = source_of(module)
    if path is None:
        return _definition(module_name, qualname, None, "")
    if not is_library(module_name) and not _as_written(function, path):
        return None
    return _definition(module_name, qualname, path, digest_of(path))


def _script_of(function: Any) -> tuple[Path, str] | None:
    """Return the script's file and digest, if a function of `__main__` may go by reference to it."""
    main = sys.modules.get(MAIN)
    path = getattr(main, "__file__", None)
    if main is None or not isinstance(path, str) or main.__spec__ is not None or is_library(MAIN):
        return None  # a notebook; or installed, or run by `python -m` and possibly part of a package
    if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(main):
        return None
    if vars(main).get(function.__qualname__) != function:
        return None
    file = Path(path).absolute()
    try:
        top = _top_level(file)
    except NotByReferenceError:
        return None
    if not top.only_defines or not top.has(function.__name__, function):
        return None
    used = ((name, value) for module, name, value in reached(function) if module is main)
    return (file, top.digest) if all(top.has(name, value) for name, value in used) else None


def _definition(module: str, qualname: str, path: Path | None, source_digest: str) -> definition_pb2.Definition:
    named = "\0".join(["reference", module, qualname, source_digest])
    return definition_pb2.Definition(
        digest=hashlib.sha256(named.encode()).hexdigest(),
        module=module,
        qualname=qualname,
        source_path=str(path) if path else "",
        source_digest=source_digest,
        folders=import_folders(),
    )


def _is_found(function: Any, module: types.ModuleType, qualname: str) -> bool:
    named: Any = module
    for name in qualname.split("."):
        named = getattr(named, name, None)
    # A bound method is a new object at every lookup.
    return named is function or (isinstance(named, types.MethodType | types.BuiltinMethodType) and named == function)


def _as_written(function: Any, path: Path) -> bool:
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or Path(function.__code__.co_filename).absolute() != path:
        return True  # a class or a decorator's wrapper: nothing to compare
    try:
        return function.__code__ in _top_level(path).codes
    except NotByReferenceError:
        return False


# Without pickles


class WithoutPickle:
    """The definition of a function, a class, or a partial of one, to send without a pickle.

    `handles` are those among its arguments. Raises NotByReferenceError if it needs a pickle.
    """

    def __init__(self, function: Any) -> None:
        self.handles: list[Handle] = []
        self._attachments: list[memoryview] = []
        self.definition = definition = self._defined(function)
        if definition.HasField("arguments"):
            definition.sizes.extend(map(len, self._attachments))
            definition.arrays = b"".join(self._attachments)
            definition.digest = hashlib.sha256(definition.SerializeToString(deterministic=True)).hexdigest()

    def _defined(self, function: Any) -> definition_pb2.Definition:
        if not isinstance(function, functools.partial):
            return _named(function)
        args, keywords = function.args, function.keywords
        while isinstance(inner := function.func, functools.partial):
            args, keywords, function = inner.args + args, inner.keywords | keywords, inner
        definition = _named(inner)
        self._put_arguments(definition, args, keywords)
        return definition

    def _put_arguments(
        self, definition: definition_pb2.Definition, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        keys: dict[int, tuple[str, Any]] = {}  # by id; the object is there to keep its id from being reused

        def key_of(leaf: Any) -> str:
            if id(leaf) not in keys:
                try:
                    inner = self._defined(leaf)
                except NotByReferenceError as error:
                    raise UnsendableError(f"can't be sent: {error}") from None
                inner.ClearField("folders")  # the outer one has them
                keys[id(leaf)] = str(len(definition.inner)), leaf
                definition.inner.append(inner)
            return keys[id(leaf)][0]

        def named(leaf: Any, _attachments: object) -> value_pb2.Value | None:
            if isinstance(leaf, functools.partial) or _has_name(leaf):
                value = value_pb2.Value()
                value.handle.kind, value.handle.key = INNER, key_of(leaf)
                return value
            if _is_users_object(leaf):
                raise UnsendableError(
                    f"is {describe(leaf)}: without pickles objects travel as data, so make its class a dataclass"
                )
            return None

        try:
            encode_call(
                args,
                keywords,
                attachments=self._attachments,
                remote=named,
                define=key_of,
                into=definition.arguments,
                handles=self.handles,
            )
        except TypeError as error:
            raise NotByReferenceError(f"its argument {error}") from None


def _named(function: Any) -> definition_pb2.Definition:
    module_name, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if isinstance(function, types.MethodType) and not isinstance(function.__self__, type):
        raise NotByReferenceError(
            f"it is a method of {describe(function.__self__)}: write a function that takes the object as an argument"
        )
    if not isinstance(module_name, str) or not isinstance(qualname, str):
        raise NotByReferenceError(
            f"it is {describe(function)}, not a function defined in a file: pass one that creates it"
        )
    if "<" in qualname:
        raise NotByReferenceError(_advice_to_move(function, qualname))
    module = sys.modules.get(module_name)
    if module is None or not _is_found(function, module, qualname):
        raise NotByReferenceError(
            f"module {module_name} has a different {qualname}, or none: define it at its top level"
        )
    path = None if is_library(module_name) else source_of(module)
    if module_name == MAIN and (path is None or module.__spec__ is not None):
        raise NotByReferenceError(
            "it is in __main__, which has no file that the receiver could have: put it into a module, or into a script "
            "that is started as a file"
        )
    if path is None:
        return _definition(module_name, qualname, None, "")
    top, outer = _file_of(module, path), qualname.partition(".")[0]
    if not _as_written(function, path):
        raise NotByReferenceError(
            f"the code of {qualname} is not in {path}: the file was changed since it was loaded, or `exec` made the "
            "function. Start the script again, or write the function at the top level of the file"
        )
    if top.has(outer, getattr(module, outer)) is False:
        raise NotByReferenceError(f"{path.name} has another {qualname} at its top level, or none: define it there")
    _check_globals(function)
    return _definition(module_name, qualname, path, top.digest)


def _advice_to_move(function: Any, qualname: str) -> str:
    code = getattr(function, "__code__", None)
    outer, _, name = qualname.rpartition(".<locals>.")
    file = "its file" if code is None else Path(code.co_filename).name
    where = f"it is defined inside {outer}(): move it to the top level of {file}"
    if name == "<lambda>":
        where = f"it is a lambda: write it as a function at the top level of {file}"
    if code is None or not code.co_freevars:
        return where
    return f"{where} and pass what it captures ({', '.join(code.co_freevars)}) as arguments, say with functools.partial"


def _file_of(module: types.ModuleType, path: Path) -> TopLevel:
    top = _top_level(path)
    if module.__name__ == MAIN and not top.guarded:
        raise NotByReferenceError(
            f'{path.name} has no `if __name__ == "__main__":`, and a worker must import it to take a function from it: '
            "put what the script does under that line"
        )
    return top


def _check_globals(function: Any) -> None:
    """Refuse a function with globals that a process which imports its file does not have."""
    for module, name, value in reached(function):
        path = None if module is None or name.startswith("__") else source_of(module)
        if module is None or path is None:
            continue
        if holds_handle(value):
            raise NotByReferenceError(
                f"it uses the global {name!r} of {path.name}, {describe(value)}, which is or holds a handle, so a "
                "worker that imports the file does not have it: pass it as an argument"
            )
        if _file_of(module, path).has(name, value) is False:
            raise NotByReferenceError(
                f"it uses the global {name!r} of {path.name}, which was set under the main guard, or changed since, so "
                "a worker that imports the file does not have that value: pass it as an argument"
            )


def _has_name(leaf: Any) -> bool:
    """Return whether it is a function or a class, or what a decorator such as `functools.cache` makes of one."""
    return callable(leaf) and all(isinstance(getattr(leaf, name, None), str) for name in ("__module__", "__qualname__"))


def _is_users_object(leaf: Any) -> bool:
    """Return whether it is an instance of a class of the user's that does not travel as data."""
    cls: type = type(leaf)
    if isinstance(leaf, _AS_VALUES) or is_record_class(cls):
        return False
    return not is_library(cls.__module__) and not hasattr(leaf, "__array__")
