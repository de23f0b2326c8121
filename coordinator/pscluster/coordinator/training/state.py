"""How far a training is, kept with the variables: what `fit` needs to go on where a coordinator before it has stopped.

Beside it, and of the same moment in a checkpoint, is the position of the dataset, which alone says what was visited.
The scripts' trainings are numbered: one that is started again finds the same ones in the same order.
"""

from __future__ import annotations

from typing import Any

from pscluster.coordinator.job.progress import TRAINING, JobProgress
from pscluster.coordinator.variables.creation import VariableCreator


class TrainingState:
    """Of the training with this number.

    Attributes:
        finished: it has ended, and all that comes at its end was done.
        stopped: it has ended before its time.
        resumed: it goes on, and does not begin.
        epoch: whose end has not been dealt with.
        steps: that were taken in it, where the data has no position.
        totals: by name, of the epoch's logs: their sum and how many they are.
        plan: see `Plan.to_json`; None where the data has no position.
        callbacks: of each, what it wants to keep.
    """

    def __init__(self, variables: VariableCreator, number: int) -> None:
        self._kept = JobProgress(variables, TRAINING)
        self.number = number
        self.finished = self.stopped = self.resumed = False
        self.epoch = self.steps = 0
        self.totals: dict[str, tuple[float, int]] = {}
        self.plan: dict[str, Any] | None = None
        self.callbacks: list[dict[str, Any]] = []

    def load(self) -> bool:
        """Take up what was kept, if it is of this training. False if it is of a later one: this one had ended."""
        found = self._kept.load()
        number = found.get("number", 0)
        if number == self.number:
            self.resumed = True
            self.finished, self.stopped = found["finished"], found["stopped"]
            self.epoch, self.steps = found["epoch"], found["steps"]
            self.totals = {name: (total, count) for name, (total, count) in found["totals"].items()}
            self.plan, self.callbacks = found["plan"], found["callbacks"]
        return bool(number <= self.number)

    def save(self) -> None:
        """In place of what was kept before."""
        self._kept.save(
            {
                "number": self.number,
                "finished": self.finished,
                "stopped": self.stopped,
                "epoch": self.epoch,
                "steps": self.steps,
                "totals": self.totals,
                "plan": self.plan,
                "callbacks": self.callbacks,
            }
        )
