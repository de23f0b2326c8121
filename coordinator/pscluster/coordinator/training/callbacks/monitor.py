"""A monitor of whether a number of the logs improves."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from pscluster.coordinator.training.callbacks.base import Callback
from pscluster.core import checks
from pscluster.core.errors import MisuseError

logger = logging.getLogger(__name__)

EPOCHS = "whole number of epochs"

Mode = Literal["auto", "min", "max"]

_GROW = re.compile(r"acc|auc|precision|recall|f1|r2|score", re.IGNORECASE)


class Monitor:
    """Remembers the best value of a number of the logs; even the first one must improve on `best`."""

    def __init__(self, name: str, mode: Mode = "auto", min_delta: float = 0.0, best: float | None = None) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode is {mode!r}; it must be 'auto', 'min' or 'max'")
        if not isinstance(name, str):
            raise TypeError(f"monitor is {checks.type_of(name)}; give the name of a log, such as 'val_loss'")
        checks.real("min_delta", min_delta, at_least=0)
        self.name = name
        self._sign = 1 if mode == "max" or (mode == "auto" and _GROW.search(name)) else -1
        self._min_delta = min_delta
        self._first = -self._sign * math.inf if best is None else best
        self.best = self._first
        self._missed = False

    def reset(self) -> None:
        """Forget the best value: another training begins."""
        self.best = self._first

    def check(self, callback: Callback) -> None:
        """Raise MisuseError if the logs will not have the number."""
        if self.name.startswith("val_") and not callback.params.get("validation", True):
            raise MisuseError(
                f"{type(callback).__name__} monitors {self.name!r}, but nothing is evaluated: give fit() "
                "validation_data, or another monitor"
            )

    def value(self, logs: Mapping[str, Any] | None) -> float | None:
        """Return the number; None if the logs lack it, which is logged once."""
        value = (logs or {}).get(self.name)
        if value is None and not self._missed and not self.name.startswith("val_"):  # not every epoch is evaluated
            self._missed = True
            logger.warning("a callback monitors %r, which is not in the logs: %s", self.name, list(logs or ()))
        return None if value is None else float(value)

    def improves(self, value: float) -> bool:
        """Return whether a value is better than `best`, by more than `min_delta`."""
        if math.isinf(self.best):
            return math.isfinite(value)
        return self._sign * (value - self.best) > self._min_delta
