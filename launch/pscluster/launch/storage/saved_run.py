"""What is saved of a run: read, and asked for its reports and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pscluster.core.errors import CheckpointError
from pscluster.launch.storage.checkpoint import VARIABLES
from pscluster.launch.storage.run_files import RunFiles, explained


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    number: int  # of the report that it came with
    path: str
    metrics: Mapping[str, Any]  # of rank 0
    name: str


class SavedRun(RunFiles):
    """A run as its files say it is."""

    def __init__(self, storage: str, name: str) -> None:
        """Name the folder of a run; nothing is read or written. CheckpointError if the storage makes no sense."""
        super().__init__(storage, name)
        self._reports: dict[int, dict[str, Any]] = {}
        self._run: dict[str, Any] = {}

    def read(self) -> Self:
        """Read what there is. CheckpointError if there is no such run, or it can't be read."""
        with explained(self.path, "can't be read"):
            self._fs.invalidate_cache()
            try:
                self._run = self._read_json("run.json")
            except FileNotFoundError:
                raise CheckpointError(f"there is no run in {self.path}") from None
            self._reports = self._read_reports()
            if self._run.get("state") == "running" and not self._is_locked():
                self._run["state"] = "interrupted"
        return self

    def _read_reports(self) -> dict[int, dict[str, Any]]:
        folder = f"{self._root}/reports"
        try:
            names = [entry.rpartition("/")[2] for entry in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return {}
        numbers = sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{6,}\.json", name))
        reports: dict[int, dict[str, Any]] = {}
        for number in numbers:
            if number != len(reports) + 1:
                break  # one before it is missing: it was never acknowledged
            reports[number] = self._read_json(f"reports/{number:06d}.json")
        return reports

    @property
    def run(self) -> Mapping[str, Any]:
        """What run.json says."""
        return self._run

    @property
    def committed(self) -> int:
        """The number of the last report."""
        return len(self._reports)

    def history(self) -> list[dict[str, Any]]:
        """Return the metrics of rank 0, or of the lowest rank that reported, by report."""
        return [_first(report["metrics"]) for report in self._reports.values()]

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that are kept, the newest last."""
        return [
            SavedCheckpoint(number, f"{self.path}/{report['checkpoint']}", _first(report["metrics"]), report["name"])
            for number, report in self._reports.items()
            if report["checkpoint"]
        ]

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint."""
        return max(self.checkpoints(), key=lambda saved: saved.number, default=None)

    def best(self, score: str | None, order: str) -> list[SavedCheckpoint]:
        """Return the checkpoints, the best first; the newest first if there is no score."""

        def value(saved: SavedCheckpoint) -> tuple[bool, float, int]:
            number = None if score is None else saved.metrics.get(score)
            if not isinstance(number, int | float) or number != number:
                return False, 0.0, saved.number
            return True, number if order == "max" else -number, saved.number

        return sorted(self.checkpoints(), key=value, reverse=True)

    def positions(self, number: int, rank: int) -> dict[str, list[int]]:
        """Return where a member of the run as it is now goes on in its datasets after a report.

        That is where it had come to. If there were other members then, it is the beginning of the first epoch that one
        of them was in: what is left of an epoch can't be cut as it was.
        """
        report = self._reports[number]
        if report.get("rows") or report.get("workers") != self._run.get("workers"):
            return {name: [state["epoch"], 0, 0] for name, state in self.rows(number).items()}
        return self._positions(number).get(str(rank), {})

    def _positions(self, number: int) -> dict[str, dict[str, list[int]]]:
        """Return the positions by rank, as of a report: of members that had returned before it, their last ones."""
        positions: dict[str, dict[str, list[int]]] = {}
        workers = self._reports[number].get("workers")
        for report in (self._reports[earlier] for earlier in range(number, 0, -1)):
            if report.get("workers") != workers or len(positions) == workers:
                break
            positions = {**report["positions"], **positions}
        return positions

    def rows(self, number: int) -> dict[str, dict[str, Any]]:
        """Return which rows of each dataset the members had been given when they reported: see `rows.Rows.state`."""
        if rows := self._reports[number].get("rows"):
            return dict(rows)
        epochs: dict[str, int] = {}
        for of_rank in self._positions(number).values():  # of a run that was not elastic: it begins an epoch anew
            for name, (epoch, *_) in of_rank.items():
                epochs[name] = min(epoch, epochs.get(name, epoch))
        return {name: {"epoch": epoch} for name, epoch in epochs.items()}

    def rows_again(self) -> int:
        """Return how many rows members have reported to have been given once more."""
        if not self._reports:
            return 0
        report = self._reports[self.committed]
        again: int = sum(state["again"] for state in report.get("rows", {}).values())
        last = self._positions(self.committed)
        return again + sum(position[2] for of_rank in last.values() for position in of_rank.values())

    def variables(self) -> str | None:
        """Return the path of the newest variables of parameter servers that are kept; None if there are none."""
        kept = [report for report in self._reports.values() if report["checkpoint"] and report.get("variables")]
        return f"{self.path}/{kept[-1]['checkpoint']}/{VARIABLES}" if kept else None


def _first(by_rank: Mapping[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = by_rank[min(by_rank, key=int)] if by_rank else {}
    return metrics
