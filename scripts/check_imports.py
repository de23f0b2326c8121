"""Fail if more than two modules import each other in a circle, including imports for types and in functions.

`make check` runs this for the whole repository; other packages can be given.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import grimp

MOST = 2
"""The number of modules that may import each other: they are read together."""

ROOT = Path(__file__).resolve().parent.parent
BESIDE = "benchmarks", "examples", "scripts", "tests"


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return the modules of each circle that is too large, by name."""
    components = {
        frozenset({module} | graph.find_downstream_modules(module) & graph.find_upstream_modules(module))
        for module in graph.modules
    }
    return sorted(sorted(circle) for circle in components if len(circle) > MOST)


def described(graph: grimp.ImportGraph, circle: list[str]) -> str:
    """Return a text that says which module imports which others of the circle, and in which lines."""
    lines = [f"{len(circle)} modules import each other in a circle:"]
    for importer in circle:
        for imported in sorted(graph.find_modules_directly_imported_by(importer) & {*circle}):
            details = graph.get_import_details(importer=importer, imported=imported)
            numbers = ",".join(str(detail["line_number"]) for detail in details)
            lines.append(f"    {importer}:{numbers} imports {imported}")
    return "\n".join(lines)


def main(packages: list[str]) -> int:
    """Return 1 if there is such a circle."""
    if not packages:
        sys.path.insert(0, str(ROOT))
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
        packages = [*settings["tool"]["importlinter"]["root_packages"], *BESIDE]
    graph = grimp.build_graph(*packages, cache_dir=None)
    too_large = circles(graph)
    for circle in too_large:
        print(described(graph, circle), file=sys.stderr)
    print(f"imports: {len(graph.modules)} modules, {len(too_large)} circles of more than {MOST}")
    return bool(too_large)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
