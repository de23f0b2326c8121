"""How far a training is, in the job's metadata: what `fit` needs to resume where an earlier coordinator stopped.

The dataset's position, of the same moment in a checkpoint, alone says what was visited. A script's trainings are
numbered: when it is started again, it finds the same ones in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pscluster.coordinator.job import progress
from pscluster.ps.client.client import PsClient

_KEPT = ("number", "finished", "stopped", "epoch", "steps", "totals", "plan", "callbacks")


@dataclass(eq=False)
class TrainingState:
    """The saved state of the script's n-th training."""

    client: PsClient
    number: int
    finished: bool = False  # it has ended, and so have the callbacks for its end
    stopped: bool = False  # it was ended early
    resumed: bool = False  # it continues an earlier run
    epoch: int = 0  # in progress, until its end has been handled
    steps: int = 0  # taken in that epoch, if the data has no position
    totals: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum and number of the epoch's logs, by name
    plan: dict[str, Any] | None = None  # see `Plan.to_json`; None if the data has no position
    callbacks: list[dict[str, Any]] = field(default_factory=list)  # the state of each

    def load(self) -> bool:
        """Load what was saved, if it is of this training. False if it is of a later one: this one has ended."""
        saved = progress.load(self.client, progress.TRAINING)
        saved_number: int = saved.get("number", 0)
        if saved_number == self.number:
            self.resumed = True
            vars(self).update(saved)
        return saved_number <= self.number

    def save(self) -> None:
        values = {name: getattr(self, name) for name in _KEPT}
        progress.save(self.client, progress.TRAINING, values)
