"""The training loop: epochs of steps on workers, evaluation behind each, and callbacks on the way.

One thread, the caller's, runs it all: it schedules functions of several steps (see plan.py), a few ahead of the
workers, takes their logs as they end, in whatever order, and calls the callbacks. What comes when:

    BEGIN -> EPOCH -> (EVALUATION) -> EPOCH -> ... -> END
    EPOCH --stop_training, Ctrl-C, SIGTERM--> what waits is cancelled, what runs ends, its logs are taken; then END, or
                                              the interruption's hooks
    any   --a callback's error--> what waits is cancelled, what runs ends; the error
    any   --a function's error--> all of them have ended; the error

Kept with the variables (state.py): at each epoch's begin and end, when the size of functions changes, before any
function of the new size, and every few seconds. Where the coordinator dies, the next one goes on with the epoch that
was not dealt with, with what was not visited of it. Lost is then: logs of steps that it had not taken, or not kept.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pscluster.coordinator.data.dataset import DataPart, DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorkerDataset
from pscluster.coordinator.job.context import HOPELESS
from pscluster.coordinator.observability.events import Training
from pscluster.coordinator.observability.progress_line import ProgressLine, choose_console
from pscluster.coordinator.scheduling.function_queue import FunctionQueue
from pscluster.coordinator.scheduling.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.training.callbacks import Callback, CallbackList, Execution, Logs
from pscluster.coordinator.training.history import History
from pscluster.coordinator.training.interrupts import Interrupts
from pscluster.coordinator.training.plan import DISPATCH_SECONDS, MEASURED, Overhead, Plan, best_size, most_ahead
from pscluster.coordinator.training.state import TrainingState
from pscluster.core.errors import CancelledError, FunctionError, MisuseError, PsClusterError
from pscluster.core.functions.definitions import partial_of
from pscluster.core.sanitize import shown
from pscluster.ps.handles.metrics import MetricLike
from pscluster.worker.evaluation import by_name
from pscluster.worker.training import StepLogs, logs_of_steps

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""So long the oldest function is waited for before others are looked at."""

SAVE_SECONDS = 10.0
"""So often it is kept how far the training is, within an epoch."""


class _Interruption(Exception):  # noqa: N818  (it is none)
    """A signal has asked for the end; what it raised, if it was handed on."""

    def __init__(self, raised: BaseException | None = None) -> None:
        super().__init__()
        self.raised = raised


@dataclass(frozen=True, slots=True)
class _Work:
    """One function: its arguments, what they are of, and how much that is."""

    args: tuple[Any, ...]
    what: str
    units: int
    examples: int = 0


class _Feed(Protocol):
    """Where the functions' data comes from."""

    unit: str
    per_epoch: int

    @property
    def data(self) -> DistributedDataset | None:
        """The dataset that has a position."""
        ...

    def place(self) -> None:
        """Before anything is restored: take the name under which the position is kept."""
        ...

    def begin(self, state: TrainingState, live: bool) -> None:
        """Go on from there, or begin. What changes is put into it.

        Args:
            state: of the training.
            live: with what a coordinator that died has left on the servers, some of it perhaps on its way.

        Raises:
            MisuseError: that was cut otherwise.
        """
        ...

    def begin_epoch(self) -> int:
        """That of the state. How much of it is done already."""
        ...

    def next(self) -> _Work | None:
        """What the next function takes; None at the epoch's end."""
        ...

    def give_back(self, work: _Work) -> None:
        """No function was given this."""
        ...

    def size(self) -> int:
        """Steps of the next function."""
        ...

    def resize(self, size: int) -> bool:
        """From the next function on. False if that was so before."""
        ...

    def save(self) -> None:
        """Whatever is known of the position now."""
        ...


class _Distributed:
    """Parts of a distributed dataset."""

    def __init__(self, data: DistributedDataset, steps_per_epoch: int | None) -> None:
        shape = data.shape
        if steps_per_epoch is not None and not shape.counted:
            raise ValueError("steps can't be counted in a dataset of files: omit steps_per_epoch")
        if steps_per_epoch is None and shape.epochs is None:
            raise ValueError("the dataset repeats without end: give steps_per_epoch, or repeat(n)")
        self._data = data
        self.unit = "step" if shape.counted else "file"
        self._counted = shape.counted
        self.per_epoch = steps_per_epoch or shape.elements * (shape.epochs or 1)
        self._with_data = steps_per_epoch is None  # then epochs end with those of the data, the first one too
        self._parts: Iterator[DataPart] = iter(())

    @property
    def data(self) -> DistributedDataset:
        return self._data

    def place(self) -> None:
        shape, _ = self._data.shape, self._data.epoch  # by which it has its name
        self._plan = Plan(self._data.name, shape.elements, shape.places, shape.kept, self.per_epoch)

    def begin(self, state: TrainingState, live: bool) -> None:
        self._state = state
        if state.plan is not None and self._plan.fits(state.plan):
            self._plan.load(state.plan)
        elif state.plan is not None and live:
            raise MisuseError(
                f"the resumed training cut its data into {_pieces(state.plan)}, and this one into "
                f"{_pieces(self._plan.to_json())}: functions in flight would count twice. Use the same cut, or start "
                "over with ParameterServerStrategy(..., resume=False)"
            )
        else:
            self._data.save_position()  # what is cut from now on was not handed out in other pieces
            now = self._data.epoch, self._data.visited
            if state.plan is not None and state.plan["name"] == self._data.name:
                self._plan.begin_otherwise(state.plan, state.epoch, now, self._with_data)
            else:
                visited = -(-now[1] // self._plan.places)
                origin = now[0], 0 if self._with_data else visited
                self._plan.begin(origin, state.epoch * self.per_epoch + (0 if self._with_data else state.steps))
        state.plan = self._plan.to_json()

    def begin_epoch(self) -> int:
        epoch = self._state.epoch
        done = self._plan.done(self._data.epoch, self._data.visited) - epoch * self.per_epoch
        self._plan.begin_epoch(epoch)
        self._parts = self._data.cut(functools.partial(self._plan.stop_of, epoch))
        return min(max(0, done), self.per_epoch)

    def next(self) -> _Work | None:
        part = next(self._parts, None)
        if part is None:
            return None
        places = part.stop - part.start
        units = -(-places // self._plan.places)
        return _Work((part,), part.name, units, places if self._counted else 0)

    def give_back(self, work: _Work) -> None:
        work.args[0].release()

    def size(self) -> int:
        return self._plan.size_at(self._plan.frontier)

    def resize(self, size: int) -> bool:
        changed = self._plan.change(size)
        self._state.plan = self._plan.to_json()
        return changed

    def save(self) -> None:
        self._data.save_position()


class _PerWorker:
    """Elements of the workers' own datasets."""

    unit = "step"
    data = None

    def __init__(self, data: PerWorkerDataset, steps_per_epoch: int | None) -> None:
        if steps_per_epoch is None:
            raise ValueError(
                "a per-worker dataset has no length: give steps_per_epoch, or take a dataset of distribute_dataset(), "
                "whose epochs end by themselves"
            )
        self.per_epoch = steps_per_epoch
        self._iterator = iter(data)
        self._size = 1
        self._left = 0

    def place(self) -> None:
        pass

    def begin(self, state: TrainingState, live: bool) -> None:  # noqa: ARG002  (it has no position)
        self._state = state

    def begin_epoch(self) -> int:
        self._left = max(0, self.per_epoch - self._state.steps)
        return self.per_epoch - self._left

    def next(self) -> _Work | None:
        steps = min(self._size, self._left)
        if not steps:
            return None
        self._left -= steps
        return _Work((self._iterator, steps), f"{steps} steps", steps)

    def give_back(self, work: _Work) -> None:
        self._left += work.units

    def size(self) -> int:
        return self._size

    def resize(self, size: int) -> bool:
        changed, self._size = size != self._size, size
        return changed

    def save(self) -> None:
        pass


def _pieces(plan: Mapping[str, Any]) -> str:
    return f"{plan['elements']:,} elements of {plan['places']:,}, {plan['per_epoch']:,} an epoch, as {plan['name']!r}"


@dataclass(frozen=True)
class Validation:
    """What is evaluated behind epochs."""

    step: Callable[[Any], Any]
    data: DistributedDataset
    metrics: Mapping[str, MetricLike]
    every: int


class Fit:
    """One training. See `ClusterCoordinator.fit` for the arguments."""

    def __init__(
        self,
        coordinator: FunctionQueue,
        step: Callable[[Any], Any],
        data: DistributedDataset | PerWorkerDataset,
        *,
        epochs: int,
        steps_per_epoch: int | None,
        steps_per_execution: int | Literal["auto"],
        validation: Validation | None,
        callbacks: Sequence[Callback],
        verbose: int,
    ) -> None:
        self._coordinator = coordinator
        self._epochs = epochs
        self._validation = validation
        self._verbose = verbose
        self._feed: _Feed
        if isinstance(data, DistributedDataset):
            self._feed = _Distributed(data, steps_per_epoch)
            if steps_per_execution == "auto" and data.shape.part > 1:
                steps_per_execution = data.shape.part
        else:
            self._feed = _PerWorker(data, steps_per_epoch)
        captured = coordinator.captured(step)
        # The name is the work's, too.
        self._run: Callable[..., StepLogs] = partial_of(captured.function.name, logs_of_steps, captured)
        self._packing = steps_per_execution
        self._workers = len(coordinator.context.workers)
        steps = self._feed.per_epoch if self._feed.unit == "step" else None
        params = {"epochs": epochs, "steps": steps, "verbose": verbose, "validation": validation is not None}
        self._callbacks = CallbackList(callbacks, coordinator, **params)
        self._training = self._callbacks.training
        self._training.keep = self._keep
        self._history = History(epochs=epochs, steps=steps)
        self._state = TrainingState(coordinator.context.variables, coordinator.trainings_ended + 1)
        self._interrupts = Interrupts(self._hopeless)
        self._pending: deque[tuple[RemoteValue, _Work]] = deque()
        self._line: ProgressLine | None = None
        self._dispatch_seconds = DISPATCH_SECONDS
        self._step_seconds: deque[float] = deque(maxlen=max(64, 2 * self._workers))
        self._function_seconds: float | None = None
        self._settled = self._packing != "auto"  # how many steps a function takes, in this epoch, about
        self._final = self._settled  # that, and no more changes of it
        self._overhead = Overhead(self._workers)
        self._batches = 0
        self._saved = time.monotonic()

    def run(self) -> History:
        """Until its end."""
        try:
            with self._interrupts:
                try:
                    self._train()
                except _Interruption as interruption:
                    self._interrupt()
                    if interruption.raised is not None:
                        raise interruption.raised from None
                except BaseException:
                    if not self._interrupts.handed_on:  # else it ends at once
                        self._give_up()
                    raise
            self._history.stopped = self._training.stopped
            return self._history
        finally:
            self._training.at_once = self._interrupts.handed_on
            self._callbacks.close()
            self._interrupts.hand_on()

    def _train(self) -> None:
        state, context = self._state, self._coordinator.context
        self._coordinator.join()
        self._feed.place()
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
        self._keep()
        self._coordinator.trainings_ended += 1

    # An epoch

    def _epoch(self, epoch: int) -> None:
        state, feed = self._state, self._feed
        goes_on = state.resumed and epoch == state.epoch
        if not goes_on:
            state.totals = {}
        state.epoch, state.resumed = epoch, False
        done = feed.begin_epoch()
        self._settle_size(goes_on)
        self._batches = scheduled = done if feed.unit == "step" else 0
        self._callbacks.on_epoch_begin(epoch)
        self._keep()
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
        self._keep()
        logs = self._means()
        steps, seconds = self._batches, time.monotonic() - begin
        if self._validation is not None and (epoch + 1) % self._validation.every == 0:
            logs |= self._validate(self._validation)
        self._callbacks.on_epoch_end(epoch, logs)
        self._history.add(epoch, logs)
        if self._verbose:
            numbers = "".join(f"  {name} {value:.4g}" for name, value in logs.items() if isinstance(value, float | int))
            text = f"{label}  {steps} steps in {seconds:.1f} s{numbers}"
            choose_console().print(shown(text), highlight=False, markup=False, soft_wrap=True)
        state.epoch, state.steps, state.totals, state.stopped = epoch + 1, 0, {}, self._training.stop_training
        self._keep()

    def _steps(self, scheduled: int) -> None:
        """Those of an epoch, of which so many are done."""
        more = True
        while more or self._pending:
            if self._interrupts.asked is not None:
                raise _Interruption
            if self._training.stop_training:
                self._stop()
                return
            # Before their size is settled no more than are measured: the others would be too small ones.
            seconds = self._function_seconds if self._settled else None
            while more and len(self._pending) < most_ahead(seconds, self._workers):
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
                    self._feed.give_back(work)  # whoever keeps the error keeps it, and nobody would be given it
                    raise
                self._pending.append((value, work))
            for value, done in self._ended():
                self._take(value, done)
            self._keep_now_and_then()

    def _ended(self) -> list[tuple[RemoteValue, _Work]]:
        """Functions that have, after a while perhaps none; they are no longer pending.

        As long as the oldest one ends, others that overtook it are left until it is their turn: to look at all of them
        each time would take longer than what is done for one.
        """
        ended: list[tuple[RemoteValue, _Work]] = []
        pending = self._pending
        if pending and not pending[0][0].wait(LOOK_SECONDS):
            running: deque[tuple[RemoteValue, _Work]] = deque()
            for each in pending:
                (running if each[0].status is RemoteValueStatus.NOT_READY else ended).append(each)
            self._pending = running
            return ended
        while pending and pending[0][0].status is not RemoteValueStatus.NOT_READY:
            ended.append(pending.popleft())
        return ended

    def _take(self, value: RemoteValue, work: _Work) -> None:
        """The logs of a function."""
        try:
            worker, begin, end, names, rows = value.fetch()
        except (FunctionError, CancelledError):
            self._coordinator.join()
            raise
        steps = len(rows)
        self._function_seconds = end - begin
        if steps:
            self._step_seconds.append(self._function_seconds / work.units)
        for name, sum_ in zip(names, rows.sum(axis=0).tolist(), strict=True):
            total, count = self._state.totals.get(name, (0.0, 0))
            self._state.totals[name] = total + sum_, count + steps
        self._state.steps += steps
        if self._callbacks.wants_end:
            self._training.execution = Execution(value.function, work.what, worker)
            for batch, row in enumerate(rows.tolist(), self._batches):
                self._callbacks.on_train_batch_end(batch, dict(zip(names, row, strict=True)))
        self._batches += steps
        self._training.steps = self._batches
        shown = dict(zip(names, rows.mean(axis=0).tolist(), strict=True)) if steps else {}
        self._tell(shown, steps, work.examples)
        if self._line is not None:
            self._line.update(work.units, examples=work.examples, logs=shown)
        if not self._final:
            self._resize(worker, begin, end)

    def _tell(self, logs: Logs, steps: int, examples: int) -> None:
        """Who looks on how far it is, and how many steps and examples came since the last time."""
        label, event_log = f"epoch {self._state.epoch + 1}/{self._epochs}", self._coordinator.context.event_log
        training = Training(label, self._batches, self._training.params.get("steps"), "step", logs)
        event_log.trained(training, steps=steps, examples=examples)

    def _resize(self, worker: int, begin: float, end: float) -> None:
        """A function was there from `begin` to `end`, by its clock: is it known now how many steps one should take?"""
        now, cpu = time.monotonic(), time.process_time()
        if not self._settled:
            if len(self._step_seconds) < max(MEASURED, 2 * self._workers):
                return
            self._settled = True
            self._overhead.begin(now, cpu)
        else:
            beside = self._overhead.add(worker, begin, end, now, cpu)
            if beside is None:
                return
            self._dispatch_seconds = beside
            self._final = self._best_size() < 1.5 * self._feed.size()
        if not self._final and self._feed.resize(self._best_size()):
            self._keep()  # before a function of that size is scheduled

    def _best_size(self) -> int:
        per_epoch = self._feed.per_epoch
        return best_size(self._step_seconds, self._dispatch_seconds, per_epoch, self._workers)

    def _settle_size(self, goes_on: bool) -> None:
        """At an epoch's begin. One that is gone on with keeps its cuts: what was handed out is not known."""
        kept = goes_on and self._feed.data is not None
        self._final = kept or self._packing != "auto"
        if kept:
            self._settled = True
        elif self._packing != "auto":
            self._feed.resize(self._packing)
        elif len(self._step_seconds) >= MEASURED:
            best, now = self._best_size(), self._feed.size()
            if not now / 2 < best < now * 2:
                self._feed.resize(best)
            self._settled = True
            self._overhead.begin(time.monotonic(), time.process_time())
        else:
            self._settled = False

    def _means(self) -> Logs:
        return {name: total / count for name, (total, count) in self._state.totals.items() if count}

    def _keep(self) -> None:
        """How far it is, with the variables. First the position: what is kept beside it is never ahead of it."""
        self._feed.save()
        self._state.callbacks = self._callbacks.states()
        self._state.save()
        self._saved = time.monotonic()

    def _keep_now_and_then(self) -> None:
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._keep()

    def _validate(self, validation: Validation) -> Logs:
        self._callbacks.on_test_begin()
        try:
            with self._interrupts.at_once():
                found = self._coordinator.evaluate(validation.step, validation.data, validation.metrics)
        except BaseException as raised:
            if not self._interrupts.handed_on:
                raise
            raise _Interruption(raised) from None
        logs = {f"val_{name}": value for name, value in found.items()}
        self._callbacks.on_test_end(logs)
        return logs

    # Before its time

    def _hopeless(self) -> str:
        """Why what has begun will not end; empty: it may."""
        context = self._coordinator.context
        stranded = "" if context.dispatcher is None else context.dispatcher.stranded(HOPELESS)
        return context.hopeless() or stranded

    def _stop(self) -> None:
        """What has not begun is given back; the logs of what ran are taken."""
        self._coordinator.cancel_waiting([value for value, _ in self._pending])
        while self._pending:
            value, work = self._pending.popleft()
            if value.status is not RemoteValueStatus.CANCELLED:
                self._take(value, work)

    def _interrupt(self) -> None:
        self._stop()
        self._keep()
        self._callbacks.on_train_interrupted(self._means())

    def _give_up(self) -> None:
        """An error: nothing is left running, and the position is what it was."""
        with contextlib.suppress(PsClusterError):
            self._coordinator.cancel_waiting([value for value, _ in self._pending])
            self._feed.save()


def validation_of(
    data: DistributedDataset | None,
    step: Callable[[Any], Any] | None,
    metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | None,
    every: int,
) -> Validation | None:
    """What `fit` was given, checked."""
    if data is None:
        if step is not None or metrics is not None:
            raise ValueError("validation_step and validation_metrics need validation_data: give it, too")
        return None
    if not isinstance(data, DistributedDataset):
        raise TypeError(
            f"validation_data is a {type(data).__name__}: give coordinator.distribute_dataset(...).batch(64)"
        )
    if step is None or metrics is None:
        raise ValueError(
            "validation_data needs validation_step, which gives for an element what the metrics take, and "
            "validation_metrics: see coordinator.evaluate"
        )
    if not callable(step):
        raise TypeError(f"validation_step is a {type(step).__name__}; it must be a function")
    return Validation(step, data, by_name(metrics), every)


def check_arguments(step: object, data: object) -> None:
    """What can be said before anything is done."""
    if not callable(step):
        raise TypeError(f"fit takes a step function, not a {type(step).__name__}")
    if not isinstance(data, DistributedDataset | PerWorkerDataset):
        raise TypeError(
            f"fit takes a dataset, not a {type(data).__name__}: give coordinator.distribute_dataset(...).batch(64), or "
            "coordinator.create_per_worker_dataset(...)"
        )
