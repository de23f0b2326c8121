"""A served step and one written by hand, in turn on the same worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from driver import timed

Steps = Callable[[int], tuple[float, float]]
"""Takes a number of steps on a worker, and returns what `timed_steps` does."""


def timed_steps(step: Any, data: list[Any], n: int) -> tuple[float, float]:
    """Seconds of one of these steps, and of the thread's processor time of it."""
    begin = time.thread_time()
    seconds = timed(lambda: [step(*data[nth % len(data)]) for nth in range(n)])
    return seconds / n, (time.thread_time() - begin) / n


def in_turn(coordinator: Any, by_hand: Steps, served: Steps, n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, in each round, of both ways; and the worker's processor time of it."""
    measured: dict[str, list[float]] = {"by hand": [], "served": [], "by hand, cpu": [], "served, cpu": []}
    for number in range(rounds + 1):
        ways = [("by hand", by_hand), ("served", served)]
        for name, function in ways[:: 1 if number % 2 else -1]:
            seconds, cpu = coordinator.schedule(function, args=(n,)).fetch()
            if number:  # after one that does not count
                measured[name].append(seconds)
                measured[f"{name}, cpu"].append(cpu)
    return measured
