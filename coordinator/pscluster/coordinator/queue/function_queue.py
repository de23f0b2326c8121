"""Schedules functions on workers, waits for them, fetches their results."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pscluster.coordinator.data.data_part import DataPart
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.local.supervised import SupervisedCluster
from pscluster.coordinator.observability import timeline
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.queue.arguments import (
    check_arguments,
    check_no_part,
    check_seconds,
    checked_limits,
    number_of,
)
from pscluster.coordinator.queue.call_maker import CallMaker, check_known
from pscluster.coordinator.queue.captured_functions import CapturedFunctions
from pscluster.coordinator.queue.worker_resources import WorkerResources
from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.questions import Question
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue
from pscluster.coordinator.scheduling.decisions.tasks import NO_LIMITS, RunLimits, Task
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.waiting import deadline_of, seconds_left
from pscluster.core.checks import type_of
from pscluster.core.display.notebook import current_cell, render_traceback
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import FunctionHandle
from pscluster.core.handles import StaysHere
from pscluster.core.values import HandleResolver, map_structure

_INTERRUPT_SECONDS = 5.0  # for functions to stop after Ctrl-C in a notebook, before their worker is ended


class FunctionQueue(StaysHere):
    """Runs functions on workers, each on one. Thread-safe."""

    instead = (
        "schedule functions in the script; a RemoteValue passes the result of one function to another as an argument"
    )

    def _begin(self, strategy: ParameterServerStrategy, dispatcher: Dispatcher) -> None:
        self.strategy = strategy
        self.trainings_ended = 0  # how many of the script's have
        self._dispatcher = dispatcher
        self._functions = CapturedFunctions(strategy.context.variables.serialization)
        self._resources = WorkerResources(strategy, self._functions, dispatcher.definitions)
        self._resolve_handle: HandleResolver = self._resources.resolve_handle  # the same object for all values
        self._calls = CallMaker(self._functions, self._resolve_handle, self, is_synchronous=strategy.is_synchronous)

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
                runs at the same time as `fn`, on another thread, and must not change anything. What it takes of parts
                and per-worker iterators is given to `fn` again; it is called once the function before has taken its
                own elements, of iterators as many as the one before that.
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
                `SynchronousStrategy`, or with a per-worker dataset, which begins anew in each function.
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
            timeout, retries = checked_limits(timeout, retries, wait)
        function = self._functions.get(fn) if lookups is None else self._calls.overlapped(fn, lookups)
        if function.handles:
            check_no_part(function)
        if args or kwargs or lookups is not None:
            result, call = self._calls.make(function, args, kwargs)
            if lookups is not None:
                check_known(call)
        else:  # as `make` does: calling it would take a tenth of the time
            result = RemoteValue(function.name, self._resolve_handle, self)
            call = Call(function, weakref.ref(result))
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
            self._dispatcher.submit(Task(call, limits=limits, key=number_of(key)), key, wait)
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
        timeout, retries = checked_limits(timeout, retries, None)
        function = self._functions.get(fn)
        check_no_part(function)
        result, call = self._calls.make(function, args, kwargs, answer)
        if call.parts:
            raise MisuseError(f"{function.name} is scheduled for internal use: it can't take a part of a dataset")
        limits = RunLimits(timeout, retries) if timeout is not None or retries else NO_LIMITS
        self._dispatcher.submit(Task(call, limits=limits, isolated=isolated))
        return result

    def forget_keys(self, keys: Iterable[str]) -> None:
        """Let the servers forget functions with these keys, which will never be scheduled again.

        Call it after a `save_progress` that records them as done: before that, their updates could count twice. Returns
        at once; the servers are told within seconds.

        Raises:
            MisuseError: a function with one of the keys has not ended. None is forgotten.
        """
        if isinstance(keys, str):
            raise TypeError("forget_keys takes several keys: write forget_keys([key])")
        self._dispatcher.servers.forget({number_of(key): key for key in keys})

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
        self._join(timeout, "join")

    def settle(self) -> None:
        """Wait as `join` does before something else begins; for internal use.

        In a notebook an error that `fetch` has raised in an earlier cell is over.
        """
        self._join(None, "begin")

    def _join(self, timeout: float | None, by: str) -> None:
        deadline = deadline_of(timeout)
        try:
            self._dispatcher.waits.join(timeout, by)
        except KeyboardInterrupt as interrupt:
            self.interrupted(interrupt)
            raise
        # A server that came back while functions ended may have lost their updates: wait for the log to say so.
        self.context.losses.wait(seconds_left(deadline))

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
            check_seconds("kill_after", kill_after)
        if values is not None and not isinstance(values, Iterable):
            raise TypeError(f"cancel takes several RemoteValues, not {type_of(values)}: write cancel([value])")
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

    def captured(self, fn: Callable[..., Any]) -> FunctionHandle:
        """Capture a user's function as `schedule` does, to be part of another one."""
        return self._calls.captured(fn)

    def captured_lookups(self, lookups: Callable[..., Any]) -> FunctionHandle:
        """Capture a function that names the rows of a step. TypeError or MisuseError if it can't be one."""
        return self._calls.captured_lookups(lookups)

    def is_leaving(self, place: int) -> bool:
        """Return whether a worker, by the scheduler's index, was told to stop, or has; for internal use."""
        return self._dispatcher.state.scheduler.workers[place].leaving

    def pending(self) -> str:
        """Return which error `schedule`, `join` or `done` will raise, and what that waits for; "" if there is none."""
        return self._dispatcher.status.pending()

    def check_no_error(self) -> None:
        """Raise the error that `schedule`, `join` or `done` will raise, which they still do; for internal use."""
        self._dispatcher.waits.check_no_error()

    def explain(self) -> str:
        """Explain in a few lines what is waiting for what, and since when, for a job that seems to hang.

        The log says so by itself when nothing has come back for a minute.
        """
        return self._dispatcher.status.explain()

    def describe(self) -> str:
        """Return a line for people: what is waiting and running, and which workers are missing."""
        return self._dispatcher.status.describe()

    @property
    def workers_up(self) -> int:
        return self._dispatcher.state.workers_up

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
