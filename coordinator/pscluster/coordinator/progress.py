"""A progress line: live in a terminal, plain lines now and then in a pipe."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pscluster.coordinator.cluster_coordinator import ClusterCoordinator

PLAIN_SECONDS = 2.0


class ProgressLine:
    """Shows how far a loop is: steps, loss, steps per second, workers up.

    Args:
        coordinator: whose workers are counted.
        total: steps in all.
        console: where to show it; default: standard error in a terminal, else standard output.
    """

    def __init__(self, coordinator: ClusterCoordinator, total: int, console: Console | None = None) -> None:
        self._coordinator = coordinator
        self._total = total
        self._console = console or (Console(stderr=True) if sys.stderr.isatty() else Console())
        self._done = 0
        self._begin = self._said = time.monotonic()
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=False,
            )
            self._task = self._live.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, steps: int, *, loss: float | None = None) -> None:
        """So many steps more are done; the loss, if there is one to show."""
        self._done += steps
        now = time.monotonic()
        rate = self._done / max(now - self._begin, 1e-9)
        text = f"{rate:.0f} steps/s  {self._coordinator.workers_up} workers up"
        if loss is not None:
            text = f"loss {loss:.4f}  {text}"
        if self._live is not None:
            self._live.update(self._task, completed=self._done, description=text)
        elif now - self._said >= PLAIN_SECONDS or self._done >= self._total or self._done == steps:
            self._said = now
            self._console.print(f"step {self._done}/{self._total}  {text}", highlight=False, soft_wrap=True)
