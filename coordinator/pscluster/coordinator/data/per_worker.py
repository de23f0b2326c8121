"""Per-worker datasets and objects as the coordinator holds them: functions and handles; the rest is on the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.handles import Handle

T = TypeVar("T")


class PerWorkerIterator(Handle):
    """One iterator on each worker. Pass it to `schedule`; a step calls `next()` on its worker's iterator."""

    handle_kind = "iterator"

    def __init__(self, resource_id: int, homes: Sequence[int] = ()) -> None:
        """Take the workers of its replicas, if they step together: by index, in the order of ranks."""
        self._id, self.homes = resource_id, tuple(homes)

    @property
    def handle_key(self) -> str:
        return str(self._id)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> object:
        raise MisuseError(
            "a per-worker iterator has its elements on the workers: pass it to schedule() or run(), and call next() on "
            "it in the step function"
        )

    def __repr__(self) -> str:
        return f"<PerWorkerIterator {self._id}>"


class PerWorkerDataset(Handle):
    """A dataset on every worker. Each `iter()` begins again, with its own seed.

    Pass an `iter()` of it to `schedule` for an iterator that continues from function to function. Or pass the dataset
    itself: a step then has its worker's dataset, and each `iter()` of that, or loop over it, begins again.
    """

    handle_kind = "dataset"

    def __init__(
        self,
        function: CapturedFunction,
        make_iterator: Callable[[CapturedFunction], PerWorkerIterator],
        build: Callable[[CapturedFunction, PerWorkerDataset], int],
        homes: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Take `build`, which has it built on all workers, and returns its resource id; and what returns the workers
        of the replicas that step together now."""
        self._function = function
        self._make_iterator = make_iterator
        self._build, self._homes_now = build, homes
        self.homes: tuple[int, ...] = ()  # once it is built: as of a PerWorkerIterator
        self._building = threading.Lock()
        self._id: int | None = None

    @property
    def handle_key(self) -> str:
        """Return the id of the resource, which is built at the first call."""
        with self._building:
            if self._id is None:
                self.homes = tuple(self._homes_now())
                self._id = self._build(self._function, self)
            return str(self._id)

    def __iter__(self) -> PerWorkerIterator:
        return self._make_iterator(self._function)

    def current(self, iterator: PerWorkerIterator) -> PerWorkerIterator:
        """Return this iterator, or a new one if replicas step together, and their workers are others by now."""
        return iterator if iterator.homes == tuple(self._homes_now()) else iter(self)

    def build(self) -> PerWorkerDataset:
        """Have every worker call `dataset_fn` now, not when the first function uses it. Return the dataset."""
        _ = self.handle_key
        return self

    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {self._function.name}>"


class PerWorker(Handle, Generic[T]):
    """An object on every worker, made there when a step first asks for it: see `ClusterCoordinator.per_worker`."""

    handle_kind = "object"

    def __init__(self, resource_id: int, name: str, on_all_workers: Callable[..., list[Any]]) -> None:
        """Take what calls a function on each worker, and returns what it returned, by worker."""
        self._id, self._name = resource_id, name
        self.on_all_workers = on_all_workers

    @property
    def handle_key(self) -> str:
        return str(self._id)

    def get(self) -> T:
        """Return, in a step function, the object of its worker."""
        raise MisuseError(
            f"the per-worker object {self._name!r} is on the workers: pass it to schedule(), or use it in a step "
            "function, and call get() there"
        )

    def __repr__(self) -> str:
        return f"<PerWorker {self._name!r}>"
