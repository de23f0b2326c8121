"""Variables as users hold them: handles that read and update shards on the parameter servers.

The same class serves in the coordinator's script and inside a step function, where updates are keyed by the function
and applied once, however often it is retried. `shard_requests` refuses wrong arguments before anything is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, Set, ValuesView
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.geometry import Block, Partition
from pscluster.core.handles import Handle
from pscluster.core.notebook import html_table
from pscluster.core.row_orders import RANGE
from pscluster.core.values import describe, map_structure
from pscluster.ps.array_pool import aligned_empty
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.cuts import Cut, SharedCut, origin_of
from pscluster.ps.client.overlap import fetched_rows
from pscluster.ps.client.read_plans import ShardRead
from pscluster.ps.client.shard_update import ShardUpdate
from pscluster.ps.handles.indexing import Array, Ids, IndexedSlices, advanced_index, gradient_of, wrapped_ids
from pscluster.ps.handles.keys import variable_key
from pscluster.ps.handles.operators import Arithmetic
from pscluster.ps.handles.row_requests import distinct_reads, row_updates
from pscluster.ps.handles.scope import Partitioner, VariableRequest, current_creator
from pscluster.ps.handles.shard_requests import ALL, ShardRequests
from pscluster.ps.optim.kernels import compute_dtype
from pscluster.v1 import ps_pb2

_V = TypeVar("_V", "Variable", "Shard")
SHARD_HEADER = ("shard", "shape", "place", "bytes")
WireDtype = Literal["float32", "bfloat16", "float16", "int8"]


class VariableList(list[_V]):
    """A list of variables or shards. `in`, `index` and the like compare identity; `==` would compare values."""

    def __contains__(self, wanted: object) -> bool:
        return any(_is_same(item, wanted) for item in self)

    def index(self, wanted: object, start: Any = 0, stop: Any = None, /) -> int:
        for position in range(*slice(start, stop).indices(len(self))):
            if _is_same(self[position], wanted):
                return position
        raise ValueError(f"{wanted!r} is not in the list")

    def count(self, wanted: object, /) -> int:
        return sum(_is_same(item, wanted) for item in self)

    def remove(self, wanted: object, /) -> None:
        del self[self.index(wanted)]


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Arithmetic):
    """One shard of a variable: shows where things live."""

    variable: Variable
    index: int

    @property
    def name(self) -> str:
        """Such as `w/part_1`; the variable's name if it is not cut."""
        whole = self.variable.num_shards == 1
        return self.variable.name if whole else f"{self.variable.name}/part_{self.index}"

    @property
    def block(self) -> Block:
        """Where it lies in the whole: on axis 0 in numbers of rows or, if they are cut in another order, of places."""
        return self.variable.partition.block(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.variable.dtype

    @property
    def owners(self) -> tuple[int, ...]:
        """The server that holds it, in the form that a variable has."""
        return (self.variable.owners[self.index],)

    @property
    def row_ids(self) -> npt.NDArray[np.int64]:
        """The numbers of its rows in the variable, in the order that they have here. ValueError for a scalar."""
        if not self.shape:
            raise ValueError(f"variable {self.variable.name!r} is a scalar: it has no rows")
        return self.variable.partition.row_ids(self.index)

    def read_value(self) -> Array:
        return read_variables([self])[0]

    def assign(self, value: npt.ArrayLike) -> None:
        if self.variable.partition.order == RANGE:
            self.variable.assign(value, at=self.block.slices or ...)
        else:
            with self.variable.client.gate:
                self.variable.client.update(self.variable.shard_assignment(self.index, value))


class Variable(ShardRequests, Arithmetic, Handle):
    """An array that lives on the parameter servers.

    Args:
        initial_value: an array, a scalar, or a function of `(shape, dtype)` that returns one.
        name: unique in the strategy; generated if not given.
        dtype: of the elements; default: the initial value's (float64 becomes float32 for Python floats only).
        shape: required if `initial_value` is a function.
        trainable: for the caller; pscluster itself ignores it.
        partitioner: how to cut it, instead of the strategy's; see `partitioners`.
        consistency: "sync": what all replicas of a `SynchronousStrategy` update in a step is applied together, at its
            end. "async": each update is applied at once, as by functions that run alone. For embedding tables beside
            dense parameters in step.
        wire_dtype: "bfloat16", "float16" or "int8": in what type functions read a variable of float32, and in what type
            its gradients are pushed. What that loses of a gradient is added to the next one. Servers keep float32, and
            all else is exact: assignments, checkpoints, reads outside of functions. Default, or "float32": all is.
        push_top_k: of a dense gradient push only this share of the elements, above 0 and at most 1: those with the
            largest absolute values. Optimizers see a dense gradient that is 0 elsewhere; what was not pushed is added
            to the next gradient. Also with `wire_dtype`, and for float32 only.

    Raises:
        MisuseError: outside of `strategy.scope()`, the name is taken, or the arguments describe no variable.
        InvalidUpdateError: the initial value does not fit the dtype without loss, or could not be made.
        ConfigurationError: the partitioner or the placement policy gave an invalid answer.
            Whatever is raised, nothing has been created.

    Examples:
        >>> with strategy.scope():
        ...     w = Variable(np.zeros((64, 10), np.float32), name="w")
        >>> w.assign_add(np.ones((64, 10))).shape
        (64, 10)
        >>> w[0, :3]
        array([1., 1., 1.], dtype=float32)
    """

    handle_kind = "variable"
    trainable: bool
    origin: int
    """The number that it was created under, by which handles name it: it stays when it is cut otherwise."""
    joined = False
    """Whether it is, in this process, a shard of several variables that were joined."""
    _table_type: ClassVar[type[Variable]]  # of tables: `table`, which builds on this module, sets it

    def __new__(
        cls,
        initial_value: object = None,
        *,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] | None = None,
        trainable: bool = True,
        partitioner: Partitioner | None = None,
        consistency: Literal["sync", "async"] = "sync",
        wire_dtype: WireDtype | None = None,
        push_top_k: float | None = None,
    ) -> Variable:
        creator = current_creator(f"Variable {name!r}" if name else "a Variable")
        request = VariableRequest(
            initial_value, name, dtype, shape, trainable, partitioner, consistency, wire_dtype, push_top_k
        )
        return creator.create_variable(request)

    @staticmethod
    def of(spec: ps_pb2.VariableSpec, client: PsClient) -> Variable:
        """Return the handle of an existing variable."""
        client.placements.learn([spec])
        cut = client.placements.cut_of(spec)
        partition = cut.now.partition
        kind = ShardedVariable if partition.num_shards > 1 else Variable
        handle: Variable = object.__new__(Variable._table_type if spec.HasField("table") else kind)
        handle.name = spec.name
        handle.shape = partition.shape
        handle.dtype = dtype_named(spec.dtype)
        handle.trainable = spec.trainable
        handle.asynchronous = spec.asynchronous
        handle._cut, handle.origin = cut, origin_of(spec)
        if spec.wire_dtype or spec.push_top_k:
            handle.wire_dtype, handle.push_top_k = spec.wire_dtype, spec.push_top_k
        handle.ephemeral = spec.evaluation > 0
        handle.client = client
        handle._slot = None
        handle._described(spec)
        cut.follow(handle)
        return handle

    def cut_changed(self) -> None:
        """Go on as what its shards make of it; for internal use."""
        if type(self) in _WHOLE:
            self.__class__ = ShardedVariable if self.num_shards > 1 else Variable

    def _described(self, spec: ps_pb2.VariableSpec) -> None:
        """Take what the spec of a subclass says besides."""

    @property
    def handle_key(self) -> str:
        return variable_key(self.origin, self.name)

    def key_with(self, prefix: str) -> str:
        """Return the key of its counterpart, whose name has this prefix."""
        return variable_key(0, prefix + self.name)

    # What it is

    @property
    def member_names(self) -> list[str]:
        """The names of the variables that the servers have for it: its own, unless it is joined."""
        return [self.name]

    @property
    def num_shards(self) -> int:
        return self.partition.num_shards

    @property
    def variables(self) -> list[Shard]:
        """The shards, each with its `device`."""
        return VariableList(Shard(self, index) for index in range(self.num_shards))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        devices = ", ".join(sorted({shard.device for shard in self.variables}))
        return f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name} on {devices}>"

    def _repr_html_(self) -> str:
        """Return a table of its shards for a notebook. Reads nothing: it may be large, or a server away."""
        rows = [(shard.name, shard.shape, shard.device, f"{shard.nbytes:,}") for shard in self.variables]
        return html_table(f"{type(self).__name__} {self.name}: {self.dtype.name} {self.shape}", SHARD_HEADER, rows)

    def __iter__(self) -> Iterator[Any]:
        len(self)  # refuses scalars
        return iter(self.read_value())

    def __reversed__(self) -> Iterator[Any]:
        len(self)  # as above
        return iter(self.read_value()[::-1])

    def __contains__(self, element: object) -> bool:
        return element in self.read_value()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar: it has no length and can't be iterated over")
        return self.shape[0]

    # Reading

    def read_value(self) -> Array:
        """Read the whole value: one request per server, all at once. Each shard is consistent, as of one moment.

        Returns:
            An array of the variable's shape and dtype, which is yours to change.

        Raises:
            PSUnavailableError: a server is unreachable.
        """
        return read_variables([self])[0]

    value = read_value

    def __getitem__(self, index: Any) -> Any:
        """Return what NumPy's indexing gives, transferring only the elements selected.

        Takes integers, slices of any step, `...`, `np.newaxis`, boolean masks of leading axes, and integer arrays on
        axis 0. Other mixtures of arrays read the whole variable.
        """
        advanced = advanced_index(index, self.name)
        if advanced is None:
            return self._read_box(index)
        if isinstance(advanced, np.ndarray) and advanced.dtype == bool:
            return self._read_mask(advanced)
        if isinstance(advanced, np.ndarray):
            return gather_rows([(self, wrapped_ids(advanced, self.shape, self.name))])[0]
        return self.read_value()[index]

    def __setitem__(self, index: Any, value: npt.ArrayLike) -> None:
        self.assign(value, at=index if isinstance(index, tuple) else (index,))  # `None` is an axis here, not all

    def _read_box(self, index: Any) -> Any:
        with self.client.gate:
            selection = self._selection(index)
            out = np.empty(selection.counts, self.dtype)
            self.client.read(self._box_reads(selection, out))
        return out.reshape(selection.result_shape)[()]

    def box_reads(self, index: Any, out: Array) -> list[ShardRead]:
        """Return the reads of a box into an array of its shape; for internal use."""
        return self._box_reads(self._selection(index), out)

    def _read_mask(self, mask: npt.NDArray[np.bool_]) -> Array:
        if mask.shape != self.shape[: mask.ndim]:
            raise IndexError(f"variable {self.name!r} has shape {self.shape}, but the mask has shape {mask.shape}")
        points = np.nonzero(mask)
        out = np.empty((len(points[0]), *self.shape[mask.ndim :]), self.dtype)
        with self.client.gate:
            self.client.read(self._mask_reads(points, out))
        return out

    def sparse_read(self, indices: npt.ArrayLike, name: str | None = None) -> Array:
        """Read the rows of these ids, in the order of the ids, duplicates included.

        Args:
            indices: integers of any shape, each in 0..rows - 1.
            name: ignored; TensorFlow has it.

        Returns:
            An array of shape `indices.shape + self.shape[1:]`.

        Raises:
            InvalidUpdateError: an id is not a row of the variable (the message names it), or ids are not integers.

        Examples:
            >>> with strategy.scope():
            ...     squares = Variable(np.arange(5) ** 2, name="squares")
            >>> squares.sparse_read([[4, 0], [1, 4]])
            array([[16,  0],
                   [ 1, 16]])
        """
        del name
        return gather_rows([(self, indices)])[0]

    def gather(self, indices: npt.ArrayLike) -> Array:
        """Read the rows of these ids; see `sparse_read`.

        Args:
            indices: integers of any shape, each in 0..rows - 1.
        """
        return self.sparse_read(indices)

    # Updating

    def assign(self, value: npt.ArrayLike, *, at: Any = None) -> Self:
        """Replace the value, or with `at` the box `v[at]`, by one that NumPy broadcasts to its shape.

        `at` consists of integers, slices and `...`.

        Args:
            value: numbers that NumPy broadcasts to the shape of the variable or box, and that fit its dtype.
            at: a box: an integer, a slice, `...`, or a tuple of these. Default: the whole variable.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: the value does not fit; nothing was changed on any shard.
            PSUnavailableError: a server is unreachable.
        """
        return self._update(ps_pb2.ASSIGN, value, at)

    def assign_add(self, delta: npt.ArrayLike, *, at: Any = None) -> Self:
        """Add to the value, or to a box of it, on the servers.

        Args:
            delta: what is added; as the value of `assign`.
            at: a box, as for `assign`.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: the delta does not fit; nothing was changed on any shard.
            PSUnavailableError: a server is unreachable.
        """
        return self._update(ps_pb2.ADD, delta, at)

    def assign_sub(self, delta: npt.ArrayLike, *, at: Any = None) -> Self:
        """Subtract from the value, or from a box of it, on the servers.

        Args:
            delta: what is subtracted; as the value of `assign`.
            at: a box, as for `assign`.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: the delta does not fit; nothing was changed on any shard.
            PSUnavailableError: a server is unreachable.
        """
        return self._update(ps_pb2.SUB, delta, at)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows. Of duplicate ids, the last one counts.

        Args:
            sparse_delta: `IndexedSlices` of rows and their ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.ASSIGN, sparse_delta, use_locking, name)

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Add to rows; duplicate ids add up.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.

        Examples:
            >>> with strategy.scope():
            ...     table = Variable(np.zeros((5, 2)), name="rows")
            >>> table.scatter_add(IndexedSlices(np.ones((3, 2)), [4, 0, 4])).numpy()[:, 0]
            array([1., 0., 0., 0., 2.])
        """
        return self._scatter(ps_pb2.ADD, sparse_delta, use_locking, name)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Subtract from rows; duplicate ids add up.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.SUB, sparse_delta, use_locking, name)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Multiply rows; duplicate ids multiply.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.MUL, sparse_delta, use_locking, name)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Divide rows; duplicate ids divide again.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.DIV, sparse_delta, use_locking, name)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows by the minimum of row and value.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.MIN, sparse_delta, use_locking, name)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows by the maximum of row and value.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.MAX, sparse_delta, use_locking, name)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Replace rows batch by batch: `v[i, ..., indices[i, ..., j]] = values[i, ..., j]`.

        Of duplicate ids, the last one counts. With one-dimensional indices, this is `scatter_update`.
        """
        self._check_slices(sparse_delta)
        if np.ndim(sparse_delta.indices) < 2:
            return self.scatter_update(sparse_delta, use_locking, name)
        with self.client.gate:
            self.client.update(self._batch_updates(sparse_delta))
        return self

    def _update(self, kind: ps_pb2.UpdateKind, value: npt.ArrayLike, at: Any) -> Self:
        with self.client.gate:
            self.client.update(self.shard_updates(kind, value, at))
        return self

    def _scatter(self, kind: ps_pb2.UpdateKind, slices: IndexedSlices, *_unused: object) -> Self:
        """Update rows. `_unused` are TensorFlow's other arguments, which have no effect here."""
        with self.client.gate:
            self.client.update(row_updates(kind, [(gradient_of(slices), self)])[0])
        return self


class ShardedVariable(Variable):
    """A variable that is cut into several shards. `Variable(...)` makes one if the partitioner cuts it.

    `ShardedVariable([a, b])` joins existing variables along axis 0, as the shards of one. They remain variables: their
    values are its rows, checkpoints have each on its own, and an optimizer keeps slots beside each of them.

    Args:
        variables: of one type, and of one shape except for the first axis.
        name: for people; it need not be unique.

    Raises:
        TypeError: not a list, an empty one, or an element is not a variable.
        ValueError: they differ in type or in shape after axis 0, or one is a scalar, cut, or given twice.
        MisuseError: they belong to several strategies.
    """

    def __new__(cls, variables: Sequence[Variable], name: str = "ShardedVariable") -> JoinedVariable:
        return JoinedVariable.of_members(variables, name)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.variables)


class JoinedVariable(ShardedVariable):
    """Several variables as the shards of one. Each numbers the updates that concern it."""

    handle_kind = "joined"
    _members: tuple[Variable, ...]

    @staticmethod
    def of_members(variables: Sequence[Variable], name: str) -> JoinedVariable:
        members = _checked_members(variables)
        first = members[0]
        stops = tuple(itertools.accumulate(member.shape[0] for member in members))
        handle: JoinedVariable = object.__new__(JoinedVariable)
        handle.name, handle.dtype, handle.client, handle._slot = str(name), first.dtype, first.client, None
        handle.shape = (stops[-1], *first.shape[1:])
        handle.trainable = all(member.trainable for member in members)
        handle.ephemeral = first.ephemeral
        partition = Partition(handle.shape, (stops, *((length,) for length in first.shape[1:])))
        handle._cut, handle.origin, handle._members = SharedCut(Cut(0, partition, ())), 0, members  # unknown to servers
        for member in members:
            member.joined = True
        return handle

    @staticmethod
    def of_key(key: str, variable: Callable[[str], Variable]) -> JoinedVariable:
        """Return the handle of a key, its members by calling `variable` with theirs; or raise ProtocolError."""
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            match json.loads(key):
                case [str() as name, list(members)] if all(isinstance(member, str) for member in members):
                    return JoinedVariable.of_members([variable(member) for member in members], name)
        raise ProtocolError(f"{key[:80]!r} is not the key of joined variables")

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(member.owners[0] for member in self._members)

    @property
    def handle_key(self) -> str:
        return json.dumps([self.name, [member.handle_key for member in self._members]])

    def key_with(self, prefix: str) -> str:
        return json.dumps([self.name, [member.key_with(prefix) for member in self._members]])

    @property
    def member_names(self) -> list[str]:
        return [member.name for member in self._members]

    @property
    def variables(self) -> list[Variable]:  # type: ignore[override]  # as in TensorFlow
        return VariableList(self._members)

    def __iter__(self) -> Iterator[Variable]:  # type: ignore[override]  # as above
        return iter(self._members)

    def _read_item(self, shard: int, rows: ps_pb2.Rows = ALL) -> ps_pb2.ReadItem:
        return self._members[shard]._read_item(0, rows)

    def _shard_update(self, kind: ps_pb2.UpdateKind, shard: int, nth: int, *args: Any, **kwargs: Any) -> ShardUpdate:
        del nth
        member = self._members[shard]
        return member._shard_update(kind, 0, member.next_update(), *args, **kwargs)

    def next_update(self) -> int:
        return 0  # see `_shard_update`


def _checked_members(variables: object) -> tuple[Variable, ...]:
    if not isinstance(variables, Sequence) or isinstance(variables, str | bytes) or not variables:
        raise TypeError(
            f"a ShardedVariable takes a list of variables, not {variables!r:.80}: to partition a single variable, "
            "give Variable a partitioner"
        )
    for index, member in enumerate(variables):
        if isinstance(member, Shard):
            raise ValueError(f"variables[{index}] is {member.name!r}, a shard of a variable: give whole variables")
        if not isinstance(member, Variable) or isinstance(member, SlotVariable | Variable._table_type):
            raise TypeError(f"variables[{index}] is {describe(member)}, not a variable: make one with Variable(...)")
        if member.num_shards > 1 or isinstance(member, JoinedVariable):
            raise ValueError(f"variables[{index}], {member.name!r}, is itself partitioned: give variables that are not")
        if not member.shape:
            raise ValueError(f"variables[{index}], {member.name!r}, is a scalar: it has no axis to join along")
    first, names = variables[0], [member.name for member in variables]
    for index, member in enumerate(variables):
        if member.dtype != first.dtype:
            raise ValueError(f"variables[{index}] is {member.dtype.name}, and the first one {first.dtype.name}")
        if member.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"variables[{index}] has shape {member.shape}, and the first one {first.shape}: they may differ in the "
                "first axis only"
            )
        if member.name in names[:index]:
            raise ValueError(f"variables[{index}], {member.name!r}, is given twice")
    _one_client(variables)
    return tuple(variables)


class SlotVariable(Variable):
    """An array that an optimizer keeps beside a variable; it can be read like one."""

    handle_kind = "slot"

    @staticmethod
    def beside(variable: Variable, optimizer: int, optimizer_name: str, slot: str) -> SlotVariable:
        """Return the slot of that name, with the variable's shape and shards."""
        handle: SlotVariable = object.__new__(SlotVariable)
        handle.__dict__.update(variable.__dict__)
        handle.name = f"{variable.name}/{optimizer_name}/{slot}"
        handle.dtype = compute_dtype(variable.dtype)
        handle.trainable = False
        handle.wire_dtype = handle.push_top_k = 0
        handle._slot = (optimizer, slot)
        handle.variable, handle.optimizer_name = variable, optimizer_name
        handle._key = json.dumps([variable.handle_key, optimizer_name, slot])
        return handle

    variable: Variable
    optimizer_name: str
    _key: str

    @property
    def handle_key(self) -> str:
        return self._key

    def key_with(self, prefix: str) -> str:
        _, optimizer_name, slot = json.loads(self._key)
        return json.dumps([self.variable.key_with(prefix), optimizer_name, slot])


def _is_same(one: Variable | Shard, other: object) -> bool:
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.variable is other.variable and one.index == other.index
    return one is other


_NOT_NESTED = (Set, Iterator, KeysView, ValuesView, ItemsView, deque)  # callers would expect these to be read
_WHOLE = {Variable, ShardedVariable}  # neither slots nor single shards


def read_variables(variables: Sequence[Variable | Shard]) -> list[Array]:
    """Read several variables of one strategy: one request per server, all servers at once."""
    if not variables:
        return []
    client = _one_client([item.variable if isinstance(item, Shard) else item for item in variables])
    with client.gate:
        return _read_variables(client, variables)


def _read_variables(client: PsClient, variables: Sequence[Variable | Shard]) -> list[Array]:
    known: Sequence[Array | None] = [None] * len(variables)
    if are_whole := set(map(type, variables)) <= _WHOLE:
        whole = cast(Sequence[Variable], variables)
        fetched = fetched_rows()
        if fetched is not None and (values := fetched.take_whole([item.id for item in whole])) is not None:
            client.exchanges.begin()  # the function may have been told to stop
            return cast(list[Array], values)
        known = client.read_planned([item.id for item in whole], lambda: [item._whole() for item in whole])
    results: list[Array] = []
    reads: list[ShardRead] = []
    for item, values in zip(variables, known, strict=True):
        result = aligned_empty(item.shape, item.dtype) if values is None else values
        results.append(result)
        if values is not None:
            continue
        if isinstance(item, Shard):
            reads.append(item.variable._shard_read(item.index, result, ...))
        else:
            reads += item._whole_reads(result)
    if reads:
        client.read(reads, whole=are_whole)
    return results


def takes_whole_reads(variable: Variable) -> bool:
    """Return whether a variable is one that can be read whole for a step, before it runs."""
    return type(variable) in _WHOLE


def rows_and_variables(
    lookups: Sequence[tuple[Variable, Ids]], variables: Sequence[Variable]
) -> tuple[list[Array], list[Array]]:
    """Read rows by flat ids, from `row_ids`, each distinct one once, and whole variables, each given once.

    One request per server; but what was fetched for this step is not read again, and a synchronous step has two.
    """
    function, fetched = current_function(), fetched_rows()
    if fetched is not None or (function is not None and function.steps is not None):
        ahead = [item for item in variables if fetched is not None and fetched.has_whole(item.id)]
        there = {item.id: value for item, value in zip(ahead, read_variables(ahead), strict=True)}
        others = iter(read_variables([item for item in variables if item.id not in there]))
        values = [there[item.id] if item.id in there else next(others) for item in variables]
        return distinct_rows(lookups), values
    reads, rows = distinct_reads(lookups)
    if not (of := [*(table for table, _ in lookups), *variables]):
        return [], []
    client = _one_client(of)
    found = client.read_both(reads, [item.id for item in variables], lambda: [item._whole() for item in variables])
    large = iter(read_variables([item for item, value in zip(variables, found, strict=True) if value is None]))
    return rows(), [next(large) if value is None else value for value in found]


def gather_rows(lookups: Sequence[tuple[Variable, npt.ArrayLike]]) -> list[Array]:
    """Read rows by id from several variables at once; see `Variable.sparse_read`."""
    if not lookups:
        return []
    with _one_client([variable for variable, _ in lookups]).gate:
        return _gather_rows(lookups)


def _gather_rows(lookups: Sequence[tuple[Variable, npt.ArrayLike]]) -> list[Array]:
    results: list[Array] = []
    reads: list[ShardRead] = []
    fetched = fetched_rows()
    for variable, indices in lookups:
        ids = variable.row_ids(indices)
        known = None if fetched is None else fetched.take(variable, ids.reshape(-1))
        result = np.empty((ids.size, *variable.shape[1:]), variable.dtype) if known is None else known
        results.append(result.reshape((*ids.shape, *variable.shape[1:])))
        if known is None:
            reads += variable._row_reads(ids.reshape(-1), result)
    _read_rows(lookups[0][0].client, reads, all_known=not reads and fetched is not None)
    return results


def distinct_rows(lookups: Sequence[tuple[Variable, Ids]]) -> list[Array]:
    """Read rows by flat ids, from `row_ids`, of several variables at once, each distinct one once."""
    if not lookups:
        return []
    with _one_client([variable for variable, _ in lookups]).gate:
        return _distinct_rows(lookups)


def _distinct_rows(lookups: Sequence[tuple[Variable, Ids]]) -> list[Array]:
    fetched = fetched_rows()
    known = [None if fetched is None else fetched.take(variable, ids) for variable, ids in lookups]
    reads, rows = distinct_reads([lookup for lookup, there in zip(lookups, known, strict=True) if there is None])
    all_known = fetched is not None and not any(there is None for there in known)
    _read_rows(lookups[0][0].client, reads, all_known=all_known)
    read = iter(rows())
    return [next(read) if there is None else there for there in known]


def _read_rows(client: PsClient, reads: Sequence[ShardRead], *, all_known: bool) -> None:
    if all_known:
        client.exchanges.begin()  # the function may have been told to stop
    else:
        client.read(reads)


def read_structure(structure: Any) -> Any:
    """Return any nesting of variables with their values in their stead: one request per server."""
    if type(structure) is list and all(issubclass(kind, Variable) for kind in set(map(type, structure))):
        return read_variables(structure)  # the common case
    leaves: dict[int, Variable | Shard] = {}

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Variable | Shard):
            leaves[id(leaf)] = leaf
        elif isinstance(leaf, _NOT_NESTED):
            raise TypeError(
                f"variables are read from lists, tuples, dicts, named tuples and dataclasses, not from "
                f"{type_of(leaf)}: make a list of it"
            )
        return leaf

    map_structure(collect, structure, (Shard,))
    values = dict(zip(leaves, read_variables(list(leaves.values())), strict=True))
    return map_structure(lambda leaf: values.get(id(leaf), leaf), structure, (Shard,))


def _one_client(variables: Sequence[Variable]) -> PsClient:
    client = variables[0].client
    for variable in variables:
        if variable.client is not client:
            raise MisuseError(
                f"variables {variables[0].name!r} and {variable.name!r} belong to different strategies: "
                "read them one by one"
            )
    return client
