"""The runner and its service, without a network: a function that was sent gets exactly one outcome, however it ends."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest
from tests.conftest import attached
from tests.fakes import FakeCall
from tests.waiting import until

from pscluster.core.errors import MisuseError, StaleError, UnavailableError
from pscluster.core.handles import Handle
from pscluster.core.ids import make_identity
from pscluster.core.metrics.trace import Recording
from pscluster.core.role.options import RoleOptions
from pscluster.core.values import encode_call
from pscluster.ps.client.client import PsClient
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.collectives.replica import replica_context
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.sources import source_of
from pscluster.worker.execution import function_calls, outbox
from pscluster.worker.execution import runner as runner_module
from pscluster.worker.execution.request_reader import RequestReader
from pscluster.worker.execution.runner import Outcome, Runner
from pscluster.worker.failures import failure_of
from pscluster.worker.function_metrics import WorkerMetrics
from pscluster.worker.job import Job
from pscluster.worker.servers import ServerList
from pscluster.worker.service import WorkerRole, WorkerService
from pscluster.worker.telemetry import WorkerTelemetry

TIMEOUT = 60.0


class NoServers:
    """Stands for the parameter servers' client, which these functions do not use."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def make_job(incarnation: int = 1, **functions: Callable[..., Any]) -> Job:
    """A job that knows these functions by name."""
    job = Job(
        incarnation=incarnation,
        worker_index=0,
        num_workers=1,
        seed=0,
        client=cast(PsClient, NoServers()),
        connect_timeout=TIMEOUT,
        metrics=WorkerMetrics(Recording()),
        pool=ConnectionPool(make_identity("worker", 0), RoleOptions()),
    )
    job._definitions.update(functions)
    return job


def step(function: int, definition: str, *args: Any, attachments: list[memoryview] | None = None) -> worker_pb2.Step:
    """A step that calls the function of that name."""
    arguments = encode_call(args, {}, attachments=attachments)
    return worker_pb2.Step(function=function, definition=definition, arguments=arguments, want_result=True)


class Stream:
    """A runner, what is sent to it, and the outcomes that it sends, among its answers or ahead of them."""

    past = False

    def __init__(self, job: Job, send: Callable[[bytes], bool] | None = None) -> None:
        self.runner = Runner(job, threading.Lock())
        self.outcomes: list[Outcome] = []
        self.sent_past = 0
        self.wrong: list[str] = []
        self._one = threading.Lock()
        self._sent: queue.SimpleQueue[worker_pb2.StepsRequest | None] = queue.SimpleQueue()
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()
        self._send = send or (self.take_past if self.past else None)
        arguments = (iter(self._sent.get, None), self._send)
        self._runs = threading.Thread(target=self.runner.run, args=arguments, daemon=True)
        self._runs.start()

    def _collect(self) -> None:
        for reply in self.runner.outcomes():
            self._take(reply)

    def _take(self, reply: worker_pb2.StepsReply) -> None:
        if not self._one.acquire(blocking=False):
            self.wrong.append("two threads send at once")
            return
        try:
            self.outcomes.extend(reply.outcomes)
        finally:
            self._one.release()

    def take_past(self, message: bytes) -> bool:
        """Take an outcome, like `ServerCall.sender`."""
        self.sent_past += 1
        self._take(worker_pb2.StepsReply.FromString(message))
        return True

    def send(self, position: int, *steps: worker_pb2.Step) -> None:
        """Send steps, the first of them at that position."""
        self._sent.put(worker_pb2.StepsRequest(position=position, steps=steps))

    def end(self) -> list[Outcome]:
        """Let what was sent run, end the stream, and return all outcomes."""
        drained = threading.Event()
        self.runner._job._definitions["drained"] = drained.set
        self.send(1000, step(0, "drained"))
        assert drained.wait(TIMEOUT)
        assert self.runner.wait_idle(TIMEOUT)
        self._sent.put(None)
        self._runs.join(TIMEOUT)
        self._collector.join(TIMEOUT)
        assert not self._runs.is_alive()
        assert not self._collector.is_alive()
        assert not self.wrong
        return [outcome for outcome in self.outcomes if outcome.function]


@pytest.fixture(params=[False, True], ids=["answers", "past them"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes are sent by either thread."""
    monkeypatch.setattr(Stream, "past", request.param)


def kinds(outcomes: Sequence[Outcome]) -> Counter[tuple[int, str]]:
    """How often each function had which outcome."""
    return Counter((outcome.function, Outcome.Kind.Name(outcome.kind)) for outcome in outcomes)


class Blocker:
    """A function that waits until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self) -> None:
        """Report that it runs, and wait."""
        self.begun.set()
        assert self.released.wait(TIMEOUT)


def test_what_is_recalled_comes_back_once_on_the_stream() -> None:
    """When recalled twice, functions that were read or not yet read come back once each; a running one continues."""
    block, ran = Blocker(), list[int]()
    stream = Stream(make_job(block=block, note=ran.append))
    stream.send(1, step(11, "block"), step(12, "note", 12), step(13, "note", 13))
    assert block.begun.wait(TIMEOUT)
    stream.send(4, step(14, "note", 14), step(15, "note", 15))  # not read before the running function has ended
    for _ in range(2):
        stream.runner.recall([11, 13, 14], [1, 3, 4], cancel_running=False)
    block.released.set()
    stream.send(6, step(13, "note", 13))  # sent again, to the same worker
    assert kinds(stream.end()) == {
        (11, "DONE"): 1,
        (12, "DONE"): 1,
        (13, "RETURNED"): 1,
        (13, "DONE"): 1,
        (14, "RETURNED"): 1,
        (15, "DONE"): 1,
    }
    assert ran == [12, 15, 13]


def test_a_late_recall_does_not_touch_the_function_sent_again() -> None:
    """A recall names positions on the stream: a function that came back and was sent again has another one."""
    block, ran = Blocker(), list[int]()
    stream = Stream(make_job(block=block, note=ran.append))
    stream.send(1, step(11, "block"), step(12, "note", 12))
    assert block.begun.wait(TIMEOUT)
    stream.runner.recall([12], [2], cancel_running=False)
    stream.send(3, step(12, "note", 12))
    block.released.set()
    reached = threading.Event()
    stream.runner._job._definitions["reached"] = lambda: reached.set()
    stream.send(4, step(13, "reached"))
    assert reached.wait(TIMEOUT)
    stream.runner.recall([12], [2], cancel_running=False)
    assert kinds(stream.end())[12, "RETURNED"] == 1
    assert ran == [12]


def test_arguments_of_recalled_functions_are_not_kept() -> None:
    """Large arguments for a recalled position are dropped; those sent with the function later are not."""
    block, seen = Blocker(), list[int]()
    job = make_job(block=block, size=lambda array: seen.append(array.nbytes))
    stream = Stream(job)

    def large(position: int, function: int) -> worker_pb2.Step:
        attachments: list[memoryview] = []
        made = step(function, "size", np.zeros(1 << 17, np.uint8), attachments=attachments)
        job.arguments[position] = attachments
        return made

    stream.send(1, step(11, "block"), large(2, 12))
    assert block.begun.wait(TIMEOUT)
    stream.runner.recall([12, 13], [2, 3], cancel_running=False)  # the second is still being prepared
    stream.send(3, large(3, 13))
    stream.send(4, large(4, 13))
    block.released.set()
    assert kinds(stream.end())[13, "DONE"] == 1
    assert seen == [1 << 17]
    assert job.arguments == {}


def test_an_empty_place_is_passed_over() -> None:
    """A function cancelled during preparation was never sent; a recall of it may arrive after its position."""
    job, ran = make_job(), list[int]()
    job._definitions["note"] = ran.append
    stream = Stream(job)
    job.arguments[2] = [memoryview(bytes(8))]
    stream.send(1, step(11, "note", 11), worker_pb2.Step(), step(13, "note", 13))
    until(lambda: ran == [11, 13], "the others have run")
    stream.runner.recall([12], [2], cancel_running=True)
    assert kinds(stream.end()) == {(11, "DONE"): 1, (13, "DONE"): 1}
    assert [outcome.kind for outcome in stream.outcomes if outcome.kind == Outcome.FAILED] == []
    assert job.arguments == {}


@pytest.mark.parametrize("refused", [0, 2, 3])
def test_outcomes_come_in_order_whichever_thread_sends_them(refused: int) -> None:
    """Long and short functions, in messages of one and of many, have one outcome each, with one sender at a time."""
    asked = itertools.count(1)

    def send(message: bytes) -> bool:
        return not (refused and next(asked) % refused == 0) and stream.take_past(message)

    stream = Stream(make_job(short=lambda: None, long=lambda: time.sleep(0.0005)), send)
    position, rng = 1, random.Random(7)
    while position < 400:
        names = [rng.choice(("short", "short", "long")) for _ in range(rng.choice((1, 1, 2, 30)))]
        stream.send(position, *(step(index, name) for index, name in enumerate(names, position)))
        position += len(names)
    outcomes = stream.end()
    assert [outcome.function for outcome in outcomes] == list(range(1, position))
    assert stream.sent_past, "none was sent by the thread that runs them"


def test_short_functions_share_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others wait after them, nothing is sent ahead of the answers."""
    monkeypatch.setattr(outbox, "SEND_SECONDS", float("inf"))  # all are short
    block = Blocker()
    stream = Stream(make_job(block=block, note=lambda: None))
    stream.send(1, step(1, "block"))
    assert block.begun.wait(TIMEOUT)
    stream.send(2, *(step(function, "note") for function in range(2, 502)))
    block.released.set()
    assert len(stream.end()) == 501
    assert stream.sent_past <= 3  # the first, the last, and the one that lets the stream end


def test_the_stream_ends_behind_an_outcome_that_is_being_sent() -> None:
    """Its status is not sent in between."""
    sending, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def send(message: bytes) -> bool:
        sending.set()
        assert go_on.wait(TIMEOUT)
        return stream.take_past(message)

    def collect() -> None:
        collected.extend(runner.outcomes())
        ended.set()

    stream, collected = Stream(make_job()), list[worker_pb2.StepsReply]()
    runner = Runner(make_job(note=lambda: None), threading.Lock())
    requests: queue.SimpleQueue[worker_pb2.StepsRequest | None] = queue.SimpleQueue()
    threading.Thread(target=collect, daemon=True).start()
    until(lambda: not runner._outbox._sending, "the stream is up")
    runs = threading.Thread(target=runner.run, args=(iter(requests.get, None), send), daemon=True)
    runs.start()
    requests.put(worker_pb2.StepsRequest(position=1, steps=[step(11, "note")]))
    assert sending.wait(TIMEOUT)
    runner.end()
    assert not ended.wait(0.05)
    go_on.set()
    assert ended.wait(TIMEOUT)
    requests.put(None)
    runs.join(TIMEOUT)
    assert not runs.is_alive()
    assert kinds(stream.end()) == {(11, "DONE"): 1}
    assert collected == []


def test_a_fault_in_sending_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome is lost with the stream, whichever thread was to send it."""
    reached: list[str] = []

    def reach(point: str) -> None:
        if point == "worker.result.before":
            reached.append(point)
            raise UnavailableError("a fault")

    monkeypatch.setattr(outbox, "reach", reach)
    runner = Runner(make_job(note=lambda: None), threading.Lock())
    outcomes = runner.outcomes()
    runner._outbox._sending = False  # the stream is up
    runner.run(iter([worker_pb2.StepsRequest(position=1, steps=[step(11, "note")])]), lambda _: True)
    assert list(outcomes) == []
    assert len(reached) == 1


def test_leaving_does_not_wait_for_outcomes_that_nobody_takes() -> None:
    """A worker whose coordinator has gone stops as soon as nothing runs."""
    runner = Runner(make_job(note=lambda: None), threading.Lock())
    runner.run(iter([worker_pb2.StepsRequest(position=1, steps=[step(11, "note")])]))
    assert runner.wait_idle(0.0), "the stream is over, its outcome is still there"


def test_an_outcome_after_the_end_is_dropped() -> None:
    """A function that fails since its attachment is being closed runs again: its error must not be the function's."""
    lock = threading.RLock()
    ending = outbox.Outbox(lock, threading.Condition(lock))
    with lock:
        ending.add(Outcome(function=1))
        ending.end()
        assert not ending.add_ended(Outcome(function=2, kind=Outcome.FAILED), others_wait=False)
    assert [outcome.function for reply in ending.messages() for outcome in reply.outcomes] == [1]


def test_a_result_too_large_for_a_message_is_the_functions_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, once and with a message, instead of breaking the stream for all."""
    monkeypatch.setattr(function_calls, "MAX_INLINE_BYTES", 1 << 20)
    stream = Stream(make_job(many=lambda: [1.0] * (1 << 17)))
    stream.send(1, step(11, "many"))
    (outcome,) = stream.end()
    assert outcome.failure.qualname == "TypeError"
    assert "the result takes 1 MiB in one message" in outcome.failure.message


def test_the_last_results_are_fetched_before_a_worker_goes() -> None:
    """The worker stays until the large arrays of the last result have been fetched."""
    job = make_job(array=lambda: np.zeros(1 << 17, np.uint8))
    stream = Stream(job)
    stream.send(1, step(11, "array"))
    stream.end()
    assert not job.wait_fetched(0.0)
    job.drop_result(11)
    assert job.wait_fetched(0.0)


class StepsCall(FakeCall):
    """The context of a stream of steps, which records that its state was checked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def is_active(self) -> bool:
        """Whether the call is active."""
        self.asked.set()
        return super().is_active()


def make_role() -> WorkerRole:
    """A worker's role without servers."""
    return WorkerRole(ServerList(0), lambda job, incarnation: cast(PsClient, NoServers()), TIMEOUT, Recording())


def begin_stream(role: WorkerRole, incarnation: int, context: StepsCall) -> Iterator[worker_pb2.StepsReply]:
    """The replies of a new stream of steps."""
    request = worker_pb2.StepsRequest(incarnation=incarnation)
    return WorkerService(role).steps(iter([request]), cast(grpc.ServicerContext, context))


def test_what_is_left_of_an_earlier_attachment_is_refused() -> None:
    """A recall that was in transit when the connection broke is not mistaken for one of the next connection."""
    role = make_role()
    old, new = (attached(role, node_pb2.AttachRequest(job=7)).incarnation for _ in range(2))
    next(begin_stream(role, new, StepsCall()))
    service = WorkerService(role)
    request = worker_pb2.RecallRequest(incarnation=old, functions=[1], positions=[1])
    with pytest.raises(StaleError, match="attachment to the worker is over"):
        service.recall(request, cast(grpc.ServicerContext, StepsCall()))
    with pytest.raises(StaleError, match="attachment to the worker is over"):
        next(begin_stream(role, old, StepsCall()))


def test_a_stream_is_up_when_the_earlier_ones_function_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A returning worker gets functions once it can run them, not while an old one still runs."""
    monkeypatch.setattr("pscluster.worker.service._TURN_SECONDS", 0.0)
    role, context = make_role(), StepsCall()
    stream = begin_stream(role, attached(role, node_pb2.AttachRequest(job=7)).incarnation, context)
    up = threading.Event()

    def wait() -> None:
        next(stream)
        up.set()

    with role._turn:  # as a function holds it
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        assert context.asked.wait(TIMEOUT)
        assert not up.is_set()
    assert up.wait(TIMEOUT)
    waiter.join(TIMEOUT)


def test_a_stream_that_waits_for_its_turn_ends_with_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is left waiting for a coordinator that has gone."""
    monkeypatch.setattr("pscluster.worker.service._TURN_SECONDS", 0.0)
    role, context = make_role(), StepsCall()
    context.end()
    stream = begin_stream(role, attached(role, node_pb2.AttachRequest(job=7)).incarnation, context)
    with role._turn:
        assert list(stream) == []


def test_the_next_message_is_read_behind_an_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that came while nothing ran may run before its reader has continued; the next one is still read."""
    monkeypatch.setattr(runner_module, "LONG_SECONDS", -1.0)  # all are long
    first, second = Blocker(), Blocker()
    read_one = RequestReader.read_one

    def read_and_linger(reader: RequestReader) -> bool:
        more = read_one(reader)
        if threading.current_thread().name == "functions-ahead" and stream.runner._read == 2:
            assert second.begun.wait(TIMEOUT)
        return more

    monkeypatch.setattr(RequestReader, "read_one", read_and_linger)
    stream = Stream(make_job(first=first, second=second, note=lambda: None))
    stream.send(1, step(11, "first"))
    assert first.begun.wait(TIMEOUT)  # and the reader waits for a message
    first.released.set()
    until(lambda: len(stream.outcomes) == 1, "nothing runs")
    stream.send(2, step(12, "second"))
    stream.send(3, step(13, "note"))
    until(lambda: stream.runner._read == 3, "the message was read while a function runs")
    second.released.set()
    assert kinds(stream.end()) == {(11, "DONE"): 1, (12, "DONE"): 1, (13, "DONE"): 1}


def test_what_ended_is_counted_once_and_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """No metric falls while a failure is written, or while another coordinator attaches. The shortest case."""
    role, seen = make_role(), list[Any]()
    telemetry = WorkerTelemetry(role, ClientMetrics(0))

    def note() -> None:
        metrics = telemetry.snapshot()
        seen.append((metrics["functions_done_total"], metrics["functions_failed_total"]))

    def noted(error: BaseException) -> Any:
        note()
        return failure_of(error)

    def ended(runner: Runner) -> None:
        note()
        end(runner)

    end = Runner.end
    monkeypatch.setattr(runner_module, "failure_of", noted)
    monkeypatch.setattr(Runner, "end", ended)
    incarnation = attached(role, node_pb2.AttachRequest(job=7)).incarnation
    role.job(incarnation)._definitions.update(nothing=lambda: None)
    steps = [step(1, "nothing"), step(2, "nowhere")]
    requests = [worker_pb2.StepsRequest(incarnation=incarnation), worker_pb2.StepsRequest(position=1, steps=steps)]
    replies = list(WorkerService(role).steps(iter(requests), cast(grpc.ServicerContext, StepsCall())))
    assert [outcome.kind for reply in replies for outcome in reply.outcomes] == [Outcome.DONE, Outcome.FAILED]
    role.job_ended()
    assert seen == [(1, 0), (1, 1), (1, 1)]
    status = node_pb2.StatusReply()
    role.describe(status)
    assert status.functions_done == 1
    runs = telemetry.snapshot()["run_seconds"]
    assert isinstance(runs, Mapping)
    assert runs["count"] == 2
    assert 0 < status.function_seconds == runs["sum"]


def test_a_stream_that_ends_does_not_end_the_next_ones_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second without a function counts once, even if an old stream ends after the beginning of another."""
    clock = iter(range(10, 100, 10))
    monkeypatch.setattr("pscluster.worker.function_metrics.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    counts = WorkerMetrics(Recording())
    old = counts.idle()  # at 10
    new = counts.idle()  # at 20
    counts.not_idle(old)  # at 30
    assert counts.idle_seconds == 10 + 20  # at 40
    counts.not_idle(new)  # at 50
    assert counts.idle_seconds == 10 + 30


class Given(Handle):
    """What the coordinator sends for a part of a dataset."""

    handle_kind = "part"

    def __init__(self, start: int) -> None:
        self._start = start

    @property
    def handle_key(self) -> str:
        """The key for dataset 5."""
        return f"5/0/{self._start}/{self._start + 2}"


def with_part(function: int, definition: str, start: int) -> worker_pb2.Step:
    """A step that gets this part of dataset 5."""
    made = step(function, definition, Given(start))
    made.parts.append(Given(start).handle_key)
    return made


def test_parts_are_dropped_however_their_functions_end() -> None:
    """Parts that were read, recalled, cancelled, failed early or left in an ended stream are not read ahead."""
    block = Blocker()

    def read_and_block(part: Any) -> list[int]:
        block()
        return [int(example) for example in part]

    job = make_job(read=lambda part: [int(example) for example in part], block=read_and_block)

    def slowly(example: Any) -> Any:
        time.sleep(0.01)
        return example

    job._pipelines["5"] = Pipeline(source_of(np.arange(100)), "data", example_functions=(slowly,), ahead=1)
    stream = Stream(job)
    stream.send(1, with_part(1, "read", 0))
    until(lambda: job.reads_ahead and not job._parts, "it is known that reading takes long")
    stream.send(2, with_part(2, "block", 10))
    assert block.begun.wait(TIMEOUT)
    stream.send(3, with_part(3, "nowhere", 20), with_part(4, "read", 30), with_part(5, "read", 40))
    until(lambda: set(job._parts) == {2, 3, 4, 5}, "another thread has read the stream meanwhile")
    stream.runner.recall([4], [4], cancel_running=False)
    assert set(job._parts) == {2, 3, 5}
    stream.runner.recall([2], [2], cancel_running=True)
    block.released.set()
    outcomes = stream.end()
    assert kinds(outcomes) == Counter(
        {(1, "DONE"): 1, (2, "CANCELLED"): 1, (3, "FAILED"): 1, (4, "RETURNED"): 1, (5, "DONE"): 1}
    )
    assert job._parts == {}
    assert job._reader._parts == []
    other = Stream(job)
    block.begun.clear()
    block.released.clear()
    other.send(1, with_part(6, "block", 50), with_part(7, "read", 60))
    assert block.begun.wait(TIMEOUT)
    other.runner.end()
    block.released.set()
    other._runs.join(TIMEOUT)
    other._sent.put(None)  # ends the thread that reads the stream
    other._collector.join(TIMEOUT)
    assert job._parts == {}
    assert job._reader._parts == []
    job.close()


class AloneInItsGang:
    """A step that is the only member of its gang, generation after generation."""

    def __init__(self, stream: Stream, incarnation: int = 1) -> None:
        self._stream, self._incarnation = stream, incarnation
        self._positions = itertools.count(1)

    def send(self, definition: str, generation: int, *, rank: int = 0, follows: int = 0) -> None:
        """Send the step: the n-th is function n."""
        position = next(self._positions)
        sent = step(position, definition)
        sent.gang.id, sent.gang.generation, sent.gang.rank, sent.gang.secret = 5, generation, rank, bytes(32)
        sent.gang.follows = follows
        sent.gang.members.add(worker=0, address="127.0.0.1:1", incarnation=self._incarnation)
        self._stream.send(position, sent)


def test_a_step_of_a_gang_that_follows_another_one_runs_if_that_has_returned() -> None:
    """Otherwise it is given back, since the other one may run again, before it."""
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    gang = AloneInItsGang(stream := Stream(make_job(work=lambda: ran.append(1), fail=fail)))
    for generation, (definition, follows) in enumerate(
        [("work", 0), ("work", 1), ("fail", 2), ("work", 3), ("work", 4), ("work", 0), ("work", 6)], 1
    ):
        gang.send(definition, generation, follows=follows)
    ended = dict.fromkeys([1, 2, 6, 7], "DONE") | {3: "FAILED"} | dict.fromkeys([4, 5], "RETURNED")
    assert kinds(stream.end()) == Counter(ended.items())
    assert len(ran) == 4


def test_a_step_of_a_gang_has_its_replica() -> None:
    """A step with a gang runs as a member of it, and is over with it; another gang, or a wrong one, is refused."""
    seen: list[Any] = []

    def work() -> Any:
        replica = replica_context()
        replica.barrier()
        seen.append(replica)
        return replica.all_reduce("sum", 3)

    def fail() -> None:
        raise ValueError("no")

    job = make_job(work=work, fail=fail, plain=lambda: replica_context().num_replicas)
    stream = Stream(job)
    gang = AloneInItsGang(stream)
    gang.send("work", 1)
    gang.send("fail", 2)
    gang.send("work", 2)
    gang.send("work", 3, rank=1)
    gang.send("work", 3)
    stream.send(6, step(6, "plain"))
    outcomes = stream.end()
    assert kinds(outcomes) == Counter(
        {(1, "DONE"): 1, (2, "FAILED"): 1, (3, "FAILED"): 1, (4, "FAILED"): 1, (5, "DONE"): 1, (6, "DONE"): 1}
    )
    failures = {outcome.function: (outcome.failure.qualname, outcome.failure.message) for outcome in outcomes}
    assert failures[2] == ("ValueError", "no")
    assert failures[3][0] == "StaleError"
    assert failures[4][0] == "ProtocolError"
    assert len(seen) == 2
    with pytest.raises(MisuseError, match="its function has ended"):
        seen[0].barrier()
