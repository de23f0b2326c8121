"""How far an epoch is, as numbers and in words."""

from __future__ import annotations

import numpy as np
import pytest

from pscluster.coordinator.data.epoch_progress import EpochProgress, EpochSizes, seconds_left


def test_what_was_visited_is_added_up() -> None:
    """Ranges of items count with their own examples and bytes; where these are unknown, with their number."""
    examples, nbytes = np.array([10, 20, 30, 40]), np.array([1, 1, 1, 5])
    assert EpochSizes(examples, nbytes).progress([(0, 1), (2, 4)], 4) == EpochProgress(80, 100, 7, 8, 7 / 8)
    assert EpochSizes(examples, None).progress([(1, 2)], 4) == EpochProgress(20, 100, None, None, 1 / 4)
    assert EpochSizes(None, None).progress([], 4) == EpochProgress(None, None, None, None, 0.0)


def test_the_time_that_is_left() -> None:
    """As long as the rest takes at the same rate, without what was visited before."""
    assert seconds_left(0.5, 10.0, 0.0) == pytest.approx(10.0)
    assert seconds_left(0.75, 10.0, 0.25) == pytest.approx(5.0)
    assert seconds_left(0.25, 10.0, 0.25) is None


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            EpochProgress(4096, 50_000, 12 << 20, 150 << 20, 0.1, 65.2),
            "4,096 of 50,000 examples, 12.0 MiB of 150.0 MiB, 1:05 left",
        ),
        (EpochProgress(None, None, 0, 900, 0.0), "0 bytes of 900 bytes"),
        (EpochProgress(1, 2, None, None, 0.5, 3725), "1 of 2 examples, 1:02:05 left"),
        (EpochProgress(None, None, None, None, 0.5), ""),
    ],
)
def test_in_words(progress: EpochProgress, words: str) -> None:
    """What is unknown is left out."""
    assert str(progress) == words
