"""Distributed datasets as the coordinator holds them: the data is read on the workers; what was read is known here.

A function is given a part: a range of places in an epoch's order, which every attempt of it reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pscluster.coordinator.data.dataset_progress import DatasetProgress, Number, Position, Range, StopOf
from pscluster.core import checks
from pscluster.core.errors import MisuseError, PsClusterError
from pscluster.core.handles import Handle, StaysHere
from pscluster.ps.handles.variable import Variable
from pscluster.v1 import worker_pb2
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.sources import Files, source_of

logger = logging.getLogger(__name__)

RETRIES = 2
"""So often a function is run again that could not read its examples, where nothing is said."""

OnError = Literal["raise", "skip"]


class DataPart(Handle):
    """A part of an epoch. Pass it to `schedule`; the step function iterates over its elements."""

    handle_kind = "part"

    def __init__(
        self, dataset: DistributedDataset, number: Number, given: Range, position: Position | None = None
    ) -> None:
        self.dataset = dataset
        self.position = position  # None: that it is read does not count as a visit
        self._given = given
        self._number = number  # the workers keep the dataset for as long as somebody has this
        self._key = f"{number.value}/{given.epoch}/{given.start}/{given.stop}"
        self._entered = False  # some function was given it

    @property
    def handle_key(self) -> str:
        """The dataset's number, the epoch, the first place and the one behind the last."""
        return self._key

    @property
    def name(self) -> str:
        """The same in every run of the script."""
        return f"{self.dataset.name}/{self.epoch}/{self.start}-{self.stop}"

    @property
    def epoch(self) -> int:
        """From 0."""
        return self._given.epoch

    @property
    def start(self) -> int:
        """The first place in the epoch's order."""
        return self._given.start

    @property
    def stop(self) -> int:
        """The place behind the last one."""
        return self._given.stop

    def enter(self) -> None:
        """A function with it is scheduled. MisuseError if the position was restored since it was given out."""
        if self.position is not None:
            self.position.enter(self._given)
        self._entered = True

    def commit(self, key: int) -> None:
        """For the dispatcher: the function with this key, which had it, has ended."""
        if self.position is not None:
            self.position.commit(self._given, key)

    def release(self) -> None:
        """The function that had it has failed, was cancelled, or could not be scheduled. It is given out again."""
        if self.position is not None:
            self.position.release(self._given)

    def __del__(self) -> None:
        if not self._entered and self.position is not None:
            self.position.abandon(self._given)

    def __iter__(self) -> Iterator[Any]:
        raise MisuseError(
            "a part has its elements on the workers: pass it to schedule(), and iterate over it in the step function"
        )

    def __repr__(self) -> str:
        return f"<DataPart {self.name}>"


@dataclass(frozen=True, slots=True)
class EpochShape:
    """Of a dataset.

    Attributes:
        kept: places that are visited.
        places: of an element; the last one may have fewer.
        epochs: that going through it once takes; None: without end.
        part: elements that one function is given.
        counted: are places examples, and an element one batch? Those of files are files.
    """

    kept: int
    places: int
    epochs: int | None
    part: int
    counted: bool

    @property
    def elements(self) -> int:
        """Of an epoch."""
        return -(-self.kept // self.places)


class DistributedDataset(StaysHere):
    """Examples that are visited once an epoch, by whichever worker comes first. See `distribute_dataset`.

    Each method returns another dataset, and leaves this one as it is. Going through one gives its `DataPart`s, for
    `schedule`. Each that is gone through has a position of its own, kept by its name: the first one of a source has the
    source's name, the next ones `name.2` and so on.
    """

    instead = "pass its parts, `for part in dataset: coordinator.schedule(fn, args=(part,))`"

    def __init__(
        self,
        progress: DatasetProgress,
        pipeline: Pipeline,
        named: itertools.count[int],
        *,
        on_error: OnError,
        retries: int,
        epochs: int | None = 1,
        elements: int = 1,
    ) -> None:
        self._progress = progress
        self._pipeline = pipeline
        self._named = named  # those that go through the same source
        self._epochs = epochs
        self._elements = elements
        self.on_error = on_error
        self.retries = retries
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._position: Position | None = None
        self._number: Number | None = None
        self._skipped = 0
        self._seconds = self._waited = 0.0

    # What is made of it

    def _with(self, **changes: Any) -> DistributedDataset:
        mine = {"epochs": self._epochs, "elements": self._elements}
        options = {name: changes.pop(name, value) for name, value in mine.items()}
        pipeline = dataclasses.replace(self._pipeline, **changes)
        return DistributedDataset(
            self._progress, pipeline, self._named, on_error=self.on_error, retries=self.retries, **options
        )

    def shuffle(self, *buffer_size: object, seed: int = 0, split: int | None = None) -> DistributedDataset:
        """In another order every epoch, the same for the same seed.

        Args:
            buffer_size: none can be given, as there is no buffer: all of the dataset is shuffled.
            seed: 0 or more.
            split: examples that lie together in the source and are shuffled among each other, after which the splits
                are shuffled; default 1,024. The whole length shuffles everything, at 8 bytes an example on each worker.
        """
        if buffer_size:
            raise TypeError(
                f"shuffle({', '.join(map(repr, buffer_size))}): the whole dataset is shuffled, without a buffer; "
                "write shuffle(), or shuffle(seed=...)"
            )
        seed = checks.whole("seed", seed, at_least=0)
        split = self._pipeline.split if split is None else checks.whole("split", split, at_least=1)
        return self._with(seed=seed, split=split)

    def map(self, fn: Callable[[Any], Any]) -> DistributedDataset:
        """`fn(element)` in place of each, on the workers: of an example before `batch`, of a batch behind it."""
        if not callable(fn):
            raise TypeError(f"map takes a function, not a {type(fn).__name__}")
        pipeline = self._pipeline
        if pipeline.batch is None:
            return self._with(each=(*pipeline.each, fn))
        return self._with(then=(*pipeline.then, fn))

    def batch(self, size: int, *, drop_remainder: bool = False) -> DistributedDataset:
        """So many examples together: arrays with one axis more. The last one of an epoch may be smaller, or is dropped.

        Batches of files do not cross from one file to the next.
        """
        if self._pipeline.batch is not None:
            raise MisuseError(f"the dataset is already batched by {self._pipeline.batch}")
        made = self._with(batch=checks.whole("batch size", size, at_least=1), drop_remainder=drop_remainder)
        if not made._pipeline.kept:
            raise ValueError(
                f"of {self._pipeline.length} examples no batch of {size} can be made, and drop_remainder=True drops "
                "them all: give a smaller size"
            )
        return made

    def repeat(self, epochs: int | None = None) -> DistributedDataset:
        """Going through it once gives so many epochs, one behind the other; None: without end."""
        return self._with(epochs=None if epochs is None else checks.whole("epochs", epochs, at_least=1))

    def prefetch(self, elements: int) -> DistributedDataset:
        """So many elements are read by a worker before they are asked for; 2 unless said otherwise, 0 none."""
        return self._with(ahead=checks.whole("elements", elements, at_least=0))

    def parts(self, elements: int) -> DistributedDataset:
        """So many elements a part: one function is handed out for all of them. Of files: so many files."""
        return self._with(elements=checks.whole("elements", elements, at_least=1))

    # What there is

    @property
    def name(self) -> str:
        """Of its position, once it is gone through; before that, of its source."""
        return self._pipeline.name

    @property
    def epoch(self) -> int:
        """How many epochs were visited wholly."""
        return self._placed().epoch

    @property
    def visited(self) -> int:
        """How many examples (or files) of the epoch that is not over yet were visited."""
        return self._placed().visited

    @property
    def skipped(self) -> int:
        """How many examples could not be read, with `on_error="skip"`; of files that could not, 1 each."""
        return self._skipped

    @property
    def waiting(self) -> float:
        """The share of the functions' time that they waited for data, from 0 to 1."""
        with self._lock:
            return self._waited / self._seconds if self._seconds else 0.0

    @property
    def examples(self) -> int:
        """Of an epoch; of files it is not known."""
        self._need_length("examples")
        return self._pipeline.kept

    def __len__(self) -> int:
        """Elements (batches) an epoch."""
        self._need_length("len()")
        return self.shape.elements

    @property
    def shape(self) -> EpochShape:
        """How an epoch is made up, for who cuts it."""
        pipeline = self._pipeline
        return EpochShape(pipeline.kept, pipeline.element, self._epochs, self._elements, not self._has_files)

    @property
    def _has_files(self) -> bool:
        return isinstance(self._pipeline.source, Files)

    def save_position(self) -> None:
        """Write it now, and not within the next seconds."""
        self._progress.save()

    def _need_length(self, what: str) -> None:
        if self._has_files:
            raise TypeError(f"{what}: how many examples are in the files is known only to their reader")

    def local(self, epoch: int = 0) -> Iterator[Any]:
        """The elements of an epoch, in order, read in this process. No position moves.

        Raises:
            DatasetError: one can't be read.
        """
        for element in self._pipeline.elements(epoch, 0, self._pipeline.kept):
            if isinstance(element, PsClusterError):
                raise element
            yield element

    def reached_variables(self) -> list[str]:
        """The names of those that its source, its reader or its `map` functions reach."""
        return sorted({handle.name for handle in self._numbered().handles if isinstance(handle, Variable)})

    def shards(self, count: int) -> Iterator[DataPart]:
        """The first epoch as so many parts of about one size, in order. No position moves: it is for evaluation."""
        number = self._numbered()
        whole = self.shape.elements
        for shard in range(count):
            first, after = (whole * each // count * self._pipeline.element for each in (shard, shard + 1))
            if first < after:
                yield DataPart(self, number, Range(0, 0, first, min(after, self._pipeline.kept)))

    # Going through it

    def __iter__(self) -> Iterator[DataPart]:
        """The parts that were not given out yet, of the epochs that one pass takes.

        A pass that was left before its end goes on. One that a checkpoint, or a coordinator that died, has left in the
        middle goes on with what was not visited.
        """
        position, most = self._placed(), self._elements * self._pipeline.element
        life, epoch = position.begin_pass()
        after = math.inf if self._epochs is None else (epoch // self._epochs + 1) * self._epochs
        yield from self._parts(position, life, lambda epoch, start: start + most if epoch < after else start)

    def cut(self, stop_of: StopOf) -> Iterator[DataPart]:
        """As going through it; but where parts end, and the pass, is as `stop_of` says: see `Position.take`."""
        position = self._placed()
        life, _ = position.begin_pass()  # now, not with the first part
        return self._parts(position, life, stop_of)

    def _parts(self, position: Position, life: int, stop_of: StopOf) -> Iterator[DataPart]:
        number = self._numbered()
        while (found := position.take(life, stop_of)) is not None:
            yield DataPart(self, number, found, position)

    def _numbered(self) -> Number:
        with self._placing:
            if self._number is None:
                self._number = self._progress.send(self._pipeline)
            return self._number

    def _placed(self) -> Position:
        with self._placing:  # it asks a server: taken by nobody who has another lock
            if self._position is None:
                pipeline, nth = self._pipeline, next(self._named)
                if nth > 1:
                    self._pipeline = pipeline = dataclasses.replace(pipeline, name=f"{pipeline.name}.{nth}")
                self._position = self._progress.enter(self, self.name, pipeline.length, pipeline.kept)
            return self._position

    def took(self, seconds: float, waited: float, skipped: Sequence[worker_pb2.Skipped]) -> None:
        """For the dispatcher: of a function that had a part, so long it ran, and waited, and what it left out of it."""
        with self._lock:
            self._seconds += seconds
            self._waited += waited
            self._skipped += sum(each.examples for each in skipped)
        for each in skipped:
            noun = "example" if each.examples == 1 else "examples"
            logger.warning("skipped %d %s: %s", each.examples, noun, each.why)

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
    """See `ClusterCoordinator.distribute_dataset`."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'")
    retries = checks.whole("retries", retries, at_least=0)
    if reader is not None and not callable(reader):
        raise TypeError(f"reader is a {type(reader).__name__}; give a function of a file")
    if reader is not None and isinstance(source, str | bytes):
        raise TypeError(f"{source!r} is one file: give a list of files")
    found = source_of(source) if reader is None else Files(source, reader)
    if not len(found):
        raise ValueError("the source has no examples: give one with at least one")
    pipeline = Pipeline(found, progress.name() if name is None else name)
    return DistributedDataset(progress, pipeline, itertools.count(1), on_error=on_error, retries=retries)
