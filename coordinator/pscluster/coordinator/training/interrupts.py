"""Ctrl-C and SIGTERM during a training: the first one asks it to end in order, the second one ends it at once.

RUNNING --signal--> ASKED     the loop sees it within a moment, lets what runs end, has checkpoints made, and hands
                              the signal on to whoever had it before: a KeyboardInterrupt, as a rule
ASKED   --signal--> handed on at once
within `at_once`: handed on at once
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Within the block it has the signals; outside of the main thread, or where nobody handles one, it does not."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """The signal that has come."""
        self._before: dict[int, Any] = {}
        self._at_once = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if callable(before := signal.getsignal(number)):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._at_once or self.asked is not None:
            self.asked = number
            self._before[number](number, frame)
            return
        self.asked = number
        logger.warning(
            "%s: the training ends when the functions that run have ended; once more ends it at once",
            signal.Signals(number).name,
        )

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block nothing is waited for."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def hand_on(self) -> None:
        """Behind the block: what the signal would have done without it."""
        if self.asked is not None:
            self._before[self.asked](self.asked, None)
