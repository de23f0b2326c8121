"""What is taken from a function's data before it runs, by `lookups`, and given again to the function.

A source (a per-worker iterator, a part of a distributed dataset) keeps the elements that were peeked at, in order,
until they are given: to the function that `lookups` was called for, or to whichever function takes the next ones. So
nothing is read twice, left out or given in another order, whatever becomes of the function. An error of the source is
raised again, where an element is to be given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pscluster.core.context import FunctionContext, current_function, in_background, on_behalf_of


class Source(Protocol):
    """Data that functions take elements of."""

    def peek(self, ahead: int, check: Callable[[], object]) -> Any:
        """Return the element that is given after `ahead` others from now on. `check` raises if there is no need for it.

        Raise what `next()` would raise for it.
        """


class LookAhead:
    """What one function is to get. For one thread.

    Args:
        function: the function. It ends the wait for an element when it is told to stop.
        neutral: the context in which elements are made: it is never told to stop, as they are also for others.
    """

    def __init__(self, function: FunctionContext, neutral: FunctionContext) -> None:
        self._function, self._neutral = function, neutral
        self._taken: dict[int, int] = {}  # by source
        self.failed = False
        """A source has ended, or raised: it will do so again for the function, if that takes as many elements."""

    def next_of(self, source: Source) -> Any:
        """Return the next element of a source for the function, and leave it there."""
        ahead = self._taken.get(id(source), 0)
        try:
            with on_behalf_of(self._neutral):
                element = source.peek(ahead, self._function.check)
        except BaseException:
            self.failed = True
            raise
        self._taken[id(source)] = ahead + 1
        return element


def look_ahead() -> LookAhead | None:
    """Return the LookAhead of the function that this thread prepares; None if it does not."""
    function = current_function()
    if function is None or function.overlap is None or not in_background():
        return None
    ahead: LookAhead | None = function.overlap.look_ahead
    return ahead
