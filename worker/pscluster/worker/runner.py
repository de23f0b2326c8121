"""Runs the functions of one `Steps` stream, one after the other, and hands their outcomes on.

Threads: one reads the stream and runs what comes, in order; the stream's own thread sends outcomes as they are ready,
so that no finished function waits for a running one. On the data plane the thread that runs them sends an outcome
itself where nothing else is to be sent, unless functions are so short that several go into one message: to wake another
thread takes longer than to send. One of the two sends at a time (`_sending`).

Functions that were sent but not yet read wait in the stream; `recall` therefore tells apart, by their position in the
order of sending, those that were not read yet, those that wait here, the running one and those that have ended.

While a function runs that has a part of a dataset which takes long to read, or behind one that was long, another thread
reads the next message of the stream: what comes next is there, and what it needs is read, when the function ends. Not
behind a short one, since handing a message to another thread costs more than that.

Every function that was sent gets exactly one outcome on the stream, or none because the stream ended; in that
case the coordinator hands it to another worker.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from pscluster.core.context import FunctionContext, running
from pscluster.core.errors import FunctionCancelled, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.functions.definitions import record_resolver
from pscluster.core.handles import Handle
from pscluster.core.metrics.trace import EACH, SHORT_SECONDS, Recording
from pscluster.core.transport.channels import MAX_INLINE_BYTES
from pscluster.core.transport.frames import Buffer
from pscluster.core.values import decode_call, encode
from pscluster.v1 import worker_pb2
from pscluster.worker.data.per_worker import EndOfIterator
from pscluster.worker.data.prefetch import EndOfPart, Part
from pscluster.worker.failures import failure_of
from pscluster.worker.function_metrics import SHORTEST_SECONDS, WorkerCounts
from pscluster.worker.job import Job

logger = logging.getLogger(__name__)

LONG_SECONDS = 0.01
"""A function that takes longer is worth a thread that reads what comes next: one that waits for it until it has ended
waits for a millisecond or two where others want the machine's cores. Of gathers of 3 ms the thread's turns took 5 %."""

SEND_SECONDS = 0.0001
"""A function that takes longer, or that none waits behind, is worth a message of its own outcome."""

_SEND_BYTES = 4096  # at most, by the thread that runs functions: there is room for so much, it does not wait

_REPLY_BYTES = 4 << 20  # outcomes are put into one message up to about this size

Outcome = worker_pb2.Outcome

Send = Callable[[bytes], bool]
"""Sends a message; False if it could not. See `ServerCall.sender`."""


class Runner:
    """The functions of one stream: see the module's docstring."""

    def __init__(self, job: Job, turn: threading.Lock, counts: WorkerCounts | None = None) -> None:
        self._counts = counts or WorkerCounts(Recording())
        self._job = job
        self._turn = turn  # shared by all streams of the worker: one function at a time
        self._lock = threading.RLock()
        # One for each that waits: a thread that wakes in vain takes the interpreter from the function.
        self._to_run = threading.Condition(self._lock)
        self._to_read = threading.Condition(self._lock)
        self._to_send = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)  # for those who wait for the end of something
        # With their positions, and when they came.
        self._waiting: deque[tuple[int, worker_pb2.Step, float]] = deque()
        self._read = 0  # position of the last step that was read
        self._recalled: set[int] = set()  # positions that were recalled before they were read
        self._running: FunctionContext | None = None
        self._outbox: deque[Outcome] = deque()
        self._send: Send | None = None
        self._sending = True  # a thread sends; at first the stream's own, that the stream is up
        self._ended = False
        self._leaving = False
        self._requests: Iterator[worker_pb2.StepsRequest] = iter(())
        self._reader: threading.Thread | None = None
        self._reading = False  # the reader reads, or is to read, one message
        self._read_all = False  # there is no other
        self._seconds = 0.0  # the last function took
        self._failure: PsClusterError | None = None  # the stream is to end with

    @property
    def running(self) -> int:
        """How many functions run now."""
        return int(self._running is not None)

    @property
    def waiting(self) -> int:
        """How many have come and wait here."""
        return len(self._waiting)

    # The reading and running thread

    def run(self, requests: Iterator[worker_pb2.StepsRequest], send: Send | None = None) -> None:
        """Take steps from the stream and run them until it ends.

        Args:
            requests: the stream.
            send: for outcomes that need not be among those that `outcomes` gives.
        """
        self._requests, self._send, counts = requests, send, self._counts
        idle = counts.idle()
        try:
            while self._wait_next():
                counts.not_idle(idle)
                while (next_one := self._next()) is not None:
                    self._settle(self._run_one(*next_one))
                idle = counts.idle()
        except grpc.RpcError:
            pass  # the coordinator has gone: nobody waits for outcomes
        except PsClusterError as error:
            logger.warning("the stream of functions ended: %s", error)
        except Exception:
            logger.exception("the runner failed; other workers will run its functions")
        finally:
            counts.not_idle(idle)
            self.end()

    def _wait_next(self) -> bool:
        """Until there may be something to run. False if there will be nothing more."""
        with self._lock:
            self._to_run.wait_for(lambda: self._waiting or self._ended or not self._reading)
            if self._ended or self._waiting or self._read_all:
                return bool(self._waiting) and not self._ended
        return self._read_one()

    def _read_one(self) -> bool:
        """By the thread whose turn it is. False at the stream's end."""
        request = next(self._requests, None)
        if request is not None:
            self._accept(request)
        return request is not None

    def _read_ahead(self) -> None:
        """A message, whenever one is wanted."""
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
        """Under the lock: the next message is to be read while a function runs."""
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
                if position in self._recalled:
                    self._recalled.discard(position)
                    self._job.pop_arguments(position)
                elif not step.definition:  # what was to be here was cancelled before it was sent
                    self._job.pop_arguments(position)
                elif self._leaving:
                    self._give_back(position, step.function)
                else:
                    self._waiting.append((position, step, now))
                    if step.parts and self._job.reads_ahead:
                        self._job.expect_parts(step)
            self._reading = False  # at once with what came: whoever runs that may want the next message already
            self._to_run.notify_all()

    def _next(self) -> tuple[int, worker_pb2.Step, float] | None:
        with self._lock:
            if not self._waiting or self._ended:
                return None
            position, step, received = self._waiting.popleft()
            self._running = self._job.context(
                function=step.function, attempt=step.attempt, key=step.key, term=step.term
            )
            if (step.parts and self._job.reads_ahead) or (self._seconds > LONG_SECONDS and not self._waiting):
                self._want_next()
            return position, step, received

    def _give_back(self, position: int, function: int) -> None:
        """Under the lock. It will not run here."""
        self._job.pop_arguments(position)
        self._job.drop_parts(function)
        self._counts.returned += 1
        self._outbox.append(Outcome(function=function, kind=Outcome.RETURNED))
        self._to_send.notify_all()

    def _settle(self, outcome: Outcome) -> None:
        with self._lock:
            self._running = None
            self._seconds = outcome.seconds
            at_once = (
                self._send is not None
                and not (self._sending or self._outbox or self._ended)
                and (outcome.seconds > SEND_SECONDS or not self._waiting)
                and outcome.ByteSize() <= _SEND_BYTES
            )
            if not at_once:
                self._outbox.append(outcome)
                self._to_send.notify_all()
                if self._ended:  # nobody sends it
                    self._changed.notify_all()
                return
            self._sending = True
        self._send_one(outcome)

    def _send_one(self, outcome: Outcome) -> None:
        """By the thread that runs functions, which has said that it sends."""
        assert self._send is not None  # see _settle
        sent = True
        try:
            reach("worker.result.before")
            sent = self._send(worker_pb2.StepsReply(outcomes=[outcome]).SerializeToString())
            reach("worker.result.after")
        except PsClusterError as error:  # a fault that is armed: the stream is to fail, as where its own thread sends
            self._failure = error
            raise
        finally:
            with self._lock:
                self._sending = False
                if not sent:
                    self._outbox.appendleft(outcome)
                if self._outbox or self._ended:
                    self._to_send.notify_all()
                self._changed.notify_all()

    def _run_one(self, position: int, step: worker_pb2.Step, received: float) -> Outcome:
        context, counts, seconds = self._running, self._counts, 0.0
        assert context is not None  # set by _next
        arguments = self._job.pop_arguments(position)
        outcome = Outcome(function=step.function)
        parts: Sequence[Part] = ()
        reach("worker.run.before")
        begun = begin = time.monotonic()
        data_before = counts.data_seconds
        try:
            with self._turn, running(context):
                context.check()
                function = self._job.definition(step.definition)
                if step.parts:
                    parts = self._job.parts_of(step)
                args, kwargs = self._arguments(step, arguments, parts)
                begin = time.monotonic()
                result = _called(function, args, kwargs, parts)
            outcome.seconds = seconds = time.monotonic() - begin
            reach("worker.run.after")
            if step.want_result and result is not None:
                self._encode_result(step.function, result, outcome)
            outcome.kind = Outcome.DONE
            counts.done += 1
        except FunctionCancelled:
            outcome.kind, outcome.updated = Outcome.CANCELLED, context.updated
            outcome.seconds = seconds = time.monotonic() - begin
            counts.cancelled += 1
        except BaseException as error:  # a step's sys.exit() must not end the worker
            seconds = time.monotonic() - begin
            outcome = Outcome(function=step.function, kind=Outcome.FAILED, seconds=seconds, updated=context.updated)
            counts.failed += 1
            outcome.failure.CopyFrom(failure_of(_without_stop(error)))
        if step.parts:
            self._job.drop_parts(step.function)
            outcome.waited = sum(part.waited for part in parts)
            counts.data_seconds += outcome.waited
            for number, part in enumerate(parts):
                for skipped in part.skipped:
                    outcome.skipped.add(examples=skipped.examples, why=str(skipped), part=number)
        # Of a function that takes nothing this is a part of a hundred: no calls.
        if seconds <= SHORTEST_SECONDS:
            counts.shortest += 1
            counts.shortest_seconds += seconds
        else:
            counts.runs.add(seconds)
        if seconds >= SHORT_SECONDS or not context.function & (EACH - 1) or context.attempt > 1:
            counts.remember(step, received, begun, begin, seconds, counts.data_seconds - data_before, outcome.kind)
        return outcome

    def _arguments(
        self, step: worker_pb2.Step, attachments: list[memoryview], parts: Sequence[Part]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not step.HasField("arguments"):
            return (), {}

        def with_parts(kind: str, key: str) -> Handle:
            mine = (part for part in parts if kind == Part.handle_kind and key == part.handle_key)
            return next(mine, None) or self._job.resolve_handle(kind, key)

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
                "or bytes, which travel beside it, in place of many small objects"
            )
        if attachments:
            # The function may use its arrays again once it has returned.
            kept: list[Buffer] = [bytes(attachment) for attachment in attachments]
            outcome.attachments.function = function
            outcome.attachments.sizes.extend(map(len, kept))
            self._job.put_result(function, kept)

    # The sending thread

    def outcomes(self) -> Iterator[worker_pb2.StepsReply]:
        """Outcomes as they are ready, several a message where several are; ends with the stream."""
        while True:
            with self._lock:
                self._sending = False
                self._changed.notify_all()
                self._to_send.wait_for(lambda: not self._sending and (self._outbox or self._ended))
                batch, size = [], 0
                while self._outbox and size < _REPLY_BYTES:
                    size += self._outbox[0].ByteSize()
                    batch.append(self._outbox.popleft())
                self._sending = bool(batch)
            if not batch:
                if self._failure is not None:
                    raise self._failure
                return
            reach("worker.result.before")
            yield worker_pb2.StepsReply(outcomes=batch)
            reach("worker.result.after")

    # Other threads

    def recall(self, functions: list[int], positions: list[int], cancel_running: bool) -> None:
        """Give back what has not started; with `cancel_running`, ask what runs to stop."""
        with self._lock:
            waiting = {position for position, *_ in self._waiting}
            for function, position in zip(functions, positions, strict=True):
                if position in waiting:
                    self._give_back(position, function)
                elif position > self._read and position not in self._recalled:
                    self._recalled.add(position)
                    self._give_back(position, function)
                elif cancel_running and self._running is not None and self._running.function == function:
                    self._running.cancel()
            gone = waiting.intersection(positions)
            self._waiting = deque(each for each in self._waiting if each[0] not in gone)

    def end_process_of(self, functions: Sequence[int]) -> None:
        """Kill this process if one of these runs: it was asked to stop, and does not."""
        with self._lock:
            if self._running is not None and self._running.function in functions:
                logger.error("function %d does not stop: ending this process, as requested", self._running.function)
                os.kill(os.getpid(), signal.SIGKILL)  # whoever keeps workers alive starts it again, as after any death

    def leave(self) -> None:
        """Give back what has not started; the running function may end.

        The stream stays until the coordinator, which was told, has ended its side: there may be functions in it
        that nobody has read, and to end it while a message is written to it would break it off.
        """
        with self._lock:
            self._leaving = True
            for position, step, _ in self._waiting:
                self._give_back(position, step.function)
            self._waiting.clear()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs and all outcomes are on their way, or nobody wants them. False if it takes longer."""
        with self._lock:
            return self._changed.wait_for(
                lambda: self._running is None and (self._ended or not (self._outbox or self._sending)), timeout
            )

    def wait_ended(self, timeout: float) -> bool:
        """Wait until no more functions can come. False if that takes longer."""
        with self._lock:
            return self._changed.wait_for(lambda: self._ended, timeout)

    def end(self) -> None:
        """The stream is over: what runs is asked to stop, the rest is forgotten."""
        with self._lock:
            self._ended = True
            for _, step, _ in self._waiting:
                self._job.drop_parts(step.function)
            self._waiting.clear()
            if self._running is not None:
                self._running.cancel()
            for each in (self._to_run, self._to_read, self._to_send, self._changed):
                each.notify_all()


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], parts: Sequence[Part]) -> Any:
    """Its result. With parts of datasets, all of each must have been read."""
    try:
        result = function(*args, **kwargs)
    except EndOfPart:
        if any(part.skipped for part in parts):
            return None  # what it asked for could not be read, and is skipped
        raise
    for part in parts:
        part.check_read()
    return result


def _without_stop(error: BaseException) -> BaseException:
    """Something else for a StopIteration, which a `join()` or `fetch()` inside a loop would end that loop with."""
    if isinstance(error, EndOfIterator):
        return error.error().with_traceback(error.__traceback__)
    if isinstance(error, StopIteration):  # as Python does where one leaves a generator
        return RuntimeError("the function raised StopIteration").with_traceback(error.__traceback__)
    return error
