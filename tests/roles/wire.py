"""A coordinator of the tests' own, which speaks the wire format without our clients' good behaviour."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from pscluster.coordinator.job.registration import SERVICE as COORDINATOR_SERVICE
from pscluster.core.ids import VERSION
from pscluster.core.security.channel import AuthenticatedChannel
from pscluster.core.security.handshake import Secret
from pscluster.core.security.tokens import user_token
from pscluster.core.transport.channels import NODE_SERVICE
from pscluster.core.transport.frames import CHUNK_BYTES, pack, unpack
from pscluster.core.transport.methods import Stub
from pscluster.ps.spec import SERVICE as PS_SERVICE
from pscluster.v1 import node_pb2, ps_pb2
from pscluster.worker.service import SERVICE as WORKER_SERVICE

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
SERVICES: dict[str, tuple[ServiceDescriptor, ...]] = {
    "ps": (NODE_SERVICE, PS_SERVICE, HEALTH_SERVICE),
    "worker": (NODE_SERVICE, WORKER_SERVICE, HEALTH_SERVICE),
    "chief": (NODE_SERVICE, COORDINATOR_SERVICE, HEALTH_SERVICE),
}
SECONDS = 60.0
JOB = 0x5EED
VARIABLE, OPTIMIZER = 1, 2

Metadata = Sequence[tuple[str, str | bytes]]


class Connection:
    """One role, seen from the wire."""

    def __init__(self, address: str) -> None:
        token = user_token(create=True)  # like a role that was given none
        assert token is not None
        plain = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.channel = with_token(plain, token)
        self.node = Stub(self.channel, NODE_SERVICE)
        self.ps = Stub(self.channel, PS_SERVICE)
        self.worker = Stub(self.channel, WORKER_SERVICE)

    def attach(self, job: int = JOB) -> tuple[Any, int]:
        """Attach to the role for a job; return the stream that holds it, and the incarnation in its first event."""
        identity = node_pb2.Identity(version=VERSION, role="chief", boot_id=1, name="a test")
        request = node_pb2.AttachRequest(coordinator=identity, job=job, num_workers=1)
        stream = self.node.attach(request, wait_for_ready=True)
        return stream, next(stream).incarnation

    @contextmanager
    def held(self, job: int = JOB) -> Iterator[int]:
        """Hold the role for a job, which ends with the block; the incarnation to work under."""
        stream, incarnation = self.attach(job)
        try:
            yield incarnation
        finally:
            with suppress(grpc.RpcError):
                self.node.end_job(node_pb2.EndJobRequest(job=job, reason="the test is over"), timeout=SECONDS)
            stream.cancel()

    def create(self, rows: int, job: int = JOB) -> None:
        """Create the variable "w", float32 [rows, 4], all of it here and all ones, and an optimizer."""
        values = np.ones((rows, 4), np.float32)
        spec = ps_pb2.VariableSpec(
            id=VARIABLE,
            name="w",
            dtype="float32",
            shape=values.shape,
            splits=[ps_pb2.AxisSplit(ends=[rows]), ps_pb2.AxisSplit(ends=[4])],
            owners=[0],
            trainable=True,
        )
        head = ps_pb2.Request(create=ps_pb2.CreateRequest(job=job, variable=spec), total_bytes=values.nbytes)
        data, frames = values.tobytes(), list[bytes]()
        for at in range(0, len(data), CHUNK_BYTES):
            head.last = at + CHUNK_BYTES >= len(data)
            frames.append(pack(head, [data[at : at + CHUNK_BYTES]]))
            head = ps_pb2.Request()
        self.ps.push(iter(frames), timeout=SECONDS)
        optimizer = ps_pb2.OptimizerSpec(id=OPTIMIZER, name="sgd", rule="sgd", numbers={"learning_rate": 0.1})
        head = ps_pb2.Request(create=ps_pb2.CreateRequest(job=job, optimizer=optimizer), last=True)
        self.ps.push(iter([pack(head)]), timeout=SECONDS)

    def read(self, rows: int, job: int = JOB) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The variable's values."""
        item = ps_pb2.ReadItem(variable=VARIABLE, shard=0, rows=ps_pb2.Rows(all=True))
        request = ps_pb2.Request(read=ps_pb2.ReadRequest(job=job, items=[item]), last=True)
        parts = [bytes(unpack(data, ps_pb2.Reply)[1]) for data in self.ps.pull(pack(request), timeout=SECONDS)]
        return np.frombuffer(b"".join(parts), np.float32).reshape(rows, 4)

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()


@contextmanager
def connect(address: str) -> Iterator[Connection]:
    """A connection to the role at that address."""
    connection = Connection(address)
    try:
        yield connection
    finally:
        connection.close()


def add_to_all(values: np.ndarray[Any, np.dtype[np.float32]], sequence: int, job: int = JOB) -> ps_pb2.Request:
    """The head of an update that adds to the whole variable."""
    item = ps_pb2.UpdateItem(
        variable=VARIABLE, shard=0, kind=ps_pb2.ADD, rows=ps_pb2.Rows(all=True), nth=1, value_bytes=values.nbytes
    )
    update = ps_pb2.UpdateRequest(job=job, incarnation=1, sequence=sequence, items=[item])
    return ps_pb2.Request(update=update, total_bytes=values.nbytes)


class Frames:
    """The frames of a client stream, supplied one by one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def give(self, data: bytes | None) -> None:
        """Supply the next frame; None ends the stream."""
        self._queue.put(data)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)


def with_token(channel: grpc.Channel, token: str) -> AuthenticatedChannel:
    """The same channel, with calls that prove knowledge of the token."""
    return AuthenticatedChannel(channel, Secret.of(token), "an address")
