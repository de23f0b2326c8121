"""The figures of a worker."""

from __future__ import annotations

from typing import ClassVar

from pscluster.core.metrics.registry import Figure, Snapshot, Telemetry
from pscluster.ps.request_metrics import ClientCounts
from pscluster.worker.service import WorkerRole

OF_CLIENTS = (
    Figure("pull_seconds", "histogram", "from a read's sending to its answer", ("server",)),
    Figure("push_seconds", "histogram", "from an update's sending to its answer", ("server",)),
    Figure("pulled_bytes_total", "counter", "received in answers to reads", ("server",)),
    Figure("pushed_bytes_total", "counter", "sent in updates", ("server",)),
    Figure("server_reconnects_total", "counter", "requests repeated since a server was out of reach", ("server",)),
)
"""Of whoever has a client of the parameter servers."""


class WorkerTelemetry(Telemetry):
    """See `figures`."""

    role: ClassVar[str] = "worker"
    figures = (
        Figure("functions_done_total", "counter", "functions that returned"),
        Figure("functions_failed_total", "counter", "functions that raised"),
        Figure("functions_cancelled_total", "counter", "functions stopped as they ran"),
        Figure("functions_returned_total", "counter", "functions given back before they began"),
        Figure("functions_running", "gauge", "functions that run"),
        Figure("functions_waiting", "gauge", "functions that came and have not begun"),
        Figure("run_seconds", "histogram", "of each function that ran"),
        Figure("idle_seconds_total", "counter", "without a function to run, a coordinator being there"),
        Figure("data_wait_seconds_total", "counter", "for which functions waited for their data"),
        Figure("attachments_total", "counter", "how often a coordinator took it"),
        *OF_CLIENTS,
    )

    def __init__(self, role: WorkerRole, asked: ClientCounts) -> None:
        super().__init__()
        self._role = role
        self._asked = asked

    def own(self) -> Snapshot:
        """From the role, its runner, and its clients."""
        counts, (running, waiting) = self._role.counts, self._role.functions()
        return {
            "functions_done_total": counts.done,
            "functions_failed_total": counts.failed,
            "functions_cancelled_total": counts.cancelled,
            "functions_returned_total": counts.returned,
            "functions_running": running,
            "functions_waiting": waiting,
            "run_seconds": counts.all_runs().plain(),
            "idle_seconds_total": counts.idle_seconds,
            "data_wait_seconds_total": counts.data_seconds,
            "attachments_total": counts.attachments,
            **self._asked.plain(),
        }
