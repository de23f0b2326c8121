"""What is taken from data before a function runs: it is given again, in order, with its errors where they belong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pscluster.core.context import FunctionContext, current_function, on_behalf_of, running
from pscluster.core.errors import FunctionCancelled
from pscluster.worker.data.look_ahead import LookAhead
from pscluster.worker.data.per_worker import EndOfIterator, WorkerIterator


class Overlap:
    """What a function's StepOverlap is, as far as its data is concerned."""

    def __init__(self, look_ahead: LookAhead) -> None:
        self.look_ahead = look_ahead
        self.taken: list[object] = []
        self.took = self.taken.append


def function(number: int) -> FunctionContext:
    """A function, and its LookAhead."""
    context, neutral = (FunctionContext(function=of, attempt=1, worker_index=0, num_workers=1) for of in (number, 0))
    context.overlap = Overlap(LookAhead(context, neutral))
    return context


def elements() -> Iterator[int]:
    """Four numbers, and an error. Their functions are never told to stop."""
    for at in range(4):
        context = current_function()
        assert context is not None
        context.check()
        yield at
    raise KeyError("no more")


def test_elements_that_were_peeked_at_are_given_in_order() -> None:
    """To whichever function takes them; the error comes after the last one, each time, also ahead."""
    iterator = WorkerIterator("1", elements)
    first, second, third = function(1), function(2), function(3)
    with on_behalf_of(first):
        assert [next(iterator), next(iterator)] == [0, 1]
    with running(first):
        assert next(iterator) == 0
    assert first.overlap.taken == [iterator]
    second.cancel()
    with on_behalf_of(second), pytest.raises(FunctionCancelled):
        next(iterator)
    with on_behalf_of(third):
        assert [next(iterator) for _ in range(3)] == [1, 2, 3]
        assert not third.overlap.look_ahead.failed
        with pytest.raises(KeyError):
            next(iterator)
        assert third.overlap.look_ahead.failed
    with running(third):
        assert [next(iterator) for _ in range(3)] == [1, 2, 3]
        for _ in range(2):
            with pytest.raises(KeyError, match="no more"):
                next(iterator)
    assert iterator.given == 4


def test_the_end_is_where_it_was() -> None:
    """An iterator that has ended ahead still gives what is left, and then says how many elements it had."""
    iterator = WorkerIterator("1", lambda: iter("ab"))
    ahead = function(1)
    with on_behalf_of(ahead):
        assert list(iterator) == ["a", "b"]
    with running(ahead):
        assert next(iterator) == "a"
        assert next(iterator) == "b"
        with pytest.raises(EndOfIterator) as caught:
            next(iterator)
    assert caught.value.given == 2
