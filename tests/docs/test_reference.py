"""The reference of the API in docs/reference: that it is whole, and that each docstring says what it must.

The site itself is built by `make docs`, with MkDocs, which reports references and links that are broken.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscluster import coordinator, launch
from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "pscluster.coordinator",
    *(f"pscluster.coordinator.{name}" for name in ("callbacks", "errors", "features", "initializers")),
    *("pscluster.coordinator.metrics", "pscluster.coordinator.optimizers"),
    *("pscluster.launch", "pscluster.spmd", "pscluster.spmd.metrics", "pscluster.spmd.optimizers"),
    "pscluster.spmd.random",
)
FRAMEWORKS = ("torch", "jax", "keras")  # not installed here, so that their modules are read, not imported
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


def documented(value: Any, *, inherited: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a public function or class and, of a class, its public methods, with their names."""
    yield getattr(value, "__qualname__", str(value)), value
    for base in value.__mro__ if inspect.isclass(value) else ():
        if not base.__module__.startswith("pscluster.") or (base is not value and not inherited):
            continue
        for name, member in vars(base).items():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if name[0] != "_" and isinstance(member, types.FunctionType) and member.__name__ != "<lambda>":
                yield f"{base.__qualname__}.{name}", member


def shown() -> set[str]:
    """Return the names that the reference shows."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {name for page in pages for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("path", MODULES)
def test_every_public_name_is_in_the_reference(path: str) -> None:
    """Each has an entry on one of its pages."""
    assert sorted({f"{path}.{name}" for name in public_names(path)} - shown()) == []


def test_the_reference_shows_nothing_else() -> None:
    """All that it shows exists; MkDocs fails only once the site is built."""
    assert [name for name in sorted(shown()) if found(name) is None] == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_modules_of_frameworks(framework: str) -> None:
    """The reference shows the whole module, and all that it offers has docstrings, which begin with a verb."""
    assert f"pscluster.{framework}" in shown()
    folder = ROOT / "adapters" / "pscluster" / framework
    wrong = []
    for home, name in homes(folder / "__init__.py"):
        path = folder.joinpath(*home.split(".")[2:]).with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        (node,) = [node for node in tree.body if isinstance(node, (ast.ClassDef, *functions)) and node.name == name]
        members = [member for member in getattr(node, "body", []) if isinstance(node, ast.ClassDef)]
        for member in [node, *(member for member in members if isinstance(member, functions))]:
            text, decorators = ast.get_docstring(member), [ast.unparse(each) for each in member.decorator_list]
            if member.name.startswith("_") or any("property" in each or "setter" in each for each in decorators):
                continue
            if not text or (isinstance(member, functions) and not begins_with_a_verb(text)):
                wrong.append(f"{name}.{member.name}: {text}")
    assert wrong == []


def homes(init: Path) -> list[tuple[str, str]]:
    """Return the modules of the public names that a package takes from its own modules, and these names."""
    tree = ast.parse(init.read_text(encoding="utf-8"))
    package = f"pscluster.{init.parent.name}."
    return [
        (node.module or "", alias.asname or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package)
        for alias in node.names
        if not alias.name.startswith("_")
    ]


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


def examples() -> dict[str, doctest.DocTest]:
    """Return the examples in the docstrings of all public names, and of their methods, by name."""
    parser, found_ones = doctest.DocTestParser(), {}
    for path in MODULES:
        for value in public_names(path).values():
            for name, member in documented(value, inherited=True):
                text = getattr(member, "__doc__", None) or ""
                if ">>>" in text:
                    found_ones[name] = parser.get_doctest(inspect.cleandoc(text), {}, name, path, 0)
    return found_ones


EXAMPLES = examples()
MOST_USED = (
    *("Variable", "EmbeddingTable", "IndexedSlices", "embedding_lookup", "embedding_bag", "Optimizer.apply_gradients"),
    *("ParameterServerStrategy", "ClusterCoordinator", "LocalCluster", "RemoteValue", "CheckpointManager", "Trainer"),
    *(f"FunctionQueue.{name}" for name in ("schedule", "join", "done", "fetch")),
    *("DataQueue.create_per_worker_dataset", "DataQueue.distribute_dataset"),
    *("EvaluationQueue.evaluate", "ClusterCoordinator.fit"),
    *("SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "Ftrl", "Adadelta", "Lion"),
)


def test_what_is_used_most_has_examples() -> None:
    """They are there; each is run below."""
    assert [name for name in MOST_USED if name not in EXAMPLES] == []


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What examples find: every name of the API, a cluster with a strategy and a coordinator, and a folder."""
    found_ones = {name: getattr(coordinator, name) for name in coordinator.__all__}
    for name in ("callbacks", "errors", "initializers", "metrics", "optimizers"):
        found_ones[name] = getattr(coordinator, name)
    with (
        LocalCluster(num_ps=2, num_workers=2, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, job_name="examples") as strategy,
    ):
        found_ones |= {"cluster": cluster, "strategy": strategy, "coordinator": ClusterCoordinator(strategy)}
        folder = str(tmp_path_factory.mktemp("examples"))
        yield {**found_ones, "__name__": "__main__", "folder": folder, "launch": launch, "np": np, "os": os}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, names: dict[str, Any]) -> None:
    """It does what it shows."""
    example = EXAMPLES[name]
    example.globs = dict(names)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
    assert result.failed == 0, "".join(report)
