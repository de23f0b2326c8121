"""Functions whose steps overlap, from when they are prepared until their pushes are acknowledged; see `overlap`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from pscluster.core.context import FunctionContext, on_behalf_of
from pscluster.core.errors import FunctionCancelled
from pscluster.ps.client.overlap import StepOverlap
from pscluster.ps.handles.fetched_rows import FetchedRows
from pscluster.v1 import worker_pb2
from pscluster.worker.failures import failure_of
from pscluster.worker.function_calls import Arguments, arguments_of
from pscluster.worker.job import Job
from pscluster.worker.overlap import Overlap

MakeContext = Callable[[int, worker_pb2.Step], FunctionContext]


class Prepared:
    """What a function needs before its step runs. Prepared by one thread, taken by another."""

    def __init__(self, context: FunctionContext, overlap: Overlap, arguments: Callable[[], Arguments]) -> None:
        self.context = context
        self._overlap, self._decode = overlap, arguments
        self._result: Future[tuple[Arguments, FetchedRows]] = Future()

    def prepare(self) -> None:
        """Decode the arguments and fetch the rows. Never raises."""
        try:
            with on_behalf_of(self.context):
                self.context.check()
                args, kwargs = self._decode()
                fetched = FetchedRows()
                if self._overlap.lookups is not None:
                    fetched.fetch(self._overlap.lookups(*args, **kwargs))
        except BaseException as error:  # it is the function's
            self._result.set_exception(error)
        else:
            self._result.set_result(((args, kwargs), fetched))

    def take(self) -> tuple[Arguments, FetchedRows]:
        """Wait for it, and return it. Raise what was raised."""
        try:
            return self._result.result()
        finally:
            self._result = Future()  # so that neither rows nor errors are held


class Preparations:
    """What is prepared for the functions of one runner, whose lock it shares.

    Args:
        context_of: makes the context of a function, by its position and step.
    """

    def __init__(self, lock: threading.RLock, job: Job, context_of: MakeContext) -> None:
        self._lock, self._job, self._context_of = lock, job, context_of
        self._prepared: dict[int, Prepared] = {}  # by position, of functions that wait

    # Under the lock

    def may_begin(self, step: worker_pb2.Step) -> bool:
        """Return whether few enough earlier steps have outstanding pushes for this function."""
        overlap, queue = self._job.overlap_of(step.definition), self._job.overlap_queue
        return queue is None or queue.may_begin(0 if overlap is None or step.attempt > 1 else overlap.steps)

    def context(self, position: int) -> FunctionContext | None:
        """Return the context of a function that is or was prepared."""
        prepared = self._prepared.get(position)
        return None if prepared is None else prepared.context

    def begin(self, position: int, step: worker_pb2.Step) -> None:
        """Have another thread prepare a function, the next one, unless it does so already."""
        if (queue := self._job.overlap_queue) is None or position in self._prepared:
            return
        if (prepared := self._preparation(position, step, None)) is not None:
            self._prepared[position] = prepared
            queue.submit_ahead(prepared.prepare)

    def drop(self, position: int) -> None:
        """Forget what was prepared for a function that does not run here."""
        if (prepared := self._prepared.pop(position, None)) is not None:
            prepared.context.cancel()

    def drop_all(self) -> None:
        for position in list(self._prepared):
            self.drop(position)

    # Without it

    def take(self, position: int, step: worker_pb2.Step, context: FunctionContext) -> Prepared | None:
        """Return what was prepared for a function that runs now, or prepare it. None if its steps do not overlap."""
        with self._lock:
            prepared = self._prepared.pop(position, None)
        if prepared is None and (prepared := self._preparation(position, step, context)) is not None:
            prepared.prepare()
        return prepared

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
        attachments = self._job.arguments.pop(position, [])

        def arguments() -> Arguments:
            parts = self._job.parts_of(step) if step.parts else ()
            return arguments_of(self._job, step, attachments, parts)

        return Prepared(context, overlap, arguments)


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
