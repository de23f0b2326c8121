"""What the top level of a file defines, read without running it."""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Import:
    module: str
    name: str | None  # None: the module itself

    def value(self) -> Any:
        module = sys.modules.get(self.module)
        if self.name is None:
            return module
        return getattr(module, self.name, sys.modules.get(f"{self.module}.{self.name}"))


@dataclass(frozen=True)
class _Literal:
    value: Any


_Binding = _Import | _Literal | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None


@dataclass
class TopLevel:
    """What an import of a file gives, thus without what is under `if __name__ == "__main__":`, its guard."""

    digest: str  # SHA-256, hex
    codes: frozenset[types.CodeType]  # of all functions in the file
    bindings: dict[str, _Binding] = field(default_factory=dict)  # by global; None for computed values
    only_defines: bool = True  # it does nothing but import, define, and assign literals
    guarded: bool = False  # it has a guard
    has_star: bool = False  # it has a star import

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
            case ast.If(test=ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")])):
                self.guarded = True
                for other in node.orelse:
                    self.only_defines = False
                    self.read(other)
            case _:
                self.only_defines = False
                self.has_star |= isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
                bindings.update(dict.fromkeys(_bound_by(node)))

    def has(self, name: str, value: Any) -> bool | None:
        """Return whether a process that imports the file has this value of a global. None: the file does not tell."""
        if name not in self.bindings:
            return None if self.has_star else False
        match self.bindings[name]:
            case _Import() as origin:
                imported = origin.value()
                return None if imported is None else imported is value
            case _Literal(written):
                return _same(written, value)
            case ast.FunctionDef(decorator_list=[]) as node:
                return self._has_function(node, value)
            case _:
                return None

    def _has_function(self, node: ast.FunctionDef, value: Any) -> bool | None:
        if not (isinstance(value, types.FunctionType) and node.name == value.__name__ == value.__code__.co_name):
            return False
        if value.__dict__:
            return None
        try:
            defaults = tuple(map(ast.literal_eval, node.args.defaults))
            keywords = {
                argument.arg: ast.literal_eval(default)
                for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                if default is not None
            }
        except ValueError:
            return None
        as_written = _same(defaults, value.__defaults__ or ()) and _same(keywords, value.__kwdefaults__ or {})
        return as_written and (value.__code__ in self.codes or None)  # None: the file was edited since


def _same(written: Any, value: Any) -> bool:
    """Return whether both are equal, and of equal types throughout: 1, 1.0 and True differ."""
    return type(written) is type(value) and repr(written) == repr(value)


def _literal_of(node: ast.Assign | ast.AnnAssign) -> _Literal | None:
    """Return the literal that the node assigns to plain names, if it does."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if node.value is None or not all(isinstance(target, ast.Name) for target in targets):
        return None
    try:
        return _Literal(ast.literal_eval(node.value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _bound_by(node: ast.stmt) -> Iterator[str]:
    code = compile(ast.Module([node], []), "", "exec", dont_inherit=True)
    return (op.argval for op in dis.get_instructions(code) if op.opname in ("STORE_NAME", "STORE_GLOBAL"))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)


@functools.lru_cache(maxsize=64)
def read_top_level(path: Path, digest: str) -> TopLevel:
    """Read a file without running it. OSError, SyntaxError or ValueError if it can't be read, or was changed."""
    source = path.read_bytes()
    if hashlib.sha256(source).hexdigest() != digest:
        raise ValueError("it was changed")
    code = compile(source, str(path), "exec", dont_inherit=True)
    top = TopLevel(digest, frozenset(_codes_in(code)))
    for node in ast.parse(source).body:
        top.read(node)
    return top
