"""Training: what one function of `fit` does on a worker. Several steps, and what each of them says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.context import experimental_get_current_worker_index
from pscluster.core.errors import MisuseError

StepLogs = tuple[int, float, float, list[str], npt.NDArray[np.float64]]
"""The worker's number, its clock before and behind, names, and for each step a row of numbers."""


_LOSS = ["loss"]


def logs_of_steps(step: Callable[[Any], Any], elements: Iterable[Any], steps: int | None = None) -> StepLogs:
    """Take one step after the other.

    Args:
        step: the user's; gives a number, which is the loss, a dict of numbers, or None.
        elements: one for each step.
        steps: so many; an iterator that ends before raises, as it does in the user's own step. None: to their end.

    Raises:
        MisuseError: a step gives something else, or not always the same names.
    """
    names: list[str] | None = None
    rows: list[list[float]] = []
    begin, iterator = time.perf_counter(), iter(elements)
    while steps is None or len(rows) < steps:
        try:
            element = next(iterator)
        except StopIteration:
            if steps is None:
                break
            raise  # as out of the user's own step: it becomes the error that says what to do
        found = step(element)
        if type(found) is float and names == _LOSS:  # what follows takes a part of a hundred of a short step's time
            rows.append([found])
            continue
        logs = found if isinstance(found, dict) else {} if found is None else {"loss": found}
        if names is None:
            names = list(logs)
        elif logs.keys() != set(names):
            raise MisuseError(f"the step gave logs named {names} before, and {list(logs)} now: give the same each time")
        rows.append([_number(name, logs[name]) for name in names])
    values = np.array(rows, np.float64).reshape(len(rows), len(names or ()))
    return experimental_get_current_worker_index(), begin, time.perf_counter(), names or [], values


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shape = f" of shape {np.shape(value)}" if np.shape(value) else ""
        raise MisuseError(
            f"the step gave a {type(value).__name__}{shape} as {name!r}; it must be a number: return the loss, or a "
            "dict of numbers, or None"
        ) from error
