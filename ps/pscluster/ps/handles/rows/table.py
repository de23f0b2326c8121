"""Embedding tables as users hold them: rows by any id, integers or strings, made when they are first updated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.core.geometry.rows import ShardRows
from pscluster.core.geometry.selection import Selection
from pscluster.core.transport.frames import view
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.reads.plans import ShardRead, WholeVariable
from pscluster.ps.client.updates.shard_update import Encoding, ShardUpdate
from pscluster.ps.handles.indexing import Array, Gradient, Ids, IndexedSlices
from pscluster.ps.handles.rows.lookup import embedding_lookup
from pscluster.ps.handles.rows.requests import distinct_reads
from pscluster.ps.handles.scope import VariableRequest, current_creator
from pscluster.ps.handles.shard_requests import ALL
from pscluster.ps.handles.variables.variable import Variable, WireDtype
from pscluster.ps.initializers import Initializer, RandomUniform, Zeros, numbers_to_seed
from pscluster.ps.row_ids import MOST_ID_BYTES, Missing, RowIds, check_missing, columns_of, id_bytes_for
from pscluster.ps.spec import MAX_SHARDS
from pscluster.ps.table_policies import NEED_LIMIT, Admission, Eviction
from pscluster.ps.tables import MAX_DIM, MAX_ROWS, initial_rows, rows_of_shard, seeded, shards_of, table_ids
from pscluster.v1 import ps_pb2

_IN_USE = ps_pb2.Rows(in_use=True)

_ID_BYTES = 64
"""The default of `max_id_bytes`: room for a UUID, a digest in hexadecimal or most addresses of mail."""


class TableOptimizer(Protocol):
    """What a table needs of an `Optimizer`, which builds on this module."""

    name: str

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]]) -> None:
        """Apply gradients on the servers."""


class EmbeddingTable(Variable):
    """A table of rows by id, on the parameter servers. A row is made when its id is first updated.

    Ids are any int64 or, with `ids=str`, any strings. Strings are stored with their rows, whole, so that no two of them
    share a row, whatever their hashes. They come as an array or a list of `str`, or of bytes that are UTF-8, or as a
    column of Arrow or pandas. "a" and "A" are different ids, and so are two forms of one letter in Unicode.

    A row that has had no update is not stored: a lookup gives its initial values, which depend on the initializer's
    seed and the id alone. So lookups make no rows, those of an evaluation neither.

    Update it with `IndexedSlices`: by `optimizer.apply_gradients`, `scatter_update`, `scatter_add` and the others. All
    updates are applied at once, also in steps of a `SynchronousStrategy`, as those of a variable with
    `consistency="async"`.

    Args:
        dim: the number of values of a row, which are float32.
        capacity: how many rows it can have; None: as many as the servers have memory for, or `max_bytes`. Memory and
            disk are taken by the rows that there are, not by the capacity.
        ids: `int`, for int64, or `str`. It can't be changed later.
        max_id_bytes: with `ids=str`, how many bytes the UTF-8 of an id may have, 1,024 at most; default: 64. It is
            rounded up to a multiple of 8, and to 16. Each row takes that much more, once, beside its values.
        optimizer: what applies the table's gradients, whichever optimizer's `apply_gradients` they are given to, with
            its own learning rate, clipping and counts; default: that optimizer.
        initializer: of new rows: `Zeros`, `Ones`, `Constant`, `RandomUniform` (the default), `RandomNormal` or
            `TruncatedNormal`. Without a seed, the table's name gives it one, which is the same in every job.
        max_bytes: how many bytes its rows may take on a server, those of optimizers' slots included. A table that is
            full refuses updates of new ids.
        admission: which gradients of an id without a row make one: `SeenTimes` or `WithProbability`; others are
            dropped. Default: all. Updates other than gradients always make rows.
        eviction: which rows are dropped: `LeastRecentlyUsed`, `LeastFrequentlyUsed`, `Unused` or `SmallNorm`; default:
            none. An id that comes back has a new row. Updates are uses of a row, and lookups are not.
        name: unique in the strategy; generated if not given.
        num_shards: how many shards a hash distributes the rows over; default: one for each server.
        trainable: for the caller; pscluster itself ignores it.
        wire_dtype: "bfloat16", "float16" or "int8": in what type functions look up rows, and in what type gradients are
            pushed, as of a `Variable`; what the encoding has lost of a gradient is added to the next one of its id.

    Raises:
        MisuseError: outside of `strategy.scope()`, the name is taken, or an argument is wrong.
        InvalidUpdateError: a server has too little memory. Whatever is raised, nothing has been created.

    Examples:
        >>> with strategy.scope():
        ...     users = EmbeddingTable(4, capacity=1000, initializer=initializers.Zeros(), name="users")
        >>> _ = users.scatter_add(IndexedSlices(np.ones((1, 4), np.float32), [10**15]))
        >>> embedding_lookup(users, [10**15, -3])[:, 0]
        array([1., 0.], dtype=float32)
        >>> with strategy.scope():
        ...     words = EmbeddingTable(4, ids=str, initializer=initializers.Zeros(), name="words")
        >>> _ = words.scatter_add(IndexedSlices(np.ones((2, 4), np.float32), ["tea", "thé"]))
        >>> words.lookup(["thé", "the"])[:, 0]
        array([1., 0.], dtype=float32)
    """

    takes_whole_reads = False
    dim: int
    max_bytes: int | None
    _optimizer_name: str
    _optimizer: TableOptimizer | None
    _optimizer_of: ClassVar[Callable[[ps_pb2.OptimizerSpec, PsClient], TableOptimizer]]  # `optimizers` sets it

    def __new__(
        cls,
        dim: int,
        *,
        ids: type[int] | type[str] = int,
        max_id_bytes: int | None = None,
        capacity: int | None = None,
        initializer: Initializer | None = None,
        optimizer: TableOptimizer | None = None,
        max_bytes: int | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        name: str | None = None,
        num_shards: int | None = None,
        trainable: bool = True,
        wire_dtype: WireDtype | None = None,
    ) -> EmbeddingTable:
        creator = current_creator(f"EmbeddingTable {name!r}" if name else "an EmbeddingTable")
        initializer = RandomUniform() if initializer is None else initializer
        try:
            dim = checks.whole("dim", dim, at_least=1, at_most=MAX_DIM)
            shards = creator.num_servers
            if num_shards is not None:
                shards = checks.whole("num_shards", num_shards, at_least=1, at_most=MAX_SHARDS)
            if capacity is not None:
                capacity = checks.whole("capacity", capacity, at_least=1, at_most=shards * (MAX_ROWS // 2))
            if not isinstance(initializer, Initializer):
                raise ValueError(f"initializer is {initializer!r}; it must be an initializer, such as RandomUniform()")
            table = ps_pb2.TableSpec(dim=dim, initializer=initializer.name)
            table.numbers = json.dumps(numbers_to_seed(initializer))
            table.capacity = capacity or 0
            table.id_bytes = _id_bytes(ids, max_id_bytes)
            if optimizer is not None:
                if getattr(optimizer, "handle_kind", None) != "optimizer":
                    raise ValueError(
                        f"optimizer is {optimizer!r}; it must be an optimizer, such as optimizers.Adagrad()"
                    )
                table.optimizer = optimizer.name
            if max_bytes is not None:
                row_bytes = 4 * (dim + columns_of(table.id_bytes))
                table.max_bytes = checks.whole("max_bytes", max_bytes, at_least=row_bytes, at_most=(1 << 63) - 1)
            for argument, policy, kinds in (("admission", admission, Admission), ("eviction", eviction, Eviction)):
                if policy is not None and not isinstance(policy, kinds):
                    names = ", ".join(kind.__name__ for kind in kinds.__args__)
                    raise ValueError(f"{argument} is {policy!r}; give one of {names}, or None")
            if admission is not None:
                table.admission.CopyFrom(admission.message())
            if eviction is not None:
                table.eviction.CopyFrom(eviction.message())
                if table.eviction.kind in NEED_LIMIT and capacity is None and max_bytes is None:
                    raise ValueError(f"{eviction} drops rows of a table that is full: give a capacity or max_bytes")
            initial_rows(seeded(table, ""), name or "table")
        except (ValueError, InvalidUpdateError) as error:
            raise MisuseError(f"EmbeddingTable {name!r}: {error}" if name else f"EmbeddingTable: {error}") from None
        shape = shards * rows_of_shard(table.capacity, shards), dim + columns_of(table.id_bytes)
        request = VariableRequest(
            Zeros(), name, np.float32, shape, trainable, lambda *_: [shards, 1], "async", wire_dtype, table=table
        )
        made = creator.create_variable(request)
        assert isinstance(made, EmbeddingTable)
        return made

    def _described(self, spec: ps_pb2.VariableSpec) -> None:
        self.dim = spec.table.dim
        self.id_bytes = spec.table.id_bytes
        self.max_bytes = spec.table.max_bytes or None
        self._optimizer_name, self._optimizer = spec.table.optimizer, None
        self.shape = spec.table.capacity, self.dim

    holder = "table"

    # What it is

    def __repr__(self) -> str:
        devices = ", ".join(sorted({shard.device for shard in self.variables}))
        limits = "".join(f" {name}={n}" for name in ("capacity", "max_bytes") if (n := getattr(self, name)))
        return f"<EmbeddingTable {self.name!r} dim={self.dim} ids={self.id_type.__name__}{limits} on {devices}>"

    @property
    def capacity(self) -> int | None:
        """How many rows it can have; shards have room for some more than their share: a hash spreads ids unevenly."""
        return self.shape[0] or None

    @property
    def id_type(self) -> type[int] | type[str]:
        return str if self.id_bytes else int

    @property
    def max_id_bytes(self) -> int | None:
        """How many bytes an id's UTF-8 may have; None: ids are int64."""
        return self.id_bytes or None

    @property
    def optimizer(self) -> TableOptimizer | None:
        """The optimizer of its own; None: whichever is used."""
        if self._optimizer is None and self._optimizer_name:
            spec = self.client.describe_optimizer(self._optimizer_name)
            self._optimizer = EmbeddingTable._optimizer_of(spec, self.client)
        return self._optimizer

    def __len__(self) -> int:
        """Return how many rows have been made."""
        counts = np.zeros(self.num_shards, "<u8")
        self.client.read(
            [
                ShardRead(self.owners[shard], self._read_item(shard, _IN_USE), 8, view(counts[shard : shard + 1]))
                for shard in range(self.num_shards)
            ]
        )
        return int(counts.sum())

    def __bool__(self) -> bool:
        """Return True, as for any object that has no value; an empty table is a table."""
        return True

    # Reading

    def lookup(self, ids: npt.ArrayLike, *, missing: Missing = "initial") -> Array:
        """Read the rows of these ids, in their order, duplicates included; each distinct row travels once.

        Args:
            ids: integers or strings, of any shape.
            missing: what an id without a row gives, such as one whose row was evicted: its "initial" values, or an
                "error".

        Returns:
            An array of shape `ids.shape + (dim,)`, of float32.

        Raises:
            InvalidUpdateError: ids are not of the table's kind, do not fit in int64, or are longer than `max_id_bytes`;
                or one, which is named, has no row.
            MisuseError: `missing` is neither of the two.
        """
        if not check_missing(missing):
            result: Array = embedding_lookup(self, ids)
            return result
        checked = self.row_ids(ids)
        with self.client.gate:
            reads, rows = distinct_reads([(self, checked.reshape(-1))])
            for read in reads:
                read.item.rows.must_exist = True
            self.client.read(reads)
        return rows()[0].reshape(*checked.shape, self.dim)

    def row_ids(self, ids: npt.ArrayLike) -> RowIds:
        return table_ids(ids, self.name, self.id_bytes)

    splits_ids = True

    def columns(self, shard: int) -> tuple[slice, ...]:
        del shard
        return (slice(0, self.dim),)

    def split_ids(self, ids: RowIds) -> Sequence[tuple[int, ShardRows]]:
        if self.num_shards == 1:
            return [(0, ShardRows(np.arange(len(ids)), ids))]
        shards = shards_of(ids, self.num_shards)
        order = np.argsort(shards, kind="stable")
        ends = np.cumsum(np.bincount(shards, minlength=self.num_shards))[:-1]
        return [(shard, ShardRows(rows, ids[rows])) for shard, rows in enumerate(np.split(order, ends))]

    # Updating

    def _ids_of(self, slices: IndexedSlices) -> RowIds:
        self._check_slices(slices._replace(dense_shape=None) if isinstance(slices, IndexedSlices) else slices)
        return self.row_ids(slices.indices)

    def apply_gradients(self, slices: IndexedSlices) -> None:
        """Apply gradients by the table's own optimizer, as its `apply_gradients` does. MisuseError if there is none."""
        if (optimizer := self.optimizer) is None:
            raise MisuseError(
                f"{self.name!r} has no optimizer of its own: make it with optimizer=, or use an optimizer's "
                "apply_gradients"
            )
        optimizer.apply_gradients([(slices, self)])

    def dense_gradient_updates(self, gradient: npt.ArrayLike, optimizer: int) -> NoReturn:
        del optimizer
        raise InvalidUpdateError(
            f"table {self.name!r}: a gradient must be IndexedSlices(values, ids), not {checks.type_of(gradient)}"
        )

    def checked_gradient(self, gradient: Gradient) -> Gradient:
        if not isinstance(gradient, IndexedSlices):
            self.dense_gradient_updates(gradient, 0)
        return super().checked_gradient(gradient)

    def _encoding(self, shard: int) -> Encoding:
        del shard
        return Encoding(self.wire_dtype, 0, (0, 0), (0, self.dim), None, self.id_bytes)

    # What variables with a value have, and a table does not

    def _shard_read(
        self, shard: int, out: Array, index: Any, rows: ps_pb2.Rows = ALL, ids: Ids | None = None
    ) -> ShardRead:
        if ids is None or rows.leading:
            self._refuse()
        return super()._shard_read(shard, out, index, rows, ids)

    def _whole(self) -> WholeVariable:
        self._refuse()

    def _selection(self, index: Any) -> Selection:
        del index
        self._refuse()

    def _dense_updates(self, kind: ps_pb2.UpdateKind, array: Array, optimizer: int) -> list[ShardUpdate]:
        del kind, array, optimizer
        self._refuse()

    def _batch_updates(self, slices: IndexedSlices) -> list[ShardUpdate]:
        del slices
        self._refuse()

    def read_value(self) -> Array:
        self._refuse()

    value = read_value

    def _refuse(self) -> NoReturn:
        raise InvalidUpdateError(
            f"{self.name!r} is an EmbeddingTable, which has rows by id only: read them with lookup(ids), and update "
            "them with IndexedSlices(values, ids)"
        )


def _id_bytes(ids: object, most: int | None) -> int:
    """Return what a row has for an id that is a string; 0: ids are int64. ValueError if it can't be."""
    if ids is not int and ids is not str:
        raise ValueError(f"ids is {ids!r}; give int or str, the type of its ids")
    if ids is int:
        if most is not None:
            raise ValueError(f"max_id_bytes is {most!r}, but only ids that are strings have a limit: give ids=str")
        return 0
    most = _ID_BYTES if most is None else most
    return id_bytes_for(checks.whole("max_id_bytes", most, at_least=1, at_most=MOST_ID_BYTES))


Variable._table_type = EmbeddingTable
