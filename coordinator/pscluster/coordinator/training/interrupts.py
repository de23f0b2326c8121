"""Ctrl-C and SIGTERM during a training: the first requests a clean end, the second ends it at once.

RUNNING --signal--> ASKED     the loop notices within a moment, lets running functions end, has checkpoints made, and
                              calls the earlier handler, which usually raises KeyboardInterrupt
ASKED   --signal--> handed on at once, as when `obstacle` tells of something that prevents a clean end
with `at_once`: handed on at once
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CHECK_SECONDS = 0.5


class Interrupts:
    """Handles the signals within the block, if that runs in the main thread.

    `obstacle` returns what prevents a clean end; "" if nothing does.
    """

    def __init__(self, obstacle: Callable[[], str]) -> None:
        self._obstacle = obstacle
        self.received: int | None = None
        self.at_once = False  # set it while signals should be handed on at once
        self.handed_on = False  # whether one was, to the earlier handler
        self._before: dict[int, Any] = {}
        self._end = contextlib.ExitStack()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            with contextlib.ExitStack() as stack:
                for signal_number in SIGNALS:
                    before = signal.getsignal(signal_number)
                    if callable(before) or (before is signal.SIG_DFL and signal_number == signal.SIGTERM):
                        self._before[signal_number] = before
                        stack.callback(signal.signal, signal_number, before)
                        signal.signal(signal_number, self._handle)
                watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
                watcher.start()
                stack.callback(watcher.join)
                stack.callback(self._over.set)
                self._end = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        again, self.received = self.received is not None, signal_number
        if again or self.at_once:
            self._hand_on(signal_number, frame)
            return
        logger.warning(
            "%s: training stops when the running functions have ended; repeat to stop it at once",
            signal.Signals(signal_number).name,
        )

    def _hand_on(self, signal_number: int, frame: FrameType | None) -> None:
        self.handed_on = True
        before = self._before[signal_number]
        if callable(before):
            before(signal_number, frame)
        else:
            signal.signal(signal_number, signal.SIG_DFL)
            os.kill(os.getpid(), signal_number)

    def _watch(self) -> None:
        while not self._over.wait(CHECK_SECONDS):
            if self.received is not None and not self.handed_on and (why := self._obstacle()):
                logger.error("training stops at once: %s", why)
                os.kill(os.getpid(), self.received)
                return

    def hand_on(self) -> None:
        """Hand on, after the block, a signal that has not been handed on yet."""
        if self.received is not None and not self.handed_on:
            self._hand_on(self.received, None)
