"""The short form of `make chaos`: a job under faults of all kinds, with a checker that knows the right numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("durability", "seed"), [("snapshot", 1)])
def test_the_checker_finds_nothing(durability: str, seed: int) -> None:
    """With workers and servers killed, frozen and cut off, and a full disk, only reported losses occur."""
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--short", "--job", "digits"]
    done = subprocess.run(
        [*command, "--durability", durability, "--seed", str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout
    assert "checker: nothing is wrong" in done.stdout
