"""What a source file says: the code in it, and how its top level comes by each of its globals.

Read from the file alone, nothing is run. What stands under `if __name__ == "__main__":` is not there for whoever
imports the file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pscluster.core.functions.sources import digest_of

Origin = Literal["import", "function", "definition", "literal", "computed"]


@dataclass(frozen=True, slots=True)
class Binding:
    """How the top level comes by a global.

    Attributes:
        origin: "function" for one that is just defined; "definition" for classes, and functions with decorators or in
            an `if`; "computed" for all that is none of the others.
        value: of a literal; of an import the module and the name in it, or None for the module itself, where they are
            known.
    """

    origin: Origin
    value: Any = None


@dataclass(frozen=True)
class SourceFile:
    """A file as it was read.

    Attributes:
        path: absolute.
        digest: SHA-256, hex.
        bindings: by global; those that only the guarded part makes are missing.
        guarded: whether there is such a part.
        has_star: whether it imports names that it does not name.
        imports: all over the file, inside of functions too: a name, and the module that it may be then, where it is
            one; as it is written, relative ones with their dots.
    """

    path: Path
    digest: str
    bindings: dict[str, Binding]
    guarded: bool
    has_star: bool
    imports: frozenset[tuple[str, str]]
    codes: tuple[types.CodeType, ...]

    def place_of(self, code: types.CodeType) -> tuple[int, int] | None:
        """The line of a function's code, and which it is of those with its name there. None: it is not in the file."""
        alike = self.at(code.co_name, code.co_firstlineno)
        return (code.co_firstlineno, alike.index(code)) if code in alike else None

    def at(self, name: str, line: int) -> list[types.CodeType]:
        """The codes of that name that begin in that line."""
        return [code for code in self.codes if (code.co_name, code.co_firstlineno) == (name, line)]


def read_source(path: Path, digest: str = "") -> SourceFile:
    """The file as it is now; or as it was when it had this digest, if it was read then, or has it now.

    Raises:
        OSError, SyntaxError, ValueError: it is not there, or is no Python.
    """
    return _read(path, digest or digest_of(path))


@functools.lru_cache(maxsize=64)
def _read(path: Path, digest: str) -> SourceFile:
    source = path.read_bytes()
    if hashlib.sha256(source).hexdigest() != digest:
        raise ValueError(f"{path} was changed")
    tree = ast.parse(source)
    code = compile(source, str(path), "exec", dont_inherit=True)
    reading = _Reading()
    reading.go_through(tree.body)
    return SourceFile(
        path,
        digest,
        reading.bindings,
        reading.guarded,
        reading.has_star,
        frozenset(_imports_in(tree)),
        tuple(codes_in(code)),
    )


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The functions' codes inside of this, in order, with those inside of them."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_in(constant)


def _imports_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name if alias.asname else alias.name.partition(".")[0]
                    yield alias.asname or top, top
            case ast.ImportFrom():
                package = "." * node.level + (f"{node.module}." if node.module else "")
                for alias in node.names:
                    yield alias.asname or alias.name, package + alias.name


class _Reading:
    """Goes through the top level."""

    def __init__(self) -> None:
        self.bindings: dict[str, Binding] = {}
        self.guarded = False
        self.has_star = False

    def _bind(self, name: str, binding: Binding) -> None:
        if name in self.bindings and self.bindings[name].origin != binding.origin:
            binding = Binding("computed")  # which it is depends
        elif name in self.bindings and binding.origin in ("literal", "function", "import"):
            binding = Binding("computed")
        self.bindings[name] = binding

    def go_through(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Import():
                    for alias in node.names:
                        top = alias.name if alias.asname else alias.name.partition(".")[0]
                        self._bind(alias.asname or top, Binding("import", (top, None)))
                case ast.ImportFrom():
                    for alias in node.names:
                        self.has_star |= alias.name == "*"
                        origin = (node.module, alias.name) if node.level == 0 else None
                        self._bind(alias.asname or alias.name, Binding("import", origin))
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._bind(node.name, Binding("definition" if node.decorator_list else "function"))
                case ast.ClassDef():
                    self._bind(node.name, Binding("definition"))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._bind(name, _assigned(value))
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    if value is not None:
                        self._bind(name, _assigned(value))
                case ast.If() if is_main_guard(node.test):
                    self.guarded = True
                    self.go_through(node.orelse)
                case _:
                    self._bind_all(node)

    def _bind_all(self, node: ast.AST) -> None:
        """Of a compound statement, whose names may be bound or not: functions and classes inside of it keep theirs."""
        for name, binding in _bound_in(node):
            self._bind(name, binding)


def _bound_in(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name, Binding("definition")
            return
        case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], Binding("import")
            return
        case ast.Name(ctx=ast.Store()):
            yield node.id, Binding("computed")
        case ast.ExceptHandler(name=str() as name):
            yield name, Binding("computed")
    for child in ast.iter_child_nodes(node):
        yield from _bound_in(child)


def _assigned(value: ast.expr) -> Binding:
    try:
        return Binding("literal", ast.literal_eval(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Binding("computed")


def is_main_guard(test: ast.expr) -> bool:
    """Is this `__name__ == "__main__"`?"""
    match test:
        case ast.Compare(left=ast.Name("__name__"), ops=[ast.Eq()], comparators=[ast.Constant("__main__")]):
            return True
        case _:
            return False
