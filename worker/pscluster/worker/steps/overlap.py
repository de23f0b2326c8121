"""Functions whose steps overlap, on a worker: the states of such a function, and what runs as one.

A function that the coordinator has scheduled with `lookups` is a partial of `overlapped` (or, in a training, of
`logs_of_overlapped_steps`): by that the runner recognizes it. From the runner's point of view it goes through these
states (see `preparations`); what is below the line can last while the next one runs:

    WAITING --the function before it begins--> PREPARING   another thread decodes its arguments, calls `lookups` with
                                                           them, and fetches the rows that it names; where that needs
                                                           data, not before it is there (see `preparations`)
            --nothing runs-------------------> PREPARING   the same, on the running thread: it is next
    PREPARING --all is there-----------------> PREPARED
              --anything is raised-----------> PREPARED    its error is raised when it is run: the function fails
    WAITING, PREPARING, PREPARED
            --it is recalled, or the stream ends--> gone   what was fetched is dropped; if it comes back, on this worker
                                                           or another, it is prepared anew
    PREPARED --its turn, and of the steps before
               it at most `overlap` have pushes
               outstanding-------------------> RUNNING     lookups of exactly these ids get these rows
    RUNNING --it returns, or raises----------> PUSHING     the next function may run
    ------------------------------------------------------------------------------------------------------------------
    PUSHING --all pushes are acknowledged----> ENDED       its outcome is sent
            --one fails, or it is told to stop-> ENDED     as failed, or cancelled; the pushes after that are dropped

Only the function after the one that runs is prepared; a function of steps when the last step of the one before it has
begun. So its rows have the updates of all steps of this worker but the last two (or `overlap + 1`): the step that runs
now, and the one before, whose pushes may be under way.

One that runs again, since its worker died or it failed, is not overlapped: it reads its rows itself, and its pushes
return when they are acknowledged. Otherwise it could be held responsible for the death of a worker that the next
function has killed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from pscluster.core.context import FunctionContext, current_function, on_behalf_of
from pscluster.core.errors import FunctionCancelled
from pscluster.core.phases import Begun
from pscluster.ps.client.overlap.own_thread import OwnThread
from pscluster.ps.client.overlap.queue import StepOverlap
from pscluster.ps.handles.rows.fetched_rows import FetchedRows
from pscluster.worker.steps.training import StepLogs, logs_of_steps

Lookups = Callable[..., Any]


class Overlap(NamedTuple):
    """How the steps of a function overlap with those before and after."""

    steps: int
    """How many earlier steps may have outstanding pushes while one runs."""
    lookups: Lookups | None
    """Names the rows of the function, or of its first step. None: nothing is fetched ahead."""
    by_step: bool = False
    """Whether the function has steps of its own, and `lookups` is called with the element of each. Otherwise with the
    function's arguments."""


def overlapped(step: Callable[..., Any], lookups: Lookups, overlap: int, *args: Any, **kwargs: Any) -> Any:
    """Run a step; the runner has called `lookups` with its arguments."""
    del lookups, overlap
    return step(*args, **kwargs)


def logs_of_overlapped_steps(
    step: Callable[[Any], Any],
    lookups: Lookups | None,
    overlap: int,
    elements: Iterable[Any],
    steps: int | None = None,
) -> StepLogs:
    """Do what `logs_of_steps` does. While a step runs, `lookups` is called with the next element, and rows fetched."""
    del overlap  # it is in the function's StepOverlap
    function = current_function()
    if function is None or function.overlap is None:
        # It runs again, since its worker died.
        return logs_of_steps(step, elements, steps)
    if (bounded := function.bounded) is not None:  # it is called anew for each step
        bounded.ahead = bounded.ahead or _AheadInRun(elements, lookups, function, function.overlap)
        return logs_of_steps(step, bounded.ahead, steps)
    with contextlib.closing(_Ahead(elements, steps, lookups, function, function.overlap)) as ahead:
        return logs_of_steps(step, ahead, steps)


def overlap_of(function: Callable[..., Any]) -> Overlap | None:
    """Return how the steps of a function overlap; None if they do not."""
    if isinstance(function, functools.partial):
        if function.func is overlapped:
            return Overlap(function.args[2], function.args[1])
        if function.func is logs_of_overlapped_steps:
            return Overlap(function.args[2], function.args[1], by_step=True)
    return None


@dataclass(slots=True)
class _Next:
    """An element that was taken ahead, or what was raised instead of it."""

    element: Any = None
    error: BaseException | None = None
    fetched: Future[FetchedRows] | None = None
    sent: tuple[FetchedRows, Begun[None]] | None = None  # instead of that: the requests


class _Ahead(Iterator[Any]):
    """The elements of a function's steps, each with its rows. One is taken ahead; never more than the function takes.

    Elements are taken on the function's thread, in the data's order. It also calls `lookups` and sends the requests for
    the rows, unless that takes long (see `OwnThread`), and receives the replies when the step is to run.
    """

    def __init__(
        self,
        elements: Iterable[Any],
        steps: int | None,
        lookups: Lookups | None,
        function: FunctionContext,
        overlap: StepOverlap,
    ) -> None:
        self._elements = iter(elements)
        self._left = steps
        self._lookups = lookups
        self._function, self._overlap = function, overlap
        self._next: _Next | None = None
        self._is_first = True
        self._own_thread = OwnThread()

    def __next__(self) -> Any:
        self._overlap.fetched = None
        self._begin_step()
        if self._lookups is None:
            return next(self._elements)
        taken = self._next or self._taken()
        if taken.error is not None:
            raise taken.error
        self._next = None
        fetched = None if taken.sent is None else self._received(*taken.sent)  # its connections serve the next request
        if self._has_next():
            self._next = self._taken()
        if self._next is None or self._next.error is not None:
            self._overlap.took_last()
        self._overlap.fetched = fetched if taken.fetched is None else taken.fetched.result()
        return taken.element

    def close(self) -> None:
        """Give up what was sent for a step that is not to run."""
        if self._next is not None and self._next.sent is not None:
            self._next.sent[1].close()

    def _begin_step(self) -> None:
        if self._is_first:
            self._is_first = False
        else:
            self._overlap.begin_step()

    def _has_next(self) -> bool:
        return self._left is None or self._left > 0

    def _taken(self) -> _Next:
        """Take an element, and begin to fetch its rows."""
        if self._left is not None:
            self._left -= 1
        try:
            element = next(self._elements)
        except (FunctionCancelled, Exception) as error:
            return _Next(error=error)
        if (first := self._overlap.first) is not None:
            self._overlap.first = None
            return _Next(element, fetched=first)
        result: Future[FetchedRows] = Future()
        rows, is_named = FetchedRows(), False
        if self._function.steps is None and self._own_thread.takes():
            begin = time.perf_counter()
            try:
                with on_behalf_of(self._function):
                    self._function.check()
                    self._name(element, rows)
                    begun = Begun(rows.fetching())
            except (FunctionCancelled, Exception) as error:  # of the step that it is for
                result.set_exception(error)
                return _Next(element, fetched=result)
            self._own_thread.took(time.perf_counter() - begin if begun.is_under_way else math.inf)
            if begun.is_under_way:
                return _Next(element, sent=(rows, begun))
            begun.close()
            is_named = True
        self._overlap.submit_ahead(functools.partial(self._fetch, element, rows, result, is_named=is_named))
        return _Next(element, fetched=result)

    def _name(self, element: Any, rows: FetchedRows) -> None:
        assert self._lookups is not None  # see __next__
        # A synchronous step reads variables as of its own clock.
        rows.name(self._lookups(element), whole=self._function.steps is None)

    def _fetch(self, element: Any, rows: FetchedRows, result: Future[FetchedRows], *, is_named: bool) -> None:
        """Fetch the rows of an element, once they are named, on another thread."""
        try:
            with on_behalf_of(self._function):
                self._function.check()
                if not is_named:
                    self._name(element, rows)
                rows.fetch()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(rows)

    def _received(self, rows: FetchedRows, begun: Begun[None]) -> FetchedRows:
        with on_behalf_of(self._function):
            begun.finish()
        return rows


class _AheadInRun(_Ahead):
    """The same in a run with bounded staleness, which begins the steps, and knows where its iterators are.

    An element that is taken ahead does not count as given: if the step it is for is not taken, it is given again.
    """

    def __init__(self, elements: Any, *args: Any) -> None:
        """Take elements of a worker's iterator."""
        self._iterator = iter(elements)
        super().__init__(self._iterator, None, *args)

    def __next__(self) -> Any:
        ahead = self._function.bounded.iterators.ahead
        ahead.clear()
        element = super().__next__()
        if self._next is not None and self._next.error is None:
            ahead[int(self._iterator.handle_key)] = 1
        return element

    def _begin_step(self) -> None:
        """Do nothing: see `bounded_steps`."""

    def _has_next(self) -> bool:
        has_next: bool = self._function.bounded.has_next
        return has_next
