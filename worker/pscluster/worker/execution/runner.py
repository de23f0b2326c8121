"""Runs the functions of one `Steps` stream, one after another, and sends their outcomes.

Threads: one reads the stream and runs the functions in order; the stream's own thread sends outcomes as they become
ready, so that no finished function waits for a running one. On the data plane, the running thread sends an outcome
itself if it is the only one, unless functions are so short that several fit into a message: waking another thread takes
longer than sending. See `outbox`.

Functions that were sent but not yet read wait in the stream. So `recall` distinguishes, by position in the order of
sending, those not yet read, those waiting here, the running one and those that have ended.

While a function runs that has a slow part of a dataset, or after a long one, another thread reads the stream's next
message: then the next function, and the data it needs, are there when this one ends. Not after a short one, since
handing a message to another thread costs more than that.

A member of a gang may be here before the function that runs before it has ended, and all its others. It begins only if
that function returns (`Gang.follows`): otherwise that one may run again, before it. It is given back, then.

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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import grpc

from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import FunctionCancelled, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.metrics.trace import EACH, SHORT_SECONDS, Run
from pscluster.v1 import worker_pb2
from pscluster.worker.data.prefetch import Part
from pscluster.worker.execution.function_calls import arguments_of, call_function, encode_result, without_stop
from pscluster.worker.execution.outbox import Outbox, Send
from pscluster.worker.execution.preparations import Preparations, failed_later
from pscluster.worker.execution.questions import Questions
from pscluster.worker.execution.request_reader import RequestReader
from pscluster.worker.failures import failure_of
from pscluster.worker.function_metrics import SHORTEST_SECONDS
from pscluster.worker.job import Job
from pscluster.worker.synchronous.steps import run_steps

logger = logging.getLogger(__name__)

LONG_SECONDS = 0.01
"""After a longer function, a thread reads the next message while a function runs: without it, reading takes a
millisecond or two if the machine's cores are busy. With gathers of 3 ms, that thread's turns took 5 % of the time."""

_ALONE = nullcontext()

Outcome = worker_pb2.Outcome

Received = tuple[int, worker_pb2.Step, float]
"""The position of a step, the step, and when it was received."""


class Runner:
    """Runs the functions of one stream: see the module's docstring."""

    def __init__(self, job: Job, turn: threading.Lock) -> None:
        self._job, self._metrics = job, job.metrics
        self._turn = turn  # shared by all streams of the worker: one function at a time
        self._lock = threading.RLock()
        # One for each waiting thread: one that wakes in vain takes the interpreter from the function.
        self._to_run = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)  # for threads that wait for the end of something
        self._waiting: deque[Received] = deque()
        self._read = 0  # position of the last step that was read
        self._recalled: set[int] = set()  # positions that were recalled before they were read
        # By function: one, or the members of a gang that run here; and those whose last pushes are outstanding.
        self._running: dict[int, FunctionContext] = {}
        self._preparations = Preparations(self._lock, job, self._context_of)
        self._outbox = Outbox(self._lock, self._changed)
        self._questions = Questions(self._lock, self._running, self._outbox.questions, self._outbox.wake)
        self._asking, self._telling = self._questions.ask, self._questions.tell_progress  # one object for all functions
        self._counting = threading.Lock()  # guards the metrics of functions that run at the same time
        self._ended = False
        self._leaving = False
        self._reader = RequestReader(self._lock, self._accept, self._to_run.notify_all)
        self._seconds = 0.0  # duration of the last function
        self._returned = 0  # the last function that returned

    def functions(self) -> tuple[int, int]:
        """Return how many functions run now, and how many wait here."""
        return len(self._running), len(self._waiting)

    # The reading and running thread

    def run(self, requests: Iterator[worker_pb2.StepsRequest], send: Send | None = None) -> None:
        """Take steps from the stream and run them until it ends. `send` is for outcomes not yielded by `outcomes`."""
        self._reader.requests, self._outbox.send, metrics = requests, send, self._metrics
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
            self._to_run.wait_for(lambda: self._waiting or self._ended or not self._reader.is_reading)
            if self._ended or self._waiting or self._reader.read_all:
                return bool(self._waiting) and not self._ended
        return self._reader.read_one()

    def _accept(self, request: worker_pb2.StepsRequest) -> None:
        now = time.monotonic()
        if request.resharded:
            self._job.know_cuts(request.resharded)
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
            # In the same critical section: the running thread may want the next message at once.
            self._reader.was_accepted()
            if self._running:
                self._prepare_next()
            self._to_run.notify_all()

    def _next(self) -> list[Received]:
        """Return what runs next: a function, or the members of a gang that are here. Empty if there is nothing."""
        with self._lock:
            if overlaps := self._job.overlap_queue is not None:
                self._job.overlap_queue.on_change = self._pushes_changed
                may_begin = self._preparations.may_begin
                self._to_run.wait_for(lambda: not self._waiting or self._ended or may_begin(self._waiting[0][1]))
            if not self._waiting or self._ended:
                return []
            group = [self._waiting.popleft()]
            step, turn = group[0][1], None
            if is_gang := step.HasField("gang"):
                if step.gang.follows not in (0, self._returned):
                    self._give_back(group[0][0], step.function)
                    return self._next()
                while self._waiting and self._waiting[0][1].gang.id == step.gang.id:
                    group.append(self._waiting.popleft())
                turn = threading.Lock() if len(group) > 1 and not step.gang.concurrent else None
            for position, member, _ in group:
                context = (self._preparations.context(position) if overlaps else None) or self._context_of(
                    position, member
                )
                self._running[member.function] = context
                context.turn = turn
                if is_gang and member.gang.HasField("steps"):
                    context.pipeline = member.gang.rank
                    context.tell_progress = self._telling
            if (step.parts and self._job.reads_ahead) or (
                (self._seconds > LONG_SECONDS or overlaps) and not self._waiting
            ):
                self._reader.want_next()
            if overlaps:
                self._preparations.another_begins()
                self._prepare_next()
            return group

    def _context_of(self, position: int, step: worker_pb2.Step) -> FunctionContext:
        context = self._job.context(function=step.function, attempt=step.attempt, key=step.key, term=step.term)
        context.position, context.asking = position, self._asking
        return context

    def _prepare_next(self) -> None:
        """Have another thread prepare the function after the one that has begun last. Under the lock."""
        if self._waiting:
            position, step, _ = self._waiting[0]
            self._preparations.begin(position, step)

    def _pushes_changed(self) -> None:
        """Check again whether the next function may begin. Called without the lock."""
        with self._lock:
            self._to_run.notify_all()

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
        self._preparations.drop(position)
        self._job.drop_parts(function)
        self._metrics.returned += 1
        self._outbox.add(Outcome(function=function, kind=Outcome.RETURNED))

    def _deliver(self, outcome: Outcome) -> None:
        with self._lock:
            self._running.pop(outcome.function, None)
            if outcome.kind == Outcome.DONE:
                self._returned = outcome.function
            if self._questions.asked:
                self._questions.function_ended(outcome.function)
            self._seconds = outcome.seconds
            send_here = self._outbox.add_ended(outcome, others_wait=bool(self._waiting))
        if send_here:
            self._outbox.send_one(outcome)

    def _run_one(self, received: Received, turn: AbstractContextManager[object]) -> None:
        """Run a function, and deliver its outcome, once its pushes are acknowledged."""
        position, step, since = received
        context, metrics, seconds = self._running[step.function], self._metrics, 0.0
        prepared = None if self._job.overlap_queue is None else self._preparations.take(position, step, context)
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
                    args, kwargs = arguments_of(self._job, step, arguments, parts)
                else:
                    args, kwargs = prepared.take()
                begin = time.monotonic()
                if is_gang and step.gang.HasField("steps"):
                    call = functools.partial(call_function, function, args, kwargs, parts)
                    result = run_steps(step, context, self._job, call)
                else:
                    result = call_function(function, args, kwargs, parts)
            outcome.seconds = seconds = time.monotonic() - begin
            reach("worker.run.after")
            if step.want_result and result is not None:
                encode_result(self._job, step.function, result, outcome)
            outcome.kind = Outcome.DONE
        except FunctionCancelled:
            outcome.kind, outcome.updated = Outcome.CANCELLED, context.updated
            outcome.seconds = seconds = time.monotonic() - begin
        except BaseException as raised:  # a step's sys.exit() must not end the worker
            error, seconds = raised, time.monotonic() - begin
            outcome = Outcome(function=step.function, kind=Outcome.FAILED, seconds=seconds, updated=context.updated)
            outcome.failure.CopyFrom(failure_of(without_stop(error)))
        if step.parts:
            self._job.drop_parts(step.function)
            outcome.waited = sum(part.waited for part in parts)
            metrics.data_seconds += outcome.waited
            for index, part in enumerate(parts):
                for skipped in part.skipped:
                    outcome.skipped.add(examples=skipped.examples, why=str(skipped), part=index)
        run: Run | None = None
        if (
            seconds >= SHORT_SECONDS or not step.function & (EACH - 1) or step.attempt > 1
        ):  # the others are only counted
            thread, waited = threading.current_thread().name, metrics.data_seconds - data_before
            run = Run(step.function, step.attempt, since, begun, begin, begin + seconds, waited, "", thread)
        if context.overlap is None:
            self._end(outcome, seconds, run)
        else:
            context.overlap.fetched = context.overlap.first = None
            self._preparations.returned(context)
            context.overlap.returned(functools.partial(self._pushed, outcome, seconds, run, context, error))

    def _pushed(
        self,
        outcome: Outcome,
        seconds: float,
        run: Run | None,
        context: FunctionContext,
        raised: BaseException | None,
        error: BaseException | None,
    ) -> None:
        """End a function that has returned, or has `raised`, and whose pushes are sent; perhaps one failed."""
        if error is not None and error is not raised and outcome.kind != Outcome.CANCELLED:
            self._job.results.pop(outcome.function, None)
            outcome = failed_later(outcome, error, updated=context.updated)
        elif outcome.kind != Outcome.DONE:
            outcome.updated = context.updated  # it may have raised before they were sent
        self._end(outcome, seconds, run)

    def _end(self, outcome: Outcome, seconds: float, run: Run | None) -> None:
        """Count a function that has ended after `seconds`, record its run if there is one, and deliver its outcome."""
        kind, metrics = outcome.kind, self._metrics
        with self._counting:
            metrics.done += kind == Outcome.DONE
            metrics.failed += kind == Outcome.FAILED
            metrics.cancelled += kind == Outcome.CANCELLED
            if seconds <= SHORTEST_SECONDS:
                metrics.shortest += 1
                metrics.shortest_seconds += seconds
            else:
                metrics.runs.add(seconds)
        if run is not None:
            metrics.recording.runs.append(run._replace(how=Outcome.Kind.Name(kind).lower()))
        self._deliver(outcome)

    def outcomes(self) -> Iterator[worker_pb2.StepsReply]:
        """Yield messages of all outcomes and questions that are ready, until the stream ends: on its own thread."""
        return self._outbox.messages()

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
            return self._changed.wait_for(lambda: not self._running and self._outbox.is_empty, timeout)

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
            self._preparations.drop_all()
            for context in self._running.values():
                context.cancel()
            self._reader.end()
            self._outbox.end()
            self._to_run.notify_all()
            self._changed.notify_all()
