"""Variables as the user holds them: handles that read and update shards on the parameter servers.

A handle names a variable; the values live on the servers only. The same class serves in the coordinator's
script and inside a step function, where updates are keyed by the function and applied once however often it
is retried. What is wrong with a call (shape, dtype, ids) is said here, before anything is sent.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, Set, ValuesView
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pscluster.core.context import current_function
from pscluster.core.dtypes import array_of, as_array, converted, dtype_named
from pscluster.core.errors import InvalidUpdateError, MisuseError, ProtocolError
from pscluster.core.geometry import AxisSlice, Block, Partition, Selection, ShardRows, check_ids, select, split_rows
from pscluster.core.handles import Handle
from pscluster.core.transport.frames import view
from pscluster.core.values import describe, map_structure
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.read_plans import WholeVariable
from pscluster.ps.client.reads import ReadPart
from pscluster.ps.client.updates import UpdatePart
from pscluster.ps.handles.operators import Arithmetic
from pscluster.ps.handles.scope import Partitioner, VariableRequest, current_creator
from pscluster.ps.optim import compute_dtype, deduplicate
from pscluster.ps.spec import check_kind, partition_of
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]
_ALL = ps_pb2.Rows(all=True)
_SUMMED = (ps_pb2.APPLY_GRADIENT, ps_pb2.ADD, ps_pb2.SUB)  # of rows with equal ids the sum counts


class IndexedSlices(NamedTuple):
    """A sparse gradient or update: `values[i]` belongs to row `indices[i]`; duplicate rows are summed.

    Attributes:
        values: (n, ...) rows.
        indices: (n,) integers.
        dense_shape: of the whole, or None.
    """

    values: npt.ArrayLike
    indices: npt.ArrayLike
    dense_shape: tuple[int, ...] | None = None


_V = TypeVar("_V", "Variable", "Shard")


class VariableList(list[_V]):
    """A list of variables or shards. `in`, `index` and so on ask which of them it is; `==` would compare its values."""

    def __contains__(self, wanted: object) -> bool:
        return any(_is_same(each, wanted) for each in self)

    def index(self, wanted: object, start: Any = 0, stop: Any = None, /) -> int:
        """The place of a variable. ValueError if it is not among them."""
        for place in range(*slice(start, stop).indices(len(self))):
            if _is_same(self[place], wanted):
                return place
        raise ValueError(f"{wanted!r} is not in the list")

    def count(self, wanted: object, /) -> int:
        """How often it is in the list."""
        return sum(_is_same(each, wanted) for each in self)

    def remove(self, wanted: object, /) -> None:
        """Take it out of the list. ValueError if it is not among them."""
        del self[self.index(wanted)]


def gradient_of(gradient: Any) -> Any:
    """What a framework gives as a gradient; rows of a sparse one, as torch has of embeddings, as `IndexedSlices`."""
    if type(gradient) is np.ndarray or not getattr(gradient, "is_sparse", False):
        return gradient
    found = gradient.detach().coalesce()
    if found.sparse_dim() != 1:
        return found.to_dense()
    return IndexedSlices(array_of(found.values()), array_of(found.indices())[0], tuple(found.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Arithmetic):
    """One shard of a variable, for those who ask where things live."""

    variable: Variable
    index: int

    @property
    def name(self) -> str:
        """`w/part_1`, or the variable's own name where it is whole."""
        whole = self.variable.num_shards == 1
        return self.variable.name if whole else f"{self.variable.name}/part_{self.index}"

    @property
    def block(self) -> Block:
        """Which part of the variable this is."""
        return self.variable.partition.block(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shard's own shape."""
        return self.block.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self.variable.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.block.size * self.dtype.itemsize

    @property
    def owners(self) -> tuple[int, ...]:
        """The server that holds it, as a variable has it of its shards."""
        return (self.variable.owners[self.index],)

    @property
    def device(self) -> str:
        """Where it lives, such as `/job:ps/task:1`."""
        return f"/job:ps/task:{self.owners[0]}"

    def read_value(self) -> Array:
        """The shard's values."""
        return self.variable._read_shard(self.index)

    def numpy(self) -> Array:
        """The shard's values."""
        return self.read_value()

    def assign(self, value: npt.ArrayLike) -> None:
        """Replace the shard's values."""
        self.variable.assign(value, at=self.block.slices or ...)


class Variable(Arithmetic, Handle):
    """An array that lives on the parameter servers.

    Args:
        initial_value: an array, a scalar, or a function of `(shape, dtype)` that returns one.
        name: unique in the strategy; one is made up if not given.
        dtype: of the elements; default: the initial value's (float64 becomes float32 for Python floats only).
        shape: needed where `initial_value` is a function.
        trainable: kept for those who ask; pscluster itself does not look at it.
        partitioner: how to cut it, instead of the strategy's; see `partitioners`.

    Raises:
        MisuseError: outside of `strategy.scope()`, the name is taken, or what was given is no variable.
        InvalidUpdateError: the initial value would lose something in that dtype, or could not be made.
        ConfigurationError: the partitioner's or the placement policy's answer is none.
            Whatever is raised, nothing has been created.
    """

    handle_kind = "variable"
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    partition: Partition
    owners: tuple[int, ...]
    _id: int
    _client: PsClient
    _slot: tuple[int, str] | None  # of this optimizer: then this is no variable but what is kept beside one

    def __new__(
        cls,
        initial_value: object = None,
        *,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] | None = None,
        trainable: bool = True,
        partitioner: Partitioner | None = None,
    ) -> Variable:
        """Create the variable on the servers; a `ShardedVariable` where it is cut."""
        creator = current_creator(f"Variable {name!r}" if name else "a Variable")
        request = VariableRequest(initial_value, name, dtype, shape, trainable, partitioner)
        return creator.create_variable(request)

    @staticmethod
    def of(spec: ps_pb2.VariableSpec, client: PsClient) -> Variable:
        """The handle of a variable that exists."""
        partition = partition_of(spec)
        handle: Variable = object.__new__(ShardedVariable if partition.num_shards > 1 else Variable)
        handle.name = spec.name
        handle.shape = partition.shape
        handle.dtype = dtype_named(spec.dtype)
        handle.trainable = spec.trainable
        handle.partition = partition
        handle.owners = tuple(spec.owners)
        handle._id = spec.id
        handle._client = client
        handle._slot = None
        return handle

    @property
    def client(self) -> PsClient:
        """Through which it is read and updated."""
        return self._client

    @property
    def handle_key(self) -> str:
        """A variable is named by its name."""
        return self.name

    # What it is

    @property
    def number(self) -> int:
        """Under which the servers know it."""
        return self._id

    @property
    def member_names(self) -> list[str]:
        """Those of the variables that the servers have for it: its own, where it is one."""
        return [self.name]

    @property
    def num_shards(self) -> int:
        """In how many shards it is cut."""
        return self.partition.num_shards

    @property
    def variables(self) -> list[Shard]:
        """The shards, each with its `device`."""
        return VariableList(Shard(self, index) for index in range(self.num_shards))

    @property
    def device(self) -> str:
        """Where it lives; the first shard's place where it is cut."""
        return self.variables[0].device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        places = ", ".join(sorted({shard.device for shard in self.variables}))
        return f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name} on {places}>"

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar: there is nothing to iterate over")
        return iter(self.read_value())

    def __reversed__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar: there is nothing to iterate over")
        return iter(self.read_value()[::-1])

    def __contains__(self, element: object) -> bool:
        return element in self.read_value()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar: it has no length")
        return self.shape[0]

    # Reading

    def read_value(self) -> Array:
        """The whole value, one request a server, all servers at once. Each shard is as it was at one moment."""
        return read_variables([self])[0]

    def numpy(self) -> Array:
        """The whole value."""
        return self.read_value()

    def value(self) -> Array:
        """The whole value."""
        return self.read_value()

    def __getitem__(self, index: Any) -> Any:
        """What NumPy's indexing gives, moving only what was asked for.

        Integers, slices of any step, `...`, `np.newaxis`, boolean masks of leading axes, and integer arrays on
        axis 0. Other mixtures of arrays read the whole.
        """
        advanced = advanced_index(index, self.name)
        if advanced is None:
            return self._read_box(self._selection(index))
        if isinstance(advanced, np.ndarray) and advanced.dtype == bool:
            return self._read_mask(advanced)
        if isinstance(advanced, np.ndarray):
            return gather_rows([(self, wrapped_ids(advanced, self.shape, self.name))])[0]
        return self.read_value()[index]

    def __setitem__(self, index: Any, value: npt.ArrayLike) -> None:
        self.assign(value, at=index if isinstance(index, tuple) else (index,))  # `None` is an axis here, not all

    def _selection(self, index: Any) -> Selection:
        try:
            return select(self.partition, index)
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"variable {self.name!r}: {error}") from None

    def _read_box(self, selection: Selection) -> Any:
        out = np.empty(selection.counts, self.dtype)
        self._client.read(
            [
                self._read_part(part.shard, out, whole_index(part.landing), ps_pb2.Rows(slices=_slices_of(part.local)))
                for part in selection.parts
            ]
        )
        return out.reshape(selection.result_shape)[()]

    def _read_mask(self, mask: npt.NDArray[np.bool_]) -> Array:
        if mask.shape != self.shape[: mask.ndim]:
            raise IndexError(f"variable {self.name!r} has shape {self.shape}, but the mask has shape {mask.shape}")
        places = np.nonzero(mask)
        out = np.empty((len(places[0]), *self.shape[mask.ndim :]), self.dtype)
        parts: list[ReadPart] = []
        for shard, mine, flat in self._shards_of_places(places):
            place = (mine, *self.partition.block(shard).slices[mask.ndim :])
            parts.append(self._read_part(shard, out, place, ps_pb2.Rows(ids=len(mine), leading=mask.ndim), flat))
        self._client.read(parts)
        return out

    def _read_shard(self, index: int) -> Array:
        out = np.empty(self.partition.block(index).shape, self.dtype)
        self._client.read([self._read_part(index, out, ...)])
        return out

    def _read_part(
        self,
        shard: int,
        out: Array,
        place: Any,
        rows: ps_pb2.Rows = _ALL,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> ReadPart:
        """A read of a shard, or of a part of it, into `out[place]`: slices, or row numbers and slices."""
        item, target = self._read_item(shard, rows), None
        if isinstance(place, tuple) and place and isinstance(place[0], np.ndarray):
            shape = (len(place[0]), *(axis.stop - axis.start for axis in place[1:]))
        else:
            target = out[place]
            shape = target.shape
        size = math.prod(shape) * self.dtype.itemsize
        if target is not None and target.flags.c_contiguous:
            return ReadPart(self.owners[shard], item, size, view(target), ids)
        return ReadPart(self.owners[shard], item, size, functools.partial(_put, out, place, shape), ids)

    def _read_item(self, shard: int, rows: ps_pb2.Rows = _ALL) -> ps_pb2.ReadItem:
        item = ps_pb2.ReadItem(variable=self._id, shard=shard, rows=rows)
        if self._slot is not None:
            item.optimizer, item.slot = self._slot
        return item

    def _whole(self) -> WholeVariable:
        blocks = enumerate(self.partition.blocks)
        shards = [(self.owners[shard], self._read_item(shard), block) for shard, block in blocks]
        return WholeVariable(self.shape, self.dtype, shards)

    def sparse_read(self, indices: npt.ArrayLike, name: str | None = None) -> Array:
        """The rows of these ids, in the order of the ids, duplicates included.

        Args:
            indices: integers of any shape, each in 0..rows - 1.
            name: taken for the peer's sake.

        Returns:
            An array of shape `indices.shape + self.shape[1:]`.

        Raises:
            InvalidUpdateError: an id that is no row of the variable is named, or the ids are no integers.
        """
        del name
        return gather_rows([(self, indices)])[0]

    def gather(self, indices: npt.ArrayLike) -> Array:
        """The rows of these ids: see `sparse_read`."""
        return self.sparse_read(indices)

    # Updating

    def assign(self, value: npt.ArrayLike, *, at: Any = None) -> Self:
        """Replace the value, or with `at` the part that this index selects. A scalar fills it.

        Args:
            value: of the selected part's shape, or one that NumPy broadcasts to it.
            at: integers, slices, `...`; as in `v[at]`.
        """
        return self._update(ps_pb2.ASSIGN, value, at)

    def assign_add(self, delta: npt.ArrayLike, *, at: Any = None) -> Self:
        """Add to the value, or to a part of it, on the servers."""
        return self._update(ps_pb2.ADD, delta, at)

    def assign_sub(self, delta: npt.ArrayLike, *, at: Any = None) -> Self:
        """Subtract from the value, or from a part of it, on the servers."""
        return self._update(ps_pb2.SUB, delta, at)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows. Of duplicate ids the last one counts."""
        return self._scatter(ps_pb2.ASSIGN, sparse_delta, use_locking, name)

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Add to rows; duplicate ids add up."""
        return self._scatter(ps_pb2.ADD, sparse_delta, use_locking, name)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Subtract from rows; duplicate ids add up."""
        return self._scatter(ps_pb2.SUB, sparse_delta, use_locking, name)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Multiply rows; duplicate ids multiply."""
        return self._scatter(ps_pb2.MUL, sparse_delta, use_locking, name)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Divide rows; duplicate ids divide again."""
        return self._scatter(ps_pb2.DIV, sparse_delta, use_locking, name)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """The smaller of row and value."""
        return self._scatter(ps_pb2.MIN, sparse_delta, use_locking, name)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """The larger of row and value."""
        return self._scatter(ps_pb2.MAX, sparse_delta, use_locking, name)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Replace rows batch by batch: `v[i, ..., indices[i, ..., j]] = values[i, ..., j]`.

        Of duplicate ids the last one counts. Indices of one axis make it `scatter_update`.
        """
        self._check_slices(sparse_delta)
        if np.ndim(sparse_delta.indices) < 2:
            return self.scatter_update(sparse_delta, use_locking, name)
        self._check_writable()
        self._client.update(self._batch_parts(sparse_delta))
        return self

    def _update(self, kind: ps_pb2.UpdateKind, value: npt.ArrayLike, at: Any) -> Self:
        self._client.update(self.update_parts(kind, value, at))
        return self

    def update_parts(self, kind: ps_pb2.UpdateKind, value: npt.ArrayLike, at: Any = None) -> list[UpdatePart]:
        """The parts of an update of all or of a box. Checked; nothing has been sent."""
        self._check_writable()
        array = converted(value, self.dtype, self.name, "value")
        check_kind(kind, self.dtype, self.name)
        if not array.ndim:
            return self._scalar_parts(kind, array, at)
        if at is None:
            return self._dense_parts(kind, self._shaped(array, self.shape, "value"), optimizer=0)
        selection = self._selection(at)
        values = self._shaped(array, selection.result_shape, "value").reshape(selection.counts)
        nth = self._next_update()
        parts = []
        for part in selection.parts:
            mine = view(np.ascontiguousarray(values[part.landing.slices]))
            rows = ps_pb2.Rows(slices=_slices_of(part.local))
            item = self._item(kind, part.shard, nth, 0, rows, len(mine))
            parts.append(UpdatePart(self.owners[part.shard], item, mine))
        return parts

    def _scalar_parts(self, kind: ps_pb2.UpdateKind, scalar: Array, at: Any) -> list[UpdatePart]:
        """One number for all that is selected: only it travels."""
        selection = self._selection(... if at is None else at)
        nth, mine = self._next_update(), view(np.ascontiguousarray(scalar))
        parts = []
        for part in selection.parts:
            rows = _ALL if at is None else ps_pb2.Rows(slices=_slices_of(part.local))
            item = self._item(kind, part.shard, nth, 0, rows, len(mine))
            item.scalar = True
            parts.append(UpdatePart(self.owners[part.shard], item, mine))
        return parts

    def _scatter(self, kind: ps_pb2.UpdateKind, slices: IndexedSlices, *_peers: object) -> Self:
        """`_peers` are the arguments that the peer's methods have besides: nothing depends on them here."""
        self._check_writable()
        self._client.update(self._sparse_parts(kind, gradient_of(slices), optimizer=0))
        return self

    def _dense_parts(self, kind: ps_pb2.UpdateKind, array: Array, optimizer: int) -> list[UpdatePart]:
        """The parts of an update of the whole value by an array of its shape and type."""
        nth = self._next_update()
        parts = []
        for index in range(self.num_shards):
            values = view(np.ascontiguousarray(array[whole_index(self.partition.block(index))]))
            item = self._item(kind, index, nth, optimizer, _ALL, len(values))
            parts.append(UpdatePart(self.owners[index], item, values))
        return parts

    def _sparse_parts(self, kind: ps_pb2.UpdateKind, slices: IndexedSlices, optimizer: int) -> list[UpdatePart]:
        """The parts of an update of rows. An optimizer's step counts on shards without rows of it, too."""
        if not self.shape:
            raise InvalidUpdateError(f"variable {self.name!r} is a scalar: it has no rows to update")
        self._check_slices(slices)
        ids = check_ids(slices.indices, self.shape[0], self.name)
        what = "values of the rows"
        values = converted(slices.values, self.dtype, self.name, what, overflow=bool(optimizer))
        rows = self._shaped(values, (*ids.shape, *self.shape[1:]), what, broadcast=not optimizer)
        check_kind(kind, self.dtype, self.name)
        rows, ids = rows.reshape(ids.size, *self.shape[1:]), ids.reshape(-1)
        if kind in _SUMMED and self.dtype.itemsize > 2:  # what the server would do; half types are summed there, wider
            width = math.prod(self.shape[1:])
            ids, sums = deduplicate(ids, rows.reshape(len(ids), width))
            rows = sums.reshape(len(ids), *self.shape[1:])
        nth = self._next_update()
        parts = []
        for index, (positions, local_ids) in self._shards_of_rows(ids):
            if not len(positions) and not optimizer:
                continue
            mine = view(np.ascontiguousarray(rows[row_index(positions, self.partition.block(index))]))
            item = self._item(kind, index, nth, optimizer, ps_pb2.Rows(ids=len(positions)), len(mine))
            parts.append(UpdatePart(self.owners[index], item, mine, np.ascontiguousarray(local_ids)))
        return parts

    def _batch_parts(self, slices: IndexedSlices) -> list[UpdatePart]:
        """The parts of a `batch_scatter_update`. Checked; nothing has been sent."""
        *batch, _ = np.shape(slices.indices)
        axis = len(batch)
        if axis >= self.ndim or tuple(batch) != self.shape[:axis]:
            raise InvalidUpdateError(
                f"variable {self.name!r} has shape {self.shape}, the indices {np.shape(slices.indices)}: "
                "all of their axes but the last must match the variable's leading axes"
            )
        ids = check_ids(slices.indices, self.shape[axis], self.name)
        values = converted(slices.values, self.dtype, self.name, "values of the rows")
        rows = self._shaped(values, (*ids.shape, *self.shape[axis + 1 :]), "values of the rows")
        rows = rows.reshape(ids.size, *self.shape[axis + 1 :])
        places = [place.reshape(-1) for place in (*np.indices(ids.shape)[:-1], ids)]
        nth = self._next_update()
        parts = []
        for shard, mine, flat in self._shards_of_places(places):
            columns: Any = (mine, *self.partition.block(shard).slices[axis + 1 :])
            piece = view(np.ascontiguousarray(rows[columns]))
            item = self._item(ps_pb2.ASSIGN, shard, nth, 0, ps_pb2.Rows(ids=len(mine), leading=axis + 1), len(piece))
            parts.append(UpdatePart(self.owners[shard], item, piece, flat))
        return parts

    def _shards_of_places(
        self, places: Sequence[npt.NDArray[np.int64]]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """The shards that have any of these places of the leading axes, with which ones and their row numbers there.

        Args:
            places: the indices along each of these axes, in arrays of one length.
        """
        axes = self.partition.ends[: len(places)]
        pieces = [np.searchsorted(ends, place, "right") for ends, place in zip(axes, places, strict=True)]
        cells = np.ravel_multi_index(pieces, [len(ends) for ends in axes])
        order = np.argsort(cells, kind="stable")
        stops = np.cumsum(np.bincount(cells, minlength=math.prod(map(len, axes))))
        across = self.num_shards // len(stops)  # shards that share a piece of these axes
        for cell, (start, stop) in enumerate(itertools.pairwise((0, *stops.tolist()))):
            if start == stop:
                continue
            mine = order[start:stop]
            for shard in range(cell * across, (cell + 1) * across):
                block = self.partition.block(shard)
                local = [place[mine] - first for place, first in zip(places, block.start, strict=False)]
                yield shard, mine, np.ravel_multi_index(local, block.shape[: len(places)]).astype(np.int64)

    def _shards_of_rows(self, ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, ShardRows]]:
        """Every shard with which of the ids, given flat, it has a part of the rows of."""
        pieces = split_rows(self.partition.of_rows, ids)
        across = self.num_shards // len(pieces)  # shards that share a piece of axis 0
        for number, rows in enumerate(pieces):
            for other in range(across):
                yield number * across + other, rows

    def checked_gradient(self, gradient: npt.ArrayLike | IndexedSlices) -> npt.ArrayLike | IndexedSlices:
        """A gradient as arrays that `gradient_parts` will take, in a floating type; a copy only where it has another.

        Raises:
            InvalidUpdateError: what `gradient_parts` says.
        """
        if not isinstance(gradient, IndexedSlices):
            return self._floats(gradient, "gradient", self.shape)
        self._check_slices(gradient)
        if not self.shape:
            raise InvalidUpdateError(f"variable {self.name!r} is a scalar: it has no rows to update")
        ids = check_ids(gradient.indices, self.shape[0], self.name)
        rows = self._floats(gradient.values, "values of the rows", (*ids.shape, *self.shape[1:]))
        return IndexedSlices(rows, ids)

    def _floats(self, value: npt.ArrayLike, what: str, shape: tuple[int, ...]) -> Array:
        array = as_array(value, self.name, what)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            array = converted(value, self.dtype, self.name, what, overflow=True)
        return self._shaped(array, shape, what, broadcast=False)

    def gradient_parts(self, gradient: npt.ArrayLike | IndexedSlices, optimizer: int) -> list[UpdatePart]:
        """The parts of an optimizer's update. Checked; nothing has been sent."""
        if self.dtype.kind != "f" and self.dtype.name != "bfloat16":
            raise InvalidUpdateError(f"variable {self.name!r} is {self.dtype.name}: only floats take gradients")
        self._check_writable()
        if isinstance(gradient, IndexedSlices):
            return self._sparse_parts(ps_pb2.APPLY_GRADIENT, gradient, optimizer)
        array = converted(gradient, self.dtype, self.name, "gradient", overflow=True)
        array = self._shaped(array, self.shape, "gradient", broadcast=False)
        return self._dense_parts(ps_pb2.APPLY_GRADIENT, array, optimizer)

    def _check_slices(self, slices: object) -> None:
        if not (hasattr(slices, "indices") and hasattr(slices, "values")):
            raise TypeError(
                f"variable {self.name!r}: an update of rows is an IndexedSlices(values, indices), not a "
                f"{type(slices).__name__}"
            )
        dense = getattr(slices, "dense_shape", None)
        if dense is not None and tuple(np.asarray(dense).reshape(-1).tolist()) != self.shape:
            raise InvalidUpdateError(
                f"variable {self.name!r} has shape {self.shape}, but the IndexedSlices has dense_shape {dense!r}"
            )

    def _check_writable(self) -> None:
        if self._slot is not None:
            raise MisuseError(f"{self.name!r} belongs to its optimizer: it can be read, but not assigned")

    def _item(
        self, kind: ps_pb2.UpdateKind, shard: int, nth: int, optimizer: int, rows: ps_pb2.Rows, size: int
    ) -> ps_pb2.UpdateItem:
        return ps_pb2.UpdateItem(
            variable=self._id, shard=shard, kind=kind, rows=rows, optimizer=optimizer, nth=nth, value_bytes=size
        )

    def _next_update(self) -> int:
        function = current_function()
        return function.nth_update(self._id) if function is not None and function.function else 1

    def _shaped(self, array: Array, shape: tuple[int, ...], what: str, broadcast: bool = True) -> Array:
        """`array`, broadcast to that shape where allowed. InvalidUpdateError if it does not fit."""
        if array.shape == shape:
            return array
        try:
            if broadcast:
                return np.broadcast_to(array, shape)
        except ValueError:
            pass
        raise InvalidUpdateError(
            f"variable {self.name!r}: the {what} has shape {array.shape}, but must have shape {shape}"
        )


class ShardedVariable(Variable):
    """A variable that is cut into several shards. `Variable(...)` makes one where the partitioner says so.

    `ShardedVariable([a, b])` takes variables that there are for the shards of one, one behind the other along axis 0.
    They stay what they are: their values are those of its rows, in checkpoints each stands for itself, and an optimizer
    keeps its slots beside each of them.

    Args:
        variables: of one type, and of one shape but for the first axis.
        name: for people; it need not be unique.

    Raises:
        TypeError: no list, an empty one, or something in it is no variable.
        ValueError: they differ in type or in the shape behind axis 0, or one is a scalar, cut, or given twice.
        MisuseError: they are of several strategies.
    """

    def __new__(cls, variables: Sequence[Variable], name: str = "ShardedVariable") -> JoinedVariable:
        """The variables, joined."""
        return JoinedVariable.of_members(variables, name)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.variables)


class JoinedVariable(ShardedVariable):
    """Several variables in the place of the shards of one. Of its updates each counts those that concern it."""

    handle_kind = "joined"
    _members: tuple[Variable, ...]

    @staticmethod
    def of_members(variables: Sequence[Variable], name: str) -> JoinedVariable:
        """See `ShardedVariable`."""
        members = _checked_members(variables)
        first = members[0]
        stops = tuple(itertools.accumulate(member.shape[0] for member in members))
        handle: JoinedVariable = object.__new__(JoinedVariable)
        handle.name, handle.dtype, handle._client, handle._slot = str(name), first.dtype, first._client, None
        handle.shape = (stops[-1], *first.shape[1:])
        handle.trainable = all(member.trainable for member in members)
        handle.partition = Partition(handle.shape, (stops, *((length,) for length in first.shape[1:])))
        handle.owners = tuple(member.owners[0] for member in members)
        handle._id, handle._members = 0, members  # the servers know the members only
        return handle

    @staticmethod
    def of_key(key: str, variable: Callable[[str], Variable]) -> JoinedVariable:
        """The handle of this key. ProtocolError if it is none; `variable` is called for each member, by name."""
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            match json.loads(key):
                case [str() as name, list(names)] if all(isinstance(each, str) for each in names):
                    return JoinedVariable.of_members([variable(each) for each in names], name)
        raise ProtocolError(f"{key[:80]!r} is not the key of joined variables")

    @property
    def handle_key(self) -> str:
        """Its name, and its members' names."""
        return self.key_with("")

    def key_with(self, prefix: str) -> str:
        """The key of one like it, of variables whose names have this before them."""
        return json.dumps([self.name, [prefix + name for name in self.member_names]])

    @property
    def member_names(self) -> list[str]:
        """Those of the variables that it is made of."""
        return [member.name for member in self._members]

    @property
    def variables(self) -> list[Variable]:  # type: ignore[override]  # TensorFlow's too are those that were given
        """The variables that it is made of."""
        return VariableList(self._members)

    def __iter__(self) -> Iterator[Variable]:  # type: ignore[override]  # as above
        return iter(self._members)

    def _read_item(self, shard: int, rows: ps_pb2.Rows = _ALL) -> ps_pb2.ReadItem:
        return self._members[shard]._read_item(0, rows)

    def _item(
        self, kind: ps_pb2.UpdateKind, shard: int, nth: int, optimizer: int, rows: ps_pb2.Rows, size: int
    ) -> ps_pb2.UpdateItem:
        del nth
        member = self._members[shard]
        return member._item(kind, 0, member._next_update(), optimizer, rows, size)

    def _next_update(self) -> int:
        return 0  # see `_item`


def _checked_members(variables: object) -> tuple[Variable, ...]:
    if not isinstance(variables, Sequence) or isinstance(variables, str | bytes) or not variables:
        raise TypeError(
            f"a ShardedVariable takes a list of variables, not {variables!r:.80}: to partition a single variable, "
            "give Variable a partitioner"
        )
    for number, each in enumerate(variables):
        if isinstance(each, Shard):
            raise ValueError(f"variables[{number}] is {each.name!r}, a shard of a variable: give whole variables")
        if not isinstance(each, Variable) or isinstance(each, SlotVariable):
            raise TypeError(f"variables[{number}] is {describe(each)}, not a variable: make one with Variable(...)")
        if each.num_shards > 1 or isinstance(each, JoinedVariable):
            raise ValueError(f"variables[{number}], {each.name!r}, is itself partitioned: give variables that are not")
        if not each.shape:
            raise ValueError(f"variables[{number}], {each.name!r}, is a scalar: it has no axis to join along")
    first, names = variables[0], [each.name for each in variables]
    for number, each in enumerate(variables):
        if each.dtype != first.dtype:
            raise ValueError(f"variables[{number}] is {each.dtype.name}, and the first one {first.dtype.name}")
        if each.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"variables[{number}] has shape {each.shape}, and the first one {first.shape}: they may differ in the "
                "first axis only"
            )
        if each.name in names[:number]:
            raise ValueError(f"variables[{number}], {each.name!r}, is given twice")
    _one_client(variables)
    return tuple(variables)


class SlotVariable(Variable):
    """What an optimizer keeps beside a variable, to be read like one."""

    handle_kind = "slot"

    @staticmethod
    def beside(variable: Variable, optimizer: int, optimizer_name: str, slot: str) -> SlotVariable:
        """The slot of that name, of the variable's shape and cut."""
        handle: SlotVariable = object.__new__(SlotVariable)
        handle.__dict__.update(variable.__dict__)
        handle.name = f"{variable.name}/{optimizer_name}/{slot}"
        handle.dtype = compute_dtype(variable.dtype)
        handle.trainable = False
        handle._slot = (optimizer, slot)
        handle._key = json.dumps([variable.name, optimizer_name, slot])
        return handle

    _key: str

    @property
    def handle_key(self) -> str:
        """The variable, the optimizer and the slot, by name."""
        return self._key


def _is_same(one: Variable | Shard, other: object) -> bool:
    """Are they the same variable, or the same shard of one?"""
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.variable is other.variable and one.index == other.index
    return one is other


_NOT_NESTED = (Set, Iterator, KeysView, ValuesView, ItemsView, deque)  # whoever passes one expects to get it read


_WHOLE = {Variable, ShardedVariable}  # not their slots, nor single shards


def read_variables(variables: Sequence[Variable | Shard]) -> list[Array]:
    """The values of several variables of one strategy: one request a server, all servers at once."""
    if not variables:
        return []
    client = _one_client([each.variable if isinstance(each, Shard) else each for each in variables])
    if set(map(type, variables)) <= _WHOLE:
        whole = cast(Sequence[Variable], variables)
        values = client.read_planned([each._id for each in whole], lambda: [each._whole() for each in whole])
        if values is not None:
            return values
    results: list[Array] = []
    parts: list[ReadPart] = []
    for each in variables:
        result = np.empty(each.shape, each.dtype)
        results.append(result)
        if isinstance(each, Shard):
            parts.append(each.variable._read_part(each.index, result, ...))
            continue
        for index, block in enumerate(each.partition.blocks):
            parts.append(each._read_part(index, result, whole_index(block)))
    client.read(parts)
    return results


def gather_rows(lookups: Sequence[tuple[Variable, npt.ArrayLike]]) -> list[Array]:
    """Rows by id of several variables at once: see `Variable.sparse_read`."""
    results: list[Array] = []
    parts: list[ReadPart] = []
    for variable, indices in lookups:
        if not variable.shape:
            raise InvalidUpdateError(f"variable {variable.name!r} is a scalar: it has no rows to read")
        ids = check_ids(indices, variable.shape[0], variable.name)
        result = np.empty((ids.size, *variable.shape[1:]), variable.dtype)
        results.append(result.reshape((*ids.shape, *variable.shape[1:])))
        for shard, (positions, local_ids) in variable._shards_of_rows(ids.reshape(-1)):
            if not len(positions):
                continue
            block = variable.partition.block(shard)
            everything = len(positions) == ids.size and block.shape[1:] == variable.shape[1:]  # in order, then
            place = ... if everything else row_index(positions, block)
            parts.append(variable._read_part(shard, result, place, ps_pb2.Rows(ids=len(positions)), local_ids))
    if lookups:
        _one_client([variable for variable, _ in lookups]).read(parts)
    return results


def read_structure(structure: Any) -> Any:
    """Any nesting of variables, with their values in their places: one request a server."""
    if type(structure) is list and all(issubclass(kind, Variable) for kind in set(map(type, structure))):
        return read_variables(structure)  # the common case
    found: dict[int, Variable | Shard] = {}

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Variable | Shard):
            found[id(leaf)] = leaf
        elif isinstance(leaf, _NOT_NESTED):
            raise TypeError(
                f"variables are read from lists, tuples, dicts, named tuples and dataclasses, not from a "
                f"{type(leaf).__name__}: make a list of it"
            )
        return leaf

    map_structure(collect, structure, (Shard,))
    values = dict(zip(found, read_variables(list(found.values())), strict=True))
    return map_structure(lambda leaf: values.get(id(leaf), leaf), structure, (Shard,))


def _one_client(variables: Sequence[Variable]) -> PsClient:
    client = variables[0]._client
    for variable in variables:
        if variable._client is not client:
            raise MisuseError(
                f"variables {variables[0].name!r} and {variable.name!r} belong to different strategies: "
                "read them one by one"
            )
    return client


def advanced_index(index: Any, name: str) -> Array | tuple[Any, ...] | None:
    """An index with arrays in it: the array, or the tuple that holds several things. None for a basic index."""
    if isinstance(index, list | range) or (isinstance(index, np.ndarray) and index.ndim):
        array = as_array(index, name, "index")
        return array.astype(np.int64) if not array.size and not isinstance(index, np.ndarray) else array
    if isinstance(index, tuple) and any(
        isinstance(item, list | tuple | range) or (isinstance(item, np.ndarray) and item.ndim) for item in index
    ):
        return index
    return None


def wrapped_ids(ids: Array, shape: tuple[int, ...], name: str) -> Array:
    """Row numbers with negative ones counted from the end, as in NumPy's indexing. IndexError if out of range."""
    if ids.dtype.kind not in "iu":
        raise IndexError(f"variable {name!r}: arrays used as indices must be of integers or booleans, not {ids.dtype}")
    rows = shape[0] if shape else 0
    if ids.size and (ids.min() < -rows or ids.max() >= rows):
        wrong = ids[(ids < -rows) | (ids >= rows)].reshape(-1)[0]
        raise IndexError(f"variable {name!r}: index {wrong} is out of range for axis 0 with {rows} rows")
    if ids.dtype.kind == "u":
        return ids
    ids = ids.astype(np.int64, copy=False)  # in a narrow type the sum may not fit
    wrapped: Array = np.where(ids < 0, ids + rows, ids)
    return wrapped


def _put(out: Array, place: Any, shape: tuple[int, ...], data: memoryview) -> None:
    """`out[place] = data`. Whole rows are moved as items, twice as fast as element by element."""
    row = math.prod(shape[1:]) * out.itemsize
    if row and isinstance(place[0], np.ndarray) and row * len(out) == out.nbytes:
        rows: Array = np.ndarray((len(out),), np.dtype((np.void, row)), view(out))
        rows[place[0]] = np.ndarray((shape[0],), rows.dtype, data)
    else:
        out[place] = np.ndarray(shape, out.dtype, data)


def whole_index(block: Block) -> Any:
    """The index of a block in the whole; with the ellipsis a scalar's is a view, too."""
    return (*block.slices, ...)


def row_index(positions: npt.NDArray[np.int64], block: Block) -> Any:
    """The index of a block's columns in an array of rows, at these rows, which rise.

    A slice where they follow each other, as those of sorted ids do: what it selects is not copied.
    """
    first, last = (int(positions[0]), int(positions[-1])) if len(positions) else (0, -1)
    rows = slice(first, last + 1) if last - first == len(positions) - 1 else positions
    return (rows, *block.slices[1:])


def _slices_of(axes: Sequence[AxisSlice]) -> ps_pb2.Slices:
    return ps_pb2.Slices(axes=[ps_pb2.AxisSlice(start=a.start, step=a.step, count=a.count) for a in axes])
