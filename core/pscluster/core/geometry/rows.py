"""Rows by id: ids checked, and given to the shards that have their rows."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import as_array, dtype_name
from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import Ids, by_modulo


class ShardRows(NamedTuple):
    """The row ids in a list that belong to one shard."""

    positions: Ids  # [n]; their positions in the list, rising
    local_ids: Ids  # [n]; their row numbers within the shard


def check_ids(ids: npt.ArrayLike, rows: int, name: str) -> Ids:
    """Return row ids as a contiguous int64 array of the same shape, or themselves if they are such an array.

    They may be of any shape and integer dtype, or an empty list. Raise InvalidUpdateError for another dtype, or if ids,
    the first of which is named, are not in 0..rows-1.
    """
    is_common = type(ids) is np.ndarray and ids.dtype == np.int64 and ids.flags.c_contiguous
    if is_common and (not ids.size or np.maximum.reduce(ids.view(np.uint64), None) < rows):  # type: ignore[union-attr]
        return ids  # type: ignore[return-value]
    array = integers(as_array(ids, name, "row ids"), ids, f"variable {name!r}: row ids")
    # As unsigned, negative ids become very large; as signed, large unsigned ids would become negative.
    unsigned = np.asarray(array, np.int64).view(np.uint64) if array.dtype.kind == "i" else array
    if array.size and np.maximum.reduce(unsigned, None) >= rows:  # what `max` calls, through a wrapper
        flat = array.ravel()
        position = int(np.argmax((flat < 0) | (flat >= rows)))
        limit = f"they must lie in 0..{rows - 1}" if rows else "there are no rows"
        raise InvalidUpdateError(
            f"variable {name!r}: row id {flat[position]} (position {position}) is out of range: "
            f"the variable has {rows} rows, {limit}"
        )
    return np.asarray(array, dtype=np.int64, order="C")


def integers(array: npt.NDArray[Any], given: object, subject: str) -> npt.NDArray[Any]:
    """Return the array of the ids that were given, an empty list as int64. InvalidUpdateError unless they are integers.

    `subject` begins the message.
    """
    if array.size == 0 and not isinstance(given, np.ndarray | np.generic):
        return array.astype(np.int64)  # NumPy makes an empty list float64
    if array.dtype.kind not in "iu":
        raise InvalidUpdateError(f"{subject} must be integers, but they are {_not_integers(array)}")
    return array


def _not_integers(array: npt.NDArray[Any]) -> str:
    """Return the type of ids that are not integers, the first that is no whole number, its place, and what to do."""
    flat, kind = array.reshape(-1), array.dtype.kind
    wrong = np.zeros(flat.size, bool)
    if kind == "O":
        wrong = np.array([isinstance(item, bool) or not isinstance(item, int | np.integer) for item in flat], bool)
    elif kind == "f":
        wrong = ~(np.isfinite(flat) & (flat == np.trunc(flat)))
    elif kind != "b":
        wrong[:] = True
    hint = "give whole numbers" if wrong.any() else "convert them first, for instance with ids.astype(np.int64)"
    if kind in "fO" and not wrong.any() and (wrong := (flat < -(2**63)) | (flat >= 2**63)).any():
        hint = "give numbers that fit in int64"
    place = int(wrong.argmax()) if flat.size else 0
    such = f", such as {flat[place : place + 1].tolist()[0]!r:.60} (position {place})" if flat.size else ""
    return f"{dtype_name(array.dtype)}{such}: {hint}"


_FEW_SHARDS = 8  # up to here, scanning all ids for each shard is faster than sorting them


def split_rows(partition: Partition, ids: Ids) -> list[ShardRows]:
    """Return the ids that each shard owns, so that rows can be distributed and reassembled in the order of the ids.

    Assemble rows that are read with `result[positions] = rows_of_the_shard`; distribute values to be written with
    `values[positions]`. Duplicates stay duplicates. Shards without ids are included. The ids are from `check_ids`; if
    they have several axes, positions count in C order. Raise ValueError if an axis other than 0 is cut, or the rank
    is 0, so there are no rows.
    """
    if not partition.shape or any(partition.cut_axes):
        raise ValueError(
            f"rows are found by id only where axis 0 alone is cut, but shape {partition.shape} "
            f"is cut into {partition.grid}"
        )
    flat = ids.reshape(-1)
    shards, kind = partition.num_shards, partition.order.kind
    if kind in ("hash", "joined"):
        flat = partition.places(flat)
    if shards == 1:
        return [ShardRows(np.arange(flat.size, dtype=np.int64), flat)]
    if kind == "modulo":
        owners, local_ids = by_modulo(flat, shards)
        if shards <= _FEW_SHARDS:
            positions = ((owners == shard).nonzero()[0] for shard in range(shards))
            return [ShardRows(own, local_ids[own]) for own in positions]
        return _grouped(owners, local_ids, shards)
    ends = np.array(partition.ends[0], dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))
    # Sorted, as from a plan of distinct rows: common, and several times faster.
    if kind == "range" and bool((flat[1:] >= flat[:-1]).all()):
        order = np.arange(flat.size, dtype=np.int64)
        cuts = itertools.pairwise((0, *np.searchsorted(flat, ends).tolist()))
        return [ShardRows(order[a:b], flat[a:b] - starts[shard]) for shard, (a, b) in enumerate(cuts)]
    if shards <= _FEW_SHARDS:
        below = [flat < end for end in ends[:-1].tolist()]
        masks = [below[0], *(low > before for before, low in itertools.pairwise(below)), ~below[-1]]
        positions = (mask.nonzero()[0] for mask in masks)
        return [ShardRows(own, flat[own] - start) for own, start in zip(positions, starts, strict=True)]
    # "right": of pieces that end at the same row, only the first can hold the rows before it.
    owners = np.searchsorted(ends, flat, side="right")
    return _grouped(owners, flat - starts[owners], shards)


def _grouped(owners: Ids, local_ids: Ids, shards: int) -> list[ShardRows]:
    """Return `split_rows`'s answer, given the owner of each id and its row number there."""
    if shards <= 1 << 16:
        owners = owners.astype(np.uint16)  # NumPy radix-sorts 16 bits, in linear time
    order = np.argsort(owners, kind="stable").astype(np.int64, copy=False)
    local_ids = local_ids[order]
    stops = np.cumsum(np.bincount(owners, minlength=shards)).tolist()
    return [ShardRows(order[start:stop], local_ids[start:stop]) for start, stop in itertools.pairwise((0, *stops))]
