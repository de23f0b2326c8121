"""Does a process grow? The verdict of `soak.py`: pure, samples in, sentences out.

A life is one process from its start to its death. Memory rises while a job warms up, caches fill and the allocator
adapts, so the first third of a life is ignored. Over the rest the slope is Theil and Sen's, the median of the slopes
between all pairs of samples: peaks in a quarter of all samples hardly change it.

A process grows if the slope exceeds the allowance per hour, and the growth over the observed time exceeds the noise at
any time. A process that is killed every few minutes has no life that is long enough. The levels of its successive lives
are then judged in the same way: anything passed on from life to life, by its files or by processes that stayed, would
show there.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at one moment. Memory and disk in MiB."""

    seconds: float
    role: str
    pid: int
    resident: float
    private: float
    descriptors: int
    threads: int
    sockets: int
    disk: float


@dataclass(frozen=True, slots=True)
class Allowance:
    """What does not count as growth.

    Attributes:
        hourly: this increase per hour.
        noise: this increase, over any time.
        unit: of both.
    """

    hourly: float
    noise: float
    unit: str = ""


ALLOWED = {
    "resident": Allowance(8.0, 4.0, "MiB"),
    "descriptors": Allowance(0.0, 2.0),
    "threads": Allowance(0.0, 2.0),
    "sockets": Allowance(0.0, 2.0),
    "disk": Allowance(8.0, 8.0, "MiB"),
}
"""By measure. A file, a thread or a connection that is left behind is one too many, but some come and go."""

SHORTEST = 600.0  # seconds of a life that is judged by itself
SHORT_LIFE, FEWEST_LIVES = 60.0, 5  # for lives that are judged together


@dataclass(frozen=True, slots=True)
class Life:
    """The samples of one process, in order."""

    role: str
    pid: int
    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> float:
        """How long it was observed."""
        return self.samples[-1].seconds - self.samples[0].seconds

    def series(self, measure: str) -> tuple[Series, Series]:
        """The times and values of a measure."""
        return (
            np.array([sample.seconds for sample in self.samples]),
            np.array([getattr(sample, measure) for sample in self.samples], np.float64),
        )


@dataclass(frozen=True, slots=True)
class Trend:
    """The behaviour of a measure in the last two thirds of a time: its begin, end and slope."""

    role: str
    lives: int  # 1: a life by itself; more: this many together
    measure: str
    start: float
    end: float
    hourly: float
    seconds: float

    @property
    def grows(self) -> bool:
        """Whether it exceeds the allowance."""
        allowed = ALLOWED[self.measure]
        return self.hourly > allowed.hourly and self.hourly * self.seconds / 3600 > allowed.noise

    def __str__(self) -> str:
        whose = self.role if self.lives == 1 else f"{self.role}, over {self.lives} lives"
        unit = ALLOWED[self.measure].unit
        return (
            f"{whose}: {self.measure} from {self.start:.1f} to {self.end:.1f} {unit}".rstrip()
            + f" in {self.seconds / 60:.0f} min, {self.hourly:+.1f} an hour"
        )


def slope(times: Series, values: Series) -> float:
    """The Theil-Sen slope: the median of the slopes between all pairs. Times increase."""
    first, second = np.triu_indices(len(times), 1)
    if not len(first):
        return 0.0
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def trend(role: str, lives: int, measure: str, times: Series, values: Series) -> Trend:
    """The trend of the last two thirds of the time."""
    late = times >= times[0] + (times[-1] - times[0]) / 3
    times, values = times[late], values[late]
    edge = max(1, len(values) // 10)
    return Trend(
        role,
        lives,
        measure,
        float(np.median(values[:edge])),
        float(np.median(values[-edge:])),
        3600 * slope(times, values),
        float(times[-1] - times[0]),
    )


def lives_of(samples: Iterable[Sample]) -> dict[str, list[Life]]:
    """All lives by role, in order."""
    lives: dict[str, list[Life]] = {}
    for role, of_role in itertools.groupby(sorted(samples, key=lambda s: (s.role, s.seconds)), lambda s: s.role):
        lives[role] = [Life(role, pid, tuple(life)) for pid, life in itertools.groupby(of_role, lambda s: s.pid)]
    return lives


def judge(samples: Iterable[Sample], shortest: float = SHORTEST) -> list[Trend]:
    """All trends that can be determined: of each life of at least `shortest` seconds, and of short ones together."""
    return [trend for lives in lives_of(samples).values() for trend in _of_role(lives, shortest)]


def _of_role(lives: Sequence[Life], shortest: float) -> Iterator[Trend]:
    for life in lives:
        if life.seconds >= shortest:
            for measure in ALLOWED:
                yield trend(life.role, 1, measure, *life.series(measure))
    short = [life for life in lives if min(SHORT_LIFE, shortest) <= life.seconds < shortest]
    if len(short) >= FEWEST_LIVES:
        for measure in ALLOWED:
            levels = [_level(*life.series(measure)) for life in short]
            times = np.array([life.samples[-1].seconds for life in short])
            yield trend(short[0].role, len(short), measure, times, np.array(levels))


def _level(times: Series, values: Series) -> float:
    """A life's level: the median of its last third."""
    return float(np.median(values[times >= times[-1] - (times[-1] - times[0]) / 3]))


COLUMNS = [field.name for field in fields(Sample)]


def row_of(sample: Sample) -> str:
    """A line for the file."""
    return ",".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in asdict(sample).values())


def read_samples(path: Path) -> list[Sample]:
    """Read what `row_of` wrote, below COLUMNS. A truncated last line is left out."""
    kinds = {"role": str, "pid": int, "descriptors": int, "threads": int, "sockets": int}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row.values())]
    return [Sample(**{name: kinds.get(name, float)(row[name]) for name in COLUMNS}) for row in rows]
