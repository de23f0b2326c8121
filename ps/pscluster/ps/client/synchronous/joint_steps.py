"""Synchronous steps that the replicas take among themselves, and commit together: with servers, only every so often.

It takes less time where steps are short: two messages between replicas a step in place of the requests to the servers;
and where gradients are large, since neither they nor the new values pass through the servers.
Only steps that do no more than this are taken so (see `fits`):

- They update variables by dense gradients, one for each shard, by rules of pscluster's own, which all replicas can
  apply, too: each has `Copies`. Of large gradients each replica applies one block, without averages of the weights and
  half types: see `block_copies`.
- They may add to other variables, such as metrics, which they do not read. This is sent when the steps are committed.
- They call no collectives: after an error of one replica, others may wait for it there.

Each replica's steps, in one call:

    begin   --the last call of this function went on in joint, with the same forms on all replicas--> joint, new copies
            --otherwise----------------------------------------------------------------------------> alone
    alone   a step is committed by itself, in the ordinary way
            --it fits, and the replicas agree that it does for all of them--> joint, with new copies
    joint   --after a step: all replicas have done the same again--> the step is `taken`: its sums are applied to the
                                                                     copies, and kept
            --enough are taken, or it was the last one------------> they are committed; joint, with new copies
            --a step is not like the others on some replica-------> those that are taken are committed, then this step
                                                                    by itself; alone until the call ends,
                                                                    unless none was taken

What was taken and is not committed is lost with any replica, and then all take these steps again: at most half a second
of work, and what one message to a server may hold. In the middle of a step a function may ask for what only the servers
have, or read what taken steps have added to. They do not know of these steps yet, so the function is ended
(`StepAlone`), and called again for that step once they do.

The sums are bitwise the same on all replicas, and so are the copies, unless a script updates the variables at the same
time. Each small gradient is sent to its server by one replica; of large ones, by how much they have changed the values.
"""

from __future__ import annotations

import enum
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pscluster.core.transport.frames import Buffer, padded, padding, view
from pscluster.ps.client.synchronous.copies import Copies
from pscluster.ps.client.synchronous.gradient_forms import Array, Forms, GradientForm
from pscluster.ps.client.synchronous.reduction import Reducer, Reduction
from pscluster.ps.spec import MAX_TOGETHER
from pscluster.v1 import ps_pb2


class Kept(NamedTuple):
    """An update of a step, as it was when it was made."""

    item: ps_pb2.UpdateItem
    buffers: Sequence[Buffer]  # what is sent
    values: memoryview
    dtype: np.dtype[Any] | None = None  # of the shard


Items = Mapping[int, Sequence[Kept]]
"""Updates by server."""

JOINT_BYTES = 256 << 10
"""The most that one step's small updates may take. The replicas have to send it to each other."""

LARGE_BYTES = 1 << 30
"""The most that one step's large gradients may take: a replica keeps the values, and its part of the slots."""

MAX_SECONDS = 0.5
"""Of work that is lost if a replica dies."""

MAX_ITEMS = 1024
"""Of one commit: their headers stay small."""

MAX_BYTES = 4 << 20
"""Of the updates of one commit."""


class _Flag(enum.IntEnum):
    """What else replicas tell each other: elements that follow the gradients of the first type."""

    DIFFERENT = 0  # this step is not like the others
    COMMIT = 1  # after this step


class StepAlone(BaseException):
    """Ends a function in the middle of a step, for the step to be taken by itself. Not an Exception: users catch those.

    It leaves no function: the worker calls it again.
    """


class Reads:
    """What a step has read, and whether it has asked for anything else."""

    def __init__(self) -> None:
        self.whole: set[int] = set()  # variables
        self.in_part: set[int] = set()
        self.other = False

    def clear(self) -> None:
        self.whole.clear()
        self.in_part.clear()
        self.other = False


def fits(items: Items, large: Forms, reads: Reads) -> tuple[Forms, Forms] | None:
    """Return the forms of a step's gradients, small and large, as `Copies` takes them.

    None if such steps can't be taken together.

    Args:
        items: what the step has updated, but for large gradients.
        large: the forms of those, in the order in which the step has applied them.
    """
    places = {(form.variable, form.shard) for form in large}
    kinds = dict.fromkeys((form.variable for form in large), ps_pb2.APPLY_GRADIENT)
    small: list[GradientForm] = []
    total = 0
    if reads.other or len(places) < len(large) or not reads.in_part.isdisjoint(kinds):
        return None
    if any(form.compute_dtype != form.dtype for form in large) or sum(form.nbytes for form in large) > LARGE_BYTES:
        return None
    for server, of_server in sorted(items.items()):
        for kept in of_server:
            item, dtype, place = kept.item, kept.dtype, (kept.item.variable, kept.item.shard)
            total += len(kept.values)
            if kinds.setdefault(item.variable, item.kind) != item.kind or item.variable in reads.in_part:
                return None
            if item.kind != ps_pb2.APPLY_GRADIENT:
                if item.variable in reads.whole:
                    return None
                continue
            if not item.rows.all or dtype is None or place in places:
                return None
            places.add(place)
            small.append(GradientForm.of(server, item, dtype))
    return (tuple(sorted(small, key=lambda form: form.order)), large) if total <= JOINT_BYTES else None


class _Sum:
    """The gradients of one type, one after the other, then a weight for each, and flags."""

    def __init__(self, dtype: np.dtype[Any], forms: Sequence[GradientForm]) -> None:
        self.dtype, self._forms = dtype, forms
        self._size = sum(form.size for form in forms)
        self._weighted = any(form.weighted for form in forms)
        self.own = np.zeros(self._size + len(forms) + len(_Flag), dtype)

    def begin(self, gradients: Mapping[tuple[int, int], Kept] | None) -> None:
        """Take this replica's gradients; None: it has others."""
        own, at = self.own, 0
        if gradients is None:
            own.fill(0)
            return
        with np.errstate(all="ignore"):
            for place, form in enumerate(self._forms):
                kept = gradients[form.variable, form.shard]
                target = own[at : at + form.size]
                target[...] = np.frombuffer(kept.values, form.dtype)
                if form.weighted:
                    own[self._size + place] = kept.item.weight
                    np.multiply(target, own[self._size + place], out=target)
                at += form.size

    def set_flags(self, *, different: bool, commit: bool) -> None:
        """Set what this replica tells the others."""
        self.own[-len(_Flag) :] = different, commit

    def flags(self, total: Array) -> Array:
        """Return how many replicas have set each `_Flag`."""
        return total[-len(_Flag) :]

    def divide(self, total: Array) -> None:
        """Divide the gradients that are to be averaged by the sum of their weights."""
        if not self._weighted:
            return
        weights, at = total[self._size : self._size + len(self._forms)], 0
        with np.errstate(all="ignore"):
            if weights.all() and (weights == weights[0]).all():
                total[: self._size] /= weights[0]
                return
            for form, weight in zip(self._forms, weights, strict=True):
                if weight:  # without any examples the sum is 0, and so is the mean
                    total[at : at + form.size] /= weight
                at += form.size


class JointSteps:
    """The steps of one replica that are taken and not committed. For one thread."""

    def __init__(self, replica: Reducer, copies: Copies) -> None:
        self._replica, self.copies = replica, copies
        self._forms = forms = copies.forms
        self.taken = 0
        """How many."""
        self._commit_due = False
        self._begin = time.monotonic()
        self._gradients: defaultdict[GradientForm, list[Buffer]] = defaultdict(list)  # that this replica sends
        self._others: defaultdict[int, list[Kept]] = defaultdict(list)
        self._kinds: dict[int, int] = {}  # of the others, by variable
        self._other_bytes = 0
        self._expected = {(form.variable, form.shard): (form.optimizer, form.weighted) for form in forms}
        self._step_bytes = sum(form.size * form.dtype.itemsize for form in forms)
        types = list(dict.fromkeys(form.compute_dtype for form in forms)) or [np.dtype(np.float32)]
        self._sums = [_Sum(dtype, [form for form in forms if form.compute_dtype == dtype]) for dtype in types]

    @property
    def due(self) -> bool:
        """Whether the steps that are taken are to be committed now."""
        return self._commit_due

    @property
    def variables(self) -> list[int]:
        """The variables that have gradients, in their order."""
        return list(dict.fromkeys(form.variable for form in (*self._forms, *self.copies.large.forms)))

    @property
    def digest(self) -> int:
        """Identify what must be the same for all replicas."""
        return self.copies.digest ^ self.taken

    def knows(self, variable: int) -> bool:
        """Return whether the servers do not know the value of a variable, after the steps that are taken."""
        return variable in self.copies.variables or variable in self._kinds

    def take(self, items: Items | None, reduction: Reduction) -> bool:
        """Take a step, with what this replica has contributed, if all replicas say that it fits; return whether it is.

        Args:
            items: None: it does not fit, here.
            reduction: the step's large gradients.

        Raises:
            MemberUnavailableError, MisuseError: as of collectives.
        """
        gradients: dict[tuple[int, int], Kept] = {}
        others: list[tuple[int, Kept]] = []
        large = self.copies.large
        alike = items is not None and reduction.forms == large.forms and self._divide(items, gradients, others)
        for of_type in self._sums:
            of_type.begin(gradients if alike else None)
        full = self._is_full or time.monotonic() - self._begin > MAX_SECONDS
        self._sums[0].set_flags(different=not alike, commit=full)
        totals = {of_type.dtype: self._replica.summed(of_type.own, "all gradients of a step") for of_type in self._sums}
        flags = self._sums[0].flags(totals[self._sums[0].dtype])
        if flags[_Flag.DIFFERENT]:
            return False
        self.taken += 1
        self._commit_due = bool(flags[_Flag.COMMIT])
        for of_type in self._sums:
            of_type.divide(totals[of_type.dtype])
        for form, gradient in self.copies.apply(totals):
            if form.server % self._replica.num_replicas == self._replica.replica_id:
                self._gradients[form].append(view(gradient))
        if large.forms:
            for variable, shard, gradient in reduction.sums(self._replica):
                large.apply(variable, shard, gradient)
            large.gather(self._replica)
        for server, kept in others:
            self._kinds[kept.item.variable] = kept.item.kind
            self._other_bytes += sum(map(len, kept.buffers))
            buffers = [bytes(buffer) for buffer in kept.buffers]  # the memory is used again
            self._others[server].append(kept._replace(buffers=buffers, values=memoryview(b"")))
        return True

    def clear(self) -> None:
        """Begin again: the steps that were taken are committed."""
        self.copies.large.committed()
        self.taken, self._commit_due, self._begin = 0, False, time.monotonic()
        self._other_bytes = 0
        self._gradients.clear()
        self._others.clear()
        self._kinds.clear()

    def contribution(self) -> dict[int, list[Kept]]:
        """Return what this replica contributes to the steps that are taken, by server."""
        result: defaultdict[int, list[Kept]] = defaultdict(list)
        for place, (form, gradients) in enumerate(self._gradients.items()):
            item = ps_pb2.UpdateItem(
                variable=form.variable,
                shard=form.shard,
                kind=ps_pb2.APPLY_GRADIENT,
                rows=ps_pb2.Rows(all=True),
                optimizer=form.optimizer,
                nth=place + 1,
                value_bytes=sum(map(len, gradients)),
                offset=0,
                gradients=self.taken,
            )
            buffers = [*gradients, bytes(padding(item.value_bytes))]
            result[form.server].append(Kept(item, buffers, memoryview(b"")))
        for server, item, segments in self.copies.large.contribution(self.taken):
            result[server].append(Kept(item, padded(segments), memoryview(b"")))
        for server, others in self._others.items():
            result[server] += others
        return result

    def _divide(self, items: Items, gradients: dict[tuple[int, int], Kept], others: list[tuple[int, Kept]]) -> bool:
        """Tell gradients from other updates. Return whether the step is like the others."""
        kinds = dict(self._kinds)
        for server, of_server in items.items():
            for kept in of_server:
                item = kept.item
                if item.kind == ps_pb2.APPLY_GRADIENT:
                    place = item.variable, item.shard
                    how = item.optimizer, item.HasField("weight")
                    if self._expected.get(place) != how or place in gradients or not item.rows.all:
                        return False
                    gradients[place] = kept
                elif item.variable in self.copies.variables or kinds.setdefault(item.variable, item.kind) != item.kind:
                    return False  # their order counts
                else:
                    others.append((server, kept))
        return len(gradients) == len(self._forms)

    @property
    def _is_full(self) -> bool:
        """Whether a message might not hold the step after this one, too."""
        steps, taken = self.taken + 2, max(self.taken, 1)
        items = sum(map(len, self._others.values())) * steps // taken
        nbytes = steps * self._step_bytes + self._other_bytes * steps // taken
        return steps > MAX_TOGETHER or items > MAX_ITEMS or nbytes > MAX_BYTES
