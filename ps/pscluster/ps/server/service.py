"""Servicer of pscluster.v1.ParameterServer: decodes requests and encodes answers. Makes no decisions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from typing import Any

import grpc

from pscluster.core.errors import ProtocolError, PsClusterError, UnavailableError, kind_of
from pscluster.core.fault_points import reach
from pscluster.core.limits import MAX_COUNT, check_count, check_name, shortened
from pscluster.core.metrics.trace import SESSION_HEADER, Served
from pscluster.core.role.drain import Drain
from pscluster.core.security.access import check_coordinator
from pscluster.core.transport.admission import Admission
from pscluster.core.transport.base import server_call
from pscluster.core.transport.frames import Assembler, Buffer, padding, parts_of, unpack
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.ps.server.admission import DEFAULT_MIB, Budget, memory_of_read
from pscluster.ps.server.requests import reads, row_reads
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.write_path import Incoming, WritePath
from pscluster.ps.spec import MOVE_BYTES, SESSION_BYTES, split_step
from pscluster.v1 import ps_pb2

STILL_SECONDS = 30.0
"""How long a large request may hold its memory without progress in either direction. A client that was frozen repeats
it."""

_MAX_NAME = 64

_COMING_BYTES = 48 << 20
"""Memory for messages that are still arriving, besides the unused budget for large requests."""

_WORDS = {"read": "pull", "update": "push"}


def _name_of(context: grpc.ServicerContext) -> str:
    """Return the name that a client gave its session or large request; "" if none."""
    names = [str(value) for key, value in context.invocation_metadata() or () if key == SESSION_HEADER]
    return names[0][:_MAX_NAME] if names else ""


def _check_session(size: int) -> None:
    """Raise ProtocolError if a reply is too large for a session."""
    if size > SESSION_BYTES:
        raise ProtocolError(f"a read of {size} bytes on a session; above {SESSION_BYTES} it is a Pull")


def _distinct(names: Iterable[str]) -> list[str]:
    """Return each name once, in order. ProtocolError if one is invalid."""
    distinct = list(dict.fromkeys(names))
    for name in distinct:
        check_name(name, "a name")
    return distinct


class ParameterServerService:
    """See ps.proto for what each method promises."""

    def __init__(
        self, role: ParameterServerRole, in_flight_bytes: int = DEFAULT_MIB << 20, watchdog: StallWatchdog | None = None
    ) -> None:
        self._role = role
        self._watchdog = watchdog or StallWatchdog(STILL_SECONDS)
        self._metrics = role.metrics
        self.budget = Budget(in_flight_bytes)
        self.admission = Admission(lambda: _COMING_BYTES + self.budget.left)
        self.budget.on_reserved = self.admission.shrink
        self._incoming = Incoming(self._watchdog)
        self.writes = WritePath(role, self.budget, self._incoming)
        # The server may be restarted, so clients that are refused retry.
        self.drain = Drain(lambda: UnavailableError(f"ps {role.store.index} is stopping"))

    def session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        """Answer small requests in order, with bytes, or on the data plane in parts. Refusals don't end the session."""
        name, reply = _name_of(context), server_call(context).reply
        for nth, data in enumerate(requests, 1):
            begin = time.monotonic()
            direction, parts = self._reply(data, requests, context)
            if direction:
                self._counted(direction, begin, sum(map(len, parts)) if direction == "pull" else len(data), name, nth)
            yield reply(parts)
            reach("ps.answer.after")

    def _reply(self, data: bytes, more: Iterator[bytes], context: grpc.ServicerContext) -> tuple[str, list[Buffer]]:
        """Return "pull", "push" or "", and the answer in parts. Takes further frames of the request from `more`."""
        after, data = split_step(data)
        prepared = None if self._role.waiting else self._role.store.prepared(data)
        # If this raises, the request is refused below.
        if prepared is not None:
            with suppress(PsClusterError), self.drain:
                if after is not None:
                    self.writes.reach_step(self._role.store, after)
                return "pull", prepared.reply()
        request, payload = unpack(data, ps_pb2.Request)
        if after is not None:
            request.after.CopyFrom(after)
        if request.last:
            answer = self._answered(data, request, Payload([payload]), len(payload), context)
            if answer[0] == "pull" and not payload and not request.id and not (after is None and request.after.run):
                self._role.store.prepare(data, request.read)
            return answer
        assembler = Assembler(SESSION_BYTES)
        assembler.add(request, payload)
        del payload
        waiting = self.admission.enter(context, request.total_bytes)
        try:
            self._incoming.assemble(assembler, more, context)
            return self._answered(b"", request, Payload(assembler.chunks), request.total_bytes, context)
        finally:
            self.admission.leave(waiting)

    def _answered(
        self, data: bytes, request: ps_pb2.Request, payload: Payload, size: int, context: grpc.ServicerContext
    ) -> tuple[str, list[Buffer]]:
        """Return as `_reply` does, once the request and its payload of `size` bytes are complete."""
        reply, buffers = ps_pb2.Reply(id=request.id, last=True), list[Buffer]()
        try:
            if request.total_bytes != size:
                raise ProtocolError(f"{size} bytes came where {request.total_bytes} were declared")
            with self.drain, self._incoming.turn(data, size):
                buffers = self._answer(request, payload, reply, context)
        except PsClusterError as error:
            reply.refusal.kind, reply.refusal.message = kind_of(error)[0], shortened(str(error))
            self._metrics.refused += 1
        reply.total_bytes = sum(map(len, buffers))
        return _WORDS.get(reply.WhichOneof("body") or "", ""), parts_of(reply, buffers)

    def _answer(
        self, request: ps_pb2.Request, chunks: Payload, reply: ps_pb2.Reply, context: grpc.ServicerContext
    ) -> list[Buffer]:
        store = self._role.serving()
        body = request.WhichOneof("body")
        if request.HasField("after"):
            self.writes.reach_step(store, request.after)
        if body == "read":
            buffers = self._read(store, request.read, request.total_bytes, chunks)
            if request.read.whole:
                buffers += self._read_whole(store, request.read.whole)
                _check_session(sum(map(len, buffers)))
            reply.read.SetInParent()
            return buffers
        if body == "update":
            reply.update.CopyFrom(self.writes.update(store, request, chunks, context))
        elif body == "create":
            reply.create.CopyFrom(self.writes.create(store, request, chunks, context))
        else:
            raise ProtocolError("a request without a body")
        return []

    @staticmethod
    def _read(store: Store, request: ps_pb2.ReadRequest, ids_bytes: int, payload: Payload) -> list[Buffer]:
        if (rows := row_reads.rows_of(store, request, ids_bytes)) is not None:
            _check_session(rows[1])
            return [row_reads.gathered(*rows, payload)]
        sources = reads.sources_of(store, request, ids_bytes)
        _check_session(reads.reply_bytes(sources))
        return list(reads.read(store, request, payload, sources))

    def _read_whole(self, store: Store, data: bytes) -> list[Buffer]:
        """Return what is read by a request within another one."""
        if (prepared := store.prepared(data)) is not None:
            return [prepared.values()]
        request, payload = unpack(data, ps_pb2.Request)
        read = request.read
        alone = request.WhichOneof("body") == "read" and not (len(payload) or read.whole or request.HasField("after"))
        if not (alone and request.last) or not all(item.rows.all for item in read.items):
            raise ProtocolError("a request within a read that does not read arrays whole")
        buffers = self._read(store, read, 0, Payload([payload]))
        store.prepare(data, read)
        return buffers

    def pull(self, data: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
        """Answer a read in frames, each sent or copied before its parts may change."""
        begin, nbytes, call = time.monotonic(), 0, server_call(context)
        with self.drain:
            request, payload = unpack(data, ps_pb2.Request)
            store = self._role.serving()
            if request.WhichOneof("body") == "move":
                with self.budget.reserve(MOVE_BYTES, context):
                    for frame in self._pages(store, request, context, call.frame_bytes):
                        with self._watchdog.with_call(context):
                            yield call.reply(frame)
                return
            if request.WhichOneof("body") != "read" or request.read.whole:
                raise ProtocolError("a Pull is a read, without another request in it")
            if request.HasField("after"):
                self.writes.reach_step(store, request.after)
            with self._incoming.turn(data, len(payload)):
                total = reads.reply_bytes(reads.sources_of(store, request.read, len(payload)))
            with (
                self.budget.reserve(memory_of_read(request.read, total), context),
                closing(reads.frames(store, request, Payload([payload]), total, call.frame_bytes)) as frames,
            ):
                for frame in frames:
                    nbytes += sum(map(len, frame))
                    with self._watchdog.with_call(context):  # until the next one is requested
                        yield call.reply(frame)
        self._counted("pull", begin, nbytes, _name_of(context))

    def _pages(
        self, store: Store, request: ps_pb2.Request, context: grpc.ServicerContext, frame_bytes: int
    ) -> Iterator[list[Buffer]]:
        """Return the frames of pages of a shard that moves."""
        check_coordinator(context, "moves of shards")
        store.check_job(request.move.job)
        _, buffers = self._role.moves.handle(store, request.move, memoryview(b""))
        gap = padding(sum(map(len, buffers)))
        return reads.whole(request.id, [*buffers, bytes(gap)], frame_bytes)

    def push(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Receive an update (or creation) in frames, and apply it once it is whole."""
        begin = time.monotonic()
        with self.drain:
            direction, nbytes, answer = self.writes.push(self._role.serving(), frames, context)
        if direction:
            self._counted(direction, begin, nbytes, _name_of(context))
        return answer

    def _counted(self, direction: str, begin: float, nbytes: int, name: str, nth: int = 1) -> None:
        """Count an answered request: the n-th of the session with this name, or a large one."""
        end, metrics = time.monotonic(), self._metrics
        if direction == "pull":
            metrics.pulls.add(end - begin)
            metrics.pulled_bytes += nbytes
        else:
            metrics.pushes.add(end - begin)
            metrics.pushed_bytes += nbytes
        if name:
            metrics.recording.served.append(Served(name, nth, direction, begin, end))

    def _store_of(self, job: int) -> Store:
        """Return the store for a request of this job. StaleError if the server serves another one."""
        store = self._role.serving()
        store.check_job(job)
        return store

    def describe(self, request: ps_pb2.DescribeRequest, context: grpc.ServicerContext) -> ps_pb2.DescribeReply:
        if request.saved:
            check_coordinator(context, "methods that write to the disk")
        store = self._store_of(request.job)
        variables, optimizers = _distinct(request.variables), _distinct(request.optimizers)
        if request.saved:
            self._role.manager.save()
        if request.seen:
            check_count(len(request.seen), MAX_COUNT, "shards whose updates were seen")
            store.note_lost((seen.variable, seen.shard, seen.boot_id, seen.updates) for seen in request.seen)
            self._role.manager.write_losses()
        reply = store.describe(variables, optimizers, request.all, request.moved)
        if request.metadata:
            reply.metadata.update(store.directory.metadata.texts)
        return reply

    def delete(self, request: ps_pb2.DeleteRequest, _context: grpc.ServicerContext) -> ps_pb2.DeleteReply:
        self.writes.delete(self._store_of(request.job), request)
        return ps_pb2.DeleteReply()

    def close_incarnation(
        self, request: ps_pb2.CloseIncarnationRequest, _context: grpc.ServicerContext
    ) -> ps_pb2.CloseIncarnationReply:
        """Refuse this incarnation: none of its updates is applied after the reply."""
        store = self._store_of(request.job)
        reach("ps.incarnation.before")
        store.close_incarnation(request.incarnation)
        reach("ps.incarnation.after")
        return ps_pb2.CloseIncarnationReply()

    def finish_functions(
        self, request: ps_pb2.FinishFunctionsRequest, _context: grpc.ServicerContext
    ) -> ps_pb2.FinishFunctionsReply:
        store = self._store_of(request.job)
        if len(request.starts) != len(request.stops):
            raise ProtocolError("intervals of functions need a stop for each start")
        check_count(len(request.starts), MAX_COUNT, "intervals of functions")
        check_count(len(request.keys), MAX_COUNT, "keys of functions")
        store.finish_functions(
            list(zip(request.starts, request.stops, strict=True)), request.keys, shut_out=request.shut_out
        )
        reach("ps.finish.after")
        return ps_pb2.FinishFunctionsReply()

    def checkpoint(self, request: ps_pb2.CheckpointRequest, _context: grpc.ServicerContext) -> ps_pb2.CheckpointReply:
        store = self._store_of(request.job)
        reply = ps_pb2.CheckpointReply()
        with self.drain:
            if request.action == ps_pb2.CheckpointRequest.MARK:
                reply.metadata.update(self._role.parts.mark(store, request.id))
                reach("ps.mark.after")
            elif request.action == ps_pb2.CheckpointRequest.WRITE:
                reach("ps.part.before")
                path = self._role.roots.path_of(request.directory, request.file)
                begin = time.monotonic()
                reply = self._role.parts.write(store, request.id, path)
                self._metrics.checkpoints.add(time.monotonic() - begin)
                self._metrics.checkpoint_bytes += reply.bytes
                reach("ps.part.after")
            elif request.action == ps_pb2.CheckpointRequest.DROP:
                self._role.parts.drop_mark(request.id)
            else:
                raise ProtocolError(f"action {request.action} of a checkpoint")
        return reply

    def restore(self, request: ps_pb2.RestoreRequest, _context: grpc.ServicerContext) -> ps_pb2.RestoreReply:
        store = self._store_of(request.job)
        with self.drain:
            self.writes.restore(store, request)
        return ps_pb2.RestoreReply()

    def move(self, request: ps_pb2.MoveRequest, context: grpc.ServicerContext) -> ps_pb2.MoveReply:
        """Take one step of the move of a shard."""
        check_coordinator(context, "moves of shards")
        store = self._store_of(request.job)
        with self.drain:
            if request.action == ps_pb2.MoveRequest.RESIZE:
                self._role.resize(request.num_servers)
                return ps_pb2.MoveReply()
            return self._role.moves.handle(store, request, memoryview(b""))[0]
