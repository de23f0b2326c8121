"""How far an epoch of a dataset is: in examples, in bytes, and in seconds that are left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_KIB = 1024


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """How far the current epoch of a dataset is.

    Attributes:
        examples: how many have been visited; None: that is not known before they are read, and was not counted.
        all_examples: how many the epoch has; None: as above.
        bytes: of the visited ones, in their files or arrays; None: unknown.
        all_bytes: of all; None: unknown.
        share: of the epoch that was visited, from 0 to 1: of its bytes, if they are known.
        seconds_left: until its end, if it goes on as it has since it began here; None: nothing was visited since.
    """

    examples: int | None
    all_examples: int | None
    bytes: int | None
    all_bytes: int | None
    share: float
    seconds_left: float | None = None

    def __str__(self) -> str:
        words = []
        if self.examples is not None:
            words.append(f"{self.examples:,} of {self.all_examples:,} examples")
        if self.bytes is not None and self.all_bytes is not None:
            words.append(f"{_sized(self.bytes)} of {_sized(self.all_bytes)}")
        if self.seconds_left is not None:
            words.append(f"{_timed(self.seconds_left)} left")
        return ", ".join(words)


def _sized(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < _KIB:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= _KIB
    return f"{number:,.1f} TiB"


def _timed(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class EpochSizes:
    """The examples and bytes of an epoch up to each of its items, in the epoch's order."""

    def __init__(self, examples: npt.NDArray[np.int64] | None, nbytes: npt.NDArray[np.int64] | None) -> None:
        """Take the numbers of each item; None: they are unknown."""
        self._examples, self._bytes = (
            None if of is None else np.cumsum([0, *of.tolist()]) for of in (examples, nbytes)
        )

    def progress(self, visited: Sequence[tuple[int, int]], items: int) -> EpochProgress:
        """Return the progress, given the items [start, stop) that were visited, of as many."""
        examples, all_examples = _sum(self._examples, visited)
        nbytes, all_bytes = _sum(self._bytes, visited)
        share = sum(stop - start for start, stop in visited) / items
        if nbytes is not None and all_bytes:
            share = nbytes / all_bytes
        return EpochProgress(examples, all_examples, nbytes, all_bytes, share)


def _sum(ends: npt.NDArray[np.int64] | None, visited: Sequence[tuple[int, int]]) -> tuple[int | None, int | None]:
    if ends is None:
        return None, None
    return sum(int(ends[stop] - ends[start]) for start, stop in visited), int(ends[-1])


def seconds_left(share: float, seconds: float, first: float) -> float | None:
    """Return how long the rest takes, if the share was `first` this many seconds ago; None: nothing has changed."""
    return seconds * (1 - share) / (share - first) if share > first else None
