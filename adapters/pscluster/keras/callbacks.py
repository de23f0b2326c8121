"""Keras' own callbacks, driven by `fit` in the script.

Their `model` is a plain copy. When a hook asks for it, the weights are read from the servers, at most once a hook; what
the hook has changed in them, such as the best weights that `EarlyStopping` restores, and in the optimizer's rate, is
written to the servers when it returns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.keras.copies import Copy, to_numpy
from pscluster.ps.handles.gradients.parameters import apply_all
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.reads import read_variables
from pscluster.ps.handles.variables.variable import Variable

logger = logging.getLogger(__name__)

_WORKING = (
    "EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, LearningRateScheduler, CSVLogger, TerminateOnNaN, "
    "LambdaCallback, RemoteMonitor, and your own"
)
_REFUSED = {
    "BackupAndRestore": "pscluster.coordinator.callbacks.BackupAndRestore also has the servers' slots and the position "
    "in the data",
    "TensorBoard": "pscluster.coordinator.callbacks.TensorBoard writes the same files",
    "OrbaxCheckpoint": "pscluster.coordinator.callbacks.ModelCheckpoint also has the servers' slots",
    "SwapEMAWeights": "averages are on the servers: served.to_keras(averages=True)",
    "ProgbarLogger": "fit(verbose=1) shows progress",
}
"""Callbacks that need what only Keras' own loop has, and what to use."""

_STATES = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
}
"""The numbers with which these continue after the coordinator's restart."""


class Served(Protocol):
    """What is needed of a served model."""

    @property
    def optimizer(self) -> Optimizer:
        """What applies gradients."""

    @property
    def variables(self) -> dict[str, Variable]:
        """The weights, in the order of a copy's."""

    def plain_copy(self) -> Copy:
        """Return a copy of the model, whose weights are any."""


class CallbackModel:
    """The model that callbacks see."""

    def __init__(self, served: Served) -> None:
        self._served = served
        copy = served.plain_copy()
        self.model = copy.model
        self._variables: list[tuple[Any, Variable]] = list(zip(copy.weights, served.variables.values(), strict=True))
        self._known: list[tuple[int, int]] = []
        self._is_stale = True
        self._rate = self._own_rate()

    def current(self) -> Any:
        """Return the model with the weights of the servers, as of the first time that this hook asks for it."""
        if self._is_stale:
            values = read_variables([variable for _, variable in self._variables])
            for (weight, _), value in zip(self._variables, values, strict=True):
                weight.assign(value)
            self._known = [_version(weight) for weight, _ in self._variables]
            self._is_stale = False
        return self.model

    def begin(self, *, of_epoch: bool) -> None:
        """Begin a hook. That of an epoch, or of the training, sees the rate on the servers."""
        self._is_stale = True
        if not of_epoch:
            return
        rate = self._served.optimizer.learning_rate
        optimizer = self.model.optimizer
        if isinstance(rate, float | int):
            if self._rate is not None and np.float32(rate) != np.float32(self._rate):
                optimizer.learning_rate = rate
                self._rate = self._own_rate()
        elif optimizer is not None:
            optimizer.iterations.assign(self._served.optimizer.iterations)
            self._rate = self._own_rate()

    def end(self) -> bool:
        """End a hook: write what it has changed. Return whether it wants the training to stop."""
        if not self._is_stale:
            changed = [
                (_array(weight, variable), variable)
                for (weight, variable), known in zip(self._variables, self._known, strict=True)
                if _version(weight) != known
            ]
            apply_all((), assign=changed)
        rate = self._own_rate()
        if rate is not None and rate != self._rate:
            self._served.optimizer.learning_rate = rate
            self._rate = rate
        return bool(self.model.stop_training)

    def _own_rate(self) -> float | None:
        rate = getattr(self.model.optimizer, "learning_rate", None)
        return None if rate is None else float(to_numpy(rate))


class DrivenCallback:
    """One of Keras' callbacks in a training. See `pscluster.worker.steps.training.FrameworkCallback`."""

    def __init__(self, callback: Any, model: CallbackModel) -> None:
        import keras

        self._callback, self._model = callback, model
        self._kind = type(callback)
        self.name = self._kind.__name__
        hooks = [f"on_{of}batch_{at}" for of in ("", "train_") for at in ("begin", "end")]
        self.by_batch = any(_is_own(callback, hook) for hook in hooks)
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
            self.by_batch = False
        never = [hook for hook in ("on_test_batch_begin", "on_test_batch_end") if _is_own(callback, hook)]
        if never:
            logger.warning("%s.%s is never called: workers evaluate batches by themselves", self.name, never[0])
        # Those that keep the model which they were given must find its weights there.
        self._keeps = self._kind.set_model is not keras.callbacks.Callback.set_model

    def begin(self, params: Mapping[str, Any]) -> None:
        """Begin a training."""
        kind = self._kind
        model = property(lambda _: self._model.current())
        self._callback.__class__ = type(kind.__name__, (kind,), {"model": model, "__module__": kind.__module__})
        self._model.model.stop_training = False
        self._callback.set_params({key: params.get(key) for key in ("verbose", "epochs", "steps")})
        self._callback.set_model(self._model.model)

    def call(self, hook: str, *args: Any) -> bool:
        """Call a hook. Return whether the training is to stop."""
        self._model.begin(of_epoch="batch" not in hook)
        if self._keeps:
            self._model.current()
        getattr(self._callback, hook)(*args)
        return self._model.end()

    def close(self) -> None:
        """Let the callback be as it was."""
        self._callback.__class__ = self._kind

    def state(self) -> dict[str, float]:
        """Return the numbers that are saved."""
        values = {name: getattr(self._callback, name, None) for name in self._saved()}
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        return {name: number for name, number in numbers.items() if math.isfinite(number)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from saved numbers."""
        for name in self._saved():
            if name in state:
                value = state[name]
                setattr(self._callback, name, value if name == "best" else int(value))

    def _saved(self) -> Sequence[str]:
        return next((_STATES[kind.__name__] for kind in self._kind.__mro__ if kind.__name__ in _STATES), ())


def driven(served: Served, callbacks: Sequence[Any]) -> list[DrivenCallback | None]:
    """Return what drives each of Keras' callbacks; None for others.

    Raises:
        MisuseError: one can't work here; the message lists those that do.
        ValueError: Keras can't tell whether what one of them monitors should grow.
    """
    import keras

    base = keras.callbacks.Callback
    for callback in callbacks:
        if not isinstance(callback, base):
            continue
        for kind in type(callback).__mro__:
            if kind.__name__ in _REFUSED and kind.__module__.startswith("keras."):
                raise MisuseError(
                    f"Keras' {type(callback).__name__} can't work with weights on servers: "
                    f"{_REFUSED[kind.__name__]}. Those of Keras that work are {_WORKING}"
                )
    if not any(isinstance(callback, base) for callback in callbacks):
        return [None] * len(callbacks)
    _choose_directions(served, callbacks)
    model = CallbackModel(served)
    return [DrivenCallback(callback, model) if isinstance(callback, base) else None for callback in callbacks]


def _choose_directions(served: Served, callbacks: Sequence[Any]) -> None:
    """Have callbacks with mode="auto" ask the metrics whether more is better. Here nothing else makes these."""
    asking = [
        callback
        for callback in callbacks
        if getattr(callback, "mode", None) == "auto"
        and getattr(callback, "monitor_op", 0) is None
        and callback.monitor.removeprefix("val_") != "loss"
    ]
    if not asking:
        return
    import keras

    model = served.plain_copy().model
    if outputs := getattr(model, "outputs", None):  # of a subclass they are not known
        outputs = getattr(model, "output", outputs[0])  # a Sequential has only one
        zeros = keras.tree.map_structure(lambda of: np.zeros([size or 1 for size in of.shape], of.dtype), outputs)
        model.compute_metrics(None, zeros, zeros)
    for callback in asking:
        callback.set_model(model)
        callback._set_monitor_op()


def _is_own(callback: Any, hook: str) -> bool:
    """Return whether a callback has a hook of its own."""
    return not getattr(getattr(callback, hook), "_is_default", False)


def _version(weight: Any) -> tuple[int, int]:
    """Return what is another after an assignment."""
    value = weight.value
    return id(value), getattr(value, "_version", 0)


def _array(weight: Any, variable: Variable) -> Any:
    return to_numpy(weight).astype(variable.dtype)
