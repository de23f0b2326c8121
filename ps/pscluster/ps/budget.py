"""Memory for large requests in flight: who asks for more than is left waits, first come, first served.

A push is held whole before it is applied, rows are copied before they are sent, and a pull of whole shards may need
the old values of what is updated while it goes out. Waiting costs little: a server is busy with one of them anyway,
and a push that waits is held back by the transport's flow control, at the client. One that is larger than all there
is goes alone. Nobody is refused. An array that a request has replaced counts until those who read it are done; since
that may be a checkpoint's slow disk, no request waits for that alone.

    waiting --its turn, and there is room--> taken --done, or given up--> gone
            --its call has ended-----------> gone
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy.typing as npt

from pscluster.core.errors import PSUnavailableError

DEFAULT_MIB = 256


class Call(Protocol):
    """What is needed of a call's context: whether it goes on, and word of its end."""

    def is_active(self) -> bool:
        """Does somebody wait for the answer?"""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have this called at the end; False if that has been."""
        ...


class Budget:
    """So many bytes for requests in flight.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()
        self.used = self._kept = 0
        self._freed: deque[int] = deque()  # of what was kept

    @contextmanager
    def taken(self, size: int, call: Call) -> Iterator[None]:
        """Take so many bytes for the block; waits for them while the call goes on.

        Raises:
            PSUnavailableError: the call has ended; nobody will see this.
        """
        place = object()

        def may_go() -> bool:
            first = self._queue[0] is place
            fits = not self.used or self.used + self.kept + size <= self._limit
            return not call.is_active() or (first and fits)

        call.add_callback(self._look)
        with self._condition:
            self._queue.append(place)
            try:
                self._condition.wait_for(may_go)
                if not call.is_active():
                    raise PSUnavailableError("the call ended while it waited for memory")
                self.used += size
            finally:
                self._queue.remove(place)
                self._condition.notify_all()  # the next one may fit, too
        try:
            yield
        finally:
            with self._condition:
                self.used -= size
                self._condition.notify_all()

    def keep(self, array: npt.NDArray[Any]) -> None:
        """Count an array until nobody has it any more."""
        with self._condition:
            self._kept += array.nbytes
        weakref.finalize(array, self._let_go, array.nbytes).atexit = False

    @property
    def kept(self) -> int:
        """Bytes of arrays that are kept."""
        with self._condition:
            while self._freed:
                self._kept -= self._freed.popleft()
            return self._kept

    def _let_go(self, size: int) -> None:
        """Wherever the last reference ends, whatever locks are held there: so none is waited for.

        Who is not told now looks when the next request is done, and there is one: nobody waits for this alone.
        """
        self._freed.append(size)
        if self._condition.acquire(blocking=False):
            try:
                self._condition.notify_all()
            finally:
                self._condition.release()

    def _look(self) -> None:
        with self._condition:
            self._condition.notify_all()
