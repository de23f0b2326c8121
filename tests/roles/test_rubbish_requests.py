"""Almost valid requests to a parameter server are refused with a message; nothing is changed or allocated.

The servicer is called as grpc would call it, without a network, so that thousands of requests can be tried.
"""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from collections.abc import Iterator
from typing import Any, cast

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes import FakeCall

from pscluster.core.errors import PsClusterError
from pscluster.core.transport.frames import pack, padding, unpack
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.wire_dtypes import encoded_bytes
from pscluster.v1 import node_pb2, ps_pb2

JOB = 77
CONTEXT = cast("grpc.ServicerContext", FakeCall())
ALLOCATES = 4 << 20
"""No request here, however large what it declares, needs more."""

SHAPES: dict[int, tuple[str, tuple[int, ...]]] = {
    1: ("float32", (4, 4)),
    2: ("int64", ()),
    3: ("float64", (2, 3, 4)),
    4: ("float32", (0, 3)),
    5: ("complex64", (3, 0)),
    6: ("bool", (5,)),
    7: ("float16", (3, 2)),
}
OPTIMIZERS = {11: "sgd", 12: "adam", 13: "ftrl"}
HUGE = (2**44, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Server:
    """A server with a few variables and optimizers."""

    def __init__(self) -> None:
        self.role = ParameterServerRole(0)
        self.service = ParameterServerService(self.role)
        self.role.job_began(node_pb2.AttachRequest(job=JOB))
        for variable, (dtype, shape) in SHAPES.items():
            spec = ps_pb2.VariableSpec(id=variable, name=f"v{variable}", dtype=dtype, shape=shape, owners=[0])
            for length in shape:
                spec.splits.add(ends=[length])
            array = np.ones(shape, dtype)
            data = array.tobytes() + bytes(padding(array.nbytes))
            request = ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB, variable=spec))
            request.total_bytes, request.last = len(data), True
            self.push(request, data)
        for optimizer, rule in OPTIMIZERS.items():
            create = ps_pb2.CreateRequest(job=JOB)
            create.optimizer.id, create.optimizer.name, create.optimizer.rule = optimizer, rule, rule
            self.push(ps_pb2.Request(create=create, last=True), b"")

    def push(self, request: ps_pb2.Request, payload: bytes) -> ps_pb2.Reply:
        """Send it as one frame of a Push."""
        return unpack(self.service.push(iter([pack(request, [payload])]), CONTEXT), ps_pb2.Reply)[0]

    def session(self, request: ps_pb2.Request, payload: bytes) -> tuple[ps_pb2.Reply, bytes]:
        """Send it over a session."""
        (data,) = self.service.session(iter([pack(request, [payload])]), CONTEXT)
        reply, answer = unpack(data, ps_pb2.Reply)
        return reply, bytes(answer)

    def values(self) -> dict[int, bytes]:
        """The values of all variables."""
        payloads = {}
        for variable in SHAPES:
            item = ps_pb2.ReadItem(variable=variable, shard=0, rows=ps_pb2.Rows(all=True))
            request = ps_pb2.Request(read=ps_pb2.ReadRequest(job=JOB, items=[item]), last=True)
            reply, payloads[variable] = self.session(request, b"")
            assert not reply.HasField("refusal"), reply
        return payloads


counts = st.sampled_from([0, 1, 1, 2, 2, 3, 4, 5]) | st.sampled_from(HUGE)
numbers = st.sampled_from([*SHAPES, 1, 1, 1, 3, 3, 99, 0, 2**32 - 1])
wire_dtypes = st.sampled_from([0, 0, 0, 0, 0, 1, 2, 3, 3, 4, -1])
row_ids = st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, -1, 2**31, 2**62, -(2**63)])


@st.composite
def rows(draw: st.DrawFn, variable: int) -> ps_pb2.Rows:
    """Some rows of a variable: often ones that it has."""
    shape = SHAPES.get(variable, ("", ()))[1]
    kind = draw(st.sampled_from(["all", "slices", "slices", "ids", "ids", "ids", "none"]))
    chosen = ps_pb2.Rows()
    if kind == "all":
        chosen.all = True
    elif kind == "slices":
        chosen.slices.SetInParent()
        for axis in range(len(shape) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))):
            length = shape[axis] if axis < len(shape) else 2
            if draw(st.integers(0, 3)):
                chosen.slices.axes.add(start=0, step=1, count=length)
            else:
                step = draw(st.sampled_from([1, -1, 2, 0, 2**62, -(2**63)]))
                chosen.slices.axes.add(start=draw(counts), step=step, count=draw(counts))
    elif kind == "ids":
        chosen.ids = draw(counts)
        chosen.leading = draw(st.sampled_from([0, 0, 1, 2, 3, 4, 2**32 - 1]))
    return chosen


def row_size(variable: int, chosen: ps_pb2.Rows) -> int:
    """The size in bytes of the values that the rows select, if there are such."""
    dtype, shape = SHAPES.get(variable, ("float32", (4, 4)))
    itemsize = np.dtype(dtype).itemsize
    if chosen.WhichOneof("kind") == "all":
        return math.prod(shape) * itemsize
    if chosen.WhichOneof("kind") == "slices":
        return math.prod(axis.count for axis in chosen.slices.axes) * itemsize
    return chosen.ids * math.prod(shape[max(chosen.leading, 1) :]) * itemsize


def encoded_size(item: ps_pb2.UpdateItem) -> int:
    """The size of the values of an encoded gradient, if it is one of a shard."""
    shape = SHAPES.get(item.variable, ("", ()))[1]
    by_rows = item.rows.WhichOneof("kind") == "ids"
    width = item.elements or math.prod(shape[max(item.rows.leading, 1) :] if by_rows else shape)
    wire_dtype = item.wire_dtype if item.wire_dtype in range(4) else 0
    size = encoded_bytes(wire_dtype, item.rows.ids if by_rows else 1, width) + 4 * item.elements
    return min(size, 2**64 - 1)


def segments(draw: st.DrawFn, sizes: list[tuple[str, int]]) -> bytes:
    """A payload for items of these sizes; values that would be too large are omitted."""
    parts = []
    for kind, size in sizes:
        if size > 1 << 16:
            continue
        if kind == "ids":
            segment = np.array([draw(row_ids) for _ in range(size // 8)], np.int64).tobytes()
        else:
            segment = draw(st.sampled_from([b"\0", b"\x01", b"\x3f", b"\xff"])) * size
        parts.append(segment + bytes(padding(len(segment))))
    return b"".join(parts)


@st.composite
def reads(draw: st.DrawFn) -> tuple[ps_pb2.Request, bytes]:
    """An almost valid read."""
    request, sizes = ps_pb2.Request(), []
    request.read.job = draw(st.sampled_from([JOB] * 9 + [0, JOB + 1]))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3, 0]))):
        variable = draw(numbers)
        chosen = draw(rows(variable))
        request.read.items.add(
            variable=variable,
            shard=draw(st.sampled_from([0] * 9 + [1, 2**32 - 1])),
            rows=chosen,
            optimizer=draw(st.sampled_from([0, *OPTIMIZERS, 99])),
            slot=draw(st.sampled_from(["", "", "", "m", "v", "momentum", "average", "x"])),
            wire_dtype=cast("Any", draw(wire_dtypes)),
        )
        if chosen.WhichOneof("kind") == "ids":
            sizes.append(("ids", chosen.ids * 8))
    return finish(draw, request, sizes)


@st.composite
def updates(draw: st.DrawFn) -> tuple[ps_pb2.Request, bytes]:
    """An almost valid update."""
    request, sizes = ps_pb2.Request(), []
    update = request.update
    update.job = draw(st.sampled_from([JOB] * 9 + [0, JOB + 1]))
    update.incarnation = draw(st.integers(0, 3))
    update.function = draw(st.integers(0, 3) | st.integers(0, 2**64 - 1))
    update.sequence = draw(st.integers(0, 2**64 - 1))
    update.settled = draw(st.sampled_from([0, 0, 0, 1, 2**64 - 1]))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3, 0]))):
        variable = draw(numbers)
        chosen = draw(rows(variable))
        scalar = draw(st.sampled_from([False, False, False, True]))
        itemsize = np.dtype(SHAPES.get(variable, ("float32", ()))[0]).itemsize
        size = itemsize if scalar else row_size(variable, chosen)
        if draw(st.integers(0, 9)) == 0:
            size = draw(counts)
        update.items.add(
            variable=variable,
            shard=draw(st.sampled_from([0] * 9 + [1])),
            kind=cast("Any", draw(st.integers(1, 8) | st.integers(-1, 12))),
            rows=chosen,
            optimizer=draw(st.sampled_from([*OPTIMIZERS, 99])),
            nth=draw(st.integers(0, 3)),
            value_bytes=min(size, 2**64 - 1),
            scalar=scalar,
        )
        item = update.items[-1]
        item.wire_dtype = cast("Any", draw(wire_dtypes))
        if draw(st.integers(0, 5)) == 0:
            item.elements = draw(counts)
        if (item.wire_dtype or item.elements) and draw(st.integers(0, 5)):
            item.kind, item.scalar = ps_pb2.APPLY_GRADIENT, False
            size = item.value_bytes = encoded_size(item)
        if chosen.WhichOneof("kind") == "ids":
            sizes.append(("ids", chosen.ids * 8))
        sizes.append(("values", size))
    return finish(draw, request, sizes)


lengths = st.sampled_from([0, 1, 2, 3, 4]) | st.sampled_from(HUGE)
SPECIFICATIONS = [
    "",
    "{}",
    "[]",
    "null",
    "1",
    '"x"',
    "{",
    "[" * 5000,
    '{"seed": 1}',
    '{"value": NaN}',
    '{"value": "x"}',
]
SCHEDULES = [
    "",
    '{"name": "x"}',
    '{"name": "constant"}',
    '{"name": "exponential_decay", "decay_steps": 0}',
    *SPECIFICATIONS,
]


@st.composite
def creations(draw: st.DrawFn) -> tuple[ps_pb2.Request, bytes]:
    """An almost valid variable or optimizer, with a number and a name that no other has."""
    request = ps_pb2.Request()
    create = request.create
    create.job = draw(st.sampled_from([JOB] * 9 + [0]))
    sizes = []
    if draw(st.booleans()):
        shape = draw(st.lists(lengths, max_size=3))
        spec = create.variable
        spec.id, spec.name = draw(st.sampled_from([50, 50, 50, 1, 0])), draw(st.sampled_from(["new", "v1", ""]))
        spec.dtype = draw(st.sampled_from(["float32", "int8", "bool", "bfloat16", "object", "", "S1000000000"]))
        spec.shape.extend(shape)
        for length in shape:
            spec.splits.add(
                ends=draw(st.sampled_from([[length], [length], [0, length], [length // 2, length], [], [9]]))
            )
        shards = math.prod(len(split.ends) for split in spec.splits)
        spec.owners.extend(
            [draw(st.sampled_from([0, 0, 1, 2**32 - 1])) for _ in range(draw(st.just(shards) | counts) % 9)]
        )
        if draw(st.booleans()):
            create.initializer.name = draw(st.sampled_from(["zeros", "ones", "constant", "random_uniform", "x", ""]))
            create.initializer.numbers = draw(st.sampled_from(SPECIFICATIONS))
        else:
            sizes.append(("values", math.prod(shape) * 4))
    else:
        optimizer = create.optimizer
        optimizer.id, optimizer.name = draw(st.sampled_from([60, 60, 0])), draw(st.sampled_from(["new", ""]))
        optimizer.rule = draw(st.sampled_from(["sgd", "adam", "ftrl", "custom", ""]))
        names = st.sampled_from(["learning_rate", "momentum", "beta_1", "epsilon", "x"])
        reals = st.sampled_from([0.0, 0.1, 1.0, -1.0, math.inf, math.nan, 1e308])
        for name in draw(st.lists(names, max_size=3)):
            optimizer.numbers[name] = draw(reals)
        for name in draw(st.lists(st.sampled_from(["nesterov", "centered", "x"]), max_size=2)):
            optimizer.flags[name] = draw(st.booleans())
        optimizer.schedule = draw(st.sampled_from(SCHEDULES))
        optimizer.options = draw(st.sampled_from(SPECIFICATIONS))
        optimizer.ema_momentum = draw(reals)
    return finish(draw, request, sizes)


def finish(draw: st.DrawFn, request: ps_pb2.Request, sizes: list[tuple[str, int]]) -> tuple[ps_pb2.Request, bytes]:
    """Add the payload, and the frame's description of it, which is mostly right."""
    payload = segments(draw, sizes)
    if draw(st.integers(0, 9)) == 0:
        payload = payload[: draw(st.integers(0, len(payload)))]
    request.total_bytes, request.last = len(payload), True
    if draw(st.integers(0, 9)) == 0:
        request.total_bytes = draw(counts)
    return request, payload


SETTINGS = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextlib.contextmanager
def modest() -> Iterator[None]:
    """Check that the block allocates little."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak < ALLOCATES, f"{peak:,} bytes"
    finally:
        tracemalloc.stop()


@given(case=reads() | updates() | creations(), pushed=st.booleans())
@SETTINGS
def test_almost_right(case: tuple[ps_pb2.Request, bytes], pushed: bool) -> None:
    """It is answered, or refused with one of our errors; a refused one has changed no variable."""
    server = Server()
    request, payload = case
    before = server.values()
    refused = True
    with modest():
        if request.HasField("read") and pushed:
            with contextlib.suppress(PsClusterError):
                data = pack(request, [payload])
                frames = [unpack(frame, ps_pb2.Reply) for frame in server.service.pull(data, CONTEXT)]
                assert frames[0][0].total_bytes == sum(len(answer) for _, answer in frames)
                assert [head.last for head, _ in frames] == [False] * (len(frames) - 1) + [True]
        elif pushed:
            with contextlib.suppress(PsClusterError):
                server.push(request, payload)
                refused = False
        else:
            reply, answer = server.session(request, payload)
            refused = reply.HasField("refusal")
            if not refused and request.HasField("read"):
                assert reply.total_bytes == len(answer)
            if refused:
                assert reply.refusal.message
                assert not answer
    if refused or request.HasField("create"):
        assert server.values() == before


INT8, ROW = ps_pb2.WIRE_INT8, ps_pb2.Rows(ids=1)
NAN, UNSORTED, BEYOND = (np.array(numbers, "<u4").tobytes() for numbers in ([0x7FC00000], [3, 1], [1, 16]))


@pytest.mark.parametrize(
    ("fields", "values", "message"),
    [
        ({"rows": ROW, "wire_dtype": INT8}, NAN + bytes(4), "scales that are not finite numbers"),
        ({"rows": ROW, "wire_dtype": INT8}, b"\0\0\x80\xbf" + bytes(4), "scales that are not finite numbers"),
        ({"rows": ps_pb2.Rows(all=True), "wire_dtype": INT8}, NAN + bytes(16), "scales that are not finite numbers"),
        ({"rows": ROW, "wire_dtype": INT8}, bytes(9), "got 9 bytes of values .* expected 8"),
        ({"rows": ROW, "wire_dtype": 9}, bytes(8), "unknown wire type 9"),
        ({"rows": ps_pb2.Rows(all=True), "elements": 2}, UNSORTED + bytes(8), "not ascending ones below 16"),
        ({"rows": ps_pb2.Rows(all=True), "elements": 2}, BEYOND + bytes(8), "not ascending ones below 16"),
        (
            {"rows": ps_pb2.Rows(all=True), "elements": 17},
            bytes(17 * 8),
            "17 elements of a shard of 'v1', which has 16",
        ),
        ({"rows": ROW, "elements": 1}, bytes(8), "single elements of rows"),
        ({"rows": ROW, "wire_dtype": INT8, "kind": ps_pb2.ADD}, bytes(8), "is not a gradient"),
        ({"rows": ROW, "wire_dtype": INT8, "gradients": 2}, bytes(8), "several gradients"),
        ({"rows": ROW, "wire_dtype": INT8, "variable": 7}, bytes(6), "'v7' is float16: only float32 is sent as int8"),
    ],
)
def test_encoded_gradients_that_are_none(fields: dict[str, Any], values: bytes, message: str) -> None:
    """Nothing of their request is applied, also of the items before."""
    server = Server()
    before = server.values()
    good = ps_pb2.UpdateItem(
        variable=1, kind=ps_pb2.APPLY_GRADIENT, optimizer=11, rows=ps_pb2.Rows(all=True), nth=1, value_bytes=64
    )
    item = ps_pb2.UpdateItem(**{"variable": 1, "kind": ps_pb2.APPLY_GRADIENT, "optimizer": 11, "nth": 2, **fields})
    item.value_bytes = len(values)
    payload = np.ones(16, np.float32).tobytes()
    for segment in (bytes(8 * item.rows.ids), values):
        payload += segment + bytes(padding(len(segment)))
    request = ps_pb2.Request(update=ps_pb2.UpdateRequest(job=JOB, incarnation=5, sequence=1, items=[good, item]))
    request.total_bytes, request.last = len(payload), True
    with pytest.raises(PsClusterError, match=message):
        server.push(request, payload)
    reply, _ = server.session(request, payload)
    assert reply.HasField("refusal")
    assert server.values() == before


@given(data=st.binary(max_size=300))
@SETTINGS
def test_bytes_on_a_session(data: bytes) -> None:
    """A session that receives something other than a request ends with one of our errors."""
    server = Server()
    with modest(), contextlib.suppress(PsClusterError):
        list(server.service.session(iter([data]), CONTEXT))
