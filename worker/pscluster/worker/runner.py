"""Runs the functions of one `Steps` stream, one after another, and sends their outcomes.

Threads: one reads the stream and runs the functions in order; the stream's own thread sends outcomes as they become
ready, so that no finished function waits for a running one. On the data plane, the running thread sends an outcome
itself if it is the only one, unless functions are so short that several fit into a message: waking another thread takes
longer than sending. Only one of the two sends at a time (`_sending`).

Functions that were sent but not yet read wait in the stream. So `recall` distinguishes, by position in the order of
sending, those not yet read, those waiting here, the running one and those that have ended.

While a function runs that has a slow part of a dataset, or after a long one, another thread reads the stream's next
message: then the next function, and the data it needs, are there when this one ends. Not after a short one, since
handing a message to another thread costs more than that.

If this worker has several members of a gang they run at the same time, each in a thread, the first one in the thread
that runs functions. They come in one message. If one of them was recalled before, the others run nonetheless: their
generation is over, and they are told to stop.

What a running function asks the coordinator is sent by the stream's own thread, before any outcome; see `questions`.

Functions whose steps overlap are prepared while the one before runs, and may have pushes outstanding when the next one
begins; see `overlap`. Such a function still counts as running here: its outcome is sent by the thread that completes
its last push, and it can be told to stop until then.

Every function that was sent gets exactly one outcome on the stream, or none because the stream ended; in that case the
coordinator gives it to another worker.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc

from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import FunctionCancelled, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.functions.definitions import record_resolver
from pscluster.core.handles import Handle
from pscluster.core.metrics.trace import EACH, SHORT_SECONDS, Run
from pscluster.core.transport.channels import MAX_INLINE_BYTES
from pscluster.core.transport.frames import Buffer
from pscluster.core.values import decode_call, encode
from pscluster.ps.client.overlap import StepOverlap
from pscluster.v1 import worker_pb2
from pscluster.worker.data.per_worker import EndOfIterator
from pscluster.worker.data.prefetch import EndOfPart, Part
from pscluster.worker.failures import failure_of
from pscluster.worker.function_metrics import SHORTEST_SECONDS
from pscluster.worker.job import Job
from pscluster.worker.overlap import Prepared
from pscluster.worker.questions import Questions
from pscluster.worker.steps import run_steps

logger = logging.getLogger(__name__)

LONG_SECONDS = 0.01
"""After a longer function, a thread reads the next message while a function runs: without it, reading takes a
millisecond or two if the machine's cores are busy. With gathers of 3 ms, that thread's turns took 5 % of the time."""

SEND_SECONDS = 0.0001  # the outcome of a longer function, or of one after which no other waits, gets its own message
_SEND_BYTES = 4096  # at most, by the running thread: it must not block, and there is room for this much
_REPLY_BYTES = 4 << 20  # approximate limit of the outcomes in one message

_ALONE = nullcontext()

Outcome = worker_pb2.Outcome

Received = tuple[int, worker_pb2.Step, float]
"""The position of a step, the step, and when it was received."""

Send = Callable[[bytes], bool]
"""Sends a message; returns False if it could not. See `ServerCall.sender`."""


class Runner:
    """Runs the functions of one stream: see the module's docstring."""

    def __init__(self, job: Job, turn: threading.Lock) -> None:
        self._job, self._metrics = job, job.metrics
        self._turn = turn  # shared by all streams of the worker: one function at a time
        self._lock = threading.RLock()
        # One for each waiting thread: one that wakes in vain takes the interpreter from the function.
        self._to_run = threading.Condition(self._lock)
        self._to_read = threading.Condition(self._lock)
        self._to_send = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)  # for threads that wait for the end of something
        self._waiting: deque[Received] = deque()
        self._read = 0  # position of the last step that was read
        self._recalled: set[int] = set()  # positions that were recalled before they were read
        # By function: one, or the members of a gang that run here; and those whose last pushes are outstanding.
        self._running: dict[int, FunctionContext] = {}
        self._prepared: dict[int, Prepared] = {}  # by position, of functions that wait
        self._questions = Questions(self._lock, self._running, self._to_send.notify_all)
        self._asking, self._telling = self._questions.ask, self._questions.tell_progress  # one object for all functions
        self._counting = threading.Lock()  # guards the metrics of functions that run at the same time
        self._outbox: deque[Outcome] = deque()
        self._send: Send | None = None
        self._sending = True  # a thread sends; at first the stream's own, to say that the stream is up
        self._ended = False
        self._leaving = False
        self._requests: Iterator[worker_pb2.StepsRequest] = iter(())
        self._reader: threading.Thread | None = None
        self._reading = False  # the reader reads, or should read, one message
        self._read_all = False  # there are no more messages
        self._seconds = 0.0  # duration of the last function

    def functions(self) -> tuple[int, int]:
        """Return how many functions run now, and how many wait here."""
        return len(self._running), len(self._waiting)

    # The reading and running thread

    def run(self, requests: Iterator[worker_pb2.StepsRequest], send: Send | None = None) -> None:
        """Take steps from the stream and run them until it ends. `send` is for outcomes not yielded by `outcomes`."""
        self._requests, self._send, metrics = requests, send, self._metrics
        idle = metrics.idle()
        try:
            while self._wait_next():
                metrics.not_idle(idle)
                while group := self._next():
                    first = group[0][1]
                    if first.HasField("gang") and first.gang.HasField("steps"):
                        self._job.host([step.gang.rank for _, step, _ in group])
                    if len(group) == 1:
                        self._run_one(group[0], self._turn)
                    else:
                        self._run_together(group)
                idle = metrics.idle()
        except grpc.RpcError:
            pass  # the coordinator is gone, and needs no outcomes
        except PsClusterError as error:
            logger.warning("the stream of functions ended: %s", error)
        except Exception:
            logger.exception("the runner failed; other workers will run its functions")
        finally:
            metrics.not_idle(idle)
            self.end()

    def _wait_next(self) -> bool:
        """Wait until there may be something to run. Return False if there will be nothing more."""
        with self._lock:
            self._to_run.wait_for(lambda: self._waiting or self._ended or not self._reading)
            if self._ended or self._waiting or self._read_all:
                return bool(self._waiting) and not self._ended
        return self._read_one()

    def _read_one(self) -> bool:
        """Read a message. Return False at the stream's end. Only one thread does so at a time."""
        request = next(self._requests, None)
        if request is not None:
            self._accept(request)
        return request is not None

    def _read_ahead(self) -> None:
        """Read a message whenever `_want_next` requests one."""
        while True:
            with self._lock:
                self._to_read.wait_for(lambda: self._reading or self._ended)
                if self._ended:
                    return
            more = False
            try:
                more = self._read_one()
            except grpc.RpcError:
                pass
            except Exception:
                logger.exception("can't read the stream of functions; other workers will run them")
            if not more:
                with self._lock:
                    self._reading, self._read_all = False, True
                    self._to_run.notify_all()
                return

    def _want_next(self) -> None:
        """Make the reader read the next message while a function runs. Under the lock."""
        if self._reading or self._read_all:
            return
        self._reading = True
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_ahead, name="functions-ahead", daemon=True)
            self._reader.start()
        self._to_read.notify_all()

    def _accept(self, request: worker_pb2.StepsRequest) -> None:
        now = time.monotonic()
        with self._lock:
            for position, step in enumerate(request.steps, request.position):
                self._read = position
                # Without a definition: the function for this position was cancelled before it was sent.
                if position in self._recalled or not step.definition:
                    self._recalled.discard(position)
                    self._job.arguments.pop(position, None)
                elif self._leaving:
                    self._give_back(position, step.function)
                else:
                    self._waiting.append((position, step, now))
                    if step.parts and self._job.reads_ahead:
                        self._job.expect_parts(step)
            self._reading = False  # in the same critical section: the running thread may want the next message at once
            if self._running:
                self._prepare_next()
            self._to_run.notify_all()

    def _next(self) -> list[Received]:
        """Return what runs next: a function, or the members of a gang that are here. Empty if there is nothing."""
        with self._lock:
            if self._job.overlap_queue is not None:
                self._job.overlap_queue.on_change = self._pushes_changed
                self._to_run.wait_for(lambda: not self._waiting or self._ended or self._may_begin())
            if not self._waiting or self._ended:
                return []
            group = [self._waiting.popleft()]
            step, turn = group[0][1], None
            if is_gang := step.HasField("gang"):
                while self._waiting and self._waiting[0][1].gang.id == step.gang.id:
                    group.append(self._waiting.popleft())
                turn = threading.Lock() if len(group) > 1 and not step.gang.concurrent else None
            for position, member, _ in group:
                if (prepared := self._prepared.get(position)) is None:
                    context = self._context_of(position, member)
                else:
                    context = prepared.context
                self._running[member.function] = context
                context.turn = turn
                if is_gang and member.gang.HasField("steps"):
                    context.pipeline = member.gang.rank
                    context.tell_progress = self._telling
            overlaps = self._job.overlap_queue is not None
            if (step.parts and self._job.reads_ahead) or (
                (self._seconds > LONG_SECONDS or overlaps) and not self._waiting
            ):
                self._want_next()
            if overlaps:
                self._prepare_next()
            return group

    def _context_of(self, position: int, step: worker_pb2.Step) -> FunctionContext:
        context = self._job.context(function=step.function, attempt=step.attempt, key=step.key, term=step.term)
        context.position, context.asking = position, self._asking
        return context

    # Functions whose steps overlap; see `overlap`

    def _may_begin(self) -> bool:
        """Return whether few enough earlier steps have outstanding pushes for the next function. Under the lock."""
        _, step, _ = self._waiting[0]
        overlap, queue = self._job.overlap_of(step.definition), self._job.overlap_queue
        return queue is None or queue.may_begin(0 if overlap is None or step.attempt > 1 else overlap.steps)

    def _pushes_changed(self) -> None:
        """Check again whether the next function may begin. Called without the lock."""
        with self._lock:
            self._to_run.notify_all()

    def _prepare_next(self) -> None:
        """Have another thread prepare the function after the one that has begun last. Under the lock."""
        queue = self._job.overlap_queue
        if queue is None or not self._waiting or self._waiting[0][0] in self._prepared:
            return
        position, step, _ = self._waiting[0]
        if (prepared := self._preparation(position, step, None)) is not None:
            self._prepared[position] = prepared
            queue.submit_ahead(prepared.prepare)

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

        def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
            parts = self._job.parts_of(step) if step.parts else ()
            return self._arguments(step, attachments, parts)

        return Prepared(context, overlap, arguments)

    def _prepare(self, position: int, step: worker_pb2.Step, context: FunctionContext) -> Prepared | None:
        """Return what was prepared for a function that runs now, or prepare it. None if its steps do not overlap."""
        with self._lock:
            prepared = self._prepared.pop(position, None)
        if prepared is None and (prepared := self._preparation(position, step, context)) is not None:
            prepared.prepare()
        return prepared

    def _drop_prepared(self, position: int) -> None:
        """Forget what was prepared for a function that does not run here. Under the lock."""
        if (prepared := self._prepared.pop(position, None)) is not None:
            prepared.context.cancel()

    def _run_together(self, group: Sequence[Received]) -> None:
        """Run the members of a gang that are here, at the same time, and deliver their outcomes."""

        def run(received: Received) -> None:
            self._run_one(received, _ALONE)

        others = [threading.Thread(target=run, args=[member], name="functions", daemon=True) for member in group[1:]]
        with self._turn:
            for other in others:
                other.start()
            run(group[0])
            for other in others:
                other.join()

    def _give_back(self, position: int, function: int) -> None:
        """Give back a function that will not run here. Under the lock."""
        self._job.arguments.pop(position, None)
        self._drop_prepared(position)
        self._job.drop_parts(function)
        self._metrics.returned += 1
        self._outbox.append(Outcome(function=function, kind=Outcome.RETURNED))
        self._to_send.notify_all()

    def _deliver(self, outcome: Outcome) -> None:
        with self._lock:
            self._running.pop(outcome.function, None)
            if self._questions.asked:
                self._questions.function_ended(outcome.function)
            self._seconds = outcome.seconds
            send_here = (
                self._send is not None
                and not (self._sending or self._outbox or self._questions.unsent or self._ended)
                and (outcome.seconds > SEND_SECONDS or not self._waiting)
                and outcome.ByteSize() <= _SEND_BYTES
            )
            if not send_here:
                self._outbox.append(outcome)
                self._to_send.notify_all()
                if self._ended:  # it will not be sent
                    self._changed.notify_all()
                return
            self._sending = True
        self._send_one(outcome)

    def _send_one(self, outcome: Outcome) -> None:
        """Send an outcome on the running thread, which has set `_sending`."""
        assert self._send is not None  # see _deliver
        sent = True
        try:
            reach("worker.result.before")
            sent = self._send(worker_pb2.StepsReply(outcomes=[outcome]).SerializeToString())
            reach("worker.result.after")
        finally:
            with self._lock:
                self._sending = False
                if not sent:
                    self._outbox.appendleft(outcome)
                if self._outbox or self._questions.unsent or self._ended:
                    self._to_send.notify_all()
                self._changed.notify_all()

    def _run_one(self, received: Received, turn: AbstractContextManager[object]) -> None:
        """Run a function, and deliver its outcome, once its pushes are acknowledged."""
        position, step, since = received
        context, metrics, seconds = self._running[step.function], self._metrics, 0.0
        prepared = None if self._job.overlap_queue is None else self._prepare(position, step, context)
        arguments = self._job.arguments.pop(position, [])
        outcome = Outcome(function=step.function)
        parts: Sequence[Part] = ()
        error: BaseException | None = None
        reach("worker.run.before")
        begun = begin = time.monotonic()
        data_before = metrics.data_seconds
        try:
            # For an empty function any call here is a hundredth of the time.
            is_gang = step.HasField("gang")
            with turn, running(context), self._job.membership.member(step.gang, context) if is_gang else _ALONE:
                context.check()
                function = self._job.definition(step.definition)
                if step.parts:
                    parts = self._job.parts_of(step)
                if prepared is None:
                    args, kwargs = self._arguments(step, arguments, parts)
                else:
                    (args, kwargs), fetched = prepared.take()
                    context.overlap.fetched = fetched
                begin = time.monotonic()
                if is_gang and step.gang.HasField("steps"):
                    call = functools.partial(_called, function, args, kwargs, parts)
                    result = run_steps(step, context, self._job, call)
                else:
                    result = _called(function, args, kwargs, parts)
            outcome.seconds = seconds = time.monotonic() - begin
            reach("worker.run.after")
            if step.want_result and result is not None:
                self._encode_result(step.function, result, outcome)
            outcome.kind = Outcome.DONE
        except FunctionCancelled:
            outcome.kind, outcome.updated = Outcome.CANCELLED, context.updated
            outcome.seconds = seconds = time.monotonic() - begin
        except BaseException as raised:  # a step's sys.exit() must not end the worker
            error, seconds = raised, time.monotonic() - begin
            outcome = Outcome(function=step.function, kind=Outcome.FAILED, seconds=seconds, updated=context.updated)
            outcome.failure.CopyFrom(failure_of(_without_stop(error)))
        if step.parts:
            self._job.drop_parts(step.function)
            outcome.waited = sum(part.waited for part in parts)
            metrics.data_seconds += outcome.waited
            for index, part in enumerate(parts):
                for skipped in part.skipped:
                    outcome.skipped.add(examples=skipped.examples, why=str(skipped), part=index)
        thread = threading.current_thread().name
        waited = metrics.data_seconds - data_before
        run = Run(step.function, step.attempt, since, begun, begin, begin + seconds, waited, "", thread)
        if context.overlap is None:
            self._end(outcome, run)
        else:
            context.overlap.fetched = None
            context.overlap.returned(functools.partial(self._pushed, outcome, run, context, error))

    def _pushed(
        self,
        outcome: Outcome,
        run: Run,
        context: FunctionContext,
        raised: BaseException | None,
        error: BaseException | None,
    ) -> None:
        """End a function that has returned, or has `raised`, and whose pushes are sent; perhaps one failed."""
        if error is not None and error is not raised and outcome.kind != Outcome.CANCELLED:
            # The step pushed before it did anything else that can fail: it would not have come any further.
            self._job.results.pop(outcome.function, None)
            stopped = isinstance(error, FunctionCancelled)
            failed = Outcome(function=outcome.function, seconds=outcome.seconds, waited=outcome.waited)
            failed.kind = Outcome.CANCELLED if stopped else Outcome.FAILED
            failed.updated = context.updated
            failed.skipped.extend(outcome.skipped)
            if not stopped:
                failed.failure.CopyFrom(failure_of(error))
            outcome = failed
        self._end(outcome, run)

    def _end(self, outcome: Outcome, run: Run) -> None:
        """Count and record a function that has ended, and deliver its outcome."""
        kind, seconds, metrics = outcome.kind, run.end - run.ready, self._metrics
        with self._counting:
            metrics.done += kind == Outcome.DONE
            metrics.failed += kind == Outcome.FAILED
            metrics.cancelled += kind == Outcome.CANCELLED
            if seconds <= SHORTEST_SECONDS:
                metrics.shortest += 1
                metrics.shortest_seconds += seconds
            else:
                metrics.runs.add(seconds)
        if seconds >= SHORT_SECONDS or not run.function & (EACH - 1) or run.attempt > 1:
            metrics.recording.runs.append(run._replace(how=Outcome.Kind.Name(kind).lower()))
        self._deliver(outcome)

    def _arguments(
        self, step: worker_pb2.Step, attachments: list[memoryview], parts: Sequence[Part]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not step.HasField("arguments"):
            return (), {}

        def with_parts(kind: str, key: str) -> Handle:
            matching = (part for part in parts if kind == Part.handle_kind and key == part.handle_key)
            return next(matching, None) or self._job.resolve_handle(kind, key)

        return decode_call(
            step.arguments,
            attachments=attachments,
            resolve_handle=with_parts if parts else self._job.resolve_handle,
            resolve_record=record_resolver(self._job.definition),
        )

    def _encode_result(self, function: int, result: Any, outcome: Outcome) -> None:
        attachments: list[memoryview] = []
        value = encode(result, path="the result", attachments=attachments, into=outcome.value)
        if (size := value.ByteSize()) > MAX_INLINE_BYTES:
            raise TypeError(
                f"the result takes {size >> 20} MiB in one message, more than {MAX_INLINE_BYTES >> 20}: return arrays "
                "or bytes, which travel beside it, instead of many small objects"
            )
        if attachments:
            # Copied, since the user's code may go on using its arrays after the function has returned.
            copies: list[Buffer] = [bytes(attachment) for attachment in attachments]
            outcome.attachments.function = function
            outcome.attachments.sizes.extend(map(len, copies))
            self._job.results[function] = copies

    # The sending thread

    def outcomes(self) -> Iterator[worker_pb2.StepsReply]:
        """Yield messages of all outcomes and questions that are ready, until the stream ends."""
        unsent = self._questions.unsent
        while True:
            with self._lock:
                self._sending = False
                self._changed.notify_all()
                self._to_send.wait_for(lambda: not self._sending and (self._outbox or unsent or self._ended))
                batch, questions, size = [], [], 0
                while unsent and size < _REPLY_BYTES:
                    size += unsent[0].ByteSize()
                    questions.append(unsent.popleft())
                while self._outbox and not unsent and size < _REPLY_BYTES:
                    size += self._outbox[0].ByteSize()
                    batch.append(self._outbox.popleft())
                self._sending = bool(batch or questions)
            if not (batch or questions):
                return
            reach("worker.result.before")
            yield worker_pb2.StepsReply(outcomes=batch, questions=questions)
            reach("worker.result.after")

    # Other threads

    def recall(self, functions: list[int], positions: list[int], cancel_running: bool) -> None:
        """Give back functions that have not started; with `cancel_running`, tell a running one to stop."""
        with self._lock:
            waiting = {position for position, *_ in self._waiting}
            for function, position in zip(functions, positions, strict=True):
                if position in waiting:
                    self._give_back(position, function)
                elif position > self._read and position not in self._recalled:
                    self._recalled.add(position)
                    self._give_back(position, function)
                elif cancel_running and (context := self._running.get(function)) is not None:
                    context.cancel()
            recalled = waiting.intersection(positions)
            self._waiting = deque(queued for queued in self._waiting if queued[0] not in recalled)

    def answer(self, reply: worker_pb2.AnswerRequest) -> None:
        """Give the coordinator's answer to the function that waits for it, if one does."""
        self._questions.answer(reply)

    def end_process_of(self, functions: Sequence[int]) -> None:
        """Kill this process if it runs one of these functions, which was told to stop and does not."""
        with self._lock:
            if stuck := self._running.keys() & set(functions):
                logger.error("function %d does not stop: ending this process, as requested", min(stuck))
                os.kill(os.getpid(), signal.SIGKILL)  # its supervisor restarts it, as after any death

    def leave(self) -> None:
        """Give back functions that have not started; let the running one end."""
        # The stream stays open until the coordinator, which has been told, ends its side: it may hold unread functions,
        # and ending it while a message is written to it would cut that off.
        with self._lock:
            self._leaving = True
            for position, step, _ in self._waiting:
                self._give_back(position, step.function)
            self._waiting.clear()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs and all outcomes are sent, or the stream has ended. Return False after `timeout`."""
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._running and (self._ended or not (self._outbox or self._sending)), timeout
            )

    def wait_ended(self, timeout: float) -> bool:
        """Wait until no more functions can come. Return False after `timeout` seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: self._ended, timeout)

    def end(self) -> None:
        """End the stream: tell the running function to stop, and forget the others."""
        with self._lock:
            self._ended = True
            for _, step, _ in self._waiting:
                self._job.drop_parts(step.function)
            self._waiting.clear()
            for position in list(self._prepared):
                self._drop_prepared(position)
            for context in self._running.values():
                context.cancel()
            for condition in (self._to_run, self._to_read, self._to_send, self._changed):
                condition.notify_all()


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], parts: Sequence[Part]) -> Any:
    """Call a function and return its result. It must read all of its parts of datasets."""
    try:
        result = function(*args, **kwargs)
    except EndOfPart:
        if any(part.skipped for part in parts):
            return None  # the element that it wanted could not be read, and is skipped
        raise
    for part in parts:
        part.check_read()
    return result


def _without_stop(error: BaseException) -> BaseException:
    """Replace a StopIteration, which, raised by `join()` or `fetch()` in a loop, would end that loop."""
    if isinstance(error, EndOfIterator):
        return error.error().with_traceback(error.__traceback__)
    if isinstance(error, StopIteration):  # as Python does when one leaves a generator
        return RuntimeError("the function raised StopIteration").with_traceback(error.__traceback__)
    return error
