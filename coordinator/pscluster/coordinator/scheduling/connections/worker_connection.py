"""One attachment to a worker, on the loop: its streams and calls."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from pscluster.coordinator.scheduling.connections.lifecycle import (
    CALL_SECONDS,
    LOST_CONNECTION,
    AioChannel,
    repeat,
    why_lost,
)
from pscluster.coordinator.scheduling.connections.loop import in_thread
from pscluster.core.awake import AwakeTime
from pscluster.core.errors import UnavailableError, is_retryable
from pscluster.core.fault_points import reach
from pscluster.core.transport.base import Stream
from pscluster.core.transport.channels import NODE_SERVICE, PeerAddress, open_aio_channel, open_peer_channel
from pscluster.core.transport.frames import Assembler, Buffer, cut, pack, pieces, unpack
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.retry import FEW_ATTEMPTS
from pscluster.core.transport.transport import Transport
from pscluster.v1 import node_pb2, ps_pb2, worker_pb2
from pscluster.worker.service import SERVICE as WORKER_SERVICE

logger = logging.getLogger(__name__)

TELL_SECONDS = 5.0
_CHECKS = 20  # a lease
_STEPS = f"/{WORKER_SERVICE.full_name}/Steps"
_UNLOADED_SECONDS = 600.0  # a definition or dataset may take long to load


async def _answers(node: Stub, timeout: float) -> bool:
    """Return whether a role answers at all within `timeout` seconds."""
    try:
        await node.status(node_pb2.StatusRequest(), timeout=timeout)
    except grpc.RpcError as error:
        return not is_retryable(error)
    return True


class WorkerConnection:
    """One attachment to a worker: its streams and calls. They raise gRPC's own errors, which the link converts.

    The stream of functions has its own thread, which takes the outcomes: every function goes through it, and an asyncio
    stream took more than half of the coordinator's time.
    """

    def __init__(
        self,
        peer: PeerAddress,
        take: Callable[[WorkerConnection, Sequence[worker_pb2.Outcome]], None],
        transport: Transport,
        take_questions: Callable[[WorkerConnection, Sequence[worker_pb2.Question]], None],
    ) -> None:
        """Call these with outcomes, and questions, as they come, on the stream's thread; errors end the stream."""
        self.peer = peer
        self._take = take
        self._take_questions = take_questions
        self._transport = transport
        self._channel = open_aio_channel(peer)
        self._node = Stub(self._channel, NODE_SERVICE)
        self._worker = Stub(self._channel, WORKER_SERVICE)
        # The other two are opened once it answers: most attempts to dial a worker that is down end before.
        self._heart: AioChannel | None = None
        self._steps_channel: grpc.Channel | None = None
        self._results: Stub | None = None
        self._attached: Any = None
        self._unloaded = _UNLOADED_SECONDS
        self._stream: Stream | None = None
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Exception | None] = loop.create_future()  # why the stream ended; None: cleanly
        self._closed = False
        self._following: asyncio.Task[None] | None = None
        self.incarnation = self.boot_id = 0
        self.resharded: Sequence[ps_pb2.VariableSpec] = ()  # variables that were resharded, so far
        self._resharded_told = 0  # how many of them the worker has been sent
        self.servers: tuple[int, ...] = ()  # what those hold that the worker knows: see AttachEvent

    async def attach(self, request: node_pb2.AttachRequest) -> None:
        """Take the worker for this job, and open the stream of functions."""
        self._unloaded = _UNLOADED_SECONDS + request.ps_timeout  # loading may have to wait for a server
        self.servers = tuple(request.store_ids)
        self._attached = self._node.attach(request)
        event = await self._attached.read()
        if event is grpc.aio.EOF:
            raise UnavailableError(f"{self.peer} ended the connection to this coordinator")
        self.incarnation, self.boot_id = event.incarnation, event.identity.boot_id
        self._transport.learn(self.peer, event)
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
        """Open the stream in a thread: dialling may block for a while."""

        def close(opened: asyncio.Future[Stream]) -> None:
            if not opened.cancelled() and opened.exception() is None:
                opened.result().close()

        opening = asyncio.ensure_future(in_thread(lambda: self._transport.open(channel, _STEPS, prompt=True)))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(close)
            raise

    def _receive(self, stream: Stream, loop: asyncio.AbstractEventLoop) -> None:
        """Take outcomes until the stream ends. Runs on the stream's thread."""
        # The thread itself reports what is not an Exception.
        why: Exception | None = UnavailableError(f"the thread of {self.peer}'s outcomes has ended")
        try:
            stream.receive()  # an empty message: the stream is up
            loop.call_soon_threadsafe(self._opened.set_result, None)
            while True:
                reply = worker_pb2.StepsReply.FromString(stream.receive())
                if reply.questions:  # before the outcomes, which may be those of functions that have asked
                    self._take_questions(self, reply.questions)
                self._take(self, reply.outcomes)
        except grpc.RpcError as error:
            why = None if error.code() is grpc.StatusCode.OK else error.with_traceback(None)
            error.__context__ = None  # its frames would hold this connection, which holds the error
        except Exception as error:
            why = error
        finally:
            stream.close()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.ended.set_result, why)

    async def leaving(self) -> bool:
        """Return True when the worker announces that it leaves, False when the connection is lost."""
        with suppress(*LOST_CONNECTION):
            return await self._attached.read() is not grpc.aio.EOF
        return False

    def _heartbeat(self) -> Any:
        """Return the worker's node, on its own connection: calls must not queue after megabytes of arguments."""
        if self._heart is None:
            self._heart = open_aio_channel(self.peer)
        return Stub(self._heart, NODE_SERVICE)

    async def answers(self, seconds: float) -> bool:
        """Return whether the worker answers within this many seconds."""
        return await _answers(self._heartbeat(), seconds)

    async def until_silent(self, lease: float) -> str:
        """Return, with the reason, when the worker has not answered for `lease` seconds: it is frozen or cut off.

        Time for which this process itself was suspended does not count.
        """
        if lease == math.inf:
            await asyncio.Event().wait()
        heartbeat = self._heartbeat()
        awake, heard = AwakeTime(lease / _CHECKS), 0.0
        while (silent := awake.seconds - heard) < lease:
            asked = awake.seconds
            asking = asyncio.create_task(_answers(heartbeat, lease - silent))
            try:
                while not asking.done() and awake.seconds - heard < lease:
                    await asyncio.wait((asking,), timeout=awake.step)
                    awake.check()
            finally:
                asking.cancel()
            if asking.done() and asking.result():
                heard = awake.seconds
            while awake.seconds - asked < lease / 3:
                await asyncio.sleep(awake.step)
                awake.check()
        return f"it has not answered for {silent:.0f} s"

    def send(self, request: worker_pb2.StepsRequest) -> None:
        """Send functions, with their position. If they do not arrive the stream ends."""
        assert self._stream is not None
        request.incarnation = self.incarnation
        if len(self.resharded) > self._resharded_told:
            new, self._resharded_told = self.resharded[self._resharded_told :], len(self.resharded)
            request.resharded.extend(new)
        reach("coordinator.send.before")
        self._stream.send(request.SerializeToString())
        reach("coordinator.send.after")

    def end_steps(self) -> None:
        """Announce that no more functions come. The worker ends its side once all have outcomes."""
        assert self._stream is not None
        self._stream.end()

    async def upload(self, head: worker_pb2.UploadRequest, buffers: Sequence[Buffer] = ()) -> str:
        """Send a definition, resource or attachments. Return why a reference can't be resolved, or ""."""
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
        return str(reply.unresolved)

    def download(self, attachments: worker_pb2.Attachments) -> list[memoryview]:
        """Return the large arrays of a result. Blocks: for the stream's thread."""
        assert self._results is not None
        assembler = Assembler(sum(attachments.sizes))
        request = worker_pb2.DownloadRequest(incarnation=self.incarnation, function=attachments.function)
        for data in self._results.download(request):
            assembler.add(*unpack(data, worker_pb2.DownloadReply))
        if not assembler.complete:
            raise UnavailableError(f"{self.peer} stopped sending the result of function {attachments.function}")
        return cut(assembler.joined(), attachments.sizes)

    async def recall(
        self, functions: Sequence[int], positions: Sequence[int], cancel_running: bool, end_process: bool = False
    ) -> None:
        """Recall functions, by their ids and positions. Those that will not run there come back as outcomes.

        If the running function is one of these, ask it to stop (`cancel_running`), or kill its process (`end_process`).
        """
        request = worker_pb2.RecallRequest(
            incarnation=self.incarnation,
            functions=functions,
            positions=positions,
            cancel_running=cancel_running,
            end_process=end_process,
        )
        # Until the connection is lost: a cancelled function that is not told may run forever.
        await repeat(lambda: self._worker.recall(request, timeout=CALL_SECONDS), over=lambda: self._closed)

    async def answer(self, answer: worker_pb2.AnswerRequest) -> None:
        """Bring an answer to the function that has asked, until the worker has it or the connection is lost."""
        answer.incarnation = self.incarnation
        await repeat(lambda: self._worker.answer(answer, timeout=CALL_SECONDS), over=lambda: self._closed)

    async def report_seen(self, servers: Sequence[int]) -> None:
        """Have the worker tell these servers which updates were acknowledged to it."""
        request = worker_pb2.ReportSeenRequest(incarnation=self.incarnation, servers=servers)
        await repeat(lambda: self._worker.report_seen(request, timeout=TELL_SECONDS), attempts=FEW_ATTEMPTS)

    def follow_servers(self, moved: asyncio.Event, request: node_pb2.AttachRequest) -> None:
        """Tell the worker from now on, whenever the event is set, where the request says that servers have moved."""
        self._following = asyncio.create_task(self._follow(moved, request))

    async def _follow(self, moved: asyncio.Event, request: node_pb2.AttachRequest) -> None:
        while True:
            await moved.wait()
            moved.clear()
            moves = worker_pb2.MoveServersRequest(
                incarnation=self.incarnation,
                servers=request.moved_servers,
                ps_addresses=request.ps_addresses,
                store_ids=request.store_ids,
            )
            try:
                await repeat(
                    functools.partial(self._worker.move_servers, moves, timeout=CALL_SECONDS),
                    over=lambda: self._closed,
                )
                self.servers = tuple(moves.store_ids)
            except LOST_CONNECTION as error:  # if the connection is lost, the next one is told at once
                logger.warning("%s does not know where servers have moved to: %s", self.peer, why_lost(error, "it"))

    async def release(
        self, resources: Sequence[int] = (), definitions: Sequence[str] = (), variables: Sequence[int] = ()
    ) -> None:
        """Have the worker drop resources and definitions that are no longer used, and deleted variables."""
        request = worker_pb2.ReleaseRequest(
            incarnation=self.incarnation, resources=resources, definitions=definitions, variables=variables
        )
        await self._worker.release(request, timeout=CALL_SECONDS)

    async def close(self) -> None:
        """Close the connection; the worker notices. No outcome is taken afterwards."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()
        if self._attached is not None:
            self._attached.cancel()
            self._attached = None  # a closed channel keeps its connection while a call object, even cancelled, exists
        if self._steps_channel is not None:
            self._steps_channel.close()  # ends all calls that its thread may be waiting for
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait((self.ended,))
        await self._channel.close()
        if self._heart is not None:
            await self._heart.close()
