"""Updates lost by parameter servers that came back: counted as soon as they are back, and reported once.

    SETTLED --a restored server is back--> COUNTING   workers and the coordinator tell it which updates it acknowledged
    COUNTING --all have, or could not----> SETTLED    a warning, if more is lost than was known

`join` waits for SETTLED, since functions may have ended meanwhile whose updates are lost. It does not wait long: if a
worker does not answer the count remains a lower bound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.waiting import Condition
from pscluster.core.errors import PsClusterError
from pscluster.ps.client.client import PsClient

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Seconds for which `join` waits for losses to be counted."""

AWAY_SECONDS = 1.0
"""The same, while a server is unreachable: the outcome of a function may arrive before the server's return does."""


class Losses:
    """Counts the lost updates of one job. `away` tells of unreachable servers, which may be back at any moment."""

    def __init__(self, client: PsClient, event_log: EventLog, away: Callable[[], object]) -> None:
        self._client, self._event_log, self._away = client, event_log, away
        self._changed = Condition(Lock())
        self._counting = 0
        self._reported: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop has weak references only
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pscluster-losses")

    def count(self) -> dict[str, int]:
        """Return the acknowledged updates that the servers have lost, by variable. May raise PsClusterError."""
        self._client.report_seen()
        lost: Counter[str] = Counter()
        for reply in self._client.statuses():
            lost |= Counter(reply.lost_updates)
        return dict(lost)

    def begin(self, workers_notified: Awaitable[None] | None) -> None:
        """Count what a restored server has lost, once `workers_notified` is done. On the loop's thread."""
        self._counting += 1  # before any outcome can tell of that server
        task = asyncio.get_running_loop().create_task(self._count_later(workers_notified))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _count_later(self, workers_notified: Awaitable[None] | None) -> None:
        try:
            if workers_notified is not None:
                await workers_notified
            await asyncio.get_running_loop().run_in_executor(self._thread, self._report)
        except (PsClusterError, RuntimeError) as error:  # RuntimeError: the job is over
            logger.debug("could not find out what was lost: %s", error)
        finally:
            with self._changed:
                self._counting -= 1
                self._changed.notify_all()

    def _report(self) -> None:
        """Warn of new losses. Calls run one at a time, on one thread."""
        lost = self.count()
        news = {name: count - known for name, count in lost.items() if count > (known := self._reported.get(name, 0))}
        self._reported = lost
        if not news:
            return
        listed = ", ".join(f"{count} of {name!r}" for name, count in news.items())
        text = f"a parameter server's process died, and acknowledged updates were lost: at least {listed}"
        logger.warning("%s: see strategy.lost_updates(); docs/guarantees.md says how to lose none", text)
        self._event_log.record("coordinator", "note", text)

    def wait(self, left: float | None) -> None:
        """Wait a moment for losses to be counted, at most `left` seconds if that is given."""
        begin = time.monotonic()
        with self._changed:
            while self._counting or self._away():
                limit = SETTLE_SECONDS if self._counting else AWAY_SECONDS
                rest = begin + (limit if left is None else min(limit, left)) - time.monotonic()
                if rest <= 0:
                    return
                self._changed.wait(rest if self._counting else min(rest, 0.05))

    def close(self) -> None:
        """Count no more: the job is over."""
        self._thread.shutdown(wait=False)
