"""How tests wait: for a condition, with a limit. Imports nothing of the project, since step functions pickle it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 90.0
"""Seconds to wait for something that takes less than one on an idle machine."""


def until(
    predicate: Callable[[], object], condition: str, state: Callable[[], object] = lambda: "", timeout: float = TIMEOUT
) -> None:
    """Wait until the predicate holds; fail after `timeout` seconds, showing the state."""
    begin = time.monotonic()
    while not predicate():
        waited = time.monotonic() - begin
        assert waited < timeout, f"waited in vain until {condition}: {state()}"
        time.sleep(min(0.002 + waited / 50, 0.5))  # poll less often as the wait gets longer


def write_whole(path: Path | str, content: object) -> None:
    """Write a file that others wait for: as soon as it is there, all of its text is."""
    draft = Path(path).with_name(f".{Path(path).name}-{os.getpid()}")
    draft.write_text(str(content))
    draft.replace(path)
