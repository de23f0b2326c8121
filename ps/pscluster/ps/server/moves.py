"""A server's part in the move of a shard to another server; see `pscluster.coordinator.moves.decision` for the whole.

    as the source   SERVING --track--> TRACKED --freeze--> FROZEN --place--> (gone)
                    TRACKED, FROZEN --release, or another coordinator--> SERVING
    as the target   (nothing) --stage, write--> STAGED --commit--> ARRIVING, and saved --serve--> SERVING
                    STAGED --withdraw, or another coordinator--> (nothing), and a late commit is refused

TRACKED: the shard changes as ever, and `ChangedPages` notes where. Pages are read without its lock: one that changes
meanwhile may be torn, but is noted as changed, and is read again.

FROZEN: updates are refused, to be tried again; reads are answered. So nothing of the state that was taken changes.

STAGED: what comes is written to a file at once, to which nothing refers yet, so little is left to be saved when the
shard is frozen (`ps.storage.arrivals`). There is no room: the move is refused before anything is copied. A shard of a
table may have more rows each time that its pages are asked for, or fewer: the answer says how many, and the file has
room for some more.

ARRIVING: neither updates nor reads are answered, since the source may still answer reads. What was committed is saved
before that is acknowledged: with it, the server that restarts has the shard. If it can't be saved, the shard is removed
again. The generation that failed may yet turn out whole, so the coordinator then gives the variable a later placement;
and to the next coordinator this server says nothing before it has saved another one.

A server that restarts has lost TRACKED, FROZEN, STAGED and ARRIVING. Its coordinator tells it again what is frozen and
what is arriving, before it serves anything, and which shards are no longer here. The remembered updates go with the
shard. The target may not have been told yet which functions and incarnations are over, so what the source refuses, it
refuses from then on as well.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from pscluster.core.errors import ProtocolError, PsClusterError, StaleError
from pscluster.core.fault_points import reach
from pscluster.core.transport.frames import Buffer
from pscluster.ps.request_metrics import ShardTraffic
from pscluster.ps.server.embedding.reserved_rows import reservation_of
from pscluster.ps.server.pages import arrays_named, in_items, pages_bytes, pages_of, taken_from
from pscluster.ps.server.resharding import ACTIONS, Resharding
from pscluster.ps.server.staged_shard import StagedShard
from pscluster.ps.server.state.shard import Array, ChangedPages, Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import MAX_PAGES, MOVE_BYTES
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.tables import row_items, row_limit
from pscluster.v1 import node_pb2, ps_pb2

_MAX_OVER = 64
"""The most moves that are remembered as over, so that late copies of their requests are refused."""


class Moves:
    """One server's part in moves. Thread-safe."""

    def __init__(self, manager: StateManager) -> None:
        self._manager = manager
        self._resharding = Resharding(manager)
        self._lock = threading.Lock()
        self._staged: dict[int, StagedShard] = {}  # by move
        self._over: deque[int] = deque(maxlen=_MAX_OVER)  # moves that this server has nothing more to do with
        # Held while a shard is entered and saved: a later withdrawal learns what has become of it.
        self._committing = threading.Lock()
        self._doubtful = False  # whether a generation may be whole that has a shard which was given back
        self._actions: dict[int, Callable[[Store, ps_pb2.MoveRequest, memoryview], _Answer]] = {
            ps_pb2.MoveRequest.TRACK: self._track,
            ps_pb2.MoveRequest.CHANGED: self._changed,
            ps_pb2.MoveRequest.FREEZE: self._freeze,
            ps_pb2.MoveRequest.READ: self._read,
            ps_pb2.MoveRequest.RELEASE: self._release,
            ps_pb2.MoveRequest.STAGE: self._stage,
            ps_pb2.MoveRequest.WRITE: self._write,
            ps_pb2.MoveRequest.COMMIT: self._commit,
            ps_pb2.MoveRequest.WITHDRAW: self._withdraw,
            ps_pb2.MoveRequest.PLACE: self._place,
            ps_pb2.MoveRequest.SERVE: self._serve,
        }

    def handle(self, store: Store, request: ps_pb2.MoveRequest, payload: memoryview) -> _Answer:
        """Take one step of a move, or of a resharding; return the reply and its payload."""
        if request.action in ACTIONS:
            if request.action == ps_pb2.MoveRequest.ABANDON:
                store.check_job(request.job)
                self._note_over(request.id)  # late copies of TRACK are refused
            return self._resharding.handle(store, request, payload)
        action = self._actions.get(request.action)
        if action is None:
            raise ProtocolError(f"action {request.action} of a move")
        return action(store, request, payload)

    # Coordinators that come and go

    def forget(self, store: Store) -> None:
        """End what was under way for another coordinator, or another job."""
        self._resharding.forget()
        with self._lock:
            staged, self._staged = self._staged, {}
        for each in staged.values():
            each.drop()
        for held in store.held()[0]:
            for shard in held.shards.values():
                with shard.lock:
                    shard.let_go()

    @staticmethod
    def attached(store: Store, request: node_pb2.AttachRequest) -> None:
        """Take what a coordinator says of moves, before anything is served. StaleError if a shard is lost."""
        for spec in request.placed:
            store.place(spec, request.job)
        for named in request.frozen:
            if named.server == store.index and (shard := _found(store, named.variable, named.shard)) is not None:
                with shard.lock:
                    shard.freeze()
        for named in request.arriving:
            if named.server == store.index and (shard := _found(store, named.variable, named.shard)) is not None:
                shard.arriving = shard.arriving or threading.Event()

    def persist(self) -> None:
        """Save a generation if the last may have a shard that was given back: the next coordinator can't know."""
        self._resharding.persist()
        if self._doubtful:
            self._manager.save()
            self._doubtful = False

    # The source

    def _track(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        held, shard = store.directory.find(request.variable, request.shard)
        if held.spec.evaluation:
            raise ProtocolError(f"a move of {held.spec.name!r}, which is a copy for an evaluation")
        with self._lock:
            self._check_wanted(store, request)
        store.count_reads()
        with shard.lock:
            if shard.pages is None or shard.pages.move != request.id:
                items = row_items(held.spec)
                elements = len(shard.array) * items if items else shard.array.size
                if (size := request.page_elements) and elements // size > MAX_PAGES:
                    raise ProtocolError(f"{elements:,} elements in pages of {size}: more than {MAX_PAGES:,}")
                shard.pages = ChangedPages(request.id, elements, items, size)
            reply, nothing = _changes(shard, shard.pages, request.round)
            reply.state.traffic = shard.traffic.recent()
            return reply, nothing

    def _changed(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        _, shard = store.directory.find(request.variable, request.shard)
        with shard.lock:
            return _changes(shard, _tracked(shard, request), request.round)

    def _freeze(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        _, shard = store.directory.find(request.variable, request.shard)
        store.check_not_staged(shard)
        store.count_reads()
        with shard.lock:
            shard_pages = _tracked(shard, request)
            shard.freeze()
            reply, nothing = _changes(shard, shard_pages, request.round)
            state = reply.state
            state.updates = shard.updates
            state.steps.update(shard.steps)
            state.traffic = shard.traffic.recent()
            with store.ledger() as ledger:
                state.term = ledger.term
                state.keys.extend(ledger.saved_keys(request.variable, request.shard))
                state.closed.extend(ledger.closed)
                for start, stop in ledger.finished:
                    state.finished_starts.append(start)
                    state.finished_stops.append(stop)
                for incarnation, client in ledger.clients.items():
                    state.clients.add(incarnation=incarnation, settled=client.settled)
        reach("ps.freeze.after")
        return reply, nothing

    def _read(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        held, shard = store.directory.find(request.variable, request.shard)
        with shard.lock:
            _tracked(shard, request)
            known = shard.arrays()
        if items := row_items(held.spec):
            known = {name: in_items(_first_rows(array, request.state.rows), items) for name, array in known.items()}
        arrays = arrays_named(known, request.arrays)
        pages = pages_of(request, known["value"].size)
        if (size := pages_bytes(pages, arrays)) > MOVE_BYTES:
            raise ProtocolError(f"a read of pages of {size:,} bytes; the limit is {MOVE_BYTES:,}: divide it")
        return ps_pb2.MoveReply(), [piece for array in arrays for piece in taken_from(array, pages)]

    def _release(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        self._note_over(request.id)
        if (shard := _found(store, request.variable, request.shard)) is not None:
            with shard.lock:
                shard.let_go(request.id)
        return ps_pb2.MoveReply(), []

    # The target

    def _stage(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        held = store.directory.variables.get(request.variable)
        if held is None or held.spec.evaluation or request.shard >= held.partition.num_shards:
            raise StaleError(f"variable {request.variable} has no shard {request.shard} that could move here")
        if request.shard in held.shards:
            raise ProtocolError(f"shard {request.shard} of {held.spec.name!r} is on ps {store.index} already")
        name, shape = (request.variable, request.shard), held.partition.block(request.shard).shape
        limit = row_limit(held.spec, held.partition, request.shard)
        if limit and request.state.rows > limit:
            raise ProtocolError(f"a move of {request.state.rows:,} rows of {held.spec.name!r}; the limit is {limit:,}")
        begin = functools.partial(self._manager.shard_file, *name)
        with self._lock:
            self._check_wanted(store, request)
            others = [each for move, each in self._staged.items() if move != request.id]
            staged = self._staged.get(request.id, StagedShard(name, shape, limit, row_items(held.spec), begin))
            self._staged = {request.id: staged}  # a coordinator makes one move at a time
        for other in others:
            other.drop()
        if staged.name != name:
            raise ProtocolError("a move of two shards")
        staged.stage(store, held, request.state)
        return ps_pb2.MoveReply(), []

    def _write(self, store: Store, request: ps_pb2.MoveRequest, payload: memoryview) -> _Answer:
        self._staged_as(store, request).write(request, payload)
        return ps_pb2.MoveReply(), []

    def _commit(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        spec = request.spec
        with self._committing:
            held = store.directory.variables.get(request.variable)
            if held is None or held.spec.placement != spec.placement or request.shard not in held.shards:
                staged = self._staged_as(store, request)
                self._install(store, request, staged)
                self._note_over(request.id)
            else:
                self._manager.save()  # a copy of the request, whose answer was lost
        reach("ps.adopt.saved")
        return ps_pb2.MoveReply(committed=True), []

    def _install(self, store: Store, request: ps_pb2.MoveRequest, staged: StagedShard) -> None:
        """Enter the shard, and save it; or raise PsClusterError, and leave all as it was."""
        state, spec, (variable, index) = request.state, request.spec, staged.name
        arrays = {name: staged.arrays[name] for name in state.arrays if name in staged.arrays}
        if len(arrays) != len(state.arrays) or "value" not in arrays or spec.id != variable:
            came = ", ".join(staged.arrays) or "nothing"
            raise ProtocolError(f"a move of {spec.name!r}, but only {came} has arrived")
        if index >= len(spec.owners) or spec.owners[index] != store.index:
            raise ProtocolError(f"a move of shard {index} of {spec.name!r}, which is not to ps {store.index}")
        if state.term != store.term:
            raise StaleError("the servers are not in one term: a restore was broken off")
        if staged.row_limit and state.rows != staged.shape[0]:
            raise ProtocolError(f"a move of {state.rows:,} rows of {spec.name!r}, but {staged.shape[0]:,} have arrived")
        shard = Shard(arrays["value"], state.updates, staged.row_limit)
        shard.put(arrays)
        shard.steps.update(state.steps)
        if not 0 <= state.traffic < math.inf:
            raise ProtocolError(f"a move of {spec.name!r} with a traffic of {state.traffic} bytes")
        shard.traffic = ShardTraffic(state.traffic)
        shard.arriving = threading.Event()
        with store.ledger() as ledger:
            for keys in (staged.state.keys, state.keys):
                ledger.record_saved(variable, index, keys)
            ledger.finish(zip(state.finished_starts, state.finished_stops, strict=False))
            for client in state.clients:
                ledger.forget_answered(client.incarnation, client.settled)
            for incarnation in state.closed:
                ledger.close(incarnation)
        before = store.install(spec, request.job, index, shard)
        try:
            if before is None:
                raise StaleError(f"variable {spec.name!r} was deleted, or its shards have moved, meanwhile")
            reach("ps.adopt.before")
            self._manager.save_shards(store, {(variable, index): (shard, staged.file)})
        except PsClusterError:
            if before is not None:
                store.uninstall(before)
                self._doubtful = True
            with store.ledger() as ledger:
                ledger.replace(variable, index, {})
            raise

    def _withdraw(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        self._note_over(request.id)
        with self._committing:
            held = store.directory.variables.get(request.variable)
            here = held is not None and held.spec.placement == request.spec.placement and request.shard in held.shards
        return ps_pb2.MoveReply(committed=here), []

    def _check_wanted(self, store: Store, request: ps_pb2.MoveRequest) -> None:
        """Raise StaleError for a move that is over. Needs the lock."""
        store.check_job(request.job)
        if request.id in self._over:
            raise StaleError("this move is over")

    def _note_over(self, move: int) -> None:
        with self._lock:
            self._over.append(move)
            staged = self._staged.pop(move, None)
        if staged is not None:
            staged.drop()

    def _staged_as(self, store: Store, request: ps_pb2.MoveRequest) -> StagedShard:
        with self._lock:
            self._check_wanted(store, request)
            staged = self._staged.get(request.id)
        if staged is None or staged.name != (request.variable, request.shard):
            raise StaleError(f"ps {store.index} has nothing of this move: it has restarted")
        return staged

    # Any server

    def _place(self, store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        gone = store.place(request.spec, request.job)
        if gone:
            self._note_over(request.id)
        reach("ps.place.after")
        if request.saved:
            self._manager.save()
        elif gone:
            self._manager.note_placement()
        return ps_pb2.MoveReply(), []

    @staticmethod
    def _serve(store: Store, request: ps_pb2.MoveRequest, _payload: memoryview) -> _Answer:
        held = store.directory.variables.get(request.variable)
        shard = None if held is None else held.shards.get(request.shard)
        if held is not None and shard is not None and held.spec.placement == request.spec.placement:
            shard.serve()
        return ps_pb2.MoveReply(), []


_Answer = tuple[ps_pb2.MoveReply, Sequence[Buffer]]


def _found(store: Store, variable: int, index: int) -> Shard | None:
    """Return a shard, also one that is arriving; None if it is not here."""
    held = store.directory.variables.get(variable)
    return None if held is None else held.shards.get(index)


def _tracked(shard: Shard, request: ps_pb2.MoveRequest) -> ChangedPages:
    if shard.pages is None or shard.pages.move != request.id:
        raise StaleError("this server does not know the move: it has restarted, or the move was given up")
    return shard.pages


def _changes(shard: Shard, pages: ChangedPages, round_number: int) -> _Answer:
    """Return the arrays of a shard, and the pages that have changed. Needs the shard's lock."""
    names = list(shard.arrays())
    changed = np.packbits(pages.take(names, round_number)).tobytes()
    state = ps_pb2.ShardState(arrays=names, rows=len(shard.array) if shard.row_limit else 0)
    return ps_pb2.MoveReply(state=state, changed=changed), []


def _first_rows(array: Array, rows: int) -> Array:
    """Return as many rows of a table's array as the caller knew of: it may have more by now, or fewer."""
    space = reservation_of(array)
    if rows > len(array) and (space is None or rows > len(space)):
        raise ProtocolError(f"a move of {rows:,} rows of a shard that has {len(array):,}")
    return array[:rows] if space is None else space[:rows]
