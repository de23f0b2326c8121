"""The context of a running function: whose updates these are, and whether it was asked to stop.

A step function runs in a context; library calls ask for it to key their updates and to notice a cancel. A
thread that a step function starts has the context of its worker's running function too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pscluster.core.errors import FunctionCancelled


class FunctionContext:
    """What a library call needs to know of the function it runs in."""

    def __init__(
        self, *, function: int, attempt: int, worker_index: int, num_workers: int, key: int = 0, term: int = 0
    ) -> None:
        self.function = function
        self.key = key
        self.term = term
        self.attempt = attempt
        self.worker_index = worker_index
        self.num_workers = num_workers
        self._cancelled = False
        self._lock = threading.Lock()
        self._updates: defaultdict[int, int] = defaultdict(int)

    def nth_update(self, variable: int) -> int:
        """The number, from 1, of the next update of this variable by this function."""
        with self._lock:
            self._updates[variable] += 1
            return self._updates[variable]

    @property
    def updated(self) -> bool:
        """Has it asked for an update, which may have been applied?"""
        return bool(self._updates)

    def cancel(self) -> None:
        """Ask the function to stop at its next library call."""
        self._cancelled = True

    def check(self) -> None:
        """Raise FunctionCancelled if the function was asked to stop."""
        if self._cancelled:
            raise FunctionCancelled


_current: ContextVar[FunctionContext | None] = ContextVar("pscluster-function", default=None)
_of_process: list[FunctionContext] = []
"""What runs in this process: one step, and perhaps a dataset that is being built for later ones."""


def current_function() -> FunctionContext | None:
    """The context of the function that runs here, or None outside of one."""
    if (own := _current.get()) is not None:
        return own
    found = list(_of_process)  # a copy at once: other threads come and go
    steps = [context for context in found if context.function]
    return next(reversed(steps or found), None)


@contextmanager
def running(context: FunctionContext) -> Iterator[FunctionContext]:
    """Run the block as that function. A worker runs one at a time, so threads of its own find it too."""
    token = _current.set(context)
    _of_process.append(context)
    try:
        yield context
    finally:
        _of_process.remove(context)
        _current.reset(token)


def experimental_get_current_worker_index() -> int:
    """Index of the worker this step or dataset function runs on. RuntimeError elsewhere (TensorFlow's name)."""
    context = current_function()
    if context is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() has an answer only inside a function that runs on a worker: "
            "call it in a step or dataset function"
        )
    return context.worker_index
