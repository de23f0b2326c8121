"""Makes variables and optimizers on the parameter servers, and knows those of a job by name."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

from pscluster.coordinator.job.live_job import LiveJob
from pscluster.coordinator.variables.initial_values import initial_value_of
from pscluster.coordinator.variables.partitioners import partition_for
from pscluster.coordinator.variables.placement import ShardPlacer
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.fault_points import reach
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.core.handles import Handle
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.registry import handle_of
from pscluster.ps.handles.scope import Partitioner, VariableRequest, colocation
from pscluster.ps.handles.variable import Variable, VariableList
from pscluster.ps.spec import OURS, partition_of
from pscluster.v1 import definition_pb2, ps_pb2

_TAKEN = {
    "variable": "names are unique in a strategy, those of variables and optimizers together; give another one or "
    "none, or use the one that exists (strategy.variables); strategy.delete_variable(variable) deletes one",
    "metric": "names are unique in a strategy; give another one or none",
}


class VariableCreator:
    """Makes the variables and optimizers of one job: the `Creator` of its strategy's scope. Thread-safe.

    Args:
        client: of the parameter servers.
        policy: whether what is sent may be pickled.
        placer: chooses a server for each shard.
        partitioner: cuts variables that bring none of their own; None: they stay whole.
    """

    def __init__(
        self, client: PsClient, policy: SerializationPolicy, placer: ShardPlacer, partitioner: Partitioner | None
    ) -> None:
        self.serialization = policy
        self._client = client
        self._placer = placer
        self._partitioner = partitioner
        self._lock = threading.Lock()
        self._variables: dict[str, Variable] = {}
        self._reserved: set[tuple[str, str]] = set()
        self._live = LiveJob()
        self._last_id = 0

    def go_on_with(self, live: LiveJob) -> None:
        """Attach to what a coordinator that died has left, as things of those names are made."""
        self._live, self._last_id = live, live.last_id

    # What there is

    @property
    def all(self) -> list[Variable]:
        """All variables in the order in which they were made, the library's own among them."""
        return VariableList(self._variables.values())

    @property
    def of_user(self) -> list[Variable]:
        """Those that the script has made."""
        return VariableList(each for each in self._variables.values() if not each.name.startswith(OURS))

    def lives(self, variable: str) -> bool:
        """Is there a variable of this name, made here or still to be attached to?"""
        return variable in self._variables or variable in self._live.variables

    def resolve_handle(self, kind: str, key: str) -> Handle:
        """Return the handle that a function returned. ProtocolError if there is none of that kind here."""
        if kind == Variable.handle_kind and key in self._variables:
            return self._variables[key]
        handle = handle_of(kind, key, lambda: self._client, self.resolve_handle)
        if handle is None:
            raise ProtocolError(f"there is no {kind} {key!r} here")
        return handle

    # What is made

    def numbers(self, count: int) -> Sequence[int]:
        """Return so many numbers that nothing on the servers has."""
        with self._lock:
            self._last_id += count
            return range(self._last_id - count + 1, self._last_id + 1)

    def create_variable(self, request: VariableRequest, *, ours: bool = False) -> Variable:
        """Cut a variable, place it, and put its initial value on the servers.

        Args:
            request: what to make.
            ours: it keeps something of the library's own, and is named so.
        """
        with self.reserving("variable", request.name, ours=ours) as name:
            initial = initial_value_of(request, name, self.serialization)
            shape, dtype = initial.shape, initial.dtype
            if (spec := self._live.take_variable(name, shape, dtype)) is not None:
                with self._lock:
                    self._placer.adopt(partition_of(spec), dtype, list(spec.owners))
                variable = self._variables[name] = Variable.of(spec, self._client)
                return variable
            beside = colocation()
            partitioner = None if beside is not None else request.partitioner or self._partitioner
            partition = partition_for(partitioner, shape, dtype, name)
            with self._lock:
                if beside is None:
                    owners = list(self._placer.place(name, partition, dtype))
                else:
                    owners = [beside]
                    self._placer.adopt(partition, dtype, owners)
                self._last_id += 1
                number = self._last_id
            try:
                spec = ps_pb2.VariableSpec(
                    id=number,
                    name=name,
                    dtype=dtype.name,
                    shape=shape,
                    splits=[ps_pb2.AxisSplit(ends=ends) for ends in partition.ends],
                    owners=owners,
                    trainable=request.trainable,
                )
                reach("coordinator.create.before")
                self._client.create_variable(spec, initial.shards(partition), initial.initializers)
                reach("coordinator.create.after")
            except BaseException:
                with self._lock:
                    self._placer.release(partition, dtype, owners)
                raise
        variable = self._variables[name] = Variable.of(spec, self._client)
        return variable

    def create_optimizer(
        self,
        spec: ps_pb2.OptimizerSpec,
        forms: Sequence[definition_pb2.Definition],
    ) -> tuple[ps_pb2.OptimizerSpec, PsClient]:
        """Give an optimizer its number, and declare it to the servers."""
        if (live := self._live.take_optimizer(spec)) is not None:
            spec = live
        else:
            (spec.id,) = self.numbers(1)
        self._client.create_optimizer(spec, forms)
        return spec, self._client

    def delete_variable(self, variable: Variable) -> None:
        """Delete a variable from its servers, with its slots. Its name is free again, and handles of it are stale."""
        self._variables.pop(variable.name, None)
        self._client.delete_variable(variable.name, variable.number)
        with self._lock:
            self._placer.release(variable.partition, variable.dtype, list(variable.owners))
            self._reserved.discard(("variable", variable.name))

    # Names

    @contextlib.contextmanager
    def reserving(self, what: str, name: str | None, kind: str | None = None, *, ours: bool = False) -> Iterator[str]:
        """Take the name given, or one made up of the kind; it is free again if the block raises."""
        taken = self._reserve(what, name, kind or what, ours)
        try:
            yield taken
        except BaseException:
            self._reserved.discard((what, taken))
            raise

    def _reserve(self, what: str, name: str | None, kind: str, ours: bool) -> str:
        with self._lock:
            if name is None:
                free = (f"{kind}_{number}" if number else kind for number in itertools.count())
                name = next(candidate for candidate in free if (what, candidate) not in self._reserved)
            elif not isinstance(name, str) or not 0 < len(name) <= 1000 or _has_surrogates(name):
                raise MisuseError(f"a {kind}'s name must be a string of 1 to 1000 characters, not {name!r:.80}")
            elif name.startswith(OURS) and not ours:
                raise MisuseError(
                    f"a {kind} can't be named {name!r}: names that begin with {OURS!r} are pscluster's own"
                )
            elif (what, name) in self._reserved:
                raise MisuseError(f"there is {self._taken_by(what, name)} {name!r} already: {_TAKEN[what]}")
            self._reserved.add((what, name))
        return name

    def _taken_by(self, what: str, name: str) -> str:
        """Variables and optimizers share their names."""
        return f"a {what}" if what != "variable" or name in self._variables else "an optimizer"


def _has_surrogates(text: str) -> bool:
    """Halves of characters, which no message can carry."""
    return any("\ud800" <= character <= "\udfff" for character in text)
