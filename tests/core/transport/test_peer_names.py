"""Names of connected peers."""

from __future__ import annotations

import pytest

from pscluster.core.transport.peer_names import address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:80", "10.0.0.1"),
        ("data:10.0.0.1:80", "10.0.0.1"),
        ("ipv4:127.8.9.1:80", "127.0.0.1"),
        ("ipv6:%5B::1%5D:80", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1:2:3:4%5D:80", "2001:db8::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:80", "10.0.0.1"),
        ("unix:", "this machine"),
        ("\x1b[31m", "an unknown address"),
    ],
)
def test_addresses(peer: str, address: str) -> None:
    """Many addresses of one kind count as one, and no text of a peer reaches the log."""
    assert address_of(peer) == address
