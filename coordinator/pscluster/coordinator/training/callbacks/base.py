"""The base of callbacks, what they see of the training, and how several of them are called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pscluster.coordinator.scheduling.function_queue import FunctionQueue

logger = logging.getLogger(__name__)

Logs = dict[str, Any]
"""Numbers by name."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The function whose steps are being dealt with.

    Attributes:
        function: its name.
        what: which part of the data it had.
        worker: that ran it.
    """

    function: str
    what: str
    worker: int

    def __str__(self) -> str:
        return f"{self.function} of {self.what} on worker {self.worker}"


class Training:
    """What callbacks see of it.

    Attributes:
        coordinator: that runs it.
        params: "epochs", "steps" (of an epoch; None: not known), "verbose", "validation" (is there one?), "resumed"
            (does it go on where a coordinator before this one, or an interruption, has left it?).
        epoch: that goes on, from 0.
        steps: that were done in it.
        stop_training: set it to end the training.
        stopped: why; shown, and kept in the history.
        failed: it was ended since it makes no sense to go on: backups stay.
        restored: a callback has restored a checkpoint in `on_train_begin`, to go on with.
        at_once: it was asked twice to end, or there is no hope for an end in order: `close` waits for nothing.
        keep: keeps how far the training is, and what callbacks keep, with the variables: before a checkpoint is made.
        execution: what the logs of `on_train_batch_end` come from.
    """

    def __init__(self, coordinator: FunctionQueue, params: Mapping[str, Any]) -> None:
        self.coordinator = coordinator
        self.params = dict(params)
        self.epoch = self.steps = 0
        self.stop_training = False
        self.stopped = ""
        self.failed = self.restored = self.at_once = False
        self.execution: Execution | None = None
        self.keep: Callable[[], None] = lambda: None

    def stop(self, why: str, *, failed: bool = False) -> None:
        """End the training, and say so."""
        self.stop_training, self.stopped, self.failed = True, why, failed
        logger.warning("training stops: %s", why)


class Callback:
    """Does nothing: override what is wanted."""

    training: Training

    @property
    def params(self) -> dict[str, Any]:
        """Of the training."""
        return self.training.params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before anything is scheduled. What is restored here is gone on with."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """The training has ended in order, early or not."""

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        """Ctrl-C or SIGTERM: no function runs, none follows."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before the epoch's first function is scheduled."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """All functions of the epoch have ended. `logs`: means over its steps, and "val_..." of the evaluation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A step is scheduled, the epoch's first with number 0. It begins when a worker is free."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A step has ended. They end in another order than they begin: the number is that of the end."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Before an evaluation."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Behind it, with its results."""

    def close(self) -> None:
        """The training is over, whatever happened: leave nothing open."""

    def state(self) -> dict[str, Any]:
        """What to keep for a coordinator that goes on with the training, as JSON holds it."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from that."""


class CallbackList(Callback):
    """Calls several callbacks, in their order. What one of them raises goes on, with a note that names it.

    Args:
        callbacks: those.
        coordinator: of the loop.
        params: see `Training`.
    """

    def __init__(self, callbacks: Iterable[Callback], coordinator: FunctionQueue, **params: Any) -> None:
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            raise TypeError(
                "callbacks are a list of instances of pscluster.coordinator.callbacks.Callback, not "
                f"a {type(callbacks).__name__}"
            )
        self.callbacks = list(callbacks)
        for each in self.callbacks:
            if not isinstance(each, Callback):
                raise TypeError(f"callbacks are instances of pscluster.coordinator.callbacks.Callback, not {each!r}")
        self.training = Training(coordinator, params)
        for each in self.callbacks:
            each.training = self.training
        hooks = ("on_train_batch_begin", "on_train_batch_end")
        self.wants_begin, self.wants_end = (
            any(
                getattr(getattr(each, hook), "__func__", None) is not getattr(Callback, hook) for each in self.callbacks
            )
            for hook in hooks
        )

    def _each(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, hook)(*args)
            except BaseException as error:
                error.add_note(f"raised by the callback {type(callback).__name__}.{hook}")
                raise

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._each("on_train_begin", logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._each("on_train_end", logs or {})

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        """All of them, also where one of them can't."""
        for callback in self.callbacks:
            try:
                callback.on_train_interrupted(logs or {})
            except Exception as error:
                logger.error("the callback %s failed at the end of training: %s", type(callback).__name__, error)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.training.epoch, self.training.steps = epoch, 0
        self._each("on_epoch_begin", epoch, logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._each("on_epoch_end", epoch, {} if logs is None else logs)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self.wants_begin:
            self._each("on_train_batch_begin", batch, logs or {})

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.training.steps = batch + 1
        if self.wants_end:
            self._each("on_train_batch_end", batch, logs or {})

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._each("on_test_begin", logs or {})

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._each("on_test_end", logs or {})

    def close(self) -> None:
        """All of them, also where one of them can't."""
        for callback in self.callbacks:
            try:
                callback.close()
            except Exception as error:
                logger.error("the callback %s could not be closed: %s", type(callback).__name__, error)

    def states(self) -> list[dict[str, Any]]:
        """What they want to keep."""
        return [{"callback": type(each).__name__, "state": state} for each in self.callbacks if (state := each.state())]

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Give each its own: of several of one class, in their order."""
        left = list(states)
        for callback in self.callbacks:
            mine = next((each for each in left if each["callback"] == type(callback).__name__), None)
            if mine is not None:
                left.remove(mine)
                callback.load(mine["state"])
