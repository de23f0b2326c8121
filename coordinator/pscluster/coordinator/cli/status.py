"""`pscluster status` and `pscluster top`: query the roles of a cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pscluster.coordinator.cli.tables import rendered
from pscluster.coordinator.observability.rates import BUSIEST, RateMeter, Rates, TableRates, TaskRates, VariableRates
from pscluster.coordinator.observability.status_client import Answer, Answers, StatusClient, replies_by_task
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.display.sanitize import shown, shown_json
from pscluster.core.security.tls import Tls
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2

_WIDTH = 140  # of tables that go into a pipe


def peers_of(cluster: ClusterSpec, tls: Tls | None = None, token: str | None = None) -> list[PeerAddress]:
    """Return all tasks, the coordinator first."""
    return [
        PeerAddress(job, index, cluster.task_address(job, index), tls, token)
        for job in ("chief", "ps", "worker", "evaluator")
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    ]


def all_up(answers: Answers) -> bool:
    """Return whether all have answered, except for evaluators, which a job does not need."""
    return all(not isinstance(answer, str) or peer.role == "evaluator" for peer, answer in answers.items())


def status_table(answers: Answers) -> Table:
    table = Table("task", "address", "state", "up", "details")
    for peer, answer in answers.items():
        address = Text(shown(peer.address))
        if isinstance(answer, str):
            table.add_row(peer.task, address, Text("not up", "bold red"), "", Text(shown(answer)))
        else:
            state = Text(shown(answer.state), "green" if answer.state in ("serving", "coordinating") else "yellow")
            up = f"{answer.uptime_seconds:.0f} s"
            table.add_row(peer.task, address, state, up, Text(shown(_detail(answer))))
    return table


def _detail(reply: node_pb2.StatusReply) -> str:
    parts = []
    if reply.identity.role == "ps":
        parts.append(f"{reply.variables} shards, {reply.variable_bytes:,} bytes")
    if reply.identity.role == "worker":
        parts.append(f"{reply.functions_done} functions done, {reply.functions_running} running")
    if reply.detail:
        parts.append(reply.detail)
    parts.append(f"{reply.identity.name}, version {reply.identity.version}")
    return "; ".join(parts)


def as_json(answers: Answers) -> str:
    """Return an object, on one line: `all_up`, and in `tasks` one object per task, in the order of the table."""
    tasks = [_task(peer, answer) for peer, answer in answers.items()]
    return shown_json({"all_up": all_up(answers), "tasks": tasks})


def _task(peer: PeerAddress, answer: Answer) -> dict[str, Any]:
    task: dict[str, Any] = {"task": peer.role, "index": peer.index, "address": peer.address}
    if isinstance(answer, str):
        return {**task, "up": False, "why": answer}
    task |= {"up": True, "state": answer.state, "uptime_seconds": round(answer.uptime_seconds, 3)}
    task |= {"name": answer.identity.name, "version": answer.identity.version}
    task |= {"boot_id": f"{answer.identity.boot_id:016x}", "coordinator": answer.coordinator}
    task |= {"memory_bytes": answer.memory_bytes, "metrics_address": answer.metrics_address, "detail": answer.detail}
    if peer.role == "ps":
        task |= {"shards": answer.variables, "shard_bytes": answer.variable_bytes, "requests": answer.requests}
        task |= {"bytes_in": answer.bytes_in, "bytes_out": answer.bytes_out, "lost_updates": dict(answer.lost_updates)}
        task["unsaved"] = answer.unsaved
    else:
        task |= {"functions_done": answer.functions_done, "functions_running": answer.functions_running}
    if peer.role == "worker":
        task |= {"function_seconds": answer.function_seconds, "waited_seconds": answer.waited_seconds}
    elif peer.role != "ps":
        task["functions_waiting"] = answer.functions_waiting
    return task


def show_status(peers: Sequence[PeerAddress], *, as_text: bool = True, every: float | None = None) -> int:
    """Print the state of all tasks, and return the exit code: 0 if all answered, or after Ctrl-C with `every`.

    `every`: seconds between rounds; None: a single round, in which Ctrl-C raises KeyboardInterrupt.
    """
    up = False
    with (
        contextlib.nullcontext() if every is None else contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(StatusClient(peers)) as client,
        _screen(live=as_text and every is not None) as show,
    ):
        for _ in (0,) if every is None else _rounds(every):
            answers = with_joined(client, peers, explained=True)
            up = all_up(answers)
            if as_text:
                show(status_table(answers))
            else:
                print(as_json(answers), flush=True)
    return 0 if up or every is not None else 1


def show_top(peers: Sequence[PeerAddress], *, every: float, rounds: int = 0, rows: int = 10) -> int:
    """Print the busiest servers, variables and workers; return the exit code.

    `rounds`: updates to show, after a first one that only measures; 0: until Ctrl-C. `rows`: the most in a table.
    """
    meter = RateMeter()
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(StatusClient(peers)) as client,
        _screen(live=True) as show,
    ):
        for round_number in _rounds(every, rounds and rounds + 1):
            answers = with_joined(client, peers, BUSIEST)
            replies = replies_by_task(answers)
            rates = meter.add(time.monotonic(), replies)
            if round_number:
                silent = {peer.task: answer for peer, answer in answers.items() if isinstance(answer, str)}
                show(top_tables(replies, rates, silent, rows))
    return 0


def with_joined(
    client: StatusClient,
    peers: Sequence[PeerAddress],
    busiest: int = 0,
    *,
    explained: bool = False,
    shards: bool = False,
) -> Answers:
    """Return the answers of these tasks, and of those that have joined or moved, from where the coordinator says.

    Without those servers that were removed from the job, and do not answer.
    """
    answers = client.ask(busiest, explained=explained, shards=shards)
    coordinator = next((peer for peer, answer in answers.items() if peer.role == "chief"), None)
    answer = answers.get(coordinator) if coordinator is not None else None
    if coordinator is None or answer is None or isinstance(answer, str):
        return answers
    named = {(peer.role, peer.index): peer for peer in peers}
    for role, places in (("worker", answer.workers), ("ps", answer.moved_servers)):
        for place in places:
            at, tls = (role, place.index), coordinator.tls
            named[at] = PeerAddress(*at, place.address, tls, coordinator.token, tls_name=place.tls_name)
    count = answer.num_servers
    gone = [at for at, peer in named.items() if at[0] == "ps" and at[1] >= count > 0 and _is_silent(answers.get(peer))]
    for at in gone:
        del named[at]
    if set(named.values()) == set(answers):
        return answers
    client.follow(named.values())
    return client.ask(busiest, explained=explained, shards=shards)


def _is_silent(answer: node_pb2.StatusReply | str | None) -> bool:
    return answer is None or isinstance(answer, str)


def _rounds(every: float, count: int = 0) -> Iterator[int]:
    """Yield the numbers below `count`, or without end for 0, with `every` seconds between two."""
    for round_number in range(count) if count else itertools.count():
        if round_number:
            time.sleep(every)
        yield round_number


@contextlib.contextmanager
def _screen(live: bool) -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows an update: in place of the previous one in a terminal, else after it."""
    if not live or not sys.stdout.isatty():
        yield lambda update: print(rendered(update, _WIDTH), flush=True)
        return
    with _cleaning_up_on_sigterm(), Live(console=Console(), auto_refresh=False) as screen:
        yield lambda update: screen.update(update, refresh=True)


class _Terminated(BaseException):
    """SIGTERM, as an exception."""


@contextlib.contextmanager
def _cleaning_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as usual, but only after the block has restored the terminal's cursor."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handle(_signal_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def size(nbytes: float) -> str:
    """Return a number of bytes as text, such as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _numbers(title: str, first: str, *names: str) -> Table:
    table = Table(first, title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    return table


def top_tables(
    replies: Mapping[str, node_pb2.StatusReply], rates: Rates, silent: Mapping[str, str], rows: int
) -> RenderableType:
    """Return the tables of an update, and the tasks that are not up, with the reason of each."""
    servers = _numbers("servers", "task", "requests/s", "in/s", "out/s", "shards", "held", "memory")
    workers = _numbers("workers", "task", "functions/s", "running", "waiting for data", "done", "memory")
    parts: list[RenderableType] = [servers, _variables(rates.variables[:rows])]
    if tables := [variable for variable in rates.variables if variable.table is not None][:rows]:
        parts.append(_tables(tables))
    parts.append(workers)

    def of(role: str, key: Callable[[TaskRates], float]) -> list[tuple[str, node_pb2.StatusReply, TaskRates]]:
        of_role = [
            (task, reply, rates.tasks.get(task, TaskRates()))
            for task, reply in replies.items()
            if reply.identity.role == role
        ]
        return sorted(of_role, key=lambda row: -key(row[2]))[:rows]

    for task, reply, rate in of("ps", lambda rate: rate.bytes_in + rate.bytes_out):
        servers.add_row(
            task,
            f"{rate.requests:,.0f}",
            size(rate.bytes_in),
            size(rate.bytes_out),
            f"{reply.variables:,}",
            size(reply.variable_bytes),
            size(reply.memory_bytes),
        )
    for task, reply, rate in of("worker", lambda rate: rate.functions):
        workers.add_row(
            task,
            f"{rate.functions:,.1f}",
            f"{rate.busy:.0%}",
            f"{rate.waited:.0%}",
            f"{reply.functions_done:,}",
            size(reply.memory_bytes),
        )
    for why in dict.fromkeys(silent.values()):
        tasks = ", ".join(task for task, reason in silent.items() if reason == why)
        parts.append(Text(f"not up: {tasks}: {shown(why)}", "bold red"))
    return Group(*parts)


def _variables(variables: Sequence[VariableRates]) -> Table:
    table = _numbers("variables", "name", "reads/s", "read/s", "updates/s", "written/s", "held", "on")
    for variable in variables:
        on = ", ".join(f"ps {server}" for server in sorted(variable.servers))
        table.add_row(
            Text(shown(variable.name)),
            f"{variable.reads:,.0f}",
            size(variable.read_bytes),
            f"{variable.updates:,.0f}",
            size(variable.update_bytes),
            size(variable.nbytes),
            on,
        )
    return table


def _tables(variables: Sequence[VariableRates]) -> Table:
    names = ("rows", "capacity", "held", "lookups/s", "hit rate", "admitted/s", "not admitted/s", "evicted/s")
    shown_table = _numbers("embedding tables", "name", *names)
    for variable in variables:
        table = variable.table or TableRates()
        shown_table.add_row(
            Text(shown(variable.name)),
            f"{table.rows:,}",
            f"{table.capacity:,}" if table.capacity else "not set",
            size(variable.nbytes),
            f"{table.read:,.0f}",
            "" if table.hit_rate is None else f"{table.hit_rate:.0%}",
            f"{table.made:,.0f}",
            f"{table.not_admitted:,.0f}",
            f"{table.evicted:,.0f}",
        )
    return shown_table
