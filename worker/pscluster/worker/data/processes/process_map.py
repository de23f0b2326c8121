"""A map of a dataset whose function is called in processes of their own, and the elements that come from it.

An element's examples are cut into tasks, so that all processes work on one batch, and put together again, in their
order. The next element is always submitted. Later ones are read and submitted ahead while fewer than `_TASKS` tasks for
each process are on their way or hold results. So what is ahead is bounded, and an element never waits for a later one.

    UNREAD --submit--> SUBMITTED --all its tasks have a result, or one has an error--> DONE --next()--> gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pscluster.core.errors import DatasetError, MisuseError
from pscluster.worker.data.blocks import cut, joined, leaves, map_leaves, size_of
from pscluster.worker.data.processes.pool import Pool
from pscluster.worker.data.sources import Sent

_TASKS = 3
_MAX_TASK = 256  # examples


@dataclass(init=False, eq=False)
class ProcessMap(Sent):
    """A function for a map, and how it travels. Only where it was made does it have the function itself.

    Args:
        function: called in place of the processes where this was made.
        name: its name, for errors.
        forms: its definitions.
        workers: how many processes each worker has.
        timeout: seconds that one call may take.
    """

    name: str
    forms: list[bytes]
    workers: int
    timeout: float

    def __init__(
        self, function: Callable[[Any], Any], name: str, forms: Sequence[bytes], workers: int, timeout: float
    ) -> None:
        vars(self)["function"] = function
        self.name, self.forms, self.workers, self.timeout = name, list(forms), workers, timeout

    @cached_property
    def function(self) -> Callable[[Any], Any]:
        """The function itself, which is not sent."""
        raise MisuseError(f"{self.name} is called in processes of its own, not here")

    @property
    def is_here(self) -> bool:
        """Whether the function itself is here."""
        return "function" in vars(self)

    def pool(self, *, each: bool, stack: bool) -> Pool:
        """Return a pool of processes.

        Args:
            each: the function takes one of the examples submitted, not all that is submitted.
            stack: the results of a task are returned as a batch, not as a list.
        """
        setup = {"forms": self.forms, "each": each, "stack": stack}
        return Pool(self.name, setup, self.workers, self.timeout, lends=each and stack)


@dataclass(eq=False)
class Unprocessed:
    """The examples of an element before the map, and what to call with an error to get the element's."""

    examples: Any
    failed: Callable[[Exception], DatasetError]


class _Element:
    """One whose tasks are under way. See the module's docstring."""

    def __init__(self, read: Unprocessed) -> None:
        self.read = read
        self.tasks: list[int] = []
        self.left = 0  # tasks without a result
        self.error: Exception | None = None
        self._results: dict[int, Any] = {}  # by the first example
        self._together: list[np.ndarray[Any, Any]] = []  # the leaves of the batch, if all results are alike so far

    @property
    def is_done(self) -> bool:
        return not self.left or self.error is not None

    def submit(self, pool: Pool, map_: ProcessMap, *, each: bool, stack: bool) -> None:
        """Have the pool do it."""
        examples = self.read.examples
        if not each:
            self.left = 1
            self.tasks.append(pool.submit(examples, self._take_whole))
            return
        size = size_of(examples)
        step = min(_MAX_TASK, -(-size // map_.workers))
        starts = range(0, size, step)
        self.left = len(starts)
        for start in starts:
            stop = min(start + step, size)
            taker = self._taker(start, stop, size, stack=stack)
            self.tasks.append(pool.submit(cut(examples, start, stop), taker, start))

    def _take_whole(self, result: Any, error: Exception | None) -> None:
        self._take(0, result, error)

    def _taker(self, start: int, stop: int, size: int, *, stack: bool) -> Callable[[Any, Exception | None], None]:
        def take(result: Any, error: Exception | None) -> None:
            if error is None and stack:
                result = self._placed(result, start, stop, size)
            self._take(start, result, error)

        return take

    def _take(self, start: int, result: Any, error: Exception | None) -> None:
        self.left -= 1
        self.error = self.error or error
        self._results[start] = result

    def _placed(self, result: Any, start: int, stop: int, size: int) -> Any:
        """Copy a part of the batch to its place in the whole if it is like the first part, else elsewhere."""
        parts = leaves(result)
        if not self._together:
            self._together = [np.empty((size, *part.shape[1:]), part.dtype) for part in parts]
        kinds = [(part.dtype, part.shape) for part in parts]
        if kinds != [(whole.dtype, (stop - start, *whole.shape[1:])) for whole in self._together]:
            return map_leaves(np.copy, result)
        for whole, part in zip(self._together, parts, strict=True):
            whole[start:stop] = part
        places = iter(self._together)
        return map_leaves(lambda _: next(places)[start:stop], result)

    def result(self) -> Any:
        """Return the examples after the map. Raise what the function has raised, or ValueError if they don't match."""
        if self.error is not None:
            raise self.error
        results = [self._results[start] for start in sorted(self._results)]
        if len(results) == 1 or not self._together:
            return joined(results)
        first = leaves(results[0])
        if all(len(leaves(result)) == len(first) for result in results):
            if all(map(self._is_placed, results)):
                places = iter(self._together)
                return map_leaves(lambda _: next(places), results[0])
            for result in results:
                for part, of_first in zip(leaves(result), first, strict=True):
                    if part.shape[1:] != of_first.shape[1:]:
                        raise ValueError(
                            f"an example of the batch has the shape {part.shape[1:]}, and the first one "
                            f"{of_first.shape[1:]}: pad them in the map, or leave batch() out"
                        )
        return joined(results)

    def _is_placed(self, result: Any) -> bool:
        return all(part.base is whole for part, whole in zip(leaves(result), self._together, strict=True))


class ProcessedElements:
    """The elements of a range of a pipeline, whose map's function is called by a pool.

    Args:
        found: yields what was read, `Unprocessed`, or a DatasetError in its place.
        finish: returns the element, from its examples after the map.
    """

    def __init__(
        self,
        found: Iterator[Any],
        pool: Pool,
        map_: ProcessMap,
        finish: Callable[[Any], Any],
        *,
        each: bool,
        stack: bool,
    ) -> None:
        self._found = found
        self._pool = pool
        self._map = map_
        self._finish = finish
        self._each, self._stack = each, stack
        self._elements: deque[_Element | DatasetError | _Ended] = deque()
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._elements:
            self._read()
        self.prime()
        element = self._elements[0]
        if isinstance(element, _Ended):
            raise element.error
        if isinstance(element, DatasetError):
            self._elements.popleft()
            return element
        self._pool.wait(lambda: element.is_done)
        self._elements.popleft()
        self._drop(element)
        self.prime()
        try:
            return self._finish(element.result())
        except Exception as error:
            return element.read.failed(error)

    def prime(self) -> None:
        """Read and submit what may be ahead. Does not wait for results."""
        while not self._ended and self._pool.held() < _TASKS * self._map.workers:
            self._read()
        self._pool.begin()

    def close(self) -> None:
        """Drop what is on its way: nothing waits for it any longer. Any thread may call this."""
        for element in list(self._elements):
            if isinstance(element, _Element):
                self._drop(element)

    def _read(self) -> None:
        """Read an element, or why there is none, and submit it."""
        try:
            read = next(self._found)
        except BaseException as error:  # for the one that asks for this element
            self._ended = True
            self._elements.append(_Ended(error))
            return
        if isinstance(read, DatasetError):
            self._elements.append(read)
            return
        element = _Element(read)
        try:
            element.submit(self._pool, self._map, each=self._each, stack=self._stack)
        except Exception as error:
            self._elements.append(read.failed(error))
            return
        self._elements.append(element)

    def _drop(self, element: _Element) -> None:
        self._pool.abandoned.extend(element.tasks)


@dataclass
class _Ended:
    """Why there is no further element: StopIteration, or what has failed."""

    error: BaseException
