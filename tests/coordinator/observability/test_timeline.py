"""The timeline: one row per function, in which each activity lies within the one it belongs to."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.steps import die_once
from tests.faults.support import running_job

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable
from pscluster.coordinator.observability.job_metrics import Attempt
from pscluster.coordinator.observability.timeline import Recorded, Span, collect, events_of, together
from pscluster.core.metrics.trace import EACH, MAX_FUNCTIONS
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2

Event = dict[str, Any]
STEPS, WORKERS = 1, 2


def nested(events: Sequence[Event]) -> dict[tuple[int, int], list[tuple[int, Event]]]:
    """Depth and slice, in order, by process and row. AssertionError if two in a row overlap without nesting, or
    something precedes the beginning."""
    rows: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        assert set(event) >= {"ph", "name", "pid", "tid"}
        if event["ph"] == "X":
            assert event["ts"] >= 0 or event["pid"] == WORKERS
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
    by_row: dict[tuple[int, int], list[tuple[int, Event]]] = {}
    for row, mine in rows.items():
        mine.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_until: list[float] = []
        by_row[row] = []
        for event in mine:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, f"{event} does not nest"
            by_row[row].append((len(open_until), event))
            open_until.append(end)
    return by_row


def test_a_step_is_a_row(sharding_strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """From the queue to the servers, each part lies within the one that caused it, and takes the expected time."""
    strategy, coordinator = sharding_strategy, ClusterCoordinator(sharding_strategy)
    with strategy.scope():
        small = Variable(np.zeros((90, 10), np.float32), name="small")
        large = Variable(np.zeros((6 << 10, 512), np.float32), name="large")  # sent on separate streams
    data = iter(coordinator.create_per_worker_dataset(lambda: iter(slow_numbers())))

    def step(numbers: Any) -> None:
        next(numbers)
        strategy.read([small])
        small.assign_add(np.ones((90, 10), np.float32))
        time.sleep(0.002)

    def heavy() -> None:
        large.assign_add(np.ones((6 << 10, 512), np.float32))
        strategy.read([large])

    for _ in range(30):
        coordinator.schedule(step, args=(data,))
    for _ in range(3):
        coordinator.schedule(heavy)
    coordinator.join()
    coordinator.timeline(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text())
    assert trace["otherData"] == {"missing": {}}
    rows = nested(trace["traceEvents"])
    steps = {row: events for (process, row), events in rows.items() if process == STEPS}
    assert len(steps) == 33
    names = {event["args"].get("name") for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"steps", "workers", "step 1"} <= names
    for row, events in steps.items():
        depths = {event["name"]: depth for depth, event in events}
        first = events[0][1]
        assert first["args"] == {"function": row, "attempts": 1, "ended": "done"}
        assert depths["queue"] == 1
        assert depths["run"] == 2
        requests = [event for _, event in events if event["name"] in ("pull", "push")]
        assert {event["name"] for event in requests} == {"pull", "push"}
        assert all(request["ms"] >= 0 for event in requests for request in event["args"]["requests"])
        servers = [(depth, event) for depth, event in events if event["name"].startswith("ps ")]
        assert {depth for depth, _ in servers} == {4}
        assert {name for _, event in servers for name in event["name"].split(" + ")} == {"ps 0", "ps 1"}
        run = next(event for _, event in events if event["name"] == "run")
        assert run["args"]["ended"] == "done"
        if first["name"].endswith("step"):
            assert run["dur"] >= 2000  # microseconds
            assert run["args"]["data_wait_ms"] >= 1
    assert sum(len(events) for (process, _), events in rows.items() if process == WORKERS) == 33


def test_the_next_job_has_nothing_of_the_last(cluster: LocalCluster) -> None:
    """Functions of the next job, which have the same numbers, do not show the last job's."""
    for _ in range(2):
        with ParameterServerStrategy(cluster) as strategy:
            ClusterCoordinator(strategy).schedule(time.sleep, args=(0.002,)).fetch()
            assert [run.function for role in collect(strategy.tasks) for run in role.runs] == [1]


def slow_numbers() -> Any:
    """Data that has to be waited for."""
    for number in range(1000):
        time.sleep(0.001)
        yield number


def test_a_step_whose_worker_was_killed_shows_both_attempts(tmp_path: Path) -> None:
    """It shows the attempt lost with its worker, and the one that ended; with one task dead the rest is there."""
    with running_job(num_workers=2) as job:

        def step(folder: str) -> None:
            die_once(folder, "killed")

        value = job.coordinator.schedule(step, args=(job.folder,))
        job.join()
        assert value.fetch() is None
        job.coordinator.timeline(tmp_path / "run.json")
    rows = nested(json.loads((tmp_path / "run.json").read_text())["traceEvents"])
    attempts = [event for _, event in rows[STEPS, 1] if event["name"].startswith("worker ")]
    assert [event["args"] for event in attempts] == [
        {"attempt": 1, "ended": "lost"},
        {"attempt": 2, "ended": "done"},
    ]
    assert [event["name"] for _, event in rows[STEPS, 1] if event["name"] == "run"] == ["run"]


def test_short_functions_are_sampled_and_the_ring_is_bounded(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """Of very many only the latest are kept, and only some of the very short ones."""
    coordinator = ClusterCoordinator(strategy)
    for _ in range(4000):
        coordinator.schedule(int)
    coordinator.join()
    coordinator.timeline(tmp_path / "run.json")
    rows = nested(json.loads((tmp_path / "run.json").read_text())["traceEvents"])
    steps = [row for process, row in rows if process == STEPS]
    assert set(range(EACH, 4001, EACH)) <= set(steps)
    assert len(steps) <= MAX_FUNCTIONS


def test_a_file_that_can_not_be_written(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """It is an OSError, as for any file."""
    with pytest.raises(FileNotFoundError):
        coordinator.timeline(tmp_path / "nowhere" / "run.json")


def test_which_servers_worked_at_the_same_time() -> None:
    """Overlapping spans become disjoint ones that cover the same time."""
    parts = [(0, Span(1, 4)), (1, Span(2, 6)), (2, Span(7, 8))]
    assert list(together(parts)) == [
        ("ps 0", Span(1, 2)),
        ("ps 0 + ps 1", Span(2, 4)),
        ("ps 1", Span(4, 6)),
        ("ps 2", Span(7, 8)),
    ]


@pytest.mark.parametrize("error", [-0.6, -0.004, 0.0, 0.004, 0.6])
def test_clocks_that_are_not_quite_known(error: float) -> None:
    """A slightly wrong offset shifts what happened elsewhere; it still lies within its cause."""
    worker, server = PeerAddress("worker", 0, "a:1"), PeerAddress("ps", 0, "b:1")
    run = node_pb2.Recorded.Run(
        function=1, attempt=1, received=105.0, begin=105.01, ready=105.02, end=105.5, how="done"
    )
    late = node_pb2.Recorded.Run(function=1, attempt=1, received=9.0, begin=9.0, ready=9.0, end=104.9, how="done")
    asked = node_pb2.Recorded.Asked(function=1, what="pull", session="s", nth=1, begin=105.1, end=105.2)
    served = node_pb2.Recorded.Served(session="s", nth=1, what="pull", begin=55.101, end=55.199)
    events = events_of(
        [Attempt(1, "step", 1, 0, 4.0, 4.999, 5.501, "done")],
        [
            Recorded(worker, runs=[late, run], asked=[asked], offset=-100.0 + error),
            Recorded(server, served=[served], offset=-50.0 - error),
        ],
    )
    names = [(depth, event["name"]) for depth, event in nested(events)[STEPS, 1]]
    assert names == [
        (0, "step"),
        (1, "queue"),
        (1, "worker 0"),
        (2, "waits"),
        (2, "arguments"),
        (2, "run"),
        (3, "pull"),
        (4, "ps 0"),
    ]
