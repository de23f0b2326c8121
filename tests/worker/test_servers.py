"""Which parameter servers a worker uses, and which coordinators it refuses because of theirs."""

from __future__ import annotations

import pytest

from pscluster.core.errors import ConfigurationError, ProtocolError
from pscluster.core.role.options import RoleOptions
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2
from pscluster.worker.servers import ServerList

OWN = [PeerAddress("ps", index, f"ps{index}:2222") for index in range(2)]


def asked(*addresses: str, store_ids: int | None = None) -> node_pb2.AttachRequest:
    """The request of a coordinator with these servers."""
    count = len(addresses) if store_ids is None else store_ids
    return node_pb2.AttachRequest(ps_addresses=addresses, store_ids=range(1, count + 1))


def test_own_list(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that lists servers uses its own addresses; a different number is refused, and logged when it changes."""
    servers = ServerList(3, OWN)
    assert servers.of(asked("a:1", "b:1")) == tuple(OWN)
    for count in (1, 1, 3, 1):
        with pytest.raises(
            ConfigurationError, match=f"has {count} parameter servers, and TF_CONFIG of worker 3 lists 2"
        ):
            servers.check(asked(store_ids=count))
    assert [record.getMessage().split()[3] for record in caplog.records] == ["1", "3", "1"]


def test_learnt() -> None:
    """A worker that lists none takes its coordinator's, dialled according to its own options."""
    servers = ServerList(3, (), RoleOptions(token="t" * 32, insecure=True))
    servers.check_count(5)
    peers = servers.of(asked("[::1]:1", "b:1"))
    assert [(peer.role, peer.index, peer.address, peer.token) for peer in peers] == [
        ("ps", 0, "[::1]:1", "t" * 32),
        ("ps", 1, "b:1", "t" * 32),
    ]


@pytest.mark.parametrize("address", ["nothing", "a:0", "http://a:1", ""])
def test_address_that_is_none(address: str) -> None:
    """Addresses from a coordinator are checked before anything changes."""
    with pytest.raises(ProtocolError, match=r"the coordinator's cluster.ps\[1\] is "):
        ServerList(3).check(asked("a:1", address))


def test_addresses_that_are_missing() -> None:
    """A coordinator that does not name all of its servers is refused if the worker does not know them."""
    with pytest.raises(ProtocolError, match=r"worker 3 lists no parameter servers, .* of 1 out of 2"):
        ServerList(3).check(asked("a:1", store_ids=2))


def test_plain_text() -> None:
    """In plain text a token is used only with servers on loopback, however they are named."""
    servers = ServerList(3, (), RoleOptions(token="t" * 32))
    servers.check(asked("127.0.0.1:1"))
    with pytest.raises(ConfigurationError, match=r"refusing to talk to ps 0 at far\.example\.com:1 in plain text"):
        servers.check(asked("far.example.com:1"))
