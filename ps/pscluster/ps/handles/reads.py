"""Reads of several variables, shards, and rows of tables at once: one request per server, all servers at once."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, Sequence, Set, ValuesView
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.core.phases import Begun, Phases, run
from pscluster.core.values import map_structure
from pscluster.ps.array_pool import aligned_empty
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.overlap.queue import fetched_rows
from pscluster.ps.client.reads.plans import ShardRead
from pscluster.ps.handles.indexing import Array, Ids
from pscluster.ps.handles.rows.requests import distinct_reads
from pscluster.ps.handles.shard_requests import ShardRequests
from pscluster.ps.handles.variables.operators import Arithmetic

_NOT_NESTED = (Set, Iterator, KeysView, ValuesView, ItemsView, deque)  # callers would expect these to be read


class Readable(Arithmetic):
    """What is read whole, together with others: a variable, or one of its shards."""

    name: Any
    client: Any
    takes_whole_reads: ClassVar[bool] = False
    """Whether its reads are planned, once, and can be made for a step before that runs."""

    def _whole_reads(self, out: Array) -> list[ShardRead]:
        """Return the reads of its value into an array."""
        raise NotImplementedError


class ReadableVariable(ShardRequests, Readable):
    """A variable, of which servers hold the shards."""


def read_variables(variables: Sequence[Readable]) -> list[Array]:
    """Read several variables, or shards, of one strategy: one request per server, all servers at once."""
    if not variables:
        return []
    client = one_client(variables)
    with client.gate:
        return _read_variables(client, variables)


def _read_variables(client: PsClient, variables: Sequence[Readable]) -> list[Array]:
    known: Sequence[Array | None] = [None] * len(variables)
    if are_whole := all(item.takes_whole_reads for item in variables):
        whole = cast(Sequence[ReadableVariable], variables)
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
        if values is None:
            reads += item._whole_reads(result)
    if reads:
        client.read(reads, whole=are_whole)
    return results


def rows_and_variables(
    lookups: Sequence[tuple[ShardRequests, Ids]], variables: Sequence[ReadableVariable]
) -> tuple[list[Array], list[Array]]:
    """Read rows by flat ids, from `row_ids`, each distinct one once, and whole variables, each given once.

    One request per server; but what was fetched for this step is not read again, and a synchronous step has two.
    """
    if not (of := [*(table for table, _ in lookups), *variables]):
        return [], []
    client = one_client(of)
    with client.gate:
        return run(_rows_and_variables(client, lookups, variables))


def reading_rows_and_variables(
    lookups: Sequence[tuple[ShardRequests, Ids]], variables: Sequence[ReadableVariable]
) -> Phases[tuple[list[Array], list[Array]]]:
    """Do what `rows_and_variables` does, in a function. The requests are under way once it has begun, if all are small.

    Not in the script, where a cut could change between its phases.
    """
    if not (of := [*(table for table, _ in lookups), *variables]):
        yield True
        return [], []
    client = one_client(of)
    with client.gate:
        begun = Begun(_rows_and_variables(client, lookups, variables))
    with contextlib.closing(begun):
        yield begun.is_under_way
        with client.gate:
            return begun.finish()


def _rows_and_variables(
    client: PsClient, lookups: Sequence[tuple[ShardRequests, Ids]], variables: Sequence[ReadableVariable]
) -> Phases[tuple[list[Array], list[Array]]]:
    function, fetched = current_function(), fetched_rows()
    if fetched is not None or (function is not None and function.steps is not None):
        yield False
        ahead = [] if fetched is None else [item for item in variables if fetched.has_whole(item.id)]
        there = {item.id for item in ahead}
        others = [item for item in variables if item.id not in there]
        both = [*read_variables(ahead), *read_variables(others)]
        values = dict(zip((item.id for item in (*ahead, *others)), both, strict=True))
        return distinct_rows(lookups), [values[item.id] for item in variables]
    reads, rows = distinct_reads(lookups)
    ids = [item.id for item in variables]
    found = yield from client.reading_both(reads, ids, lambda: [item._whole() for item in variables])
    large = iter(read_variables([item for item, value in zip(variables, found, strict=True) if value is None]))
    return rows(), [next(large) if value is None else value for value in found]


def gather_rows(lookups: Sequence[tuple[ShardRequests, npt.ArrayLike]]) -> list[Array]:
    """Read rows by id from several variables at once; see `Variable.sparse_read`."""
    if not lookups:
        return []
    with one_client([variable for variable, _ in lookups]).gate:
        return _gather_rows(lookups)


def _gather_rows(lookups: Sequence[tuple[ShardRequests, npt.ArrayLike]]) -> list[Array]:
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


def rows_if_all_fetched(lookups: Sequence[tuple[ShardRequests, Any]]) -> list[Array] | None:
    """Return the rows of these ids, not checked yet, if all of them, and no others, were fetched for this step."""
    fetched = fetched_rows()
    if fetched is None or not lookups:
        return None
    rows: list[Array] | None = fetched.take_all(lookups)
    if rows is not None:
        one_client([table for table, _ in lookups]).exchanges.begin()  # the function may have been told to stop
    return rows


def distinct_rows(lookups: Sequence[tuple[ShardRequests, Ids]]) -> list[Array]:
    """Read rows by flat ids, from `row_ids`, of several variables at once, each distinct one once."""
    if not lookups:
        return []
    with one_client([variable for variable, _ in lookups]).gate:
        return _distinct_rows(lookups)


def _distinct_rows(lookups: Sequence[tuple[ShardRequests, Ids]]) -> list[Array]:
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
    if type(structure) is list and all(issubclass(kind, Readable) for kind in set(map(type, structure))):
        return read_variables(structure)  # the common case
    leaves: dict[int, Readable] = {}

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Readable):
            leaves[id(leaf)] = leaf
        elif isinstance(leaf, _NOT_NESTED):
            raise TypeError(
                f"variables are read from lists, tuples, dicts, named tuples and dataclasses, not from "
                f"{type_of(leaf)}: make a list of it"
            )
        return leaf

    map_structure(collect, structure, (Readable,))
    values = dict(zip(leaves, read_variables(list(leaves.values())), strict=True))
    return map_structure(lambda leaf: values.get(id(leaf), leaf), structure, (Readable,))


def one_client(variables: Sequence[Readable | ShardRequests]) -> PsClient:
    """Return the client of all of these. MisuseError if they have several."""
    client: PsClient = variables[0].client
    for variable in variables:
        if variable.client is not client:
            raise MisuseError(
                f"variables {variables[0].name!r} and {variable.name!r} belong to different strategies: "
                "read them one by one"
            )
    return client
