"""Training: a function of `fit` on a worker, which takes several steps and returns their logs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.context import experimental_get_current_worker_index
from pscluster.core.errors import MisuseError
from pscluster.ps.handles.metric import MetricLike
from pscluster.worker.steps.results import NO_RESULT

StepLogs = tuple[int, float, float, list[str], npt.NDArray[np.float64]]
"""The worker's index, its clock before and after, names, and for each step a row of numbers."""

_LOSS = ["loss"]


@runtime_checkable
class MakesSteps(Protocol):
    """A model of a framework, which `fit`, `evaluate` and `predict` take in place of a step function."""

    def training_step(self) -> Callable[[Any], Any]:
        """Return the step of `fit`."""

    def evaluation_step(self) -> Callable[[Any], Any]:
        """Return the step of `evaluate`, which returns the arguments of the metric."""

    def evaluation_metric(self) -> MetricLike:
        """Return the metric; it may have `several` results, as a dict."""

    def prediction_step(self) -> Callable[[Any], Any]:
        """Return the step of `predict`."""


class FrameworkCallback(Protocol):
    """What drives a callback of a model's framework. Its hooks have Keras' names, as those of ours."""

    name: str
    by_batch: bool
    """Whether it has hooks for batches."""

    def begin(self, params: Mapping[str, Any]) -> None:
        """Begin a training, before the first hook; `params`: as `Callback.params`."""

    def call(self, hook: str, *args: Any) -> bool:
        """Call a hook. Return whether the training is to stop."""

    def close(self) -> None:
        """End the training, for whatever reason."""

    def state(self) -> dict[str, float]:
        """Return what to save for a coordinator that resumes the training."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


@runtime_checkable
class DrivesCallbacks(Protocol):
    """A model that can drive callbacks of its framework in `fit`."""

    def drive_callbacks(self, callbacks: Sequence[Any]) -> Sequence[FrameworkCallback | None]:
        """Return what drives each callback; None for one that is not of its framework. Raise if one can't work."""


def logs_of_steps(step: Callable[[Any], Any], elements: Iterable[Any], steps: int | None = None) -> StepLogs:
    """Run the user's step for each element: `steps` times, or to the end if None. An earlier end raises StopIteration.

    Raise MisuseError if a step returns something other than a number (the loss), a dict of numbers, or None; or other
    names than before.
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
            raise  # as from the user's own step: the runner turns it into an error that says what to do
        result = step(element)
        if type(result) is float and names == _LOSS:  # skips what takes 1 % of a short step's time
            rows.append([result])
            continue
        logs = result if isinstance(result, dict) else {} if result is None else {"loss": result}
        if names is None:
            names = list(logs)
        elif logs.keys() != set(names):
            raise MisuseError(
                f"the step returned logs named {names} before, and {list(logs)} now: return the same names each time"
            )
        rows.append([_number(name, logs[name]) for name in names])
    values = np.array(rows, np.float64).reshape(len(rows), len(names or ()))
    return experimental_get_current_worker_index(), begin, time.perf_counter(), names or [], values


def logs_of_replicas(of_replicas: Sequence[Sequence[StepLogs | Any]]) -> StepLogs:
    """Return the means of the logs of single steps, each over the replicas that have some; the clock is that of one.

    MisuseError if they have other names.
    """
    there = [[(at, step) for at, step in enumerate(logs) if step is not NO_RESULT] for logs in of_replicas]
    if not any(there):  # an earlier attempt has taken all steps, and its logs are lost
        return 0, 0.0, 0.0, [], np.empty((0, 0))
    source = next(replica for replica, logs in enumerate(there) if logs)
    (_, first), (_, last) = there[source][0], there[source][-1]
    names, rows = first[3], defaultdict[int, list[Any]](list)
    for replica, logs in enumerate(there):
        for at, step in logs:
            if step[3] != names:
                raise MisuseError(
                    f"replica {replica} returned logs named {step[3]}, and replica {source} {names}: return the same "
                    "names"
                )
            rows[at].append(step[4][0])
    means = np.array([np.mean(rows[at], axis=0) for at in sorted(rows)])
    return first[0], first[1], last[2], names, means.reshape(len(rows), len(names))


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shape = f" of shape {np.shape(value)}" if np.shape(value) else ""
        raise MisuseError(
            f"the step returned {type_of(value)}{shape} as {name!r}; it must be a number: return the loss, a "
            "dict of numbers, or None"
        ) from error
