"""What the live page is given, from what was seen: pure, so mostly without a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.coordinator import ClusterCoordinator
from pscluster.coordinator.cli.status import top_tables
from pscluster.coordinator.cli.tables import rendered
from pscluster.coordinator.dashboard.snapshot import JobSnapshot
from pscluster.coordinator.dashboard.view import page
from pscluster.coordinator.dashboard.watch import Watch
from pscluster.coordinator.observability.events import MAX_DETAIL, MAX_EVENTS, EventLog, Saved, Series, Training
from pscluster.coordinator.observability.rates import RateMeter, Rates, TaskRates, VariableRates
from pscluster.coordinator.observability.status_client import Answer, StatusClient
from pscluster.coordinator.scheduling.queue_stats import QueueStats, WorkerStats
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2

PS = [PeerAddress("ps", index, f"ps{index}:1") for index in range(2)]
WORKERS = [PeerAddress("worker", index, f"worker{index}:1") for index in range(3)]


def worker(index: int, **other: Any) -> WorkerStats:
    """One that is at work, but for what is said."""
    usual: dict[str, Any] = {
        "up": True,
        "why": "",
        "incarnation": 1,
        "restarts": 0,
        "has": 1,
        "running": "step",
        "quiet": 0.1,
        "outcomes": 10,
        "done": 10,
        "seconds": 0.1,
    }
    return WorkerStats(peer=WORKERS[index], **{**usual, **other})


def snapshot(*workers: WorkerStats, gone: float = 0.0, error: str = "", waiting: int = 0, **other: Any) -> JobSnapshot:
    """A job with these workers."""
    has = sum(stats.has for stats in workers)
    queue = QueueStats(waiting, 0.0, has, 30 + has, 30, 0, 0, 0, paused=False, error=error, workers=workers)
    replies = {
        peer.task: node_pb2.StatusReply(
            identity=node_pb2.Identity(role=peer.role, index=peer.index, boot_id=1), state="serving"
        )
        for peer in (*PS, *WORKERS)
    }
    usual: dict[str, Any] = {
        "now": 100.0,
        "clock": 100.0,
        "job": "job",
        "coordinator": "chief 0",
        "memory_bytes": 1,
        "ended": False,
        "connected": True,
        "queue": queue,
        "servers": {PS[0]: 0.0, PS[1]: gone},
        "workers": WORKERS,
        "replies": replies,
        "asked": True,
        "rates": Rates({}, []),
        "event_log": EventLog(),
        "series": Series(90.0),
    }
    return JobSnapshot(**{**usual, **other})


def test_replicas_are_shown_with_their_workers() -> None:
    """By number, with the share of the time since the last reply that each has waited."""
    shown = snapshot(worker(0), worker(1))
    for index, replicas in ((0, (2,)), (1, (0, 1))):
        for number in replicas:
            shown.replies[f"worker {index}"].replicas.add(number=number, staleness=number, wait_seconds=1, dropped=7)
    meter = RateMeter()
    meter.add(10.0, shown.replies)
    later = {}
    for task, reply in shown.replies.items():
        later[task] = node_pb2.StatusReply()
        later[task].CopyFrom(reply)
        for replica in later[task].replicas:
            replica.wait_seconds += 0.5 * replica.number
    rows = page(dataclasses.replace(shown, replies=later, rates=meter.add(12.0, later)))["replicas"]
    assert [(row["number"], row["task"], row["staleness"], row["waited"]) for row in rows] == [
        (0, "worker 1", 0, 0.0),
        (1, "worker 1", 1, 0.25),
        (2, "worker 0", 2, 0.5),
    ]
    assert {row["dropped"] for row in rows} == {7}


def test_embedding_tables_are_shown() -> None:
    """With the rows of all servers, and per second what became of them; a server that was restarted has no rates."""
    meter, replies = RateMeter(), list[dict[str, node_pb2.StatusReply]]()
    for counts in (
        {"rows": 100},
        {"rows": 130, "rows_read": 80, "rows_found": 60, "rows_made": 50, "rows_evicted": 20},
    ):
        shown = snapshot(worker(0)).replies
        for peer in PS:
            load = shown[peer.task].busiest.add(name="users", bytes=1000, updates=len(replies))
            load.table.MergeFrom(node_pb2.TableLoad(capacity=500, rows_not_admitted=4 * len(replies), **counts))
        shown["ps 0"].busiest.add(name="w", bytes=1)
        replies.append(dict(shown))
    replies[1]["ps 1"].identity.boot_id = 2
    meter.add(10.0, replies[0])
    rates = meter.add(12.0, replies[1])
    (row,) = page(snapshot(worker(0), rates=rates))["tables"]
    assert row == {
        "name": "users",
        "rows": 260,
        "capacity": 1000,
        "held": 2000,
        "read": 40.0,
        "hit_rate": 0.75,
        "made": 25.0,
        "evicted": 10.0,
        "not_admitted": 2.0,
    }
    in_terminal = rendered(top_tables({}, rates, {}, 5), 140)
    assert re.search(r"users +│ +260 │ +1,000 │ +2.0 KiB │ +40 │ +75% │ +25 │ +2 │ +10 │", in_terminal)
    (row,) = page(snapshot(worker(0), rates=meter.add(13.0, replies[1])))["tables"]
    assert (row["rows"], row["hit_rate"], row["made"]) == (260, None, 0.0)


def health(shown: JobSnapshot) -> tuple[str, str, list[str]]:
    """State, sentence, and what is wrong."""
    verdict = page(shown)["health"]
    return verdict["state"], verdict["text"], verdict["problems"]


def test_verdicts() -> None:
    """The first line says how it is; what is wrong follows, the worst first."""
    fine = [worker(index) for index in range(3)]
    assert health(snapshot(*fine)) == ("ok", "Healthy, at work", [])
    assert health(snapshot(*(worker(index, has=0) for index in range(3))))[:2] == (
        "idle",
        "Healthy; nothing is scheduled",
    )
    assert health(snapshot(*fine, ended=True)) == ("over", "The job is over", [])
    assert health(snapshot(*fine, connected=False))[1] == "Waiting for the cluster's tasks"
    assert health(snapshot(*fine, error="step failed"))[2] == ["step failed"]
    dead = worker(2, up=False, has=0, why="killed")
    slow = worker(1, seconds=0.3)
    state, text, problems = health(snapshot(worker(0), slow, dead, gone=3.0))
    assert (state, text) == ("bad", "Needs attention")
    assert problems == [
        "ps 1 is unreachable for 3 s: reads and updates there wait",
        "worker 2 is down: killed; its functions run again elsewhere",
        "worker 1 is a straggler: its functions take 3 times as long as the others'",
    ]
    assert health(snapshot(worker(0), worker(1), dead))[0] == "warn"
    assert health(snapshot(*(worker(index, up=False, has=0, restarts=-1) for index in range(3))))[0] == "bad"
    failed = EventLog()
    failed.record("worker 1", "error", "step failed on worker 1", "its traceback")
    assert health(snapshot(*fine, ended=True, event_log=failed))[2] == ["its last error: step failed on worker 1"]
    assert page(snapshot(*fine, ended=True, event_log=failed))["errors"][0]["detail"] == "its traceback"
    assert "detail" not in page(snapshot(*fine, event_log=failed))["errors"][0]
    stuck = health(snapshot(worker(0), worker(1), worker(2, quiet=45.0)))
    assert stuck[2] == ["worker 2: nothing has come back from step for 45 s"]


def test_slow_data() -> None:
    """Who spends most of the time in waiting for it is named."""
    rates = Rates({f"worker {index}": TaskRates(waited=waited) for index, waited in enumerate((0.1, 0.62, 0.5))}, [])
    (problem,) = health(snapshot(*(worker(index) for index in range(3)), rates=rates))[2]
    assert problem.startswith("worker 1, worker 2: up to 62% of the time is spent waiting for data")


def test_a_checkpoint_that_is_missing() -> None:
    """It is wrong until there is one in the same folder, though functions run."""
    event_log, fine = EventLog(), [worker(index) for index in range(3)]
    event_log.not_saved("/a/ckpt-000001", "No space left on device")
    event_log.saved(Saved("/b/ckpt-000001", 1.0, 0.1, 0.1, 1))
    state, text, (problem,) = health(snapshot(*fine, event_log=event_log))
    assert (state, text) == ("warn", "Needs attention")
    assert problem.startswith("the checkpoint /a/ckpt-000001 was not written: No space left on device; until one is")
    event_log.saved(Saved("/a/ckpt-000002", 2.0, 0.1, 0.1, 1))
    assert health(snapshot(*fine, event_log=event_log)) == ("ok", "Healthy, at work", [])


def test_a_server_that_can_t_save() -> None:
    """Its full disk is a problem, though functions run."""
    shown = snapshot(*(worker(index) for index in range(3)))
    shown.replies["ps 1"].unsaved = "No space left on device in /state/ps-1"
    state, text, (problem,) = health(shown)
    assert (state, text) == ("warn", "Needs attention")
    assert problem.startswith("ps 1 can't save its state: No space left on device in /state/ps-1; under durability")


def test_a_silent_task() -> None:
    """Who does not answer is said to, though its connection stands: it may be frozen."""
    shown = snapshot(*(worker(index) for index in range(3)))
    frozen = JobSnapshot(**{**{name: getattr(shown, name) for name in JobSnapshot.__dataclass_fields__}, "replies": {}})
    assert "worker 0 does not answer: if that continues, its functions run again elsewhere" in health(frozen)[2]
    assert {row["state"] for row in page(frozen)["servers"]} == {"does not answer"}


def test_what_is_hot() -> None:
    """The variable with most of the bytes, the server with more than its share; a lone one of either is not hot."""
    variables = [
        VariableRates("big", 100, read_bytes=80.0, servers={0: 80.0}),
        VariableRates("small", 10, update_bytes=20.0, servers={0: 5.0, 1: 15.0}),
    ]
    tasks = {"ps 0": TaskRates(bytes_in=5.0, bytes_out=80.0), "ps 1": TaskRates(bytes_in=15.0)}
    document = page(snapshot(worker(0), rates=Rates(tasks, variables)))
    assert [(row["name"], row["share"], row["hot"]) for row in document["variables"]] == [
        ("big", 0.8, True),
        ("small", 0.2, False),
    ]
    assert document["variables"][1]["servers"] == [["ps 0", 0.25], ["ps 1", 0.75]]
    assert [(row["share"], row["hot"]) for row in document["servers"]] == [(0.85, True), (0.15, False)]
    assert not page(snapshot(worker(0), rates=Rates({}, variables[:1])))["variables"][0]["hot"]


def test_numbers_that_are_none() -> None:
    """A loss of NaN or infinity is JSON all the same."""
    event_log, series = EventLog(), Series(90.0)
    event_log.trained(Training(logs={"loss": math.nan, "other": math.inf}))
    series.add(91.0, 10, event_log.take_loss())
    document = json.loads(json.dumps(page(snapshot(worker(0), event_log=event_log, series=series)), allow_nan=False))
    assert document["training"]["logs"] == [["loss", "nan"], ["other", "inf"]]
    assert document["series"]["losses"] == ["nan"]


def test_a_loss_is_kept_as_a_number() -> None:
    """A loss that is an object, such as a tensor with its graph, is kept as a number."""

    class Tensor(float):
        pass

    event_log, told = EventLog(), Tensor(0.5)
    alive = weakref.ref(told)
    event_log.trained(Training(logs={"loss": told}))
    del told
    assert alive() is None
    assert event_log.training.logs == {"loss": 0.5}
    assert event_log.take_loss() == (0.5, 1)


def test_a_flood_is_bounded() -> None:
    """Of many events the last are kept, of long tracebacks the end; retries do not drive out errors."""
    event_log = EventLog()
    event_log.record("worker 0", "error", "first", "x" * 100_000 + "end")
    for index in range(5000):
        event_log.record("worker 0", "retry", f"again {index}")
    assert len(event_log.events) == MAX_EVENTS
    (error,) = event_log.errors
    assert len(error.detail) == MAX_DETAIL
    assert error.detail.endswith("end")


def test_now_is_now() -> None:
    """After hours, too, when a point of the curves takes minutes; and a clock that jumps moves all of a curve."""
    event_log, series = EventLog(), Series(0.0)
    for second in range(1, 36_001):
        series.add(float(second), 100 * second, (2.0, 1.0))
    for second in range(36_001, 36_005):
        series.add(float(second), 3_600_000, (0.5, 1.0))
    shown = page(snapshot(worker(0), now=1000.0, clock=36_004.0, event_log=event_log, series=series))
    assert shown["queue"]["rate"] == 0.0
    assert shown["series"]["loss_now"] == 0.5
    assert shown["series"]["times"][-1] == 1000.0
    assert shown["running"] == 36_004.0 - event_log.since


@given(st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 1000)), min_size=1, max_size=300), st.integers(4, 40))
def test_a_series_forgets_no_function(steps: list[tuple[float, int]], most: int) -> None:
    """However long it is: few points, in order, whose rates times their seconds are all functions that were done."""
    series, now, done = Series(50.0, 3, most), 50.0, 3
    for seconds, more in steps:
        now, done = now + seconds, done + more
        series.add(now, done, (1.0, 1.0))
    times, losses = series.rows()
    assert len(times) <= most
    assert times == sorted(times)
    assert times[-1] == now
    assert set(losses) == {1.0}
    rates = series.curve()
    assert len(rates) == len(times)
    if len(times) < len(steps):  # points are means over their own time; the last one is the rate of now
        lengths = [after - before for before, after in zip([50.0, *times], times, strict=False)]
        total = sum(rate * length for rate, length in zip(rates[:-1], lengths[:-1], strict=True))
        assert total == pytest.approx(series._points[-2].done - 3 if len(times) > 1 else 0, abs=1e-6 * (1 + done))


def test_one_miss_is_none(coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that has answered is silent when it does not twice; one that never has, at once."""
    peers = coordinator.strategy.tasks[:2]
    answers: dict[PeerAddress, Answer] = dict.fromkeys(peers, "it does not answer")
    answers[peers[0]] = node_pb2.StatusReply(state="serving")
    monkeypatch.setattr(StatusClient, "ask", lambda *_, **__: answers)

    async def silent() -> list[list[str]]:
        watch = Watch(coordinator.context)
        watch._status_client = StatusClient(peers)
        shown = []
        for _ in range(4):
            await watch._ask_once()
            shown.append([peer.task for peer in peers if peer.task not in watch._replies])
            answers[peers[0]] = "it does not answer" if len(shown) < 3 else node_pb2.StatusReply(state="serving")
        watch.close()
        return shown

    assert asyncio.run(silent()) == [["ps 1"], ["ps 1"], ["ps 0", "ps 1"], ["ps 1"]]


@pytest.mark.parametrize("jump", [0, 3600, -3600])
def test_the_words_of_the_launcher(jump: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a process ended replaces what its connection said, whichever came first; a death counts once.

    So it is if the machine's clock jumps in between.
    """
    event_log = EventLog()
    event_log.record("worker 2", "down", "is gone: Socket closed")
    jumped = time.time() + jump
    monkeypatch.setattr(time, "time", lambda: jumped)
    event_log.exited("worker 2", "(pid 7) was killed by SIGKILL; restarting in 0.5 s")
    dead = worker(2, up=False, has=0, why="Socket closed")
    (problem,) = health(snapshot(worker(0), worker(1), dead, event_log=event_log))[2]
    assert problem.startswith("worker 2 is down: (pid 7) was killed by SIGKILL; restarting in 0.5 s; its functions")
    event_log.record("worker 2", "up", "is back")
    event_log.exited("worker 2", "(pid 7) was killed by SIGKILL; restarted as pid 8")
    (row,) = (
        row for row in page(snapshot(worker(0), worker(1), worker(2), event_log=event_log))["workers"] if row["story"]
    )
    assert [entry["text"] for entry in row["story"]] == [
        "is back",
        "(pid 7) was killed by SIGKILL; restarted as pid 8",
    ]
    assert (row["state"], row["deaths"]) == ("working", 1)

    event_log.exited("ps 1", "(pid 9) was killed by SIGKILL; restarted as pid 10")
    event_log.record("ps 1", "down", "is unreachable; retrying for up to 600 s")
    shown = page(snapshot(worker(0), gone=2.0, event_log=event_log))["servers"][1]
    assert shown["state"] == "unreachable for 2 s: (pid 9) was killed by SIGKILL; restarted as pid 10"
    assert (shown["deaths"], len(shown["story"])) == (1, 1)
    event_log.record("ps 1", "up", "is back after 2 s")
    event_log.record("ps 1", "down", "is unreachable")
    assert event_log.deaths["ps 1"] == 2


def test_the_curve_ends_at_the_number() -> None:
    """The tile, the words beside a curve, and the end of the curve are one number, after hours, too."""
    event_log, series = EventLog(), Series(0.0)
    for second in range(1, 2_001):
        event_log.trained(Training(logs={"loss": 1 / second, "accuracy": 0.5}), steps=second % 3, examples=32)
        series.add(float(second), 7 * second + second % 5, event_log.take_loss(), event_log.steps)
        if second in (1, 2, 5, 100, 301, 2_000):
            shown = page(snapshot(worker(0), event_log=event_log, series=series))
            assert shown["series"]["rates"][-1] == shown["queue"]["rate"]
            assert shown["series"]["losses"][-1] == shown["series"]["loss_now"]
            assert dict(shown["training"]["logs"])["loss"] == shown["series"]["loss_now"]
    assert shown["training"]["step_rate"] == pytest.approx(1.0)
    assert shown["training"]["example_rate"] == 32
    assert page(snapshot(worker(0)))["training"]["step_rate"] is None


def test_a_hot_server_needs_attention() -> None:
    """One that carries far more than its share of much is a problem, with what helps; of little it is none."""
    fine = [worker(index) for index in range(3)]

    def at(scale: float, *servers: tuple[int, float], shards: int = 4) -> tuple[str, list[str]]:
        whole = sum(share for _, share in servers)
        variables = [
            VariableRates("emb", 100, read_bytes=scale * whole, servers={ps: scale * share for ps, share in servers})
        ]
        tasks = {f"ps {index}": TaskRates() for index in range(2)}
        tasks |= {f"ps {ps}": TaskRates(bytes_out=scale * share) for ps, share in servers}
        state = snapshot(*fine, rates=Rates(tasks, variables))
        for ps, share in servers:
            load = node_pb2.VariableLoad(name="emb", rows=9, shape=[1000, 8])
            load.shards.extend(
                node_pb2.ShardLoad(shard=shards * ps + index, traffic=scale * share / shards) for index in range(shards)
            )
            state.replies[f"ps {ps}"].busiest.append(load)
        _, text, problems = health(state)
        return text, problems

    text, problems = at(1e7, (0, 0.22), (1, 0.78))
    assert text == "Needs attention"
    assert problems == [
        "ps 1 carries 78% of the load of 2 servers, most of it for emb, 78% of whose traffic goes there",
        "proposed: strategy.apply(strategy.plan()) moves one shard, after which no server has more than 1.17 times the "
        "mean load",
    ]
    assert at(1e7, (0, 1.0), shards=1)[1][1:] == [
        "proposed: emb: its only shard has 100% of the load of all servers; cut its rows by hash, into more shards: "
        "partitioner=HashPartitioner(16)"
    ]
    assert at(1e7, (0, 0.4), (1, 0.6)) == ("Healthy, at work", [])
    assert at(1e3, (0, 1.0)) == ("Healthy, at work", [])
