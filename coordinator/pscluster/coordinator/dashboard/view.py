"""The contents of the live page, as one object of plain values, made from a snapshot of the job. Pure.

Names, errors and tracebacks are data here and on the page, which shows them as text and never as markup.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pscluster.coordinator.dashboard.health import health_of, problems_of
from pscluster.coordinator.dashboard.snapshot import JobSnapshot
from pscluster.coordinator.observability.events import Event
from pscluster.coordinator.observability.rates import TaskRates, VariableRates
from pscluster.coordinator.scheduling.queue_stats import WorkerStats
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2

SLOW = 2.0  # a worker whose functions take this many times as long as the other workers' median is a straggler
HOT_SHARE = 0.5  # a variable that accounts for more than this share of all bytes moved is hot, if there are others
HOT_SERVER = 1.5  # a server that moves this many times its fair share is hot
LAST_ERRORS = 3  # this many errors include their tracebacks when the job has ended
MAX_VARIABLES = 20
MAX_EVENTS = 100

Json = dict[str, Any]


def page(snapshot: JobSnapshot, *, details: bool = False) -> Json:
    """Return the contents of the page; with `details` including the errors' tracebacks, which it fetches one by one.

    When the job has ended it can't fetch them any more, so the last errors always include theirs.
    """
    times, losses = snapshot.series.rows()
    event_log, training = snapshot.event_log, snapshot.event_log.training
    stories = _stories(event_log.events)
    workers = _workers(snapshot, stories)
    servers = _servers(snapshot, stories)
    variables = _variables(snapshot.rates.variables)
    detailed = MAX_EVENTS if details else LAST_ERRORS if snapshot.ended else 0
    problems = problems_of(snapshot, workers, servers)
    loss = snapshot.series.loss
    return {
        "now": snapshot.now,
        "began": event_log.began,
        "running": snapshot.clock - event_log.since,
        "job": snapshot.job,
        "coordinator": snapshot.coordinator,
        "memory": snapshot.memory_bytes,
        "health": dict(zip(("state", "text", "problems"), health_of(snapshot, problems), strict=True)),
        "queue": _queue(snapshot),
        "training": {
            **asdict(training),
            "logs": [
                [name, _number(value if loss is None or name != event_log.loss_name else loss)]
                for name, value in training.logs.items()
            ],
            "step_rate": snapshot.series.step_rate,
            "example_rate": snapshot.series.example_rate,
        },
        "series": {
            "times": [round(snapshot.now - snapshot.clock + at, 1) for at in times],
            "rates": [round(rate, 2) for rate in snapshot.series.curve()],
            "losses": _loss_curve(losses, loss),
            "loss": event_log.loss_name,
            "loss_now": None if loss is None else _number(loss),
        },
        "workers": workers,
        "replicas": _replicas(snapshot),
        "servers": servers,
        "variables": variables,
        "tables": _tables(snapshot.rates.variables),
        "more_variables": max(len(snapshot.rates.variables) - MAX_VARIABLES, 0),
        "events": [_event(event) for event in reversed(event_log.events[-MAX_EVENTS:])],
        "errors": [
            {**_event(event), "detailed": bool(event.detail), **({"detail": event.detail} if age < detailed else {})}
            for age, event in enumerate(reversed(event_log.errors))
        ],
        "checkpoints": [asdict(checkpoint) for checkpoint in reversed(event_log.checkpoints)],
    }


def _number(value: float) -> float | str:
    """Return a number as JSON can represent it: NaN and infinity as text."""
    return float(value) if value == value and abs(value) != float("inf") else str(float(value))


def _loss_curve(losses: Sequence[float | None], now: float | None) -> list[float | str | None]:
    """Return the points' means, but for the last one the current loss, as in the number beside the curve."""
    last = max((at for at, loss in enumerate(losses) if loss is not None), default=None)
    drawn = [now if at == last and now is not None else loss for at, loss in enumerate(losses)]
    return [None if loss is None else _number(loss) for loss in drawn]


def _event(event: Event) -> Json:
    return {"number": event.number, "time": event.time, "who": event.who, "kind": event.kind, "text": event.text}


def _stories(events: Sequence[Event]) -> dict[str, list[Json]]:
    """Return when each task went down and came back, the newest first."""
    stories: dict[str, list[Json]] = {}
    for event in reversed(events):
        if event.kind in ("up", "down"):
            stories.setdefault(event.who, []).append({"time": event.time, "kind": event.kind, "text": event.text})
    return {who: story[:6] for who, story in stories.items()}


def _queue(snapshot: JobSnapshot) -> Json:
    queue = snapshot.queue
    if queue is None:
        return {"waiting": 0, "running": 0, "done": 0, "failed": 0, "retried": 0, "cancelled": 0, "rate": 0.0}
    return {
        "waiting": queue.waiting,
        "running": queue.in_flight,
        "done": queue.done,
        "failed": queue.failed,
        "retried": queue.retried,
        "cancelled": queue.cancelled,
        "rate": round(snapshot.series.rate, 2),
    }


def _common(snapshot: JobSnapshot, peer: PeerAddress, stories: Mapping[str, list[Json]]) -> Json:
    reply = snapshot.replies.get(peer.task)
    return {
        "task": peer.task,
        "address": peer.address,
        "name": "" if reply is None else reply.identity.name,
        "up_seconds": None if reply is None else round(reply.uptime_seconds),
        "memory": None if reply is None else reply.memory_bytes,
        "deaths": snapshot.event_log.deaths.get(peer.task, 0),
        "story": stories.get(peer.task, []),
    }


def _workers(snapshot: JobSnapshot, stories: Mapping[str, list[Json]]) -> list[Json]:
    rows = []
    known = {} if snapshot.queue is None else {stats.peer.task: stats for stats in snapshot.queue.workers}
    exits = snapshot.event_log.exits
    for peer in snapshot.workers:
        worker = known.get(peer.task)
        rate = snapshot.rates.tasks.get(peer.task, TaskRates())
        slower = None if worker is None or snapshot.queue is None else _slower(worker, snapshot.queue.workers)
        silent = snapshot.asked and peer.task not in snapshot.replies
        state, good = _state_of_worker(worker, snapshot.replies.get(peer.task), silent, exits.get(peer.task))
        rows.append(
            {
                **_common(snapshot, peer, stories),
                "state": state,
                "good": good,
                "runs": "" if worker is None or not worker.has else worker.running,
                "quiet": 0 if worker is None or not worker.has else round(worker.quiet, 1),
                "has": 0 if worker is None else worker.has,
                "rate": round(rate.functions, 2),
                "busy": round(rate.busy, 3),
                "waited": round(rate.waited, 3),
                "seconds": None if worker is None else worker.seconds,
                "slower": None if slower is None else round(slower, 1),
                "straggler": slower is not None and slower >= SLOW,
                "done": 0 if worker is None else worker.done,
            }
        )
    return rows


def _replicas(snapshot: JobSnapshot) -> list[Json]:
    """Return the replicas of synchronous strategies. One that has run on several workers has a row for each."""
    rows = []
    for peer in snapshot.workers:
        reply = snapshot.replies.get(peer.task, node_pb2.StatusReply())
        waited = snapshot.rates.tasks.get(peer.task, TaskRates()).replicas_waited
        rows += [
            {
                "number": replica.number,
                "task": peer.task,
                "staleness": replica.staleness,
                "waited": round(waited.get(replica.number, 0.0), 3),
                "wait_seconds": round(replica.wait_seconds, 3),
                "dropped": replica.dropped,
            }
            for replica in reply.replicas
        ]
    return sorted(rows, key=lambda row: row["number"])


def _state_of_worker(
    worker: WorkerStats | None, reply: node_pb2.StatusReply | None, silent: bool, exit_: str | None
) -> tuple[str, str]:
    if worker is None:
        return (reply.state, "ok") if reply is not None else ("does not answer", "warn") if silent else ("", "ok")
    if not worker.up:
        return f"{'down' if worker.restarts >= 0 else 'not connected yet'}: {exit_ or worker.why}", "bad"
    if reply is not None and reply.state == "stopping":
        return "stopping", "warn"
    if silent:
        return "does not answer", "warn"
    return ("working", "ok") if worker.has else ("idle", "ok")


def _slower(worker: WorkerStats, workers: Sequence[WorkerStats]) -> float | None:
    """Return how many times as long its functions take as the others' median; None: unknown."""
    others = [other.seconds for other in workers if other is not worker and other.up and other.seconds]
    if not worker.up or not worker.seconds or not others:
        return None
    return worker.seconds / statistics.median(others)


def _servers(snapshot: JobSnapshot, stories: Mapping[str, list[Json]]) -> list[Json]:
    moved = {
        peer.task: rate.bytes_in + rate.bytes_out
        for peer in snapshot.servers
        if (rate := snapshot.rates.tasks.get(peer.task)) is not None
    }
    total = sum(moved.values())
    rows = []
    exits = snapshot.event_log.exits
    for peer, unreachable in snapshot.servers.items():
        reply = snapshot.replies.get(peer.task)
        rate = snapshot.rates.tasks.get(peer.task, TaskRates())
        share = moved.get(peer.task, 0.0) / total if total else 0.0
        if unreachable:
            exit_ = exits.get(peer.task)
            state, good = f"unreachable for {unreachable:.0f} s{f': {exit_}' if exit_ else ''}", "bad"
        elif snapshot.asked and reply is None:
            state, good = "does not answer", "warn"
        else:
            state = "serving" if reply is None else reply.state
            good = "ok" if state == "serving" else "warn"
        rows.append(
            {
                **_common(snapshot, peer, stories),
                "state": state,
                "good": good,
                "detail": "" if reply is None else reply.detail,
                "requests": round(rate.requests, 1),
                "bytes_in": round(rate.bytes_in),
                "bytes_out": round(rate.bytes_out),
                "share": round(share, 3),
                "hot": len(snapshot.servers) > 1 and share * len(snapshot.servers) >= HOT_SERVER,
                "shards": 0 if reply is None else reply.variables,
                "held": 0 if reply is None else reply.variable_bytes,
                "lost": {} if reply is None else dict(reply.lost_updates),
                "unsaved": "" if reply is None else reply.unsaved,
            }
        )
    return rows


def _variables(variables: Sequence[VariableRates]) -> list[Json]:
    total = sum(variable.moved for variable in variables)
    rows = []
    for variable in variables[:MAX_VARIABLES]:
        share = variable.moved / total if total else 0.0
        rows.append(
            {
                "name": variable.name,
                "held": variable.nbytes,
                "reads": round(variable.reads, 1),
                "read_bytes": round(variable.read_bytes),
                "updates": round(variable.updates, 1),
                "update_bytes": round(variable.update_bytes),
                "share": round(share, 3),
                "hot": len(variables) > 1 and share > HOT_SHARE,
                "servers": [
                    [f"ps {server}", round(moved / variable.moved, 3) if variable.moved else 0.0]
                    for server, moved in sorted(variable.servers.items())
                ],
            }
        )
    return rows


def _tables(variables: Sequence[VariableRates]) -> list[Json]:
    """Return the embedding tables, the busiest first."""
    tables = [(variable, variable.table) for variable in variables if variable.table is not None]
    return [
        {
            "name": variable.name,
            "rows": table.rows,
            "capacity": table.capacity or None,
            "held": variable.nbytes,
            "read": round(table.read, 1),
            "hit_rate": None if table.hit_rate is None else round(table.hit_rate, 3),
            "made": round(table.made, 1),
            "evicted": round(table.evicted, 1),
            "not_admitted": round(table.not_admitted, 1),
        }
        for variable, table in tables[:MAX_VARIABLES]
    ]
