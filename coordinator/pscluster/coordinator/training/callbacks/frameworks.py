"""Callbacks of a framework, such as Keras, which `fit` calls by way of the model that it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pscluster.coordinator.training.callbacks.base import Callback, Logs
from pscluster.worker.steps.training import DrivesCallbacks, FrameworkCallback


def with_frameworks(step: object, callbacks: Any) -> Any:
    """Return callbacks, with ours in the place of those of the model's framework; the rest as it is.

    What the framework's can't do is raised.
    """
    if not isinstance(step, DrivesCallbacks) or isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        return callbacks
    given = list(callbacks)
    others = [callback for callback in given if not isinstance(callback, Callback)]
    driven = iter(step.drive_callbacks(others) if others else ())
    return [callback if isinstance(callback, Callback) else _wrapped(callback, next(driven)) for callback in given]


def _wrapped(callback: Any, driven: FrameworkCallback | None) -> Any:
    if driven is None:
        return callback  # what it is, is said where callbacks are checked
    return _ByBatch(driven) if driven.by_batch else _ByEpoch(driven)


class _ByEpoch(Callback):
    """Calls a framework's callback, but not for each batch."""

    def __init__(self, callback: FrameworkCallback) -> None:
        self._callback = callback

    def _call(self, hook: str, *args: Any) -> None:
        if self._callback.call(hook, *args) and not self.training.stop_training:
            self.training.stop(f"the callback {self._callback.name} has asked for it")

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._callback.begin(self.params)
        self._call("on_train_begin", logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._call("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._call("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._call("on_epoch_end", epoch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._call("on_test_begin", logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._call("on_test_end", logs)

    def close(self) -> None:
        self._callback.close()

    def state(self) -> dict[str, Any]:
        return {"of": self._callback.name, **self._callback.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        if state.get("of") == self._callback.name:
            self._callback.load(state)


class _ByBatch(_ByEpoch):
    """Calls a framework's callback for each batch, too."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._call("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._call("on_train_batch_end", batch, logs)
