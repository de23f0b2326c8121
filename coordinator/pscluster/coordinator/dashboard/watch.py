"""Collects the contents of the live page, on the page's loop; only the roles are queried in a thread.

sampling    once a second, always: record two numbers and the loss, for the curves
watching    while the page is open somewhere: read the coordinator's state twice a second, under the dispatcher's lock
            for the time it takes to copy a few numbers per worker; query the status of all roles at once every other
            second; send the result to all open pages
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from pscluster.coordinator.dashboard.snapshot import JobSnapshot
from pscluster.coordinator.dashboard.view import page
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.local.reports import InheritedReports
from pscluster.coordinator.local.supervised import SupervisedCluster
from pscluster.coordinator.observability.events import Series
from pscluster.coordinator.observability.rates import BUSIEST, RateMeter, Rates
from pscluster.coordinator.observability.status_client import Answers, StatusClient, replies_by_task
from pscluster.coordinator.scheduling.connections.loop import in_thread
from pscluster.core.metrics.registry import resident_bytes
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5

ASK_SECONDS = 2.0
"""Seconds between queries of the roles, which are the largest cost of the page: more in their processes than here."""

ANSWER_SECONDS = 1.0  # seconds that each may take to answer
MISSES = 2  # a role that has answered before counts as silent after this many queries in a row without an answer
OLD_SECONDS = 5.0

SAMPLE_SECONDS = 1.0

SHARE = 0.1
"""Of a core, the most that is spent on contents for callers who ask again and again, as any user of the machine may on
loopback: until then they get the same."""


class Watch:
    def __init__(self, context: JobContext) -> None:
        self._context = weakref.ref(context)
        self._status_client: StatusClient | None = None
        self._meter = RateMeter()
        self._rates = Rates({}, [])
        self._replies: dict[str, node_pb2.StatusReply] = {}  # the latest
        self._misses: dict[str, int] = {}  # queries without an answer since
        self._asked_at = 0.0
        self._asked = False
        self._series = Series(time.monotonic(), _done(context))
        self._event_log = context.event_log
        resolver = context.resolver
        self._reports = resolver.reports if isinstance(resolver, SupervisedCluster) else InheritedReports()
        self._watchers = 0
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._text = ""
        self._made: dict[bool, tuple[float, str]] = {}  # contents, with details or without, and until when they count
        self._ended = False

    async def run(self) -> None:
        """Sample, update and query until cancelled."""
        await asyncio.gather(*map(self._repeat, (self._sample, self._show, self._ask)))

    async def _repeat(self, once: Callable[[], Awaitable[None]]) -> None:
        logged = ""
        while True:
            try:
                await once()
            except Exception as error:  # from a user's name or loss, for example: the next one may be valid
                if (why := f"{type(error).__name__}: {error}") != logged:
                    logged = why
                    logger.exception("the live page could not be updated")
                await asyncio.sleep(SAMPLE_SECONDS)

    async def _sample(self) -> None:
        await asyncio.sleep(SAMPLE_SECONDS)
        if (context := self._context()) is not None:
            for task, text in self._reports.take():
                self._event_log.exited(task, text)
            self._series.add(time.monotonic(), _done(context), self._event_log.take_loss(), self._event_log.steps)

    async def _show(self) -> None:
        await self._wake.wait()
        await self._publish()
        await asyncio.sleep(TICK_SECONDS)

    async def _publish(self) -> None:
        text = self._contents()
        async with self._changed:
            self._text = text
            self._changed.notify_all()

    async def _ask(self) -> None:
        await self._wake.wait()
        await self._ask_once()
        await asyncio.sleep(ASK_SECONDS)

    async def _ask_once(self) -> None:
        context = self._context()
        if context is None or self._ended:
            return
        if self._status_client is None:
            self._status_client = StatusClient(())
        client, self._asked_at, tasks = self._status_client, time.monotonic(), context.tasks
        del context

        def ask() -> Answers:
            client.follow(tasks)
            return client.ask(BUSIEST, ANSWER_SECONDS, shards=True)

        new = replies_by_task(await in_thread(ask))
        self._misses = {task: self._misses.get(task, 0) + 1 for task in self._replies if task not in new}
        kept = {task: reply for task, reply in self._replies.items() if 0 < self._misses.get(task, 0) < MISSES}
        self._replies = {**kept, **new}
        self._rates, self._asked = self._meter.add(time.monotonic(), new), True

    def _forget_old(self) -> None:
        """Forget the roles' last answers if they are out of date."""
        if time.monotonic() - self._asked_at > OLD_SECONDS:
            self._meter, self._rates = RateMeter(), Rates({}, [])
            self._replies, self._misses, self._asked = {}, {}, False

    def _contents(self, *, details: bool = False) -> str:
        context = self._context()
        if context is None:
            return self._text
        dispatcher, gone = context.dispatcher, context.unreachable()
        snapshot = JobSnapshot(
            now=time.time(),
            clock=time.monotonic(),
            job=context.request.job_name,
            coordinator=context.request.coordinator.name,
            memory_bytes=resident_bytes(),
            ended=self._ended,
            queue=None if dispatcher is None else dispatcher.status.stats(),
            connected=context.connected,
            servers={peer: gone.get(peer, 0.0) for peer in context.tasks if peer.role == "ps"},
            workers=[peer for peer in context.tasks if peer.role == "worker"],
            replies=self._replies,
            asked=self._asked,
            rates=self._rates,
            event_log=self._event_log,
            series=self._series,
        )
        return json.dumps(page(snapshot, details=details), separators=(",", ":"), allow_nan=False, default=str)

    def _recent(self, *, details: bool) -> str:
        """Return contents that have just been made, or others if making them took so long that callers share them."""
        begin = time.monotonic()
        until, text = self._made.get(details, (-math.inf, ""))
        if begin >= until or self._ended:
            text, end = self._contents(details=details), time.monotonic()
            self._made[details] = end + (end - begin) / SHARE, text
        return text

    async def state(self) -> str:
        """Return the contents of the page, with details; query the roles if their answers are out of date."""
        if not self._watchers and time.monotonic() - self._asked_at > ASK_SECONDS:  # once for any number of callers
            self._forget_old()
            await self._ask_once()
        return self._recent(details=True)

    def detail(self, event_number: int) -> str | None:
        """Return the traceback of the error with this number; None if there is none, or it is no longer recorded."""
        return next((error.detail for error in self._event_log.errors if error.number == event_number), None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count an open page within the block."""
        if not self._watchers:
            self._forget_old()
        self._watchers += 1
        self._wake.set()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._wake.clear()

    async def updates(self) -> AsyncIterator[str]:
        """Yield the contents of the page at each update, until the end. A slow caller gets fewer."""
        sent = self._recent(details=False)
        yield sent
        while not self._ended:
            async with self._changed:
                await self._changed.wait()
                sent = self._text
            yield sent
        if sent is not self._text:  # the job ended during the last send
            yield self._text

    async def end(self) -> None:
        self._ended = True
        await self._publish()

    def close(self) -> None:
        if self._status_client is not None:
            self._status_client.close()


def _done(context: JobContext) -> int:
    dispatcher = context.dispatcher
    return 0 if dispatcher is None else dispatcher.status.functions_done
