"""The examples as a user runs them: what they print, and how they end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.roles.processes import run

from pscluster.coordinator import SavedVariables

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

# Fewer steps and examples than by default, of clicks that are easier to predict: it still meets the bound.
QUICK = ("--steps", "200", "--batch-size", "256", "--rows", "300000")
TABLE_BYTES = 300_000 * 8 * 4


def number_in(pattern: str, output: str) -> float:
    """The number in the output that the pattern's group matches."""
    match = re.search(pattern, output)
    assert match is not None, output
    return float(match[1].replace(",", ""))


def run_example(name: str, *arguments: str) -> tuple[int, str]:
    """Run an example on a local cluster of two servers and two workers; return its exit code and output."""
    return run("run", "--ps", "2", "--workers", "2", str(EXAMPLES / name), *arguments)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_embedding(framework: str, tmp_path: Path) -> None:
    """The click model gets below the log-loss that the example promises, and transfers a hundredth of the table per
    step; then it answers requests."""
    if framework == "torch":
        pytest.importorskip("torch")
    code, output = run_example("embedding.py", *QUICK, "--framework", framework, "--checkpoints", str(tmp_path))
    assert code == 0, output
    promised = number_in(r'"--target", type=float, default=([\d.]+)', (EXAMPLES / "embedding.py").read_text())
    reached = number_in(r"log-loss ([\d.]+);", output)
    assert number_in(r"the best possible is ([\d.]+)", output) < reached <= promised
    assert promised < number_in(r"the best of a constant ([\d.]+)", output)
    for verb, whole in (("pulled", "tables"), ("pushed", "gradients")):
        step = number_in(rf"a step {verb} ([\d,]+) bytes", output)
        assert number_in(rf"whole {whole} would be ([\d,]+)", output) == TABLE_BYTES
        assert 0 < step < TABLE_BYTES / 100
    assert re.search(r"table/part_0 .* 4,800,000 ", output), output
    assert re.search(r"table/part_1 .* 4,800,000 ", output), output
    check_answers(tmp_path)


def check_answers(directory: Path) -> None:
    """The trained model answers from its checkpoint, with what it has learned; a bad request gets a reason."""
    saved = SavedVariables(directory)
    ids, x = np.random.default_rng(0).integers(0, 300_000, (3, 26)), np.linspace(-1, 1, 39).reshape(3, 13)
    requests = [
        {"ids": ids.tolist(), "dense": x.tolist()},
        {"ids": ids[0].tolist(), "dense": x[0].tolist()},
        {"ids": [300_000] * 26, "dense": x[0].tolist()},
        {"ids": ids[0].tolist(), "dense": [1.0]},
        {},
        [1],
    ]
    command = [sys.executable, str(EXAMPLES / "serve.py"), str(directory)]
    lines = "".join(f"{json.dumps(request)}\n" for request in requests)
    served = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=60)
    several, one, *wrong = map(json.loads, served.stdout.splitlines())
    logits = saved["table"][ids].sum(axis=1) @ saved["head"] + x @ saved["w"] + saved["b"]
    np.testing.assert_allclose(several["click"], 1 / (1 + np.exp(-logits)), rtol=1e-4)
    assert one == {"click": pytest.approx(several["click"][0]), "version": 1}
    assert [list(each) for each in wrong] == [["error"]] * 4
    assert "row id 300000 (position 0) is out of range" in wrong[0]["error"]
    assert wrong[1]["error"] == "there must be 13 dense features for each list of ids, not [1]"


def test_a_bound_that_is_missed() -> None:
    """A model that does not get below the target says so, and the exit code shows it."""
    code, output = run_example("embedding.py", "--steps", "3", "--rows", "2600")
    assert code == 1
    assert output.splitlines()[-1].startswith("that is more than the 0.42 ")


def test_digits() -> None:
    """After a few steps the classifier has learned, though less than the example promises: the exit code says so.

    That it reaches what it promises is tested from the wheel.
    """
    code, output = run_example("digits.py", "--steps", "50")
    assert code == 1
    assert 0.3 < number_in(r"test accuracy ([\d.]+)", output) < 0.96
    assert output.splitlines()[-1].startswith("that is less than the 0.96 ")
