"""The order of the examples of an epoch, which follows from a seed and the epoch's number. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from pscluster.worker.data.sources import Numbers


class Order:
    """The order of `length` examples in each epoch; without a seed, that of the source. A split has `split` of them.

    With `neighbours`, a number for each example of the only split, those with the same number stay together.
    """

    def __init__(self, length: int, split: int, seed: int | None, neighbours: Numbers | None = None) -> None:
        assert neighbours is None or split >= length
        self.length = length
        self.split = split
        self.seed = seed
        self._neighbours = neighbours
        self._splits = lru_cache(2)(self._splits_of)
        self._within = lru_cache(4)(self._within_of)

    def pieces(self, epoch: int, start: int, stop: int) -> Iterator[tuple[Numbers, int, int]]:
        """Yield the examples at the positions [start, stop), by split: their numbers, and the split's [first, end)."""
        splits, starts = self._splits(epoch if self.seed is not None else 0)
        index = bisect.bisect_right(starts, start) - 1  # ten times as fast as NumPy's, for one number
        while start < stop:
            split = int(splits[index])
            first = split * self.split
            size = min(self.split, self.length - first)
            offset = start - int(starts[index])
            count = min(size - offset, stop - start)
            if self.seed is None:
                numbers = np.arange(first + offset, first + offset + count)
            else:
                numbers = first + self._within(epoch, split)[offset : offset + count]
            yield numbers, first, first + size
            start, index = start + count, index + 1

    def _splits_of(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Return the splits in their order, and the position at which each begins."""
        count = -(-self.length // self.split)
        splits = np.arange(count) if self.seed is None else generator_of(self.seed, epoch).permutation(count)
        sizes = np.where(splits == count - 1, self.length - (count - 1) * self.split, self.split)
        return splits, np.cumsum(sizes) - sizes

    def _within_of(self, epoch: int, split: int) -> Numbers:
        assert self.seed is not None
        size = min(self.split, self.length - split * self.split)
        order = generator_of(self.seed, epoch, split + 1).permutation(size)
        if self._neighbours is None:
            return order
        first = np.full(self._neighbours.max() + 1, size)  # where the first of each group comes
        np.minimum.at(first, self._neighbours[order], np.arange(size))
        return order[np.argsort(first[self._neighbours[order]], kind="stable")]


def generator_of(*seeds: int) -> np.random.Generator:
    """Return a generator that depends on these seeds alone."""
    return np.random.default_rng(seeds)
