"""One attachment's membership in gangs: makes a function a member for as long as it runs."""

from __future__ import annotations

from pscluster.core.context import FunctionContext
from pscluster.core.errors import FunctionCancelled, MisuseError
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.gang import Gang
from pscluster.worker.collectives.incoming import Gangs
from pscluster.worker.collectives.links import MemberLinks
from pscluster.worker.collectives.replica import ReplicaContext

_OUTCOMES = worker_pb2.ExchangeReply


class _Member:
    """One function's membership in a gang. A class: a generator takes longer, and most programs take microseconds."""

    __slots__ = ("_function", "_gangs", "_hosted", "_links", "_message", "_pool")

    def __init__(self, gangs: Gangs, pool: ConnectionPool, message: worker_pb2.Gang, function: FunctionContext) -> None:
        self._gangs, self._pool, self._message, self._function = gangs, pool, message, function

    def __enter__(self) -> None:
        gang = Gang.of(self._message)
        links = self._links = MemberLinks(gang, self._pool, self._function)
        self._hosted = self._gangs.begin(gang, lambda: links.mailbox)
        links.readings = self._hosted.readings
        self._function.replica = ReplicaContext(links)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        kind, reason = _OUTCOMES.RETURNED, ""
        if isinstance(error, FunctionCancelled):
            kind = _OUTCOMES.STOPPED
        elif isinstance(error, MisuseError) and self._links.disagreed:
            kind, reason = _OUTCOMES.MISUSED, str(error)
        elif error is not None:
            kind, reason = _OUTCOMES.FAILED, f"{type(error).__name__}: {error}"
        self._gangs.end(self._hosted, kind, reason, self._links.end())


class Membership:
    """The gangs that one attachment's functions are in. Thread-safe."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.gangs = Gangs()
        self._pool = pool

    def member(self, message: worker_pb2.Gang, function: FunctionContext) -> _Member:
        """Make the function in the block a member of a gang. The others learn how it ends."""
        return _Member(self.gangs, self._pool, message, function)

    def close(self) -> None:
        """Refuse exchanges, and break those that are open: the attachment is over."""
        self.gangs.close()
        self._pool.close()
