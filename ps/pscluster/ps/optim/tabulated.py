"""Schedules from functions that can't travel to the servers: their rates, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pscluster.core import checks
from pscluster.ps.optim.schedules import PiecewiseConstantDecay

MAX_RATES = 10_000
"""The most rates of a table, which goes to each server, and into each of its snapshots, as JSON."""


def tabulated(rates_of: Callable[[Sequence[int]], Sequence[float]], steps: int) -> PiecewiseConstantDecay:
    """Return a schedule of the rates that a function has for the first steps, and of its next one from there on.

    Args:
        rates_of: called with steps, counted from 0; returns a rate for each.
        steps: for how many steps the rates change. If they are more than `MAX_RATES`, that many rates are taken, in
            equal distances, each for the steps up to the next.

    Raises:
        ValueError: `steps` is below 1, or a rate is negative, NaN or infinite: its step is named.
    """
    steps = checks.whole("steps", steps, at_least=1)
    held = -(-steps // MAX_RATES)
    at = [*range(0, steps, held), steps]
    boundaries: list[int] = []
    rates: list[float] = []
    for step, rate in zip(at, rates_of(at), strict=True):
        rate = checks.real(f"the rate of step {step}", float(rate), ": give a schedule of numbers", at_least=0)
        if not rates:
            rates.append(rate)
        elif rate != rates[-1]:
            boundaries.append(step - 1)
            rates.append(rate)
    return PiecewiseConstantDecay(tuple(boundaries), tuple(rates))
