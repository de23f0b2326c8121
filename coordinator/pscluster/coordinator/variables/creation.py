"""Creation of variables and optimizers on the parameter servers, and their names in a job."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from pscluster.coordinator.job.live_job import LiveJob
from pscluster.coordinator.variables.encodings import check_shards, encoding_of
from pscluster.coordinator.variables.initial_values import initial_value_of
from pscluster.coordinator.variables.partitioners import partition_for
from pscluster.coordinator.variables.placement import ShardPlacer
from pscluster.core.display.notebook import current_cell
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.fault_points import reach
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.core.handles import Handle
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.keys import parse_variable_key
from pscluster.ps.handles.registry import handle_of
from pscluster.ps.handles.scope import Partitioner, VariableRequest, colocation
from pscluster.ps.handles.variables.variable import Variable, VariableList
from pscluster.ps.spec import NOT_IN_STEP, OWN_RULE, RESERVED, partition_of, row_order_message
from pscluster.ps.tables import seeded
from pscluster.v1 import definition_pb2, ps_pb2

logger = logging.getLogger(__name__)

_TAKEN = {
    "variable": "names are unique in a strategy, those of variables and optimizers together; give another one or "
    "none, or use the one that exists (strategy.variables); strategy.delete_variable(variable) deletes one",
    "metric": "names are unique in a strategy; give another one or none",
}


_KINDS = ("variable", "table")  # of what is no optimizer, see `VariableRequest.kind`


class Deferred(Protocol):
    """What is to be restored once it is made."""

    def variable_made(self, variable: Variable) -> None:
        """Restore a variable, if it was awaited."""

    def variable_deleted(self, variable: Variable) -> None:
        """Forget a variable."""

    def optimizer_made(self, name: str) -> None:
        """Restore what an optimizer had kept, if it was awaited."""


class VariableCreator:
    """Creates the variables and optimizers of one job: the `Creator` of its strategy's scope. Thread-safe.

    `partitioner` cuts variables that have none of their own; None: they stay whole.
    """

    def __init__(
        self, client: PsClient, policy: SerializationPolicy, placer: ShardPlacer, partitioner: Partitioner | None
    ) -> None:
        self.serialization = policy
        self._client = client
        self._placer = placer
        self._partitioner = partitioner
        # Held while variables or optimizers are created, and while shards change their servers, or servers come and go.
        self.placing = threading.RLock()
        self._lock = threading.Lock()
        self._variables: dict[str, Variable] = {}
        self._reserved: dict[tuple[str, str], int | None] = {}  # with the cell of a notebook that has
        self._optimizers: dict[str, ps_pb2.OptimizerSpec] = {}
        self._warned: int | None = None  # the last cell that was logged to make something again
        self._live = LiveJob()
        self._last_id = 0
        self.deferred: Deferred | None = None
        self.combines_gradients = False
        """Whether those of all replicas are combined, which must be exact."""

    def go_on_with(self, live: LiveJob) -> None:
        """Attach to what an earlier coordinator has left, once the script creates things of those names."""
        self._live, self._last_id = live, live.last_id

    def resize(self, servers: int) -> None:
        """Place variables that are created from now on among this many servers."""
        with self._lock:
            self._placer.resize(servers)

    def shard_moved(self, nbytes: int, source: int, target: int) -> None:
        """Note, for the placement of other variables, that a shard has another server."""
        with self._lock:
            self._placer.move(nbytes, source, target)

    def cut_otherwise(self, old: ps_pb2.VariableSpec, new: ps_pb2.VariableSpec) -> None:
        """Note that a variable has other shards, elsewhere: its handles go on with them."""
        dtype = dtype_named(new.dtype)
        with self._lock:
            if new.name in self._variables:
                self._placer.release(partition_of(old), dtype, list(old.owners))
                self._placer.adopt(partition_of(new), dtype, list(new.owners))
        self._client.placements.learn([new])

    @property
    def num_servers(self) -> int:
        return self._client.num_servers

    @property
    def all(self) -> list[Variable]:
        return VariableList(self._variables.values())

    def resolve_handle(self, kind: str, key: str) -> Handle:
        """Return the handle that a function returned. ProtocolError if it is unknown here."""
        if kind == Variable.handle_kind:
            number, name = parse_variable_key(key)
            if (known := self._variables.get(name)) is not None and number in (0, known.id, known.origin):
                return known
        handle = handle_of(kind, key, lambda: self._client, self.resolve_handle)
        if handle is None:
            raise ProtocolError(f"there is no {kind} {key!r} here")
        return handle

    def numbers(self, count: int) -> Sequence[int]:
        """Return `count` ids that nothing on the servers has."""
        with self._lock:
            self._last_id += count
            return range(self._last_id - count + 1, self._last_id + 1)

    def create_variable(self, request: VariableRequest) -> Variable:
        with self.placing, self.reserving("variable", request.name, request.kind) as name:
            initial = initial_value_of(request, name, self.serialization)
            shape, dtype = initial.shape, initial.dtype
            wire_dtype, push_top_k = encoding_of(request, name, dtype)
            if (wire_dtype or push_top_k) and request.consistency == "sync" and self.combines_gradients:
                raise MisuseError(f"variable {name!r} {NOT_IN_STEP}")
            if (spec := self._live.take_variable(name, shape, dtype, request.table)) is not None:
                with self._lock:
                    self._placer.adopt(partition_of(spec), dtype, list(spec.owners))
                if (spec.wire_dtype, spec.push_top_k) != (wire_dtype, push_top_k):
                    logger.warning(
                        "variable %r keeps the wire_dtype and push_top_k it has in the resumed job; those given here "
                        "are ignored",
                        name,
                    )
                return self._made(Variable.of(spec, self._client))
            beside = colocation()
            partitioner = None if beside is not None else request.partitioner or self._partitioner
            partition = partition_for(partitioner, shape, dtype, name)
            check_shards(partition, push_top_k, name)
            with self._lock:
                if beside is None:
                    owners = list(self._placer.place(name, partition, dtype))
                else:
                    owners = [beside]
                    self._placer.adopt(partition, dtype, owners)
                self._last_id += 1
                variable_id = self._last_id
            try:
                spec = ps_pb2.VariableSpec(
                    id=variable_id,
                    name=name,
                    dtype=dtype.name,
                    shape=shape,
                    splits=[ps_pb2.AxisSplit(ends=ends) for ends in partition.ends],
                    owners=owners,
                    trainable=request.trainable,
                    asynchronous=request.consistency == "async",
                    row_order=row_order_message(partition.order),
                    table=None if request.table is None else seeded(request.table, name),
                    wire_dtype=wire_dtype,  # type: ignore[arg-type]
                    push_top_k=push_top_k,
                )
                if (earlier := self._variables.pop(name, None)) is not None:  # of a cell that has run before
                    self._delete(earlier)
                reach("coordinator.create.before")
                self._client.create_variable(spec, initial.shards(partition), initial.initializers)
                reach("coordinator.create.after")
            except BaseException:
                with self._lock:
                    self._placer.release(partition, dtype, owners)
                raise
            return self._made(Variable.of(spec, self._client))

    def _made(self, variable: Variable) -> Variable:
        """Enter a variable, and restore it if it was awaited; or delete it if that is not possible, and raise."""
        self._variables[variable.name] = variable
        if self.deferred is not None:
            try:
                self.deferred.variable_made(variable)
            except BaseException:
                self.delete_variable(variable)
                raise
        return variable

    def create_optimizer(
        self, spec: ps_pb2.OptimizerSpec, forms: Sequence[definition_pb2.Definition]
    ) -> tuple[ps_pb2.OptimizerSpec, PsClient]:
        if (live := self._live.take_optimizer(spec)) is not None:
            spec = live
        elif (earlier := self._optimizers.get(spec.name)) is not None:
            _check_same(spec, earlier)
            spec.id = earlier.id  # it keeps the slots of variables that are not made again
        else:
            (spec.id,) = self.numbers(1)
        with self.placing:
            self._client.create_optimizer(spec, forms)
            if self.deferred is not None:
                self.deferred.optimizer_made(spec.name)
        self._optimizers[spec.name] = spec
        return spec, self._client

    def delete_variable(self, variable: Variable) -> None:
        """Delete a variable with its slots from its servers. Its name is free again, and its handles are stale."""
        with self.placing:  # not while it is being resharded
            self._variables.pop(variable.name, None)
            self._delete(variable)
        with self._lock:
            self._reserved.pop(("variable", variable.name), None)

    def _delete(self, variable: Variable) -> None:
        if self.deferred is not None:
            self.deferred.variable_deleted(variable)
        self._client.delete_variable(variable.name, variable.id)
        with self._lock:
            self._placer.release(variable.partition, variable.dtype, list(variable.owners))

    @contextlib.contextmanager
    def reserving(self, namespace: str, name: str | None, kind: str | None = None) -> Iterator[str]:
        """Reserve the name, or a free one made from the kind. It is free again if the block raises.

        In a notebook a variable, a metric or an optimizer that an earlier cell has made under this name makes way.
        """
        kind, cell = kind or namespace, current_cell()
        earlier: int | None = None
        with self._lock:
            if name is None:
                free = (f"{kind}_{suffix}" if suffix else kind for suffix in itertools.count())
                name = next(candidate for candidate in free if (namespace, candidate) not in self._reserved)
            elif not isinstance(name, str) or not 0 < len(name) <= 1000 or _has_surrogates(name):
                raise MisuseError(f"the {kind}'s name must be a string of 1 to 1000 characters, not {name!r:.80}")
            elif name.startswith(RESERVED):
                raise MisuseError(
                    f"the {kind} can't be named {name!r}: names that begin with {RESERVED!r} are pscluster's own"
                )
            elif (namespace, name) in self._reserved:
                earlier = self._earlier_cell(namespace, name, kind, cell)
            self._reserved[namespace, name] = cell
        try:
            yield name
        except BaseException:
            if earlier is None and namespace == "variable":
                self._optimizers.pop(name, None)  # it was made, and something that belongs to it was not
            if earlier is None or (namespace == "variable" and not self._is_made(name)):
                self._reserved.pop((namespace, name), None)
            else:
                self._reserved[namespace, name] = earlier
            raise

    def _is_made(self, name: str) -> bool:
        return name in self._variables or name in self._optimizers

    def _earlier_cell(self, namespace: str, name: str, kind: str, cell: int | None) -> int:
        """Return the earlier cell that has taken the name; MisuseError unless what it made may be made again."""
        is_optimizer = namespace == "variable" and name not in self._variables  # they share their names
        wants_optimizer = namespace == "variable" and kind not in _KINDS
        taken_by = "an optimizer" if is_optimizer else f"a {namespace}"
        earlier = self._reserved[namespace, name]
        if cell is None or earlier in (None, cell) or is_optimizer is not wants_optimizer:
            raise MisuseError(f"there is already {taken_by} {name!r}: {_TAKEN[namespace]}")
        if self._warned != cell:
            self._warned = cell
            logger.warning(
                "this cell makes again what an earlier one has made, such as %s %r: earlier values are gone", kind, name
            )
        return earlier


def _check_same(spec: ps_pb2.OptimizerSpec, earlier: ps_pb2.OptimizerSpec) -> None:
    """Raise MisuseError if an optimizer differs from that of an earlier cell in more than its hyperparameters."""
    policy = json.loads(spec.options or "{}").get("nonfinite", "apply")
    one, other = ((it.rule, it.options, bool(it.ema_momentum)) for it in (spec, earlier))
    if one != other or spec.rule == OWN_RULE or policy != "apply":
        raise MisuseError(
            f"there is already an optimizer {spec.name!r}, which this one can't take over from: leave out its name, or "
            "give another one"
        )


def _has_surrogates(text: str) -> bool:
    """Return whether the text has halves of characters, which no message can carry."""
    return any("\ud800" <= character <= "\udfff" for character in text)
