"""Sends each worker the functions, classes and per-worker resources that it lacks, and has it drop unused ones."""

from __future__ import annotations

import itertools

import grpc

from pscluster.coordinator.scheduling.calls.call import ResourceRecipe
from pscluster.coordinator.scheduling.calls.function_errors import not_begun, unpreparable
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.state import DispatchState, WorkerHandle
from pscluster.core.errors import MisuseError, PSUnavailableError
from pscluster.core.functions.definitions import CapturedFunction, split_off_bulk
from pscluster.v1 import worker_pb2

MAX_DEFINITIONS = 256
"""Functions and classes that a worker keeps beyond those that it still needs."""


def has_definition(handle: WorkerHandle, function: CapturedFunction) -> bool:
    """Return whether the worker has a function, and if so mark it as the last one used. Under the lock."""
    if function.digest not in handle.known:
        return False
    handle.known[function.digest] = handle.known.pop(function.digest)
    return True


class DefinitionsCache:
    """Sends workers what functions need, once."""

    def __init__(self, state: DispatchState, server_watch: ServerWatch) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._server_watch = server_watch
        self.resources: dict[int, ResourceRecipe] = {}

    def _drop(self, digest: str) -> None:
        """Have all workers drop a definition. On the loop's thread."""
        with self._state.lock:
            having = [handle for handle in self._state.workers if digest in handle.known]
            for handle in having:
                del handle.known[digest]
        for handle in having:
            if handle.connection is not None:
                self._state.in_background(handle.connection.release(definitions=[digest]))

    def release_function(self, function: CapturedFunction) -> None:
        """Have the workers drop a function that will not be scheduled again."""
        self._state.on_loop(self._drop, function.digest)

    async def define(self, handle: WorkerHandle, connection: WorkerConnection, function: CapturedFunction) -> None:
        """Send the worker a function or class. Raise MisuseError or TypeError if that is not possible."""
        with self._state.lock:
            if has_definition(handle, function):
                return
        for inner in function.functions:
            await self.define(handle, connection, inner)
        why = ""
        for form in function.forms():
            head = worker_pb2.UploadRequest(definition=form)
            bulk = split_off_bulk(head.definition)
            why = await connection.upload(head, [memoryview(bulk)] if bulk else ())
            if not why:
                handle.known[function.digest] = None
                return
        raise MisuseError(why)

    async def forget_unused(self, index: int, handle: WorkerHandle, connection: WorkerConnection) -> None:
        """Have the worker drop the least recently used definitions if it has too many."""
        if len(handle.known) <= MAX_DEFINITIONS:
            return
        with self._state.lock:
            calls = [task.payload for task in self._scheduler.workers[index].sent.values()]
            used = {digest for call in calls for digest in (call.function.digest, *call.classes)}
            oldest = itertools.islice(handle.known, len(handle.known) - MAX_DEFINITIONS // 2)
            dropped = [digest for digest in oldest if digest not in used]
            for digest in dropped:
                del handle.known[digest]
        await connection.release(definitions=dropped)

    async def build_resources(self, handle: WorkerHandle, connection: WorkerConnection) -> None:
        """Build the resources that the worker lacks."""
        for resource_id in set(self.resources) - handle.built:  # an atomic copy: other threads add
            if (recipe := self.resources.get(resource_id)) is None:  # released meanwhile
                continue
            resource = worker_pb2.Resource()
            resource.CopyFrom(recipe.message)
            if resource.replicas:
                at = recipe.homes.index(handle.peer.index) if handle.peer.index in recipe.homes else len(recipe.homes)
                resource.first_replica = at * resource.replicas_per_worker
            try:
                await self.define(handle, connection, recipe.function)
            except (grpc.RpcError, MisuseError, TypeError) as error:
                failure = unpreparable(error, handle.peer)
                if isinstance(failure, PSUnavailableError):  # the cluster's error, not the dataset's
                    self.resources.pop(resource_id, None)
                    with self._state.lock:
                        self._server_watch.doubt()
                    self._state.abort(not_begun(recipe.function, handle.peer.index, 0, failure), final=False)
                    continue
                # Raised by functions that use it, like an error of `dataset_fn`: others are not affected.
                resource.unloadable = f"{recipe.function.name} can't be used on {handle.peer}: {failure}"
            await connection.upload(worker_pb2.UploadRequest(resource=resource))
            handle.built.add(resource_id)
            if resource_id not in self.resources:  # released while it was built
                self._release_everywhere(recipe.message)

    def add_resource(self, recipe: ResourceRecipe) -> None:
        """Build this on every worker before its next function."""
        with self._state.lock:
            self.resources[recipe.message.id] = recipe
        self._state.on_loop(self._state.wake_all)

    def release_resource(self, resource_id: int) -> None:
        """Drop an unused resource. Takes no lock: the garbage collector may call this, on any thread."""
        if (recipe := self.resources.pop(resource_id, None)) is not None:
            self._state.on_loop(self._release_everywhere, recipe.message)

    def release_variable(self, origin: int) -> None:
        """Have all workers drop their handles of a variable that was deleted. A worker that is gone has none."""
        self._state.on_loop(self._release_variable, origin)

    def _release_variable(self, origin: int) -> None:
        for handle in self._state.workers:
            if handle.connection is not None:
                self._state.in_background(handle.connection.release(variables=[origin]))

    def _release_everywhere(self, resource: worker_pb2.Resource) -> None:
        # A dataset's definition holds its data and belongs to this resource alone; a function may be used again.
        definitions = [resource.definition] if resource.distributed else []
        for handle in self._state.workers:
            if resource.id in handle.built and handle.connection is not None:
                handle.built.discard(resource.id)
                for digest in definitions:
                    handle.known.pop(digest, None)
                self._state.in_background(handle.connection.release([resource.id], definitions))
