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


class AwakeTimer:
    """Tells at its checks, some `step` seconds apart, when `seconds` more of this process awake have passed."""

    def __init__(self, seconds: float, step: float) -> None:
        self._seconds, self._step = seconds, step
        self.restart()

    def restart(self) -> None:
        """Begin anew: what is awaited has made progress."""
        self._awake = AwakeTime(self._step)

    def is_due(self) -> bool:
        """Return whether the time has passed since the last time that it had, or `restart`."""
        self._awake.check()
        if self._awake.seconds < self._seconds:
            return False
        self.restart()
        return True
