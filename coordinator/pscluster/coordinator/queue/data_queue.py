"""Makes datasets, and objects, that functions use on workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy.typing as npt

from pscluster.coordinator.data.dataset import RETRIES, DistributedDataset, OnError, distribute
from pscluster.coordinator.data.dataset_progress import DatasetProgress
from pscluster.coordinator.data.per_worker import PerWorker, PerWorkerDataset
from pscluster.coordinator.queue.arguments import check_no_part
from pscluster.coordinator.queue.gang_queue import GangQueue
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.variables.initial_values import array_for
from pscluster.coordinator.waiting import deadline_of, seconds_left
from pscluster.core.checks import type_of
from pscluster.core.functions.definitions import FunctionHandle, partial_of
from pscluster.worker.data.per_replica import made_in_sync
from pscluster.worker.data.per_worker import given
from pscluster.worker.per_worker_variable import OwnValue, PerWorkerVariable

T = TypeVar("T")


class DataQueue(GangQueue):
    """Also makes what functions take: datasets, and objects on every worker. Thread-safe."""

    def _begin(self, strategy: ParameterServerStrategy, dispatcher: Dispatcher) -> None:
        super()._begin(strategy, dispatcher)
        strategy.context.dataset_progress = DatasetProgress(
            strategy.context.client,
            dispatcher,
            self._resources.send_pipeline,
            self.over_shards,
            self._functions.capture,
        )

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
            function = self._functions.capture(partial_of("elements", given, dataset_fn), holds_data=True)
        if make is not None:
            function = self._functions.capture(partial_of(function.name, make, FunctionHandle(function), *options))
        return self._resources.dataset(function)

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
        check_no_part(function)
        return self._resources.worker_object(function, self._on_all_workers)

    def per_worker_variable(
        self, initial_value: npt.ArrayLike, *, dtype: npt.DTypeLike | None = None, name: str = "PerWorkerVariable"
    ) -> PerWorkerVariable:
        """Make a variable with a value of its own on each worker, which functions there read and assign.

            count = coordinator.per_worker_variable(0, name="batches")
            def step(batch): count.assign_add(1)               # on a worker
            count.read_all()                                   # the value of each worker, by its index

        Args:
            initial_value: an array or a number, sent to each worker.
            dtype: of the elements; default: as in `Variable`.
            name: for people; it need not be unique.

        Raises:
            TypeError: `initial_value` is a function: for values that workers make themselves see `per_worker`.
            MisuseError: it is not an array of numbers.
            InvalidUpdateError: it does not fit the dtype without loss.
        """
        if callable(initial_value):
            raise TypeError(
                f"per_worker_variable takes an array or a number, not {type_of(initial_value)}: for values that "
                "workers make themselves use per_worker(fn)"
            )
        value = array_for(initial_value, dtype, name)
        function = self._functions.capture(partial_of(name, OwnValue, value), holds_data=True)
        return PerWorkerVariable(
            self._resources.worker_object(function, self._on_all_workers), name, value.shape, value.dtype.name
        )

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

    def _on_all_workers(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Return what a function returns on each worker, by its index."""
        values = self.schedule_together(fn, args)
        try:
            results: list[Any] = self.fetch(values, timeout)
        except BaseException:  # such as Ctrl-C
            self.cancel(values)
            raise
        return results

    @property
    def _shards(self) -> int:
        """Return into how many shards a dataset is cut by default."""
        return 5 * max(len(self.context.workers), 1)
