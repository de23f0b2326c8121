"""A progress line: live in a terminal, and in a notebook that has ipywidgets; plain lines now and then elsewhere."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.observability.events import Training
from pscluster.coordinator.scheduling.function_queue import FunctionQueue
from pscluster.core.sanitize import shown as plain

PLAIN_SECONDS = 2.0
LIVE_SECONDS = 0.05


def choose_console() -> Console:
    """Standard error in a terminal, else standard output."""
    return Console(stderr=True) if sys.stderr.isatty() else Console()


def _is_notebook(console: Console) -> bool:
    """One in which rich can show what changes; it says that it is no terminal."""
    return console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None


class ProgressLine:
    """Shows how far a loop is: steps, loss, steps or examples per second, workers up, and how long is waited for data.

    Args:
        coordinator: whose workers are counted.
        total: steps in all; None: not known.
        console: where to show it; default: see `choose_console`.
        label: what it is of, such as "epoch 1/3".
        unit: what is counted.
        data: the dataset that is gone through: says how much time goes into waiting for it.
        done: steps that were done before.
        tells: also show it on the live page.
    """

    def __init__(
        self,
        coordinator: FunctionQueue,
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
        self._said = -math.inf
        self._live: Progress | None = None
        if self._console.is_terminal or _is_notebook(self._console):
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=False,
            )
            self._task = self._live.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.refresh()  # in a notebook its end shows what was shown last
            self._live.stop()

    def update(
        self, steps: int, *, loss: float | None = None, examples: int = 0, logs: Mapping[str, float] | None = None
    ) -> None:
        """So many steps more are done.

        Args:
            steps: since the last call.
            loss: to be shown.
            examples: in these steps; given, examples a second are shown in place of steps.
            logs: other numbers to be shown, by name.
        """
        self._done += steps
        self._examples += examples
        shown = {**({} if loss is None else {"loss": loss}), **(logs or {})}
        if self._tells:
            training = Training(self._label.strip(), self._done, self._total, self._unit, shown)
            self._coordinator.context.event_log.trained(training, steps=steps, examples=examples)
        now = time.monotonic()
        if now - self._said < (PLAIN_SECONDS if self._live is None else LIVE_SECONDS) and self._done != self._total:
            return
        self._said = now
        text = self._text(shown, now - self._begin)
        if self._live is not None:
            self._live.update(self._task, completed=self._done, description=escape(self._label + text))
        else:
            of = "" if self._total is None else f"/{self._total}"
            line = f"{self._label}{self._unit} {self._done}{of}  {text}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _text(self, shown: Mapping[str, float], seconds: float) -> str:
        done, what = (self._examples, "examples") if self._examples else (self._done - self._before, f"{self._unit}s")
        words = [f"{plain(name)} {value:.4f}" for name, value in shown.items()]
        words += [f"{done / max(seconds, 1e-9):,.0f} {what}/s", f"{self._coordinator.workers_up} workers up"]
        if self._data is not None:
            words.append(f"{self._data.waiting:.0%} of the time waiting for data")
        return "  ".join(words)
