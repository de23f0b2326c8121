"""Memory for large requests in flight: a request that needs more than is left waits, first come, first served.

A push is held whole before it is applied, rows are copied before they are sent, and a pull of whole shards may need
the old values of shards that are updated while it is sent. Waiting costs little: one such request keeps a server busy,
and the transport's flow control holds a waiting push back at the client. A request larger than the whole budget runs
alone. No request is refused.

    waiting --its turn, and there is room--> reserved --done, or given up--> released
            --its call has ended-----------> dropped
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from pscluster.core.errors import InvalidUpdateError, PSUnavailableError
from pscluster.core.transport.frames import ALIGNMENT, padding
from pscluster.ps.row_ids import bytes_by
from pscluster.ps.server.requests.changes import Change
from pscluster.v1 import ps_pb2

DEFAULT_MIB = 256

WHOLE_PULL_BYTES = 16 << 20
"""The most of the budget that a pull of whole shards takes. It needs memory for the old values of blocks that change
while it is sent, rarely many; if it took its full size, one slow reader would make all other requests wait."""


class Budget:
    """Memory for requests in flight: `used` of `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.on_reserved: Callable[[], object] = lambda: None  # for users of the bytes that are left
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()
        self.used = 0

    @property
    def left(self) -> int:
        """Bytes that are not reserved; none while a request larger than the limit runs."""
        return max(self.limit - self.used, 0)

    @contextmanager
    def reserve(self, size: int, call: grpc.RpcContext) -> Iterator[None]:
        """Reserve `size` bytes for the block, after waiting for them. PSUnavailableError if the call ends meanwhile."""
        ticket = object()

        def may_go() -> bool:
            first = self._queue[0] is ticket
            return not call.is_active() or (first and (not self.used or self.used + size <= self.limit))

        call.add_callback(self._wake)
        with self._condition:
            self._queue.append(ticket)
            try:
                self._condition.wait_for(may_go)
                if not call.is_active():
                    raise PSUnavailableError("the call ended while it waited for memory")
                self.used += size
            finally:
                self._queue.remove(ticket)
                self._condition.notify_all()  # the next one may fit, too
        try:
            self.on_reserved()
            yield
        finally:
            with self._condition:
                self.used -= size
                self._condition.notify_all()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()


def memory_of_read(request: ps_pb2.ReadRequest, total: int) -> int:
    """Return the memory that a pull of `total` bytes may need: rows and boxes are copied before they are sent."""
    if all(item.rows.all for item in request.items):
        return min(total, WHOLE_PULL_BYTES)
    return total * 5 if any(item.wire_dtype for item in request.items) else total  # they are float32 until then


def check_amount(changes: Sequence[Change], total: int, budget: int) -> None:
    """Raise InvalidUpdateError if an update brings more bytes than both the whole budget and the arrays it changes.

    Otherwise an update that named the same shard or rows repeatedly could bring any amount. The arrays are the values
    of shards; what steps that are taken together have changed comes for values and slots, for each of them twice: as a
    piece, and as what the rounding of that has left.
    """
    if total <= budget:
        return
    arrays = {_changed(change): change.shard.array.nbytes for change in changes}
    room = sum(size + padding(size) for size in arrays.values())
    ids = sum(bytes_by(change.item.rows) + ALIGNMENT for change in changes)
    if total > room + min(ids, room):
        raise InvalidUpdateError(
            f"an update of {total:,} bytes to arrays of {room:,} bytes; the limit is the larger of their size "
            f"and {budget:,} (--in-flight-mib): send less at a time"
        )


def _changed(change: Change) -> tuple[int, str, bool]:
    """Identify the array that a change is of: that of the values, unless it is one of `APPLY_CHANGE`."""
    item = change.item
    of_steps = item.kind == ps_pb2.APPLY_CHANGE
    return id(change.shard), item.slot if of_steps else "", of_steps and not item.rows.all
