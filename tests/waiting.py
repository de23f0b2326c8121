"""How tests wait: for a condition, with a limit. Imports nothing of ours: step functions take it along to workers."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 90.0
"""Seconds to wait for what comes within one on an idle machine."""


def until(
    predicate: Callable[[], object], what: str, state: Callable[[], object] = lambda: "", patience: float = PATIENCE
) -> None:
    """Wait until the predicate holds; if it does not come to that, say how it is."""
    begin = time.monotonic()
    while not predicate():
        waited = time.monotonic() - begin
        assert waited < patience, f"waited in vain until {what}: {state()}"
        time.sleep(min(0.002 + waited / 50, 0.5))  # what takes long is not asked for all the time
