"""Variables as users hold them: handles that read and update shards on the parameter servers.

The same class serves in the coordinator's script and inside a step function, where updates are keyed by the function
and applied once, however often it is retried. `shard_requests` refuses wrong arguments before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pscluster.core.display.notebook import html_table
from pscluster.core.dtypes import dtype_named
from pscluster.core.geometry.partition import Block
from pscluster.core.geometry.row_orders import RANGE
from pscluster.core.handles import Handle
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.placement.cuts import origin_of
from pscluster.ps.client.reads.plans import ShardRead
from pscluster.ps.handles.indexing import Array, advanced_index, wrapped_ids
from pscluster.ps.handles.keys import variable_key
from pscluster.ps.handles.reads import Readable, ReadableVariable, gather_rows, read_variables
from pscluster.ps.handles.scope import Partitioner, VariableRequest, current_creator
from pscluster.ps.handles.variables.updates import VariableUpdates
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
class Shard(Readable):
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

    @property
    def client(self) -> PsClient:
        return self.variable.client

    def read_value(self) -> Array:
        return read_variables([self])[0]

    def assign(self, value: npt.ArrayLike) -> None:
        if self.variable.partition.order == RANGE:
            self.variable.assign(value, at=self.block.slices or ...)
        else:
            with self.variable.client.gate:
                self.variable.client.update(self.variable.shard_assignment(self.index, value))

    def _whole_reads(self, out: Array) -> list[ShardRead]:
        return [self.variable._shard_read(self.index, out, ...)]


class Variable(VariableUpdates, ReadableVariable, Handle):
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
    takes_whole_reads = True
    trainable: bool
    origin: int
    """The number that it was created under, by which handles name it: it stays when it is resharded."""
    laid_out = False
    """Whether its shards are, in this process, the blocks of a global array's layout, and must stay so."""
    # Modules that build on this one set these.
    _sharded_type: ClassVar[type[Variable]]
    _table_type: ClassVar[type[Variable]]

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
        kind = Variable._sharded_type if partition.num_shards > 1 else Variable
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
        if self.takes_whole_reads:
            self.__class__ = Variable._sharded_type if self.num_shards > 1 else Variable

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
        devices = ", ".join(f"/job:ps/task:{server}" for server in sorted(set(self.owners)))
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


def _is_same(one: Variable | Shard, other: object) -> bool:
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.variable is other.variable and one.index == other.index
    return one is other
