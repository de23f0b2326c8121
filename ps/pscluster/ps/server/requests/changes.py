"""Checked items of updates, and a short way to check the plainest and most frequent ones.

A training step pushes gradients of the same shards again and again, and most are of a whole shard or of rows of it, in
the shard's own type. What is to be checked of such an item does not depend on the request but for its sizes. So it is
found out once and kept beside the shard: a `GradientForm`. All other items, and those with anything wrong, take the
long way in `update_checks`, which also knows the errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pscluster.core.transport.frames import padding
from pscluster.ps.optim.joint import MAX_ELEMENTS
from pscluster.ps.server.requests.selection import Array, Box, table_of
from pscluster.ps.server.state.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.state.shard import GradientForm, Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import OWN_RULE, SESSION_BYTES
from pscluster.v1 import ps_pb2


@dataclass(slots=True)  # not frozen: that would make the creation take three times as long
class Change:
    """A checked item of an update: what it changes, and where its bytes are in the payload. Not changed itself."""

    item: ps_pb2.UpdateItem
    held: HeldVariable
    shard: Shard
    optimizer: HeldOptimizer | None
    index: Box | None
    ids_at: int
    values_at: int
    joins: int = 0  # the elements of a gradient that may be applied together with others; 0: it is applied alone
    rows: int = -1  # of such a gradient: how many rows it is for; -1: it is for the whole shard

    @property
    def encoded(self) -> bool:
        """Whether its values are a gradient in another type, or only some elements of one."""
        return bool(self.item.wire_dtype or self.item.elements)

    @property
    def decoded_bytes(self) -> int:
        """The memory that its values take, in addition to what has come, while they are applied."""
        elements = self.item.rows.ids * self.unit or self.item.elements
        return self.item.value_bytes + elements * 4 if self.encoded and elements else 0  # joined, and in float32

    @property
    def unit(self) -> int:
        """The number of elements of each of its rows, or of the shard."""
        if self.held.spec.HasField("table"):
            return self.held.spec.table.dim
        if self.item.rows.WhichOneof("kind") != "ids":
            return self.shard.array.size
        return math.prod(self.shard.array.shape[self.item.rows.leading or 1 :])

    @property
    def table(self) -> Array:
        """The shard as rows, which are numbered over its first axis."""
        return table_of(self.shard.array, 1, self.held.spec.name)

    @property
    def replaces_array(self) -> bool:
        """Whether it assigns a whole shard, whose array may be replaced: prepared reads hold views of small ones."""
        whole = self.item.kind == ps_pb2.ASSIGN and self.item.rows.WhichOneof("kind") == "all" and not self.item.scalar
        return whole and self.shard.array.nbytes > SESSION_BYTES


def plain_gradient(store: Store, item: ps_pb2.UpdateItem, at: int) -> Change | None:
    """Return what a gradient changes that may be applied together with others, whose bytes begin at `at`.

    None if it is no such gradient, or does not fit.
    """
    if item.kind != ps_pb2.APPLY_GRADIENT:
        return None
    held, shard = store.find(item.variable, item.shard)
    optimizer = store.directory.optimizer(item.optimizer)
    form = shard.gradients
    if form is None or form.optimizer is not optimizer:
        form = shard.gradients = _form_of(held, shard, optimizer)
    rows, size = item.rows, item.value_bytes
    if (
        not (form.joins and 0 < size <= MAX_ELEMENTS * form.itemsize // 2)
        or item.scalar
        or item.wire_dtype
        or item.elements
        or item.gradients
        or item.HasField("offset")
    ):
        return None
    joins = size // form.itemsize
    if count := rows.ids:  # so it is no other kind
        if size != count * form.row_bytes or rows.leading > 1 or rows.id_bytes:
            return None
        values_at = at + 8 * count + padding(8 * count)
        return Change(item, held, shard, optimizer, None, at, values_at, joins, count)
    if not rows.all or size != form.nbytes:
        return None
    return Change(item, held, shard, optimizer, None, at, at, joins)


def _form_of(held: HeldVariable, shard: Shard, optimizer: HeldOptimizer) -> GradientForm:
    array, spec = shard.array, optimizer.spec
    joins = (
        array.dtype.kind == "f"
        and array.itemsize in (4, 8)  # half types are computed in float32
        and spec.rule != OWN_RULE
        and not spec.ema_momentum
        and not held.spec.HasField("table")
    )
    row_bytes = math.prod(array.shape[1:]) * array.itemsize if array.ndim else 0
    return GradientForm(optimizer, array.itemsize, array.nbytes, row_bytes, joins)
