"""Per-worker datasets as the coordinator holds them: recipes and handles; the data is on the workers."""

from __future__ import annotations

from collections.abc import Callable

from pscluster.core.definitions import CapturedFunction
from pscluster.core.errors import MisuseError
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


class PerWorkerDataset:
    """A dataset on every worker. Each `iter()` begins anew, with a seed of its own."""

    def __init__(
        self, function: CapturedFunction, make_iterator: Callable[[CapturedFunction], PerWorkerIterator]
    ) -> None:
        self._function = function
        self._make_iterator = make_iterator

    def __iter__(self) -> PerWorkerIterator:
        return self._make_iterator(self._function)

    def build(self) -> PerWorkerDataset:
        """The peer's name: the dataset itself."""
        return self

    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {self._function.name}>"
