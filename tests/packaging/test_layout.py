"""One import name in eight source roots: what keeps them from hiding each other."""

import importlib
import tomllib
import types
from pathlib import Path

import pytest

from pscluster import coordinator

ROOT = Path(__file__).resolve().parent.parent.parent
PORTIONS = {
    "adapters": "pscluster.torch",
    "proto": "pscluster.v1",
    "core": "pscluster.core",
    "ps": "pscluster.ps",
    "worker": "pscluster.worker",
    "coordinator": "pscluster.coordinator",
    "launch": "pscluster.launch",
    "spmd": "pscluster.spmd",
}


@pytest.mark.parametrize("root", PORTIONS)
def test_no_root_hides_the_others(root: str) -> None:
    """A `pscluster/__init__.py` in one root would hide the other seven, and mypy would not say so."""
    assert not (ROOT / root / "pscluster" / "__init__.py").exists()


@pytest.mark.parametrize(("root", "name"), PORTIONS.items())
def test_each_portion_is_typed(root: str, name: str) -> None:
    """Each portion has its own py.typed: type checkers look for it in the portion, not in the namespace."""
    assert ROOT.joinpath(root, *name.split("."), "py.typed").is_file()


@pytest.mark.parametrize(("root", "name"), [item for item in PORTIONS.items() if item[0] != "adapters"])
def test_each_portion_is_alone_in_its_root(root: str, name: str) -> None:
    """A root holds one portion, so that a module's folder shows the direction of its imports."""
    folders = {path.name for path in (ROOT / root / "pscluster").iterdir() if path.name != "__pycache__"}
    assert folders == {name.removeprefix("pscluster.")}


def test_each_framework_has_a_portion() -> None:
    """Each is typed, and can be imported without its framework."""
    folders = {path.name for path in (ROOT / "adapters" / "pscluster").iterdir() if path.name != "__pycache__"}
    assert folders == {"jax", "keras", "torch"}
    assert all((ROOT / "adapters" / "pscluster" / name / "py.typed").is_file() for name in folders)
    for name in folders:
        assert importlib.import_module(f"pscluster.{name}").__name__ == f"pscluster.{name}"


def test_build_knows_every_root() -> None:
    """The wheel and the editable install list the eight roots and no other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(settings["packages"]) == {f"{root}/pscluster" for root in PORTIONS}
    assert set(settings["dev-mode-dirs"]) == set(PORTIONS)


@pytest.mark.parametrize("name", PORTIONS.values())
def test_each_portion_is_imported(name: str) -> None:
    """Every portion is found under the one import name."""
    assert importlib.import_module(name).__name__ == name


def test_a_star_brings_no_modules() -> None:
    """They would replace the script's own `metrics` or `errors`; each can be imported by name."""
    names: dict[str, object] = {}
    exec("from pscluster.coordinator import *", names)
    assert not [name for name, value in names.items() if isinstance(value, types.ModuleType)]
    assert names["LocalCluster"] is coordinator.LocalCluster
    for name in ("callbacks", "errors", "initializers", "metrics", "optimizers", "sources"):
        assert isinstance(getattr(coordinator, name), types.ModuleType)
        assert name in dir(coordinator)
