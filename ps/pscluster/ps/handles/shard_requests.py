"""What a read or an update of a variable asks of each shard, after all arguments have been checked.

Nothing here talks to a server: `variable` sends the requests.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.context import current_function, encodes_reads
from pscluster.core.dtypes import as_array, converted, is_or_are
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RANGE
from pscluster.core.geometry.rows import ShardRows, check_ids, split_rows
from pscluster.core.geometry.selection import AxisSlice, Selection, select
from pscluster.core.transport.frames import view
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.placement.cuts import SharedCut
from pscluster.ps.client.reads.plans import ShardRead, WholeVariable
from pscluster.ps.client.updates.shard_update import Encoding, ShardUpdate
from pscluster.ps.handles.indexing import Array, Gradient, Ids, IndexedSlices, whole_index
from pscluster.ps.row_ids import RowIds, rows_by
from pscluster.ps.spec import check_kind
from pscluster.ps.wire_dtypes import decode, encoded_bytes
from pscluster.v1 import ps_pb2

ALL = ps_pb2.Rows(all=True)
"""A whole shard."""


class ShardRequests:
    """What the servers hold of a variable, and the requests about its shards."""

    name: str
    holder = "variable"  # what messages call it
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    client: PsClient  # reads and updates it
    _cut: SharedCut
    asynchronous: bool = False  # applied at once, also in synchronous steps
    wire_dtype: int = 0  # of reads in functions, and of gradients; 0: its own
    push_top_k: float = 0  # of dense gradients, the share of elements that is pushed; 0: all
    _slot: tuple[int, str] | None  # optimizer and name, if this is a slot

    @property
    def id(self) -> int:
        """The number under which the servers have it: another one once it is resharded."""
        return self._cut.now.id

    @property
    def partition(self) -> Partition:
        """How it is cut."""
        return self._cut.now.partition

    @property
    def owners(self) -> tuple[int, ...]:
        """The parameter server of each shard, as far as this process knows: they may have moved."""
        cut = self._cut.now
        return self.client.placements.owners(cut.id, cut.owners)

    def columns(self, shard: int) -> tuple[slice, ...]:
        """Return which part of a row a shard has."""
        return self.partition.columns(shard)

    # Reads

    def row_ids(self, ids: npt.ArrayLike) -> RowIds:
        """Return ids of rows to read as int64, of the same shape. InvalidUpdateError names one that is no row."""
        if not self.shape:
            raise InvalidUpdateError(f"variable {self.name!r} is a scalar: it has no rows to read")
        return check_ids(ids, self.shape[0], self.name)

    id_bytes = 0
    """The most bytes of ids that are strings, for which arrays of bytes stand (`row_ids`); 0: ids are integers."""

    splits_ids = False
    """Whether ids are of any size, and `split_ids` alone knows whose they are."""

    def split_ids(self, ids: Ids) -> Sequence[tuple[int, ShardRows]]:
        """Return each shard, with which of these ids are its, and under which numbers."""
        return list(_shards_of_rows(self.partition, ids))

    def _whole(self) -> WholeVariable:
        owners, index = self.owners, self.partition.index
        blocks = enumerate(self.partition.blocks)
        shards = [(owners[shard], self._read_item(shard), block, index(shard)) for shard, block in blocks]
        return WholeVariable(self.shape, self.dtype, shards)

    def _whole_reads(self, out: Array) -> list[ShardRead]:
        return [self._shard_read(shard, out, self.partition.index(shard)) for shard in range(self.partition.num_shards)]

    def _box_reads(self, selection: Selection, out: Array) -> list[ShardRead]:
        if self.partition.order != RANGE:
            if selection.is_all_of(self.shape):
                return self._whole_reads(out)
            points = _points_of(selection, self.shape)
            return self._mask_reads(points, out.reshape(len(points[0]), *self.shape[len(points) :]))
        return [
            self._shard_read(selected.shard, out, whole_index(selected.target), _slices_of(selected.local))
            for selected in selection.shards
        ]

    def _mask_reads(self, points: Sequence[Ids], out: Array) -> list[ShardRead]:
        """Return the reads of points of the leading axes into the rows of an array."""
        axes, reads = len(points), []
        for shard, positions, rows in _shards_of_points(self.partition, points):
            index = (positions, *self.partition.block(shard).slices[axes:])
            reads.append(self._shard_read(shard, out, index, ps_pb2.Rows(ids=len(positions), leading=axes), rows))
        return reads

    def _row_reads(self, ids: Ids, out: Array) -> list[ShardRead]:
        reads = []
        for shard, (positions, local_ids) in self.split_ids(ids):
            if not len(positions):
                continue
            columns = self.columns(shard)
            whole = tuple(axis.stop - axis.start for axis in columns) == self.shape[1:]
            everything = len(positions) == ids.size and whole  # then they are in order
            index = ... if everything else _row_index(positions, columns)
            reads.append(self._shard_read(shard, out, index, rows_by(local_ids), local_ids))
        return reads

    def _shard_read(
        self, shard: int, out: Array, index: Any, rows: ps_pb2.Rows = ALL, ids: Ids | None = None
    ) -> ShardRead:
        """Return a read of (a part of) a shard into `out[index]`: slices, or row numbers and slices."""
        item, target = self._read_item(shard, rows), None
        if item.wire_dtype:
            return self._encoded_read(self.owners[shard], item, out, index, ids)
        if isinstance(index, tuple) and index and isinstance(index[0], np.ndarray):
            shape = (len(index[0]), *(axis.stop - axis.start for axis in index[1:]))
        else:
            target = out[index]
            shape = target.shape
        size = math.prod(shape) * self.dtype.itemsize
        if target is not None and target.flags.c_contiguous:
            return ShardRead(self.owners[shard], item, size, view(target), ids)
        return ShardRead(self.owners[shard], item, size, functools.partial(_put, out, index, shape), ids)

    def _encoded_read(self, server: int, item: ps_pb2.ReadItem, out: Array, index: Any, ids: Ids | None) -> ShardRead:
        """Return a read of values that come in another type."""
        if ids is not None and isinstance(index, tuple):
            shape = (len(ids), *(axis.stop - axis.start for axis in index[1:]))
        else:
            shape = out[index].shape
        rows = 1 if ids is None else len(ids)
        width = math.prod(shape if ids is None else shape[1:])
        put = functools.partial(_put_decoded, item.wire_dtype, rows, width, out, index, shape)
        return ShardRead(server, item, encoded_bytes(item.wire_dtype, rows, width), put, ids)

    def _read_item(self, shard: int, rows: ps_pb2.Rows = ALL) -> ps_pb2.ReadItem:
        item = ps_pb2.ReadItem(variable=self.id, shard=shard, rows=rows)
        if self._slot is not None:
            item.optimizer, item.slot = self._slot
        elif self.wire_dtype and not rows.in_use and encodes_reads(current_function()):
            item.wire_dtype = self.wire_dtype  # type: ignore[assignment]
        return item

    def _selection(self, index: Any) -> Selection:
        """Return what a basic index selects. IndexError, TypeError or ValueError, with the variable's name."""
        try:
            return select(self.partition if self.partition.order == RANGE else self.partition.of_places, index)
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"variable {self.name!r}: {error}") from None

    # Updates

    def shard_updates(self, kind: ps_pb2.UpdateKind, value: npt.ArrayLike, at: Any = None) -> list[ShardUpdate]:
        """Return the updates of everything, or of a box."""
        self._check_writable()
        array = converted(value, self.dtype, self.name, "value")
        check_kind(kind, self.dtype, self.name)
        if array.ndim and at is None:
            return self._dense_updates(kind, self._shaped(array, self.shape, "value"), optimizer=0)
        selection = self._selection(... if at is None else at)
        if array.ndim:
            array = self._shaped(array, selection.result_shape, "value").reshape(selection.counts)
        if at is not None and self.partition.order != RANGE:
            return self._point_updates(kind, selection, np.broadcast_to(array, selection.counts))
        nth = self.next_update()
        updates = []
        for selected in selection.shards:
            rows = ALL if at is None else _slices_of(selected.local)
            values = array[selected.target.slices] if array.ndim else array
            updates.append(self._shard_update(kind, selected.shard, nth, rows, values))
            updates[-1].item.scalar = not array.ndim  # one number is sent for all elements
        return updates

    def shard_assignment(self, shard: int, value: npt.ArrayLike) -> list[ShardUpdate]:
        """Return the update that replaces one shard by a value that NumPy broadcasts to its shape."""
        self._check_writable()
        array = converted(value, self.dtype, self.name, "value")
        array = self._shaped(array, self.partition.block(shard).shape, "value")
        return [self._shard_update(ps_pb2.ASSIGN, shard, self.next_update(), ALL, array)]

    def _dense_updates(self, kind: ps_pb2.UpdateKind, array: Array, optimizer: int) -> list[ShardUpdate]:
        """Return the updates of everything by an array of its shape and type."""
        nth = self.next_update()
        return [
            self._shard_update(kind, shard, nth, ALL, array[self.partition.index(shard)], optimizer)
            for shard in range(self.partition.num_shards)
        ]

    def _point_updates(self, kind: ps_pb2.UpdateKind, selection: Selection, array: Array) -> list[ShardUpdate]:
        """Return the updates of a box of places that are scattered over the shards, by an array of its shape."""
        points = _points_of(selection, self.shape)
        axes, nth = len(points), self.next_update()
        values = array.reshape(len(points[0]), *self.shape[axes:])
        return [
            self._shard_update(
                kind, shard, nth, ps_pb2.Rows(ids=len(positions), leading=axes), values[positions], ids=local_ids
            )
            for shard, positions, local_ids in _shards_of_points(self.partition, points)
        ]

    def row_updates(self, kind: ps_pb2.UpdateKind, ids: Ids, rows: Array, optimizer: int = 0) -> list[ShardUpdate]:
        """Return the updates of rows, from `checked_rows`. Their step counts on shards without such rows, too."""
        nth = self.next_update()
        updates = []
        for shard, (positions, local_ids) in self.split_ids(ids):
            if len(positions) or optimizer:
                values = rows[_row_index(positions, self.columns(shard))]
                updates.append(self.shard_row_update(kind, shard, nth, local_ids, values, optimizer))
        return updates

    def checked_rows(self, kind: ps_pb2.UpdateKind, slices: IndexedSlices, optimizer: int) -> tuple[Ids, Array]:
        """Return the flat ids of an update of rows, and the rows, of shape (ids, ...) and the variable's type."""
        self._check_writable()
        ids, row_shape = self._ids_of(slices), self.shape[1:]
        values = converted(
            slices.values, self.dtype, self.name, "values of the rows", overflow=bool(optimizer), holder=self.holder
        )
        rows = self._shaped(values, (*ids.shape, *row_shape), "values of the rows", broadcast=not optimizer)
        check_kind(kind, self.dtype, self.name)
        return ids.reshape(-1), rows.reshape(ids.size, *row_shape)

    def _batch_updates(self, slices: IndexedSlices) -> list[ShardUpdate]:
        self._check_writable()
        *batch, _ = np.shape(slices.indices)
        axis = len(batch)
        if axis >= len(self.shape) or tuple(batch) != self.shape[:axis]:
            raise InvalidUpdateError(
                f"variable {self.name!r} has shape {self.shape}, the indices {np.shape(slices.indices)}: "
                "all of their axes but the last must match the variable's leading axes"
            )
        ids, row_shape = check_ids(slices.indices, self.shape[axis], self.name), self.shape[axis + 1 :]
        values = converted(slices.values, self.dtype, self.name, "values of the rows")
        rows = self._shaped(values, (*ids.shape, *row_shape), "values of the rows").reshape(ids.size, *row_shape)
        points = [coordinates.reshape(-1) for coordinates in (*np.indices(ids.shape)[:-1], ids)]
        nth = self.next_update()
        updates = []
        for shard, positions, local_rows in _shards_of_points(self.partition, points):
            columns: Any = (positions, *self.partition.block(shard).slices[axis + 1 :])
            where = ps_pb2.Rows(ids=len(positions), leading=axis + 1)
            updates.append(self._shard_update(ps_pb2.ASSIGN, shard, nth, where, rows[columns], ids=local_rows))
        return updates

    def dense_gradient_updates(self, gradient: npt.ArrayLike, optimizer: int) -> list[ShardUpdate]:
        """Return the updates of all shards by a dense gradient; for internal use."""
        self.check_takes_gradients()
        self._check_writable()
        array = converted(gradient, self.dtype, self.name, "gradient", overflow=True)
        array = self._shaped(array, self.shape, "gradient", broadcast=False)
        return self._dense_updates(ps_pb2.APPLY_GRADIENT, array, optimizer)

    def check_takes_gradients(self) -> None:
        if self.dtype.kind != "f" and self.dtype.name != "bfloat16":
            raise InvalidUpdateError(f"variable {self.name!r} is {self.dtype.name}: only floats take gradients")

    def checked_gradient(self, gradient: Gradient) -> Gradient:
        """Return a gradient as floating arrays that updates are made of, copied only if it has another type."""
        if not isinstance(gradient, IndexedSlices):
            return self._floats(gradient, "gradient", self.shape)
        ids = self._ids_of(gradient)
        rows = self._floats(gradient.values, "values of the rows", (*ids.shape, *self.shape[1:]))
        return IndexedSlices(rows, ids)

    def _floats(self, value: npt.ArrayLike, argument: str, shape: tuple[int, ...]) -> Array:
        array = as_array(value, self.name, argument, holder=self.holder)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            array = converted(value, self.dtype, self.name, argument, overflow=True, holder=self.holder)
        return self._shaped(array, shape, argument, broadcast=False)

    def shard_row_update(
        self, kind: ps_pb2.UpdateKind, shard: int, nth: int, local_ids: Ids, values: Array, optimizer: int
    ) -> ShardUpdate:
        """Return the update of these rows of a shard by the columns of theirs that it has."""
        return self._shard_update(kind, shard, nth, rows_by(local_ids), values, optimizer, local_ids)

    def shard_row_read(self, shard: int, out: Array, rows: slice | Ids, local_ids: Ids) -> ShardRead:
        """Return the read of these rows of a shard into those of an array."""
        if isinstance(rows, slice) and not self.wire_dtype:
            target = out[(rows, *self.columns(shard))]
            if target.flags.c_contiguous:
                item = self._read_item(shard, rows_by(local_ids))
                return ShardRead(self.owners[shard], item, target.nbytes, view(target), local_ids)
        return self._shard_read(shard, out, (rows, *self.columns(shard)), rows_by(local_ids), local_ids)

    def _shard_update(
        self,
        kind: ps_pb2.UpdateKind,
        shard: int,
        nth: int,
        rows: ps_pb2.Rows,
        values: Array,
        optimizer: int = 0,
        ids: Ids | None = None,
    ) -> ShardUpdate:
        """Return one shard's share of an update: the n-th of the variable in its function."""
        data = view(np.ascontiguousarray(values))
        item = ps_pb2.UpdateItem(
            variable=self.id, shard=shard, kind=kind, rows=rows, optimizer=optimizer, nth=nth, value_bytes=len(data)
        )
        row_numbers = None if ids is None else np.ascontiguousarray(ids)
        encoding = None
        if kind == ps_pb2.APPLY_GRADIENT and (self.wire_dtype or (self.push_top_k and ids is None)):
            encoding = self._encoding(shard)
        return ShardUpdate(
            self.owners[shard], item, data, row_numbers, self.name, self.dtype, self.asynchronous, encoding
        )

    def _encoding(self, shard: int) -> Encoding:
        block = self.partition.block(shard)
        return Encoding(self.wire_dtype, self.push_top_k, block.start, block.shape, self.partition)

    def next_update(self) -> int:
        """Return the number of the next update in the function that runs."""
        function = current_function()
        return function.nth_update(self.id) if function is not None and function.function else 1

    # Checks

    def _ids_of(self, slices: IndexedSlices) -> RowIds:
        self._check_slices(slices)
        if not self.shape:
            raise InvalidUpdateError(f"variable {self.name!r} is a scalar: it has no rows to update")
        return check_ids(slices.indices, self.shape[0], self.name)

    def _check_slices(self, slices: object) -> None:
        """Raise TypeError unless these are `IndexedSlices`, InvalidUpdateError if those of another variable."""
        if not (hasattr(slices, "indices") and hasattr(slices, "values")):
            raise TypeError(
                f"{self.holder} {self.name!r}: an update of rows is an IndexedSlices(values, indices), "
                f"not {type_of(slices)}"
            )
        dense = getattr(slices, "dense_shape", None)
        if dense is not None and tuple(np.asarray(dense).reshape(-1).tolist()) != self.shape:
            raise InvalidUpdateError(
                f"variable {self.name!r} has shape {self.shape}, but the IndexedSlices has dense_shape {dense!r}"
            )

    def _check_writable(self) -> None:
        if self._slot is not None:
            raise MisuseError(f"{self.name!r} belongs to its optimizer: it can be read, but not assigned")

    def _shaped(self, array: Array, shape: tuple[int, ...], argument: str, broadcast: bool = True) -> Array:
        """Return an array of that shape, broadcast if allowed. InvalidUpdateError if it does not fit."""
        if array.shape == shape:
            return array
        try:
            if broadcast:
                return np.broadcast_to(array, shape)
        except ValueError:
            pass
        raise InvalidUpdateError(
            f"{self.holder} {self.name!r}: the {argument} {'have' if is_or_are(argument) == 'are' else 'has'} shape "
            f"{array.shape}, but must have shape {shape}"
        )


def _put(out: Array, index: Any, shape: tuple[int, ...], data: memoryview) -> None:
    """Set `out[index] = data`. Whole rows are moved as items, twice as fast as element by element."""
    row = math.prod(shape[1:]) * out.itemsize
    if row and isinstance(index[0], np.ndarray) and row * len(out) == out.nbytes:
        rows: Array = np.ndarray((len(out),), np.dtype((np.void, row)), view(out))
        rows[index[0]] = np.ndarray((shape[0],), rows.dtype, data)
    else:
        out[index] = np.ndarray(shape, out.dtype, data)


def _put_decoded(
    wire_dtype: int, rows: int, width: int, out: Array, index: Any, shape: tuple[int, ...], data: memoryview
) -> None:
    """Set `out[index]` to encoded values."""
    values = decode(wire_dtype, data, rows, width)
    if isinstance(index, tuple) and index and isinstance(index[0], np.ndarray):
        _put(out, index, shape, view(values))
    else:
        out[index] = values.reshape(shape)


def _row_index(positions: Ids, columns: tuple[slice, ...]) -> Any:
    """Return the index of these columns in an array of rows, at these rows, in ascending order.

    Consecutive rows, as sorted ids have, are a slice: it selects without a copy.
    """
    first, last = (int(positions[0]), int(positions[-1])) if len(positions) else (0, -1)
    rows = slice(first, last + 1) if last - first == len(positions) - 1 else positions
    return (rows, *columns)


def _slices_of(axes: Sequence[AxisSlice]) -> ps_pb2.Rows:
    slices = [ps_pb2.AxisSlice(start=axis.start, step=axis.step, count=axis.count) for axis in axes]
    return ps_pb2.Rows(slices=ps_pb2.Slices(axes=slices))


def _points_of(selection: Selection, shape: tuple[int, ...]) -> list[Ids]:
    """Return the selected points of axis 0, and of the axes up to the last that is not selected whole."""
    whole = [axis == AxisSlice.of(range(length)) for axis, length in zip(selection.axes, shape, strict=True)]
    leading = max((axis + 1 for axis, selected in enumerate(whole) if not selected), default=1)
    axes = [np.asarray(axis.indices, np.int64) for axis in selection.axes[:leading]]
    return [coordinates.reshape(-1) for coordinates in np.meshgrid(*axes, indexing="ij")]


def _shards_of_rows(partition: Partition, ids: Ids) -> Iterator[tuple[int, ShardRows]]:
    """Yield every shard with those of the ids whose rows lie, in part, on it."""
    pieces = split_rows(partition.of_rows, ids)
    across = partition.num_shards // len(pieces)  # shards that share a piece of axis 0
    for piece, rows in enumerate(pieces):
        for shard in range(piece * across, (piece + 1) * across):
            yield shard, rows


def _shards_of_points(partition: Partition, points: Sequence[Ids]) -> Iterator[tuple[int, Ids, Ids]]:
    """Yield every shard with any of these points of the leading axes: the points' positions, and row numbers there.

    `points` has the coordinates along each of these axes, in arrays of one length.
    """
    if partition.order != RANGE:
        points = [partition.places(points[0]), *points[1:]]
    axes = partition.ends[: len(points)]
    pieces = [np.searchsorted(ends, axis, "right") for ends, axis in zip(axes, points, strict=True)]
    cells = np.ravel_multi_index(pieces, [len(ends) for ends in axes])
    order = np.argsort(cells, kind="stable")
    stops = np.cumsum(np.bincount(cells, minlength=math.prod(map(len, axes))))
    across = partition.num_shards // len(stops)  # shards that share a piece of these axes
    for cell, (start, stop) in enumerate(itertools.pairwise((0, *stops.tolist()))):
        if start == stop:
            continue
        positions = order[start:stop]
        for shard in range(cell * across, (cell + 1) * across):
            block = partition.block(shard)
            local = [axis[positions] - first for axis, first in zip(points, block.start, strict=False)]
            yield shard, positions, np.ravel_multi_index(local, block.shape[: len(points)]).astype(np.int64)
