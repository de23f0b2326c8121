"""Writes what members report together: into the run's folder, for TensorBoard, and to the screen."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

from pscluster.coordinator.observability.progress_line import choose_console
from pscluster.coordinator.training.events import EventWriter
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.launch.answers.session import Commit
from pscluster.launch.config import CheckpointConfig
from pscluster.launch.storage.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Reporting:
    """Writes the reports of a run. For one thread."""

    def __init__(self, folder: RunFolder, checkpoint: CheckpointConfig) -> None:
        self._folder, self._keep = folder, checkpoint
        self._events: EventWriter | None = None

    def commit(self, commit: Commit, save_variables: Callable[[str], object]) -> str | None:
        """Commit a report, and show it; return the path of its checkpoint, if it has one.

        `save_variables` saves those of the parameter servers to a path. PsClusterError if the report can't be written:
        then it is not committed. What else fails is logged.
        """
        number, reports = commit.number, commit.reports
        path = self._folder.commit(number, reports, save_variables, commit.rows)
        metrics = reports[min(reports)].metrics
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self._show(number, numbers)
        self._write_events(number, numbers)
        try:
            self._folder.retain(self._keep.num_to_keep, self._keep.score, self._keep.order)
        except PsClusterError as error:  # tried again after the next report
            logger.warning("old checkpoints can't be deleted: %s", error)
        return path

    def close(self) -> None:
        """Close what is open."""
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()

    def _show(self, number: int, numbers: Mapping[str, float]) -> None:
        listed = "".join(f"  {name} {value:.4g}" for name, value in numbers.items())
        text = f"{self._folder.name}  report {number}{listed}"
        choose_console().print(shown(text), highlight=False, markup=False, soft_wrap=True)

    def _write_events(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of the lowest rank for TensorBoard, if what that needs is installed."""
        if not EventWriter.available():
            return
        try:
            self._events = self._events or EventWriter(f"{self._folder.path}/tensorboard")
            self._events.scalars(number, numbers)
        except (ConfigurationError, OSError) as error:
            logger.warning("report %d is committed, but not in the files for TensorBoard: %s", number, error)
