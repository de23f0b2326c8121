"""Servicer of pscluster.v1.ParameterServer: frames in, store, frames out. Decides nothing."""

from __future__ import annotations

import contextlib
import functools
import heapq
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import (
    InvalidUpdateError,
    ProtocolError,
    PsClusterError,
    StaleError,
    UnavailableError,
    kind_of,
)
from pscluster.core.fault_points import reach
from pscluster.core.functions.definitions import UnresolvedReference
from pscluster.core.ids import fresh_id
from pscluster.core.limits import MAX_CONTROL_BYTES, MAX_COUNT, MAX_PICKLE_BYTES, check_count, check_name, shortened
from pscluster.core.metrics.trace import SESSION_HEADER, Served
from pscluster.core.role.drain import Drain
from pscluster.core.role.node import Role
from pscluster.core.security.access import check_coordinator
from pscluster.core.transport.admission import Admission
from pscluster.core.transport.frames import (
    ALIGNMENT,
    CHUNK_BYTES,
    DATA_FRAME_BYTES,
    Assembler,
    Buffer,
    pack,
    padding,
    parts_of,
    pieces,
    unpack,
)
from pscluster.core.transport.tcp.context import DataContext
from pscluster.core.transport.watchdog import Patience
from pscluster.ps.request_metrics import ServiceCounts, StoreCounts
from pscluster.ps.server.admission import DEFAULT_MIB, Budget
from pscluster.ps.server.array_pool import Spares
from pscluster.ps.server.payload import Payload, Staging
from pscluster.ps.server.shard import Array, Snapshot
from pscluster.ps.server.store import Placed, Store
from pscluster.ps.spec import COPY, MESSAGE_BYTES, OURS, SESSION_BYTES
from pscluster.ps.storage.checkpoint_parts import Parts
from pscluster.ps.storage.manager import Keeper, Lineage
from pscluster.ps.storage.options import DurabilityOptions
from pscluster.ps.storage.roots import Roots
from pscluster.v1 import node_pb2, ps_pb2

WHOLE_PULL_BYTES = 16 << 20
"""What a pull of whole shards takes of the budget at most. It needs memory for the old values of what is changed while
it goes out, which is seldom much; were it all of the pull's bytes, one slow reader would keep everybody waiting."""

STILL_SECONDS = 30.0
"""So long a large request may keep its memory while nothing of it comes, or is taken. A client that was frozen sends it
again."""

OWN_SECONDS = 3.0
"""So long a server that comes back is kept for the coordinator that it had, which dials every quarter of a second."""

_MAX_NAME = 64

_COMING_BYTES = 48 << 20
"""Messages that are still coming may take so much, and what large requests leave of their budget."""

_LARGE_HEADER_BYTES = 64 << 10
"""Requests with more to look at than this are looked at one at a time: others go on beside them."""

_FRAME_BLOCKS = DATA_FRAME_BYTES // CHUNK_BYTES

_CUT_OFF = "the stream ended before its last frame: nothing was applied"

_MAX_PUSH_BYTES = 1 << 46  # what is received is bounded by the items' sizes; this bounds the declaration


MAX_BUSIEST = 256
"""Of so many variables at most does a status tell."""


class ParameterServerRole(Role):
    """Keeps the store of the job that the server works for."""

    def __init__(self, index: int, keeper: Keeper | None = None, roots: Roots | None = None) -> None:
        self.roots = roots or Roots()
        self.keeper = keeper or Keeper(DurabilityOptions())
        self.parts = Parts()
        self.counts = ServiceCounts()
        self._store_counts = StoreCounts()
        reach("ps.restore.before")
        found = self.keeper.restore()
        reach("ps.restore.after")
        self._take_on(Store(index) if found is None else found.store)
        self.kept_job = self.store.job
        self._origin = Lineage() if found is None else found.lineage
        self._restored = "" if found is None else found.words
        # Restored, and not told yet which workers were given up meanwhile: nobody is served before that.
        self.waiting = found is not None
        self._own_until = time.monotonic() + OWN_SECONDS
        self._new = False  # the job has begun, and may not be on disk

    def _take_on(self, store: Store) -> None:
        """Another store, of the same server."""
        store.counts, store.spill = self._store_counts, self.keeper.spill
        self.store = store

    def serving(self) -> Store:
        """The store, for whoever asks for something of it. UnavailableError while it waits for its coordinator."""
        if self.waiting:
            raise UnavailableError(f"ps {self.store.index} has come back, and waits for its coordinator")
        return self.store

    def admit(self, request: node_pb2.AttachRequest) -> None:
        """StaleError for a coordinator whose job is not the one that is held here, or was taken over."""
        mine = self._origin
        if (
            self.waiting
            and request.job != self.kept_job
            and not request.take_over
            and time.monotonic() < self._own_until
        ):
            raise UnavailableError("it has come back, and waits for the coordinator that it had; try again")
        if request.holding and request.holding != mine.holding:
            raise StaleError(
                "it was restarted, or worked for another coordinator meanwhile, and has lost its shards of all "
                "variables: start a new coordinator to begin anew"
            )
        if request.lineage and request.lineage == mine.lineage:
            first = request.epoch > mine.epoch
            if not first and not (request.epoch == mine.epoch and request.job == self.store.job):
                raise StaleError(
                    f"coordinator number {mine.epoch} of this job has taken it over from number {request.epoch}"
                )

    def job_began(self, request: node_pb2.AttachRequest) -> None:
        """Go on with what there is, if it is of the same lineage; else start empty: what is left is dropped."""
        if request.lineage and request.lineage == self._origin.lineage:
            reach("ps.epoch.before")
            self.store.take_over(request.job)
            self.parts.forget()  # checkpoints of a coordinator that is gone
            reach("ps.epoch.after")
            self._origin = replace(self._origin, epoch=request.epoch)
            self.keeper.go_on(self._origin)
            return
        self.parts.forget()
        self._take_on(Store(self.store.index, request.job))
        self._restored = ""
        self._origin = Lineage(fresh_id(), request.lineage, request.epoch, request.job_name)
        self.keeper.begin(self.store, self._origin)
        self._new = True

    def attached(self, request: node_pb2.AttachRequest) -> int:
        """Another number where the store is another: a coordinator that comes back sees what it has lost."""
        for incarnation in request.closed:
            self.store.close_incarnation(incarnation)
        self.store.finish_functions(list(zip(request.finished_starts, request.finished_stops, strict=True)))
        self.waiting = False
        return self._origin.holding

    def account(self, event: node_pb2.AttachEvent) -> None:
        """What was restored, once, what can't be without help, and the term."""
        event.restored, self._restored = self._restored, ""
        event.missing_rules.extend(self.store.held()[2])
        event.term = self.store.term

    def introduce(self, reply: node_pb2.HelloReply) -> None:
        """What is held."""
        mine = self._origin
        reply.holding, reply.lineage, reply.epoch, reply.job_name = mine.holding, mine.lineage, mine.epoch, mine.name

    def keep(self) -> None:
        """A job that has begun is on disk: else a server that dies now comes back without it, or with the one before.

        PsClusterError, with the reason, if it can't be put there.
        """
        if self._new:
            self.keeper.save()
            self._new = False

    def job_ended(self) -> None:
        """Drop the job's variables."""
        self.parts.forget()
        self._take_on(Store(self.store.index))
        self._origin, self.waiting = Lineage(), False
        self.keeper.end()

    def describe(self, reply: node_pb2.StatusReply) -> None:
        """Shards and bytes."""
        reply.variables, reply.variable_bytes = self.store.totals()
        reply.detail = f"{self.store.remembered} updates remembered; {self.keeper.words}"
        reply.lost_updates.update(self.store.lost)
        reply.requests = sum(self.counts.pulls.counts) + sum(self.counts.pushes.counts)
        reply.bytes_in, reply.bytes_out = self.counts.pushed_bytes, self.counts.pulled_bytes
        if self.waiting:
            reply.state = "restored, waiting for its coordinator"

    def describe_load(self, reply: node_pb2.StatusReply, busiest: int) -> None:
        """The variables of which most bytes were read and updated."""
        most = min(busiest, MAX_BUSIEST)
        traffic = [each for each in self.store.traffic() if not each[0].startswith(OURS)]
        found = heapq.nlargest(most, traffic, key=lambda each: each[2].pulled_bytes + each[2].pushed_bytes)
        for name, nbytes, counts in found:
            load = reply.busiest.add(name=name, bytes=nbytes, reads=counts.pulls, read_bytes=counts.pulled_bytes)
            load.updates, load.update_bytes = counts.pushes, counts.pushed_bytes

    def recorded(self) -> Iterator[node_pb2.Recorded]:
        """Requests."""
        return self.counts.recording.messages()


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


def _has_room(context: grpc.ServicerContext) -> None:
    """The call has its memory for all that it brings."""
    if isinstance(context, DataContext):
        context.has_room = True


def _check_amount(placed: Sequence[Placed], total: int, budget: int) -> None:
    """InvalidUpdateError if an update brings more than large requests may have together, and than it changes.

    One that names a shard again and again could bring any amount; so could one that names rows again and again.
    """
    if total <= budget:
        return
    shards = {id(part.shard): part.shard.array.nbytes for part in placed}
    changes = sum(size + padding(size) for size in shards.values())
    ids = sum(part.item.rows.ids * 8 + ALIGNMENT for part in placed)
    if total > changes + min(ids, changes):
        raise InvalidUpdateError(
            f"an update of {total:,} bytes to shards of {changes:,}, the limit is {budget:,} (--in-flight-mib) or "
            "what they have: send less at a time"
        )


def _distinct(names: Iterable[str]) -> list[str]:
    """Each once, in order. ProtocolError for one that is no name."""
    found = list(dict.fromkeys(names))
    for name in found:
        check_name(name, "a name")
    return found


def _restore_request(data: memoryview) -> ps_pb2.RestoreRequest:
    try:
        return ps_pb2.RestoreRequest.FromString(bytes(data))
    except DecodeError as error:
        raise ProtocolError(f"not a RestoreRequest: {error}") from None


def _memory_of(request: ps_pb2.ReadRequest, total: int) -> int:
    """What a pull of so many bytes may need: rows and boxes are copied before they are sent."""
    return min(total, WHOLE_PULL_BYTES) if all(item.rows.all for item in request.items) else total


class ParameterServerService:
    """See ps.proto for what each method promises."""

    def __init__(
        self, role: ParameterServerRole, in_flight_bytes: int = DEFAULT_MIB << 20, patience: Patience | None = None
    ) -> None:
        self._role = role
        self._patience = patience or Patience(STILL_SECONDS)
        self._counts = role.counts
        self.budget = Budget(in_flight_bytes)
        self.admission = Admission(lambda: _COMING_BYTES + self.budget.left, MESSAGE_BYTES)
        self.budget.on_taken = self.admission.shrink
        self._large = threading.Lock()
        self.spares = Spares()
        self._mixed = False  # have large updates of different kinds come?
        # It may be started again: whoever is refused tries again.
        self.drain = Drain(lambda: UnavailableError(f"ps {role.store.index} is stopping"))

    def session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        """Small requests, answered in order: with bytes, on the data plane in parts. A refused one does not end it."""
        name, counts, takes_parts = _name_of(context), self._counts, getattr(context, "takes_parts", False)
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
            yield parts if takes_parts else b"".join(parts)
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
            with self.drain, self._turn(data, payload):
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
            self._assemble(assembler, more, context)
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

    def _assemble(self, assembler: Assembler, frames: Iterator[bytes], context: grpc.ServicerContext) -> None:
        """Take the rest of a request's frames. ProtocolError if they end too early."""
        with self._patience.with_call(context) as goes_on:
            while not assembler.complete:
                data = next(frames, None)
                if data is None:
                    raise ProtocolError(_CUT_OFF)
                request, payload = unpack(data, ps_pb2.Request)
                assembler.add(request, payload)
                if len(payload):
                    goes_on()

    def _turn(self, data: bytes, payload: memoryview) -> AbstractContextManager[object]:
        """What to look at a request in: one of those with large headers at a time."""
        return self._large if len(data) - len(payload) > _LARGE_HEADER_BYTES else contextlib.nullcontext()

    def _answer(
        self, request: ps_pb2.Request, chunks: Payload, reply: ps_pb2.Reply, context: grpc.ServicerContext
    ) -> list[Buffer]:
        store = self._role.serving()
        body = request.WhichOneof("body")
        if body == "read":
            size = store.reply_bytes(request.read, request.total_bytes)
            if size > SESSION_BYTES:
                raise ProtocolError(f"a read of {size} bytes on a session; above {SESSION_BYTES} it is a Pull")
            buffers = list(store.read(request.read, chunks))
            reply.read.SetInParent()
            return buffers
        if body == "update":
            placed = store.check_update(request.update, request.total_bytes)
            reply.update.CopyFrom(self._update(store, request, placed, chunks))
        elif body == "create":
            self._check_create(store, request, context)
            self._create(store, request.create, chunks, reply)
        else:
            raise ProtocolError("a request without a body")
        return []

    def pull(self, data: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
        """A read in frames: of bytes, or on the data plane of parts, which are sent before they may change."""
        begin, nbytes, takes_parts = time.monotonic(), 0, getattr(context, "takes_parts", False)
        with self.drain:
            for frame in self._frames_of(data, context, takes_parts):
                nbytes += sum(map(len, frame))
                with self._patience.with_call(context):  # until the next is asked for
                    yield frame if takes_parts else b"".join(frame)
        self._counted("pull", begin, nbytes, context)

    def _frames_of(self, data: bytes, context: grpc.ServicerContext, live: bool) -> Iterator[list[Buffer]]:
        """In parts; those of live arrays are of use until the next frame is asked for."""
        request, payload = unpack(data, ps_pb2.Request)
        store = self._role.serving()
        if request.WhichOneof("body") != "read":
            raise ProtocolError("a Pull is a read")
        with self._turn(data, payload):
            total = store.reply_bytes(request.read, len(payload))
        frames = _Frames(request.id, total)
        with (
            self.budget.taken(_memory_of(request.read, total), context),
            closing(store.segments(request.read, Payload([payload]))) as segments,
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
            what, nbytes, answer = self._take(frames, context)
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

    def _take(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> tuple[str, int, bytes]:
        """What it was, "push" or nothing that is counted, its bytes, and the answer."""
        store, placed = self._role.serving(), []
        data = next(frames, None)
        if data is None:
            raise ProtocolError(_CUT_OFF)
        first, payload = unpack(data, ps_pb2.Request)
        what = first.WhichOneof("body")
        if what == "update":
            with self._turn(data, payload):
                placed = store.check_update(first.update, first.total_bytes)
            _check_amount(placed, first.total_bytes, self.budget.limit)
        elif what == "create":
            self._check_create(store, first, context)
        elif what == "restore":
            check_coordinator(context, "the restoring of checkpoints")
            if first.total_bytes > MAX_CONTROL_BYTES:
                raise ProtocolError(
                    f"a request to restore of {first.total_bytes:,} bytes, the limit is {MAX_CONTROL_BYTES:,}"
                )
        else:
            raise ProtocolError("a Push is an update, a creation or a request to restore")
        if self._may_stage(first.total_bytes, placed):
            with self.budget.taken(first.total_bytes, context):
                _has_room(context)
                # By a function of its own, of which nothing is left when others get the memory.
                update, left = self._take_staged(store, first, payload, placed, frames, context)
                self.spares.keep(left)
                self.spares.shrink(first.total_bytes + self.budget.left)
                return "push", first.total_bytes, pack(ps_pb2.Reply(id=first.id, last=True, update=update))
        assembler = Assembler(_MAX_PUSH_BYTES)
        assembler.add(first, payload)
        del data, payload
        with self.budget.taken(first.total_bytes, context):
            _has_room(context)
            self._make_room()
            self._assemble(assembler, frames, context)
            if next(frames, None) is not None:
                raise ProtocolError("a frame behind the last one")
            reply = ps_pb2.Reply(id=first.id, last=True)
            if what == "restore":
                self.restore(_restore_request(Payload(assembler.chunks).joined()), context)
                return "", 0, pack(reply)
            if what == "update":
                payload_once = Payload(assembler.chunks, once=not self._role.keeper.logs)
                reply.update.CopyFrom(self._update(store, first, placed, payload_once))
                return "push", first.total_bytes, pack(reply)
            self._create(store, first.create, Payload(assembler.chunks), reply)
            return "", 0, pack(reply)

    def _make_room(self) -> None:
        """For an update that is kept as it comes."""
        if self.spares.nbytes > self.budget.left:
            self.spares.shrink(self.budget.left)
            self._mixed = True

    def _may_stage(self, total_bytes: int, placed: list[Placed]) -> bool:
        """May the values of an update come straight into arrays that take the place of those that there are?

        Not with a log: what is written there would be an array that later updates change. Nor where a shard is named
        twice: all of the arrays are made before anything comes, and are to be no more than what the server holds. Nor
        large ones, unless they go alone and others do not come in between: see `spares`.
        """
        limit = self.budget.limit
        if total_bytes > limit // 4 and (total_bytes <= limit or self._mixed):
            return False
        distinct = len({id(part.shard) for part in placed}) == len(placed) > 0
        return distinct and not self._role.keeper.logs and all(part.takes_place for part in placed)

    def _take_staged(
        self,
        store: Store,
        first: ps_pb2.Request,
        payload: memoryview,
        placed: list[Placed],
        frames: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> tuple[ps_pb2.UpdateReply, list[Array]]:
        """An update whose values may take the place of those that there are; and the arrays of no use any more."""
        there = [part.shard.array for part in placed]
        arrays = [self.spares.take(array.shape, array.dtype) for array in there]
        self.spares.shrink(self.budget.left)
        staging = Staging({part.values_at: array for part, array in zip(placed, arrays, strict=True)})
        landing = staging.landing
        landing.put(first, payload)
        if isinstance(context, DataContext):
            context.place = landing.take
        before = landing.missing
        with self._patience.with_call(context) as goes_on:
            for data in frames:
                if data:  # else it is where it belongs
                    landing.take(data, len(data))
                if landing.missing < before:
                    goes_on()
                before = landing.missing
        if not landing.complete:
            raise ProtocolError(_CUT_OFF)
        reply = self._update(store, first, placed, staging.payload())
        of_each = zip(placed, there, arrays, strict=True)
        return reply, [new if part.shard.array is old else old for part, old, new in of_each]

    def _update(
        self, store: Store, request: ps_pb2.Request, placed: list[Placed], payload: Payload
    ) -> ps_pb2.UpdateReply:
        reply = self._role.keeper.update(store, request.update, placed, payload, request.total_bytes)
        reach("ps.acknowledge.before")
        return reply

    def _create(self, store: Store, request: ps_pb2.CreateRequest, payload: Payload, reply: ps_pb2.Reply) -> None:
        reply.create.SetInParent()
        if request.HasField("rule") and len(payload.joined()):
            self._role.keeper.check_rule(request.optimizer.name)
        known = request.HasField("optimizer") and store.has_optimizer(request.optimizer)
        try:
            reach("ps.create.before")
            store.create(request, payload)
            reach("ps.create.after")
            if request.initializer.name != COPY:  # no function runs while copies are made: see `describe`
                self._save(waits=known)
            reach("ps.create.saved")
        except UnresolvedReference as reason:
            reply.create.unresolved = str(reason) or "no reason given"

    def _save(self, *, waits: bool) -> None:
        """Return when it is on disk. Who changes what there is waits for a disk without room, as with an update."""
        try:
            self._role.keeper.save()
        except UnavailableError:
            raise
        except PsClusterError as error:
            if waits:
                raise UnavailableError(str(error)) from None
            raise

    @staticmethod
    def _check_create(store: Store, request: ps_pb2.Request, context: grpc.ServicerContext) -> None:
        create = request.create
        # A step may set the rate of an optimizer whose rule the server has.
        if not create.HasField("optimizer") or create.HasField("rule") or not store.has_optimizer(create.optimizer):
            check_coordinator(context, "the creation of variables and of optimizers")
        expected = store.expected_bytes(request.create)
        if create.HasField("optimizer") and not create.HasField("rule") and request.total_bytes:
            raise ProtocolError(f"{request.total_bytes:,} bytes with an optimizer whose rule does not come with it")
        if expected is None and request.total_bytes > MAX_PICKLE_BYTES:
            raise ProtocolError(
                f"a function or class of {request.total_bytes:,} bytes, the limit is {MAX_PICKLE_BYTES:,}: let it not "
                "capture what it can load"
            )
        if expected is not None and request.total_bytes != expected:
            raise ProtocolError(f"a creation of {request.total_bytes} bytes whose shards here have {expected}")

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
            self._role.keeper.save()
        if request.seen:
            check_count(len(request.seen), MAX_COUNT, "shards of which updates were seen")
            store.note_lost((each.variable, each.shard, each.life, each.updates) for each in request.seen)
            self._role.keeper.write_losses()
        return store.describe(variables, optimizers, request.all)

    def delete(self, request: ps_pb2.DeleteRequest, _context: grpc.ServicerContext) -> ps_pb2.DeleteReply:
        """Remove a variable, or all whose names begin with a prefix."""
        store = self._store_of(request.job)
        check_name(request.name, "a variable's name")
        check_name(request.prefix, "the beginning of variables' names")
        store.delete(request.name, request.id, request.prefix)
        reach("ps.delete.after")
        self._role.keeper.save()
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
                self._role.keeper.save()
                reach("ps.commit.saved")
            else:
                where = functools.partial(self._role.roots.path_of, request.directory)
                self._role.parts.stage(store, request.id, request.shards, where)
                reach("ps.stage.after")
        return ps_pb2.RestoreReply()
