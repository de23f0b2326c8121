"""Limits on what a peer may request: anything above is refused with a message that names the limit."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from typing import Any, cast

import grpc
import numpy as np
import pytest
from tests.fakes import FakeCall

from pscluster.coordinator.queue.cluster_coordinator import DEFAULTS
from pscluster.core import limits
from pscluster.core.errors import InvalidUpdateError, ProtocolError, PsClusterError
from pscluster.core.ids import VERSION, check_version
from pscluster.core.role.node import NodeService, Role
from pscluster.core.transport.channels import NODE_SERVICE
from pscluster.core.transport.frames import pack, unpack
from pscluster.core.transport.methods import generic_handler
from pscluster.core.values import decode
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.v1 import node_pb2, ps_pb2, value_pb2, worker_pb2
from pscluster.worker.data.prefetch import Part
from pscluster.worker.service import _check

JOB = 77
OURS = node_pb2.Identity(version=VERSION, role="ps", name="ps 0")


def context() -> grpc.ServicerContext:
    """The context of an active call."""
    return cast("grpc.ServicerContext", FakeCall())


def attach(**fields: Any) -> None:
    """Attach to a role as a coordinator does."""
    service = NodeService(OURS, Role(), lambda: None)
    request = node_pb2.AttachRequest(coordinator=OURS, job=JOB, **fields)
    stream = cast("Any", service.attach(request, context()))
    next(stream)
    stream.close()


def ps() -> ParameterServerService:
    """A server without variables."""
    role = ParameterServerRole(0)
    role.job_began(node_pb2.AttachRequest(job=JOB))
    return ParameterServerService(role)


def create(**fields: Any) -> None:
    """Create a variable."""
    spec = ps_pb2.VariableSpec(id=1, dtype="float32", **fields)
    request = ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB, variable=spec), last=True)
    ps().push(iter([pack(request)]), context())


def upload(total: int, sizes: list[int] | None = None) -> None:
    """Announce an upload."""
    request = worker_pb2.UploadRequest(total_bytes=total)
    if sizes is None:
        request.definition.SetInParent()
    else:
        request.attachments.sizes.extend(sizes)
    _check(request)


MANY = [0] * (limits.MAX_COUNT + 1)
LARGE = ps_pb2.Request(read=ps_pb2.ReadRequest(items=[ps_pb2.ReadItem(slot="x" * (5 << 20))]))
LONG = "x" * (limits.MAX_NAME + 1)
TOO_MUCH: dict[str, tuple[Callable[[], object], str]] = {
    "a frame's header": (
        lambda: unpack(LARGE.SerializeToString(), ps_pb2.Request),
        r"a frame with [0-9,]+ bytes( or more)? beside its payload; the limit is 1,048,576",
    ),
    "a variable's name": (lambda: create(name=LONG, owners=[0]), r"a variable's name of 1,025 characters, .*1,024"),
    "a variable's axes": (
        lambda: create(name="v", shape=[1] * 65, splits=[ps_pb2.AxisSplit(ends=[1])] * 65, owners=[0]),
        "'v' has 65 axes; the limit is 64",
    ),
    "intervals of functions": (
        lambda: ps().finish_functions(ps_pb2.FinishFunctionsRequest(job=JOB, starts=MANY, stops=MANY), context()),
        "32,769 intervals of functions in one request; the limit is 32,768: send several",
    ),
    "intervals at an attachment": (
        lambda: attach(finished_starts=bytes(limits.MAX_ENDED + 1), finished_stops=bytes(limits.MAX_ENDED + 1)),
        "1,048,577 intervals",
    ),
    "half an interval": (lambda: attach(finished_starts=[1]), "a stop for each start"),
    "a wait": (lambda: attach(ps_timeout=math.nan), "ps_timeout is nan s"),
    "a wait without end": (lambda: attach(ps_timeout=math.inf), "ps_timeout is inf s"),
    "a peer's name": (
        lambda: check_version(node_pb2.Identity(version=VERSION, name=LONG), OURS),
        "a peer's name of 1,025",
    ),
    "a pickle": (lambda: upload(limits.MAX_PICKLE_BYTES + 1), "1,073,741,825 bytes; the limit is 1,073,741,824"),
    "arrays": (lambda: upload(0, MANY), "32,769 arrays beside the arguments"),
    "arrays' sizes": (lambda: upload(5, [2, 2]), "attachments of 4 bytes, but 5 are declared"),
    "axes of an array": (
        lambda: decode(value_pb2.Value(array=value_pb2.Array(dtype="int8", shape=[1] * 100, data=b"x"))),
        "an array of 100 dimensions",
    ),
    "an element type": (
        lambda: decode(value_pb2.Value(array=value_pb2.Array(dtype=LONG, data=b"x"))),
        "unknown element type 'xxx",
    ),
    "a part of a dataset": (lambda: Part("3/1/-5/9", cast("Any", None), cast("Any", None)), "'3/1/-5/9' is not a part"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_too_much(case: str) -> None:
    """It is refused with an error that names what came, and the limit."""
    call, message = TOO_MUCH[case]
    with pytest.raises(ProtocolError, match=message):
        call()


def test_a_server_learns_of_all_functions_that_have_ended() -> None:
    """When it is taken, in one request: as many intervals as a full queue leaves if every other function has ended."""
    starts = range(1, 2 * int(DEFAULTS["max_queued"]) + 2, 2)
    attach(finished_starts=starts, finished_stops=[start + 1 for start in starts])
    bytes_each = node_pb2.AttachRequest(finished_starts=[1 << 34], finished_stops=[1 << 34]).ByteSize() - 4
    assert bytes_each * limits.MAX_ENDED < limits.MAX_CONTROL_BYTES


def test_a_request_that_is_no_frame() -> None:
    """Above 16 MiB it is refused before it is parsed."""
    seen: list[str] = []
    handler = cast("Any", generic_handler(NODE_SERVICE, NodeService(OURS, Role(), lambda: None), seen.append))

    class Call(FakeCall):
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def set_trailing_metadata(self, _metadata: object) -> None:
            pass

        def abort(self, code: grpc.StatusCode, details: str) -> None:
            raise PsClusterError(f"{code.name}: {details}")

    class Details:
        method = "/pscluster.v1.Node/Status"

    behaviour = handler.service(Details).unary_unary
    with pytest.raises(PsClusterError, match=r"INVALID_ARGUMENT: 16,777,217 bytes in one request to .*Status; the"):
        behaviour(bytes(limits.MAX_CONTROL_BYTES + 1), Call())
    assert behaviour(b"", Call()).state == "waiting for a coordinator"
    assert seen == ["ipv4:127.0.0.1:1"] * 2


def test_the_same_row_again_and_again() -> None:
    """A read of rows may not total more than a GiB if the variable is smaller."""
    service = ps()
    spec = ps_pb2.VariableSpec(id=1, name="v", dtype="float32", shape=[2, 1 << 16], owners=[0])
    spec.splits.extend([ps_pb2.AxisSplit(ends=[2]), ps_pb2.AxisSplit(ends=[1 << 16])])
    made = ps_pb2.CreateRequest(job=JOB, variable=spec, initializer=ps_pb2.Initializer(name="zeros"))
    service.push(iter([pack(ps_pb2.Request(create=made, last=True))]), context())
    ids = np.zeros(5000, np.int64)
    item = ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(ids=len(ids)))
    request = ps_pb2.Request(read=ps_pb2.ReadRequest(job=JOB, items=[item]), total_bytes=ids.nbytes, last=True)
    with pytest.raises(
        InvalidUpdateError, match="5,000 rows of 'v' take 1,310,720,000 bytes, the limit for one item of a read"
    ):
        list(service.pull(pack(request, [ids.tobytes()]), context()))


def test_errors_are_short() -> None:
    """A peer's long text is cut in an error, and stays text; a line of the log stays one line."""
    assert limits.shortened("short") == "short"
    for text in ("x" * 100_000, "é" * 100_000, "\N{OLD PERSIAN NUMBER HUNDRED}" * 100_000, "\ud800" * 9000):
        cut = limits.shortened(text)
        assert cut.endswith(" ...")
        assert len(cut.encode()) <= limits.MAX_ERROR_BYTES + 4
    assert limits.one_line("a\nb\x1b[31mc" + "d" * 500) == "a\\nb\\x1b[31mc" + "d" * 191


@pytest.mark.parametrize(
    ("soft", "hard", "most", "expected"),
    [
        (256, 4096, 4096, 4096),
        (256, resource.RLIM_INFINITY, 24576, 10240),
        (20000, resource.RLIM_INFINITY, 24576, 20000),
        (256, 100_000, 24576, 10240),
        (256, resource.RLIM_INFINITY, 300, 256),
    ],
)
def test_descriptors(soft: int, hard: int, most: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the process may have; some systems refuse the hard limit that they themselves report."""
    now = [(soft, hard)]

    def setrlimit(_which: int, wanted: tuple[int, int]) -> None:
        if not 0 <= wanted[0] <= most:
            raise ValueError("current limit exceeds maximum limit")
        now[0] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _which: now[0])
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    limits.raise_descriptor_limit()
    assert now[0] == (expected, hard)
