"""What is in an epoch of a dataset, and how far it is: in examples, in bytes, and in seconds that are left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.sources import Arrays, Blocks, Files, Numbers

_KIB = 1024


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """How far the current epoch of a dataset is.

    Attributes:
        examples: how many have been visited; None: that is not known before they are read, and was not counted.
        all_examples: how many the epoch has; None: as above.
        bytes: of the visited ones, in their files or arrays; None: unknown.
        all_bytes: of all; None: unknown.
        share: of the epoch that was visited, from 0 to 1: of its bytes, if they are known.
        seconds_left: until its end, if it goes on as it has since it began here; None: nothing was visited since.
    """

    examples: int | None
    all_examples: int | None
    bytes: int | None
    all_bytes: int | None
    share: float
    seconds_left: float | None = None

    def __str__(self) -> str:
        words = []
        if self.examples is not None:
            words.append(f"{self.examples:,} of {self.all_examples:,} examples")
        if self.bytes is not None and self.all_bytes is not None:
            words.append(f"{_sized(self.bytes)} of {_sized(self.all_bytes)}")
        if self.seconds_left is not None:
            words.append(f"{_timed(self.seconds_left)} left")
        return ", ".join(words)


def _sized(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < _KIB:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= _KIB
    return f"{number:,.1f} TiB"


def _timed(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class EpochSizes:
    """The examples and bytes of an epoch up to each of its items, in the epoch's order."""

    def __init__(self, examples: npt.NDArray[np.int64] | None, nbytes: npt.NDArray[np.int64] | None) -> None:
        """Take the numbers of each item; None: they are unknown."""
        self._examples, self._bytes = (
            None if of is None else np.cumsum([0, *of.tolist()]) for of in (examples, nbytes)
        )

    def progress(self, visited: Sequence[tuple[int, int]], items: int) -> EpochProgress:
        """Return the progress, given the items [start, stop) that were visited, of as many."""
        examples, all_examples = _sum(self._examples, visited)
        nbytes, all_bytes = _sum(self._bytes, visited)
        share = sum(stop - start for start, stop in visited) / items
        if nbytes is not None and all_bytes:
            share = nbytes / all_bytes
        return EpochProgress(examples, all_examples, nbytes, all_bytes, share)


def _sum(ends: npt.NDArray[np.int64] | None, visited: Sequence[tuple[int, int]]) -> tuple[int | None, int | None]:
    if ends is None:
        return None, None
    return sum(int(ends[stop] - ends[start]) for start, stop in visited), int(ends[-1])


@dataclass(frozen=True, slots=True)
class EpochShape:
    """How an epoch of a dataset is made up."""

    items: int  # that are visited
    items_per_element: int  # the last element may have fewer
    epochs: int | None  # in one pass; None: without end
    elements_per_part: int
    noun: str  # "example", and an element is one batch; else what an element is: "file", "block", "window" of several

    @property
    def elements(self) -> int:
        return -(-self.items // self.items_per_element)


class EpochCounts:
    """Examples, elements and bytes of a dataset's epochs, as its source tells them. Not thread-safe."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._sizes = -1, EpochSizes(None, None)  # of the epoch that was asked for last

    def shape(self, epochs: int | None, elements_per_part: int) -> EpochShape:
        """Return how an epoch is made up, of a pass with this many epochs."""
        pipeline = self._pipeline
        source = pipeline.source
        noun = source.noun if isinstance(source, Blocks) else "example"
        noun = "window" if pipeline.window > 1 else noun
        return EpochShape(pipeline.visited_length, pipeline.element, epochs, elements_per_part, noun)

    @property
    def examples(self) -> int:
        """How many examples an epoch has. TypeError if its files do not say it."""
        if (sizes := self._block_sizes("examples")) is None:
            return self._pipeline.visited_length
        batch = self._pipeline.batch or 1
        return int((sizes - sizes % batch).sum() if self._pipeline.drop_remainder else sizes.sum())

    @property
    def elements(self) -> int:
        """How many elements (batches) an epoch has; of blocks shuffled together the first one. TypeError as above."""
        if (sizes := self._block_sizes("len()")) is None:
            return -(-self._pipeline.visited_length // self._pipeline.element)
        batch = self._pipeline.batch or 1
        return int((sizes // batch if self._pipeline.drop_remainder else -(-sizes // batch)).sum())

    def progress(self, epoch: int, visited: Sequence[tuple[int, int]]) -> EpochProgress:
        """Return how far an epoch is, given the items [start, stop) that were visited."""
        source, length = self._pipeline.source, self._pipeline.visited_length
        if isinstance(source, Blocks):
            known, sizes = self._sizes
            if known != epoch:
                order = self._pipeline.block_order(epoch)
                of_blocks = (None if of is None else of[order] for of in (source.sizes, source.nbytes))
                self._sizes = epoch, (sizes := EpochSizes(*of_blocks))
            return sizes.progress(visited, length)
        done = sum(stop - start for start, stop in visited)
        each = source.example_bytes if isinstance(source, Arrays) else None
        nbytes, all_bytes = (None, None) if each is None else (done * each, length * each)
        return EpochProgress(done, length, nbytes, all_bytes, done / length)

    def _block_sizes(self, purpose: str) -> Numbers | None:
        """Return the examples of each block, or of each window of the first epoch; None if it is not read in blocks.

        TypeError if they are not known.
        """
        source = self._pipeline.source
        if not isinstance(source, Blocks):
            return None
        if (sizes := source.sizes) is None:
            where = "known only to their reader" if isinstance(source, Files) else "known only when they are read"
            raise TypeError(f"{purpose}: the number of examples in the files is {where}")
        if (window := self._pipeline.window) > 1:  # other epochs may put others together
            sizes = np.add.reduceat(sizes[self._pipeline.block_order(0)], np.arange(0, len(sizes), window))
        return sizes


def seconds_left(share: float, seconds: float, first: float) -> float | None:
    """Return how long the rest takes, if the share was `first` this many seconds ago; None: nothing has changed."""
    return seconds * (1 - share) / (share - first) if share > first else None
