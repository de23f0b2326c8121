"""A replica's copies of the large variables that its synchronous steps update, of which it updates one block itself.

It is for steps that are taken together (see `joint_steps`). In each, every replica has the sums of its own block of the
gradients (see `reduction`), applies them to that block of the values by the servers' rules, and gives the others the
new values; slots are kept for its own block only. This is how ZeRO (Rajbhandari et al. 2020) divides the work of an
optimizer.

The gradients of many steps take too much memory to be kept, and too long to be sent. So what is committed is by how
much the steps have changed values and slots: the servers add it to what they have. As with gradients, nothing is lost
that others add or assign meanwhile. If nobody does, the servers then have the same numbers as the replicas, bit for
bit, whenever steps are committed: where the sum of an old value and its change is not the new value, what is missing is
sent, too. (That can be where the two values differ in sign or by more than a factor of two. What is missing is the
error of Dekker's sum (1971), which is a number of the same type.)

The copies are fetched again only if a shard's version is not the one that the commit has led to:

    fetched    --apply--> ahead: nobody else knows the steps
    ahead      --committed--> fetched, if all replicas had begun with the same versions; else unknown: fetched anew
    ahead      --an error--> dropped
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from pscluster.core.geometry.partition import even_ends
from pscluster.core.transport.frames import view
from pscluster.ps.client.reads.plans import ShardRead
from pscluster.ps.client.synchronous.gradient_forms import Array, Describe, Forms, GradientForm, known_rule, read_item
from pscluster.ps.client.synchronous.reduction import Reducer, agree
from pscluster.ps.optim.kernels import apply_dense, new_slots
from pscluster.ps.optim.rules import UpdateRule
from pscluster.v1 import ps_pb2

_VALUES = ""
"""The name of a shard's values, beside those of its slots."""

_AT_ONCE = 1 << 15
"""Elements whose change is computed at a time, which fit in the processor's cache."""


@dataclass(slots=True)
class _Piece:
    """The part of a shard that lies in the own block."""

    form: GradientForm
    start: int  # in the shard, in elements
    rule: UpdateRule
    arrays: dict[str, Array]  # values and slots, flat
    committed: dict[str, Array]  # as the servers have them
    changes: dict[str, Array]  # that were committed last
    gradients: int = 0  # that the shard has had

    @property
    def slots(self) -> dict[str, Array]:
        return {name: array for name, array in self.arrays.items() if name != _VALUES}


class BlockCopies:
    """Copies of the shards that large gradients of these forms, in this order, update. For one thread."""

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self.nbytes = sum(form.nbytes for form in forms)
        """Of the gradients."""
        self.values: dict[tuple[int, int], Array] = {}
        """By variable and shard, flat."""
        self._flat: dict[np.dtype[Any], Array] = {}  # all values of a type
        self._pieces: dict[tuple[int, int], _Piece] = {}
        self._cut = (0, 0)  # rank and number of the replicas
        self._heads = np.zeros((len(forms), 3), "<u8")  # of each shard: version, how many gradients, which optimizer
        version, gradients = ps_pb2.Rows(version=True), ps_pb2.Rows(gradients=True)
        self._head_reads = [
            read
            for form, head in zip(forms, self._heads, strict=True)
            for read in (
                ShardRead(form.server, read_item(form, version), 8, view(head[:1])),
                ShardRead(form.server, read_item(form, gradients, optimizer=True), 16, view(head[1:])),
            )
        ]
        self._optimizers: Array | None = None  # those that the pieces are of
        self._updates = np.zeros(len(forms), "<u8")  # that a commit makes, of each shard
        self._versions: Array | None = None  # of what is here; None: it is unknown, or ahead
        self._before: Array | None = None  # those that steps were applied to
        self._compared = False  # with those of the other replicas

    def fetch(self, read: Callable[[Sequence[ShardRead]], None], describe: Describe, rank: int, replicas: int) -> bool:
        """Read what has changed, as the servers have it now. Return False if a rule can't be applied here."""
        if not self.forms:
            return True
        self._compared = False
        read(self._head_reads)
        versions, optimizers = self._heads[:, 0], self._heads[:, 2]
        if self._cut != (rank, replicas) or self._optimizers is None or (self._optimizers != optimizers).any():
            self._versions = None
            if not self._lay_out(describe, rank, replicas):
                return False
            self._cut, self._optimizers = (rank, replicas), optimizers.copy()
        if self._versions is None or (self._versions != versions).any():
            self._versions = None
            before = versions.copy()
            self._fetch_all(read)
            self._versions = before
        return True

    def apply(self, variable: int, shard: int, gradient: Array) -> None:
        """Apply the own part of a shard's gradient."""
        if self._versions is not None:
            self._before, self._versions = self._versions, None
        piece = self._pieces[variable, shard]
        piece.gradients += 1
        apply_dense(piece.rule, piece.arrays[_VALUES], gradient, piece.slots, piece.gradients)

    def gather(self, replica: Reducer) -> None:
        """Give the other replicas the own block of the values, and take theirs. All must call this."""
        if not self._compared:
            self._compare(replica)
        for dtype in sorted(self._flat, key=str):
            replica.gather_parts(self._flat[dtype], "large variables of a step")

    def contribution(self, steps: int) -> Iterator[tuple[int, ps_pb2.UpdateItem, list[memoryview]]]:
        """Yield how so many steps have changed the own block: servers, updates, and their segments."""
        for piece in self._pieces.values():
            form, itemsize = piece.form, piece.form.dtype.itemsize
            for nth, (name, array) in enumerate(piece.arrays.items()):
                change = piece.changes[name]
                places, remainder = _difference(array, piece.committed[name], change)
                item = ps_pb2.UpdateItem(
                    variable=form.variable,
                    shard=form.shard,
                    kind=ps_pb2.APPLY_CHANGE,
                    optimizer=form.optimizer,
                    slot=name,
                    nth=nth + 1,
                )
                dense, single = ps_pb2.UpdateItem(), ps_pb2.UpdateItem()
                dense.CopyFrom(item)
                dense.rows.all, dense.value_bytes, dense.offset = True, change.nbytes, piece.start * itemsize
                dense.gradients = 0 if name else steps
                yield form.server, dense, [view(change)]
                single.CopyFrom(item)
                single.rows.ids, single.value_bytes = len(places), remainder.nbytes
                yield form.server, single, [view(places + piece.start), view(remainder)]

    def committed(self) -> None:
        """Take note that the contribution is committed."""
        if self._before is not None:
            self._versions, self._before = self._before + self._updates, None

    def _compare(self, replica: Reducer) -> None:
        """Find out whether all replicas have begun with the same values; if not, they are fetched after the commit.

        If a script has updated a variable between two replicas' fetches, one gives the others its block without that.
        """
        versions = b"" if self._before is None else self._before.tobytes()
        digest = xxhash.xxh3_64_intdigest(versions) >> 1
        if not agree(replica, digest):
            self._before = None
        self._compared = True

    def _lay_out(self, describe: Describe, rank: int, replicas: int) -> bool:
        """Prepare memory. Return False if a rule can't be applied here."""
        rules: dict[int, UpdateRule] = {}
        for optimizer, server in {form.optimizer: form.server for form in self.forms}.items():
            spec = describe(optimizer, server)
            rule = known_rule(spec)
            if spec is None or rule is None or spec.ema_momentum:  # averages move with each step
                return False
            rules[optimizer] = rule
        by_type: defaultdict[np.dtype[Any], list[GradientForm]] = defaultdict(list)
        for form in self.forms:
            by_type[form.dtype].append(form)
        self._pieces.clear()
        for dtype, forms in by_type.items():
            size = sum(form.size for form in forms)
            flat = self._flat.get(dtype)
            if flat is None:
                flat = self._flat[dtype] = np.empty(size, dtype)
            at, ends = 0, (0, *even_ends(size, replicas))
            start, stop = ends[rank:][:2]
            for form in forms:
                blocks = sum(at < high and at + form.size > low for low, high in itertools.pairwise(ends))
                self._updates[self.forms.index(form)] = (1 + len(rules[form.optimizer].slots)) * (1 + blocks)
                key = form.variable, form.shard
                values = self.values[key] = flat[at : at + form.size]
                low, high = max(at, start) - at, min(at + form.size, stop) - at
                at += form.size
                if low < high:
                    rule = rules[form.optimizer]
                    arrays = {_VALUES: values[low:high], **new_slots(rule, (high - low,), dtype)}
                    committed, changes = (
                        {name: np.empty_like(array) for name, array in arrays.items()} for _ in range(2)
                    )
                    self._pieces[key] = _Piece(form, low, rule, arrays, committed, changes)
        return True

    def _fetch_all(self, read: Callable[[Sequence[ShardRead]], None]) -> None:
        """Read all values, and the own part of the slots."""
        read([_read_of(form, _VALUES, self.values[form.variable, form.shard]) for form in self.forms])
        counts = {(form.variable, form.shard): int(head[1]) for form, head in zip(self.forms, self._heads, strict=True)}
        for slot in dict.fromkeys(name for piece in self._pieces.values() for name in piece.slots):
            with_it = [piece for piece in self._pieces.values() if slot in piece.arrays]
            wholes = [np.empty(piece.form.size, piece.form.dtype) for piece in with_it]
            read([_read_of(piece.form, slot, whole) for piece, whole in zip(with_it, wholes, strict=True)])
            for piece, whole in zip(with_it, wholes, strict=True):
                own = piece.arrays[slot]
                own[...] = whole[piece.start : piece.start + len(own)]
        for key, piece in self._pieces.items():
            piece.gradients = counts[key]
            for name, array in piece.arrays.items():
                piece.committed[name][...] = array


def _difference(new: Array, old: Array, change: Array) -> tuple[Array, Array]:
    """Write into `change` by how much values have changed, and make the old ones the new ones.

    Return the places where old + change is not the new value, and what is missing there.
    """
    places: list[Array] = []
    remainders: list[Array] = []
    with np.errstate(all="ignore"):
        for start in range(0, len(new), _AT_ONCE):
            span = slice(start, start + _AT_ONCE)
            after, before, by = new[span], old[span], change[span]
            np.subtract(after, before, out=by)
            left = np.add(before, by)
            np.subtract(after, left, out=left)
            if left.any():
                # Infinity minus infinity would make NaN of what has not changed.
                by[after == before] = 0
                found = np.flatnonzero(np.isfinite(left) & (left != 0))
                places.append(found + start)
                remainders.append(left[found])
            before[...] = after
    return np.concatenate([np.empty(0, np.int64), *places]), np.concatenate([np.empty(0, new.dtype), *remainders])


def _read_of(form: GradientForm, slot: str, target: Array) -> ShardRead:
    item = read_item(form, optimizer=bool(slot), slot=slot)
    return ShardRead(form.server, item, target.nbytes, view(target))
