"""The context of a running function: whose updates these are, and whether it was told to stop.

A step function runs in a context; library calls look it up to key their updates and to notice a cancellation. Threads
that a step function starts also have the context of their worker's running function.

A worker may run several replicas of a gang, each in a thread with a context of its own. If they are not to run at the
same time they share a lock, and take turns: one has its turn while its function computes, and gives it up while it
waits for other replicas.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pscluster.core.errors import FunctionCancelled, MisuseError

STEP_UPDATES = 4096
"""The most updates of one variable in one synchronous step."""

MAX_STEPS = (1 << 32) // STEP_UPDATES
"""The most steps of one function: the number of an update has 32 bits."""


@dataclass(kw_only=True, eq=False)
class FunctionContext:
    """What a library call needs to know about the function it runs in.

    Most functions need few of the fields: the others are set where they are needed, which costs the others nothing.
    """

    function: int
    attempt: int
    worker_index: int
    num_workers: int
    key: int = 0
    term: int = 0
    replica: Any = field(default=None, init=False)
    """The ReplicaContext of its gang, or of one replica; made at first use, by a module that stands above this one."""
    steps: Any = field(default=None, init=False)
    """The ReplicaSteps of a synchronous run that this function is called for, once for each of them."""
    pipeline: int | None = field(default=None, init=False)
    """The replica of a SynchronousStrategy that this is, which takes elements of its own. None: it is none."""
    position: int = field(default=0, init=False)
    """The place of its step on the stream of functions. It names this execution: a retry has the attempt's number."""
    asking: Callable[[FunctionContext, Any], Any] | None = field(default=None, init=False)
    """Takes its questions to the coordinator; see `ask`. None: it is not a function that was scheduled."""
    overlap: Any = field(default=None, init=False)
    """Its StepOverlap, if its pushes return at once and rows are fetched before it runs. None: they are not."""
    tell_progress: Callable[[FunctionContext], object] | None = field(default=None, init=False)
    """Tells the coordinator that this execution has committed steps of a synchronous run. None: there is no need to."""
    turn: threading.Lock | None = field(default=None, init=False)
    """Shared with the other replicas that run here; None: they may run at the same time, or there are none."""
    _in_turn: int = field(default=0, init=False)  # the thread that has the turn; 0: this function has not
    bounded: Any = field(default=None, init=False)
    """The same for a run with bounded staleness, whose updates are applied as they come: its Bounded."""
    _has_updated: bool = field(default=False, init=False)  # in an earlier step
    _sends: bool = field(default=False, init=False)  # an update, in this step
    _first_nth: int = field(default=0, init=False)
    _cancelled: bool = field(default=False, init=False)
    _on_cancel: list[Callable[[], object]] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _updates: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int), init=False)

    def nth_update(self, variable: int) -> int:
        """Return the number, from 1, of this function's next update of a variable."""
        return self.nth_updates([variable])[0]

    def nth_updates(self, variables: Iterable[int]) -> list[int]:
        """Return what `nth_update` does, of each of these."""
        with self._lock:
            numbers = []
            for variable in variables:
                self._updates[variable] += 1
                numbers.append(self._first_nth + self._updates[variable])
            return numbers

    def begin_step(self, number: int) -> None:
        """Begin a synchronous step, from 0: its updates have numbers that other attempts at it give them, too."""
        with self._lock:
            if any(count > STEP_UPDATES for count in self._updates.values()):
                raise MisuseError(f"a synchronous step has made more than {STEP_UPDATES} updates of one variable")
            self._first_nth = number * STEP_UPDATES
            self._has_updated |= bool(self._updates)
            self._sends = False
            self._updates.clear()

    def update_counts(self) -> dict[int, int]:
        """Return how many updates of each variable it has requested."""
        with self._lock:
            return dict(self._updates)

    def go_on_after(self, counts: Mapping[int, int]) -> None:
        """Number the next updates from those counts on, as an earlier attempt did after as many updates."""
        with self._lock:
            for variable, count in counts.items():
                self._updates[variable] = max(self._updates[variable], count)

    def drop_step(self, *, updated: bool) -> None:
        """Forget the updates of a synchronous step that ended too early. `updated`: some were applied at once."""
        with self._lock:
            self._has_updated |= updated
            self._sends = False
            self._updates.clear()

    def sends_update(self) -> None:
        """Note that an update is about to be sent, or to be a part of its step."""
        self._sends = True

    @property
    def updated(self) -> bool:
        """Whether it has sent an update, which may have been applied. One that was refused before that is none."""
        return self._has_updated or self._sends

    @property
    def is_cancelled(self) -> bool:
        """Whether the function was told to stop."""
        return self._cancelled

    def cancel(self) -> None:
        """Make the function stop at its next library call, and end those that wait."""
        self._cancelled = True
        for callback in tuple(self._on_cancel):
            callback()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call this when the function is told to stop, on any thread: it must not block. At once if it was told."""
        self._on_cancel.append(callback)
        if self._cancelled:
            callback()

    def ask(self, value: Any) -> Any:
        """Ask the coordinator something, and wait for the answer. Others have their turn meanwhile. For internal use.

        The coordinator must have been given what answers; it gets the value, which is plain data. It may fail the
        question: that error is raised here. Any thread of the function may ask, several of them at once.

        Raises:
            MisuseError: this is not a function that runs on a worker, or it has ended.
            FunctionCancelled: the function was told to stop.
            TypeError: the value can't be sent, or is too large.
        """
        if self.asking is None:
            raise MisuseError("only a function that was scheduled can ask its coordinator something, while it runs")
        return self.asking(self, value)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block in this replica's turn."""
        if self.turn is None:
            yield
            return
        self._take_turn(self.turn)
        try:
            yield
        finally:
            self._end_turn(self.turn)

    @contextmanager
    def out_of_turn(self) -> Iterator[None]:
        """Let others that run here have their turn while the block waits for them, if this is in one."""
        if self.turn is None or self._in_turn != threading.get_ident():
            yield
            return
        self._end_turn(self.turn)
        try:
            yield
        finally:
            self._take_turn(self.turn)

    def _take_turn(self, turn: threading.Lock) -> None:
        turn.acquire()
        self._in_turn = threading.get_ident()
        # Threads that this function starts find the last one.
        _of_process.remove(self)
        _of_process.append(self)

    def _end_turn(self, turn: threading.Lock) -> None:
        self._in_turn = 0
        turn.release()

    def check(self) -> None:
        """Raise FunctionCancelled if the function was told to stop."""
        if self._cancelled:
            raise FunctionCancelled


_current: ContextVar[FunctionContext | None] = ContextVar("pscluster-function", default=None)
_in_background: ContextVar[bool] = ContextVar("pscluster-in-background", default=False)
_of_process: list[FunctionContext] = []
"""What runs in this process: a step, or one of each replica here, and possibly the building of a dataset for later."""


def current_function() -> FunctionContext | None:
    """Return the context of the function that runs here, or None outside one.

    Raise MisuseError on a thread that a step function has started while others run at the same time.
    """
    if (own := _current.get()) is not None:
        return own
    if not _of_process:
        return None
    contexts = list(_of_process)  # an atomic copy: other threads add and remove contexts
    steps = [context for context in contexts if context.function]
    if len(steps) > 1 and steps[-1].turn is None:
        raise MisuseError(
            f"this thread was started by one of the {len(steps)} replicas of this process, and it is unclear which: "
            "start it with target=contextvars.copy_context().run and the function as the first argument"
        )
    return next(reversed(steps or contexts), None)


_exact: ContextVar[bool] = ContextVar("pscluster-exact-reads", default=False)


@contextmanager
def exact_reads() -> Iterator[None]:
    """Have functions read variables in this block as their servers hold them, whatever their `wire_dtype`."""
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)


def encodes_reads(function: FunctionContext | None) -> bool:
    """Return whether reads by this function are in the variables' `wire_dtype`; False if it is none."""
    return function is not None and function.function > 0 and not _exact.get()


class running:  # noqa: N801 - it is used like a function
    """Run the block as that function. Unless several run at the same time, other threads also find it.

    A class, since a generator takes twice as long, and a worker runs tens of thousands of functions a second.
    """

    def __init__(self, context: FunctionContext) -> None:
        self._context = context

    def __enter__(self) -> FunctionContext:
        self._token = _current.set(self._context)
        _of_process.append(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _of_process.remove(self._context)
        _current.reset(self._token)


class _OnBehalf:
    """What `on_behalf_of` returns: a push begins and ends in one, so it costs less than a generator would."""

    __slots__ = ("_background", "_context", "_function")

    def __init__(self, context: FunctionContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._function, self._background = _current.set(self._context), _in_background.set(True)

    def __exit__(self, *_: object) -> None:
        _in_background.reset(self._background)
        _current.reset(self._function)


def on_behalf_of(context: FunctionContext) -> AbstractContextManager[None]:
    """Do a function's reads and updates in the block, on a thread where its code does not run.

    Threads that run elsewhere do not find it here: they belong to the function whose code runs.
    """
    return _OnBehalf(context)


def in_background() -> bool:
    """Return whether this thread does something for a function whose code runs elsewhere, or not yet, or is over."""
    return _in_background.get()


def experimental_get_current_worker_index() -> int:
    """Return the index of the worker that this step or dataset function runs on. Raise RuntimeError elsewhere."""
    context = current_function()
    if context is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() works only inside a function that runs on a worker: call it in a "
            "step or dataset function"
        )
    return context.worker_index
