"""Reads on a server: check each item, then copy it, or take a snapshot of it to send in pieces."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from pscluster.core.errors import InvalidUpdateError, ProtocolError, UnavailableError, UnknownVariableError
from pscluster.core.limits import MAX_ROWS_BYTES
from pscluster.core.transport.frames import CHUNK_BYTES, Buffer, padding, parts_of, pieces, view
from pscluster.ps import row_ids
from pscluster.ps.optim.kernels import new_slots
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.server.embedding import tables
from pscluster.ps.server.requests import encoded
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.requests.selection import Array, Box, Ids, box_of, check_ids, table_of
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Shard, Snapshot
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import AVERAGE
from pscluster.ps.tables import InitialRows, initial_rows
from pscluster.ps.wire_dtypes import encoded_bytes
from pscluster.v1 import ps_pb2


@dataclass(slots=True)  # not frozen: that would make the creation take three times as long
class Source:
    """What an item of a read reads: an array of a shard, or a box of it. Not changed itself."""

    name: str
    shard: Shard
    held_array: Array
    ids_at: int
    size: int
    dtype: np.dtype[Any]  # on the wire; differs from the array's while an average is still the value itself
    index: Box | None = None
    table: InitialRows | None = None  # of a table whose rows are read by id
    values: bool = False  # reads the values, whose array may have been replaced since
    leading: int = 1  # axes over which rows are numbered
    wire_dtype: int = 0  # on the wire, if it is another one
    rows: int = 1  # of which each begins a block, and their elements
    width: int = 0

    @property
    def array(self) -> Array:
        """The array, which under the shard's lock is the present one."""
        return self.shard.array if self.values else self.held_array

    @property
    def rows_array(self) -> Array:
        """The same as the rows that ids number."""
        return table_of(self.array, self.leading, self.name)


def sources_of(store: Store, request: ps_pb2.ReadRequest, ids_bytes: int) -> list[Source]:
    """Return what the items of a read read, with `ids_bytes` of ids in all. Refuse what can't be read."""
    store.check_job(request.job)
    sources, at = [], 0
    for item in request.items:
        source, at = _locate(store, item, at)
        sources.append(source)
    if at != ids_bytes:
        raise ProtocolError(f"a read with {ids_bytes} bytes of row numbers whose items need {at}")
    return sources


def reply_bytes(sources: Iterable[Source]) -> int:
    """Return the payload bytes of the reply to a read."""
    return sum(source.size + padding(source.size) for source in sources)


def read(
    store: Store, request: ps_pb2.ReadRequest, payload: Payload, sources: Sequence[Source] | None = None
) -> Iterator[Buffer]:
    """Yield the segments of the reply in pieces, each shard as it was at one moment."""
    with _unreadable_means_retry():
        for segment in segments(store, request, payload, sources):
            if isinstance(segment, Snapshot):
                yield from segment
            else:
                yield segment


def frames(
    store: Store, request: ps_pb2.Request, payload: Payload, total: int, frame_bytes: int
) -> Generator[list[Buffer], None, None]:
    """Yield the reply as frames, whose parts may be views of arrays that change: valid until the next is requested."""
    done = before = 0
    with _unreadable_means_retry(), closing(_groups(store, request.read, payload, total, frame_bytes)) as groups:
        for buffers, again in groups:
            if again:
                done = before
            before, done = done, done + sum(map(len, buffers))
            reply = ps_pb2.Reply(id=request.id, again=again, last=done == total)
            if not before:
                reply.total_bytes = total
                reply.read.SetInParent()
            yield parts_of(reply, buffers)


def whole(request_id: int, buffers: Sequence[Buffer], frame_bytes: int) -> Iterator[list[Buffer]]:
    """Yield a reply of these bytes as frames."""
    total, done = sum(map(len, buffers)), 0
    for group in pieces(buffers, frame_bytes) if total else [[]]:
        reply = ps_pb2.Reply(id=request_id, last=done + sum(map(len, group)) == total)
        if not done:
            reply.total_bytes = total
            reply.read.SetInParent()
        done += sum(map(len, group))
        yield parts_of(reply, group)


def _groups(
    store: Store, request: ps_pb2.ReadRequest, payload: Payload, total: int, frame_bytes: int
) -> Generator[tuple[list[Buffer], bool], None, None]:
    """Yield the payload of each frame, and whether it replaces that of the previous frame."""
    small, size = list[Buffer](), 0
    with closing(segments(store, request, payload)) as in_turn:
        for segment in in_turn:
            if not isinstance(segment, Snapshot):
                small.append(segment)
                size += len(segment)
                if size < CHUNK_BYTES:
                    continue
            yield from ((piece, False) for piece in pieces(small))
            small, size = [], 0
            if isinstance(segment, Snapshot):
                for chunk, again in segment.chunks(frame_bytes // CHUNK_BYTES):
                    yield [chunk], again
        yield from ((piece, False) for piece in (pieces(small) if total else [[]]))


@contextmanager
def _unreadable_means_retry() -> Iterator[None]:
    """Have the client repeat a read if its old values can't be read back from the disk."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"try again: {error.strerror}") from None


def _no_row(_: int) -> str:
    return ""


def _named_row(store: Store, item: ps_pb2.ReadItem, ids: row_ids.RowIds, nth: int) -> str:
    """Return how an error names the n-th row of a read by ids: by its id in the whole variable."""
    held = store.directory.variables.get(item.variable)
    if held is None or item.rows.leading > 1:
        return ""
    if held.spec.HasField("table"):
        return f", row {row_ids.shown(ids[nth])},"
    return f", row {held.partition.row_ids(item.shard)[ids[nth]]},"


def segments(
    store: Store, request: ps_pb2.ReadRequest, payload: Payload, sources: Sequence[Source] | None = None
) -> Generator[Buffer | Snapshot, None, None]:
    """Yield the segments of the reply; large arrays as snapshots, to be read before the next segment is taken.

    `sources` are those of the items, found a moment ago; None: they are found when it is their turn.
    """
    at, begin = 0, time.monotonic()
    for nth, item in enumerate(request.items):
        source, next_at = _locate(store, item, at) if sources is None else (sources[nth], 0)
        at = source.ids_at
        which, size = item.rows.WhichOneof("kind"), source.size
        wire_dtype, rows, width, name = source.wire_dtype, source.rows, source.width, source.name
        row_of = _no_row
        if which == "ids":
            ids = payload.ids(at, item.rows)
            if wire_dtype:
                row_of = functools.partial(_named_row, store, item, ids)
            segment: Buffer | Snapshot
            if source.table is None:
                segment = _gather(source, ids)
            else:
                if item.rows.id_bytes:
                    row_ids.check_strings(ids, name)
                with source.shard.lock:
                    values, missing = tables.read_rows(source.shard, ids, source.table)
                if item.rows.must_exist and len(missing):
                    raise row_ids.without_rows(name, ids[missing])
                segment = view(values)
                if (held := store.directory.variables.get(item.variable)) is not None:
                    held.metrics.rows_found += len(ids) - len(missing)
        else:
            segment = _block(store, source)
        traffic = source.shard.traffic
        del source  # it would keep the shard's old array alive if that is replaced while the client is slow
        if wire_dtype:
            with closing(segment) if isinstance(segment, Snapshot) else nullcontext():
                yield from encoded.replies(wire_dtype, segment, rows, width, name, row_of)
        elif isinstance(segment, Snapshot):
            with closing(segment):
                yield segment
        else:
            yield segment
        if padding(size):
            yield bytes(padding(size))
        at = next_at
        if (
            which not in ("version", "gradients", "in_use")
            and (held := store.directory.variables.get(item.variable)) is not None
        ):
            end = time.monotonic()
            held.metrics.read(size, end - begin, item.rows.ids)
            traffic.add(size, end)
            begin = end


def _block(store: Store, source: Source) -> Buffer | Snapshot:
    """Return a copy of an array or of a box of it; of large values a snapshot, which the caller closes."""
    shard, array = source.shard, source.array
    selected = array if source.index is None else array[source.index]
    if source.values and source.dtype == array.dtype and selected.flags.c_contiguous and source.size > CHUNK_BYTES:
        start = byte_bounds(selected)[0] - byte_bounds(array)[0]
        return shard.snapshot(start, start + selected.nbytes, store.spill)
    del array, selected
    with shard.lock:
        array = source.array
        copy = np.array(array if source.index is None else array[source.index], source.dtype, order="C")
    return view(copy)


def _locate(store: Store, item: ps_pb2.ReadItem, at: int) -> tuple[Source, int]:
    """Return what an item reads, and where the next item's ids begin in the payload."""
    held, shard = store.find(item.variable, item.shard)
    if (plain := _plain_rows(held, shard, item, at)) is not None:
        ids_bytes = 8 * item.rows.ids
        return plain, at + ids_bytes + padding(ids_bytes)
    array = values = shard.array
    dtype, ids_at = array.dtype, at
    row_ids.check_kind(item.rows, held.spec)
    if item.slot and held.spec.HasField("table"):
        raise ProtocolError(f"a read of slots or averages of table {held.spec.name!r}")
    if item.slot == AVERAGE:
        array = shard.averages.get(item.optimizer, array)  # before the first gradient the value is the average
        dtype = compute_dtype(array.dtype)
    elif item.slot:
        array = _slots(store, held, shard, item.optimizer).get(item.slot)  # type: ignore[assignment]
        if array is None:
            raise UnknownVariableError(f"the optimizer has no slot {item.slot!r} for {held.spec.name!r}")
        dtype = array.dtype
    which, name = item.rows.WhichOneof("kind"), held.spec.name
    index: Box | None = None
    table = None
    if which == "all":
        size = array.size * dtype.itemsize
    elif which == "slices":
        index = box_of(item.rows.slices, array, name)
        size = math.prod(axis.count for axis in item.rows.slices.axes) * dtype.itemsize
    elif which == "ids" and held.spec.HasField("table"):
        if item.rows.leading > 1:
            raise ProtocolError(f"a read of rows of table {name!r} that is not of values by their ids")
        table = initial_rows(held.spec.table, name)
        size = item.rows.ids * table.dim * dtype.itemsize
        _check_rows_bytes(item, size, name)
        ids_bytes = row_ids.bytes_by(item.rows)
        at += ids_bytes + padding(ids_bytes)
    elif which == "ids":
        size = item.rows.ids * table_of(array, item.rows.leading, name).shape[1] * dtype.itemsize
        _check_rows_bytes(item, size, name)
        ids_bytes = row_ids.bytes_by(item.rows)
        at += ids_bytes + padding(ids_bytes)
    elif which == "in_use" and held.spec.HasField("table"):
        array = np.array([len(shard.array)], "<u8")
        dtype, size = array.dtype, array.nbytes
    elif which == "version" or which == "gradients":
        if which == "version":
            array = np.array([shard.version], "<u8")
        else:
            digest = store.directory.optimizer(item.optimizer).digest
            array = np.array([shard.steps.get(item.optimizer, 0), digest], "<u8")
        dtype, size = array.dtype, array.nbytes
    else:
        raise ProtocolError("a read without rows")
    source = Source(name, shard, array, ids_at, size, dtype, index, table, array is values, item.rows.leading)
    return _encoded_source(item, source) if item.wire_dtype else source, at


def _plain_rows(held: HeldVariable, shard: Shard, item: ps_pb2.ReadItem, at: int) -> Source | None:
    """Return what an item reads if it reads rows of a matrix as they are, as most do; None if it may not."""
    array, rows = shard.array, item.rows
    if array.ndim != 2 or rows.WhichOneof("kind") != "ids" or rows.leading > 1 or rows.id_bytes:
        return None
    if item.slot or item.wire_dtype or held.spec.HasField("table"):
        return None
    name, size = held.spec.name, rows.ids * array.shape[1] * array.itemsize
    _check_rows_bytes(item, size, name)
    return Source(name, shard, array, at, size, array.dtype, values=True)


def _check_rows_bytes(item: ps_pb2.ReadItem, size: int, name: str) -> None:
    if item.rows.ids > 1 and size > MAX_ROWS_BYTES:
        raise InvalidUpdateError(
            f"{item.rows.ids:,} rows of {name!r} take {size:,} bytes, the limit for one item of a read is "
            f"{MAX_ROWS_BYTES:,}: divide it"
        )


def _encoded_source(item: ps_pb2.ReadItem, source: Source) -> Source:
    """Return what an item reads in another type. ProtocolError if that is no read of values."""
    which = item.rows.WhichOneof("kind")
    if item.slot or which in ("version", "gradients", "in_use") or (source.table is not None and which != "ids"):
        raise ProtocolError(f"a read of {source.name!r} in another type is not one of values")
    encoded.check_dtype(item.wire_dtype, source.dtype, source.name)
    rows = item.rows.ids if which == "ids" else 1
    if source.table is not None:
        width = source.table.dim
    else:
        width = source.rows_array.shape[1] if which == "ids" else source.size // source.dtype.itemsize
    size = encoded_bytes(item.wire_dtype, rows, width)
    return replace(source, size=size, wire_dtype=item.wire_dtype, rows=rows, width=width)


def _slots(store: Store, held: HeldVariable, shard: Shard, optimizer: int) -> dict[str, Array]:
    """Return an optimizer's slots of a shard, created when they are first needed."""
    known = store.directory.optimizer(optimizer)
    with shard.lock:
        if optimizer not in shard.slots:
            shard.slots[optimizer] = new_slots(known.rule, shard.array.shape, held.dtype)
        return shard.slots[optimizer]


def _gather(source: Source, ids: Ids) -> Buffer:
    """Return a copy of these rows. InvalidUpdateError if one is not there."""
    table = source.rows_array
    check_ids(table, ids, source.name)
    out = np.empty((len(ids), table.shape[1]), table.dtype)
    with source.shard.lock:
        source.rows_array.take(ids, 0, out, "clip")  # the ids are checked; with "clip" NumPy needs no buffer
    return view(out if out.dtype == source.dtype else out.astype(source.dtype))
