"""Per-worker datasets as the coordinator holds them: recipes and handles; the data is on the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.handles import Handle


class PerWorkerIterator(Handle):
    """One iterator on each worker. Pass it to `schedule`; a step calls `next()` on its worker's own."""

    handle_kind = "iterator"

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def handle_key(self) -> str:
        """The resource's number."""
        return str(self._number)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> object:
        raise MisuseError(
            "a per-worker iterator has its elements on the workers: pass it to schedule(), and call next() on it in "
            "the step function"
        )

    def __repr__(self) -> str:
        return f"<PerWorkerIterator {self._number}>"


class PerWorkerDataset(Handle):
    """A dataset on every worker. Each `iter()` begins anew, with a seed of its own.

    Pass what `iter()` gives to `schedule`, for an iterator that goes on from function to function; or the dataset: a
    step then has its worker's own, and each `iter()` of it, or loop over it, begins anew.
    """

    handle_kind = "dataset"

    def __init__(
        self,
        function: CapturedFunction,
        make_iterator: Callable[[CapturedFunction], PerWorkerIterator],
        build: Callable[[CapturedFunction, PerWorkerDataset], int],
    ) -> None:
        """`build`: has it built on all workers, and gives its number."""
        self._function = function
        self._make_iterator = make_iterator
        self._build = build
        self._building = threading.Lock()
        self._number: int | None = None

    @property
    def handle_key(self) -> str:
        """The resource's number. It is built by then."""
        with self._building:
            if self._number is None:
                self._number = self._build(self._function, self)
            return str(self._number)

    def __iter__(self) -> PerWorkerIterator:
        return self._make_iterator(self._function)

    def build(self) -> PerWorkerDataset:
        """Have every worker call `dataset_fn` now, and not when the first function uses it; the dataset itself."""
        _ = self.handle_key
        return self

    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {self._function.name}>"
