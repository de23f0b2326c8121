"""A worker's part of a per-worker dataset: built where it is used, from the user's `dataset_fn`.

Every worker calls the same function with its own context and iterates over the result. An error, in the function or in
the iteration, is stored and raised in the step that requests an element.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.errors import EndOfDatasetError, MisuseError
from pscluster.core.handles import Handle
from pscluster.worker.data.look_ahead import look_ahead


@dataclass(frozen=True, slots=True)
class InputContext:
    """What a `dataset_fn(context)` is told about the worker, or the replica, that it is for.

    Attributes:
        worker_index: of that worker, from 0; another one may run the replica while it is gone.
        num_workers: of the cluster.
        input_pipeline_id: the replica, from 0; without replicas in sync the worker.
        num_input_pipelines: the number of replicas, or of workers.
        seed: differs between pipelines and between `iter()` calls; the same if the run is repeated.
        num_replicas_in_sync: how many replicas step together: all of a SynchronousStrategy's, else one.
    """

    worker_index: int
    num_workers: int
    input_pipeline_id: int
    num_input_pipelines: int
    seed: int
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int, uneven: bool = False) -> int:
        """Return this replica's share of the examples of a batch: all of them unless replicas step together.

        Args:
            global_batch_size: how many all replicas take together in one step.
            uneven: whether shares may differ: the first replicas then get one example more, as `numpy.array_split`.

        Raises:
            ValueError: it does not divide evenly, and `uneven` is not set.
        """
        size = checks.whole("global_batch_size", global_batch_size, at_least=1)
        return share_of(size, self.num_replicas_in_sync, self.input_pipeline_id, "a global batch", uneven)[1]


def share_of(length: int, replicas: int, rank: int, noun: str, uneven: bool) -> tuple[int, int]:
    """Return where a replica's share of some examples begins, and its length: `numpy.array_split`'s.

    Raise ValueError, which names them as `noun`, if shares differ and `uneven` is not set.
    """
    if replicas == 1:
        return 0, length
    share, larger = divmod(length, replicas)
    if larger and not uneven:
        raise ValueError(
            f"{noun} of {length} examples does not divide evenly among {replicas} replicas: make it a multiple of "
            f"{replicas}, or give uneven=True, for shares of {share + 1} and {share}"
        )
    return rank * share + min(rank, larger), share + (rank < larger)


def mixed_seed(seed: int, resource_seed: int, pipeline: int) -> int:
    """Return a 63-bit seed derived from these three."""
    state = np.random.SeedSequence([seed, resource_seed, pipeline]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def call_dataset_fn(dataset_fn: Callable[..., Any], context: InputContext) -> Any:
    """Call `dataset_fn()` or `dataset_fn(context)`, depending on its signature.

    It may itself return such a function, as in TensorFlow's tutorial with `distribute_datasets_from_function`.
    """
    dataset = _called(dataset_fn, context)
    return _called(dataset, context) if callable(dataset) and not isinstance(dataset, Iterable) else dataset


def _called(dataset_fn: Callable[..., Any], context: InputContext) -> Any:
    try:
        parameters = inspect.signature(dataset_fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return dataset_fn()
    takes_one = any(
        parameter.kind is parameter.VAR_POSITIONAL
        or (
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        )
        for parameter in parameters
    )
    return dataset_fn(context) if takes_one else dataset_fn()


def begun_at(dataset: Iterable[Any], position: int) -> Iterator[Any] | None:
    """Return an iterator that gives the element at this position first, if that is possible without reading others.

    It is of sequences, arrays, and what has a method `skip(count)`, such as datasets of TensorFlow and Hugging Face.
    """
    if isinstance(dataset, Sequence | np.ndarray) and len(dataset) >= position:
        return map(dataset.__getitem__, range(position, len(dataset)))
    skip = getattr(dataset, "skip", None)
    return iter(skip(position)) if callable(skip) else None


def given(elements: Iterable[Any]) -> Iterable[Any]:
    """Return the elements: the `dataset_fn` of a per-worker dataset that was given without one."""
    return elements


class EndOfIterator(StopIteration):
    """The end of a worker's iterator, distinguishable from that of any other when it leaves a step."""

    ended = "the dataset of this worker"
    advice = (
        "schedule fewer steps, make it endless (for instance with itertools.cycle), begin a new iter() of it, or loop "
        "over it inside the step with `for element in iterator`"
    )

    def __init__(self, given: int) -> None:
        super().__init__()
        self.given = given

    def error(self) -> EndOfDatasetError:
        """Return the error for a step that requested too many elements."""
        return EndOfDatasetError(f"{self.ended} ended after {self.given} elements: {self.advice}")


class _Built(Handle):
    """The result of a `dataset_fn`, or the error that it raised, for the step that requests an element.

    Args:
        waited: called with the seconds that each element took.
    """

    def __init__(
        self, key: str, build: Callable[[], Iterable[Any]], waited: Callable[[float], None] = lambda _: None
    ) -> None:
        self._key = key
        self._build = build
        self._waited = waited
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        try:
            self._take(build())
        except BaseException as error:  # even a sys.exit() is for the step that requests an element
            self._store(error)

    @property
    def handle_key(self) -> str:
        return self._key

    def _take(self, dataset: Iterable[Any]) -> None:
        raise NotImplementedError

    def _store(self, error: BaseException) -> None:
        self._error, self._trace = error, error.__traceback__

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # else the traceback would grow with every step


class WorkerIterator(_Built):
    """This worker's own iterator, which a step function gets for a per-worker iterator."""

    handle_kind = "iterator"
    given = 0  # elements so far
    _peeked = False

    def _take(self, dataset: Iterable[Any]) -> None:
        self._recent: deque[Any] = deque()  # taken by the last synchronous step that was committed, or since
        self._begin = 0  # how many were taken before these
        self._confirmed = 0  # how many by steps that are committed, and before
        if not isinstance(dataset, Iterable):
            raise TypeError(f"dataset_fn returned {type_of(dataset)}: it must return something to iterate over")
        self._unread: Iterable[Any] | None = dataset  # until the first element is taken
        self._iterator = iter(dataset)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        overlap = None
        if (function := current_function()) is not None:
            function.check()
            if (overlap := function.overlap) is not None and (ahead := look_ahead()) is not None:
                return ahead.next_of(self)
        steps = None if function is None else function.steps or function.bounded
        with self._lock:
            self._check_next()
            if self.given < self._begin + len(self._recent):
                element = self._recent[self.given - self._begin]
            else:
                element = self._next()
                if steps is not None:
                    self._begin = self.given - len(self._recent)
                    self._recent.append(element)
            self.given += 1
            if steps is not None:
                steps.take_from(self)
            elif self._recent or self._begin:
                self._forget(self.given)
        if overlap is not None:
            overlap.took(self)
        return element

    def peek(self, ahead: int, check: Callable[[], object]) -> Any:
        """Return the element that is given after `ahead` others from now on, and keep it. See `look_ahead`."""
        check()
        with self._lock:
            if self._error is None and not self._recent:
                self._begin = self.given
            self._peeked = True
            while self.given + ahead >= self._begin + len(self._recent):
                self._check()
                self._recent.append(self._next(waits=False))
            return self._recent[self.given + ahead - self._begin]

    def _check_next(self) -> None:
        """Raise the stored error, unless an element that was peeked at before is the next. Under the lock."""
        if self._error is not None and not (self._peeked and self.given < self._begin + len(self._recent)):
            self._check()

    def _next(self, *, waits: bool = True) -> Any:
        """Take an element from the dataset; `waits`: a function waits for it. Under the lock."""
        begin, self._unread = time.monotonic(), None
        try:
            element = next(self._iterator)
        except StopIteration:
            raise EndOfIterator(self.given) from None
        except Exception as error:
            self._store(error)
            raise
        if waits:
            self._waited(time.monotonic() - begin)
        return element

    # In synchronous steps: the elements of a step are given again until it is committed.

    def confirm(self, position: int | None = None) -> None:
        """Note that what was given is of steps that are committed, or all before this position.

        What the last ones took, which are committed together, can be given again until the next call.
        """
        with self._lock:
            self._forget(self._confirmed)
            self._confirmed = self.given if position is None else position

    def rewind(self) -> None:
        """Give again what was taken since the last step that was committed."""
        with self._lock:
            self.given = max(self._confirmed, self._begin)

    def seek(self, position: int) -> None:
        """Give the element at this position next. MisuseError if it was given too long ago."""
        with self._lock:
            self._check()
            if self._unread is not None and position:
                self._skip_to(self._unread, position)
            if not self._recent:
                self._begin = self.given
            if position < self._begin:
                raise MisuseError(
                    f"this worker's iterator can't go back to element {position}: those before {self._begin} are gone"
                )
            while self._begin + len(self._recent) < position:
                self.given = self._begin + len(self._recent)
                self._recent.append(self._next())
                self._forget(self.given + 1)
            self.given = self._confirmed = position

    def _skip_to(self, dataset: Iterable[Any], position: int) -> None:
        """Begin at a position, if the dataset can. Under the lock."""
        try:
            iterator = begun_at(dataset, position)
        except Exception as error:
            self._store(error)
            raise
        if iterator is not None:
            self._iterator, self._unread, self.given = iterator, None, position

    def _forget(self, before: int) -> None:
        """Drop elements before this position. Under the lock."""
        while self._recent and self._begin < before:
            self._recent.popleft()
            self._begin += 1
        self._begin = max(self._begin, before)

    def get_next(self) -> Any:
        """Return the next element (TensorFlow's name). Raise EndOfDatasetError after the last one."""
        try:
            return next(self)
        except EndOfIterator as end:
            raise end.error() from None


class WorkerDataset(_Built):
    """This worker's own dataset, which a step function gets for a per-worker dataset. Each `iter()` starts over."""

    handle_kind = "dataset"

    def _take(self, dataset: Iterable[Any]) -> None:
        self._dataset: Iterable[Any] | None = dataset  # None: build another one

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self._key, self._fresh, self._waited)

    def _fresh(self) -> Iterable[Any]:
        self._check()
        with self._lock:
            dataset = self._dataset
            if isinstance(dataset, Iterator):  # such as a generator, which can be used only once
                self._dataset = None
        return self._build() if dataset is None else dataset
