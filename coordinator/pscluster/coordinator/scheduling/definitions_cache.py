"""Which functions, classes and per-worker resources each worker has, and how it is given those that it lacks."""

from __future__ import annotations

import itertools

import grpc

from pscluster.coordinator.scheduling.call import (
    ResourceRecipe,
)
from pscluster.coordinator.scheduling.outcomes import (
    not_begun,
    unpreparable,
)
from pscluster.coordinator.scheduling.server_watch import ServerWatch
from pscluster.coordinator.scheduling.settlement import Settlement
from pscluster.coordinator.scheduling.state import DispatchState, WorkerHandle
from pscluster.coordinator.scheduling.worker_connection import WorkerConnection
from pscluster.core.errors import (
    MisuseError,
    PSUnavailableError,
)
from pscluster.core.functions.definitions import CapturedFunction, split_off_bulk
from pscluster.v1 import worker_pb2

MAX_DEFINITIONS = 256
"""So many functions and classes a worker keeps, beyond those that it still needs."""


def has_definition(handle: WorkerHandle, function: CapturedFunction) -> bool:
    """Return whether the worker has it, which is the last one used then. Under the lock."""
    if function.digest not in handle.known:
        return False
    handle.known[function.digest] = handle.known.pop(function.digest)
    return True


class DefinitionsCache:
    """Brings to workers what functions need, once."""

    def __init__(self, state: DispatchState, settlement: Settlement, server_watch: ServerWatch) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._settlement = settlement
        self._server_watch = server_watch
        self.resources: dict[int, ResourceRecipe] = {}

    def _drop(self, digest: str) -> None:
        """On the loop's thread."""
        with self._state.lock:
            having = [handle for handle in self._state.workers if digest in handle.known]
            for handle in having:
                del handle.known[digest]
        for handle in having:
            if handle.connection is not None:
                self._state.in_background(handle.connection.release(definitions=[digest]))

    def release_function(self, function: CapturedFunction) -> None:
        """It is scheduled no more: the workers need not keep it."""
        self._state.on_loop(self._drop, function.digest)

    async def define(self, handle: WorkerHandle, connection: WorkerConnection, function: CapturedFunction) -> None:
        """Give the worker a function or class. MisuseError or TypeError if that is not possible."""
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
        """Where functions are made anew for every call, let the worker drop those that were not used for longest."""
        if len(handle.known) <= MAX_DEFINITIONS:
            return
        with self._state.lock:
            calls = [task.payload for task in self._scheduler.recallable(index)]
            used = {digest for call in calls for digest in (call.function.digest, *call.classes)}
            oldest = itertools.islice(handle.known, len(handle.known) - MAX_DEFINITIONS // 2)
            dropped = [digest for digest in oldest if digest not in used]
            for digest in dropped:
                del handle.known[digest]
        await connection.release(definitions=dropped)

    async def build_resources(self, handle: WorkerHandle, connection: WorkerConnection) -> None:
        for number in set(self.resources) - handle.built:  # a copy at once: other threads add
            recipe = self.resources.get(number)
            if recipe is None:  # released meanwhile
                continue
            resource = worker_pb2.Resource()
            resource.CopyFrom(recipe.message)
            try:
                await self.define(handle, connection, recipe.function)
            except (grpc.RpcError, MisuseError, TypeError) as error:
                failure = unpreparable(error, handle.peer)
                if isinstance(failure, PSUnavailableError):  # the cluster's error, and not of the dataset
                    self.resources.pop(number, None)
                    with self._state.lock:
                        self._server_watch.doubt()
                    self._settlement.abort(not_begun(recipe.function, handle.peer.index, 0, failure), final=False)
                    continue
                # The error of whoever uses it, as one of `dataset_fn` is: others need not hear of it.
                resource.unloadable = f"{recipe.function.name} can't be used on {handle.peer}: {failure}"
            await connection.upload(worker_pb2.UploadRequest(resource=resource))
            handle.built.add(number)
            if number not in self.resources:  # released while it was built
                self._release_everywhere(recipe.message)

    def add_resource(self, recipe: ResourceRecipe) -> None:
        """Build this on every worker before its next function."""
        with self._state.lock:
            self.resources[recipe.message.id] = recipe
        self._state.on_loop(self._state.wake_all)

    def release_resource(self, number: int) -> None:
        """Nobody uses it any more. May be called by the garbage collector, on any thread: takes no lock."""
        recipe = self.resources.pop(number, None)
        if recipe is not None:
            self._state.on_loop(self._release_everywhere, recipe.message)

    def _release_everywhere(self, resource: worker_pb2.Resource) -> None:
        # A dataset's definition holds its data, and is no other resource's; a function may be used again.
        definitions = [resource.definition] if resource.distributed else []
        for handle in self._state.workers:
            if resource.id in handle.built and handle.connection is not None:
                handle.built.discard(resource.id)
                for digest in definitions:
                    handle.known.pop(digest, None)
                self._state.in_background(handle.connection.release([resource.id], definitions))
