"""When a worker that is away is dialled again."""

from __future__ import annotations

import pytest

from pscluster.coordinator.scheduling.connections.lifecycle import seconds_to_redial


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("outage", [0.2, 1.0, 3.0, 8.0, 60.0])
def test_a_worker_is_found_soon_after_it_is_back(outage: float, chance: float) -> None:
    """It takes a tenth of the time that it was away, half a second at most, however the attempts fall."""
    away = attempts = 0.0
    while away < outage:
        away += seconds_to_redial(away, chance)
        attempts += 1
    assert away - outage <= min(max(0.1 * outage, 0.05), 0.5)
    assert attempts < 80 + 4 * outage


def test_one_that_stays_away_is_asked_now_and_then() -> None:
    """A worker that stays away is dialled two to four times a second, forever."""
    assert seconds_to_redial(1e9, 0.0) == 0.25
    assert seconds_to_redial(1e9, 1.0) == 0.5
