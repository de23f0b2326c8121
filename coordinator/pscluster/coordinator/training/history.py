"""The logs of a training, epoch by epoch, and a plot of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

from pscluster.core.errors import ConfigurationError


class History:
    """The logs of the epochs, as Keras has them.

    Attributes:
        epoch: the epochs' numbers, from 0, or from where the training was resumed.
        history: by name, a number for each of these epochs; NaN where there was none.
        params: "epochs" and "steps", the steps of an epoch if they are known.
        stopped: why the training ended early; "" if it did not.
    """

    def __init__(self, **params: Any) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}
        self.params: dict[str, Any] = params
        self.stopped = ""

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Add the logs of an epoch; numbers that another epoch has not are NaN there. For internal use."""
        for name in logs:
            self.history.setdefault(name, [math.nan] * len(self.epoch))
        self.epoch.append(epoch)
        for name, values in self.history.items():
            values.append(logs.get(name, math.nan))

    def plot(self, path: str | PathLike[str]) -> None:
        """Plot each number with its "val_" counterpart in a panel, as a PNG or what the path's suffix says.

        Raises:
            ConfigurationError: matplotlib is not installed.
            ValueError: no epoch has ended.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError('pictures need matplotlib: pip install "pscluster[plot]"') from error
        names = [name for name, values in self.history.items() if all(map(_is_number, values))]
        panels = list(dict.fromkeys(name.removeprefix("val_") for name in names))
        if not panels:
            raise ValueError("nothing to plot: no epoch with logs has ended")
        figure = Figure(figsize=(7, 2.6 * len(panels)), layout="constrained")
        for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            for name in (panel, f"val_{panel}"):
                if name in names:
                    axes.plot([epoch + 1 for epoch in self.epoch], self.history[name], marker=".", label=name)
            axes.set_xlabel("epoch")
            axes.set_ylabel(panel)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(path, dpi=120)

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {values[-1]:.4g}" for name, values in self.history.items() if _is_number(values[-1]))
        return f"<History {len(self.epoch)} epochs{f': {last}' if last else ''}>"


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int)
