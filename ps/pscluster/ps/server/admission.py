"""Memory for large requests in flight: who asks for more than is left waits, first come, first served.

A push is held whole before it is applied, rows are copied before they are sent, and a pull of whole shards may need
the old values of what is updated while it goes out. Waiting costs little: a server is busy with one of them anyway,
and a push that waits is held back by the transport's flow control, at the client. One that is larger than all there
is goes alone. Nobody is refused.

    waiting --its turn, and there is room--> taken --done, or given up--> gone
            --its call has ended-----------> gone
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

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

    Attributes:
        used: bytes that are taken now.
        on_taken: called when more are, for whoever makes use of what is left.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.on_taken: Callable[[], object] = lambda: None
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()
        self.used = 0

    @property
    def left(self) -> int:
        """Bytes that nobody has; none where a larger request goes alone."""
        return max(self.limit - self.used, 0)

    @contextmanager
    def taken(self, size: int, call: Call) -> Iterator[None]:
        """Take so many bytes for the block; waits for them while the call goes on.

        Raises:
            PSUnavailableError: the call has ended; nobody will see this.
        """
        place = object()

        def may_go() -> bool:
            first = self._queue[0] is place
            return not call.is_active() or (first and (not self.used or self.used + size <= self.limit))

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
            self.on_taken()
            yield
        finally:
            with self._condition:
                self.used -= size
                self._condition.notify_all()

    def _look(self) -> None:
        with self._condition:
            self._condition.notify_all()
