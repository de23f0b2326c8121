"""How much the benchmark's sides do in a round."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("run")


@pytest.mark.parametrize("quick", [False, True])
def test_every_round_takes_steps(run: Any, quick: bool) -> None:
    """Whole calls, and at least one: also where a call is more steps than the round would have."""
    for row in [*run._synchronous_rows(2), *run._collective_rows(2), *run._loop_rows(), *run._dispatch_rows()]:
        at_once = row.arguments.get("at_once", 1)
        for side in row.sides:
            first, counts = (row.amount(side, quick=quick, counts=counts) for counts in (False, True))
            assert first % at_once == counts % at_once == 0
            assert 0 < first <= counts
            assert quick or counts == row.n[side]
