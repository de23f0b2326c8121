"""Questions that functions ask their coordinator while they run, on a real cluster."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from tests.conftest import Gate, leave_mark, marks, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    RemoteValueStatus,
    errors,
    experimental_get_current_worker_index,
)
from pscluster.coordinator.scheduling.answers import _MAX_UNSENT, Answers
from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.questions import Answer, Question
from pscluster.coordinator.scheduling.connections.worker_connection import WorkerConnection
from pscluster.coordinator.scheduling.decisions.gang import Gang
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import capture
from pscluster.core.limits import MAX_QUESTION_BYTES, MAX_QUESTIONS
from pscluster.core.role.options import DATA_PORT_VARIABLE
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.tcp import stream as data_stream
from pscluster.core.values import decode, encode
from pscluster.v1 import node_pb2, value_pb2, worker_pb2


def ask(value: Any) -> Any:
    """Ask, as library code in a function does."""
    context = current_function()
    assert context is not None
    return context.ask(value)


def double(question: Question) -> None:
    """Answer at once."""
    question.reply(question.value * 2)


class Kept:
    """Keeps questions, to be answered later."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[Question] = queue.SimpleQueue()

    def __call__(self, question: Question) -> None:
        """Keep it."""
        self._questions.put(question)

    def next(self) -> Question:
        """Wait for the next one."""
        return self._questions.get(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def without_data_plane() -> Iterator[LocalCluster]:
    """A cluster whose roles have plain gRPC only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_PORT_VARIABLE, "off")
        with LocalCluster(1, 2, log_level="ERROR") as cluster:
            yield cluster


@pytest.fixture(params=["data plane", "gRPC"])
def either(request: pytest.FixtureRequest, cluster: LocalCluster) -> Iterator[ClusterCoordinator]:
    """A coordinator on a cluster with, and on one without, a data plane."""
    grpc_only = request.param == "gRPC"
    with ParameterServerStrategy(request.getfixturevalue("without_data_plane") if grpc_only else cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        until(lambda: coordinator.workers_up == 2, "all workers are up")
        for link in coordinator._dispatcher.state.workers:
            assert link.connection is not None
            assert isinstance(link.connection._stream, data_stream.DataStream) is not grpc_only
        yield coordinator


# On a real cluster


def test_an_answer(either: ClusterCoordinator) -> None:
    """The function goes on with it; the coordinator sees who has asked."""
    kept = Kept()
    value = either.schedule_with(lambda: [ask({"a": 1}), ask(2)], answer=kept)
    first = kept.next()
    assert (first.value, first.attempt, first.number, first.rank) == ({"a": 1}, 1, 1, 0)
    assert first.worker in (0, 1)
    assert value.status is RemoteValueStatus.NOT_READY
    first.reply([3.5, None])
    second = kept.next()
    assert (second.function, second.number, second.worker) == (first.function, 2, first.worker)
    second.reply("done")
    assert value.fetch(TIMEOUT) == [[3.5, None], "done"]
    either.join(TIMEOUT)


def test_many_questions_at_once(either: ClusterCoordinator) -> None:
    """Several threads of several functions ask, and each gets its own answer."""

    def asks(base: int) -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, range(base, base + 100)))

    values = [either.schedule_with(asks, (1000 * index,), answer=double) for index in range(4)]
    for index, results in enumerate(either.fetch(values, TIMEOUT)):
        assert results == [2 * (1000 * index + number) for number in range(100)]


def test_an_error_as_an_answer(coordinator: ClusterCoordinator) -> None:
    """It is raised in the function, and is the function's error if it is not caught there."""

    def caught() -> str:
        try:
            ask(1)
        except KeyError as error:
            return f"{type(error).__name__} {error.args}"
        return "no error"

    def no(question: Question) -> None:
        question.fail(KeyError("not", "here"))

    assert coordinator.schedule_with(caught, answer=no).fetch(TIMEOUT) == "KeyError ('not', 'here')"
    coordinator.schedule_with(lambda: ask(1), answer=no)
    with pytest.raises(KeyError) as raised:
        coordinator.join(TIMEOUT)
    assert raised.value.args == ("not", "here")
    assert isinstance(raised.value, errors.FunctionError)


def test_what_answers_raises(coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    """The function gets the error, and the log has it; the stream goes on."""

    def broken(question: Question) -> None:
        raise LookupError(f"no {question.value}")

    def late(question: Question) -> None:
        question.reply(1)
        raise LookupError("after that")

    value = coordinator.schedule_with(lambda: ask("way"), answer=broken, isolated=True)
    with pytest.raises(LookupError, match="no way"):
        value.fetch(TIMEOUT)
    assert coordinator.schedule_with(lambda: ask(1), answer=late).fetch(TIMEOUT) == 1
    assert caplog.text.count("can't be answered") == 2
    coordinator.join(TIMEOUT)


def test_a_function_that_was_scheduled_without_an_answer(coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(lambda: ask(1))
    with pytest.raises(errors.FunctionError, match="asks something, but was scheduled without an answer"):
        coordinator.join(TIMEOUT)


def test_a_late_answer_after_a_cancellation(coordinator: ClusterCoordinator) -> None:
    """It does nothing, and another function on that worker gets its own."""
    kept = Kept()
    cancelled = [coordinator.schedule_with(lambda: ask("first"), answer=kept) for _ in range(2)]
    late = [kept.next(), kept.next()]
    assert coordinator.cancel(cancelled) == 2
    with pytest.raises(errors.CancelledError):
        cancelled[0].fetch(TIMEOUT)
    values = [coordinator.schedule_with(lambda: ask("second"), answer=kept) for _ in range(2)]
    questions = [kept.next(), kept.next()]
    for question in late:
        question.reply("too late")
    for question in questions:
        assert question.value == "second"
        question.reply("in time")
    assert coordinator.fetch(values, TIMEOUT) == ["in time"] * 2
    coordinator.join(TIMEOUT)


def test_a_function_that_fails_and_runs_again(coordinator: ClusterCoordinator) -> None:
    """The next attempt asks again, perhaps on the same worker; an answer to the first one is not for it."""
    kept = Kept()
    spare = Kept()

    def divides() -> float:
        with ThreadPoolExecutor(2) as pool:
            divisor = pool.submit(ask, "divisor")
            other = pool.submit(ask, "other")
            if (by := divisor.result()) == 0:
                raise ZeroDivisionError
            other.result()
        return 1 / float(by)

    def answer(question: Question) -> None:
        (kept if question.value == "divisor" else spare)(question)

    value = coordinator.schedule_with(divides, answer=answer, retries=1)
    first, other = kept.next(), spare.next()
    first.reply(0)
    other.reply(None)
    second, again = kept.next(), spare.next()
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.function == second.function
    second.reply(4)
    again.reply(None)
    assert value.fetch(TIMEOUT) == 0.25


def test_a_worker_that_dies_while_its_question_is_open() -> None:
    """The next attempt asks again; the late answer to the first one does nothing."""
    kept = Kept()
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        value = coordinator.schedule_with(lambda: ask(os.getpid()), answer=kept)
        first = kept.next()
        os.kill(first.value, signal.SIGKILL)
        second = kept.next()
        assert (first.attempt, second.attempt) == (1, 2)
        assert second.value != first.value
        assert second.number == first.number
        first.reply("to the dead")
        second.reply("to the living")
        assert value.fetch(TIMEOUT) == "to the living"
        coordinator.join(TIMEOUT)


def test_other_functions_run_meanwhile(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """Neither does a question wait for a function on another worker, nor that one for the answer."""
    kept = Kept()

    def held(path: str) -> int:
        ask("begun")
        wait_for_file(path)
        return experimental_get_current_worker_index()

    running = coordinator.schedule_with(held, (gate.path,), answer=kept)
    begun = kept.next()
    begun.reply(None)
    asking = coordinator.schedule_with(lambda: ask("meanwhile"), answer=kept)
    question = kept.next()
    assert question.worker != begun.worker
    others = Kept()
    question.reply("yes")
    assert asking.fetch(TIMEOUT) == "yes"
    waits = coordinator.schedule_with(lambda: ask("for the other"), answer=others)
    question = others.next()
    gate.open()
    assert running.fetch(TIMEOUT) == begun.worker
    question.reply("at last")
    assert waits.fetch(TIMEOUT) == "at last"


def test_questions_and_answers_that_are_too_large(coordinator: ClusterCoordinator) -> None:
    """Each is refused where it is made. A question whose answer was refused is still open."""
    kept = Kept()

    def large() -> str:
        try:
            ask(bytes(4 * MAX_QUESTION_BYTES))
        except TypeError as error:
            return f"{error} {len(ask(1))}"
        return "sent"

    value = coordinator.schedule_with(large, answer=kept)
    question = kept.next()
    with pytest.raises(TypeError, match=r"the answer takes 4,194,\d+ bytes; the limit is 1,048,576"):
        question.reply(bytes(4 * MAX_QUESTION_BYTES))
    with pytest.raises(TypeError, match=r"the answer is a _thread\.lock"):
        question.reply(threading.Lock())
    question.reply(bytes(MAX_QUESTION_BYTES // 2))
    with pytest.raises(MisuseError, match="has been answered"):
        question.reply(2)
    assert value.fetch(TIMEOUT).startswith("the question takes 4,194,")
    assert value.fetch(TIMEOUT).endswith(f" {MAX_QUESTION_BYTES // 2}")


def test_too_many_questions(coordinator: ClusterCoordinator, gate: Gate) -> None:
    """One beyond the limit gets an error; the others get their answers."""
    kept = Kept()

    def many(count: int, path: str) -> list[Any]:
        all_there = threading.Barrier(count)

        def asked(number: int) -> Any:
            all_there.wait(TIMEOUT)
            try:
                return ask(number)
            except MisuseError as error:
                leave_mark(path, "refused")
                return str(error)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(asked, range(count)))

    value = coordinator.schedule_with(many, (MAX_QUESTIONS + 1, gate.path), answer=kept)
    questions = [kept.next() for _ in range(MAX_QUESTIONS)]
    until(lambda: marks(gate), "one is refused")
    for question in questions:
        question.reply(-1)
    results = value.fetch(TIMEOUT)
    (refused,) = [result for result in results if result != -1]
    assert f"has asked {MAX_QUESTIONS} questions that have no answer yet" in refused


def test_the_members_of_a_gang(coordinator: ClusterCoordinator) -> None:
    """Each question says which member has asked, even if members are on other workers than their ranks."""
    kept = Kept()
    until(lambda: coordinator.workers_up == 2, "all workers are up")
    values = coordinator.schedule_gang(
        lambda: ask(experimental_get_current_worker_index()), (), {}, [1, 0], 2, None, 0, None, answer=kept
    )
    questions = sorted((kept.next(), kept.next()), key=lambda question: question.rank)
    assert [(question.rank, question.worker, question.value) for question in questions] == [(0, 1, 1), (1, 0, 0)]
    for question in questions:
        assert question.attempt == 1
        question.reply(10 + question.rank)
    assert coordinator.fetch(values, TIMEOUT) == [10, 11]


def test_wrong_arguments(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="schedule_with takes a function, not an int"):
        coordinator.schedule_with(3, answer=double)  # type: ignore[arg-type]
    part = next(iter(coordinator.distribute_dataset([1, 2, 3]).batch(3)))
    with pytest.raises(MisuseError, match="can't take a part of a dataset"):
        coordinator.schedule_with(len, (part,), answer=double)


# Without a network


class FakeConnection:
    """Takes answers when the test lets it."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation, self.boot_id = incarnation, 0
        self.answers: list[Answer] = []
        self.calls = 0
        self.blocked = False

    async def answer(self, answer: Answer) -> None:
        """Take an answer, or never return."""
        self.calls += 1
        while self.blocked:
            await asyncio.sleep(0.001)
        self.answers.append(answer)


class Desk:
    """`Answers` with a worker that has one function, without a network."""

    def __init__(self) -> None:
        self.kept = list[Question]()
        self.state = DispatchState([PeerAddress("worker", 0, "nowhere:1")], [], node_pb2.AttachRequest(), 100, 3)
        self.answers = Answers(self.state)
        self.state.scheduler.add(
            Task(Call(capture(os.getpid), weakref.ref(cast("Any", self)), answer=self.kept.append))
        )
        self.connection = FakeConnection(1)
        self.come_up(self.connection)

    def come_up(self, connection: FakeConnection) -> None:
        """Give the worker, on a new connection, its function."""
        self.connection, self.state.workers[0].connection = connection, cast("WorkerConnection", connection)
        self.state.scheduler.worker_up(0)
        self.state.scheduler.take(0)

    def ask(self, number: int, *, function: int = 1, position: int = 1, value: value_pb2.Value | None = None) -> None:
        """Let the worker ask."""
        question = worker_pb2.Question(
            function=function, position=position, number=number, value=value if value is not None else encode(number)
        )
        self.answers.take(0, cast("WorkerConnection", self.connection), [question])

    @property
    def numbers(self) -> list[int]:
        """The questions that came through."""
        return [question.number for question in self.kept]


def test_questions_that_make_no_sense_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so once; later ones are taken."""
    desk = Desk()
    desk.ask(0)
    desk.ask(1, function=0)
    desk.ask(1, function=2)
    desk.ask(1, position=2)  # of an execution that is over, which is nobody's fault
    desk.ask(2)
    desk.ask(2)
    desk.ask(1)
    assert desk.numbers == [2]
    assert caplog.text.count("dropped a question from worker 0 at nowhere:1: number 0 of function 1") == 1
    assert len(caplog.records) == 1


def test_what_is_only_told_is_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Progress means nothing of a function that runs alone, of another execution, or of one that does not exist."""
    desk = Desk()
    for function, position in ((1, 1), (1, 2), (2, 1)):
        told = worker_pb2.Question(function=function, position=position, progressed=True)
        desk.answers.take(0, cast("WorkerConnection", desk.connection), [told])
    assert [record.message for record in caplog.records] == [
        "dropped a question from worker 0 at nowhere:1: it asks for function 2, which does not exist"
    ]
    desk.ask(1)
    assert desk.numbers == [1]


@pytest.mark.parametrize("late", [False, True])
def test_deaths_before_progress_are_forgotten(late: bool) -> None:
    """Also if the coordinator learns of the progress only when it has told the member to stop, for another's death."""
    peers = [PeerAddress("worker", index, "nowhere:1") for index in range(2)]
    state = DispatchState(peers, [], node_pb2.AttachRequest(), 100, 3)
    calls = [Call(capture(os.getpid), weakref.ref(cast("Any", state)), deaths=("before",)) for _ in peers]
    gang = Gang(calls, [1, 2], [0, 1], deaths=1)
    state.scheduler.add_gang(gang)
    for index in range(2):
        state.scheduler.worker_up(index)
        state.scheduler.take(index)
    assert state.scheduler.place_gang() is gang
    for index in range(2):
        state.scheduler.take(index)
    if late:
        state.scheduler.lose(0)
        calls[0].deaths = (*calls[0].deaths, "after")
        state.scheduler.settle_gangs()
        state.scheduler.decide_loss(0, gang.members[0])
    told = worker_pb2.Question(function=gang.members[1].id, position=gang.members[1].position, progressed=True)
    Answers(state).take(1, cast("WorkerConnection", FakeConnection(1)), [told])
    assert gang.deaths == late
    assert list(calls[0].deaths) == ["after"] * late


def test_a_question_that_can_not_be_read_is_answered_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    for number, value in enumerate([value_pb2.Value(), encode(bytes(2 * MAX_QUESTION_BYTES))], 1):
        desk.ask(number, value=value)
    until(lambda: len(desk.connection.answers) == 2, "both are answered")
    assert {answer.failure.qualname for answer in desk.connection.answers} == {"ProtocolError"}
    assert len(caplog.records) == 1
    assert desk.kept == []


def test_an_answer_names_its_question() -> None:
    desk = Desk()
    desk.ask(1)
    desk.ask(2)
    desk.kept[1].reply("two")
    until(lambda: desk.connection.answers, "it is sent")
    (answer,) = desk.connection.answers
    assert (answer.function, answer.position, answer.number, decode(answer.value)) == (1, 1, 2, "two")
    assert repr(desk.kept[1]) == "<question 2 of function 1 on worker 0, attempt 1>"


def test_answers_to_what_is_over_are_not_sent() -> None:
    """Whether the worker is lost, or only runs the function again."""
    desk = Desk()
    desk.ask(1)
    first = desk.connection
    desk.state.scheduler.run_again(0, [1])
    desk.state.scheduler.take(0)
    desk.ask(1, position=2)
    desk.kept[0].reply("too late")
    desk.state.scheduler.lose(0)
    desk.kept[1].reply("too late, too")
    desk.state.scheduler.requeue(0)
    desk.come_up(FakeConnection(2))
    desk.ask(1)
    desk.kept[2].reply("in time")
    until(lambda: desk.connection.answers, "the last one is sent")
    assert first.calls == 0
    assert [decode(answer.value) for answer in desk.connection.answers] == ["in time"]
    assert len(desk.answers._asked[0]) == 1


def test_questions_beyond_the_limit_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Those of a worker that takes no answers are dropped at some point: memory is bounded."""
    desk = Desk()
    for number in range(1, MAX_QUESTIONS + 2):
        desk.ask(number)
    assert len(desk.kept) == MAX_QUESTIONS
    until(lambda: desk.connection.answers, "the one that is too many is answered")
    (answer,) = desk.connection.answers
    assert answer.number == MAX_QUESTIONS + 1
    assert "wait for answers before asking more" in answer.failure.message
    desk.connection.blocked = True
    for number in range(MAX_QUESTIONS + 2, 2 * _MAX_UNSENT):
        desk.ask(number)
    assert desk.answers._asked[0][1].unsent == _MAX_UNSENT - MAX_QUESTIONS
    assert "it has not taken" in caplog.text
    desk.connection.blocked = False
    until(lambda: desk.answers._asked[0][1].unsent == 0, "all have been sent")
    desk.kept[0].reply(1)
    desk.ask(2 * _MAX_UNSENT)
    assert desk.numbers[-1] == 2 * _MAX_UNSENT
