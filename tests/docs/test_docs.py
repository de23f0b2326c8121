"""The user documents on a real cluster: their Python blocks run, and say what comes out.

Blocks of a document share a namespace, in order. The first one makes `cluster`, `strategy` and `coordinator`.
What they show is compared:

    expression  # -> text            str() of its value, ignoring whitespace
    statement   # raises Error       it ends with exactly this error
    statement   # raises Error: a ... b    whose message contains a followed by b

A block followed by "prints" and an indented text prints that text with its last statement.
Tables with the header `| call | error | message |` are compared too: each call runs in `strategy.scope()`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.conftest import is_gone

from pscluster.coordinator import LocalCluster, ParameterServerStrategy, errors

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("variables", "optimizers", "checkpoints", "datasets", "training", "workers", "collectives", "observability"),
    *("dashboard", "synchronous", "trainer", "spmd", "serving", "threads_and_gpus", "features"),
    *("asynchrony",),
    *("from_tensorflow",),
    *("notebook",),
)
DOCUMENTS = [f"docs/{name}.md" for name in NAMES]
TABLE = "| call | error | message |"

RESULT = re.compile(r"# -> (.+)$")
RAISES = re.compile(r"# raises (\w+)(?:: (.+))?$", re.MULTILINE)


class Statement(NamedTuple):
    """A statement of a document, the result or error that the document shows for it, and its place."""

    node: ast.stmt
    line: int
    result: str | None = None
    error: str | None = None
    message: str = ""
    in_scope: bool = False
    prints: str = ""


def statements(text: str) -> Iterator[Statement]:
    """The statements of a document's Python blocks and tables of errors, in order."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if lines[at] == "```python":
            end = lines.index("```", at)
            *most, last = _of_block(lines[at + 1 : end], at + 1)
            yield from most
            yield last._replace(prints=_printed(lines[end + 1 :]))
            at = end
        elif lines[at] == TABLE:
            at += 2
            while at < len(lines) and lines[at].startswith("|"):
                yield _of_row(lines[at], at + 1)
                at += 1
        at += 1


def _printed(following: list[str]) -> str:
    if [*following, "", ""][1] != "prints":
        return ""
    return "\n".join(itertools.takewhile(lambda line: line.startswith("    "), following[3:]))


def _of_block(lines: list[str], above: int) -> Iterator[Statement]:
    for node in ast.parse("\n".join(lines)).body:
        assert node.end_lineno is not None
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        ast.increment_lineno(node, above)  # tracebacks name the document's line
        result, raises = RESULT.search(source), RAISES.search(source)
        if result:
            yield Statement(node, node.lineno, result=result[1])
        elif raises:
            yield Statement(node, node.lineno, error=raises[1], message=raises[2] or "")
        else:
            yield Statement(node, node.lineno)


def _of_row(row: str, line: int) -> Statement:
    call, error, message = (cell.strip() for cell in row.strip("|").split(" | "))
    (node,) = ast.parse(call.strip("`")).body
    ast.increment_lineno(node, line - 1)
    return Statement(node, line, error=error.strip("`"), message=message, in_scope=True)


def flat(value: object) -> str:
    """The text of a value, on one line."""
    return " ".join(str(value).split())


class _Noting(ast.NodeTransformer):
    """Has the left side of every `<` and `>` noted, so that a failure tells how far from its limit a value was."""

    def visit(self, node: ast.AST) -> Any:
        """Leave what is in a scope of its own, and may be sent to a worker."""
        return node if isinstance(node, ast.Lambda | ast.GeneratorExp | ast.ListComp) else super().visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        if isinstance(node.ops[0], ast.Lt | ast.Gt):
            arguments: list[ast.expr] = [ast.Constant(ast.unparse(node.left)), node.left]
            node.left = ast.Call(ast.Name("_noted", ast.Load()), arguments, [])
        return ast.fix_missing_locations(node)


def execute(statement: Statement, name: str, namespace: dict[str, Any]) -> None:
    """Run a statement, and check that its result is what the document says."""
    node, where = statement.node, f"{name}:{statement.line}"
    with contextlib.ExitStack() as stack:
        if statement.in_scope and "strategy" in namespace:
            stack.enter_context(namespace["strategy"].scope())
        if statement.result is not None:
            assert isinstance(node, ast.Expr), f"{where}: only an expression has a result"
            compared: dict[str, Any] = {}
            expression = _Noting().visit(ast.Expression(node.value))
            noted = {"_noted": lambda text, value: compared.update({text: value}) or value}
            value = eval(compile(expression, name, "eval", dont_inherit=True), namespace, noted)
            assert flat(value) == flat(statement.result), f"{where} {compared or ''}"
            return
        code = compile(ast.Module([node], []), name, "exec", dont_inherit=True)
        if statement.error is None:
            output = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            exec(code, namespace)
            assert not statement.prints or flat(output.getvalue()) == flat(statement.prints), where
            return
        kind: type[Exception] = getattr(errors, statement.error, None) or getattr(builtins, statement.error)
        with pytest.raises(kind) as caught:
            exec(code, namespace)
    assert caught.type is kind, f"{where}: a {caught.type.__name__}, which is more special"
    said, pattern = flat(caught.value), ".*".join(re.escape(piece.strip()) for piece in statement.message.split("..."))
    assert re.search(pattern, said), f"{where}: {said}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that it shows can be run, gives what it says, and leaves nothing. Paths are relative to `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for `pscluster`
    namespace: dict[str, Any] = {"__name__": "__main__"}  # a script's: its functions and classes are sent by value
    shown = list(statements((ROOT / name).read_text(encoding="utf-8")))
    assert [s for s in shown if s.error], "no error is shown"
    pids: list[int] = []
    try:
        for statement in shown:
            execute(statement, name, namespace)
    finally:
        for strategy in [value for value in namespace.values() if isinstance(value, ParameterServerStrategy)]:
            strategy.close()
            if isinstance(cluster := strategy.cluster_resolver, LocalCluster):
                namespace[f"cluster of {id(strategy)}"] = cluster
        for cluster in [value for value in namespace.values() if isinstance(value, LocalCluster)]:
            pids += cluster.pids.values()
            cluster.stop()
    assert pids or name == "docs/trainer.md", "what it starts ends by itself"
    assert all(map(is_gone, pids))


WRONG = [
    ("1 + 1  # -> 3", AssertionError),
    ("x = 1  # -> 1", AssertionError),
    ("1 + 1  # raises ValueError", pytest.fail.Exception),
    ("int('a')  # raises ValueError: some other message", AssertionError),
    ("[][0]  # raises LookupError", AssertionError),
    ("[][0]", IndexError),
    ("print(1)\n```\n\nprints\n\n    2", AssertionError),
]


def test_what_was_compared_is_told() -> None:
    (statement,) = statements("```python\nmax(losses) < 0.1, 2 > 1  # -> (True, True)\n```\n")
    with pytest.raises(AssertionError, match=r"a document:2 \{'max\(losses\)': 0\.3, '2': 2\}"):
        execute(statement, "a document", {"losses": [0.2, 0.3]})


@pytest.mark.parametrize(("line", "error"), WRONG, ids=[line for line, _ in WRONG])
def test_what_does_not_hold_is_found(line: str, error: type[BaseException]) -> None:
    """The test of the documents fails if what they show is not true."""
    (statement,) = statements(f"# Title\n\n```python\n{line}\n```\n")
    assert statement.line == 4
    with pytest.raises(error):
        execute(statement, "a document", {})


OTHERS = [f"docs/{name}.md" for name in ("from_ddp", "guarantees", "jax", "keras", "kubernetes", "pytorch", "security")]


@pytest.mark.parametrize("name", [*DOCUMENTS, *OTHERS])
def test_links_and_lines(name: str) -> None:
    """A document is in the README's list, its links to files are valid, and its lines are not too long."""
    path = ROOT / name
    assert f"({name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > 120] == []
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (path.parent / link).exists()] == []


def test_the_scripts_of_a_move_are_shown_as_they_are() -> None:
    """Every block of docs/from_ddp.md and docs/pytorch.md is in an example, which tests/frameworks runs."""
    for name, examples, count in (
        ("from_ddp", ("digits_ddp.py", "digits_synchronous.py"), 6),
        ("pytorch", ("torch_recommender.py",), 4),
    ):
        scripts = [flat((ROOT / "examples" / example).read_text()) for example in examples]
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
        assert len(blocks) == count
        assert [block for block in blocks if not any(flat(block) in script for script in scripts)] == []


def test_what_is_shown_of_tensorflow_is_python() -> None:
    """The blocks that show its API are not run, since it is not installed; but they can be."""
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "from_tensorflow.md").read_text(), re.DOTALL)
    assert len(blocks) == 8
    assert all(ast.parse(block).body for block in blocks)


def names_in(path: Path) -> set[str]:
    """The names that a module defines at its top level, and in its classes."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, *functions)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, functions)}
    return names


def test_the_map_is_true() -> None:
    """Every file that docs/architecture.md names exists, and defines the name beside it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"`((?:adapters|core|ps|worker|coordinator|launch|spmd)/[\w/]+\.py)`(?:[ ,|]+`([\w.]+)`)?", text)
    assert len(rows) > 40
    missing = []
    for file, name in rows:
        root = file.split("/")[0]
        path = ROOT / root / "pscluster" / file.removeprefix("adapters/")
        if not path.is_file() or (name and name not in names_in(path)):
            missing.append((file, name))
    assert missing == []


def test_the_readme_shows_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The API in twenty lines is a script: it learns the weights that it prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The API in twenty lines")[2]
    match = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    exec(compile(match[1], "README.md", "exec"), {"__name__": "__main__"})
    loss, *weights = re.findall(r"[-+.\de]+", capsys.readouterr().out)
    assert float(loss) < 0.1
    assert [round(float(weight)) for weight in weights] == list(range(8))
