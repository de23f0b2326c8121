"""Which way requests go: the data plane where it can be reached, gRPC elsewhere; and back again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator

import numpy as np
import pytest
from tests.conftest import PATIENCE
from tests.faults.support import until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
)
from pscluster.core.channels import PeerAddress
from pscluster.core.data_plane import client as data_client
from pscluster.core.errors import ConfigurationError
from pscluster.core.serving import DATA_PORT_VARIABLE, data_port_of
from pscluster.core.streams import DirectStream
from pscluster.ps.client import PsClient
from pscluster.ps.connections import Session

LARGE = 3 << 20  # elements: more than goes over a session


def session_of(client: PsClient, server: int = 0) -> Session:
    """One that is idle, or new."""
    session = client._servers[server].take_session()
    client._servers[server].give_back(session)
    return session


def idle_connections(client: PsClient) -> int:
    """Of the data plane, to server 0, that large requests have left."""
    return len(client._servers[0]._data._idle)


@pytest.fixture
def large(strategy: ParameterServerStrategy) -> Variable:
    """A variable that is read and updated in frames."""
    with strategy.scope():
        return Variable(np.arange(LARGE, dtype=np.float32), name="large")


def check(variable: Variable) -> None:
    """Reads and updates of it do what they should, small ones and large ones."""
    np.testing.assert_array_equal(variable[5:9], np.arange(5, 9))
    before = variable.numpy()
    variable.assign_add(np.ones(LARGE, np.float32))
    np.testing.assert_array_equal(variable.numpy(), before + 1)
    variable.assign(np.arange(LARGE, dtype=np.float32))
    np.testing.assert_array_equal(variable.gather([LARGE - 1, 0]), [LARGE - 1, 0])


def test_requests_go_over_the_data_plane(strategy: ParameterServerStrategy, large: Variable) -> None:
    check(large)
    assert session_of(strategy.client).direct
    assert idle_connections(strategy.client) >= 1  # used, and used again


def test_functions_go_over_the_data_plane(cluster: LocalCluster, strategy: ParameterServerStrategy) -> None:
    with ParameterServerStrategy(cluster, take_over=True) as mine:
        coordinator = ClusterCoordinator(mine)
        assert coordinator.schedule(os.getpid).fetch(PATIENCE) in cluster.pids.values()
        links = coordinator._dispatcher._links
        until(lambda: all(link.connection and link.connection._stream for link in links), "all workers are connected")
        assert {type(link.connection._stream) for link in links if link.connection} == {data_client.PromptStream}


def test_another_address_of_the_server_stays_on_its_way(strategy: ParameterServerStrategy, large: Variable) -> None:
    """As of a proxy: what is dialled there must not go past it."""
    for server in strategy.client._servers:
        server.peer = PeerAddress("ps", server.peer.index, server.peer.address.replace("127.0.0.1", "localhost"))
        server.hello()
        server.drop_sessions()
    check(large)
    session = session_of(strategy.client)
    assert not session.direct
    assert isinstance(session._stream, DirectStream)
    assert idle_connections(strategy.client) == 0


def test_a_port_that_is_blocked(
    strategy: ParameterServerStrategy, large: Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(large)
    with monkeypatch.context() as patch:
        patch.setattr("socket.create_connection", blocked)
        for server in strategy.client._servers:
            server.drop_sessions()
        check(large)
        assert not session_of(strategy.client).direct
        for server in strategy.client._servers:
            server._data._avoid_until = 0.0  # the minute is over
        check(large)
        assert not session_of(strategy.client).direct
    for server in strategy.client._servers:
        server.hello()  # as after any failure: it could be reached before, and now the server can be, again
    check(large)
    assert session_of(strategy.client).direct


def test_a_port_that_could_never_be_reached(
    strategy: ParameterServerStrategy, large: Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the server otherwise says nothing about it."""
    server = strategy.client._servers[0]
    host, port = server._data._where or ("", 0)
    with monkeypatch.context() as patch:
        patch.setattr("socket.create_connection", blocked)
        server._data.is_at(host, 1)
        server._data.is_at(host, port)  # as if it had just begun
        server.drop_sessions()
        check(large)
    for _ in range(2):
        server.hello()
        check(large)
        assert not session_of(strategy.client).direct
    server._data._avoid_until = 0.0  # the minute is over
    check(large)
    assert session_of(strategy.client).direct


def blocked(*_: object, **__: object) -> None:
    """In the place of what dials."""
    raise TimeoutError("timed out")


@pytest.fixture
def job() -> Iterator[tuple[LocalCluster, ParameterServerStrategy]]:
    """A cluster whose server may die."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        yield cluster, strategy


def test_a_server_that_is_started_again(job: tuple[LocalCluster, ParameterServerStrategy]) -> None:
    """Its next process has another port."""
    cluster, strategy = job
    with strategy.scope():
        variable = Variable(np.zeros(3, np.float32), name="v")
    variable.assign_add(np.ones(3, np.float32))
    server = strategy.client._servers[0]
    before = server._data._where
    strategy.client.check_saved(["v"])
    cluster.wait_restarted("ps", 0, cluster.kill("ps", 0), timeout=PATIENCE)
    variable.assign_add(np.ones(3, np.float32))
    assert session_of(strategy.client).direct
    assert server._data._where != before


def test_another_program_has_the_port_of_a_server_that_died(job: tuple[LocalCluster, ParameterServerStrategy]) -> None:
    """Its answer is none of the server's, which says where it is now."""
    cluster, strategy = job
    with strategy.scope():
        large = Variable(np.arange(LARGE, dtype=np.float32), name="large")
    server = strategy.client._servers[0]
    before = server._data._where
    assert before
    strategy.client.check_saved(["large"])
    cluster.wait_restarted("ps", 0, cluster.kill("ps", 0), timeout=PATIENCE)
    with socket.create_server(before) as stranger:

        def greet() -> None:
            greeted, _ = stranger.accept()
            with greeted:
                greeted.sendall(bytes(64))  # before it is asked, as servers of HTTP/2 do
                with contextlib.suppress(ConnectionResetError):
                    while greeted.recv(1 << 16):
                        pass

        greeter = threading.Thread(target=greet)
        greeter.start()
        server._data.is_at("127.0.0.1", 1)
        server._data.is_at(*before)  # as if nobody had asked the server since, nor had a connection to it
        check(large)
        greeter.join(PATIENCE)
    assert not greeter.is_alive(), "nobody came"
    assert server._data._where != before
    assert session_of(strategy.client).direct


def test_without_a_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_PORT_VARIABLE, "off")
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            large = Variable(np.arange(LARGE, dtype=np.float32), name="large")
        coordinator = ClusterCoordinator(strategy)
        assert coordinator.schedule(lambda: float(large[3])).fetch(PATIENCE) == 3.0
        check(large)
        assert not session_of(strategy.client).direct
        (link,) = coordinator._dispatcher._links
        assert link.connection is not None
        assert not isinstance(link.connection._stream, data_client.DataStream)


def test_an_interrupted_update_over_grpc_leaves_no_call_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a server takes nothing: gRPC's threads end, and the next update is taken."""
    monkeypatch.setenv(DATA_PORT_VARIABLE, "off")
    main, before = threading.main_thread(), set(threading.enumerate())

    def waits_for_an_answer() -> bool:  # gRPC itself leaves a call behind that it is interrupted in making
        frames = traceback.walk_stack(sys._current_frames()[main.ident or 0])
        return {"push", "wait"} <= {frame.f_code.co_name for frame, _ in frames}

    def threads_of_calls() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before and "(_run)" in thread.name]

    def interrupt() -> None:
        until(waits_for_an_answer, "the update is under way")
        os.kill(os.getpid(), signal.SIGINT)

    partitioner = FixedShardsPartitioner(2)
    with LocalCluster(2, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster, partitioner) as strategy:
        with strategy.scope():
            large = Variable(np.zeros((2, 4 * LARGE), np.float32), name="large")
        until(lambda: not threads_of_calls(), "the cluster is made")
        interrupter = threading.Thread(target=interrupt)
        os.kill(cluster.pids["ps", 0], signal.SIGSTOP)
        try:
            interrupter.start()
            with pytest.raises(KeyboardInterrupt) as kept:  # its traceback, as a shell keeps it
                large.assign_add(np.ones(large.shape, np.float32))
            until(lambda: not threads_of_calls(), "gRPC's threads have ended", lambda: str(threads_of_calls()))
            assert kept.tb
        finally:
            interrupter.join(PATIENCE)
            os.kill(cluster.pids["ps", 0], signal.SIGCONT)
        large.assign(np.full(large.shape, 7, np.float32))
        assert set(np.unique(large.numpy())) == {7}


@pytest.mark.parametrize("text", ["", "65536", "-1", "one", "0x10"])
def test_ports_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"the data port is .*; give one from 1 to 65535, 0"):
        data_port_of(text)


def test_a_port_for_one_process_does_not_keep_a_local_cluster_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_PORT_VARIABLE, "47123")
    with LocalCluster(2, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        assert all(session_of(strategy.client, server).direct for server in range(2))
        ports = {server._data._where for server in strategy.client._servers}
        assert len(ports) == 2
        assert ("127.0.0.1", 47123) not in ports
