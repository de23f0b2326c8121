"""What clients and servers agree on about tables whose rows are made when their ids are first updated.

A table is a variable of shape (rows, dim + TAIL), or wider if its ids are strings (`row_ids`), see `ps_pb2.TableSpec`,
cut into shards. Each has an array of the rows that are in use; the shape says how many these may be. Slots and averages
are beside them, row by row, of shape (rows, dim): an id is stored once, with the values.
A hash of an id says which shard its row is in. A row that has had no update yet is not stored: its values follow from
the initializer's seed and the id alone, so that every server, after every restart, gives the same ones for it.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pscluster.core.dtypes import as_array
from pscluster.core.errors import InvalidUpdateError, ProtocolError, PsClusterError
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.rows import integers
from pscluster.core.numbers.splitmix import mixed
from pscluster.ps.initializers import (
    Constant,
    Initializer,
    Ones,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    Zeros,
    takes_seed,
)
from pscluster.ps.initializers import from_spec as initializer_from_spec
from pscluster.ps.row_ids import LEAST_ID_BYTES, MOST_ID_BYTES, RowIds, columns_of, dtype_in, numbers_of, string_ids
from pscluster.ps.spec import partition_of
from pscluster.ps.table_policies import check_policies
from pscluster.v1 import ps_pb2

Ids = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

TAIL = 4
"""Columns of a row beside its values where ids are int64: 8 bytes for the id, 8 that are not 0 if the row is in use."""

MAX_ROWS = (1 << 31) - 2
"""The most rows of a shard: an index stores their numbers in 32 bits."""

BY_ID = "id"
"""What stands for the order of a table's rows where those of variables are named."""

SEEN = "seen"
"""The name, among a shard's arrays, of the counts of ids without a row, where a table is cut into other shards."""

SEEN_BYTES = 1 << 20
"""Of these counts, one byte each."""

GROWING_ROWS = 1 << 20
"""Rows of each shard in the shape of a table that is not limited: it is placed as one that will be large."""

MAX_DIM = 1 << 20

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_PIECE = 64 << 10
"""Elements that are computed at once: they fit in a core's second-level cache."""


def shards_of(ids: RowIds, num_shards: int) -> Ids:
    """Return the shard of each id. It follows from the upper half of the hash; a shard's index uses the lower half."""
    upper = mixed(numbers_of(ids)) >> np.uint64(32)
    return ((upper * np.uint64(num_shards)) >> np.uint64(32)).view(np.int64)


def table_ids(ids: npt.ArrayLike, name: str, id_bytes: int = 0) -> RowIds:
    """Return ids as a contiguous array of their shape: of int64, or if `id_bytes` is given of bytes (`string_ids`).

    InvalidUpdateError unless they are integers that fit, or strings of up to that many bytes.
    """
    if id_bytes:
        return string_ids(ids, name, id_bytes)
    array = as_array(ids, name, "ids", holder="table")
    if array.size and array.dtype.kind in "USOT" and isinstance(first := array.reshape(-1)[0], str | bytes):
        raise InvalidUpdateError(
            f"table {name!r}: ids must be integers, but the first is {array.reshape(-1)[:1].tolist()[0]!r:.60}, "
            f"a {'str' if isinstance(first, str) else 'bytes'}: for ids that are strings, make the table with ids=str"
        )
    array = integers(array, ids, f"table {name!r}: ids")
    if array.dtype == np.uint64 and array.size and int(array.max()) >> 63:
        raise InvalidUpdateError(
            f"table {name!r}: id {array.max()} does not fit in int64: the largest is {(1 << 63) - 1}"
        )
    return np.asarray(array, np.int64, order="C")


@dataclass(frozen=True)
class InitialRows:
    """The values of rows that have had no update."""

    initializer: Initializer
    dim: int

    def __post_init__(self) -> None:
        """Raise ValueError for an initializer whose values do not follow from a row alone."""
        kinds = Zeros, Ones, Constant, RandomUniform, RandomNormal, TruncatedNormal
        if type(self.initializer) not in kinds:
            raise ValueError(
                f"{self.initializer.name} can't make the rows of a table, since its values depend on the number of "
                f"rows: give one of {', '.join(kind.__name__ for kind in kinds)}"
            )
        self.initializer.check((1, self.dim), np.float32)

    def of(self, ids: RowIds) -> Rows:
        """Return the rows of these ids, shape (n, dim)."""
        out = np.empty((len(ids), self.dim), np.float32)
        initializer = self.initializer
        if not isinstance(initializer, RandomUniform | RandomNormal):
            out[...] = initializer((1, self.dim))
            return out
        seed = mixed(np.array([initializer.seed], np.uint64))
        columns = np.arange(1, self.dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        scaled = _scaled_by(initializer)
        step = max(1, _PIECE // self.dim)
        for start in range(0, len(ids), step):
            keys = mixed(numbers_of(ids[start : start + step]) ^ seed)
            uniform = (mixed(keys[:, None] + columns) >> np.uint64(32)).astype(np.float64)
            out[start : start + step] = scaled((uniform + 0.5) * 2.0**-32)
        return out


def _scaled_by(initializer: RandomUniform | RandomNormal) -> Callable[[Doubles], Any]:
    """Return what turns uniform numbers in (0, 1) into the initializer's."""
    if isinstance(initializer, RandomUniform):
        low, high = initializer.minval, initializer.maxval
        highest = np.float32(high)
        if highest >= high:
            highest = np.nextafter(highest, np.float32(-np.inf))
        return lambda uniform: np.minimum((uniform * (high - low) + low).astype(np.float32), highest)
    mean, stddev = initializer.mean, initializer.stddev
    within = 0.9544997361036416 if isinstance(initializer, TruncatedNormal) else 1.0  # of a normal's, within 2 of 0
    return lambda uniform: _normal_quantiles((uniform - 0.5) * within) * stddev + mean


# Coefficients of algorithm AS 241, from the highest power on: of the numerators and denominators in the middle, and
# in the tails as far as sqrt(-log(p)) = 5. Beyond that are none of our numbers, whose smallest p is 2**-33.
_MIDDLE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457, 13731.693765509461125,
     1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.495278852854561, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867, 5394.1960214247511077,
     687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
_TAILS = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.148103976427480074590,
     0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)  # fmt: skip


def _normal_quantiles(q: Doubles) -> Doubles:
    """Return the quantiles of the standard normal distribution at probabilities 0.5 + q (Wichura 1988, AS 241)."""
    x = _quotient(_MIDDLE, 0.180625 - q * q) * q
    tails = np.abs(q) > 0.425
    of_tails = q[tails]
    r = np.sqrt(-np.log(0.5 - np.abs(of_tails)))
    x[tails] = np.copysign(_quotient(_TAILS, r - 1.6), of_tails)
    return x


def _quotient(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Doubles) -> Doubles:
    above, below = np.zeros_like(x), np.zeros_like(x)
    for of_above, of_below in zip(*coefficients, strict=True):
        above, below = above * x + of_above, below * x + of_below
    return above / below


@functools.lru_cache(maxsize=256)
def _made(dim: int, initializer: str, numbers: str) -> InitialRows:
    return InitialRows(initializer_from_spec(initializer, json.loads(numbers or "{}")), dim)


def seeded(table: ps_pb2.TableSpec, name: str) -> ps_pb2.TableSpec:
    """Return the spec of a new table, with a seed that follows from its name if its initializer was given none.

    So a job that restores a checkpoint goes on with the initial values that ids without a row had before.
    """
    numbers = json.loads(table.numbers or "{}")
    if "seed" in numbers or not takes_seed(table.initializer):
        return table
    with_seed = ps_pb2.TableSpec()
    with_seed.CopyFrom(table)
    with_seed.numbers = json.dumps({**numbers, "seed": xxhash.xxh3_64_intdigest(name.encode()) >> 1})
    return with_seed


def initial_rows(table: ps_pb2.TableSpec, name: str) -> InitialRows:
    """Return what makes the rows of a table. InvalidUpdateError, naming the variable, if it can't be made."""
    if not 0 < table.dim <= MAX_DIM:
        raise InvalidUpdateError(f"table {name!r} has rows of {table.dim} values; the limits are 1 and {MAX_DIM:,}")
    try:
        return _made(table.dim, table.initializer, table.numbers)
    except (TypeError, ValueError, RecursionError, PsClusterError) as error:
        raise InvalidUpdateError(f"table {name!r}: {error}") from None


def check_table(spec: ps_pb2.VariableSpec) -> None:
    """Raise InvalidUpdateError or ProtocolError for a table that can't be; nothing for a variable that is none."""
    if not spec.HasField("table"):
        return
    initial_rows(spec.table, spec.name)
    check_policies(spec)
    partition, id_bytes = partition_of(spec), spec.table.id_bytes
    if id_bytes and (id_bytes % 8 or not LEAST_ID_BYTES <= id_bytes <= MOST_ID_BYTES):
        raise ProtocolError(
            f"table {spec.name!r} has ids of {id_bytes} bytes; they must be a multiple of 8 in "
            f"{LEAST_ID_BYTES}..{MOST_ID_BYTES}"
        )
    if (
        spec.dtype != "float32"
        or len(partition.shape) != 2
        or partition.shape[1] != spec.table.dim + columns_of(id_bytes)
        or partition.grid[1] != 1
        or not spec.asynchronous
    ):
        raise ProtocolError(
            f"table {spec.name!r} is {spec.dtype}{list(partition.shape)} in {list(partition.grid)} shards, which are "
            f"not rows of {spec.table.dim} values, updated at once"
        )
    if not spec.table.capacity and partition.shape[0] != partition.num_shards * GROWING_ROWS:
        raise ProtocolError(f"table {spec.name!r} is not limited, and has a shape of {partition.shape[0]:,} rows")
    if (rows := max(block.shape[0] for block in partition.blocks)) > MAX_ROWS:
        raise InvalidUpdateError(
            f"table {spec.name!r} has shards of {rows:,} rows; the limit is {MAX_ROWS:,}: cut it into more"
        )


def row_limit(spec: ps_pb2.VariableSpec, partition: Partition, shard: int) -> int:
    """Return how many rows a shard of a table may have; 0 for a variable that is none."""
    if not spec.HasField("table"):
        return 0
    return partition.block(shard).shape[0] if spec.table.capacity else MAX_ROWS


def most_rows(max_bytes: int, row_bytes: int) -> float:
    """Return how many rows a cut or a restore may give a server: a few more than the limit says, as a hash may do."""
    rows = max_bytes // row_bytes
    return rows + 6 * math.sqrt(rows)


def width_of(spec: ps_pb2.VariableSpec, array: str) -> int:
    """Return how many elements a row has in an array of a table, by its name: ids are beside the values alone."""
    return int(spec.shape[1]) if array == "value" else spec.table.dim


def row_items(spec: ps_pb2.VariableSpec) -> int:
    """Return into how many items, equally many in each array, a row is divided when its shard moves; 0 of a variable.

    Pages of a shard hold a number of items, as those of a variable do of elements: see `PAGE_ELEMENTS`.
    """
    return 4 * math.gcd(spec.table.dim, int(spec.shape[1])) if spec.HasField("table") else 0


def rows_of_shard(capacity: int, num_shards: int) -> int:
    """Return for how many rows a shard has room: a hash gives it its share, and by chance some more.

    `capacity`: of the table; 0: it is not limited.
    """
    if not capacity:
        return GROWING_ROWS
    mean = capacity / num_shards
    return min(capacity, math.ceil(mean + 6 * math.sqrt(mean)))


def shards_before(shard: int, num_shards: int, before: int) -> range:
    """Return which shards of a table, of `before`, had the rows of a shard when it is cut into `num_shards`.

    Each has the ids whose hashes are in a range, see `shards_of`: so it takes rows of those that overlap with its own.
    """
    return range(shard * before // num_shards, -(-(shard + 1) * before // num_shards))


def ids_in(array: Rows, dim: int) -> RowIds:
    """Return the ids of the rows that are in use in a shard's array, in order: others may follow them."""
    ids, in_use = tails_of(array, dim)
    return ids[: rows_in_use(in_use)].copy()


def tails_of(array: Rows, dim: int) -> tuple[RowIds, npt.NDArray[np.uint64]]:
    """Return views of the rows' ids, and of what is not 0 where a row is in use."""
    dtype = dtype_in(array.shape[1], dim)
    if not len(array):
        return np.empty(0, dtype), np.empty(0, np.uint64)
    at, strides = dim * array.itemsize, array.strides[:1]
    uses_at = at + dtype.itemsize
    return np.ndarray(len(array), dtype, array, at, strides), np.ndarray(len(array), np.uint64, array, uses_at, strides)


def rows_in_use(in_use: npt.NDArray[np.uint64]) -> int:
    """Return how many rows are in use: they are the first ones, and looking at others could give them memory."""
    return bisect.bisect_left(in_use, True, key=lambda used: not used)
