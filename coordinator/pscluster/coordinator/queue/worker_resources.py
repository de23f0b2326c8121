"""What functions have on every worker: iterators, datasets, objects; and the pipelines of distributed datasets."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pscluster.coordinator.data.dataset_progress import DatasetResource
from pscluster.coordinator.data.per_worker import PerWorker, PerWorkerDataset, PerWorkerIterator
from pscluster.coordinator.queue.captured_functions import CapturedFunctions
from pscluster.coordinator.scheduling.calls.call import ResourceRecipe
from pscluster.coordinator.scheduling.definitions_cache import DefinitionsCache
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import CapturedFunction, partial_of
from pscluster.core.handles import Handle
from pscluster.v1 import worker_pb2
from pscluster.worker.data.pipelines import Pipeline, numbered
from pscluster.worker.features.layer import Layer


class WorkerResources:
    """The resources of one coordinator on its workers. Each lives as long as its handle here. Thread-safe."""

    def __init__(
        self, strategy: ParameterServerStrategy, functions: CapturedFunctions, definitions: DefinitionsCache
    ) -> None:
        self._strategy, self._functions, self._definitions = strategy, functions, definitions
        self._ids = itertools.count(1)
        self._handles: weakref.WeakValueDictionary[str, PerWorkerIterator | PerWorkerDataset | PerWorker[Any]] = (
            weakref.WeakValueDictionary()
        )

    @property
    def homes(self) -> tuple[int, ...]:
        """Return the indices of the workers whose replicas step together now; none if they do not."""
        return tuple(peer.index for peer in self._strategy.context.workers) if self._strategy.is_synchronous else ()

    def dataset(self, function: CapturedFunction) -> PerWorkerDataset:
        """Return a dataset that this function makes on each worker."""
        return PerWorkerDataset(function, self._make_iterator, self._build_dataset, lambda: self.homes)

    def worker_object(self, function: CapturedFunction, on_all_workers: Callable[..., list[Any]]) -> PerWorker[Any]:
        """Return an object that this function makes on each worker; for `on_all_workers` see `PerWorker`."""
        resource_id = next(self._ids)
        item = PerWorker[Any](resource_id, function.name, on_all_workers)
        self._handles[item.handle_key] = item
        self._build(item, function, (), id=resource_id, object=True, name=function.name)
        return item

    def send_pipeline(self, pipeline: Pipeline) -> DatasetResource:
        """Give the workers the pipeline of a distributed dataset, for as long as the returned resource exists."""
        resource_id = next(self._ids)
        # By its number it is no other one's.
        sent = partial_of(f"dataset {pipeline.name!r}", numbered, pipeline, resource_id)
        function = self._functions.capture(sent, holds_data=True)
        resource = DatasetResource(resource_id, function.handles)
        self._build(resource, function, (), id=resource_id, distributed=True)
        return resource

    def resolve_handle(self, kind: str, key: str) -> Handle:
        """Return a handle in a result. Raise MisuseError if the coordinator has none such."""
        if kind == Layer.handle_kind:
            raise MisuseError(
                "a function returned a layer: return what its get_state() does, for set_state() of another"
            )
        if kind not in (PerWorkerIterator.handle_kind, PerWorkerDataset.handle_kind, PerWorker.handle_kind):
            return self._strategy.resolve_handle(kind, key)
        handle = self._handles.get(key)
        if handle is None or handle.handle_kind != kind:
            raise MisuseError(f"a function returned a per-worker {kind} that this coordinator no longer has")
        return handle

    def _make_iterator(self, function: CapturedFunction) -> PerWorkerIterator:
        resource_id = next(self._ids)
        iterator = self._handles[str(resource_id)] = PerWorkerIterator(resource_id, self.homes)
        self._build(iterator, function, iterator.homes, id=resource_id, seed=resource_id)
        return iterator

    def _build_dataset(self, function: CapturedFunction, dataset: PerWorkerDataset) -> int:
        resource_id = next(self._ids)
        self._handles[str(resource_id)] = dataset
        self._build(dataset, function, dataset.homes, id=resource_id, seed=resource_id, iterable=True)
        return resource_id

    def _build(self, owner: object, function: CapturedFunction, homes: Sequence[int], **resource: Any) -> None:
        """Build a resource on every worker, for as long as its owner exists; `homes`: of its replicas."""
        message, definitions = worker_pb2.Resource(definition=function.digest, **resource), self._definitions
        if homes:
            message.replicas_per_worker = self._strategy.devices_per_worker
            message.replicas = len(homes) * message.replicas_per_worker
        definitions.add_resource(ResourceRecipe(message, function, homes))
        weakref.finalize(owner, definitions.release_resource, message.id).atexit = False
