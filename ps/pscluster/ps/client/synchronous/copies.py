"""A replica's own copies of the shards that its synchronous steps update: small ones here, large in `block_copies`.

While several steps are committed together, no server has the values between them. So each replica applies what all of
them have contributed to copies of its own, by the servers' rules, and reads these. They are fetched when such steps
begin, as the servers have them then; the servers stay the truth, and apply the same gradients when the steps are
committed. What others update meanwhile is not in the copies until they are fetched again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from pscluster.core.transport.frames import view
from pscluster.ps.array_pool import pop_unused
from pscluster.ps.client.reads.plans import ShardRead, WholeVariable
from pscluster.ps.client.synchronous.block_copies import BlockCopies
from pscluster.ps.client.synchronous.gradient_forms import Array, Describe, Forms, GradientForm, known_rule, read_item
from pscluster.ps.optim.kernels import apply_dense, new_slots
from pscluster.ps.optim.rules import UpdateRule
from pscluster.v1 import ps_pb2


@dataclass(slots=True)
class _Run:
    """Copies of shards that are neighbours and are applied alike, as if they were one."""

    forms: list[GradientForm]
    rule: UpdateRule
    values: Array  # flat
    slots: dict[str, Array]
    gradients: int = 0  # applied so far

    @property
    def size(self) -> int:
        return len(self.values)


class Copies:
    """Copies of the shards that gradients of these forms update. For one thread.

    Args:
        forms: of small gradients, in the order of `GradientForm.order`.
        large: of those that the replicas reduce, in the order in which the steps apply them.
    """

    def __init__(self, forms: Forms, large: Forms = ()) -> None:
        self.forms = forms
        self.large = BlockCopies(large)
        self.digest = xxhash.xxh3_64_intdigest(repr((forms, large)).encode()) >> 1 | 1
        """Identifies the forms: a positive number of 63 bits."""
        self.variables = frozenset(form.variable for form in (*forms, *large))
        self._heads = np.zeros((len(forms), 2), "<u8")  # of each shard: how many gradients, and which optimizer
        rows = ps_pb2.Rows(gradients=True)
        self._head_reads = [
            ShardRead(form.server, read_item(form, rows, optimizer=True), head.nbytes, view(head))
            for form, head in zip(forms, self._heads, strict=True)
        ]
        self._optimizers: Array | None = None  # those of `_groups`
        self._groups: list[_Run] = []  # all that are applied alike
        self._runs: list[_Run] = []  # those of them that have had as many gradients
        self._reads: list[ShardRead] = []  # of values and slots
        self._values: dict[tuple[int, int], Array] = {}  # by variable and shard, flat
        self._wholes: dict[int, WholeVariable] = {}
        self._given: dict[int, list[Array]] = {}  # by variable: what `read` has returned last

    def fetch(self, read: Callable[[Sequence[ShardRead]], None], describe: Describe, rank: int, replicas: int) -> bool:
        """Read everything as the servers have it now. Return False if a rule can't be applied here."""
        if not self.large.fetch(read, describe, rank, replicas):
            return False
        self._values.update(self.large.values)
        while self.forms:
            read([*self._head_reads, *self._reads])
            optimizers = self._heads[:, 1].copy()
            if self._optimizers is not None and (optimizers == self._optimizers).all():
                break
            if not self._lay_out(describe):  # the first time, or after a change of an optimizer
                return False
            self._optimizers = optimizers
        counts = iter(self._heads[:, 0].tolist())
        self._runs = [run for group in self._groups for run in _divided(group, counts)]
        return True

    def _lay_out(self, describe: Describe) -> bool:
        """Prepare memory, and what to read into it. Return False if a rule can't be applied here."""
        by_number: dict[int, UpdateRule] = {}
        for optimizer, server in {form.optimizer: form.server for form in self.forms}.items():
            if (rule := known_rule(describe(optimizer, server))) is None:
                return False
            by_number[optimizer] = rule
        self._groups, self._reads = [], []
        for _, group in itertools.groupby(self.forms, lambda form: form.order):
            forms = list(group)
            rule, size, dtype = by_number[forms[0].optimizer], sum(form.size for form in forms), forms[0].dtype
            run = _Run(forms, rule, np.empty(size, dtype), new_slots(rule, (size,), dtype))
            self._groups.append(run)
            at = 0
            for form in forms:
                span = slice(at, at + form.size)
                at += form.size
                values = self._values[form.variable, form.shard] = run.values[span]
                self._reads.append(ShardRead(form.server, read_item(form), values.nbytes, view(values)))
                for name, slot in run.slots.items():
                    item = read_item(form, optimizer=True, slot=name)
                    self._reads.append(ShardRead(form.server, item, slot[span].nbytes, view(slot[span])))
        return True

    def apply(self, sums: Mapping[np.dtype[Any], Array]) -> list[tuple[GradientForm, Array]]:
        """Apply gradients as their servers will: of each type in which they are computed, one behind the other.

        Return each of them, flat and of its shard's type.
        """
        at: defaultdict[np.dtype[Any], int] = defaultdict(int)
        gradients: list[tuple[GradientForm, Array]] = []
        for run in self._runs:
            computed, dtype = run.forms[0].compute_dtype, run.values.dtype
            start = at[computed]
            at[computed] += run.size
            with np.errstate(all="ignore"):
                gradient = sums[computed][start : start + run.size].astype(dtype, copy=False)
            run.gradients += 1
            apply_dense(run.rule, run.values, gradient, run.slots, run.gradients)
            start = 0
            for form in run.forms:
                gradients.append((form, gradient[start : start + form.size]))
                start += form.size
        return gradients

    def describe(self, variables: Sequence[int], wholes: Sequence[WholeVariable]) -> None:
        """Take note of the shapes and cuts of variables, for `read`."""
        self._wholes.update(zip(variables, wholes, strict=True))

    def knows(self, variables: Iterable[int]) -> bool:
        """Return whether the shapes and cuts of all of these variables are known."""
        return all(map(self._wholes.__contains__, variables))

    def read(self, variable: int) -> Array:
        """Return the values of a variable, which the caller may change: in the last ones' memory if nobody has them."""
        whole = self._wholes[variable]
        # New memory costs as much as a copy.
        given = self._given.pop(variable, None)
        result = None if given is None else pop_unused(given)
        form = whole.shape, whole.dtype
        if result is None or (result.shape, result.dtype) != form:  # callers may change these, too
            result = np.empty(whole.shape, whole.dtype)
        self._given[variable] = [result]
        for _, item, block, index in whole.shards:
            result[index] = self._values[variable, item.shard].reshape(block.shape)
        return result


def _divided(group: _Run, counts: Iterator[int]) -> Iterator[_Run]:
    """Yield the parts of a group that have had as many gradients; `counts` goes on behind the group's."""
    start = 0
    for count, same in itertools.groupby(zip(group.forms, counts, strict=False), lambda pair: pair[1]):  # forms first
        forms = [form for form, _ in same]
        stop = start + sum(form.size for form in forms)
        slots = {name: slot[start:stop] for name, slot in group.slots.items()}
        yield _Run(forms, group.rule, group.values[start:stop], slots, count)
        start = stop
