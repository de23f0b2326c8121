"""The rates of tasks, from two successive status replies. Pure.

Counters restart with each process, so replies of two processes are not compared: a task that was restarted has no
rates until its second reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pscluster.v1 import node_pb2

BUSIEST = 64  # the number of variables that each server is asked to report


@dataclass(frozen=True, slots=True)
class TaskRates:
    """The rates of a task, per second; `busy` and `waited` are shares of its time."""

    requests: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    functions: float = 0.0
    busy: float = 0.0
    waited: float = 0.0
    replicas_waited: Mapping[int, float] = field(default_factory=dict)  # of a worker, likewise, by replica


@dataclass(slots=True)
class TableRates:
    """The rows of an embedding table on all servers together, and per second what became of them."""

    rows: int = 0
    capacity: int = 0  # 0: not limited
    read: float = 0.0
    found: float = 0.0  # of those read, the ones that there were
    made: float = 0.0
    evicted: float = 0.0
    not_admitted: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """The share of the rows read that there were; None: none were read."""
        return min(self.found / self.read, 1.0) if self.read else None


@dataclass(slots=True)
class VariableRates:
    """The rates of a variable on all servers together, per second."""

    name: str
    nbytes: int = 0
    reads: float = 0.0
    read_bytes: float = 0.0
    updates: float = 0.0
    update_bytes: float = 0.0
    servers: dict[int, float] = field(default_factory=dict)  # bytes moved per second, by server
    table: TableRates | None = None

    @property
    def moved(self) -> float:
        """Bytes read and written, per second."""
        return self.read_bytes + self.update_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of all tasks that have replied twice; and of variables, the busiest first."""

    tasks: Mapping[str, TaskRates]
    variables: list[VariableRates]


class RateMeter:
    """Compares each task's status reply with the one before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, node_pb2.StatusReply]] = {}

    def add(self, now: float, replies: Mapping[str, node_pb2.StatusReply]) -> Rates:
        """Return the rates since the last call."""
        tasks: dict[str, TaskRates] = {}
        variables: dict[str, VariableRates] = {}
        for task, reply in replies.items():
            then, before = self._before.get(task, (now, reply))
            seconds = now - then
            same = before.identity.boot_id == reply.identity.boot_id
            for load in reply.busiest:
                known = variables.setdefault(load.name, VariableRates(load.name))
                known.nbytes += load.bytes
                if load.HasField("table"):
                    known.table = known.table or TableRates()
                    known.table.rows += load.table.rows
                    known.table.capacity += load.table.capacity
            if seconds <= 0 or not same:
                continue
            tasks[task] = TaskRates(
                requests=max(reply.requests - before.requests, 0) / seconds,
                bytes_in=max(reply.bytes_in - before.bytes_in, 0) / seconds,
                bytes_out=max(reply.bytes_out - before.bytes_out, 0) / seconds,
                functions=max(reply.functions_done - before.functions_done, 0) / seconds,
                # A function counts when it ends: a long one may add more than the time since the last reply.
                busy=min(max(reply.function_seconds - before.function_seconds, 0) / seconds, 1.0),
                waited=min(max(reply.waited_seconds - before.waited_seconds, 0) / seconds, 1.0),
                replicas_waited=_waited(before, reply, seconds),
            )
            _compare(before, reply, seconds, variables)
        self._before = {task: (now, reply) for task, reply in replies.items()}
        return Rates(
            tasks, sorted(variables.values(), key=lambda variable: (-variable.moved, -variable.nbytes, variable.name))
        )


def _waited(before: node_pb2.StatusReply, reply: node_pb2.StatusReply, seconds: float) -> dict[int, float]:
    """Return the share of time for which each replica waited for others. The time counts when it ends, as above."""
    known = {replica.number: replica.wait_seconds for replica in before.replicas}
    return {
        replica.number: min(max(replica.wait_seconds - known.get(replica.number, 0.0), 0) / seconds, 1.0)
        for replica in reply.replicas
    }


def _compare(
    before: node_pb2.StatusReply, reply: node_pb2.StatusReply, seconds: float, variables: Mapping[str, VariableRates]
) -> None:
    """Add the rates of a server's variables, except for those that its last reply did not list among the busiest."""
    known = {load.name: load for load in before.busiest}
    for load in reply.busiest:
        old, rates = known.get(load.name), variables[load.name]
        if old is None or old.reads > load.reads or old.updates > load.updates:  # created again under its name
            continue
        read, written = load.read_bytes - old.read_bytes, load.update_bytes - old.update_bytes
        rates.reads += (load.reads - old.reads) / seconds
        rates.updates += (load.updates - old.updates) / seconds
        rates.read_bytes += read / seconds
        rates.update_bytes += written / seconds
        if rates.table is not None:
            _compare_tables(old.table, load.table, seconds, rates.table)
        if load.bytes:  # a server also reports variables of which it holds nothing
            moved = rates.servers.get(reply.identity.index, 0.0) + (read + written) / seconds
            rates.servers[reply.identity.index] = moved


def _compare_tables(before: node_pb2.TableLoad, now: node_pb2.TableLoad, seconds: float, rates: TableRates) -> None:
    rates.read += max(now.rows_read - before.rows_read, 0) / seconds
    rates.found += max(now.rows_found - before.rows_found, 0) / seconds
    rates.made += max(now.rows_made - before.rows_made, 0) / seconds
    rates.evicted += max(now.rows_evicted - before.rows_evicted, 0) / seconds
    rates.not_admitted += max(now.rows_not_admitted - before.rows_not_admitted, 0) / seconds
