"""The metrics of a worker."""

from __future__ import annotations

from typing import ClassVar

from pscluster.core.metrics.registry import Metric, Snapshot, Telemetry
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.worker.service import WorkerRole

_BY_REPLICA = ("replica",)

OF_CLIENTS = (
    Metric("pull_seconds", "histogram", "time from sending a read to its reply", ("server",)),
    Metric("push_seconds", "histogram", "time from sending an update to its reply", ("server",)),
    Metric("pulled_bytes_total", "counter", "bytes received in replies to reads", ("server",)),
    Metric("pushed_bytes_total", "counter", "bytes sent in updates", ("server",)),
    Metric("server_reconnects_total", "counter", "requests repeated because a server was unreachable", ("server",)),
    Metric("residual_bytes", "gauge", "bytes kept of gradients, which their encoding has lost"),
    Metric("residual_rows", "gauge", "rows with a residual, counting each dense gradient as one"),
    Metric("residual_rows_dropped_total", "counter", "rows whose residuals were dropped for lack of memory"),
)
"""Metrics of a role with a client of the parameter servers."""


class WorkerTelemetry(Telemetry):
    """The metrics of a worker."""

    role: ClassVar[str] = "worker"
    metrics = (
        Metric("functions_done_total", "counter", "functions that returned"),
        Metric("functions_failed_total", "counter", "functions that raised"),
        Metric("functions_cancelled_total", "counter", "functions stopped while running"),
        Metric("functions_returned_total", "counter", "functions given back before they began"),
        Metric("functions_running", "gauge", "functions now running"),
        Metric("functions_waiting", "gauge", "functions received but not begun"),
        Metric("run_seconds", "histogram", "time that each function ran"),
        Metric("idle_seconds_total", "counter", "time without a function to run, while a coordinator was attached"),
        Metric("data_wait_seconds_total", "counter", "time functions spent waiting for data"),
        Metric("attachments_total", "counter", "how often a coordinator attached"),
        Metric("replica_staleness_steps", "gauge", "steps that the replica is ahead of the slowest", _BY_REPLICA),
        Metric(
            "replica_wait_seconds_total",
            "counter",
            "time from the end of the replica's step until it could go on",
            _BY_REPLICA,
        ),
        Metric("replica_dropped_total", "counter", "contributions of the replica that came too late", _BY_REPLICA),
        *OF_CLIENTS,
    )

    def __init__(self, role: WorkerRole, client_metrics: ClientMetrics) -> None:
        super().__init__()
        self._role = role
        self._client_metrics = client_metrics

    def own(self) -> Snapshot:
        metrics, (running, waiting) = self._role.metrics, self._role.functions()
        return {
            "functions_done_total": metrics.done,
            "functions_failed_total": metrics.failed,
            "functions_cancelled_total": metrics.cancelled,
            "functions_returned_total": metrics.returned,
            "functions_running": running,
            "functions_waiting": waiting,
            "run_seconds": metrics.all_runs().plain(),
            "idle_seconds_total": metrics.idle_seconds,
            "data_wait_seconds_total": metrics.data_seconds,
            "attachments_total": metrics.attachments,
            **metrics.plain_replicas(),
            **self._client_metrics.plain(),
        }
