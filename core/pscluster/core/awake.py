"""Time that this process was awake for: what it may hold against others.

A process that was stopped itself (frozen, swapped out, its machine suspended) has not been waiting. What came meanwhile
lies there unread, so by the clock everybody else has been silent.
"""

from __future__ import annotations

import time


class AwakeTime:
    """Counted in looks: one counts for twice the time that was to pass since the one before, at most.

    Args:
        step: seconds that are to pass between two looks.
    """

    def __init__(self, step: float) -> None:
        self.step = step
        self.seconds = 0.0
        self._last = time.monotonic()

    def look(self) -> float:
        """Seconds since the last look, which count from now on."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * self.step), now
        self.seconds += passed
        return passed
