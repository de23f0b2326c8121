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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from pscluster.core.errors import InvalidUpdateError, PSUnavailableError
from pscluster.core.transport.frames import ALIGNMENT, padding
from pscluster.ps.server.updates import Change
from pscluster.v1 import ps_pb2

DEFAULT_MIB = 256

WHOLE_PULL_BYTES = 16 << 20
"""What a pull of whole shards takes of the budget at most. It needs memory for the old values of what is changed while
it goes out, which is seldom much; were it all of the pull's bytes, one slow reader would keep everybody waiting."""


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


def memory_of_read(request: ps_pb2.ReadRequest, total: int) -> int:
    """Return what a pull of so many bytes may need: rows and boxes are copied before they are sent."""
    return min(total, WHOLE_PULL_BYTES) if all(item.rows.all for item in request.items) else total


def check_amount(changes: Sequence[Change], total: int, budget: int) -> None:
    """InvalidUpdateError if an update brings more than large requests may have together, and than it changes.

    One that names a shard again and again could bring any amount; so could one that names rows again and again.
    """
    if total <= budget:
        return
    shards = {id(change.shard): change.shard.array.nbytes for change in changes}
    room = sum(size + padding(size) for size in shards.values())
    ids = sum(change.item.rows.ids * 8 + ALIGNMENT for change in changes)
    if total > room + min(ids, room):
        raise InvalidUpdateError(
            f"an update of {total:,} bytes to shards of {room:,} bytes, the limit is the larger of their size "
            f"and {budget:,} (--in-flight-mib): send less at a time"
        )
