"""Evaluates and predicts: functions over the shards of a dataset, with the present variables or with copies."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pscluster.coordinator.checkpoints.checkpoint import BARRIER_SECONDS
from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.queue.data_queue import DataQueue
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue
from pscluster.coordinator.scheduling.decisions.tasks import RunLimits, Task
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.variables.evaluation_snapshot import EvaluationSnapshot
from pscluster.coordinator.waiting import deadline_of, seconds_left
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError, UnavailableError, UnknownVariableError
from pscluster.core.functions.definitions import CapturedFunction, FunctionHandle, partial_of
from pscluster.ps.handles.metric import MetricLike
from pscluster.worker.steps.evaluation import States, by_name, joined, outputs_of, results_of, states_of
from pscluster.worker.steps.training import MakesSteps


class EvaluationQueue(DataQueue):
    """What trainings and their callbacks use of a ClusterCoordinator: also evaluates and predicts. Thread-safe."""

    def _begin(self, strategy: ParameterServerStrategy, dispatcher: Dispatcher) -> None:
        super()._begin(strategy, dispatcher)
        self._remains = deque[EvaluationSnapshot]()  # of evaluations that have ended, on servers that were unreachable

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
        step: Callable[[Any], Any] | MakesSteps,
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
                of these, the same for all elements. Or a served Keras model.
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
        if isinstance(step, MakesSteps):
            step = step.prediction_step()
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
        function = self._functions.capture(evaluate_shard).renamed(snapshot.rename)
        values: list[RemoteValue] = []
        try:
            self._dispatcher.atomically(lambda: self._dispatcher.waits.check_may_run(function.name))
            snapshot.make(self._dispatcher, BARRIER_SECONDS if timeout is None else timeout)
            for shard in dataset.shards(shards):
                result, call = self._calls.make(function, (shard,), None)
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
