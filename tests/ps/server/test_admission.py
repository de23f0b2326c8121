"""Memory for large requests in flight: the order in which they wait, and its release."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import grpc
import numpy as np
import pytest
from tests.conftest import grpc_server
from tests.fakes import FakeCall
from tests.waiting import until

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.errors import PSUnavailableError, UnavailableError, from_rpc
from pscluster.core.transport.channels import SERVER_OPTIONS
from pscluster.core.transport.frames import pack, unpack
from pscluster.core.transport.methods import Stub, generic_handler
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.ps.server.admission import Budget
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.spec import SERVICE
from pscluster.v1 import node_pb2, ps_pb2

JOB = 7


class Asker:
    """A thread that reserves memory, and holds it until it is done."""

    def __init__(self, budget: Budget, size: int) -> None:
        self.call = FakeCall()
        self.has = threading.Event()
        self.gave_up = threading.Event()
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(budget, size))
        self._thread.start()

    def _run(self, budget: Budget, size: int) -> None:
        try:
            with budget.reserve(size, self.call):  # type: ignore[arg-type]
                self.has.set()
                self._enough.wait()
        except PSUnavailableError:
            self.gave_up.set()

    def done(self) -> None:
        """Release the memory."""
        self._enough.set()
        self._thread.join()


@contextmanager
def asking(budget: Budget, *sizes: int) -> Iterator[list[Asker]]:
    """Give threads that reserve memory in this order."""
    with ExitStack() as stack:
        askers = []
        for size in sizes:
            asker = Asker(budget, size)
            stack.callback(asker.done)
            askers.append(asker)
            until(lambda: asker.has.is_set() or len(budget._queue) > 0, "it has asked")  # noqa: B023  (called here)
            waiting = [asker for asker in askers if not asker.has.is_set()]
            until(lambda: len(budget._queue) == len(waiting), "all are in the queue")  # noqa: B023
        yield askers


def test_first_come_first_served() -> None:
    """A small one does not overtake a large one that waits, which would wait for ever otherwise."""
    budget = Budget(100)
    with asking(budget, 60, 60, 10) as (first, second, third):
        assert first.has.is_set()
        assert not second.has.is_set()
        assert not third.has.is_set()
        first.done()
        assert second.has.wait(60)
        assert third.has.wait(60)
        assert budget.used == 70
    assert budget.used == 0


def test_one_that_is_larger_than_all_goes_alone() -> None:
    """It is not refused."""
    budget = Budget(100)
    with asking(budget, 10, 1000, 10) as (first, large, last):
        assert not large.has.is_set()
        first.done()
        assert large.has.wait(60)
        assert not last.has.is_set()
        large.done()
        assert last.has.wait(60)


def test_who_gives_up_makes_room() -> None:
    """A call that has ended, in the queue or before it is queued."""
    budget = Budget(100)
    with asking(budget, 60, 60, 10) as (first, second, third):
        second.call.end()
        assert second.gave_up.wait(60)
        assert third.has.wait(60)
        assert first.has.is_set()
    ended = FakeCall()
    ended.end()
    with pytest.raises(PSUnavailableError), budget.reserve(1, ended):  # type: ignore[arg-type]
        pass
    assert (budget.used, len(budget._queue)) == (0, 0)


def test_who_stands_still_makes_room() -> None:
    """A push whose frames do not come, and a pull whose frames are not taken, lose their memory; others continue."""
    role, size, over = ParameterServerRole(0), 8 << 20, threading.Event()
    role.job_began(node_pb2.AttachRequest(job=JOB))
    service = ParameterServerService(role, 1 << 20, StallWatchdog(0.3))
    spec = ps_pb2.VariableSpec(id=1, name="w", dtype="uint8", shape=[size], splits=[ps_pb2.AxisSplit(ends=[size])])
    spec.owners.append(0)
    create = ps_pb2.Request(create=ps_pb2.CreateRequest(job=JOB, variable=spec), total_bytes=size)
    item = ps_pb2.ReadItem(variable=1, shard=0, rows=ps_pb2.Rows(all=True))
    read = pack(ps_pb2.Request(read=ps_pb2.ReadRequest(job=JOB, items=[item]), last=True))

    def still() -> Iterator[bytes]:
        yield pack(create, [bytes(1 << 20)])
        over.wait()

    def whole() -> Iterator[bytes]:
        yield pack(create, [bytes(1 << 20)])
        yield pack(ps_pb2.Request(last=True), [bytes(size - (1 << 20))])

    with grpc_server(4, options=SERVER_OPTIONS) as server:
        server.add_generic_rpc_handlers((generic_handler(SERVICE, service),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]) as channel:
            stub = Stub(channel, SERVICE)
            pushed = stub.push.future(still(), timeout=60)
            until(lambda: service.budget.used == size, "it has what it declared")
            stub.push(whole(), timeout=60)
            assert pushed.code() == grpc.StatusCode.CANCELLED
            assert isinstance(from_rpc(pushed.exception(), "ps 0"), UnavailableError), "its client tries again"
            pulled = stub.pull(read, timeout=60)
            next(pulled)
            until(lambda: service.budget.used, "it reads")
            until(lambda: not service.budget.used, "it was ended")
            assert sum(len(unpack(data, ps_pb2.Reply)[1]) for data in stub.pull(read, timeout=60)) == size
            over.set()


def test_large_requests_beyond_the_budget() -> None:
    """Reads and updates of more than the budget wait for each other, and all complete."""
    with (
        LocalCluster(1, 4, log_level="ERROR", env={"PSCLUSTER_IN_FLIGHT_MIB": "1"}) as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            v = Variable(np.zeros((6 << 20) // 4, np.float32))

        def step() -> bool:
            value = strategy.read([v])[0]
            v.assign_add(np.ones(len(value), np.float32))
            return bool((value == value[0]).all())

        coordinator = ClusterCoordinator(strategy)
        results = [coordinator.schedule(step) for _ in range(40)]
        assert all(coordinator.fetch(results, 100))
        assert (v.numpy() == 40).all()


def test_whole_values_beyond_the_budget_are_not_copied() -> None:
    """Also if the variable was created from values, which take as much and run alone, too. Other updates end it."""
    role, size, sequences = ParameterServerRole(0), 8 << 20, itertools.count(1)
    role.job_began(node_pb2.AttachRequest(job=JOB))
    service = ParameterServerService(role, 1 << 20)
    spec = ps_pb2.VariableSpec(id=1, name="w", dtype="uint8", shape=[size], splits=[ps_pb2.AxisSplit(ends=[size])])
    spec.owners.append(0)

    def push(**body: Any) -> None:
        call = cast(grpc.ServicerContext, FakeCall())
        frames = pack(ps_pb2.Request(total_bytes=size, last=True, **body), [np.full(size, 3, np.uint8).data])
        service.push(iter([frames]), call)

    def update(kind: ps_pb2.UpdateKind) -> None:
        item = ps_pb2.UpdateItem(variable=1, kind=kind, rows=ps_pb2.Rows(all=True), value_bytes=size)
        push(update=ps_pb2.UpdateRequest(job=JOB, sequence=next(sequences), settled=1, items=[item]))

    push(create=ps_pb2.CreateRequest(job=JOB, variable=spec))
    for _ in range(2):
        update(ps_pb2.ASSIGN)
        assert service.writes.pool.nbytes == size, "what was there is used for the next"
    for kind in (ps_pb2.ADD, ps_pb2.ASSIGN):
        update(kind)
        assert service.writes.pool.nbytes == 0
