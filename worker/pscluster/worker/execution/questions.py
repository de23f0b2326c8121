"""Questions that running functions ask their coordinator, on the worker.

A question goes out on the stream of outcomes, before the outcome of its function; the answer comes as a call. The
thread that asks waits:

    WAITING --an answer comes---------------------> ANSWERED   it returns the value, or raises the error
            --the function is told to stop, or
              the stream ends---------------------> STOPPED    it raises FunctionCancelled
            --the function ends: another thread of
              it was waiting----------------------> LEFT       it raises MisuseError

A question is lost only with its stream, and with that the attempt that asked: the next attempt asks its own. An answer
is lost only with the connection. One for which nobody waits is ignored: it is a copy, or comes too late. So that it is
not taken by a later execution of the same function, whose questions have the same numbers, it names the position of the
step on the stream, which no other execution has.

In the same way, but without waiting, a function tells that it has committed steps of a synchronous run.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from pscluster.core.context import FunctionContext
from pscluster.core.errors import FunctionCancelled, MisuseError
from pscluster.core.limits import MAX_QUESTION_BYTES
from pscluster.core.values import decode, encode
from pscluster.v1 import value_pb2, worker_pb2
from pscluster.worker.failures import rebuild_error

Answer = worker_pb2.AnswerRequest


def encoded(value: Any, name: str) -> value_pb2.Value:
    """Encode a question or an answer, called `name` in errors. Raise TypeError if it can't be sent, or is too large."""
    message = encode(value, path=name)
    if (size := message.ByteSize()) > MAX_QUESTION_BYTES:
        raise TypeError(
            f"{name} takes {size:,} bytes; the limit is {MAX_QUESTION_BYTES:,}: return large data as the function's "
            "result, or keep it in variables"
        )
    return message


@dataclass(eq=False, slots=True)
class _Asked:
    """What one execution of a function has asked."""

    position: int
    last: int = 0  # number of the last question
    waiting: dict[int, Future[Answer]] = field(default_factory=dict)  # by number

    def end(self, error: BaseException) -> None:
        """Make all threads that wait raise this error."""
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            answer.set_exception(error)


class Questions:
    """The questions of a runner's functions. It shares the runner's lock, and knows what `running` has.

    It adds to `unsent`, and calls `wake`, when there is something to send.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        running: Mapping[int, FunctionContext],
        unsent: deque[worker_pb2.Question],
        wake: Callable[[], object],
    ) -> None:
        self._lock, self._running, self._unsent, self._wake = lock, running, unsent, wake
        self.asked: dict[int, _Asked] = {}
        """By function. Only of those that run and have asked something."""

    def ask(self, context: FunctionContext, value: Any) -> Any:
        """Do what `FunctionContext.ask` promises."""
        question = worker_pb2.Question(value=encoded(value, "the question"))
        answer: Future[Answer] = Future()
        with self._lock:
            context.check()
            if self._running.get(context.function) is not context:
                raise MisuseError("the function that asks has ended: it must wait for the threads that it starts")
            asked = self.asked.get(context.function)
            if first := asked is None:
                asked = self.asked[context.function] = _Asked(context.position)
            asked.last += 1
            asked.waiting[asked.last] = answer
            if first:  # now, since this may end the wait at once
                context.on_cancel(functools.partial(self._stop, asked))
            question.function, question.position, question.number = context.function, asked.position, asked.last
            self._unsent.append(question)
            self._wake()
        with context.out_of_turn():
            reply = answer.result()
        if reply.WhichOneof("answer") == "failure":
            raise rebuild_error(reply.failure)
        return decode(reply.value)

    def tell_progress(self, context: FunctionContext) -> None:
        """Do what `FunctionContext.tell_progress` promises, once. Does not wait."""
        context.tell_progress = None
        with self._lock:
            question = worker_pb2.Question(function=context.function, position=context.position, progressed=True)
            self._unsent.append(question)
            self._wake()

    def _stop(self, asked: _Asked) -> None:
        with self._lock:
            asked.end(FunctionCancelled())

    def answer(self, reply: Answer) -> None:
        """Give an answer to the thread that waits for it, if there is one."""
        with self._lock:
            asked = self.asked.get(reply.function)
            if asked is None or asked.position != reply.position:
                return
            if (answer := asked.waiting.pop(reply.number, None)) is not None:
                answer.set_result(reply)

    def function_ended(self, function: int) -> None:
        """Forget the questions of a function that has ended, under the lock."""
        if (asked := self.asked.pop(function, None)) is not None:
            asked.end(MisuseError("the function has ended before its question was answered"))
