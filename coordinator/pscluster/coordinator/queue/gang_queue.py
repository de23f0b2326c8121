"""Runs functions on several workers at the same time: gangs, and the steps of a synchronous run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pscluster.coordinator.data.per_worker import PerWorkerDataset, PerWorkerIterator
from pscluster.coordinator.queue.arguments import check_arguments, check_no_part, checked_limits
from pscluster.coordinator.queue.function_queue import FunctionQueue
from pscluster.coordinator.scheduling.calls.call import Call
from pscluster.coordinator.scheduling.calls.questions import Question
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.scheduling.decisions.gang import Gang
from pscluster.coordinator.scheduling.decisions.tasks import NO_LIMITS, RunLimits
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.scheduling.synchronous_run import SynchronousRun
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.synchronous.per_replica import own_values
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.cluster.spec import tasks_in_words
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.ids import fresh_id
from pscluster.core.values import encode, map_structure
from pscluster.v1 import worker_pb2
from pscluster.worker.steps.results import of_steps

_NOTHING = encode(None)


class GangQueue(FunctionQueue):
    """Also runs a function on several workers at once. Thread-safe."""

    def _begin(self, strategy: ParameterServerStrategy, dispatcher: Dispatcher) -> None:
        super()._begin(strategy, dispatcher)
        self.synchronous_run = SynchronousRun(strategy.context.client.updater, strategy.step_options)
        strategy.context.settle_steps = self.synchronous_run.settle

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
        timeout, retries = checked_limits(timeout, retries, wait)
        function = self.captured_for_gang(fn)
        arguments = own_values((list(args or ()), dict(kwargs or {})), size)
        limits = RunLimits(timeout, retries) if timeout or retries else NO_LIMITS
        return self.schedule_members(
            *(function, arguments, homes, limits, wait),
            min_workers=min_workers,
            steps=steps,
            spare=spare,
            no_result=no_result,
            answer=answer,
            isolated=isolated,
        )

    def captured_for_gang(self, fn: Callable[..., Any]) -> CapturedFunction:
        """Capture a function for a gang. MisuseError if it captures a part of a dataset. For internal use."""
        function = self._functions.get(fn)
        check_no_part(function)
        return function

    def schedule_members(
        self,
        function: CapturedFunction,
        arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        homes: Sequence[int] | None,
        limits: RunLimits = NO_LIMITS,
        wait: float | None = None,
        *,
        min_workers: int = 0,
        steps: worker_pb2.SynchronousSteps | None = None,
        spare: int = 0,
        no_result: Any = None,
        answer: Callable[[Question], None] | None = None,
        isolated: bool = False,
        waits: bool = False,
    ) -> list[RemoteValue]:
        """Do what `schedule_gang` does, given the positional and named arguments of each member. For internal use.

        Those that are the same object are encoded once. With `waits` it is sent to no worker that another one runs on.
        """
        values: list[RemoteValue] = []
        calls: list[Call] = []
        for own in arguments:
            if calls and own is arguments[0] and not calls[0].remote:
                value, call = self._calls.repeat(calls[0])
            else:
                value, call = self._calls.make(function, *own, answer)
            if call.parts:
                raise MisuseError(f"{function.name} runs on several workers: it can't take a part of a dataset")
            if any(remote.status is not RemoteValueStatus.READY for remote in call.remote.values()):
                raise MisuseError(f"an argument of {function.name} is not ready: pass what its fetch() returns")
            values.append(value)
            calls.append(call)
        if steps is not None and not steps.staleness:
            is_whole = not any(variable.asynchronous for variable in self.context.variables.all)
            for call in calls:
                call.takes_whole_steps = is_whole
        keys = [fresh_id() for _ in calls]
        gang = Gang(calls, keys, homes, limits, min_workers, fresh_id(), steps=steps, spare=spare, isolated=isolated)
        gang.waits = waits
        gang.no_result = _NOTHING if no_result is None else encode(no_result), ()
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

    def _workers_of_steps(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Sequence[int]:
        """Return the workers that take steps: those of the iterators that they are given, otherwise all.

        An iterator has a share for each of its replicas, and none for a worker that has joined since it was made.
        """
        handles = list(self._functions.get(fn).handles)
        map_structure(handles.append, (list(args), dict(kwargs or {})))
        of_data = {
            handle.homes or self._resources.homes
            for handle in handles
            if isinstance(handle, PerWorkerIterator | PerWorkerDataset)
        }
        if len(of_data) > 1:
            raise MisuseError(
                "these iterators were made when the cluster had different workers, so their replicas are not the same: "
                "begin a new iter() of each"
            )
        return of_data.pop() if of_data else self._resources.homes

    def members(self, workers: int | Sequence[int] | None) -> tuple[list[int] | None, int]:
        """Return the workers that are asked for, by rank, and how many they are; None: any. For internal use."""
        if workers is None:
            there = [peer.index for peer in self.context.workers]
            if not there:
                raise MisuseError("no worker has joined the cluster yet, so no function can run on several")
            return self._dispatcher.places(there), len(there)
        if isinstance(workers, Sequence) and not isinstance(workers, str | bytes):
            indices = [checks.whole("a worker's index", index, at_least=0) for index in workers]
            return self.homes_of(indices), len(indices)
        size = checks.whole("workers", workers, ", or their indices", at_least=1)
        if size > (count := len(self.context.workers)):
            raise ValueError(f"workers is {size}, but the cluster has {count}")
        return None, size

    def homes_of(self, indices: Sequence[int]) -> list[int]:
        """Return the places of these workers. ValueError if one is not there, or twice. For internal use."""
        there, wanted = {peer.index for peer in self.context.workers}, set(indices)
        if not indices or len(wanted) < len(indices) or not wanted <= there:
            raise ValueError(
                f"workers is {list(indices)}; give different indices of workers; the cluster has "
                f"{tasks_in_words(sorted(there))}"
            )
        return self._dispatcher.places(indices)
