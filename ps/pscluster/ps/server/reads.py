"""Reads on a server: what is asked for is looked up and checked, then copied, or captured to be sent in pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from pscluster.core.errors import InvalidUpdateError, ProtocolError, UnknownVariableError
from pscluster.core.limits import MAX_ROWS_BYTES
from pscluster.core.transport.frames import CHUNK_BYTES, Buffer, padding, view
from pscluster.ps.optim import compute_dtype, new_slots
from pscluster.ps.server.directory import HeldVariable
from pscluster.ps.server.payload import Payload
from pscluster.ps.server.selection import Array, Box, Ids, box_of, check_ids, table_of
from pscluster.ps.server.shard import Shard, Snapshot
from pscluster.ps.server.store import Store
from pscluster.ps.spec import AVERAGE
from pscluster.v1 import ps_pb2


@dataclass(frozen=True, slots=True)
class _Source:
    """What an item of a read reads: an array of a shard, or a box of it; for ids, the array as a table."""

    name: str
    shard: Shard
    array: Array
    size: int
    dtype: np.dtype[Any]  # to be sent; another than the array's for an average that is still the value itself
    index: Box | None = None
    values: bool = False  # it is the values, which may be in another array by now


def reply_bytes(store: Store, request: ps_pb2.ReadRequest, ids_bytes: int) -> int:
    """Payload bytes of the reply to a read that came with so many bytes of ids. Refuses what can't be read."""
    store.check_job(request.job)
    total = at = 0
    for item in request.items:
        source, at = _locate(store, item, at)
        total += source.size + padding(source.size)
    if at != ids_bytes:
        raise ProtocolError(f"a read with {ids_bytes} bytes of row numbers whose items need {at}")
    return total


def read(store: Store, request: ps_pb2.ReadRequest, payload: Payload) -> Iterator[Buffer]:
    """The segments of the reply, in pieces, each shard as it was at one moment."""
    for segment in segments(store, request, payload):
        if isinstance(segment, Snapshot):
            yield from segment
        else:
            yield segment


def segments(store: Store, request: ps_pb2.ReadRequest, payload: Payload) -> Generator[Buffer | Snapshot, None, None]:
    """The segments of the reply; of large arrays snapshots, each to be read before the next segment is taken."""
    at, begin = 0, time.monotonic()
    for item in request.items:
        source, next_at = _locate(store, item, at)
        which, size = item.rows.WhichOneof("kind"), source.size
        if which == "ids":
            ids = payload.ids(at, item.rows.ids)
            check_ids(source.array, ids, source.name)
            made: Buffer | Snapshot = _gather(source, ids)
        else:
            made = _block(store, source)
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
        if which != "version" and (held := store.directory.variables.get(item.variable)) is not None:
            end = time.monotonic()
            held.counts.read(size, end - begin, item.rows.ids)
            begin = end


def _block(store: Store, source: _Source) -> Buffer | Snapshot:
    """All of an array, or a box of it: a copy, or of large values a snapshot, to be closed."""
    shard, array = source.shard, source.array
    selected = array if source.index is None else array[source.index]
    if source.values and source.dtype == array.dtype and selected.flags.c_contiguous and source.size > CHUNK_BYTES:
        start = byte_bounds(selected)[0] - byte_bounds(array)[0]
        return shard.snapshot(start, start + source.size, store.spill)
    with shard.lock:
        copy = np.array(selected, source.dtype, order="C")
    return view(copy)


def _locate(store: Store, item: ps_pb2.ReadItem, at: int) -> tuple[_Source, int]:
    """What an item reads, and where the next item's ids begin in the payload."""
    held, shard = store.directory.find(item.variable, item.shard)
    array = values = shard.array
    dtype = array.dtype
    if item.slot == AVERAGE:
        array = shard.averages.get(item.optimizer, array)  # before the first gradient the value is its average
        dtype = compute_dtype(array.dtype)
    elif item.slot:
        array = _slots(store, held, shard, item.optimizer).get(item.slot)  # type: ignore[assignment]
        if array is None:
            raise UnknownVariableError(f"the optimizer keeps no slot {item.slot!r} for {held.spec.name!r}")
        dtype = array.dtype
    which = item.rows.WhichOneof("kind")
    if which == "all":
        return _Source(held.spec.name, shard, array, array.size * dtype.itemsize, dtype, values=array is values), at
    if which == "slices":
        index = box_of(item.rows.slices, array, held.spec.name)
        size = math.prod(axis.count for axis in item.rows.slices.axes) * dtype.itemsize
        return _Source(held.spec.name, shard, array, size, dtype, index, array is values), at
    if which == "ids":
        table = table_of(array, item.rows.leading, held.spec.name)
        size = item.rows.ids * table.shape[1] * dtype.itemsize
        if item.rows.ids > 1 and size > MAX_ROWS_BYTES:
            raise InvalidUpdateError(
                f"{item.rows.ids:,} rows of {held.spec.name!r} take {size:,} bytes, the limit for one item of a "
                f"read is {MAX_ROWS_BYTES:,}: divide it"
            )
        ids_size = item.rows.ids * 8
        return _Source(held.spec.name, shard, table, size, dtype), at + ids_size + padding(ids_size)
    if which == "version":
        version: Array = np.array([shard.version], "<u8")
        return _Source(held.spec.name, shard, version, version.nbytes, version.dtype), at
    raise ProtocolError("a read without rows")


def _slots(store: Store, held: HeldVariable, shard: Shard, optimizer: int) -> dict[str, Array]:
    """The slots that an optimizer keeps beside a shard; they are made when they are first needed."""
    known = store.directory.optimizer(optimizer)
    with shard.lock:
        if optimizer not in shard.slots:
            shard.slots[optimizer] = new_slots(known.rule, shard.array.shape, held.dtype)
        return shard.slots[optimizer]


def _gather(source: _Source, ids: Ids) -> Buffer:
    out = np.empty((len(ids), source.array.shape[1]), source.array.dtype)
    with source.shard.lock:
        np.take(source.array, ids, 0, out, "clip")  # "clip" spares NumPy a buffer; the ids are checked
    return view(out.astype(source.dtype, copy=False))
