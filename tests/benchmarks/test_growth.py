"""The verdict of `make soak`, on series for which the answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.growth import ALLOWED, COLUMNS, SHORTEST, Sample, Trend, judge, lives_of, read_samples, row_of, slope

HOUR = 3600.0
Measure = Callable[[float], float]


def life(
    seconds: float,
    begin: float = 0.0,
    pid: int = 1,
    *,
    resident: Measure = lambda t: 100.0,
    descriptors: Measure = lambda t: 40.0,
    disk: Measure = lambda t: 10.0,
) -> list[Sample]:
    """A life with a sample every 5 s; the measured value is a function of the seconds since its start."""
    return [
        Sample(begin + t, "ps 0", pid, resident(t), 50.0, int(descriptors(t)), 20, 9, disk(t))
        for t in np.arange(0.0, seconds, 5.0).tolist()
    ]


def growing(samples: list[Sample]) -> set[str]:
    """The measures that grow."""
    return {trend.measure for trend in judge(samples) if trend.grows}


@pytest.mark.parametrize("hourly", [-7.5, 0.0, 1.0, 30.0])
def test_the_slope_of_a_line_with_peaks(hourly: float) -> None:
    """A quarter of all samples may be anything: the slope is that of the others, within their noise."""
    rng = np.random.default_rng(0)
    times = np.arange(0.0, HOUR, 10.0)
    values = 100 + hourly * times / HOUR + rng.normal(0, 0.05, len(times))
    values[rng.permutation(len(times))[: len(times) // 4]] = 1000
    clean = 100 + hourly * times / HOUR
    assert slope(times, clean) * HOUR == pytest.approx(hourly, abs=1e-6)
    # Evenly spaced peaks pull pairs up as often as down.
    assert slope(times, values) * HOUR == pytest.approx(hourly, abs=1.0)


@pytest.mark.parametrize(
    ("resident", "grows"),
    [
        (lambda t: 100 + 20 * t / HOUR, True),
        (lambda t: 100 + 7 * t / HOUR, False),  # less than the allowance per hour
        (lambda t: 100 + 80 * (1 - math.exp(-t / 120)), False),  # caches that fill
        (lambda t: 100 + 30 * (int(t) % 60 < 10), False),  # peaks that end
        (lambda t: 100 + 30 * (t > 0.9 * HOUR), False),  # one step is no slope
        (lambda t: 100 + 2 * int(t / 300), True),  # a step every five minutes is one
        (lambda t: 200 - 20 * t / HOUR, False),
    ],
    ids=["line", "slow line", "saturating", "peaks", "late step", "staircase", "falling"],
)
def test_memory(resident: Measure, grows: bool) -> None:
    """Memory grows if it keeps rising, not if it was filled, or needed for a moment."""
    assert growing(life(HOUR, resident=resident)) == ({"resident"} if grows else set())


@pytest.mark.parametrize(
    ("descriptors", "grows"),
    [
        (lambda t: 40 + int(t / 120), True),  # one leaked at each reconnection
        (lambda t: 40 + int(t / 600), True),
        (lambda t: 40 + int(t / 7) % 5, False),  # some come and go
        (lambda t: 40 + 5 * (t > 600), False),  # a pool that was created once
    ],
    ids=["every two minutes", "every ten minutes", "to and fro", "once"],
)
def test_descriptors(descriptors: Measure, grows: bool) -> None:
    """Any leaked descriptor, thread or connection counts."""
    assert growing(life(HOUR, descriptors=descriptors)) == ({"descriptors"} if grows else set())


def test_a_short_life_says_nothing() -> None:
    """A slope within minutes is noise, and is not judged."""
    assert judge(life(SHORTEST - 60, resident=lambda t: 100 + t)) == []


@pytest.mark.parametrize("step", [0.0, 3.0], ids=["as the one before", "more than the one before"])
def test_short_lives_together(step: float) -> None:
    """For a process that is killed every five minutes the levels that its lives reached are judged."""

    def filling(base: float) -> Measure:
        return lambda t: base + min(t, 40.0)

    lives = [
        sample for index in range(12) for sample in life(290, 300.0 * index, index, resident=filling(60 + step * index))
    ]
    assert [trend.lives for trend in judge(lives)] == [12] * len(ALLOWED)
    assert growing(lives) == ({"resident"} if step else set())


def test_each_process_of_a_role_is_judged_separately() -> None:
    """Two long lives are judged separately; a new process begins lower, which is not a trend."""
    first, second = life(HOUR), life(HOUR, HOUR, 2, resident=lambda t: 60 + 20 * t / HOUR)
    assert [len(one.samples) for one in lives_of([*second, *first])["ps 0"]] == [len(first), len(second)]
    grown = [trend for trend in judge([*second, *first]) if trend.grows]
    assert [trend.measure for trend in grown] == ["resident"]
    assert grown[0].hourly == pytest.approx(20.0)


def test_what_a_verdict_says() -> None:
    """It names the process, the measure, its begin and end, and the time."""
    said = str(Trend("ps 0", 1, "resident", 100.0, 113.3, 20.0, 2400.0))
    assert said == "ps 0: resident from 100.0 to 113.3 MiB in 40 min, +20.0 an hour"
    assert str(Trend("worker 1", 9, "threads", 20, 30, 10, 3600)).startswith(
        "worker 1, over 9 lives: threads from 20.0"
    )


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A file with a truncated last line, as when the process died, gives all the others."""
    samples = life(20)
    lines = [",".join(COLUMNS), *map(row_of, samples)]
    path = tmp_path / "samples.csv"
    path.write_text("\n".join([*lines, lines[-1][:20]]))
    assert read_samples(path) == samples
