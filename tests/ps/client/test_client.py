"""The parameter servers' client when things go wrong in the middle: interrupts, long transfers, late copies."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import numpy as np
import pytest
from tests.conftest import attached
from tests.fakes import FakeCall
from tests.ps.storage.support import beside, declare
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import FixedShardsPartitioner, LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.errors import PSUnavailableError, ShardMovedError, StaleError, UnavailableError
from pscluster.core.ids import make_identity
from pscluster.core.limits import MAX_COUNT
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.frames import pack
from pscluster.core.transport.grpc_streams import GrpcStream
from pscluster.core.transport.watchdog import Liveness
from pscluster.ps.client import exchanges
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.connections import Server, Session
from pscluster.ps.client.exchanges import Exchanges
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import node_pb2, ps_pb2

JOB = 7
RETRY_SECONDS = 10.0


class Clock:
    """Replaces the module `time`: stands still until it is advanced."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """The time."""
        return self.now


class FakeServer:
    """The client's `Server`, whose process is up or down as the test says."""

    def __init__(self) -> None:
        self.peer = PeerAddress("ps", 0, "127.0.0.1:1")
        self.lost: PSUnavailableError | None = None
        self.asked = 0
        self.hello: Callable[[], None] = lambda: None

    def check(self) -> None:
        """It is never given up by the coordinator."""

    def give_up(self, error: PSUnavailableError) -> None:
        """Record the error with which it is given up."""
        self.lost = error

    def check_store_id(self, timeout: float = 0.0) -> None:
        """Answer as the test says."""
        self.asked += 1
        self.hello()

    def drop_sessions(self) -> None:
        """There are none."""


@pytest.fixture
def client() -> Iterator[PsClient]:
    """A client without servers."""
    client = PsClient([], make_identity("chief", 0), job=JOB, incarnation=1, retry_seconds=RETRY_SECONDS)
    yield client
    client.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The client's clock."""
    clock = Clock()
    monkeypatch.setattr(exchanges, "time", clock)
    return clock


def retry(client: PsClient, server: FakeServer, attempt: Callable[[], Any]) -> Any:
    """Run an attempt as the client does."""
    return client.exchanges.retrying(cast(Server, server), attempt)


def test_a_long_transfer_that_breaks_off_is_repeated(client: PsClient, clock: Clock) -> None:
    """The time allowed for a server begins when it fails, not when the long transfer that went well began."""
    server, attempts = FakeServer(), list[float]()

    def attempt() -> str:
        attempts.append(clock.now)
        clock.now += 100 * RETRY_SECONDS
        if len(attempts) == 1:
            raise UnavailableError("broken off")
        return "whole"

    assert retry(client, server, attempt) == "whole"
    assert (len(attempts), server.asked) == (2, 1)


def test_patience_with_a_failing_server_ends(client: PsClient, clock: Clock) -> None:
    """A request that keeps failing is given up `retry_seconds` after the first failure."""
    attempts = []

    def attempt() -> None:
        attempts.append(clock.now)
        clock.now += 0.6 * RETRY_SECONDS
        raise UnavailableError("broken off")

    with pytest.raises(PSUnavailableError, match=r"after 10 s of retries: .*broken off"):
        retry(client, FakeServer(), attempt)
    assert len(attempts) == 3


def test_a_hung_server_costs_one_attempt(client: PsClient, clock: Clock) -> None:
    """An attempt may take a minute to find no server: after the first one the server is probed."""
    server, attempts = FakeServer(), []

    def no_hello() -> None:
        clock.now += 0.4 * RETRY_SECONDS
        raise UnavailableError("no hello")

    server.hello = no_hello

    def attempt() -> None:
        attempts.append(clock.now)
        raise UnavailableError("no answer came in time")

    with pytest.raises(PSUnavailableError):
        retry(client, server, attempt)
    assert (len(attempts), server.asked) == (1, 3)


def test_a_session_that_has_ended_at_once_leaves_no_thread() -> None:
    """The requests end with it, so that grpc's thread that waits for the next one ends too."""
    taken: list[Iterator[bytes]] = []

    class EndedCall:
        """A call that is over before a callback could be added."""

        def add_callback(self, callback: Callable[[], None]) -> bool:
            """Refuse: too late."""
            del callback
            return False

        def cancel(self) -> None:
            """Do nothing: it is over."""

    def call(requests: Iterator[bytes], metadata: object) -> EndedCall:
        """Return the call of a session."""
        del metadata
        taken.append(requests)
        return EndedCall()

    class Channel:
        """A channel with no server at its other end."""

        def stream_stream(self, path: str) -> Callable[..., EndedCall]:
            """Take the requests."""
            del path
            return call

    stream = GrpcStream(cast(grpc.Channel, Channel()), "", ())
    session = Session(stream, Liveness(lambda _seconds: True, RETRY_SECONDS))
    ended: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    threading.Thread(target=lambda: ended.put(list(taken[0])), daemon=True).start()
    assert ended.get(timeout=TIMEOUT) == []
    session.close()


def test_an_interrupt_between_requests_leaves_no_reply_behind(sharding_strategy: ParameterServerStrategy) -> None:
    """After Ctrl-C while requests are sent, no later request gets the answer to an earlier one."""
    with sharding_strategy.scope():
        first = Variable(np.arange(6, dtype=np.float32), name="first")
        second = Variable(np.arange(6, dtype=np.float32) + 100, name="second")
    servers = sharding_strategy.client._servers
    begun: list[Session] = []
    take = servers[0].take_session

    def note() -> Session:
        begun.append(take())
        return begun[-1]

    def interrupt() -> Session:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers[0], "take_session", note)
        patch.setattr(servers[1], "take_session", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.read_value()
    for session in begun:
        assert session not in servers[0]._idle
        with pytest.raises((grpc.RpcError, UnavailableError)):
            session.receive()
    np.testing.assert_array_equal(second.read_value(), np.arange(6) + 100)
    np.testing.assert_array_equal(first.read_value(), np.arange(6))


def test_an_error_is_raised_when_all_servers_are_done(client: PsClient) -> None:
    """A function that has failed sends nothing more: its transfers to other servers have ended by then."""
    failed, ended = threading.Event(), list[str]()

    def fail() -> None:
        failed.set()
        raise ValueError("the first server's")

    def go_on() -> None:
        assert failed.wait(TIMEOUT)
        for _ in range(1000):
            time.sleep(0)
        ended.append("the second server's")

    with pytest.raises(ValueError, match="the first server's"):
        client.exchanges.on_each([fail, go_on])
    assert ended == ["the second server's"]


def test_a_late_copy_of_a_creation_changes_nothing(strategy: ParameterServerStrategy) -> None:
    """A variable that has been trained is not created again."""
    zeros = np.zeros(4, np.float32)
    with strategy.scope():
        variable = Variable(zeros, name="w")
    variable.assign_add(np.ones(4, np.float32))
    strategy.client.create_variable(strategy.client.describe_variable("w"), [zeros])
    np.testing.assert_array_equal(variable.read_value(), np.ones(4))


def test_losses_are_counted_of_any_number_of_shards(
    strategy: ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process has seen of more shards than a request may name is told in several."""
    seen = [ps_pb2.SeenUpdates(variable=4_000_000_000, shard=shard, updates=1) for shard in range(MAX_COUNT + 1)]
    monkeypatch.setattr(strategy.context.client.updater, "seen", lambda: seen)
    assert strategy.lost_updates() == {}


def test_threads_that_wait_for_a_frozen_server_end_with_the_job() -> None:
    """Not after `ps_timeout`; and they are told that it is over, not that the server is lost."""
    with LocalCluster(num_ps=2, num_workers=1) as cluster:
        strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
        with strategy.scope():
            variable = Variable(np.zeros((2, SESSION_BYTES // 8)), name="v")
        begun = [threading.Event() for _ in range(3)]

        def forever(work: Callable[[], object], event: threading.Event) -> Callable[[], None]:
            def run() -> None:
                while True:
                    work()
                    event.set()

            return run

        works = (variable.numpy, lambda: variable.assign_add(variable.shape[1]), variable.variables[0].read_value)
        with beside(*map(forever, works, begun)) as raised:
            for event in begun:
                assert event.wait(TIMEOUT)
            cluster.kill("ps", 1, signal.SIGSTOP)
            try:
                strategy.close()
                until(lambda: len(raised) == len(works), "all have ended", lambda: raised)
            finally:
                cluster.kill("ps", 1, signal.SIGCONT)
    assert [type(error) for error in raised] == [StaleError] * len(works), raised
    assert all("its strategy was closed" in str(error) for error in raised), raised


def test_nothing_is_kept_of_a_variable_that_was_deleted(strategy: ParameterServerStrategy) -> None:
    """A job may make and delete variables for weeks."""
    updater, before = strategy.context.client.updater, len(strategy.context.client.updater.seen())
    with strategy.scope():
        variable = Variable(np.zeros(3), name="for a while")
    variable.assign_add(np.ones(3))
    assert len(updater.seen()) == before + 1
    strategy.delete_variable(variable)
    assert len(updater.seen()) == before
    store = Store(0, JOB)
    declare(store, 1, np.zeros(3))
    store.delete("v1")
    assert store._creating == {}


def test_a_server_that_worked_for_another_job_shows_it() -> None:
    """The process and job are the same, but what it held for the job is lost, and so the job's number is another."""
    role = ParameterServerRole(0)

    def attach(job: int, fresh: bool) -> int:
        request = node_pb2.AttachRequest(job=job)
        if fresh:
            role.job_began(request)
        return attached(role, request).store_id

    before = attach(JOB, fresh=True)
    assert attach(JOB, fresh=False) == before
    attach(JOB + 1, fresh=True)
    role.job_ended()
    assert attach(JOB, fresh=True) != before


def test_a_pull_that_is_given_up_holds_nothing() -> None:
    """The snapshot of a shard ends with the call that reads it, however far that got."""
    role = ParameterServerRole(0)
    role.job_began(node_pb2.AttachRequest(job=JOB))
    service = ParameterServerService(role)
    size = 4 << 20
    spec = ps_pb2.VariableSpec(id=1, name="w", dtype="uint8", shape=[size], splits=[ps_pb2.AxisSplit(ends=[size])])
    spec.owners.append(0)
    context = cast(grpc.ServicerContext, FakeCall())
    create = ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB, variable=spec), total_bytes=size, last=True)
    service.push(iter([pack(create, [bytes(size)])]), context)
    (shard,) = role.store.directory.variables[1].shards.values()
    item = ps_pb2.ReadItem(variable=1, shard=0, rows=ps_pb2.Rows(all=True))
    read = ps_pb2.Request(read=ps_pb2.ReadRequest(job=JOB, items=[item]), last=True)
    frames = cast(Any, service.pull(pack(read), context))
    next(frames)
    assert len(shard._snapshots) == 1
    frames.close()
    assert shard._snapshots == []
    assert service.drain.close(0.0), "nothing is under way"


def test_a_server_that_is_removed_while_it_is_asked_is_not_lost() -> None:
    """Its part of the job is over as soon as all workers know; an answer that was on its way then is no loss."""
    peers = [PeerAddress("ps", index, f"127.0.0.1:{index + 1}") for index in range(2)]
    requests = Exchanges(peers, make_identity("worker", 0), ClientMetrics(2), RETRY_SECONDS, RETRY_SECONDS)
    server, lost = requests.servers[1], list[PSUnavailableError]()
    server.store_id, requests.on_lost = 5, lost.append

    def hello(timeout: float) -> node_pb2.HelloReply:
        del timeout
        requests.remove_server()
        return node_pb2.HelloReply()  # it has no job any more

    def attempt() -> None:
        raise UnavailableError("the connection was closed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "hello", hello)
        with pytest.raises(ShardMovedError, match="ps 1 was removed from the job"):
            requests.retrying(server, attempt)
    assert lost == []
    requests.close("the test is over")
