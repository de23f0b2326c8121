"""Work in two phases: begun now, finished later, on the same thread or another.

A generator function does such work: it yields once, when it has begun, and returns the result. What it yields says
whether anything is under way by then: False if all is yet to be done, and takes as long as it takes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")

Phases = Generator[bool, None, T]


def run(phases: Phases[T]) -> T:
    """Do the work at once, and return the result."""
    return Begun(phases).finish()


class Begun(Generic[T]):
    """Work that has begun. Exactly one thread calls `finish` or `close`, once."""

    def __init__(self, phases: Phases[T]) -> None:
        """Begin the work. Raise what that raises."""
        self._phases = phases
        self.is_under_way = next(phases)

    def finish(self) -> T:
        """Return the result once the work is done. Raise what it raises."""
        try:
            next(self._phases)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("the work has more than two phases")

    def close(self) -> None:
        """Give the work up."""
        self._phases.close()
