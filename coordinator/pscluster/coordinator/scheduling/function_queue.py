"""Schedules functions on workers, waits for them, fetches their results; and makes datasets and evaluations of that."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pscluster.coordinator.checkpoints.checkpoint import BARRIER_SECONDS
from pscluster.coordinator.data.dataset import RETRIES, DataPart, DistributedDataset, OnError, distribute
from pscluster.coordinator.data.dataset_progress import DatasetProgress, DatasetResource
from pscluster.coordinator.data.per_worker import PerWorker, PerWorkerDataset, PerWorkerIterator
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.local.supervised import SupervisedCluster
from pscluster.coordinator.observability import timeline
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.scheduling.call import Call, ResourceRecipe, placeholder
from pscluster.coordinator.scheduling.captured_functions import CapturedFunctions
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.scheduling.gangs import Gang
from pscluster.coordinator.scheduling.questions import Question
from pscluster.coordinator.scheduling.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.scheduling.synchronous_run import SynchronousRun
from pscluster.coordinator.scheduling.tasks import NO_LIMITS, RunLimits, Task
from pscluster.coordinator.scheduling.waiting import deadline_of, seconds_left
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.synchronous.per_replica import own_values
from pscluster.coordinator.variables.evaluation_snapshot import EvaluationSnapshot
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.cluster.spec import tasks_in_words
from pscluster.core.errors import MisuseError, UnavailableError, UnknownVariableError
from pscluster.core.functions.definitions import CapturedFunction, FunctionHandle, partial_of
from pscluster.core.handles import Handle, StaysHere
from pscluster.core.ids import fresh_id
from pscluster.core.notebook import current_cell, render_traceback
from pscluster.core.values import HandleResolver, encode, encode_call, map_structure
from pscluster.ps.handles.metrics import MetricLike
from pscluster.v1 import value_pb2, worker_pb2
from pscluster.worker.data.per_replica import made_in_sync
from pscluster.worker.data.per_worker import given
from pscluster.worker.data.pipelines import Pipeline, numbered
from pscluster.worker.evaluation import States, by_name, joined, outputs_of, results_of, states_of
from pscluster.worker.features.layer import Layer
from pscluster.worker.overlap import overlapped
from pscluster.worker.step_results import of_steps
from pscluster.worker.training import MakesSteps

T = TypeVar("T")

_SECONDS = "number of seconds"
_ELEMENTS = (DataPart, PerWorkerDataset, PerWorkerIterator)
_INTERRUPT_SECONDS = 5.0  # for functions to stop after Ctrl-C in a notebook, before their worker is ended
_MAX_OVERLAPPING = 64  # functions with lookups that are captured once; the least recently used are captured again


class FunctionQueue(StaysHere):
    """What trainings and their callbacks use of a ClusterCoordinator: it runs functions on workers. Thread-safe."""

    instead = (
        "schedule functions in the script; a RemoteValue passes the result of one function to another as an argument"
    )

    def _begin(self, strategy: ParameterServerStrategy, dispatcher: Dispatcher) -> None:
        self.strategy = strategy
        self.trainings_ended = 0  # how many of the script's have
        self._dispatcher = dispatcher
        self._functions = CapturedFunctions(strategy.context.variables.serialization)
        self.synchronous_run = SynchronousRun(strategy.context.client.updater, strategy.step_options)
        strategy.context.settle_steps = self.synchronous_run.settle
        self._resources = itertools.count(1)
        self._per_worker: weakref.WeakValueDictionary[str, PerWorkerIterator | PerWorkerDataset | PerWorker[Any]] = (
            weakref.WeakValueDictionary()
        )
        self._remains = deque[EvaluationSnapshot]()  # of evaluations that have ended, on servers that were unreachable
        # By the digests of a function and its lookups; the last used one at the end.
        self._overlapping: dict[tuple[str, str], CapturedFunction] = {}
        self._resolve_handle: HandleResolver = self._handle_of  # the same object for all values
        strategy.context.dataset_progress = DatasetProgress(
            strategy.context.client, dispatcher, self._send_pipeline, self.over_shards
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.strategy!r}>"

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        lookups: Callable[..., Any] | None = None,
        timeout: float | None = None,
        retries: int = 0,
        key: str = "",
        wait: float | None = None,
    ) -> RemoteValue:
        """Queue a function for some worker, and return its result-to-be.

        The function and the values it captures are taken as they are at its first `schedule`, `fit` or `evaluate`; pass
        as arguments what changes from call to call. If its code changes, or that of your functions and classes that it
        reaches, it is a new function. A captured name that is rebound keeps its first value, and the log warns once;
        changes in place are not noticed. Make the function once, before the loop: a new lambda or partial in each call
        costs 0.3 ms, ten times as much as the same function again, and 1 ms if it captures another value each time.
        Per-worker iterators become the executing worker's own, RemoteValues their values once they are ready. If the
        worker dies the function runs again elsewhere, and its updates are applied once.

        Blocks while the queue is full, and, after an earlier function has failed, until all running ones have stopped.

        Args:
            fn: any callable.
            args, kwargs: what it is called with, of any structure: arrays, numbers, texts, handles, RemoteValues, and
                what can be pickled where that is allowed.
            lookups: called on the worker with the same arguments before `fn` runs, while the function before it does.
                It returns the rows that `fn` will look up, `[(table, ids), ...]`, which are fetched meanwhile: lookups
                of exactly these ids in `fn` get them. Updates in `fn` then return at once, and are sent while the next
                function runs; this one ends, for `join`, checkpoints and its RemoteValue, when they are acknowledged.
                So rows may lack the updates of this worker's last two functions, and other reads those of its last. It
                runs at the same time as `fn`, on another thread, and must not change anything.
            timeout: seconds that each attempt may run on a worker. After that it fails with FunctionTimeoutError: it is
                stopped at its next read or update, its further updates are refused, its result is dropped, and its
                worker is used again once it has ended (see `cancel` for one that never does). None: no limit.
            retries: how often it runs again after it raised or ran too long. Its updates count once: those of a failed
                run are not applied again. No run begins before the last one has ended: one that has run too long and
                reaches no read or update within another 5 s costs its worker, until it has ended there.
            key: names this piece of the work for all who schedule it, such as `f"epoch {epoch}, rows {a}-{b}"`. All
                runs under one key count once together, even if the coordinator dies and the next one schedules it
                again. The servers remember that until `forget_keys`.
            wait: seconds after which to give up where this blocks. None: as long as the slowest function takes.

        Raises:
            MisuseError: a function with this key is scheduled and has not ended; or `lookups` is given with a
                `SynchronousStrategy`, or with elements of datasets, which are not there before the function runs.
            ValueError: `retries` is less than 0, or `timeout` is not above 0.
            TypeError: `fn` is not callable, or something in the arguments can't be sent: its path is named.
            FunctionError: an earlier function failed; this one has not been scheduled.
            WaitTimeoutError: it was not scheduled within `wait` seconds; the message says why.
            PSUnavailableError: a parameter server is lost.

        Examples:
            >>> value = coordinator.schedule(lambda x: x + 1, args=(41,))
            >>> value.fetch()
            42
            >>> coordinator.schedule(lambda x: x + 1, args=(value,), timeout=60.0, retries=2).fetch()
            43
        """
        if not callable(fn):
            raise TypeError(f"schedule takes a function, not {type_of(fn)}")
        # Only given arguments are checked: checking all took a third of the time for a function without any.
        if args is not None or kwargs is not None:
            check_arguments(args, kwargs)
        if timeout is not None or wait is not None or type(retries) is not int or retries:
            timeout, retries = _checked_limits(timeout, retries, wait)
        function = self._functions.get(fn) if lookups is None else self._overlapped(fn, lookups)
        if function.handles:
            _check_no_part(function)
        result = RemoteValue(function.name, self._resolve_handle, self)
        call = Call(function, weakref.ref(result))
        if args or kwargs:
            self._encode(call, args or (), dict(kwargs or {}))
            if lookups is not None and any(isinstance(handle, _ELEMENTS) for handle in call.handles):
                raise MisuseError(
                    f"lookups is called before {function.name} runs, and can't know the elements of a dataset that it "
                    "will take: pass a batch as an argument, or train with fit(..., lookups=, overlap=1)"
                )
        if call.parts and not key and (visits := [part for part in call.parts if part.position is not None]):
            key = " and ".join(f"{part.name}/{function.name}" for part in visits)
        limits = NO_LIMITS
        if timeout is not None or retries or call.parts:
            limits = RunLimits(timeout, retries, call.data_retries)
        entered: list[DataPart] = []
        try:
            for part in call.parts:
                part.enter()
                entered.append(part)
            self._dispatcher.submit(Task(call, limits=limits, key=_number_of(key)), key, wait)
        except BaseException as error:
            for part in entered:
                part.release()
            if isinstance(error, KeyboardInterrupt):
                self.interrupted(error)
            raise
        return result

    def schedule_with(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        answer: Callable[[Question], None],
        timeout: float | None = None,
        retries: int = 0,
        isolated: bool = False,
    ) -> RemoteValue:
        """Schedule a function that asks something while it runs (`FunctionContext.ask`); for internal use.

        Args:
            answer: called with each question, on the thread of the worker's connection: it must not block. It may keep
                the question, and reply later from any thread. Each attempt asks again. See `Question`.
            isolated: an error of the function cancels nothing else.
        """
        if not callable(fn):
            raise TypeError(f"schedule_with takes a function, not {type_of(fn)}")
        check_arguments(args, kwargs)
        timeout, retries = _checked_limits(timeout, retries, None)
        function = self._functions.get(fn)
        _check_no_part(function)
        result = RemoteValue(function.name, self._resolve_handle, self)
        call = Call(function, weakref.ref(result), answer=answer)
        if args or kwargs:
            self._encode(call, args or (), dict(kwargs or {}))
        if call.parts:
            raise MisuseError(f"{function.name} is scheduled for internal use: it can't take a part of a dataset")
        limits = RunLimits(timeout, retries) if timeout is not None or retries else NO_LIMITS
        self._dispatcher.submit(Task(call, limits=limits, isolated=isolated))
        return result

    def schedule_together(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        workers: int | Sequence[int] | None = None,
        timeout: float | None = None,
        retries: int = 0,
        wait: float | None = None,
    ) -> list[RemoteValue]:
        """Run a function on several workers at the same time, and return their results-to-be, by rank.

        Each run gets its rank, and can talk to the others, by `replica_context()`. They begin together, once all the
        workers are free: functions that were scheduled before go first, and later ones wait for these workers. If one
        of them fails, the others are stopped. If a worker dies, all run again, and updates are applied once.

        Args:
            args, kwargs: the same for all, but for `PerReplica` values, of which each gets its own.
            workers: how many, or the indices of which, in the order of ranks. None: all of the cluster.
            timeout, retries, wait: as in `schedule`; a retry is one of all.

        Raises:
            ValueError: there are no such workers, or a `PerReplica` value has not as many values.
            MisuseError: an argument is a part of a distributed dataset, or a RemoteValue that is not ready.
        """
        if not callable(fn):
            raise TypeError(f"schedule_together takes a function, not {type_of(fn)}")
        check_arguments(args, kwargs)
        homes, size = self.members(workers)
        return self.schedule_gang(fn, args, kwargs, homes, size, timeout, retries, wait)

    def schedule_gang(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        homes: Sequence[int] | None,
        size: int,
        timeout: float | None,
        retries: int,
        wait: float | None,
        *,
        min_workers: int = 0,
        steps: worker_pb2.SynchronousSteps | None = None,
        spare: int = 0,
        no_result: Any = None,
        answer: Callable[[Question], None] | None = None,
        isolated: bool = False,
    ) -> list[RemoteValue]:
        """Do what `schedule_together` does, perhaps to take steps of a synchronous run; for internal use.

        `answer` and `isolated` are as in `schedule_with`; `answer` gets the questions of all members. Once all but
        `spare` have returned, one whose worker is lost or silent counts as having returned `no_result`.
        """
        timeout, retries = _checked_limits(timeout, retries, wait)
        function = self._functions.get(fn)
        _check_no_part(function)
        values: list[RemoteValue] = []
        calls: list[Call] = []
        for rank in range(size):
            value = RemoteValue(function.name, self._resolve_handle, self)
            call = Call(function, weakref.ref(value), answer=answer)
            own_args, own_kwargs = own_values((list(args or ()), dict(kwargs or {})), rank, size)
            if own_args or own_kwargs:
                self._encode(call, own_args, own_kwargs)
            if call.parts:
                raise MisuseError(f"{function.name} runs on several workers: it can't take a part of a dataset")
            if any(remote.status is not RemoteValueStatus.READY for remote in call.remote.values()):
                raise MisuseError(f"an argument of {function.name} is not ready: pass what its fetch() returns")
            values.append(value)
            calls.append(call)
        keys = [fresh_id() for _ in calls]
        limits = RunLimits(timeout, retries) if timeout or retries else NO_LIMITS
        gang = Gang(calls, keys, homes, limits, min_workers, fresh_id(), steps=steps, spare=spare, isolated=isolated)
        gang.no_result = encode(no_result), ()
        self._dispatcher.submit_gang(gang, wait)
        return values

    def take_steps(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        steps: int,
        collect: worker_pb2.SynchronousSteps.Collect,
        timeout: float | None = None,
        retries: int = 0,
    ) -> tuple[int, list[Any]]:
        """Take steps of the job's synchronous run on all workers; return how many were done, and the results by rank.

        Fewer are done if the data of a replica ends. Raises the error of a step, once: `join` does not raise it again.
        """
        run, devices = self.synchronous_run, self.strategy.devices_per_worker
        workers = self._workers_of_steps(fn, args, kwargs)
        homes = [place for place in self._dispatcher.places(workers) for _ in range(devices)]
        replicas = len(homes)
        min_workers = -(-self.strategy.min_replicas // devices)
        with run.steps(steps, collect) as (message, committed):
            values = self.schedule_gang(
                *(fn, args, kwargs, homes, replicas, timeout, retries, None),
                min_workers=min_workers,
                steps=message,
                spare=message.backup,
                no_result=(None, ([], [])),
            )
            try:
                for value in values:
                    value.wait()
            except BaseException:  # such as Ctrl-C
                self.cancel(values)
                raise
            if any(value.status is not RemoteValueStatus.READY for value in values):
                self.join()  # raises the error, which a later call would raise otherwise
            returned = [value.fetch() for value in values]
            ends = [end for end, _ in returned if end is not None]
            last = min(ends)
            committed(last, len(ends) < replicas)
        done, of_replicas = last - message.first, [result for _, result in returned]
        if message.staleness or message.backup:
            of_replicas = [of_steps(collect, numbered, done) for numbered in of_replicas]
        return done, of_replicas

    def members(self, workers: int | Sequence[int] | None) -> tuple[list[int] | None, int]:
        """Return the workers that are asked for, by rank, and how many they are; None: any. For internal use."""
        there = [peer.index for peer in self.context.workers]
        if workers is None:
            if not there:
                raise MisuseError("no worker has joined the cluster yet, so there is none to run a function together")
            return self._dispatcher.places(there), len(there)
        if isinstance(workers, Sequence) and not isinstance(workers, str | bytes):
            indices = [checks.whole("a worker's index", index, at_least=0) for index in workers]
            if not indices or len(set(indices)) < len(indices) or not set(indices).issubset(there):
                raise ValueError(
                    f"workers is {list(workers)}; give different indices of workers; the cluster has "
                    f"{tasks_in_words(there)}"
                )
            return self._dispatcher.places(indices), len(indices)
        size = checks.whole("workers", workers, ", or their indices", at_least=1)
        if size > len(there):
            raise ValueError(f"workers is {size}, but the cluster has {len(there)}")
        return None, size

    def forget_keys(self, keys: Iterable[str]) -> None:
        """Let the servers forget functions with these keys, which will never be scheduled again.

        Call it after a `save_progress` that records them as done: before that, their updates could count twice. Returns
        at once; the servers are told within seconds.

        Raises:
            MisuseError: a function with one of the keys has not ended. None is forgotten.
        """
        if isinstance(keys, str):
            raise TypeError("forget_keys takes several keys: write forget_keys([key])")
        self._dispatcher.servers.forget({_number_of(key): key for key in keys})

    def _encode(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Encode the arguments, as they are now, into a call."""
        waiting: dict[str, RemoteValue] = {}

        def remote(leaf: Any, _attachments: object) -> value_pb2.Value | None:
            if not isinstance(leaf, RemoteValue):
                return None
            # Another coordinator's value is set under another lock, and names other variables.
            if leaf._resolve_handle is not self._resolve_handle:
                raise MisuseError(f"{leaf!r} is another coordinator's: pass what its fetch() returns")
            waiting[key := str(len(waiting))] = leaf
            return placeholder(key)

        attachments: list[memoryview] = []
        handles: list[Handle] = []
        classes: dict[str, CapturedFunction] = {}

        def define(cls: type) -> str:
            if (known := self._functions.of_class(cls)) is None:
                return ""
            classes[known.digest] = known
            return known.digest

        call.arguments = value_pb2.Value()
        encode_call(
            args, kwargs, attachments=attachments, remote=remote, define=define, into=call.arguments, handles=handles
        )
        # Copies: the caller may change its arrays once this has returned.
        call.attachments = [memoryview(bytes(attachment)) for attachment in attachments]
        for handle in handles:
            if isinstance(handle, FunctionHandle):  # inside a record, such as a served module; or of a layer
                classes[handle.function.digest] = handle.function
        call.remote, call.classes, call.define, call.handles = waiting, classes, define, handles
        call.parts = [handle for handle in handles if isinstance(handle, DataPart)]

    def join(self, timeout: float | None = None) -> None:
        """Wait until every scheduled function has ended.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            FunctionError: a function failed: the first error, raised once. All else was cancelled, nothing runs.
            PSUnavailableError: a parameter server is lost.
            WaitTimeoutError: `timeout` seconds have passed; the message says what waits and which workers are missing.

        Examples:
            >>> coordinator.join(timeout=60.0)
        """
        deadline = deadline_of(timeout)
        try:
            self._dispatcher.waits.join(timeout)
        except KeyboardInterrupt as interrupt:
            self.interrupted(interrupt)
            raise
        # A server that came back while functions ended may have lost their updates: wait for the log to say so.
        self.context.losses.wait(seconds_left(deadline))

    def cancel_waiting(self, values: Iterable[RemoteValue]) -> int:
        """Wait for running functions to end, cancel those of these that have not begun, and return how many.

        Their RemoteValues raise CancelledError.
        """
        return self._dispatcher.waits.cancel_waiting(values)

    def cancel(self, values: Iterable[RemoteValue] | None = None, *, kill_after: float | None = None) -> int:
        """End the functions of these values at once, and those that take their results; return how many.

        Their RemoteValues raise CancelledError; other functions go on. A running one is asked to stop, which it does at
        its next read or update; the servers refuse its further updates, and its worker takes other work once it has
        stopped. It may have applied some updates before; its error says so.

        Args:
            values: None: of all functions.
            kill_after: seconds for running functions to stop, including those that were cancelled or timed out before.
                After that their worker's process is ended, with its datasets, and has to be restarted as after any
                death: a LocalCluster does that. None: they may go on forever. A function that holds the GIL keeps its
                worker from receiving this.
        """
        if kill_after is not None:
            _check_seconds("kill_after", kill_after)
        return self._dispatcher.waits.cancel(values, kill_after)

    def interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Take note that Ctrl-C has ended a wait: in a notebook all functions end, and the cluster goes on.

        Otherwise the next cell would wait for them. A script usually ends.
        """
        if current_cell() is None:
            return
        restarts = isinstance(self.context.resolver, SupervisedCluster)
        if count := self.cancel(kill_after=_INTERRUPT_SECONDS if restarts else None):
            interrupt.add_note(
                f"{count} function{'s were' if count > 1 else ' was'} cancelled. The cluster goes on: run any cell."
            )
        interrupt._render_traceback_ = functools.partial(render_traceback, interrupt)  # type: ignore[attr-defined]

    def withdraw(self, values: Iterable[RemoteValue]) -> None:
        """Cancel functions that have not begun, and ask those to stop that have; for internal use. Returns at once."""
        self._dispatcher.waits.withdraw(values)

    def is_leaving(self, place: int) -> bool:
        """Return whether a worker, by the scheduler's index, was told to stop, or has; for internal use."""
        return self._dispatcher.state.scheduler.workers[place].leaving

    def pending(self) -> str:
        """Return which error `schedule`, `join` or `done` will raise, and what that waits for; "" if there is none."""
        return self._dispatcher.status.pending()

    def explain(self) -> str:
        """Explain in a few lines what is waiting for what, and since when, for a job that seems to hang.

        The log says so by itself when nothing has come back for a minute.
        """
        return self._dispatcher.status.explain()

    @property
    def context(self) -> JobContext:
        """Return what the parts of the job share; for internal use."""
        return self.strategy.context

    @property
    def telemetry(self) -> CoordinatorTelemetry:
        """Return the job's metrics: `telemetry.snapshot()`."""
        return self.strategy.telemetry

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of the latest functions for https://ui.perfetto.dev, with a row for each role.

        The last 2,048 attempts that took a millisecond or longer, and every sixteenth of the shorter ones, are always
        recorded. Of a process that has died since, the trace has only what others recorded. The format is Chrome's
        (JSON). An existing file is overwritten.
        """
        context = self.context
        timeline.write(path, list(context.metrics.attempts), timeline.collect(context.tasks))

    def done(self) -> bool:
        """Return whether every scheduled function has ended. Raises as `join` does.

        Examples:
            >>> coordinator.done()
            True
        """
        return self._dispatcher.waits.done()

    def fetch(self, structure: Any, timeout: float | None = None) -> Any:
        """Return a structure with each RemoteValue in it replaced by its value; everything else stays as it is.

        Args:
            structure: a RemoteValue, or lists, tuples and dicts that hold some.
            timeout: seconds for all of them together; None: as long as it takes.

        Raises:
            FunctionError, CancelledError: as `RemoteValue.fetch`.
            WaitTimeoutError: not all values were ready within `timeout` seconds.

        Examples:
            >>> values = {name: coordinator.schedule(len, args=(name,)) for name in ("one", "three")}
            >>> coordinator.fetch(values)
            {'one': 3, 'three': 5}
        """
        deadline = deadline_of(timeout)

        def value_of(leaf: Any) -> Any:
            return leaf._fetch(seconds_left(deadline), timeout) if isinstance(leaf, RemoteValue) else leaf

        return map_structure(value_of, structure)

    def create_per_worker_dataset(self, dataset_fn: Callable[..., Any] | Iterable[Any]) -> PerWorkerDataset:
        """Make a dataset on every worker, from the iterable that `dataset_fn()` or `dataset_fn(context)` returns there.

        An iterable in place of the function is sent to every worker. Pass `iter()` of the returned dataset to
        `schedule`, or the dataset itself if each function should begin at its start. A worker that restarts rebuilds it
        and begins at its start.

        Args:
            dataset_fn: called on each worker, with an `InputContext` if it takes an argument; or an iterable that is
                no iterator.

        Raises:
            ValueError: it is neither.

        Examples:
            >>> def numbers(context):
            ...     yield from range(context.worker_index, 1000, context.num_workers)
            >>> iterator = iter(coordinator.create_per_worker_dataset(numbers))
            >>> coordinator.schedule(lambda it: next(it) < 1000, args=(iterator,)).fetch()
            True
        """
        make = made_in_sync if self.strategy.is_synchronous else None
        return self.per_worker_dataset(dataset_fn, make)

    def per_worker_dataset(
        self, dataset_fn: Callable[..., Any] | Iterable[Any], make: Callable[..., Any] | None, *options: Any
    ) -> PerWorkerDataset:
        """Do what `create_per_worker_dataset` does. With `make`, workers call `make(dataset_fn, *options, context)`.

        In place of an iterable it gets a function that returns it. For internal use.
        """
        if callable(dataset_fn):
            function = self._functions.get(dataset_fn)
        elif not isinstance(dataset_fn, Iterable):
            raise ValueError(f"create_per_worker_dataset takes a function or an iterable, not {type_of(dataset_fn)}")
        elif isinstance(dataset_fn, Iterator):
            raise ValueError("an iterator can be iterated over only once: give a list, or a function that makes one")
        else:
            function = self._functions.anew(partial_of("elements", given, dataset_fn), holds_data=True)
        if make is not None:
            function = self._functions.anew(partial_of(function.name, make, FunctionHandle(function), *options))
        return PerWorkerDataset(function, self._make_iterator, self._build_dataset, lambda: self._homes)

    def per_worker(self, fn: Callable[[], T]) -> PerWorker[T]:
        """Have every worker make an object of its own by calling `fn()` there, such as a model or a jitted function.

            model = coordinator.per_worker(make_model)
            def step(images): return model.get()(images)      # or pass it: schedule(step, args=(model, images))

        A worker makes it when a step first calls `get()`, and all of its functions share it, whatever they do to it. If
        the worker restarts it is made anew. If `fn` raises, that step fails, and the next one calls `fn` again. The
        object is never sent anywhere, and is dropped with the last reference to the returned handle, that of functions
        included. `fn` and the values it captures are taken as they are now, as by `schedule`.

        Raises:
            TypeError: `fn` is not callable, or something that it captures can't be sent.
        """
        if not callable(fn):
            raise TypeError(f"per_worker takes a function that makes the object, not {type_of(fn)}")
        function = self._functions.get(fn)
        _check_no_part(function)
        resource_id = next(self._resources)
        item = PerWorker[T](resource_id, function.name)
        self._per_worker[item.handle_key] = item
        self._build(item, function, (), id=resource_id, object=True, name=function.name)
        return item

    def distribute_dataset(
        self,
        source: Any,
        *,
        reader: Callable[[Any], Any] | None = None,
        name: str | None = None,
        on_error: OnError = "raise",
        retries: int = RETRIES,
    ) -> DistributedDataset:
        """Make a dataset whose examples are each visited exactly once an epoch, by any worker.

            data = coordinator.distribute_dataset((images, labels)).shuffle(seed=1).batch(64)
            for part in data.repeat(3):
                coordinator.schedule(step, args=(part,))      # def step(part): for images, labels in part: ...
            coordinator.join()

        The examples of a function are fixed when it is scheduled: every attempt reads the same ones, and its updates
        count once, even if the coordinator dies and the next one repeats it. Checkpoints record what was visited, and a
        restored run continues in the middle of the epoch.

        Args:
            source: arrays with one example a row (or a tuple or dict of them; memory-mapped ones are sent by file
                name); anything with `__len__` and `__getitem__` (a list, a PyTorch or Hugging Face dataset); anything
                with `__len__` and `read(start, stop)`; or a function that returns one of these, called here for its
                length and on each worker. With `reader`, a list of files. For files of the usual kinds see
                `pscluster.coordinator.sources`.
            reader: called with a file on a worker; returns its examples: arrays, or an iterable.
            name: under which the position is saved; default: the number of the dataset in the script.
            on_error: for examples that can't be read after the retries: "raise" a DatasetError, as any error of a
                function, or "skip": they are left out, logged, and counted in `skipped`.
            retries: how often a function that could not read runs again.

        Raises:
            TypeError: the source can't be read in any of these ways.
            ValueError: it has no examples, or an argument is out of range.

        Examples:
            >>> data = coordinator.distribute_dataset(np.arange(10)).batch(4)
            >>> values = [coordinator.schedule(lambda part: sum(map(len, part)), args=(part,)) for part in data]
            >>> sum(coordinator.fetch(values))
            10
        """
        progress = self.context.dataset_progress
        assert progress is not None  # made with the coordinator
        return distribute(progress, source, reader=reader, name=name, on_error=on_error, retries=retries)

    def evaluate(
        self,
        step: Callable[[Any], Any] | MakesSteps,
        dataset: DistributedDataset,
        metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | None = None,
        *,
        shards: int | Literal["auto"] = "auto",
        timeout: float | None = None,
        concurrent: bool = False,
    ) -> dict[str, Any]:
        """Return metrics over a dataset, by name, with the present variables: each example once, whatever dies.

        Waits for functions that were scheduled before; until it returns, `schedule` in other threads waits. The dataset
        is cut into shards in its order; one function computes the states of each, which are merged in the order of the
        shards. So the results are bit for bit those of one process that does the same.

        With `concurrent` training goes on meanwhile, in other threads and with functions already scheduled. For a
        moment no function runs, as for a checkpoint: running ones end first, the others wait. In that moment the
        servers copy the variables that the step reaches, and the slots of the optimizers that it reaches (such as
        averages). The step reads the copies, which take memory on the servers until this returns; what it writes to a
        variable goes to the copy and is lost with it. An error of the evaluation is raised here and cancels nothing
        else; an error of another function cancels the evaluation, and is raised by `schedule`, `join` or `done`.

        Args:
            step: called on workers with each element; returns what the metrics take: a tuple such as (labels, scores),
                or a dict with one such for each metric. Or a served Keras model, which has metrics of its own.
            dataset: its first epoch is read once; its position does not change.
            metrics: by name, or with names: those of `pscluster.coordinator.metrics`, or objects with their four
                methods `initial`, `update`, `merge`, `result`.
            shards: how many functions; "auto": five a worker.
            timeout: seconds for the whole evaluation. None: running functions have 60 s to end before copies are made.
            concurrent: evaluate copies of the variables while other functions run.

        Raises:
            TypeError: `step` is not a function, or `dataset` is not a distributed dataset.
            MisuseError: something is not a metric, or its states do not merge; or the dataset's own functions reach
                variables, of which they would not have copies.
            FunctionError: the step failed, or, unless `concurrent`, a function that was scheduled before.
            CancelledError: with `concurrent`, another function failed meanwhile.
            WaitTimeoutError: `timeout` seconds have passed.
            UnavailableError: with `concurrent`, a parameter server has lost the copies: evaluate again.

        Examples:
            >>> data = coordinator.distribute_dataset(np.arange(10.0)).batch(4)
            >>> coordinator.evaluate(lambda batch: (batch,), data, [metrics.Mean(name="mean")])
            {'mean': 4.5}
        """
        if isinstance(step, MakesSteps):
            metrics = [step.evaluation_metric()] if metrics is None else metrics
            step = step.evaluation_step()
        elif metrics is None:
            raise MisuseError("the metrics are None: give a list, such as [metrics.Accuracy()], or a dict")
        named = by_name(metrics)
        shards = self._checked_shards("evaluate", step, dataset, shards)
        captured = self.captured(step)
        if concurrent:
            return results_of(named, self._states_of_copies(captured.function, named, dataset, shards, timeout))
        evaluate_shard = partial_of(captured.function.name, states_of, captured, named)
        return results_of(named, self.over_shards(evaluate_shard, dataset, shards, timeout))

    def predict(
        self,
        step: Callable[[Any], Any],
        dataset: DistributedDataset,
        *,
        shards: int | Literal["auto"] = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Return what the step returns for each element of a dataset, joined in the order of its first epoch.

        As `evaluate` does, it waits for functions that were scheduled before, and `schedule` in other threads waits
        until it returns. Each example is read once, whatever dies. The outputs must fit in this process's memory.

        Args:
            step: called on workers with each element; returns an array with an example a row, a number, or a structure
                of these, the same for all elements.
            dataset: its first epoch is read once; its position does not change. With `on_error="skip"` outputs of
                examples that can't be read are missing.
            shards: how many functions; "auto": five a worker.
            timeout: seconds for all of it.

        Returns:
            The structure, each leaf an array of all elements' outputs joined along the first axis; of numbers, an
            array with one for each element.

        Raises:
            TypeError: `step` is not a function, or `dataset` is not a distributed dataset.
            MisuseError: outputs differ in structure, or can't be joined.
            FunctionError: the step failed, or a function that was scheduled before.
            WaitTimeoutError: `timeout` seconds have passed.
        """
        shards = self._checked_shards("predict", step, dataset, shards)
        captured = self.captured(step)
        predict_shard = partial_of(captured.function.name, outputs_of, captured)
        outputs = self.over_shards(predict_shard, dataset, shards, timeout)
        return joined(list(itertools.chain.from_iterable(outputs)))

    def _checked_shards(self, caller: str, step: object, dataset: object, shards: int | Literal["auto"]) -> int:
        """Return how many shards to cut into. TypeError or ValueError if an argument of the caller is wrong."""
        if shards != "auto":
            shards = checks.whole("shards", shards, ", or 'auto'", at_least=1)
        if not callable(step):
            raise TypeError(f"{caller} takes a step function, not {type_of(step)}")
        if not isinstance(dataset, DistributedDataset):
            raise TypeError(
                f"{caller} takes a distributed dataset, not {type_of(dataset)}: give "
                "coordinator.distribute_dataset(...).batch(64)"
            )
        return self._shards if shards == "auto" else shards

    @property
    def _shards(self) -> int:
        """Return into how many shards a dataset is cut by default."""
        return 5 * max(len(self.context.workers), 1)

    def over_shards(
        self,
        fn: Callable[[Any], Any],
        dataset: DistributedDataset,
        shards: int | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Return what `fn` returns for each shard of a dataset's first epoch, in order, alone; for internal use."""
        deadline = deadline_of(timeout)
        values: list[RemoteValue] = []
        with self._dispatcher.waits.exclusive(timeout):
            try:
                values.extend(self.schedule(fn, args=(shard,)) for shard in dataset.shards(shards or self._shards))
                self.join(seconds_left(deadline))
            except BaseException:
                self._dispatcher.waits.withdraw(values)
                raise
            results: list[Any] = self.fetch(values)
        return results

    def _states_of_copies(
        self,
        captured: CapturedFunction,
        metrics: Mapping[str, MetricLike],
        dataset: DistributedDataset,
        shards: int,
        timeout: float | None,
    ) -> list[States]:
        """Return the states of each shard, computed with copies of the present variables while other functions run."""
        deadline = deadline_of(timeout)
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
        values: list[RemoteValue] = []
        try:
            self._dispatcher.atomically(lambda: self._dispatcher.waits.check_no_error(function.name))
            snapshot.make(self._dispatcher, BARRIER_SECONDS if timeout is None else timeout)
            for shard in dataset.shards(shards):
                result = RemoteValue(function.name, self._resolve_handle, self)
                call = Call(function, weakref.ref(result))
                self._encode(call, (shard,), {})
                values.append(result)
                task = Task(call, limits=RunLimits(data_retries=call.data_retries), isolated=True)
                self._dispatcher.submit(task, left=seconds_left(deadline))
            self._dispatcher.waits.wait_for(values, deadline, timeout)
            return [value.fetch() for value in values]
        except UnknownVariableError as error:
            if snapshot.are_lost():
                raise UnavailableError(
                    "a parameter server was restarted without the evaluation snapshot: evaluate again"
                ) from error
            raise
        finally:  # wherever Ctrl-C struck
            self._dispatcher.waits.withdraw(values)
            self._dispatcher.definitions.release_function(function)
            if inner is not captured:
                self._dispatcher.definitions.release_function(inner)
            self._drop(snapshot)

    def _drop(self, snapshot: EvaluationSnapshot) -> None:
        """Drop a snapshot now, or, if a server is unreachable, in the next evaluation."""
        if not snapshot.drop():
            self._remains.append(snapshot)

    @property
    def workers_up(self) -> int:
        return self._dispatcher.state.workers_up

    def describe(self) -> str:
        """Return a line for people: what is waiting and running, and which workers are missing."""
        return self._dispatcher.status.describe()

    def _make_iterator(self, function: CapturedFunction) -> PerWorkerIterator:
        resource_id = next(self._resources)
        iterator = self._per_worker[str(resource_id)] = PerWorkerIterator(resource_id, self._homes)
        self._build(iterator, function, iterator.homes, id=resource_id, seed=resource_id)
        return iterator

    def _build_dataset(self, function: CapturedFunction, dataset: PerWorkerDataset) -> int:
        resource_id = next(self._resources)
        self._per_worker[str(resource_id)] = dataset
        self._build(dataset, function, dataset.homes, id=resource_id, seed=resource_id, iterable=True)
        return resource_id

    @property
    def _homes(self) -> tuple[int, ...]:
        """Return the indices of the workers whose replicas step together now; none if they do not."""
        return tuple(peer.index for peer in self.context.workers) if self.strategy.is_synchronous else ()

    def _workers_of_steps(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Sequence[int]:
        """Return the workers that take steps: those of the iterators that they are given, otherwise all.

        An iterator has a share for each of its replicas, and none for a worker that has joined since it was made.
        """
        handles = list(self._functions.get(fn).handles)
        map_structure(handles.append, (list(args), dict(kwargs or {})))
        of_data = {
            handle.homes or self._homes
            for handle in handles
            if isinstance(handle, PerWorkerIterator | PerWorkerDataset)
        }
        if len(of_data) > 1:
            raise MisuseError(
                "these iterators were made when the cluster had different workers, so their replicas are not the same: "
                "begin a new iter() of each"
            )
        return of_data.pop() if of_data else self._homes

    def _send_pipeline(self, pipeline: Pipeline) -> DatasetResource:
        resource_id = next(self._resources)
        # By its number it is no other one's.
        sent = partial_of(f"dataset {pipeline.name!r}", numbered, pipeline, resource_id)
        function = self._functions.anew(sent, holds_data=True)
        resource = DatasetResource(resource_id, function.handles)
        self._build(resource, function, (), id=resource_id, distributed=True)
        return resource

    def _build(self, owner: object, function: CapturedFunction, homes: Sequence[int], **resource: Any) -> None:
        """Build a resource on every worker, for as long as its owner exists; `homes`: of its replicas."""
        message, definitions = worker_pb2.Resource(definition=function.digest, **resource), self._dispatcher.definitions
        if homes:
            message.replicas_per_worker = self.strategy.devices_per_worker
            message.replicas = len(homes) * message.replicas_per_worker
        definitions.add_resource(ResourceRecipe(message, function, homes))
        weakref.finalize(owner, definitions.release_resource, message.id).atexit = False

    def _handle_of(self, kind: str, key: str) -> Handle:
        if kind == Layer.handle_kind:
            raise MisuseError(
                "a function returned a layer: return what its get_state() does, for set_state() of another"
            )
        if kind not in (PerWorkerIterator.handle_kind, PerWorkerDataset.handle_kind, PerWorker.handle_kind):
            return self.strategy.resolve_handle(kind, key)
        handle = self._per_worker.get(key)
        if handle is None or handle.handle_kind != kind:
            raise MisuseError(f"a function returned a per-worker {kind} that this coordinator no longer has")
        return handle

    def _overlapped(self, fn: Callable[..., Any], lookups: Callable[..., Any]) -> CapturedFunction:
        """Return a function that runs with what `lookups` names, captured once. See `schedule`."""
        if self.strategy.is_synchronous:
            raise MisuseError(
                "lookups with a SynchronousStrategy: schedule runs a function on one worker, and all take its steps; "
                "leave lookups out, or train with fit(..., lookups=, overlap=1) and a staleness of 1 or more"
            )
        step, named = self.captured(fn), self.captured_lookups(lookups)
        key = step.function.digest, named.function.digest
        if (function := self._overlapping.pop(key, None)) is None:
            function = self._functions.anew(partial_of(step.function.name, overlapped, step, named, 1))
            while len(self._overlapping) >= _MAX_OVERLAPPING:
                self._overlapping.pop(next(iter(self._overlapping)), None)
        self._overlapping[key] = function  # at the end
        return function

    def captured_lookups(self, lookups: Callable[..., Any]) -> FunctionHandle:
        """Capture a function that names the rows of a step. TypeError or MisuseError if it can't be one."""
        if not callable(lookups):
            raise TypeError(f"lookups must be a function, not {type_of(lookups)}")
        named = self.captured(lookups)
        if any(isinstance(handle, _ELEMENTS) for handle in named.function.handles):
            raise MisuseError(f"{named.function.name} captures a dataset: lookups must not take elements of it")
        return named

    def check_overlap(self, overlap: int) -> None:
        """Raise MisuseError if this many steps can't overlap."""
        staleness = self.strategy.step_options.staleness
        if self.strategy.is_synchronous and overlap > staleness:
            raise MisuseError(
                f"overlap is {overlap}, and the staleness of the SynchronousStrategy {staleness:g}: a replica can't "
                f"leave more steps behind than the others may be; give the strategy staleness={overlap}, or fit "
                f"overlap={staleness:g}"
            )

    def captured(self, fn: Callable[..., Any]) -> FunctionHandle:
        """Capture a user's function as `schedule` does, to be part of another one."""
        function = self._functions.get(fn)
        _check_no_part(function)
        return FunctionHandle(function)


def check_arguments(args: object, kwargs: object) -> None:
    """Raise TypeError if these are not the arguments of a function, as a tuple or list and as a dict, or None."""
    if args is not None and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
        raise TypeError(f"args must be a tuple or list of arguments, not {type_of(args)}: write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of arguments, not {type_of(kwargs)}")


def _checked_limits(timeout: float | None, retries: int, wait: float | None) -> tuple[float | None, int]:
    """Return a function's timeout and retries. Raise ValueError or TypeError for a wrong one, or a wrong `wait`."""
    retries = checks.whole("retries", retries, at_least=0)
    if timeout is not None:
        timeout = checks.real("timeout", timeout, ", or None", kind=_SECONDS, finite=False, above=0)
    if wait is not None:
        _check_seconds("wait", wait)
    return timeout, retries


def _check_seconds(name: str, value: object) -> None:
    checks.real(name, value, ", or None", kind=_SECONDS, finite=False, at_least=0)


def _check_no_part(function: CapturedFunction) -> None:
    if any(isinstance(handle, DataPart) for handle in function.handles):
        raise MisuseError(f"{function.name} captures a part of a dataset: pass it as an argument")


def _number_of(key: str) -> int:
    """Return the servers' number of a key; 0 if it is empty. Two keys collide as rarely as random 64-bit numbers."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a string, not {type_of(key)}")
    if not key:
        return 0
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
