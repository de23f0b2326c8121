"""Prepared reads give what ordinary ones would, whatever is changed, deleted or recreated in the meantime."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any, cast

import grpc
import numpy as np
import pytest
from tests.fakes import FakeCall
from tests.waiting import until

from pscluster.coordinator import FixedShardsPartitioner, ParameterServerStrategy, Variable
from pscluster.core.errors import ProtocolError, StaleError
from pscluster.core.transport.frames import pack, unpack
from pscluster.ps.array_pool import CACHE_LINE, UNALIGNED_BYTES
from pscluster.ps.client.reads.reader import MAX_PLANS
from pscluster.ps.handles.reads import rows_and_variables
from pscluster.ps.server.requests import creation
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import ps_pb2

CONTEXT = cast(grpc.ServicerContext, FakeCall())


def spec_of(name: str, variable_id: int = 1, shape: tuple[int, ...] = (1,)) -> ps_pb2.VariableSpec:
    """An int64 variable in one shard."""
    splits = [ps_pb2.AxisSplit(ends=[length]) for length in shape]
    return ps_pb2.VariableSpec(id=variable_id, name=name, shape=shape, dtype="int64", owners=[0], splits=splits)


def create(store: Store, spec: ps_pb2.VariableSpec, value: int = 0) -> None:
    """Create it on a server, like its service."""
    request = ps_pb2.CreateRequest(job=store.job, variable=spec)
    size = creation.expected_bytes(store, request)
    assert size is not None
    creation.create(store, request, Payload([memoryview(value.to_bytes(8, "little") + bytes(8))[:size]]))


def read_request(job: int = 1, rows: ps_pb2.Rows | None = None, request_id: int = 0) -> ps_pb2.Request:
    """A read of all of variable 1."""
    item = ps_pb2.ReadItem(variable=1, shard=0, rows=rows or ps_pb2.Rows(all=True))
    return ps_pb2.Request(id=request_id, read=ps_pb2.ReadRequest(job=job, items=[item]), last=True)


@pytest.fixture
def service() -> ParameterServerService:
    """A server of job 1 with a variable of the value 11."""
    role = ParameterServerRole(0)
    role.store = Store(0, 1)
    create(role.store, spec_of("w"), 11)
    return ParameterServerService(role)


def cut(n: int, shape: tuple[int, ...], _: Any) -> list[int]:
    """Cut each axis into this many pieces."""
    return [n] * len(shape)


def test_many_small_variables_of_every_kind(strategy: ParameterServerStrategy) -> None:
    """Whole and cut variables, scalars and empty ones, even twice in a list, are read; each result is a separate
    array. Those of 64 KiB or more begin at a cache line."""
    shapes: list[tuple[int, ...]] = [(), (3,), (0, 2), (5, 2), (2, 3, 2), (5, 1 << 14)]
    with strategy.scope():
        made = [
            Variable(np.arange(np.prod(shape)).reshape(shape).astype(dtype), partitioner=partial(cut, n))
            for shape in shapes
            for dtype in (np.float32, np.int8, np.complex64)
            for n in (1, 3)
        ]
    listed = [*made, made[3]]
    for _ in range(4):
        values = strategy.read(listed)
        for variable, value in zip(listed, values, strict=True):
            expected = np.arange(variable.size).reshape(variable.shape).astype(variable.dtype)
            np.testing.assert_array_equal(value, expected)
            assert value.flags.writeable
            assert value.nbytes < UNALIGNED_BYTES or value.ctypes.data % CACHE_LINE == 0
            value += 1


def test_rows_and_whole_variables_by_one_request(
    strategy: ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what separate reads give, also where they are too large for one reply, or there are none of either.

    No variable is resharded meanwhile.
    """
    client, reading_both = strategy.client, strategy.client.reading_both

    def checked(*arguments: Any) -> Any:
        assert client.gate._inside
        result = yield from reading_both(*arguments)
        assert client.gate._inside
        return result

    monkeypatch.setattr(client, "reading_both", checked)
    with strategy.scope():
        table = Variable(np.arange(20.0).reshape(10, 2), partitioner=FixedShardsPartitioner(2))
        small = [Variable(np.arange(3)), Variable(np.float32(7))]
        large = Variable(np.arange(SESSION_BYTES // 8), partitioner=FixedShardsPartitioner(3))
        halves = [Variable(np.full(SESSION_BYTES // 16, n)) for n in range(4)]
    ids = np.array([7, 0, 7])
    for variables in ([], small, halves, [*small, large]):
        for lookups in ([], [(table, ids)]):
            for _ in range(2):  # the second time the servers know the request
                rows, values = rows_and_variables(lookups, variables)
                assert [array.tolist() for array in rows] == [table.sparse_read(ids).tolist()] * len(lookups)
                for value, expected in zip(values, strategy.read(list(variables)), strict=True):
                    np.testing.assert_array_equal(value, expected)


def test_what_a_read_with_another_in_it_may_be(service: ParameterServerService) -> None:
    """It reads arrays whole. Whatever else it is, is refused, and the session goes on."""
    create(service._role.store, spec_of("t", 2, (2,)), 5)
    rows = ps_pb2.ReadItem(variable=2, shard=0, rows=ps_pb2.Rows(ids=1))
    ids = [np.zeros(2, np.int64).tobytes()]

    def answer(whole: bytes) -> tuple[ps_pb2.Reply, bytes]:
        request = ps_pb2.Request(read=ps_pb2.ReadRequest(job=1, items=[rows], whole=whole), last=True, total_bytes=16)
        (reply,) = service.session(iter([pack(request, ids)]), CONTEXT)
        header, payload = unpack(reply, ps_pb2.Reply)
        return header, bytes(payload)

    for _ in range(3):
        reply, payload = answer(pack(read_request()))
        assert reply.last
        assert (payload[0], payload[16]) == (5, 11)
    data, nested = pack(read_request()), read_request()
    nested.read.whole = data
    after = read_request()
    after.after.run = 1
    for wrong in (
        *(data[:cut] for cut in range(1, len(data))),
        pack(nested),
        pack(after),
        pack(ps_pb2.Request(read=ps_pb2.ReadRequest(job=1, items=[rows]), last=True, total_bytes=16), ids),
        pack(read_request(job=2)),
        pack(read_request(rows=ps_pb2.Rows(version=True))),
    ):
        reply, _ = answer(wrong)
        assert reply.HasField("refusal"), wrong
    pulled = read_request()
    pulled.read.whole = data
    with pytest.raises(ProtocolError, match="another request"):
        list(service.pull(pack(pulled), CONTEXT))


def test_updates_and_deletions_are_seen(service: ParameterServerService) -> None:
    """A prepared read returns the current values."""
    store, data = service._role.store, pack(read_request())
    for _ in range(3):
        (reply,) = service.session(iter([data]), CONTEXT)
        assert bytes(unpack(reply, ps_pb2.Reply)[1])[:1] == b"\x0b"
    assert store.prepared(data) is not None
    store.delete("w")
    (reply,) = service.session(iter([data]), CONTEXT)
    assert "was deleted" in unpack(reply, ps_pb2.Reply)[0].refusal.message


def test_a_server_that_stops_refuses_prepared_reads_too(service: ParameterServerService) -> None:
    """It refuses them like all others."""
    data = pack(read_request())
    list(service.session(iter([data, data]), CONTEXT))
    assert service.drain.close(0)
    (reply,) = service.session(iter([data]), CONTEXT)
    assert "ps 0 is stopping" in unpack(reply, ps_pb2.Reply)[0].refusal.message


def test_another_job_s_requests_are_refused(service: ParameterServerService, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if the job changed while one of them was answered."""
    answer, data = service._answer, pack(read_request())

    def and_then_the_next_job_begins(*arguments: Any) -> Any:
        result = answer(*arguments)
        service._role.store = Store(0, 2)
        create(service._role.store, spec_of("w"), 22)
        return result

    monkeypatch.setattr(service, "_answer", and_then_the_next_job_begins)
    _, second = service.session(iter([data, data]), CONTEXT)
    assert "another job" in unpack(second, ps_pb2.Reply)[0].refusal.message


@pytest.mark.parametrize("rows", [ps_pb2.Rows(all=True), ps_pb2.Rows(ids=3)])
def test_a_pull_of_nothing_has_a_frame(rows: ps_pb2.Rows) -> None:
    """It has one frame, the last."""
    role = ParameterServerRole(0)
    role.store = Store(0, 1)
    create(role.store, spec_of("w", shape=(5, 0)))
    ids = np.arange(3).tobytes() + bytes(8) if rows.ids else b""
    frames = list(ParameterServerService(role).pull(pack(read_request(rows=rows), [ids] if ids else []), CONTEXT))
    assert [unpack(frame, ps_pb2.Reply)[0].last for frame in frames] == [True]


def test_threads_that_read_other_lists(strategy: ParameterServerStrategy) -> None:
    """Several threads read more lists at once than are stored."""
    with strategy.scope():
        variables = [Variable(float(value)) for value in range(10)]
    failures = list[BaseException]()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(MAX_PLANS):
                chosen = rng.permutation(10)[: rng.integers(1, 10)].tolist()
                assert [float(v) for v in strategy.read([variables[i] for i in chosen])] == [*map(float, chosen)]
        except BaseException as error:  # the main thread raises it
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_a_variable_deleted_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not exist afterwards, and another one with its name does."""
    store, made, go_on = Store(0, 1), creation.make_variable, threading.Event()

    def slowly(store: Store, request: ps_pb2.CreateRequest, payload: Payload) -> Any:
        if request.variable.id == 5:
            go_on.wait()
        return made(store, request, payload)

    monkeypatch.setattr(creation, "make_variable", slowly)
    raised = list[Exception]()

    def first() -> None:
        try:
            create(store, spec_of("w", 5))
        except StaleError as error:
            raised.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    until(lambda: 5 in store.directory.pending, "the first one is being made")
    store.delete("w")
    create(store, spec_of("w", 6))
    go_on.set()
    thread.join()
    assert list(store.directory.variables) == [6]
    assert "deleted while it was made" in str(raised[0])
