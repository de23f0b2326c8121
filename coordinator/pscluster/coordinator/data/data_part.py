"""A part of a dataset, which a function is given: a range of items (examples, files, or blocks of files).

They are items of an epoch's order, and the same in all attempts of the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pscluster.coordinator.data.dataset_progress import DatasetResource, EpochRange, Position
from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle

if TYPE_CHECKING:
    from pscluster.coordinator.data.dataset import DistributedDataset


class DataPart(Handle):
    """A part of an epoch: items `start` to `stop` - 1 in the order of epoch `epoch`, all from 0.

    Pass it to `schedule`; the step function iterates over its elements.
    """

    handle_kind = "part"

    def __init__(
        self,
        dataset: DistributedDataset,
        resource: DatasetResource,
        assigned: EpochRange,
        position: Position | None = None,
    ) -> None:
        self.dataset = dataset
        self.epoch, self.start, self.stop = assigned.epoch, assigned.start, assigned.stop
        self.position = position  # None: reading it does not count as a visit
        self._assigned = assigned
        self._resource = resource  # keeps the dataset on the workers
        self._key = f"{resource.id}/{assigned.epoch}/{assigned.start}/{assigned.stop}"
        self._entered = False  # a function was scheduled with it

    @property
    def handle_key(self) -> str:
        """The dataset's resource id, the epoch, the first item and the one after the last."""
        return self._key

    @property
    def name(self) -> str:
        """A name that is the same in every run of the script."""
        return f"{self.dataset.name}/{self.epoch}/{self.start}-{self.stop}"

    def enter(self) -> None:
        """Record that a function is scheduled with it. MisuseError if the position has been restored since."""
        if self.position is not None:
            self.position.enter(self._assigned)
        self._entered = True

    def commit(self, key: int) -> None:
        """Record, for the dispatcher, that its function, which has this key, has ended."""
        if self.position is not None:
            self.position.commit(self._assigned, key)

    def release(self) -> None:
        """Free it for another function: its own has failed, was cancelled, or could not be scheduled."""
        if self.position is not None:
            self.position.release(self._assigned)

    def __del__(self) -> None:
        if not self._entered and self.position is not None:
            self.position.abandon(self._assigned)

    def __iter__(self) -> Iterator[Any]:
        raise MisuseError(
            "a part has its elements on the workers: pass it to schedule(), and iterate over it in the step function"
        )

    def __repr__(self) -> str:
        return f"<DataPart {self.name}>"
