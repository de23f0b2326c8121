"""Overlapping steps: pushes that return at once, and work that is done ahead.

What is sent when, by whom, and what that means for functions, is decided by `push_order`. Here are the lock, the
threads and the waits. A step that pushes once sends that itself, and receives the acknowledgement when a later step
needs it: until then it lies in the kernel. That takes no other thread (see `own_thread`). A thread of the pool sends
large pushes, and several of one step. One more does what is submitted ahead (calls `lookups`, fetches rows). All work
on behalf of the function that is concerned: what they do ends as the function's own calls would when it is told to
stop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from pscluster.core.context import FunctionContext, current_function, encodes_reads, in_background, on_behalf_of
from pscluster.core.phases import Begun, Phases, run
from pscluster.ps.client.overlap.own_thread import OWN_BYTES, OwnThread
from pscluster.ps.client.overlap.push_order import Owner, PushOrder, Sender

MOST_BYTES = 64 << 20
"""Of pushes that are queued, beyond the first: a step that pushes more waits until they are sent."""

MakePush = Callable[[], Phases[None]]

_Sent = tuple[FunctionContext, Begun[None]]

Submit = Callable[[Callable[[], None]], Future[None]]
Ended = Callable[[BaseException | None], object]
"""Called with the error of the first push that has failed, if any."""


class OverlapQueue:
    """The pushes of one attachment's functions, and what is done ahead for them. Thread-safe.

    Args:
        submit: runs something on a thread of a pool. It may raise RuntimeError once the job is over.
        on_change: called, without a lock, when another step may be able to begin.
    """

    def __init__(self, submit: Submit, most_bytes: int = MOST_BYTES) -> None:
        self._submit = submit
        self.on_change: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._order: PushOrder[tuple[FunctionContext, MakePush]] = PushOrder(most_bytes)
        self._sent: _Sent | None = None  # the first push, while its acknowledgement is unclaimed
        self._own_thread = OwnThread()
        self._ended: dict[Owner, Ended] = {}  # of functions that have returned
        self._ahead: deque[Callable[[], None]] = deque()

    def may_begin(self, overlap: int) -> bool:
        """Return whether a step may begin while at most `overlap` earlier ones have outstanding pushes."""
        with self._lock:
            return self._order.may_begin(overlap)

    # Pushes

    def wake(self) -> None:
        """Have all that wait check whether their function was told to stop."""
        with self._lock:
            self._changed.notify_all()

    def _wait(self, context: FunctionContext, until: Callable[[], bool]) -> None:
        """Wait until this holds, or raise FunctionCancelled. Under the lock."""

        def is_over() -> bool:
            if not until():
                self._pass_on()  # else it might never hold
                return context.is_cancelled
            return True

        self._changed.wait_for(is_over)
        context.check()

    def add(self, context: FunctionContext, owner: Owner, push: MakePush, nbytes: int) -> None:
        """Queue a push, or send it. Raise the error of an earlier one of the function."""
        if not owner.of_step:
            self._acknowledge()  # what an earlier step has sent has been answered by now
        with self._lock:
            self._wait(context, lambda: self._order.may_add(owner, nbytes))
            _raise_error_of(owner)
            here = self._order.is_empty and nbytes <= OWN_BYTES and self._own_thread.takes()
            start = self._order.add(owner, (context, push), nbytes, here=here)
            self._pass_on()
        if start and here:
            self._send_here(context, push)
            _raise_error_of(owner)
        elif start:
            self._run(self._send_all)

    def _send_here(self, context: FunctionContext, push: MakePush) -> None:
        """Send the first push, and do not wait for its acknowledgement."""
        begin = time.perf_counter()
        try:
            with on_behalf_of(context):
                context.check()
                begun = Begun(push())
        except BaseException as error:  # it is the function's
            self._acknowledged(error, here=True)
            return
        self._own_thread.took(time.perf_counter() - begin)
        with self._lock:
            if self._order.sent():
                self._run(partial(self._send_all, (context, begun)))
            else:
                self._sent = context, begun
                self._changed.notify_all()  # who waits may have to pass it on

    def _claimed(self, sender: Sender) -> _Sent | None:
        """Return what was sent, if its acknowledgement was unclaimed; this sender waits for it now. Under the lock."""
        if not self._order.claim(sender):
            return None
        sent, self._sent = self._sent, None
        return sent

    def _acknowledge(self) -> None:
        """Receive the acknowledgement that is unclaimed, if one is."""
        with self._lock:
            sent = self._claimed(Sender.STEP)
        if sent is not None:
            self._acknowledged(_error_of(sent), here=True)

    def _pass_on(self) -> None:
        """Have a thread of the pool receive the acknowledgement that is unclaimed, if one is. Under the lock."""
        if (sent := self._claimed(Sender.POOL)) is not None:
            self._run(partial(self._send_all, sent))

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._submit(work)
        except RuntimeError:  # the pool is closed: the job is over, and what is sent says so
            threading.Thread(target=work, name="overlap", daemon=True).start()

    def _send_all(self, sent: _Sent | None = None) -> None:
        """Receive the acknowledgement of what was sent; then send all that is queued."""
        if sent is not None:
            self._acknowledged(_error_of(sent))
            del sent
        while True:
            with self._lock:
                push, ended = self._order.next()
                callbacks = self._callbacks(ended)
            self._tell(callbacks)
            if push is None:
                return
            context, phases = push.payload
            error: BaseException | None = None
            try:
                with on_behalf_of(context):
                    context.check()
                    run(phases())
            except BaseException as raised:  # it is the function's
                error = raised
            del push, phases
            self._acknowledged(error)
            del error

    def _acknowledged(self, error: BaseException | None, *, here: bool = False) -> None:
        """Note how the first push has ended, which a thread of the pool has sent or, if `here`, a step's own."""
        with self._lock:
            callbacks = self._callbacks(self._order.acknowledged(error))
            if here and self._order.go_on():
                self._run(self._send_all)
        self._tell(callbacks)

    def _callbacks(self, ended: list[Owner]) -> list[Callable[[], object]]:
        """Return what to call, without the lock. Under the lock."""
        self._changed.notify_all()
        return [_bound(self._ended.pop(owner), owner.error) for owner in ended]

    def _tell(self, callbacks: list[Callable[[], object]]) -> None:
        for callback in callbacks:
            callback()
        self.on_change()

    def begin_step(self, context: FunctionContext, owner: Owner, overlap: int) -> None:
        if not self.may_begin(overlap):
            self._acknowledge()
        with self._lock:
            self._wait(context, lambda: owner.error is not None or self._order.may_begin(overlap))
            _raise_error_of(owner)
            self._order.begin_step(owner)

    def steps_acknowledged(self, owner: Owner) -> int:
        with self._lock:
            return self._order.steps_acknowledged(owner)

    def wait_own(self, context: FunctionContext, owner: Owner, *, all_steps: bool) -> None:
        if owner.outstanding:
            self._acknowledge()
            with self._lock:
                self._wait(context, lambda: not (owner.outstanding if all_steps else owner.of_step))
        _raise_error_of(owner)

    def returned(self, owner: Owner, ended: Ended) -> None:
        with self._lock:
            if not (now := self._order.returned(owner)):
                self._ended[owner] = ended
                self._pass_on()
        if now:
            ended(owner.error)

    # What is done ahead

    def submit_ahead(self, work: Callable[[], None]) -> None:
        """Run this on a thread of the pool, after what was submitted before. It must not raise."""
        with self._lock:
            self._ahead.append(work)
            start = len(self._ahead) == 1
        if start:
            self._run(self._do_ahead)

    def _do_ahead(self) -> None:
        while True:
            with self._lock:
                work = self._ahead[0]
            work()
            with self._lock:
                self._ahead.popleft()
                if not self._ahead:
                    return


def _error_of(sent: _Sent) -> BaseException | None:
    """Return what receiving the acknowledgement of a push has raised."""
    context, begun = sent
    try:
        with on_behalf_of(context):
            begun.finish()
    except BaseException as raised:  # it is the function's
        return raised
    return None


def _raise_error_of(owner: Owner) -> None:
    if owner.error is not None:
        raise owner.error


def _bound(ended: Ended, error: BaseException | None) -> Callable[[], object]:
    return lambda: ended(error)


class StepOverlap:
    """What a function whose steps overlap knows of that; see `FunctionContext.overlap`.

    Args:
        steps: how many earlier steps may have outstanding pushes while one runs.
    """

    def __init__(self, queue: OverlapQueue, context: FunctionContext, steps: int) -> None:
        self._queue, self._context, self.steps = queue, context, steps
        self._owner = Owner()
        context.on_cancel(queue.wake)  # briefly takes the queue's lock, under which nothing waits for anything else
        self.fetched: Any = None
        """The FetchedRows of the step that runs."""
        self.look_ahead: Any = None
        """What its lookups take of its data before it runs: a LookAhead, of a module that stands above this one."""
        self.first: Future[Any] | None = None
        """Of a function of several steps: the FetchedRows of the first one, if they were fetched before it ran."""
        self.took: Callable[[object], object] = lambda _: None
        """Called with a source of data when the function has taken an element of it, or has found its end."""
        self.took_last: Callable[[], object] = lambda: None
        """Called by a function of several steps when the last one has begun, and rows of a later one may be fetched."""

    def push(self, push: MakePush, nbytes: int) -> None:
        """Have this sent after all that was pushed before, and do not wait for its acknowledgement.

        Raise the error of an earlier push of the function, or FunctionCancelled.
        """
        self._queue.add(self._context, self._owner, push, nbytes)

    def begin_step(self) -> None:
        """Begin another step of the function, once at most `overlap` earlier ones have outstanding pushes.

        Raise what an earlier push has raised, or FunctionCancelled.
        """
        self._queue.begin_step(self._context, self._owner, self.steps)

    @property
    def steps_acknowledged(self) -> int:
        """How many steps of the function, before the present one, have had all their pushes acknowledged, in order."""
        return self._queue.steps_acknowledged(self._owner)

    def settle_step(self) -> None:
        """Wait for the pushes of the step that runs, before a read of it. Do nothing for what is read ahead."""
        if not in_background():
            self._queue.wait_own(self._context, self._owner, all_steps=False)

    def settle(self) -> None:
        """Wait for all pushes of the function."""
        self._queue.wait_own(self._context, self._owner, all_steps=True)

    def returned(self, ended: Ended) -> None:
        """Call `ended` once the function, whose code is over, has no outstanding pushes: now, or by another thread."""
        self._queue.returned(self._owner, ended)

    def submit_ahead(self, work: Callable[[], None]) -> None:
        """Do something for a later step on another thread."""
        self._queue.submit_ahead(work)


def fetched_rows() -> Any:
    """Return the FetchedRows of the step that runs on this thread; None if there are none, or reads are exact."""
    function = current_function()
    if function is None or function.overlap is None or in_background() or not encodes_reads(function):
        return None
    return function.overlap.fetched
