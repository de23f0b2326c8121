"""ClusterCoordinator: schedule functions on workers, wait for them, fetch their results, train."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorkerDataset
from pscluster.coordinator.scheduling.function_queue import FunctionQueue
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.training.callbacks import Callback
from pscluster.coordinator.training.fit import Fit, check_arguments, validation_of
from pscluster.coordinator.training.history import History
from pscluster.core import checks
from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.ps.handles.metrics import MetricLike

MAX_QUEUED = 262_144
MAX_ATTEMPTS = 3
WORKER_LEASE = 30.0

_making = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """A coordinator's, as it was made with them."""

    max_queued: int
    max_attempts: int
    worker_lease: float


class ClusterCoordinator(FunctionQueue):
    """Hands functions to workers. One a strategy: making it again gives the same one.

    Args:
        strategy: connected to the cluster.
        max_queued: `schedule` blocks while so many functions wait; default 262,144.
        max_attempts: a function that was running on so many workers that died fails: it may be what kills them.
            Default 3.
        worker_lease: seconds for which a worker may be silent, frozen or cut off, before its functions go to others
            and what it still sends is refused; default 30. It is asked three times as often. A step that holds Python's
            lock, as some libraries' do, makes its worker silent, too.

    Raises:
        ValueError: no strategy, or an option is out of its range.
        MisuseError: the strategy's coordinator was made with other options; or the strategy is closed.

    Threads may schedule, join and fetch at the same time.
    """

    _options: Options
    _training: threading.Lock

    def __new__(
        cls,
        strategy: ParameterServerStrategy,
        *,
        max_queued: int | None = None,
        max_attempts: int | None = None,
        worker_lease: float | None = None,
    ) -> ClusterCoordinator:
        """The coordinator of this strategy."""
        if current_function() is not None:
            raise MisuseError(f"no ClusterCoordinator can be made in a step function: {cls.instead}")
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(f"a ClusterCoordinator needs a ParameterServerStrategy, not a {type(strategy).__name__}")
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
            self._options = Options(
                MAX_QUEUED if max_queued is None else max_queued,
                MAX_ATTEMPTS if max_attempts is None else max_attempts,
                WORKER_LEASE if worker_lease is None else worker_lease,
            )
            self._training = threading.Lock()
            self._begin(strategy, context.start_dispatcher(**dataclasses.asdict(self._options)))
            context.coordinator = self
            return self

    def _check_options(self, asked: Mapping[str, float | None]) -> None:
        """MisuseError if it was made with others."""
        for name, value in asked.items():
            if value is not None and value != (mine := getattr(self._options, name)):
                raise MisuseError(
                    f"{name} is {value}, but this strategy's ClusterCoordinator was made with {mine}, and there is one "
                    "a strategy: give its options where it is made first, or none"
                )

    def fit(
        self,
        step: Callable[[Any], Any],
        data: DistributedDataset | PerWorkerDataset,
        *,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        steps_per_execution: int | Literal["auto"] = "auto",
        validation_data: DistributedDataset | None = None,
        validation_step: Callable[[Any], Any] | None = None,
        validation_metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | None = None,
        validation_freq: int = 1,
        callbacks: Sequence[Callback] = (),
        verbose: int | Literal["auto"] = "auto",
    ) -> History:
        """Train: take a step with each element of the data, epoch by epoch.

        Waits for what was scheduled before. Ctrl-C and SIGTERM end it when the functions that run have ended, once
        `BackupAndRestore` and `ModelCheckpoint` have made a checkpoint; then they go on to whoever had them before. A
        second one ends it at once.

        Where the coordinator dies and the script is started again, this training goes on where it was: with variables
        that live by itself, from a checkpoint with `callbacks.BackupAndRestore`.

        Args:
            step: called on a worker with each element; gives the loss, a dict of numbers, or None.
            data: gone through once an epoch, or as often as its `repeat` says. A per-worker dataset needs
                `steps_per_epoch`.
            epochs: how many; those that were done before the script was started again among them.
            steps_per_epoch: an epoch ends after so many, wherever the data is then. Default: with the data.
            steps_per_execution: steps that one function takes; "auto": so many that handing it out takes less than 2 %
                of their time, by measurement (or as `data.parts` says). What is computed does not depend on it, but for
                how steps of several workers overlap.
            validation_data: evaluated after epochs, as by `evaluate`, into logs named "val_...".
            validation_step: see `evaluate`.
            validation_metrics: see `evaluate`.
            validation_freq: how many epochs lie between two evaluations.
            callbacks: called on the way: see `pscluster.coordinator.callbacks`.
            verbose: 0: show nothing; 1 or "auto": progress, live in a terminal or notebook, and a line for each epoch;
                2: only that line.

        Returns:
            The logs of the epochs.

        Raises:
            ValueError, TypeError, MisuseError: an argument can't be; nothing was done.
            FunctionError: a step failed. All else was cancelled, nothing runs.
            PSUnavailableError: a parameter server is lost.
        """
        check_arguments(step, data)
        epochs = checks.whole("epochs", epochs, at_least=1)
        validation_freq = checks.whole("validation_freq", validation_freq, at_least=1)
        if steps_per_epoch is not None:
            steps_per_epoch = checks.whole("steps_per_epoch", steps_per_epoch, at_least=1)
        if steps_per_execution != "auto":
            steps_per_execution = checks.whole("steps_per_execution", steps_per_execution, at_least=1)
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f"verbose is {verbose!r}; it must be 0, 1, 2 or 'auto'")
        training = Fit(
            self,
            step,
            data,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            steps_per_execution=steps_per_execution,
            validation=validation_of(validation_data, validation_step, validation_metrics, validation_freq),
            callbacks=callbacks,
            verbose=1 if verbose == "auto" else int(verbose),
        )
        if not self._training.acquire(blocking=False):
            raise MisuseError("this coordinator is already training: wait until fit() returns, or train in one thread")
        try:
            return training.run()
        finally:
            self._training.release()
