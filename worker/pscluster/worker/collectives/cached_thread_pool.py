"""Threads that are kept for a while after their work: starting one takes longer than waking it.

    none --run--> busy --its work is done--> idle --run-----------------------> busy
                                             idle --a while passes, or close--> ended
                                             --enough are idle, or closed-----> ended

Work never waits for a thread: if none is idle, another one is started.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
"""After which a thread without work ends."""

MAX_IDLE = 64

Work = Callable[[], object]


class CachedThreadPool:
    """Runs each piece of work on a daemon thread of its own. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work | None]] = []  # where each idle thread gets its work; the last is next
        self._closed = False

    def run(self, work: Work) -> None:
        """Run this soon, without waiting for the thread to begin unless it is a new one."""
        with self._lock:
            given = self._idle.pop() if self._idle else None
        if given is not None:
            given.put(work)
            return
        given = queue.SimpleQueue()
        given.put(work)  # not as an argument, which the thread would hold until it ends
        threading.Thread(target=self._serve, args=(given,), name=self._name, daemon=True).start()

    def _serve(self, given: queue.SimpleQueue[Work | None]) -> None:
        thread, work = threading.current_thread(), given.get()
        while work is not None:
            thread.name = self._name
            try:
                work()
            except Exception:
                logger.exception("the work of a thread failed")
            work = None  # it must not live on while nothing runs
            thread.name = f"idle, of {self._name}"
            if self._rests(given):
                work = self._next(given)

    def _rests(self, given: queue.SimpleQueue[Work | None]) -> bool:
        """Make this thread idle. Return False if it is not kept."""
        with self._lock:
            kept = not self._closed and len(self._idle) < MAX_IDLE
            if kept:
                self._idle.append(given)
            return kept

    def _next(self, given: queue.SimpleQueue[Work | None]) -> Work | None:
        try:
            return given.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:
            if given in self._idle:
                self._idle.remove(given)
                return None
        return given.get()  # it has been, or is being, given work

    def close(self) -> None:
        """End idle threads, and others once their work is done. Work may still be run."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for given in idle:
            given.put(None)
