"""Messages from unauthenticated peers take no role down and allocate nothing: live roles, raw sockets, raw calls."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.roles.wire import SECONDS

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.ids import make_identity
from pscluster.core.transport.channels import NODE_SERVICE, open_channel
from pscluster.core.transport.methods import Stub, methods
from pscluster.ps.spec import SERVICE as PS_SERVICE
from pscluster.v1 import node_pb2, ps_pb2
from pscluster.worker.service import SERVICE as WORKER_SERVICE

OPENINGS = (
    b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x00\x00\x00\x00\x00\x01",
)
GROWTH = 64 << 20  # far more than the garbage that is sent, far less than what it declares


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One server and one worker that must survive."""
    with LocalCluster(1, 1, restart=False, transport="tcp", log_level="ERROR") as cluster:
        yield cluster


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def _rubbish(generator: random.Random) -> Iterator[bytes]:
    yield b""
    for size in (1, 7, 100, 5000):
        yield generator.randbytes(size)
    huge = 2**62
    yield ps_pb2.Request(id=1, total_bytes=huge, update=ps_pb2.UpdateRequest(job=1)).SerializeToString()
    item = ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(ids=huge))
    yield ps_pb2.Request(id=1, last=True, read=ps_pb2.ReadRequest(job=1, items=[item])).SerializeToString()


def _call(channel: grpc.Channel, method: Any, messages: list[bytes]) -> None:
    """Make a call: whatever the answer is, there is one, and no call hangs."""
    call = getattr(channel, method.shape)(method.path)
    request: Any = iter(messages) if method.client_streaming else messages[0]
    with contextlib.suppress(grpc.RpcError):
        reply = call(request, timeout=20)
        if method.server_streaming and not method.path.endswith("Attach"):
            for _ in zip(reply, range(10), strict=False):
                pass
            reply.cancel()


def _still_works(cluster: LocalCluster) -> None:
    with ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            variable = Variable(np.zeros(3, np.float32), name="variable")
        coordinator = ClusterCoordinator(strategy)
        coordinator.schedule(lambda: variable.assign_add(np.ones(3, np.float32)).name)
        coordinator.join(timeout=60)
        assert variable.numpy().tolist() == [1, 1, 1]


def test_rubbish_on_the_port_and_in_every_method(cluster: LocalCluster) -> None:
    """With other protocols, broken frames, random messages and huge declarations the roles keep serving, and do not
    grow."""
    _still_works(cluster)
    generator = random.Random(62)
    before = {task: _resident(pid) for task, pid in cluster.pids.items()}
    for role, service in (("ps", PS_SERVICE), ("worker", WORKER_SERVICE)):
        address = cluster.cluster_spec().task_address(role, 0)
        host, port = address.rsplit(":", 1)
        for opening in (*OPENINGS, generator.randbytes(3000)):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(opening)
                connection.settimeout(0.05)
                with contextlib.suppress(OSError):
                    connection.recv(1000)
        with open_channel(address, None, cluster.token) as channel:
            for method in (*methods(service), *methods(NODE_SERVICE)):
                for message in _rubbish(generator):
                    _call(channel, method, [message, message])

    _still_works(cluster)
    assert cluster.pids.keys() == before.keys()
    assert all(_resident(pid) < before[task] + GROWTH for task, pid in cluster.pids.items())


def test_an_attach_that_makes_no_sense_changes_nothing(cluster: LocalCluster) -> None:
    """An Attach with the store_ids of too many or too few servers is refused; the next one gets the worker."""
    address = cluster.cluster_spec().task_address("worker", 0)
    with open_channel(address, None, cluster.token) as channel:
        node = Stub(channel, NODE_SERVICE)
        request = node_pb2.AttachRequest(coordinator=make_identity("chief", 0), job=7, num_workers=1)
        for store_ids in ([], [1, 2], [1] * 1000):
            del request.store_ids[:]
            request.store_ids.extend(store_ids)
            with pytest.raises(grpc.RpcError) as refused:
                next(node.attach(request, timeout=SECONDS, wait_for_ready=True))
            said = f"the coordinator has {len(store_ids)} parameter servers, and TF_CONFIG of worker 0 lists 1"
            assert said in str(refused.value.details())
            reply = node.status(node_pb2.StatusRequest(), timeout=SECONDS)
            assert (reply.state, reply.coordinator) == ("waiting for a coordinator", "")
    _still_works(cluster)
