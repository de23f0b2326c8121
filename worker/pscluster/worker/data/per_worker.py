"""A worker's share of a per-worker dataset: built where it is used, from the user's `dataset_fn`.

Every worker calls the same function with a context of its own and iterates over what it returns. An error,
in the function or in the iteration, is kept and raised in the step that asks for an element.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from pscluster.core.context import current_function
from pscluster.core.errors import EndOfDatasetError
from pscluster.core.handles import Handle


@dataclass(frozen=True, slots=True)
class InputContext:
    """What a `dataset_fn(context)` learns of the worker it runs on.

    Attributes:
        worker_index: of this worker, from 0.
        num_workers: how many workers the cluster has.
        seed: differs between workers and between `iter()` calls, the same when the run is repeated.
    """

    worker_index: int
    num_workers: int
    seed: int

    @property
    def input_pipeline_id(self) -> int:
        """The peer's name for `worker_index`; here it does tell workers apart."""
        return self.worker_index

    @property
    def num_input_pipelines(self) -> int:
        """The peer's name for `num_workers`."""
        return self.num_workers

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1: a worker is one replica, and workers do not wait for each other."""
        return 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The peer's name; with one replica the same number."""
        return global_batch_size


def mixed_seed(seed: int, resource_seed: int, worker_index: int) -> int:
    """A 63-bit seed made of these three."""
    state = np.random.SeedSequence([seed, resource_seed, worker_index]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def call_dataset_fn(dataset_fn: Callable[..., Any], context: InputContext) -> Any:
    """`dataset_fn()` or `dataset_fn(context)`, whichever its signature asks for.

    It may return such a function, too, as the peer's tutorial does with `distribute_datasets_from_function`.
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


def given(elements: Iterable[Any]) -> Iterable[Any]:
    """The `dataset_fn` of a per-worker dataset that was given as it is."""
    return elements


class EndOfIterator(StopIteration):
    """The end of a worker's iterator, to be told from that of any other one when a step lets it out.

    Attributes:
        given: how many elements there were.
        ended: what had so many.
        advice: how to mend the step.
    """

    ended = "the dataset of this worker"
    advice = (
        "schedule fewer steps, make it endless (for instance with itertools.cycle), begin a new iter() of it, or loop "
        "over it inside the step with `for element in iterator`"
    )

    def __init__(self, given: int) -> None:
        super().__init__()
        self.given = given

    def error(self) -> EndOfDatasetError:
        """The error of a step that asked for too much."""
        return EndOfDatasetError(f"{self.ended} ended after {self.given} elements: {self.advice}")


class WorkerIterator(Handle):
    """What a step function gets for a per-worker iterator: this worker's own."""

    handle_kind = "iterator"

    def __init__(
        self, key: str, build: Callable[[], Iterable[Any]], waited: Callable[[float], None] = lambda _: None
    ) -> None:
        """`waited` is told the seconds that each element took."""
        self._key = key
        self._waited = waited
        self._lock = threading.Lock()
        self._given = 0
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._iterator: Iterator[Any] | None = None
        try:
            dataset = build()
            if not isinstance(dataset, Iterable):
                raise TypeError(
                    f"dataset_fn returned a {type(dataset).__name__}: it must return something to iterate over"
                )
            self._iterator = iter(dataset)
        except BaseException as error:  # a sys.exit(), too, is for the step that asks for an element
            self._keep(error)

    @property
    def handle_key(self) -> str:
        """The resource's number."""
        return self._key

    @property
    def given(self) -> int:
        """How many elements were given out."""
        return self._given

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if (function := current_function()) is not None:
            function.check()
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(self._trace)  # else it would grow with every step
            assert self._iterator is not None  # there is an error or an iterator
            begin = time.monotonic()
            try:
                element = next(self._iterator)
            except StopIteration:
                raise EndOfIterator(self._given) from None
            except Exception as error:
                self._keep(error)
                raise
            self._given += 1
            self._waited(time.monotonic() - begin)
            return element

    def _keep(self, error: BaseException) -> None:
        self._error, self._trace = error, error.__traceback__

    def get_next(self) -> Any:
        """The next element (the peer's name). EndOfDatasetError behind the last one."""
        try:
            return next(self)
        except EndOfIterator as end:
            raise end.error() from None


class WorkerDataset(Handle):
    """What a step function gets for a per-worker dataset: this worker's own, of which each `iter()` begins anew."""

    handle_kind = "dataset"

    def __init__(self, key: str, build: Callable[[], Iterable[Any]], waited: Callable[[float], None]) -> None:
        """`waited` is told the seconds that each element took."""
        self._key = key
        self._build = build
        self._waited = waited
        self._dataset: Iterable[Any] | None = None  # None: to be made anew
        self._taking = threading.Lock()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        try:
            self._dataset = build()
        except BaseException as error:  # a sys.exit(), too, is for the step that asks for an element
            self._error = error
            self._trace = error.__traceback__

    @property
    def handle_key(self) -> str:
        """The resource's number."""
        return self._key

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self._key, self._fresh, self._waited)

    def _fresh(self) -> Iterable[Any]:
        if self._error is not None:
            raise self._error.with_traceback(self._trace)
        with self._taking:
            dataset = self._dataset
            if isinstance(dataset, Iterator):  # a generator, for one, can be gone through once
                self._dataset = None
        return self._build() if dataset is None else dataset
