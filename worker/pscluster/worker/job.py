"""What a worker holds for a job: definitions, resources, attachments, and its client of the parameter servers.

A coordinator that attaches gets a fresh `Job` under a fresh incarnation and sends everything anew; what an
earlier attachment left is dropped, and its late updates are refused by the servers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import (
    MisuseError,
    ProtocolError,
    PsClusterError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
)
from pscluster.core.functions.definitions import FunctionHandle, resolve
from pscluster.core.handles import Handle
from pscluster.core.metrics.trace import Recording
from pscluster.core.transport.frames import Buffer
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.registry import handle_of
from pscluster.ps.spec import PINNED
from pscluster.v1 import definition_pb2, worker_pb2
from pscluster.worker.data.per_worker import InputContext, WorkerDataset, WorkerIterator, call_dataset_fn, mixed_seed
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.prefetch import Part, Reader
from pscluster.worker.function_metrics import WorkerCounts
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
        counts: WorkerCounts | None = None,
    ) -> None:
        self._counts = counts or WorkerCounts(Recording())
        self.incarnation = incarnation
        self.worker_index = worker_index
        self.num_workers = num_workers
        self._seed = seed
        self._term = 0
        self._client = client
        self._connect_timeout = connect_timeout
        self._connected = False
        self._connecting = threading.Lock()
        self._lock = threading.Lock()
        self._handles: dict[tuple[str, str], Handle] = {("strategy", ""): StepStrategy(client)}
        # Of copies that are there for one evaluation: for as long as its function is.
        self._passing: weakref.WeakValueDictionary[tuple[str, str], Handle] = weakref.WeakValueDictionary()
        self._definitions: dict[str, Callable[..., Any]] = {}
        self._arguments: dict[int, list[memoryview]] = {}
        self._results: dict[int, Sequence[Buffer]] = {}
        self._fetched = threading.Condition(self._lock)
        self._pipelines: dict[str, Pipeline] = {}  # by the dataset's number
        self._unloadable: dict[str, str] = {}  # datasets that are none here, and why
        self._parts: dict[int, list[Part]] = {}  # by the function that they were sent for
        self._reader = Reader(self.context(function=0, attempt=0))
        self.closed = threading.Event()

    def close(self) -> None:
        """The attachment is over."""
        self.closed.set()
        self._reader.end()
        self._client.close()

    def client(self) -> PsClient:
        """The parameter servers' client, connected. PSUnavailableError if one is out of reach for too long."""
        with self._connecting:
            if not self._connected:
                try:
                    self._client.connect(self._connect_timeout, self.closed)
                except UnavailableError as error:
                    raise PSUnavailableError(str(error)) from None
                self._connected = True
        return self._client

    def tell_seen(self, servers: Sequence[int]) -> None:
        """Have these servers compare what they have with what this worker was told of.

        Raises:
            ProtocolError: there is no such server.
        """
        if wrong := [index for index in servers if index >= self._client.num_servers]:
            raise ProtocolError(f"there is no parameter server {wrong[0]}: there are {self._client.num_servers}")
        # Not on behalf of the function that runs, which may have been asked to stop.
        with running(self.context(function=0, attempt=0)):
            self._client.tell_seen(servers)

    # Handles

    def resolve_handle(self, kind: str, key: str) -> Handle:
        """This worker's object for a handle."""
        if kind == FunctionHandle.handle_kind:
            return cast("Handle", self.definition(key))  # what is loaded with it takes it for the function
        with self._lock:
            known = self._handles.get((kind, key), self._passing.get((kind, key)))
        if known is not None:
            return known
        handle = handle_of(kind, key, self.client, self.resolve_handle)
        if handle is None:
            raise ProtocolError(f"there is no {kind} {key!r} on this worker")
        with self._lock:
            if PINNED in key:
                return self._passing.setdefault((kind, key), handle)
            return self._handles.setdefault((kind, key), handle)

    # Definitions and resources

    def define(self, definition: definition_pb2.Definition, bulk: memoryview) -> None:
        """Take a function or class. UnresolvedReference if it goes by a reference that leads nowhere here."""
        function = resolve(definition, bulk, self.resolve_handle)
        with self._lock:
            self._definitions[definition.digest] = function

    def definition(self, digest: str) -> Callable[..., Any]:
        """What was defined under that digest."""
        with self._lock:
            function = self._definitions.get(digest)
        if function is None:
            raise ProtocolError(f"function {digest[:12]} was never defined on this worker")
        return function

    def build(self, resource: worker_pb2.Resource) -> None:
        """Build a per-worker iterator. Errors of the user's function wait in it for the step that uses it."""
        kind: type[WorkerIterator | WorkerDataset] = WorkerDataset if resource.iterable else WorkerIterator
        place = kind.handle_kind, str(resource.id)
        with self._lock:
            if place in self._handles:  # a copy of the request: an iterator goes on where it is
                return
        if resource.unloadable and resource.distributed:
            self._unloadable[str(resource.id)] = resource.unloadable
            return
        dataset_fn = _raising(resource.unloadable) if resource.unloadable else self.definition(resource.definition)
        if resource.distributed:
            self._pipelines.setdefault(str(resource.id), dataset_fn())
            return
        context = InputContext(
            self.worker_index, self.num_workers, mixed_seed(self._seed, resource.seed, self.worker_index)
        )
        with running(self.context(function=0, attempt=0)):
            made = kind(str(resource.id), lambda: call_dataset_fn(dataset_fn, context), self._counts.waited_for_data)
        with self._lock:
            self._handles.setdefault(place, made)

    # Parts of distributed datasets

    @property
    def reads_ahead(self) -> bool:
        """Does it pay to know early which parts are next?"""
        return self._reader.is_slow

    def expect_parts(self, step: worker_pb2.Step) -> None:
        """A function that waits here will want these: begin to read them."""
        with contextlib.suppress(ProtocolError, MisuseError):  # the step itself will say so
            self.parts_of(step)

    def parts_of(self, step: worker_pb2.Step) -> list[Part]:
        """Those of a function, made when they are first asked for."""
        with self._lock:
            parts = self._parts.get(step.function)
            if parts is None:
                numbers = [key.partition("/")[0] for key in step.parts]
                pipelines = [self._pipelines.get(number) for number in numbers]
                if None in pipelines:
                    raise self._no_dataset(numbers)
                parts = [
                    Part(key, pipeline, self._reader, skips=step.skips)
                    for key, pipeline in zip(step.parts, pipelines, strict=True)
                    if pipeline is not None
                ]
                self._parts[step.function] = parts
                for part in parts:
                    self._reader.add(part)
            return parts

    def _no_dataset(self, numbers: Sequence[str]) -> PsClusterError:
        """Under the lock: the error of a function whose datasets, of these numbers, are not all here."""
        why = next((self._unloadable[number] for number in numbers if number in self._unloadable), "")
        return MisuseError(why) if why else ProtocolError(f"a dataset of {', '.join(numbers)} is not on this worker")

    def drop_parts(self, function: int) -> None:
        """It has ended, or goes elsewhere."""
        with self._lock:
            parts = self._parts.pop(function, ())
        for part in parts:
            self._reader.close(part)

    def release(self, resources: Sequence[int], definitions: Sequence[str]) -> None:
        """Nobody uses these any more."""
        with self._lock:
            for number in resources:
                if self._pipelines.pop(str(number), None) is not None:
                    self._reader.forget(str(number))
                self._unloadable.pop(str(number), None)
                for kind in (WorkerIterator, WorkerDataset):
                    self._handles.pop((kind.handle_kind, str(number)), None)
            for digest in definitions:
                self._definitions.pop(digest, None)

    def context(self, *, function: int, attempt: int, key: int = 0, term: int = 0) -> FunctionContext:
        """The context for a function of this job. The first one of a term begins it for all that runs beside it."""
        if term > self._term:
            self._term = self._client.term = term
        return FunctionContext(
            function=function,
            attempt=attempt,
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            key=key,
            term=term,
        )

    # Large arrays of arguments and results

    def take_arguments(self, position: int, attachments: list[memoryview]) -> None:
        """The large arrays of the arguments of the step at that position have come."""
        with self._lock:
            self._arguments[position] = attachments

    def pop_arguments(self, position: int) -> list[memoryview]:
        """Those arrays; they are not kept."""
        with self._lock:
            return self._arguments.pop(position, [])

    def put_result(self, function: int, attachments: Sequence[Buffer]) -> None:
        """Keep the large arrays of a result until they have been fetched."""
        with self._lock:
            self._results[function] = attachments

    def result(self, function: int) -> Sequence[Buffer]:
        """The large arrays of a result."""
        with self._lock:
            if function not in self._results:
                raise StaleError(f"function {function} has no result to fetch on this worker")
            return self._results[function]

    def drop_result(self, function: int) -> None:
        """They have been fetched."""
        with self._lock:
            self._results.pop(function, None)
            self._fetched.notify_all()

    def wait_fetched(self, timeout: float) -> bool:
        """Wait until no result is left to fetch. False if that takes longer."""
        with self._fetched:
            return self._fetched.wait_for(lambda: not self._results, timeout)


def _raising(why: str) -> Callable[[], Any]:
    """What stands for a `dataset_fn` that can't be loaded here."""

    def dataset_fn() -> Any:
        raise MisuseError(why)

    return dataset_fn
