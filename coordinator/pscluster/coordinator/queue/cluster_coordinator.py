"""ClusterCoordinator: schedule functions on workers, wait for them, fetch their results, train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorkerDataset
from pscluster.coordinator.queue.evaluation_queue import EvaluationQueue
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.training.arguments import own_validation, validation_of
from pscluster.coordinator.training.callbacks import Callback
from pscluster.coordinator.training.callbacks.frameworks import with_frameworks
from pscluster.coordinator.training.fit import Fit
from pscluster.coordinator.training.history import History
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.ps.handles.metric import MetricLike
from pscluster.worker.steps.training import MakesSteps

DEFAULTS = {"max_queued": 262_144, "max_attempts": 3, "worker_lease": 30.0}

_MAX_OVERLAP = 16  # of steps: each holds its gradients in the worker's memory

_making = threading.Lock()


class ClusterCoordinator(EvaluationQueue):
    """Runs functions on workers. There is one for each strategy: making it again returns the same one. Thread-safe.

    Args:
        strategy: connected to the cluster.
        max_queued: `schedule` blocks while this many functions wait; default 262,144.
        max_attempts: a function fails when this many workers have died running it: it may be what kills them. Deaths
            before synchronous steps that it has committed do not count. Default 3.
        worker_lease: seconds for which a worker may be silent, frozen or cut off, before its functions go to others
            and what it still sends is refused; default 30. It is polled three times as often. A step that holds the
            GIL, as some libraries do, makes its worker silent as well. Workers that wait for each other ask after twice
            as long whether the other one is there.

    Raises:
        ValueError: there is no strategy, or an option is out of range.
        MisuseError: the strategy's coordinator was created with other options, or the strategy is closed.

    Examples:
        >>> coordinator = ClusterCoordinator(strategy)
        >>> values = [coordinator.schedule(pow, args=(number, 2)) for number in range(5)]
        >>> coordinator.join()
        >>> coordinator.fetch(values)
        [0, 1, 4, 9, 16]
    """

    _options: dict[str, Any]
    _training: threading.Lock

    def __new__(
        cls,
        strategy: ParameterServerStrategy,
        *,
        max_queued: int | None = None,
        max_attempts: int | None = None,
        worker_lease: float | None = None,
    ) -> ClusterCoordinator:
        if current_function() is not None:
            raise MisuseError(f"a ClusterCoordinator can't be created in a step function: {cls.instead}")
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(f"a ClusterCoordinator needs a ParameterServerStrategy, not {type_of(strategy)}")
        asked = {"max_queued": max_queued, "max_attempts": max_attempts, "worker_lease": worker_lease}
        for name, value in asked.items():
            if value is not None:
                checks.real(name, value, finite=False, at_least=1)
        with _making:
            context = strategy.context
            if isinstance(context.coordinator, ClusterCoordinator):
                context.coordinator._check_options(asked)
                return context.coordinator
            self = super().__new__(cls)
            self._options = {name: DEFAULTS[name] if value is None else value for name, value in asked.items()}
            self._training = threading.Lock()
            self._begin(strategy, context.start_dispatcher(**self._options))
            context.coordinator = self
            return self

    def _check_options(self, asked: Mapping[str, float | None]) -> None:
        for name, value in asked.items():
            if value is not None and value != (mine := self._options[name]):
                raise MisuseError(
                    f"{name} is {value}, but this strategy's ClusterCoordinator was created with {mine}, and a "
                    "strategy has only one: pass options only where it is first created"
                )

    def fit(
        self,
        step: Callable[[Any], Any] | MakesSteps,
        data: DistributedDataset | PerWorkerDataset,
        *,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        steps_per_execution: int | Literal["auto"] = "auto",
        validation_data: DistributedDataset | None = None,
        validation_step: Callable[[Any], Any] | None = None,
        validation_metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | None = None,
        validation_freq: int = 1,
        callbacks: Sequence[Callback | Any] = (),
        verbose: int | Literal["auto"] = "auto",
        lookups: Callable[[Any], Any] | None = None,
        overlap: int = 0,
    ) -> History:
        """Train: take a step with each element of the data, epoch by epoch. Return the logs of the epochs.

        With a `SynchronousStrategy` all workers take each step together, each with its own element. A step is then one
        of all replicas, and its logs are the means of theirs.

        Waits for functions that were scheduled before. Ctrl-C and SIGTERM end it once running functions have ended and
        `BackupAndRestore` and `ModelCheckpoint` have made a checkpoint; then the earlier signal handler is called. A
        second signal ends it at once.

        If the coordinator dies and the script is restarted, this training continues where it was: by itself while the
        variables live, otherwise from a checkpoint, with `callbacks.BackupAndRestore`.

        Args:
            step: called on a worker with each element; returns the loss, a dict of numbers, or None. Or a Keras model
                that `pscluster.keras.serve` has returned.
            data: read once an epoch, or as often as its `repeat` says. A per-worker dataset needs `steps_per_epoch`. A
                `SynchronousStrategy` takes only those, as its `distribute_dataset` makes them.
            epochs: how many, including those that were done before the script was restarted.
            steps_per_epoch: an epoch ends after this many, wherever the data is then. Default: with the data.
            steps_per_execution: steps that one function takes; "auto": enough, by measurement, that scheduling takes
                less than 2 % of their time (or as `data.parts` says). It does not change what is computed, only how
                steps of several workers overlap.
            validation_data: evaluated after epochs, as by `evaluate`, into logs named "val_...".
            validation_step, validation_metrics: see `evaluate`. A Keras model has its own.
            validation_freq: evaluate after every this many epochs.
            callbacks: see `pscluster.coordinator.callbacks`. With a Keras model also Keras' own.
            verbose: 0: show nothing; 1 or "auto": progress, live in a terminal or notebook, and a line for each epoch;
                2: only that line.
            lookups: with `overlap` above 0: called on a worker with the next element before a step runs, or, if it
                takes long, at the same time on another thread; returns the rows that the next step will look up,
                `[(table, ids), ...]`, which are fetched while the step runs, also for the first step of the next
                function on that worker. It must not change anything.
            overlap: how many earlier steps of its worker may have updates under way while a step runs: updates return
                at once. Rows that `lookups` names may lack the updates of the worker's last `overlap + 1` steps, other
                reads those of the last `overlap`. 0: none. With a `SynchronousStrategy` at most its staleness; rows
                that are named may then lack one step more of the other replicas than it says.

        Raises:
            ValueError, TypeError, MisuseError: an argument is wrong; nothing was done.
            FunctionError: a step failed. All else was cancelled, nothing runs.
            PSUnavailableError: a parameter server is lost.

        Examples:
            >>> with strategy.scope():
            ...     slope = Variable(0.0, name="slope")
            >>> def step(batch):
            ...     x, y = batch
            ...     error = float(slope.numpy()) * x - y
            ...     slope.assign_sub(0.1 * float((error * x).mean()))
            ...     return float((error**2).mean())
            >>> x = np.linspace(-1, 1, 100)
            >>> data = coordinator.distribute_dataset((x, 3 * x)).shuffle(seed=0).batch(10)
            >>> history = coordinator.fit(step, data, epochs=20, verbose=0)
            >>> round(float(slope.numpy()), 1), len(history.epoch)
            (3.0, 20)
        """
        epochs = checks.whole("epochs", epochs, at_least=1)
        validation_freq = checks.whole("validation_freq", validation_freq, at_least=1)
        if steps_per_epoch is not None:
            steps_per_epoch = checks.whole("steps_per_epoch", steps_per_epoch, at_least=1)
        if steps_per_execution != "auto":
            steps_per_execution = checks.whole("steps_per_execution", steps_per_execution, at_least=1)
        overlap = checks.whole("overlap", overlap, at_least=0, at_most=_MAX_OVERLAP)
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f"verbose is {verbose!r}; it must be 0, 1, 2 or 'auto'")
        validation_step, validation_metrics = own_validation(step, validation_data, validation_step, validation_metrics)
        callbacks = with_frameworks(step, callbacks)
        if isinstance(step, MakesSteps):
            step = step.training_step()
        training = Fit(
            self,
            step,
            data,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=steps_per_execution,
            validation=validation_of(validation_data, validation_step, validation_metrics),
            validation_freq=validation_freq,
            callbacks=callbacks,
            verbose=1 if verbose == "auto" else int(verbose),
            lookups=lookups,
            overlap=overlap,
        )
        if not self._training.acquire(blocking=False):
            raise MisuseError("this coordinator is already training: wait until fit() returns, or train in one thread")
        try:
            return training.run()
        except KeyboardInterrupt as interrupt:
            self.interrupted(interrupt)
            raise
        finally:
            self._training.release()
