"""Ends calls that hold something and do not go on.

A call that waits for its peer, for the next message or for room to send, waits as long as the connection lasts, and a
peer that is alive and does nothing keeps that for ever. Time is counted in looks, not by the clock: a process that was
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

LOOKS = 30


class Call(Protocol):
    """What is needed of a call's context."""

    def cancel(self) -> bool:
        """End it; who waits for its messages is told by an exception."""
        ...


@dataclass(slots=True, eq=False)
class _Watched:
    """A call, and in how many looks it has not gone on."""

    call: Call
    looks: int = 0


class Patience:
    """With calls that may stand still for so many seconds.

    Args:
        seconds: a call is ended after as many, or a little more.
    """

    def __init__(self, seconds: float) -> None:
        self._between = seconds / LOOKS
        self._lock = threading.Lock()
        self._watched: set[_Watched] = set()
        self._watching = False

    @contextmanager
    def with_call(self, call: Call) -> Iterator[Callable[[], None]]:
        """Watch a call for the block, which is given what to call whenever the call goes on."""

        watched = _Watched(call)

        def goes_on() -> None:
            watched.looks = 0

        with self._lock:
            self._watched.add(watched)
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="patience", daemon=True).start()
        try:
            yield goes_on
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
                    watched.looks += 1
                late = [watched for watched in self._watched if watched.looks == LOOKS + 1]
            for watched in late:
                logger.warning("a call was ended: nothing came of it for %g s", self._between * LOOKS)
                watched.call.cancel()
