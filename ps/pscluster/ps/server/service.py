"""Servicer of pscluster.v1.ParameterServer: decodes requests, and encodes the answers. Decides nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import grpc

from pscluster.core.errors import ProtocolError, PsClusterError, UnavailableError, kind_of
from pscluster.core.fault_points import reach
from pscluster.core.limits import MAX_COUNT, check_count, check_name, shortened
from pscluster.core.metrics.trace import SESSION_HEADER, Served
from pscluster.core.role.drain import Drain
from pscluster.core.security.access import check_coordinator
from pscluster.core.transport.admission import Admission
from pscluster.core.transport.frames import (
    CHUNK_BYTES,
    DATA_FRAME_BYTES,
    Assembler,
    Buffer,
    parts_of,
    pieces,
    unpack,
)
from pscluster.core.transport.server_call import server_call
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.ps.server import reads
from pscluster.ps.server.admission import DEFAULT_MIB, Budget, memory_of_read
from pscluster.ps.server.incoming import Incoming
from pscluster.ps.server.payload import Payload
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.shard import Snapshot
from pscluster.ps.server.store import Store
from pscluster.ps.server.write_path import WritePath
from pscluster.ps.spec import MESSAGE_BYTES, SESSION_BYTES
from pscluster.v1 import ps_pb2

STILL_SECONDS = 30.0
"""So long a large request may keep its memory while nothing of it comes, or is taken. A client that was frozen sends it
again."""

_MAX_NAME = 64

_COMING_BYTES = 48 << 20
"""Messages that are still coming may take so much, and what large requests leave of their budget."""

_FRAME_BLOCKS = DATA_FRAME_BYTES // CHUNK_BYTES


class _Frames:
    """The frames of a reply of so many bytes."""

    def __init__(self, number: int, total: int) -> None:
        self._number, self._total = number, total
        self._before = 0  # where the frame before began
        self.done = 0

    def parts(self, buffers: Sequence[Buffer], again: bool = False) -> list[Buffer]:
        """The next frame, if these are its bytes."""
        reply = ps_pb2.Reply(id=self._number, again=again, last=self.done + sum(map(len, buffers)) == self._total)
        if not self.done:
            reply.total_bytes = self._total
            reply.read.SetInParent()
        return parts_of(reply, buffers)

    def sent(self, buffers: Sequence[Buffer], again: bool = False) -> list[Buffer]:
        """The next frame, of these bytes; or one that begins where the one before did, in its place."""
        if again:
            self.done = self._before
        frame = self.parts(buffers, again)
        self._before = self.done
        self.done += sum(map(len, buffers))
        return frame


_WORDS = {"read": "pull", "update": "push"}


def _name_of(context: grpc.ServicerContext) -> str:
    """Of a session, or of a large request, as its client has given it; "": it has none."""
    names = [str(value) for key, value in context.invocation_metadata() or () if key == SESSION_HEADER]
    return names[0][:_MAX_NAME] if names else ""


def _distinct(names: Iterable[str]) -> list[str]:
    """Each once, in order. ProtocolError for one that is no name."""
    found = list(dict.fromkeys(names))
    for name in found:
        check_name(name, "a name")
    return found


class ParameterServerService:
    """See ps.proto for what each method promises."""

    def __init__(
        self, role: ParameterServerRole, in_flight_bytes: int = DEFAULT_MIB << 20, watchdog: StallWatchdog | None = None
    ) -> None:
        self._role = role
        self._watchdog = watchdog or StallWatchdog(STILL_SECONDS)
        self._counts = role.counts
        self.budget = Budget(in_flight_bytes)
        self.admission = Admission(lambda: _COMING_BYTES + self.budget.left, MESSAGE_BYTES)
        self.budget.on_taken = self.admission.shrink
        self._incoming = Incoming(self._watchdog)
        self.writes = WritePath(role, self.budget, self._incoming, self.restore)
        # It may be started again: whoever is refused tries again.
        self.drain = Drain(lambda: UnavailableError(f"ps {role.store.index} is stopping"))

    def session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        """Small requests, answered in order: with bytes, on the data plane in parts. A refused one does not end it."""
        name, counts, reply = _name_of(context), self._counts, server_call(context).reply
        for nth, data in enumerate(requests, 1):
            begin = time.monotonic()
            what, parts = self._reply(data, requests, context)
            end = time.monotonic()
            if what == "pull":
                counts.pulls.add(end - begin)
                nbytes = sum(map(len, parts))
                counts.pulled_bytes += nbytes
            elif what == "push":
                counts.pushes.add(end - begin)
                nbytes = len(data)
                counts.pushed_bytes += nbytes
            if name and what:
                counts.recording.served.append(Served(name, nth, what, begin, end))
            yield reply(parts)
            reach("ps.answer.after")

    def _reply(self, data: bytes, more: Iterator[bytes], context: grpc.ServicerContext) -> tuple[str, list[Buffer]]:
        """What it was, "pull", "push" or neither, and the answer, in parts. Of a request in frames, more are taken."""
        reply, buffers = ps_pb2.Reply(last=True), list[Buffer]()
        prepared = None if self._role.waiting else self._role.store.prepared(data)
        if prepared is None:
            request, payload = unpack(data, ps_pb2.Request)
            reply.id = request.id
            if not request.last:
                return self._reply_to_frames(request, payload, more, reply, context)
        try:
            if prepared is not None:
                with self.drain:
                    begin = time.monotonic()
                    answer = prepared.reply()
                    took = time.monotonic() - begin
                    prepared.times += 1
                    prepared.seconds += took
                    return "pull", answer
            if request.total_bytes != len(payload):
                raise ProtocolError(f"{len(payload)} bytes came where {request.total_bytes} were declared")
            with self.drain, self._incoming.turn(data, payload):
                buffers = self._answer(request, Payload([payload]), reply, context)
            if request.HasField("read") and not payload and not request.id:
                self._role.store.prepare(data, request.read)
        except PsClusterError as error:
            reply.refusal.kind, reply.refusal.message = kind_of(error)[0], shortened(str(error))
            self._counts.refused += 1
        reply.total_bytes = sum(len(buffer) for buffer in buffers)
        return _WORDS.get(reply.WhichOneof("body") or "", ""), parts_of(reply, buffers)

    def _reply_to_frames(
        self,
        request: ps_pb2.Request,
        payload: memoryview,
        more: Iterator[bytes],
        reply: ps_pb2.Reply,
        context: grpc.ServicerContext,
    ) -> tuple[str, list[Buffer]]:
        """The same, for a request whose first frame this is."""
        assembler, buffers = Assembler(SESSION_BYTES), list[Buffer]()
        assembler.add(request, payload)
        del payload
        waiting = self.admission.enter(context, request.total_bytes)
        try:
            self._incoming.assemble(assembler, more, context)
            with self.drain:
                buffers = self._answer(request, Payload(assembler.chunks), reply, context)
        except PsClusterError as error:
            if not assembler.complete:  # what is left of it would be taken for the next request
                raise
            reply.refusal.kind, reply.refusal.message = kind_of(error)[0], shortened(str(error))
            self._counts.refused += 1
        finally:
            self.admission.leave(waiting)
        reply.total_bytes = sum(len(buffer) for buffer in buffers)
        return _WORDS.get(reply.WhichOneof("body") or "", ""), parts_of(reply, buffers)

    def _answer(
        self, request: ps_pb2.Request, chunks: Payload, reply: ps_pb2.Reply, context: grpc.ServicerContext
    ) -> list[Buffer]:
        store = self._role.serving()
        body = request.WhichOneof("body")
        if body == "read":
            size = reads.reply_bytes(store, request.read, request.total_bytes)
            if size > SESSION_BYTES:
                raise ProtocolError(f"a read of {size} bytes on a session; above {SESSION_BYTES} it is a Pull")
            buffers = list(reads.read(store, request.read, chunks))
            reply.read.SetInParent()
            return buffers
        if body == "update":
            reply.update.CopyFrom(self.writes.update(store, request, chunks))
        elif body == "create":
            reply.create.CopyFrom(self.writes.create(store, request, chunks, context))
        else:
            raise ProtocolError("a request without a body")
        return []

    def pull(self, data: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
        """A read in frames: of bytes, or on the data plane of parts, which are sent before they may change."""
        begin, nbytes, call = time.monotonic(), 0, server_call(context)
        with self.drain:
            for frame in self._frames_of(data, context, call.takes_parts):
                nbytes += sum(map(len, frame))
                with self._watchdog.with_call(context):  # until the next is asked for
                    yield call.reply(frame)
        self._counted("pull", begin, nbytes, context)

    def _frames_of(self, data: bytes, context: grpc.ServicerContext, live: bool) -> Iterator[list[Buffer]]:
        """In parts; those of live arrays are of use until the next frame is asked for."""
        request, payload = unpack(data, ps_pb2.Request)
        store = self._role.serving()
        if request.WhichOneof("body") != "read":
            raise ProtocolError("a Pull is a read")
        with self._incoming.turn(data, payload):
            total = reads.reply_bytes(store, request.read, len(payload))
        frames = _Frames(request.id, total)
        with (
            self.budget.taken(memory_of_read(request.read, total), context),
            closing(reads.segments(store, request.read, Payload([payload]))) as segments,
        ):
            small, size = list[Buffer](), 0
            for segment in segments:
                if not isinstance(segment, Snapshot):
                    small.append(segment)
                    size += len(segment)
                    if size < CHUNK_BYTES:
                        continue
                yield from map(frames.sent, pieces(small))
                small, size = [], 0
                if not isinstance(segment, Snapshot):
                    continue
                if live:
                    yield from (frames.sent([chunk], again) for chunk, again in segment.chunks(_FRAME_BLOCKS))
                    continue
                for frame, packed in segment.packed(lambda chunk: b"".join(frames.parts([chunk]))):
                    frames.done += packed
                    yield [frame]
            yield from map(frames.sent, pieces(small) if total else [[]])

    def push(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """An update (or creation) in frames; applied once it is whole."""
        begin = time.monotonic()
        with self.drain:
            what, nbytes, answer = self.writes.push(self._role.serving(), frames, context)
        if what:
            self._counted(what, begin, nbytes, context)
        return answer

    def _counted(self, what: str, begin: float, nbytes: int, context: grpc.ServicerContext) -> None:
        """A large request was answered."""
        end, counts = time.monotonic(), self._counts
        (counts.pulls if what == "pull" else counts.pushes).add(end - begin)
        if what == "pull":
            counts.pulled_bytes += nbytes
        else:
            counts.pushed_bytes += nbytes
        if name := _name_of(context):
            counts.recording.served.append(Served(name, 1, what, begin, end))

    def _store_of(self, job: int) -> Store:
        """The store, for a request of this job. StaleError if it is of another one."""
        store = self._role.serving()
        store.check_job(job)
        return store

    def describe(self, request: ps_pb2.DescribeRequest, context: grpc.ServicerContext) -> ps_pb2.DescribeReply:
        """Look names up in the directory."""
        if request.saved:
            check_coordinator(context, "what writes to the disk")
        store = self._store_of(request.job)
        variables, optimizers = _distinct(request.variables), _distinct(request.optimizers)
        if request.saved:
            self._role.manager.save()
        if request.seen:
            check_count(len(request.seen), MAX_COUNT, "shards of which updates were seen")
            store.note_lost((each.variable, each.shard, each.life, each.updates) for each in request.seen)
            self._role.manager.write_losses()
        return store.describe(variables, optimizers, request.all)

    def delete(self, request: ps_pb2.DeleteRequest, _context: grpc.ServicerContext) -> ps_pb2.DeleteReply:
        """Remove a variable, or all whose names begin with a prefix."""
        store = self._store_of(request.job)
        check_name(request.name, "a variable's name")
        check_name(request.prefix, "the beginning of variables' names")
        store.delete(request.name, request.id, request.prefix)
        reach("ps.delete.after")
        self._role.manager.save()
        return ps_pb2.DeleteReply()

    def close_incarnation(
        self, request: ps_pb2.CloseIncarnationRequest, _context: grpc.ServicerContext
    ) -> ps_pb2.CloseIncarnationReply:
        """Nothing of this incarnation is applied after the reply."""
        store = self._store_of(request.job)
        reach("ps.incarnation.before")
        store.close_incarnation(request.incarnation)
        reach("ps.incarnation.after")
        return ps_pb2.CloseIncarnationReply()

    def finish_functions(
        self, request: ps_pb2.FinishFunctionsRequest, _context: grpc.ServicerContext
    ) -> ps_pb2.FinishFunctionsReply:
        """These functions have ended."""
        store = self._store_of(request.job)
        if len(request.starts) != len(request.stops):
            raise ProtocolError("intervals of functions need as many stops as starts")
        check_count(len(request.starts), MAX_COUNT, "intervals of functions")
        check_count(len(request.keys), MAX_COUNT, "keys of functions")
        store.finish_functions(
            list(zip(request.starts, request.stops, strict=True)), request.keys, shut_out=request.shut_out
        )
        reach("ps.finish.after")
        return ps_pb2.FinishFunctionsReply()

    def checkpoint(self, request: ps_pb2.CheckpointRequest, _context: grpc.ServicerContext) -> ps_pb2.CheckpointReply:
        """Mark, write or drop this server's part of a checkpoint."""
        store = self._store_of(request.job)
        reply = ps_pb2.CheckpointReply()
        with self.drain:
            if request.action == ps_pb2.CheckpointRequest.MARK:
                self._role.parts.mark(store, request.id)
                reach("ps.mark.after")
            elif request.action == ps_pb2.CheckpointRequest.WRITE:
                reach("ps.part.before")
                path = self._role.roots.path_of(request.directory, request.file)
                begin = time.monotonic()
                reply = self._role.parts.write(store, request.id, path)
                self._counts.checkpoints.add(time.monotonic() - begin)
                self._counts.checkpoint_bytes += reply.bytes
                reach("ps.part.after")
            elif request.action == ps_pb2.CheckpointRequest.DROP:
                self._role.parts.drop_mark(request.id)
            else:
                raise ProtocolError(f"action {request.action} of a checkpoint")
        return reply

    def restore(self, request: ps_pb2.RestoreRequest, _context: grpc.ServicerContext) -> ps_pb2.RestoreReply:
        """Read a checkpoint beside what there is, or let it take its place."""
        store = self._store_of(request.job)
        with self.drain:
            if request.drop:
                self._role.parts.drop_staged(request.id)
            elif request.ahead:
                self._role.parts.name(request.id, request.shards)
            elif request.commit:
                self._role.parts.commit(store, request.id, request.term)
                reach("ps.commit.after")
                self._role.manager.save()
                reach("ps.commit.saved")
            else:
                where = functools.partial(self._role.roots.path_of, request.directory)
                self._role.parts.stage(store, request.id, request.shards, where)
                reach("ps.stage.after")
        return ps_pb2.RestoreReply()
