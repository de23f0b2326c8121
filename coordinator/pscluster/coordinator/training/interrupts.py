"""Ctrl-C and SIGTERM during a training: the first one asks it to end in order, the second one ends it at once.

RUNNING --signal--> ASKED     the loop sees it within a moment, lets what runs end, has checkpoints made, and hands
                              the signal on to whoever had it before: a KeyboardInterrupt, as a rule
ASKED   --signal--> handed on at once; so once `hopeless` says that there will be no end in order
within `at_once`: handed on at once
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_SECONDS = 0.5


class Interrupts:
    """Within the block it has the signals, if that is in the main thread.

    Args:
        hopeless: why it makes no sense to wait for an end in order; empty: it does.
    """

    def __init__(self, hopeless: Callable[[], str]) -> None:
        self._hopeless = hopeless
        self.asked: int | None = None
        """The signal that has come."""
        self.handed_on = False
        self._before: dict[int, Any] = {}
        self._restore = contextlib.ExitStack()
        self._at_once = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            for number in SIGNALS:
                before = signal.getsignal(number)
                if callable(before) or (before is signal.SIG_DFL and number == signal.SIGTERM):
                    self._before[number] = before
                    self._restore.callback(signal.signal, number, before)
                    signal.signal(number, self._handle)
            self._restore.enter_context(self._watched())
        except BaseException:
            self._restore.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked is not None, number
        if again or self._at_once:
            self._hand_on(number, frame)
            return
        logger.warning(
            "%s: training stops when the running functions have ended; repeat to stop it at once",
            signal.Signals(number).name,
        )

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.handed_on = True
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block nothing is waited for."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_SECONDS):
                if self.asked is not None and not self.handed_on and (why := self._hopeless()):
                    logger.error("training stops at once: %s", why)
                    os.kill(os.getpid(), self.asked)
                    return

        watcher = threading.Thread(target=watch, name="interrupts", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def hand_on(self) -> None:
        """Behind the block: what the signal would have done without it, if it has not."""
        if self.asked is not None and not self.handed_on:
            self._hand_on(self.asked, None)
