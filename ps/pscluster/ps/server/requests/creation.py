"""Creation on a server: variables with the shards that live here, and optimizers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import InvalidUpdateError, ProtocolError, UnknownVariableError
from pscluster.core.functions.definitions import resolve
from pscluster.core.limits import check_name
from pscluster.core.transport.frames import padding
from pscluster.ps.optim.rules import RULES, UpdateRule
from pscluster.ps.optim.specs import rule_of
from pscluster.ps.server.embedding import tables
from pscluster.ps.server.requests.initialization import Array, Fill, initial_values, initializer_of, no_handles
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import COPY, partition_of
from pscluster.ps.tables import check_table, row_limit
from pscluster.v1 import ps_pb2


def expected_bytes(store: Store, request: ps_pb2.CreateRequest) -> int | None:
    """Return the payload bytes that a create request must have; None: any. Refuse what can't be created."""
    store.check_job(request.job)
    if request.HasField("optimizer"):
        return None
    spec = request.variable
    if spec.id == 0 or not spec.name:
        raise ProtocolError("a variable needs an id and a name")
    check_name(spec.name, "a variable's name")
    store.check_name(spec)
    check_table(spec)
    if spec.table.optimizer and not store.knows_optimizer(spec.table.optimizer):
        raise InvalidUpdateError(
            f"table {spec.name!r} has an optimizer of its own, {spec.table.optimizer!r}, which is not in this job: "
            "make it in the same strategy"
        )
    if request.HasField("initializer"):
        return None
    partition, dtype = partition_of(spec), dtype_named(spec.dtype)
    sizes = [partition.block(i).size * dtype.itemsize for i, owner in enumerate(spec.owners) if owner == store.index]
    return sum(size + padding(size) for size in sizes)


def create(store: Store, request: ps_pb2.CreateRequest, payload: Payload) -> None:
    """Add a variable, with the initial values of the shards that live here, or an optimizer."""
    store.check_job(request.job)
    if request.HasField("optimizer"):
        _create_optimizer(store, request, payload)
    else:
        store.add(request.variable, request.job, lambda: make_variable(store, request, payload))


def make_variable(store: Store, request: ps_pb2.CreateRequest, payload: Payload) -> HeldVariable:
    """Make a variable, with the shards that live here, without entering it in the directory."""
    spec = request.variable
    partition, dtype = partition_of(spec), dtype_named(spec.dtype)
    check_table(spec)
    if request.initializer.name == COPY:
        return HeldVariable(spec, dtype, partition, _copied(store, spec, request.initializer))
    if spec.HasField("table"):
        return HeldVariable(spec, dtype, partition, _empty_shards(store, spec))
    if request.HasField("initializer"):
        fill = initializer_of(request.initializer, payload.joined(), spec.name, partition)
    else:
        fill = _given(payload)
    arrays = initial_values(spec, partition, dtype, store.index, fill)
    return HeldVariable(spec, dtype, partition, {shard: Shard(array) for shard, array in arrays.items()})


def _empty_shards(store: Store, spec: ps_pb2.VariableSpec) -> dict[int, Shard]:
    """Return the shards of a table that live here."""
    partition, shards = partition_of(spec), {}
    for shard, owner in enumerate(spec.owners):
        if owner == store.index:
            limit = row_limit(spec, partition, shard)
            try:
                shards[shard] = Shard(tables.new_array(0, limit, partition.shape[1]), row_limit=limit)
            except MemoryError as error:
                raise InvalidUpdateError(
                    f"table {spec.name!r}: ps {store.index} has too little memory for {error} of it"
                ) from None
    return shards


def _copied(store: Store, spec: ps_pb2.VariableSpec, initializer: ps_pb2.Initializer) -> dict[int, Shard]:
    try:
        numbers = json.loads(initializer.numbers)
        source, optimizers = int(numbers["variable"]), set(map(int, numbers["optimizers"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"variable {spec.name!r} does not say which variable it is a copy of: {error!r}") from None
    held = store.directory.variables.get(source)
    if held is None:
        raise UnknownVariableError(
            f"variable {spec.name!r} can't be a copy of variable {source}, which is not on this server"
        )
    same = ps_pb2.VariableSpec()
    same.CopyFrom(held.spec)
    same.id, same.name, same.evaluation = spec.id, spec.name, spec.evaluation
    if same != spec:
        raise InvalidUpdateError(
            f"variable {spec.name!r} can't be a copy of {held.spec.name!r}, which has a different shape, "
            "dtype, partition or placement"
        )
    try:
        return {index: shard.copy(optimizers) for index, shard in held.shards.items()}
    except MemoryError:
        size = sum(shard.nbytes for shard in held.shards.values())
        raise InvalidUpdateError(
            f"ps {store.index} has too little memory for a copy of {held.spec.name!r}, up to {size:,} bytes"
        ) from None


def _given(payload: Payload) -> Fill:
    """Return a function that fills shards, in turn, with the values that came with the request."""
    at = 0

    def fill(_shape: tuple[int, ...], _start: tuple[int, ...], out: Array) -> None:
        nonlocal at
        flat, size = out.reshape(-1), out.itemsize
        for offset, piece in payload.blocks(at, out.nbytes, size):
            flat[offset // size : (offset + len(piece)) // size] = np.frombuffer(piece, out.dtype)
        at += out.nbytes + padding(out.nbytes)

    return fill


def _create_optimizer(store: Store, request: ps_pb2.CreateRequest, payload: Payload) -> None:
    spec = request.optimizer
    if not spec.id or not spec.name:
        raise ProtocolError("an optimizer needs an id and a name")
    check_name(spec.name, "an optimizer's name")
    rule_class: Any = RULES.get(spec.rule)
    if request.HasField("rule"):
        rule_class = resolve(request.rule, payload.joined(), no_handles)
    if not (isinstance(rule_class, type) and issubclass(rule_class, UpdateRule)):
        raise InvalidUpdateError(f"{spec.rule!r} is not an update rule; choose one of {', '.join(sorted(RULES))}")
    rule = rule_of(spec, rule_class)
    definition = request.rule if request.HasField("rule") else None
    by_value = bool(len(payload.joined())) or (definition is not None and bool(definition.pickle))
    store.put_optimizer(HeldOptimizer(spec, rule, definition, by_value))
