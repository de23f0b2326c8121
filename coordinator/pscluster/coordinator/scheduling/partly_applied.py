"""Functions that ended for good with an error, or were cancelled, and may have applied a part of their updates.

What they applied stays, and is in every checkpoint from then on, until one is restored. The last ones are named.
"""

from __future__ import annotations

from collections import deque

MAX_NAMED = 1000
_MAX_TEXT = 300


class PartlyApplied:
    """Those of a job, since it began or a checkpoint was restored. Its owner serialises the calls."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[str] = deque(maxlen=MAX_NAMED)

    def add(self, function: str, why: str) -> None:
        """One that ended so."""
        line = why.partition("\n")[0]
        self.count += 1
        self._last.append((line if line.startswith(function) else f"{function}: {line}")[:_MAX_TEXT])

    def clear(self) -> None:
        """A checkpoint was restored: nothing of them is left."""
        self.count = 0
        self._last.clear()

    @property
    def last(self) -> list[str]:
        """The last ones: each function's name, and how it ended."""
        return list(self._last)
