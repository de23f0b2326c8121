"""Where a role listens."""

from __future__ import annotations

import pytest

from pscluster.core.role.listening import listen_address
from pscluster.core.role.options import RoleOptions


@pytest.mark.parametrize(
    ("own", "address"),
    [
        ("10.0.0.3:2222", "0.0.0.0:2222"),
        ("ps0.example.com:2222", "0.0.0.0:2222"),
        ("[fd00::3]:2222", "[::]:2222"),
        ("[::1]:2222", "[::1]:2222"),
        ("unix:/run/job/ps-0", "unix:/run/job/ps-0"),
    ],
)
def test_all_interfaces_of_a_family(own: str, address: str) -> None:
    """Those of IPv6 for an address of that family: else the data plane could not be reached there."""
    assert listen_address(own, RoleOptions(insecure=True)) == address
