"""Takes the questions of running functions, on the threads of the workers' connections, and sends the answers.

A question comes on the stream of outcomes. Whether its function answers at all, `Call.answer` says. What happens:

    a worker's message --its function runs there-------------> OPEN      `Call.answer` gets it
                       --it has ended, was cancelled or lost-> dropped   the function has been told to stop
                       --it makes no sense-------------------> dropped   the log says so once for each worker
    OPEN --`Question.reply` or `fail`------------------------> ANSWERED  the answer is sent until the worker has it
         --`Call.answer` raises------------------------------> ANSWERED  with that error, which is logged
         --its function ends, or its worker is lost----------> OVER      an answer does nothing

A message may also only tell that a gang has committed steps of a synchronous run, of which the scheduler takes note.

Questions without anything that answers, beyond MAX_QUESTIONS without an answer, or with a value that can't be read are
answered with an error. What is kept of a question here is a number: the one who answers has the rest.

What may be lost: a question with its connection, together with the attempt that asked; an answer likewise. An answer
may arrive twice, and is then taken once: see `pscluster.worker.execution.questions`. An answer that was given but not
received when a worker is lost had no effect there, so the next attempt asks again: what answers must expect the same
question from a higher attempt. A function that waits for an answer is running, and barriers wait for it: what answers
must not wait for a barrier.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.questions import Answer, Question
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.limits import MAX_QUESTION_BYTES, MAX_QUESTIONS, one_line
from pscluster.core.values import decode
from pscluster.v1 import worker_pb2

logger = logging.getLogger(__name__)

_MAX_UNSENT = 16 * MAX_QUESTIONS
"""More answers of one function that the worker has not taken: it ignores them, and asks on."""


@dataclass(eq=False, slots=True)
class _Asked:
    """What one attempt has asked: the numbers of its questions. The attempt is named by its connection and position."""

    worker: int
    incarnation: int
    function: int
    position: int
    last: int = 0  # number of the last question
    open: set[int] = field(default_factory=set)
    unsent: int = 0  # answers that the worker has not taken


class Answers:
    """Gives questions to what answers them, and sends the answers to the workers."""

    def __init__(self, state: DispatchState) -> None:
        self._state, self._scheduler = state, state.scheduler
        self._lock = threading.Lock()  # held for a moment, and with no other: the thread that answers may hold any
        self._asked: defaultdict[int, dict[int, _Asked]] = defaultdict(dict)  # by worker, and function
        self._warned: set[int] = set()  # of which workers

    def take(self, index: int, connection: WorkerConnection, questions: Sequence[worker_pb2.Question]) -> None:
        """Take a worker's questions, on the thread of its connection. Raises nothing: other functions go on."""
        for question in questions:
            try:
                self._take(index, connection.incarnation, question)
            except Exception:
                logger.exception("can't take a question from %s", self._state.workers[index].peer)

    def _take(self, index: int, incarnation: int, message: worker_pb2.Question) -> None:
        function, number = message.function, message.number
        with self._state.lock:  # a function may ask before `give` has noted where it was sent
            if not 0 < function <= self._scheduler.entered:
                self._warn(index, f"it asks for function {function}, which does not exist")
                return
            if message.progressed:
                self._progressed(index, message)
                return
            task = self._current(index, function, message.position)
            if task is None:
                return
            call, rank, attempt = task.payload, 0, task.attempts + task.failures
            if task.gang is not None:
                rank, attempt = task.gang.rank_of(task), task.gang.generation
            asked = self._asked_by(index, incarnation, function, message.position)
        with self._lock:
            if number <= asked.last:
                self._warn(index, f"number {number} of function {function} comes after number {asked.last}")
                return
            if len(asked.open) + asked.unsent >= _MAX_UNSENT:
                self._warn(index, f"it has not taken {asked.unsent} answers to function {function}")
                return
            asked.last = number
            refused = len(asked.open) >= MAX_QUESTIONS
            asked.open.add(number)
        question = Question(
            None,
            function=function,
            attempt=attempt,
            number=number,
            rank=rank,
            worker=index,
            send=lambda answer: self._send(asked, number, answer),
        )
        if refused:
            question.fail(
                MisuseError(
                    f"{call.function.name} has asked {MAX_QUESTIONS} questions that have no answer yet, which is the "
                    "limit: wait for answers before asking more"
                )
            )
        elif call.answer is None:
            question.fail(ProtocolError(f"{call.function.name} asks something, but was scheduled without an answer"))
        else:
            self._answer(question, message, call.answer)

    def _answer(self, question: Question, message: worker_pb2.Question, answer: Callable[[Question], None]) -> None:
        """Let a question be answered; with an error, if it can't be read or that raises."""
        try:
            if (size := message.value.ByteSize()) > MAX_QUESTION_BYTES:
                raise ProtocolError(f"a question of {size:,} bytes; the limit is {MAX_QUESTION_BYTES:,}")
            question.value = decode(message.value)
        except ProtocolError as error:
            self._warn(question.worker, f"a question can't be read: {error}")
            question.fail(error)
            return
        try:
            answer(question)
        except Exception as error:
            logger.exception("%r can't be answered", question)
            if not question.answered:
                question.fail(error)

    def _progressed(self, index: int, message: worker_pb2.Question) -> None:
        """Note that a member of a gang has committed steps, if it still matters. Under the dispatcher's lock."""
        worker = self._scheduler.workers[index]
        task = worker.sent.get(message.function) or worker.lingering.get(message.function)  # cancelled since
        if task is None or task.position != message.position or not self._scheduler.gangs.progressed(task):
            return
        gang = task.gang
        assert gang is not None
        for call in gang.payloads:
            call.deaths = call.deaths[-gang.deaths :] if gang.deaths else ()

    def _current(self, index: int, function: int, position: int) -> Task[Call] | None:
        """Return a worker's task if it still has it, at that position."""
        task = self._scheduler.workers[index].sent.get(function)
        return task if task is not None and task.position == position else None

    def _asked_by(self, index: int, incarnation: int, function: int, position: int) -> _Asked:
        """Return what an attempt has asked; at its first question, forget those that are over.

        Under the dispatcher's lock.
        """
        by_function = self._asked[index]
        asked = by_function.get(function)
        if asked is None or (asked.incarnation, asked.position) != (incarnation, position):
            for other in list(by_function.values()):
                if other.incarnation != incarnation or self._current(index, other.function, other.position) is None:
                    del by_function[other.function]
            asked = by_function[function] = _Asked(index, incarnation, function, position)
        return asked

    def _send(self, asked: _Asked, number: int, answer: Answer) -> None:
        """Send an answer, unless the attempt that asked is over. From any thread."""
        with self._lock:
            asked.open.discard(number)
        connection = self._state.workers[asked.worker].connection
        # Without the dispatcher's lock: what ends just now is told by the worker, which ignores the answer.
        if connection is None or connection.incarnation != asked.incarnation or self._state.closed:
            return
        if self._current(asked.worker, asked.function, asked.position) is None:
            return
        answer.function, answer.position, answer.number = asked.function, asked.position, number
        with self._lock:
            asked.unsent += 1

        async def send() -> None:
            try:
                await connection.answer(answer)
            finally:
                with self._lock:
                    asked.unsent -= 1

        self._state.on_loop(lambda: self._state.in_background(send()))

    def _warn(self, index: int, why: str) -> None:
        """Log, once for each worker, that it has sent something that makes no sense."""
        if index not in self._warned:
            self._warned.add(index)
            logger.warning("dropped a question from %s: %s", self._state.workers[index].peer, one_line(why))
