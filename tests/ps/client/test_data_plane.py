"""Which way requests are sent: the data plane if it can be reached, gRPC otherwise; and back again."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
)
from pscluster.core.errors import ConfigurationError
from pscluster.core.role.options import DATA_PORT_VARIABLE, data_port_of
from pscluster.core.transport.base import StreamEndedError
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.grpc_streams import GrpcStream
from pscluster.core.transport.tcp import client as data_client
from pscluster.core.transport.tcp import stream as data_stream
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.connections import Session

LARGE = 3 << 20  # elements: too many for a session


def session_of(client: PsClient, server: int = 0) -> Session:
    """An idle session, or a new one."""
    session = client._servers[server].take_session()
    client._servers[server].give_back(session)
    return session


def is_direct(session: Session) -> bool:
    """Whether it uses the data plane."""
    return isinstance(session.stream, data_stream.DataStream)


def idle_connections(client: PsClient) -> int:
    """The number of idle data-plane connections to server 0 that large requests have left."""
    return len(client._servers[0]._transport._idle)


@pytest.fixture
def large(strategy: ParameterServerStrategy) -> Variable:
    """A variable that is read and updated in frames."""
    with strategy.scope():
        return Variable(np.arange(LARGE, dtype=np.float32), name="large")


def check(variable: Variable) -> None:
    """Check that small and large reads and updates of it work."""
    np.testing.assert_array_equal(variable[5:9], np.arange(5, 9))
    before = variable.numpy()
    variable.assign_add(np.ones(LARGE, np.float32))
    np.testing.assert_array_equal(variable.numpy(), before + 1)
    variable.assign(np.arange(LARGE, dtype=np.float32))
    np.testing.assert_array_equal(variable.gather([LARGE - 1, 0]), [LARGE - 1, 0])


def test_requests_go_over_the_data_plane(strategy: ParameterServerStrategy, large: Variable) -> None:
    check(large)
    assert is_direct(session_of(strategy.client))
    assert idle_connections(strategy.client) >= 1  # used repeatedly


def test_functions_go_over_the_data_plane(cluster: LocalCluster, strategy: ParameterServerStrategy) -> None:
    with ParameterServerStrategy(cluster, take_over=True) as mine:
        coordinator = ClusterCoordinator(mine)
        assert coordinator.schedule(os.getpid).fetch(TIMEOUT) in cluster.pids.values()
        links = coordinator._dispatcher.state.workers
        until(lambda: all(link.connection and link.connection._stream for link in links), "all workers are connected")
        assert {type(link.connection._stream) for link in links if link.connection} == {data_stream.PromptStream}


def test_another_address_of_the_server_stays_on_its_way(strategy: ParameterServerStrategy, large: Variable) -> None:
    """A client that dials a proxy's address, for example, must not bypass the proxy."""
    for server in strategy.client._servers:
        path = Path(server.peer.address.removeprefix("unix:"))
        with contextlib.suppress(FileExistsError):
            os.symlink(path, path.with_name(f"ps-9{server.peer.index}"))
        server.peer = PeerAddress("ps", server.peer.index, f"unix:{path.with_name(f'ps-9{server.peer.index}')}")
        server.hello()
        server.drop_sessions()
    check(large)
    session = session_of(strategy.client)
    assert not is_direct(session)
    assert isinstance(session.stream, GrpcStream)
    assert idle_connections(strategy.client) == 0


def test_a_port_that_is_blocked(
    strategy: ParameterServerStrategy, large: Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(large)
    with monkeypatch.context() as patch:
        patch.setattr(data_client, "_connected", blocked)
        for server in strategy.client._servers:
            server.drop_sessions()
        check(large)
        assert not is_direct(session_of(strategy.client))
        for server in strategy.client._servers:
            server._transport._avoid_until = 0.0  # the minute is over
        check(large)
        assert not is_direct(session_of(strategy.client))
    for server in strategy.client._servers:
        server.hello()  # as after any failure: it could be reached before, and now the server can be, again
    check(large)
    assert is_direct(session_of(strategy.client))


def test_a_port_that_could_never_be_reached(
    strategy: ParameterServerStrategy, large: Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ways to reach the server say nothing about its port."""
    server = strategy.client._servers[0]
    endpoint = server._transport._endpoint
    assert endpoint is not None
    with monkeypatch.context() as patch:
        patch.setattr(data_client, "_connected", blocked)
        server._transport.is_at(("127.0.0.1", 1))
        server._transport.is_at(*endpoint)  # as if it had just begun
        server.drop_sessions()
        check(large)
    for _ in range(2):
        server.hello()
        check(large)
        assert not is_direct(session_of(strategy.client))
    server._transport._avoid_until = 0.0  # the minute is over
    check(large)
    assert is_direct(session_of(strategy.client))


def blocked(*_: object, **__: object) -> None:
    """Replaces the function that dials."""
    raise TimeoutError("timed out")


@pytest.fixture
def job() -> Iterator[tuple[LocalCluster, ParameterServerStrategy]]:
    """A cluster whose server may die."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        yield cluster, strategy


def test_a_server_that_is_started_again(job: tuple[LocalCluster, ParameterServerStrategy]) -> None:
    """Its next process has the same socket, and new sessions."""
    cluster, strategy = job
    with strategy.scope():
        variable = Variable(np.zeros(3, np.float32), name="v")
    variable.assign_add(np.ones(3, np.float32))
    server = strategy.client._servers[0]
    before = server._transport._endpoint
    strategy.client.check_saved(["v"])
    cluster.wait_restarted("ps", 0, cluster.kill("ps", 0), timeout=TIMEOUT)
    variable.assign_add(np.ones(3, np.float32))
    assert is_direct(session_of(strategy.client))
    assert before is not None
    assert server._transport._endpoint is not None
    assert server._transport._endpoint[0] == before[0]
    assert server._transport._endpoint[1] != before[1]


_TAKE = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for port in sys.argv[1:]:
    for share in (False, True):
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
            try:
                thief.bind(("127.0.0.1", int(port)))
                print("taken")
            except OSError as error:
                print(error.errno)
"""


def test_a_thief_of_the_port_of_a_server_that_died() -> None:
    """Over TCP another user gets neither port; a process of this user gets a handshake, and is forgotten."""
    with (
        LocalCluster(1, 1, transport="tcp", restart=False, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            large = Variable(np.arange(LARGE, dtype=np.float32), name="large")
        server = strategy.client._servers[0]
        before = server._transport._endpoint
        assert before
        where = before[0]
        assert isinstance(where, tuple)
        strategy.client.check_saved(["large"])
        cluster.kill("ps", 0)
        if os.geteuid() == 0:
            ports = server.peer.address.rpartition(":")[2], str(where[1])
            took = subprocess.run([sys.executable, "-I", "-S", "-c", _TAKE, *ports], capture_output=True, check=True)
            assert took.stdout.split() == [str(errno.EADDRINUSE).encode()] * 4
        with socket.create_server(where, reuse_port=True) as thief:
            taken = list[bytes]()

            def answer() -> None:
                connection, _ = thief.accept()
                with connection:
                    taken.append(connection.recv(1 << 16))
                    connection.sendall(bytes(64))

            answering = threading.Thread(target=answer)
            answering.start()
            server._transport.is_at(("127.0.0.1", 1))
            server._transport.is_at(*before)  # as if the server's death had not been noticed yet
            assert server._transport.connect("/test", ()) is None
            answering.join(TIMEOUT)
        assert not answering.is_alive(), "no client came"
        assert cluster.token.encode() not in taken[0]
        assert server._transport._forgotten
        cluster.restart("ps", 0, timeout=TIMEOUT)
        check(large)
        assert server._transport._endpoint is not None
        assert server._transport._endpoint[0] == where
        assert is_direct(session_of(strategy.client))


def test_what_was_forgotten_is_asked_for(strategy: ParameterServerStrategy, large: Variable) -> None:
    """If a connection breaks while the server lives, what was known is dropped; the next request asks again."""
    check(large)
    server = strategy.client._servers[0]
    before = server._transport._endpoint
    session = server.take_session()
    server._transport.drop()
    session.stream._connection._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]  # not by `cancel`
    with pytest.raises(StreamEndedError):
        session.stream.receive()
    session.close()
    assert server._transport._forgotten
    server.drop_sessions()
    assert not is_direct(session_of(strategy.client)), "not at once"
    server._transport._avoid_until = 0.0  # a second later
    assert is_direct(session_of(strategy.client))
    assert server._transport._endpoint == before


def test_without_a_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_PORT_VARIABLE, "off")
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            large = Variable(np.arange(LARGE, dtype=np.float32), name="large")
        coordinator = ClusterCoordinator(strategy)
        assert coordinator.schedule(lambda: float(large[3])).fetch(TIMEOUT) == 3.0
        check(large)
        assert not is_direct(session_of(strategy.client))
        (link,) = coordinator._dispatcher.state.workers
        assert link.connection is not None
        assert not isinstance(link.connection._stream, data_stream.DataStream)


def test_an_interrupted_update_over_grpc_leaves_no_call_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C while a server accepts nothing gRPC's threads end, and the next update is accepted."""
    monkeypatch.setenv(DATA_PORT_VARIABLE, "off")
    main, before = threading.main_thread(), set(threading.enumerate())

    def waits_for_an_answer() -> bool:  # gRPC itself leaves a call open if it is interrupted while making it
        frames = traceback.walk_stack(sys._current_frames()[main.ident or 0])
        names = {frame.f_code.co_name for frame, _ in frames}
        return {"push", "wait"} <= names and "start" not in names  # nor of the thread that it starts

    def threads_of_calls() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before and "(_run)" in thread.name]

    def interrupt() -> None:
        until(waits_for_an_answer, "the update is under way")
        os.kill(os.getpid(), signal.SIGINT)

    partitioner = FixedShardsPartitioner(2)
    with LocalCluster(2, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster, partitioner) as strategy:
        with strategy.scope():
            large = Variable(np.zeros((2, LARGE), np.float32), name="large")
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
            interrupter.join(TIMEOUT)
            os.kill(cluster.pids["ps", 0], signal.SIGCONT)
        large.assign(np.full(large.shape, 7, np.float32))
        assert (large.numpy() == 7).all()


@pytest.mark.parametrize("text", ["", "65536", "-1", "one", "0x10"])
def test_ports_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"the data port is .*; give one from 1 to 65535, 0"):
        data_port_of(text)


def test_a_port_for_one_process_does_not_keep_a_local_cluster_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP each server has its own; over Unix sockets there are none."""
    monkeypatch.setenv(DATA_PORT_VARIABLE, "47123")
    for transport, kind in (("tcp", tuple), ("unix", str)):
        with (
            LocalCluster(2, 1, transport=transport, log_level="ERROR") as cluster,
            ParameterServerStrategy(cluster) as strategy,
        ):
            assert all(is_direct(session_of(strategy.client, server)) for server in range(2))
            addresses = {
                endpoint[0] for server in strategy.client._servers if (endpoint := server._transport._endpoint)
            }
            assert len(addresses) == 2
            assert {type(where) for where in addresses} == {kind}
            assert ("127.0.0.1", 47123) not in addresses
