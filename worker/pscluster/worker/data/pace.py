"""How long reading takes, and whether it pays off to read ahead."""

from __future__ import annotations

import resource
import time

SHORT_SECONDS = 0.00025
SHORT_SHARE = 1 / 16
_PAUSE_SECONDS = 1.0  # anything longer was not a step
_SMOOTHING = 1 / 32  # one slow element among many, such as the first of a split, counts only for its share
_OF_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # Linux has it


class Stopwatch:
    """Measures this thread's time for something, without the time while others have its processor.

    On busy cores, a thread that was just woken is soon preempted for milliseconds, which says nothing about reading. So
    if the thread has not slept, for data or for Python's lock, its processor time counts.
    """

    def __init__(self) -> None:
        self._slept, self._cpu, self._begin = _times_slept(), time.thread_time(), time.perf_counter()

    def seconds(self) -> float:
        """Return the time since it was made."""
        if self._slept == _times_slept():
            return time.thread_time() - self._cpu
        return time.perf_counter() - self._begin


def _times_slept() -> float:
    """Return how often this thread has slept; if the system does not tell, a different number each time."""
    return time.perf_counter() if _OF_THREAD is None else resource.getrusage(_OF_THREAD).ru_nvcsw


class Pace:
    """Smoothed times of reading an element, and from one element to the next. Under the reader's lock.

    Batches of one block are read together, and count as one here.
    """

    def __init__(self, *, always_slow: bool = False) -> None:
        self._always_slow = always_slow
        self._reading = self._between = 0.0
        self._last: float | None = None

    def read(self, seconds: float) -> None:
        """Note the time of reading an element."""
        self._reading += _SMOOTHING * (seconds - self._reading)

    def given(self, now: float) -> None:
        """Note that a function has got an element."""
        if self._last is not None:
            self._between += _SMOOTHING * (min(now - self._last, _PAUSE_SECONDS) - self._between)
        self._last = now

    def is_slow(self) -> bool:
        """Return whether reading ahead pays off."""
        return self._always_slow or self._reading > max(SHORT_SECONDS, SHORT_SHARE * self._between)
