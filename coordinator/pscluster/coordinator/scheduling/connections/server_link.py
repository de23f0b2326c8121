"""The coordinator's attachment to a parameter server, on the loop: taken, watched, and taken again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc

from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.scheduling.connections.lifecycle import (
    CALL_SECONDS,
    LOST_CONNECTION,
    AioChannel,
    TlsDiagnosis,
    is_cancelled,
    repeat,
    why_lost,
)
from pscluster.core.errors import BusyError, PsClusterError, PSUnavailableError, StaleError, UnavailableError, from_rpc
from pscluster.core.limits import MAX_COUNT, one_line
from pscluster.core.numbers.intervals import IntervalSet
from pscluster.core.transport.channels import HELLO_SECONDS, NODE_SERVICE, PeerAddress, open_aio_channel
from pscluster.core.transport.methods import Stub
from pscluster.ps.spec import SERVICE as PS_SERVICE
from pscluster.v1 import node_pb2, ps_pb2
from pscluster.worker.servers import not_listed

logger = logging.getLogger(__name__)

CONFIRM_SECONDS = 30.0
"""The longest time that a server that a worker reports as lost gets to answer the coordinator."""

_CHECK_SECONDS = 0.1
_MIN_HELLO_SECONDS = 0.5


class ServerAttachment:
    """The coordinator's control of one parameter server."""

    gone_since = 0.0  # when it became unreachable; 0: it is reachable
    returns = 0  # how often it was taken again
    on_return: Callable[[ServerAttachment], None] | None = None  # called on the loop once it is back and was restored
    on_lost: Callable[[int, PSUnavailableError], None] | None = None  # called on the loop, with its index

    def __init__(
        self,
        peer: PeerAddress,
        attach: node_pb2.AttachRequest,
        declare_again: Callable[[int, Sequence[int]], Future[None]],
        store_id: int = 0,
        event_log: EventLog | None = None,
    ) -> None:
        """Take `declare_again`, which sends a server the rules of these optimizers, as it does not persist them."""
        self.peer = peer
        self._request = attach
        self._declare_again = declare_again
        self._unlisted: set[int] = set()  # workers that were logged as unlisted
        self._closed: list[int] = []  # incarnations; a server that comes back must know these before it serves
        self._finished = IntervalSet()
        self._version = 0 if peer.tls is None else peer.tls.refresh()  # before the channel, which may be newer
        self._open()
        # Channels with a certificate that has been renewed since, by the task that closes each.
        self._retired: dict[asyncio.Task[None], AioChannel] = {}
        self._diagnosis = TlsDiagnosis(peer)
        self._attached: Any = None
        self._watching: asyncio.Task[PSUnavailableError] | None = None
        self.removed = False  # from the job
        self.over = False  # the job is ending: the loss of the server is not logged
        self.restored = ""  # what it had restored when it was taken
        self.store_id = store_id  # of the state that it holds for this job, or must hold when it is taken; 0: any
        self.boot_id = 0  # of the process that was taken last
        self.term = 0  # of that state: see UpdateRequest
        self._event_log = event_log or EventLog()

    async def attach(self) -> None:
        """Take the server for this job. BusyError while another coordinator holds it."""
        self._renew()
        request = node_pb2.AttachRequest()
        request.CopyFrom(self._request)
        request.store_id = self.store_id
        request.closed.extend(self._closed)
        for start, stop in self._finished:
            request.finished_starts.append(start)
            request.finished_stops.append(stop)
        call = self._node.attach(request)
        try:
            event = await call.read()
        except grpc.RpcError as error:
            # Not through a variable: the error and this frame would hold each other, 20 KiB an attempt.
            raise await self._diagnosed(from_rpc(error, str(self.peer))) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise UnavailableError(f"{self.peer.task} has moved meanwhile") from None  # its old channel is closed
        if event is grpc.aio.EOF:
            raise UnavailableError(f"{self.peer} ended the connection to this coordinator")
        if event.missing_rules:
            await asyncio.wrap_future(self._declare_again(self.peer.index, event.missing_rules))
        self._attached, self.store_id, self.restored, self.term = call, event.store_id, event.restored, event.term
        self.boot_id = event.identity.boot_id

    async def _diagnosed(self, failure: PsClusterError) -> PsClusterError:
        """Diagnose the failure of an attempt, and return the error to raise."""
        await self._diagnosis.diagnose(failure)
        if isinstance(failure, StaleError):
            return PSUnavailableError(f"{self.peer} refuses this coordinator: {failure}")
        return failure

    def _open(self) -> None:
        self._channel = open_aio_channel(self.peer)
        self._node, self._ps = Stub(self._channel, NODE_SERVICE), Stub(self._channel, PS_SERVICE)

    def move(self, peer: PeerAddress) -> None:
        """Dial the server there from now on. On the loop, while it is not attached."""
        self.peer, self._diagnosis = peer, TlsDiagnosis(peer)
        self._reopen()

    def _renew(self) -> None:
        """Open a new channel if the certificate was renewed: the old one would dial with the old one forever."""
        if self.peer.tls is not None and self.peer.tls.refresh() != self._version:
            self._version = self.peer.tls.version
            self._reopen()

    def _reopen(self) -> None:
        # Closed once its calls have ended: only attachments last longer, and this one's is lost.
        closing = asyncio.create_task(self._channel.close(CALL_SECONDS))
        self._retired[closing] = self._channel
        closing.add_done_callback(self._retired.pop)
        self._open()

    @property
    def is_here(self) -> bool:
        """Return whether it is attached."""
        return self._attached is not None and not self.gone_since

    async def take(self) -> None:
        """Take the server, retrying while it is unreachable; raise BusyError at once."""
        await self._repeat(self.attach)

    def begin(self) -> None:
        """Watch the server from now on, and take it again when it comes back."""
        self._watching = asyncio.create_task(self._watch())

    async def watch(self) -> PSUnavailableError:
        """Return, with the reason, when the server is lost: it is unreachable, or no longer holds its state."""
        assert self._watching is not None
        return await asyncio.shield(self._watching)

    async def _watch(self) -> PSUnavailableError:
        while True:
            with suppress(grpc.RpcError):
                while (event := await self._attached.read()) is not grpc.aio.EOF:
                    if event.kind == node_pb2.AttachEvent.UNLISTED:
                        self._tell_unlisted(event.identity)
            gone = self.gone_since = time.monotonic()
            if not self.over:
                timeout = self._request.ps_timeout
                logger.warning("%s is unreachable; retrying for up to %g s", self.peer, timeout)
                self._event_log.record(self.peer.task, "down", f"is unreachable; retrying for up to {timeout:g} s")
            try:
                # BusyError: the server has not noticed the end of the old connection yet.
                await self._repeat(self.attach, BusyError)
            except PsClusterError as error:
                return self._lost(error)
            if self.restored and self.on_return is not None:
                self.on_return(self)
            took, self.gone_since = time.monotonic() - gone, 0.0
            self.returns += 1
            news, level = f"is reachable again after {took:.1f} s", logging.INFO
            if self.restored:
                news, level = f"is back after {took:.1f} s, with {self.restored}", logging.WARNING
            logger.log(level, "%s %s", self.peer, news)
            self._event_log.record(self.peer.task, "up", news)

    async def check(self) -> PSUnavailableError | None:
        """Check a report that the server is lost. Return why it is, or None if it answers and still holds its state.

        The reporter has waited for `ps_timeout`. If the server does not answer here either, it gets a quarter of that
        again, at most CONFIRM_SECONDS: it may just be restarting. The time since it was found unreachable counts.
        """
        request, since = node_pb2.HelloRequest(identity=self._request.coordinator), 0.0
        patience = min(self._request.ps_timeout / 4, CONFIRM_SECONDS)
        while not self.removed:
            asked = time.monotonic()
            try:
                reply = await self._node.hello(request, timeout=min(HELLO_SECONDS, max(patience, _MIN_HELLO_SECONDS)))
            except LOST_CONNECTION as error:
                failure = why_lost(error, str(self.peer))
            else:
                if not self.store_id or reply.store_id == self.store_id:
                    return None
                why = f"{self.peer} is lost: it was restarted without its variables, or serves another job"
                return self._lost(PSUnavailableError(why))
            since = since or asked
            waited = time.monotonic() - min(since, self.gone_since or since)
            if waited >= patience or self.peer.why_gone():
                return self._lost(failure)
            await asyncio.sleep(_CHECK_SECONDS)
        return None

    def _lost(self, why: PsClusterError) -> PSUnavailableError:
        """Return the error that says the server is lost. Unless the server says why itself, end all waits for it."""
        if isinstance(why, PSUnavailableError):
            return why
        cause = self.peer.why_gone() or self._diagnosis.why or why
        lost = PSUnavailableError(f"{self.peer} is lost, and with it its shards of all variables: {cause}")
        if self.on_lost is not None:
            self.on_lost(self.peer.index, lost)
        return lost

    def _tell_unlisted(self, worker: node_pb2.Identity) -> None:
        """Log, once a worker, that it uses this server but is not in this coordinator's cluster."""
        if worker.index in self._unlisted or worker.index in self._request.workers:  # it has joined since
            return
        self._unlisted.add(worker.index)
        name = one_line(worker.name) or f"worker {worker.index}"
        text = not_listed(worker.index, "this coordinator", self._request.workers)
        logger.warning("%s is up, but %s", name, text)
        self._event_log.record(f"worker {worker.index}", "note", text)

    def knows(self, other: ServerAttachment) -> None:
        """Tell the server, once it is taken, of all incarnations and functions that are over, as another one knows."""
        self._closed = list(other._closed)
        for start, stop in other._finished:
            self._finished.add(start, stop)

    async def close_incarnation(self, incarnation: int) -> None:
        """Have this server refuse all updates of an incarnation. Raise PSUnavailableError if the server is lost."""
        self._closed.append(incarnation)
        request = ps_pb2.CloseIncarnationRequest(job=self._request.job, incarnation=incarnation)
        await self._tell("close_incarnation", request)

    async def finish_functions(
        self, intervals: Sequence[tuple[int, int]], keys: Iterable[int] = (), *, shut_out: bool = False
    ) -> None:
        """Tell the server that functions have ended, and that no function with these keys will run again.

        With `shut_out` it refuses their updates afterwards. Raise PSUnavailableError if it is lost.
        """
        for start, stop in intervals:
            self._finished.add(start, stop)
        keys = list(keys)
        for at in range(0, max(len(intervals), len(keys), 1), MAX_COUNT):
            some = intervals[at : at + MAX_COUNT]
            request = ps_pb2.FinishFunctionsRequest(
                job=self._request.job,
                starts=[start for start, _ in some],
                stops=[stop for _, stop in some],
                keys=keys[at : at + MAX_COUNT],
                shut_out=shut_out,
            )
            await self._tell("finish_functions", request)

    async def retire(self) -> None:
        """Let go of the server, which was removed from the job: it needs to hear of nothing any more."""
        self.over = self.removed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        self._reopen()  # calls that are under way end by themselves
        await self._channel.close()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        channels = (*self._retired.values(), self._channel)
        for closing in self._retired:
            closing.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _tell(self, method: str, request: object) -> None:
        """Call one of the server's methods until it answers. Raise PSUnavailableError if it is lost."""

        async def tell() -> None:
            if self.removed:
                return
            try:
                await getattr(self._ps, method)(request, timeout=CALL_SECONDS)  # on the current channel
            except grpc.RpcError as error:
                raise from_rpc(error, str(self.peer)) from None

        try:
            await self._repeat(tell)
        except UnavailableError as error:
            raise PSUnavailableError(self.peer.why_gone() or str(error)) from None
        except StaleError as error:  # it does not know the job: it was restarted, and has lost its state
            raise PSUnavailableError(f"{self.peer}: {error}") from None

    async def _repeat(self, call: Callable[[], Awaitable[None]], *also: type[PsClusterError]) -> None:
        await repeat(call, *also, seconds=self._request.ps_timeout, over=self.peer.why_gone)


def unreachable(servers: Iterable[ServerAttachment]) -> dict[PeerAddress, float]:
    """Return the unreachable ones of these servers, with the seconds for which they have been."""
    now = time.monotonic()
    return {server.peer: now - since for server in servers if (since := server.gone_since)}


def runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield rising ids as intervals [start, stop)."""
    at = 0
    while at < len(ids):
        start = at
        while at < len(ids) and ids[at] - ids[start] == at - start:
            at += 1
        yield ids[start], ids[start] + at - start
