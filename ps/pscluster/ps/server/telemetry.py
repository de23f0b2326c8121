"""The metrics of a parameter server."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pscluster.core.metrics.registry import OTHER, Labels, Metric, Snapshot, Telemetry
from pscluster.ps.request_metrics import VariableCounts
from pscluster.ps.server.admission import Budget
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.spec import OURS, PINNED

_BY = ("variable",)

_OF_VARIABLES: dict[str, tuple[Metric, Callable[[VariableCounts], float]]] = {
    metric.name: (metric, value)
    for metric, value in (
        (Metric("variable_pulls_total", "counter", "shards read, whole or rows", _BY), lambda c: c.pulls),
        (Metric("variable_pulled_bytes_total", "counter", "values read", _BY), lambda c: c.pulled_bytes),
        (Metric("variable_pull_seconds_total", "counter", "time to read and send them", _BY), lambda c: c.pull_seconds),
        (Metric("variable_pushes_total", "counter", "updates of shards applied", _BY), lambda c: c.pushes),
        (Metric("variable_pushed_bytes_total", "counter", "values of updates applied", _BY), lambda c: c.pushed_bytes),
        (
            Metric("variable_push_seconds_total", "counter", "time to apply them, including waits for the shard", _BY),
            lambda c: c.push_seconds,
        ),
        (Metric("variable_rows_read_total", "counter", "rows read by number", _BY), lambda c: c.rows_read),
        (Metric("variable_rows_updated_total", "counter", "rows updated by number", _BY), lambda c: c.rows_updated),
    )
}


class ServerTelemetry(Telemetry):
    """See `metrics`."""

    role: ClassVar[str] = "ps"
    metrics = (
        Metric("pull_seconds", "histogram", "from the arrival of a read to the end of its reply"),
        Metric("push_seconds", "histogram", "from the arrival of an update, or of its first frame, to its reply"),
        Metric("pulled_bytes_total", "counter", "sent in answers to reads"),
        Metric("pushed_bytes_total", "counter", "received in updates"),
        Metric("requests_refused_total", "counter", "small requests answered with an error"),
        Metric("update_staleness_updates", "histogram", "for each update, others' updates since the sender's last one"),
        Metric("updates_duplicate_total", "counter", "updates dropped because they had already been applied"),
        Metric("updates_remembered", "gauge", "keys remembered to detect duplicates"),
        Metric("updates_lost", "gauge", "acknowledged updates lost when a process died, at least", _BY),
        Metric("lock_waits_total", "counter", "updates that waited for their shard"),
        Metric("lock_wait_seconds_total", "counter", "time that updates waited for their shard"),
        Metric("in_flight_bytes", "gauge", "memory for large requests under way"),
        Metric("variables", "gauge", "variables with shards here"),
        Metric("variable_bytes", "gauge", "their shards, with what optimizers keep", _BY),
        *(metric for metric, _ in _OF_VARIABLES.values()),
        Metric("snapshot_seconds", "histogram", "to save a generation of the state"),
        Metric("snapshot_bytes_total", "counter", "written of generations"),
        Metric("snapshot_failures_total", "counter", "generations that could not be saved"),
        Metric("log_bytes", "gauge", "the log's segment"),
        Metric("checkpoint_seconds", "histogram", "to write this server's part of a checkpoint"),
        Metric("checkpoint_bytes_total", "counter", "written of checkpoints"),
    )

    def __init__(self, role: ParameterServerRole, budget: Budget) -> None:
        super().__init__()
        self._role = role
        self._budget = budget
        self._labels = Labels()

    def own(self) -> Snapshot:
        """From the store, the service and the manager."""
        role, store, counts = self._role, self._role.store, self._role.counts
        # The largest first, for whom there are labels; what an evaluation copies comes and goes.
        traffic = sorted(store.traffic(), key=lambda each: (each[0].startswith(PINNED), -each[1]))
        labels = self._labels.choose([name for name, _, _ in traffic if not name.startswith(OURS)])
        sizes: dict[str, float] = {}
        lost: dict[str, float] = {}
        for name, count in store.lost.items():
            lost[labels.get(name, OTHER)] = lost.get(labels.get(name, OTHER), 0) + count
        by_metric: dict[str, dict[str, float]] = {name: {} for name in _OF_VARIABLES}
        for name, nbytes, counted in traffic:
            label = labels.get(name, OTHER)
            sizes[label] = sizes.get(label, 0) + nbytes
            if name.startswith(PINNED):
                continue  # when it goes, a counter would fall
            for metric, (_, value) in _OF_VARIABLES.items():
                by_metric[metric][label] = by_metric[metric].get(label, 0) + value(counted)
        return {
            "pull_seconds": counts.pulls.plain(),
            "push_seconds": counts.pushes.plain(),
            "pulled_bytes_total": counts.pulled_bytes,
            "pushed_bytes_total": counts.pushed_bytes,
            "requests_refused_total": counts.refused,
            "update_staleness_updates": store.counts.staleness.plain(),
            "updates_duplicate_total": store.counts.duplicates,
            "updates_remembered": store.remembered,
            "updates_lost": lost,
            "lock_waits_total": store.counts.lock_waits,
            "lock_wait_seconds_total": store.counts.lock_seconds,
            "in_flight_bytes": self._budget.used,
            "variables": len(traffic),
            "variable_bytes": sizes,
            **by_metric,
            "snapshot_seconds": role.manager.saves.plain(),
            "snapshot_bytes_total": role.manager.saved_bytes,
            "snapshot_failures_total": role.manager.failures,
            "log_bytes": role.manager.log_bytes,
            "checkpoint_seconds": counts.checkpoints.plain(),
            "checkpoint_bytes_total": counts.checkpoint_bytes,
        }
