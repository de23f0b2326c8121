"""A progress line: live in a terminal and in a notebook; elsewhere a plain line every two seconds.

In a notebook it is an output of the cell that is updated, not a widget: that needs no ipywidgets, catches nothing that
others print meanwhile, stays in the saved notebook, and goes when the cell runs again.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.observability.events import Training
from pscluster.coordinator.queue.evaluation_queue import EvaluationQueue
from pscluster.core.display.sanitize import shown as plain

if TYPE_CHECKING:  # imported where something is shown: most scripts show nothing, and rich is slow to import
    from rich.console import Console
    from rich.progress import Progress

PLAIN_SECONDS = 2.0
LIVE_SECONDS = 0.05
NOTEBOOK_SECONDS = 0.2


def choose_console() -> Console:
    """Return a console on standard error if that is a terminal, else on standard output."""
    from rich.console import Console

    return Console(stderr=True) if sys.stderr.isatty() else Console()


def progress_of_files(data: DistributedDataset) -> str:
    """Return how far the epoch of a dataset of files is, in words; "" if it has just begun, or is of something else."""
    return str(progress) if data.is_of_files and (progress := data.progress).share else ""


class ProgressLine:
    """Shows the progress of a loop: steps, loss, steps or examples per second, workers up, time spent waiting for data.

    Args:
        total: steps in all; None: unknown.
        console: where to show it; default: see `choose_console`.
        label: a name for the loop, such as "epoch 1/3".
        data: the dataset that the loop reads: the share of time spent waiting for it is shown, and of one of files how
            many examples and bytes of the epoch are done, and how long the rest takes.
        done: steps done before.
        tells: also show the progress on the live page.
    """

    def __init__(
        self,
        coordinator: EvaluationQueue,
        total: int | None = None,
        console: Console | None = None,
        *,
        label: str = "",
        unit: str = "step",
        data: DistributedDataset | None = None,
        done: int = 0,
        tells: bool = True,
    ) -> None:
        self._coordinator = coordinator
        self._total = total
        self._console = console or choose_console()
        self._label = f"{label}  " if label else ""
        self._unit = unit
        self._data = data
        self._done = self._before = done
        self._examples = 0
        self._begin = time.monotonic()
        self._tells = tells
        self._shown_at = -math.inf
        self._live: Progress | None = None
        self._display: Any = None  # IPython's handle of the output, in a notebook
        if self._console.is_terminal or self._console.is_jupyter:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._live = Progress(
                TextColumn("{task.description}", markup=False),  # names are not ours
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=False,
                auto_refresh=not self._console.is_jupyter,  # by a thread
            )
            self._task = self._live.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        if self._live is not None and self._console.is_jupyter:
            from IPython.display import display

            show: Callable[..., Any] = display  # it has no types
            self._display = show(self._live, display_id=True)
        elif self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.update(self._live)
        elif self._live is not None:
            self._live.refresh()
            self._live.stop()

    def update(
        self, steps: int, *, loss: float | None = None, examples: int = 0, logs: Mapping[str, float] | None = None
    ) -> None:
        """Add steps that were done since the last call, and show the progress, with the loss and other numbers by name.

        Given the number of examples in these steps, examples per second are shown instead of steps.
        """
        self._done += steps
        self._examples += examples
        shown = {**({} if loss is None else {"loss": loss}), **(logs or {})}
        if self._tells:
            training = Training(self._label.strip(), self._done, self._total, self._unit, shown)
            self._coordinator.context.event_log.trained(training, steps=steps, examples=examples)
        now = time.monotonic()
        if now - self._shown_at < self._pause and self._done != self._total:
            return
        self._shown_at = now
        text = self._text(shown, now - self._begin)
        if self._live is not None:
            self._live.update(self._task, completed=self._done, description=self._label + text)
            if self._display is not None:
                self._display.update(self._live)
        else:
            of = "" if self._total is None else f"/{self._total}"
            line = f"{self._label}{self._unit} {self._done}{of}  {text}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def _pause(self) -> float:
        """The least seconds between two updates of what is shown."""
        if self._display is not None:
            return NOTEBOOK_SECONDS
        return PLAIN_SECONDS if self._live is None else LIVE_SECONDS

    def _text(self, shown: Mapping[str, float], seconds: float) -> str:
        done, unit = (self._examples, "examples") if self._examples else (self._done - self._before, f"{self._unit}s")
        words, workers = [f"{plain(name)} {value:.4f}" for name, value in shown.items()], self._coordinator.workers_up
        words += [f"{done / max(seconds, 1e-9):,.0f} {unit}/s", f"{workers} worker{'s' * (workers != 1)} up"]
        if self._data is not None and (progress := progress_of_files(self._data)):
            words.append(progress)
        if self._data is not None:
            words.append(f"{self._data.waiting:.0%} of the time waiting for data")
        return "  ".join(words)
