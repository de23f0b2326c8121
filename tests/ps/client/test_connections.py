"""A client's connections to a parameter server."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.faults.proxy import Proxy
from tests.faults.support import connections_to
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.errors import UnavailableError
from pscluster.core.ids import fresh_id, make_identity
from pscluster.core.security import tokens
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.frames import view
from pscluster.ps.client import connections
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.connections import Server
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.v1 import ps_pb2


def test_renewed_certificates_leave_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they are renewed, there are at most the connections of the last two, and none after the end."""
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 0.0)
    with LocalCluster(1, 1, tls=True, log_level="ERROR") as cluster:
        address = cluster.cluster_spec().task_address("ps", 0)
        assert address is not None
        assert cluster.tls is not None
        port = int(address.rpartition(":")[2])
        peer = PeerAddress("ps", 0, address, cluster.tls, cluster.token)
        until(lambda: cluster.is_alive("ps", 0), "the server was started")
        server = Server(peer, make_identity("chief", 0), TIMEOUT)
        until(lambda: answers(server), "the server answers")
        for _ in range(4):
            renew(cluster.tls.folder)
            server.hello()
        until(lambda: connections_to(port) == 2, "those before are closed", lambda: str(connections_to(port)))
        server.close()
        until(lambda: connections_to(port) == 0, "all are closed", lambda: str(connections_to(port)))


def test_what_waits_for_a_server_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large requests that are stuck on the way to its old place are answered at the new one, once."""
    monkeypatch.setattr(connections, "_LEAVE_SECONDS", 10 * TIMEOUT)
    with (
        LocalCluster(1, 1, transport="tcp", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            small, large = Variable(np.zeros(3), name="small"), Variable(np.zeros(200_000), name="large")
        peer, job = strategy.context.tasks[0], strategy.context.request.job
        identity = make_identity("worker", 0)
        with Proxy(peer.address) as proxy, ThreadPoolExecutor(4) as pool:
            far = replace(peer, address=proxy.address)
            client = PsClient([far], identity, job=job, incarnation=fresh_id(), retry_seconds=TIMEOUT)
            try:
                client.connect(TIMEOUT)
                add(client, spec_of(strategy, small))  # there are sessions, and channels in use
                proxy.stall(back=True)
                waiting: list[Future[object]] = [pool.submit(client.describe_variable, "small")]
                waiting += [pool.submit(add, client, spec_of(strategy, each)) for each in (small, large, small)]
                until(lambda: proxy.held >= 1, "something is stuck")
                assert not any(future.done() for future in waiting)
                client.move(peer)
                for future in waiting:
                    future.result(TIMEOUT)
                client.move(peer)  # it is there
                add(client, spec_of(strategy, small))
            finally:
                client.close()
            until(lambda: connections_to(proxy.port) == 0, "the channels to its old place are closed, too")
        assert small.numpy().tolist() == [4.0] * 3
        assert set(large.numpy().tolist()) == {1.0}


def spec_of(strategy: ParameterServerStrategy, variable: Variable) -> ps_pb2.VariableSpec:
    """What the servers know of a variable."""
    return strategy.context.client.describe_variable(variable.name)


def add(client: PsClient, spec: ps_pb2.VariableSpec) -> None:
    """Add 1 to all elements, as the client does for a handle."""
    values = np.ones(tuple(spec.shape))
    rows = ps_pb2.Rows(all=True)
    item = ps_pb2.UpdateItem(variable=spec.id, kind=ps_pb2.ADD, rows=rows, value_bytes=values.nbytes, nth=1)
    client.update([ShardUpdate(0, item, view(values))])


def answers(server: Server) -> bool:
    """Whether it answers the handshake."""
    try:
        server.hello()
    except UnavailableError:
        return False
    return True


def renew(folder: Path) -> None:
    """Write each file anew, with the same content."""
    for path in folder.iterdir():
        draft = path.with_name(f".{path.name}")
        draft.write_bytes(path.read_bytes())
        os.chmod(draft, path.stat().st_mode)
        draft.rename(path)
