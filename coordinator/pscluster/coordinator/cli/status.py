"""Asking roles how they do: `pscluster status` and `pscluster top`."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, TracebackType
from typing import Any, Self

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pscluster.coordinator.cli.health import ASK_SECONDS
from pscluster.coordinator.cli.tables import rendered
from pscluster.coordinator.observability.rates import BUSIEST, RateMeter, Rates, TaskRates, VariableRates
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.errors import RETRYABLE, from_rpc
from pscluster.core.sanitize import shown, shown_json
from pscluster.core.security.tls import Tls
from pscluster.core.transport.channels import NODE_SERVICE, PeerAddress, explain, open_peer_channel
from pscluster.core.transport.methods import Stub
from pscluster.v1 import node_pb2

_AT_ONCE = 32
_WIDTH = 140  # of tables that go into a pipe

Answer = node_pb2.StatusReply | str
"""A task's own account of itself, or why there is none."""


def peers_of(cluster: ClusterSpec, tls: Tls | None = None, token: str | None = None) -> list[PeerAddress]:
    """All tasks, the coordinator first."""
    return [
        PeerAddress(job, index, cluster.task_address(job, index), tls, token)
        for job in ("chief", "ps", "worker", "evaluator")
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    ]


class Asker:
    """Asks tasks for their accounts, all at once, on connections that stay open; a context manager."""

    def __init__(self, peers: Sequence[PeerAddress]) -> None:
        self.peers = list(peers)
        self._channels = [open_peer_channel(peer) for peer in self.peers]
        self._stubs = [Stub(channel, NODE_SERVICE) for channel in self._channels]

    def ask(self, busiest: int = 0, timeout: float = ASK_SECONDS) -> list[Answer]:
        """What each says, in their order. Takes `timeout` seconds at most."""
        request = node_pb2.StatusRequest(busiest=busiest)
        answers = functools.partial(self._answer, request, timeout)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(answers, self.peers, self._stubs))

    @staticmethod
    def _answer(request: node_pb2.StatusRequest, timeout: float, peer: PeerAddress, stub: Stub) -> Answer:
        try:
            reply: node_pb2.StatusReply = stub.status(request, timeout=timeout)
        except grpc.RpcError as error:
            return "it does not answer" if error.code() in RETRYABLE else str(from_rpc(error, str(peer)))
        theirs = reply.identity
        if (theirs.role, theirs.index) != (peer.role, peer.index):
            return f"{theirs.name} answers there: compare TF_CONFIG"
        return reply

    def explained(self, answers: Sequence[Answer]) -> list[Answer]:
        """The same, and of those that do not answer what a plain connection can tell."""

        def why(peer: PeerAddress, answer: Answer) -> Answer:
            return explain(peer.address, peer.tls) if answer == "it does not answer" else answer

        with ThreadPoolExecutor(_AT_ONCE) as pool:  # those that don't answer take seconds each
            return list(pool.map(why, self.peers, answers))

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ask(peer: PeerAddress) -> Answer:
    """One task's own account of itself, or why there is none."""
    with Asker([peer]) as asker:
        return asker.explained(asker.ask())[0]


def all_up(peers: Sequence[PeerAddress], answers: Sequence[Answer]) -> bool:
    """Have all answered? Nobody waits for an evaluator."""
    return all(
        not isinstance(answer, str) or peer.role == "evaluator" for peer, answer in zip(peers, answers, strict=True)
    )


def status_table(peers: Sequence[PeerAddress], answers: Sequence[Answer]) -> Table:
    """Every task's state."""
    table = Table("task", "address", "state", "up", "what it has")
    for peer, answer in zip(peers, answers, strict=True):
        if isinstance(answer, str):
            table.add_row(peer.task, peer.address, Text("not up", "bold red"), "", Text(shown(answer)))
        else:
            state = Text(shown(answer.state), "green" if answer.state in ("serving", "coordinating") else "yellow")
            up = f"{answer.uptime_seconds:.0f} s"
            table.add_row(peer.task, peer.address, state, up, Text(shown(_detail(answer))))
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


def as_json(peers: Sequence[PeerAddress], answers: Sequence[Answer]) -> str:
    """One object, on one line: `all_up`, and in `tasks` one for every task, in the order of the table."""
    tasks = [_task(peer, answer) for peer, answer in zip(peers, answers, strict=True)]
    return shown_json({"all_up": all_up(peers, answers), "tasks": tasks})


def _task(peer: PeerAddress, answer: Answer) -> dict[str, Any]:
    task: dict[str, Any] = {"task": peer.role, "index": peer.index, "address": peer.address}
    if isinstance(answer, str):
        return {**task, "up": False, "why": answer}
    task |= {"up": True, "state": answer.state, "uptime_seconds": round(answer.uptime_seconds, 3)}
    task |= {"name": answer.identity.name, "version": answer.identity.version}
    task |= {"incarnation": f"{answer.identity.incarnation:016x}", "coordinator": answer.coordinator}
    task |= {"memory_bytes": answer.memory_bytes, "metrics_address": answer.metrics_address, "detail": answer.detail}
    if peer.role == "ps":
        task |= {"shards": answer.variables, "shard_bytes": answer.variable_bytes, "requests": answer.requests}
        task |= {"bytes_in": answer.bytes_in, "bytes_out": answer.bytes_out, "lost_updates": dict(answer.lost_updates)}
    else:
        task |= {"functions_done": answer.functions_done, "functions_running": answer.functions_running}
    if peer.role == "worker":
        task |= {"function_seconds": answer.function_seconds, "waited_seconds": answer.waited_seconds}
    elif peer.role != "ps":
        task["functions_waiting"] = answer.functions_waiting
    return task


def show_status(
    peers: Sequence[PeerAddress],
    *,
    as_text: bool = True,
    every: float | None = None,
    rounds: int = 0,
) -> int:
    """Print how all tasks do; the exit code: 0 if all answer, or if somebody has looked on until Ctrl-C.

    One look that is broken off has no exit code: KeyboardInterrupt.

    Args:
        as_text: a table; otherwise JSON, a line each time.
        every: seconds between two looks; None: once.
        rounds: so many looks; 0: until Ctrl-C.
    """
    up = False
    with (
        contextlib.nullcontext() if every is None else contextlib.suppress(KeyboardInterrupt),
        Asker(peers) as asker,
        _screen(live=as_text and every is not None) as show,
    ):
        for _ in _rounds(every, 1 if every is None else rounds):
            answers = asker.explained(asker.ask())
            up = all_up(asker.peers, answers)
            if as_text:
                show(status_table(asker.peers, answers))
            else:
                print(as_json(asker.peers, answers), flush=True)
    return 0 if up or every is not None else 1


def show_top(peers: Sequence[PeerAddress], *, every: float, rounds: int = 0, rows: int = 10) -> int:
    """Print who does most, a second: servers, variables, workers. The first look only counts; the exit code.

    Args:
        every: seconds between two looks.
        rounds: so many pictures; 0: until Ctrl-C.
        rows: of each table, at most.
    """
    meter = RateMeter()
    with contextlib.suppress(KeyboardInterrupt), Asker(peers) as asker, _screen(live=True) as show:
        for number in _rounds(every, rounds and rounds + 1):
            answers = asker.ask(BUSIEST)
            replies = {
                peer.task: answer
                for peer, answer in zip(asker.peers, answers, strict=True)
                if not isinstance(answer, str)
            }
            rates = meter.add(time.monotonic(), replies)
            if number:
                silent = [
                    peer.task for peer, answer in zip(asker.peers, answers, strict=True) if isinstance(answer, str)
                ]
                show(top_tables(replies, rates, silent, rows))
    return 0


def _rounds(every: float | None, count: int) -> Iterator[int]:
    """Numbers, so long apart, until Ctrl-C."""
    number = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            yield number
            number += 1
            if number == count:
                return
            time.sleep(every or 0)


@contextlib.contextmanager
def _screen(live: bool) -> Iterator[Callable[[RenderableType], None]]:
    """Shows one picture in the place of the last in a terminal, behind it elsewhere."""
    if not live or not sys.stdout.isatty():

        def add(picture: RenderableType) -> None:
            print(_plain(picture), flush=True)

        yield add
        return
    with _orderly(), Live(console=Console(), auto_refresh=False) as screen:
        yield lambda picture: screen.update(picture, refresh=True)


class _Terminated(BaseException):
    """SIGTERM, on its way out."""


@contextlib.contextmanager
def _orderly() -> Iterator[None]:
    """SIGTERM ends the process as it always does, but what is inside first puts the terminal right: the cursor."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not ours:
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _plain(picture: RenderableType) -> str:
    parts = picture.renderables if isinstance(picture, Group) else [picture]
    return "\n".join(rendered(part, _WIDTH) for part in parts)


def size(nbytes: float) -> str:
    """Bytes in words, such as "1.5 MiB"."""
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
    replies: Mapping[str, node_pb2.StatusReply], rates: Rates, silent: Sequence[str], rows: int
) -> RenderableType:
    """The busiest servers, variables and workers."""
    servers = _numbers("servers", "task", "requests/s", "in/s", "out/s", "shards", "held", "memory")
    workers = _numbers("workers", "task", "functions/s", "in functions", "for data", "done", "memory")
    parts: list[RenderableType] = [servers, _variables(rates.variables[:rows]), workers]

    def of(role: str, key: Callable[[TaskRates], float]) -> list[tuple[str, node_pb2.StatusReply, TaskRates]]:
        mine = [
            (task, reply, rates.tasks.get(task, TaskRates()))
            for task, reply in replies.items()
            if reply.identity.role == role
        ]
        return sorted(mine, key=lambda each: -key(each[2]))[:rows]

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
    if silent:
        parts.append(Text(f"not up: {', '.join(silent)}", "bold red"))
    return Group(*parts)


def _variables(variables: Sequence[VariableRates]) -> Table:
    table = _numbers("variables", "name", "reads/s", "read/s", "updates/s", "written/s", "held", "on")
    for each in variables:
        on = ", ".join(f"ps {server}" for server in sorted(each.servers))
        table.add_row(
            Text(shown(each.name)),
            f"{each.reads:,.0f}",
            size(each.read_bytes),
            f"{each.updates:,.0f}",
            size(each.update_bytes),
            size(each.nbytes),
            on,
        )
    return table
