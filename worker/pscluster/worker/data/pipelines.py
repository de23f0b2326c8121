"""Pipelines of distributed datasets: reading in the order of an epoch, `map` and `batch`. Pure, except for the user's
source and functions.

The order of an epoch depends only on the seed and the epoch's number, so that every worker computes the same one. The
source is cut into splits; a shuffled epoch takes the splits in random order, and the examples of each split in random
order. So only a split must be read and held in memory, not the whole source.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np

from pscluster.core.errors import DatasetError, PsClusterError
from pscluster.worker.data.batches import Batches
from pscluster.worker.data.blocks import (
    check_block,
    cut,
    joined,
    map_leaves,
    size_of,
    stacked,
    take,
    take_rows,
    unstacked,
)
from pscluster.worker.data.order import Order, generator_of
from pscluster.worker.data.processes.pool import Pool
from pscluster.worker.data.processes.process_map import ProcessedElements, ProcessMap, Unprocessed
from pscluster.worker.data.sources import Arrays, Blocks, Files, Numbers, Sent, Source

SPLIT = 1024  # default number of examples in a split
_READ_BYTES = 1 << 18


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _in_turn(streams: Sequence[Iterator[Any]]) -> Iterator[Any]:
    """Yield the items of several iterators, one of each in turn. Raise what one has raised after the others' end."""
    left, why = deque(streams), None
    while left:
        stream = left.popleft()
        try:
            item = next(stream)
        except StopIteration:
            continue
        except Exception as error:
            why = why or error
            continue
        yield item
        left.append(stream)
    if why is not None:
        raise why


@dataclass(frozen=True)
class Pipeline(Sent):
    """A source, and the processing of its examples. Travels to the workers."""

    source: Source | Blocks
    name: str
    seed: int | None = None
    split: int = SPLIT
    window: int = 1  # blocks that are shuffled together
    example_functions: tuple[Callable[[Any], Any] | ProcessMap, ...] = ()  # for each example, before batching
    batch: int | None = None
    drop_remainder: bool = False
    batch_functions: tuple[Callable[[Any], Any] | ProcessMap, ...] = ()  # for each batch
    ahead: int = 2  # batches that a worker reads ahead

    @property
    def length(self) -> int:
        """The number of positions of an epoch: examples, or blocks such as files."""
        return len(self.source)

    @property
    def visited_length(self) -> int:
        """The number of positions that are visited."""
        if self.drop_remainder and self.batch and not isinstance(self.source, Blocks):
            return self.length - self.length % self.batch
        return self.length

    @property
    def element(self) -> int:
        """The number of positions that one element takes."""
        return self.window if isinstance(self.source, Blocks) else self.batch or 1

    def count(self, start: int, stop: int) -> int | None:
        """Return the number of elements at these positions; None if that is known only when they are read."""
        return None if isinstance(self.source, Blocks) else -(-(stop - start) // self.element)

    @cached_property
    def process_map(self) -> ProcessMap | None:
        """The map whose function processes call; None: there is none, or the function itself is here."""
        for function in (*self.example_functions, *self.batch_functions):
            if isinstance(function, ProcessMap) and not function.is_here:
                return function
        return None

    @cached_property
    def pool(self) -> Pool:
        """The processes of the map. They start with the first task."""
        assert self.process_map is not None
        return self.process_map.pool(each=self._maps_examples, stack=self._stacks)

    def close(self) -> None:
        """End the processes of the map, if there are any."""
        if self.process_map is not None:
            self.pool.close()

    def elements(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        """Yield the elements at these positions; in place of one that can't be read, the DatasetError that says why."""
        found = self.read(epoch, start, stop)
        # Those of a map in processes come one by one, and are closed by their consumer.
        return found if isinstance(found, ProcessedElements) else _one_by_one(found)

    def read(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        """Yield the elements as `elements` does, but those that are read at once together, as `Batches`."""
        found = self._read(epoch, start, stop)
        if (map_ := self.process_map) is None:
            return found
        each, stack = self._maps_examples, self._stacks
        return ProcessedElements(found, self.pool, map_, self._finished, each=each, stack=stack)

    def _read(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        step = self.element
        if isinstance(self.source, Blocks):
            for first in range(start, stop, step):
                yield from self._of_window(self.source, epoch, range(first, min(first + step, stop)))
            return
        stride = step
        if isinstance(self.source, Arrays):  # read several small batches at once: seeking takes longer than reading
            stride *= max(1, _READ_BYTES // max(1, step * self.source.example_bytes))
        for begin in range(start, stop, stride):
            end, block = min(begin + stride, stop), None
            if end - begin > step:
                with suppress(Exception):  # then read one by one, to find out which can't be read
                    block = self._block(epoch, begin, end)
            if block is not None and self._are_cut:
                yield Batches(block, step, end - begin)
                continue
            for first in range(begin, end, step):
                after = min(first + step, end)
                own = None if block is None else map_leaves(itemgetter(slice(first - begin, after - begin)), block)
                yield self._element(epoch, first, after, own)

    @cached_property
    def _are_cut(self) -> bool:
        """Whether elements are batches of examples as they are, which can be cut out of what was read."""
        return self.batch is not None and not self.example_functions and not self.batch_functions

    def _block(self, epoch: int, start: int, stop: int) -> Any:
        assert not isinstance(self.source, Blocks)
        blocks = []
        for numbers, first, after in self._order.pieces(epoch, start, stop):
            block = self.source.read(numbers, first, after)
            if not isinstance(self.source, Arrays):  # our own, whose blocks are right
                check_block(block, len(numbers))
            blocks.append(block)
        return joined(blocks)

    def _element(self, epoch: int, start: int, stop: int, block: Any) -> Any:
        """Return an element, from the `block` of its examples if they were read, or its DatasetError."""
        try:
            block = self._block(epoch, start, stop) if block is None else block
            if self.process_map is None:
                return self._processed(block)
            return Unprocessed(self._begun(block), partial(self._unreadable, epoch, start, stop))
        except Exception as error:
            return self._unreadable(epoch, start, stop, error)

    def _unreadable(self, epoch: int, start: int, stop: int, error: Exception) -> DatasetError:
        numbers = np.concatenate([piece for piece, _, _ in self._order.pieces(epoch, start, stop)])
        some = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        subject = f"the examples at {start:,} to {stop - 1:,} of epoch {epoch}, numbers {some} of the source,"
        return self._failed(subject, stop - start, error)

    def block_order(self, epoch: int) -> Numbers:
        """Return the numbers of the blocks in the order of an epoch."""
        return next(self._order.pieces(epoch, 0, self.length))[0]

    def _of_window(self, source: Blocks, epoch: int, positions: range) -> Iterator[Any]:
        """Yield the elements of the blocks at these positions, which are shuffled together."""
        indices = [
            int(piece[0][0]) for position in positions for piece in self._order.pieces(epoch, position, position + 1)
        ]
        blocks, streams = [], []
        for index in indices:
            try:
                block = source.load(index)
                if isinstance(block, Iterator):
                    streams.append(block)
                elif size_of(block):
                    blocks.append(block)
            except Exception as error:
                yield self._failed(f"{source.name_of(index)}, in epoch {epoch},", 1, error)
        block = None  # what it holds can be freed as it is arranged
        others = f" and {len(indices) - 1} that are read with it" if len(indices) > 1 else ""
        subject = f"{source.name_of(indices[0])}{others}, in epoch {epoch},"
        if streams:
            yield from self._of_stream(_in_turn(streams), subject, epoch, indices[0])
        if blocks:
            try:
                blocks = [joined(blocks)]
            except Exception as error:  # they don't fit together
                yield self._failed(subject, len(blocks), error)
                return
            yield from self._of_block(blocks.pop(), subject, epoch, indices[0], by_batch=isinstance(source, Files))

    def _of_block(self, block: Any, subject: str, epoch: int, index: int, *, by_batch: bool) -> Iterator[Any]:
        """Yield the elements of examples. `by_batch`: there may be many, and other leaves than arrays."""
        size = size_of(block)
        step = self.batch or 1
        stop = size - size % step if self.drop_remainder else size
        if type(block) is dict:
            block = dict(block)  # columns are taken out of it, and the source may keep its own
        if self._are_cut and not by_batch and not isinstance(block, list):
            batches = Batches(block, step, stop, partial(self._arranged_or_failed, epoch, index, subject))
            del block
            if batches:
                yield batches
            return
        order = self._order_within(epoch, index, size) if by_batch else None
        if order is None:
            block = self._arranged(epoch, index, block)
        for start in range(0, stop, step):
            examples = cut(block, start, start + step) if order is None else take(block, order[start : start + step])
            yield self._of_examples(examples, start, subject)

    def _order_within(self, epoch: int, index: int, size: int) -> Numbers:
        """Return the order of the examples of a block, or of several that are shuffled together."""
        return np.arange(size) if self.seed is None else generator_of(self.seed, epoch, index + 1).permutation(size)

    def _arranged(self, epoch: int, index: int, block: Any) -> Any:
        """Return a copy of a block, in the epoch's order: the source may keep it, or map it from a file.

        The columns of a dict are taken out of it one by one, so that each can be freed once it was copied.
        """
        order = None if self.seed is None else self._order_within(epoch, index, size_of(block))
        if isinstance(block, list):
            return block if order is None else take(block, order)
        arrange = _copied if order is None else partial(take_rows, indices=order)
        if type(block) is not dict:
            return map_leaves(arrange, block)
        return {name: map_leaves(arrange, block.pop(name)) for name in list(block)}

    def _arranged_or_failed(self, epoch: int, index: int, subject: str, block: Any) -> Any:
        """Do what `_arranged` does. Raise the DatasetError of what it raises."""
        size = size_of(block)
        try:
            return self._arranged(epoch, index, block)
        except Exception as error:
            raise self._failed(subject, size, error) from error

    def _of_stream(self, examples: Iterator[Any], subject: str, epoch: int, number: int) -> Iterator[Any]:
        """Yield elements as they come. At most a batch is held in memory, plus a split if shuffled."""
        step, start = self.batch or 1, 0
        if self.seed is not None:
            examples = self._shuffled(examples, epoch, number)
        while True:
            try:
                block = list(itertools.islice(examples, step))
            except Exception as error:  # the rest can't be read either
                yield self._failed(f"what comes after the first {start:,} examples of {subject}", 1, error)
                return
            if not block or (len(block) < step and self.drop_remainder):
                return
            yield self._of_examples(block, start, subject)
            start += len(block)

    def _of_examples(self, examples: Any, start: int, subject: str) -> Any:
        def failed(error: Exception) -> DatasetError:
            count = size_of(examples)
            return self._failed(f"examples {start:,} to {start + count - 1:,} of {subject}", count, error)

        try:
            return self._processed(examples) if self.process_map is None else Unprocessed(self._begun(examples), failed)
        except Exception as error:
            return failed(error)

    def _shuffled(self, examples: Iterator[Any], epoch: int, number: int) -> Iterator[Any]:
        """Yield the examples split by split, each in a random order."""
        assert self.seed is not None
        for split in itertools.count(1):
            block = list(itertools.islice(examples, self.split))
            for index in generator_of(self.seed, epoch, number + 1, split).permutation(len(block)).tolist():
                example, block[index] = block[index], None  # so that it can be freed as soon as it was used
                yield example
            if len(block) < self.split:
                return

    def _processed(self, block: Any) -> Any:
        """Return the element of the examples in a block."""
        if self.example_functions or self.batch is None:
            block = self._of_each(self.example_functions, block)
        # Copied, since a step may write to its element, which must not change the source.
        element = map_leaves(_copied, block[0]) if self.batch is None else stacked(block)
        return self._of_batch(self.batch_functions, element)

    def _of_each(self, functions: Sequence[Callable[[Any], Any] | ProcessMap], block: Any) -> list[Any]:
        examples = unstacked(block)
        for function in functions:
            call = function.function if isinstance(function, ProcessMap) else function
            examples = [call(example) for example in examples]
        return examples

    def _of_batch(self, functions: Sequence[Callable[[Any], Any] | ProcessMap], element: Any) -> Any:
        for function in functions:
            element = (function.function if isinstance(function, ProcessMap) else function)(element)
        return element

    # With a map in processes: what is done before and after it

    @cached_property
    def _maps_examples(self) -> bool:
        """Whether its function takes examples, not batches."""
        return self.process_map in self.example_functions

    @cached_property
    def _stacks(self) -> bool:
        """Whether examples are put together right after it."""
        return self._maps_examples and self.batch is not None and self.process_map is self.example_functions[-1]

    def _begun(self, block: Any) -> Any:
        """Return what the map's function is called for: the examples, or their batch."""
        assert self.process_map is not None
        if self._maps_examples:
            before = self.example_functions[: self.example_functions.index(self.process_map)]
            return self._of_each(before, block) if before else block
        if self.example_functions:
            block = self._of_each(self.example_functions, block)
        return self._of_batch(self.batch_functions[: self.batch_functions.index(self.process_map)], stacked(block))

    def _finished(self, block: Any) -> Any:
        """Return the element of what the map has returned."""
        assert self.process_map is not None
        if not self._maps_examples:
            return self._of_batch(self.batch_functions[self.batch_functions.index(self.process_map) + 1 :], block)
        if not self._stacks:
            after = self.example_functions[self.example_functions.index(self.process_map) + 1 :]
            examples = self._of_each(after, block)
            block = examples[0] if self.batch is None else stacked(examples)
        return self._of_batch(self.batch_functions, block)

    def _failed(self, subject: str, count: int, error: Exception) -> DatasetError:
        # A PsClusterError says itself what was raised in another process, if its class is not known here.
        why = str(error) if type(error) is PsClusterError else f"{type(error).__name__}: {error}"
        failure = DatasetError(f"dataset {self.name!r}: {subject} can't be read: {why}")
        failure.__cause__, failure.examples = error, count
        return failure

    @cached_property
    def _order(self) -> Order:
        if isinstance(self.source, Blocks):
            return Order(self.length, max(1, self.length), self.seed, self.source.neighbours)
        return Order(self.length, self.split, self.seed)


def numbered(pipeline: Pipeline, _index: int) -> Pipeline:
    """Return the pipeline: what a worker calls for the one with this number."""
    return pipeline


def _one_by_one(found: Iterator[Any]) -> Iterator[Any]:
    for each in found:
        if isinstance(each, Batches):
            while each:
                yield each.take()
        else:
            yield each
