"""Reads what the live page shows, while somebody looks. On the page's loop, but for the roles' accounts.

sampling    once a second, always: two numbers and the loss are noted, for the curves
looking     while somebody has the page open: what the coordinator knows is read twice a second, under the
            dispatcher's lock for as long as it takes to copy a few numbers a worker; the roles are asked for their
            accounts every other second, all at once; what comes of it is given to all who look
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from pscluster.coordinator.cli.status import Asker
from pscluster.coordinator.dashboard.view import JobSnapshot, ServerStats, page
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.local.launcher import InheritedReports
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.observability.events import Series
from pscluster.coordinator.observability.rates import BUSIEST, RateMeter, Rates
from pscluster.coordinator.scheduling.loop import in_thread
from pscluster.core.metrics.registry import resident_bytes
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""So often what is shown is made anew, while somebody looks."""

ASK_SECONDS = 2.0
"""So often the roles are asked. It is what costs most of all this: their processor time more than ours."""

ANSWER_SECONDS = 1.0
"""So long each may take to answer."""

MISSES = 2
"""A role that has answered counts as silent when it does not so many times, one after the other."""

OLD_SECONDS = 5.0

SAMPLE_SECONDS = 1.0


class Watch:
    """Of one job."""

    def __init__(self, context: JobContext) -> None:
        self._context = weakref.ref(context)
        self._asker: Asker | None = None
        self._meter = RateMeter()
        self._rates = Rates({}, [])
        self._replies: dict[str, node_pb2.StatusReply] = {}  # the last ones
        self._misses: dict[str, int] = {}  # since then
        self._asked_at = 0.0
        self._asked = False
        self._series = Series(time.monotonic(), _done(context))
        self._event_log = context.event_log
        resolver = context.resolver
        self._reports = resolver.reports if isinstance(resolver, LocalCluster) else InheritedReports()
        self._watchers = 0
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._text = ""
        self._ended = False

    async def run(self) -> None:
        """Until it is cancelled: the sampling, and the looking."""
        await asyncio.gather(*map(self._on_and_on, (self._sample, self._show, self._ask)))

    async def _on_and_on(self, once: Callable[[], Awaitable[None]]) -> None:
        said = ""
        while True:
            try:
                await once()
            except Exception as error:  # in what somebody has named, or returned as a loss: the next one may do
                if (why := f"{type(error).__name__}: {error}") != said:
                    said = why
                    logger.exception("the live page could not be brought up to date")
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
        text = self._picture()
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
        if self._asker is None:
            self._asker = Asker(context.tasks)
        asker, self._asked_at = self._asker, time.monotonic()
        del context
        answers = await in_thread(asker.ask, BUSIEST, ANSWER_SECONDS)
        new = {
            peer.task: answer for peer, answer in zip(asker.peers, answers, strict=True) if not isinstance(answer, str)
        }
        self._misses = {task: self._misses.get(task, 0) + 1 for task in self._replies if task not in new}
        kept = {task: reply for task, reply in self._replies.items() if 0 < self._misses.get(task, 0) < MISSES}
        self._replies = {**kept, **new}
        self._rates, self._asked = self._meter.add(time.monotonic(), new), True

    def _forget_old(self) -> None:
        """Nobody has looked for a while: what the roles said then is not how they are."""
        if time.monotonic() - self._asked_at > OLD_SECONDS:
            self._meter, self._rates = RateMeter(), Rates({}, [])
            self._replies, self._misses, self._asked = {}, {}, False

    def _picture(self, *, details: bool = False) -> str:
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
            queue=None if dispatcher is None else dispatcher.stats(),
            connected=context.connected,
            servers=[ServerStats(peer, gone.get(peer, 0.0)) for peer in context.tasks if peer.role == "ps"],
            workers=[peer for peer in context.tasks if peer.role == "worker"],
            replies=self._replies,
            asked=self._asked,
            rates=self._rates,
            event_log=self._event_log,
            series=self._series,
        )
        return json.dumps(page(snapshot, details=details), separators=(",", ":"), allow_nan=False, default=str)

    async def look(self) -> str:
        """What is shown now; the roles are asked if nobody has lately."""
        if not self._watchers and time.monotonic() - self._asked_at > ASK_SECONDS:  # however many look at once
            self._forget_old()
            await self._ask_once()
        return self._picture(details=True)

    def detail(self, number: int) -> str | None:
        """The traceback of the error of this number; None: there is no such error, or not any more."""
        return next((error.detail for error in self._event_log.errors if error.number == number), None)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Somebody does within the block."""
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

    async def pictures(self) -> AsyncIterator[str]:
        """Each new one, until the end. Who is slow gets fewer."""
        sent = self._picture()
        yield sent
        while not self._ended:
            async with self._changed:
                await self._changed.wait()
                sent = self._text
            yield sent
        if sent is not self._text:  # the end came while this was sent
            yield self._text

    async def end(self) -> None:
        """The last picture."""
        self._ended = True
        await self._publish()

    def close(self) -> None:
        """Close the connections."""
        if self._asker is not None:
            self._asker.close()


def _done(context: JobContext) -> int:
    dispatcher = context.dispatcher
    return 0 if dispatcher is None else dispatcher.functions_done
