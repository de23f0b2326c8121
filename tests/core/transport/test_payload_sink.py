"""Payloads received directly into their destination; whole values that replace the current ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import grpc
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.conftest import SEARCH
from tests.waiting import TIMEOUT

from pscluster.coordinator import FixedShardsPartitioner, LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.errors import ProtocolError
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.frames import CHUNK_BYTES, Buffer, pack, padding, parts_of, view
from pscluster.core.transport.payload_sink import PayloadSink
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import ps_pb2

SIZE = SESSION_BYTES + 3
"""Bytes of a shard that is too large for a session, and is padded."""

CHUNK = SIZE + padding(SIZE)


@given(st.data())
def test_a_payload_is_received_in_place(data: st.DataObject) -> None:
    """The payload arrives in place, cut into frames anywhere and received in any pieces; torn frames are sent again."""
    targets = [np.zeros(size, np.uint8) for size in data.draw(st.lists(st.integers(0, 40), max_size=4))]
    whole = bytes(range(1, 251))[: sum(len(target) + padding(len(target)) for target in targets)]
    sink = PayloadSink(ps_pb2.Reply, [view(target) for target in targets])
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=5))})
    for start, stop in itertools.pairwise(cuts):
        middle = data.draw(st.integers(start, stop))
        torn, pieces = (False, bytes(stop - start), stop), [(True, whole[start:middle], middle)]
        pieces += [(False, whole[middle:stop], stop)] if middle < stop else []
        for again, values, end in data.draw(st.sampled_from([[(False, whole[start:stop], stop)], [torn, *pieces]])):
            frame = pack(ps_pb2.Reply(again=again, last=end == len(whole)), [values])
            first = data.draw(st.integers(0, len(frame)))
            rooms = sink.take(frame[:first], len(frame))
            if rooms is None:  # too few bytes to tell
                first, rooms = len(frame), sink.take(frame, len(frame))
            for room in rooms or ():
                room[:] = frame[first : first + len(room)]
                first += len(room)
    assert sink.complete == (len(cuts) > 1)
    at = 0
    for target in targets:
        assert target.tobytes() == whole[at : at + len(target)]
        at += len(target) + padding(len(target))


def test_too_much_and_too_little() -> None:
    target = np.zeros(32, np.uint8)
    sink = PayloadSink(ps_pb2.Request, [view(target)])
    sink.take(frame := pack(ps_pb2.Request(), [bytes(20)]), len(frame))
    assert sink.missing == 12
    with pytest.raises(ProtocolError, match="8 bytes more than were requested"):
        sink.take(frame, len(frame))
    sink = PayloadSink(ps_pb2.Request, [view(target)])
    sink.put(ps_pb2.Request(last=True), memoryview(bytes(20)))
    assert not sink.complete
    with pytest.raises(ProtocolError, match="a frame came after the last one"):
        sink.put(ps_pb2.Request(), memoryview(bytes(12)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One server."""
    with LocalCluster(1, 1, transport="tcp", log_level="ERROR") as cluster:
        yield cluster


@pytest.fixture(params=["data plane", "gRPC"])
def strategy(request: pytest.FixtureRequest, cluster: LocalCluster) -> Iterator[ParameterServerStrategy]:
    """Requests use one transport or the other."""
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy:
        (server,) = strategy.client._servers
        if request.param == "gRPC":
            server.peer = PeerAddress("ps", 0, server.peer.address.replace("127.0.0.1", "localhost"))
        server.hello()
        assert server._transport.usable() == (request.param != "gRPC")
        yield strategy


@pytest.fixture
def variable(strategy: ParameterServerStrategy) -> Variable:
    """Two shards."""
    with strategy.scope():
        return Variable(np.zeros((2, SIZE), np.uint8), name="v")


def test_whole_values(variable: Variable) -> None:
    """They arrive, and later updates are applied to them."""
    values = np.random.default_rng(0).integers(0, 99, (2, SIZE)).astype(np.uint8)
    for _ in range(3):
        variable.assign(values)
        np.testing.assert_array_equal(variable.numpy(), values)
        variable.assign_add(np.ones((2, SIZE), np.uint8))
        np.testing.assert_array_equal(variable.gather([1, 0]), values[::-1] + 1)
        values = values[:, ::-1].copy()


def test_no_read_is_of_two_values(variable: Variable) -> None:
    """Whole values come from two threads, and another adds to them, while all, rows and parts of rows are read.

    The arrays that are left are used again, never while somebody has them.
    """
    over = threading.Event()
    failures: list[BaseException] = []

    def repeatedly(change: object) -> None:
        nth = 0
        try:
            while not over.is_set():
                nth += 1
                change(nth)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    def assign(nth: int) -> None:
        variable.assign(np.full((2, SIZE), nth % 251, np.uint8))

    def add(_: int) -> None:
        variable.assign_add(np.ones((2, SIZE), np.uint8))

    threads = [threading.Thread(target=repeatedly, args=(change,)) for change in (assign, assign, add)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(round(30 * SEARCH)):
            rows, box = variable.gather([1, 0, 1]), variable[:, SIZE // 2 : SIZE // 2 + 5000]
            for read in (*variable.numpy(), *rows, *box):
                assert read.min() == read.max()
    finally:
        over.set()
        for thread in threads:
            thread.join(TIMEOUT)
    assert not failures


def request_of(strategy: ParameterServerStrategy, variable: Variable, shards: Sequence[int] = (0, 1)) -> ps_pb2.Request:
    """The head of an update of these shards."""
    client = strategy.client
    items = [
        ps_pb2.UpdateItem(
            variable=variable.id,
            shard=shard,
            nth=nth,
            kind=ps_pb2.ASSIGN,
            rows=ps_pb2.Rows(all=True),
            value_bytes=SIZE,
        )
        for nth, shard in enumerate(shards, 1)
    ]
    update = ps_pb2.UpdateRequest(job=client.job, incarnation=client.incarnation, sequence=1 << 40, items=items)
    return ps_pb2.Request(update=update, total_bytes=len(items) * CHUNK)


BAD: dict[str, list[tuple[int, bool]]] = {
    "ends early": [(CHUNK, False)],
    "says that it is all": [(CHUNK, True)],
    "too much": [(CHUNK, False), (CHUNK, False), (16, True)],
    "more after the last": [(CHUNK, False), (CHUNK, True), (16, False)],
    "no last": [(CHUNK, False), (CHUNK, False)],
}


def in_frames(head: ps_pb2.Request, payload: bytes, last: bool) -> Iterator[Sequence[Buffer]]:
    """A payload in frames that gRPC accepts, too."""
    for at in range(0, len(payload), CHUNK_BYTES):
        head.last = last and at + CHUNK_BYTES >= len(payload)
        yield parts_of(head, [payload[at : at + CHUNK_BYTES]])
        head = ps_pb2.Request()


@pytest.mark.parametrize("sizes", BAD.values(), ids=BAD.keys())
def test_an_incomplete_payload_changes_nothing(
    strategy: ParameterServerStrategy, variable: Variable, sizes: list[tuple[int, bool]]
) -> None:
    """An incomplete payload is an error."""
    before = np.full((2, SIZE), 7, np.uint8)
    variable.assign(before)

    def frames(sizes: list[tuple[int, bool]]) -> Iterator[Sequence[Buffer]]:
        head = request_of(strategy, variable)
        for size, last in sizes:
            yield from in_frames(head, bytes([9]) * size, last)
            head = ps_pb2.Request()

    (server,) = strategy.client._servers
    with pytest.raises((grpc.RpcError, ProtocolError)):
        server.push(lambda _: frames(sizes), (), TIMEOUT)
    np.testing.assert_array_equal(variable.numpy(), before)
    server.push(lambda _: frames([(CHUNK, False), (CHUNK, True)]), (), TIMEOUT)
    assert (variable.numpy() == 9).all()


def test_a_shard_that_is_named_twice(strategy: ParameterServerStrategy, variable: Variable) -> None:
    """Each of its values counts, one after the other."""

    def frames() -> Iterator[Sequence[Buffer]]:
        yield parts_of(request_of(strategy, variable, (0, 1, 0)))
        for value in (1, 2, 3):
            yield from in_frames(ps_pb2.Request(), bytes([value]) * CHUNK, value == 3)

    (server,) = strategy.client._servers
    server.push(lambda _: frames(), (), TIMEOUT)
    assert variable.numpy()[:, :5].tolist() == [[3] * 5, [2] * 5]
