"""What a parameter server holds for a job: shards, optimizers, the directory, the ledger of applied updates.

Updates and reads of different shards run at the same time, those of one shard one after the other. An update
request is checked whole before any of it is applied; then each item is applied under its shard's lock, in
which the ledger is asked and told, so that a repetition that arrives while the first is in progress waits
for it and finds it done. Closing an incarnation takes every shard's lock once after marking it: whatever was
in progress has ended when the reply goes out.

Locks, in order: a variable's while it is made, a shard's, then the store's. None is held over a network call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import (
    InvalidUpdateError,
    MisuseError,
    ProtocolError,
    PsClusterError,
    StaleError,
    UnavailableError,
    UnknownVariableError,
)
from pscluster.core.fault_points import reach
from pscluster.core.functions.definitions import resolve
from pscluster.core.geometry import AxisSlice, Partition
from pscluster.core.limits import MAX_ROWS_BYTES, check_name
from pscluster.core.transport.frames import CHUNK_BYTES, Buffer, padding, view
from pscluster.ps.optim import RULES, UpdateRule, apply_dense, apply_rows, compute_dtype, deduplicate, new_slots
from pscluster.ps.optim.schedules import from_spec as schedule_from_spec
from pscluster.ps.request_metrics import StoreCounts, VariableCounts
from pscluster.ps.server.creation import born, filler, no_handles
from pscluster.ps.server.dedup import Ledger, Origin
from pscluster.ps.server.losses import UNKNOWN, UNKNOWN_NAME, Losses
from pscluster.ps.server.payload import Ids, Payload
from pscluster.ps.server.prepared_reads import MAX_REQUEST_BYTES, PreparedRead, PreparedReads
from pscluster.ps.server.shard import Array, Shard, Snapshot
from pscluster.ps.spec import AVERAGE, COPY, OWN_RULE, SESSION_BYTES, check_kind, partition_of
from pscluster.ps.storage.spill import Spill
from pscluster.v1 import definition_pb2, ps_pb2

logger = logging.getLogger(__name__)

_ARITHMETIC: dict[int, np.ufunc] = {
    ps_pb2.ADD: np.add,
    ps_pb2.SUB: np.subtract,
    ps_pb2.MUL: np.multiply,
    ps_pb2.DIV: np.divide,
    ps_pb2.MIN: np.minimum,
    ps_pb2.MAX: np.maximum,
}


@dataclass(slots=True)
class HeldVariable:
    """A variable of the directory and the shards of it that live here."""

    spec: ps_pb2.VariableSpec
    dtype: np.dtype[Any]
    partition: Partition
    shards: dict[int, Shard]
    counts: VariableCounts = field(default_factory=VariableCounts)


@dataclass(slots=True)
class HeldOptimizer:
    """An optimizer of the directory."""

    spec: ps_pb2.OptimizerSpec
    rule: UpdateRule
    definition: definition_pb2.Definition | None = None  # of a rule of the user's own
    by_value: bool = False  # its class came as a pickle


Index = tuple[slice | EllipsisType, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """What an item of a read reads: an array of a shard, or a box of it; for ids, the array as a table."""

    shard: Shard
    array: Array
    size: int
    dtype: np.dtype[Any]  # to be sent; another than the array's for an average that is still the value itself
    index: Index | None = None
    values: bool = False  # it is the values, which may be in another array by now


@dataclass(frozen=True, slots=True)
class Placed:
    """An item of an update, checked: what it changes and where its bytes lie in the payload."""

    item: ps_pb2.UpdateItem
    held: HeldVariable
    shard: Shard
    optimizer: HeldOptimizer | None
    index: Index | None
    ids_at: int
    values_at: int

    @property
    def takes_place(self) -> bool:
        """Are its values all of a shard whose array may become another? Of small ones prepared reads keep views."""
        whole = self.item.kind == ps_pb2.ASSIGN and self.item.rows.WhichOneof("kind") == "all" and not self.item.scalar
        return whole and self.shard.array.nbytes > SESSION_BYTES


_GONE = 256
"""So many deletions of all names with a prefix are remembered: a late copy of a creation makes none of them again."""


_AT_ONCE = 256
"""So many intervals of functions are taken in under the lock, before others get it."""


class Store:
    """The state of one job on one server. See the module's docstring for what may happen at the same time."""

    def __init__(self, index: int, job: int = 0) -> None:
        self.index = index
        self.job = job
        self.counts = StoreCounts()
        self.spill = Spill()
        """Keeps what changes before it is written to disk, or sent."""
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._variables: dict[int, HeldVariable] = {}
        self._optimizers: dict[int, HeldOptimizer] = {}
        self._prepared = PreparedReads()
        self._awaited: dict[int, ps_pb2.OptimizerSpec] = {}  # restored, and their rule has to be sent again
        self.losses = Losses()
        self._births: dict[int, threading.Lock] = {}  # by variable, held while its shards are made
        self._unborn: dict[int, str] = {}  # the names of those that are being made, unless they were deleted
        self._gone: deque[str] = deque(maxlen=_GONE)  # prefixes of names that were deleted

    # The directory

    def check_job(self, job: int) -> None:
        """StaleError if a request is of another job."""
        if job != self.job or not job:
            raise StaleError(
                f"ps {self.index} works for another job, or for none: it was restarted and has lost its variables, or "
                "another coordinator has taken it"
            )

    def take_over(self, job: int) -> None:
        """Another coordinator goes on with what is here. When this returns, nothing of the one before is applied any
        more, for it is of another job."""
        with self._lock:
            self.job = job
            self._ledger.forget_functions()
            self._prepared.clear()
            self._gone.clear()  # late copies are of another job now, and numbers may come again
            shards = [shard for held in self._variables.values() for shard in held.shards.values()]
        _pass_through(shards)

    def expected_bytes(self, request: ps_pb2.CreateRequest) -> int | None:
        """Payload bytes that a create request must bring; None: any. Refuses what can't be created."""
        self.check_job(request.job)
        if request.HasField("optimizer"):
            return None
        spec = request.variable
        if spec.id == 0 or not spec.name:
            raise ProtocolError("a variable without a number or a name")
        check_name(spec.name, "a variable's name")
        with self._lock:
            self._check_name(spec)
        if request.HasField("initializer"):
            return None
        partition, dtype = partition_of(spec), dtype_named(spec.dtype)
        sizes = [partition.block(i).size * dtype.itemsize for i, owner in enumerate(spec.owners) if owner == self.index]
        return sum(size + padding(size) for size in sizes)

    def has_optimizer(self, spec: ps_pb2.OptimizerSpec) -> bool:
        """Is there one of this number and name, with this rule?"""
        with self._lock:
            held = self._optimizers.get(spec.id)
            return held is not None and (held.spec.name, held.spec.rule) == (spec.name, spec.rule)

    def create(self, request: ps_pb2.CreateRequest, payload: Payload) -> None:
        """Add a variable, with the initial values of the shards that live here, or an optimizer."""
        self.check_job(request.job)
        if request.HasField("optimizer"):
            self._create_optimizer(request, payload)
            return
        spec = request.variable
        with self._lock:
            birth = self._births.setdefault(spec.id, threading.Lock())
        # The same again is a copy of the request that comes late: what was made by the first may be trained by now,
        # or is still being made.
        with birth:
            with self._lock:
                known = self._variables.get(spec.id)
                if known is None:
                    self._unborn[spec.id] = spec.name
            if known is None:
                known = self._born(request, payload)
        if known.spec != spec:
            raise InvalidUpdateError(f"variable id {spec.id} is taken by {known.spec.name!r}")

    def _born(self, request: ps_pb2.CreateRequest, payload: Payload) -> HeldVariable:
        """Make a variable, and enter it unless it was deleted, or its name was taken, meanwhile."""
        spec, made = request.variable, None
        try:
            made = self._made(request, payload)
        finally:
            with self._lock:
                wanted = self._unborn.pop(spec.id, None) is not None
                if made is not None and wanted:
                    self.check_job(request.job)
                    self._check_name(spec)
                    self._variables[spec.id] = made
        if not wanted:
            raise StaleError(f"variable {spec.name!r} was deleted while it was made")
        return made

    def _check_name(self, spec: ps_pb2.VariableSpec) -> None:
        """Under the lock."""
        if spec.name.startswith(tuple(self._gone)):
            raise StaleError(f"variable {spec.name!r} was deleted with all others whose names begin like it")
        # The same spec again is a repetition of this request: its first answer was lost.
        if any(held.spec.name == spec.name and held.spec != spec for held in self._variables.values()):
            raise InvalidUpdateError(f"there is a variable {spec.name!r} already: names are unique in a strategy")

    def _made(self, request: ps_pb2.CreateRequest, payload: Payload) -> HeldVariable:
        spec = request.variable
        partition, dtype = partition_of(spec), dtype_named(spec.dtype)
        if request.initializer.name == COPY:
            return HeldVariable(spec, dtype, partition, self._copied(spec, request.initializer))
        if request.HasField("initializer"):
            fill = filler(request.initializer, payload.joined(), spec.name)
            arrays = born(spec, partition, dtype, self.index, fill)
        else:
            arrays = self._given(spec, partition, dtype, payload)
        return HeldVariable(spec, dtype, partition, {shard: Shard(array) for shard, array in arrays.items()})

    def _copied(self, spec: ps_pb2.VariableSpec, initializer: ps_pb2.Initializer) -> dict[int, Shard]:
        """The shards of another variable that live here, as they are now."""
        try:
            numbers = json.loads(initializer.numbers)
            source, optimizers = int(numbers["variable"]), set(map(int, numbers["optimizers"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"variable {spec.name!r}, a copy of nothing: {error!r}") from None
        held = self._variables.get(source)
        if held is None:
            raise UnknownVariableError(f"variable {spec.name!r} is to be a copy of number {source}, which is not here")
        same = ps_pb2.VariableSpec()
        same.CopyFrom(held.spec)
        same.id, same.name = spec.id, spec.name
        if same != spec:
            raise InvalidUpdateError(
                f"variable {spec.name!r} can't be a copy of {held.spec.name!r}, which has another shape, type, cut or "
                "places"
            )
        try:
            return {number: shard.copy(optimizers) for number, shard in held.shards.items()}
        except MemoryError:
            size = sum(shard.nbytes for shard in held.shards.values())
            raise InvalidUpdateError(
                f"ps {self.index} has no memory for a copy of {held.spec.name!r}, up to {size:,} bytes"
            ) from None

    def _given(
        self, spec: ps_pb2.VariableSpec, partition: Partition, dtype: np.dtype[Any], payload: Payload
    ) -> dict[int, Array]:
        """The initial values that came with the request, of the shards that live here."""
        arrays, at = {}, 0
        for shard, owner in enumerate(spec.owners):
            if owner != self.index:
                continue
            shape = partition.block(shard).shape
            try:
                array = arrays[shard] = np.empty(shape, dtype)
            except (MemoryError, ValueError) as error:  # ValueError: NumPy has no arrays of such a shape
                raise InvalidUpdateError(f"variable {spec.name!r}, shard {shard}, shape {shape}: {error}") from None
            flat = array.reshape(-1)
            for offset, piece in payload.blocks(at, array.nbytes, dtype.itemsize):
                low = offset // dtype.itemsize
                flat[low : low + len(piece) // dtype.itemsize] = np.frombuffer(piece, dtype)
            at += array.nbytes + padding(array.nbytes)
        return arrays

    def _create_optimizer(self, request: ps_pb2.CreateRequest, payload: Payload) -> None:
        spec = request.optimizer
        if not spec.id or not spec.name:
            raise ProtocolError("an optimizer without a number or a name")
        check_name(spec.name, "an optimizer's name")
        rule_class: Any = RULES.get(spec.rule)
        if request.HasField("rule"):
            rule_class = resolve(request.rule, payload.joined(), no_handles)
        if not (isinstance(rule_class, type) and issubclass(rule_class, UpdateRule)):
            raise InvalidUpdateError(f"{spec.rule!r} is no update rule; there are {', '.join(sorted(RULES))}")
        try:
            rule = rule_class.from_spec(spec.numbers, spec.flags)
            if spec.schedule:
                schedule = schedule_from_spec(json.loads(spec.schedule))
                # The rule is a frozen value; the schedule, which counts from 0, takes the place of its constant rate.
                object.__setattr__(rule, "learning_rate_at", lambda step: schedule(step - 1))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidUpdateError(f"optimizer {spec.name!r}: {error}") from None
        definition = request.rule if request.HasField("rule") else None
        by_value = bool(len(payload.joined())) or (definition is not None and bool(definition.pickle))
        with self._lock:
            self._optimizers[spec.id] = HeldOptimizer(spec, rule, definition, by_value)
            self._awaited.pop(spec.id, None)

    def delete(self, name: str, variable: int = 0, prefix: str = "") -> None:
        """Remove a variable, of this number if one is given; one that is not there is fine.

        With a prefix instead of a name: all whose names begin so, and none of them is made any more.
        """

        def meant(number: int, named: str) -> bool:
            return named.startswith(prefix) if prefix else named == name and variable in (0, number)

        with self._lock:
            if prefix and prefix not in self._gone:
                self._gone.append(prefix)
            for number, held in list(self._variables.items()):
                if meant(number, held.spec.name):
                    del self._variables[number]
                    self._prepared.clear()
                    if prefix:
                        self._births.pop(number, None)
            self._unborn = {number: named for number, named in self._unborn.items() if not meant(number, named)}

    def describe(
        self, variables: Sequence[str], optimizers: Sequence[str], everything: bool = False
    ) -> ps_pb2.DescribeReply:
        """What the directory knows of these names. UnknownVariableError names the first unknown one."""
        reply = ps_pb2.DescribeReply()
        held_variables, held_optimizers, awaited = self.held()  # what is done with them is not done under the lock
        by_name = {held.spec.name: held for held in held_variables}
        rules = {held.spec.name: held.spec for held in held_optimizers}
        rules |= {spec.name: spec for spec in awaited.values()}
        if everything:
            variables, optimizers = list(by_name), list(rules)
        for name in variables:
            if name not in by_name:
                raise UnknownVariableError(f"there is no variable {name!r} in this job")
            reply.variables.append(by_name[name].spec)
        for name in optimizers:
            if name not in rules:
                raise UnknownVariableError(f"there is no optimizer {name!r} in this job")
            spec = reply.optimizers.add()
            spec.CopyFrom(rules[name])
            shards = (shard for held in held_variables for shard in held.shards.values())
            spec.iterations = max((shard.steps.get(spec.id, 0) for shard in shards), default=0)
        return reply

    # What is kept on disk

    def held(self) -> tuple[list[HeldVariable], list[HeldOptimizer], dict[int, ps_pb2.OptimizerSpec]]:
        """The directory: variables, optimizers, and by number those optimizers whose rule is awaited."""
        with self._lock:
            return list(self._variables.values()), list(self._optimizers.values()), dict(self._awaited)

    def restore(self, variables: Sequence[HeldVariable], awaited: Mapping[int, ps_pb2.OptimizerSpec]) -> None:
        """Put in what was saved, before anybody is served."""
        self._variables = {held.spec.id: held for held in variables}
        self._awaited = dict(awaited)

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """The memory of updates, under its lock."""
        with self._lock:
            yield self._ledger

    def traffic(self) -> list[tuple[str, int, VariableCounts]]:
        """Of each variable its name, the bytes of its shards here, slots included, and what was read and updated."""
        with self._lock:
            self._prepared.settle()
            held = list(self._variables.values())
        return [(each.spec.name, sum(shard.nbytes for shard in each.shards.values()), each.counts) for each in held]

    def totals(self) -> tuple[int, int]:
        """How many shards are held, and their bytes, slots included."""
        shards = self._all_shards()
        return len(shards), sum(shard.nbytes for shard in shards)

    def _all_shards(self) -> list[Shard]:
        with self._lock:
            return [shard for held in self._variables.values() for shard in held.shards.values()]

    # Incarnations and functions

    def close_incarnation(self, incarnation: int) -> None:
        """When this returns, no update of the incarnation is being or will be applied."""
        with self._lock:
            self._ledger.close(incarnation)
        _pass_through(self._all_shards())

    @property
    def remembered(self) -> int:
        """How many updates are remembered, so that a repetition of them is found."""
        with self._lock:
            return self._ledger.remembered

    @property
    def term(self) -> int:
        """What was sent under an earlier one is refused."""
        return self._ledger.term

    def finish_functions(
        self, intervals: Sequence[tuple[int, int]], keys: Iterable[int] = (), *, shut_out: bool = False
    ) -> None:
        """These functions have ended, and those with these keys will not be run again.

        With `shut_out`: when this returns, no update of theirs is being or will be applied.
        """
        pieces = [intervals[at : at + _AT_ONCE] for at in range(0, len(intervals), _AT_ONCE)]
        for piece in pieces:
            with self._lock:
                self._ledger.finish(piece)
        left = list(keys)
        while left:
            with self._lock:
                self._ledger.forget(left[:_AT_ONCE])
            del left[:_AT_ONCE]
        if shut_out:
            _pass_through(self._all_shards())

    # Reading

    def _shard(self, variable: int, shard: int) -> tuple[HeldVariable, Shard]:
        held = self._variables.get(variable)
        if held is None:
            raise UnknownVariableError(f"there is no variable number {variable} in this job")
        if shard not in held.shards:
            raise UnknownVariableError(f"shard {shard} of {held.spec.name!r} does not live on ps {self.index}")
        return held, held.shards[shard]

    def _locate(self, item: ps_pb2.ReadItem, at: int) -> tuple[_Source, int]:
        """What an item reads, and where the next item's ids begin in the payload."""
        held, shard = self._shard(item.variable, item.shard)
        array = values = shard.array
        dtype = array.dtype
        if item.slot == AVERAGE:
            array = shard.averages.get(item.optimizer, array)  # before the first gradient the value is its average
            dtype = compute_dtype(array.dtype)
        elif item.slot:
            array = self._slots(held, shard, item.optimizer).get(item.slot)  # type: ignore[assignment]
            if array is None:
                raise UnknownVariableError(f"the optimizer keeps no slot {item.slot!r} for {held.spec.name!r}")
            dtype = array.dtype
        which = item.rows.WhichOneof("kind")
        if which == "all":
            return _Source(shard, array, array.size * dtype.itemsize, dtype, values=array is values), at
        if which == "slices":
            index = _index(item.rows.slices, array, held.spec.name)
            size = math.prod(axis.count for axis in item.rows.slices.axes) * dtype.itemsize
            return _Source(shard, array, size, dtype, index, array is values), at
        if which == "ids":
            table = _table(array, item.rows.leading, held.spec.name)
            size = item.rows.ids * table.shape[1] * dtype.itemsize
            if item.rows.ids > 1 and size > MAX_ROWS_BYTES:
                raise InvalidUpdateError(
                    f"{item.rows.ids:,} rows of {held.spec.name!r} take {size:,} bytes, the limit for one item of a "
                    f"read is {MAX_ROWS_BYTES:,}: divide it"
                )
            ids_size = item.rows.ids * 8
            return _Source(shard, table, size, dtype), at + ids_size + padding(ids_size)
        if which == "version":
            version: Array = np.array([shard.version], "<u8")
            return _Source(shard, version, version.nbytes, version.dtype), at
        raise ProtocolError("a read without rows")

    def _slots(self, held: HeldVariable, shard: Shard, optimizer: int) -> dict[str, Array]:
        """The slots that an optimizer keeps beside a shard; they are made when they are first needed."""
        known = self.optimizer(optimizer)
        with shard.lock:
            if optimizer not in shard.slots:
                shard.slots[optimizer] = new_slots(known.rule, shard.array.shape, held.dtype)
            return shard.slots[optimizer]

    def optimizer(self, number: int) -> HeldOptimizer:
        """By its number. UnknownVariableError if there is none; UnavailableError if its rule is awaited."""
        known = self._optimizers.get(number)
        if known is None and number in self._awaited:
            raise UnavailableError(f"ps {self.index} waits for the rule of optimizer {self._awaited[number].name!r}")
        if known is None:
            raise UnknownVariableError(f"there is no optimizer number {number} in this job")
        return known

    def reply_bytes(self, request: ps_pb2.ReadRequest, ids_bytes: int) -> int:
        """Payload bytes of the reply to a read that came with so many bytes of ids. Refuses what can't be read."""
        self.check_job(request.job)
        total = at = 0
        for item in request.items:
            source, at = self._locate(item, at)
            total += source.size + padding(source.size)
        if at != ids_bytes:
            raise ProtocolError(f"a read with {ids_bytes} bytes of row numbers whose items need {at}")
        return total

    def read(self, request: ps_pb2.ReadRequest, payload: Payload) -> Iterator[Buffer]:
        """The segments of the reply, in pieces, each shard as it was at one moment."""
        for segment in self.segments(request, payload):
            if isinstance(segment, Snapshot):
                yield from segment
            else:
                yield segment

    def segments(self, request: ps_pb2.ReadRequest, payload: Payload) -> Generator[Buffer | Snapshot, None, None]:
        """The segments of the reply; of large arrays snapshots, each to be read before the next segment is taken."""
        at, begin = 0, time.monotonic()
        for item in request.items:
            source, next_at = self._locate(item, at)
            which, size = item.rows.WhichOneof("kind"), source.size
            if which == "ids":
                ids = payload.ids(at, item.rows.ids)
                self._check_ids(item.variable, source.array, ids)
                made: Buffer | Snapshot = _gather(source, ids)
            else:
                made = self._block(source)
            del source  # while this waits for a client another array may take the place of the shard's
            if isinstance(made, Snapshot):
                try:
                    yield made
                finally:
                    made.close()
            else:
                yield made
            if padding(size):
                yield bytes(padding(size))
            at = next_at
            if which != "version" and (held := self._variables.get(item.variable)) is not None:
                end = time.monotonic()
                held.counts.read(size, end - begin, item.rows.ids)
                begin = end

    def _block(self, source: _Source) -> Buffer | Snapshot:
        """All of an array, or a box of it: a copy, or of large values a snapshot, to be closed."""
        shard, array = source.shard, source.array
        selected = array if source.index is None else array[source.index]
        if source.values and source.dtype == array.dtype and selected.flags.c_contiguous and source.size > CHUNK_BYTES:
            start = byte_bounds(selected)[0] - byte_bounds(array)[0]
            return shard.snapshot(start, start + source.size, self.spill)
        with shard.lock:
            copy = np.array(selected, source.dtype, order="C")
        return view(copy)

    def prepared(self, request: bytes) -> PreparedRead | None:
        """What answers this request, byte for byte one that was prepared."""
        return self._prepared.find(request)

    def prepare(self, data: bytes, request: ps_pb2.ReadRequest) -> None:
        """Keep what answers a request that was just answered, if it is for whole arrays of variables only."""
        if request.job != self.job:  # of the job before, answered by its own store
            return
        if len(data) > MAX_REQUEST_BYTES or any(item.slot or not item.rows.all for item in request.items):
            return
        with self._lock:
            try:
                found = [self._shard(item.variable, item.shard) for item in request.items]
            except UnknownVariableError:  # deleted since
                return
            if len({id(shard) for _, shard in found}) < len(found):  # nobody of ours asks so: it would be kept, too
                return
            sources = [(shard.lock, view(shard.array)) for _, shard in found]
            self._prepared.add(data, PreparedRead(sources, [held.counts for held, _ in found]))

    def _check_ids(self, variable: int, table: Array, ids: Ids) -> None:
        rows = table.shape[0]
        if len(ids) and ids.view(np.uint64).max() >= rows:  # a negative one is a very large one there
            name = self._variables[variable].spec.name
            wrong = ids[(ids < 0) | (ids >= rows)][0]
            raise InvalidUpdateError(f"row {wrong} of a shard of {name!r} that has {rows} rows")

    # Updating

    def check_update(self, request: ps_pb2.UpdateRequest, total_bytes: int) -> list[Placed]:
        """Everything about an update that can be said before its payload is there."""
        self.check_job(request.job)
        with self._lock:
            self._ledger.admit(_origin(request))
        return self.place(request, total_bytes)

    def place(self, request: ps_pb2.UpdateRequest, total_bytes: int) -> list[Placed]:
        """What each item of an update changes, and where its bytes are. Refuses what does not fit together."""
        placed, at = [], 0
        for item in request.items:
            held, shard = self._shard(item.variable, item.shard)
            name = held.spec.name
            if item.kind != ps_pb2.ASSIGN and item.kind != ps_pb2.APPLY_GRADIENT and item.kind not in _ARITHMETIC:
                raise ProtocolError(f"update kind {item.kind} of {name!r}")
            check_kind(item.kind, held.dtype, name)
            optimizer = None
            if item.kind == ps_pb2.APPLY_GRADIENT:
                optimizer = self.optimizer(item.optimizer)
            ids_at = at
            which = item.rows.WhichOneof("kind")
            index: Index | None = None
            if which == "ids":
                table = _table(shard.array, item.rows.leading, name)
                expected = item.rows.ids * table.shape[1] * table.itemsize
                at += item.rows.ids * 8 + padding(item.rows.ids * 8)
                if item.scalar:
                    raise ProtocolError("one value for many rows by number")
            elif which == "all":
                expected = shard.array.nbytes
            elif which == "slices":
                index = _index(item.rows.slices, shard.array, name)
                expected = math.prod(axis.count for axis in item.rows.slices.axes) * shard.array.itemsize
            else:
                raise ProtocolError(f"an update of {name!r} without rows")
            if optimizer is not None and (which == "slices" or item.scalar):
                raise ProtocolError(f"a gradient for {name!r} is for all of it or for rows by number")
            if item.scalar:
                expected = shard.array.itemsize
            if item.value_bytes != expected:
                raise InvalidUpdateError(f"{item.value_bytes} bytes for {expected} of {name!r}, shard {item.shard}")
            placed.append(Placed(item, held, shard, optimizer, index, ids_at, at))
            at += expected + padding(expected)
        if at != total_bytes:
            raise ProtocolError(f"an update of {total_bytes} bytes whose items need {at}")
        return placed

    def update(
        self, request: ps_pb2.UpdateRequest, placed: list[Placed], payload: Payload, applied: list[int] | None = None
    ) -> ps_pb2.UpdateReply:
        """Apply a checked request whose payload has wholly come, each item once.

        Args:
            applied: gets, for each item in turn, how many updates its shard has had with this one; 0 if it was
                applied before. Where this raises, for the items up to there.
        """
        applied = [] if applied is None else applied
        origin = _origin(request)
        self.note_lost((item.variable, item.shard, item.life, item.seen) for item in request.items)
        ids_of: list[Ids | None] = []
        for part in placed:
            ids = None
            if part.item.rows.WhichOneof("kind") == "ids":
                ids = payload.ids(part.ids_at, part.item.rows.ids)
                table = _table(part.shard.array, part.item.rows.leading, part.held.spec.name)
                self._check_ids(part.item.variable, table, ids)
            ids_of.append(ids)
        reply = ps_pb2.UpdateReply(life=self.losses.life)
        for part, ids in zip(placed, ids_of, strict=True):
            item, begin = part.item, time.monotonic()
            if not part.shard.lock.acquire(blocking=False):
                part.shard.lock.acquire()
                took = time.monotonic() - begin
                self.counts.lock_waits += 1
                self.counts.lock_seconds += took
            try:
                with self._lock:
                    self.check_job(request.job)  # it may have been taken over since
                    self._ledger.admit(origin)
                    repeated = self._ledger.seen(origin, item.variable, item.shard, item.nth)
                if repeated:
                    self.counts.duplicates += 1
                    reply.repeated_ += 1
                    reply.updates.append(part.shard.updates)
                    applied.append(0)
                    continue
                reach("ps.update.before")
                part.shard.changes += 1
                try:
                    with np.errstate(all="ignore"):  # infinity and NaN are the caller's to look for
                        self._apply(part, ids, payload)
                except PsClusterError:
                    raise
                except Exception as error:  # the rule, which may be the user's, or its learning rate
                    if part.optimizer is None:
                        raise
                    raise MisuseError(
                        f"optimizer {part.optimizer.spec.name!r} failed to update variable {part.held.spec.name!r}, "
                        f"shard {item.shard}, on ps {self.index}: {type(error).__name__}: {error}"
                    ) from error
                reach("ps.update.after")
                with self._lock:
                    self._ledger.record(origin, item.variable, item.shard, item.nth)
                if item.life == reply.life:
                    self.counts.staleness.add(part.shard.updates - item.seen)
                part.shard.updates += 1
                applied.append(part.shard.updates)
                reply.updates.append(part.shard.updates)
                reply.applied += 1
            finally:
                part.shard.lock.release()
            part.held.counts.updated(item.value_bytes, time.monotonic() - begin, item.rows.ids)
            reach("ps.ledger.after")
        if not origin.function:
            with self._lock:
                self._ledger.settle(origin.incarnation, request.settled)
        return reply

    def note_lost(self, told: Iterable[tuple[int, int, int, int]]) -> None:
        """Compare what a client was told by a process before this one with what was restored.

        Args:
            told: variable, shard, life of the process, updates.
        """
        if not self.losses.restored:
            return
        for variable, shard, life, updates in told:
            with self._lock:
                lost = self.losses.note((variable, shard), life, updates)
            held = self._variables.get(variable)
            if lost and held is not None:
                name = held.spec.name
                logger.warning("at least %d acknowledged updates of %r, shard %d, were lost", lost, name, shard)

    @property
    def lost(self) -> dict[str, int]:
        """Acknowledged updates that are lost, at least, by variable: on the shard that has lost most."""
        found: dict[str, int] = {}
        with self._lock:
            for (variable, shard), lost in self.losses.total.items():
                if variable in self._variables:
                    name = self._variables[variable].spec.name
                    found[name] = max(lost, found.get(name, 0))
                elif (variable, shard) == UNKNOWN:
                    found[UNKNOWN_NAME] = lost
        return found

    def replay(self, request: ps_pb2.UpdateRequest, placed: Placed, payload: Payload, count: int) -> None:
        """Apply one item of a request again, as its shard's update with this count, and remember it."""
        part, origin, ids = placed, _origin(request), None
        if part.item.rows.WhichOneof("kind") == "ids":
            ids = payload.ids(part.ids_at, part.item.rows.ids)
        with part.shard.lock, np.errstate(all="ignore"):
            part.shard.changes += 1
            self._apply(part, ids, payload)
            part.shard.updates = count
        if origin.function and request.job != self.job:
            return  # the coordinator that it was of is gone, and the next one numbers its functions anew
        with self._lock:
            self._ledger.record(origin, part.item.variable, part.item.shard, part.item.nth)

    def _apply(self, part: Placed, ids: Ids | None, payload: Payload) -> None:
        """Under the shard's lock."""
        shard, dtype = part.shard, part.shard.array.dtype
        slots: dict[str, Array] = {}
        step = 0
        if part.optimizer is not None:
            number = part.optimizer.spec.id
            if number not in shard.slots:
                shard.slots[number] = new_slots(part.optimizer.rule, shard.array.shape, dtype)
            slots, step = shard.slots[number], shard.steps.get(number, 0) + 1
        if part.optimizer is not None and part.optimizer.spec.rule == OWN_RULE:
            self._apply_own(part, ids, slots, step, payload)
        elif ids is not None:
            self._apply_rows(part, ids, slots, step, payload)
        elif part.index is not None or part.item.scalar:
            self._apply_slices(part, payload)
        else:
            self._apply_dense(part, slots, step, payload)
        if part.optimizer is not None:
            shard.steps[part.optimizer.spec.id] = step
            if part.optimizer.spec.ema_momentum:
                shard.average(part.optimizer.spec.id, part.optimizer.spec.ema_momentum, ids)

    def _apply_own(self, part: Placed, ids: Ids | None, slots: dict[str, Array], step: int, payload: Payload) -> None:
        """A gradient by a rule of the user's, which may raise at any block: the shard is as before then."""
        rows = slice(None) if ids is None else ids
        arrays = [part.shard.array, *slots.values()]
        before = [array[rows].copy() if array.ndim else array.copy() for array in arrays]
        try:
            if ids is None:
                self._apply_dense(part, slots, step, payload)
            else:
                self._apply_rows(part, ids, slots, step, payload)
        except BaseException:
            for array, old in zip(arrays, before, strict=True):
                array[rows if array.ndim else ...] = old
            raise

    def _apply_rows(self, part: Placed, ids: Ids, slots: dict[str, Array], step: int, payload: Payload) -> None:
        shard, dtype = part.shard, part.shard.array.dtype
        values = payload.array(part.values_at, part.item.value_bytes // dtype.itemsize, dtype)
        table = _table(shard.array, part.item.rows.leading, part.held.spec.name)
        rows = values.reshape(len(ids), table.shape[1])
        shard.before_rows_change(ids, part.item.rows.leading or 1)
        if part.optimizer is not None:
            tables = {name: array.reshape(table.shape) for name, array in slots.items()}
            apply_rows(part.optimizer.rule, table, ids, rows, tables, step)
        elif part.item.kind == ps_pb2.ASSIGN:
            table[ids] = rows
        elif part.item.kind in (ps_pb2.ADD, ps_pb2.SUB):
            unique, sums = deduplicate(ids, rows)
            table[unique] = _ARITHMETIC[part.item.kind](table[unique], sums)  # sums of half types are float32
        else:
            _ARITHMETIC[part.item.kind].at(table, ids, rows)

    @staticmethod
    def _apply_slices(part: Placed, payload: Payload) -> None:
        """Values for a box of the shard, or one value for all that is selected."""
        shard, dtype = part.shard, part.shard.array.dtype
        target = shard.array if part.index is None else shard.array[part.index]
        values = payload.array(part.values_at, part.item.value_bytes // dtype.itemsize, dtype)
        values = values.reshape(() if part.item.scalar else target.shape)
        shard.before_change()
        if part.item.kind == ps_pb2.ASSIGN:
            target[...] = values
        else:
            _ARITHMETIC[part.item.kind](target, values, out=target, casting="same_kind")

    def _apply_dense(self, part: Placed, slots: dict[str, Array], step: int, payload: Payload) -> None:
        shard, dtype = part.shard, part.shard.array.dtype
        if (whole := payload.own(part.values_at)) is not None and shard.replace(whole):
            return
        flat = shard.array.reshape(-1)
        for offset, piece in payload.blocks(part.values_at, part.item.value_bytes, dtype.itemsize):
            values = np.frombuffer(piece, dtype)
            span = slice(offset // dtype.itemsize, offset // dtype.itemsize + len(values))
            # Not all of it at the beginning: what is kept of the old values takes the place of what has been applied.
            shard.before_span_changes(span.start, span.stop)
            if part.optimizer is not None:
                parts = {name: array.reshape(-1)[span] for name, array in slots.items()}
                apply_dense(part.optimizer.rule, flat[span], values, parts, step)
            elif part.item.kind == ps_pb2.ASSIGN:
                flat[span] = values
            else:
                operation = _ARITHMETIC[part.item.kind]
                operation(flat[span], values, out=flat[span], casting="same_kind")


def _index(slices: ps_pb2.Slices, array: Array, name: str) -> Index:
    """The index of a box of the array. InvalidUpdateError if it reaches beyond it."""
    if len(slices.axes) != array.ndim:
        raise ProtocolError(f"a box of {len(slices.axes)} axes in {name!r}, whose shards have {array.ndim}")
    index = []
    for axis, length in zip(slices.axes, array.shape, strict=True):
        last = axis.start + (axis.count - 1) * axis.step
        if not axis.step or (axis.count and not (axis.start < length and 0 <= last < length)):
            raise InvalidUpdateError(
                f"{axis.count} indices from {axis.start} on, {axis.step} apart, of {name!r}, "
                f"a shard with {length} on that axis"
            )
        index.append(AxisSlice(axis.start, axis.step, axis.count).as_slice)
    return (*index, ...)  # with the ellipsis a scalar's selection is a view, too


def _table(array: Array, leading: int, name: str) -> Array:
    """The array as rows: its leading axes flattened to one, the others to the other. A view."""
    leading = leading or 1
    if leading > array.ndim:
        raise InvalidUpdateError(f"rows over {leading} axes of {name!r}, which has {array.ndim}")
    return array.reshape(math.prod(array.shape[:leading]), math.prod(array.shape[leading:]))


def _gather(source: _Source, ids: Ids) -> Buffer:
    out = np.empty((len(ids), source.array.shape[1]), source.array.dtype)
    with source.shard.lock:
        np.take(source.array, ids, 0, out, "clip")  # "clip" spares NumPy a buffer; the ids are checked
    return view(out.astype(source.dtype, copy=False))


def _pass_through(shards: Sequence[Shard]) -> None:
    """Whatever was in progress on them has ended."""
    for shard in shards:
        with shard.lock:
            pass


def _origin(request: ps_pb2.UpdateRequest) -> Origin:
    return Origin(request.incarnation, request.function, request.sequence, request.key, request.term)
