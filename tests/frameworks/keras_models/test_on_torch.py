"""What depends on Keras' backend, on torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

NAMES = (
    "one_process or drop or saves or nested or in_a_step_is or sum or rows or whole or step_shows or in_fit or best "
    "or not_see"
)


@pytest.mark.timeout(600)  # some twenty tests in a process of their own, each with the limit of any test
@pytest.mark.skipif(keras.config.backend() != "jax", reason="this is it")
def test_what_depends_on_the_backend_also_holds_on_torch() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", NAMES]
    command.append(os.fspath(Path(__file__).parent))
    done = subprocess.run(command, env=os.environ | {"KERAS_BACKEND": "torch"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
