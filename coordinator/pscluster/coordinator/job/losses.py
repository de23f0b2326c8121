"""What parameter servers have lost that came back: found out as soon as they are back, and told once.

    SETTLED --a restored server is back--> COUNTING   workers and the coordinator tell it of how many updates they know
    COUNTING --all have, or could not----> SETTLED    a warning, if more is lost than was known

`join` waits for SETTLED, since functions may have ended meanwhile whose updates are lost. It does not wait long: a
worker that does not answer leaves it at a lower bound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.scheduling.waiting import Condition
from pscluster.core.errors import PsClusterError
from pscluster.ps.client.client import PsClient

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""So long `join` waits for it to be known what is lost."""

AWAY_SECONDS = 1.0
"""The same, where a server is still away: its return may have been overtaken by the outcome of a function."""


def count_losses(client: PsClient) -> dict[str, int]:
    """Ask the servers for updates that were acknowledged and lost, by variable. May raise PsClusterError."""
    client.tell_seen()
    found: dict[str, int] = {}
    for reply in client.statuses():
        for name, lost in reply.lost_updates.items():
            found[name] = max(lost, found.get(name, 0))
    return found


class Losses:
    """Of one job."""

    def __init__(self, count: Callable[[], Mapping[str, int]], event_log: EventLog) -> None:
        """`count`: asks the servers, by variable; may raise PsClusterError."""
        self._count, self._event_log = count, event_log
        self._changed = Condition(Lock())
        self._counting = 0
        self._told: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # held: the loop alone would let them go
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pscluster-losses")

    def begin(self, tell_seen: Callable[[], Awaitable[None]]) -> None:
        """A restored server is back. On the loop's thread; `tell_seen` has the workers tell what they know."""
        self._counting += 1  # before anybody can be told of what happens on that server
        task = asyncio.get_running_loop().create_task(self._settle(tell_seen))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, tell_seen: Callable[[], Awaitable[None]]) -> None:
        try:
            await tell_seen()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._tell)
        except (PsClusterError, RuntimeError) as error:  # the latter: the job is over
            logger.debug("could not find out what was lost: %s", error)
        finally:
            with self._changed:
                self._counting -= 1
                self._changed.notify_all()

    def _tell(self) -> None:
        """One at a time: on one thread."""
        lost = dict(self._count())
        news = {name: count - known for name, count in lost.items() if count > (known := self._told.get(name, 0))}
        self._told = lost
        if not news:
            return
        listed = ", ".join(f"{count} of {name!r}" for name, count in news.items())
        text = f"acknowledged updates were lost with a parameter server's process, at least {listed}"
        logger.warning("%s: see strategy.lost_updates(); docs/guarantees.md says how to lose none", text)
        self._event_log.record("coordinator", "note", text)

    def wait(self, left: float | None, away: Callable[[], bool]) -> None:
        """Until it is known what is lost, for a moment and for `left` seconds at most.

        Args:
            left: None: no limit of the caller's.
            away: is a server gone that may come back at any moment?
        """
        begin = time.monotonic()
        while self._counting or away():
            limit = SETTLE_SECONDS if self._counting else AWAY_SECONDS
            if left is not None:
                limit = min(limit, left)
            rest = begin + limit - time.monotonic()
            if rest <= 0:
                return
            with self._changed:
                if self._counting or away():
                    self._changed.wait(min(rest, 0.05) if not self._counting else rest)

    def close(self) -> None:
        """The job is over."""
        self._thread.shutdown(wait=False)
