"""What `make check` does with pip-audit's answers, given by a stand-in, since the real one needs a database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).resolve().parents[2] / "scripts" / "audit.py"
UNKNOWN = {"name": "grpcio", "skip_reason": "Dependency not found"}
FINE = {"name": "numpy", "version": "2.0", "vulns": []}
WEAK = {"name": "pyyaml", "version": "5.1", "vulns": [{"id": "CVE-1", "fix_versions": ["5.4"]}]}


def audited(folder: Path, probe: str, all_of_them: str) -> tuple[int, str]:
    """Exit code and output if pip-audit answers this for one package, and for all."""
    package = folder / "pip_audit"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import sys\nprint({probe!r} if '--no-deps' in sys.argv else {all_of_them!r})\n"
    )
    done = subprocess.run(
        [sys.executable, str(AUDIT)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def answer(*dependencies: dict[str, Any]) -> str:
    """The answer of pip-audit."""
    return json.dumps({"dependencies": dependencies, "fixes": []})


@pytest.mark.parametrize(
    ("probe", "all_of_them", "code", "says"),
    [
        (answer(FINE), answer(FINE, UNKNOWN), 0, "pip-audit: 1 packages, 0 known vulnerabilities; 1 are unknown there"),
        (answer(FINE), answer(FINE, WEAK), 1, "pyyaml 5.1: CVE-1; fixed in: 5.4"),
        (answer(UNKNOWN), answer(WEAK), 0, "WARNING: advisories unreachable: NOT CHECKED"),
        ("Traceback: no network", "", 0, "WARNING: advisories unreachable: NOT CHECKED"),
    ],
    ids=["fine", "weak", "unknown", "unreachable"],
)
def test_answers(tmp_path: Path, probe: str, all_of_them: str, code: int, says: str) -> None:
    """A known vulnerability is a failure; an unreachable database is a warning."""
    result = audited(tmp_path, probe, all_of_them)
    assert result[0] == code
    assert says in result[1]
