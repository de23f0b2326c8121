"""A server's part in resharding a variable; see `pscluster.coordinator.moves.reshard` for the whole.

    (nothing) --make--> MADE --fill, capture, settle--> MADE --seal--> SEALED, and saved
                        SEALED --adopt--> (the variable), and saved
                        MADE, SEALED --abandon, or another coordinator--> (nothing)

The new variable has an id of its own. Until it is adopted it has a reserved name and the number of an evaluation, like
an evaluation's copies: so it is in no checkpoint, and a coordinator that takes over removes it.

MADE is known to this process only: a server that restarts amid it refuses all that comes until another `make`. So a
variable is sealed only if this process has got all that came, and the old shards here have applied nothing since they
were captured: they are frozen. What is sealed is saved, and may be adopted by any later process.

Rows of a variable are filled in while the old shards change, which are tracked as if they moved (`moves`), and those
that have changed once more after CAPTURE. A late copy of a request must not put earlier values over later ones: so FILL
is refused when a later round of it has come.

Of a table by id, COUNT says before all that how many rows each new shard will have, and after CAPTURE rows are taken
from the old shards (TAKE) and put into the new ones, which grow with them: see `table_resharding`.

Adopting is one step of the directory: the name means the new variable, and the old one is gone. It is repeated until
it is saved; after that, a request for the old id is refused as one for a variable that was deleted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pscluster.core.errors import InvalidUpdateError, ProtocolError, PsClusterError, StaleError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.limits import check_name
from pscluster.core.transport.frames import Buffer, view
from pscluster.ps.array_pool import aligned_full
from pscluster.ps.request_metrics import ShardTraffic
from pscluster.ps.server.embedding import table_resharding
from pscluster.ps.server.embedding.tables import new_array
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Array, Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import MOVE_BYTES, RESERVED, partition_of
from pscluster.ps.storage.arrivals import ShardFile
from pscluster.ps.storage.checkpoint_parts import blank_array
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.tables import SEEN, check_table, row_limit
from pscluster.v1 import ps_pb2

ACTIONS = frozenset(
    (
        ps_pb2.MoveRequest.MAKE,
        ps_pb2.MoveRequest.CAPTURE,
        ps_pb2.MoveRequest.FILL,
        ps_pb2.MoveRequest.SETTLE,
        ps_pb2.MoveRequest.SEAL,
        ps_pb2.MoveRequest.ADOPT,
        ps_pb2.MoveRequest.ABANDON,
        ps_pb2.MoveRequest.COUNT,
        ps_pb2.MoveRequest.TAKE,
    )
)
"""Of a MoveRequest, those that are handled here."""


class _UnderWay(NamedTuple):
    """The variable that is being resharded, and the new one."""

    id: int
    old: int
    new: int


class Resharding:
    """One server's part in cutting variables otherwise, one at a time. Thread-safe."""

    def __init__(self, manager: StateManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._under_way: _UnderWay | None = None
        self._rounds: dict[int, int] = {}  # of FILL, the last that has come, by new shard
        self._adopting = threading.Lock()  # held while one is entered and saved
        self._unsaved = False  # whether one that was entered may not be

    def handle(
        self, store: Store, request: ps_pb2.MoveRequest, payload: memoryview
    ) -> tuple[ps_pb2.MoveReply, Sequence[Buffer]]:
        """Take one step; return the reply and its payload."""
        match request.action:
            case ps_pb2.MoveRequest.COUNT:
                return self._count(store, request), []
            case ps_pb2.MoveRequest.TAKE:
                return ps_pb2.MoveReply(), [self._take(store, request)]
            case ps_pb2.MoveRequest.MAKE:
                self._make(store, request)
            case ps_pb2.MoveRequest.CAPTURE:
                return self._capture(store, request), []
            case ps_pb2.MoveRequest.FILL:
                self._fill(store, request, payload)
            case ps_pb2.MoveRequest.SETTLE:
                self._settle(store, request)
            case ps_pb2.MoveRequest.SEAL:
                self._seal(store, request)
                reach("ps.seal.saved")
            case ps_pb2.MoveRequest.ADOPT:
                self._adopt(store, request.spec, request.job)
            case ps_pb2.MoveRequest.ABANDON:
                self._abandon(store, request)
            case action:
                raise ProtocolError(f"action {action} of a resharding")
        return ps_pb2.MoveReply(), []

    def forget(self) -> None:
        """End what was under way for another coordinator, or another job."""
        with self._lock:
            self._under_way = None

    def persist(self) -> None:
        """Save what was entered, if it may not be: the next coordinator can't know."""
        if self._unsaved:
            self._manager.save()
            self._unsaved = False

    def _check_under_way(self, store: Store, request: ps_pb2.MoveRequest) -> _UnderWay:
        store.check_job(request.job)
        with self._lock:
            known = self._under_way
        if known is None or known.id != request.id:
            raise StaleError(
                f"ps {store.index} has nothing of this resharding: it has restarted, or the cut was given up"
            )
        return known

    def _make(self, store: Store, request: ps_pb2.MoveRequest) -> None:
        spec, held = request.spec, store.directory.variables.get(request.variable)
        if held is None or held.spec.evaluation:
            raise StaleError(f"there is no variable {request.variable} that could be resharded")
        if not spec.evaluation or not spec.name.startswith(RESERVED) or spec.id in (0, held.spec.id):
            raise ProtocolError(f"a resharding of {held.spec.name!r} without a number or a reserved name of its own")
        check_name(spec.name, "a variable's name")
        check_table(spec)
        if _apart_from_cut(spec, held.spec) != held.spec:
            raise ProtocolError(f"a resharding of {held.spec.name!r} that makes another variable of it")
        partition = partition_of(spec)

        def new_shard(shard: int) -> Shard:
            if limit := row_limit(spec, partition, shard):
                return Shard(new_array(0, limit, partition.shape[1]), row_limit=limit)
            return Shard(aligned_full(partition.block(shard).shape, 0, held.dtype))

        def make() -> HeldVariable:
            try:
                shards = {shard: new_shard(shard) for shard, owner in enumerate(spec.owners) if owner == store.index}
            except MemoryError:
                raise InvalidUpdateError(
                    f"ps {store.index} has too little memory for shards of {held.spec.name!r}"
                ) from None
            return HeldVariable(spec, held.dtype, partition, shards)

        store.check_job(request.job)
        store.add(spec, request.job, make)
        with self._lock:
            self._under_way, self._rounds = _UnderWay(request.id, request.variable, spec.id), {}

    @staticmethod
    def _count(store: Store, request: ps_pb2.MoveRequest) -> ps_pb2.MoveReply:
        store.check_job(request.job)
        held, shard = store.directory.find(request.variable, request.shard)
        with shard.lock:
            rows = table_resharding.counts_by_shard(held, shard, request.num_shards)
            return ps_pb2.MoveReply(rows=rows.tolist(), state=ps_pb2.ShardState(arrays=shard.arrays()))

    def _take(self, store: Store, request: ps_pb2.MoveRequest) -> memoryview:
        known = self._check_under_way(store, request)
        held, shard = store.directory.find(known.old, request.shard)
        name = request.arrays[0] if len(request.arrays) == 1 else ""
        with shard.lock:
            return table_resharding.taken(held, shard, name, request.start, request.state.rows, request.state.updates)

    def _capture(self, store: Store, request: ps_pb2.MoveRequest) -> ps_pb2.MoveReply:
        known = self._check_under_way(store, request)
        held, shard = store.directory.find(known.old, request.shard)
        store.check_not_staged(shard)
        store.count_reads()
        reply = ps_pb2.MoveReply()
        with shard.lock:
            self._check_under_way(store, request)  # else it would stay frozen after a cut that was given up meanwhile
            pages = shard.pages if shard.pages is not None and shard.pages.move == request.id else None
            if pages is None and not held.spec.HasField("table"):
                raise StaleError("the changes of this shard were not tracked: the cut was given up")
            shard.freeze()
            state = reply.state
            state.arrays.extend(shard.arrays())
            state.updates, state.traffic = shard.updates, shard.traffic.recent()
            state.steps.update(shard.steps)
            if held.spec.HasField("table"):
                state.rows, state.seen = len(shard.array), table_resharding.seen(held, shard)
            if pages is not None:
                reply.changed = np.packbits(pages.take(list(state.arrays), request.round)).tobytes()
            with store.ledger() as ledger:
                named = ledger.named(known.old, request.shard)
                state.term = ledger.term
        by_updates: dict[frozenset[int], list[int]] = {}
        for function, nths in named.items():
            by_updates.setdefault(nths, []).append(function)
        for nths, keys in by_updates.items():
            reply.named.add(nth=sorted(nths), keys=keys)
        reach("ps.capture.after")
        return reply

    def _new_shard(self, store: Store, request: ps_pb2.MoveRequest) -> tuple[HeldVariable, Shard]:
        known = self._check_under_way(store, request)
        return store.directory.find(known.new, request.shard)

    def _fill(self, store: Store, request: ps_pb2.MoveRequest, payload: memoryview) -> None:
        held, shard = self._new_shard(store, request)
        name = request.arrays[0] if len(request.arrays) == 1 else ""
        with shard.lock:
            self._check_under_way(store, request)
            with self._lock:
                if request.round < self._rounds.get(request.shard, 0):
                    raise StaleError("this request is a late copy: later values have come")
                self._rounds[request.shard] = request.round
            if name == SEEN:
                table_resharding.take_seen(held, shard, payload, request.state.seen)
                return
            if name not in shard.arrays():
                shard.put({name: _blank(store, held, shard, name)})
            if shard.row_limit:
                elements = len(payload) // 4
                table_resharding.make_room(held, shard, name, request.start, elements, functools.partial(_fills, store))
            array = shard.arrays()[name]
            if request.rows:
                _fill_rows(shard, array, request.rows, payload)
            else:
                _fill_span(shard, array, request.start, payload)
        reach("ps.fill.after")

    def _settle(self, store: Store, request: ps_pb2.MoveRequest) -> None:
        held, shard = self._new_shard(store, request)
        state = request.state
        if not 0 <= state.traffic < math.inf:
            raise ProtocolError(f"a resharding of {held.spec.name!r} with a traffic of {state.traffic} bytes")
        if state.term != store.term:
            raise StaleError("the servers are not in one term: a restore was broken off")
        with shard.lock, store.ledger() as ledger:
            self._check_under_way(store, request)
            shard.retain(frozenset(state.arrays))  # a restore may have ended others since they were copied
            shard.updates, shard.steps = state.updates, dict(state.steps)
            shard.changes += 1
            shard.traffic = ShardTraffic(state.traffic)
            named = {key: set(nths) for key, nths in ledger.named(held.spec.id, request.shard).items()}
            for same in request.named:
                for key in same.keys:
                    named.setdefault(key, set()).update(same.nth)
            ledger.replace(held.spec.id, request.shard, named)

    def _seal(self, store: Store, request: ps_pb2.MoveRequest) -> None:
        """Save the new shards beside what was saved before, so that it does not matter how much else the server has."""
        known = self._check_under_way(store, request)
        held = store.directory.variables.get(known.new)
        if held is None:
            raise StaleError(f"ps {store.index} lacks the new shards: they were deleted")
        if not self._manager.may_extend(store, len(held.shards)):
            self._manager.save()
            return
        files = dict[tuple[int, int], tuple[Shard, ShardFile | None]]()
        try:
            for index, shard in held.shards.items():
                with shard.lock:
                    arrays = shard.arrays()
                file = self._manager.shard_file(known.new, index, arrays)
                files[known.new, index] = shard, file
                if file is not None:
                    for name, array in arrays.items():
                        file.put(name, 0, view(array))
            self._manager.save_shards(store, files)
        except OSError as error:
            raise PsClusterError(f"the new shards can't be saved: {error.strerror or error}") from None
        finally:
            for _, file in files.values():
                if file is not None:
                    file.discard()  # unless it was saved

    def _adopt(self, store: Store, spec: ps_pb2.VariableSpec, job: int) -> None:
        with self._adopting:
            self._unsaved = True
            store.adopt(spec, job)
            self.forget()
            reach("ps.adopt_cut.before")
            try:
                self._manager.save_shards(store)
            except PsClusterError as error:  # it is repeated until it is saved
                raise UnavailableError(str(error)) from None
            self._unsaved = False
        reach("ps.adopt_cut.saved")

    def _abandon(self, store: Store, request: ps_pb2.MoveRequest) -> None:
        store.check_job(request.job)
        with self._lock:
            if self._under_way is not None and self._under_way.id == request.id:
                self._under_way = None
        held = store.directory.variables.get(request.variable)
        for shard in held.shards.values() if held is not None else ():
            with shard.lock:
                shard.let_go(request.id)
                shard.release()  # also if something else has tracked it
        if request.spec.evaluation:
            store.delete("", evaluation=request.spec.evaluation)
            with contextlib.suppress(PsClusterError):  # what is left of it after a restart is dropped some day
                self._manager.save_shards(store)


def _apart_from_cut(spec: ps_pb2.VariableSpec, old: ps_pb2.VariableSpec) -> ps_pb2.VariableSpec:
    """Return a spec with the name and the cut of another one."""
    same = ps_pb2.VariableSpec()
    same.CopyFrom(spec)
    same.id, same.name, same.evaluation, same.origin, same.placement = old.id, old.name, 0, old.origin, old.placement
    if old.HasField("table") and len(spec.shape) == len(old.shape):
        same.shape[0] = old.shape[0]  # as many rows as fit into its shards
    del same.splits[:], same.owners[:]
    same.splits.extend(old.splits)
    same.owners.extend(old.owners)
    same.ClearField("row_order")
    if old.HasField("row_order"):
        same.row_order.CopyFrom(old.row_order)
    return same


def _fill_span(shard: Shard, array: Array, start: int, payload: memoryview) -> None:
    """Set elements of a new shard's array from `start` on. ProtocolError if it has not as many."""
    count, rest = divmod(len(payload), array.itemsize)
    if rest or start + count > array.size or len(payload) > MOVE_BYTES:
        raise ProtocolError(f"{len(payload):,} bytes from element {start:,} of a shard of {array.size:,} elements")
    if shard.row_limit:
        shard.before_rows_change(np.arange(start, start + count, array.shape[1]) // array.shape[1])
    else:
        shard.before_span_changes(start, start + count)
    shard.changes += 1
    array.reshape(-1)[start : start + count] = np.frombuffer(payload, array.dtype)


def _fill_rows(shard: Shard, array: Array, numbers: bytes, payload: memoryview) -> None:
    """Set rows of a new shard's array. ProtocolError if they are not its, or the payload is not theirs."""
    rows = np.frombuffer(numbers[: len(numbers) // 8 * 8], np.int64)
    if shard.row_limit or not array.ndim or len(numbers) % 8 or rows[0] < 0 or rows[-1] >= len(array):
        raise ProtocolError(f"a resharding with rows that a shard of shape {array.shape} does not have")
    if (rows[1:] <= rows[:-1]).any():
        raise ProtocolError("a resharding with rows that are not ascending")
    row_shape = array.shape[1:]
    if len(payload) != len(rows) * math.prod(row_shape) * array.itemsize or len(payload) > MOVE_BYTES:
        raise ProtocolError(f"{len(payload):,} bytes for {len(rows):,} rows of shape {row_shape} of {array.dtype}")
    shard.before_rows_change(rows)
    shard.changes += 1
    array[rows] = np.frombuffer(payload, array.dtype).reshape(len(rows), *row_shape)


def _fills(store: Store, optimizer: int) -> Mapping[str, float]:
    """Return what each slot of an optimizer holds before the first gradient."""
    return store.directory.optimizer(optimizer).rule.slots


def _blank(store: Store, held: HeldVariable, shard: Shard, name: str) -> Array:
    kind, _, rest = name.partition("/")
    try:
        if kind not in ("slot", "average"):
            raise ValueError
        fills = _fills(store, int(rest.partition("/")[0] if kind == "slot" else rest))
        array = blank_array(store, held, shard.array.shape, name, shard.row_limit)
    except (ValueError, PsClusterError):
        raise ProtocolError(f"a resharding with an array {name[:80]!r}") from None
    except MemoryError:
        raise InvalidUpdateError(f"ps {store.index} has too little memory for shards of {held.spec.name!r}") from None
    if shard.row_limit and kind == "slot":
        array[...] = fills[rest.partition("/")[2]]
    return array
