"""Cuts through the job that the servers hold until they have written them: see `checkpoints`.

Each server writes what it has marked, so from the mark on until all have written it the servers stay the same: they are
added and removed before it, or after it. Shards may move meanwhile: a server writes what it had.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

CHECK_SECONDS = 0.5


class Cuts:
    """The last cut of a job, until it is written. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last: weakref.ref[object] | None = None  # one that was dropped is never written

    def begin(self, cut: object) -> None:
        """Note that the servers hold a cut, instead of the one before."""
        with self._changed:
            self._last = weakref.ref(cut)

    def end(self, cut: object) -> None:
        """Note that it is written, or never will be."""
        with self._changed:
            if self._open is cut:
                self._last = None
                self._changed.notify_all()

    @property
    def _open(self) -> object | None:
        return None if self._last is None else self._last()

    @contextlib.contextmanager
    def none_open(self, placing: threading.RLock, check: Callable[[], object]) -> Iterator[None]:
        """Hold the lock `placing`, under which cuts are made, in the block; wait for it until none is open.

        `check` raises if the caller must not wait any longer.
        """
        while True:
            with self._changed:
                while self._open is not None:
                    self._changed.wait(CHECK_SECONDS)
                    check()
            with placing:
                if self._open is None:
                    yield
                    return
