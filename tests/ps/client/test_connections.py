"""A client's connections to a parameter server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.faults.support import connections_to
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import LocalCluster
from pscluster.core.errors import UnavailableError
from pscluster.core.ids import make_identity
from pscluster.core.security import tokens
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.client.connections import Server


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
