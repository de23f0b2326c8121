"""The short form of `make soak`: everything that its job does, once under faults, and its picture."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.growth import COLUMNS, Sample, lives_of, read_samples, row_of

ROOT = Path(__file__).resolve().parent.parent.parent
SOAK = [sys.executable, str(ROOT / "benchmarks" / "soak.py")]
TURNS = 10


def soak(*arguments: str) -> tuple[int, str]:
    """Its exit code and output."""
    done = subprocess.run([*SOAK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    return done.returncode, done.stdout


@pytest.mark.timeout(300)
def test_the_job_under_faults(tmp_path: Path) -> None:
    """Every part of it is done while workers and servers die, and all processes are sampled; nothing is judged."""
    samples = tmp_path / "deep" / "samples.csv"
    arguments = ["--turns", str(TURNS), "--every", "0.5", "--worker-every", "2", "--ps-every", "3"]
    code, said = soak(*arguments, "--csv", str(samples))
    assert code == 0, said
    assert "verdict: none" in said, said
    account = next(line for line in said.splitlines() if "processes killed" in line)
    counts = {kind: int(n.replace(",", "")) for n, kind in re.findall(r"([\d,]+) ([a-z ]+)", account)}
    assert counts["turns"] == counts["large updates"] == TURNS, said
    assert counts["new functions"] == 20 * TURNS, said
    assert counts["errors"] == counts["variables"] == TURNS // 4, said
    assert counts["datasets"] == TURNS // 5, said
    assert counts["health checks"] > 0, said
    assert counts.get("checkpoints", 0) + counts.get("checkpoints failed", 0) == TURNS // 8, said
    assert counts["processes killed"] > 0, said
    lives = lives_of(read_samples(samples))
    assert sorted(lives) == ["cluster", "coordinator", "ps 0", "ps 1", "worker 0", "worker 1", "worker 2"]
    for role in ("cluster", "coordinator", "ps 0", "worker 0"):
        assert len(lives[role]) == 1, said
    for role in ("coordinator", "ps 0", "worker 0"):
        seen = lives[role][0].samples  # the last one may be from a process that has closed its connections
        for measure in ("resident", "private", "descriptors", "threads", "sockets"):
            assert max(getattr(sample, measure) for sample in seen) > 1, (role, measure)
    assert max(sample.disk for sample in lives["ps 0"][0].samples) > 1


@pytest.mark.parametrize("hourly", [0.0, 60.0], ids=["nothing grows", "memory grows"])
def test_samples_that_were_taken_before(tmp_path: Path, hourly: float) -> None:
    """They are judged and drawn; the exit code is the verdict's."""
    path, picture = tmp_path / "samples.csv", tmp_path / "soak.png"
    series = [
        Sample(t, "ps 0", 7, 100 + hourly * t / 3600, 80.0, 40, 20, 9, 1.0) for t in map(float, range(0, 3600, 9))
    ]
    path.write_text("\n".join([",".join(COLUMNS), *map(row_of, series)]))
    drawn = () if hourly else ("--png", str(picture))
    code, said = soak("--judge", str(path), *drawn)
    assert code == (1 if hourly else 0), said
    assert ("ps 0: resident from" in said) == bool(hourly), said
    if not drawn:
        return
    if importlib.util.find_spec("matplotlib") is None:
        assert "no picture" in said
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 150_000
