"""Copies of variables: as the source was at the first request, however often it is repeated; saved by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes import FakeCall
from tests.ps.storage.support import (
    JOB,
    Client,
    begun,
    declare,
    declare_rule,
    dense,
    facts,
    found_in,
    killed,
    rows,
    values_of,
)

from pscluster.core.errors import InvalidUpdateError, ProtocolError, StaleError, UnknownVariableError
from pscluster.core.transport.frames import pack, unpack
from pscluster.ps.request_metrics import ServiceMetrics
from pscluster.ps.server.requests import creation
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import COPY
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import ps_pb2

both = pytest.mark.parametrize("kind", [Durability.SNAPSHOT, Durability.LOG])


def copying(held: Store, source: int, copy_id: int, *optimizers: int, **changes: Any) -> ps_pb2.CreateRequest:
    """The request for a copy."""
    spec = next(variable.spec for variable in held.held()[0] if variable.spec.id == source)
    request = ps_pb2.CreateRequest(job=held.job, variable=spec)
    request.variable.id, request.variable.name, request.variable.evaluation = copy_id, f"copies/{copy_id}", 1
    for name, value in changes.items():
        if name == "ends":
            request.variable.splits[0].ClearField("ends")
            request.variable.splits[0].ends.extend(value)
        elif name == "owners":
            request.variable.ClearField("owners")
            request.variable.owners.extend(value)
        else:
            setattr(request.variable, name, value)
    numbers = {"variable": source, "optimizers": list(optimizers)}
    request.initializer.name, request.initializer.numbers = COPY, json.dumps(numbers)
    return request


def make(held: Store, request: ps_pb2.CreateRequest) -> None:
    """Create it, like the service."""
    assert creation.expected_bytes(held, request) is None
    creation.create(held, request, Payload([memoryview(b"")]))


@pytest.fixture
def held() -> Store:
    """A table in two shards."""
    store = Store(0, JOB)
    declare(store, 1, np.arange(12.0).reshape(6, 2), (4, 6))
    return store


@pytest.fixture
def client(held: Store) -> Client:
    """A client without a disk."""
    return Client(StateManager(DurabilityOptions()), held)


def test_the_first_values_stay(held: Store, client: Client) -> None:
    """The same request again, after the source has changed, copies nothing; neither follows the other."""
    request = copying(held, 1, 5)
    make(held, request)
    client.update(rows(ps_pb2.ASSIGN, [0, 3], np.full((2, 2), 99.0)))
    make(held, request)
    np.testing.assert_array_equal(values_of(held, 5, 0), np.arange(8.0).reshape(4, 2))
    np.testing.assert_array_equal(values_of(held, 5, 1), np.arange(8.0, 12.0).reshape(2, 2))
    client.update(dense(ps_pb2.ASSIGN, np.zeros((2, 2)), 5, 1))
    np.testing.assert_array_equal(values_of(held, 1, 1), np.arange(8.0, 12.0).reshape(2, 2))
    assert values_of(held, 1)[0].tolist() == [99, 99]


def test_what_optimizers_keep(held: Store, client: Client) -> None:
    """Slots, steps and averages of the named optimizers are copied; of others nothing."""
    declare_rule(held, 2, "sgd", learning_rate=1.0, momentum=0.5, ema=0.5)
    declare_rule(held, 3, "adagrad", learning_rate=1.0)
    for optimizer in (2, 3):
        client.update(dense(ps_pb2.APPLY_GRADIENT, np.ones((4, 2)), optimizer=optimizer))
    make(held, copying(held, 1, 5, 2))
    make(held, copying(held, 1, 6))
    client.update(dense(ps_pb2.APPLY_GRADIENT, np.ones((4, 2)), optimizer=2))
    shards = {variable.spec.id: variable.shards[0] for variable in held.held()[0]}
    source, copy, plain = (shards[variable_id] for variable_id in (1, 5, 6))
    assert (set(source.slots), source.steps) == ({2, 3}, {2: 2, 3: 1})
    assert (set(copy.slots), copy.steps, set(copy.averages)) == ({2}, {2: 1}, {2})
    assert (plain.slots, plain.steps, plain.averages) == ({}, {}, {})
    np.testing.assert_array_equal(copy.slots[2]["momentum"], -np.ones((4, 2)))
    assert not np.shares_memory(copy.slots[2]["momentum"], source.slots[2]["momentum"])
    assert not np.array_equal(copy.averages[2], source.averages[2])


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"ends": (3, 6)}, InvalidUpdateError, "'copies/5' can't be a copy of 'v1', which has a different shape"),
        ({"dtype": "float32"}, InvalidUpdateError, "can't be a copy of 'v1'"),
        ({"owners": (0, 1)}, InvalidUpdateError, "can't be a copy of 'v1'"),
        ({"trainable": True}, InvalidUpdateError, "can't be a copy of 'v1'"),
        ({"name": "v1"}, InvalidUpdateError, "there is already a variable 'v1'"),
    ],
)
def test_another_cut(held: Store, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    """A copy with another cut than its source is refused, and nothing is created."""
    before = facts(held)
    with pytest.raises(error, match=said):
        make(held, copying(held, 1, 5, **changes))
    assert facts(held) == before


def test_of_nothing(held: Store) -> None:
    """A source that does not exist, or is not given, is refused."""
    request = copying(held, 1, 5)
    for numbers, error, said in (
        (
            '{"variable": 9, "optimizers": []}',
            UnknownVariableError,
            "'copies/5' can't be a copy of variable 9, which is",
        ),
        ('{"variable": 1}', ProtocolError, "does not say which variable it is a copy of: KeyError"),
        ("[]", ProtocolError, "does not say which variable it is a copy of"),
        ("", ProtocolError, "does not say which variable it is a copy of"),
        ('{"variable": "x", "optimizers": []}', ProtocolError, "does not say which variable it is a copy of"),
    ):
        request.initializer.numbers = numbers
        with pytest.raises(error, match=said):
            make(held, request)
    assert [variable.spec.id for variable in held.held()[0]] == [1]


def test_deleted_together(held: Store) -> None:
    """All copies of one evaluation are deleted, and no others; a late creation request makes none of them again."""
    requests = [copying(held, 1, copy_id, evaluation=copy_id // 6 + 1) for copy_id in (5, 6, 7)]
    for request in requests:
        make(held, request)
    held.delete("", evaluation=2)
    assert [variable.spec.name for variable in held.held()[0]] == ["v1", "copies/5"]
    for request in requests[1:]:
        with pytest.raises(StaleError, match="was deleted, with all others"):
            make(held, request)
    held.delete("", evaluation=2)
    held.take_over(JOB + 1)
    requests[1].job = JOB + 1
    make(held, requests[1])
    assert [variable.spec.name for variable in held.held()[0]] == ["v1", "copies/5", "copies/6"]


@both
def test_on_disk_is_the_value(tmp_path: Path, kind: Durability) -> None:
    """The saved value is not that of the source: the source has changed since, and so has the copy."""
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.arange(12.0).reshape(6, 2), (4, 6))
        client = Client(manager, held)
        manager.save()
        client.update(dense(ps_pb2.ADD, np.ones((4, 2))))
        make(held, copying(held, 1, 5))
        client.update(dense(ps_pb2.ADD, np.ones((4, 2))))
        manager.save()
        client.update(dense(ps_pb2.ADD, np.ones((2, 2)), 1, 1))
        store = found_in(killed(tmp_path / "s"), kind)
        np.testing.assert_array_equal(values_of(store, 5, 0), np.arange(8.0).reshape(4, 2) + 1)
        np.testing.assert_array_equal(values_of(store, 5, 1), np.arange(8.0, 12.0).reshape(2, 2))
        np.testing.assert_array_equal(values_of(store, 1, 0), np.arange(8.0).reshape(4, 2) + 2)
        held.delete("", evaluation=1)
        manager.save()
        assert [variable.spec.id for variable in found_in(killed(tmp_path / "s"), kind).held()[0]] == [1]


@both
def test_the_service_saves_when_it_is_asked(tmp_path: Path, kind: Durability) -> None:
    """A copy is acknowledged at once, while no function runs; it is on disk when `Describe(saved)` is answered."""
    with begun(tmp_path / "s", kind) as (manager, held):
        declare(held, 1, np.arange(12.0).reshape(6, 2), (4, 6))
        manager.save()
        role = ParameterServerRole.__new__(ParameterServerRole)
        role.store, role.manager, role.waiting, role.metrics = held, manager, False, ServiceMetrics()
        service, context = ParameterServerService(role), FakeCall()
        request = ps_pb2.Request(create=copying(held, 1, 5), last=True)
        reply, _ = unpack(service.push(iter([pack(request)]), context), ps_pb2.Reply)  # type: ignore[arg-type]
        assert reply.HasField("create")
        assert [variable.spec.id for variable in found_in(killed(tmp_path / "s"), kind).held()[0]] == [1]
        describe = ps_pb2.DescribeRequest(job=JOB, variables=["copies/5"], saved=True)
        assert service.describe(describe, context).variables[0].id == 5  # type: ignore[arg-type]
        store = found_in(killed(tmp_path / "s"), kind)
        np.testing.assert_array_equal(values_of(store, 5, 0), np.arange(8.0).reshape(4, 2))
        service.delete(ps_pb2.DeleteRequest(job=JOB, evaluation=1), context)  # type: ignore[arg-type]
        assert [variable.spec.id for variable in found_in(killed(tmp_path / "s"), kind).held()[0]] == [1]
        with pytest.raises(UnknownVariableError, match="there is no variable 'copies/5'"):
            service.describe(describe, context)  # type: ignore[arg-type]
