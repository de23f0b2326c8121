"""What a distributed dataset gives for a place in its order: the order, the reading, `map` and `batch`. Pure but for
what the user's source and functions do.

An epoch has an order of its own, made of the seed and its number alone, so that every worker finds the same one. The
source is cut into splits of so many examples; a shuffled epoch goes through the splits in random order, and through
the examples of each split in random order. Memory and reading are then those of a split, not of the whole.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from pscluster.core.errors import DatasetError
from pscluster.worker.data.sources import (
    Arrays,
    Files,
    Numbers,
    Sent,
    Source,
    check_block,
    joined,
    map_leaves,
    size_of,
    stacked,
    take,
    unstacked,
)

SPLIT = 1024
"""Examples a split, where nothing is said."""

_AT_ONCE_BYTES = 1 << 18


class Order:
    """Which example stands at which place of an epoch.

    Args:
        length: examples.
        split: examples a split.
        seed: of the shuffling; None: they stand as they are in the source.
    """

    def __init__(self, length: int, split: int, seed: int | None) -> None:
        self.length = length
        self.split = split
        self.seed = seed
        self._splits = lru_cache(2)(self._splits_of)
        self._within = lru_cache(4)(self._within_of)

    def pieces(self, epoch: int, start: int, stop: int) -> Iterator[tuple[Numbers, int, int]]:
        """The examples at the places [start, stop), by split: their numbers, and the split's first and last + 1."""
        splits, starts = self._splits(epoch if self.seed is not None else 0)
        place = bisect.bisect_right(starts, start) - 1  # a tenth of what NumPy's takes, for one number
        while start < stop:
            split = int(splits[place])
            first = split * self.split
            size = min(self.split, self.length - first)
            here = start - int(starts[place])
            count = min(size - here, stop - start)
            if self.seed is None:
                numbers = np.arange(first + here, first + here + count)
            else:
                numbers = first + self._within(epoch, split)[here : here + count]
            yield numbers, first, first + size
            start, place = start + count, place + 1

    def _splits_of(self, epoch: int) -> tuple[Numbers, Numbers]:
        """The splits in their order, and the place at which each begins."""
        count = -(-self.length // self.split)
        splits = np.arange(count) if self.seed is None else _random(self.seed, epoch).permutation(count)
        sizes = np.where(splits == count - 1, self.length - (count - 1) * self.split, self.split)
        return splits, np.cumsum(sizes) - sizes

    def _within_of(self, epoch: int, split: int) -> Numbers:
        assert self.seed is not None
        size = min(self.split, self.length - split * self.split)
        return _random(self.seed, epoch, split + 1).permutation(size)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _random(*seeds: int) -> np.random.Generator:
    return np.random.default_rng(seeds)


@dataclass(frozen=True)
class Pipeline(Sent):
    """A source, and what is done with its examples. Travels to the workers."""

    source: Source | Files
    name: str
    seed: int | None = None
    split: int = SPLIT
    each: tuple[Callable[[Any], Any], ...] = ()  # for each example, before they are put together
    batch: int | None = None
    drop_remainder: bool = False
    then: tuple[Callable[[Any], Any], ...] = ()  # for each batch
    ahead: int = 2  # batches that a worker reads before they are asked for

    @property
    def length(self) -> int:
        """Places of an epoch: examples, or files."""
        return len(self.source)

    @property
    def kept(self) -> int:
        """Those that are visited."""
        if self.drop_remainder and self.batch and not isinstance(self.source, Files):
            return self.length - self.length % self.batch
        return self.length

    @property
    def element(self) -> int:
        """Places that one element takes."""
        return 1 if isinstance(self.source, Files) else self.batch or 1

    def count(self, start: int, stop: int) -> int | None:
        """How many elements these places have; None: that is known when they are read."""
        return None if isinstance(self.source, Files) else -(-(stop - start) // self.element)

    def elements(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        """Of these places, in order. In the place of one that can't be read stands the DatasetError that says why."""
        step = self.element
        if isinstance(self.source, Files):
            for place in range(start, stop):
                yield from self._of_file(self.source, epoch, place)
            return
        at_once = step  # to read a small batch takes less time than to get to it: several, then
        if isinstance(self.source, Arrays):
            at_once *= max(1, _AT_ONCE_BYTES // max(1, step * self.source.example_bytes))
        for begin in range(start, stop, at_once):
            end, block = min(begin + at_once, stop), None
            if end - begin > step:
                with suppress(Exception):  # one by one: then it is known which can't be read
                    block = self._block(list(self._order.pieces(epoch, begin, end)))
            for first in range(begin, end, step):
                after = min(first + step, end)
                of_it = None if block is None else map_leaves(itemgetter(slice(first - begin, after - begin)), block)
                yield self._element(epoch, first, after, of_it)

    def _block(self, places: Sequence[tuple[Numbers, int, int]]) -> Any:
        assert not isinstance(self.source, Files)
        blocks = []
        for numbers, first, after in places:
            block = self.source.read(numbers, first, after)
            if not isinstance(self.source, Arrays):  # whose blocks are as they must be
                check_block(block, len(numbers))
            blocks.append(block)
        return joined(blocks)

    def _element(self, epoch: int, start: int, stop: int, block: Any) -> Any:
        """`block`: its examples, if they were read."""
        places = list(self._order.pieces(epoch, start, stop)) if block is None else []
        try:
            return self._made(self._block(places) if block is None else block)
        except Exception as error:
            numbers = np.concatenate([each for each, _, _ in self._order.pieces(epoch, start, stop)])
            some = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
            what = f"the examples at {start:,} to {stop - 1:,} of epoch {epoch}, numbers {some} of the source,"
            return self._failed(what, stop - start, error)

    def _of_file(self, files: Files, epoch: int, place: int) -> Iterator[Any]:
        ((numbers, _, _),) = self._order.pieces(epoch, place, place + 1)
        number = int(numbers[0])
        what = f"the file {files.paths[number]!r}, number {number} of the source, in epoch {epoch},"
        try:
            block = files.load(number)
            size = 0 if isinstance(block, Iterator) else size_of(block)
        except Exception as error:
            yield self._failed(what, 1, error)
            return
        if isinstance(block, Iterator):
            yield from self._of_stream(block, what, epoch, number)
            return
        order = np.arange(size) if self.seed is None else _random(self.seed, epoch, number + 1).permutation(size)
        step = self.batch or 1
        for start in range(0, size - size % step if self.drop_remainder else size, step):
            places = order[start : start + step]
            try:
                made = self._made(take(block, places))
            except Exception as error:
                made = self._failed(f"examples {start:,} to {start + len(places) - 1:,} of {what}", len(places), error)
            yield made

    def _of_stream(self, examples: Iterator[Any], what: str, epoch: int, number: int) -> Iterator[Any]:
        """As they come, so that no more than a batch is held; of shuffled ones no more than a split besides."""
        step, start = self.batch or 1, 0
        if self.seed is not None:
            examples = self._shuffled(examples, epoch, number)
        while True:
            try:
                block = list(itertools.islice(examples, step))
            except Exception as error:  # what is behind it can't be read either
                yield self._failed(f"what comes behind the first {start:,} examples of {what}", 1, error)
                return
            if not block or (len(block) < step and self.drop_remainder):
                return
            try:
                made = self._made(block)
            except Exception as error:
                made = self._failed(f"examples {start:,} to {start + len(block) - 1:,} of {what}", len(block), error)
            yield made
            del made
            start += len(block)

    def _shuffled(self, examples: Iterator[Any], epoch: int, number: int) -> Iterator[Any]:
        """Split by split: in a random order in each."""
        assert self.seed is not None
        for split in itertools.count(1):
            block = list(itertools.islice(examples, self.split))
            for place in _random(self.seed, epoch, number + 1, split).permutation(len(block)).tolist():
                example, block[place] = block[place], None  # it is not held any longer than it is needed
                yield example
            if len(block) < self.split:
                return

    def _made(self, block: Any) -> Any:
        if self.each or self.batch is None:
            examples = unstacked(block)
            for function in self.each:
                examples = [function(example) for example in examples]
            block = examples
        # A step may write to what it gets: the source stays as it is.
        element = map_leaves(_copied, block[0]) if self.batch is None else stacked(block)
        for function in self.then:
            element = function(element)
        return element

    def _failed(self, what: str, count: int, error: Exception) -> DatasetError:
        failure = DatasetError(f"dataset {self.name!r}: {what} can't be read: {type(error).__name__}: {error}")
        failure.__cause__, failure.examples = error, count
        return failure

    @cached_property
    def _order(self) -> Order:
        return Order(self.length, max(1, self.length) if isinstance(self.source, Files) else self.split, self.seed)


def numbered(pipeline: Pipeline, _number: int) -> Pipeline:
    """What the worker calls for the pipeline with this number."""
    return pipeline
