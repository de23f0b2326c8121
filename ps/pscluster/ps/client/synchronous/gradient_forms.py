"""What the dense gradients of a step are like, by which replicas agree on how to apply them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.optim.rules import RULES, UpdateRule
from pscluster.ps.optim.specs import rule_of
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]

Describe = Callable[[int, int], ps_pb2.OptimizerSpec | None]
"""Looks up an optimizer by its number, on a server; None if it is unknown here."""


@dataclass(frozen=True, slots=True)
class GradientForm:
    """What is the same for a shard's dense gradient in each step, and on all replicas."""

    variable: int
    shard: int
    server: int
    optimizer: int
    dtype: np.dtype[Any]  # of the shard
    size: int  # elements
    weighted: bool  # a mean over the examples of all replicas, not a sum

    @classmethod
    def of(cls, server: int, item: ps_pb2.UpdateItem, dtype: np.dtype[Any]) -> GradientForm:
        """Return the form of a gradient of a whole shard."""
        size, weighted = item.value_bytes // dtype.itemsize, item.HasField("weight")
        return cls(item.variable, item.shard, server, item.optimizer, dtype, size, weighted)

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The type in which it is summed and applied."""
        return compute_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def order(self) -> tuple[str, str, int, bool]:
        """Sorts forms so that those that are applied alike are neighbours."""
        return self.compute_dtype.name, self.dtype.name, self.optimizer, self.weighted


Forms = tuple[GradientForm, ...]
"""Of one gradient a shard."""


def known_rule(spec: ps_pb2.OptimizerSpec | None) -> UpdateRule | None:
    """Return the rule of an optimizer; None if it is not one of pscluster's own."""
    if spec is None or (rule_class := RULES.get(spec.rule)) is None:
        return None
    return rule_of(spec, rule_class)


def read_item(
    form: GradientForm, rows: ps_pb2.Rows | None = None, *, optimizer: bool = False, slot: str = ""
) -> ps_pb2.ReadItem:
    """Return what to read of a shard: all of its values unless something else is given."""
    return ps_pb2.ReadItem(
        variable=form.variable,
        shard=form.shard,
        rows=rows or ps_pb2.Rows(all=True),
        optimizer=form.optimizer if optimizer else 0,
        slot=slot,
    )
