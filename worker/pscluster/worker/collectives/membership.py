"""One attachment's membership in gangs: makes a function a member for as long as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pscluster.core.context import FunctionContext
from pscluster.core.errors import FunctionCancelled, MisuseError
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.gang import Gang
from pscluster.worker.collectives.incoming import Gangs
from pscluster.worker.collectives.links import MemberLinks
from pscluster.worker.collectives.replica import ReplicaContext

_OUTCOMES = worker_pb2.ExchangeReply


class Membership:
    """The gangs that one attachment's functions are in. Thread-safe."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.gangs = Gangs()
        self._pool = pool

    @contextmanager
    def member(self, message: worker_pb2.Gang, function: FunctionContext) -> Iterator[None]:
        """Make the function in the block a member of a gang. The others learn how it ends."""
        gang = Gang.of(message)
        links = MemberLinks(gang, self._pool, function)
        hosted = self.gangs.begin(gang, links.mailbox)
        links.readings = hosted.readings
        function.replica = ReplicaContext(links)
        kind, reason = _OUTCOMES.RETURNED, ""
        try:
            yield
        except FunctionCancelled:
            kind = _OUTCOMES.STOPPED
            raise
        except BaseException as error:
            if links.disagreed and isinstance(error, MisuseError):
                kind, reason = _OUTCOMES.MISUSED, str(error)
            else:
                kind, reason = _OUTCOMES.FAILED, f"{type(error).__name__}: {error}"
            raise
        finally:
            self.gangs.end(hosted, kind, reason, links.end())

    def close(self) -> None:
        """Refuse exchanges, and break those that are open: the attachment is over."""
        self.gangs.close()
        self._pool.close()
