"""Questions of running functions, without a network: each is answered once, or its thread is told why it is not."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest
from tests.conftest import attached
from tests.waiting import until
from tests.worker.execution.test_runner import (
    TIMEOUT,
    StepsCall,
    Stream,
    begin_stream,
    kinds,
    make_job,
    make_role,
    step,
)

from pscluster.core.context import FunctionContext, current_function, running
from pscluster.core.errors import FunctionCancelled, MisuseError, ProtocolError, PsClusterError, StaleError
from pscluster.core.limits import MAX_QUESTION_BYTES
from pscluster.core.values import decode, encode
from pscluster.v1 import node_pb2, value_pb2, worker_pb2
from pscluster.worker.execution import outbox
from pscluster.worker.execution.questions import Questions
from pscluster.worker.execution.runner import Runner
from pscluster.worker.failures import failure_of
from pscluster.worker.service import WorkerService


class Asked(Stream):
    """A stream that also collects questions."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.questions: list[worker_pb2.Question] = []
        job = make_job()
        job._definitions.update(functions)
        super().__init__(job)

    def _take(self, reply: worker_pb2.StepsReply) -> None:
        self.questions.extend(reply.questions)
        super()._take(reply)

    def question(self, nth: int = 0) -> worker_pb2.Question:
        """Wait for a question, and return it."""
        until(lambda: len(self.questions) > nth, "a question comes")
        return self.questions[nth]

    def answer(self, question: worker_pb2.Question, value: Any = None, error: BaseException | None = None) -> None:
        """Answer it."""
        answer = worker_pb2.AnswerRequest(
            function=question.function, position=question.position, number=question.number
        )
        if error is None:
            answer.value.CopyFrom(encode(value))
        else:
            answer.failure.CopyFrom(failure_of(error))
        self.runner.answer(answer)

    def results(self) -> dict[int, Any]:
        """End the stream, and return the results of the functions that returned something."""
        return {outcome.function: decode(outcome.value) for outcome in self.end() if outcome.HasField("value")}


@pytest.fixture(params=[False, True], ids=["answers", "past them"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes are sent by either thread."""
    monkeypatch.setattr(Stream, "past", request.param)


def ask(value: Any) -> Any:
    """Ask, as library code in a function does."""
    context = current_function()
    assert context is not None
    return context.ask(value)


def test_an_answer() -> None:
    """A function asks twice, and goes on with what it is told."""
    stream = Asked(ask=lambda: [ask({"a": (1, None)}), ask("b")])
    stream.send(5, step(11, "ask"))
    first = stream.question()
    assert (first.function, first.position, first.number) == (11, 5, 1)
    assert decode(first.value) == {"a": (1, None)}
    stream.answer(first, ["yes"])
    second = stream.question(1)
    assert (second.number, decode(second.value)) == (2, "b")
    stream.answer(second, None)
    assert stream.results() == {11: [["yes"], None]}
    assert stream.runner._questions.asked == {}


def raised(error: BaseException) -> Exception:
    """Return what a function that is answered with this error gets."""
    caught: list[Exception] = []

    def function() -> None:
        try:
            ask(1)
        except Exception as error:
            caught.append(error)

    stream = Asked(function=function)
    stream.send(1, step(11, "function"))
    stream.answer(stream.question(), error=error)
    stream.end()
    return caught[0]


class CodedError(Exception):
    """An error whose `__init__` must not run again."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def test_an_error_as_an_answer() -> None:
    """It is raised as the same class, with its arguments and attributes, and tells where it comes from."""
    error = raised(KeyError("k", 2))
    assert (type(error), error.args) == (KeyError, ("k", 2))
    coded = raised(CodedError(7))
    assert type(coded) is CodedError
    assert (coded.code, str(coded)) == (7, "code 7")
    try:
        raise OSError(2, "gone")
    except OSError as caught:
        error = raised(caught)
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror) == (2, "gone")
    assert "On the coordinator:\nTraceback" in error.__notes__[0]
    assert "test_an_error_as_an_answer" in error.__notes__[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), ExceptionGroup("both", [ValueError()])])
def test_an_error_that_can_not_be_rebuilt(error: BaseException) -> None:
    rebuilt = raised(error)
    assert type(rebuilt) is PsClusterError
    assert str(rebuilt).startswith(f"{type(error).__name__}: ")


def test_many_threads_ask_at_once() -> None:
    """Each gets its own answer, whatever the order of the answers is."""

    def function() -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, range(40)))

    stream = Asked(function=function)
    stream.send(1, step(11, "function"))
    for first in range(0, 40, 8):
        stream.question(first + 7)
        for question in reversed(stream.questions[first : first + 8]):
            stream.answer(question, decode(question.value) * 10)
    assert stream.results() == {11: [10 * index for index in range(40)]}
    assert [question.number for question in stream.questions] == list(range(1, 41))


def test_large_questions_do_not_make_one_large_message() -> None:
    """Together they may be more than a message can carry. Outcomes are sent after all of them."""
    runner = Runner(make_job(), threading.Lock())
    value = encode(bytes(MAX_QUESTION_BYTES - 100))
    runner._outbox.questions.extend(worker_pb2.Question(function=1, number=n, value=value) for n in range(1, 13))
    runner._outbox._outcomes.append(worker_pb2.Outcome(function=1))
    runner.end()
    replies = list(runner.outcomes())
    assert max(reply.ByteSize() for reply in replies) <= outbox._REPLY_BYTES + MAX_QUESTION_BYTES
    assert [question.number for reply in replies for question in reply.questions] == list(range(1, 13))
    assert [len(reply.outcomes) for reply in replies] == [0, 0, 1]


@pytest.mark.parametrize("ends", [False, True])
def test_a_function_that_is_told_to_stop(ends: bool) -> None:
    """Its thread stops waiting, also if the whole stream ends, and a late answer does nothing."""
    stopped: list[BaseException] = []

    def function() -> None:
        try:
            ask(1)
        except FunctionCancelled as error:
            stopped.append(error)
            raise

    stream = Asked(function=function)
    stream.send(1, step(11, "function"))
    question = stream.question()
    if ends:
        stream.runner.end()
        until(lambda: stopped, "it has stopped")
        stream.answer(question, 1)
        return
    stream.runner.recall([11], [1], cancel_running=True)
    until(lambda: stopped, "it has stopped")
    stream.answer(question, 1)
    assert kinds(stream.end()) == {(11, "CANCELLED"): 1}


def test_a_function_that_was_told_to_stop_can_not_ask() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def function() -> None:
        begun.set()
        assert go_on.wait(TIMEOUT)
        ask(1)

    stream = Asked(function=function)
    stream.send(1, step(11, "function"))
    assert begun.wait(TIMEOUT)
    stream.runner.recall([11], [1], cancel_running=True)
    go_on.set()
    assert kinds(stream.end()) == {(11, "CANCELLED"): 1}
    assert stream.questions == []


def test_the_answer_to_an_earlier_execution_is_not_taken() -> None:
    """A function that failed runs again here, under the same number, and asks the same."""
    stream = Asked(function=lambda: 1 / ask("divisor"))
    stream.send(1, step(11, "function"))
    first = stream.question()
    stream.answer(first, 0)
    stream.send(2, step(11, "function"))
    second = stream.question(1)
    assert (second.function, second.number) == (first.function, first.number)
    stream.answer(first, 1)
    stream.answer(second, 2)
    stream.answer(second, 4)  # a copy
    assert stream.results() == {11: 0.5}


def test_a_thread_that_outlives_its_function() -> None:
    """It gets an error while it waits, and when it asks later."""
    errors: list[Exception] = []
    go_on = threading.Event()

    def late() -> None:
        for _ in range(2):
            try:
                ask(1)
            except MisuseError as error:
                errors.append(error)
            assert go_on.wait(TIMEOUT)

    def function() -> None:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(late,), daemon=True)
        threads.append(thread)
        thread.start()
        until(lambda: stream.questions, "it has asked")

    threads: list[threading.Thread] = []
    stream = Asked(function=function)
    stream.send(1, step(11, "function"))
    until(lambda: errors, "it has an error")
    until(lambda: stream.outcomes, "its function has ended")
    go_on.set()
    threads[0].join(TIMEOUT)
    assert "ended before its question was answered" in str(errors[0])
    assert "must wait for the threads that it starts" in str(errors[1])
    assert kinds(stream.end()) == {(11, "DONE"): 1}


def test_a_question_that_is_too_large() -> None:
    """It is refused where it is made; the function can ask something else."""

    def function() -> Any:
        with pytest.raises(TypeError, match=r"the question takes 1,048,\d+ bytes; the limit is 1,048,576: return"):
            ask(bytes(MAX_QUESTION_BYTES))
        with pytest.raises(TypeError, match=r"the question is a _thread\.lock"):
            ask(threading.Lock())
        return ask(2)

    stream = Asked(function=function)
    stream.send(1, step(11, "function"))
    assert stream.question().number == 1
    stream.answer(stream.question(), 3)
    assert stream.results() == {11: 3}


def test_elsewhere_nothing_can_be_asked() -> None:
    context = FunctionContext(function=0, attempt=0, worker_index=0, num_workers=1)
    with pytest.raises(MisuseError, match="only a function that was scheduled can ask"):
        context.ask(1)


def test_others_have_their_turn_meanwhile() -> None:
    """A replica that waits for an answer does not keep the others on its worker from computing."""
    context = FunctionContext(function=3, attempt=1, worker_index=0, num_workers=1)
    context.turn, woken = threading.Lock(), threading.Event()
    questions = Questions(threading.RLock(), {3: context}, deque(), woken.set)
    context.asking = questions.ask
    results: list[Any] = []

    def replica() -> None:
        with running(context), context.in_turn():
            results.append(context.ask(1))
            results.append(cast("threading.Lock", context.turn).locked())

    thread = threading.Thread(target=replica, daemon=True)
    thread.start()
    assert woken.wait(TIMEOUT)
    with context.turn:
        questions.answer(worker_pb2.AnswerRequest(function=3, number=1, value=encode(5)))
        assert results == []
    thread.join(TIMEOUT)
    assert results == [5, True]
    assert not context.turn.locked()


def test_answers_that_make_no_sense() -> None:
    """They are refused, or have no effect."""
    role = make_role()
    old, new = (attached(role, node_pb2.AttachRequest(job=7)).incarnation for _ in range(2))
    service, context = WorkerService(role), cast(grpc.ServicerContext, StepsCall())
    service.answer(worker_pb2.AnswerRequest(incarnation=new, value=encode(1)), context)  # there is no stream yet
    stream: Iterator[worker_pb2.StepsReply] = begin_stream(role, new, StepsCall())
    next(stream)
    with pytest.raises(StaleError, match="attachment to the worker is over"):
        service.answer(worker_pb2.AnswerRequest(incarnation=old, value=encode(1)), context)
    with pytest.raises(ProtocolError, match="an answer without a value or an error"):
        service.answer(worker_pb2.AnswerRequest(incarnation=new, function=1), context)
    service.answer(worker_pb2.AnswerRequest(incarnation=new, function=1, position=1, value=encode(1)), context)


def test_an_answer_that_can_not_be_read() -> None:
    """The function gets an error."""
    stream = Asked(function=lambda: ask(1))
    stream.send(1, step(11, "function"))
    question = stream.question()
    stream.runner.answer(
        worker_pb2.AnswerRequest(function=11, position=1, number=question.number, value=value_pb2.Value())
    )
    (outcome,) = stream.end()
    assert outcome.failure.qualname == "ProtocolError"


def test_progress_is_told_before_the_outcome_and_not_waited_for() -> None:
    """The function goes on at once; what it tells is on the stream before its result."""
    arrived: list[str] = []

    class Ordered(Asked):
        def _take(self, reply: worker_pb2.StepsReply) -> None:
            arrived.extend("told" for question in reply.questions if question.progressed)
            arrived.extend("ended" for _ in reply.outcomes)
            super()._take(reply)

    def tell() -> int:
        function = current_function()
        assert function is not None
        stream.runner._questions.tell_progress(function)
        return 1

    stream = Ordered(tell=tell)
    stream.send(1, step(1, "tell"))
    until(lambda: "ended" in arrived, "it has returned")
    assert arrived == ["told", "ended"]
    assert stream.results() == {1: 1}
