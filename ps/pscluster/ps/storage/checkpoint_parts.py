"""What a parameter server does for a checkpoint: its part of it.

    nothing --mark(id)--> marked(id) --write(id)--> nothing     the file is there, and what is in it is told
                                    \\--drop, or another mark--> nothing
    nothing --stage(id)--> staged(id) --commit(id)--> nothing   shards, slots, steps and what is remembered of updates
                                                                by functions with keys are those of the checkpoint
                                     \\--drop, or another stage--> nothing

Marking takes no time to speak of: updates that come later save the old bytes before they change them. What is staged
lies beside what there is, so that a checkpoint which turns out to be damaged changes nothing.

A commit opens a new term before it changes anything: an update of an earlier one, delayed on its way or between two
shards, is refused, or is on a shard whose values are still to be replaced. The term is kept with the state.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pscluster.core.errors import CheckpointMisfitError, StaleError, UnavailableError
from pscluster.ps.optim import compute_dtype, new_slots
from pscluster.ps.server.directory import HeldVariable
from pscluster.ps.server.shard import Shard
from pscluster.ps.server.store import Store
from pscluster.ps.spec import PINNED
from pscluster.ps.storage.capture import Capture
from pscluster.ps.storage.tensor_files import Array, TensorToWrite, WrittenTensor, read, tensor_name, write
from pscluster.v1 import ps_pb2


@dataclass(frozen=True, slots=True)
class _MarkedShard:
    held: HeldVariable
    number: int
    shard: Shard
    capture: Capture
    updates: int
    steps: Mapping[int, int]
    named: Mapping[int, frozenset[int]]  # by key of a function, which of its updates were applied


_Named = dict[tuple[int, int], dict[int, set[int]]]
"""By variable and shard, by key of a function: which of its updates were applied."""


@dataclass(slots=True)
class _Staged:
    store: Store
    arrays: list[tuple[Shard, dict[str, Array], dict[int, int]]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # the numbers of variable and shard of each

    def begin_averages(self) -> None:
        """The values have been read: they are the averages, too, as far as none were saved."""
        for _, arrays, _ in self.arrays:
            for key, array in arrays.items():
                if key.startswith("average/"):
                    array[...] = arrays["value"]


class Parts:
    """The checkpoints of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marked: dict[int, list[_MarkedShard]] = {}
        self._staged: dict[int, _Staged] = {}
        self._named: tuple[int, _Named] = -1, {}  # of what is, or is to be, staged under that number
        # What became of the last of each: a copy of a request has the same answer, and a late one does nothing.
        # Before the first one there is none, and no request names -1.
        self._written: tuple[int, Future[ps_pb2.CheckpointReply]] = -1, Future()
        self._committed: tuple[int, Future[None]] = -1, Future()
        self._over: set[int] = set()  # the last that was dropped, or has taken the place of what there was

    def mark(self, store: Store, number: int) -> None:
        """Remember all shards as they are, but for those of copies that an evaluation reads."""
        with self._lock:
            if number in self._over:
                return
        self._forget_marked()
        marked = []
        for held in store.held()[0]:
            if held.spec.name.startswith(PINNED):
                continue
            for index, shard in held.shards.items():
                with shard.lock:
                    capture = shard.capture(store.spill)
                    with store.ledger() as ledger:
                        named = ledger.named(held.spec.id, index)
                    marked.append(_MarkedShard(held, index, shard, capture, shard.updates, dict(shard.steps), named))
        with self._lock:
            same = self._marked.pop(number, ())  # by a copy of the request, at the same time
            self._marked[number] = marked
        _release(same)

    def write(self, store: Store, number: int, path: str) -> ps_pb2.CheckpointReply:
        """Write what was marked. CheckpointError if that fails."""
        with self._lock:
            marked = self._marked.pop(number, None)
            if marked is not None:
                self._written = number, Future()
            last, done = self._written
        if marked is None:
            if last != number:
                raise StaleError(
                    f"checkpoint {number} is not marked on ps {store.index}: it was dropped, or the server restarted"
                )
            return done.result()
        with _told(done):
            try:
                reply = self._write(store, marked, path)
            finally:
                del marked  # what is kept of a failure would keep it
            done.set_result(reply)
        return reply

    @staticmethod
    def _write(store: Store, marked: Sequence[_MarkedShard], path: str) -> ps_pb2.CheckpointReply:
        names = _optimizer_names(store)
        reply = ps_pb2.CheckpointReply()
        tensors: list[TensorToWrite] = []
        entries: list[ps_pb2.CheckpointTensor] = []
        try:
            for each in marked:
                shard = reply.shards.add(variable=each.held.spec.id, shard=each.number, updates=each.updates)
                for optimizer, step in each.steps.items():
                    shard.steps[names[optimizer]] = step
                by_updates: dict[frozenset[int], list[int]] = {}
                for number, nths in each.named.items():
                    by_updates.setdefault(nths, []).append(number)
                for nths, keys in by_updates.items():
                    shard.named.add(nth=sorted(nths), keys=keys)
                for key, array in each.capture.arrays.items():
                    named = _by_name(key, names)
                    name = f"{tensor_name(each.held.spec.name, named)}/part_{each.number}"
                    entry = shard.tensors.add(array=named, tensor=name, dtype=array.dtype.name, shape=array.shape)
                    entries.append(entry)
                    tensors.append(TensorToWrite(name, array.dtype, array.shape, each.capture.in_order(key)))
            done = write(path, tensors, {"format": "np"})
        finally:
            _release(marked)
        for entry, place in zip(entries, done.tensors, strict=True):
            entry.offset, entry.bytes, entry.sha256 = place.offset, place.nbytes, place.sha256
        reply.header_sha256, reply.header_bytes, reply.bytes = done.header_sha256, done.header_bytes, done.nbytes
        return reply

    def forget(self) -> None:
        """Drop everything that is marked or staged."""
        self._forget_marked()
        with self._lock:
            self._staged.clear()
            self._named = -1, {}
            self._over.clear()

    def drop_mark(self, number: int) -> None:
        """Of this checkpoint: it is not to be written."""
        with self._lock:
            marked = self._marked.pop(number, ())
            self._over = {number}
        _release(list(marked))

    def drop_staged(self, number: int) -> None:
        """Of this one: it is not to take the place of what there is."""
        with self._lock:
            self._staged.pop(number, None)
            self._named = -1, {}
            self._over = {number}

    def _forget_marked(self) -> None:
        with self._lock:
            marked, self._marked = self._marked, {}
        for each in marked.values():
            _release(each)

    def name(self, number: int, shards: Sequence[ps_pb2.RestoreShard]) -> None:
        """Take what functions with keys had done to these shards: with what is staged, or ahead of it, in several."""
        with self._lock:
            if number in self._over:
                return
            if self._named[0] != number:
                self._named = number, {}
            for item in shards:
                of_shard = self._named[1].setdefault((item.variable, item.shard), {})
                for same in item.named:
                    for key in same.keys:
                        of_shard.setdefault(key, set()).update(same.nth)

    def stage(
        self, store: Store, number: int, shards: Sequence[ps_pb2.RestoreShard], where: Callable[[str], str]
    ) -> None:
        """Read and verify everything, beside what there is. CheckpointError if anything is not as it should be."""
        with self._lock:
            if number in self._over:
                return
            self._staged.clear()
        self.name(number, shards)
        staged = _Staged(store)
        numbers = {name: optimizer for optimizer, name in _optimizer_names(store).items()}
        wanted: dict[tuple[str, str], list[tuple[ps_pb2.RestoreSource, Array]]] = {}
        held = {each.spec.id: each for each in store.held()[0]}
        for item in shards:
            if item.variable not in held or item.shard not in held[item.variable].shards:
                raise CheckpointMisfitError(
                    f"shard {item.shard} of variable number {item.variable} does not live on ps {store.index}"
                )
            shard = held[item.variable].shards[item.shard]
            arrays: dict[str, Array] = {}
            for wish in item.arrays:
                key = _by_number(wish.array, numbers)
                if key is None:
                    continue  # of an optimizer that is not there
                arrays[key] = _blank(store, held[item.variable], shard, key)
                for source in wish.sources:
                    wanted.setdefault((source.file, source.tensor.tensor), []).append((source, arrays[key]))
            if "value" not in arrays:
                raise CheckpointMisfitError(f"no values for shard {item.shard} of {held[item.variable].spec.name!r}")
            _check_slots(store, held[item.variable], arrays)
            steps = {numbers[name]: step for name, step in item.steps.items() if name in numbers}
            staged.arrays.append((shard, arrays, steps))
            staged.places.append((item.variable, item.shard))
        # Values first: where no average was saved, the value is the average.
        in_order = sorted(wanted.items(), key=lambda each: each[1][0][0].tensor.array != "value")
        averages_begin = sum(places[0][0].tensor.array == "value" for _, places in in_order)
        for number_read, ((file, _), places) in enumerate(in_order):
            if number_read == averages_begin:
                staged.begin_averages()
            entry = places[0][0].tensor
            place = WrittenTensor(entry.offset, entry.bytes, entry.sha256)
            values = read(where(file), entry.tensor, entry.dtype, tuple(entry.shape), place)
            for source, target in places:
                try:
                    target[_box(source.to, source.count)] = values[_box(getattr(source, "from"), source.count)]
                except (ValueError, IndexError, OverflowError) as error:
                    raise CheckpointMisfitError(f"{entry.tensor} does not fit into its variable: {error}") from None
        with self._lock:
            if number not in self._over:
                self._staged[number] = staged

    def commit(self, store: Store, number: int, term: int) -> None:
        """What was staged takes the place of what there is, under a new term. UnavailableError if nothing is."""
        with self._lock:
            staged, (_, named) = self._staged.pop(number, None), self._named
            if staged is not None:
                self._named = -1, {}
                self._committed, self._over = (number, Future()), {number}
            last, done = self._committed
        if staged is None and last == number:
            done.result()
            return
        with _told(done):
            if staged is None or staged.store is not store:
                raise UnavailableError(
                    f"ps {store.index} was restarted and has nothing to restore any more: restore again"
                )
            self._commit(store, staged, named, term)
            done.set_result(None)

    @staticmethod
    def _commit(store: Store, staged: _Staged, named: _Named, term: int) -> None:
        with store.ledger() as ledger:
            ledger.open_term(term)
        for (shard, arrays, steps), place in zip(staged.arrays, staged.places, strict=True):
            with shard.lock:
                with store.ledger() as ledger:
                    ledger.replace(*place, named.get(place, {}))
                shard.before_change()
                shard.updates += 1
                shard.changes += 1
                shard.array[...] = arrays.pop("value")
                shard.slots.clear()
                shard.averages.clear()
                shard.put(arrays)
                shard.steps.clear()
                shard.steps.update(steps)


@contextlib.contextmanager
def _told(copies: Future[Any]) -> Iterator[None]:
    """What fails here is what copies of the request are told, too."""
    try:
        yield
    except BaseException as error:
        reason: BaseException | None = error
        while reason is not None:  # it is kept for long, and with it all that they know
            traceback.clear_frames(reason.__traceback__)
            reason = reason.__cause__ or reason.__context__
        if not copies.done():
            copies.set_exception(error)
        raise


def _blank(store: Store, held: HeldVariable, shard: Shard, key: str) -> Array:
    """An array of a shard, to be filled. Slots are as before the first gradient: not all may have been saved."""
    kind, _, rest = key.partition("/")
    if kind != "slot":
        dtype = shard.array.dtype if kind == "value" else compute_dtype(shard.array.dtype)
        return np.zeros(shard.array.shape, dtype)
    number, _, slot = rest.partition("/")
    slots = new_slots(store.directory.optimizer(int(number)).rule, shard.array.shape, held.dtype)
    if slot not in slots:
        raise CheckpointMisfitError(
            f"the checkpoint has a slot {slot!r} of {held.spec.name!r} that its optimizer does not keep"
        )
    return slots[slot]


def _check_slots(store: Store, held: HeldVariable, arrays: Mapping[str, Array]) -> None:
    """CheckpointError if an optimizer keeps slots beside those that were saved of it."""
    for optimizer in {key.split("/")[1] for key in arrays if key.startswith("slot/")}:
        known = store.directory.optimizer(int(optimizer))
        for slot in known.rule.slots:
            if f"slot/{optimizer}/{slot}" not in arrays:
                raise CheckpointMisfitError(
                    f"the checkpoint lacks the slot {slot!r} of {held.spec.name!r} that optimizer "
                    f"{known.spec.name!r} keeps: give it another name to begin with new slots"
                )


def _box(start: Sequence[int], count: Sequence[int]) -> Any:
    return (*(slice(a, a + n) for a, n in zip(start, count, strict=True)), ...)


def _release(marked: Sequence[_MarkedShard]) -> None:
    for each in marked:
        each.shard.release(each.capture)


def _optimizer_names(store: Store) -> dict[int, str]:
    _, optimizers, awaited = store.held()
    return {known.spec.id: known.spec.name for known in optimizers} | {key: spec.name for key, spec in awaited.items()}


def _by_name(key: str, names: Mapping[int, str]) -> str:
    """ "slot/7/m" -> "slot/adam/m"."""
    kind, _, rest = key.partition("/")
    if not rest:
        return key
    number, _, slot = rest.partition("/")
    return "/".join([kind, names[int(number)], *([slot] if slot else [])])


def _by_number(key: str, numbers: Mapping[str, int]) -> str | None:
    """The other way; None for an optimizer that is not there. Its name may hold slashes, that of a slot not."""
    kind, _, rest = key.partition("/")
    if not rest:
        return key
    name, _, slot = rest.rpartition("/") if kind == "slot" else (rest, "", "")
    if name not in numbers:
        return None
    return "/".join([kind, str(numbers[name]), *([slot] if slot else [])])
