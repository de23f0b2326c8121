"""What `make check` says of circular imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).resolve().parents[2] / "scripts" / "check_imports.py"


def checked(folder: Path, modules: dict[str, str]) -> tuple[int, str]:
    """Exit code and output for a package of these modules."""
    package = folder / "planted"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(CHECK), "planted"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_a_planted_circle(tmp_path: Path) -> None:
    """A circle of three modules is found and described, though an import is for types and another in a function."""
    code, output = checked(
        tmp_path,
        {
            "one": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from planted import two\n",
            "two": "def late():\n    from planted.three import one\n",
            "three": "import planted.one as one\n",
            "beside": "import planted.one\n",
        },
    )
    assert code == 1
    assert "3 modules import each other in a circle" in output
    for line in (
        "planted.one:4 imports planted.two",
        "planted.two:2 imports planted.three",
        "planted.three:1 imports planted.one",
    ):
        assert line in output
    assert "beside" not in output


def test_two_modules_may_import_each_other(tmp_path: Path) -> None:
    """Two modules may, since they are read together."""
    code, output = checked(tmp_path, {"one": "import planted.two\n", "two": "import planted.one\n"})
    assert code == 0
    assert "0 circles" in output
