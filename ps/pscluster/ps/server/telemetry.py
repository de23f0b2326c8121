"""The metrics of a parameter server."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from pscluster.core.metrics.registry import OTHER, Labels, Metric, Snapshot, Telemetry
from pscluster.ps.server.admission import Budget
from pscluster.ps.server.role import ParameterServerRole

_BY = ("variable",)

_OF_VARIABLES = {  # fields of VariableMetrics
    "pulls": Metric("variable_pulls_total", "counter", "shards read, whole or rows", _BY),
    "pulled_bytes": Metric("variable_pulled_bytes_total", "counter", "bytes of values read", _BY),
    "pull_seconds": Metric("variable_pull_seconds_total", "counter", "time to read and send those values", _BY),
    "pushes": Metric("variable_pushes_total", "counter", "updates of shards applied", _BY),
    "pushed_bytes": Metric("variable_pushed_bytes_total", "counter", "bytes of values of updates applied", _BY),
    "push_seconds": Metric("variable_push_seconds_total", "counter", "time to apply them and wait for the shard", _BY),
    "rows_read": Metric("variable_rows_read_total", "counter", "rows read by number", _BY),
    "rows_updated": Metric("variable_rows_updated_total", "counter", "rows updated by number", _BY),
    "rows_found": Metric("table_rows_found_total", "counter", "rows of tables read that had been updated before", _BY),
    "rows_made": Metric("table_rows_made_total", "counter", "rows of tables made, for ids that had none", _BY),
    "rows_made_again": Metric(
        "table_rows_made_again_total", "counter", "rows of tables made, for ids whose rows were dropped lately", _BY
    ),
    "rows_evicted": Metric("table_rows_evicted_total", "counter", "rows of tables dropped", _BY),
    "rows_not_admitted": Metric(
        "table_rows_not_admitted_total", "counter", "rows of gradients of tables dropped, of ids not admitted", _BY
    ),
}


class ServerTelemetry(Telemetry):
    """See `metrics`."""

    role: ClassVar[str] = "ps"
    metrics = (
        Metric("pull_seconds", "histogram", "time from the arrival of a read to the end of its reply"),
        Metric("push_seconds", "histogram", "time from the arrival of an update, or of its first frame, to its reply"),
        Metric("pulled_bytes_total", "counter", "bytes sent in replies to reads"),
        Metric("pushed_bytes_total", "counter", "bytes received in updates"),
        Metric("requests_refused_total", "counter", "small requests answered with an error"),
        Metric("update_staleness_updates", "histogram", "for each update, others' updates since the sender's last one"),
        Metric("updates_duplicate_total", "counter", "updates dropped because they had already been applied"),
        Metric("updates_remembered", "gauge", "keys remembered to detect duplicates"),
        Metric("updates_lost", "gauge", "lower bound of the acknowledged updates lost when a process died", _BY),
        Metric("lock_waits_total", "counter", "updates that waited for their shard"),
        Metric("lock_wait_seconds_total", "counter", "time that updates waited for their shard"),
        Metric("in_flight_bytes", "gauge", "bytes reserved for large requests in progress"),
        Metric("variables", "gauge", "variables with shards here"),
        Metric("variable_bytes", "gauge", "bytes of their shards, with optimizer slots and averages", _BY),
        Metric("table_rows", "gauge", "rows of tables", _BY),
        *_OF_VARIABLES.values(),
        Metric("snapshot_seconds", "histogram", "time to save a snapshot of the state"),
        Metric("snapshot_bytes_total", "counter", "bytes written for snapshots"),
        Metric("snapshot_failures_total", "counter", "snapshots that could not be saved"),
        Metric("log_bytes", "gauge", "bytes of the log's current segment"),
        Metric("checkpoint_seconds", "histogram", "time to write this server's part of a checkpoint"),
        Metric("checkpoint_bytes_total", "counter", "bytes written for checkpoints"),
    )

    def __init__(self, role: ParameterServerRole, budget: Budget) -> None:
        super().__init__()
        self._role = role
        self._budget = budget
        self._labels = Labels()

    def own(self) -> Snapshot:
        """Return the metrics of the store, the service and the state manager."""
        role, store, metrics = self._role, self._role.store, self._role.metrics
        # The largest get labels first, and evaluation snapshots, which come and go, last.
        traffic = sorted(store.traffic(), key=lambda item: (item[0].spec.evaluation > 0, -item[1]))
        labels = self._labels.choose([held.spec.name for held, _ in traffic if not held.spec.evaluation])
        lost: dict[str, float] = defaultdict(float)
        for name, count in store.lost.items():
            lost[labels.get(name, OTHER)] += count
        sizes: dict[str, float] = defaultdict(float)
        table_rows: dict[str, float] = defaultdict(float)
        by_metric: dict[str, dict[str, float]] = {metric.name: defaultdict(float) for metric in _OF_VARIABLES.values()}
        for held, nbytes in traffic:
            label = labels.get(held.spec.name, OTHER)
            sizes[label] += nbytes
            if held.spec.HasField("table"):
                table_rows[label] += sum(len(shard.array) for shard in list(held.shards.values()))
            if held.spec.evaluation:
                continue  # a counter would fall when the snapshot is deleted
            for field, metric in _OF_VARIABLES.items():
                value = getattr(held.metrics, field)
                by_metric[metric.name][label] += value
        return {
            "pull_seconds": metrics.pulls.plain(),
            "push_seconds": metrics.pushes.plain(),
            "pulled_bytes_total": metrics.pulled_bytes,
            "pushed_bytes_total": metrics.pushed_bytes,
            "requests_refused_total": metrics.refused,
            "update_staleness_updates": store.metrics.staleness.plain(),
            "updates_duplicate_total": store.metrics.duplicates,
            "updates_remembered": store.remembered,
            "updates_lost": lost,
            "lock_waits_total": store.metrics.lock_waits,
            "lock_wait_seconds_total": store.metrics.lock_seconds,
            "in_flight_bytes": self._budget.used,
            "variables": len(traffic),
            "variable_bytes": sizes,
            "table_rows": table_rows,
            **by_metric,
            "snapshot_seconds": role.manager.saves.plain(),
            "snapshot_bytes_total": role.manager.saved_bytes,
            "snapshot_failures_total": role.manager.failures,
            "log_bytes": role.manager.log_bytes,
            "checkpoint_seconds": metrics.checkpoints.plain(),
            "checkpoint_bytes_total": metrics.checkpoint_bytes,
        }
