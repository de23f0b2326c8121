"""ReportCheckpoint: reports what a training loop logs, with checkpoints. For `coordinator.fit`, and for Keras.

Keras is not imported: what its loop calls are methods of these names, on any object.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pscluster.coordinator.checkpoints.checkpoint import Checkpoint as Variables
from pscluster.coordinator.training.callbacks import Callback
from pscluster.core import checks
from pscluster.core.errors import MisuseError
from pscluster.launch.members.context import get_context, report
from pscluster.launch.storage.checkpoint import Checkpoint

KERAS_FILE = "model.keras"

Logs = dict[str, Any]


class ReportCheckpoint(Callback):
    """Reports the logs of a training loop in a function that `Trainer.fit` runs, after each epoch or some steps.

    The checkpoint is one of all variables with their slots, which `pscluster.coordinator.Checkpoint(strategy).read`
    reads; in Keras it is the model, in `model.keras`. Its metadata says how many "epochs" are done, and "steps" of the
    next one. With several members rank 0 gives it; the others save their models, too, since strategies may read
    variables together, and throw them away.

    Args:
        metrics: which to report: None: all; names; or for each name to report that of the log.
        report_freq: "epoch", or a number of steps.
        checkpoint_freq: a checkpoint comes with every this many reports; 0: with none.
        directory: where it is written before it is copied into the run's folder: a place that the parameter servers
            reach. Default: a temporary directory of this machine.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        metrics: Sequence[str] | Mapping[str, str] | None = None,
        *,
        report_freq: int | Literal["epoch"] = "epoch",
        checkpoint_freq: int = 1,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if report_freq != "epoch":
            report_freq = checks.whole("report_freq", report_freq, ", or 'epoch'", at_least=1)
        if isinstance(metrics, str):
            raise TypeError(f"metrics is the string {metrics!r}: give a list of names")
        if metrics is not None and not isinstance(metrics, Iterable):
            raise TypeError(f"metrics is {checks.type_of(metrics)}; give a list of names")
        self._metrics = metrics if metrics is None or isinstance(metrics, Mapping) else {name: name for name in metrics}
        self._report_freq = report_freq
        self._checkpoint_freq = checks.whole("checkpoint_freq", checkpoint_freq, at_least=0)
        self._directory = directory
        self._reports = self._steps = self._epoch = 0
        self.model: Any = None  # in Keras

    # The hooks of both loops

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch, self._steps = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._steps += 1
        if self._report_freq != "epoch" and self._steps % self._report_freq == 0:
            self._report(logs or {}, {"epochs": self._epoch, "steps": self._steps})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._report_freq == "epoch":
            self._report(logs or {}, {"epochs": epoch + 1, "steps": 0})

    # Those that only Keras has

    def set_model(self, model: Any) -> None:
        """Remember the model; Keras calls this before the training."""
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Do nothing: how many steps there are makes no difference."""

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    on_batch_begin = on_batch_end = on_test_batch_begin = on_test_batch_end = _nothing
    on_predict_begin = on_predict_end = on_predict_batch_begin = on_predict_batch_end = _nothing

    def _report(self, logs: Logs, done: Mapping[str, int]) -> None:
        metrics = self._chosen(logs)
        self._reports += 1
        if not self._checkpoint_freq or self._reports % self._checkpoint_freq:
            report(metrics)
            return
        with self._place() as folder:
            self._save(folder)
            checkpoint = Checkpoint.from_directory(folder)
            checkpoint.set_metadata(done)
            report(metrics, checkpoint if get_context().world_rank == 0 else None)

    def _chosen(self, logs: Logs) -> Logs:
        if self._metrics is None:
            return dict(logs)
        if missing := [name for name in self._metrics.values() if name not in logs]:
            raise MisuseError(f"ReportCheckpoint can't report {missing[0]!r}: the logs have {', '.join(logs)}")
        return {name: logs[logged] for name, logged in self._metrics.items()}

    @contextlib.contextmanager
    def _place(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="pscluster-report-", dir=self._directory) as folder:
            yield folder

    def _save(self, folder: str) -> None:
        if self.model is not None:
            self.model.save(str(Path(folder, KERAS_FILE)))
            return
        self.training.keep()
        Variables(self.training.coordinator.strategy).write(folder)


ReportCheckpointCallback = ReportCheckpoint
"""Its name in Ray Train."""
