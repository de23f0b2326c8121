"""The base class of callbacks, what they see of the training, and a list that calls several of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pscluster.coordinator.queue.evaluation_queue import EvaluationQueue
from pscluster.core.checks import type_of

logger = logging.getLogger(__name__)

Logs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Execution:
    """The function whose steps are being reported."""

    function: str  # its name
    what: str  # the name of its part of the data
    worker: int  # the index of the worker that ran it

    def __str__(self) -> str:
        return f"{self.function} of {self.what} on worker {self.worker}"


@dataclass(eq=False)
class Training:
    """What callbacks see of the training.

    `params` has "epochs", "steps" (in an epoch; None if unknown), "verbose", "validation" (whether there is one), and
    "resumed" (whether it continues what an earlier coordinator, or an interruption, has left).
    """

    coordinator: EvaluationQueue
    params: dict[str, Any]
    epoch: int = 0  # the current one
    steps: int = 0  # done in the current epoch
    stop_training: bool = False  # set it to end the training
    stopped: str = ""  # why; it is logged, and saved in the history
    failed: bool = False  # it was ended because continuing makes no sense: backups stay
    restored: bool = False  # a callback has restored a checkpoint in `on_train_begin`, to continue from
    at_once: bool = False  # the end was requested twice, or a clean end is impossible: `close` must not wait
    execution: Execution | None = None  # the function that the logs of `on_train_batch_end` come from
    # Saves the states of the training and its callbacks with the variables; call it before a checkpoint.
    keep: Callable[[], None] = lambda: None

    def stop(self, why: str, *, failed: bool = False) -> None:
        """End the training, and log why."""
        self.stop_training, self.stopped, self.failed = True, why, failed
        logger.warning("training stops: %s", why)


class Callback:
    """Base class of callbacks, whose hooks do nothing.

        class Pause(callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if logs["loss"] > 10:
                    self.training.stop("the loss is too large")

        coordinator.fit(step, data, epochs=5, callbacks=[Pause()])

    Hooks are called in the script, by the thread that called `fit`, one after the other; what one of them raises ends
    the training. Numbers in `logs` are floats, by the names that the step gives them: "loss" if it returns a number.

    Attributes:
        training: what the hooks see of the training, and stop it by.
    """

    training: Training

    @property
    def params(self) -> dict[str, Any]:
        return self.training.params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin, before anything is scheduled. The training continues from what is restored here.

        Args:
            logs: empty.
        """

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Handle the training's clean end, early or not.

        Args:
            logs: the last value of each series in the history.
        """

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        """Handle Ctrl-C or SIGTERM. No function runs, and none follows. An error of one callback is only logged.

        Args:
            logs: means over the steps of the epoch so far.
        """

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin an epoch, before its first function is scheduled.

        Args:
            epoch: from 0; a training that is resumed begins with a later one.
            logs: empty.
        """

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """End an epoch, all of whose functions have ended.

        Args:
            epoch: from 0.
            logs: means over the epoch's steps, and the metrics of its evaluation, as "val_...". What a hook adds to
                them is in the history, and in the logs of the callbacks that follow.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Handle that a step is scheduled. It begins when a worker is free.

        Args:
            batch: the number of the step in its epoch, from 0.
            logs: empty.
        """

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Handle that a step has ended.

        Args:
            batch: how many of the epoch have ended before, from 0: steps end in another order than they begin.
            logs: what the step has returned. `training.execution` says where it ran.
        """

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Begin an evaluation.

        Args:
            logs: empty.
        """

    def on_test_end(self, logs: Logs | None = None) -> None:
        """End an evaluation.

        Args:
            logs: its metrics, as "val_...".
        """

    def close(self) -> None:
        """Release all resources: the training is over, for whatever reason."""

    def state(self) -> dict[str, Any]:
        """Return what to save for a coordinator that resumes the training: values that JSON can have, by name."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: what `state` had returned.
        """


class CallbackList(Callback):
    """Calls several callbacks, in their order. What one of them raises passes, with a note that names it.

    For `params` see `Training`.
    """

    def __init__(self, callbacks: Iterable[Callback], coordinator: EvaluationQueue, **params: Any) -> None:
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            raise TypeError(
                "callbacks are a list of instances of pscluster.coordinator.callbacks.Callback, not "
                f"{type_of(callbacks)}"
            )
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks are instances of pscluster.coordinator.callbacks.Callback, not {callback!r}"
                )
        self.training = Training(coordinator, params)
        for callback in self.callbacks:
            callback.training = self.training
        self.wants_begin = self._overridden("on_train_batch_begin")
        self.wants_end = self._overridden("on_train_batch_end")

    def _overridden(self, hook: str) -> bool:
        methods = (getattr(getattr(callback, hook), "__func__", None) for callback in self.callbacks)
        return any(method is not getattr(Callback, hook) for method in methods)

    def _call_each(self, hook: str, *args: Any, at_end: bool = False) -> None:
        """Call this hook of each callback; `at_end`, even if some fail."""
        for callback in self.callbacks:
            name = type(callback).__name__
            try:
                getattr(callback, hook)(*args)
            except BaseException as error:
                if not at_end or not isinstance(error, Exception):
                    error.add_note(f"raised by the callback {name}.{hook}")
                    raise
                logger.error("the callback %s failed at the end of training: %s", name, error)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._call_each("on_train_begin", logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._call_each("on_train_end", logs or {})

    def on_train_interrupted(self, logs: Logs | None = None) -> None:
        self._call_each("on_train_interrupted", logs or {}, at_end=True)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.training.epoch, self.training.steps = epoch, 0
        self._call_each("on_epoch_begin", epoch, logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._call_each("on_epoch_end", epoch, {} if logs is None else logs)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self.wants_begin:
            self._call_each("on_train_batch_begin", batch, logs or {})

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.training.steps = batch + 1
        if self.wants_end:
            self._call_each("on_train_batch_end", batch, logs or {})

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._call_each("on_test_begin", logs or {})

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._call_each("on_test_end", logs or {})

    def close(self) -> None:
        self._call_each("close", at_end=True)

    def states(self) -> list[dict[str, Any]]:
        """Return the states of those callbacks that have one, with the names of their classes."""
        states = [(type(callback).__name__, callback.state()) for callback in self.callbacks]
        return [{"callback": name, "state": state} for name, state in states if state]

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Load each callback's state; several of one class get theirs in their order."""
        remaining = list(states)
        for callback in self.callbacks:
            for saved in remaining:
                if saved["callback"] == type(callback).__name__:
                    remaining.remove(saved)
                    callback.load(saved["state"])
                    break
