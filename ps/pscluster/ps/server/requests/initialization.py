"""Initial values computed on the server that holds them, by built-in initializers or by the user's function."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import converted
from pscluster.core.errors import InvalidUpdateError, MisuseError, PsClusterError
from pscluster.core.functions.definitions import resolve
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RANGE
from pscluster.core.handles import Handle
from pscluster.ps.array_pool import aligned_empty
from pscluster.ps.initializers import from_spec
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]
Fill = Callable[[tuple[int, ...], tuple[int, ...], Array], None]
"""(shape of the whole, where the block starts in it, the block to fill)"""


_PIECE_BYTES = 4 << 20  # of rows made by built-in initializers for a shard that has only some of them


def initializer_of(initializer: ps_pb2.Initializer, bulk: memoryview, name: str, partition: Partition) -> Fill:
    """Return a function that fills a shard. UnresolvedReference if the user's function can't be found here.

    Where rows lie in another order than their ids, it is called with places. The rows are made in the order of their
    ids, and those of the shard are taken: the values are the same as in contiguous shards.
    """
    if not initializer.HasField("function"):
        try:
            built_in = from_spec(initializer.name, json.loads(initializer.numbers or "{}"))
        except (TypeError, ValueError, RecursionError, PsClusterError) as error:
            raise InvalidUpdateError(f"variable {name!r}: {error}") from None
        generate: Fill = lambda shape, start, out: built_in.generate(shape, start, out)  # noqa: E731
        return generate if partition.order == RANGE else functools.partial(_scattered, partition, generate, None)
    function = resolve(initializer.function, bulk, no_handles)
    call: Fill = lambda shape, start, out: _call(function, shape, start, out, name)  # noqa: E731
    if partition.order == RANGE:
        return call
    return functools.partial(_scattered, partition, call, lambda dtype: _takes(function, partition.shape, dtype)[2])


def _scattered(
    partition: Partition,
    fill: Fill,
    made_of: Callable[[np.dtype[Any]], Literal["none", "named", "any"]] | None,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    out: Array,
) -> None:
    """Fill a shard, which has the places from `start` on, with its rows of an array that `fill` makes in pieces.

    A function that makes blocks is asked for those of contiguous shards, one that makes the whole array only once.
    Others, without `made_of`, may be asked for any pieces.
    """
    if not out.size:
        fill(shape, start, out)  # checks its parameters
        return
    rows = shape[0]
    if made_of is None:
        pieces = list(range(0, rows, max(1, _PIECE_BYTES * len(out) // out.nbytes)))
    else:
        pieces = [0] if made_of(out.dtype) == "none" else [0, *partition.ends[0][:-1]]
    for first, stop in itertools.pairwise((*pieces, rows)):
        local = partition.places(np.arange(first, stop)) - start[0]
        inside = np.flatnonzero((local >= 0) & (local < len(out)))
        if inside.size:
            made = np.empty((stop - first, *shape[1:]), out.dtype)
            fill(shape, (first, *start[1:]), made)
            out[local[inside]] = made[inside]


def _call(function: Callable[..., Any], shape: tuple[int, ...], start: tuple[int, ...], out: Array, name: str) -> None:
    arguments, keywords, block = _takes(function, shape, out.dtype)
    given = {"partition_shape": out.shape, "partition_offset": start}
    value = np.asarray(function(*arguments, **{keyword: given[keyword] for keyword in keywords}))
    expected = out.shape if block == "named" else shape
    if block == "none" or (block == "any" and value.shape != out.shape):
        index = tuple(slice(a, a + n) for a, n in zip(start, out.shape, strict=True))
        with contextlib.suppress(ValueError):
            value = np.broadcast_to(value, shape)[index]
    if value.shape != out.shape:
        raise ValueError(f"it returned an array of shape {value.shape}, but {expected} was expected")
    np.copyto(out, converted(value, out.dtype, name, "initial value"))


def _takes(
    function: Callable[..., Any], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[tuple[object, ...], list[str], Literal["none", "named", "any"]]:
    """Return the positional arguments and keywords, and "named" or "any" if it takes those for the block to compute.

    TensorFlow's users often pass a function that has its shape and dtype already, or takes any keywords.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return (shape, dtype), [], "none"
    block: Literal["none", "named", "any"] = "none"
    keywords = [keyword for keyword in ("partition_shape", "partition_offset") if keyword in signature.parameters]
    if keywords:
        block = "named"
    elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        block, keywords = "any", ["partition_shape", "partition_offset"]
    for arguments in ((shape, dtype), ()):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments, **dict.fromkeys(keywords))
            return arguments, keywords, block
    raise TypeError(
        f"it takes {signature}, but is called with (shape, dtype), and with partition_shape and partition_offset "
        "by keyword where it names them"
    )


def initial_values(
    spec: ps_pb2.VariableSpec, partition: Partition, dtype: np.dtype[Any], owner: int, fill: Fill
) -> dict[int, Array]:
    """Compute the initial values of one owner's shards.

    InvalidUpdateError, naming the variable, if that fails.
    """
    arrays = {}
    for shard, where in enumerate(spec.owners):
        if where != owner:
            continue
        block = partition.block(shard)
        size = block.size * dtype.itemsize
        too_large = InvalidUpdateError(
            f"variable {spec.name!r}: ps {owner} has too little memory for {size:,} bytes of it: "
            "partition it into more shards"
        )
        try:
            arrays[shard] = aligned_empty(block.shape, dtype, lasting=True)
        except (MemoryError, ValueError):  # ValueError if the size in bytes exceeds any integer type
            raise too_large from None
        try:
            fill(partition.shape, block.start, arrays[shard])
        except PsClusterError:
            raise
        except MemoryError:
            raise too_large from None
        except (Exception, SystemExit) as error:  # the user's function
            raise InvalidUpdateError(
                f"the initial value of variable {spec.name!r}, shard {shard}, could not be computed on ps {owner}: "
                f"{type(error).__name__}: {error}"
            ) from error
    return arrays


def no_handles(kind: str, key: str) -> Handle:
    """Refuse handles, for `resolve`: functions that run on a server have none."""
    raise MisuseError(f"a function that runs on a parameter server can't use {kind} {key!r}")
