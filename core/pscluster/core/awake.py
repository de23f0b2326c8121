"""Time for which this process was awake: all that it may count as silence of others.

A process that was itself stopped (frozen, swapped out, its machine suspended) was not waiting. Messages that came in
the meantime are still unread, so by the clock every peer seems to have been silent.
"""

from __future__ import annotations

import time


class AwakeTime:
    """Adds up the time between checks, each counting for at most twice the `step` seconds intended."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.seconds = 0.0
        self._last = time.monotonic()

    def check(self) -> float:
        """Count and return the seconds since the last check."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * self.step), now
        self.seconds += passed
        return passed
