"""Waits of the user's threads, which Ctrl-C and SIGTERM end, whenever they come.

Python runs a signal's handler on the main thread, between two of its instructions, and a wait is ended for that when
the system ends it. One that comes just before the thread begins to wait, or that the system gives to another thread,
does not: its handler would run when the wait is over, which may be never. So waits are cut into short ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_SECONDS = 0.5


def _in_pieces(wait: Callable[[float], bool], timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    while deadline is None or (left := deadline - time.monotonic()) > _SECONDS:
        if wait(_SECONDS):
            return True
    return wait(max(left, 0.0))


class Condition(threading.Condition):
    """One whose waits a signal ends."""

    def wait(self, timeout: float | None = None) -> bool:
        """As the base's, but for half a second at most: then it returns True, too, and the caller has to look again.

        To wait on would miss what comes as a piece ends: the base takes it for a timeout, before it has the lock again.
        """
        piece = _SECONDS if timeout is None else min(timeout, _SECONDS)
        return super().wait(piece) or timeout is None or timeout > _SECONDS


class Event(threading.Event):
    """One whose waits a signal ends."""

    def wait(self, timeout: float | None = None) -> bool:
        """As the base's."""
        return _in_pieces(super().wait, timeout)


def wait_for(future: Future[Any], timeout: float | None = None) -> bool:
    """Until it has ended, whatever it came to, in a wait that a signal ends. False if it has not."""
    ended = Event()
    future.add_done_callback(lambda _: ended.set())
    return ended.wait(timeout)


def result_of(future: Future[T], timeout: float | None = None) -> T:
    """What it comes to, in a wait that a signal ends. Raises what it raised; TimeoutError."""
    if not wait_for(future, timeout):
        raise TimeoutError(f"not done within {timeout:g} s")
    return future.result()
