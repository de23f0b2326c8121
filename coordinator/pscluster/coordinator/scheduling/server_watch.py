"""What becomes of parameter servers while functions run, and what they are told of those that have ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pscluster.coordinator.scheduling.connections import (
    LOST_CONNECTION,
)
from pscluster.coordinator.scheduling.recalls import Recalls
from pscluster.coordinator.scheduling.server_link import ServerAttachment, runs
from pscluster.coordinator.scheduling.settlement import Settlement
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.scheduling.worker_connection import TELL_SECONDS, WorkerConnection
from pscluster.core.errors import (
    MisuseError,
    PsClusterError,
    PSUnavailableError,
)
from pscluster.core.fault_points import reach
from pscluster.core.intervals import IntervalSet

logger = logging.getLogger(__name__)

FINISH_SECONDS = 2.0
"""So often servers are told which functions have ended: it only frees their memory, and delays what runs meanwhile."""


class ServerWatch:
    """Notices that servers are lost, and tells them what they need not remember."""

    def __init__(self, state: DispatchState, recalls: Recalls, settlement: Settlement) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._recalls = recalls
        self._settlement = settlement
        self._forgotten = [set[int]() for _ in state.servers]  # keys that each has not been told of yet

    def jobs(self) -> list[Coroutine[Any, Any, None]]:
        """Return what is to go on for as long as the job does."""
        servers, told = self._state.servers, [IntervalSet() for _ in self._state.servers]
        watching = [self._watch(server) for server in servers]
        telling = map(self._tell_finished, servers, told, self._forgotten)
        return [*watching, *telling, self._collect_finished(told)]

    async def _watch(self, server: ServerAttachment) -> None:
        error = await server.watch()
        if self._state.closed:
            return
        logger.error("%s", error)
        self._settlement.abort(error, final=True)

    async def tell_seen(self, servers: Sequence[int]) -> None:
        """Have all workers that are there tell these servers of how many updates they were told."""

        async def tell(connection: WorkerConnection) -> None:
            with suppress(*LOST_CONNECTION, TimeoutError):  # then what is known is less
                await asyncio.wait_for(connection.tell_seen(servers), TELL_SECONDS)

        await asyncio.gather(
            *(tell(handle.connection) for handle in self._state.workers if handle.up and handle.connection is not None)
        )

    def doubt(self) -> None:
        """Under the lock: a worker says that a server is lost. It may be, or be out of the worker's reach only."""
        if self._scheduler.final or self._state.closed:
            return
        self._scheduler.doubt()
        try:
            self._state.loop.call_soon_threadsafe(self._check)
        except RuntimeError:  # the loop is closed
            self._scheduler.no_doubt()

    def _check(self) -> None:
        """On the loop's thread."""

        async def check() -> None:
            checks = [self._state.loop.create_task(server.check()) for server in self._state.servers]
            try:
                for done in asyncio.as_completed(checks):
                    if (error := await done) is not None and not self._state.closed:
                        logger.error("%s", error)
                        self._settlement.abort(error, final=True)
                        break
            finally:
                for each in checks:
                    each.cancel()
                with self._state.lock:
                    self._scheduler.no_doubt()
                    self._state.changed.notify_all()

        self._state.in_background(check())

    async def _collect_finished(self, untold: Sequence[IntervalSet]) -> None:
        while True:
            await asyncio.sleep(FINISH_SECONDS)
            with self._state.lock:
                # Keys with the numbers, never before: else a late copy of an update would meet neither.
                ended, keys = self._scheduler.take_ended()
                for forgotten in self._forgotten:
                    forgotten.update(keys)
                if self._scheduler.queued:  # Ctrl-C has kept somebody from saying so
                    self._state.ask_to_wake()
            for start, stop in runs(sorted(ended)):
                for each in untold:
                    each.add(start, stop)

    async def _tell_finished(self, server: ServerAttachment, untold: IntervalSet, forgotten: set[int]) -> None:
        """Each server for itself: one that is gone keeps nobody else waiting."""
        while True:
            await asyncio.sleep(FINISH_SECONDS)
            intervals, keys = list(untold), list(forgotten)
            if not intervals and not keys:
                continue
            reach("coordinator.finish.before")
            try:
                await server.finish_functions(intervals, keys)
            except PsClusterError as error:  # a server that is lost is noticed elsewhere
                logger.debug("%s does not know which functions have ended: %s", server.peer, error)
            else:
                untold.remove(intervals)
                forgotten.difference_update(keys)

    def forget(self, keys: Mapping[int, str]) -> None:
        """Functions with these keys will not be scheduled again: let the servers forget what they did."""
        with self._state.lock:
            early = [name for key, name in keys.items() if self._scheduler.is_scheduled(key)]
            if early:
                raise MisuseError(
                    f"functions with the keys {early[:5]} have not ended: call join() before forget_keys()"
                )
            self._scheduler.forget(keys)

    def forget_ended(self, keys: Iterable[int]) -> set[int]:
        """As `forget`, but for those that are scheduled again; the others."""
        with self._state.lock:
            return self._scheduler.forget(keys)

    def forgotten(self) -> set[int]:
        """Keys that will not be scheduled again, and that some server may not have been told of yet."""
        with self._state.lock:
            told_of = [keys.copy() for keys in self._forgotten]  # copied at once: the loop's
            return set[int]().union(self._scheduler.to_forget, *told_of)

    def is_lost(self, error: PSUnavailableError) -> None:
        """The coordinator's own client has found it out: final. On any thread, without the lock."""
        if self._state.closed:
            return
        recalls = self._settlement.aborted(error, final=True)
        if recalls:
            self._state.on_loop(self._recalls.ask, recalls)
