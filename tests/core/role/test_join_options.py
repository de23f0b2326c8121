"""Where a role that joins is dialled."""

from __future__ import annotations

import pytest

from pscluster.core.role.join_options import JoinOptions, dialled_at


@pytest.mark.parametrize(
    ("listens", "coordinator", "advertised", "dialled"),
    [
        ("127.0.0.2:4000", "127.0.0.1:2222", "", "127.0.0.2:4000"),
        ("0.0.0.0:4000", "127.0.0.1:2222", "", "127.0.0.1:4000"),
        ("0.0.0.0:4000", "localhost:2222", "", "127.0.0.1:4000"),
        ("0.0.0.0:4000", "nowhere.invalid:2222", "", "0.0.0.0:4000"),
        ("0.0.0.0:4000", "127.0.0.1:2222", "10.1.2.3", "10.1.2.3:4000"),
        ("0.0.0.0:4000", "127.0.0.1:2222", "10.1.2.3:80", "10.1.2.3:80"),
        ("[::]:4000", "127.0.0.1:2222", "fd00::1", "[fd00::1]:4000"),
    ],
)
def test_where_it_is_dialled(listens: str, coordinator: str, advertised: str, dialled: str) -> None:
    """At the address that it advertises, or the one that its calls to the coordinator come from."""
    assert dialled_at(listens, JoinOptions(coordinator, advertise=advertised)) == dialled
