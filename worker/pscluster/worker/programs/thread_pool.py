"""Threads that take over work which holds no lock of Python's: one for each core except the caller's.

A piece of work that is handed over is done by the first thread that is free, or by the one that waits for it, if no
thread has begun it: so nothing waits for threads that are busy otherwise.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable

import numpy as np


class WorkItem:
    """Work that was handed over."""

    __slots__ = ("_error", "_over", "_run", "_taken")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._error: BaseException | None = None
        self._taken, self._over = threading.Lock(), threading.Lock()  # each is taken once, and not given back
        self._over.acquire()

    def take(self) -> None:
        """Do it, unless it has been begun."""
        if not self._taken.acquire(blocking=False):
            return
        run, self._run = self._run, None
        assert run is not None
        try:
            run()
        except BaseException as error:
            self._error = error
        del run
        self._over.release()

    def finish(self) -> None:
        """Do it, or wait until it is done. Raise its error."""
        self.take()
        self._over.acquire()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Wait until it is done, if it has been begun. Otherwise it never will be."""
        if self._taken.acquire(blocking=False):
            self._run = None
        else:
            with contextlib.suppress(BaseException):
                self.finish()


class ThreadPool:
    """Threads, which end with the process."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._items: queue.SimpleQueue[WorkItem] = queue.SimpleQueue()
        for _ in range(num_threads):
            threading.Thread(target=self._run, name="devices", daemon=True).start()

    def _run(self) -> None:
        with np.errstate(all="ignore"):  # warnings would be shown on the worker
            while True:
                self._items.get().take()

    def submit(self, run: Callable[[], None]) -> WorkItem:
        """Return the work, which a thread begins once it is free."""
        item = WorkItem(run)
        self._items.put(item)
        return item


_lock = threading.Lock()
_known: dict[int, ThreadPool] = {}  # by process: a child that was forked has no threads


def thread_pool() -> ThreadPool:
    """Return the one of this process, which is made at first use."""
    process = os.getpid()
    if (known := _known.get(process)) is None:
        with _lock:
            if (known := _known.get(process)) is None:
                known = _known[process] = ThreadPool(_cores() - 1)
    return known


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
