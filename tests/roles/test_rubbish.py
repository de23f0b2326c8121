"""Messages from nowhere: a role outlives them, allocates nothing for what was only declared, and serves on."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.roles.messages import messages
from tests.roles.processes import (
    DONE,
    IDLE,
    JOB,
    PATIENCE,
    Process,
    Roles,
    environ,
    make_cluster,
    run,
    tf_config,
    until,
)
from tests.roles.wire import JOB as JOB_NUMBER
from tests.roles.wire import SECONDS, SERVICES, VARIABLE, Connection, Frames, add_to_all, connect

from pscluster.core.frames import pack, unpack
from pscluster.core.rpc import Method, methods
from pscluster.v1 import ps_pb2, worker_pb2

MIB = 1 << 20
GROWTH = 80 * MIB
"""What a role may grow by in one test: by what it received, since the allocator gives nothing back."""


class Target:
    """A server and a worker that wait for a coordinator, and a coordinator of another cluster."""

    def __init__(self, roles: Roles, cluster: dict[str, list[str]], chief: str, processes: dict[str, Process]) -> None:
        self.addresses = {"ps": cluster["ps"][0], "worker": cluster["worker"][0], "chief": chief}
        self.processes = processes
        self._roles = roles

    def host_and_port(self, role: str) -> tuple[str, int]:
        """Where a role listens."""
        host, port = self.addresses[role].split(":")
        return host, int(port)

    def serves_a_job(self) -> None:
        """Run a whole job on server and worker."""
        until(self._is_free, "nobody holds the roles any more")
        coordinator = self._roles.coordinator(JOB)
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0

    def _is_free(self) -> bool:
        for role in ("ps", "worker"):
            with connect(self.addresses[role]) as connection:
                try:
                    with connection.held(JOB_NUMBER + 1):
                        pass
                except grpc.RpcError:
                    return False
        return True

    @contextlib.contextmanager
    def unharmed(self, *roles: str) -> Iterator[None]:
        """The roles neither grow nor complain of anything but their peers during the block."""
        before = {role: self.processes[role].resident_bytes() for role in roles}
        written = {role: len(self.processes[role].output) for role in roles}
        yield
        for role in roles:
            process = self.processes[role]
            assert process.is_running
            grown = process.resident_bytes() - before[role]
            assert grown < GROWTH, f"{role} has grown by {grown / MIB:.0f} MiB"
            assert "Traceback" not in process.output[written[role] :], process.output[written[role] :]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Roles that have done a job, so that they are as large as they get."""
    folder = tmp_path_factory.mktemp("target")
    cluster, other = make_cluster(), make_cluster()
    with Roles(cluster, folder) as roles, Roles(other, tmp_path_factory.mktemp("other")) as others:
        processes = {"ps": roles.ps(), "worker": roles.worker()}
        others.ps()
        others.worker()
        processes["chief"] = others.coordinator(IDLE, str(folder / "gate"))
        made = Target(roles, cluster, other["chief"][0], processes)
        made.serves_a_job()
        processes["chief"].wait_for("connected")
        yield made
        made.serves_a_job()
        (folder / "gate").touch()
        assert processes["chief"].wait() == 0, "its job was not disturbed"


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2_frame(kind: int, flags: int, stream: int, content: bytes, declared: int | None = None) -> bytes:
    """An HTTP/2 frame, which may declare another length than it has."""
    length = len(content) if declared is None else declared
    return struct.pack(">I", length)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def tls_hello() -> bytes:
    """What a client says that expects TLS."""
    content = b"\x03\x03" + bytes(range(32)) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    handshake = b"\x01" + struct.pack(">I", len(content))[1:] + content
    return b"\x16\x03\x01" + struct.pack(">H", len(handshake)) + handshake


RAW = {
    "random bytes": random.Random(1).randbytes(4096),
    "zeros": bytes(4096),
    "HTTP/1.1": b"GET /metrics HTTP/1.1\r\nHost: ps0\r\n\r\n",
    "HTTP/1.1 upgrade": b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 99999999999\r\n\r\n",
    "TLS hello": tls_hello(),
    "half a preface": PREFACE[:10],
    "preface alone": PREFACE,
    "preface and noise": PREFACE + random.Random(2).randbytes(4096),
    "truncated settings": PREFACE + http2_frame(4, 0, 0, b"\x00\x03", declared=36),
    "a frame of 16 MiB declared": PREFACE + http2_frame(4, 0, 0, b"") + http2_frame(0, 0, 1, b"x", declared=2**24 - 1),
    "data of no stream": PREFACE + http2_frame(4, 0, 0, b"") + http2_frame(0, 1, 7, b"x" * 100),
    "broken headers": PREFACE + http2_frame(4, 0, 0, b"") + http2_frame(1, 4, 1, b"\xff" * 50),
    "a ping flood": PREFACE + http2_frame(4, 0, 0, b"") + http2_frame(6, 0, 0, bytes(8)) * 2000,
    "a reset flood": PREFACE + http2_frame(4, 0, 0, b"") + http2_frame(3, 0, 1, bytes(4)) * 2000,
}


@pytest.mark.parametrize("role", ["ps", "worker", "chief"])
def test_raw_bytes(role: str, target: Target) -> None:
    """Another protocol, or none, on the port: the connection is over, and the role is as before."""
    with target.unharmed(role):
        for data in RAW.values():
            for close_first in (True, False):
                with socket.create_connection(target.host_and_port(role), timeout=SECONDS) as connection:
                    connection.sendall(data)
                    if close_first:
                        connection.shutdown(socket.SHUT_WR)
                        with contextlib.suppress(OSError):
                            while connection.recv(65536):
                                pass


def test_connections_that_say_nothing(target: Target) -> None:
    """Two hundred silent connections keep nobody from working."""
    with target.unharmed("ps", "worker"), contextlib.ExitStack() as stack:
        for role in ("ps", "worker"):
            for _ in range(200):
                stack.enter_context(socket.create_connection(target.host_and_port(role), timeout=SECONDS))
        target.serves_a_job()


ALL_METHODS = [
    pytest.param(role, method, id=f"{role} {method.path}")
    for role, services in SERVICES.items()
    for service in services
    for method in methods(service)
]


def answer(channel: grpc.Channel, method: Method, requests: Sequence[bytes]) -> grpc.StatusCode:
    """Send serialised messages to a method and take a few replies; how it ended."""
    request: object = iter(requests) if method.client_streaming else requests[0]
    try:
        reply = getattr(channel, method.shape)(method.path)(request, timeout=SECONDS)
        if method.server_streaming:
            for _ in zip(range(3), reply, strict=False):
                if not method.client_streaming:
                    break  # Attach and Watch have no end
            reply.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(("role", "method"), ALL_METHODS)
def test_random_bytes_as_messages(role: str, method: Method, target: Target) -> None:
    """Bytes that are no message of the method's are refused as such, in every method."""
    rng = random.Random(3)
    with target.unharmed(role), grpc.insecure_channel(target.addresses[role]) as channel:
        for _ in range(15):
            code = answer(channel, method, [rng.randbytes(rng.randrange(1, 300)) for _ in range(2)])
            assert code == grpc.StatusCode.INVALID_ARGUMENT


def requests_of(method: Method) -> st.SearchStrategy[list[tuple[Any, bytes | None]]]:
    """Well-formed messages for a method, with values at the edges; those in frames with a payload."""
    (service,) = {s for services in SERVICES.values() for s in services if s.full_name == method.path.split("/")[1]}
    descriptor = service.methods_by_name[method.path.split("/")[2]].input_type
    framed = "payload" in descriptor.fields_by_name and descriptor.fields_by_name["payload"].number == 15

    @st.composite
    def one(draw: st.DrawFn) -> tuple[Any, bytes | None]:
        message: Any = draw(messages(descriptor, JOB_NUMBER))
        if not framed:
            return message, None
        payload = draw(st.sampled_from([b"", b"\0" * 8, b"\xff" * 16, b"\0" * 32, np.arange(16.0).tobytes()]))
        if draw(st.integers(0, 4)):  # as a frame should be, so that more than its frame is looked at
            message.total_bytes, message.last = len(payload), True
        return message, payload

    return st.lists(one(), min_size=1, max_size=3)


def serialised(message: Any, payload: bytes | None, incarnation: int) -> bytes:
    """The message's bytes; what names our job as its incarnation gets the one that the role has given us."""
    if getattr(message, "incarnation", 0) == JOB_NUMBER and incarnation:
        message.incarnation = incarnation
    return pack(message, [payload]) if payload else bytes(message.SerializeToString())


FUZZED = [case for case in ALL_METHODS if "Health" not in str(case.id)]


@pytest.mark.parametrize(("role", "method"), FUZZED)
def test_messages_that_make_no_sense(role: str, method: Method, target: Target) -> None:
    """Well-formed messages with absurd values are answered, or refused with a status of ours: never with a crash.

    So are counts of 2**62, ids that look negative, variables that are not there: a failed allocation or a
    forgotten check would show as UNKNOWN, with a traceback in the role's log.
    """

    def send(connection: Connection, requests: list[tuple[Any, bytes | None]], incarnation: int) -> None:
        code = answer(connection.channel, method, [serialised(*request, incarnation) for request in requests])
        assert code in (grpc.StatusCode.OK, *OURS), code

    with target.unharmed(role), connect(target.addresses[role]) as connection:

        @given(requests_of(method))
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        def send_some(requests: list[tuple[Any, bytes | None]]) -> None:
            if role == "chief":  # which holds roles and is held by none
                send(connection, requests, 0)
                return
            with connection.held() as incarnation:
                if role == "ps":
                    connection.create(rows=4)
                send(connection, requests, incarnation)

        send_some()


OURS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNAVAILABLE,
}


@pytest.mark.parametrize("declared", [2**40, 2**62, 2**64 - 1])
def test_push_that_declares_too_much(declared: int, target: Target) -> None:
    """A Push or an Upload that declares an absurd size is refused, and nothing is allocated for it."""
    values = np.ones((4, 4), np.float32)
    with target.unharmed("ps", "worker"):
        with connect(target.addresses["ps"]) as connection, connection.held():
            connection.create(rows=4)
            head = add_to_all(values, sequence=1)
            head.total_bytes = declared
            with pytest.raises(grpc.RpcError) as caught:
                connection.ps.push(iter([pack(head, [values.tobytes()])]), timeout=SECONDS)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            head.update.items[0].value_bytes = declared
            with pytest.raises(grpc.RpcError) as caught:
                connection.ps.push(iter([pack(head, [values.tobytes()])]), timeout=SECONDS)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert connection.read(4).tolist() == values.tolist(), "nothing was changed"
        with connect(target.addresses["worker"]) as connection, connection.held() as incarnation:
            upload = worker_pb2.UploadRequest(incarnation=incarnation, total_bytes=declared)
            upload.attachments.sizes.append(declared)
            with pytest.raises(grpc.RpcError) as caught:
                connection.worker.upload(iter([pack(upload, [bytes(1000)])]), timeout=SECONDS)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("shape", [[2**62], [2**62, 0], [2**40, 2**40], [2**63], [1] * 70, [2**31, 2**31, 0]])
@pytest.mark.parametrize("born", [False, True])
def test_variable_of_absurd_shape(shape: list[int], born: bool, target: Target) -> None:
    """A variable that is larger than any memory, or of more axes than there can be, is refused."""
    spec = ps_pb2.VariableSpec(id=9, name="absurd", dtype="float32", shape=shape, owners=[0])
    for length in shape:
        spec.splits.add(ends=[length])
    with target.unharmed("ps"), connect(target.addresses["ps"]) as connection, connection.held():
        request = ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB_NUMBER, variable=spec), last=True)
        if born:
            request.create.initializer.name = "zeros"
        with pytest.raises(grpc.RpcError) as caught:
            connection.ps.push(iter([pack(request)]), timeout=SECONDS)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


COUNTS = [5, 2**20, 2**31, 2**40, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("rank", ["rows", "rows without elements"])
def test_read_of_too_many_rows(rank: str, target: Target) -> None:
    """A read of more ids than came is refused before its reply is made, on a session and on a Pull."""
    with target.unharmed("ps"), connect(target.addresses["ps"]) as connection, connection.held():
        connection.create(rows=4)
        number = VARIABLE
        if rank != "rows":
            number = 7
            spec = ps_pb2.VariableSpec(id=number, name="thin", dtype="float32", shape=[4, 0], owners=[0])
            spec.splits.add(ends=[4])
            spec.splits.add(ends=[0])
            create = ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB_NUMBER, variable=spec), last=True)
            connection.ps.push(iter([pack(create)]), timeout=SECONDS)
        for count in COUNTS:
            item = ps_pb2.ReadItem(variable=number, shard=0, rows=ps_pb2.Rows(ids=count))
            request = ps_pb2.Request(read=ps_pb2.ReadRequest(job=JOB_NUMBER, items=[item]), last=True, total_bytes=16)
            data = pack(request, [bytes(16)])
            with pytest.raises(grpc.RpcError) as caught:
                list(connection.ps.pull(data, timeout=SECONDS))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, count
            (reply,) = connection.ps.session(iter([data]), timeout=SECONDS)
            assert unpack(reply, ps_pb2.Reply)[0].refusal.kind in ("protocol", "invalid-update"), count


@pytest.mark.parametrize("row", [-1, 4, 2**31, 2**62, -(2**63)])
@pytest.mark.parametrize("how", ["read", "update"])
def test_rows_that_are_not_there(row: int, how: str, target: Target) -> None:
    """Ids beyond the rows, negative ones among them, are refused by number before anything was changed."""
    ids = np.array([0, row], np.int64)
    values = np.ones((2, 4), np.float32)
    with target.unharmed("ps"), connect(target.addresses["ps"]) as connection, connection.held():
        connection.create(rows=4)
        before = connection.read(4)
        request = ps_pb2.Request(last=True)
        buffers = [ids.tobytes()]
        if how == "read":
            request.read.job = JOB_NUMBER
            request.read.items.add(variable=VARIABLE, shard=0).rows.ids = 2
        else:
            request.CopyFrom(add_to_all(values, sequence=2))
            request.last = True
            request.update.items[0].rows.ids = 2
            buffers.append(values.tobytes())
        request.total_bytes = sum(map(len, buffers))
        (reply,) = connection.ps.session(iter([pack(request, buffers)]), timeout=SECONDS)
        refusal = unpack(reply, ps_pb2.Reply)[0].refusal
        assert refusal.kind == "invalid-update"
        assert str(row) in refusal.message
        assert connection.read(4).tolist() == before.tolist()


@pytest.mark.parametrize("what", ["variable", "shard", "optimizer"])
def test_numbers_that_are_not_there(what: str, target: Target) -> None:
    """A variable, shard or optimizer that the server does not have is an error that names it."""
    with target.unharmed("ps"), connect(target.addresses["ps"]) as connection, connection.held():
        connection.create(rows=4)
        for number in (3, 2**31, 2**32 - 1):
            head = add_to_all(np.ones((4, 4), np.float32), sequence=3)
            head.last = True
            head.update.items[0].kind = ps_pb2.APPLY_GRADIENT
            setattr(head.update.items[0], what, number)
            (reply,) = connection.ps.session(iter([pack(head, [bytes(64)])]), timeout=SECONDS)
            refusal = unpack(reply, ps_pb2.Reply)[0].refusal
            assert refusal.kind == "unknown-variable", refusal
            assert str(number) in refusal.message


HALF_A_PUSH = """
import os, sys
import numpy as np
from pscluster.core.frames import CHUNK_BYTES, pack
from pscluster.v1 import ps_pb2
from tests.roles.wire import Frames, add_to_all, connect

values = np.ones((CHUNK_BYTES // 2, 4), np.float32)  # eight frames
data = values.tobytes()
with connect(sys.argv[1]) as connection:
    held = connection.attach()  # and never let go
    connection.create(len(values))
    frames = Frames()
    reply = connection.ps.push.future(iter(frames))
    frames.give(pack(add_to_all(values, sequence=1), [data[:CHUNK_BYTES]]))
    for part in range(1, 6):
        frames.give(pack(ps_pb2.Request(), [data[part * CHUNK_BYTES : (part + 1) * CHUNK_BYTES]]))
    connection.read(len(values))  # what was sent before has arrived
    print("half", flush=True)
    sys.stdin.read()
"""


def test_half_a_push_then_a_kill(target: Target) -> None:
    """A client that is killed in the middle of its update has changed nothing, and what it sent is not kept."""
    rows = MIB // 2
    grown = []
    for _ in range(4):
        before = target.processes["ps"].resident_bytes()
        program = [sys.executable, "-c", HALF_A_PUSH, target.addresses["ps"]]
        root = Path(__file__).resolve().parents[2]
        with subprocess.Popen(
            program, env=environ(), cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "half\n"
            client.kill()
            client.wait(PATIENCE)
        with connect(target.addresses["ps"]) as connection, connection.held():
            assert connection.read(rows).sum() == rows * 4, "the job's values are kept, without the update"
        grown.append(target.processes["ps"].resident_bytes() - before)
    assert min(grown[1:]) < 4 * MIB, grown
    assert grown[0] < GROWTH


def test_half_an_upload_then_an_end(target: Target) -> None:
    """An upload whose stream ends in order, but too early, is refused."""
    with (
        target.unharmed("worker"),
        connect(target.addresses["worker"]) as connection,
        connection.held() as incarnation,
    ):
        head = worker_pb2.UploadRequest(incarnation=incarnation, total_bytes=2000)
        head.attachments.sizes.append(2000)
        frames = Frames()
        frames.give(pack(head, [bytes(1000)]))
        frames.give(None)
        with pytest.raises(grpc.RpcError, match="ended before its last frame"):
            connection.worker.upload(iter(frames), timeout=SECONDS)


def test_message_beyond_the_limit(target: Target) -> None:
    """A message above the size that any of ours has is refused by gRPC itself, a compressed one as well."""
    for compression in (None, grpc.Compression.Gzip):
        with (
            target.unharmed("ps"),
            grpc.insecure_channel(
                target.addresses["ps"], options=[("grpc.max_send_message_length", -1)], compression=compression
            ) as channel,
        ):
            push: Any = channel.stream_unary("/pscluster.v1.ParameterServer/Push")
            with pytest.raises(grpc.RpcError) as caught:
                push(iter([b"\x7a" + bytes(100 * MIB)]), timeout=SECONDS)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unknown_methods(target: Target) -> None:
    """Methods and services that are not there are refused as such."""
    for role in ("ps", "worker", "chief"):
        with target.unharmed(role), grpc.insecure_channel(target.addresses[role]) as channel:
            for path in ("/pscluster.v1.Node/Nothing", "/other.Service/Method", "/", "nothing"):
                call: Any = channel.unary_unary(path)
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"", timeout=SECONDS)
                assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_nothing_of_it_is_left(target: Target) -> None:
    """After all of it the roles do a whole job, and `pscluster status` finds them in order."""
    target.serves_a_job()
    cluster = {"ps": [target.addresses["ps"]], "worker": [target.addresses["worker"]]}
    code, output = run("status", config=tf_config(cluster, "ps"))
    assert code == 0, output
    assert output.count("waiting for a coordinator") == 2
