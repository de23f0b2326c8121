"""Who does a piece of work, by how long the last ones took."""

from __future__ import annotations

from itertools import count

from pscluster.ps.client.overlap.own_thread import MOST_ELSEWHERE, QUICK_SECONDS, OwnThread


def test_slow_pieces_go_elsewhere_for_longer_and_longer() -> None:
    """Each slow piece doubles how many are left to another thread, up to a limit; a quick one begins anew."""
    own = OwnThread()
    assert own.takes()
    for slow in range(14):
        own.took(2 * QUICK_SECONDS)
        assert next(left for left in count() if own.takes()) == min(2**slow, MOST_ELSEWHERE)
    own.took(QUICK_SECONDS)
    assert own.takes()
    own.took(2 * QUICK_SECONDS)
    assert not own.takes()
    assert own.takes()
