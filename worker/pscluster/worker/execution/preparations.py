"""What is prepared for functions whose steps overlap, before they run; see `overlap` for their states.

Another thread decodes a function's arguments as soon as it is the next one. When it may call `lookups`, and fetch the
rows, depends on what that needs:

    arguments without data                        at once: while the function before it runs
    elements of a per-worker iterator, of a part  once the one before it, the same function, has taken all of its own:
                                                  its parts are given, and as many elements of iterators as the one
                                                  before that has taken (at first one of each); or it has returned
    the first element of a function of steps      once the last step of the one before it, the same function, has begun
      (`fit`)

After another function, or if that has not happened when it is its turn, the running thread fetches the rows; a
function of steps does that itself. So data is read in the order in which functions take it. If a function takes more
than was expected, it gets the elements that were peeked at for the next one (see `look_ahead`), whose rows are then for
other ids than its lookups, and are not used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from pscluster.core.context import FunctionContext, on_behalf_of
from pscluster.core.errors import FunctionCancelled
from pscluster.core.handles import Handle
from pscluster.ps.client.overlap.queue import StepOverlap
from pscluster.ps.handles.rows.fetched_rows import FetchedRows
from pscluster.v1 import worker_pb2
from pscluster.worker.data.look_ahead import LookAhead
from pscluster.worker.data.per_worker import WorkerIterator
from pscluster.worker.data.prefetch import Part
from pscluster.worker.execution.function_calls import Arguments, arguments_of
from pscluster.worker.failures import failure_of
from pscluster.worker.job import Job
from pscluster.worker.steps.overlap import Overlap

MakeContext = Callable[[int, worker_pb2.Step], FunctionContext]


class Prepared:
    """What a function needs before its step runs. Prepared by one thread, taken by another."""

    def __init__(
        self,
        job: Job,
        step: worker_pb2.Step,
        context: FunctionContext,
        overlap: Overlap,
        attachments: list[memoryview],
    ) -> None:
        self.context = context
        self.definition = step.definition
        self.by_step = overlap.by_step
        self.parts: Sequence[Part] = ()
        self.iterators: list[WorkerIterator] = []
        self.is_claimed = False  # a thread fetches the rows, or has, or none is to; guarded by the runner's lock
        self.is_ahead = False  # another thread does, or has
        self._job, self._step, self._lookups, self._attachments = job, step, overlap.lookups, attachments
        self._arguments: Future[Arguments] = Future()
        self._peeked = threading.Event()  # of a function of steps: its first element is there, or never will be
        self._fetched: Future[FetchedRows] = Future()

    @property
    def needs_data(self) -> bool:
        """Whether `lookups` takes elements that a function before it may take. Once the arguments are decoded."""
        return self.by_step or bool(self.parts or self.iterators)

    def decode(self) -> None:
        """Decode the arguments. Never raises."""
        try:
            with on_behalf_of(self.context):
                self.context.check()
                self.parts = self._job.parts_of(self._step) if self._step.parts else ()
                arguments = arguments_of(self._job, self._step, self._attachments, self.parts, self._note)
        except BaseException as error:  # it is the function's
            self._arguments.set_exception(error)
        else:
            self._arguments.set_result(arguments)

    def wait_decoded(self) -> None:
        self._arguments.exception()

    def _note(self, handle: Handle) -> None:
        if isinstance(handle, WorkerIterator) and all(handle is not known for known in self.iterators):
            self.iterators.append(handle)

    def fetch(self) -> None:
        """Fetch the rows, once the arguments are decoded. Never raises."""
        ahead: LookAhead = self.context.overlap.look_ahead
        fetched = FetchedRows()
        try:
            args, kwargs = self._arguments.result()
            with on_behalf_of(self.context):
                self.context.check()
                if self._lookups is None:
                    pass
                elif self.by_step:
                    element = ahead.next_of(args[0])
                    self._peeked.set()
                    fetched.name(self._lookups(element))
                else:
                    fetched.name(self._lookups(*args, **kwargs))
                fetched.fetch()
        except BaseException as error:  # it is the function's
            # One whose data has ended, or can't be read, finds that out itself: perhaps it does not take that much.
            if not ahead.failed or self.context.is_cancelled:
                self._fetched.set_exception(error)
                return
        finally:
            self._peeked.set()
        self._fetched.set_result(fetched)

    def take(self) -> Arguments:
        """Return the arguments once all is there, and give the rows to the function's StepOverlap.

        Raise what was raised.
        """
        overlap: StepOverlap = self.context.overlap
        try:
            arguments = self._arguments.result()
            if not self.by_step:
                overlap.fetched = self._fetched.result()
            elif self.is_ahead:
                self._peeked.wait()  # else two threads would take elements
                overlap.first = self._fetched  # for which the first step waits
            return arguments
        finally:
            self._arguments = Future()  # so that neither arguments, nor rows, nor errors are held
            if not self.by_step:
                self._fetched = Future()


class Preparations:
    """What is prepared for the functions of one runner, whose lock it shares.

    Args:
        context_of: makes the context of a function, by its position and step.
    """

    def __init__(self, lock: threading.RLock, job: Job, context_of: MakeContext) -> None:
        self._lock, self._job, self._context_of = lock, job, context_of
        self._prepared: dict[int, Prepared] = {}  # by position, of functions that wait
        self._held: Prepared | None = None  # of these, the one that waits for data
        # The function that has begun last, if its steps overlap; whether it has taken all of its data; how many
        # elements of iterators it has taken, and is expected to take.
        self._running: Prepared | None = None
        self._took_all, self._taken, self._expected = False, 0, 0
        self._last: tuple[str, int] = "", 0  # the definition of the one before it, and how many that took

    # Under the lock

    def may_begin(self, step: worker_pb2.Step) -> bool:
        """Return whether few enough earlier steps have outstanding pushes for this function."""
        overlap, queue = self._job.overlap_of(step.definition), self._job.overlap_queue
        return queue is None or queue.may_begin(0 if overlap is None or step.attempt > 1 else overlap.steps)

    def context(self, position: int) -> FunctionContext | None:
        """Return the context of a function that is or was prepared."""
        prepared = self._prepared.get(position)
        return None if prepared is None else prepared.context

    def another_begins(self) -> None:
        """Take note that a function begins: what the one before it has taken says nothing of what follows now."""
        self._running = None

    def begin(self, position: int, step: worker_pb2.Step) -> None:
        """Have another thread prepare a function, the next one, unless it does so already."""
        if (queue := self._job.overlap_queue) is None or position in self._prepared:
            return
        if (prepared := self._preparation(position, step, None)) is not None:
            self._prepared[position] = prepared
            queue.submit_ahead(partial(self._prepare, prepared))

    def drop(self, position: int) -> None:
        """Forget what was prepared for a function that does not run here."""
        if (prepared := self._prepared.pop(position, None)) is not None:
            self._claim(prepared)
            prepared.context.cancel()

    def drop_all(self) -> None:
        for position in list(self._prepared):
            self.drop(position)

    def _claim(self, prepared: Prepared) -> bool:
        """Let only the caller fetch the rows of a function. Return False if another one does, or has."""
        if self._held is prepared:
            self._held = None
        claimed, prepared.is_claimed = not prepared.is_claimed, True
        return claimed

    def _may_fetch(self, prepared: Prepared) -> bool:
        if not prepared.needs_data:
            return True
        running = self._running
        return self._took_all and running is not None and running.definition == prepared.definition

    # Without it

    def _prepare(self, prepared: Prepared) -> None:
        prepared.decode()
        with self._lock:
            if not prepared.is_claimed and not self._may_fetch(prepared):
                self._held = prepared
                return
            if not self._claim(prepared):
                return
            prepared.is_ahead = True
        prepared.fetch()

    def take(self, position: int, step: worker_pb2.Step, context: FunctionContext) -> Prepared | None:
        """Return what was prepared for a function that runs now, or prepare it. None if its steps do not overlap."""
        with self._lock:
            prepared = self._prepared.pop(position, None)
            to_fetch = prepared is None or self._claim(prepared)
        if prepared is None:
            if (prepared := self._preparation(position, step, context)) is None:
                return None
            prepared.decode()
        prepared.wait_decoded()
        if to_fetch and not prepared.by_step:
            prepared.fetch()
        overlap: StepOverlap = context.overlap
        overlap.took_last = partial(self._has_taken_all, prepared)
        if prepared.needs_data and not prepared.by_step:
            overlap.took = partial(self._has_taken, prepared)
        with self._lock:
            self._running, self._took_all, self._taken = prepared, False, 0
            definition, count = self._last
            self._expected = max(count, 1) if definition == prepared.definition else len(prepared.iterators)
        return prepared

    def _has_taken(self, prepared: Prepared, source: object) -> None:
        """Take note that a function has taken an element of its data, or found its end."""
        if any(source is iterator for iterator in prepared.iterators):
            self._taken += 1
        enough = self._taken >= self._expected or not prepared.iterators
        if enough and all(part.is_given for part in prepared.parts):
            self._has_taken_all(prepared)

    def _has_taken_all(self, prepared: Prepared) -> None:
        """Fetch rows of the next function, if it waits for this one to have taken its data."""
        with self._lock:
            if self._running is not prepared or self._took_all:
                return
            self._took_all, held, queue = True, self._held, self._job.overlap_queue
            if held is None or queue is None or not self._may_fetch(held) or not self._claim(held):
                return
            held.is_ahead = True
        queue.submit_ahead(held.fetch)

    def returned(self, context: FunctionContext) -> None:
        """Take note that a function's code is over."""
        running = self._running
        if running is not None and running.context is context:
            self._last = running.definition, self._taken
            self._has_taken_all(running)

    def _preparation(self, position: int, step: worker_pb2.Step, context: FunctionContext | None) -> Prepared | None:
        """Return what is to be prepared for a function, of which this may be the context. None if it is not one."""
        overlap, queue = self._job.overlap_of(step.definition), self._job.overlap_queue
        if overlap is None or queue is None or step.attempt > 1:
            return None
        if step.HasField("gang"):  # its arguments are decoded as a member, which it is only once it runs
            if context is not None:
                context.overlap = StepOverlap(queue, context, overlap.steps)
            return None
        context = context or self._context_of(position, step)
        context.overlap = StepOverlap(queue, context, overlap.steps)
        context.overlap.look_ahead = LookAhead(context, self._job.context(function=0, attempt=0))
        return Prepared(self._job, step, context, overlap, self._job.arguments.pop(position, []))


def failed_later(outcome: worker_pb2.Outcome, error: BaseException, *, updated: bool) -> worker_pb2.Outcome:
    """Return the outcome of a function that has returned, or raised, and of whose pushes one has failed."""
    # The step pushed before it did anything else that can fail: it would not have come any further.
    stopped = isinstance(error, FunctionCancelled)
    failed = worker_pb2.Outcome(function=outcome.function, seconds=outcome.seconds, waited=outcome.waited)
    failed.kind = worker_pb2.Outcome.CANCELLED if stopped else worker_pb2.Outcome.FAILED
    failed.updated = updated
    failed.skipped.extend(outcome.skipped)
    if not stopped:
        failed.failure.CopyFrom(failure_of(error))
    return failed
