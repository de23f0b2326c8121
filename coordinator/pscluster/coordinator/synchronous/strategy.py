"""SynchronousStrategy: all workers run each step together, as replicas of one model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorkerDataset, PerWorkerIterator
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.queue.arguments import check_arguments
from pscluster.coordinator.queue.cluster_coordinator import ClusterCoordinator
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.synchronous import results
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.context import MAX_STEPS
from pscluster.core.errors import EndOfDatasetError
from pscluster.ps.handles.scope import Partitioner
from pscluster.v1 import worker_pb2
from pscluster.worker.data.per_replica import made_in_sync, sliced
from pscluster.worker.strategy import ReduceOp

MAX_DEVICES = 16
"""The most replicas of one worker."""

_NOT_GIVEN: Final[Any] = object()
_COLLECT: Final = {
    "last": worker_pb2.SynchronousSteps.LAST,
    "all": worker_pb2.SynchronousSteps.ALL,
    "mean": worker_pb2.SynchronousSteps.MEAN,
}

_MAX_STALENESS = 1 << 32


class SynchronousStrategy(ParameterServerStrategy):
    """Runs each step on all workers at once, which are replicas of one model; variables are on parameter servers.

    Args:
        cluster_resolver, variable_partitioner, **options: as those of `ParameterServerStrategy`.
        devices_per_worker: how many replicas each worker is. They run at the same time, in threads of one process, so
            step functions must not share what they change; NumPy, torch and JAX let other threads run as they compute.
        min_replicas: steps go on without workers that are lost while the others are this many replicas, and also run
            those of the lost ones: the results are the same. With fewer, and at most with the number of all, they wait
            for the workers to come back.
        staleness: how many steps a replica may be ahead of the slowest. Above 0, each replica's updates are applied as
            they come, and `float("inf")` lets none wait. The slack is within one call of `run`: take many `steps` in
            each.
        backup: how many contributions a step does without: it is done with the first of the others. One that comes
            later is dropped, and its replica continues with the current step. Not together with `staleness`.
        requeue_dropped: give a replica what it took for a step that was done without it again in its next step.

    Raises:
        ValueError: an argument is out of range, or does not go with another one. Otherwise as
            `ParameterServerStrategy`.
    """

    is_synchronous: ClassVar[bool] = True

    def __init__(
        self,
        cluster_resolver: ClusterResolver | LocalCluster,
        variable_partitioner: Partitioner | None = None,
        *,
        devices_per_worker: int = 1,
        min_replicas: int = 1,
        staleness: float = 0,
        backup: int = 0,
        requeue_dropped: bool = False,
        **options: Any,
    ) -> None:
        if not (isinstance(staleness, float) and staleness == math.inf):
            staleness = checks.whole("staleness", staleness, ', or float("inf")', at_least=0, at_most=_MAX_STALENESS)
        backup = checks.whole("backup", backup, at_least=0)
        if staleness and backup:
            raise ValueError(
                f"staleness is {staleness:g}, and backup is {backup}: with a staleness no step waits for all "
                "contributions, so none is dropped; give one of the two"
            )
        if requeue_dropped and not backup:
            raise ValueError("requeue_dropped without backup: no contribution is dropped; give backup=1 or more")
        self.step_options = worker_pb2.SynchronousSteps(
            staleness=staleness, backup=backup, requeue_dropped=bool(requeue_dropped)
        )
        self.devices_per_worker = checks.whole(
            "devices_per_worker", devices_per_worker, at_least=1, at_most=MAX_DEVICES
        )
        self.min_replicas = checks.whole("min_replicas", min_replicas, at_least=1)
        super().__init__(cluster_resolver, variable_partitioner, **options)
        self.context.variables.combines_gradients = not staleness

    def _check_workers(self, count: int) -> None:
        if self.context.options.max_workers is not None and not self.context.connected:
            return  # workers may join before the first step
        if not count:
            raise ValueError("there is no replica: no worker has joined the cluster yet")
        replicas, backup = count * self.devices_per_worker, self.step_options.backup
        if self.min_replicas > replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, but there are {replicas} replicas: give at most that"
            )
        if backup >= replicas:
            raise ValueError(
                f"backup is {backup}, but there are {replicas} replicas: at least one has to contribute; give at most "
                f"{replicas - 1}"
            )

    @property
    def num_replicas_in_sync(self) -> int:
        """Return the number of replicas: each worker is `devices_per_worker` of them."""
        return len(self.context.workers) * self.devices_per_worker

    # Steps

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        steps: int = 1,
        collect: Literal["last", "all", "mean"] = "last",
        timeout: float | None = None,
        retries: int = 0,
    ) -> Any:
        """Run a function on all replicas at once, once for each step, and return their results.

        What all replicas update in a step is applied together when all have ended it, and each reads in the next step
        what that has made of the variables. If a worker dies, the step that was not committed runs again once it is
        back, on the same elements of its iterators.

        Workers that have joined since the last call take part, if the iterators among the arguments were made since
        then: those that are older go on with the workers that they were made for.

        Within a function that runs on a worker, `run` calls `fn` there.

        Args:
            fn: a step function, captured as by `ClusterCoordinator.schedule`: make it once, before the loop.
            args, kwargs: the same for all, but for `PerReplica` values, of which each gets its own.
            steps: how often. The workers are told once, and take the steps among themselves.
            collect: the results of the last step; a list of those of all steps; or the mean of each number or array
                over the steps.
            timeout: seconds for all of these steps; see `ClusterCoordinator.schedule`.
            retries: how often a step is tried again in which a replica has raised an error. Once it is committed, and
                another one after it, later steps have as many.

        Returns:
            The structure of the results, with a `PerReplica` in place of each leaf: a value for each replica, by rank.

        Raises:
            FunctionError: a replica raised: its error, also an instance of the class it raised. The others have been
                stopped, the steps before are applied, and the next `run` works. Or an earlier scheduled function
                failed.
            EndOfDatasetError: the data of a replica has ended; no replica has applied anything of that step. `steps` of
                the error says how many were done before, and `results` what they returned.
            MisuseError: the replicas returned different structures, or have applied gradients to different variables.
            TypeError: `fn` is not callable, or something in the arguments can't be sent.
            ValueError: `steps`, `collect` or another argument is out of range, or a `PerReplica` argument has not as
                many values as there are replicas.
            PSUnavailableError: a parameter server is lost.
        """
        if not callable(fn):
            raise TypeError(f"run takes a function, not {type_of(fn)}")
        check_arguments(args, kwargs)
        steps = checks.whole("steps", steps, at_least=1, at_most=MAX_STEPS - 1)
        if collect not in _COLLECT:
            raise ValueError(f"collect is {collect!r}; give one of {', '.join(map(repr, _COLLECT))}")
        coordinator = ClusterCoordinator(self)
        self._check_workers(len(self.context.workers))
        done, of_replicas = coordinator.take_steps(fn, args, kwargs, steps, _COLLECT[collect], timeout, retries)
        if done == steps:
            return results.merge(of_replicas)
        error = EndOfDatasetError(
            f"the data of a replica ended after {done} of {steps} steps, and all replicas stopped there: begin a "
            "new iter() of the dataset, or make it endless"
        )
        error.steps, error.results = done, results.merge(of_replicas) if done else None
        raise error

    # Values of replicas

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = _NOT_GIVEN) -> Any:
        """Combine the replicas' values.

        Args:
            reduce_op: "sum", "mean", "min" or "max". Sums have their arrays' type, but those of bools are int64; means
                of integers and bools are float64.
            value: what `run` returned, or a part of it.
            axis: None: element by element. A number: of all elements along this axis, of all replicas, which may differ
                in length there. A mean is one of elements, not of the replicas' means. It must be given.

        Returns:
            The structure, with the combined value in place of each `PerReplica`.

        Raises:
            TypeError: there is no axis, or the value is not a structure of `PerReplica` of arrays or numbers.
            ValueError: there is no such operation or axis, or shapes differ.
        """
        if axis is _NOT_GIVEN:
            raise TypeError(
                "reduce needs an axis: give axis=None to combine the replicas' values element by element, or axis=0 to "
                "combine their elements along the first axis, too"
            )
        return results.reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int = _NOT_GIVEN) -> Any:
        """Join the replicas' arrays along an axis, by rank. They may differ in length there; numbers become an array.

        Raises:
            TypeError: there is no axis, or the value is not a structure of `PerReplica` of arrays or numbers.
            ValueError: there is no such axis, or shapes differ elsewhere.
        """
        if axis is _NOT_GIVEN:
            raise TypeError("gather needs an axis: give axis=0 to join the replicas' arrays along the first one")
        return results.gather(value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what each replica has of what `run` returned, by rank. Of anything else, a tuple of it alone.

            losses = strategy.local_results(strategy.run(step))          # of each replica

        Args:
            value: a `PerReplica`, or a structure of some: then a tuple of structures.
        """
        return results.local_results(value)

    experimental_local_results = local_results

    # Datasets

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: object = None
    ) -> PerWorkerDataset:
        """Make a dataset on each worker, from what `dataset_fn(context)` returns there: batches of this replica's size.

        `context.get_per_replica_batch_size(n)` is the replica's share of a global batch of n. Pass `iter()` of the
        result to `run`; the step calls `next()` on it.

        Args:
            dataset_fn: takes an `InputContext`, or nothing; returns an iterable.
            options: ignored; TensorFlow's.

        Raises:
            TypeError: `dataset_fn` is not a function.
        """
        del options
        if not callable(dataset_fn):
            raise TypeError(
                f"distribute_datasets_from_function takes a function, not {type_of(dataset_fn)}: an iterable of global "
                "batches is given to distribute_dataset"
            )
        return ClusterCoordinator(self).per_worker_dataset(dataset_fn, made_in_sync)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def distribute_dataset(
        self, dataset: Iterable[Any] | Callable[[], Iterable[Any]], options: object = None, *, uneven: bool = False
    ) -> PerWorkerDataset:
        """Make a dataset of each replica's slices of global batches, those of `numpy.array_split`.

        Every worker iterates over all batches, so they must be the same on each: shuffle with a seed of your own.

        Args:
            dataset: the global batches: structures of arrays with the examples along the first axis. Or a function
                that returns an iterable of them, which is called on each worker; an iterable is sent there whole.
            options: ignored; TensorFlow's.
            uneven: whether a batch may divide unevenly: the first replicas then get one example more. Otherwise such a
                batch is an error of the step that takes it.

        Raises:
            TypeError: it is neither iterable nor a function without arguments, or is distributed already.
            ValueError: it is an iterator, which can be iterated over only once, or `uneven` is not a bool.
        """
        del options
        uneven = checks.flag("uneven", uneven)
        if isinstance(dataset, PerWorkerDataset | PerWorkerIterator | DistributedDataset):
            raise TypeError(
                f"distribute_dataset takes global batches, not {type_of(dataset)}, which is distributed already: give "
                "it what that was made of"
            )
        if callable(dataset):
            if not _takes_nothing(dataset):
                raise TypeError(
                    "distribute_dataset calls its function without arguments, to get the global batches: give a "
                    "function of an InputContext to distribute_datasets_from_function"
                )
        elif not isinstance(dataset, Iterable):
            raise TypeError(f"distribute_dataset takes global batches or a function, not {type_of(dataset)}")
        return ClusterCoordinator(self).per_worker_dataset(dataset, sliced, uneven)

    experimental_distribute_dataset = distribute_dataset


def _takes_nothing(fn: Callable[..., Any]) -> bool:
    """Return whether a function can be called without arguments."""
    try:
        inspect.signature(fn).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin, which does not say
        return True
    return True
