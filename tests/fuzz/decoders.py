"""Every decoder of data that others send or leave on a disk: its valid inputs, and the errors that others may cause.

If a checksum would refuse every changed input, it is made to fit again: an attacker who writes the file can do so, too.
Pickles are not here: they may do anything, and are accepted only from peers that may run code anyway.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import json
import math
import random
import socket
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import grpc
import numpy as np
import xxhash
from google.protobuf.message import DecodeError, Message
from tests.conftest import attached
from tests.fakes import FakeCall

from pscluster.coordinator.checkpoints.index import (
    Index,
    SavedFile,
    SavedNamed,
    SavedTensor,
    SavedVariable,
    check_whole,
    read_index,
)
from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.coordinator.job.members import SECRET_BYTES, Claim, Members
from pscluster.coordinator.job.progress import decoded
from pscluster.coordinator.job.registration import place_of
from pscluster.coordinator.serving import TableVersion, delta_parquet, delta_safetensors
from pscluster.coordinator.serving.delta_files import Changes, Header
from pscluster.coordinator.serving.deltas import read_delta
from pscluster.core.cluster.addresses import parse_address
from pscluster.core.cluster.tf_config import TFConfig
from pscluster.core.errors import (
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    MemberUnavailableError,
    MisuseError,
    NotPermittedError,
    ProtocolError,
    PsClusterError,
    RefusedError,
    from_kind,
)
from pscluster.core.functions.definitions import capture, resolve, split_off_bulk
from pscluster.core.functions.policy import SerializationPolicy, choose, chosen_policy
from pscluster.core.ids import VERSION
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.core.limits import MAX_CALL_BYTES
from pscluster.core.metrics.trace import Recording
from pscluster.core.role.node import NodeService
from pscluster.core.security.handshake import NONCE_BYTES, CallHeader, Secret, SessionTable, accept_reply, make_request
from pscluster.core.security.tokens import load_token
from pscluster.core.transport.frames import Assembler, pack, padding, unpack
from pscluster.core.transport.tcp.packets import ClosedError, Connection, Kind, as_buffers
from pscluster.core.values import decode, decode_call, encode, encode_call
from pscluster.ps.handles.registry import handle_of
from pscluster.ps.optim.schedules import ExponentialDecay
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.spec import with_step
from pscluster.ps.storage.files import generations as durable_files
from pscluster.ps.storage.files import tensor_files
from pscluster.ps.storage.files.generations import DamagedError, StateDirectory
from pscluster.ps.storage.files.roots import Roots
from pscluster.ps.storage.log import format as log_format
from pscluster.ps.storage.log import reader as log_reader
from pscluster.ps.storage.replay import restored
from pscluster.ps.wire_dtypes import encode as encode_floats
from pscluster.v1 import (
    authentication_pb2,
    coordinator_pb2,
    data_plane_pb2,
    definition_pb2,
    node_pb2,
    ps_pb2,
    state_pb2,
    value_pb2,
    worker_pb2,
)
from pscluster.worker.collectives.gang import Gang
from pscluster.worker.collectives.incoming import Hosted, Receiver
from pscluster.worker.collectives.mailbox import Mailbox
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.prefetch import Part, Reader
from pscluster.worker.data.sources import MappedArray
from pscluster.worker.failures import failure_of, rebuild_error, rebuild_failure
from pscluster.worker.programs.local import rounds
from pscluster.worker.programs.program import ArrayType, Numbers
from pscluster.worker.programs.program import encode as encode_program
from pscluster.worker.programs.reading import parse, read_numbers
from pscluster.worker.servers import ServerList
from pscluster.worker.service import WorkerRole, WorkerService

JOB = 77
TABLE = 4
REFUSALS: tuple[type[BaseException], ...] = (PsClusterError, DecodeError)
"""What may come of a message: errors of ours, and protobuf's own, of which `rpc` makes one of ours."""


class Point(NamedTuple):
    """A record that is sent."""

    x: float
    label: str


@dataclass
class Nested:
    """Another record."""

    points: list[Point] = field(default_factory=list)
    array: Any = None


@dataclass(frozen=True)
class Decoder:
    """A decoder.

    Attributes:
        name: of it.
        examples: valid inputs.
        run: decodes an input, and looks at what comes of it.
        errors: what it may raise.
        fit: makes an input's checksums fit.
    """

    name: str
    examples: Sequence[bytes]
    run: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...] = REFUSALS
    fit: Callable[[bytes], bytes] = lambda data: data

    def try_(self, data: bytes) -> bool:
        """Decode; return whether it was refused. Any other error of the decoder propagates."""
        try:
            self.run(data)
        except self.errors:
            return True
        return False


def _context() -> grpc.ServicerContext:
    return cast("grpc.ServicerContext", FakeCall())


# Values


def _objects() -> list[Any]:
    return [
        *(None, True, -3, 2**80, 0.5, 1 + 2j, "text", b"bytes"),
        *([1, [2, (3, {4})]], {"a": 1, (1, 2): frozenset({"x"})}, np.arange(6).reshape(2, 3), np.float32(1.5)),
        *(np.array(["ab", "c"]), np.array([b"ab"]), np.array(["2020-01-01"], "datetime64[D]"), np.bool_(True)),
        *(np.zeros((0, 3)), np.array(True), np.str_("t"), Point(1.0, "p"), Nested([Point(0.0, "")], np.ones(2))),
    ]


def _decode(data: bytes) -> None:
    decoded = decode(value_pb2.Value.FromString(data))
    with contextlib.suppress(TypeError):  # some values can't be encoded again: an empty text of NumPy's, for example
        encode(decoded)


def _decode_call(data: bytes) -> None:
    """Decode with attachments: a byte says how many there are, and one byte the size of each."""
    count, size, rest = (data[0] % 4, data[1] % 32, data[2:]) if len(data) > 1 else (0, 0, b"")
    attachments = [bytearray(size) for _ in range(count)]
    decode_call(value_pb2.Value.FromString(rest), attachments=attachments)


def _call_example() -> list[bytes]:
    attachments: list[memoryview] = []
    value = encode_call((1, np.arange(4)), {"x": [Point(0.0, "a")]}, attachments=attachments)
    aside = value_pb2.Value()
    aside.CopyFrom(value)
    array = aside.tuple.items[0].tuple.items[1].array
    if array.data:
        array.ClearField("data")
        array.attachment, array.dtype, array.shape[:] = 1, "uint8", [8]
    return [b"\0\0" + value.SerializeToString(), b"\1\10" + aside.SerializeToString()]


def _failure(data: bytes) -> None:
    failure = worker_pb2.Failure.FromString(data)
    str(rebuild_failure(failure, function="f", worker=1, attempts=1))
    str(rebuild_error(failure))


def _failures() -> list[bytes]:
    raised: list[BaseException] = [
        ValueError("x"),
        KeyError(1, 2),
        OSError(2, "no", "f"),
        UnicodeDecodeError("a", b"b", 0, 1, "c"),
    ]
    return [
        failure_of(error).SerializeToString() for error in (*raised, MemoryError(), StopIteration(3), SystemExit(1))
    ]


# Requests to a parameter server


class Server:
    """A server with three variables, a table and an optimizer, which may write checkpoints in a separate directory."""

    def __init__(self, folder: str, index: int = 0) -> None:
        self.role = ParameterServerRole(index, roots=Roots([folder]))
        self.service = ParameterServerService(self.role)
        self.role.job_began(node_pb2.AttachRequest(job=JOB))
        for variable_id, (dtype, shape) in enumerate((("float32", (4, 4)), ("int64", ()), ("bool", (5,))), 1):
            self.push(*creation(variable_id, dtype, shape, index))
        self.push(*_table(TABLE, index))
        optimizer = ps_pb2.OptimizerSpec(id=11, name="adam", rule="adam", numbers={"learning_rate": 0.1})
        self.push(ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB, optimizer=optimizer), last=True), b"")

    def push(self, request: ps_pb2.Request, payload: bytes) -> None:
        """Send it as one frame."""
        request.total_bytes, request.last = len(payload), True
        self.service.push(iter([pack(request, [payload])]), _context())


def creation(variable: int, dtype: str, shape: tuple[int, ...], owner: int = 0) -> tuple[ps_pb2.Request, bytes]:
    """A request that makes a variable of ones, and its payload."""
    spec = ps_pb2.VariableSpec(id=variable, name=f"v{variable}", dtype=dtype, shape=shape, owners=[owner])
    for length in shape:
        spec.splits.add(ends=[length])
    data = np.ones(shape, dtype).tobytes()
    return ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB, variable=spec)), data + bytes(padding(len(data)))


def _table(variable: int, owner: int = 0) -> tuple[ps_pb2.Request, bytes]:
    """A request that makes a table of rows of 4 values by strings."""
    request, _ = creation(variable, "float32", (8, 10), owner)
    spec = request.create.variable
    spec.asynchronous = True
    spec.table.CopyFrom(ps_pb2.TableSpec(dim=4, initializer="zeros", id_bytes=16, capacity=9))
    request.create.initializer.name, request.create.initializer.numbers = "zeros", "{}"
    return request, b""


def _frames_of_requests() -> list[bytes]:
    """Reads, updates and creations, each in one frame."""
    ids = np.array([0, 2], np.int64).tobytes()
    rows = ps_pb2.Rows(ids=2)
    box = ps_pb2.Rows(slices=ps_pb2.Slices(axes=[ps_pb2.AxisSlice(start=1, step=1, count=2)] * 2))
    reads = [
        (ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(all=True)), b""),
        (ps_pb2.ReadItem(variable=1, rows=rows, optimizer=11, slot="m"), ids),
        (ps_pb2.ReadItem(variable=TABLE, rows=ps_pb2.Rows(ids=2, id_bytes=8)), b"one\0\0\0\0\0th\xc3\xa9\0\0\0\0"),
        (ps_pb2.ReadItem(variable=1, rows=box), b""),
        (ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(version=True)), b""),
        (ps_pb2.ReadItem(variable=1, rows=rows, wire_dtype=ps_pb2.WIRE_INT8), ids),
        (ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(all=True), wire_dtype=ps_pb2.WIRE_BFLOAT16), b""),
    ]
    made = [(ps_pb2.Request(id=1, read=ps_pb2.ReadRequest(job=JOB, items=[item])), payload) for item, payload in reads]
    row = np.ones((2, 4), np.float32).tobytes()
    elements = np.array([3, 9], "<u4").tobytes()
    gradient = {"variable": 1, "kind": ps_pb2.APPLY_GRADIENT, "optimizer": 11}
    put = {"variable": 0, "shard": 1, "kind": ps_pb2.PUT, "name": "progress", "text": "{}"}
    updates: list[tuple[dict[str, Any], bytes]] = [
        (put, b""),
        (
            {"variable": 1, "kind": ps_pb2.ADD, "rows": ps_pb2.Rows(all=True), "value_bytes": 64},
            np.ones(16, "f4").tobytes(),
        ),
        ({"variable": 1, "kind": ps_pb2.APPLY_GRADIENT, "rows": rows, "optimizer": 11, "value_bytes": 32}, ids + row),
        (
            {**gradient, "variable": TABLE, "rows": ps_pb2.Rows(ids=2, id_bytes=8), "value_bytes": 32},
            b"one\0\0\0\0\0th\xc3\xa9\0\0\0\0" + row,
        ),
        (
            {**gradient, "rows": rows, "wire_dtype": ps_pb2.WIRE_INT8, "value_bytes": 16},
            ids + encode_floats(ps_pb2.WIRE_INT8, np.ones((2, 4), np.float32)).tobytes(),
        ),
        ({**gradient, "rows": ps_pb2.Rows(all=True), "elements": 2, "value_bytes": 16}, elements + row[:8]),
        ({"variable": 1, "kind": ps_pb2.ASSIGN, "rows": box, "value_bytes": 4, "scalar": True}, bytes(16)),
    ]
    for sequence, (fields, payload) in enumerate(updates, 1):
        update = ps_pb2.UpdateRequest(
            job=JOB, incarnation=5, sequence=sequence, items=[ps_pb2.UpdateItem(nth=1, **fields)]
        )
        made.append((ps_pb2.Request(id=2, update=update), payload))
    made.append(creation(21, "float32", (2, 3)))
    made.append(_table(24))
    filled, _ = creation(22, "float32", (2, 3))
    filled.create.initializer.name, filled.create.initializer.numbers = "random_normal", '{"seed": 1, "stddev": 0.1}'
    made.append((filled, b""))
    hashed, _ = creation(23, "float32", (4, 2))
    hashed.create.variable.row_order.CopyFrom(ps_pb2.RowOrder(kind="hash", seed=5))
    hashed.create.variable.splits[0].ends[:] = [2, 4]
    hashed.create.variable.owners[:] = [0, 1]
    hashed.create.initializer.name, hashed.create.initializer.numbers = "zeros", "{}"
    made.append((hashed, b""))
    schedule = json.dumps(ExponentialDecay(0.1, 3, 0.5).to_spec())
    optimizer = ps_pb2.OptimizerSpec(id=12, name="sgd", rule="sgd", numbers={"learning_rate": 0.1}, schedule=schedule)
    made.append((ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB, optimizer=optimizer)), b""))
    frames = []
    for request, payload in made:
        request.total_bytes, request.last = len(payload), True
        frames.append(pack(request, [payload] if payload else []))
    return frames


def _is_code(data: bytes) -> bool:
    """Whether the request brings a function or class. Loading one may do anything, and is not tried here."""
    with contextlib.suppress(PsClusterError, DecodeError):
        request = unpack(data, ps_pb2.Request)[0]
        return request.create.HasField("rule") or request.create.initializer.HasField("function")
    return False


class _Servers:
    """A server for some inputs, then a new one: what is applied to it stays in it."""

    def __init__(self, folder: str) -> None:
        self._folder, self._used = folder, 0
        self._server = Server(folder)

    @property
    def service(self) -> ParameterServerService:
        """The server's service."""
        self._used += 1
        if self._used % 50 == 0:
            self._server = Server(self._folder)
        return self._server.service

    def session(self, data: bytes) -> None:
        """Send a request on a session."""
        if not _is_code(data):
            for reply in self.service.session(iter([data]), _context()):
                refusal = unpack(reply, ps_pb2.Reply)[0].refusal
                if refusal.kind:
                    raise from_kind(refusal.kind, refusal.message)

    def push(self, data: bytes) -> None:
        """Send a Push in up to three messages."""
        frames = data.split(b"\xa5\x5a\xa5")[:3]
        if not any(map(_is_code, frames)):
            self.service.push(iter(frames), _context())

    def pull(self, data: bytes) -> None:
        """Send a Pull, and check that its reply is of the announced size."""
        frames = [unpack(frame, ps_pb2.Reply) for frame in self.service.pull(data, _context())]
        assert frames[0][0].total_bytes == sum(len(payload) for _, payload in frames)

    def unary(self, data: bytes) -> None:
        """Call the method that the first byte chooses."""
        methods: list[tuple[str, Any]] = [
            ("describe", ps_pb2.DescribeRequest),
            ("delete", ps_pb2.DeleteRequest),
            ("close_incarnation", ps_pb2.CloseIncarnationRequest),
            ("finish_functions", ps_pb2.FinishFunctionsRequest),
            ("checkpoint", ps_pb2.CheckpointRequest),
            ("restore", ps_pb2.RestoreRequest),
        ]
        name, kind = methods[data[0] % len(methods)] if data else methods[0]
        getattr(self.service, name)(kind.FromString(data[1:]), _context())

    def unary_examples(self) -> list[bytes]:
        """Examples for `unary`."""
        tensor = ps_pb2.SavedTensor(array="value", tensor="v1/part_0", dtype="float32", shape=[4, 4], bytes=64)
        whole = ps_pb2.RestoreSource(tensor=tensor, to=[0, 0], count=[4, 4])
        getattr(whole, "from").extend([0, 0])
        shard = ps_pb2.RestoreShard(variable=1, arrays=[ps_pb2.RestoreArray(array="value", sources=[whole])])
        rows = ps_pb2.SavedRows(split=ps_pb2.AxisSplit(ends=[4]), order=ps_pb2.RowOrder(kind="hash", seed=5))
        scattered = ps_pb2.RestoreSource(tensor=tensor, to=[0], count=[4], rows=rows)
        getattr(scattered, "from").append(0)
        shard.arrays[0].sources.append(scattered)
        shard.steps["adam"] = 3
        shard.named.add(nth=[1, 2], keys=[7, 1 << 63])
        common: dict[str, Any] = {"job": JOB, "id": 9, "directory": self._folder}
        requests: list[tuple[int, Message]] = [
            (0, ps_pb2.DescribeRequest(job=JOB, variables=["v1"], optimizers=["adam"], metadata=True)),
            (1, ps_pb2.DeleteRequest(job=JOB, name="v3", id=3)),
            (1, ps_pb2.DeleteRequest(job=JOB, evaluation=3)),
            (2, ps_pb2.CloseIncarnationRequest(job=JOB, incarnation=4)),
            (3, ps_pb2.FinishFunctionsRequest(job=JOB, starts=[1, 5], stops=[3, 9], keys=[7])),
            (4, ps_pb2.CheckpointRequest(job=JOB, action=ps_pb2.CheckpointRequest.MARK, id=9)),
            (4, ps_pb2.CheckpointRequest(action=ps_pb2.CheckpointRequest.WRITE, file="part.safetensors", **common)),
            (5, ps_pb2.RestoreRequest(shards=[shard], metadata={"texts": {"progress": "{}"}}, **common)),
            (5, ps_pb2.RestoreRequest(job=JOB, id=9, shards=[shard], ahead=True)),
            (5, ps_pb2.RestoreRequest(job=JOB, id=9, commit=True, term=1)),
        ]
        return [bytes((kind,)) + request.SerializeToString() for kind, request in requests]


class _Steps:
    """Contributions to synchronous steps, and reads after steps, by one of two servers; then new ones."""

    SEPARATOR = b"\xa5\x5a\xa5"

    def __init__(self, folder: str) -> None:
        self._folder, self._used = folder, 0
        self._begin()

    def _begin(self) -> None:
        self._servers = [Server(self._folder, index) for index in range(2)]

    def run(self, data: bytes) -> None:
        """Send requests to the server that the first byte chooses."""
        self._used += 1
        if self._used % 20 == 0:
            self._begin()
        frames = data[1:].split(self.SEPARATOR)[:6]
        if not any(map(_is_code, frames)):
            service = self._servers[data[0] % 2 if data else 0].service
            for reply in service.session(iter(frames), _context()):
                refusal = unpack(reply, ps_pb2.Reply)[0].refusal
                if refusal.kind:
                    raise from_kind(refusal.kind, refusal.message)

    def examples(self) -> list[bytes]:
        """A step of two replicas on each server, its end, and reads after it."""
        kinds, run = ps_pb2.Contribution, itertools.count(1)
        ids, row = np.array([0, 2], np.int64).tobytes(), np.ones((2, 4), np.float32).tobytes()
        add = {"variable": 1, "kind": ps_pb2.ADD, "rows": ps_pb2.Rows(all=True), "value_bytes": 64}, bytes(64)
        rows = {"variable": 1, "kind": ps_pb2.APPLY_GRADIENT, "rows": ps_pb2.Rows(ids=2), "optimizer": 11}
        gradient = {**rows, "value_bytes": 32, "weight": 0.5}, ids + row
        piece = {**add[0], "kind": ps_pb2.APPLY_GRADIENT, "optimizer": 11, "value_bytes": 32}, bytes(32)
        examples = []
        for index in range(2):
            kind = kinds.STAGE if index else kinds.COMMIT
            for fields, payload in (add, gradient, piece):
                of: dict[str, Any] = {"run": next(run), "epoch": 3, "replicas": 2}
                sent = [] if index else [self._sent({**of, "kind": kinds.OPEN}, 0)]
                for replica in range(2):
                    contribution = {**of, "kind": kind, "replica": replica}
                    if fields is not add[0]:
                        contribution["updated"] = [1]
                    if fields is piece[0]:
                        contribution["reduced"] = 5
                        if not index:
                            sent.append(self._sent({**contribution, "kind": kinds.REDUCE}, replica))
                    if not index:
                        contribution["positions"] = {5: 7}
                    own = {**fields, "offset": 32 * replica} if fields is piece[0] else fields
                    sent.append(self._sent(contribution, replica, own, payload))
                if not index:
                    sent.append(self._sent({**of, "kind": kinds.WAIT}, 0))
                read = ps_pb2.Request(
                    read=ps_pb2.ReadRequest(job=JOB, items=[ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(all=True))])
                )
                read.last = True
                sent.append(with_step(of["run"], 1, 3) + pack(read))
                read.after.run, read.after.step, read.after.epoch = of["run"], 1, 3
                sent.append(pack(read))
                examples.append(bytes((index,)) + self.SEPARATOR.join(sent))
        tick = {"run": next(run), "epoch": 3, "replicas": 1, "kind": kinds.TICK}
        done = {**tick, "step": 1, "until": 1, "positions": {5: 7}, "before": {5: 6}}
        ticks = [self._sent(of, 0) for of in ({**tick, "begins": True}, done, {**done, "ended": True})]
        examples.append(bytes(1) + self.SEPARATOR.join(ticks))
        of = {"run": next(run), "epoch": 3, "replicas": 2, "backup": 1}
        opened = [self._sent({**of, "kind": kinds.OPEN, "replica": replica}, replica) for replica in range(2)]
        ready, commit = ({**of, "kind": kind} for kind in (kinds.READY, kinds.COMMIT))
        asked = [self._sent(ready, 0), self._sent(commit, 0, *add), self._sent({**ready, "replica": 1}, 1)]
        examples.append(bytes(1) + self.SEPARATOR.join([*opened, *asked]))
        return examples

    @staticmethod
    def _sent(of: dict[str, Any], replica: int, fields: dict[str, Any] | None = None, payload: bytes = b"") -> bytes:
        items = [] if fields is None else [ps_pb2.UpdateItem(nth=1, **fields)]
        update = ps_pb2.UpdateRequest(job=JOB, incarnation=5 + replica, function=2 + replica, items=items)
        update.contribution.CopyFrom(ps_pb2.Contribution(**of))
        request = ps_pb2.Request(update=update, total_bytes=len(payload), last=True)
        return pack(request, [payload] if payload else [])


class _Moves:
    """Moves and cuts of shards: calls, Pushes and Pulls to one of two servers, in turn; then to new ones."""

    SEPARATOR = b"\xa5\x5a\xa5"
    ASK, PUSH, PULL = range(3)

    def __init__(self, folder: str) -> None:
        self._folder, self._used = folder, 0
        self._begin()

    def _begin(self) -> None:
        self._servers = [Server(self._folder, index) for index in range(2)]
        for server in self._servers:
            for variable_id, shape in ((5, (4, 4)), (6, (6, 2))):
                request, _ = creation(variable_id, "float32", shape)
                spec = request.create.variable
                spec.splits[0].ends[:], spec.owners[:] = [shape[0] // 2, shape[0]], [0, 1]
                request.create.initializer.name, request.create.initializer.numbers = "zeros", "{}"
                server.push(request, b"")
        self._service = [server.service for server in self._servers]

    def run(self, data: bytes) -> None:
        """Make calls to the server that the first byte chooses; the first byte of each says how."""
        self._used += 1
        if self._used % 20 == 0:
            self._begin()
        service, refused = self._service[data[0] % 2 if data else 0], None
        for call in data[1:].split(self.SEPARATOR)[:12]:
            try:
                if (how := call[0] % 3 if call else self.ASK) == self.ASK:
                    service.move(ps_pb2.MoveRequest.FromString(call[1:]), _context())
                elif _is_code(call[1:]):
                    continue
                elif how == self.PUSH:
                    service.push(iter([call[1:]]), _context())
                else:
                    for _ in service.pull(call[1:], _context()):
                        pass
            except REFUSALS as error:
                refused = error
        for server in self._servers:
            server.role.store.describe((), (), True)
        if refused is not None:
            raise refused

    def examples(self) -> list[bytes]:
        """A move's source and target, and a variable and a table that are cut anew."""
        actions, page = ps_pb2.MoveRequest, {"arrays": ["value"], "pages": [0]}
        specs = {held.spec.id: held.spec for held in self._servers[1].role.store.held()[0]}

        def ask(**fields: Any) -> bytes:
            return bytes((self.ASK,)) + ps_pb2.MoveRequest(job=JOB, **fields).SerializeToString()

        def push(payload: bytes, **fields: Any) -> bytes:
            move = ps_pb2.MoveRequest(job=JOB, **fields)
            request = ps_pb2.Request(move=move, total_bytes=len(payload), last=True)
            return bytes((self.PUSH,)) + pack(request, [payload])

        def pull(**fields: Any) -> bytes:
            return bytes((self.PULL,)) + pack(ps_pb2.Request(move=ps_pb2.MoveRequest(job=JOB, **fields), last=True))

        def changed(variable: int, **fields: Any) -> ps_pb2.VariableSpec:
            spec = ps_pb2.VariableSpec()
            spec.CopyFrom(specs[variable])
            spec.MergeFrom(ps_pb2.VariableSpec(**fields))
            return spec

        source: dict[str, Any] = {"id": 90, "variable": 5, "shard": 0}
        placed = changed(5, placement=1)
        placed.owners[:] = [1, 1]
        state = ps_pb2.ShardState(arrays=["value"], updates=3, steps={11: 2}, closed=[4], traffic=8.0)
        state.keys.add(function=3, incarnation=5, sequence=6, nth=[1, 2], key=7)
        state.clients.add(incarnation=4, settled=2)
        state.finished_starts.append(1)
        state.finished_stops.append(4)
        to = [
            ask(action=actions.STAGE, state=ps_pb2.ShardState(arrays=["value", "slot/11/m"]), **source),
            push(bytes(32), action=actions.WRITE, **page, **source),
            ask(action=actions.COMMIT, spec=placed, state=state, **source),
            ask(action=actions.SERVE, spec=placed, **source),
        ]
        of = [
            ask(action=actions.TRACK, **source),
            ask(action=actions.CHANGED, round=1, **source),
            pull(action=actions.READ, **page, **source),
            ask(action=actions.FREEZE, round=2, **source),
            ask(action=actions.PLACE, spec=placed, saved=True, **source),
            ask(action=actions.RELEASE, **source),
            ask(action=actions.RESIZE, num_servers=2),
        ]
        cut, table = {"id": 91, "variable": 6}, {"id": 92, "variable": TABLE}
        made, by_id = (
            changed(variable, id=number, name=f"pscluster/{number}", evaluation=number, origin=variable)
            for variable, number in ((6, 61), (TABLE, 62))
        )
        made.splits[0].ends[:], made.owners[:] = [1, 3, 6], [1, 0, 1]
        by_id.splits[0].ends[:], by_id.owners[:] = [5, 8], [1, 1]
        adopted, adopted_table = changed(6, origin=6), changed(TABLE, origin=TABLE)
        for spec, own in ((adopted, made), (adopted_table, by_id)):
            spec.id = own.id
            spec.splits[0].ends[:], spec.owners[:] = own.splits[0].ends, own.owners
        value, slot = ({"arrays": [name], "round": 2} for name in ("value", "slot/11/m"))
        numbers = np.array([0, 1], np.int64).tobytes()
        rows = [
            ask(action=actions.MAKE, spec=made, **cut),
            ask(action=actions.TRACK, shard=1, page_elements=2, **cut),
            push(bytes(8), action=actions.FILL, shard=0, **value, **cut),
            push(bytes(16), action=actions.FILL, shard=2, rows=numbers, **value, **cut),
            push(bytes(8), action=actions.FILL, shard=2, start=2, **slot, **cut),
            ask(action=actions.CAPTURE, shard=1, round=3, **cut),
            ask(
                action=actions.SETTLE,
                shard=0,
                state=ps_pb2.ShardState(updates=3, arrays=["value"], steps={11: 2}, traffic=2.0),
                named=[ps_pb2.NamedUpdates(nth=[1, 2], keys=[7, 1 << 63])],
                **cut,
            ),
            ask(action=actions.SEAL, **cut),
            ask(action=actions.ADOPT, spec=adopted, **cut),
        ]
        row = bytes(specs[TABLE].shape[1] * 4)
        ids = [
            ask(action=actions.COUNT, num_shards=2, **table),
            ask(action=actions.MAKE, spec=by_id, **table),
            ask(action=actions.CAPTURE, **table),
            pull(action=actions.TAKE, arrays=["value"], state=ps_pb2.ShardState(rows=0), **table),
            push(2 * row, action=actions.FILL, **value, **table),
            push(bytes(2 * 16), action=actions.FILL, **slot, **table),
            ask(action=actions.SETTLE, state=ps_pb2.ShardState(updates=3, arrays=["value"]), **table),
            ask(action=actions.ABANDON, spec=by_id, **table),
        ]
        sequences = [(0, of), (1, to), (1, rows), (1, [*rows[:4], ask(action=actions.ABANDON, spec=made, **cut)])]
        sequences += [(1, ids), (1, [*ids[:-1], ask(action=actions.ADOPT, spec=adopted_table, **table)])]
        return [bytes((server,)) + self.SEPARATOR.join(calls) for server, calls in sequences]


def _push_examples() -> list[bytes]:
    whole = [data for data in _frames_of_requests() if unpack(data, ps_pb2.Request)[0].WhichOneof("body") != "read"]
    request, payload = creation(31, "float32", (8, 8))
    request.total_bytes = len(payload)
    second = ps_pb2.Request(last=True)
    return [*whole, pack(request, [payload[:96]]) + b"\xa5\x5a\xa5" + pack(second, [payload[96:]])]


def _frames(data: bytes) -> None:
    """Several messages of one kind, combined."""
    kinds: list[Any] = [ps_pb2.Request, ps_pb2.Reply, worker_pb2.UploadRequest, worker_pb2.DownloadReply]
    assembler = Assembler(1 << 20)
    kind = kinds[data[0] % 4] if data else kinds[0]
    for message in data[1:].split(b"\xa5\x5a\xa5"):
        assembler.add(*cast("Any", unpack(message, kind)))
    assembler.joined()


def _frames_examples() -> list[bytes]:
    first = pack(worker_pb2.DownloadReply(total_bytes=20), [bytes(12)])
    last = pack(worker_pb2.DownloadReply(last=True), [bytes(8)])
    upload = worker_pb2.UploadRequest(incarnation=3, total_bytes=4, last=True)
    upload.attachments.sizes.append(4)
    return [b"\3" + first + b"\xa5\x5a\xa5" + last, b"\2" + pack(upload, [bytes(4)]), b"\0" + _frames_of_requests()[0]]


# What every role answers, and workers


class _Node:
    """What every role answers, of a server; a new one for some inputs."""

    def __init__(self, folder: str) -> None:
        self._folder, self._used = folder, 0
        self._begin()

    def _begin(self) -> None:
        identity = node_pb2.Identity(version=VERSION, role="ps", name="ps 0")
        self._role = Server(self._folder).role
        self._service = NodeService(identity, self._role, lambda: None)

    def call(self, data: bytes) -> None:
        """Make a Hello, an attachment, or the end of a job."""
        self._used += 1
        if self._used % 20 == 0:
            self._begin()
        which, rest = (data[0] % 3, data[1:]) if data else (0, b"")
        if which == 0:
            self._service.hello(node_pb2.HelloRequest.FromString(rest), _context())
        elif which == 1:
            stream = cast("Any", self._service.attach(node_pb2.AttachRequest.FromString(rest), _context()))
            with contextlib.closing(stream):
                next(stream)
        else:
            self._service.end_job(node_pb2.EndJobRequest.FromString(rest), _context())

    def examples(self) -> list[bytes]:
        """Examples for `call`."""
        identity = node_pb2.Identity(version=VERSION, role="chief", index=0, boot_id=4, name="chief 0")
        attach = node_pb2.AttachRequest(
            coordinator=identity, job=JOB, num_workers=2, seed=5, closed=[1, 2], finished_starts=[1], finished_stops=[4]
        )
        attach.store_ids.append(8)
        attach.ps_timeout = 3.0
        again = node_pb2.AttachRequest()
        again.CopyFrom(attach)
        for held in self._role.store.held()[0]:
            again.placed.add().CopyFrom(held.spec)
            again.placed[-1].placement = 1
            named = {"variable": held.spec.id, "shard": 0, "server": 0}
            (again.frozen if held.spec.id == 1 else again.arriving).add(**named)
        again.workers.append(1)
        return [
            b"\0" + node_pb2.HelloRequest(identity=identity).SerializeToString(),
            b"\1" + attach.SerializeToString(),
            b"\1" + again.SerializeToString(),
            b"\2" + node_pb2.EndJobRequest(job=JOB, reason="over").SerializeToString(),
        ]


class _NoClient:
    """A worker's client that reaches no server. Its exchanges are itself."""

    def __init__(self) -> None:
        self.exchanges, self.servers = self, [SimpleNamespace(store_id=8)]

    @property
    def num_servers(self) -> int:
        """How many servers it has."""
        return len(self.servers)

    def add_server(self, _peer: object, store_id: int) -> None:
        """Add one."""
        self.servers.append(SimpleNamespace(store_id=store_id))

    def remove_server(self) -> None:
        """Remove the last."""
        self.servers.pop()

    def move(self, peer: Any) -> None:
        """Have one be elsewhere."""
        assert peer.index < len(self.servers)

    def report_seen(self, servers: Sequence[int]) -> None:
        """Tell no server."""

    def close(self) -> None:
        """Nothing to close."""


class _Worker:
    def __init__(self) -> None:
        self._role = WorkerRole(
            ServerList(0), lambda _request, _incarnation: cast("Any", _NoClient()), 1.0, Recording()
        )
        self.incarnation = attached(self._role, node_pb2.AttachRequest(job=JOB, num_workers=1)).incarnation
        self._service = WorkerService(self._role)

    def call(self, data: bytes) -> None:
        """Make an upload without code, or any other call, but those whose functions run."""
        which, rest = (data[0] % 8, data[1:]) if data else (0, b"")
        if which == 0:
            frames = rest.split(b"\xa5\x5a\xa5")[:3]
            if unpack(frames[0], worker_pb2.UploadRequest)[0].WhichOneof("body") != "definition":
                self._service.upload(iter(frames), _context())
        elif which == 1:
            self._service.recall(worker_pb2.RecallRequest.FromString(rest), _context())
        elif which == 2:
            self._service.release(worker_pb2.ReleaseRequest.FromString(rest), _context())
        elif which == 4:
            self._service.report_seen(worker_pb2.ReportSeenRequest.FromString(rest), _context())
        elif which == 5:
            self._service.answer(worker_pb2.AnswerRequest.FromString(rest), _context())
        elif which == 6:
            self._service.move_servers(worker_pb2.MoveServersRequest.FromString(rest), _context())
        elif which == 7:
            self._role.admit(node_pb2.AttachRequest.FromString(rest))
        else:
            list(self._service.download(worker_pb2.DownloadRequest.FromString(rest), _context()))

    def fit(self, data: bytes) -> bytes:
        """Put in this worker's incarnation, which no input could know."""
        return data.replace(_INCARNATION, self.incarnation.to_bytes(8, "little"))

    @staticmethod
    def examples() -> list[bytes]:
        """Examples for `call`."""
        incarnation = int.from_bytes(_INCARNATION, "little")
        upload = worker_pb2.UploadRequest(incarnation=incarnation, total_bytes=24, last=True)
        upload.attachments.position = 2
        upload.attachments.sizes.extend([8, 16])
        resource = worker_pb2.UploadRequest(incarnation=incarnation, last=True)
        resource.resource.id, resource.resource.definition = 4, "abc"
        recall = worker_pb2.RecallRequest(
            incarnation=incarnation, functions=[1, 2], positions=[1, 2], cancel_running=True
        )
        release = worker_pb2.ReleaseRequest(incarnation=incarnation, resources=[4], definitions=["abc"])
        answer = worker_pb2.AnswerRequest(incarnation=incarnation, function=1, position=1, number=1, value=encode(3))
        moved = node_pb2.ServerAddress(index=0, address="127.0.0.1:2222", tls_name="ps.pscluster")
        places: dict[str, Any] = {"ps_addresses": ["127.0.0.1:2222", "[::1]:2223"], "store_ids": [8, 9]}
        resized = worker_pb2.MoveServersRequest(incarnation=incarnation, servers=[moved], **places)
        attach = node_pb2.AttachRequest(job=JOB, num_workers=1, moved_servers=[moved], resized=True, **places)
        return [
            b"\0" + pack(upload, [bytes(24)]),
            b"\0" + pack(resource),
            b"\5" + answer.SerializeToString(),
            b"\6" + resized.SerializeToString(),
            b"\7" + attach.SerializeToString(),
            b"\1" + recall.SerializeToString(),
            b"\2" + release.SerializeToString(),
            b"\3" + worker_pb2.DownloadRequest(incarnation=incarnation, function=1).SerializeToString(),
            b"\4" + worker_pb2.ReportSeenRequest(incarnation=incarnation, servers=[0]).SerializeToString(),
        ]


# Those who have not proved anything yet, or ask to join

_SECRET = Secret.of("correct-horse-battery-staple")


class _Newcomers:
    """A handshake, the header of a call, or a registration, as the first byte says."""

    def __init__(self) -> None:
        self._sessions = SessionTable("ps", 0, 7)

    def call(self, data: bytes) -> None:
        """Take one of them."""
        which, rest = (data[0] % 3, data[1:]) if data else (0, b"")
        if which == 0:
            request = authentication_pb2.HandshakeRequest.FromString(rest)
            self._sessions.open([_SECRET], request, 0.0)
        elif which == 1:
            header = CallHeader.parse(rest.decode(errors="surrogateescape"))
            if header is None or self._sessions.admit(header, "/a/B", 0.0) is None:
                raise AuthenticationError("no header of a call, or of no session")
        else:
            asked = coordinator_pb2.RegisterRequest.FromString(rest)
            for caller in ("ipv4:10.0.0.9:4", "ipv6:%5Bfe80::1%25eth0%5D:4", "unix:"):
                with contextlib.suppress(RefusedError):
                    place_of(asked, caller, "unix:/run/job/chief-0", [ip_network("10.0.0.0/8")])
            claim = Claim(asked.secret, asked.task, asked.last_index if asked.had_index else None)
            Members([0, 1], limit=10).claim(claim, 100.0, lambda _: False)

    def examples(self) -> list[bytes]:
        """Examples for `call`."""
        handshake = make_request(_SECRET, "127.0.0.1:1", bytes(range(NONCE_BYTES)))
        session = accept_reply(_SECRET, handshake, self._sessions.open([_SECRET], handshake, 0.0).reply)
        asked: dict[str, Any] = {"port": 2222, "secret": bytes(SECRET_BYTES), "job_name": "digits"}
        registrations = [
            coordinator_pb2.RegisterRequest(host="10.0.0.3", task="3", **asked),
            coordinator_pb2.RegisterRequest(path="/run/job/worker-0", last_index=1, had_index=True, **asked),
        ]
        return [
            b"\0" + make_request(_SECRET, "127.0.0.1:1", bytes(NONCE_BYTES)).SerializeToString(),
            b"\1" + session.next_call("/a/B")[0].encode(),
            *(b"\2" + registration.SerializeToString() for registration in registrations),
        ]


_INCARNATION = bytes(range(0xB1, 0xB9))

_GANG = Gang.of(
    worker_pb2.Gang(id=1, generation=2, rank=1, members=[worker_pb2.GangMember()] * 2, secret=bytes(range(32)))
)
_BETWEEN = b"\xa5\x5a\xa5"


def _exchange(data: bytes) -> None:
    """What a member sends another one: an opening, which is checked or not, and a few messages."""
    checked, rest = data[:1] != b"\1", data[1:]
    mailbox = Mailbox(_GANG.rank, ["replica 0", "replica 1"], lambda _posted: None)
    mailbox.begin(worker_pb2.Signature(operation="barrier()"))
    hosted = Hosted(_GANG, lambda: mailbox)

    def find(opening: worker_pb2.Opening) -> Hosted:
        if checked:
            _GANG.check(opening)
        elif opening.source:
            raise NotPermittedError("it is another one's")
        return hosted

    for _ in Receiver(find).messages(iter(rest.split(_BETWEEN)[:4])):
        pass


def _exchange_examples() -> list[bytes]:
    sender = replace(_GANG, rank=0)
    opening = pack(worker_pb2.ExchangeRequest(opening=sender.opening(1)))
    signature = worker_pb2.Signature(operation="barrier()", layout="float32[2]", digest=1, place="a.py:1")
    messages = [
        pack(worker_pb2.ExchangeRequest(sequence=1, signature=signature, alone=True)),
        pack(worker_pb2.ExchangeRequest(sequence=1), [bytes(8)]),
        pack(worker_pb2.ExchangeRequest(sequence=2, signature=signature), [bytes(3)]),
    ]
    return [mark + _BETWEEN.join([opening, *messages]) for mark in (b"\0", b"\1")]


def _part(data: bytes) -> None:
    """A part of a dataset, by its position."""
    pipeline = Pipeline(cast("Any", range(100)), "numbers")
    Part(data.decode(errors="replace"), pipeline, cast("Reader", None))


def _handle(data: bytes) -> None:
    """The key of a handle that consists of other keys."""
    kind = ("slot", "metric")[data[0] % 2] if data else "slot"

    def resolve(_kind: str, key: str) -> Any:
        raise ProtocolError(f"nothing is called {key[:10]!r}")

    handle_of(kind, data[1:].decode(errors="replace"), lambda: cast("Any", None), resolve)


# Files


class _Files:
    """Files of checkpoints and of a server's state, written anew for every input."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = folder / "checkpoint"
        self._checkpoint.mkdir()
        self._state = StateDirectory(folder / "state")
        self._array = np.arange(12, dtype=np.float32).reshape(3, 4)
        (self._checkpoint / "part.safetensors").write_bytes(b"\0" * 64 + self._array.tobytes())
        (folder / "state" / "state-000001.safetensors").write_bytes(self._array.tobytes())
        self._token = folder / "token"
        self._log = folder / "log-000001.bin"

    def index(self, data: bytes) -> None:
        """Read an index, and what is examined first."""
        (self._checkpoint / "index.json").write_bytes(data)
        index = read_index(str(self._checkpoint))
        check_whole(index, str(self._checkpoint))
        assert index.nbytes >= 0

    def index_examples(self) -> list[bytes]:
        """Examples for `index`."""
        index = Index(3, "2026-01-01", 0.25)
        index.optimizers["adam"] = {"rule": "adam"}
        index.files["part.safetensors"] = SavedFile(112, 64, "0" * 64)
        named = [[SavedNamed.of([1, 2], [7, 1 << 63])], []]
        variable = SavedVariable("w", (3, 4), "float32", True, ((1, 3), (4,)), {}, [1, 2], [{"adam": 1}, {}], named)
        index.partly_applied, index.partly_applied_last = 1, ["step failed on worker 0"]
        for shard, rows in enumerate((1, 2)):
            tensor = SavedTensor(
                shard, "part.safetensors", f"w/part_{shard}", "float32", (rows, 4), 64, rows * 16, "0" * 64
            )
            variable.arrays.setdefault("value", []).append(tensor)
        index.variables["w"] = variable
        return [index.to_json()]

    @staticmethod
    def sign(data: bytes) -> bytes:
        """Give the index a digest that fits."""
        text, mark, _ = data.rpartition(b',\n "sha256": "')
        if not mark:
            return data
        digest = hashlib.sha256(text.decode(errors="replace").encode(errors="replace") + b"\n}").hexdigest()
        return text + mark + digest.encode() + b'"\n}\n'

    def tensor(self, data: bytes) -> None:
        """Check an index's description of a tensor against the file."""
        said = ps_pb2.SavedTensor.FromString(data)
        path = tensor_files.join(str(self._checkpoint), said.array or "part.safetensors")
        tensor_files.read(path, said)

    def tensor_examples(self) -> list[bytes]:
        """Examples for `tensor`."""
        checksum = xxhash.xxh3_128(self._array.tobytes()).hexdigest()
        said = ps_pb2.SavedTensor(tensor="w", dtype="float32", shape=[3, 4], offset=64, bytes=48, checksum=checksum)
        return [said.SerializeToString()]

    def delta(self, data: bytes) -> None:
        """Read a delta, and say of which version it is."""
        (self._checkpoint / "delta").write_bytes(data)
        loaded = read_delta(self._checkpoint / "delta")
        assert str(loaded.delta.since)
        assert len(loaded.ids) == len(loaded.rows)

    def manifest(self, data: bytes) -> None:
        """Read a generation of a server's state, with everything it refers to."""
        (self._state.path / "state-000001.manifest").write_bytes(data)
        manifest = self._state.manifest(1)
        restored(manifest, [self._state.read(shard) for shard in manifest.shards])

    def manifest_examples(self) -> list[bytes]:
        """Examples for `manifest`."""
        manifest = state_pb2.Manifest(server=0, job=JOB, generation=1, finished_starts=[1], finished_stops=[5])
        manifest.variables.add(id=1, name="w", dtype="float32", shape=[3, 4], owners=[0]).splits.extend(
            [ps_pb2.AxisSplit(ends=[3]), ps_pb2.AxisSplit(ends=[4])]
        )
        shard = manifest.shards.add(variable=1, shard=0, updates=4)
        shard.steps[11] = 2
        shard.keys.add(function=3, nth=[1, 2])
        saved = ps_pb2.SavedTensor(file="state-000001.safetensors", bytes=48, dtype="float32", shape=[3, 4])
        saved.checksum = xxhash.xxh3_128(self._array.tobytes()).hexdigest()
        for name in ("value", "slot/11/m"):
            saved.array = name
            shard.arrays.append(saved)
        spec = ps_pb2.OptimizerSpec(id=11, name="adam", rule="adam", numbers={"learning_rate": 0.1})
        manifest.optimizers.add(spec=spec)
        manifest.clients.add(incarnation=4, settled=2)
        body = manifest.SerializeToString()
        return [self.check_sum(durable_files._HEAD.pack(durable_files._MAGIC, 0, len(body)) + body)]

    @staticmethod
    def check_sum(data: bytes) -> bytes:
        """Give the manifest a checksum and a length that fit."""
        head = durable_files._HEAD.size
        if len(data) < head:
            return data
        body = data[head:]
        return durable_files._HEAD.pack(durable_files._MAGIC, zlib.crc32(body), len(body)) + body

    def log(self, data: bytes) -> None:
        """Read a segment of a log; of a damaged one count everything readable."""
        self._log.write_bytes(data)
        dropped = log_reader.Dropped()
        try:
            for record, payload in log_reader.records([self._log], 1, dropped=dropped):
                assert len(payload) <= len(data)
                assert record is not None
        finally:
            lost = log_reader.lost_in([self._log], 1)
            assert all(lost.updates[key] >= count for key, count in dropped.updates.items())

    @staticmethod
    def log_examples() -> list[bytes]:
        """Examples for `log`: from this boot, and from another one, with a truncated last record."""
        examples = []
        for boot in (log_format.machine_boot_id(), bytes(16)):
            head = log_format.with_crc(log_format.SEGMENT, log_format.SEGMENT_MAGIC, 1, 0, boot)
            data = head + bytes(log_format.FIRST - len(head))
            for index in range(2):
                request = unpack(_frames_of_requests()[4 + index], ps_pb2.Request)[0]
                record = pack(state_pb2.LogRecord(update=request.update, updates=[index + 1], last=True), [bytes(64)])
                data += log_format.header_of(0, len(record), len(data), 1, index + 1) + record
            mark = b"".join(log_format.mark_twice(len(data), 2, synced=False))
            data = head + mark + data[log_format.FIRST :]
            examples.append(_Files.log_sums(data))
        examples[1] = examples[1][:-9]
        return examples

    @staticmethod
    def log_sums(data: bytes) -> bytes:
        """Give the segment checksums that fit, as far as its records can be followed."""
        out, at, head = bytearray(data), log_format.FIRST, log_format.HEAD
        if len(out) < at:
            return data
        begin = 0
        for size in (log_format.SEGMENT.size, log_format.MARK.size, log_format.MARK.size):
            begin += size
            struct.pack_into("<I", out, begin - 4, zlib.crc32(out[begin - size : begin - 4]))
        while at + head.size <= len(out):
            _, _, _, size, batch, segment, record = head.unpack_from(out, at)
            if at + head.size + size <= len(out):
                body = bytes(out[at + head.size : at + head.size + size])
                checksum = xxhash.xxh3_64(body).intdigest() & 0xFFFF_FFFF
                out[at : at + head.size] = log_format.header_of(checksum, size, batch, segment, record)
            at += head.size + size
        return bytes(out)

    def token(self, data: bytes) -> None:
        """Read a file with tokens."""
        self._token.write_bytes(data)
        token = load_token(self._token, {})
        assert token is not None
        assert token.isascii()


_STEPS = """
import dataclasses, functools, math
from pathlib import Path
import numpy as np

RATE = 0.5

@dataclasses.dataclass(frozen=True)
class Batch:
    x: int
    of: object = None

class Model:
    @classmethod
    def named(cls, x):
        return cls.__name__, x

def step(*held):
    return held, math.floor(RATE)
"""


def _refuse_handle(kind: str, key: str) -> Any:
    raise ProtocolError(f"there is no {kind} {key}")


class _Functions:
    """Functions that came without pickles, with pickles off."""

    def __init__(self, folder: Path) -> None:
        name = f"steps_{folder.name.replace('-', '_')}"
        (folder / f"{name}.py").write_text(_STEPS)
        sys.path.append(str(folder))
        module = importlib.import_module(name)
        self._policy = SerializationPolicy(False, "pickles are off here", (folder.resolve(),), is_worker=True)
        np.save(folder / "mapped.npy", np.arange(12.0).reshape(3, 4))
        mapped = MappedArray.of(np.load(folder / "mapped.npy", mmap_mode="r"))
        functions = (
            module.step,
            module.Model.named,
            functools.partial(module.step, np.arange(30_000), module.Batch(1, [module.step]), k="a"),
            functools.partial(module.step, functools.partial(module.Model.named, module.Batch)),
            functools.partial(module.step, mapped),
        )
        self._forms: list[tuple[bytes, memoryview]] = []
        for function in functions:
            (form,) = capture(function, policy=self._policy).forms()
            bulk = split_off_bulk(form)
            self._forms.append((form.SerializeToString(), memoryview(bulk)))

    def examples(self) -> list[bytes]:
        """The first byte chooses the arrays."""
        return [bytes([index]) + form for index, (form, _) in enumerate(self._forms)]

    def resolve(self, data: bytes) -> None:
        """Resolve one definition. A file that is not here is requested again, by value."""
        form = definition_pb2.Definition.FromString(data[1:])
        before = chosen_policy()
        choose(self._policy)
        try:
            function = resolve(form, self._forms[data[0] % len(self._forms)][1] if data else b"", _refuse_handle)
            for argument in function.args if isinstance(function, functools.partial) else ():
                if isinstance(argument, MappedArray):
                    with contextlib.suppress(OSError):  # it does not exist
                        argument.open().tolist()
        finally:
            choose(before)


def _tf_config(data: bytes) -> None:
    config = TFConfig.parse(data.decode(errors="replace"))
    assert TFConfig.parse(config.to_json()).cluster == config.cluster


def _position(data: bytes) -> None:
    """The stored positions of datasets, in the job's metadata."""
    for state in decoded("positions", {"positions": data.decode(errors="replace")}).values():
        coverage = EpochCoverage(1000, 990)
        coverage.load(state if isinstance(state, dict) else {})
        coverage.take(coverage.epoch, lambda start: start + 10)


def _position_examples() -> list[bytes]:
    text = json.dumps({"train": {"length": 1000, "epoch": 2, "visited": {"2": [[0, 100], [200, 300]], "3": [[0, 64]]}}})
    return [text.encode()]


_TF_CONFIG = json.dumps(
    {
        "cluster": {"chief": ["c:2222"], "worker": ["w0:2222", "[::1]:2223"], "ps": {"0": "10.0.0.1:2222"}},
        "task": {"type": "worker", "index": 1},
        "rpc_layer": "grpc",
    }
)


def _packets_examples() -> list[bytes]:
    call = data_plane_pb2.DataCall(path="/a/B", metadata=[data_plane_pb2.DataMetadata(key="k", value="v")])
    status = data_plane_pb2.DataStatus(code=14, details="gone", trailing=call.metadata)
    messages = [(Kind.CALL, (call.SerializeToString(),)), (Kind.MESSAGE, (b"one",)), (Kind.MESSAGE, (b"t", b"wo" * 99))]
    return [
        b"".join(as_buffers([*messages, (Kind.END, ())])),
        b"".join(as_buffers([messages[1], (Kind.STATUS, (status.SerializeToString(),))])),
    ]


def _packets(data: bytes) -> None:
    """What any caller sends on the data plane, or a server to its client; all of it fits into the socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        reader = Connection(ours)
        reader.limit = MAX_CALL_BYTES
        with contextlib.suppress(ClosedError):
            while True:
                kind, body = reader.receive()
                if kind is Kind.CALL:
                    data_plane_pb2.DataCall.FromString(body)
                elif kind is Kind.STATUS:
                    data_plane_pb2.DataStatus.FromString(body)


def _program(data: bytes) -> None:
    """A program over global arrays, as a worker reads it. What makes sense can be planned."""
    program = parse.__wrapped__(data.decode(errors="replace"))
    assert len(program.last_use) == len(program.code)
    for array in program.arrays:
        assert len(array.layout.specs) == len(array.shape)


def _numbers(data: bytes) -> None:
    """The numbers of the arrays of a run of a program."""
    numbers = read_numbers(data)
    assert read_numbers(numbers.encoded()) == numbers


def _program_examples() -> list[bytes]:
    names = [f"/job:worker/task:{task}/device:CPU:0" for task in range(2)]
    mesh = Mesh({"x": 2}, names)
    rows, columns = (ArrayType((4, 3), np.dtype("f4"), Layout(specs, mesh)) for specs in (["x", None], [None, "x"]))
    terms = ArrayType((3,), np.dtype("f4"), Layout([None], mesh), ("x",), "maximum")
    code: list[Any] = [
        ["load", 1, 0],
        ["create", 2, "normal", [0.0, 1.5, 7]],
        ["move", 3, 1],
        ["compute", [4], "add", [0, 1], [["in", 0], ["in", 1]], {"dtype": "float32"}],
        ["compute", [5], "maximum.reduce", [4], [["in", 0]], {"axis": ["tuple", 0], "keepdims": False}],
        ["compute", [6], "getitem", [3], [["in", 0], ["tuple", ["slice", 0, None, 2], ["..."], ["shape", 0]]], {}],
        ["call", [7], 0, [4, 3], [], True],
        ["call", [], 1, [7], [["x", "unsharded"], []], False],
        ["fetch", 4, True],
    ]
    arrays = [rows, rows, rows, columns, rows, terms, columns, rows]
    return [encode_program(mesh, arrays, 1, code, [2, 3, 6]).encode(), encode_program(mesh, [], 0, [], []).encode()]


def _round(data: bytes) -> None:
    """Where another task says that its calls of a function are."""
    mesh = Mesh({"x": 2})
    with contextlib.suppress(MisuseError, MemberUnavailableError):
        rounds.decide(mesh, rounds.decode(data, [0, 1], mesh))


def _round_examples() -> list[bytes]:
    arrays = rounds.ArrayShape("float32", (2, 3)), rounds.ArrayShape("int8", ())
    waiting = rounds.Waiting("psum", ("x",), arrays, 0, "train.py:3")
    statuses: list[rounds.Status] = [
        waiting,
        waiting,
        rounds.Ended(arrays, (3, 1 << 63)),
        rounds.Failed("ValueError: no"),
    ]
    return [rounds.encode(dict(enumerate(statuses[at : at + 2]))) for at in range(3)]


def _once(ids: Any) -> Any:
    return iter([ids])


def _delta_examples() -> list[bytes]:
    """Deltas of a variable and of tables by id, in both formats."""
    examples = []
    for shape, any_ids, id_bytes in (((12, 2), False, 0), ((0, 3), True, 0), ((12,), False, 0), ((0, 3), True, 16)):
        rows = np.arange(math.prod((3, *shape[1:])), dtype=np.float32).reshape(3, *shape[1:])
        versions = TableVersion(1, 32 * "a"), TableVersion(2, 32 * "b")
        header = Header("t", rows.dtype, shape, any_ids, *versions, id_bytes)
        ids: Any = np.array([b"a", b"th\xc3\xa9", b"x" * 16] if id_bytes else [1, 4, 9], header.id_dtype)

        def take(some: Any, rows: Any = rows, ids: Any = ids) -> Any:
            return rows[np.searchsorted(ids, some)]

        def has(some: Any, ids: Any = ids, any_ids: bool = any_ids) -> Any:
            return (some != ids[1]) | (not any_ids)

        changes = Changes(header, 3, functools.partial(_once, ids), take, has)
        for write in (delta_safetensors.write, delta_parquet.write):
            file = io.BytesIO()
            write(file, changes)
            examples.append(file.getvalue())
    return examples


def _with_delta_checksum(data: bytes) -> bytes:
    """The checksum of a delta in safetensors made to fit; Parquet as it is."""
    if data.startswith(delta_parquet.MAGIC):
        return data
    return data[:-16] + xxhash.xxh3_128_digest(data[:-16])


def all_decoders(folder: Path) -> list[Decoder]:
    """All decoders; their files are in the folder."""
    files, worker, functions = _Files(folder), _Worker(), _Functions(folder)
    newcomers = _Newcomers()
    node = _Node(tempfile.mkdtemp(dir=folder))
    servers = _Servers(tempfile.mkdtemp(dir=folder))
    steps, moves = _Steps(tempfile.mkdtemp(dir=folder)), _Moves(tempfile.mkdtemp(dir=folder))
    frames = _frames_of_requests()
    pulls = [data for data in frames if unpack(data, ps_pb2.Request)[0].WhichOneof("body") == "read"]
    values = [encode(example).SerializeToString() for example in _objects()]
    slot, metric = (
        json.dumps(["1:w", "adam", "m"]).encode(),
        json.dumps(["AUC", "a", {"num_thresholds": 9}, ["2:t", "3:f", "4:p", "5:n"]]).encode(),
    )
    return [
        Decoder("value", values, _decode),
        Decoder("call", _call_example(), _decode_call),
        Decoder("failure", _failures(), _failure),
        Decoder("frames", _frames_examples(), _frames),
        Decoder("packets", _packets_examples(), _packets),
        Decoder("program", _program_examples(), _program, (ProtocolError, MisuseError)),
        Decoder("numbers", [Numbers([1, 2], [3], [4, 5], [1]).encoded()], _numbers),
        Decoder("round", _round_examples(), _round),
        Decoder("session", frames, servers.session),
        Decoder("push", _push_examples(), servers.push),
        Decoder("pull", pulls, servers.pull),
        Decoder("ps", servers.unary_examples(), servers.unary),
        Decoder("node", node.examples(), node.call),
        Decoder("worker", worker.examples(), worker.call, fit=worker.fit),
        Decoder("newcomer", newcomers.examples(), newcomers.call),
        Decoder("exchange", _exchange_examples(), _exchange),
        Decoder("steps", steps.examples(), steps.run),
        Decoder("moves", moves.examples(), moves.run),
        Decoder("function", functions.examples(), functions.resolve),
        Decoder("part", [b"3/0/10/20"], _part),
        Decoder("handle", [b"\0" + slot, b"\1" + metric], _handle),
        Decoder("index", files.index_examples(), files.index, (CheckpointError,), files.sign),
        Decoder("tensor", files.tensor_examples(), files.tensor, (CheckpointError, DecodeError)),
        # The manager treats these as damage.
        Decoder(
            "manifest",
            files.manifest_examples(),
            files.manifest,
            (PsClusterError, ValueError, KeyError),
            files.check_sum,
        ),
        Decoder("delta", _delta_examples(), files.delta, (CheckpointError,), _with_delta_checksum),
        Decoder("log", files.log_examples(), files.log, (DamagedError,), files.log_sums),
        Decoder(
            "token",
            [b"abcdefghijklmnopqrstuvwxyz01\nqrstuvwxyz0123456789abcdefgh\n"],
            files.token,
            (ConfigurationError,),
        ),
        Decoder("tf_config", [_TF_CONFIG.encode()], _tf_config, (ConfigurationError,)),
        Decoder(
            "address",
            [b"ps0:2222", b"[::1]:1", b"unix:/run/job/ps-0"],
            lambda data: parse_address(data.decode(errors="replace")),
            (ConfigurationError,),
        ),
        Decoder("position", _position_examples(), _position, (CheckpointError,)),
    ]


def seeded(name: str, input_number: int) -> random.Random:
    """The random numbers for one input."""
    return random.Random(f"{name}/{input_number}")
