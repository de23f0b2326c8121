"""Where an epoch is cut into functions, and how many steps each of them takes. Pure.

A dataset's epochs, one behind the other, are counted in elements (batches) from the one in which the training began; an
epoch of the training is so many of them. A function takes the next few. How many is settled before the first of them is
handed out, and kept with the variables: a coordinator that comes back cuts at the same places, and so repeats what is
not known to be done under the same names (see `DistributedDataset`); other cuts would be other pieces of work, and what
both did would count twice. So a change of the size holds from an element on behind all that were handed out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

DISPATCH_SHARE = 0.01
"""So much of a step's time may handing it out take, with `steps_per_execution="auto"`: half of what is promised. The
other half is for what is not measured, as what the workers' own threads take."""

DISPATCH_SECONDS = 0.001
"""So long handing out a function takes, as long as it is not measured: it does where functions come one by one."""

MEASURED = 8
"""After so many functions of one step it is known how long a step takes."""

FUNCTIONS_A_WORKER = 4
"""So many functions at least a worker has in an epoch, lest some wait for the last one."""

FUNCTION_SECONDS = 0.25
"""So long a function is at most, of steps that are shorter: it is what a death repeats, and an end waits for."""

QUEUED_SECONDS = 0.2
"""So much work is scheduled for each worker, beyond two functions."""

MOST_QUEUED = 2000

_FIRST = -(1 << 40)


@dataclass
class Plan:
    """Of one training.

    Attributes:
        name: of the data's position.
        elements: of an epoch of the data.
        places: that one element takes in the order of the data; the last one of an epoch may take fewer.
        kept: places of an epoch.
        per_epoch: elements of an epoch of the training.
        origin: an epoch of the data and an element of it.
        index: that element's, of the training.
        cuts: (from this element on, so many a function), rising.
        frontier: behind the last element that was handed out.
    """

    name: str
    elements: int
    places: int
    kept: int
    per_epoch: int
    origin: tuple[int, int] = (0, 0)
    index: int = 0
    cuts: list[tuple[int, int]] = field(default_factory=list)
    frontier: int = 0

    def begin(self, origin: tuple[int, int], index: int) -> None:
        """Nothing was handed out yet: this element of the data is that one of the training."""
        self.origin, self.index, self.frontier, self.cuts = origin, index, index, []

    def size_at(self, element: int) -> int:
        """So many elements does a function take that begins with this one."""
        return next((size for start, size in reversed(self.cuts) if start <= element), 1)

    def change(self, size: int) -> bool:
        """From the frontier on functions take so many. False if they do already."""
        if self.size_at(self.frontier) == size:
            return False
        # What was left of the data before the training began is cut the same way.
        start = _FIRST if not self.cuts and self.frontier == self.index else self.frontier
        self.cuts = [*(cut for cut in self.cuts if cut[0] < start), (start, size)]
        return True

    def begin_epoch(self, epoch: int) -> None:
        """All elements of the epochs before were handed out. Cuts that nobody needs any more are dropped."""
        self.frontier = max(self.frontier, epoch * self.per_epoch)
        past = [cut for cut in self.cuts if cut[0] <= epoch * self.per_epoch]
        self.cuts = [*past[-1:], *self.cuts[len(past) :]]

    def stop_of(self, training_epoch: int, epoch: int, start: int) -> int:
        """Where a function ends that begins at this place of the data's epoch; `start` if it is of a later one.

        Args:
            training_epoch: which epoch of the training goes on.
            epoch: of the data.
            start: a place in its order.
        """
        before = self._first_of(epoch)
        element = before + start // self.places
        end = (training_epoch + 1) * self.per_epoch
        if element >= end:
            return start
        following = (other for other, _ in self.cuts if other > element)
        stop = min([element + self.size_at(element), end, before + self.elements, *following])
        self.frontier = max(self.frontier, stop)
        return min((stop - before) * self.places, self.kept)

    def done(self, epoch: int, visited: int) -> int:
        """Elements that were taken, where all epochs of the data before this one and so many places of it were."""
        return max(0, self._first_of(epoch) + math.ceil(visited / self.places))

    def _first_of(self, epoch: int) -> int:
        """The first element of this epoch of the data, as one of the training."""
        return (epoch - self.origin[0]) * self.elements - self.origin[1] + self.index

    def begin_otherwise(self, found: dict[str, Any], epoch: int, now: tuple[int, int], whole: bool) -> None:
        """Go on with a training that has cut the same data into other elements.

        What was visited counts, also where it was not told of: an epoch of which everything was is over.

        Args:
            found: what was kept of that training's plan.
            epoch: of the training, which was not dealt with.
            now: the data's epoch, and how many places of it were visited.
            whole: epochs end with those of the data; else after so many elements, wherever the data is then.
        """
        before = Plan(**{key: found[key] for key in ("name", "elements", "places", "kept", "per_epoch")})
        before.load(found)
        if not whole:
            done = before.done(*now) - epoch * before.per_epoch
            visited = math.ceil(now[1] / self.places)
            self.begin((now[0], visited), epoch * self.per_epoch + min(max(0, done), self.per_epoch))
            return
        first, rest = divmod(epoch * before.per_epoch - before._first_of(0), before.elements)
        # Of data that epochs did not end with, what follows begins with the next epoch of the data.
        self.begin((now[0] if rest else min(first, now[0]), 0), epoch * self.per_epoch)

    def to_json(self) -> dict[str, Any]:
        """What has to be the same when the training goes on."""
        return {
            "name": self.name,
            "elements": self.elements,
            "places": self.places,
            "kept": self.kept,
            "per_epoch": self.per_epoch,
            "origin": list(self.origin),
            "index": self.index,
            "cuts": [list(cut) for cut in self.cuts],
        }

    def fits(self, found: dict[str, Any]) -> bool:
        """Is this data cut into the same elements?"""
        mine = self.to_json()
        return all(found[key] == mine[key] for key in ("name", "elements", "places", "kept", "per_epoch"))

    def load(self, found: dict[str, Any]) -> None:
        """Go on with this, which fits."""
        first, element = found["origin"]
        self.begin((first, element), found["index"])
        self.cuts = [(start, size) for start, size in found["cuts"]]


def best_size(step_seconds: Iterable[float], dispatch_seconds: float, per_epoch: int | None, workers: int) -> int:
    """How many steps a function should take, so that handing it out takes no more than its share.

    Args:
        step_seconds: measured, of several functions: for each the seconds of a step.
        dispatch_seconds: that a function takes, beside its steps.
        per_epoch: steps of an epoch, if that is known.
        workers: how many.
    """
    found = sorted(step_seconds)
    typical = max(found[len(found) // 2], 1e-7)
    size = math.ceil(min(dispatch_seconds / DISPATCH_SHARE, FUNCTION_SECONDS) / typical)
    if per_epoch is not None:
        size = min(size, per_epoch // (workers * FUNCTIONS_A_WORKER))
    return max(1, size)


class Overhead:
    """What a function costs beside its steps: measured while the workers have enough to do.

    Two things: how long a worker stands between two functions, and CPU time of the coordinator, which may have to share
    the workers' cores.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self._least = max(16, 8 * workers)
        self.begin(0.0, 0.0)

    def begin(self, now: float, cpu: float) -> None:
        """From now on, when the coordinator has used so many seconds of CPU."""
        self._begin, self._cpu = now, cpu
        self._functions = 0
        self._ends: dict[int, float] = {}
        self._gaps: list[float] = []

    def add(self, worker: int, begin: float, end: float, now: float, cpu: float) -> float | None:
        """A function was with this worker from `begin` to `end`, by its clock. The seconds beside, once they are known.

        Known: when enough functions have ended, in a time that is long enough. Then it begins anew.
        """
        last = self._ends.get(worker, math.inf)
        if begin >= last:  # else it was started again meanwhile, with another clock
            self._gaps.append(begin - last)
        self._ends[worker] = end
        self._functions += 1
        if self._functions < self._least or now - self._begin < QUEUED_SECONDS:
            return None
        beside = (statistics.median(self._gaps) if self._gaps else 0.0) + (cpu - self._cpu) / self._functions
        self.begin(now, cpu)
        return beside


def most_ahead(function_seconds: float | None, workers: int) -> int:
    """How many functions to have scheduled: enough that no worker waits, and not more, for all of them end before the
    last one does."""
    queued = 2 if function_seconds is None else 2 + int(QUEUED_SECONDS / max(function_seconds, 1e-6))
    return min(workers * queued, MOST_QUEUED)
