"""Cancel calls that hold something and make no progress.

A call that waits for its peer, for the next message or for room to send, waits as long as the connection lasts, and a
peer that is alive and does nothing keeps that for ever. Time is counted in checks, not by the clock: a process that was
stopped itself has not been waiting.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

CHECKS = 30


class Call(Protocol):
    """What is needed of a call's context."""

    def cancel(self) -> bool:
        """End it; who waits for its messages is told by an exception."""
        ...


@dataclass(slots=True, eq=False)
class _Watched:
    """A call, and for how many checks it has made no progress."""

    call: Call
    checks: int = 0


class StallWatchdog:
    """Cancel calls that make no progress for so many seconds.

    Args:
        seconds: a call is cancelled after as many, or a little more.
    """

    def __init__(self, seconds: float) -> None:
        self._between = seconds / CHECKS
        self._lock = threading.Lock()
        self._watched: set[_Watched] = set()
        self._watching = False

    @contextmanager
    def with_call(self, call: Call) -> Iterator[Callable[[], None]]:
        """Watch a call for the block, which is given what to call whenever the call makes progress."""
        watched = _Watched(call)

        def progress() -> None:
            watched.checks = 0

        with self._lock:
            self._watched.add(watched)
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="stall-watchdog", daemon=True).start()
        try:
            yield progress
        finally:
            with self._lock:
                self._watched.remove(watched)

    def _watch(self) -> None:
        """As long as there are calls to watch."""
        pause = threading.Event()
        while True:
            pause.wait(self._between)
            with self._lock:
                if not self._watched:
                    self._watching = False
                    return
                for watched in self._watched:
                    watched.checks += 1
                late = [watched for watched in self._watched if watched.checks == CHECKS + 1]
            for watched in late:
                logger.warning("cancelled a call that made no progress for %g s", self._between * CHECKS)
                watched.call.cancel()
