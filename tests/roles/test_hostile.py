"""Unauthenticated callers at the ports of a working cluster lose their connections, and cost others nothing."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.roles.hostile import PREFACE, bombs, crowd, frame, head, opened, rubbish, trickle
from tests.roles.processes import PSCLUSTER, Roles, make_cluster
from tests.roles.wire import SERVICES
from tests.waiting import until

from pscluster.core import limits
from pscluster.core.ids import make_identity
from pscluster.core.limits import MAX_UNAUTHENTICATED, raise_descriptor_limit
from pscluster.core.security.authenticator import CALL_METADATA
from pscluster.core.security.channel import AuthenticatedChannel
from pscluster.core.security.connection_reaper import _CHECKS_TO_FORGET, ConnectionReaper
from pscluster.core.security.handshake import Secret
from pscluster.core.security.refusals import BURST
from pscluster.core.transport.channels import NODE_SERVICE, open_channel
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.peer_names import grpc_name
from pscluster.v1 import node_pb2

TOKEN = "correct-horse-battery-staple"
CONNECTIONS = 2000
_STATUS = "/pscluster.v1.Node/Status"
_UNPACKED = 48 << 20
GROWTH = 96 << 20  # far less than what is sent in all

# Runs functions in rounds, each of which must run exactly once, until it is told to end. Between rounds it leaves the
# processors to those who are to be refused.
WORK = """
import pathlib, sys, time
import numpy as np
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable

strategy = ParameterServerStrategy(TFConfigClusterResolver())
with strategy.scope():
    w = Variable(np.zeros(4, np.float32), name="w")
coordinator = ClusterCoordinator(strategy)

def step():
    w.assign_add(np.ones(4, np.float32))

rounds = 0
while not pathlib.Path(sys.argv[1]).exists():
    for _ in range(20):
        coordinator.schedule(step)
    coordinator.join()
    rounds += 1
    assert w.numpy().tolist() == [20.0 * rounds] * 4, (rounds, w.numpy())
    print("round", rounds, flush=True)
    time.sleep(0.02)
print("all rounds are right", flush=True)
"""


class Working:
    """A working cluster."""

    def __init__(self, roles: Roles, cluster: dict[str, list[str]], gate: Path) -> None:
        self.gate = gate
        self.processes = {"ps": roles.ps(), "worker": roles.worker(), "chief": roles.coordinator(WORK, str(gate))}
        self.addresses = {job: cluster[job][0] for job in self.processes}
        self.goes_on(2)

    def rounds(self) -> int:
        """The number of rounds done so far."""
        return len(re.findall(r"^round \d+$", self.processes["chief"].output, re.MULTILINE))

    def goes_on(self, rounds: int = 3) -> None:
        """Wait for this many more rounds."""
        wanted = self.rounds() + rounds
        until(lambda: self.rounds() >= wanted or not self._all_run(), "the job goes on")
        assert self._all_run(), self.processes["chief"].output

    def _all_run(self) -> bool:
        return all(process.is_running for process in self.processes.values())

    def descriptors(self) -> dict[str, int]:
        """The number of open descriptors, by role."""
        return {job: len(os.listdir(f"/proc/{process.pid}/fd")) for job, process in self.processes.items()}

    def resident(self) -> dict[str, int]:
        """Bytes of memory, by role."""
        return {job: process.resident_bytes() for job, process in self.processes.items()}

    def data_addresses(self) -> dict[str, str]:
        """The addresses of the data planes, by role."""
        addresses = {}
        for job in ("ps", "worker"):
            with open_channel(self.addresses[job], None, TOKEN) as channel:
                request = node_pb2.HelloRequest(identity=make_identity("tool", 0))
                hello = Stub(channel, NODE_SERVICE).hello(request, timeout=60)
            assert hello.data_port
            addresses[job] = f"127.0.0.1:{hello.data_port}"
        return addresses

    def answers(self, job: str) -> bool:
        """Whether the role accepts a new connection from an authorized caller."""
        with open_channel(self.addresses[job], None, TOKEN) as channel:
            try:
                Stub(channel, NODE_SERVICE).status(node_pb2.StatusRequest(), timeout=5)
            except grpc.RpcError:
                return False
            return True


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Working]:
    """A server, a worker and a coordinator that work throughout, and end with the right numbers."""
    folder = tmp_path_factory.mktemp("hostile")
    cluster = make_cluster()
    with Roles(cluster, folder, {"PSCLUSTER_TOKEN": TOKEN}) as roles:
        working = Working(roles, cluster, folder / "gate")
        yield working
        working.goes_on()
        working.gate.touch()
        working.processes["chief"].wait_for("all rounds are right")
        assert working.processes["chief"].wait() == 0
        for process in working.processes.values():
            assert "Traceback" not in process.output


def test_rubbish_and_bombs(working: Working) -> None:
    """Data without a token is not read: no role grows, and the job continues with the right results."""
    before, generator = working.resident(), random.Random(7)
    for job, address in working.addresses.items():
        rubbish(address, generator)
        bombs(address, SERVICES[job][:-1])
        working.goes_on(1)
    for address in working.data_addresses().values():
        rubbish(address, generator)
        working.goes_on(1)
    grown = {job: size - before[job] for job, size in working.resident().items()}
    assert all(size < GROWTH for size in grown.values()), grown


def test_compressed_messages_are_not_unpacked(working: Working) -> None:
    """Compressed messages are refused, even from callers with the token, and no role grows."""
    before = working.resident()
    zeros = bytes(_UNPACKED)
    for address in working.addresses.values():
        with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as plain:
            header, _ = AuthenticatedChannel(plain, Secret.of(TOKEN), address).session().next_call(_STATUS)
            call: Any = plain.unary_unary(_STATUS)
            with pytest.raises(grpc.RpcError) as refused:
                call(zeros, timeout=60, metadata=((CALL_METADATA, header),), compression=grpc.Compression.Gzip)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED, refused.value
    grown = {job: size - before[job] for job, size in working.resident().items()}
    assert all(size < _UNPACKED // 2 for size in grown.values()), grown


def test_who_is_refused_again_and_again_is_closed(working: Working) -> None:
    """Calls without the token in a loop finally get no answer, and their connections are closed; authorized callers at
    the same address are served meanwhile, and the log has one line, not one for each call."""
    address, data = working.addresses["ps"], working.data_addresses()["ps"]
    calls = b"".join(head("/pscluster.v1.Node/Status", 2 * n + 1) for n in range(64))
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(opened(address)) for _ in range(3 * BURST // 64)]
        for connection in crowd:
            connection.sendall(PREFACE + frame(4, 0, 0) + calls)
            connection.setblocking(False)

        def closed() -> bool:
            return any(map(has_ended, crowd))

        until(closed, "a connection is closed")
    assert working.answers("ps")
    with opened(data) as connection:  # a garbage handshake
        connection.sendall(struct.pack("<IBBH", 33, 5, 0xD5, 0) + b"\x1a\x1f" + b"\xff" * 31)
        connection.makefile("rb").read()
    working.goes_on(1)
    refused = "calls without a valid proof of the cluster token"
    until(lambda: refused in working.processes["ps"].output, "the refused calls are logged")
    log = working.processes["ps"].output
    assert log.count("refused ") < 5
    assert "Traceback" not in log


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it, after any data that came before."""
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.timeout(180)
def test_a_crowd_and_slow_ones(working: Working) -> None:
    """With thousands of idle connections, and some that send byte by byte, the job continues, callers with the token
    are accepted, and everything the others used is freed when they leave."""
    raise_descriptor_limit()
    count = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 5)
    before, memory = working.descriptors(), working.resident()
    over = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(trickle, address, 20, over.is_set) for address in working.addresses.values()]
        try:
            for job, address in working.addresses.items():
                with crowd(address, count):
                    working.goes_on()
                    until(lambda job=job: working.answers(job), f"{job} lets somebody in")  # type: ignore[misc]
            # Fewer: it keeps few that are unauthenticated, and its queue of connections is short. A connection that
            # finds it full is tried again by the kernel a second later.
            for address in working.data_addresses().values():
                with crowd(address, min(count, 6 * MAX_UNAUTHENTICATED)):
                    working.goes_on()
        finally:
            over.set()
        assert all(future.result() for future in slow)

    def back() -> bool:
        return all(now <= before[job] + 10 for job, now in working.descriptors().items())

    until(back, "the roles have their descriptors back")
    grown = {job: size - memory[job] for job, size in working.resident().items()}
    assert all(size < GROWTH for size in grown.values()), grown


def test_unauthenticated_connections_do_not_keep_others_out(tmp_path: Path) -> None:
    """Unauthenticated callers that occupy all descriptors of a role with few give way to others."""
    few = ("bash", "-c", 'ulimit -n 256; exec "$0" "$@"')
    cluster = make_cluster()
    env = {"PSCLUSTER_TOKEN": TOKEN}
    with Roles(cluster, tmp_path, env) as roles, open_channel(cluster["ps"][0], None, TOKEN) as watching:
        ps = roles.start("ps", role="ps", command=(*few, *PSCLUSTER))
        ps.wait_for("serving on")
        address = cluster["ps"][0]
        # A probe that connected earlier, and sends nothing more.
        asked = health_pb2.HealthCheckRequest()
        watch = health_pb2_grpc.HealthStub(watching).Watch(asked)
        next(watch)
        with crowd(address, 600) as connections:
            assert len(connections) > 192
            with open_channel(address, None, TOKEN) as channel:
                stub = Stub(channel, NODE_SERVICE)

                def answers() -> bool:
                    try:
                        stub.status(node_pb2.StatusRequest(), timeout=5)
                    except grpc.RpcError:
                        return False
                    return True

                until(answers, "somebody who belongs here gets in")
                ps.wait_for("connections are open: closing unauthenticated ones")
                assert answers()
        ps.wait_for(r"closed \d+ unauthenticated connections")
        assert watch.is_active()
        assert ps.is_running


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_reaper_knows_whom_it_authenticated(family: socket.AddressFamily) -> None:
    """Of two connections the authenticated one stays; before the second scan both do."""
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        port = server.getsockname()[1]
        reaper = ConnectionReaper(2)
        reaper.port = port
        pairs = []
        for _ in range(2):
            client = opened(f"127.0.0.1:{port}")
            pairs.append((client, server.accept()[0]))
        (friend, ours), (unknown, other) = pairs
        with friend, unknown, ours, other:
            assert grpc_name(ours) == f"ipv4:127.0.0.1:{friend.getsockname()[1]}"
            reaper.mark_authenticated(grpc_name(ours))
            assert reaper.check() == 0
            assert reaper.check() == 1
            assert unknown.recv(1) == b""
            ours.sendall(b"x")
            assert friend.recv(1) == b"x"


def test_the_reaper_forgets_nobody_who_comes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller authenticated during a scan stays known; one that has left is forgotten, even without a crowd."""
    reaper, walk = ConnectionReaper(2), ConnectionReaper._connections
    reaper.mark_authenticated("ipv4:127.0.0.1:1")

    def walking(self: ConnectionReaper) -> Iterator[tuple[str, socket.socket]]:
        yield from walk(self)
        self.mark_authenticated("ipv4:127.0.0.1:2")

    monkeypatch.setattr(ConnectionReaper, "_connections", walking)
    reaper.check()
    assert reaper._known == {"ipv4:127.0.0.1:2"}
    monkeypatch.undo()
    roomy = ConnectionReaper(1 << 20)
    roomy.mark_authenticated("ipv4:127.0.0.1:3")
    for _ in range(_CHECKS_TO_FORGET):
        assert roomy._known
        roomy.check()
    assert not roomy._known


def test_bounds_that_follow_from_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections use three quarters of the descriptors at most, and never more than the limit."""
    for soft, places in ((256, 192), (20_000, limits.MAX_CONNECTIONS), (1, 1), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _which, soft=soft: (soft, soft))
        assert limits.connections() == places
