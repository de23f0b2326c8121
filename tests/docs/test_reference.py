"""The reference of the API in docs/reference: that it is whole, and that each docstring says what it must.

The site itself is built by `make docs`, with MkDocs, which reports references and links that are broken.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pscluster import coordinator

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "pscluster.coordinator",
    *(f"pscluster.coordinator.{name}" for name in ("callbacks", "errors", "features", "initializers")),
    *("pscluster.coordinator.metrics", "pscluster.coordinator.optimizers"),
    *("pscluster.launch", "pscluster.spmd", "pscluster.spmd.metrics", "pscluster.spmd.optimizers"),
    *("pscluster.spmd.random", "pscluster.torch", "pscluster.jax", "pscluster.keras"),
)
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
# What a docstring of a function does not begin with: a verb in the imperative is none of these, and has no s added.
NO_VERBS = {"A", "All", "An", "Any", "Each", "How", "If", "It", "Its", "Such", "The", "This", "What", "Whether"}
VERBS_IN_S = {"Access", "Express", "Pass", "Press", "Process"}


def found(path: str) -> Any:
    """Return what a dotted name means: a module, or something in one."""
    parts = path.split(".")
    if parts[:2] == ["pscluster", "coordinator"]:  # its modules are attributes, not all of them files of the package
        value: Any = coordinator
        rest = parts[2:]
    else:
        for at in range(len(parts), 0, -1):
            try:
                value, rest = importlib.import_module(".".join(parts[:at])), parts[at:]
                break
            except ModuleNotFoundError:
                continue
    for name in rest:
        value = getattr(value, name)
    return value


def public_names(path: str) -> dict[str, Any]:
    """Return what a module offers: `__all__` or, without it, its own classes and functions, or those it collects."""
    module = found(path)
    if hasattr(module, "__all__"):
        names = [name for name in module.__all__ if name[0] != "_"]
    else:
        names = [name for name in dir(module) if name[0] != "_"]
    values = {name: getattr(module, name) for name in names}
    if hasattr(module, "__all__"):
        return values
    collects = hasattr(module, "__path__")  # a package; errors are shown with all others
    return {
        name: value
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value) or (collects and isinstance(value, str)))
        and (collects or value.__module__ == module.__name__)
        and (isinstance(value, str) or value.__module__.startswith("pscluster."))
        and not (inspect.isclass(value) and value.__module__ == "pscluster.core.errors")
    }


def documented(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a public function or class and, of a class, its own public methods, with their names."""
    yield getattr(value, "__qualname__", str(value)), value
    if inspect.isclass(value):
        for name, member in vars(value).items():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if name[0] != "_" and isinstance(member, types.FunctionType) and member.__name__ != "<lambda>":
                yield f"{value.__qualname__}.{name}", member


def shown() -> set[str]:
    """Return the names that the reference shows."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {name for page in pages for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("path", MODULES)
def test_every_public_name_is_in_the_reference(path: str) -> None:
    """Each has an entry, unless its whole module is shown."""
    entries = shown()
    assert path in entries or not {f"{path}.{name}" for name in public_names(path)} - entries


def test_the_reference_shows_nothing_else() -> None:
    """All that it shows exists; MkDocs fails only once the site is built."""
    assert [name for name in sorted(shown()) if found(name) is None] == []


def begins_with_a_verb(docstring: str) -> bool:
    """Tell whether a docstring's first word can be an imperative."""
    word = re.match(r"[A-Z][a-z]+(?:-[a-z]+)?(?=[\s,.:;(])", docstring)
    if word is None or word[0] in NO_VERBS:
        return False
    return word[0] in VERBS_IN_S or re.search("[^s]s$", word[0]) is None


@pytest.mark.parametrize("path", MODULES)
def test_docstrings(path: str) -> None:
    """All public names have one, and so do methods; that of a function begins with a verb."""
    if path == "pscluster.torch":
        pytest.importorskip("torch", reason="its modules import it; tests of frameworks check it")
    missing, without_verb = [], []
    for value in public_names(path).values():
        for name, member in documented(value):
            text = inspect.getdoc(member)
            if not isinstance(member, (type, types.FunctionType)):
                continue
            if not text:
                missing.append(name)
            elif isinstance(member, types.FunctionType) and not begins_with_a_verb(text):
                without_verb.append(f"{name}: {text.splitlines()[0]}")
    assert (missing, without_verb) == ([], [])


@pytest.mark.parametrize("text", ["The sum.", "A sum.", "Returns it.", "Whether it is", "return it"])
def test_what_begins_with_no_verb(text: str) -> None:
    """Nouns, articles and the third person are found."""
    assert not begins_with_a_verb(text)
    assert begins_with_a_verb("Return the sum.")
