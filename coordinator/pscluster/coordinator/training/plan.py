"""Where an epoch is cut into functions, and how many steps each of them takes. Pure.

A dataset's successive epochs are counted in elements (batches) from where the training began; an epoch of the training
is a fixed number of them, and a function takes the next few. How many is settled before the first of them is handed
out, and saved with the variables. So a coordinator that resumes cuts at the same elements, and repeats work that may be
undone under the same names (see `DistributedDataset`); with other cuts, work would count twice. A change of the size
therefore applies only to elements after all that were handed out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

DISPATCH_SHARE = 0.01
"""The share of a step's time that dispatching may take with `steps_per_execution="auto"`: half of what is promised.
The other half is for what is not measured, such as the workers' own threads."""

DISPATCH_SECONDS = 0.001
"""How long dispatching a function takes, until it is measured: typical of functions that come one by one."""

MEASURED = 8  # after how many functions of one step the time of a step is known
FUNCTIONS_A_WORKER = 4
"""The fewest functions a worker has in an epoch, so that workers do not idle until the last one ends."""

FUNCTION_SECONDS = 0.25  # the longest a function of several steps takes: a death repeats it, and stopping waits for it
QUEUED_SECONDS = 0.2  # how much work is scheduled for each worker, beyond two functions
MOST_QUEUED = 2000

_FIRST = -(1 << 40)


@dataclass
class Plan:
    name: str  # the data's
    elements: int  # in an epoch of the data
    items_per_element: int  # examples, or files; an epoch's last element may have fewer
    items: int  # in an epoch of the data
    per_epoch: int  # elements in an epoch of the training
    origin: Sequence[int] = (0, 0)  # an epoch of the data, and an element in it
    index: int = 0  # the number of that element in the training
    cuts: list[Sequence[int]] = field(default_factory=list)  # (first element, elements per function), ascending
    frontier: int = 0  # the element after the last one that was handed out

    def begin(self, origin: tuple[int, int], index: int) -> None:
        """Begin, with nothing handed out, where element `origin` of the data is element `index` of the training."""
        self.origin, self.index, self.frontier, self.cuts = origin, index, index, []

    def size_at(self, element: int) -> int:
        """Return how many elements a function takes that begins with `element`."""
        return next((size for start, size in reversed(self.cuts) if start <= element), 1)

    def change(self, size: int) -> bool:
        """Have functions take `size` elements from the frontier on; return whether that is a change."""
        if self.size_at(self.frontier) == size:
            return False
        # Data left over from before the training began is cut the same way.
        start = _FIRST if not self.cuts and self.frontier == self.index else self.frontier
        self.cuts = [*(cut for cut in self.cuts if cut[0] < start), (start, size)]
        return True

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: all earlier elements were handed out, and their cuts are dropped."""
        self.frontier = max(self.frontier, epoch * self.per_epoch)
        past = [cut for cut in self.cuts if cut[0] <= epoch * self.per_epoch]
        self.cuts = [*past[-1:], *self.cuts[len(past) :]]

    def stop_of(self, training_epoch: int, epoch: int, start: int) -> int:
        """Return where a function that begins at item `start` of the data's epoch ends.

        `start` itself if that item belongs to a later epoch of the training than `training_epoch`.
        """
        before = self._first_of(epoch)
        element = before + start // self.items_per_element
        end = (training_epoch + 1) * self.per_epoch
        if element >= end:
            return start
        following = (other for other, _ in self.cuts if other > element)
        stop = min([element + self.size_at(element), end, before + self.elements, *following])
        self.frontier = max(self.frontier, stop)
        return min((stop - before) * self.items_per_element, self.items)

    def done(self, epoch: int, visited: int) -> int:
        """Return how many elements are done once `visited` items of this epoch of the data are."""
        return max(0, self._first_of(epoch) + math.ceil(visited / self.items_per_element))

    def _first_of(self, epoch: int) -> int:
        """Return the number in the training of the first element of this epoch of the data."""
        return (epoch - self.origin[0]) * self.elements - self.origin[1] + self.index

    def begin_with_another_cut(self, saved: dict[str, Any], epoch: int, now: tuple[int, int], whole: bool) -> None:
        """Continue a training that cut the same data into other elements, in its epoch `epoch`.

        Whatever was visited counts, even if it was not reported: an epoch that was visited completely is over. `now`:
        the data's epoch, and how many items of it were visited. `whole`: epochs end with those of the data; otherwise
        after `per_epoch` elements, wherever the data is then.
        """
        before = Plan(**saved)
        if not whole:
            done = before.done(*now) - epoch * before.per_epoch
            visited = math.ceil(now[1] / self.items_per_element)
            self.begin((now[0], visited), epoch * self.per_epoch + min(max(0, done), self.per_epoch))
            return
        first, rest = divmod(epoch * before.per_epoch - before._first_of(0), before.elements)
        # If the earlier epochs did not end with the data's, the rest begins with the data's next epoch.
        self.begin((now[0] if rest else min(first, now[0]), 0), epoch * self.per_epoch)

    def to_json(self) -> dict[str, Any]:
        """Return what must be the same when the training resumes."""
        return {name: value for name, value in vars(self).items() if name != "frontier"}

    def fits(self, saved: dict[str, Any]) -> bool:
        names = ("name", "elements", "items_per_element", "items", "per_epoch")
        return all(saved[name] == getattr(self, name) for name in names)

    def load(self, saved: dict[str, Any]) -> None:
        """Continue with a saved plan that fits."""
        self.origin, self.index, self.cuts = saved["origin"], saved["index"], saved["cuts"]
        self.frontier = self.index


def best_size(step_seconds: Iterable[float], dispatch_seconds: float, per_epoch: int | None, workers: int) -> int:
    """Return how many steps a function should take, so that what it takes beside them is no more than its share."""
    typical = max(statistics.median_high(step_seconds), 1e-7)
    size = math.ceil(min(dispatch_seconds / DISPATCH_SHARE, FUNCTION_SECONDS) / typical)
    if per_epoch is not None:
        size = min(size, per_epoch // (workers * FUNCTIONS_A_WORKER))
    return max(1, size)


class Overhead:
    """Measures what a function costs beside its steps, while the workers have enough to do.

    That is the time that a worker idles between two functions, and the coordinator's CPU time, since it may share the
    workers' cores.
    """

    def __init__(self, workers: int) -> None:
        self._least = max(16, 8 * workers)
        self.begin(0.0, 0.0)

    def begin(self, now: float, cpu: float) -> None:
        """Begin to measure, when the coordinator has used `cpu` seconds of CPU time."""
        self._begin, self._cpu = now, cpu
        self._functions = 0
        self._ends: dict[int, float] = {}
        self._gaps: list[float] = []

    def add(self, worker: int, begin: float, end: float, now: float, cpu: float) -> float | None:
        """Count a function that ran from `begin` to `end` by its worker's clock; return the seconds beside its steps.

        None until enough functions have ended over a long enough time; then measuring begins again.
        """
        last = self._ends.get(worker, math.inf)
        if begin >= last:  # otherwise the worker was restarted, with another clock
            self._gaps.append(begin - last)
        self._ends[worker] = end
        self._functions += 1
        if self._functions < self._least or now - self._begin < QUEUED_SECONDS:
            return None
        overhead = (statistics.median(self._gaps) if self._gaps else 0.0) + (cpu - self._cpu) / self._functions
        self.begin(now, cpu)
        return overhead


def most_ahead(function_seconds: float | None, workers: int) -> int:
    """Return how many functions to schedule ahead: just enough that no worker waits."""
    queued = 2 if function_seconds is None else 2 + int(QUEUED_SECONDS / max(function_seconds, 1e-6))
    return min(workers * queued, MOST_QUEUED)
