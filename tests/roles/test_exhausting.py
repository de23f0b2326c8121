"""A caller with the token, or a worker's key, that tries to monopolise a server: it is bounded, others continue."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from tests.roles.hostile import half_messages
from tests.roles.processes import Process, Roles, make_cluster
from tests.roles.wire import JOB, OPTIMIZER, SECONDS, VARIABLE, Connection, add_to_all, connect

from pscluster.core.transport.frames import pack, unpack
from pscluster.v1 import ps_pb2

ROWS = 4
IN_FLIGHT = 16 << 20
BOUND = IN_FLIGHT + (48 << 20)
STREAM = 256 << 10  # of each: gRPC's window of 64 KiB, and the thread that reads it, while all are read at once
SESSION = "/pscluster.v1.ParameterServer/Session"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, str, Connection]]:
    """A parameter server with a variable, and a client that works with it."""
    cluster = make_cluster(workers=0)
    with Roles(cluster, tmp_path_factory.mktemp("exhausting"), {"PSCLUSTER_IN_FLIGHT_MIB": "16"}) as roles:
        ps = roles.ps()
        with connect(cluster["ps"][0]) as friend, friend.held():
            friend.create(ROWS)
            yield ps, cluster["ps"][0], friend


def update(friend: Connection, sequence: int) -> None:
    """Add ones to the whole variable, on a separate session."""
    ones = np.ones((ROWS, 4), np.float32)
    request = add_to_all(ones, sequence)
    request.last = True
    (data,) = friend.ps.session(iter([pack(request, [ones.tobytes()])]), timeout=SECONDS)
    reply = unpack(data, ps_pb2.Reply)[0]
    assert reply.update.applied == 1, reply


@pytest.mark.parametrize(("size", "streams", "least"), [(60 << 20, 16, 0), (1 << 20, 200, IN_FLIGHT)])
def test_half_messages_stay_in_bounds(
    server: tuple[Process, str, Connection], size: int, streams: int, least: int
) -> None:
    """Sessions that hold all but one byte of a message hold no more than the bound, and others' updates are applied
    meanwhile."""
    ps, address, friend = server
    before, sequence = ps.resident_bytes(), size
    session = friend.channel.session()
    proofs = [session.next_call(SESSION)[0] for _ in range(streams)]
    with half_messages(address, SESSION, proofs, size) as (taken, ended):
        assert taken >= least, "they are let in, unless their messages are too large"
        assert ended, "who has no room is cut off"
        update(friend, sequence)
        assert ps.resident_bytes() - before < BOUND + streams * STREAM


def test_one_name_many_times(server: tuple[Process, str, Connection]) -> None:
    """A Describe that names a variable and an optimizer as often as a message can is answered once for each; with more
    it is refused."""
    ps, _, friend = server
    before = ps.resident_bytes()
    request = ps_pb2.DescribeRequest(job=JOB, variables=["w"] * 150_000, optimizers=["sgd"] * 100_000)
    reply = friend.ps.describe(request, timeout=SECONDS)
    assert [variable.id for variable in reply.variables] == [VARIABLE]
    assert [optimizer.id for optimizer in reply.optimizers] == [OPTIMIZER]
    request.variables.extend(["w"] * 2_000_000)
    with pytest.raises(grpc.RpcError, match="larger than max"):
        friend.ps.describe(request, timeout=SECONDS)
    assert ps.resident_bytes() - before < BOUND


def test_more_than_a_shard_has_is_refused(server: tuple[Process, str, Connection]) -> None:
    """An update that names a shard repeatedly, and so could bring any amount of data, is refused before that
    arrives."""
    _, _, friend = server
    item = ps_pb2.UpdateItem(variable=VARIABLE, shard=0, kind=ps_pb2.ADD, rows=ps_pb2.Rows(ids=1 << 20), nth=1)
    item.value_bytes = (1 << 20) * 16
    again = ps_pb2.UpdateRequest(job=JOB, incarnation=1, sequence=9, items=[item] * 2)
    total = 2 * ((1 << 20) * 8 + item.value_bytes)
    with pytest.raises(grpc.RpcError, match="in-flight-mib"):
        friend.ps.push(iter([pack(ps_pb2.Request(update=again, total_bytes=total))]), timeout=SECONDS)


def test_large_requests_come_in_frames(server: tuple[Process, str, Connection]) -> None:
    """A session's request in several frames is one request; one that declares too much is not read at all."""
    _, _, friend = server
    before, ones = friend.read(ROWS), np.ones((ROWS, 4), np.float32)
    data = ones.tobytes()
    frames = [pack(add_to_all(ones, 77)), pack(ps_pb2.Request(), [data[:16]])]
    frames.append(pack(ps_pb2.Request(last=True), [data[16:]]))
    (answer,) = friend.ps.session(iter(frames), timeout=SECONDS)
    assert unpack(answer, ps_pb2.Reply)[0].update.applied == 1
    assert (friend.read(ROWS) == before + 1).all()
    huge = add_to_all(ones, 78)
    huge.total_bytes = 1 << 40
    with pytest.raises(grpc.RpcError, match="is declared; the limit is"):
        list(friend.ps.session(iter([pack(huge)]), timeout=SECONDS))
