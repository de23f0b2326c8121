"""A worker's state for a job: definitions, resources, attachments, and its client of the parameter servers.

A coordinator that attaches gets a fresh `Job` under a fresh incarnation and sends everything again. The state of an
earlier attachment is dropped, and its late updates are refused by the servers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from pscluster.core.checks import type_of
from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import MisuseError, ProtocolError, PSUnavailableError, UnavailableError
from pscluster.core.functions.definitions import FunctionHandle, resolve
from pscluster.core.handles import Handle
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.frames import Buffer
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.overlap.queue import OverlapQueue
from pscluster.ps.client.synchronous.copies import Copies
from pscluster.ps.handles.registry import handle_of
from pscluster.ps.handles.variables.sharded import JoinedVariable
from pscluster.ps.handles.variables.variable import Variable
from pscluster.v1 import definition_pb2, ps_pb2, worker_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.membership import Membership
from pscluster.worker.data.per_replica import OfReplicas
from pscluster.worker.data.per_worker import InputContext, WorkerDataset, WorkerIterator, call_dataset_fn, mixed_seed
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.prefetch import Part, Reader
from pscluster.worker.features.layer import Layer
from pscluster.worker.function_metrics import WorkerMetrics
from pscluster.worker.objects import WorkerObject
from pscluster.worker.programs.store import BlockStore
from pscluster.worker.steps.overlap import Overlap, overlap_of
from pscluster.worker.strategy import StepStrategy

logger = logging.getLogger(__name__)


class Job:
    """One attachment of a coordinator to this worker. Thread-safe."""

    def __init__(
        self,
        *,
        incarnation: int,
        worker_index: int,
        num_workers: int,
        seed: int,
        client: PsClient,
        connect_timeout: float,
        metrics: WorkerMetrics,
        pool: ConnectionPool,
    ) -> None:
        self.metrics = metrics
        self.incarnation = incarnation
        self.worker_index = worker_index
        self.num_workers = num_workers
        self._seed = seed
        self._term = 0
        self._client = client
        self._connect_timeout = connect_timeout
        self._connected = False
        self._connecting = threading.Lock()
        self._placing = threading.Lock()
        self._placements = 0
        self._lock = threading.Lock()
        own: list[Handle] = [StepStrategy(client), BlockStore()]
        self._handles: dict[tuple[str, str], Handle] = {(item.handle_kind, item.handle_key): item for item in own}
        self._variables: dict[str, Variable] = {}  # by name, those among them that are variables
        # Those of an evaluation snapshot, while a function uses them.
        self._passing: weakref.WeakValueDictionary[tuple[str, str], Handle] = weakref.WeakValueDictionary()
        self._definitions: dict[str, Callable[..., Any]] = {}
        self._layers: dict[str, Layer] = {}  # by their definition's digest
        self._making_layers = threading.Lock()  # a large vocabulary takes a second
        self.arguments: dict[int, list[memoryview]] = {}
        """Large arrays of arguments, by the position of the step."""
        self.results: dict[int, Sequence[Buffer]] = {}
        """Large arrays of results, by function, until they have been fetched."""
        self.steps_taken: dict[int, tuple[int, int]] = {}
        """By replica: the synchronous run of which it has last taken a step here, and how many steps it then had."""
        self.before_last_step: dict[int, dict[int, int]] = {}
        """By replica: the positions of its iterators before the last step under a bound that it has taken here."""
        self.joint_copies: dict[int, tuple[str, Copies]] = {}
        """By replica: the function whose steps were last taken together here, and the copies that they update."""
        self._hosted: Collection[int] = ()  # replicas that have last run here
        self._fetched = threading.Condition(self._lock)
        self._pipelines: dict[str, Pipeline] = {}  # by dataset id
        self._unloadable: dict[str, str] = {}  # dataset ids, with the reason
        self._parts: dict[int, list[Part]] = {}  # by function
        self._reader = Reader(self.context(function=0, attempt=0))
        self.membership = Membership(pool)
        self.overlap_queue: OverlapQueue | None = None
        """What functions whose steps overlap have pushed; None until there is such a function."""
        self.closed = threading.Event()

    def close(self) -> None:
        """End the reader and the client: the attachment is over."""
        self.closed.set()
        self._reader.end()
        with self._lock:
            objects = [handle for handle in self._handles.values() if isinstance(handle, WorkerObject)]
            pipelines = list(self._pipelines.values())
        for pipeline in pipelines:
            pipeline.close()
        for item in objects:
            item.drop()
        self.membership.close()
        self._client.close()

    def client(self) -> PsClient:
        """Return the connected client of the parameter servers. Raise PSUnavailableError if one stays unreachable."""
        with self._connecting:
            if not self._connected:
                try:
                    self._client.connect(self._connect_timeout, self.closed)
                except UnavailableError as error:
                    raise PSUnavailableError(str(error)) from None
                self._connected = True
        return self._client

    @property
    def num_servers(self) -> int:
        return self._client.num_servers

    def know_placements(self, count: int) -> None:
        """Have this worker know where shards are, after this many moves; drop copies of synchronous steps."""
        if count <= self._placements:
            return
        specs = self._client.moved_variables(0)  # by each of several replicas here: no lock is held meanwhile
        with self._placing:
            self._client.placements.learn(specs)
            if count > self._placements:
                self.joint_copies.clear()
                self._placements = count

    def know_cuts(self, specs: Sequence[ps_pb2.VariableSpec]) -> None:
        """Have the functions that come from now on use variables as they are cut by now; drop copies of others."""
        with self._placing:
            self._client.placements.learn(specs)
            self.joint_copies.clear()

    def move_server(self, peer: PeerAddress) -> None:
        """Dial a server there from now on, also for what waits for it."""
        self._client.move(peer)

    def resize(self, servers: Sequence[PeerAddress], store_ids: Sequence[int]) -> None:
        """Have these servers, of which some may be new. ProtocolError unless there is a store id for each."""
        count = len(servers)
        if len(store_ids) != count:
            raise ProtocolError(f"{count} parameter servers, and what {len(store_ids)} of them hold")
        with self._placing:  # not `_connecting`: a connection may wait for a server that has just moved
            known = self._client.exchanges
            while len(known.servers) > count or (
                # It was removed, and another one added with its index, before this worker was told of either.
                len(known.servers) > 1 and known.servers[-1].store_id not in (0, store_ids[len(known.servers) - 1])
            ):
                known.remove_server()
            for peer in servers[len(known.servers) :]:
                known.add_server(peer, store_ids[peer.index])

    def report_seen(self, servers: Sequence[int]) -> None:
        """Tell these servers what this worker knows, for them to compare. Raise ProtocolError if one does not exist."""
        if wrong := [index for index in servers if index >= self._client.num_servers]:
            raise ProtocolError(f"there is no parameter server {wrong[0]}: there are {self._client.num_servers}")
        # Not on behalf of the running function, which may have been told to stop.
        with running(self.context(function=0, attempt=0)):
            self._client.report_seen(servers)

    # Handles

    def resolve_handle(self, kind: str, key: str) -> Handle:
        if kind == FunctionHandle.handle_kind:
            return cast("Handle", self.definition(key))  # whatever contains the handle gets the function in its place
        if kind == Layer.handle_kind:
            return self._layer(key)
        with self._lock:
            known = self._handles.get((kind, key))
            if known is None:
                known = self._passing.get((kind, key))
        if known is not None:
            return known
        handle = handle_of(kind, key, self.client, self.resolve_handle)
        if handle is None:
            raise ProtocolError(f"there is no {kind} {key!r} on this worker")
        with self._lock:
            if handle.ephemeral:
                return self._passing.setdefault((kind, key), handle)
            if isinstance(handle, Variable) and kind == Variable.handle_kind:
                old = self._variables.setdefault(handle.name, handle)
                if old.id < handle.id:  # it was deleted, and its name given again
                    self._handles.pop((kind, old.handle_key), None)
                    self._variables[handle.name] = handle
            return self._handles.setdefault((kind, key), handle)

    def _layer(self, digest: str) -> Layer:
        """Return the layer that a definition makes, the same one for all functions."""
        with self._making_layers:
            if (layer := self._layers.get(digest)) is None:
                made = self.definition(digest)()
                if not isinstance(made, Layer):
                    raise ProtocolError(f"definition {digest[:12]} makes {type_of(made)}, not a layer")
                layer = self._layers[digest] = made
            return layer

    def iterator_of(self, resource: int, rank: int) -> WorkerIterator | None:
        """Return a replica's iterator of a per-worker dataset; None if there is none."""
        with self._lock:
            handle: object = self._handles.get((WorkerIterator.handle_kind, str(resource)))
        if isinstance(handle, OfReplicas):
            handle = handle.of(rank)
        return handle if isinstance(handle, WorkerIterator) else None

    def host(self, ranks: Collection[int]) -> None:
        """Forget the data of replicas that have run here and do not now: they are back where they belong."""
        if ranks == self._hosted:
            return
        self._hosted = ranks
        with self._lock:
            handles = [handle for handle in self._handles.values() if isinstance(handle, OfReplicas)]
        for handle in handles:
            handle.keep(ranks)

    # Definitions and resources

    def define(self, definition: definition_pb2.Definition, bulk: memoryview) -> None:
        """Take a function or class. Raise UnresolvedReference if it is a reference that can't be followed here."""
        function = resolve(definition, bulk, self.resolve_handle)
        if self.overlap_queue is None and overlap_of(function) is not None:
            self.overlap_queue = OverlapQueue(self._client.exchanges.submit)
        self._definitions[definition.digest] = function

    def definition(self, digest: str) -> Callable[..., Any]:
        if (function := self._definitions.get(digest)) is None:
            raise ProtocolError(f"function {digest[:12]} was never defined on this worker")
        return function

    def overlap_of(self, digest: str) -> Overlap | None:
        """Return how the steps of a function overlap; None if they do not."""
        function = self._definitions.get(digest)
        return None if function is None else overlap_of(function)

    def build(self, resource: worker_pb2.Resource) -> None:
        """Build a dataset or per-worker iterator. Errors of the user's function are raised in the step that uses it.

        An object is only made known: the first function that asks for it makes it.
        """
        if resource.object:
            self._know_object(resource)
            return
        kind: type[WorkerIterator | WorkerDataset] = WorkerDataset if resource.iterable else WorkerIterator
        name = kind.handle_kind, str(resource.id)
        with self._lock:
            if name in self._handles:  # a repeated request: an iterator keeps its position
                return
        dataset_fn = None if resource.unloadable else self.definition(resource.definition)
        if resource.distributed:
            if dataset_fn is None:
                self._unloadable[str(resource.id)] = resource.unloadable
            else:
                self._pipelines.setdefault(str(resource.id), dataset_fn())
            return
        pipelines, each = resource.replicas or self.num_workers, resource.replicas_per_worker or 1
        if pipelines % each:
            raise ProtocolError(f"{pipelines} replicas, {each} of each worker")

        def make(pipeline: int) -> WorkerIterator | WorkerDataset:
            seed = mixed_seed(self._seed, resource.seed, pipeline)
            context = InputContext(pipeline // each, pipelines // each, pipeline, pipelines, seed)

            def build() -> Any:
                if dataset_fn is None:
                    raise MisuseError(resource.unloadable)
                return call_dataset_fn(dataset_fn, context)

            with running(self.context(function=0, attempt=0)):
                return kind(str(resource.id), build, self.metrics.waited_for_data)

        handle: Handle
        if resource.replicas:
            first = resource.first_replica
            handle = OfReplicas(str(resource.id), kind.handle_kind, make, range(first, min(first + each, pipelines)))
        else:
            handle = make(self.worker_index)
        with self._lock:
            self._handles.setdefault(name, handle)

    def _know_object(self, resource: worker_pb2.Resource) -> None:
        fn = None if resource.unloadable else self.definition(resource.definition)

        def make() -> Any:
            if fn is None:
                raise MisuseError(resource.unloadable)
            with running(self.context(function=0, attempt=0)):
                return fn()

        key, place = str(resource.id), f"worker:{self.worker_index}"
        handle = WorkerObject(key, f"per-worker object {resource.name!r} on {place}", make)
        with self._lock:
            self._handles.setdefault((handle.handle_kind, key), handle)

    # Parts of distributed datasets

    @property
    def reads_ahead(self) -> bool:
        """Whether it helps to know early which parts are next."""
        return self._reader.is_slow

    def expect_parts(self, step: worker_pb2.Step) -> None:
        """Start reading the parts of a function that waits here."""
        with contextlib.suppress(ProtocolError, MisuseError):  # raised again when the step runs
            self.parts_of(step)

    def parts_of(self, step: worker_pb2.Step) -> list[Part]:
        """Return the parts of a function, created on first use."""
        with self._lock:
            parts = self._parts.get(step.function)
            if parts is None:
                parts = [Part(key, self._pipeline_of(key), self._reader, skips=step.skips) for key in step.parts]
                self._parts[step.function] = parts
                for part in parts:
                    self._reader.add(part)
            return parts

    def _pipeline_of(self, part_key: str) -> Pipeline:
        """Return the pipeline of a part. Raise MisuseError or ProtocolError if it is not here. Under the lock."""
        dataset = part_key.partition("/")[0]
        if dataset in self._unloadable:
            raise MisuseError(self._unloadable[dataset])
        if dataset not in self._pipelines:
            raise ProtocolError(f"dataset {dataset} is not on this worker")
        return self._pipelines[dataset]

    def drop_parts(self, function: int) -> None:
        """Close the parts of a function that has ended, or goes to another worker."""
        with self._lock:
            parts = self._parts.pop(function, ())
        for part in parts:
            self._reader.close(part)

    def release(self, resources: Sequence[int], definitions: Sequence[str], variables: Collection[int] = ()) -> None:
        """Forget resources, definitions, and deleted variables with what consists of them."""
        gone = []
        with self._lock:
            for resource in map(str, resources):
                if (pipeline := self._pipelines.pop(resource, None)) is not None:
                    gone.append(pipeline)
                    self._reader.forget(resource)
                self._unloadable.pop(resource, None)
                for kind in (WorkerIterator, WorkerDataset, WorkerObject):
                    handle: object = self._handles.pop((kind.handle_kind, resource), None)
                    if isinstance(handle, WorkerObject):
                        handle.drop()
            if variables:
                self._forget_variables(variables)
            for digest in definitions:
                self._definitions.pop(digest, None)
                self._layers.pop(digest, None)
        for pipeline in gone:
            pipeline.close()

    def _forget_variables(self, origins: Collection[int]) -> None:
        """Forget the handles of variables that were deleted, and those that consist of them. Under the lock."""
        for name, handle in list(self._handles.items()):
            if not isinstance(handle, Variable):
                continue
            members = handle.variables if isinstance(handle, JoinedVariable) else [handle]  # a slot has its origin
            if any(member.origin in origins for member in members):
                del self._handles[name]
                if self._variables.get(handle.name) is handle:
                    del self._variables[handle.name]
                    self._client.updater.forget(handle.id)

    def context(self, *, function: int, attempt: int, key: int = 0, term: int = 0) -> FunctionContext:
        """Return the context for a function of this job. The first one of a term also sets the client's term."""
        if term > self._term:
            self._term = self._client.updater.term = term
        return FunctionContext(
            function=function,
            attempt=attempt,
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            key=key,
            term=term,
        )

    def drop_result(self, function: int) -> None:
        """Forget the large arrays of a result that has been fetched."""
        with self._lock:
            self.results.pop(function, None)
            self._fetched.notify_all()

    def wait_fetched(self, timeout: float) -> bool:
        """Wait until no result is left to fetch. Return False after `timeout` seconds."""
        with self._fetched:
            return self._fetched.wait_for(lambda: not self.results, timeout)
