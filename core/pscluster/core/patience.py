"""Ends calls that hold something and do not go on.

A call that waits for its peer's next message waits as long as the connection lasts, and a peer that is alive and sends
nothing keeps that for ever. Time is counted in looks, not by the clock: a process that was stopped itself has not been
waiting.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)

LOOKS = 30


class Call(Protocol):
    """What is needed of a call's context."""

    def cancel(self) -> bool:
        """End it; who waits for its messages is told by an exception."""
        ...


class Patience:
    """With calls that may stand still for so many seconds.

    Args:
        seconds: a call is ended after as many, or a little more.
    """

    def __init__(self, seconds: float) -> None:
        self._between = seconds / LOOKS
        self._lock = threading.Lock()
        self._looks: dict[Call, int] = {}
        self._watched = False

    @contextmanager
    def with_call(self, call: Call) -> Iterator[Callable[[], None]]:
        """Watch a call for the block, which is given what to call whenever the call goes on."""

        def goes_on() -> None:
            with self._lock:
                self._looks[call] = 0

        with self._lock:
            self._looks[call] = 0
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="patience", daemon=True).start()
        try:
            yield goes_on
        finally:
            with self._lock:
                del self._looks[call]

    def _watch(self) -> None:
        """As long as there are calls to watch."""
        pause = threading.Event()
        while True:
            pause.wait(self._between)
            with self._lock:
                if not self._looks:
                    self._watched = False
                    return
                for call in self._looks:
                    self._looks[call] += 1
                late = [call for call, looks in self._looks.items() if looks == LOOKS + 1]
            for call in late:
                logger.warning("a call was ended: nothing came of it for %g s", self._between * LOOKS)
                call.cancel()
