"""The path of all requests that change the state: decode, validate, admit, apply, log, reply.

    Push, or a session's request
      decode     a header, and a payload that is still to arrive if it is large
      validate   `update_checks.check_update`, `check_create`: all that can be checked before the payload arrives
      admit      `admission.Budget`: memory for the payload, which is then received
      apply      `updates.apply`: each item once, under its shard's lock; `creation.create`; or, of a contribution to a
                 synchronous step, `StepPath.contribute`: staged now, applied with those of the other replicas
      log        `StateManager.logged`, `StateManager.save`: as durable as the user has chosen
      reply

Values that are assigned whole to large shards are received into arrays that take the place of the shards' own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import ProtocolError, PsClusterError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.functions.loading import UnresolvedReference
from pscluster.core.limits import MAX_CONTROL_BYTES, MAX_PICKLE_BYTES, check_name
from pscluster.core.security.access import check_coordinator
from pscluster.core.transport.base import server_call
from pscluster.core.transport.frames import Assembler, pack, unpack
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.ps.array_pool import ArrayPool
from pscluster.ps.server.admission import Budget, check_amount
from pscluster.ps.server.requests import creation, update_checks, updates
from pscluster.ps.server.requests.changes import Change
from pscluster.ps.server.requests.payload import Payload, Staging
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.state.shard import Array
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.steps import StepPath
from pscluster.ps.spec import COPY, MOVE_BYTES
from pscluster.ps.storage.manager import StateManager
from pscluster.v1 import ps_pb2

_MAX_PUSH_BYTES = 1 << 46  # what is received is bounded by the items' sizes; this bounds the declaration

_LARGE_HEADER_BYTES = 64 << 10
"""Requests with larger headers are decoded and checked one at a time, while others continue beside them."""

_CUT_OFF = "the stream ended before its last frame: nothing was applied"


class Incoming:
    """Receives requests of more than one frame; the watchdog cancels calls whose frames stop arriving."""

    def __init__(self, watchdog: StallWatchdog) -> None:
        self.watchdog = watchdog
        self._large = threading.Lock()

    def turn(self, data: bytes, payload_bytes: int) -> AbstractContextManager[object]:
        """Return a context in which to handle a request; it admits one request with large headers at a time."""
        return self._large if len(data) - payload_bytes > _LARGE_HEADER_BYTES else contextlib.nullcontext()

    def assemble(self, assembler: Assembler, frames: Iterator[bytes], context: grpc.ServicerContext) -> None:
        """Receive the rest of a request's frames. ProtocolError if they end too early."""
        with self.watchdog.with_call(context) as progress:
            while not assembler.complete:
                data = next(frames, None)
                if data is None:
                    raise ProtocolError(_CUT_OFF)
                request, payload = unpack(data, ps_pb2.Request)
                assembler.add(request, payload)
                if len(payload):
                    progress()


class WritePath:
    """Handles requests that change the state, for the servicer. Thread-safe."""

    def __init__(self, role: ParameterServerRole, budget: Budget, incoming: Incoming) -> None:
        self._role = role
        self._budget = budget
        self._incoming = incoming
        self._steps = StepPath(
            lambda *update: write(role.manager, *update),
            lambda store, contribution: role.manager.log_contribution(store, contribution),
        )
        self.pool = ArrayPool()
        self._mixed = False  # whether large updates of different kinds have arrived

    # Small requests, with their payload

    def update(
        self, store: Store, request: ps_pb2.Request, payload: Payload, context: grpc.ServicerContext
    ) -> ps_pb2.UpdateReply:
        changes = update_checks.check_update(store, request.update, request.total_bytes, context)
        update_checks.wait_for_moves(changes)
        return self._update(store, request.update, changes, payload, request.total_bytes)

    def _update(
        self, store: Store, update: ps_pb2.UpdateRequest, changes: list[Change], payload: Payload, total_bytes: int
    ) -> ps_pb2.UpdateReply:
        """Stage a contribution to a synchronous step; apply any other update."""
        if update.HasField("contribution"):
            return self._steps.contribute(store, update, changes, payload, total_bytes)
        return write(self._role.manager, store, update, changes, payload, total_bytes)

    def reach_step(self, store: Store, after: ps_pb2.StepCount) -> None:
        """Apply what is staged of synchronous steps before this one, all of which are committed."""
        self._steps.reach_step(store, after)

    def create(
        self, store: Store, request: ps_pb2.Request, payload: Payload, context: grpc.ServicerContext
    ) -> ps_pb2.CreateReply:
        _check_create(store, request, context)
        return self._create(store, request.create, payload)

    def delete(self, store: Store, request: ps_pb2.DeleteRequest) -> None:
        """Remove a variable, or all copies of an evaluation."""
        check_name(request.name, "a variable's name")
        store.delete(request.name, request.id, request.evaluation)
        reach("ps.delete.after")
        self._role.manager.save()

    def restore(self, store: Store, request: ps_pb2.RestoreRequest) -> None:
        """Take one step of restoring a checkpoint."""
        parts, manager = self._role.parts, self._role.manager
        if request.drop:
            parts.drop_staged(request.id)
        elif request.ahead:
            parts.name(request.id, request.shards)
        elif request.commit:
            parts.commit(store, request.id, request.term)
            reach("ps.commit.after")
            manager.save()
            reach("ps.commit.saved")
        else:
            parts.stage(store, request, functools.partial(self._role.roots.path_of, request.directory))
            reach("ps.stage.after")

    # Large requests

    def push(self, store: Store, frames: Iterator[bytes], context: grpc.ServicerContext) -> tuple[str, int, bytes]:
        """Receive and apply a request in frames; return "push" (or "": not counted), its bytes, and the answer."""
        changes: list[Change] = []
        data = next(frames, None)
        if data is None:
            raise ProtocolError(_CUT_OFF)
        first, payload = unpack(data, ps_pb2.Request)
        body = first.WhichOneof("body")
        if body == "update":
            with self._incoming.turn(data, len(payload)):
                changes = update_checks.check_update(store, first.update, first.total_bytes, context)
            check_amount(changes, first.total_bytes, self._budget.limit)
            update_checks.wait_for_moves(changes)
        elif body == "create":
            _check_create(store, first, context)
        elif body == "restore":
            _check_restore(first, context)
        elif body == "move":
            _check_move(store, first, context)
        else:
            raise ProtocolError("a Push is an update, a creation, a request to restore, or pages of a shard")
        if not first.update.HasField("contribution") and self._may_stage(first.total_bytes, changes):
            with self._budget.reserve(first.total_bytes, context):
                server_call(context).has_taken_memory()
                # A separate function, so that no reference is left when the memory is released to other requests.
                update, unused = self._update_staged(store, first, payload, changes, frames, context)
                self.pool.put(unused)
                self.pool.shrink(first.total_bytes + self._budget.left)
                return "push", first.total_bytes, pack(ps_pb2.Reply(id=first.id, last=True, update=update))
        assembler = Assembler(_MAX_PUSH_BYTES)
        assembler.add(first, payload)
        del data, payload
        with self._budget.reserve(first.total_bytes + sum(change.decoded_bytes for change in changes), context):
            server_call(context).has_taken_memory()
            self._make_room()
            self._incoming.assemble(assembler, frames, context)
            if next(frames, None) is not None:
                raise ProtocolError("a frame came after the last one")
            reply = ps_pb2.Reply(id=first.id, last=True)
            if body == "restore":
                self.restore(store, _restore_request(Payload(assembler.chunks).joined()))
                return "", 0, pack(reply)
            if body == "move":
                self._role.moves.handle(store, first.move, Payload(assembler.chunks).joined())
                return "", 0, pack(reply)
            if body == "update":
                keep = self._role.manager.logs or first.update.HasField("contribution")
                whole = Payload(assembler.chunks, once=not keep)
                update = self._update(store, first.update, changes, whole, first.total_bytes)
                reply.update.CopyFrom(update)
                return "push", first.total_bytes, pack(reply)
            reply.create.CopyFrom(self._create(store, first.create, Payload(assembler.chunks)))
            return "", 0, pack(reply)

    def _make_room(self) -> None:
        """Shrink the pool to the unused budget, before an update is received as chunks."""
        if self.pool.nbytes > self._budget.left:
            self.pool.shrink(self._budget.left)
            self._mixed = True

    def _may_stage(self, total_bytes: int, changes: Sequence[Change]) -> bool:
        """Return whether the values of an update may be received straight into arrays that replace those of shards.

        Not with a log: it would write arrays that later updates change. Not if a shard is named twice: all arrays are
        made before any data arrives, and must not take more than the server holds already. Not for large updates,
        unless they exceed the whole budget, and so run alone, and no others have come in between: see `ArrayPool`.
        """
        limit = self._budget.limit
        if total_bytes > limit // 4 and (total_bytes <= limit or self._mixed):
            return False
        distinct = len({id(change.shard) for change in changes}) == len(changes) > 0
        return distinct and not self._role.manager.logs and all(change.replaces_array for change in changes)

    def _update_staged(
        self,
        store: Store,
        first: ps_pb2.Request,
        payload: memoryview,
        changes: list[Change],
        frames: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> tuple[ps_pb2.UpdateReply, list[Array]]:
        """Receive an update into new arrays and apply it; return the reply, and the arrays that are now unused."""
        replaced = [change.shard.array for change in changes]
        arrays = [self.pool.take(array.shape, array.dtype) for array in replaced]
        self.pool.shrink(self._budget.left)
        staging = Staging({change.values_at: array for change, array in zip(changes, arrays, strict=True)})
        sink = staging.sink
        sink.put(first, payload)
        server_call(context).receive_into(sink.take)
        before = sink.missing
        with self._incoming.watchdog.with_call(context) as progress:
            for data in frames:
                if data:  # else the transport has put it into the array
                    sink.take(data, len(data))
                if sink.missing < before:
                    progress()
                before = sink.missing
        if not sink.complete:
            raise ProtocolError(_CUT_OFF)
        reply = write(self._role.manager, store, first.update, changes, staging.payload(), first.total_bytes)
        of_each = zip(changes, replaced, arrays, strict=True)
        return reply, [new if change.shard.array is old else old for change, old, new in of_each]

    # Creations

    def _create(self, store: Store, request: ps_pb2.CreateRequest, payload: Payload) -> ps_pb2.CreateReply:
        if request.HasField("rule") and len(payload.joined()):
            self._role.manager.check_rule(request.optimizer.name)
        known = request.HasField("optimizer") and store.directory.has_optimizer(request.optimizer)
        try:
            reach("ps.create.before")
            creation.create(store, request, payload)
            reach("ps.create.after")
            if request.initializer.name != COPY:  # functions wait for copies: `describe` saves later
                try:
                    self._role.manager.save()
                except PsClusterError as error:
                    if known:  # the client retries while the disk is full, as with an update
                        raise UnavailableError(str(error)) from None
                    raise
            reach("ps.create.saved")
        except UnresolvedReference as reason:
            return ps_pb2.CreateReply(unresolved=str(reason) or "no reason given")
        return ps_pb2.CreateReply()


def write(
    manager: StateManager,
    store: Store,
    request: ps_pb2.UpdateRequest,
    changes: list[Change],
    payload: Payload,
    total_bytes: int,
) -> ps_pb2.UpdateReply:
    """Apply a checked update and log it; return once it may be acknowledged."""
    with manager.logged(store, request, changes, payload, total_bytes) as applied:
        reply = updates.apply(store, request, changes, payload, applied)
    reach("ps.acknowledge.before")
    return reply


def _check_create(store: Store, request: ps_pb2.Request, context: grpc.ServicerContext) -> None:
    create = request.create
    known = create.HasField("optimizer") and store.directory.has_optimizer(create.optimizer)
    if not known or create.HasField("rule"):  # a step may set the rate of an optimizer whose rule the server has
        check_coordinator(context, "the creation of variables and optimizers")
    expected = creation.expected_bytes(store, create)
    if create.HasField("optimizer") and not create.HasField("rule") and request.total_bytes:
        raise ProtocolError(f"{request.total_bytes:,} bytes with an optimizer whose rule does not come with it")
    if expected is None and request.total_bytes > MAX_PICKLE_BYTES:
        raise ProtocolError(
            f"a function or class of {request.total_bytes:,} bytes; the limit is {MAX_PICKLE_BYTES:,}: have it "
            "load large data instead of capturing it"
        )
    if expected is not None and request.total_bytes != expected:
        raise ProtocolError(f"a creation of {request.total_bytes} bytes whose shards here have {expected}")


def _check_restore(request: ps_pb2.Request, context: grpc.ServicerContext) -> None:
    check_coordinator(context, "the restoration of checkpoints")
    if request.total_bytes > MAX_CONTROL_BYTES:
        raise ProtocolError(
            f"a request to restore of {request.total_bytes:,} bytes; the limit is {MAX_CONTROL_BYTES:,}"
        )


def _check_move(store: Store, request: ps_pb2.Request, context: grpc.ServicerContext) -> None:
    check_coordinator(context, "moves of shards")
    store.check_job(request.move.job)
    carries = request.move.action in (ps_pb2.MoveRequest.WRITE, ps_pb2.MoveRequest.FILL)
    if not carries or not 0 < request.total_bytes <= MOVE_BYTES:
        raise ProtocolError(f"{request.total_bytes:,} bytes that are not pages of a shard; the limit is {MOVE_BYTES:,}")


def _restore_request(data: memoryview) -> ps_pb2.RestoreRequest:
    try:
        return ps_pb2.RestoreRequest.FromString(bytes(data))
    except DecodeError as error:
        raise ProtocolError(f"not a RestoreRequest: {error}") from None
