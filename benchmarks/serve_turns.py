"""A served step and one written by hand, in turn on the same worker."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from driver import timed

Prepared = Callable[[], tuple[list[Any], Mapping[str, Callable[..., Any]]]]
"""Returns, on a worker, batches, and a step that takes one for "by hand" and for "served"."""


def in_turn(coordinator: Any, prepared: Prepared, n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of both ways, and of the worker's thread's processor time of it: medians of each round.

    The steps take turns one by one: minutes differ on machines that others use, too, and what is measured is small.
    """

    def steps(n: int) -> dict[str, float]:
        data, ways = prepared()
        taken: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(n):
            for name, step in list(ways.items())[:: 1 if number % 2 else -1]:
                begin = time.thread_time()
                taken[name].append(timed(lambda: step(*data[number % len(data)])))  # noqa: B023  # called at once
                taken[f"{name}, cpu"].append(time.thread_time() - begin)
        return {name: statistics.median(of) for name, of in taken.items()}

    measured: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, seconds in coordinator.schedule(steps, args=(n,)).fetch().items():
            if number:  # after one that does not count
                measured[name].append(seconds)
    return dict(measured)
