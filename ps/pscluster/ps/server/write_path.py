"""The one way of whatever changes the state: decode, admit, validate, apply, log, reply.

    Push, or a session's request
      decode     a header, and a payload that is still to come if it is large
      validate   `updates.check_update`, `check_create`: all that can be said before the payload is there
      admit      `admission.Budget`: memory for the payload; then it is received
      apply      `updates.apply`: each item once, under its shard's lock; `creation.create`
      log        `StateManager.logged`, `StateManager.save`: it is as durable as the user has chosen
      reply

Values that are assigned whole to large shards are received into arrays that take the place of the shards' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import ProtocolError, PsClusterError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.functions.definitions import UnresolvedReference
from pscluster.core.limits import MAX_CONTROL_BYTES, MAX_PICKLE_BYTES
from pscluster.core.security.access import check_coordinator
from pscluster.core.transport.frames import Assembler, pack, unpack
from pscluster.core.transport.server_call import server_call
from pscluster.ps.server import creation, updates
from pscluster.ps.server.admission import Budget, check_amount
from pscluster.ps.server.array_pool import ArrayPool
from pscluster.ps.server.incoming import CUT_OFF, Incoming
from pscluster.ps.server.payload import Payload, Staging
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.shard import Array
from pscluster.ps.server.store import Store
from pscluster.ps.server.updates import Change
from pscluster.ps.spec import COPY
from pscluster.ps.storage.manager import StateManager
from pscluster.v1 import ps_pb2

_MAX_PUSH_BYTES = 1 << 46  # what is received is bounded by the items' sizes; this bounds the declaration


class WritePath:
    """Takes updates and creations from the servicer. Thread-safe.

    Args:
        budget: memory for large requests.
        incoming: receives what comes in frames.
        restore: called with a request to restore a checkpoint that was too large for one message.
    """

    def __init__(
        self,
        role: ParameterServerRole,
        budget: Budget,
        incoming: Incoming,
        restore: Callable[[ps_pb2.RestoreRequest, grpc.ServicerContext], object],
    ) -> None:
        self._role = role
        self._budget = budget
        self._incoming = incoming
        self._restore = restore
        self.pool = ArrayPool()
        self._mixed = False  # have large updates of different kinds come?

    # Small requests, whose payload is there

    def update(self, store: Store, request: ps_pb2.Request, payload: Payload) -> ps_pb2.UpdateReply:
        """Check and apply an update."""
        changes = updates.check_update(store, request.update, request.total_bytes)
        return write(self._role.manager, store, request.update, changes, payload, request.total_bytes)

    def create(
        self, store: Store, request: ps_pb2.Request, payload: Payload, context: grpc.ServicerContext
    ) -> ps_pb2.CreateReply:
        """Check a creation, and make what it asks for."""
        _check_create(store, request, context)
        return self._create(store, request.create, payload)

    # Large ones

    def push(self, store: Store, frames: Iterator[bytes], context: grpc.ServicerContext) -> tuple[str, int, bytes]:
        """Take a request in frames; return "push" or nothing that is counted, its bytes, and the answer."""
        changes: list[Change] = []
        data = next(frames, None)
        if data is None:
            raise ProtocolError(CUT_OFF)
        first, payload = unpack(data, ps_pb2.Request)
        body = first.WhichOneof("body")
        if body == "update":
            with self._incoming.turn(data, payload):
                changes = updates.check_update(store, first.update, first.total_bytes)
            check_amount(changes, first.total_bytes, self._budget.limit)
        elif body == "create":
            _check_create(store, first, context)
        elif body == "restore":
            _check_restore(first, context)
        else:
            raise ProtocolError("a Push is an update, a creation or a request to restore")
        if self._may_stage(first.total_bytes, changes):
            with self._budget.taken(first.total_bytes, context):
                server_call(context).has_taken_memory()
                # By a function of its own, of which nothing is left when others get the memory.
                update, left = self._update_staged(store, first, payload, changes, frames, context)
                self.pool.keep(left)
                self.pool.shrink(first.total_bytes + self._budget.left)
                return "push", first.total_bytes, pack(ps_pb2.Reply(id=first.id, last=True, update=update))
        assembler = Assembler(_MAX_PUSH_BYTES)
        assembler.add(first, payload)
        del data, payload
        with self._budget.taken(first.total_bytes, context):
            server_call(context).has_taken_memory()
            self._make_room()
            self._incoming.assemble(assembler, frames, context)
            if next(frames, None) is not None:
                raise ProtocolError("a frame came after the last one")
            reply = ps_pb2.Reply(id=first.id, last=True)
            if body == "restore":
                self._restore(_restore_request(Payload(assembler.chunks).joined()), context)
                return "", 0, pack(reply)
            if body == "update":
                whole = Payload(assembler.chunks, once=not self._role.manager.logs)
                update = write(self._role.manager, store, first.update, changes, whole, first.total_bytes)
                reply.update.CopyFrom(update)
                return "push", first.total_bytes, pack(reply)
            reply.create.CopyFrom(self._create(store, first.create, Payload(assembler.chunks)))
            return "", 0, pack(reply)

    def _make_room(self) -> None:
        """For an update that is kept as it comes."""
        if self.pool.nbytes > self._budget.left:
            self.pool.shrink(self._budget.left)
            self._mixed = True

    def _may_stage(self, total_bytes: int, changes: Sequence[Change]) -> bool:
        """May the values of an update come straight into arrays that take the place of those that there are?

        Not with a log: what is written there would be an array that later updates change. Nor where a shard is named
        twice: all of the arrays are made before anything comes, and are to be no more than what the server holds. Nor
        large ones, unless they go alone and others do not come in between: see `array_pool`.
        """
        limit = self._budget.limit
        if total_bytes > limit // 4 and (total_bytes <= limit or self._mixed):
            return False
        distinct = len({id(change.shard) for change in changes}) == len(changes) > 0
        return distinct and not self._role.manager.logs and all(change.takes_place for change in changes)

    def _update_staged(
        self,
        store: Store,
        first: ps_pb2.Request,
        payload: memoryview,
        changes: list[Change],
        frames: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> tuple[ps_pb2.UpdateReply, list[Array]]:
        """An update whose values may take the place of those that there are; and the arrays of no use any more."""
        there = [change.shard.array for change in changes]
        arrays = [self.pool.take(array.shape, array.dtype) for array in there]
        self.pool.shrink(self._budget.left)
        staging = Staging({change.values_at: array for change, array in zip(changes, arrays, strict=True)})
        sink = staging.sink
        sink.put(first, payload)
        server_call(context).receive_into(sink.take)
        before = sink.missing
        with self._incoming.watchdog.with_call(context) as progress:
            for data in frames:
                if data:  # else it is where it belongs
                    sink.take(data, len(data))
                if sink.missing < before:
                    progress()
                before = sink.missing
        if not sink.complete:
            raise ProtocolError(CUT_OFF)
        reply = write(self._role.manager, store, first.update, changes, staging.payload(), first.total_bytes)
        of_each = zip(changes, there, arrays, strict=True)
        return reply, [new if change.shard.array is old else old for change, old, new in of_each]

    # Creations

    def _create(self, store: Store, request: ps_pb2.CreateRequest, payload: Payload) -> ps_pb2.CreateReply:
        if request.HasField("rule") and len(payload.joined()):
            self._role.manager.check_rule(request.optimizer.name)
        known = request.HasField("optimizer") and store.has_optimizer(request.optimizer)
        try:
            reach("ps.create.before")
            creation.create(store, request, payload)
            reach("ps.create.after")
            if request.initializer.name != COPY:  # no function runs while copies are made: see `describe`
                self._save(waits=known)
            reach("ps.create.saved")
        except UnresolvedReference as reason:
            return ps_pb2.CreateReply(unresolved=str(reason) or "no reason given")
        return ps_pb2.CreateReply()

    def _save(self, *, waits: bool) -> None:
        """Return when it is on disk. Who changes what there is waits for a disk without room, as with an update."""
        try:
            self._role.manager.save()
        except UnavailableError:
            raise
        except PsClusterError as error:
            if waits:
                raise UnavailableError(str(error)) from None
            raise


def write(
    manager: StateManager,
    store: Store,
    request: ps_pb2.UpdateRequest,
    changes: list[Change],
    payload: Payload,
    total_bytes: int,
) -> ps_pb2.UpdateReply:
    """Apply a checked update and log it; return when it may be acknowledged.

    Raises:
        UnavailableError: with a log, it can't be taken, or can't be acknowledged.
    """
    with manager.logged(store, request, changes, payload, total_bytes) as applied:
        reply = updates.apply(store, request, changes, payload, applied)
    reach("ps.acknowledge.before")
    return reply


def _check_create(store: Store, request: ps_pb2.Request, context: grpc.ServicerContext) -> None:
    create = request.create
    # A step may set the rate of an optimizer whose rule the server has.
    if not create.HasField("optimizer") or create.HasField("rule") or not store.has_optimizer(create.optimizer):
        check_coordinator(context, "the creation of variables and of optimizers")
    expected = creation.expected_bytes(store, create)
    if create.HasField("optimizer") and not create.HasField("rule") and request.total_bytes:
        raise ProtocolError(f"{request.total_bytes:,} bytes with an optimizer whose rule does not come with it")
    if expected is None and request.total_bytes > MAX_PICKLE_BYTES:
        raise ProtocolError(
            f"a function or class of {request.total_bytes:,} bytes, the limit is {MAX_PICKLE_BYTES:,}: have it "
            "load large data instead of capturing it"
        )
    if expected is not None and request.total_bytes != expected:
        raise ProtocolError(f"a creation of {request.total_bytes} bytes whose shards here have {expected}")


def _check_restore(request: ps_pb2.Request, context: grpc.ServicerContext) -> None:
    check_coordinator(context, "the restoring of checkpoints")
    if request.total_bytes > MAX_CONTROL_BYTES:
        raise ProtocolError(
            f"a request to restore of {request.total_bytes:,} bytes, the limit is {MAX_CONTROL_BYTES:,}"
        )


def _restore_request(data: memoryview) -> ps_pb2.RestoreRequest:
    try:
        return ps_pb2.RestoreRequest.FromString(bytes(data))
    except DecodeError as error:
        raise ProtocolError(f"not a RestoreRequest: {error}") from None
