"""Watches for lost parameter servers, and tells the servers which functions have ended."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pscluster.coordinator.scheduling.connections.lifecycle import LOST_CONNECTION, is_cancelled
from pscluster.coordinator.scheduling.connections.server_link import ServerAttachment, runs
from pscluster.coordinator.scheduling.connections.worker_connection import TELL_SECONDS, WorkerConnection
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.errors import MisuseError, PsClusterError, PSUnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.numbers.intervals import IntervalSet

logger = logging.getLogger(__name__)

FINISH_SECONDS = 2.0
"""Seconds between reports to servers of functions that have ended: they only free memory, and delay other requests."""


class ServerWatch:
    """Notices lost servers, and tells the servers what they need not remember."""

    def __init__(self, state: DispatchState) -> None:
        self._state, self._scheduler = state, state.scheduler
        # By server: the keys that it has not been told to forget yet, and the functions that have ended likewise.
        self._forgotten = [set[int]() for _ in state.servers]
        self._untold = [IntervalSet() for _ in state.servers]
        self._removed = weakref.WeakSet[ServerAttachment]()

    def jobs(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run for as long as the job does."""
        servers = self._state.servers
        telling = map(self._tell_finished, servers, self._untold, self._forgotten)
        return [*map(self._watch, servers), *telling, self._collect_finished()]

    def add(self, server: ServerAttachment) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run for another server, with the next index. On the loop's thread."""
        self._untold.append(IntervalSet())
        self._forgotten.append(set())
        return [self._watch(server), self._tell_finished(server, self._untold[-1], self._forgotten[-1])]

    def remove(self, server: ServerAttachment) -> None:
        """Watch the server with the highest index no longer, which is being removed."""
        self._removed.add(server)
        self._untold.pop()
        self._forgotten.pop()

    async def _watch(self, server: ServerAttachment) -> None:
        try:
            error = await server.watch()
        except asyncio.CancelledError:
            if server in self._removed:
                return
            raise
        if self._state.closed or server in self._removed:
            return
        logger.error("%s", error)
        self._state.abort(error, final=True)

    async def report_seen(self, servers: Sequence[int]) -> None:
        """Have all workers tell these servers which updates were acknowledged to them."""

        async def tell(connection: WorkerConnection) -> None:
            with suppress(*LOST_CONNECTION, TimeoutError):  # then less is known
                try:
                    await asyncio.wait_for(connection.report_seen(servers), TELL_SECONDS)
                except asyncio.CancelledError:  # it was closed meanwhile
                    if is_cancelled():
                        raise

        workers = self._state.workers
        await asyncio.gather(*(tell(handle.connection) for handle in workers if handle.up and handle.connection))

    def doubt(self) -> None:
        """Check all servers: a worker reports one as lost, which may only be unreachable from there. Under the lock."""
        if self._state.closed or not self._scheduler.doubt():
            return
        try:
            self._state.loop.call_soon_threadsafe(lambda: self._state.in_background(self._check()))
        except RuntimeError:  # the loop is closed
            self._scheduler.no_doubt()

    async def _check(self) -> None:
        checks = [self._state.loop.create_task(server.check()) for server in self._state.servers]
        try:
            for done in asyncio.as_completed(checks):
                if (error := await done) is not None and not self._state.closed:
                    logger.error("%s", error)
                    self._state.abort(error, final=True)
                    break
        finally:
            for checking in checks:
                checking.cancel()
            with self._state.lock:
                self._scheduler.no_doubt()
                self._state.changed.notify_all()

    async def _collect_finished(self) -> None:
        while True:
            await asyncio.sleep(FINISH_SECONDS)
            with self._state.lock:
                # Keys with the ids, never before: otherwise a late copy of an update would match neither.
                ended, keys = self._scheduler.take_ended()
                for forgotten in self._forgotten:
                    forgotten.update(keys)
                if self._scheduler.queued:  # Ctrl-C may have prevented the wake-up
                    self._state.ask_to_wake()
            for start, stop in runs(sorted(ended)):
                for intervals in self._untold:
                    intervals.add(start, stop)

    async def _tell_finished(self, server: ServerAttachment, untold: IntervalSet, forgotten: set[int]) -> None:
        """Tell one server, so that one that is down delays no other."""
        while server not in self._removed:
            await asyncio.sleep(FINISH_SECONDS)
            intervals, keys = list(untold), list(forgotten)
            if not intervals and not keys:
                continue
            reach("coordinator.finish.before")
            try:
                await server.finish_functions(intervals, keys)
            except PsClusterError as error:  # the loss of a server is noticed elsewhere
                logger.debug("%s does not know which functions have ended: %s", server.peer, error)
            else:
                untold.remove(intervals)
                forgotten.difference_update(keys)

    def forget(self, keys: Mapping[int, str]) -> None:
        """Let the servers forget functions with these keys, which will not be scheduled again."""
        with self._state.lock:
            early = [name for key, name in keys.items() if self._scheduler.is_scheduled(key)]
            if early:
                raise MisuseError(
                    f"functions with the keys {early[:5]} have not ended: call join() before forget_keys()"
                )
            self._scheduler.forget(keys)

    def shard_moved(self, source: int, target: int) -> None:
        """Have a server told as well of the keys that the one whose shard it has got may remember."""
        with self._state.lock:
            self._forgotten[target].update(self._forgotten[source].copy())

    def forgotten(self) -> set[int]:
        """Return the keys to forget of which some server may not have been told yet."""
        with self._state.lock:
            told_of = [keys.copy() for keys in self._forgotten]  # `copy` is atomic: the loop changes them
            return set[int]().union(self._scheduler.to_forget, *told_of)

    def is_lost(self, error: PSUnavailableError) -> None:
        """Abort with this final error of the coordinator's own client. From any thread, without the lock."""
        if not self._state.closed:
            self._state.abort(error, final=True)
