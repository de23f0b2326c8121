"""Distributed datasets as the coordinator holds them: workers read the data, and what was read is known here."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from pscluster.coordinator.data.data_part import DataPart
from pscluster.coordinator.data.dataset_progress import (
    ChooseStop,
    DatasetProgress,
    DatasetResource,
    EpochRange,
    Position,
)
from pscluster.coordinator.data.epoch_progress import EpochCounts, EpochProgress, EpochShape, seconds_left
from pscluster.coordinator.data.file_lists import FileList
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError, PsClusterError
from pscluster.core.handles import StaysHere
from pscluster.ps.handles.variables.variable import Variable
from pscluster.v1 import worker_pb2
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.processes.process_map import ProcessMap
from pscluster.worker.data.sources import Blocks, Files, Ranges, source_of

logger = logging.getLogger(__name__)

RETRIES = 2  # how often a function that could not read its examples runs again, by default
MAX_PROCESSES = 256  # of a map, on each worker

OnError = Literal["raise", "skip"]


class DistributedDataset(StaysHere):
    """Examples of which each is visited once an epoch, by any worker. See `distribute_dataset`.

    Each method returns another dataset, and leaves this one as it is. Iterating over one yields its `DataPart`s, for
    `schedule`. Each dataset that is iterated over has its own position, saved under its name: the first one of a source
    has the source's name, the next ones are `name.2` and so on. `skipped` counts the examples that could not be read,
    with `on_error="skip"`; an unreadable file counts as 1.
    """

    instead = "pass its parts, `for part in dataset: coordinator.schedule(fn, args=(part,))`"

    def __init__(
        self,
        progress: DatasetProgress,
        pipeline: Pipeline,
        ordinals: itertools.count[int],
        *,
        on_error: OnError,
        retries: int,
        epochs: int | None = 1,
        elements: int = 1,
    ) -> None:
        self._progress = progress
        self._pipeline = pipeline
        self._ordinals = ordinals  # of the datasets that iterate over the same source
        self._epochs = epochs
        self._elements = elements
        self.on_error = on_error
        self.retries = retries
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._position: Position | None = None
        self._resource: DatasetResource | None = None
        self.skipped = 0
        self._seconds = self._waited = 0.0
        self._counts = EpochCounts(pipeline)
        self._begun: dict[int, tuple[float, float]] = {}  # when a pass came to an epoch, and its share visited then

    # Transformations

    def _with(self, **changes: Any) -> DistributedDataset:
        current = {"epochs": self._epochs, "elements": self._elements}
        options = {name: changes.pop(name, value) for name, value in current.items()}
        pipeline = dataclasses.replace(self._pipeline, **changes)
        return DistributedDataset(
            self._progress, pipeline, self._ordinals, on_error=self.on_error, retries=self.retries, **options
        )

    def shuffle(
        self, *buffer_size: object, seed: int = 0, split: int | None = None, blocks: int = 1
    ) -> DistributedDataset:
        """Return it in a different order every epoch, determined by the seed.

        Args:
            buffer_size: refused, since there is no buffer: the whole dataset is shuffled.
            seed: 0 or more.
            split: how many consecutive examples of the source are shuffled with each other, before the splits
                themselves are shuffled; default 1,024. With the whole length all examples are shuffled together, at 8
                bytes an example on each worker.
            blocks: of what is read in blocks or files: how many of them, neighbours in the order of the epoch, a
                function takes and reads together, to shuffle their examples with each other; a worker then holds that
                many. Of what is read as a stream, such as tars, one example of each comes in turn before splits are
                shuffled.

        Raises:
            TypeError: a buffer size is given; or `blocks`, and the source is not read in blocks.
        """
        if buffer_size:
            raise TypeError(
                f"shuffle({', '.join(map(repr, buffer_size))}): the whole dataset is shuffled, without a buffer; "
                "write shuffle(), or shuffle(seed=...)"
            )
        seed = checks.whole("seed", seed, at_least=0)
        split = self._pipeline.split if split is None else checks.whole("split", split, at_least=1)
        blocks = checks.whole("blocks", blocks, at_least=1)
        if blocks > 1 and not isinstance(self._pipeline.source, Blocks):
            raise TypeError(
                f"shuffle(blocks={blocks}): the source is not read in blocks, and all of it is shuffled; split= says "
                "how many neighbours are shuffled with each other"
            )
        return self._with(seed=seed, split=split, window=min(blocks, self._pipeline.length))

    def map(self, fn: Callable[[Any], Any], *, workers: int = 0, timeout: float = 60.0) -> DistributedDataset:
        """Apply `fn` to each element, on the workers: to each example before `batch`, to each batch after it.

        With `workers`, `fn` is called in processes of their own, as for decoding images; the elements and their order
        are the same. It is taken as it is now, knows no variables, and takes and returns what `schedule` could send.
        If one of the processes dies, or a call takes too long, the examples that it was at are given to another, and
        fail at the third time.

        Args:
            fn: returns what comes in place of an element.
            workers: how many processes each worker has for it; 0: `fn` is called in the worker itself.
            timeout: seconds that one call may take in such a process.

        Raises:
            MisuseError: `fn` captures a variable, or the dataset already has a map with processes.
        """
        if not callable(fn):
            raise TypeError(f"map takes a function, not {type_of(fn)}")
        workers = checks.whole("workers", workers, at_least=0, at_most=MAX_PROCESSES)
        timeout = checks.real("timeout", timeout, above=0)
        pipeline = self._pipeline
        added = self._in_processes(fn, workers, timeout) if workers else fn
        if pipeline.batch is None:
            return self._with(example_functions=(*pipeline.example_functions, added))
        return self._with(batch_functions=(*pipeline.batch_functions, added))

    def _in_processes(self, fn: Callable[[Any], Any], workers: int, timeout: float) -> ProcessMap:
        functions = (*self._pipeline.example_functions, *self._pipeline.batch_functions)
        if other := next((function for function in functions if isinstance(function, ProcessMap)), None):
            raise MisuseError(
                f"the dataset already has a map with processes, which calls {other.name}: call both functions in one, "
                "or leave workers= out"
            )
        captured = self._progress.capture(fn)
        if captured.handles:
            raise MisuseError(
                f"{captured.name} captures what is on the cluster, such as a variable, which the processes of a map "
                "don't know: leave workers= out"
            )
        forms: list[bytes] = []
        try:
            forms.extend(form.SerializeToString() for form in captured.forms())
        except TypeError:  # it is known by its name, and can't be sent otherwise
            if not forms:
                raise
        return ProcessMap(fn, captured.name, forms, workers, timeout)

    def batch(self, size: int, *, drop_remainder: bool = False) -> DistributedDataset:
        """Combine `size` examples into arrays with one more axis. An epoch's last batch may be smaller, or is dropped.

        No batch spans two files.
        """
        if self._pipeline.batch is not None:
            raise MisuseError(f"the dataset is already batched by {self._pipeline.batch}")
        batched = self._with(batch=checks.whole("batch size", size, at_least=1), drop_remainder=drop_remainder)
        if not batched._pipeline.visited_length:
            raise ValueError(
                f"{self._pipeline.length} examples make no batch of {size}, and drop_remainder=True drops them all: "
                "give a smaller size"
            )
        return batched

    def repeat(self, epochs: int | None = None) -> DistributedDataset:
        """Have one pass yield `epochs` epochs, one after another; None: without end."""
        return self._with(epochs=None if epochs is None else checks.whole("epochs", epochs, at_least=1))

    def prefetch(self, elements: int) -> DistributedDataset:
        """Have workers read `elements` elements ahead; 2 unless this is called, 0 for none."""
        return self._with(ahead=checks.whole("elements", elements, at_least=0))

    def parts(self, elements: int) -> DistributedDataset:
        """Have each part, and so each function, take `elements` elements; of a dataset of files, files or blocks."""
        return self._with(elements=checks.whole("elements", elements, at_least=1))

    # State

    @property
    def name(self) -> str:
        """The name of its position, once it is iterated over; before that, of its source."""
        return self._pipeline.name

    @property
    def epoch(self) -> int:
        """How many epochs have been visited completely."""
        return self._enter().epoch

    @property
    def visited(self) -> int:
        """How many examples (or files, or blocks of files) of the current epoch have been visited."""
        return self._enter().visited

    @property
    def progress(self) -> EpochProgress:
        """How far the current epoch is, in examples and bytes as far as they are known, and the seconds left.

        `str()` of it is a line, such as "4,096 of 50,000 examples, 12.0 MiB of 147.1 MiB, 1:05 left".
        """
        epoch, visited = self._enter().visited_ranges()
        with self._lock:
            found = self._counts.progress(epoch, visited)
        if (begun := self._begun.get(epoch)) is None:
            return found
        left = seconds_left(found.share, time.monotonic() - begun[0], begun[1])
        return dataclasses.replace(found, seconds_left=left)

    @property
    def is_of_files(self) -> bool:
        """Whether it is read in blocks of files."""
        return isinstance(self._pipeline.source, Blocks)

    @property
    def waiting(self) -> float:
        """The share of their time that functions waited for data, from 0 to 1."""
        with self._lock:
            return self._waited / self._seconds if self._seconds else 0.0

    @property
    def examples(self) -> int:
        """How many examples an epoch has; unknown for files that do not say it."""
        return self._counts.examples

    def __len__(self) -> int:
        """Return how many elements (batches) an epoch has; of a dataset of blocks shuffled together the first one."""
        return self._counts.elements

    @property
    def shape(self) -> EpochShape:
        return self._counts.shape(self._epochs, self._elements)

    def save_position(self) -> None:
        """Write the position now, instead of within the next seconds."""
        self._progress.save()

    def local(self, epoch: int = 0) -> Iterator[Any]:
        """Yield the elements of an epoch, in order, read here; DatasetError if one can't be. No position moves."""
        for element in self._pipeline.elements(epoch, 0, self._pipeline.visited_length):
            if isinstance(element, PsClusterError):
                raise element
            yield element

    def reached_variables(self) -> list[str]:
        """Return the names of the variables that its source, its reader or its `map` functions reach."""
        return sorted({handle.name for handle in self._send().handles if isinstance(handle, Variable)})

    def shards(self, count: int) -> Iterator[DataPart]:
        """Yield the first epoch as `count` parts of similar size, in order, for evaluation. No position moves."""
        resource, shape = self._send(), self.shape
        bounds = [shape.elements * shard // count * shape.items_per_element for shard in range(count + 1)]
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                yield DataPart(self, resource, EpochRange(0, 0, start, min(stop, shape.items)))

    def over_shards(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Return what `fn` returns on workers for each of several shards of the first epoch, in order.

        Each example is in one shard, and a shard whose worker dies is read again by another. No position moves.
        """
        return self._progress.over_shards(fn, self)

    # Iteration

    def __iter__(self) -> Iterator[DataPart]:
        """Yield the parts of one pass that are not assigned yet.

        A pass that was abandoned continues, as does one that a checkpoint, or a coordinator that died, has left in the
        middle: with what was not visited.
        """
        position, items = self._enter(), self._elements * self._pipeline.element
        term, epoch = position.begin_pass()
        end = math.inf if self._epochs is None else (epoch // self._epochs + 1) * self._epochs
        yield from self._parts(position, term, lambda epoch, start: start + items if epoch < end else start)

    def cut(self, choose_stop: ChooseStop) -> Iterator[DataPart]:
        """Return an iterator whose parts, and whose pass, end where `choose_stop` says."""
        position = self._enter()
        term, _ = position.begin_pass()  # now, not with the first part
        return self._parts(position, term, choose_stop)

    def _parts(self, position: Position, term: int, choose_stop: ChooseStop) -> Iterator[DataPart]:
        resource = self._send()
        self._begun = {}
        while (assigned := position.take(term, choose_stop)) is not None:
            if (epoch := assigned.epoch) not in self._begun:
                share = self.progress.share if position.epoch == epoch else 0.0
                last = {epoch - 1: self._begun[epoch - 1]} if epoch - 1 in self._begun else {}
                self._begun = last | {epoch: (time.monotonic(), share)}
            yield DataPart(self, resource, assigned, position)

    def _send(self) -> DatasetResource:
        """Return the dataset on the workers, which is sent once."""
        with self._making:
            if self._resource is None:
                self._resource = self._progress.send(self._pipeline)
            return self._resource

    def _enter(self) -> Position:
        """Return its position, which it takes, with its name, at the first call."""
        with self._making:  # may query a server: never taken with another lock held
            if self._position is None:
                pipeline, nth = self._pipeline, next(self._ordinals)
                if nth > 1:
                    self._pipeline = pipeline = dataclasses.replace(pipeline, name=f"{pipeline.name}.{nth}")
                listed = pipeline.source.listed if isinstance(pipeline.source, Blocks | Ranges) else None
                files = FileList(listed) if listed else None
                self._position = self._progress.enter(self, self.name, pipeline.length, pipeline.visited_length, files)
            return self._position

    def took(self, seconds: float, waited: float, skipped: Sequence[worker_pb2.Skipped]) -> None:
        """Record, for the dispatcher, how long a function with a part ran and waited, and what it skipped."""
        with self._lock:
            self._seconds += seconds
            self._waited += waited
            self.skipped += sum(skip.examples for skip in skipped)
        noun = self.shape.noun
        for skip in skipped:
            logger.warning("skipped %d %s: %s", skip.examples, noun if skip.examples == 1 else f"{noun}s", skip.why)

    def __repr__(self) -> str:
        return f"<DistributedDataset {self.name!r}>"


def distribute(
    progress: DatasetProgress,
    source: Any,
    *,
    reader: Callable[[Any], Any] | None,
    name: str | None,
    on_error: OnError,
    retries: int,
) -> DistributedDataset:
    """Distribute a dataset; see `ClusterCoordinator.distribute_dataset`."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'")
    retries = checks.whole("retries", retries, at_least=0)
    if not isinstance(name, str | None):
        raise TypeError(f"name is {type_of(name)}; give a string, under which its position is saved")
    if reader is not None and not callable(reader):
        raise TypeError(f"reader is {type_of(reader)}; give a function of a file")
    if reader is not None and isinstance(source, str | bytes):
        raise TypeError(f"{source!r} is one file: give a list of files")
    readable = source_of(source) if reader is None else Files(source, reader)
    if not len(readable):
        raise ValueError("the source has no examples: give one with at least one")
    pipeline = Pipeline(readable, progress.name() if name is None else name)
    return DistributedDataset(progress, pipeline, itertools.count(1), on_error=on_error, retries=retries)
