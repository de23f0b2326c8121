"""Links: the coordinator's connections to parameter servers and workers, on the loop.

A worker's link goes round and round:

    DIALLING -> ATTACHING -> PREPARING (resources are built) -> UP -> LOST -> CLOSING (its incarnation is closed
    on every server) -> DIALLING

and tells its owner of `up`, `lost` and `closed`. Within UP a writer takes tasks and sends them, a reader takes
outcomes, and a watcher notices that the worker leaves. Whatever fails ends the round.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import tenacity

from pscluster.coordinator.observability.events import Observed
from pscluster.coordinator.scheduling.loop import in_thread
from pscluster.core.awake import AwakeTime
from pscluster.core.errors import (
    AuthenticationError,
    BusyError,
    ConfigurationError,
    NotPermittedError,
    PsClusterError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
    VersionMismatchError,
    from_rpc,
    is_retryable,
)
from pscluster.core.fault_points import reach
from pscluster.core.limits import MAX_COUNT, one_line
from pscluster.core.security.aio_channel import AuthenticatedAioChannel
from pscluster.core.transport.channels import (
    HELLO_SECONDS,
    NODE_SERVICE,
    PeerAddress,
    open_aio_channel,
    open_peer_channel,
    open_stream,
    why_untrusted,
)
from pscluster.core.transport.frames import Assembler, Buffer, pack, pieces, unpack
from pscluster.core.transport.grpc_streams import Stream
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.tcp.client import DataPort
from pscluster.ps.server.dedup import IntervalSet
from pscluster.ps.spec import SERVICE as PS_SERVICE
from pscluster.v1 import node_pb2, ps_pb2, worker_pb2
from pscluster.worker.servers import not_listed
from pscluster.worker.service import SERVICE as WORKER_SERVICE

logger = logging.getLogger(__name__)

CALL_SECONDS = 30.0
TELL_SECONDS = 5.0
_END_SECONDS = 5.0
_LOOK_SECONDS = 5.0
_WAIT = tenacity.wait_random_exponential(multiplier=0.05, max=0.25)
_REDIAL_SECONDS = 0.05, 0.5  # at least, and at most
_CHECK_SECONDS = 0.1
_LOOKS = 20  # in a lease
_TO_BE_MENDED = ConfigurationError, VersionMismatchError, AuthenticationError, NotPermittedError
_FEW = 3  # attempts of what nobody is to wait long for
_STEPS = f"/{WORKER_SERVICE.full_name}/Steps"
_UNLOADED_SECONDS = 600.0  # a definition or dataset may take long to load

AioChannel = grpc.aio.Channel | AuthenticatedAioChannel

LOST_CONNECTION = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What grpc.aio raises where a connection is lost: a status; or what is said of a closed channel, or of a write to
a call that has ended before its status was read."""


def why_lost(error: BaseException, peer: str) -> PsClusterError:
    """Our error for one of those, or one of ours as it is."""
    if isinstance(error, PsClusterError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc(error, peer)
    return UnavailableError(f"the connection to {peer} has ended: {error}")


class Distrust:
    """Why two sides whose connection was good once can't trust each other any more: a certificate has expired.

    Or why a peer refuses for as long as nobody mends it: it lists other servers, or is of another version.
    """

    def __init__(self, peer: PeerAddress) -> None:
        self._peer = peer
        self._next_look = 0.0
        self._refusal = ""
        self.why = ""

    async def look(self, failure: PsClusterError) -> None:
        """Log what it is, once: it is waited for that somebody mends it. Not looked for at each attempt."""
        if isinstance(failure, _TO_BE_MENDED) and str(failure) != self._refusal:
            self._refusal = str(failure)
            logger.error("%s refuses this coordinator until that is mended: %s", self._peer, failure)
        if self._peer.tls is None or not isinstance(failure, UnavailableError) or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        why = str(await in_thread(why_untrusted, self._peer) or "")
        if why and why != self.why:
            logger.error("%s", why)
        self.why = why


class PsLink:
    """The coordinator's control of one parameter server."""

    gone_since = 0.0  # 0: it is there
    returns = 0  # how often it was taken again
    on_return: Callable[[PsLink], None] | None = None  # called on the loop when a server is back that was restored

    def __init__(
        self,
        peer: PeerAddress,
        attach: node_pb2.AttachRequest,
        declare_again: Callable[[int, Sequence[int]], Awaitable[None]],
        holding: int = 0,
        observed: Observed | None = None,
    ) -> None:
        """Nothing is dialled yet.

        Args:
            declare_again: sends a server, by its index, the rules of these optimizers, which it keeps nowhere.
            holding: the number of what it has to hold as it is taken; 0: it may hold anything.
            observed: is told when it goes and when it is back.
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
        self._distrust = Distrust(peer)
        self._attached: Any = None
        self._watching: asyncio.Task[PSUnavailableError] | None = None
        self.over = False  # the job is being ended: that the server goes is no news
        self.restored = ""  # what it said of that when it was taken
        self.holding = holding  # the number of what it holds for this job
        self.term = 0  # of what it holds: see UpdateRequest
        self._observed = observed or Observed()

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
            await self._distrust.look(failure)
            raise self._why(failure) from None
        if event is grpc.aio.EOF:
            raise UnavailableError(f"{self.peer} ended the attachment")
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
                self._observed.tell(self.peer.task, "down", f"is unreachable; retrying for up to {timeout:g} s")
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
                self._observed.tell(self.peer.task, "up", f"is back after {took:.1f} s, with {self.restored}")
            else:
                logger.info("%s is in reach again after %.1f s", self.peer, took)
                self._observed.tell(self.peer.task, "up", f"is in reach again after {took:.1f} s")

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
                    f"{self.peer} is lost: it was restarted without its variables, or works for another job"
                )
            since = since or asked
            waited = time.monotonic() - min(since, self.gone_since or since)
            if waited >= self._request.ps_timeout or self.peer.why_gone():
                return self._lost(failure)
            await asyncio.sleep(_CHECK_SECONDS)

    def _lost(self, why: object) -> PSUnavailableError:
        found = self.peer.why_gone() or self._distrust.why or why
        return PSUnavailableError(f"{self.peer} is lost, and with it its shards of all variables: {found}")

    def _tell_unlisted(self, worker: node_pb2.Identity) -> None:
        """Log it, once: a worker uses this server's cluster, and is not in this coordinator's."""
        if worker.index in self._unlisted:
            return
        self._unlisted.add(worker.index)
        name = one_line(worker.name) or f"worker {worker.index}"
        text = not_listed(worker.index, "this coordinator", self._request.workers)
        logger.warning("%s is up, but %s", name, text)
        self._observed.tell(f"worker {worker.index}", "note", text)

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
            wait=_WAIT,
            stop=lambda state: late(state) or bool(self.peer.why_gone()),
        )


def seconds_to_redial(away: float, chance: float) -> float:
    """How long to wait before a worker that has been away for so many seconds is dialled again.

    A twentieth to a tenth of that, half a second at most: one that is back is found soon, and one that stays away
    costs some three attempts a second, of less than a millisecond each.

    Args:
        away: seconds.
        chance: a random number from 0 to 1.
    """
    shortest, longest = _REDIAL_SECONDS
    return min(max(away / 10, shortest), longest) * (0.5 + chance / 2)


async def end_job(peer: PeerAddress, job: int, reason: str) -> None:
    """Tell a role that the job is over, on a connection of its own: the ones in use may be broken."""
    request = node_pb2.EndJobRequest(job=job, reason=reason)
    async with open_aio_channel(peer) as channel:
        node, until = Stub(channel, NODE_SERVICE), time.monotonic() + _END_SECONDS
        try:
            # A role that did not hear of it keeps what it holds, and waits. One that is gone fails at once each time.
            async for attempt in tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception(is_retryable),
                wait=_WAIT,
                stop=tenacity.stop_after_attempt(_FEW) | tenacity.stop_after_delay(_END_SECONDS),
                reraise=True,
            ):
                with attempt:
                    await node.end_job(request, timeout=max(until - time.monotonic(), 0.1))
        except grpc.RpcError as error:
            logger.debug("could not tell %s that the job is over: %s", peer, error.code().name)


async def _answers(node: Stub, timeout: float) -> bool:
    """Whether a role says anything, within so many seconds."""
    try:
        await node.status(node_pb2.StatusRequest(), timeout=timeout)
    except grpc.RpcError as error:
        return not is_retryable(error)
    return True


class WorkerConnection:
    """One attachment to a worker: its streams and calls. Errors are grpc's own until the link sorts them.

    The stream of functions has a thread of its own, which takes the outcomes as they come: it is what every function
    goes through, and an asyncio stream took more than half of the coordinator's time.
    """

    def __init__(
        self,
        peer: PeerAddress,
        take: Callable[[WorkerConnection, Sequence[worker_pb2.Outcome]], None],
        data: DataPort | None = None,
    ) -> None:
        """Nothing is dialled yet.

        Args:
            take: is given outcomes as they come, on the stream's thread; what it raises ends the stream.
            data: the worker's, which functions go over if it can be reached.
        """
        self.peer = peer
        self._take = take
        self._data = data or DataPort(str(peer), peer.token, peer.tls)
        self._channel = open_aio_channel(peer)
        self._node = Stub(self._channel, NODE_SERVICE)
        self._worker = Stub(self._channel, WORKER_SERVICE)
        # The other two once it has answered: most attempts to reach one that is away end before.
        self._heart: AioChannel | None = None
        self._steps_channel: grpc.Channel | None = None
        self._results: Stub | None = None
        self._attached: Any = None
        self._unloaded = _UNLOADED_SECONDS
        self._stream: Stream | None = None
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Exception | None] = loop.create_future()  # why the stream did; None: in order
        self._closed = False
        self.incarnation = 0

    async def attach(self, request: node_pb2.AttachRequest) -> None:
        """Take the worker, and open the stream of steps."""
        self._unloaded = _UNLOADED_SECONDS + request.ps_timeout  # what is loaded may have to wait for a server
        self._attached = self._node.attach(request)
        event = await self._attached.read()
        if event is grpc.aio.EOF:
            raise UnavailableError(f"{self.peer} ended the attachment")
        self.incarnation = event.incarnation
        self._data.learn(self.peer, event)
        channel = self._steps_channel = open_peer_channel(self.peer)
        self._results = Stub(channel, WORKER_SERVICE)
        stream = self._stream = await self._open_stream(channel)
        stream.send(worker_pb2.StepsRequest(incarnation=self.incarnation).SerializeToString())
        name = f"outcomes-{self.peer.index}"
        arguments = (stream, asyncio.get_running_loop())
        threading.Thread(target=self._receive, args=arguments, name=name, daemon=True).start()
        await asyncio.wait((self._opened, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            raise self.ended.result() or UnavailableError(f"{self.peer} ended the stream of steps")

    async def _open_stream(self, channel: grpc.Channel) -> Stream:
        """Over the data plane, if that can be reached, else over gRPC."""

        def open_either() -> Stream:
            return self._data.open_prompt(_STEPS, ()) or open_stream(channel, _STEPS, ())

        def close(opened: asyncio.Future[Stream]) -> None:
            if not opened.cancelled() and opened.exception() is None:
                opened.result().close()

        opening = asyncio.ensure_future(in_thread(open_either))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(close)
            raise

    def _receive(self, stream: Stream, loop: asyncio.AbstractEventLoop) -> None:
        """The stream's thread."""
        # What is no Exception leaves this, and is shown by the thread itself.
        why: Exception | None = UnavailableError(f"the thread of {self.peer}'s outcomes has ended")
        try:
            stream.receive()  # empty: the stream is up
            loop.call_soon_threadsafe(self._opened.set_result, None)
            while True:
                self._take(self, worker_pb2.StepsReply.FromString(stream.receive()).outcomes)
        except grpc.RpcError as error:
            why = None if error.code() is grpc.StatusCode.OK else error.with_traceback(None)
            error.__context__ = None  # it holds frames, which hold this, which holds the error
        except Exception as error:
            why = error
        finally:
            stream.close()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.ended.set_result, why)

    async def leaving(self) -> bool:
        """Return when the worker says that it leaves (True), or is gone."""
        with suppress(*LOST_CONNECTION):
            return await self._attached.read() is not grpc.aio.EOF
        return False

    async def until_silent(self, lease: float) -> str:
        """Return, in words, when the worker has not answered for so many seconds: it is frozen, or cut off.

        Seconds for which this process itself stood still do not count.
        """
        if lease == math.inf:
            await asyncio.Event().wait()
        # Of its own: behind megabytes of arguments that a slow link has still to carry, no question would be answered.
        self._heart = open_aio_channel(self.peer)
        heart = Stub(self._heart, NODE_SERVICE)
        awake, heard = AwakeTime(lease / _LOOKS), 0.0
        while (silent := awake.seconds - heard) < lease:
            asked = awake.seconds
            asking = asyncio.create_task(_answers(heart, lease - silent))
            try:
                while not asking.done() and awake.seconds - heard < lease:
                    await asyncio.wait((asking,), timeout=awake.step)
                    awake.look()
            finally:
                asking.cancel()
            if asking.done() and asking.result():
                heard = awake.seconds
            while awake.seconds - asked < lease / 3:
                await asyncio.sleep(awake.step)
                awake.look()
        return f"it has not answered for {silent:.0f} s"

    def send(self, position: int, steps: Iterable[worker_pb2.Step]) -> None:
        """Send functions. Whether they arrive, the stream's end tells."""
        assert self._stream is not None
        request = worker_pb2.StepsRequest(incarnation=self.incarnation, position=position, steps=steps)
        reach("coordinator.send.before")
        self._stream.send(request.SerializeToString())
        reach("coordinator.send.after")

    def end_steps(self) -> None:
        """No more functions come. The worker ends its side when there is an outcome of all that did."""
        assert self._stream is not None
        self._stream.end()

    async def upload(self, head: worker_pb2.UploadRequest, buffers: Sequence[Buffer] = ()) -> str:
        """Send a definition, resource or attachments; why a reference can't be followed, or nothing."""
        head.incarnation, head.total_bytes = self.incarnation, sum(map(len, buffers))

        async def frames() -> AsyncIterator[bytes]:
            frame, sent = head, 0
            for group in pieces(buffers):
                sent += sum(map(len, group))
                frame.last = sent == head.total_bytes
                yield pack(frame, group)
                frame = worker_pb2.UploadRequest()
            if not head.total_bytes:
                head.last = True
                yield pack(head)

        reply = await self._worker.upload(frames(), timeout=self._unloaded)
        unresolved: str = reply.unresolved
        return unresolved

    def download(self, attachments: worker_pb2.Attachments) -> list[memoryview]:
        """The large arrays of a result. For the stream's thread: it waits for them."""
        assert self._results is not None
        assembler = Assembler(sum(attachments.sizes))
        request = worker_pb2.DownloadRequest(incarnation=self.incarnation, function=attachments.function)
        for data in self._results.download(request):
            assembler.add(*unpack(data, worker_pb2.DownloadReply))
        if not assembler.complete:
            raise UnavailableError(f"{self.peer} broke off the result of function {attachments.function}")
        whole, at, parts = assembler.joined(), 0, []
        for size in attachments.sizes:
            parts.append(whole[at : at + size])
            at += size
        return parts

    async def recall(
        self,
        functions: Sequence[int],
        positions: Sequence[int],
        cancel_running: bool,
        end_process: bool = False,
    ) -> None:
        """Ask for functions back. Those that will not run there come as outcomes.

        Args:
            functions: their numbers.
            positions: where they are among all that were sent.
            cancel_running: ask what runs to stop, if it is one of these.
            end_process: kill the worker's process, if it runs one of these.
        """
        request = worker_pb2.RecallRequest(
            incarnation=self.incarnation,
            functions=functions,
            positions=positions,
            cancel_running=cancel_running,
            end_process=end_process,
        )
        # Until the link itself is lost: what is cancelled and does not hear of it may run for ever.
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=_WAIT,
            stop=lambda _: self._closed,
            reraise=True,
        ):
            with attempt:
                await self._worker.recall(request, timeout=CALL_SECONDS)

    async def tell_seen(self, servers: Sequence[int]) -> None:
        """Have the worker tell these servers of how many updates it was told."""
        request = worker_pb2.TellSeenRequest(incarnation=self.incarnation, servers=servers)
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=_WAIT,
            stop=tenacity.stop_after_attempt(_FEW),
            reraise=True,
        ):
            with attempt:
                await self._worker.tell_seen(request, timeout=TELL_SECONDS)

    async def release(self, resources: Sequence[int] = (), definitions: Sequence[str] = ()) -> None:
        """Nobody uses these any more."""
        request = worker_pb2.ReleaseRequest(incarnation=self.incarnation, resources=resources, definitions=definitions)
        await self._worker.release(request, timeout=CALL_SECONDS)

    async def close(self) -> None:
        """Close the connection; the worker notices. No outcome is taken afterwards."""
        self._closed = True
        if self._attached is not None:
            self._attached.cancel()
            # A closed channel's connection stays for as long as there is a call of it, though it be cancelled.
            self._attached = None
        if self._steps_channel is not None:
            self._steps_channel.close()  # with all that its thread may wait for
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait((self.ended,))
        await self._channel.close()
        if self._heart is not None:
            await self._heart.close()


def out_of_reach(servers: Iterable[PsLink]) -> dict[PeerAddress, float]:
    """Those that are, and for how many seconds."""
    now = time.monotonic()
    return {server.peer: now - since for server in servers if (since := server.gone_since)}
