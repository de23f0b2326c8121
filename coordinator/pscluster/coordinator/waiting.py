"""Waits of the user's threads that Ctrl-C and SIGTERM always interrupt.

Python runs a signal's handler on the main thread, between two of its instructions; a wait is interrupted for it if the
signal interrupts its system call. A signal that comes just before the wait begins, or that the system delivers to
another thread, does not do that: its handler would run when the wait is over, perhaps never. So waits are cut into
short ones.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from typing import Any, TypeVar

from pscluster.core import checks

T = TypeVar("T")

_SECONDS = 0.5


def deadline_of(timeout: float | None) -> float:
    """Return when `timeout` seconds from now are over, on the monotonic clock; None: never. ValueError: no number."""
    if timeout is None:
        return math.inf
    return time.monotonic() + checks.real("timeout", timeout, ", or None", kind="number of seconds", finite=False)


def seconds_left(deadline: float) -> float | None:
    """Return how many seconds are left until then; None if it never comes."""
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)


class Condition(threading.Condition):
    """A condition whose waits signals interrupt."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as the base does, but for half a second at most; then return True as well: the caller checks again.

        Waiting on here could miss a notification at the end of a piece, which the base takes for a timeout before it
        has the lock again.
        """
        piece = _SECONDS if timeout is None else min(timeout, _SECONDS)
        return super().wait(piece) or timeout is None or timeout > _SECONDS


class Event(threading.Event):
    """An event whose waits signals interrupt."""

    def wait(self, timeout: float | None = None) -> bool:
        deadline = deadline_of(timeout)
        while (left := deadline - time.monotonic()) > _SECONDS:
            if super().wait(_SECONDS):
                return True
        return super().wait(max(left, 0.0))


def wait_for(future: Future[Any], timeout: float | None = None) -> bool:
    """Wait, interruptibly, until a future is done; return whether it is."""
    ended = Event()
    future.add_done_callback(lambda _: ended.set())
    return ended.wait(timeout)


def result_of(future: Future[T], timeout: float | None = None) -> T:
    """Wait, interruptibly, for a future's result. Raises its exception, or TimeoutError."""
    if not wait_for(future, timeout):
        raise TimeoutError(f"not done within {timeout:g} s")
    return future.result()
