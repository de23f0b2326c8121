"""The training loop: epochs of steps on workers, an evaluation after each, and callbacks.

The caller's thread does everything: it schedules functions of several steps (see plan.py), a few ahead of the workers,
takes their logs as they end, in any order, and calls the callbacks. The sequence:

    BEGIN -> EPOCH -> (EVALUATION) -> EPOCH -> ... -> END
    EPOCH --stop_training, Ctrl-C, SIGTERM--> cancel waiting functions, let running ones end, take their logs; then END,
                                              or the interruption's hooks
    any   --a callback's error--> cancel waiting functions, let running ones end; raise the error
    any   --a function's error--> raise the error, once all functions have ended

The state (state.py) is saved with the variables at each epoch's begin and end, before any function of a new size, and
every few seconds. If the coordinator dies, the next one resumes the epoch in progress with what was not visited of it.
Only logs of steps that had not been taken, or not saved, are lost then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorkerDataset
from pscluster.coordinator.job.context import UNREACHABLE_SECONDS
from pscluster.coordinator.observability.events import Training
from pscluster.coordinator.observability.progress_line import ProgressLine, choose_console, progress_of_files
from pscluster.coordinator.queue.evaluation_queue import EvaluationQueue
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.training.arguments import Validation, checked_overlap, feed_of
from pscluster.coordinator.training.callbacks import Callback, CallbackList, Execution, Logs
from pscluster.coordinator.training.feed import Work
from pscluster.coordinator.training.function_size import FunctionSize
from pscluster.coordinator.training.history import History
from pscluster.coordinator.training.interrupts import Interrupts
from pscluster.coordinator.training.state import TrainingState
from pscluster.core.checks import type_of
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import EndOfDatasetError, PsClusterError
from pscluster.core.functions.definitions import partial_of
from pscluster.v1 import worker_pb2
from pscluster.worker.steps.overlap import logs_of_overlapped_steps
from pscluster.worker.steps.training import StepLogs, logs_of_replicas, logs_of_steps

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # how long to wait for the oldest function before checking the others
SAVE_SECONDS = 10.0  # how often the state is saved within an epoch


class _Interruption(Exception):  # noqa: N818  (it is none)
    """A signal has requested the end. `raised`: what its earlier handler raised, if it was called."""

    def __init__(self, raised: BaseException | None = None) -> None:
        super().__init__()
        self.raised = raised


class Fit:
    """One training. See `ClusterCoordinator.fit` for the arguments."""

    def __init__(
        self,
        coordinator: EvaluationQueue,
        step: Callable[[Any], Any],
        data: DistributedDataset | PerWorkerDataset,
        *,
        epochs: int,
        steps_per_epoch: int | None,
        steps_per_execution: int | Literal["auto"],
        validation: Validation | None,
        validation_freq: int,
        callbacks: Sequence[Callback],
        verbose: int,
        lookups: Callable[[Any], Any] | None,
        overlap: int,
    ) -> None:
        self._coordinator = coordinator
        self._epochs = epochs
        self._validation, self._validation_freq = validation, validation_freq
        self._verbose = verbose
        self._together = coordinator.strategy.is_synchronous
        if not callable(step):
            raise TypeError(f"fit takes a step function, not {type_of(step)}")
        self._feed = feed_of(data, steps_per_epoch, synchronous=self._together)
        if steps_per_execution == "auto" and isinstance(data, DistributedDataset) and data.shape.elements_per_part > 1:
            steps_per_execution = data.shape.elements_per_part
        named = checked_overlap(coordinator, lookups, overlap)
        captured = coordinator.captured(step)
        # Logs and errors show the step's own name.
        self._name = captured.function.name
        self._run: Callable[..., StepLogs] = (
            partial_of(self._name, logs_of_overlapped_steps, captured, named, overlap)
            if overlap
            else partial_of(self._name, logs_of_steps, captured)
        )
        steps = self._feed.per_epoch if self._feed.unit == "step" else None
        params = {"epochs": epochs, "steps": steps, "verbose": verbose, "validation": validation is not None}
        self._callbacks = CallbackList(callbacks, coordinator, **params)
        self._training = self._callbacks.training
        self._training.keep = self._save
        self._history = History(epochs=epochs, steps=steps)
        self._state = TrainingState(coordinator.context.client, coordinator.trainings_ended + 1)
        self._interrupts = Interrupts(self._obstacle)
        self._pending: deque[tuple[RemoteValue, Work]] = deque()
        self._line: ProgressLine | None = None
        self._size = FunctionSize(steps_per_execution, self._feed, coordinator.context)
        self._batches = 0
        self._saved = time.monotonic()

    def run(self) -> History:
        try:
            with self._interrupts:
                try:
                    self._train()
                except _Interruption as interruption:
                    self._stop()
                    self._save()
                    self._callbacks.on_train_interrupted(self._means())
                    if interruption.raised is not None:
                        raise interruption.raised from None
                except BaseException:
                    if not self._interrupts.handed_on:  # otherwise end at once
                        self._abort()
                    raise
            self._history.stopped = self._training.stopped
            return self._history
        finally:
            self._training.at_once = self._interrupts.handed_on
            self._callbacks.close()
            self._interrupts.hand_on()

    def _train(self) -> None:
        state, context = self._state, self._coordinator.context
        self._coordinator.settle()
        self._feed.prepare()
        self._callbacks.on_train_begin()
        live = context.resumed and not self._training.restored
        if live or self._training.restored:
            known = state.load()
            over = state.finished and (state.stopped or state.epoch >= self._epochs)
            if not known or over:
                logger.warning("skipping training %d of this script: already finished", state.number)
                self._coordinator.trainings_ended += 1
                return
        self._training.params["resumed"] = state.resumed
        if state.resumed:
            self._callbacks.load_states(state.callbacks)
            self._training.stop_training = state.stopped
            logger.info("resuming at epoch %d", state.epoch + 1)
        self._feed.begin(state, live)
        for epoch in range(state.epoch, self._epochs):
            if self._training.stop_training:
                break
            self._epoch(epoch)
        self._callbacks.on_train_end({name: values[-1] for name, values in self._history.history.items()})
        state.finished = True
        self._save()
        self._coordinator.trainings_ended += 1

    def _epoch(self, epoch: int) -> None:
        state, feed = self._state, self._feed
        resumed = state.resumed and epoch == state.epoch
        if not resumed:
            state.totals = {}
        state.epoch, state.resumed = epoch, False
        done = feed.begin_epoch()
        self._size.begin_epoch(resumed)
        self._batches = scheduled = done if feed.unit == "step" else 0
        self._callbacks.on_epoch_begin(epoch)
        self._save()
        begin = time.monotonic()
        label = f"epoch {epoch + 1}/{self._epochs}"
        with contextlib.ExitStack() as stack:
            if self._verbose == 1:
                line = ProgressLine(
                    self._coordinator,
                    feed.per_epoch,
                    label=label,
                    unit=feed.unit,
                    data=feed.data,
                    done=done,
                    tells=False,
                )
                self._line = stack.enter_context(line)
            stack.callback(setattr, self, "_line", None)
            self._steps(scheduled)
        self._save()
        logs = self._means()
        steps, seconds = self._batches, time.monotonic() - begin
        if self._validation is not None and (epoch + 1) % self._validation_freq == 0:
            logs |= self._validate(self._validation)
        self._callbacks.on_epoch_end(epoch, logs)
        self._history.add(epoch, logs)
        if self._verbose:
            numbers = "".join(f"  {name} {value:.4g}" for name, value in logs.items() if isinstance(value, float | int))
            text = f"{label}  {steps} steps in {seconds:.1f} s{numbers}"
            choose_console().print(shown(text), highlight=False, markup=False, soft_wrap=True)
        state.epoch, state.steps, state.totals, state.stopped = epoch + 1, 0, {}, self._training.stop_training
        self._save()

    def _steps(self, scheduled: int) -> None:
        """Take the steps of an epoch, after the `scheduled` ones that are done already."""
        more = True
        while more or self._pending:
            if self._interrupts.received is not None:
                raise _Interruption
            if self._training.stop_training:
                self._stop()
                return
            if self._together:
                more = self._take_together(scheduled)
                scheduled = self._batches
                continue
            ahead = self._size.most_ahead()
            while more and len(self._pending) < ahead:
                work = self._feed.next()
                if work is None:
                    more = False
                    break
                try:
                    for _ in range(work.units if self._callbacks.wants_begin else 0):
                        self._callbacks.on_train_batch_begin(scheduled)
                        scheduled += 1
                    value = self._coordinator.schedule(self._run, args=work.args)
                except BaseException:
                    self._feed.give_back(work)  # the error's traceback may keep the part alive, unassigned
                    raise
                self._pending.append((value, work))
            for value, ended in self._ended():
                self._take(value, ended)
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self._save()

    def _ended(self) -> list[tuple[RemoteValue, Work]]:
        """Remove and return functions that have ended; perhaps none, after `POLL_SECONDS`.

        While the oldest one ends in time, those that overtook it wait for their turn: checking all of them each time
        would take longer than handling one.
        """
        ended: list[tuple[RemoteValue, Work]] = []
        pending = self._pending
        if pending and not pending[0][0].wait(POLL_SECONDS):
            running: deque[tuple[RemoteValue, Work]] = deque()
            for function in pending:
                (running if function[0].status is RemoteValueStatus.NOT_READY else ended).append(function)
            self._pending = running
            return ended
        while pending and pending[0][0].status is not RemoteValueStatus.NOT_READY:
            ended.append(pending.popleft())
        return ended

    def _take_together(self, scheduled: int) -> bool:
        """Take the next steps on all workers at once. Return False at the epoch's end."""
        work = self._feed.next()
        if work is None:
            return False
        for batch in range(scheduled, scheduled + work.units if self._callbacks.wants_begin else scheduled):
            self._callbacks.on_train_batch_begin(batch)
        iterator, _ = work.args
        collect = worker_pb2.SynchronousSteps.ALL
        done, of_replicas = self._coordinator.take_steps(self._run, (iterator, 1), None, work.units, collect)
        if done < work.units:
            raise EndOfDatasetError(
                f"the data of a replica ended after {self._batches + done} of {self._feed.per_epoch} steps of "
                f"epoch {self._state.epoch + 1}. An epoch continues in the data where the last one ended: make it "
                "endless, or give fewer steps_per_epoch or epochs"
            )
        self._add(self._name, logs_of_replicas(of_replicas), work, work.units)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._save()
        return True

    def _take(self, value: RemoteValue, work: Work) -> None:
        value.wait()
        if value.status is not RemoteValueStatus.READY:
            self._coordinator.join()  # raises the first error
        logs = value.fetch()
        self._add(value.function, logs, work, len(logs[-1]))

    def _add(self, function: str, logs: StepLogs, work: Work, steps: int) -> None:
        """Add the logs of this many steps to those of the epoch, and call the callbacks."""
        worker, begin, end, names, rows = logs
        self._size.measure(end - begin, work.units if steps else 0)
        for name, sum_ in zip(names, rows.sum(axis=0).tolist(), strict=True):
            total, count = self._state.totals.get(name, (0.0, 0))
            self._state.totals[name] = total + sum_, count + len(rows)
        self._state.steps += steps
        if self._callbacks.wants_end:
            self._training.execution = Execution(function, work.name, worker)
            for batch, row in enumerate(rows.tolist(), self._batches):
                self._callbacks.on_train_batch_end(batch, dict(zip(names, row, strict=True)))
        self._batches += steps
        self._training.steps = self._batches
        shown = dict(zip(names, rows.mean(axis=0).tolist(), strict=True)) if len(rows) else {}
        label = f"epoch {self._state.epoch + 1}/{self._epochs}"
        if self._feed.data is not None and (progress := progress_of_files(self._feed.data)):
            label += f", {progress}"
        training = Training(label, self._batches, self._training.params.get("steps"), "step", shown)
        self._coordinator.context.event_log.trained(training, steps=steps, examples=work.examples)
        if self._line is not None:
            self._line.update(work.units, examples=work.examples, logs=shown)
        if self._size.adjust(worker, begin, end):
            self._save()  # before a function of that size is scheduled

    def _means(self) -> Logs:
        return {name: total / count for name, (total, count) in self._state.totals.items() if count}

    def _save(self) -> None:
        """Save the state with the variables, after the position, which must never be behind it."""
        self._feed.save()
        self._state.callbacks = self._callbacks.states()
        self._state.save()
        self._saved = time.monotonic()

    def _validate(self, validation: Validation) -> Logs:
        self._callbacks.on_test_begin()
        self._interrupts.at_once = True
        try:
            metrics = self._coordinator.evaluate(*validation)
        except BaseException as raised:
            if not self._interrupts.handed_on:
                raise
            raise _Interruption(raised) from None
        finally:
            self._interrupts.at_once = False
        logs = {f"val_{name}": value for name, value in metrics.items()}
        self._callbacks.on_test_end(logs)
        return logs

    # Ending early

    def _obstacle(self) -> str:
        """Return why functions that have begun can't end; "" if they may."""
        context = self._coordinator.context
        stranded = "" if context.dispatcher is None else context.dispatcher.status.stranded(UNREACHABLE_SECONDS)
        return context.unreachable_too_long() or stranded

    def _stop(self) -> None:
        """Cancel the functions that have not begun, and take the logs of the others."""
        self._coordinator.cancel_waiting([value for value, _ in self._pending])
        while self._pending:
            value, work = self._pending.popleft()
            if value.status is not RemoteValueStatus.CANCELLED:
                self._take(value, work)

    def _abort(self) -> None:
        """Leave nothing running after an error, and write the position as it is."""
        with contextlib.suppress(PsClusterError):
            self._coordinator.cancel_waiting([value for value, _ in self._pending])
            self._feed.save()
