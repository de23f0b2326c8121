"""The user's script: when its functions may go by reference, and how a worker loads it.

A script is not a module that can be imported: on the coordinator it is `__main__`, and running it once more
would run the program. So its functions go by reference only where its top level does nothing but define:
imports, functions, classes, literals, and the part under `if __name__ == "__main__":`. And only where what a
function uses is still what the file says. Everything else goes by value, which always works.

Its classes always go by value, and so do functions that use one. A class that came both ways would be two
classes on the worker, and `isinstance` would say no.

That is where pickles may travel. Where they are off all of it goes by reference: `pscluster.core.functions.assembling`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pscluster.core.errors import PsClusterError
from pscluster.core.functions.policy import trust
from pscluster.core.functions.source_files import is_main_guard
from pscluster.core.functions.sources import digest_of, globals_of
from pscluster.core.values.records import MODULE_MARK

MAIN = "__main__"


class UnresolvedReference(PsClusterError):  # noqa: N818  (a reply of the worker, not a fault)
    """What a definition names is not here, or is another version: it has to come by value."""


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


_Binding = _Import | _Literal | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class _Script:
    """What a script that only defines says about its globals."""

    digest: str
    bindings: dict[str, _Binding]
    codes: dict[str, types.CodeType]

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
        if function.__code__ != self.codes.get(function.__name__):
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


def script_file(function: Any) -> tuple[Path, str] | None:
    """The script's file and digest, if the function may go by reference to it.

    The function is one of `__main__`, at its top level.
    """
    main = sys.modules.get(MAIN)
    path = getattr(main, "__file__", None)
    if main is None or not isinstance(path, str) or main.__spec__ is not None:
        return None  # a notebook; or run by `python -m`, and part of a package, perhaps
    if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(main):
        return None
    if vars(main).get(function.__qualname__) != function:
        return None
    try:
        file = Path(path).absolute()
        script = _parse(file, digest_of(file))
    except (OSError, SyntaxError, ValueError):  # an archive, a notebook's cell, compiled code
        return None
    return (file, script.digest) if script is not None and script.vouches_for(function) else None


@functools.lru_cache(maxsize=16)
def _parse(file: Path, digest: str) -> _Script | None:
    source = file.read_bytes()
    if hashlib.sha256(source).hexdigest() != digest:
        return None
    bindings: dict[str, _Binding] = {}
    for node in ast.parse(source).body:
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name if alias.asname else alias.name.partition(".")[0]
                    bindings[alias.asname or top] = _Import(top, None)
            case ast.ImportFrom(module=str() as origin, level=0):
                for alias in node.names:
                    bindings[alias.asname or alias.name] = _Import(origin, alias.name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bindings[node.name] = node
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                try:
                    literal = _Literal(ast.literal_eval(node.value)) if node.value is not None else None
                except ValueError:
                    return None
                for target in targets:
                    if not isinstance(target, ast.Name):
                        return None
                    if literal is not None:
                        bindings[target.id] = literal
            case ast.If(orelse=[]) if is_main_guard(node.test):
                pass
            case _:
                return None
    module = compile(source, str(file), "exec", dont_inherit=True)
    codes = {code.co_name: code for code in module.co_consts if isinstance(code, types.CodeType)}
    return _Script(digest, bindings, codes)


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the very bytes that were compared, whatever is on disk by now."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:  # noqa: ARG002  (the interface's)
        return compile(self._source, self.path, "exec", dont_inherit=True)


_scripts: dict[str, types.ModuleType] = {}
_loading = threading.RLock()


def load_script(source_path: str, digest: str) -> types.ModuleType:
    """The script with this digest as a module: from its path, this process' own script, or this role's folders.

    Where pickles are off, from the folders that peers may name files of, only.

    Raises:
        UnresolvedReference: no such file is here, or it can't be loaded.
    """
    with _loading:
        module = _scripts.get(digest)
        if module is None:
            module = _scripts[digest] = _load(_find(source_path, digest), digest)
        return module


def loaded_scripts() -> list[types.ModuleType]:
    """The scripts that were loaded here, the latest first."""
    with _loading:
        return list(_scripts.values())[::-1]


def _find(source_path: str, digest: str) -> Path:
    own = getattr(sys.modules.get(MAIN), "__file__", None)
    candidates = [Path(source_path), Path.cwd() / Path(source_path).name]
    if isinstance(own, str):
        candidates.insert(1, Path(own).absolute())
    candidates = [path for path in [*candidates, *trust().places(source_path)] if trust().owns(path)]
    for path in candidates:
        try:
            if digest_of(path) == digest:
                return path
        except (OSError, ValueError):
            continue
    tried = ", ".join(dict.fromkeys(str(path) for path in candidates)) or "no place: it lies in none of the own folders"
    raise UnresolvedReference(
        f"the script {source_path[:1000]} is not here, or is another version; looked at {tried}. Copy it, as it is "
        "where the coordinator runs, into a folder that the role was given with --functions-from, or is started in"
    )


def _load(path: Path, digest: str) -> types.ModuleType:
    name = f"_pscluster_script_{digest[:12]}"
    try:
        loader = _Loader(name, str(path), path.read_bytes())
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None, "the loader was given"
        module = importlib.util.module_from_spec(spec)
        # As when it is run: modules beside the script are found first.
        if (folder := str(path.parent)) not in sys.path:
            sys.path.insert(0, folder)
        vars(module)[MODULE_MARK] = MAIN
        sys.modules[name] = module
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        reason = f"{type(error).__name__}: {error}"
        raise UnresolvedReference(f"the script {path} can't be loaded here: {reason}") from error
    return module
