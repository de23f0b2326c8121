"""Metrics: histograms, labels, and that every role serves what it says."""

from __future__ import annotations

import ast
import json
import re
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import numpy as np
import pytest

from pscluster.coordinator.observability.job_metrics import CoordinatorMetrics
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.scheduling.decisions.tasks import Task
from pscluster.core.geometry.partition import Partition
from pscluster.core.metrics.registry import OTHER, Histogram, Labels, Metric, Snapshot, Telemetry
from pscluster.ps.request_metrics import TRAFFIC_HALF_LIFE, ServiceMetrics, VariableMetrics
from pscluster.ps.server.admission import Budget
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.prepared_reads import PreparedRead
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.telemetry import ServerTelemetry
from pscluster.v1 import node_pb2, ps_pb2
from pscluster.worker.telemetry import WorkerTelemetry

ROLES: list[type[Telemetry]] = [CoordinatorTelemetry, ServerTelemetry, WorkerTelemetry]


def test_a_bucket_counts_values_up_to_its_bound() -> None:
    """A value equal to a bound belongs to it; the buckets are cumulative, as Prometheus wants them."""
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        histogram.add(value)
    assert histogram.plain() == {"count": 5, "sum": 16.0, "buckets": {"1.0": 2, "2.0": 3, "4.0": 4, "+Inf": 5}}


@pytest.mark.parametrize(("first", "last", "count"), [(0.9, 0.1, 50), (3.5, 0.5, 31), (9.0, 9.0, 1), (2.0, 1.0, 2)])
def test_many_that_lie_between_two(first: float, last: float, count: int) -> None:
    """Values added in one call are counted as if each were added."""
    at_once, one_by_one = Histogram((1.0, 2.0, 4.0)), Histogram((1.0, 2.0, 4.0))
    at_once.add_falling(first, last, count)
    for index in range(count):
        one_by_one.add(first - (first - last) / max(count - 1, 1) * index)
    assert at_once.counts == one_by_one.counts
    assert at_once.total == pytest.approx(one_by_one.total)


def test_the_wait_of_each_that_was_sent_together() -> None:
    """Old functions at the head, from a lost worker, do not make the others old; many in a row count individually."""
    counts, ages = CoordinatorMetrics(), [30.0, 20.0, *[0.02] * 98]
    counts.sent([Task(None, since=100.0 - age) for age in ages], 100.0)
    assert counts.dispatches.total == pytest.approx(sum(ages))
    assert [many for many in counts.dispatches.counts if many] == [98, 2]
    counts.sent([Task(None, since=100.0 - age / 1000) for age in range(200, 101, -1)], 100.0)
    assert counts.dispatches.total == pytest.approx(sum(ages) + sum(range(102, 201)) / 1000)
    assert sum(counts.dispatches.counts) == 199


def test_labels_are_bounded_and_stay() -> None:
    """A value with its own label keeps it, however many come; deleted ones make room."""
    labels = Labels(2)
    assert labels.choose(["a", "b", "c"]) == {"a": "a", "b": "b", "c": OTHER}
    assert labels.choose(["c", "b", "a"]) == {"a": "a", "b": "b", "c": OTHER}
    assert labels.choose(["c", "b"]) == {"b": "b", "c": "c"}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.role)
def test_names(role: type[Telemetry]) -> None:
    """Names are valid for Prometheus, unique, and end in what they count; each has a description."""
    names = [metric.name for metric in role.described()]
    assert len(names) == len(set(names))
    for metric in role.described():
        assert re.fullmatch(r"[a-z][a-z_]*", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.help
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_updates"))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.role)
def test_the_document_has_them(role: type[Telemetry]) -> None:
    """docs/observability.md names every metric of each role, with its labels and meaning, and no other."""
    text = (Path(__file__).parents[3] / "docs" / "observability.md").read_text(encoding="utf-8")
    for metrics, title in (
        (role.metrics, f"`pscluster_{role.role}_`"),
        (role.described()[len(role.metrics) :], "role"),
    ):
        (section,) = re.findall(rf"^### .*{title}\n(.*?)(?=^#|^Where)", text, re.MULTILINE | re.DOTALL)
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
        kinds = {"histogram": " (histogram)"}
        assert rows == [
            [f"| `{metric.name}`", ", ".join(metric.labels), f"{metric.help}{kinds.get(metric.kind, '')} |"]
            for metric in metrics
        ]


def test_nothing_is_called_between_the_reading_and_the_writing_of_a_counter() -> None:
    """Otherwise additions by other threads would be lost; see `pscluster.core.metrics.registry`."""
    unsafe = []
    for path in sorted(Path(__file__).parents[3].glob("*/pscluster/*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name):
                added = ast.unparse(node.value)
                calls = any(isinstance(child, ast.Call) for child in ast.walk(node.value))
                if calls and re.search(
                    r"count|_pulled|_pushed|monotonic|perf_counter", f"{ast.unparse(node.target)} {added}"
                ):
                    unsafe.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert unsafe == []


def test_a_prepared_reads_seconds_do_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread that answers the same read has added while the clock is read is kept."""
    prepared = PreparedRead([])
    role = SimpleNamespace(
        metrics=ServiceMetrics(), waiting=False, store=SimpleNamespace(index=0, prepared=lambda data: prepared)
    )
    service = ParameterServerService(cast(ParameterServerRole, role))
    asked, seconds = count(), list[float]()

    def answer() -> None:
        service._reply(b"", iter(()), cast(grpc.ServicerContext, None))
        seconds.append(prepared._seconds)

    def clock() -> float:
        now = float(next(asked))
        if now == 1:  # as the first thread is about to add
            other = threading.Thread(target=answer)
            other.start()
            other.join()
        return now

    monkeypatch.setattr("pscluster.ps.server.state.prepared_reads.time", SimpleNamespace(monotonic=clock))
    answer()
    assert seconds == [1, 2]


def test_an_evaluations_copies_take_no_counts_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes belong to `other`, and reads of them count for no variable, since they will be deleted.

    None is among the busiest.
    """
    role, counts = ParameterServerRole(0), VariableMetrics()
    counts.read(8, 0.1, 1)
    specs = ps_pb2.VariableSpec(name="own"), ps_pb2.VariableSpec(name="copy", evaluation=1)
    scalar = np.dtype(np.float32), Partition((), ())
    traffic = [(HeldVariable(spec, *scalar, {}, counts), 16) for spec in specs]
    monkeypatch.setattr(role.store, "traffic", lambda: traffic)
    metrics = ServerTelemetry(role, Budget(1)).snapshot()
    assert metrics["variable_bytes"] == {"own": 16, OTHER: 16}
    assert metrics["variable_pulls_total"] == {"own": 1}
    reply = node_pb2.StatusReply()
    role.describe_load(reply, 10)
    assert [load.name for load in reply.busiest] == ["own"]


def test_loads_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shards if they are asked for, and no more than are allowed; traffic counts half after two minutes."""
    now = 0.0
    monkeypatch.setattr("pscluster.ps.request_metrics.time", SimpleNamespace(monotonic=lambda: now))
    role = ParameterServerRole(0)
    shards = {index: Shard(np.zeros((2, 4), np.float32)) for index in (1, 3)}
    spec = ps_pb2.VariableSpec(name="v", shape=[8, 4])
    held = HeldVariable(spec, np.dtype(np.float32), Partition.even((8, 4), (4,)), shards)
    monkeypatch.setattr(role.store, "traffic", lambda: [(held, 64)])
    shards[3].traffic.add(100)
    now = TRAFFIC_HALF_LIFE
    shards[3].traffic.add(10)
    reply = node_pb2.StatusReply()
    role.describe_load(reply, 1, shards=True)
    (load,) = reply.busiest
    assert [(each.shard, each.bytes, each.traffic) for each in load.shards] == [(1, 32, 0.0), (3, 32, 60.0)]
    assert list(load.shape) == [8, 4]
    monkeypatch.setattr("pscluster.ps.server.role.MAX_SHARDS", 1)
    for reply, shown in ((node_pb2.StatusReply(), False), (node_pb2.StatusReply(), True)):
        role.describe_load(reply, 1, shards=shown)
        assert [len(load.shards) for load in reply.busiest] == [0]


class OneRole(Telemetry):
    """A role with one metric."""

    role = "one"
    metrics = (Metric("things_total", "counter", "things", ("kind",)),)

    def own(self) -> Snapshot:
        return {"things_total": {"a": 1, 'quote " and \\ and\nline': 2}}


def test_a_snapshot_has_what_is_described_and_json_can_hold_it() -> None:
    """A snapshot holds every metric, including those that all roles have."""
    snapshot = OneRole().snapshot()
    assert set(snapshot) == {metric.name for metric in OneRole.described()}
    assert json.loads(json.dumps(snapshot)) == snapshot
    memory = snapshot["memory_bytes"]
    assert isinstance(memory, int | float)
    assert memory > 1 << 20
    assert snapshot["ready"] == 0
