"""Guarantee 1: every update is applied once, whatever dies or is sent twice. All tests end by comparing numbers."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
from tests.faults.proxy import Proxy
from tests.faults.steps import Deadly, die, die_once, first_time, note, wait_for
from tests.faults.support import Job, RawClient, ones, running_job, status
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import (
    ClusterSpec,
    IndexedSlices,
    LocalCluster,
    SimpleClusterResolver,
    Variable,
    experimental_get_current_worker_index,
    optimizers,
)
from pscluster.core.context import FunctionContext, current_function
from pscluster.core.errors import ProtocolError, StaleError
from pscluster.core.ids import fresh_id, make_identity
from pscluster.core.transport import frames as frames_module
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.frames import padding, view
from pscluster.ps.client import exchanges
from pscluster.ps.client import exchanges as client_exchanges
from pscluster.ps.client.client import PsClient
from pscluster.ps.server.requests import creation, reads, update_checks, updates
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.store import Store
from pscluster.v1 import ps_pb2

FUNCTIONS = 700

POINTS = ("before", "first between", "second between", "answered", "after", "result")
"""Where a function's worker dies; "answered": a server has applied an update, and the worker does not learn of it."""


class Counters:
    """Variables that count by every kind of update, each with shards on all servers."""

    def __init__(self, job: Job) -> None:
        with job.strategy.scope():
            self.dense = Variable(np.zeros((7, 3), np.float32), name="dense")
            self.sparse = Variable(np.zeros((9, 2), np.int64), name="sparse")
            self.trained = Variable(np.zeros((5, 4), np.float32), name="trained")
            self.embedded = Variable(np.zeros((6, 2), np.float32), name="embedded")
            self.sgd = optimizers.SGD(learning_rate=1.0)
        self.all = [self.dense, self.sparse, self.trained, self.embedded]
        owners = [shard.device for variable in self.all for shard in variable.variables]
        assert len(owners) == 12
        assert len(set(owners)) == 2

    def check(self, count: int) -> None:
        """Check that every element of every shard has this count, and that the optimizer has made this many steps."""
        for variable in self.all:
            for shard in variable.variables:
                assert set(shard.numpy().reshape(-1).tolist()) == {count}, shard.name
        assert self.sgd.iterations == count


def counting_step(counters: Counters, folder: str, at: Mapping[str, Sequence[int]]) -> Any:
    """A step that adds 1 to all counters, and kills its worker at the named points in the given functions."""
    dense, sparse, trained, embedded = counters.all
    sgd = counters.sgd
    every_row = IndexedSlices(np.ones(sparse.shape, np.int64), np.arange(len(sparse)))
    gradients: list[tuple[Any, Variable]] = [
        (-np.ones(trained.shape, np.float32), trained),
        (IndexedSlices(-np.ones(embedded.shape, np.float32), np.arange(len(embedded))), embedded),
    ]

    def step(index: int) -> Any:
        def point(name: str) -> None:
            if index in at[name]:
                die_once(folder, f"{name}-{index}")

        point("before")
        dense.assign_add(np.ones(dense.shape, np.float32))
        point("first between")
        sparse.scatter_add(every_row)
        point("second between")
        if index in at["answered"] and first_time(folder, f"answered-{index}"):
            with mock.patch.object(exchanges, "unpack", die):
                sgd.apply_gradients(gradients)
        sgd.apply_gradients(gradients)
        point("after")
        return Deadly(folder, index) if index in at["result"] else index

    return step


def test_killed_at_named_points() -> None:
    """700 functions count to exactly 700 on every shard while workers die before, between and after the updates."""
    with running_job(num_ps=2, num_workers=3, shards=3) as job:
        counters = Counters(job)
        chosen = random.Random(1).sample(range(100, FUNCTIONS - 100), 2 * len(POINTS))
        at = {name: chosen[position :: len(POINTS)] for position, name in enumerate(POINTS)}
        step = counting_step(counters, job.folder, at)
        values = [job.coordinator.schedule(step, args=(index,)) for index in range(FUNCTIONS)]
        job.join()
        counters.check(FUNCTIONS)
        for name in POINTS:
            for index in at[name]:
                assert not first_time(job.folder, f"{name}-{index}"), "the point was never reached"
        for index, value in enumerate(job.coordinator.fetch(values)):
            assert np.asarray(value).tolist() == ([index, -1] if index in at["result"] else index)


def test_killed_at_random_moments() -> None:
    """The count is also exact when workers are killed from outside, at moments chosen by a seeded generator."""
    with running_job(num_ps=2, num_workers=3, shards=3, restart=False) as job:
        counters = Counters(job)
        step = counting_step(counters, job.folder, dict.fromkeys(POINTS, ()))
        values = [job.coordinator.schedule(step, args=(index,)) for index in range(FUNCTIONS)]
        generator = random.Random(2)
        for progress in sorted(generator.sample(range(FUNCTIONS - 200), 8)):
            job.until_done(values, progress)
            worker = generator.randrange(3)
            job.kill(worker)
            job.cluster.restart("worker", worker)
        job.join()
        counters.check(FUNCTIONS)
        assert job.coordinator.fetch(values) == list(range(FUNCTIONS))
        for index in range(2):
            until(functools.partial(forgotten, job, index), "the servers have forgotten all keys")


def forgotten(job: Job, index: int) -> bool:
    """Whether a server reports that it no longer remembers any update."""
    return status(job.cluster, "ps", index).detail.startswith("0 updates remembered;")


def test_killed_in_a_large_update() -> None:
    """An update sent in frames is applied whole or not at all, and once, wherever its sender dies."""
    with running_job(num_ps=2, num_workers=2, shards=2) as job:
        with job.strategy.scope():
            large = Variable(np.zeros((2, 1_300_000), np.float32), name="large")  # 5.2 MB on each server
        folder = job.folder

        def step(index: int) -> int:
            def one_frame_only(*arguments: Any) -> Any:
                yield next(frames(*arguments))
                die()

            frames = frames_module.pieces
            if index in (5, 12) and first_time(folder, f"frames-{index}"):
                with mock.patch.object(exchanges, "pieces", one_frame_only):
                    large.assign_add(np.ones(large.shape, np.float32))
            if index in (8, 15) and first_time(folder, f"answered-{index}"):
                with mock.patch.object(exchanges, "unpack", die):
                    large.assign_add(np.ones(large.shape, np.float32))
            large.assign_add(np.ones(large.shape, np.float32))
            return index

        values = [job.coordinator.schedule(step, args=(index,)) for index in range(20)]
        job.join()
        assert job.coordinator.fetch(values) == list(range(20))
        assert holds(large, 20)
        assert not any(first_time(folder, name) for name in ("frames-5", "frames-12", "answered-8", "answered-15"))


# The network


@contextmanager
def job_behind_proxies(role: str, **options: Any) -> Iterator[tuple[Job, list[Proxy]]]:
    """A job whose coordinator reaches the tasks of a role only through proxies."""
    with ExitStack() as stack:
        proxies: list[Proxy] = []

        def through_proxies(cluster: LocalCluster) -> SimpleClusterResolver:
            tasks = {
                job: [cluster.cluster_spec().task_address(job, index) for index in range(count)]
                for job, count in (("ps", 1), ("worker", options.get("num_workers", 1)))
            }
            proxies.extend(stack.enter_context(Proxy(address)) for address in tasks[role])
            tasks[role] = [proxy.address for proxy in proxies]
            return SimpleClusterResolver(ClusterSpec(tasks))

        job = stack.enter_context(running_job(connect_to=through_proxies, transport="tcp", **options))
        yield job, proxies


@contextmanager
def direct(job: Job, variable: Variable) -> Iterator[Variable]:
    """The same variable through separate connections, bypassing the proxy."""
    peer = PeerAddress("ps", 0, job.cluster.cluster_spec().task_address("ps", 0), token=job.cluster.token)
    own = PsClient([peer], make_identity("tool", 0), job=job.strategy.job, incarnation=fresh_id())
    with closing(own):
        own.connect(TIMEOUT)
        yield Variable.of(own.describe_variable(variable.name), own)


def holds(variable: Variable, value: float) -> bool:
    """Whether all elements have that value."""
    return bool(np.all(variable.numpy() == value))


@pytest.mark.parametrize("rows", [4, 400_000], ids=["on a session", "in frames"])
def test_an_answer_that_is_lost(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that received no answer sends its update again; the server, which had applied it, only answers."""
    monkeypatch.setattr(client_exchanges, "SESSION_BYTES", 1 << 20)
    frames = rows * 4 if rows > 4 else 0  # sent once the server has proved itself and announced how much room there is
    with job_behind_proxies("ps") as (job, (proxy,)):
        with job.strategy.scope():
            variable = Variable(np.zeros(rows, np.float32), name="variable")
        variable.assign_add(ones(variable))
        with direct(job, variable) as seen:
            for count in (2, 3):
                proxy.swallow_answers(after=frames)
                adding = threading.Thread(target=variable.assign_add, args=(ones(variable),))
                adding.start()
                until(functools.partial(holds, seen, count), "the server has applied it")
                proxy.cut()
                adding.join(TIMEOUT)
                assert not adding.is_alive()
                assert holds(variable, count)
        job.coordinator.schedule(int, args=(1,))
        job.join()  # the cluster is unharmed


def test_connections_cut_at_any_moment() -> None:
    """Each of 300 updates, small and large, counts once while connections are repeatedly reset."""
    with job_behind_proxies("ps") as (job, (proxy,)):
        with job.strategy.scope():
            small = Variable(np.zeros(4, np.float32), name="small")
            large = Variable(np.zeros(1_300_000, np.float32), name="large")
        over = threading.Event()
        cuts = 0

        def cut() -> None:
            nonlocal cuts
            generator = random.Random(3)
            while not over.is_set():
                before = proxy.forwarded
                goal = before + generator.randrange(20_000_000)
                while proxy.forwarded < goal and not over.wait(0.001):
                    pass
                proxy.cut()
                cuts += 1

        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            for index in range(300):
                small.assign_add(ones(small))
                if index % 10 == 0:
                    large.assign_add(ones(large))
        finally:
            over.set()
            cutting.join()
        assert small.numpy().tolist() == [300] * 4
        assert holds(large, 30)
        assert cuts > 3


def test_a_worker_that_was_given_up_but_lives() -> None:
    """Updates from a worker whose function others have taken over are refused, even if it does not know that yet."""
    with job_behind_proxies("worker", num_workers=2) as (job, proxies):
        with job.strategy.scope():
            total = Variable(np.zeros(4, np.float32), name="total")
        folder = job.folder

        def step() -> int:
            total.assign_add(np.ones(4, np.float32))
            zombie = first_time(folder, "first")
            if zombie:
                note(folder, "held", str(experimental_get_current_worker_index()))
                wait_for(folder, "go")
            try:
                # The zombie ignores the request to stop, as if it had not arrived yet.
                with mock.patch.object(FunctionContext, "check") if zombie else nullcontext():
                    total.assign_add(np.ones(4, np.float32))
            except BaseException as error:
                note(folder, "fate", f"{type(error).__name__}: {error}")
                raise
            return experimental_get_current_worker_index()

        value = job.coordinator.schedule(step)
        index = int(wait_for(folder, "held"))
        pid = job.cluster.pids["worker", index]
        os.kill(pid, signal.SIGSTOP)
        try:
            proxies[index].part()
            job.join()
            assert value.fetch() == 1 - index
            assert total.numpy().tolist() == [2] * 4
            note(folder, "go")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert "given up" in wait_for(folder, "fate")
        assert total.numpy().tolist() == [2] * 4
        proxies[index].join()
        job.until_up(2)


# Handmade requests


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A cluster for the tests that send handmade requests."""
    with running_job(num_workers=1, shards=2) as job:
        yield job


_names = itertools.count()


@pytest.fixture
def variable(job: Job) -> Variable:
    """A variable with two shards on one server."""
    with job.strategy.scope():
        return Variable(np.zeros((6, 20_000), np.float32), name=f"variable_{next(_names)}")


def value_of(variable: Variable) -> float:
    """The value of all its elements."""
    (value,) = set(variable.numpy().reshape(-1).tolist())
    return float(value)


Way = Literal["session", "push"]
ways = pytest.mark.parametrize("way", ["session", "push"])
keyed = pytest.mark.parametrize("key", [{"function": 10**6}, {"sequence": 5}], ids=["of a function", "of a client"])


@ways
@keyed
def test_the_same_request_again(job: Job, variable: Variable, way: Way, key: dict[str, int]) -> None:
    """A repeated request changes nothing and is answered; another update from the same sender counts."""
    with RawClient(job) as raw:
        request = raw.add(variable, 1.0, **key)
        first, again = (getattr(raw, way)(*request) for _ in range(2))
        assert (first.applied, first.repeated_) == (2, 0)
        assert (again.applied, again.repeated_) == (0, 2)
        other: Way = "push" if way == "session" else "session"
        assert getattr(raw, other)(*request).applied == 0
        assert value_of(variable) == 1
        assert getattr(raw, way)(*raw.add(variable, 1.0, nth=2, **key)).applied == 2
        assert value_of(variable) == 2


def test_a_function_is_known_by_its_number_whoever_runs_it(job: Job, variable: Variable) -> None:
    """A second attempt, on another worker, finds what the first one applied."""
    with RawClient(job) as first, RawClient(job) as second:
        assert first.session(*first.add(variable, 1.0, function=10**6 + 1)).applied == 2
        first.close_incarnation(first.incarnation)
        assert second.session(*second.add(variable, 1.0, function=10**6 + 1)).repeated_ == 2
        assert value_of(variable) == 1


@keyed
def test_repetitions_at_the_same_time(job: Job, variable: Variable, key: dict[str, int]) -> None:
    """Of copies that arrive together, on sessions and in frames, one is applied and the others are answered."""
    with RawClient(job) as raw:
        request = raw.add(variable, 1.0, **key)
        replies: list[ps_pb2.UpdateReply] = []
        start = threading.Barrier(8)

        def send(way: str) -> None:
            start.wait(TIMEOUT)
            replies.append(getattr(raw, way)(*request))

        threads = [threading.Thread(target=send, args=(way,)) for way in ("session", "push") * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert sum(reply.applied for reply in replies) == 2
        assert sum(reply.repeated_ for reply in replies) == 14
        assert value_of(variable) == 1


@ways
def test_late_updates_change_nothing(job: Job, variable: Variable, way: Way) -> None:
    """Updates of an ended function, a lost worker, an answered request or another job are refused."""
    ended, sequence = 10**6 + 2, 7
    with RawClient(job) as raw, RawClient(job) as closed, RawClient(job) as foreign:
        raw.finish(ended, ended + 1)
        raw.close_incarnation(closed.incarnation)
        getattr(raw, way)(*raw.add(variable, 1.0, sequence=sequence, settled=sequence))
        foreign_request, payload = foreign.add(variable, 1.0, sequence=1)
        foreign_request.update.job += 1
        late = [
            (raw, raw.add(variable, 1.0, function=ended), "has ended"),
            (closed, closed.add(variable, 1.0, function=ended + 1), "given up"),
            (closed, closed.add(variable, 1.0, sequence=1), "given up"),
            (raw, raw.add(variable, 1.0, sequence=sequence - 1), "answered long ago"),
            (foreign, (foreign_request, payload), "another job"),
        ]
        for sender, request, why in late:
            with pytest.raises(StaleError, match=why):
                getattr(sender, way)(*request)
        with pytest.raises(ProtocolError, match="sequence"):
            getattr(raw, way)(*raw.add(variable, 1.0))
        assert value_of(variable) == 1


def test_a_worker_is_given_up_while_its_update_arrives(job: Job, variable: Variable) -> None:
    """An update whose first frames came before its incarnation was closed is refused once it is complete."""
    with RawClient(job) as raw, RawClient(job) as coordinator:
        request, payload = raw.add(variable, 1.0, function=10**6 + 3)

        def frames() -> Iterator[bytes]:
            for index, frame in enumerate(raw.frames(request, payload, 4)):
                if index == 3:
                    coordinator.close_incarnation(raw.incarnation)
                yield frame

        with pytest.raises(StaleError, match="given up"):
            raw.send_frames(frames())
        assert value_of(variable) == 0


def test_an_update_that_breaks_off_changes_nothing(job: Job, variable: Variable) -> None:
    """If the end of the stream is missing nothing is applied, and the same update can still be sent whole."""
    with RawClient(job) as raw:
        request, payload = raw.add(variable, 1.0, function=10**6 + 4)
        for frames in range(4):
            with pytest.raises(ProtocolError, match="before its last frame"):
                raw.send_frames(itertools.islice(raw.frames(request, payload, 4), frames))
        assert value_of(variable) == 0
        assert raw.push(request, payload).applied == 2
        assert value_of(variable) == 1


def test_a_variable_is_created_once(job: Job, variable: Variable) -> None:
    """A late copy of the request that created a variable does not restore its initial values."""
    variable.assign_add(ones(variable))
    with RawClient(job) as raw:
        create = ps_pb2.Request(create=ps_pb2.CreateRequest(job=raw.job, variable=raw.spec(variable)))
        payload = bytes(variable.nbytes)
        create.total_bytes = len(payload)
        raw.send_frames(raw.frames(create, payload, 2))
    assert value_of(variable) == 1


def test_the_coordinator_tells_of_functions_that_ended(job: Job, variable: Variable) -> None:
    """Soon after a function has ended no more updates are accepted for it, from any worker."""

    def own_id() -> int:
        context = current_function()
        assert context is not None
        return context.function

    function = job.coordinator.schedule(own_id).fetch(TIMEOUT)
    assert function > 0
    nth = itertools.count(1)
    with RawClient(job) as raw:

        def refused() -> bool:
            try:
                raw.session(*raw.add(variable, 0.0, function=function, nth=next(nth)))
            except StaleError:
                return True
            return False

        until(refused, "the function has ended for the server, too")


# The store


def new_store() -> Store:
    """A server's state with one variable of one shard, a row of 8."""
    held = Store(0, 1)
    spec = ps_pb2.VariableSpec(
        id=1, name="v", dtype="float32", shape=[1, 8], owners=[0], splits=[{"ends": [1]}, {"ends": [8]}]
    )
    creation.create(held, ps_pb2.CreateRequest(job=1, variable=spec), Payload([memoryview(bytes(32))]))
    return held


class Slow(Payload):
    """A payload on which the server blocks."""

    def __init__(self) -> None:
        super().__init__([view(np.ones(8, np.float32))])
        self.reached, self.go_on = threading.Event(), threading.Event()

    def blocks(self, start: int, size: int, itemsize: int) -> Iterator[tuple[int, memoryview]]:
        """Return the original's blocks, later."""
        self.reached.set()
        assert self.go_on.wait(TIMEOUT)
        return super().blocks(start, size, itemsize)


def add_request(function: int, incarnation: int = 5) -> ps_pb2.UpdateRequest:
    """A request that adds to the store's variable."""
    item = ps_pb2.UpdateItem(variable=1, kind=ps_pb2.ADD, nth=1, rows=ps_pb2.Rows(all=True), value_bytes=32)
    return ps_pb2.UpdateRequest(job=1, incarnation=incarnation, function=function, items=[item])


def held_values(held: Store) -> list[float]:
    """The value of the store's variable."""
    item = ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(all=True))
    whole = b"".join(reads.read(held, ps_pb2.ReadRequest(job=1, items=[item]), Payload([])))
    return [float(value) for value in np.frombuffer(whole, np.float32)]


def test_a_repetition_while_the_first_is_in_progress() -> None:
    """A repetition waits for the first and finds it done; closing the incarnation waits for both."""
    held = new_store()
    request = add_request(3)
    placed = update_checks.check_update(held, request, 32)
    slow, replies, closed = Slow(), list[ps_pb2.UpdateReply](), threading.Event()

    def close() -> None:
        held.close_incarnation(5)
        closed.set()

    first = threading.Thread(target=lambda: replies.append(updates.apply(held, request, placed, slow)))
    first.start()
    assert slow.reached.wait(TIMEOUT)
    quick = Payload([view(np.ones(8, np.float32))])
    again = threading.Thread(target=lambda: replies.append(updates.apply(held, request, placed, quick)))
    again.start()
    assert replies == []
    slow.go_on.set()
    for thread in (first, again):
        thread.join(TIMEOUT)
    assert sorted((reply.applied, reply.repeated_) for reply in replies) == [(0, 1), (1, 0)]
    assert held_values(held) == [1] * 8
    slow = Slow()
    first = threading.Thread(target=lambda: updates.apply(held, add_request(4), placed, slow))
    first.start()
    assert slow.reached.wait(TIMEOUT)
    closing = threading.Thread(target=close)
    closing.start()
    assert not closed.is_set(), "an update of the incarnation is being applied"
    slow.go_on.set()
    closing.join(TIMEOUT)
    assert held_values(held) == [2] * 8, "when the incarnation is closed, what was in progress has ended"
    with pytest.raises(StaleError):
        update_checks.check_update(held, add_request(5), 32)
    first.join(TIMEOUT)


def test_a_function_is_shut_out_while_its_update_is_in_progress() -> None:
    """Ending a running function waits for the update being applied; none of its updates is applied afterwards."""
    held = new_store()
    placed = update_checks.check_update(held, add_request(3), 32)
    slow, ended = Slow(), threading.Event()

    def shut_out() -> None:
        held.finish_functions([(3, 4)], shut_out=True)
        ended.set()

    update = threading.Thread(target=lambda: updates.apply(held, add_request(3), placed, slow))
    update.start()
    assert slow.reached.wait(TIMEOUT)
    late = threading.Thread(target=shut_out)
    late.start()

    def is_refused() -> bool:
        with suppress(StaleError):
            update_checks.check_update(held, add_request(3), 32)
            return False
        return True

    until(is_refused, "it is to be refused")
    assert not ended.is_set(), "an update of the function is being applied"
    slow.go_on.set()
    for thread in (update, late):
        thread.join(TIMEOUT)
    assert held_values(held) == [1] * 8
    with pytest.raises(StaleError, match="has ended"):
        updates.apply(held, add_request(3), placed, Payload([view(np.ones(8, np.float32))]))


def test_a_server_remembers_what_is_in_flight_and_no_more() -> None:
    """A server's memory of updates does not grow over 5,000 functions."""
    held, most = new_store(), 0
    values = Payload([view(np.ones(8, np.float32))])
    for function in range(1, 5_001):
        request = add_request(function, incarnation=5 + function % 3)
        updates.apply(held, request, update_checks.check_update(held, request, 32 + padding(32)), values)
        most = max(most, held.remembered)
        if function % 500 == 0:
            held.finish_functions([(function - 499, function + 1)])
    assert most == 500
    assert held.remembered == 0
    assert held_values(held) == [5_000] * 8
    with pytest.raises(StaleError, match="has ended"):
        update_checks.check_update(held, add_request(777), 32)
