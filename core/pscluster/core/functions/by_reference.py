"""Functions by reference: by name, with the digest of the file that defines them, which the receiver must have, too.

Where pickles may travel, a function goes so only if it does at the other end what it does here; all else goes by value.
A script is not a module that can be imported: on the coordinator it is `__main__`, and to run it once more would run
the program. So its functions go by reference only if its top level does nothing but define: imports, functions,
classes, literals, and the part under `if __name__ == "__main__":`. Its classes never do, nor functions that use one:
a class that came both ways would be two classes on the worker, and `isinstance` would say no.

Where pickles are off, everything goes by reference. A function is what a file defines at its top level; a
`functools.partial` of one has its arguments beside it, as data and handles, with functions and classes by name in them.
Globals are what the receiver's own import of the file makes of them: a function that uses others is refused.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pscluster.core.functions.sources import (
    digest_of,
    globals_of,
    holds_handle,
    import_folders,
    is_library,
    reached,
    reaches_handle,
    source_of,
)
from pscluster.core.handles import Handle, StaysHere
from pscluster.core.values import describe, encode_call
from pscluster.core.values.encoding import UnsendableError
from pscluster.core.values.records import is_record_class
from pscluster.v1 import definition_pb2, value_pb2

MAIN = "__main__"

INNER = "definition"
"""The kind of the handles that stand for functions and classes among the arguments of a partial."""

_AS_VALUES = (Handle, StaysHere, enum.Enum, str, bytes, int, float, complex, list, tuple, dict, set, frozenset)


class NotByReferenceError(TypeError):
    """This can't be sent by reference. The message says what, why and what to do."""


# What a file says


@dataclass(frozen=True)
class _Import:
    module: str
    name: str | None  # None: the module itself

    def value(self) -> Any:
        found = sys.modules.get(self.module)
        if self.name is None:
            return found
        return getattr(found, self.name, sys.modules.get(f"{self.module}.{self.name}"))


@dataclass(frozen=True)
class _Literal:
    value: Any


_Binding = _Import | _Literal | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None


@dataclass
class _TopLevel:
    """What whoever imports a file gets: what is under `if __name__ == "__main__":` is not part of it.

    Attributes:
        digest: SHA-256, hex.
        codes: of all functions in the file.
        bindings: by global; None for what is computed.
        only_defines: it does nothing but import, define, and assign literals.
        guarded: whether it has a part under that line.
        has_star: whether it imports names that it does not name.
    """

    digest: str
    codes: frozenset[types.CodeType]
    bindings: dict[str, _Binding] = field(default_factory=dict)
    only_defines: bool = True
    guarded: bool = False
    has_star: bool = False

    def read(self, node: ast.stmt) -> None:
        bindings = self.bindings
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name if alias.asname else alias.name.partition(".")[0]
                    bindings[alias.asname or top] = _Import(top, None)
            case ast.ImportFrom(module=str() as origin, level=0):
                self.has_star |= node.names[0].name == "*"
                for alias in node.names:
                    bindings[alias.asname or alias.name] = _Import(origin, alias.name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bindings[node.name] = node
            case ast.Expr(value=ast.Constant()) | ast.AnnAssign(target=ast.Name(), value=None):
                pass
            case ast.Assign() | ast.AnnAssign() if (literal := _literal_of(node)) is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    assert isinstance(target, ast.Name), "see _literal_of"
                    bindings[target.id] = literal
            case ast.If() if _is_main_guard(node.test):
                self.guarded = True
                for other in node.orelse:
                    self.only_defines = False
                    self.read(other)
            case _:
                self.only_defines = False
                self.has_star |= isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
                bindings.update(dict.fromkeys(_bound_in(node)))

    def has_code_of(self, function: types.FunctionType) -> bool:
        """Is the function's code still what the file says? It is not if the file was edited since, for one."""
        return function.__code__ in self.codes

    def makes_another(self, name: str, value: Any) -> bool:
        """Has whoever imports the file another value of this global, or none?"""
        if name not in self.bindings:
            return not self.has_star
        match self.bindings[name]:
            case _Import() as origin:
                found = origin.value()
                return found is not None and found is not value
            case _Literal(written):
                return not _same(written, value)
            case ast.FunctionDef(decorator_list=[]):
                return not isinstance(value, types.FunctionType) or value.__name__ != name
            case _:
                return False

    def vouches_for(self, function: Any) -> bool:
        """Would the function, if the file were loaded elsewhere, do there what it does here?"""
        todo, seen = [function], set[Any]()
        while todo:
            function = todo.pop()
            if function in seen:
                continue
            seen.add(function)
            if not isinstance(function, types.FunctionType) or not self._as_written(function):
                return False
            for name, value in globals_of(function).items():
                match self.bindings.get(name):
                    case _Import() as origin if value is not None and origin.value() is value:
                        continue
                    case _Literal(written) if _same(written, value):
                        continue
                    case ast.FunctionDef() if getattr(value, "__name__", "") == name:
                        todo.append(value)
                    case _:
                        return False
        return True

    def _as_written(self, function: types.FunctionType) -> bool:
        node = self.bindings.get(function.__name__)
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or function.__dict__:
            return False
        if function.__code__.co_name != function.__name__ or not self.has_code_of(function):
            return False
        try:
            defaults = tuple(ast.literal_eval(default) for default in node.args.defaults)
            keywords = {
                argument.arg: ast.literal_eval(default)
                for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                if default is not None
            }
        except ValueError:
            return False
        return _same(defaults, function.__defaults__ or ()) and _same(keywords, function.__kwdefaults__ or {})


def _same(written: Any, value: Any) -> bool:
    """Equal and of equal types all through: 1, 1.0 and True differ."""
    return type(written) is type(value) and repr(written) == repr(value)


def _literal_of(node: ast.Assign | ast.AnnAssign) -> _Literal | None:
    """What it assigns to plain names, if that is a literal."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if node.value is None or not all(isinstance(target, ast.Name) for target in targets):
        return None
    try:
        return _Literal(ast.literal_eval(node.value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _bound_in(node: ast.AST) -> Iterator[str]:
    """The names that a statement may bind."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
            return
        case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.ExceptHandler(name=str() as name):
            yield name
    for child in ast.iter_child_nodes(node):
        yield from _bound_in(child)


def _is_main_guard(test: ast.expr) -> bool:
    """Is this `__name__ == "__main__"`?"""
    match test:
        case ast.Compare(left=ast.Name("__name__"), ops=[ast.Eq()], comparators=[ast.Constant("__main__")]):
            return True
        case _:
            return False


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)


def _top_level(path: Path) -> _TopLevel:
    """Read a file, without running anything of it.

    Raises:
        OSError, SyntaxError, ValueError: it is not there, is no Python, or changes right now.
    """
    return _read(path, digest_of(path))


@functools.lru_cache(maxsize=64)
def _read(path: Path, digest: str) -> _TopLevel:
    source = path.read_bytes()
    if hashlib.sha256(source).hexdigest() != digest:
        raise ValueError(f"{path} was changed")
    code = compile(source, str(path), "exec", dont_inherit=True)
    top = _TopLevel(digest, frozenset(_codes_in(code)))
    for node in ast.parse(source).body:
        top.read(node)
    return top


# Beside pickles


def reference_to(function: Any) -> definition_pb2.Definition | None:
    """The function by reference; None if at the other end that may be something else."""
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
    """The script's file and digest, if the function, of `__main__`, may go by reference to it."""
    main = sys.modules.get(MAIN)
    path = getattr(main, "__file__", None)
    if main is None or not isinstance(path, str) or main.__spec__ is not None:
        return None  # a notebook; or run by `python -m`, and part of a package, perhaps
    if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(main):
        return None
    if vars(main).get(function.__qualname__) != function:
        return None
    file = Path(path).absolute()
    try:
        top = _top_level(file)
    except (OSError, SyntaxError, ValueError):  # an archive, a notebook's cell, compiled code
        return None
    return (file, top.digest) if top.only_defines and top.vouches_for(function) else None


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
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    # A bound method is a new object every time it is looked up.
    return found is function or (isinstance(found, types.MethodType | types.BuiltinMethodType) and found == function)


def _as_written(function: Any, path: Path) -> bool:
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or Path(function.__code__.co_filename).absolute() != path:
        return True  # a class, a decorator's wrapper: nothing to compare
    try:
        return _top_level(path).has_code_of(function)
    except (OSError, SyntaxError, ValueError):
        return False


# Without pickles


class WithoutPickle:
    """A function, a class, or a partial of one, as it travels without a pickle.

    Attributes:
        definition: to be sent.
        handles: those among its arguments.

    Raises:
        NotByReferenceError: it can't be sent so.
    """

    def __init__(self, function: Any) -> None:
        self.handles: list[Handle] = []
        self._attachments: list[memoryview] = []
        self.definition = form = self._defined(function)
        if form.HasField("arguments"):
            form.sizes.extend(map(len, self._attachments))
            form.arrays = b"".join(self._attachments)
            form.digest = hashlib.sha256(form.SerializeToString(deterministic=True)).hexdigest()

    def _defined(self, function: Any) -> definition_pb2.Definition:
        if not isinstance(function, functools.partial):
            return _named(function)
        args, keywords = function.args, function.keywords
        while isinstance(inner := function.func, functools.partial):
            args, keywords, function = inner.args + args, inner.keywords | keywords, inner
        form = _named(inner)
        self._put_arguments(form, args, keywords)
        return form

    def _put_arguments(self, form: definition_pb2.Definition, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        places: dict[int, tuple[str, Any]] = {}  # by id, for as long as the object is there

        def place_of(found: Any) -> str:
            if id(found) not in places:
                try:
                    inner = self._defined(found)
                except NotByReferenceError as error:
                    raise UnsendableError(f"can't be sent: {error}") from None
                inner.ClearField("folders")  # the whole one has them
                places[id(found)] = str(len(form.inner)), found
                form.inner.append(inner)
            return places[id(found)][0]

        def named(leaf: Any, _attachments: object) -> value_pb2.Value | None:
            if isinstance(leaf, functools.partial) or _has_name(leaf):
                value = value_pb2.Value()
                value.handle.kind, value.handle.key = INNER, place_of(leaf)
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
                define=place_of,
                into=form.arguments,
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
        raise NotByReferenceError(f"it is {describe(function)}, and no function of a file: write one that makes it")
    if "<" in qualname:
        raise NotByReferenceError(_move_it(function, qualname))
    module = sys.modules.get(module_name)
    if module is None or not _is_found(function, module, qualname):
        raise NotByReferenceError(f"{qualname} is not what the module {module_name} has by that name: put it there")
    path = None if is_library(module_name) else source_of(module)
    if module_name == MAIN and (path is None or module.__spec__ is not None):
        raise NotByReferenceError(
            "what is in __main__ has no file that the receiver could have: put it into a script that is started as a "
            "file, or into a module"
        )
    if path is None:
        return _definition(module_name, qualname, None, "")
    top = _file_of(module, path)
    if top.makes_another(qualname.partition(".")[0], getattr(module, qualname.partition(".")[0])):
        raise NotByReferenceError(f"{path.name} does not define {qualname} at its top level: move it there")
    if not _as_written(function, path):
        raise NotByReferenceError(
            f"the code of {qualname} is not in {path}: the file was changed since it was loaded, or `exec` has made "
            "it. Start the script again, or write the function at the top level of the file"
        )
    _check_globals(function)
    return _definition(module_name, qualname, path, top.digest)


def _move_it(function: Any, qualname: str) -> str:
    code = getattr(function, "__code__", None)
    outer, _, name = qualname.rpartition(".<locals>.")
    file = "its file" if code is None else Path(code.co_filename).name
    where = f"it is defined inside {outer}(): move it to the top level of {file}"
    if name == "<lambda>":
        where = f"it is a lambda: write it as a function at the top level of {file}"
    if code is None or not code.co_freevars:
        return where
    return f"{where} and pass what it captures ({', '.join(code.co_freevars)}) as arguments, say with functools.partial"


def _file_of(module: types.ModuleType, path: Path) -> _TopLevel:
    try:
        top = _top_level(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise NotByReferenceError(f"{path} can't be read: {error}") from None
    if module.__name__ == MAIN and not top.guarded:
        raise NotByReferenceError(
            f'{path.name} has no `if __name__ == "__main__":`, and to take a function from it a worker has to import '
            "it: put what the script does under that line"
        )
    return top


def _check_globals(function: Any) -> None:
    """Refuse a function whose globals whoever imports its file does not have."""
    for module, name, value in reached(function):
        path = None if module is None or name.startswith("__") else source_of(module)
        if module is None or path is None:
            continue
        if holds_handle(value):
            raise NotByReferenceError(
                f"it uses the global {name!r} of {path.name}, {describe(value)}, which is or holds a handle, and a "
                "worker that imports the file does not have it: pass it as an argument"
            )
        if _file_of(module, path).makes_another(name, value):
            raise NotByReferenceError(
                f"it uses the global {name!r} of {path.name}, which was set under the main guard, or changed since, "
                "and a worker that imports the file does not have that value: pass it as an argument"
            )


def _has_name(leaf: Any) -> bool:
    """Is it a function or a class, or what a decorator such as `functools.cache` has made of one?"""
    return callable(leaf) and all(isinstance(getattr(leaf, name, None), str) for name in ("__module__", "__qualname__"))


def _is_users_object(leaf: Any) -> bool:
    """Is it of a class of the user's, and none that travels as data?"""
    if isinstance(leaf, (*_AS_VALUES, np.ndarray, np.generic)) or is_record_class(type(leaf)):
        return False
    return not is_library(type(leaf).__module__) and not hasattr(leaf, "__array__")
