"""Threads that share work which holds no lock of Python's: one for each core, together with the one that asks.

A piece of work is taken by any thread that is free, also by the one that asks: so it goes on if all others are busy
with other work, and never waits for a piece that no thread has begun.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable

import numpy as np


class _Work:
    """Pieces of work, by number."""

    def __init__(self, count: int, run: Callable[[int], None]) -> None:
        self.errors: dict[int, BaseException] = {}
        self._run, self._count = run, count
        self._next = itertools.count()  # taking a number is atomic
        self._lock, self._left = threading.Lock(), count
        self._over = threading.Lock()
        self._over.acquire()

    def take_part(self) -> None:
        """Do pieces until all have been begun."""
        while (nth := next(self._next)) < self._count:
            try:
                self._run(nth)
            except BaseException as error:
                self.errors[nth] = error
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._over.release()

    def wait(self) -> None:
        """Wait until all pieces are done. Raise the error of the first that has failed."""
        self._over.acquire()
        if self.errors:
            raise self.errors[min(self.errors)]


class Crew:
    """Threads, which end with the process."""

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._works: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        for _ in range(helpers):
            threading.Thread(target=self._help, name="devices", daemon=True).start()

    def _help(self) -> None:
        with np.errstate(all="ignore"):  # warnings would be shown on the worker
            while True:
                self._works.get().take_part()

    def share(self, count: int, run: Callable[[int], None]) -> None:
        """Call a function with each number below `count`, at once, and return when all calls have.

        If some fail, the others end first; then the error of the one with the lowest number is raised.
        """
        work = _Work(count, run)
        for _ in range(min(self._helpers, count - 1)):
            self._works.put(work)
        work.take_part()
        work.wait()


_lock = threading.Lock()
_known: dict[int, Crew] = {}  # by process: a child that was forked has no threads


def crew() -> Crew:
    """Return the one of this process, which is made at first use."""
    process = os.getpid()
    if (known := _known.get(process)) is None:
        with _lock:
            if (known := _known.get(process)) is None:
                known = _known[process] = Crew(_cores() - 1)
    return known


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
