"""Schedules functions on workers, waits for them, fetches their results; datasets and evaluations made of that."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pscluster.coordinator.checkpoints.checkpoint import BARRIER_SECONDS
from pscluster.coordinator.data.dataset import RETRIES, DataPart, DistributedDataset, OnError, distribute
from pscluster.coordinator.data.dataset_progress import DatasetProgress, Number
from pscluster.coordinator.data.per_worker import PerWorkerDataset, PerWorkerIterator
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.observability import timeline
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.scheduling.call import Call, ResourceRecipe, placeholder
from pscluster.coordinator.scheduling.captured_functions import CapturedFunctions
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.scheduling.remote_value import RemoteValue
from pscluster.coordinator.scheduling.scheduler import Task
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.variables.evaluation_snapshot import EvaluationSnapshot
from pscluster.core import checks
from pscluster.core.errors import MisuseError, UnavailableError, UnknownVariableError
from pscluster.core.functions.definitions import CapturedFunction, FunctionHandle, partial_of
from pscluster.core.handles import Handle, StaysHere
from pscluster.core.values import HandleResolver, encode_call, map_structure
from pscluster.ps.handles.metrics import MetricLike
from pscluster.v1 import value_pb2, worker_pb2
from pscluster.worker.data.per_worker import given
from pscluster.worker.data.pipelines import Pipeline, numbered
from pscluster.worker.evaluation import States, by_name, results_of, states_of

logger = logging.getLogger(__name__)

_SECONDS = "number of seconds"


class FunctionQueue(StaysHere):
    """What a ClusterCoordinator does with functions: hands them to workers, waits for them, fetches their results.

    It is what trainings and their callbacks have of the coordinator. Threads may use it at the same time.

    Attributes:
        strategy: of the job.
        trainings_ended: how many trainings of the script have.
    """

    instead = (
        "schedule what is to run in the script; a function may have the result of another one as an argument, by its "
        "RemoteValue"
    )
    strategy: ParameterServerStrategy
    trainings_ended: int
    _dispatcher: Dispatcher
    _functions: CapturedFunctions
    _resources: itertools.count[int]
    _per_worker: weakref.WeakValueDictionary[str, PerWorkerIterator | PerWorkerDataset]
    _resolve_handle: HandleResolver  # the same object for all values
    _remains: deque[EvaluationSnapshot]  # of evaluations that are over, on servers that could not be reached then

    def _begin(self, strategy: ParameterServerStrategy, dispatcher: Dispatcher) -> None:
        """Hand out functions by this dispatcher."""
        self.strategy = strategy
        self.trainings_ended = 0
        self._dispatcher = dispatcher
        self._functions = CapturedFunctions(strategy.context.variables.serialization)
        self._resources = itertools.count(1)
        self._per_worker = weakref.WeakValueDictionary()
        self._remains = deque()
        self._resolve_handle = self._handle_of
        strategy.context.dataset_progress = DatasetProgress(strategy.context.variables, dispatcher, self._send_pipeline)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.strategy!r}>"

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        key: str = "",
        wait: float | None = None,
    ) -> RemoteValue:
        """Queue a function for some worker, and return its result-to-be.

        The function, with the values it captures, is taken as it is at its first `schedule`, `fit` or `evaluate`;
        what changes from call to call is an argument. Where its code, or that of functions and classes of yours that it
        reaches, is another one, it is a new function. A captured name that leads to another value keeps the first one,
        and the log warns of it, once; what is changed in place is not seen. Make it once, before the loop: a new lambda
        or partial in each call costs some 0.3 ms, ten times as much as the same function again, and 1 ms if it captures
        another value each time. Per-worker iterators become the executing worker's own, RemoteValues their values once
        they are ready. If the worker dies the function runs again elsewhere, its updates are applied once.

        Blocks while the queue is full, and, where an earlier function has failed, until all that runs has stopped.

        Args:
            fn: any callable.
            args: its positional arguments.
            kwargs: its keyword arguments.
            timeout: seconds that it may run on a worker, each time. Then it fails with FunctionTimeoutError, whatever
                it does: it is stopped at its next read or update, what it still updates is refused, what it returns
                is dropped, and its worker is used again when it has ended (see `cancel` for one that never does).
                Without a timeout it may run for ever.
            retries: how often it is run again when it raises, or runs too long. Updates of a run that failed count
                once: the next run's are the same ones. Between two runs lies the end of the first: one that has run too
                long and comes to no read or update within 5 s more costs its worker, until it has ended there.
            key: names this piece of the work, whoever schedules it, such as `f"epoch {epoch}, rows {a}-{b}"`. What ran
                under this key counts once with any repetition, also if the coordinator died and the next one schedules
                it again. The servers remember that until `forget_keys`.
            wait: seconds to wait at most, where this blocks. Without them it may take as long as a function that hangs.

        Raises:
            MisuseError: a function with this key is scheduled and has not ended.
            ValueError: `retries` is less than 0, or `timeout` is not above 0.
            TypeError: `fn` is not callable, or something in the arguments can't be sent: its path is named.
            FunctionError: an earlier function failed; this one has not been scheduled.
            WaitTimeoutError: `wait` seconds have passed: it has not been scheduled. The message says what for.
            PSUnavailableError: a parameter server is lost.
        """
        if not callable(fn):
            raise TypeError(f"schedule takes a function, not a {type(fn).__name__}")
        # What is not given is not looked at: of a function that takes nothing the checks were a third of the time.
        if args is not None and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
            raise TypeError(f"args must be a tuple or list of arguments, not a {type(args).__name__}: write args=(x,)")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a dict of arguments, not a {type(kwargs).__name__}")
        if type(retries) is not int or retries < 0:
            retries = checks.whole("retries", retries, at_least=0)
        if timeout is not None:
            timeout = checks.real("timeout", timeout, ", or None", kind=_SECONDS, finite=False, above=0)
        if wait is not None:
            _check_seconds("wait", wait)
        function = self._functions.get(fn)
        if function.handles:
            _check_no_part(function)
        result = RemoteValue(function.name, self._resolve_handle, self)
        call = Call(function, weakref.ref(result), retries=retries, timeout=timeout, key=_number_of(key))
        if args or kwargs:
            self._encode(call, args or (), dict(kwargs or {}))
        if call.parts and not key and (visits := [part for part in call.parts if part.position is not None]):
            key = " and ".join(f"{part.name}/{function.name}" for part in visits)
            call.key = _number_of(key)
        entered: list[DataPart] = []
        try:
            for part in call.parts:
                part.enter()
                entered.append(part)
            self._dispatcher.submit(call, key, wait)
        except BaseException:
            for part in entered:
                part.release()
            raise
        return result

    def forget_keys(self, keys: Iterable[str]) -> None:
        """Say that functions with these keys will never be scheduled again, so that the servers need not remember them.

        The place for it is behind a `save_progress` that says that these are done. Forgotten before that, what they did
        could count twice. Returns at once; the servers are told within seconds.

        Raises:
            MisuseError: a function with one of the keys has not ended. None is forgotten.
        """
        if isinstance(keys, str):
            raise TypeError("forget_keys takes several keys: write forget_keys([key])")
        self._dispatcher.forget({_number_of(key): key for key in keys})

    def _encode(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Put the arguments, as they are now, into a call."""
        waiting: dict[str, RemoteValue] = {}

        def remote(leaf: Any, _attachments: object) -> value_pb2.Value | None:
            if not isinstance(leaf, RemoteValue):
                return None
            # Another's is settled under another lock, and names other variables.
            if leaf._resolve_handle is not self._resolve_handle:
                raise MisuseError(f"{leaf!r} is another coordinator's: pass what its fetch() returns")
            waiting[key := str(len(waiting))] = leaf
            return placeholder(key)

        attachments: list[memoryview] = []
        handles: list[Handle] = []
        classes: dict[str, CapturedFunction] = {}

        def define(cls: type) -> str:
            known = self._functions.of_class(cls)
            if known is None:
                return ""
            classes[known.digest] = known
            return known.digest

        call.arguments = value_pb2.Value()
        encode_call(
            args,
            kwargs,
            attachments=attachments,
            remote=remote,
            define=define,
            into=call.arguments,
            handles=handles,
        )
        # The caller may change its arrays once this has returned.
        call.attachments = [memoryview(bytes(attachment)) for attachment in attachments]
        call.remote, call.classes, call.define, call.handles = waiting, classes, define, handles
        call.parts = [handle for handle in handles if isinstance(handle, DataPart)]

    def join(self, timeout: float | None = None) -> None:
        """Wait until every scheduled function has ended.

        Raises:
            FunctionError: a function failed: the first error, raised once. All else was cancelled, nothing runs.
            PSUnavailableError: a parameter server is lost.
            WaitTimeoutError: `timeout` seconds have passed; the message says what waits and which workers are missing.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._dispatcher.join(timeout)
        # A server that came back while functions ended may have lost what they did: that has been said by now.
        self.context.wait_for_losses(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def cancel_waiting(self, values: Iterable[RemoteValue]) -> int:
        """Cancel those of these functions that no worker has begun, once all that run have ended; how many.

        Their RemoteValues raise CancelledError.
        """
        return self._dispatcher.cancel_waiting(values)

    def cancel(self, values: Iterable[RemoteValue] | None = None, *, kill_after: float | None = None) -> int:
        """End the functions of these values, wherever they are, and those that take their results; how many.

        At once: their RemoteValues raise CancelledError, the others go on. What runs is asked to stop, which it does at
        its next read or update; what it still updates is refused by the servers, and its worker takes other work as
        soon as it has stopped. It may have applied a part before, and its error says so.

        Args:
            values: None: of all functions, whoever has scheduled them.
            kill_after: seconds for what runs to stop, also where it had been cancelled, or had failed by its timeout,
                before. Then its worker's process is ended, with its datasets, and is to be started again as after any
                death: a LocalCluster does so. None: it may go on for ever. A function that holds Python's lock keeps
                its worker from hearing of it.
        """
        if kill_after is not None:
            _check_seconds("kill_after", kill_after)
        return self._dispatcher.cancel(values, kill_after)

    def pending(self) -> str:
        """Which error waits to be raised by `schedule`, `join` or `done`, and what for; "" if there is none."""
        return self._dispatcher.pending()

    def explain(self) -> str:
        """Explain in a few lines what waits for what and since when, for a job that seems to hang.

        The log says it by itself when nothing has come back for a minute.
        """
        return self._dispatcher.explain()

    @property
    def context(self) -> JobContext:
        """What the parts of the job share; of use to pscluster itself."""
        return self.strategy.context

    @property
    def telemetry(self) -> CoordinatorTelemetry:
        """Return figures of the job, for monitoring: `telemetry.snapshot()`."""
        return self.strategy.telemetry

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what the cluster did of the last functions, as a trace for https://ui.perfetto.dev: a row each.

        The last 2,048 attempts at functions that ran for a millisecond or longer, and every sixteenth of the shorter
        ones, are remembered all the time. Of a process that died since there is nothing but what others saw of it.

        Args:
            path: of the file: JSON in Chrome's trace event format. One that is there is written over.

        Raises:
            OSError: it can't be written.
        """
        context = self.context
        timeline.write(path, list(context.counts.attempts), timeline.collect(context.tasks))

    def done(self) -> bool:
        """Has every scheduled function ended? Raises as `join` does."""
        return self._dispatcher.done()

    def fetch(self, structure: Any, timeout: float | None = None) -> Any:
        """Any nesting of RemoteValues with their values in their places; what is none stays as it is.

        Raises:
            WaitTimeoutError: `timeout` seconds have passed, and not all values are there.
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, RemoteValue):
                return leaf
            return leaf._fetch(None if deadline is None else max(0.0, deadline - time.monotonic()), timeout)

        return map_structure(value_of, structure)

    def create_per_worker_dataset(self, dataset_fn: Callable[..., Any] | Iterable[Any]) -> PerWorkerDataset:
        """A dataset on every worker: `dataset_fn()` or `dataset_fn(context)` is called there and returns an iterable.

        An iterable instead of a function is sent to every worker as it is. Give `iter()` of what this returns
        to `schedule`, or itself where each function is to begin anew. A worker that restarts builds it anew and begins
        at its start.
        """
        if not callable(dataset_fn):
            if not isinstance(dataset_fn, Iterable):
                raise ValueError(
                    f"create_per_worker_dataset takes a function or an iterable, not a {type(dataset_fn).__name__}"
                )
            elements = dataset_fn
            if isinstance(elements, Iterator):
                raise ValueError(
                    "an iterator can be iterated over only once: give a list, or a function that makes one"
                )
            function = self._functions.anew(partial_of("elements", given, elements), holds_data=True)
        else:
            function = self._functions.get(dataset_fn)
        return PerWorkerDataset(function, self._make_iterator, self._build_dataset)

    def distribute_dataset(
        self,
        source: Any,
        *,
        reader: Callable[[Any], Any] | None = None,
        name: str | None = None,
        on_error: OnError = "raise",
        retries: int = RETRIES,
    ) -> DistributedDataset:
        """A dataset of which each example is visited exactly once an epoch, by whichever worker comes first.

            data = coordinator.distribute_dataset((images, labels)).shuffle(seed=1).batch(64)
            for part in data.repeat(3):
                coordinator.schedule(step, args=(part,))      # def step(part): for images, labels in part: ...
            coordinator.join()

        Which examples a function reads is settled when it is scheduled: every attempt of it reads the same ones, and
        what it does counts once, also where the coordinator dies and the next one repeats it. What was visited goes
        into checkpoints, and a run that is restored goes on in the middle of the epoch.

        Args:
            source: what the examples come from: arrays with one example a row (a tuple or dict of them, memory-mapped
                ones too, which are sent by the file's name); whatever has `__len__` and `__getitem__` (a list, a
                PyTorch or Hugging Face dataset); whatever has `__len__` and `read(start, stop)`; or a function that
                returns one of these, called here for its length and on each worker. With `reader`, a list of files.
            reader: called with a file on a worker, returns its examples: arrays, or something to iterate over.
            name: the position is kept under it; default: the number of the dataset in the script.
            on_error: what becomes of examples that can't be read after the retries: "raise", DatasetError ends the
                job's functions as any error; "skip", they are left out, logged, and counted in `skipped`.
            retries: so often a function is run again that could not read.

        Raises:
            TypeError: there is no way to read the source.
            ValueError: it has no examples, or an argument is out of its range.
        """
        progress = self.context.dataset_progress
        assert progress is not None  # made with the coordinator
        return distribute(progress, source, reader=reader, name=name, on_error=on_error, retries=retries)

    def evaluate(
        self,
        step: Callable[[Any], Any],
        dataset: DistributedDataset,
        metrics: Mapping[str, MetricLike] | Sequence[MetricLike],
        *,
        shards: int | Literal["auto"] = "auto",
        timeout: float | None = None,
        concurrent: bool = False,
    ) -> dict[str, Any]:
        """Metrics over a dataset: each example exactly once, whatever dies, with the variables as they are now.

        Waits for what was scheduled before; until it returns, other threads' `schedule` waits. The dataset is cut into
        shards, in its order; each shard's states are made by one function and travel back with its result, and are
        merged in the order of the shards. So the results are bit for bit those of one process that does the same.

        With `concurrent` training goes on meanwhile, in other threads and with what is scheduled already. For a moment
        no function runs, as for a checkpoint: those that do end first, those that wait go on waiting. In it the servers
        copy the variables that the step reaches, and for the optimizers that it reaches what they keep beside those
        (their averages, for one). The step reads the copies. They take memory on the servers until this returns. What
        the step writes to a variable goes to the copy and is gone with it. An error of the evaluation's functions is
        raised here and cancels nothing else; one of another function cancels the evaluation, and is raised by
        `schedule`, `join` or `done`.

        Args:
            step: called on workers with each element, gives what the metrics take: a tuple such as (labels, scores),
                or a dict with one for each metric.
            dataset: its first epoch, once; its position does not move.
            metrics: by name, or with names: those of `pscluster.coordinator.metrics`, or what has their four methods
                `initial`, `update`, `merge`, `result`.
            shards: how many functions; "auto": five a worker.
            timeout: seconds for all of it. Without one, functions that run have 60 s to end in before copies are made.
            concurrent: with copies of the variables, while other functions run.

        Returns:
            By name, what each metric's `result` gives.

        Raises:
            TypeError: `step` is no function, or `dataset` no distributed one.
            MisuseError: something is no metric, or its states do not merge; or the dataset's own functions reach
                variables, of which they would not have copies.
            FunctionError: the step, or, unless `concurrent`, something scheduled before, failed.
            CancelledError: with `concurrent`, another function failed meanwhile.
            WaitTimeoutError: `timeout` seconds have passed.
            UnavailableError: with `concurrent`, a parameter server has lost the copies: evaluate again.
        """
        named = by_name(metrics)
        if shards != "auto":
            shards = checks.whole("shards", shards, ", or 'auto'", at_least=1)
        if not callable(step):
            raise TypeError(f"evaluate takes a step function, not a {type(step).__name__}")
        if not isinstance(dataset, DistributedDataset):
            raise TypeError(
                f"evaluate takes a distributed dataset, not a {type(dataset).__name__}: give "
                "coordinator.distribute_dataset(...).batch(64)"
            )

        captured = self.captured(step)
        if shards == "auto":
            shards = 5 * len(self.context.workers)
        if concurrent:
            return results_of(named, self._states_of_copies(captured.function, named, dataset, shards, timeout))
        evaluate_shard = partial_of(captured.function.name, states_of, captured, named)
        deadline = None if timeout is None else time.monotonic() + timeout
        found: list[RemoteValue] = []
        with self._dispatcher.exclusive(timeout):
            try:
                found.extend(self.schedule(evaluate_shard, args=(part,)) for part in dataset.shards(shards))
                self.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except BaseException:
                self._dispatcher.withdraw(self._dispatcher.tasks_of(found))
                raise
            states = self.fetch(found)
        return results_of(named, states)

    def _states_of_copies(
        self,
        captured: CapturedFunction,
        metrics: Mapping[str, MetricLike],
        dataset: DistributedDataset,
        shards: int,
        timeout: float | None,
    ) -> list[States]:
        """The states of each shard, with copies of the variables as they are now, among whatever else runs."""
        begin = time.monotonic()

        def left() -> float | None:
            return None if timeout is None else begin + timeout - time.monotonic()

        if reached := dataset.reached_variables():
            raise MisuseError(
                f"the dataset's own functions reach {', '.join(map(repr, reached))}, which training changes while this "
                "is evaluated: read variables in the step instead"
            )
        for _ in range(len(self._remains)):
            with contextlib.suppress(IndexError):  # another evaluation has taken it
                self._drop(self._remains.popleft())
        snapshot = EvaluationSnapshot(self.context)
        inner = captured.renamed(snapshot.rename)
        evaluate_shard = partial_of(captured.name, states_of, FunctionHandle(inner), metrics)
        function = self._functions.anew(evaluate_shard).renamed(snapshot.rename)
        tasks: list[Task[Call]] = []
        found: list[RemoteValue] = []
        try:
            self._dispatcher.atomically(lambda: self._dispatcher.check_no_error(function.name))
            snapshot.make(self._dispatcher, BARRIER_SECONDS if timeout is None else timeout)
            for part in dataset.shards(shards):
                result = RemoteValue(function.name, self._resolve_handle, self)
                call = Call(function, weakref.ref(result), isolated=True)
                self._encode(call, (part,), {})
                found.append(result)
                tasks.append(self._dispatcher.submit(call, left=left()))
            self._dispatcher.wait_for(found, left(), timeout)
            return [value.fetch() for value in found]
        except UnknownVariableError as error:
            if snapshot.are_lost():
                raise UnavailableError(
                    "a parameter server was restarted without the evaluation snapshot: evaluate again"
                ) from error
            raise
        finally:  # wherever Ctrl-C struck
            self._dispatcher.withdraw(tasks)
            self._dispatcher.release_function(function)
            if inner is not captured:
                self._dispatcher.release_function(inner)
            self._drop(snapshot)

    def _drop(self, snapshot: EvaluationSnapshot) -> None:
        """Now, or where a server can't be reached with the next evaluation."""
        if not snapshot.drop():
            self._remains.append(snapshot)

    @property
    def workers_up(self) -> int:
        """Return how many workers take functions now."""
        return self._dispatcher.workers_up

    def describe(self) -> str:
        """A line for people: what waits, what runs, which workers are missing."""
        return self._dispatcher.describe()

    def _make_iterator(self, function: CapturedFunction) -> PerWorkerIterator:
        number = next(self._resources)
        iterator = PerWorkerIterator(number)
        self._per_worker[str(number)] = iterator
        self._add_resource(worker_pb2.Resource(id=number, definition=function.digest, seed=number), function, iterator)
        return iterator

    def _build_dataset(self, function: CapturedFunction, dataset: PerWorkerDataset) -> int:
        number = next(self._resources)
        self._per_worker[str(number)] = dataset
        resource = worker_pb2.Resource(id=number, definition=function.digest, seed=number, iterable=True)
        self._add_resource(resource, function, dataset)
        return number

    def _send_pipeline(self, pipeline: Pipeline) -> Number:
        value = next(self._resources)
        # By its number it is no other one's.
        sent = partial_of(f"dataset {pipeline.name!r}", numbered, pipeline, value)
        function = self._functions.anew(sent, holds_data=True)
        number = Number(value, function.handles)
        message = worker_pb2.Resource(id=number.value, definition=function.digest, distributed=True)
        self._add_resource(message, function, number)
        return number

    def _add_resource(self, message: worker_pb2.Resource, function: CapturedFunction, owner: object) -> None:
        """For as long as its owner is there."""
        self._dispatcher.add_resource(ResourceRecipe(message, function))
        weakref.finalize(owner, self._dispatcher.release_resource, message.id).atexit = False

    def _handle_of(self, kind: str, key: str) -> Handle:
        """The handle that a function returned."""
        if kind not in (PerWorkerIterator.handle_kind, PerWorkerDataset.handle_kind):
            return self.strategy.resolve_handle(kind, key)
        found = self._per_worker.get(key)
        if found is None or found.handle_kind != kind:
            raise MisuseError(f"a function returned a per-worker {kind} that this coordinator no longer has")
        return found

    def captured(self, fn: Callable[..., Any]) -> FunctionHandle:
        """For what is made of a function of the user's: the function, captured as by `schedule`.

        Raises:
            TypeError: it can't be called, or sent.
            MisuseError: it has captured a part of a dataset.
        """
        function = self._functions.get(fn)
        _check_no_part(function)
        return FunctionHandle(function)


def _check_seconds(name: str, value: object) -> None:
    checks.real(name, value, ", or None", kind=_SECONDS, finite=False, at_least=0)


def _check_no_part(function: CapturedFunction) -> None:
    if any(isinstance(handle, DataPart) for handle in function.handles):
        raise MisuseError(f"{function.name} captures a part of a dataset: pass it as an argument")


def _number_of(key: str) -> int:
    """What the servers know a key by; 0: none. Two keys share one as seldom as two of 2**64 random numbers do."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a string, not a {type(key).__name__}")
    if not key:
        return 0
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
