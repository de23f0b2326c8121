"""The arguments of `fit`, checked before anything is scheduled: the data, the overlap, the validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pscluster.coordinator.data.dataset import DistributedDataset
from pscluster.coordinator.data.per_worker import PerWorkerDataset
from pscluster.coordinator.queue.evaluation_queue import EvaluationQueue
from pscluster.coordinator.training.feed import DistributedFeed, Feed, PerWorkerFeed
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import FunctionHandle
from pscluster.ps.handles.metric import MetricLike
from pscluster.worker.steps.evaluation import by_name
from pscluster.worker.steps.training import MakesSteps

Validation = tuple[Callable[[Any], Any], DistributedDataset, Mapping[str, MetricLike]]
"""The arguments of `EvaluationQueue.evaluate`, which is called after epochs."""

_DATASETS = (
    "coordinator.distribute_dataset(...).batch(64) or coordinator.create_per_worker_dataset(...)",
    "what strategy.distribute_dataset() returns",
)
"""What `fit` takes: with steps of each worker, and with synchronous ones."""


def feed_of(data: object, steps_per_epoch: int | None, *, synchronous: bool) -> Feed:
    """Return the feed of a dataset. TypeError, ValueError or MisuseError unless `fit` takes it."""
    if isinstance(data, DistributedDataset):
        if synchronous:
            raise MisuseError(
                "a SynchronousStrategy trains on all workers together, and a distributed dataset has parts for "
                "single ones: give fit what strategy.distribute_dataset() returns"
            )
        return DistributedFeed(data, steps_per_epoch)
    if not isinstance(data, PerWorkerDataset):
        raise TypeError(f"fit takes a dataset, not {type_of(data)}: give {_DATASETS[synchronous]}")
    if synchronous and steps_per_epoch is None:
        raise ValueError("with a SynchronousStrategy fit needs steps_per_epoch: how many global batches an epoch takes")
    return PerWorkerFeed(data, steps_per_epoch)


def checked_overlap(
    coordinator: EvaluationQueue, lookups: Callable[[Any], Any] | None, overlap: int
) -> FunctionHandle | None:
    """Return the captured `lookups`, if there are any. Raise as `ClusterCoordinator.fit` if steps can't overlap so."""
    strategy = coordinator.strategy
    if strategy.is_synchronous and overlap > (staleness := strategy.step_options.staleness):
        raise MisuseError(
            f"overlap is {overlap}, and the staleness of the SynchronousStrategy {staleness:g}: a replica can't "
            f"leave more steps behind than the others may be; give the strategy staleness={overlap}, or fit "
            f"overlap={staleness:g}"
        )
    if lookups is None:
        return None
    if not overlap:
        raise ValueError("lookups names the rows of the next step, which needs overlap: give overlap=1 as well")
    return coordinator.captured_lookups(lookups)


def own_validation(step: object, data: object, given: Any, metrics: Any) -> tuple[Any, Any]:
    """Return the validation's step and metrics: those given, or those of a model that is trained and evaluated."""
    if data is None or given is not None or metrics is not None or not isinstance(step, MakesSteps):
        return given, metrics
    return step.evaluation_step(), [step.evaluation_metric()]


def validation_of(
    data: DistributedDataset | None,
    step: Callable[[Any], Any] | None,
    metrics: Mapping[str, MetricLike] | Sequence[MetricLike] | None,
) -> Validation | None:
    if data is None:
        if step is not None or metrics is not None:
            raise ValueError("validation_step and validation_metrics need validation_data: give it, too")
        return None
    if not isinstance(data, DistributedDataset):
        raise TypeError(f"validation_data is {type_of(data)}: give coordinator.distribute_dataset(...).batch(64)")
    if step is None or metrics is None:
        raise ValueError(
            "validation_data needs validation_step, which returns what the metrics take for an element, and "
            "validation_metrics: see coordinator.evaluate"
        )
    if not callable(step):
        raise TypeError(f"validation_step is {type_of(step)}; it must be a function")
    return step, data, by_name(metrics)
