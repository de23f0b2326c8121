"""One attachment to a worker, on the loop: its streams and calls."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import tenacity

from pscluster.coordinator.scheduling.connections import (
    CALL_SECONDS,
    FEW_ATTEMPTS,
    LOST_CONNECTION,
    RETRY_WAIT,
    AioChannel,
)
from pscluster.coordinator.scheduling.loop import in_thread
from pscluster.core.awake import AwakeTime
from pscluster.core.errors import (
    UnavailableError,
    is_retryable,
)
from pscluster.core.fault_points import reach
from pscluster.core.transport.channels import (
    NODE_SERVICE,
    PeerAddress,
    open_aio_channel,
    open_peer_channel,
    open_stream,
)
from pscluster.core.transport.frames import Assembler, Buffer, pack, pieces, unpack
from pscluster.core.transport.grpc_streams import Stream
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.tcp.client import DataPort
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.service import SERVICE as WORKER_SERVICE

logger = logging.getLogger(__name__)

TELL_SECONDS = 5.0
_LOOKS = 20  # in a lease
_STEPS = f"/{WORKER_SERVICE.full_name}/Steps"
_UNLOADED_SECONDS = 600.0  # a definition or dataset may take long to load


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
            raise UnavailableError(f"{self.peer} ended the connection to this coordinator")
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
            raise UnavailableError(f"{self.peer} stopped sending the result of function {attachments.function}")
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
            wait=RETRY_WAIT,
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
            wait=RETRY_WAIT,
            stop=tenacity.stop_after_attempt(FEW_ATTEMPTS),
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
