"""The guides to JAX and Keras, whose blocks run as those of other documents do; and their examples, as a user runs
them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.docs import test_docs
from tests.roles.processes import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Keras' own conversions of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("name", ["docs/jax.md", "docs/keras.md"])
def test_what_a_guide_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if "keras" not in sys.modules:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    test_docs.test_what_a_document_shows(name, tmp_path, monkeypatch)


def test_the_digits_of_jax() -> None:
    code, output = run("run", "--ps", "2", "--workers", "2", str(EXAMPLES / "jax_digits.py"), JAX_PLATFORMS="cpu")
    assert code == 0, output
    assert re.search(r"test accuracy 0\.9", output), output


def test_the_digits_of_keras(tmp_path: Path) -> None:
    example, path = str(EXAMPLES / "keras_digits.py"), tmp_path / "digits.keras"
    code, output = run("run", "--ps", "2", "--workers", "2", example, str(path), KERAS_BACKEND="torch")
    assert code == 0, output
    assert re.search(r"test accuracy 0\.[89]", output), output
    assert path.exists()
