"""What the fault tests share: a running job, and ways to wait for its outcome."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import ClusterCoordinator, LocalCluster, ParameterServerStrategy, RemoteValue, Variable
from pscluster.coordinator.variables.partitioners import FixedShardsPartitioner
from pscluster.core.errors import MisuseError, from_kind, from_rpc
from pscluster.core.ids import fresh_id
from pscluster.core.transport.channels import NODE_SERVICE, open_channel
from pscluster.core.transport.frames import pack, padding, unpack
from pscluster.core.transport.methods import Stub
from pscluster.ps.spec import SERVICE as PS_SERVICE
from pscluster.v1 import node_pb2, ps_pb2

__all__ = [
    "Job",
    "RawClient",
    "connections_to",
    "gone",
    "kill_when_up",
    "ones",
    "ready",
    "running_job",
    "status",
    "stopped",
]


def _state(pid: int) -> str:
    """The kernel's letter for a process's state; a zombie's if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    return _state(pid) == "Z"


def stopped(pid: int) -> bool:
    """Whether the process is stopped: a signal to continue would be lost if it came earlier."""
    return _state(pid) == "T"


def connections_to(port: int) -> int:
    """How many established TCP connections this process has to a port of this machine."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01" and int(fields[2].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    ours = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed in the meantime
            ours.add(os.readlink(descriptor))
    return len(inodes & ours)


def ready(values: Sequence[RemoteValue]) -> int:
    """The number of values that are ready."""
    return sum(value.status.value == "ready" for value in values)


def status(cluster: LocalCluster, role: str, index: int) -> node_pb2.StatusReply:
    """A task's answer to Status."""
    with open_channel(cluster.cluster_spec().task_address(role, index), cluster.tls, cluster.token) as channel:
        reply: node_pb2.StatusReply = Stub(channel, NODE_SERVICE).status(
            node_pb2.StatusRequest(), timeout=TIMEOUT, wait_for_ready=True
        )
    return reply


def kill_when_up(cluster: LocalCluster, role: str, index: int) -> None:
    """Kill a task once it has a process: it may have just died, by itself or by the test's hand."""

    def was_killed() -> bool:
        try:
            cluster.kill(role, index)
        except MisuseError:
            return False
        return True

    until(was_killed, f"{role} {index} runs, and is killed")


@dataclass(frozen=True)
class Job:
    """A cluster with a strategy and a coordinator in this process."""

    cluster: LocalCluster
    strategy: ParameterServerStrategy
    coordinator: ClusterCoordinator
    folder: str  # for the marks that functions leave

    def kill(self, worker: int) -> int:
        """Kill a worker with SIGKILL, and return the pid that it had."""
        return self.cluster.kill("worker", worker)

    def until_up(self, count: int) -> None:
        """Wait until exactly this many workers accept functions."""
        until(lambda: self.coordinator.workers_up == count, f"{count} workers are up", self.coordinator.describe)

    def until_done(self, values: Sequence[RemoteValue], count: int) -> None:
        """Wait until this many of the values are ready; raises the error of a function that failed."""
        until(
            lambda: ready(values) >= count or (self.coordinator.done() and ready(values) >= count),
            f"{count} functions are done",
            self.coordinator.describe,
        )

    def join(self) -> None:
        """Wait for everything scheduled; a hang is reported with its cause."""
        self.coordinator.join(timeout=TIMEOUT)


@contextmanager
def quiet(name: str, level: int) -> Iterator[None]:
    """Silence this logger and those below it, up to a level, within the block."""
    mine = logging.getLogger(name)
    before = mine.level
    mine.setLevel(level)
    try:
        yield
    finally:
        mine.setLevel(before)


@contextmanager
def running_job(
    num_ps: int = 1,
    num_workers: int = 1,
    *,
    shards: int = 1,
    max_attempts: int = 10,
    worker_lease: float = 30.0,
    connect_to: Callable[[LocalCluster], Any] = lambda cluster: cluster,
    command: str | None = None,
    **options: Any,
) -> Iterator[Job]:
    """A cluster and a coordinator in this process; afterwards no process is left.

    Args:
        num_ps: parameter servers.
        num_workers: workers.
        shards: into how many shards variables are cut.
        max_attempts: of a function.
        worker_lease: see ClusterCoordinator.
        connect_to: the resolver through which the coordinator finds the cluster.
        command: source of a program that stands for the roles' own.
        options: of LocalCluster.
    """
    if command is not None:
        options["_command"] = [sys.executable, "-c", command]
    options.setdefault("log_level", "ERROR")
    with (
        quiet("pscluster.coordinator", logging.WARNING),  # these deaths are deliberate
        quiet("pscluster.local_cluster", logging.ERROR),
        tempfile.TemporaryDirectory(prefix="pscluster-faults-") as folder,
        LocalCluster(num_ps, num_workers, **options) as cluster,
    ):
        pids = list(cluster.pids.values())
        strategy = ParameterServerStrategy(
            connect_to(cluster),
            FixedShardsPartitioner(shards),
            token=cluster.token,
            connect_timeout=TIMEOUT,
            job_name="job",
        )
        try:
            coordinator = ClusterCoordinator(strategy, max_attempts=max_attempts, worker_lease=worker_lease)
            yield Job(cluster, strategy, coordinator, folder)
        finally:
            strategy.close()
            pids += cluster.pids.values()
    assert all(map(gone, pids)), "a process was left behind"


class RawClient:
    """Talks to one parameter server as any program with the token could: nothing is checked or repeated."""

    def __init__(self, job: Job, index: int = 0, incarnation: int = 0) -> None:
        self.job = job.strategy.job
        self.index = index
        self.incarnation = incarnation or fresh_id()
        self._channel = open_channel(
            job.cluster.cluster_spec().task_address("ps", index), job.cluster.tls, job.cluster.token
        )
        self._stub = Stub(self._channel, PS_SERVICE)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=TIMEOUT)
        except grpc.RpcError as error:
            raise from_rpc(error, "the server") from None

    def spec(self, variable: Variable) -> ps_pb2.VariableSpec:
        """The server's description of a variable."""
        spec: ps_pb2.VariableSpec = self._call(
            "describe", ps_pb2.DescribeRequest(job=self.job, variables=[variable.name])
        ).variables[0]
        return spec

    def add(
        self, variable: Variable, amount: float, *, function: int = 0, sequence: int = 0, nth: int = 1, settled: int = 0
    ) -> tuple[ps_pb2.Request, bytes]:
        """A request that adds to every element of the shards on this server, and its payload."""
        spec = self.spec(variable)
        request = ps_pb2.Request(last=True)
        update = request.update
        update.job, update.incarnation = self.job, self.incarnation
        update.function, update.sequence, update.settled = function, sequence, settled
        payload = b""
        for shard, owner in enumerate(spec.owners):
            if owner == self.index:
                values = np.full(variable.partition.block(shard).shape, amount, spec.dtype).tobytes()
                rows = ps_pb2.Rows(all=True)
                update.items.add(
                    variable=spec.id, shard=shard, kind=ps_pb2.ADD, nth=nth, rows=rows, value_bytes=len(values)
                )
                payload += values + bytes(padding(len(values)))
        request.total_bytes = len(payload)
        return request, payload

    def session(self, request: ps_pb2.Request, payload: bytes) -> ps_pb2.UpdateReply:
        """Send it on a session. Raises the refusal."""
        (data,) = self._call("session", iter([pack(request, [payload])]))
        reply, _ = unpack(data, ps_pb2.Reply)
        if reply.HasField("refusal"):
            raise from_kind(reply.refusal.kind, reply.refusal.message)
        return reply.update

    def push(self, request: ps_pb2.Request, payload: bytes, frames: int = 3) -> ps_pb2.UpdateReply:
        """Send it as a Push in this many frames. Raises the refusal."""
        return self.send_frames(self.frames(request, payload, frames)).update

    def send_frames(self, frames: Iterator[bytes]) -> ps_pb2.Reply:
        """Send a Push of these messages."""
        return unpack(self._call("push", frames), ps_pb2.Reply)[0]

    @staticmethod
    def frames(request: ps_pb2.Request, payload: bytes, frames: int) -> Iterator[bytes]:
        """The messages of a Push."""
        head = ps_pb2.Request()
        head.CopyFrom(request)
        size = -(-len(payload) // frames)
        for index in range(frames):
            head.last = index == frames - 1
            yield pack(head, [payload[index * size : (index + 1) * size]])
            head = ps_pb2.Request()

    def close_incarnation(self, incarnation: int) -> None:
        """Close an incarnation, as the coordinator does when it gives up a worker."""
        self._call("close_incarnation", ps_pb2.CloseIncarnationRequest(job=self.job, incarnation=incarnation))

    def finish(self, start: int, stop: int) -> None:
        """Report that functions have ended, as the coordinator does."""
        self._call("finish_functions", ps_pb2.FinishFunctionsRequest(job=self.job, starts=[start], stops=[stop]))


def ones(variable: Variable) -> npt.NDArray[Any]:
    """A 1 for every element."""
    return np.ones(variable.shape, variable.dtype)
