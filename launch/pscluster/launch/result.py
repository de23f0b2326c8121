"""What a run has come to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pscluster.launch.storage.checkpoint import Checkpoint
from pscluster.launch.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Result:
    """What a run has reported, and how it ended."""

    name: str
    path: str
    """Of the run's folder."""
    state: str
    """"finished", "failed", "interrupted", or "running"."""
    metrics: Mapping[str, Any]
    """Those of rank 0 in the last report; empty if there is none."""
    metrics_history: Sequence[Mapping[str, Any]]
    """Those of rank 0, by report."""
    checkpoint: Checkpoint | None
    """The newest."""
    best_checkpoints: Sequence[tuple[Checkpoint, Mapping[str, Any]]]
    """Those that are kept, with the metrics that came with them, the best first."""
    return_values: Sequence[Any] | None = None
    """What the function returned, by rank; None if it has not, or, in a result that was loaded, if it is not JSON.

    Of an elastic run: what those members returned that came to its end, in the order in which they had joined.
    """
    error: BaseException | None = field(default=None, compare=False)
    rows_again: int = 0
    """Rows of datasets that members were given once more after a restart, or others after a member had left, as far as
    it was reported."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Return the result of a run from its folder.

            Result.load("~/pscluster_runs/digits").metrics

        Args:
            path: of the run's folder: a path, or a URL.

        Raises:
            CheckpointError: no run is there.
        """
        storage, _, name = os.fspath(path).rstrip("/").rpartition("/")
        folder = RunFolder(storage or ".", name).read()
        return cls.of(folder, return_values=folder.run.get("return_values"))

    @classmethod
    def of(
        cls, folder: RunFolder, *, return_values: Sequence[Any] | None = None, error: BaseException | None = None
    ) -> Result:
        """Return the result of a run that has been read or written."""
        history, latest = folder.history(), folder.latest()
        keep = folder.run.get("checkpoint_config") or {}
        best = folder.best(keep.get("score"), keep.get("order", "max"))
        return cls(
            name=folder.name,
            path=folder.path,
            state=str(folder.run.get("state", "")),
            metrics=history[-1] if history else {},
            metrics_history=history,
            checkpoint=None if latest is None else Checkpoint(latest.path),
            best_checkpoints=[(Checkpoint(saved.path), saved.metrics) for saved in best],
            return_values=return_values,
            error=error,
            rows_again=folder.rows_again(),
        )
