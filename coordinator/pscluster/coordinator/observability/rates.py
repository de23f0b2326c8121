"""What tasks do a second: from two of their accounts, one after the other. Pure.

Counters begin anew with each process, so accounts of two incarnations are not compared: a task that was restarted has
no rates until it was asked twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pscluster.v1 import node_pb2

BUSIEST = 64
"""Of so many variables a server is asked to tell."""


@dataclass(frozen=True, slots=True)
class TaskRates:
    """Of a task, a second; `busy` and `waited` are shares of its time."""

    requests: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    functions: float = 0.0
    busy: float = 0.0
    waited: float = 0.0


@dataclass(slots=True)
class VariableRates:
    """Of a variable on all servers together, a second."""

    name: str
    nbytes: int = 0
    reads: float = 0.0
    read_bytes: float = 0.0
    updates: float = 0.0
    update_bytes: float = 0.0
    servers: dict[int, float] = field(default_factory=dict)  # bytes moved a second, by server

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.update_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """Of all tasks that were asked twice; and of variables, the busiest first."""

    tasks: Mapping[str, TaskRates]
    variables: list[VariableRates]


class RateMeter:
    """Takes accounts as they come and compares each with the one before it."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, node_pb2.StatusReply]] = {}

    def add(self, now: float, replies: Mapping[str, node_pb2.StatusReply]) -> Rates:
        """The rates since the last time, by task."""
        tasks: dict[str, TaskRates] = {}
        variables: dict[str, VariableRates] = {}
        for task, reply in replies.items():
            then, before = self._before.get(task, (now, reply))
            seconds = now - then
            same = before.identity.incarnation == reply.identity.incarnation
            for load in reply.busiest:
                known = variables.setdefault(load.name, VariableRates(load.name))
                known.nbytes += load.bytes
            if seconds <= 0 or not same:
                continue
            tasks[task] = TaskRates(
                requests=max(reply.requests - before.requests, 0) / seconds,
                bytes_in=max(reply.bytes_in - before.bytes_in, 0) / seconds,
                bytes_out=max(reply.bytes_out - before.bytes_out, 0) / seconds,
                functions=max(reply.functions_done - before.functions_done, 0) / seconds,
                # A function counts when it ends: a long one may bring more than the time since the last account.
                busy=min(max(reply.function_seconds - before.function_seconds, 0) / seconds, 1.0),
                waited=min(max(reply.waited_seconds - before.waited_seconds, 0) / seconds, 1.0),
            )
            _compare(before, reply, seconds, variables)
        self._before = {task: (now, reply) for task, reply in replies.items()}
        return Rates(tasks, sorted(variables.values(), key=lambda each: (-each.moved, -each.nbytes, each.name)))


def _compare(
    before: node_pb2.StatusReply, reply: node_pb2.StatusReply, seconds: float, variables: Mapping[str, VariableRates]
) -> None:
    """Add what a server did with its variables. One that it did not tell of before was not among the busiest then."""
    known = {load.name: load for load in before.busiest}
    for load in reply.busiest:
        old, rates = known.get(load.name), variables[load.name]
        if old is None or old.reads > load.reads or old.updates > load.updates:  # made anew under its name
            continue
        read, written = load.read_bytes - old.read_bytes, load.update_bytes - old.update_bytes
        rates.reads += (load.reads - old.reads) / seconds
        rates.updates += (load.updates - old.updates) / seconds
        rates.read_bytes += read / seconds
        rates.update_bytes += written / seconds
        rates.servers[reply.identity.index] = rates.servers.get(reply.identity.index, 0.0) + (read + written) / seconds
