"""Dispatch against workers of fake: what happens when messages cross, in the very order that a test wants."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

import pytest
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    RemoteValue,
    RemoteValueStatus,
)
from pscluster.coordinator.job.context import open_jobs
from pscluster.coordinator.scheduling import definitions_cache, server_watch, worker_link
from pscluster.coordinator.scheduling import dispatcher as dispatch
from pscluster.coordinator.scheduling import state as dispatch_state
from pscluster.coordinator.scheduling.calls import call as call_module
from pscluster.coordinator.scheduling.calls.call import Call, ResourceRecipe, placeholder
from pscluster.coordinator.scheduling.connections import lifecycle, loop
from pscluster.coordinator.scheduling.connections.server_link import ServerAttachment
from pscluster.coordinator.scheduling.decisions.scheduler import Scheduler
from pscluster.coordinator.scheduling.decisions.tasks import RunLimits, Task
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.scheduling.state import DispatchState
from pscluster.coordinator.waiting import Condition
from pscluster.core.errors import (
    BusyError,
    FunctionError,
    FunctionTimeoutError,
    MisuseError,
    PsClusterError,
    PSUnavailableError,
    UnavailableError,
)
from pscluster.core.functions.definitions import CapturedFunction, capture
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.values import encode, encode_call
from pscluster.v1 import node_pb2, value_pb2, worker_pb2
from pscluster.worker.failures import failure_of

Outcome = worker_pb2.Outcome
Take = Callable[[Any, Sequence[Outcome]], None]


class FakeWorker:
    """A worker as the dispatcher sees it, across all its connections; what it answers, and when, the test says."""

    def __init__(self, index: int, address: str = "", boot_id: int = 0) -> None:
        self.peer = PeerAddress("worker", index, address or f"nowhere:{index + 1}")
        self.boot_id = boot_id
        self.is_there = True
        self.connections: list[FakeConnection] = []
        self.may_upload = asyncio.Event()
        self.may_upload.set()

    @property
    def last(self) -> FakeConnection:
        """Its latest connection."""
        return self.connections[-1]


class FakeConnection:
    """Stands in for a WorkerConnection."""

    def __init__(self, worker: FakeWorker, take: Take) -> None:
        self.worker, self.peer = worker, worker.peer
        self._take = take
        worker.connections.append(self)
        self.incarnation, self.boot_id = len(worker.connections), worker.boot_id
        self.sent: list[tuple[int, list[worker_pb2.Step]]] = []
        self.uploads: list[worker_pb2.UploadRequest] = []
        self.recalls: list[list[int]] = []
        self.forgotten: list[str] = []
        self.uploading = 0
        self.steps_ended = False
        self.leaves = asyncio.Event()
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def attach(self, request: node_pb2.AttachRequest) -> None:
        """Attach at once, if it is there."""
        if not self.worker.is_there:
            raise UnavailableError("it is not there")

    def follow_servers(self, moved: asyncio.Event, request: node_pb2.AttachRequest) -> None:
        """Do nothing: no server moves here."""

    async def until_silent(self, _lease: float) -> str:
        """Never return."""
        await asyncio.Event().wait()
        return ""

    async def leaving(self) -> bool:
        """Leave when the test says so."""
        return await self.leaves.wait()

    def send(self, request: worker_pb2.StepsRequest) -> None:
        """Record the call."""
        self.sent.append((request.position, list(request.steps)))

    def end_steps(self) -> None:
        """Record the call."""
        self.steps_ended = True

    async def upload(self, head: worker_pb2.UploadRequest, buffers: Sequence[Any] = ()) -> str:
        """Wait until the test lets it go on."""
        del buffers
        self.uploading += 1
        await self.worker.may_upload.wait()
        self.uploading -= 1
        self.uploads.append(head)
        return ""

    async def recall(self, functions: Sequence[int], positions: Sequence[int], cancel_running: bool) -> None:
        """Record the positions; the test sends the outcomes."""
        del functions, cancel_running
        self.recalls.append(list(positions))

    async def release(self, resources: Sequence[int] = (), definitions: Sequence[str] = ()) -> None:
        """Record the call."""
        del resources
        self.forgotten.extend(definitions)

    async def close(self) -> None:
        """Do nothing: nothing is open."""

    # What the test lets it do

    @property
    def functions(self) -> list[int]:
        """Return the ids of the functions that were sent; 0 for those that had been recalled by then."""
        return [step.function for _, steps in self.sent for step in steps]

    def tell(self, kind: worker_pb2.Outcome.Kind, *functions: int, seconds: float = 1.0) -> None:
        """Deliver outcomes."""
        self._tell([Outcome(function=function, kind=kind, seconds=seconds) for function in functions])

    def tell_value(self, function: int, value: value_pb2.Value) -> None:
        """Deliver a result."""
        self._tell([Outcome(function=function, kind=Outcome.DONE, value=value, seconds=1.0)])

    def end(self, error: Exception | None = None) -> None:
        """End the stream, after the outcomes that came before."""
        asyncio.get_running_loop().call_soon(self.ended.set_result, error)

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        asyncio.get_running_loop().call_soon(self._take, self, outcomes)


class FakeServerAttachment(ServerAttachment):
    """A parameter server that only counts."""

    def __init__(self) -> None:
        self.peer = PeerAddress("ps", 0, "nowhere:1")
        self.told: list[list[tuple[int, int]]] = []
        self.answers: list[Exception | None] = []
        self.closing: Exception | None = None
        self.shutting_out: list[tuple[int, int]] = []
        self.may_shut_out = asyncio.Event()
        self.may_shut_out.set()
        self.checked = asyncio.Event()
        self.verdict: PSUnavailableError | None = None

    async def check(self) -> PSUnavailableError | None:
        """Answer as the test says, when it says so."""
        await self.checked.wait()
        return self.verdict

    async def watch(self) -> PSUnavailableError:
        """Never return: the server is never lost."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def close_incarnation(self, incarnation: int) -> None:
        """Answer as the test says."""
        if self.closing is not None:
            raise self.closing

    async def finish_functions(
        self, intervals: Sequence[tuple[int, int]], keys: Iterable[int] = (), *, shut_out: bool = False
    ) -> None:
        """Answer as the test says."""
        del keys
        if shut_out:
            self.shutting_out += intervals
            await self.may_shut_out.wait()
        self.told.append(list(intervals))
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer


class FakeCluster:
    """A dispatcher between fake workers and servers. Its methods are for the loop's thread."""

    def __init__(self, workers: int, servers: int = 0, max_attempts: int = 10) -> None:
        self.workers = [FakeWorker(index) for index in range(workers)]
        self.servers = [FakeServerAttachment() for _ in range(servers)]
        state = DispatchState(
            [worker.peer for worker in self.workers], self.servers, node_pb2.AttachRequest(), 100, max_attempts
        )
        self.dispatcher = Dispatcher(state)
        self._function = capture(nothing)

    async def start(self) -> None:
        """Start the dispatcher, and wait until all workers are up."""
        await self.dispatcher.start()
        await until(lambda: self.dispatcher.state.workers_up == len(self.workers))

    def schedule(
        self, function: CapturedFunction | None = None, *, size: int = 0, timeout: float | None = None
    ) -> RemoteValue:
        """Submit a function with an argument of `size` bytes beside the message."""
        function = function or self._function
        step = worker_pb2.Step(definition=function.digest)
        encode_call((), {}, into=step.arguments)
        value = RemoteValue(function.name, no_handle)
        attachments = [memoryview(bytes(size))] if size else []
        call = Call(function, weakref.ref(value), step.arguments, attachments)
        self.dispatcher.submit(Task(call, limits=RunLimits(timeout=timeout)))
        return value

    def join(self, index: int, address: str, boot_id: int) -> FakeWorker:
        """Let a worker register."""
        worker = FakeWorker(index, address, boot_id)
        self.workers.append(worker)
        self.dispatcher.join(worker.peer, boot_id)
        return worker

    def state(self, index: int) -> list[int]:
        """Return the ids of the functions that a worker has, according to the scheduler."""
        return list(self.dispatcher._scheduler.workers[index].sent)


def nothing() -> None:
    """Be scheduled; it runs nowhere."""


def no_handle(kind: str, key: str) -> Any:
    """Fail: results here have no handles."""
    raise AssertionError((kind, key))


async def until(predicate: Callable[..., object], *args: object) -> None:
    """Let the loop go on until the predicate holds of the arguments."""
    async with asyncio.timeout(TIMEOUT):
        while not predicate(*args):
            await asyncio.sleep(0)


async def loop_at_rest() -> None:
    """Let everything on the loop come to rest."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeCluster]]:
    """Makes dispatchers with fake workers; closes them at the end."""
    made: list[FakeCluster] = []

    def make(workers: int = 1, **more: int) -> FakeCluster:
        fake = FakeCluster(workers, **more)

        def connection(peer: PeerAddress, take: Take, *_: object) -> FakeConnection:
            return FakeConnection(next(worker for worker in fake.workers if worker.peer == peer), take)

        monkeypatch.setattr(worker_link, "WorkerConnection", connection)
        made.append(fake)
        return fake

    async def no_end(*_: object) -> None:
        pass

    monkeypatch.setattr(dispatch, "end_job", no_end)
    monkeypatch.setattr(worker_link, "LEAVE_SECONDS", 0.0)
    yield make
    for cluster in made:
        loop.run(cluster.dispatcher.close("the test is over"), TIMEOUT)


def on_loop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine on the loop's thread."""
    loop.run(scenario(), TIMEOUT)


def test_a_worker_leaves_with_a_message_on_its_way(fake: Callable[..., FakeCluster]) -> None:
    """The stream is left alone until the worker has ended it; the functions go on elsewhere."""
    cluster = fake()
    (worker,) = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        first = worker.last
        cluster.schedule()
        await until(lambda: first.functions)
        first.tell(Outcome.DONE, 1, seconds=1e-6)  # from now on it could have many
        cluster.schedule()
        await until(lambda: 2 in first.functions)
        first.leaves.set()
        await until(lambda: first.recalls)
        assert first.recalls == [[2]], "all is asked back, as the worker may not read for long"
        cluster.schedule()
        await until(lambda: first.steps_ended)
        await loop_at_rest()
        assert cluster.state(0) == [2], "it gets nothing more"
        first.end()
        await until(lambda: len(worker.connections) == 2 and worker.last.functions)
        worker.last.tell(Outcome.DONE, 2)
        await until(lambda: worker.last.functions == [2, 3])

    on_loop(scenario)


def test_a_stream_that_breaks_off_in_a_write_does_not_end_the_link(fake: Callable[..., FakeCluster]) -> None:
    """However the connection ends, by grpc's errors or by what it says of a call that is gone, the link dials again."""
    cluster = fake()
    (worker,) = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        for error in (asyncio.InvalidStateError("gone"), UnavailableError("gone"), ValueError("gone"), None):
            count = len(worker.connections)
            worker.last.end(error)
            await until(lambda count: len(worker.connections) > count and cluster.dispatcher.state.workers_up, count)
        value = cluster.schedule()
        await until(lambda: worker.last.functions)
        worker.last.tell(Outcome.DONE, 1)
        await until(lambda: value.status is RemoteValueStatus.READY)

    on_loop(scenario)


def test_what_is_recalled_while_it_is_prepared_keeps_its_place(fake: Callable[..., FakeCluster]) -> None:
    """A function that went to another worker meanwhile is not sent, and does not bring its place there along."""
    cluster = fake(2)
    busy, other = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        for _ in range(2):
            cluster.schedule()
        await until(lambda: busy.last.functions == [1] and other.last.functions == [2])
        other.last.tell(Outcome.DONE, 2, seconds=1e-6)
        await until(lambda: not cluster.state(1))
        other.may_upload.clear()
        cluster.schedule(size=1)
        await until(lambda: other.last.uploading)
        busy.last.tell(Outcome.DONE, 1, seconds=1e-6)
        busy.may_upload.clear()
        for _ in range(6):
            cluster.schedule(size=1)
        await until(lambda: busy.last.uploading and cluster.state(0) == [4, 5, 6])
        busy.last.tell(Outcome.RETURNED, 4, 5)  # a recall overtook them
        await until(lambda: cluster.state(0) == [6])
        other.may_upload.set()
        await until(lambda: {4, 5} <= set(other.last.functions))
        busy.may_upload.set()
        await until(lambda: len(busy.last.sent) == 2)
        assert [position for position, _ in busy.last.sent] == [1, 2], "4 and 5 are at other places on the other stream"
        assert busy.last.functions == [1, 0, 0, 6]
        places = [head.attachments.position for head in busy.last.uploads if head.HasField("attachments")]
        assert places == [2, 4], "4 was on its way when it was recalled, 5 needed not go"

    on_loop(scenario)


def test_only_a_worker_without_any_function_steals(fake: Callable[..., FakeCluster]) -> None:
    """One that has a place free, but also something to run, does not take what waits for others' functions to end."""
    cluster = fake(2)
    first, second = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        for _ in range(2):
            cluster.schedule()
        await until(lambda: first.last.functions and second.last.functions)
        for worker in (first, second):
            worker.last.tell(Outcome.DONE, *worker.last.functions)
        for _ in range(4):
            cluster.schedule()
        await until(lambda: all(len(cluster.state(index)) == 2 for index in range(2)))
        for index in range(2):
            await until(lambda index: cluster.dispatcher._scheduler.workers[index].idle, index)
            cluster.dispatcher.state.steal(index)
        assert cluster.dispatcher._scheduler.workers[0].idle
        idle = second.last
        second.last.tell(Outcome.DONE, *cluster.state(1))
        await until(lambda: not cluster.state(1) and cluster.dispatcher._scheduler.workers[1].idle)
        assert first.last.recalls == []
        cluster.dispatcher.state.steal(1)
        await until(lambda: first.last.recalls)
        ((position,),) = first.last.recalls
        stolen = cluster.state(0)[1]
        assert position == 3, "the later one of those it has"
        first.last.tell(Outcome.RETURNED, stolen)
        await until(lambda: stolen in idle.functions)
        assert cluster.state(1) == [stolen]

    on_loop(scenario)


def test_arguments_too_large_for_a_message_are_refused(
    fake: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `schedule`, or as that function's error where it is another's result that makes them so."""
    monkeypatch.setattr(call_module, "MAX_INLINE_BYTES", 1 << 20)
    cluster = fake()
    (worker,) = cluster.workers
    function = capture(nothing)

    def call(argument: Any, **waiting: RemoteValue) -> tuple[Call, RemoteValue]:
        step = worker_pb2.Step(definition=function.digest)
        value = RemoteValue("nothing", no_handle)
        encode_call(
            (argument,),
            {},
            into=step.arguments,
            remote=lambda leaf, _: placeholder("x") if isinstance(leaf, RemoteValue) else None,
        )
        return Call(function, weakref.ref(value), step.arguments, [], dict(waiting)), value

    async def scenario() -> None:
        await cluster.start()
        with pytest.raises(TypeError, match="the arguments take 1 MiB in one message"):
            cluster.dispatcher.submit(Task(call([1.0] * (1 << 17))[0]))
        first = cluster.schedule()
        await until(lambda: worker.last.functions)
        waits, value = call([first, "x" * (1 << 19)], x=first)
        cluster.dispatcher.submit(Task(waits))
        worker.last.tell_value(1, encode("y" * (1 << 19)))
        await until(lambda: value.status is RemoteValueStatus.FAILED)
        with pytest.raises(FunctionError, match="the arguments take 1 MiB in one message"):
            value.fetch()
        assert len(worker.connections) == 1, "nothing broke"

    on_loop(scenario)


def test_a_worker_forgets_functions_that_were_not_used_for_longest(
    fake: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a script makes a new function for every call, its workers do not grow."""
    monkeypatch.setattr(definitions_cache, "MAX_DEFINITIONS", 4)
    cluster = fake()
    (worker,) = cluster.workers
    functions = [capture(functools.partial(abs, n)) for n in range(20)]
    often = functions[0]

    async def scenario() -> None:
        await cluster.start()
        function_number = 0
        for function in functions[1:]:
            for scheduled in (function, often):
                cluster.schedule(scheduled)
                function_number += 1
                await until(lambda function_number: cluster.state(0) == [function_number], function_number)
                await until(lambda function_number: function_number in worker.last.functions, function_number)
                worker.last.tell(Outcome.DONE, function_number)
        await until(lambda: not cluster.state(0))
        known = cluster.dispatcher.state.workers[0].known
        assert often.digest in known
        assert often.digest not in worker.last.forgotten
        assert len(known) <= 4
        defined = [head.definition.digest for head in worker.last.uploads]
        assert sorted(defined) == sorted([*known, *worker.last.forgotten])

    on_loop(scenario)


def test_done_does_not_wait_for_what_still_runs(fake: Callable[..., FakeCluster]) -> None:
    """While an error waits for another worker's function it is not done; then it raises the error, once."""
    cluster = fake(2)
    failing, running = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        for _ in range(2):
            cluster.schedule()
        await until(lambda: failing.last.functions and running.last.functions)
        failing.last.tell(Outcome.FAILED, *failing.last.functions)
        await until(lambda: running.last.recalls)
        assert not cluster.dispatcher.waits.done()
        running.last.tell(Outcome.CANCELLED, *running.last.functions)
        await until(lambda: not cluster.state(1))
        with pytest.raises(FunctionError):
            cluster.dispatcher.waits.done()
        assert cluster.dispatcher.waits.done()

    on_loop(scenario)


def test_servers_are_told_again_of_ended_functions(
    fake: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that fails, with whatever error of ours, does not end the telling, and is made good by the next."""
    monkeypatch.setattr(server_watch, "FINISH_SECONDS", 0.0)
    cluster = fake(servers=1)
    (server,) = cluster.servers
    (worker,) = cluster.workers
    server.answers = [UnavailableError("away"), PsClusterError("odd")]

    async def scenario() -> None:
        await cluster.start()
        cluster.schedule()
        await until(lambda: worker.last.functions)
        worker.last.tell(Outcome.DONE, 1)
        await until(lambda: len(server.told) == 3)
        cluster.schedule()
        await until(lambda: len(worker.last.functions) == 2)
        worker.last.tell(Outcome.DONE, 2)
        await until(lambda: len(server.told) == 4)
        assert server.told == [[(1, 2)], [(1, 2)], [(1, 2)], [(2, 3)]]

    on_loop(scenario)


def test_updates_that_cannot_be_shut_out_are_a_lost_server(fake: Callable[..., FakeCluster]) -> None:
    """A lost worker's function does not run again then: waits for it raise that a server is lost."""
    cluster = fake(servers=1)
    (worker,) = cluster.workers
    cluster.servers[0].closing = UnavailableError("ps 0 can't be reached")

    async def scenario() -> None:
        await cluster.start()
        value = cluster.schedule()
        await until(lambda: worker.last.functions)
        worker.last.end()
        await until(lambda: value.status is RemoteValueStatus.CANCELLED)

    on_loop(scenario)
    with pytest.raises(PSUnavailableError, match="ps 0 can't be reached"):
        cluster.dispatcher.waits.join(TIMEOUT)


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_a_function_that_is_ended_and_goes_on(fake: Callable[..., FakeCluster], how: str) -> None:
    """Its value has its error at once; nothing is cut, and no error raised, before every server refuses its updates.

    Its worker gives back what waits there and is given nothing else until it has ended, and its result is dropped.
    """
    cluster = fake(workers=1, servers=2)
    (worker,), dispatcher = cluster.workers, cluster.dispatcher
    scheduler = dispatcher._scheduler

    async def scenario() -> None:
        await cluster.start()
        cluster.servers[1].may_shut_out.clear()
        scheduler.workers[0].seconds = 1e-6
        value = cluster.schedule(timeout=1e-9 if how == "timeout" else None)
        await until(lambda: worker.last.functions == [1])
        scheduler.begin_barrier("a cut")
        if how == "cancel":
            assert dispatcher.waits.cancel([value], None) == 1
        await until(lambda: value.status is not RemoteValueStatus.NOT_READY)
        await until(lambda: all(server.shutting_out == [(1, 2)] for server in cluster.servers))
        await loop_at_rest()
        assert worker.last.recalls[0] == [1]
        assert not dispatcher.waits.done()
        assert not scheduler.take_barrier("a cut"), "an update of it may still be applied"
        cluster.servers[1].may_shut_out.set()
        await until(scheduler.take_barrier, "a cut")
        scheduler.end_barrier("a cut")
        if how == "timeout":
            with pytest.raises(FunctionTimeoutError):
                dispatcher.waits.done()
        assert dispatcher.waits.done()
        other = cluster.schedule()
        await loop_at_rest()
        assert worker.last.functions == [1], "the worker still runs the first"
        worker.last.tell_value(1, encode(7))
        await until(lambda: worker.last.functions == [1, 2])
        worker.last.tell_value(2, encode(8))
        await until(lambda: other.status is RemoteValueStatus.READY)
        assert value.status is (RemoteValueStatus.FAILED if how == "timeout" else RemoteValueStatus.CANCELLED)

    on_loop(scenario)


def test_what_waits_for_a_function_that_is_ended(fake: Callable[..., FakeCluster]) -> None:
    """It comes back, for any worker that is free; what was cancelled on its way there is not run."""
    cluster = fake()
    (worker,) = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        cluster.dispatcher._scheduler.workers[0].seconds = 1e-6
        values = [cluster.schedule() for _ in range(4)]
        await until(lambda: worker.last.functions == [1, 2, 3, 4])
        assert cluster.dispatcher.waits.cancel(values[:2], None) == 2
        await until(lambda: len(worker.last.recalls) == 2)
        assert worker.last.recalls == [[1, 2], [3, 4]]
        worker.last.tell(Outcome.RETURNED, 2, 3, 4)
        await until(lambda: cluster.state(0) == [])
        await loop_at_rest()
        assert worker.last.functions == [1, 2, 3, 4], "it still runs the first"
        worker.last.tell(Outcome.CANCELLED, 1)
        await until(lambda: worker.last.functions == [1, 2, 3, 4, 3, 4])
        worker.last.tell(Outcome.DONE, 3, 4)
        await until(lambda: values[3].status is RemoteValueStatus.READY)
        assert [value.status.value for value in values] == ["cancelled", "cancelled", "ready", "ready"]

    on_loop(scenario)


def test_what_is_cancelled_while_it_is_prepared(fake: Callable[..., FakeCluster]) -> None:
    """It is not sent, and its worker, which will never tell of it, is free."""
    cluster = fake()
    (worker,) = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        worker.may_upload.clear()
        value = cluster.schedule(size=1)
        await until(lambda: worker.last.uploading)
        assert cluster.dispatcher.waits.cancel([value], None) == 1
        await until(lambda: worker.last.recalls == [[1]])
        worker.may_upload.set()
        await until(lambda: worker.last.functions == [0])
        other = cluster.schedule()
        await until(lambda: worker.last.functions == [0, 2])
        worker.last.tell(Outcome.DONE, 2)
        await until(lambda: other.status is RemoteValueStatus.READY)

    on_loop(scenario)


def test_a_function_that_cannot_be_shut_out_is_a_lost_server(fake: Callable[..., FakeCluster]) -> None:
    """No caller may go on as if none of its updates could arrive any more."""
    cluster = fake(servers=1)
    (worker,) = cluster.workers
    cluster.servers[0].answers = [UnavailableError("ps 0 can't be reached")]

    async def scenario() -> None:
        await cluster.start()
        value = cluster.schedule()
        await until(lambda: worker.last.functions)
        assert cluster.dispatcher.waits.cancel([value], None) == 1

    on_loop(scenario)
    for _ in range(2):
        with pytest.raises(PSUnavailableError, match="ps 0 can't be reached"):
            cluster.dispatcher.waits.join(TIMEOUT)


def test_what_waits_for_a_cancelled_value_is_cancelled(fake: Callable[..., FakeCluster]) -> None:
    """It would wait forever: also what waits for that in turn, and if only what waits is cancelled."""
    cluster = fake()
    (worker,) = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        blocker = cluster.schedule()
        await until(lambda: worker.last.functions)

        def dependent(value: RemoteValue) -> RemoteValue:
            result = RemoteValue("dependent", no_handle)
            call = Call(cluster._function, weakref.ref(result), encode(None), remote={"0": value})
            cluster.dispatcher.submit(Task(call))
            return result

        first = dependent(blocker)
        second = dependent(first)
        third = dependent(second)
        cluster.dispatcher.waits.withdraw([second])
        assert [value.status for value in (first, second, third)] == [
            RemoteValueStatus.NOT_READY,
            RemoteValueStatus.CANCELLED,
            RemoteValueStatus.CANCELLED,
        ]
        assert cluster.dispatcher.waits.cancel([blocker], None) == 2
        assert first.status is RemoteValueStatus.CANCELLED

    on_loop(scenario)


@pytest.mark.parametrize("lost", [True, False])
def test_a_worker_says_that_a_server_is_lost(fake: Callable[..., FakeCluster], lost: bool) -> None:
    """It is not reported before it is known to be true; then it is final, or an error like any other."""
    cluster = fake(servers=2)
    (worker,) = cluster.workers
    said = PSUnavailableError("ps 1 can't be reached")

    async def scenario() -> None:
        await cluster.start()
        value = cluster.schedule()
        await until(lambda: worker.last.functions)
        (function_number,) = worker.last.functions
        worker.last._tell([Outcome(function=function_number, kind=Outcome.FAILED, failure=failure_of(said))])
        await until(lambda: value.status is RemoteValueStatus.FAILED)
        await loop_at_rest()
        assert not cluster.dispatcher.waits.done(), "its error may have to be final"
        if lost:
            cluster.servers[1].verdict = PSUnavailableError("ps 1 is lost")
        for server in cluster.servers:
            server.checked.set()

    on_loop(scenario)
    for call in (cluster.dispatcher.waits.join, cluster.dispatcher.waits.join):
        with pytest.raises(PSUnavailableError, match="is lost" if lost else "can't be reached"):
            call(TIMEOUT)
        if not lost:
            break
    assert lost or cluster.dispatcher.waits.done()


def test_an_unforeseen_error_is_raised_to_all_who_wait(fake: Callable[..., FakeCluster]) -> None:
    """An unforeseen error is raised by those who wait, also if gRPC calls it a cancellation."""
    for failure in (ValueError("a bug"), asyncio.CancelledError()):
        cluster = fake()

        async def fails(failure: BaseException = failure) -> None:
            raise failure

        async def scenario(cluster: FakeCluster = cluster, fails: Any = fails) -> None:
            await cluster.dispatcher._supervised(fails())

        on_loop(scenario)
        with pytest.raises(PsClusterError, match="the coordinator failed"):
            cluster.dispatcher.waits.join(TIMEOUT)


class Interrupted:
    """A loop, or scheduler, that is interrupted at the first call."""

    def __init__(self, real: Any, name: str) -> None:
        self._real, self._name = real, name

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._real, name)

        def interrupted(*_: object) -> None:
            self._name = ""
            raise KeyboardInterrupt

        return interrupted


def test_ctrl_c_in_schedule_loses_no_wake_up(fake: Callable[..., FakeCluster]) -> None:
    """Wherever it strikes, the next function that is scheduled runs."""
    cluster = fake()
    (worker,) = cluster.workers
    dispatcher = cluster.dispatcher

    async def interrupted(attribute: str, name: str) -> None:
        owner = dispatcher if attribute == "_scheduler" else dispatcher.state
        real = getattr(owner, attribute)
        setattr(owner, attribute, Interrupted(real, name))
        with pytest.raises(KeyboardInterrupt):
            cluster.schedule()
        setattr(owner, attribute, real)

    async def scenario() -> None:
        await cluster.start()
        await until(lambda: dispatcher._scheduler.workers[0].idle)
        await interrupted("_scheduler", "add")
        cluster.schedule()
        await until(lambda: worker.last.functions == [1])
        await interrupted("loop", "call_soon_threadsafe")  # the worker is busy: the loop is to be woken
        cluster.schedule()
        worker.last.tell(Outcome.DONE, 1)
        await until(lambda: worker.last.functions == [1, 2])
        worker.last.tell(Outcome.DONE, 2)

    on_loop(scenario)


def test_ctrl_c_while_a_function_is_handed_over(fake: Callable[..., FakeCluster]) -> None:
    """Before it is sent, or after it is sent and before that is recorded: another thread sends it; it counts once."""
    cluster = fake()
    (worker,) = cluster.workers
    dispatcher = cluster.dispatcher

    async def scenario() -> None:
        await cluster.start()
        for function_number, name in enumerate(("offer", "reserve", "give"), 1):
            await until(lambda: dispatcher._scheduler.workers[0].idle)
            scheduler, values = dispatcher._scheduler, list[RemoteValue]()
            dispatcher._outcomes._scheduler = Interrupted(scheduler, name)  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                values.append(cluster.schedule())
            dispatcher._outcomes._scheduler = scheduler
            await until(lambda function_number: function_number in cluster.state(0), function_number)
            places = [position for position, _ in worker.last.sent]
            assert places == sorted(set(places)), "no place is given twice"
            worker.last.tell(
                Outcome.DONE, *[function for function in worker.last.functions if function == function_number]
            )
            await until(lambda: dispatcher.waits.done())
        assert worker.last.functions == [1, 2, 3, 3]

    on_loop(scenario)


def test_what_is_scheduled_after_an_error_is_not_asked_back(fake: Callable[..., FakeCluster]) -> None:
    """The user has seen the error, and goes on, before the loop has heard of it."""
    cluster = fake()
    (worker,) = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        cluster.schedule()
        await until(lambda: worker.last.functions == [1] and cluster.dispatcher._scheduler.workers[0].idle)
        failure = Outcome(function=1, kind=Outcome.FAILED)
        worker.last._take(worker.last, [failure])
        with pytest.raises(FunctionError):
            cluster.dispatcher.waits.done()
        cluster.schedule()
        assert worker.last.functions == [1, 2]
        await loop_at_rest()
        assert worker.last.recalls == []
        worker.last.tell(Outcome.DONE, 2)

    on_loop(scenario)


def test_a_function_whose_schedule_was_interrupted_never_runs() -> None:
    """It was to wait for a value, and was never entered: when the value comes, it stays out."""
    scheduler: Scheduler[str] = Scheduler(1, 1)
    task = Task("never entered", 1)
    scheduler.unblock(task)
    assert scheduler.idle


def test_schedule_and_join_do_not_enter_the_condition(fake: Callable[..., FakeCluster]) -> None:
    """A condition's own `with` is Python code, in which Ctrl-C can leave the lock behind."""
    cluster = fake()

    class NotEntered(Condition):
        """One that may be waited for, not entered."""

        def __enter__(self) -> bool:
            raise AssertionError("entered on a user's thread")

    dispatcher, state = cluster.dispatcher, cluster.dispatcher.state
    real = state.changed
    state.changed = NotEntered(state.lock)
    try:
        assert dispatcher.waits.done()
        dispatcher.waits.join(0.0)
        cluster.schedule()
    finally:
        state.changed = real


def test_a_refused_coordinator_does_not_end_anybodys_job(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that the first coordinator has not taken yet would believe the second one that the job is over."""
    told: list[int] = []
    real = lifecycle.end_job

    async def end_job(peer: PeerAddress, job: int, *more: Any) -> None:
        told.append(job)
        await real(peer, job, *more)

    monkeypatch.setattr(dispatch, "end_job", end_job)
    with ParameterServerStrategy(cluster) as first:
        with pytest.raises(BusyError):
            ParameterServerStrategy(cluster)
        assert told == []
    assert set(told) == {first.job}


def test_a_strategy_without_references_is_still_closed(cluster: LocalCluster) -> None:
    """Its roles are told at exit that the job is over, though its script has long forgotten it; closed, it goes."""
    held = weakref.ref(ParameterServerStrategy(cluster).context)
    gc.collect()
    (job,) = (open_job for open_job in open_jobs() if open_job is held())
    job.close("the test has ended")
    del job
    gc.collect()
    assert held() is None


def test_a_result_of_another_coordinator_is_refused(coordinator: ClusterCoordinator) -> None:
    """It would wake the wrong queue: what waits for it would run on the other cluster."""
    with pytest.raises(MisuseError, match="another coordinator's"):
        coordinator.schedule(nothing, args=(RemoteValue("elsewhere", no_handle),))


def test_a_worker_that_builds_a_dataset_delays_no_other(fake: Callable[..., FakeCluster]) -> None:
    """It has nothing to run, but it can't take anything either: who can is woken."""
    cluster = fake(2)
    quick, slow = cluster.workers

    async def scenario() -> None:
        await cluster.start()
        await loop_at_rest()
        slow.may_upload.clear()
        cluster.dispatcher.definitions.add_resource(ResourceRecipe(worker_pb2.Resource(id=1), capture(nothing)))
        await until(lambda: slow.last.uploading and len(quick.last.uploads) == 2)
        for function_number in range(1, 6):
            cluster.schedule()
            await until(lambda: function_number in quick.last.functions)  # noqa: B023  (called here)
            quick.last.tell(Outcome.DONE, function_number)
            await until(lambda: not cluster.state(0))
            await loop_at_rest()  # its own outcome has woken it, and it sleeps again
        slow.may_upload.set()

    on_loop(scenario)


def test_a_worker_that_found_nothing_to_steal_looks_again(
    fake: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another one's recall was under way, of which nothing is left for it."""
    monkeypatch.setattr(dispatch_state, "STEAL_SECONDS", 0.001)
    answered = asyncio.Event()
    recall = FakeConnection.recall

    async def slowly(self: FakeConnection, *arguments: Any, **more: Any) -> None:
        await recall(self, *arguments, **more)
        await answered.wait()

    monkeypatch.setattr(FakeConnection, "recall", slowly)
    cluster, checked = fake(3), list[int]()
    steal = cluster.dispatcher.state.steal
    monkeypatch.setattr(
        cluster.dispatcher.state,
        "steal",
        lambda index: (checked.append(index), steal(index)),  # type: ignore[func-returns-value]
    )

    async def scenario() -> None:
        await cluster.start()
        for _ in range(3):  # each has one; no speed is known
            cluster.schedule()
        await until(lambda: all(cluster.state(index) for index in range(3)))
        (first,) = cluster.state(0)
        cluster.workers[0].last.tell(Outcome.DONE, first, seconds=1e-6)  # from now on it could have many
        await until(lambda: not cluster.state(0))
        for _ in range(8):
            cluster.schedule()
        await until(lambda: len(cluster.state(0)) == 8)
        holder = cluster.workers[0].last
        cluster.workers[1].last.tell(Outcome.DONE, *cluster.state(1), seconds=5.0)
        await until(lambda: holder.recalls)
        checked.clear()
        cluster.workers[2].last.tell(Outcome.DONE, *cluster.state(2), seconds=5.0)
        await until(lambda: 2 in checked)
        await loop_at_rest()
        answers = 0
        while not all(cluster.state(index) for index in range(3)):
            if answers < len(holder.recalls):  # of each only one comes back: the others run by now
                answers += 1
                holder.tell(Outcome.RETURNED, cluster.state(0)[-1])
                answered.set()
            await asyncio.sleep(0)

    on_loop(scenario)


def test_a_worker_joins_and_leaves(fake: Callable[..., FakeCluster]) -> None:
    """One that joins gets what waits; one that leaves is forgotten once its functions are elsewhere, and may return."""
    cluster = fake(0)
    left: list[PeerAddress] = []

    async def scenario() -> None:
        await cluster.start()
        cluster.dispatcher.state.on_worker_left = left.append
        cluster.schedule()
        worker = cluster.join(5, "here:1", 1)
        await until(lambda: worker.connections and worker.last.functions == [1])
        other = cluster.join(2, "here:2", 2)
        await until(lambda: cluster.dispatcher.state.workers_up == 2)
        assert (cluster.dispatcher.places([5, 2]), cluster.dispatcher.is_there(5)) == ([0, 1], True)
        worker.last.leaves.set()
        await until(lambda: worker.last.steps_ended)
        assert left == []
        worker.last.end()
        await until(lambda: left == [worker.peer])
        await until(lambda: other.last.functions == [1])
        assert cluster.dispatcher.status.describe().endswith("1 of 1 workers up")
        again = cluster.join(5, "there:1", 3)
        await until(lambda: again.connections and cluster.dispatcher.state.workers_up == 2)
        assert cluster.dispatcher.places([5]) == [0], "it is the same task"
        assert len(worker.connections) == 1

    on_loop(scenario)


def test_a_worker_returns_elsewhere(fake: Callable[..., FakeCluster]) -> None:
    """A process that registers in the place of another one is dialled there; what the other one had runs again."""
    cluster = fake(0)

    async def scenario() -> None:
        await cluster.start()
        first = cluster.join(0, "here:1", 1)
        cluster.schedule()
        await until(lambda: first.connections and first.last.functions == [1])
        second = cluster.join(0, "there:1", 2)
        await until(lambda: second.connections and second.last.functions == [1])
        assert "another process has registered" in cluster.dispatcher.state.workers[0].why
        second.boot_id, count = 3, len(second.connections)
        second.last.end(UnavailableError("gone"))
        await until(lambda: len(second.connections) > count)
        await until(lambda: "another process answers there" in cluster.dispatcher.state.workers[0].why)
        assert not cluster.dispatcher.state.workers_up

    on_loop(scenario)


@pytest.mark.parametrize("how", ["forgotten", "retired"])
def test_a_worker_stays_away(fake: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """One that has joined is forgotten after a while, and any that is retired; others are expected for ever."""
    cluster = fake(1)
    left: list[PeerAddress] = []

    async def scenario() -> None:
        await cluster.start()
        cluster.dispatcher.state.on_worker_left = left.append
        (listed,) = cluster.workers
        joined = cluster.join(1, "here:1", 1)
        await until(lambda: cluster.dispatcher.state.workers_up == 2)
        for worker in (listed, joined):
            worker.is_there = False
            worker.last.end(UnavailableError("gone"))
        await until(lambda: len(listed.connections) > 1 and len(joined.connections) > 1)
        assert left == [], "they are expected"
        assert not cluster.dispatcher.is_there(0), "another process may take its place"
        if how == "forgotten":
            monkeypatch.setattr(dispatch_state, "FORGET_SECONDS", 0.0)
            await until(lambda: left == [joined.peer])
            count = len(listed.connections)
            await until(lambda: len(listed.connections) > count)
        else:
            cluster.dispatcher.retire(0)
            await until(lambda: left == [listed.peer])

    on_loop(scenario)
