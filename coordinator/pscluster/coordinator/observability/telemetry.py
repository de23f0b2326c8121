"""The metrics of a coordinator."""

from __future__ import annotations

import weakref
from typing import ClassVar

from pscluster.coordinator.job.context import JobContext
from pscluster.core.metrics.registry import Metric, Snapshot, Telemetry
from pscluster.worker.telemetry import OF_CLIENTS

_OF_DISPATCH = (
    Metric("queue_functions", "gauge", "functions waiting to be sent to a worker"),
    Metric("queue_age_seconds", "gauge", "time since the first of these was scheduled"),
    Metric("functions_scheduled_total", "counter", "functions scheduled"),
    Metric("functions_running", "gauge", "functions sent to workers, including those waiting there"),
    Metric("functions_done_total", "counter", "functions that returned a result"),
    Metric("functions_failed_total", "counter", "functions that failed"),
    Metric("functions_cancelled_total", "counter", "functions cancelled"),
    Metric("worker_up", "gauge", "1 if the worker accepts functions, else 0", ("worker",)),
    Metric("worker_functions", "gauge", "functions sent to the worker that have not ended", ("worker",)),
    Metric("worker_function_seconds", "gauge", "average duration of recent functions on the worker", ("worker",)),
    Metric("worker_outcomes_total", "counter", "functions that came back, including those not begun", ("worker",)),
    Metric("worker_reconnects_total", "counter", "times that the worker was connected again", ("worker",)),
    Metric("server_up", "gauge", "1 if the server is reachable, else 0", ("server",)),
    Metric("server_returns_total", "counter", "times that the server came back", ("server",)),
)


class CoordinatorTelemetry(Telemetry):
    role: ClassVar[str] = "coordinator"
    metrics = (
        *_OF_DISPATCH,
        Metric("functions_retried_total", "counter", "functions run again", ("why",)),
        Metric("dispatch_seconds", "histogram", "time from scheduling a function to sending it"),
        Metric("lock_waits_total", "counter", "messages from workers that waited for the queue's lock"),
        Metric("lock_wait_seconds_total", "counter", "duration of these waits"),
        Metric("checkpoint_seconds", "histogram", "time to write a checkpoint"),
        Metric("checkpoint_pause_seconds", "histogram", "time that functions were paused for a checkpoint"),
        Metric("checkpoints_failed_total", "counter", "checkpoints that were not written"),
        Metric("checkpoint_bytes", "gauge", "size of the last checkpoint"),
        Metric("checkpoint_timestamp_seconds", "gauge", "time of the last checkpoint, since 1970; 0: none"),
        *OF_CLIENTS,
    )

    def __init__(self, context: JobContext) -> None:
        super().__init__()
        self._context = weakref.ref(context)
        self._nothing: Snapshot = {metric.name: {} if metric.labels else 0 for metric in _OF_DISPATCH}

    def not_ready(self) -> str:
        """Return why the coordinator is not ready, naming the missing tasks; empty if it is."""
        context = self._context()
        dispatcher = context.dispatcher if context is not None else None
        if dispatcher is None:
            return "the script has not made a ClusterCoordinator yet"
        missing = dispatcher.status.missing()
        return f"it waits for {', '.join(missing)}" if missing else ""

    def own(self) -> Snapshot:
        context = self._context()
        assert context is not None  # the caller holds it, or is closed with it
        metrics, dispatcher, checkpoints = context.metrics, context.dispatcher, context.event_log.checkpoints
        return {
            **(self._nothing if dispatcher is None else dispatcher.status.metrics()),
            "functions_retried_total": {"worker lost": metrics.retried_lost, "failed": metrics.retried_failed},
            "dispatch_seconds": metrics.dispatches.plain(),
            "lock_waits_total": metrics.lock_waits,
            "lock_wait_seconds_total": metrics.lock_seconds,
            "checkpoint_seconds": metrics.checkpoints.plain(),
            "checkpoint_pause_seconds": metrics.checkpoint_pauses.plain(),
            "checkpoints_failed_total": metrics.checkpoints_failed,
            "checkpoint_bytes": checkpoints[-1].nbytes if checkpoints else 0,
            "checkpoint_timestamp_seconds": checkpoints[-1].time if checkpoints else 0,
            **context.client.metrics.plain(),
        }
