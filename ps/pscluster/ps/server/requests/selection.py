"""Which elements of a shard an item of a read or an update selects: a box, or rows by number."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.core.geometry.selection import AxisSlice
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Box = tuple[slice | EllipsisType, ...]


def box_of(slices: ps_pb2.Slices, array: Array, name: str) -> Box:
    """Return the index of a box of the array. InvalidUpdateError if the box reaches beyond it."""
    if len(slices.axes) != array.ndim:
        raise ProtocolError(f"a box of {len(slices.axes)} axes in {name!r}, whose shards have {array.ndim}")
    index = []
    for axis, length in zip(slices.axes, array.shape, strict=True):
        last = axis.start + (axis.count - 1) * axis.step
        if not axis.step or (axis.count and not (axis.start < length and 0 <= last < length)):
            raise InvalidUpdateError(
                f"a slice of {name!r} (start {axis.start}, step {axis.step}, {axis.count} elements) reaches beyond a "
                f"shard of length {length}"
            )
        index.append(AxisSlice(axis.start, axis.step, axis.count).as_slice)
    return (*index, ...)  # with the ellipsis a scalar's selection is a view, too


def table_of(array: Array, leading: int, name: str) -> Array:
    """Return the array as rows, a view of it: its leading axes flattened to one, the rest to another."""
    leading = leading or 1
    if leading == 1 and array.ndim == 2:
        return array
    if leading > array.ndim:
        raise InvalidUpdateError(f"rows over {leading} axes of {name!r}, which has {array.ndim}")
    return array.reshape(math.prod(array.shape[:leading]), math.prod(array.shape[leading:]))


def check_ids(table: Array, ids: Ids, name: str) -> None:
    """Raise InvalidUpdateError if the table lacks one of these rows."""
    rows = table.shape[0]
    # As unsigned, negative ids are very large. The method `max` takes twice as long for a few hundred.
    if len(ids) and np.maximum.reduce(ids.view(np.uint64)) >= rows:
        wrong = ids[(ids < 0) | (ids >= rows)][0]
        raise InvalidUpdateError(f"row {wrong} of a shard of {name!r} that has {rows} rows")
