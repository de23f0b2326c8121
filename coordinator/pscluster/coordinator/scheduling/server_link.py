"""The coordinator's attachment to a parameter server, on the loop: taken, watched, taken again."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
import tenacity

from pscluster.coordinator.observability.events import EventLog
from pscluster.coordinator.scheduling.connections import (
    CALL_SECONDS,
    LOST_CONNECTION,
    RETRY_WAIT,
    AioChannel,
    TlsDiagnosis,
    why_lost,
)
from pscluster.core.errors import (
    BusyError,
    PsClusterError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
    from_rpc,
)
from pscluster.core.intervals import IntervalSet
from pscluster.core.limits import MAX_COUNT, one_line
from pscluster.core.transport.channels import (
    HELLO_SECONDS,
    NODE_SERVICE,
    PeerAddress,
    open_aio_channel,
)
from pscluster.core.transport.methods import Stub
from pscluster.ps.spec import SERVICE as PS_SERVICE
from pscluster.v1 import node_pb2, ps_pb2
from pscluster.worker.servers import not_listed

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.1


class ServerAttachment:
    """The coordinator's control of one parameter server."""

    gone_since = 0.0  # 0: it is there
    returns = 0  # how often it was taken again
    on_return: Callable[[ServerAttachment], None] | None = (
        None  # called on the loop when a server is back that was restored
    )

    def __init__(
        self,
        peer: PeerAddress,
        attach: node_pb2.AttachRequest,
        declare_again: Callable[[int, Sequence[int]], Awaitable[None]],
        holding: int = 0,
        event_log: EventLog | None = None,
    ) -> None:
        """Nothing is dialled yet.

        Args:
            declare_again: sends a server, by its index, the rules of these optimizers, which it keeps nowhere.
            holding: the number of what it has to hold as it is taken; 0: it may hold anything.
            event_log: is told when it goes and when it is back.
        """
        self.peer = peer
        self._request = attach
        self._declare_again = declare_again
        self._unlisted: set[int] = set()  # workers that this has been said of
        self._closed: list[int] = []  # incarnations; what a server that comes back has to know before it serves
        self._finished = IntervalSet()
        self._generation = 0 if peer.tls is None else peer.tls.look_again()  # before the channel: that may be newer
        self._channel = open_aio_channel(peer)
        self._node = Stub(self._channel, NODE_SERVICE)
        self._ps = Stub(self._channel, PS_SERVICE)
        # Channels with a certificate that was renewed since, by the task that closes each.
        self._retired: dict[asyncio.Task[None], AioChannel] = {}
        self._diagnosis = TlsDiagnosis(peer)
        self._attached: Any = None
        self._watching: asyncio.Task[PSUnavailableError] | None = None
        self.over = False  # the job is being ended: that the server goes is no news
        self.restored = ""  # what it said of that when it was taken
        self.holding = holding  # the number of what it holds for this job
        self.term = 0  # of what it holds: see UpdateRequest
        self._event_log = event_log or EventLog()

    async def attach(self) -> None:
        """Take the server for this job. BusyError while another coordinator holds it."""
        self._renew()
        request = node_pb2.AttachRequest()
        request.CopyFrom(self._request)
        request.holding = self.holding
        request.closed.extend(self._closed)
        for start, stop in self._finished:
            request.finished_starts.append(start)
            request.finished_stops.append(stop)
        call = self._node.attach(request)
        try:
            event = await call.read()
        except grpc.RpcError as error:
            # Not by way of a variable: the error and this frame would hold each other, 20 KiB at every attempt.
            failure = from_rpc(error, str(self.peer))
            await self._diagnosis.diagnose(failure)
            raise self._why(failure) from None
        if event is grpc.aio.EOF:
            raise UnavailableError(f"{self.peer} ended the connection to this coordinator")
        if event.missing_rules:
            await self._declare_again(self.peer.index, event.missing_rules)
        self._attached, self.holding, self.restored, self.term = call, event.incarnation, event.restored, event.term

    def _renew(self) -> None:
        """With a renewed certificate comes a channel of its own: the one there is would dial with the old for ever."""
        if self.peer.tls is not None and self.peer.tls.look_again() != self._generation:
            self._generation = self.peer.tls.generation
            self._retire(self._channel)
            self._channel = open_aio_channel(self.peer)
            self._node = Stub(self._channel, NODE_SERVICE)
            self._ps = Stub(self._channel, PS_SERVICE)

    def _retire(self, channel: AioChannel) -> None:
        """Close a channel that no new call takes, once the calls on it have ended."""
        closing = asyncio.create_task(
            channel.close(CALL_SECONDS)
        )  # only attachments last longer, and this one's is lost
        self._retired[closing] = channel
        closing.add_done_callback(self._retired.pop)

    def _why(self, failure: PsClusterError) -> PsClusterError:
        if isinstance(failure, StaleError):
            return PSUnavailableError(f"{self.peer} refuses this coordinator: {failure}")
        return failure

    async def take(self) -> None:
        """Take the server, patiently where it can't be reached; BusyError at once."""
        try:
            async for attempt in self._retrying():
                with attempt:
                    await self.attach()
        except tenacity.RetryError as error:
            raise UnavailableError(str(error.last_attempt.exception())) from None

    def begin(self) -> None:
        """Look after the server from now on: take it again when it comes back."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def watch(self) -> PSUnavailableError:
        """Return, with the reason, when the server is lost: it can't be reached, or no longer holds what it held."""
        self.begin()
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
                # Busy: the end of the old connection has not been noticed there yet.
                async for attempt in self._retrying(BusyError):
                    with attempt:
                        await self.attach()
            except (PsClusterError, tenacity.RetryError) as error:
                why = error.last_attempt.exception() if isinstance(error, tenacity.RetryError) else error
                if isinstance(why, PSUnavailableError):
                    return why
                return self._lost(why)
            if self.restored and self.on_return is not None:
                self.on_return(self)
            took, self.gone_since = time.monotonic() - gone, 0.0
            self.returns += 1
            if self.restored:
                logger.warning("%s is back after %.1f s, with %s", self.peer, took, self.restored)
                self._event_log.record(self.peer.task, "up", f"is back after {took:.1f} s, with {self.restored}")
            else:
                logger.info("%s is reachable again after %.1f s", self.peer, took)
                self._event_log.record(self.peer.task, "up", f"is reachable again after {took:.1f} s")

    async def check(self) -> PSUnavailableError | None:
        """Why the server is lost, of which somebody else has said so; None if it answers, and holds what it held.

        Whoever says so has waited for it already. So has this, where it was found to be gone before.
        """
        request, since = node_pb2.HelloRequest(identity=self._request.coordinator), 0.0
        while True:
            asked = time.monotonic()
            try:
                reply = await self._node.hello(request, timeout=min(HELLO_SECONDS, self._request.ps_timeout))
            except LOST_CONNECTION as error:
                failure = why_lost(error, str(self.peer))
            else:
                if not self.holding or reply.holding == self.holding:
                    return None
                return PSUnavailableError(
                    f"{self.peer} is lost: it was restarted without its variables, or serves another job"
                )
            since = since or asked
            waited = time.monotonic() - min(since, self.gone_since or since)
            if waited >= self._request.ps_timeout or self.peer.why_gone():
                return self._lost(failure)
            await asyncio.sleep(_CHECK_SECONDS)

    def _lost(self, why: object) -> PSUnavailableError:
        found = self.peer.why_gone() or self._diagnosis.why or why
        return PSUnavailableError(f"{self.peer} is lost, and with it its shards of all variables: {found}")

    def _tell_unlisted(self, worker: node_pb2.Identity) -> None:
        """Log it, once: a worker uses this server's cluster, and is not in this coordinator's."""
        if worker.index in self._unlisted:
            return
        self._unlisted.add(worker.index)
        name = one_line(worker.name) or f"worker {worker.index}"
        text = not_listed(worker.index, "this coordinator", self._request.workers)
        logger.warning("%s is up, but %s", name, text)
        self._event_log.record(f"worker {worker.index}", "note", text)

    async def close_incarnation(self, incarnation: int) -> None:
        """Nothing of it is applied on this server afterwards. PSUnavailableError if the server is lost."""
        self._closed.append(incarnation)
        request = ps_pb2.CloseIncarnationRequest(job=self._request.job, incarnation=incarnation)
        await self._repeated(lambda: self._ps.close_incarnation(request, timeout=CALL_SECONDS))

    async def finish_functions(
        self, intervals: Sequence[tuple[int, int]], keys: Iterable[int] = (), *, shut_out: bool = False
    ) -> None:
        """These functions have ended, and those with these keys will not be run again.

        With `shut_out`: nothing of them is applied on this server afterwards. PSUnavailableError if it is lost.
        """
        for start, stop in intervals:
            self._finished.add(start, stop)
        forgotten = list(keys)
        for at in range(0, max(len(intervals), len(forgotten), 1), MAX_COUNT):
            some = intervals[at : at + MAX_COUNT]
            request = ps_pb2.FinishFunctionsRequest(
                job=self._request.job,
                starts=[start for start, _ in some],
                stops=[stop for _, stop in some],
                keys=forgotten[at : at + MAX_COUNT],
                shut_out=shut_out,
            )
            call = functools.partial(self._ps.finish_functions, request, timeout=CALL_SECONDS)
            await self._repeated(call)

    async def close(self) -> None:
        """Close the connection."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        channels = (*self._retired.values(), self._channel)
        for closing in self._retired:
            closing.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _repeated(self, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            async for attempt in self._retrying():
                with attempt:
                    try:
                        await call()
                    except grpc.RpcError as error:
                        raise from_rpc(error, str(self.peer)) from None
        except tenacity.RetryError as error:
            raise PSUnavailableError(self.peer.why_gone() or str(error.last_attempt.exception())) from None
        except StaleError as error:  # it knows nothing of the job: it was restarted, and has lost what it held
            raise PSUnavailableError(f"{self.peer}: {error}") from None

    def _retrying(self, *also: type[PsClusterError]) -> tenacity.AsyncRetrying:
        late = tenacity.stop_after_delay(self._request.ps_timeout)
        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, (UnavailableError, *also)) and not isinstance(error, PSUnavailableError)
            ),
            wait=RETRY_WAIT,
            stop=lambda state: late(state) or bool(self.peer.why_gone()),
        )


def unreachable(servers: Iterable[ServerAttachment]) -> dict[PeerAddress, float]:
    """Those that are, and for how many seconds."""
    now = time.monotonic()
    return {server.peer: now - since for server in servers if (since := server.gone_since)}


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rising numbers as [start, stop) of those that follow one another."""
    at = 0
    while at < len(numbers):
        start = at
        while at < len(numbers) and numbers[at] - numbers[start] == at - start:
            at += 1
        yield numbers[start], numbers[start] + at - start
