"""A parameter server's part of a checkpoint.

    nothing --mark(id)--> marked(id) --write(id)--> nothing     the file is written, and its tensors are reported
                                    \\--drop, or another mark--> nothing
    nothing --stage(id)--> staged(id) --commit(id)--> nothing   shards, slots, steps and remembered updates of functions
                                                                with keys are those of the checkpoint
                                     \\--drop, or another stage--> nothing

Marking takes hardly any time: later updates save the old bytes before they change them. The staged state exists beside
the current one, so that a checkpoint that turns out to be damaged changes nothing.

A commit opens a new term before it changes anything: an update of an earlier term, delayed in the network or between
two shards, is refused, or changes a shard whose values are about to be replaced. The term is saved with the state.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from pscluster.core.errors import CheckpointMismatchError, StaleError, UnavailableError
from pscluster.core.geometry.moves import common_rows
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import Ids
from pscluster.ps.array_pool import aligned_full
from pscluster.ps.optim.kernels import new_slots
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.server.embedding import table_policy, tables
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.metadata import check_texts
from pscluster.ps.server.state.shard import Shard, Snapshot
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import METADATA, SYNCHRONOUS, row_order_of
from pscluster.ps.storage.files.tensor_files import Array, read, tensor_name, tensor_to_write, write
from pscluster.ps.tables import width_of
from pscluster.v1 import ps_pb2


@dataclass(frozen=True, slots=True)
class _MarkedShard:
    held: HeldVariable
    shard_index: int
    capture: Mapping[str, Snapshot]
    updates: int
    steps: Mapping[int, int]
    named: Mapping[int, frozenset[int]]  # by key of a function, which of its updates were applied


_Named = dict[tuple[int, int], dict[int, set[int]]]
"""By variable and shard, by key of a function: which of its updates were applied."""

_Wanted = dict[tuple[str, str], list[tuple[ps_pb2.RestoreSource, Array, tuple[HeldVariable, int]]]]
"""By file and tensor: the parts of it to read, the arrays that they belong to, and these arrays' variable and shard."""


@dataclass(slots=True)
class _Staged:
    store: Store
    metadata: dict[str, str] | None  # None: it stays
    # The ids of variable and shard, the shard, its arrays, and its steps by optimizer.
    shards: list[tuple[tuple[int, int], Shard, dict[str, Array], dict[int, int]]] = field(default_factory=list)


class CheckpointParts:
    """One server's parts of checkpoints. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marked: dict[int, list[_MarkedShard]] = {}
        self._staged: dict[int, _Staged] = {}
        self._named: tuple[int, _Named] = -1, {}  # for the state that is, or will be, staged under that number
        # The outcome of the last of each, so that a copy of its request gets the same answer, and a late one does
        # nothing. No request names -1.
        self._written: tuple[int, Future[ps_pb2.CheckpointReply]] = -1, Future()
        self._committed: tuple[int, Future[None]] = -1, Future()
        self._over = -1  # the last that was dropped or committed
        self._forgotten = 0  # the calls of `forget` so far: what began before the last one must not be kept
        self._committing = threading.Lock()  # held while the state is replaced

    def mark(self, store: Store, checkpoint_id: int) -> Mapping[str, str]:
        """Take snapshots of all shards except those of evaluation snapshots, and return the metadata."""
        with self._lock:
            if checkpoint_id == self._over:
                return {}
            forgotten = self._forgotten
        self._forget_marked()
        marked = []
        for held in store.held()[0]:
            if held.spec.evaluation:
                continue
            for index, shard in held.shards.items():
                with shard.lock:
                    capture = shard.capture(store.spill)
                    with store.ledger() as ledger:
                        named = ledger.named(held.spec.id, index)
                    marked.append(_MarkedShard(held, index, capture, shard.updates, dict(shard.steps), named))
        with self._lock:
            unused: Sequence[_MarkedShard] = marked
            if not self._is_over(checkpoint_id, forgotten):
                unused = self._marked.pop(checkpoint_id, ())  # from a copy of the request at the same time
                self._marked[checkpoint_id] = marked
        _release(unused)
        return {name: text for name, text in store.directory.metadata.texts.items() if name != SYNCHRONOUS}

    def write(self, store: Store, checkpoint_id: int, path: str) -> ps_pb2.CheckpointReply:
        """Write the marked shards, after those of an earlier checkpoint. CheckpointError if that fails."""
        with self._lock:
            marked, before = self._marked.pop(checkpoint_id, None), self._written
            if marked is not None:
                self._written = checkpoint_id, Future()
            last, done = self._written
        if marked is None:
            if last != checkpoint_id:
                raise StaleError(
                    f"checkpoint {checkpoint_id} is not marked on ps {store.index}: it was dropped, or the server "
                    "restarted; save again"
                )
            return done.result()
        with _shared_failure(done):
            try:
                if before[0] >= 0:  # its caller may have been cut off, and have the same file written again
                    wait([before[1]])
                reply = self._write(store, marked, path)
            finally:
                del marked  # else a stored exception would keep it alive
            done.set_result(reply)
        return reply

    @staticmethod
    def _write(store: Store, marked: Sequence[_MarkedShard], path: str) -> ps_pb2.CheckpointReply:
        names = _optimizer_names(store)
        by_id = {str(optimizer): name for optimizer, name in names.items()}
        reply = ps_pb2.CheckpointReply()
        tensors: list[ps_pb2.SavedTensor] = []
        try:
            for mark in marked:
                shard = reply.shards.add(variable=mark.held.spec.id, shard=mark.shard_index, updates=mark.updates)
                for optimizer, step in mark.steps.items():
                    shard.steps[names[optimizer]] = step
                by_updates: dict[frozenset[int], list[int]] = {}
                for function, nths in mark.named.items():
                    by_updates.setdefault(nths, []).append(function)
                for nths, keys in by_updates.items():
                    shard.named.add(nth=sorted(nths), keys=keys)
                for key, captured in mark.capture.items():
                    named = _with_optimizer(key, by_id)
                    name = f"{tensor_name(mark.held.spec.name, named)}/part_{mark.shard_index}"
                    shard.tensors.append(tensor_to_write(name, captured.dtype, captured.shape, named))
                tensors += shard.tensors
            written = write(path, tensors, (captured for mark in marked for captured in mark.capture.values()))
        finally:
            _release(marked)
        reply.header_checksum, reply.header_bytes, reply.bytes = written
        return reply

    def forget(self) -> None:
        """Drop everything that is marked or staged, or is about to be. Waits for a commit that has begun."""
        with self._lock:
            self._forgotten += 1
        self._forget_marked()
        with self._committing, self._lock:
            self._staged.clear()
            self._named = -1, {}
            self._over = -1

    def _is_over(self, checkpoint_id: int, forgotten: int) -> bool:
        """Return whether what began after `forgotten` calls of `forget` must not be kept. Needs the lock."""
        return checkpoint_id == self._over or forgotten != self._forgotten

    def drop_mark(self, checkpoint_id: int) -> None:
        """Drop this checkpoint's mark, so that it is not written."""
        with self._lock:
            marked = self._marked.pop(checkpoint_id, ())
            self._over = checkpoint_id
        _release(list(marked))

    def drop_staged(self, checkpoint_id: int) -> None:
        """Drop the state staged for this checkpoint, so that it is not committed."""
        with self._lock:
            self._staged.pop(checkpoint_id, None)
            self._named = -1, {}
            self._over = checkpoint_id

    def _forget_marked(self) -> None:
        with self._lock:
            marked, self._marked = self._marked, {}
        for shards in marked.values():
            _release(shards)

    def name(self, checkpoint_id: int, shards: Sequence[ps_pb2.RestoreShard]) -> None:
        """Note the updates of these shards by functions with keys: with the stage request, or ahead in several ones."""
        with self._lock:
            if checkpoint_id == self._over:
                return
            if self._named[0] != checkpoint_id:
                self._named = checkpoint_id, {}
            for item in shards:
                of_shard = self._named[1].setdefault((item.variable, item.shard), {})
                for same in item.named:
                    for key in same.keys:
                        of_shard.setdefault(key, set()).update(same.nth)

    def stage(self, store: Store, request: ps_pb2.RestoreRequest, where: Callable[[str], str]) -> None:
        """Read and verify everything into new arrays. CheckpointError if anything is missing, damaged or misfits."""
        checkpoint_id, shards, texts = request.id, request.shards, dict(request.metadata.texts)
        check_texts(texts)
        with self._lock:
            if checkpoint_id == self._over:
                return
            self._staged.clear()
            forgotten = self._forgotten
        self.name(checkpoint_id, shards)
        staged = _Staged(store, texts if request.HasField("metadata") else None)
        numbers = {name: optimizer for optimizer, name in _optimizer_names(store).items()}
        of_tables: list[tuple[HeldVariable, int, dict[str, Array], dict[str, Sequence[ps_pb2.RestoreSource]]]] = []
        values: _Wanted = {}
        others: _Wanted = {}
        held = {variable.spec.id: variable for variable in store.held()[0]}
        for item in shards:
            if item.variable not in held or item.shard not in held[item.variable].shards:
                raise CheckpointMismatchError(
                    f"shard {item.shard} of variable number {item.variable} does not live on ps {store.index}"
                )
            shard = held[item.variable].shards[item.shard]
            arrays: dict[str, Array] = {}
            is_table = held[item.variable].spec.HasField("table")
            sources: dict[str, Sequence[ps_pb2.RestoreSource]] = {}
            for wanted_array in item.arrays:
                try:
                    key = _with_optimizer(wanted_array.array, numbers)
                except KeyError:
                    continue  # its optimizer does not exist here
                shape = (0, shard.array.shape[1]) if is_table else shard.array.shape
                arrays[key] = blank_array(store, held[item.variable], shape, key, shard.row_limit)
                sources[key] = wanted_array.sources
                for source in () if is_table else wanted_array.sources:
                    wanted = values if source.tensor.array == "value" else others
                    target = source, arrays[key], (held[item.variable], item.shard)
                    wanted.setdefault((source.tensor.file, source.tensor.tensor), []).append(target)
            if "value" not in arrays:
                raise CheckpointMismatchError(f"no values for shard {item.shard} of {held[item.variable].spec.name!r}")
            _check_slots(store, held[item.variable], arrays)
            if is_table:
                of_tables.append((held[item.variable], item.shard, arrays, sources))
            steps = {numbers[name]: step for name, step in item.steps.items() if name in numbers}
            staged.shards.append(((item.variable, item.shard), shard, arrays, steps))
        _read_into(values, where)
        for _, shard, arrays, _ in staged.shards:
            for key, array in arrays.items():
                if key.startswith("average/") and not shard.row_limit:  # where none was saved, the average is the value
                    array[...] = arrays["value"]
        _read_into(others, where)
        taken: Counter[int] = Counter()
        for table, shard_index, arrays, sources in of_tables:
            fills = {key: _fill(store, key) for key in arrays if key.startswith("slot/")}
            tables.restore_rows(
                table.spec,
                shard_index,
                table.shards[shard_index].row_limit,
                table_policy.in_steps(table.shards[shard_index].updates),
                arrays,
                fills,
                sources,
                lambda tensor: read(where(tensor.file), tensor),
            )
            taken[table.spec.id] += sum(array.nbytes for array in arrays.values())
            tables.check_bytes(table.spec, arrays, taken[table.spec.id], store.index)
        with self._lock:
            if not self._is_over(checkpoint_id, forgotten):
                self._staged[checkpoint_id] = staged

    def commit(self, store: Store, checkpoint_id: int, term: int) -> None:
        """Replace the state by the staged one, under a new term. UnavailableError if nothing is staged."""
        with self._committing:
            with self._lock:
                staged, (_, named) = self._staged.pop(checkpoint_id, None), self._named
                if staged is not None:
                    self._named = -1, {}
                    self._committed, self._over = (checkpoint_id, Future()), checkpoint_id
                last, done = self._committed
            if staged is None and last == checkpoint_id:
                done.result()
                return
            lost = UnavailableError(
                f"ps {store.index} was restarted and has nothing to restore any more: restore again"
            )
            if staged is None:
                raise lost
            with _shared_failure(done):
                if staged.store is not store:
                    raise lost
                self._commit(store, staged, named, term)
                done.set_result(None)

    @staticmethod
    def _commit(store: Store, staged: _Staged, named: _Named, term: int) -> None:
        metadata = store.directory.metadata
        with store.runs.between_steps(), metadata.lock, store.ledger() as ledger:
            ledger.open_term(term)
            store.runs.drop(lambda staged: staged.request.term < term)
            if staged.metadata is not None:
                ledger.replace(*METADATA, {})
                metadata.updates += 1
                # The last decision stays: the iterators of its replicas are where they are.
                texts = {name: text for name, text in staged.metadata.items() if name != SYNCHRONOUS}
                if (decision := metadata.texts.get(SYNCHRONOUS)) is not None:
                    texts[SYNCHRONOUS] = decision
                metadata.texts = texts
        for ids, shard, arrays, steps in staged.shards:
            with shard.lock:
                with store.ledger() as ledger:
                    ledger.replace(*ids, named.get(ids, {}))
                shard.before_change()
                shard.updates += 1
                shard.changes += 1
                if shard.row_limit:
                    shard.array, shard.rows, shard.sightings = arrays.pop("value"), None, None
                    if shard.pages is not None:
                        shard.pages.resize(len(shard.array))
                else:
                    shard.array[...] = arrays.pop("value")
                shard.slots.clear()
                shard.averages.clear()
                shard.put(arrays)
                shard.steps = steps


@contextlib.contextmanager
def _shared_failure(copies: Future[Any]) -> Iterator[None]:
    """Answer copies of the request with the same failure."""
    try:
        yield
    except BaseException as error:
        reason: BaseException | None = error
        while reason is not None:  # it is held for long, and would keep alive all that its frames refer to
            traceback.clear_frames(reason.__traceback__)
            reason = reason.__cause__ or reason.__context__
        if not copies.done():
            copies.set_exception(error)
        raise


def blank_array(store: Store, held: HeldVariable, shape: tuple[int, ...], key: str, limit: int = 0) -> Array:
    """Return a new array of a shard to read into. Slots are as before the first gradient: not all may be saved.

    `limit`: how many rows those of a table can grow to; of `shape`, only the rows count then.
    """
    kind, _, rest = key.partition("/")
    if limit:
        if kind == "slot":
            _fill(store, key)
        return tables.new_array(shape[0], limit, width_of(held.spec, key))
    if kind != "slot":
        return aligned_full(shape, 0, held.dtype if kind == "value" else compute_dtype(held.dtype))
    optimizer_id, _, slot = rest.partition("/")
    slots = new_slots(store.directory.optimizer(int(optimizer_id)).rule, shape, held.dtype)
    if slot not in slots:
        raise CheckpointMismatchError(
            f"the checkpoint has a slot {slot!r} of {held.spec.name!r} that its optimizer does not keep"
        )
    return slots[slot]


def _fill(store: Store, key: str) -> float:
    """Return what a slot holds before the first gradient. CheckpointMismatchError if its optimizer has no such slot."""
    _, optimizer, slot = key.split("/", 2)
    fills = store.directory.optimizer(int(optimizer)).rule.slots
    if slot not in fills:
        raise CheckpointMismatchError(f"the checkpoint has a slot {slot!r} that its optimizer does not keep")
    return fills[slot]


def _check_slots(store: Store, held: HeldVariable, arrays: Mapping[str, Array]) -> None:
    """Raise CheckpointMismatchError if only some of an optimizer's slots were saved."""
    for optimizer in {key.split("/")[1] for key in arrays if key.startswith("slot/")}:
        known = store.directory.optimizer(int(optimizer))
        for slot in known.rule.slots:
            if f"slot/{optimizer}/{slot}" not in arrays:
                raise CheckpointMismatchError(
                    f"the checkpoint lacks the slot {slot!r} of {held.spec.name!r} that optimizer "
                    f"{known.spec.name!r} keeps: give it another name to begin with new slots"
                )


def _read_into(wanted: _Wanted, where: Callable[[str], str]) -> None:
    """Read each tensor once, into all arrays that contain part of it."""
    for (file, tensor), targets in wanted.items():
        values = read(where(file), targets[0][0].tensor)
        for source, target, (held, shard) in targets:
            try:
                start = getattr(source, "from")
                if not source.HasField("rows"):
                    target[_box(source.to, source.count)] = values[_box(start, source.count)]
                    continue
                old_rows, new_rows = _rows_in_common(source.rows, held.partition, shard, len(values))
                columns = _box(source.to, source.count)
                target[(new_rows, *columns)] = values[(old_rows, *_box(start, source.count))]
            except (ValueError, IndexError, OverflowError) as error:
                raise CheckpointMismatchError(f"{tensor} does not fit into its variable: {error}") from None


def _rows_in_common(saved: ps_pb2.SavedRows, partition: Partition, shard: int, rows: int) -> tuple[Ids, Ids]:
    """Return the rows that a saved tensor has of a shard, by number in either. ValueError if this makes no sense."""
    new = partition.of_rows
    old = Partition(new.shape, (tuple(saved.split.ends),), row_order_of(saved.order))
    if old.block(saved.piece).shape != (rows,):
        raise ValueError(f"piece {saved.piece} of its rows has {old.block(saved.piece).shape[0]}, not {rows}")
    return common_rows(old, saved.piece, new, shard // (partition.num_shards // new.num_shards))


def _box(start: Sequence[int], count: Sequence[int]) -> Any:
    return (*(slice(a, a + n) for a, n in zip(start, count, strict=True)), ...)


def _release(marked: Sequence[_MarkedShard]) -> None:
    for marked_shard in marked:
        for captured in marked_shard.capture.values():
            captured.close()


def _optimizer_names(store: Store) -> dict[int, str]:
    _, optimizers, awaited = store.held()
    return {known.spec.id: known.spec.name for known in optimizers} | {key: spec.name for key, spec in awaited.items()}


def _with_optimizer(key: str, optimizers: Mapping[str, str | int]) -> str:
    """Replace the optimizer in an array's key: "slot/7/m" <-> "slot/adam/m". KeyError if it is unknown.

    Names of optimizers may contain slashes, names of slots may not.
    """
    kind, _, rest = key.partition("/")
    if not rest:
        return key
    optimizer, _, slot = rest.rpartition("/") if kind == "slot" else (rest, "", "")
    return "/".join([kind, str(optimizers[optimizer]), *([slot] if slot else [])])
