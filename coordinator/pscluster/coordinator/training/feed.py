"""What a training's functions take: parts of a distributed dataset, or elements of per-worker datasets."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pscluster.coordinator.data.data_part import DataPart
from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorkerDataset
from pscluster.coordinator.training.plan import Plan
from pscluster.coordinator.training.state import TrainingState
from pscluster.core.errors import MisuseError


@dataclass(frozen=True, slots=True)
class Work:
    """The data of one function: its arguments, its name, and its size in steps (or files) and examples."""

    args: tuple[Any, ...]
    name: str
    units: int
    examples: int = 0


class DistributedFeed:
    def __init__(self, data: DistributedDataset, steps_per_epoch: int | None) -> None:
        shape = data.shape
        if steps_per_epoch is not None and shape.noun != "example":
            raise ValueError("steps can't be counted in a dataset of files: omit steps_per_epoch")
        if steps_per_epoch is None and shape.epochs is None:
            raise ValueError("the dataset repeats without end: give steps_per_epoch, or repeat(n)")
        self.data = data
        self.unit = "step" if shape.noun == "example" else shape.noun
        self.per_epoch = steps_per_epoch or shape.elements * (shape.epochs or 1)
        self._with_data = steps_per_epoch is None  # epochs end with those of the data, the first one included
        self._parts: Iterator[DataPart] = iter(())

    def prepare(self) -> None:
        """Take the name under which the position is saved, before anything is restored."""
        shape, _ = self.data.shape, self.data.epoch  # reading the epoch takes the name
        self._plan = Plan(self.data.name, shape.elements, shape.items_per_element, shape.items, self.per_epoch)

    def begin(self, state: TrainingState, live: bool) -> None:
        """Continue from the training's state, or begin, and keep the state's plan current.

        `live`: with the servers of a coordinator that died, some of whose functions may still run. MisuseError if
        their data was cut differently.
        """
        self._state = state
        if state.plan is not None and self._plan.fits(state.plan):
            self._plan.load(state.plan)
        elif state.plan is not None and live:
            raise MisuseError(
                f"the resumed training cut its data into {_cut(state.plan)}, and this one into "
                f"{_cut(self._plan.to_json())}: functions in flight would count twice. Use the same cut, or start "
                "over with ParameterServerStrategy(..., resume=False)"
            )
        else:
            self.save()  # before any part of the new cut is handed out
            now = self.data.epoch, self.data.visited
            if state.plan is not None and state.plan["name"] == self.data.name:
                self._plan.begin_with_another_cut(state.plan, state.epoch, now, self._with_data)
            else:
                visited = -(-now[1] // self._plan.items_per_element)
                origin = now[0], 0 if self._with_data else visited
                self._plan.begin(origin, state.epoch * self.per_epoch + (0 if self._with_data else state.steps))
        state.plan = self._plan.to_json()

    def begin_epoch(self) -> int:
        """Begin the state's epoch; return how many of its units are already done."""
        epoch = self._state.epoch
        done = self._plan.done(self.data.epoch, self.data.visited) - epoch * self.per_epoch
        self._plan.begin_epoch(epoch)
        self._parts = self.data.cut(functools.partial(self._plan.stop_of, epoch))
        return min(max(0, done), self.per_epoch)

    def next(self) -> Work | None:
        """Return the next function's data; None at the epoch's end."""
        part = next(self._parts, None)
        if part is None:
            return None
        items = part.stop - part.start
        units = -(-items // self._plan.items_per_element)
        return Work((part,), part.name, units, items if self.unit == "step" else 0)

    def give_back(self, work: Work) -> None:
        """Take back data that no function was scheduled with."""
        work.args[0].release()

    def size(self) -> int:
        return self._plan.size_at(self._plan.frontier)

    def resize(self, size: int) -> bool:
        """Have functions take `size` steps, from the next one on; return whether that is a change."""
        changed = self._plan.change(size)
        self._state.plan = self._plan.to_json()
        return changed

    def save(self) -> None:
        self.data.save_position()


class PerWorkerFeed:
    """A feed of elements of per-worker datasets, which have no position. For its methods see `DistributedFeed`."""

    unit = "step"
    data = None

    def __init__(self, data: PerWorkerDataset, steps_per_epoch: int | None) -> None:
        if steps_per_epoch is None:
            raise ValueError(
                "a per-worker dataset has no length: give steps_per_epoch, or use distribute_dataset(), whose epochs "
                "end by themselves"
            )
        self.per_epoch = steps_per_epoch
        self._data, self._iterator = data, iter(data)
        self._size = 1
        self._steps_left = 0

    def prepare(self) -> None:
        pass

    def begin(self, state: TrainingState, live: bool) -> None:  # noqa: ARG002  (it has no position)
        self._state = state

    def begin_epoch(self) -> int:
        self._steps_left = max(0, self.per_epoch - self._state.steps)
        self._iterator = self._data.current(self._iterator)
        return self.per_epoch - self._steps_left

    def next(self) -> Work | None:
        steps = min(self._size, self._steps_left)
        if not steps:
            return None
        self._steps_left -= steps
        return Work((self._iterator, steps), f"{steps} steps", steps)

    def give_back(self, work: Work) -> None:
        self._steps_left += work.units

    def size(self) -> int:
        return self._size

    def resize(self, size: int) -> bool:
        changed, self._size = size != self._size, size
        return changed

    def save(self) -> None:
        pass


Feed = DistributedFeed | PerWorkerFeed


def _cut(plan: Mapping[str, Any]) -> str:
    elements = f"{plan['elements']:,} elements of {plan['items_per_element']:,}"
    return f"{elements}, {plan['per_epoch']:,} an epoch, as {plan['name']!r}"
