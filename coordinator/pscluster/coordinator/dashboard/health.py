"""Whether a job is healthy, and what is wrong with it, in sentences for the live page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pscluster.coordinator.dashboard.snapshot import JobSnapshot
from pscluster.coordinator.moves.plan import make_plan, measured

BUSY_BYTES = 256 << 10  # a hot server is a problem once all servers together move this many bytes per second
QUIET_SECONDS = 30.0  # a worker that has a function and has returned nothing for this long is a problem
MUCH_WAITED = 0.5  # a worker that waits for data for this share of its time or more is a problem
MAX_ERROR_TEXT = 500  # characters of an error that the verdict shows; the list of errors has all of it

Json = dict[str, Any]


def _overloaded(snapshot: JobSnapshot, servers: Sequence[Json]) -> list[str]:
    """Describe the servers that slow the job down, with the variable that causes most of their load, and remedies."""
    if sum(row["bytes_in"] + row["bytes_out"] for row in servers) < BUSY_BYTES:
        return []
    problems = []
    for row, peer in zip(servers, snapshot.servers, strict=True):
        if not row["hot"]:
            continue
        index = peer.index
        text = f"{row['task']} carries {row['share']:.0%} of the load of {len(servers)} servers"
        most = max(snapshot.rates.variables, key=lambda variable: variable.servers.get(index, 0.0), default=None)
        if most is not None and (here := most.servers.get(index, 0.0)) > 0:
            text += f", most of it for {most.name}, {here / most.moved:.0%} of whose traffic goes there"
        problems.append(text)
    return [*problems, *_remedies(snapshot)] if problems else []


def _remedies(snapshot: JobSnapshot) -> list[str]:
    """Return what would balance the servers, by what was lately read and updated."""
    replies = [snapshot.replies[peer.task] for peer in snapshot.servers if peer.task in snapshot.replies]
    if len(replies) < len(snapshot.servers):
        return []
    plan = make_plan(*measured(replies, "load"), len(replies), "load")
    remedies = [f"proposed: {cut}" for cut in plan.cuts]
    if plan.moves:
        moves = "one shard" if len(plan.moves) == 1 else f"{len(plan.moves)} shards"
        remedies.insert(
            0,
            f"proposed: strategy.apply(strategy.plan()) moves {moves}, after which no server has more than "
            f"{plan.peak:.2f} times the mean load",
        )
    return remedies


def problems_of(snapshot: JobSnapshot, workers: Sequence[Json], servers: Sequence[Json]) -> list[str]:
    """Return what is wrong, in sentences, from the page's rows."""
    problems = [
        f"{row['task']} is {row['state']}: reads and updates there wait" for row in servers if row["good"] == "bad"
    ]
    for row in workers:
        if row["good"] == "bad":
            more = "; its functions run again elsewhere" if row["state"].startswith("down") else ""
            problems.append(f"{row['task']} is {row['state']}{more}")
    problems += [f"{row['task']} {row['state']}" for row in servers if row["state"] == "does not answer"]
    problems += [
        f"{row['task']} {row['state']}: if that continues, its functions run again elsewhere"
        for row in workers
        if row["state"] == "does not answer"
    ]
    problems += [
        f"{row['task']} is {row['state']}"
        for row in servers
        if row["good"] == "warn" and row["state"] != "does not answer"
    ]
    problems += [
        f"{text[:MAX_ERROR_TEXT]}; until one is, a job that dies resumes from an older one, if any"
        for text in snapshot.event_log.unsaved.values()
    ]
    problems += [
        f"{row['task']} can't save its state: {row['unsaved'][:MAX_ERROR_TEXT]}; under durability snapshot all updates "
        "since then are lost if it dies, under log updates wait: make room, or mend the disk"
        for row in servers
        if row["unsaved"]
    ]
    for row in workers:
        if row["has"] and row["quiet"] >= QUIET_SECONDS and row["good"] == "ok":
            problems.append(f"{row['task']}: nothing has come back from {row['runs']} for {row['quiet']:.0f} s")
        if row["straggler"]:
            problems.append(
                f"{row['task']} is a straggler: its functions take {row['slower']:g} times as long as the others'"
            )
    if waiting := [row for row in workers if row["waited"] >= MUCH_WAITED]:
        names = ", ".join(row["task"] for row in waiting)
        share = max(row["waited"] for row in waiting)
        problems.append(f"{names}: up to {share:.0%} of the time is spent waiting for data; make reading faster")
    problems += _overloaded(snapshot, servers)
    for row in servers:
        if row["lost"]:
            count = sum(row["lost"].values())
            problems.append(
                f"{row['task']} lost at least {count:,} acknowledged updates when it died; "
                "with PSCLUSTER_DURABILITY=log a server loses none"
            )
    return problems


def health_of(snapshot: JobSnapshot, problems: list[str]) -> tuple[str, str, list[str]]:
    """Return the verdict: a word for the page's colour, a sentence, and the problems."""
    queue = snapshot.queue
    if snapshot.ended:
        last = [f"its last error: {error.text[:MAX_ERROR_TEXT]}" for error in snapshot.event_log.errors[-1:]]
        return "over", "The job is over", last
    if not snapshot.connected:
        return "warn", "Waiting for the cluster's tasks", problems
    if queue is None:
        return "idle", "Connected; no ClusterCoordinator yet", problems
    if queue.error:
        return "bad", "A function failed; the others were cancelled", [queue.error, *problems]
    if problems:
        stuck = not any(worker.up for worker in queue.workers) or any(snapshot.servers.values())
        return "bad" if stuck else "warn", "Needs attention", problems
    if queue.paused:
        return "ok", "Making a checkpoint; functions are paused until it is done", []
    if not queue.in_flight and not queue.waiting:
        return "idle", "Healthy; nothing is scheduled", []
    return "ok", "Healthy, at work", []
