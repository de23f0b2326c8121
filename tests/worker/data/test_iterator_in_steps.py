"""A worker's iterator in synchronous steps: elements of a step are given again until it is committed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.conftest import search

from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import MisuseError
from pscluster.worker.data.per_replica import sliced
from pscluster.worker.data.per_worker import EndOfIterator, InputContext, WorkerIterator


class Steps:
    """Stands for the steps of this worker."""

    def __init__(self) -> None:
        self.iterators: set[Any] = set()

    def take_from(self, iterator: WorkerIterator) -> None:
        """Note it."""
        self.iterators.add(iterator)


def context_of(steps: Steps | None) -> FunctionContext:
    """Return the context of a function that takes steps, or of another one."""
    context = FunctionContext(function=1, attempt=1, worker_index=0, num_workers=1)
    context.steps = steps
    return context


class IteratorMachine(RuleBasedStateMachine):
    """Steps that are committed or not, attempts that begin anew, here or on a worker that has restarted."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.after = 0  # the positions that server 0 has recorded
        self.at = 0  # what is given next
        self.had_part = False  # has this process taken the elements of the last step that is committed?
        self.start()

    def start(self) -> None:
        self.iterator = WorkerIterator("5", itertools.count)

    def take(self, count: int, steps: Steps | None) -> None:
        with running(context_of(steps)):
            for _ in range(count):
                assert next(self.iterator) == self.at
                self.at += 1

    @rule(count=st.integers(0, 4))
    def commit(self, count: int) -> None:
        """A step takes elements, and is committed."""
        self.take(count, Steps())
        self.iterator.confirm()
        self.before, self.after = self.after, self.at
        self.had_part = True
        assert len(self.iterator._recent) <= 8, "elements of the last two steps at most"

    @rule(count=st.integers(0, 4), committed=st.booleans())
    def fail(self, count: int, committed: bool) -> None:
        """The attempt ends in the middle of a step, or before it learns that the step is committed."""
        self.take(count, Steps())
        self.iterator.rewind()
        if committed:
            self.before, self.after = self.after, self.at
            self.had_part = True
        self.go_on(dry=False)

    @rule()
    def restart(self) -> None:
        """The worker dies."""
        self.start()
        self.had_part = False
        self.go_on(dry=False)

    def go_on(self, *, dry: bool) -> None:
        self.at = self.before if dry else self.after
        self.iterator.seek(self.at)

    @precondition(lambda self: self.after > self.before)
    @rule(restarted=st.booleans())
    def repeat_for_the_result(self, restarted: bool) -> None:
        """All steps are committed, and the last one is taken again."""
        if restarted or not self.had_part:
            self.start()
        self.had_part = True
        count = self.after - self.before
        self.go_on(dry=True)
        self.take(count, Steps())
        self.iterator.confirm()

    @rule(count=st.integers(1, 3))
    def take_otherwise(self, count: int) -> None:
        """A function outside of steps takes elements, between two runs."""
        self.take(count, None)
        self.before = self.after = self.at
        self.take(1, Steps())  # a step that is committed at once
        self.iterator.confirm()
        self.after, self.had_part = self.at, True

    @invariant()
    def it_is_where_it_should_be(self) -> None:
        assert self.iterator.given == self.at


TestIteratorMachine = IteratorMachine.TestCase
TestIteratorMachine.settings = search(60, 20)


class SequenceMachine(IteratorMachine):
    """The same with data that can begin anywhere."""

    def start(self) -> None:
        self.iterator = WorkerIterator("5", lambda: range(10_000))


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = search(20, 20)


class Read(list[int]):
    """Notes which elements are read."""

    def __init__(self, elements: Iterable[int]) -> None:
        super().__init__(elements)
        self.read: list[int] = []

    def __getitem__(self, at: Any) -> Any:
        self.read.append(at)
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        return (self[at] for at in range(len(self)))


class Skipping:
    """Data with the method by which datasets of TensorFlow and Hugging Face begin later."""

    def __init__(self, data: Read, first: int = 0) -> None:
        self._data, self._first = data, first

    def __iter__(self) -> Iterator[int]:
        return (self._data[at] for at in range(self._first, len(self._data)))

    def skip(self, count: int) -> Skipping:
        """Begin so many elements later."""
        return Skipping(self._data, self._first + count)


@pytest.mark.parametrize("made", [lambda data: data, Skipping], ids=["a sequence", "skip"])
def test_elements_before_a_position_are_not_read_where_they_need_not_be(made: Any) -> None:
    data = Read(range(100))
    iterator = WorkerIterator("5", lambda: made(data))
    iterator.seek(90)
    with running(context_of(Steps())):
        assert [next(iterator), next(iterator)] == [90, 91]
    assert data.read == [90, 91]
    iterator.rewind()
    assert list(iterator) == list(range(90, 100))
    assert data.read == list(range(90, 100))
    assert WorkerIterator("5", lambda: np.arange(3)).get_next() == 0


@pytest.mark.parametrize("made", [lambda data: data, iter], ids=["a sequence", "an iterator"])
def test_slices_before_a_position_are_not_made(made: Any) -> None:
    batches = [np.arange(4 * at, 4 * at + 4) for at in range(10)]
    context = InputContext(1, 2, 1, 2, 0)
    iterator = WorkerIterator("5", lambda: sliced(lambda: made(batches), False, context))
    iterator.seek(8)
    assert [rows.tolist() for rows in iterator] == [[34, 35], [38, 39]]


def test_data_that_can_not_be_skipped() -> None:
    """Its error is raised in each step, as that of the function that makes it."""

    class Broken(Skipping):
        def skip(self, count: int) -> Skipping:
            raise OSError(f"no element {count}")

    iterator = WorkerIterator("5", lambda: Broken(Read([1, 2])))
    for _ in range(2):
        with pytest.raises(OSError, match="no element 1"):
            iterator.seek(1)


def test_elements_that_are_gone() -> None:
    iterator = WorkerIterator("5", lambda: range(9))
    with running(context_of(steps := Steps())):
        for _ in range(3):
            next(iterator)
            iterator.confirm()
        assert steps.iterators == {iterator}
    iterator.seek(2)
    with pytest.raises(MisuseError, match="can't go back to element 1: those before 2 are gone"):
        iterator.seek(1)
    assert list(iterator) == [2, 3, 4, 5, 6, 7, 8]


def test_data_that_ends_before_a_position() -> None:
    iterator = WorkerIterator("5", lambda: range(3))
    with pytest.raises(EndOfIterator):
        iterator.seek(5)
    iterator.seek(3)
    with running(context_of(Steps())), pytest.raises(EndOfIterator):
        next(iterator)
    iterator.rewind()
    assert iterator.given == 3
